// norm_backward_few.cuh: the gradients of the norms of few rows, in one launch.
//
// A cluster has all rows: a CTA has the columns of some warps of norm_backward_kernel's CTA, in as
// many rows as it has room for at once, with one group of warps for each. The warps send each other
// the sums of their parts of a row, which are added up in the order of norm_backward_kernel: the
// bits of dx are the same. What is summed over the rows stays within a CTA.
#pragma once

#include "mailbox.cuh"
#include "norm_backward_row.cuh"

namespace hfp::cuda {

struct FewRowsParams : NormBackwardParams {
  void *dweight, *dbias;
  DType bias_type;
  int warps;    // of a row
  int per_cta;  // of these
  int ctas;     // that have any
  int groups;   // rows at once
};

// Of a thread's part of a row: its sums.
template <class W, class From0, class T, class Grad, int N, int kVectors, int K>
__device__ __forceinline__ void sum_products(From0, float (&v)[K], const NormBackwardParams &p,
                                             Held<T, Grad, N, kVectors> &row,
                                             const ParamVec<W, N> (&weight)[kVectors],
                                             const Columns &c, float centre) {
#pragma unroll
  for (float &of : v) of = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = c.index + i * c.stride;
    if (at >= c.vectors) break;
    row.x[i].stay_packed(p.zero);
    float x[N], g[N], w[N];
    row.x[i].get(x);
    row.grad[i].get(g);
    load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
    add_products<From0::value>(v, x, g, w, centre);
  }
}

// Stores a thread's part of row `to` of dx, and adds the row to the sums of its columns: a loop of
// norm_backward_kernel, to the bit. It does not call this one: as a function it costs it registers
// (sm_80: fp32 layer_norm of any weight 50 instead of 47, rms_norm 68 instead of 63).
template <bool kCentred, class W, class T, class Grad, int N, int kVectors, class Sums>
__device__ __forceinline__ void finish_row(const NormBackwardParams &p,
                                           Held<T, Grad, N, kVectors> &row,
                                           const ParamVec<W, N> (&weight)[kVectors],
                                           const Columns &c, const RowStats &s, int64_t to,
                                           Sums &sums) {
  const int64_t start = to * p.x_rows.cols;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = c.index + i * c.stride;
    if (at >= c.vectors) break;
    row.x[i].stay_packed(p.zero);
    row.grad[i].stay_packed(p.zero);
    float x[N], g[N], w[N];
    row.x[i].get(x);
    row.grad[i].get(g);
    load_factor<W>(w, p, weight[i], static_cast<int64_t>(at) * N);
    if constexpr (kCentred) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] -= s.centre;
      sums.add(1, i, g);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
    }
    store_as<T>(p.dx, start + static_cast<int64_t>(at) * N, w);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = s.template hat<kOneSum<kCentred, T, W, kVectors>>(x[j]);
    if constexpr (!kCentred) round_any(x, p.hat_type);
    sums.add(0, i, g, x);
  }
}

#if __CUDA_ARCH__ >= 900
// sum_each over the warps of a row, `warp` of them this one. The first of a CTA's warps is `leader`.
// parity: of the uses of `box`, which is this group's, as is `inbox`.
template <int K>
__device__ __forceinline__ void sum_each_by_mail(float (&v)[K], float4 *inbox, Mailbox &box,
                                                 uint32_t parity, const FewRowsParams &p, int warp,
                                                 bool leader) {
  if (warp >= p.warps) return;  // who waits has sent too, so none falls two uses behind
  constexpr int kFloats = K == 3 ? 4 : K;
  const int lane = threadIdx.x % 32u;
  float sent[kFloats] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) sent[k] = Group<32>::sum_lanes(v[k]);
  if (leader && lane == 0) box.announce(p.warps * static_cast<int>(sizeof sent));
  if (lane < p.ctas) box.send(reinterpret_cast<float *>(inbox + warp), sent, lane);
  __syncwarp();
  box.wait(parity);
  const volatile float *from = reinterpret_cast<const volatile float *>(inbox + lane);
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = Group<32>::sum_lanes(lane < p.warps ? from[k] : 0.0f);
}
#endif

