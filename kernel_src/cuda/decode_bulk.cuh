// decode_bulk.cuh: decode_product.cuh's products of up to eight rows of x, from sm_90 on; the same sums in the same
// order.
//
// A warp of its own has pieces of W's rows copied (cp.async.bulk), where there each thread copies what it multiplies:
// of a short product's time the instructions for that were the larger part. What else there is between a kernel's start
// and its end is kept short too, for nothing hides it: a warp has the part of x that it multiplies by to itself, so
// that one barrier is enough for a norm, and none otherwise; loads that wait for nothing are asked for at once.
#pragma once

#include "decode_product.cuh"

namespace hfp::cuda::decode {

inline constexpr int kBulkRows = 8;
inline constexpr int kBulkThreads = kThreads + 32;
inline constexpr int kSlab = kWarps * kChunk;  // elements of a row that all warps take at a time
inline constexpr int kSlotUnits = 2;
// A slot of the ring: two units' rows of a slab. 64 bytes behind each row, so that the two rows which a quarter of a
// load reads lie in different banks.
inline constexpr int kSlabRow = kSlab * 2 + 64, kSlabBytes = kUnit * kSlabRow, kSlotBytes = kSlotUnits * kSlabBytes;
inline constexpr int kMostSlots = 6, kFewestSlots = 4;
inline constexpr int kMostSlabs = 16;  // of a row

__host__ __device__ constexpr int sum_buffers(int rows) { return rows <= 2 ? 2 : 1; }

struct Bulk {
  Product p;
  int slots;
};

#if __CUDA_ARCH__ >= 900
struct Mailboxes {
  Mailbox come[kMostSlots], gone[kMostSlots];
};

// All of the CTA's weights, by one warp: 16 lanes, of which each copies a row's piece.
template <class T, bool kPairs>
__device__ __forceinline__ void copy_weights(const Product &p, char *ring, Mailboxes &boxes, int slots) {
  const int lane = threadIdx.x % 32, units = units_of_cta<kPairs>(p);
  RingTurn slot(1);
#pragma unroll 1
  for (int base = 0; base < units; base += kRound) {
    const T *rows[kRound / kSlotUnits];
#pragma unroll
    for (int s = 0; s < kRound / kSlotUnits; ++s) {
      const int u = base + s * kSlotUnits + lane / kUnit;
      rows[s] = lane < kSlotUnits * kUnit && u < units ? unit_row<T, kPairs>(p, u, lane % kUnit) : nullptr;
    }
#pragma unroll 1
    for (int first = 0; first < p.columns; first += kSlab) {
      const int bytes = min(kSlab, p.columns - first) * 2;
#pragma unroll
      for (int s = 0; s < kRound / kSlotUnits; ++s) {
        if (base + s * kSlotUnits >= units) break;
        boxes.gone[slot.at].wait(slot.turn);
        Mailbox &come = boxes.come[slot.at];
        const unsigned there = __ballot_sync(0xffffffffu, rows[s] != nullptr);
        if (lane == 0) come.announce(bytes * __popc(there));
        __syncwarp();
        if (rows[s] != nullptr) {
          come.fetch(ring + slot.at * kSlotBytes + lane * kSlabRow, rows[s] + first, bytes);
        }
        slot.next(slots);
      }
    }
  }
}

// The thread's result of a round, if it has one; what it takes beside the sum is asked for before the sum is known.
template <class T, bool kPairs>
struct Result {
  static constexpr int kEach = kPairs ? 2 : 1, kOfRow = kRound / kEach * kUnit;
  bool there;
  int row, column;
  float bias[2], residual;

