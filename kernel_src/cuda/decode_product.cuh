// decode_product.cuh: x W^T for up to 16 rows of x by tensor cores, W as it lies in a linear layer ([out, in],
// half types), with the row's RMS norm before it and bias, residual sum or activation after it.
//
// Weights are read once and are all that takes time, so everything serves keeping their copies on
// their way. A CTA takes units of eight of W's rows; its warps share out the length of a row in
// chunks of 64 elements. A thread copies with cp.async exactly those 16 bytes that it later feeds to
// its own mma, so a ring of stages needs no barrier: it runs on through sums, epilogues, and (before
// wait_for_previous, which orders everything but weights) into the kernel before.
//
// mma.m16n8k16 takes x as A (16 rows) and eight rows of W as B. Which k a thread holds is free as
// long as A and B agree: eight neighbours of one row, so that both are loads of 16 bytes from
// memory as it lies. One row or sixteen: the same sums in the same order.
//
// Empty below sm_80, which has neither: device_of says so, and decode_plain.cuh's kernels run.
#pragma once

#include "async_copy.cuh"
#include "decode_common.cuh"

namespace hfp::cuda::decode {

inline constexpr int kUnit = 8;    // W's rows in a unit: the n of an mma
inline constexpr int kRound = 4;   // units whose sums a warp holds at once
inline constexpr int kStageBytes = 1024;  // of a warp: a chunk of a unit

#if __CUDA_ARCH__ >= 800
// 16 bytes, or zeros.
__device__ __forceinline__ void copy_weight(void *to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

#endif

// ---------------------------------------------------------------------------------------------

// Bytes of shared memory: the ring; x's rows, staged; the warps' sums; the norm's sums.
// A staged row is followed by 64 bytes, so that the two rows which an eighth of a load reads lie in
// different banks.
__host__ __device__ inline int staged_row_bytes(int columns) {
  return (columns + kChunk - 1) / kChunk * kChunk * 2 + 64;
}
inline int shared_bytes(int stages, bool staged, int rows, int columns) {
  return kWarps * stages * kStageBytes + (staged ? rows * staged_row_bytes(columns) : 0) +
         kWarps * rows * kRound * kUnit * 4 + kMaxRows * kWarps * 4;
}

// Row `lane_row` of the CTA's i-th unit; null beyond the last row.
template <class T, bool kPairs>
__device__ __forceinline__ const T *unit_row(const Product &p, int i, int lane_row) {
  if constexpr (kPairs) {
    const int row = (static_cast<int>(blockIdx.x) + (i >> 1) * static_cast<int>(gridDim.x)) * kUnit + lane_row;
    const T *w = static_cast<const T *>(i & 1 ? p.weight[1] : p.weight[0]);
    return row < p.end[0] ? w + row * (i & 1 ? p.stride[1] : p.stride[0]) : nullptr;
  } else {
    int row = (static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x)) * kUnit + lane_row;
    const void *w = p.weight[0];
    int64_t stride = p.stride[0];
    if (row >= p.end[2]) return nullptr;
    if (row >= p.end[1]) w = p.weight[2], stride = p.stride[2], row -= p.end[1];
    else if (row >= p.end[0]) w = p.weight[1], stride = p.stride[1], row -= p.end[0];
    return static_cast<const T *>(w) + row * stride;
  }
}

// How many units of a product are the CTA's; of pairs, two for each.
template <bool kPairs>
__device__ __forceinline__ int units_of_cta(const Product &p) {
  const int all = ((kPairs ? p.end[0] : p.end[2]) + kUnit - 1) / kUnit;
  const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  return (all - cta + grid - 1) / grid * (kPairs ? 2 : 1);
}

// A row's scale, of the squares that each warp has summed.
__device__ __forceinline__ float norm_scale(const Product &p, const float *squares) {
  float square = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; w += 4) {
    const float4 four = *reinterpret_cast<const float4 *>(squares + w);
    square += four.x, square += four.y, square += four.z, square += four.w;
  }
  return rsqrtf(square / static_cast<float>(p.columns) + p.eps);
}

