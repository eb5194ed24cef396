// decode_bulk.cuh: decode_product.cuh's products of up to eight rows of x, from sm_90 on; the same sums in the same
// order. W's rows are the mma's A, 16 at a time, and x's the B.
//
// A warp of its own has pieces of W's rows copied (cp.async.bulk), where there each thread copies what it multiplies:
// of a short product's time the instructions for that were the larger part. What else there is between a kernel's start
// and its end is kept short too, for nothing hides it: a warp has the part of x that it multiplies by to itself, so
// that one barrier is enough for a norm, and none otherwise; loads that wait for nothing are asked for at once. Short
// products of one row lie two to a multiprocessor (Share), so that one's start is beside the other's end.
#pragma once

#include "decode_product.cuh"

// At most so many of a thread; by older compilers as many as so many threads would leave.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define HFP_REGISTERS(most) __maxnreg__(most)
#else
#define HFP_REGISTERS(most) __launch_bounds__((64 << 10) / (most) / 128 * 128, 1)
#endif

namespace hfp::cuda::decode {

inline constexpr int kBulkRows = 8;
// kStreams: a warp has the chunks of so many of kWarps, each summed by itself. Two where a multiprocessor is to have
// registers for another product's warps beside them.
__host__ __device__ constexpr int multiplying_threads(int streams) { return kThreads / streams; }
__host__ __device__ constexpr int bulk_threads(int streams) { return multiplying_threads(streams) + 32; }
inline constexpr int kSharedRegisters = 80;  // of a thread, with two streams
inline constexpr int kSlab = kWarps * kChunk;  // elements of a row that all warps take at a time
// A slot of the ring: a unit's rows of a slab. 64 bytes behind each row, so that the two rows which a quarter of a
// load reads lie in different banks.
inline constexpr int kSlabRow = kSlab * 2 + 64, kSlotBytes = kUnit * kSlabRow;
inline constexpr int kMostSlots = 12;
inline constexpr int kMostSlabs = 16;  // of a row

__host__ __device__ constexpr int sum_buffers(int rows) { return rows <= 2 ? 2 : 1; }
// A row's sums of a round, of one warp. Four floats behind them, so that the rows which a warp stores at once lie in
// different banks.
inline constexpr int kRowSums = kRound * kUnit + 4;

struct Bulk {
  Product p;
  int slots;
};

#if __CUDA_ARCH__ >= 900
struct Mailboxes {
  Mailbox come[kMostSlots], gone[kMostSlots];
};

// All of the CTA's weights, by one warp: eight lanes, of which each copies a row's piece.
template <class T, bool kPairs>
__device__ __forceinline__ void copy_weights(const Product &p, char *ring, Mailboxes &boxes, int slots) {
  const int lane = threadIdx.x % 32, units = units_of_cta<kPairs>(p);
  RingTurn slot(1);
#pragma unroll 1
  for (int base = 0; base < units; base += kRound) {
    const T *rows[kRound];
#pragma unroll
    for (int u = 0; u < kRound; ++u) {
      rows[u] = lane < kUnit && base + u < units ? unit_row<T, kPairs>(p, base + u, lane) : nullptr;
    }
#pragma unroll 1
    for (int first = 0; first < p.columns; first += kSlab) {
      const int bytes = min(kSlab, p.columns - first) * 2;
#pragma unroll
      for (int u = 0; u < kRound; ++u) {
        if (base + u >= units) break;
        boxes.gone[slot.at].wait(slot.turn);
        Mailbox &come = boxes.come[slot.at];
        const unsigned there = __ballot_sync(0xffffffffu, rows[u] != nullptr);
        if (lane == 0) come.announce(bytes * __popc(there));
        __syncwarp();
        if (rows[u] != nullptr) come.fetch(ring + slot.at * kSlotBytes + lane * kSlabRow, rows[u] + first, bytes);
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
      for (int w = 0; w < kWarps; ++w) part[w] = sums[(w * p.rows + row) * kRowSums + from];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) s = w < summed ? s + part[w] : s;
      return s;
    };
    if constexpr (kPairs) finish_pair<T>(p, row, column, total(at) + bias[0], total(at + kUnit) + bias[1]);
    else finish_one<T>(p, row, column, total(at) + bias[0], residual);
  }
};

// Of the warps that multiply.
template <int kStreams>
__device__ __forceinline__ void sync_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(multiplying_threads(kStreams)) : "memory");
}
#endif