  // A round of `n` units from the CTA's number `base` on.
  __device__ __forceinline__ void begin(const Product &p, int base, int n) {
    const int e = static_cast<int>(threadIdx.x), u = e % kOfRow / kUnit;
    row = e / kOfRow;
    column = (static_cast<int>(blockIdx.x) + (base / kEach + u) * static_cast<int>(gridDim.x)) * kUnit + e % kUnit;
    there = row < p.rows && u * kEach < n && column < (kPairs ? p.end[0] : p.end[2]);
    bias[0] = bias[1] = residual = 0.0f;
    if (!there) return;
    if constexpr (kPairs) {
      bias[0] = bias_at<T>(p, 0, column), bias[1] = bias_at<T>(p, 1, column);
    } else {
      if (column >= p.end[1]) bias[0] = bias_at<T>(p, 2, column - p.end[1]);
      else if (column >= p.end[0]) bias[0] = bias_at<T>(p, 1, column - p.end[0]);
      else bias[0] = bias_at<T>(p, 0, column);
    }
  }

  __device__ __forceinline__ void load_residual(const Product &p) {
    if (there) residual = residual_at<T>(p, row, column);
  }

  __device__ __forceinline__ void finish(const Product &p, const float *sums) const {
    if (!there) return;
    const int summed = min((p.columns + kChunk - 1) / kChunk, kWarps);
    const int of_row = static_cast<int>(threadIdx.x) % kOfRow, at = of_row / kUnit * kEach * kUnit + of_row % kUnit;
    const auto total = [&](int from) {
      float part[kWarps], s = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) part[w] = sums[(w * p.rows + row) * (kRound * kUnit) + from];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) s = w < summed ? s + part[w] : s;
      return s;
    };
    if constexpr (kPairs) finish_pair<T>(p, row, column, total(at) + bias[0], total(at + kUnit) + bias[1]);
    else finish_one<T>(p, row, column, total(at) + bias[0], residual);
  }
};

// Of the warps that multiply.
__device__ __forceinline__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }
#endif

// kOne: of one row of x, whose parts stay in registers until they are normed.
template <class T, bool kPairs, bool kOne>
__global__ void __launch_bounds__(kBulkThreads, 1) decode_bulk_kernel(const __grid_constant__ Bulk b) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  __shared__ Mailboxes boxes;
  const Product &p = b.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int chunks = (p.columns + kChunk - 1) / kChunk, units = units_of_cta<kPairs>(p);
  const int rows = kOne ? 1 : p.rows, row_bytes = staged_row_bytes(p.columns), row_sums = kRound * kUnit;
  char *const staged = shared + b.slots * kSlotBytes;
  // Of two rounds in turns, where there is room for it.
  float *const sums = reinterpret_cast<float *>(staged + rows * row_bytes);
  float *const squares = sums + sum_buffers(rows) * kWarps * rows * row_sums;

  let_next_start();
  if (threadIdx.x == kThreads) {
    for (int s = 0; s < b.slots; ++s) boxes.come[s].init(), boxes.gone[s].init(kWarps);
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    copy_weights<T, kPairs>(p, shared, boxes, b.slots);
    wait_for_previous<false>();
    return;
  }

  // Before the wait: what the kernel before has no part in.
  Result<T, kPairs> result;
  result.begin(p, 0, min(kRound, units));
  if constexpr (kOne) {
    // Of each 64 chunks eight elements a thread.
    const int own = own_piece(), padded = chunks * (kChunk / 8), pieces = p.columns / 8;
    const uint4 *const x = static_cast<const uint4 *>(p.x);
    constexpr int kMost = kMostSlabs / 4;
    Eight<T> v[kMost], weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (p.norm_weight != nullptr) {
        weight[j].bits = make_uint4(0, 0, 0, 0);
        if (own + j * kThreads < pieces) {
          weight[j].bits = __ldg(static_cast<const uint4 *>(p.norm_weight) + own + j * kThreads);
        }
      }
    }
    wait_for_previous<false>();
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      v[j].bits = make_uint4(0, 0, 0, 0);
      if (own + j * kThreads < pieces) v[j].bits = __ldcg(x + own + j * kThreads);
    }
    if constexpr (!kPairs) result.load_residual(p);
    if (p.norm_weight != nullptr) {
      float square = 0.0f;
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (own + j * kThreads < padded) square = add_squares(square, v[j]);
      }
      square = warp_sum(square);
      if (lane == 0) squares[warp] = square;
      sync_warps();
      const float scale = norm_scale(p, squares);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        const int i = own + j * kThreads;
        if (i >= pieces) continue;
        Eight<T> w;
        if (j < 2) w = weight[j];
        else w.bits = __ldg(static_cast<const uint4 *>(p.norm_weight) + i);
        v[j] = normed<T>(p, v[j], scale, w);
      }
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const int i = own + j * kThreads;
      if (i < padded) *reinterpret_cast<uint4 *>(staged + i * 16) = v[j].bits;
    }
    __syncwarp();
  } else {
    NormWeight<T> weight;
    weight.load(p);
    wait_for_previous<false>();
    if constexpr (!kPairs) result.load_residual(p);
    stage_rows<T>(p, staged, row_bytes, squares, weight, [] { sync_warps(); });
  }

  RingTurn slot(0);
  const bool has_row = group < rows;
  const char *const x_at = staged + (has_row ? group : 0) * row_bytes + (warp * kChunk + quarter * 8) * 2;
  const char *const w_at = shared + group * kSlabRow + warp * (kChunk * 2) + quarter * 16;
  int turn = 0;