template <class T>
__device__ __forceinline__ Eight<T> normed(const Product &p, Eight<T> v, float scale, const Eight<T> &weight) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float y = to_float(v.value[j]) * scale;
    if (p.round_normed) y = rounded<T>(y);
    v.value[j] = from_float<T>(y * (to_float(weight.value[j]) + p.norm_offset));
  }
  return v;
}

// Elements of the norm's weight that a thread of stage_rows takes of its first chunks.
template <class T, int kStreams = 1>
struct NormWeight {
  static constexpr int kAhead = kStreams == 1 ? 4 : 1;  // of each stream
  Eight<T> value[kAhead * kStreams];

  static __device__ __forceinline__ Eight<T> at(const Product &p, int chunk) {
    Eight<T> w;
    const int i = chunk * (kChunk / 8) + static_cast<int>(threadIdx.x) % 8;
    w.bits = i < p.columns / 8 ? __ldg(static_cast<const uint4 *>(p.norm_weight) + i) : make_uint4(0, 0, 0, 0);
    return w;
  }
  __device__ __forceinline__ void load(const Product &p) {
#pragma unroll
    for (int j = 0; j < kAhead * kStreams; ++j) {
      if (p.norm_weight != nullptr) value[j] = at(p, static_cast<int>(threadIdx.x) / 32 + j * (kWarps / kStreams));
    }
  }
};

template <class T>
__device__ __forceinline__ float add_squares(float sum, const Eight<T> &v) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sum = fmaf(to_float(v.value[j]), to_float(v.value[j]), sum);
  return sum;
}

// x to shared memory, normed if asked for: a warp the chunks that it multiplies by, eight of its lanes a row. A row's
// squares are summed in the order of own_piece(): of every fourth chunk by themselves. sync: a barrier of all warps.
// kStreams: of how many of kWarps a warp has the chunks. kAtOnce: rows of which eight lanes ask for chunks at once; with
// streams, in fewer registers, for fewer of each.
template <class T, int kStreams = 1, int kAtOnce = 2, class Sync>
__device__ __forceinline__ void stage_rows(const Product &p, char *staged, int row_bytes, float *squares,
                                           const NormWeight<T, kStreams> &weight, const Sync &sync) {
  constexpr int kSums = 4, kGroups = 4;
  constexpr int kApart = kWarps / kStreams, kLoads = kStreams == 1 ? kSums : kSums / (kStreams * kAtOnce);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 8, own = lane % 8;
  const int chunks = (p.columns + kChunk - 1) / kChunk, pieces = p.columns / 8;
  const T *const x = static_cast<const T *>(p.x);
  const auto to = [&](int row, int chunk) {
    return reinterpret_cast<uint4 *>(staged + row * row_bytes + (chunk * (kChunk / 8) + own) * 16);
  };
#pragma unroll 1
  for (int base = group; base - group < p.rows; base += kGroups * kAtOnce) {
    float sum[kAtOnce][kStreams][kSums] = {};
#pragma unroll 1
    for (int first = warp; first < chunks; first += kSums * kWarps) {
#pragma unroll
      for (int begin = 0; begin < kSums; begin += kLoads) {
        if (begin > 0 && first + begin * kWarps >= chunks) break;
        Eight<T> v[kAtOnce][kStreams][kLoads];
        const auto each = [&](const auto &what) {
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
            for (int e = 0; e < kStreams; ++e) {
#pragma unroll
              for (int j = 0; j < kLoads; ++j) {
                what(base + r * kGroups, first + e * kApart + (begin + j) * kWarps, v[r][e][j], sum[r][e][begin + j]);
              }
            }
          }
        };
        each([&](int row, int chunk, Eight<T> &piece, float &) {
          const int i = chunk * (kChunk / 8) + own;
          piece.bits = make_uint4(0, 0, 0, 0);
          if (row < p.rows && i < pieces) {
            piece.bits = __ldcg(reinterpret_cast<const uint4 *>(x + row * p.x_stride) + i);
          }
        });
        each([&](int row, int chunk, const Eight<T> &piece, float &of_piece) {
          if (row < p.rows && chunk < chunks) {
            *to(row, chunk) = piece.bits;
            of_piece = add_squares(of_piece, piece);
          }
        });
      }
    }
    if (p.norm_weight == nullptr) continue;
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
      for (int e = 0; e < kStreams; ++e) {
        const float(&s)[kSums] = sum[r][e];
        float square = (s[0] + s[2]) + (s[1] + s[3]);
#pragma unroll
        for (int d = 4; d > 0; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
        const int row = base + r * kGroups;
        if (own == 0 && row < p.rows) squares[row * kWarps + warp + e * kApart] = square;
      }
    }
  }
  if (p.norm_weight != nullptr) {
    sync();
#pragma unroll 1
    for (int row = group; row < p.rows; row += kGroups) {
      const float scale = norm_scale(p, squares + row * kWarps);
      const auto norm = [&](int chunk, const Eight<T> &w) {
        Eight<T> v;
        v.bits = *to(row, chunk);
        *to(row, chunk) = normed<T>(p, v, scale, w).bits;
      };
      constexpr int kAhead = NormWeight<T, kStreams>::kAhead;
#pragma unroll
      for (int j = 0; j < kAhead * kStreams; ++j) {
        const int chunk = warp + j * kApart;
        if (chunk >= chunks) break;
        norm(chunk, weight.value[j]);
      }
#pragma unroll 1
      for (int chunk = warp + kAhead * kWarps; chunk < chunks; chunk += kApart) {
        norm(chunk, NormWeight<T, kStreams>::at(p, chunk));
      }
    }
  }
  __syncwarp();
}

