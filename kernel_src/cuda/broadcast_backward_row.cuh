// broadcast_backward_row.cuh: what the kernels of the gradients of what is broadcast share: parameters, the
// functions, and a thread's way through its rows where these are at one distance from each other.
#pragma once

#include "activations_grad.cuh"
#include "ordered.cuh"
#include "rows.cuh"

namespace hfp::cuda {

struct BroadcastParams {
  static constexpr bool kStartsEarly = true;
  void *dx, *first, *second;
  float *partials;
  const void *grad, *x, *param;
  Rows grad_rows, x_rows, param_rows;
  int64_t reduced, inner, parts, first_unit, units;
  int64_t wide;  // of a row of partials
  int vectors;   // per row
  int chunks;    // of a row; each has `lanes` vectors
  int lanes, groups;  // groups of threads, each with other rows
  FastDivisor by_chunks, by_lanes, by_parts, by_inner;
  int step;  // rows of a sum between a thread's, where these are at one distance
  FastDivisor by_step;
  FastDivisor by_pieces;  // of a row, as in BroughtRows
  int64_t x_step, grad_step, dx_step;  // between a thread's rows, where these are at one distance
  DType grad_type, param_type;
};

// ---------------------------------------------------------------------------------------------
// Functions: F::apply(grad, x, param, first, second) leaves dx in grad and adds to the kSums sums, the
// last of which is `second`. kMostRows: of one sum in one launch, where there are kFewSumCtas. The
// others count where rows are at one distance: threads of a CTA, most of them on one row, rows that a
// thread has on their way, and CTAs on an SM; in one launch of clusters, threads of a CTA, most of them
// on one row where two CTAs are a cluster, vectors or rows that are enough, and whether eight may be one.

struct MulAddGrad {
  static constexpr int kSums = 2, kMostRows = kMulAddSumRows;
  static constexpr int kThreads = kMulAddThreads, kLanes = kMulAddThreads;
  static constexpr int kAhead = kMulAddAhead, kCtas = kMulAddCtas;
  static constexpr int kTeamThreads = kMulAddTeamThreads, kPairLanes = kMulAddTeamThreads;
  static constexpr int64_t kTeamVectors = kMulAddTeamVectors, kManyTeamRows = kMulAddTeamRows;
  static constexpr bool kEights = true, kBrings = true;
  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&g)[N], const float (&x)[N],
                                               const float (&p)[N], float (&first)[N],
                                               float (&second)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      first[i] = fmaf(g[i], x[i], first[i]);
      second[i] += g[i];
      g[i] *= p[i];
    }
  }
};

template <int kActivation>
struct AddActivationGrad {
  static constexpr int kSums = 1, kMostRows = kActivationSumRows;
  static constexpr int kThreads = kActivationThreads, kLanes = kActivationLanes;
  static constexpr int kAhead = kActivationAhead, kCtas = 1;
  static constexpr int kTeamThreads = kActivationThreads, kPairLanes = kActivationPairLanes;
  static constexpr int64_t kTeamVectors = kActivationTeamVectors;
  static constexpr int64_t kManyTeamRows = kActivationTeamRows;
  static constexpr bool kEights = false, kBrings = false;
  template <class T, int N>
  __device__ __forceinline__ static void apply(float (&g)[N], const float (&x)[N],
                                               const float (&p)[N], float (&)[N],
                                               float (&second)[N]) {
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = __fadd_rn(x[i], p[i]);
    round_to<T>(y);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] *= activate_slope<kActivation, sizeof(T) == 4>(y[i]).slope;
      second[i] += g[i];
    }
  }
};

// Adds up v over the lanes of a warp that have the same vector of columns, every kLanes-th, which share out
// the values by halves as long as each keeps kLeast: upper lanes have the upper ones, in v[0] and on. By
// recursion, since ptxas leaves v in local memory where a loop has 16 values.
template <int kLanes, int kLeast, int kCount, int kBit = 16, int K>
__device__ __forceinline__ void share_out(float (&v)[K], int lane) {
  if constexpr (kBit >= kLanes) {
    if constexpr (kCount == kLeast) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(~0u, v[i], kBit);
      share_out<kLanes, kLeast, kCount, kBit / 2>(v, lane);
    } else {
      const bool upper = (lane & kBit) != 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float low = v[i], high = v[i + kCount / 2];
        v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kBit);
      }
      share_out<kLanes, kLeast, kCount / 2, kBit / 2>(v, lane);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// A thread's rows