#pragma unroll 1
  for (int base = 0; base < units; base += kRound, turn ^= 1) {
    const int n = min(kRound, units - base);
    if (base > 0) {
      result.begin(p, base, n);
      if constexpr (!kPairs) result.load_residual(p);
    }
    float d[kRound][4] = {};
#pragma unroll 1
    for (int first = 0; first < chunks; first += kWarps) {
      const int k = (first + warp) * kChunk + quarter * 8;
      const bool here = first + warp < chunks;
      uint4 xs[2] = {};
      if (here && has_row) {
        xs[0] = *reinterpret_cast<const uint4 *>(x_at + first * (kChunk * 2));
        xs[1] = *reinterpret_cast<const uint4 *>(x_at + first * (kChunk * 2) + 64);
      }
#pragma unroll
      for (int s = 0; s < kRound / kSlotUnits; ++s) {
        if (s * kSlotUnits >= n) break;
        boxes.come[slot.at].wait(slot.turn);
        if (here) {
          const char *const at = w_at + slot.at * kSlotBytes;
          uint4 w[kSlotUnits][2];
#pragma unroll
          for (int u = 0; u < kSlotUnits; ++u) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              w[u][j] = *reinterpret_cast<const uint4 *>(at + u * kSlabBytes + j * 64);
              if (k + 32 * j >= p.columns) w[u][j] = make_uint4(0, 0, 0, 0);  // whatever was there before
            }
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t even[4] = {xs[j].x, 0, xs[j].y, 0}, odd[4] = {xs[j].z, 0, xs[j].w, 0};
#pragma unroll
            for (int u = 0; u < kSlotUnits; ++u) mma<T>(d[s * kSlotUnits + u], even, w[u][j].x, w[u][j].y);
#pragma unroll
            for (int u = 0; u < kSlotUnits; ++u) mma<T>(d[s * kSlotUnits + u], odd, w[u][j].z, w[u][j].w);
          }
        }
        __syncwarp();
        if (lane == 0) boxes.gone[slot.at].arrive();
        slot.next(b.slots);
      }
    }
    float *const of_round = sums + (sum_buffers(rows) > 1 ? turn * kWarps * rows * row_sums : 0);
    if (has_row) {
      float *const mine = of_round + (warp * rows + group) * row_sums + quarter * 2;
#pragma unroll
      for (int u = 0; u < kRound; ++u) *reinterpret_cast<float2 *>(mine + u * kUnit) = make_float2(d[u][0], d[u][1]);
    }
    sync_warps();
    result.finish(p, of_round);
    if (sum_buffers(rows) == 1 && base + kRound < units) sync_warps();
  }
#endif
}

}  // namespace hfp::cuda::decode