// kRows: of x, at most. One row's parts stay in registers until they are normed.
template <class T, bool kPairs, int kRows, int kStreams>
__global__ void HFP_REGISTERS(kStreams == 2 ? kSharedRegisters : 96)
    decode_bulk_kernel(const __grid_constant__ Bulk b) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  __shared__ Mailboxes boxes;
  constexpr bool kOne = kRows == 1;
  constexpr int kBulkWarps = kWarps / kStreams;
  constexpr int kMultiplying = multiplying_threads(kStreams), kBulkThreads = bulk_threads(kStreams);
  const Product &p = b.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int chunks = (p.columns + kChunk - 1) / kChunk, units = units_of_cta<kPairs>(p);
  const int rows = kOne ? 1 : p.rows, row_bytes = staged_row_bytes(p.columns);
  char *const staged = shared + b.slots * kSlotBytes;
  // Of two rounds in turns, where there is room for it.
  float *const sums = reinterpret_cast<float *>(staged + rows * row_bytes);
  float *const squares = sums + sum_buffers(rows) * kWarps * rows * kRowSums;

  let_next_start();
  if (threadIdx.x == kMultiplying) {
    for (int s = 0; s < b.slots; ++s) boxes.come[s].init(), boxes.gone[s].init(kBulkWarps);
  }
  __syncthreads();
  if (threadIdx.x >= kMultiplying) {
    if (threadIdx.x < kBulkThreads) copy_weights<T, kPairs>(p, shared, boxes, b.slots);
    wait_for_previous<false>();
    return;
  }

  // Before the wait: what the kernel before has no part in.
  Result<T, kPairs> result;
  result.begin(p, 0, min(kRound, units));
  if constexpr (kOne) {
    // Of each 64 chunks eight elements a thread of each stream.
    const int padded = chunks * (kChunk / 8), pieces = p.columns / 8;
    const auto own = [&](int e, int j) { return own_piece(warp + e * kBulkWarps) + j * kThreads; };
    const uint4 *const x = static_cast<const uint4 *>(p.x);
    constexpr int kMost = kMostSlabs / 4;
    Eight<T> v[kStreams][kMost], weight[kStreams];
#pragma unroll
    for (int e = 0; e < kStreams; ++e) {
      weight[e].bits = make_uint4(0, 0, 0, 0);
      if (p.norm_weight != nullptr && own(e, 0) < pieces) {
        weight[e].bits = __ldg(static_cast<const uint4 *>(p.norm_weight) + own(e, 0));
      }
    }
    wait_for_previous<false>();
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
#pragma unroll
      for (int e = 0; e < kStreams; ++e) {
        v[e][j].bits = make_uint4(0, 0, 0, 0);
        if (own(e, j) < pieces) v[e][j].bits = __ldcg(x + own(e, j));
      }
    }
    if constexpr (!kPairs) result.load_residual(p);
    if (p.norm_weight != nullptr) {
#pragma unroll
      for (int e = 0; e < kStreams; ++e) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          if (own(e, j) < padded) square = add_squares(square, v[e][j]);
        }
        square = warp_sum(square);
        if (lane == 0) squares[warp + e * kBulkWarps] = square;
      }
      sync_warps<kStreams>();
      const float scale = norm_scale(p, squares);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