// Where they are at one distance from each other.
template <class T>
struct PlainRows {
  const T *x, *grad;
  T *dx;
  int64_t first, col;  // row of the sum, whose parameter is for all; column
  int left;
  int cta;  // of those that have rows of the sum; for BroughtRows
};

// What a warp brings to L2 of each step's rows of x or grad: a piece of kPieceVectors of one of them, which is
// mostly for other CTAs. All of the sum's CTAs together bring all rows of the next step, in their order in
// memory, where each CTA has a few lines of many rows. And those that run ahead bring rows for the others.
template <class T>
struct BroughtRows {
  static constexpr int kPieceVectors = 64;
  const T *at;
  int64_t step;
  int left;

  // From step `ahead` on.
  __device__ __forceinline__ BroughtRows(const BroadcastParams &p, const PlainRows<T> &rows, int ahead) {
    constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
    const int item = rows.cta * static_cast<int>(blockDim.x / 32) + static_cast<int>(threadIdx.x / 32);
    const bool of_grad = item % 2 != 0;
    const int row = p.by_pieces.divide(item / 2);
    const int piece = item / 2 - row * (p.vectors / kPieceVectors);
    const int64_t place = rows.first + (row + static_cast<int64_t>(ahead) * p.step) * p.inner;
    at = static_cast<const T *>(of_grad ? p.grad : p.x) +
         place * (of_grad ? p.grad_rows.s2 : p.x_rows.s2) + piece * kPieceVectors * N;
    step = of_grad ? p.grad_step : p.x_step;
    left = -1;
    if (threadIdx.x % 32 == 0 && row < p.step) {
      left = static_cast<int>(p.by_step.divide(static_cast<int>(p.reduced) - row + p.step - 1)) - ahead;
    }
  }
  __device__ __forceinline__ void bring() {
    if (left > 0) bring_row(at, kPieceVectors);
    at += step, --left;
  }
};
struct NoneBrought {
  template <class... A>
  __device__ __forceinline__ NoneBrought(const A &...) {}
  __device__ __forceinline__ void bring() {}
};

// Stores dx of these and adds them to the sums, with kAhead of them on their way.
template <class F, int kAhead, class Brought, int N, class T>
__device__ __forceinline__ void sum_plain_rows(const BroadcastParams &p, const PlainRows<T> &rows,
                                               float (&first)[N], float (&second)[N]) {
  const T *x = rows.x, *grad = rows.grad;
  T *dx = rows.dx;
  int left = rows.left;
  Vec<T, N> held_x[kAhead], held_grad[kAhead];
  const auto ask_for = [&](int a) {
    held_x[a].template load<Cache::kStream>(x);
    held_grad[a].template load<Cache::kStream>(grad);
    x += p.x_step, grad += p.grad_step;
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (a < left) ask_for(a);
  }
  Brought brought(p, rows, kAhead);
  brought.bring();
  float param[N];
  load_any(param, p.param, p.param_type, row_offset(p.param_rows, rows.first) + rows.col);
#pragma unroll 1
  for (; left > 0; left -= kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (a >= left) break;
      float value[N], g[N];
      held_x[a].get(value);
      held_grad[a].get(g);
      // Two sums leave no registers for a row that is on its way meanwhile.
      if (F::kSums == 1 && a + kAhead < left) ask_for(a);
      F::template apply<T, N>(g, value, param, first, second);
      store_as<T>(dx, 0, g);
      dx += p.dx_step;
      if (F::kSums == 2 && a + kAhead < left) ask_for(a);
      brought.bring();
    }
  }
}

}  // namespace hfp::cuda