// kTall: more than eight rows of x. kStaged: x in shared memory, normed if asked for; else each warp
// reads its part from L2 when it needs it.
template <class T, bool kPairs, bool kTall, bool kStaged, int kStages>
__global__ void __launch_bounds__(kThreads, 1) decode_product_kernel(const __grid_constant__ Product p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int chunks = (p.columns + kChunk - 1) / kChunk;
  const int row_bytes = staged_row_bytes(p.columns);

  char *const ring = shared + warp * kStages * kStageBytes;
  char *const staged = shared + kWarps * kStages * kStageBytes;
  float *const sums = reinterpret_cast<float *>(staged + (kStaged ? p.rows * row_bytes : 0));
  float *const squares = sums + kWarps * p.rows * kRound * kUnit;

  const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  const int units = units_of_cta<kPairs>(p);

  // Before the ring, behind whose megabytes they would wait.
  [[maybe_unused]] NormWeight<T> weight;
  if constexpr (kStaged) weight.load(p);

  // What is copied next: by rounds, in a round by chunks, of a chunk unit by unit.
  int next_base = 0, next_unit = 0, next_chunk = warp, next_slot = 0;
  if (warp >= chunks) next_base = units;
  const auto copy_next = [&] {
    if (next_base < units) {
      const T *row = unit_row<T, kPairs>(p, next_base + next_unit, group);
      const int k = next_chunk * kChunk + quarter * 8;
      char *const to = ring + next_slot * kStageBytes + lane * 16;
      const void *safe = p.weight[0];
      const bool first = row != nullptr && k < p.columns, second = row != nullptr && k + 32 < p.columns;
      copy_weight(to, first ? row + k : safe, first);
      copy_weight(to + 512, second ? row + k + 32 : safe, second);
      if (++next_unit == min(kRound, units - next_base)) {
        next_unit = 0;
        if ((next_chunk += kWarps) >= chunks) next_chunk = warp, next_base += kRound;
      }
      if (++next_slot == kStages) next_slot = 0;
    }
    end_copies();
  };
  for (int s = 0; s < kStages; ++s) copy_next();

  let_next_start();
  wait_for_previous<false>();

  [[maybe_unused]] const T *const x = static_cast<const T *>(p.x);
  if constexpr (kStaged) stage_rows<T>(p, staged, row_bytes, squares, weight, [] { __syncthreads(); });

  // Rows `group` and `group + 8` of x, elements k to k + 7.
  const auto load_x = [&](int row, int k) -> uint4 {
    if (row >= p.rows) return make_uint4(0, 0, 0, 0);
    if constexpr (kStaged) {
      return *reinterpret_cast<const uint4 *>(staged + row * row_bytes + k * 2);
    } else {
      if (k >= p.columns) return make_uint4(0, 0, 0, 0);
      return __ldcg(reinterpret_cast<const uint4 *>(x + row * p.x_stride + k));
    }
  };

  // From L2 one chunk ahead of its use.
  uint4 ahead[kTall ? 4 : 2];
  const auto load_chunk = [&](int chunk) {
    const int k = chunk * kChunk + quarter * 8;
    ahead[0] = load_x(group, k), ahead[1] = load_x(group, k + 32);
    if constexpr (kTall) ahead[2] = load_x(group + 8, k), ahead[3] = load_x(group + 8, k + 32);
  };
  if constexpr (!kStaged) load_chunk(warp);

  int slot = 0;
  for (int base = 0; base < units; base += kRound) {
    const int n = min(kRound, units - base);
    float d[kRound][4] = {};
    for (int chunk = warp; chunk < chunks; chunk += kWarps) {
      if constexpr (kStaged) load_chunk(chunk);
      uint4 low[2] = {ahead[0], ahead[1]}, high[2] = {};
      if constexpr (kTall) high[0] = ahead[2], high[1] = ahead[3];
      if constexpr (!kStaged) load_chunk(chunk + kWarps < chunks ? chunk + kWarps : warp);
#pragma unroll
      for (int u = 0; u < kRound; ++u) {
        if (u < n) {
          wait_for_copies<kStages - 1>();
          const char *const at = ring + slot * kStageBytes + lane * 16;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 w = *reinterpret_cast<const uint4 *>(at + j * 512);
            const uint32_t even[4] = {low[j].x, high[j].x, low[j].y, high[j].y};
            const uint32_t odd[4] = {low[j].z, high[j].z, low[j].w, high[j].w};
            mma<T>(d[u], even, w.x, w.y);
            mma<T>(d[u], odd, w.z, w.w);
          }
          copy_next();  // over what this thread alone has read, and used
          if (++slot == kStages) slot = 0;
        }
      }
    }

    if (warp < chunks) {
      float *const mine = sums + warp * p.rows * (kRound * kUnit) + quarter * 2;
#pragma unroll
      for (int u = 0; u < kRound; ++u) {
        if (group < p.rows) {
          *reinterpret_cast<float2 *>(mine + group * (kRound * kUnit) + u * kUnit) = make_float2(d[u][0], d[u][1]);
        }
        if (kTall && group + 8 < p.rows) {
          *reinterpret_cast<float2 *>(mine + (group + 8) * (kRound * kUnit) + u * kUnit) =
              make_float2(d[u][2], d[u][3]);
        }
      }
    }
    __syncthreads();

    const int summed = min(chunks, kWarps);
    const auto total = [&](int row, int column) {
      float s = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w < summed) s += sums[(w * p.rows + row) * (kRound * kUnit) + column];
      }
      return s;
    };
    if constexpr (kPairs) {
      for (int e = threadIdx.x; e < p.rows * kRound / 2 * kUnit; e += kThreads) {
        const int row = e / (kRound / 2 * kUnit), pair = e / kUnit % (kRound / 2), c = e % kUnit;
        const int column = (cta + (base / 2 + pair) * grid) * kUnit + c;
        if (pair * 2 < n && column < p.end[0]) {
          finish_pair<T>(p, row, column, total(row, pair * 2 * kUnit + c) + bias_at<T>(p, 0, column),
                         total(row, (pair * 2 + 1) * kUnit + c) + bias_at<T>(p, 1, column));
        }
      }
    } else {
      for (int e = threadIdx.x; e < p.rows * kRound * kUnit; e += kThreads) {
        const int row = e / (kRound * kUnit), u = e / kUnit % kRound, c = e % kUnit;
        const int column = (cta + (base + u) * grid) * kUnit + c;
        if (u < n && column < p.end[2]) {
          const int part = column >= p.end[1] ? 2 : column >= p.end[0] ? 1 : 0;
          const int first = part == 2 ? p.end[1] : part == 1 ? p.end[0] : 0;
          finish_one<T>(p, row, column, total(row, u * kUnit + c) + bias_at<T>(p, part, column - first),
                        residual_at<T>(p, row, column));
        }
      }
    }
    if (base + kRound < units) __syncthreads();
  }
#endif
}

}  // namespace hfp::cuda::decode