#pragma unroll
        for (int e = 0; e < kStreams; ++e) {
          const int i = own(e, j);
          if (i >= pieces) continue;
          Eight<T> w;
          if (j == 0) w = weight[e];
          else w.bits = __ldg(static_cast<const uint4 *>(p.norm_weight) + i);
          v[e][j] = normed<T>(p, v[e][j], scale, w);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
#pragma unroll
      for (int e = 0; e < kStreams; ++e) {
        const int i = own(e, j);
        if (i < padded) *reinterpret_cast<uint4 *>(staged + i * 16) = v[e][j].bits;
      }
    }
    __syncwarp();
  } else {
    NormWeight<T, kStreams> weight;
    weight.load(p);
    wait_for_previous<false>();
    if constexpr (!kPairs) result.load_residual(p);
    stage_rows<T, kStreams, (kRows + 3) / 4>(p, staged, row_bytes, squares, weight, [] { sync_warps<kStreams>(); });
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
    float d[kRound / 2][kStreams][4] = {};  // of two units a row of each, for two rows of x
#pragma unroll 1
    for (int first = 0; first < chunks; first += kWarps) {
#pragma unroll
      for (int u = 0; u < kRound; u += 2) {
        if (u >= n) break;
        const bool two = u + 1 < n;
        boxes.come[slot.at].wait(slot.turn);
        RingTurn second = slot;
        second.next(b.slots);
        if (two) boxes.come[second.at].wait(second.turn);
        // x is read anew for each two units: held in registers it would leave no room for a second CTA.
#pragma unroll
        for (int e = 0; e < kStreams; ++e) {
          const int chunk = first + warp + e * kBulkWarps, k = chunk * kChunk + quarter * 8;
          const int at = e * kBulkWarps * (kChunk * 2);
          uint4 x[2], w[2][2];
          const auto load = [&](int j) {
            x[j] = w[0][j] = w[1][j] = make_uint4(0, 0, 0, 0);  // beyond the row's end is what was there before
            if (k + 32 * j < p.columns) {
              w[0][j] = *reinterpret_cast<const uint4 *>(w_at + slot.at * kSlotBytes + at + j * 64);
              if (two) w[1][j] = *reinterpret_cast<const uint4 *>(w_at + second.at * kSlotBytes + at + j * 64);
            }
            if (has_row && chunk < chunks) {
              x[j] = *reinterpret_cast<const uint4 *>(x_at + first * (kChunk * 2) + at + j * 64);
            }
          };
          const auto multiply = [&](int j) {
            const uint32_t even[4] = {w[0][j].x, w[1][j].x, w[0][j].y, w[1][j].y};
            const uint32_t odd[4] = {w[0][j].z, w[1][j].z, w[0][j].w, w[1][j].w};
            mma<T>(d[u / 2][e], even, x[j].x, x[j].y);
            mma<T>(d[u / 2][e], odd, x[j].z, x[j].w);
          };
          if constexpr (kOne || kStreams == 1) load(0), load(1), multiply(0), multiply(1);
          else load(0), multiply(0), load(1), multiply(1);  // in fewer registers
        }
        __syncwarp();
        if (lane == 0) {
          boxes.gone[slot.at].arrive();
          if (two) boxes.gone[second.at].arrive();
        }
        slot = second;
        if (two) slot.next(b.slots);
      }
    }
    float *const of_round = sums + (sum_buffers(rows) > 1 ? turn * kWarps * rows * kRowSums : 0);
#pragma unroll
    for (int e = 0; e < kStreams; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = quarter * 2 + i;
        if (row >= rows) continue;
        float *const mine = of_round + ((warp + e * kBulkWarps) * rows + row) * kRowSums + group;
#pragma unroll
        for (int u = 0; u < kRound; ++u) mine[u * kUnit] = d[u / 2][e][u % 2 * 2 + i];
      }
    }
    sync_warps<kStreams>();
    result.finish(p, of_round);
    if (sum_buffers(rows) == 1 && base + kRound < units) sync_warps<kStreams>();
  }
#endif
}

}  // namespace hfp::cuda::decode