// One CTA per SM is enough, and says so: else ptxas spills to fit two.
template <bool kCentred, class T, class Grad, class W, int N, int kVectors>
__global__ void __launch_bounds__(kNormClusterThreads, 1)
    norm_backward_few_kernel(const __grid_constant__ FewRowsParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSums = kCentred ? 2 : 1;
  constexpr bool kOnce = kOneSum<kCentred, T, W, kVectors>;
  // Two of each: who is ahead by one exchange has seen that the one before is over for all. One more for
  // sums that are made again.
  constexpr int kBoxes = kOnce ? 3 : 2;
  __shared__ float4 inbox[kBoxes][kNormClusterGroups][32];
  __shared__ Mailbox box[kBoxes][kNormClusterGroups];
  extern __shared__ float4 all[];

  for (int i = threadIdx.x; i < kBoxes * kNormClusterGroups; i += blockDim.x) {
    box[i / kNormClusterGroups][i % kNormClusterGroups].init();
  }
  Team<true>::leave();
  const int lane = threadIdx.x % 32u, group = threadIdx.x / 32u / p.per_cta;
  const int first_warp = static_cast<int>(Team<true>::rank()) * p.per_cta;
  const int member = static_cast<int>(threadIdx.x / 32u) - group * p.per_cta;
  const int warp = first_warp + member;
  const bool leader = member == 0;
  const Columns c{warp * 32 + lane, p.warps * 32,
                  warp < p.warps ? static_cast<int>(p.vectors) : 0};
  const int rows = static_cast<int>(p.x_rows.rows);

  using Row = Held<T, Grad, N, kVectors>;
  const T *x_row = Row::x_row(p, group);
  const Grad *grad_row = Row::grad_row(p, group);
  compute_now(x_row, grad_row);
  wait_for_previous();
  Row now;
  now.load(x_row, grad_row, group < rows, c);
  ParamVec<W, N> weight[kVectors];
  if constexpr (!std::is_same_v<W, AnyType>) {
    load_params(weight, p.weight, c.index, c.stride, c.vectors, 1.0f);
  }
  ColumnSums<false, kSums, kVectors, N> sums;
  Team<true>::left();  // all have their mailboxes

  uint32_t again = 0;  // sums that were made again
  // The same number of rounds for all threads of the cluster.
  for (int first = 0, round = 0; first < rows; first += p.groups, ++round) {
    const int row = first + group;
    const auto exchange = [&](auto &v, int use, uint32_t parity) {
      sum_each_by_mail(v, inbox[use][group], box[use][group], parity, p, warp, leader);
    };
    RowStats s;
    if constexpr (kOnce) {
      s = one_sum_stats<T, false>(p, [&](float centre, float (&v)[4], auto first) {
        sum_products<W>(first, v, p, now, weight, c, centre);
        if constexpr (first.value) exchange(v, round & 1, round >> 1 & 1);
        else exchange(v, 2, again++ & 1);
      });
    } else {
      float mean = 0.0f, v[kRowSums<kCentred, false>];
      if constexpr (kCentred) {
        float sum[1] = {now.sum_x()};
        exchange(sum, 0, round & 1);
        mean = sum[0] * p.inverse_cols;
      }
      sum_products<W>(std::bool_constant<!kCentred>{}, v, p, now, weight, c, mean);
      // With one exchange a round, the rounds take turns.
      exchange(v, kCentred ? 1 : round & 1, kCentred ? round & 1 : round >> 1 & 1);
      s = row_stats<kCentred>(p, mean, v);
    }
    if (row < rows) finish_row<kCentred, W>(p, now, weight, c, s, row, sums);
    if (first + p.groups < rows) now.load(p, row + p.groups, c);
  }

  // Four columns of a thread in a float4; those of a warp lie next to each other.
  constexpr int kFours = N / 4;
  const int lanes = p.per_cta * 32, wide = kSums * kVectors * kFours * lanes;
  float4 *own = all + group * wide + member * 32 + lane;
#pragma unroll
  for (int k = 0; k < kSums; ++k)
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float sum[N];
      sums.get(k, i, sum);
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        own[((k * kVectors + i) * kFours + j) * lanes] =
            make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
      }
    }
  __syncthreads();
  for (int e = threadIdx.x; e < wide; e += blockDim.x) {
    const int of = e / lanes, thread = e - of * lanes;
    const int j = of % kFours, i = of / kFours % kVectors, k = of / kFours / kVectors;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int g = 0; g < p.groups; ++g) {
      const float4 four = all[g * wide + e];
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
    const int at = first_warp * 32 + thread + i * c.stride;
    if (first_warp + thread / 32 >= p.warps || at >= static_cast<int>(p.vectors)) continue;
    const int64_t col = static_cast<int64_t>(at) * N + 4 * j;
    if (k == 0 && p.need_weight) store_any(p.dweight, p.weight_type, col, sum);
    if (k == 1 && p.need_bias) store_any(p.dbias, p.bias_type, col, sum);
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launcher

// By norm_backward_few_kernel, where there are clusters and few enough rows; false where not.
template <bool kCentred, class T, class Grad, class W, int kVectors>
bool launch_few(const NormBackwardParams &rows, const SumPartialsParams &to, int device,
                void *stream, const char *op, int32_t *status) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  if (rows.x_rows.rows > kNormClusterRows || (!rows.need_weight && !rows.need_bias)) return false;
  if (!pointer_aligned(to.first) || !pointer_aligned(to.second)) return false;
  auto *kernel = &norm_backward_few_kernel<kCentred, T, Grad, W, N, kVectors>;
  if (!has_clusters(reinterpret_cast<const void *>(kernel), device)) return false;
  FewRowsParams p{};
  static_cast<NormBackwardParams &>(p) = rows;
  p.dweight = to.first;
  p.dbias = to.second;
  p.bias_type = to.second_type;
  p.warps = cta_threads(p.vectors, kVectors) / 32;
  p.per_cta = (p.warps + kClusterSize - 1) / kClusterSize;
  p.ctas = (p.warps + p.per_cta - 1) / p.per_cta;
  p.groups = kNormClusterThreads / (32 * p.per_cta);
  if (p.groups > p.x_rows.rows) p.groups = static_cast<int>(p.x_rows.rows);
  const int threads = p.groups * p.per_cta * 32;
  const int bytes = threads * (kCentred ? 2 : 1) * kVectors * N * static_cast<int>(sizeof(float));
  *status = launch_clusters(kernel, 1, threads, p, stream, op, bytes);
  return true;
}

}  // namespace hfp::cuda
