// attention_mma.cuh: attention of half types with mma.sync (sm_80). A warp has 32 queries (16 of long
// heads) and all keys of a block, which lie in shared memory; the next block is copied meanwhile. The
// weights go from the first product to the second in registers. Dao, arXiv:2307.08691.
#pragma once

#include "async_copy.cuh"
#include "attention.cuh"
#include "attention_hopper.h"
#include "attention_mask.cuh"

namespace hfp::cuda {
namespace {

template <int kDim>
struct MmaShape {
  static constexpr int kTiles = kDim <= 128 ? 2 : 1;  // of 16 queries, of a warp
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kQueries = kWarps * kTiles * 16;
  static constexpr int kKeys = kDim <= 64 ? 64 : 32;  // more would not leave enough registers
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, of a row
  static constexpr bool kKeepQ = kDim <= 64;  // in registers
  // q, and two stages of keys and values
  static constexpr int kBytes = (kQueries + 4 * kKeys) * kDim * 2;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
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

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Chunk c of row r: eight rows of one column lie in all banks.
template <int kChunks>
__device__ __forceinline__ uint32_t place(int r, int c) {
  return static_cast<uint32_t>((r * kChunks + (c ^ (r & 7))) * 16);
}

// Columns [0, dim) of a row as chunks; what lies behind them, and a row that is not there, is 0.
template <class T>
__device__ __forceinline__ void copy_chunk(char *to, const T *row, int column, int dim, bool there,
                                           bool aligned) {
  const bool any = there && column < dim;
  uint4 *target = reinterpret_cast<uint4 *>(to);
  if (aligned) {
    copy_later(target, any ? row + column : row, any ? 16u : 0u);
    return;
  }
  const uint16_t *from = reinterpret_cast<const uint16_t *>(row);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = column + 2 * i;
    const uint32_t low = there && c < dim ? from[c] : 0u;
    const uint32_t high = there && c + 1 < dim ? from[c + 1] : 0u;
    word[i] = low | high << 16;
  }
  *target = make_uint4(word[0], word[1], word[2], word[3]);
}

template <class T, int kDim>
__device__ __forceinline__ void copy_block(char *to, const T *from, int64_t row, int first, int end,
                                           int dim, bool aligned) {
  using S = MmaShape<kDim>;
#pragma unroll
  for (int i = threadIdx.x; i < S::kKeys * S::kChunks; i += S::kThreads) {
    const int n = i / S::kChunks, c = i % S::kChunks;
    const bool there = first + n < end;
    copy_chunk(to + place<S::kChunks>(n, c), from + (there ? (first + n) * row : 0), c * 8, dim, there,
               aligned);
  }
}

#endif

// kGeneral: with a mask, a cap or a window. Of long heads a block of the mask, if two keys of it may be read
// at once, is read while the block before is computed.
template <class T, int kDim, bool kGeneral>
__global__ void __launch_bounds__(MmaShape<kDim>::kThreads)
    attention_mma_kernel(const __grid_constant__ AttentionArgs a, int64_t blocks, bool aligned,
                         bool paired, MaskReads reads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  using S = MmaShape<kDim>;
  constexpr int kTiles = S::kTiles, kChunks = S::kChunks, kKeys = S::kKeys;
  constexpr int kBlockBytes = kKeys * kDim * 2;
  extern __shared__ __align__(128) char memory[];
  using Blocks = MaskBlocks<S::kQueries, kKeys, S::kWarps>;
  __shared__ __align__(16) char mask_memory[kGeneral ? sizeof(Blocks) : 1];
  Blocks &mask = *reinterpret_cast<Blocks *>(mask_memory);
  char *q_shared = memory, *k_shared = memory + S::kQueries * kDim * 2;
  char *v_shared = k_shared + 2 * kBlockBytes;
  const uint32_t q_at = shared_address(q_shared), k_at = shared_address(k_shared),
                 v_at = shared_address(v_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const AttentionUnit unit(a, blockIdx.x, blocks, S::kQueries);
  if (unit.first >= unit.rows) return;
  const int dim = static_cast<int>(a.dim), value_dim = static_cast<int>(a.value_dim);
  const T *k = static_cast<const T *>(a.k) + unit.k_offset(a);
  const T *v = static_cast<const T *>(a.v) + unit.v_offset(a);
  const int all = unit.most(a, S::kQueries), fewest = unit.fewest(a, S::kQueries);
  const int begin = kGeneral ? unit.begin(a, S::kQueries, kKeys) : 0;
  const int highest_low = kGeneral ? unit.floor_of(a, all) : 0;

#pragma unroll 4
  for (int i = threadIdx.x; i < S::kQueries * kChunks; i += S::kThreads) {
    const int r = i / kChunks, c = i % kChunks;
    const bool there = unit.first + r < unit.rows;
    const T *row = static_cast<const T *>(a.q) + unit.q_offset(a, there ? unit.first + r : 0);
    copy_chunk(q_shared + place<kChunks>(r, c), row, c * 8, dim, there, aligned);
  }
  const bool masks = kGeneral && a.mask != nullptr, pairs = kGeneral && reads.pairs;
  const int steps = (all - begin + kKeys - 1) / kKeys;
  const bool known = masks && Blocks::looks_at(steps);
  if constexpr (kGeneral) {
    if (masks) mask.template begin<T>(a, unit, begin, all, known, reads.eight);
  }
  // The block from `j` on that is computed next, and whether the mask changes its scores.
  const auto next_of = [&](int j) { return known ? mask.next(j, steps) : j; };
  const auto changes = [&](int j) { return masks && !(known && !mask.is_set(mask.changed, j)); };
  int j = next_of(0);
  if (j < steps) {
    copy_block<T, kDim>(k_shared, k, a.k_row, begin + j * kKeys, all, dim, aligned);
    copy_block<T, kDim>(v_shared, v, a.v_row, begin + j * kKeys, all, value_dim, aligned);
  }
  end_copies();

  // Accumulators of tile t: rows warp_row + 16 t + lane / 4 (+ 8), columns 2 (lane % 4) (+ 1).
  const int warp_row = warp * kTiles * 16;
  int limit[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = unit.first + warp_row + t * 16 + h * 8 + lane / 4;
      limit[t][h] = row < unit.rows ? unit.limit(a, row) : 0;
    }
  }
  constexpr float kLog2E = 1.4426950408889634f;
  // Scores stay as they are, and are scaled in the exponent; with a cap, a mask, or a scale that would
  // turn their order around, they are scaled first.
  const bool capped = kGeneral && a.softcap > 0.0f;
  const bool scaled_first = kGeneral ? capped || a.mask != nullptr || !(a.scale > 0.0f) : !(a.scale > 0.0f);
  const float first_scale = a.scale * kLog2E, factor_first = scaled_first && !capped ? first_scale : 1.0f;
  const float cap_scale = capped ? first_scale / a.softcap : 0.0f;
  const float scale = scaled_first ? 1.0f : first_scale;

  float out[kTiles][kDim / 8][4];
  float top[kTiles][2], total[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[t][n][i] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) top[t][h] = -INFINITY, total[t][h] = 0.0f;
  }
  uint32_t kept[S::kKeepQ ? kTiles : 1][S::kKeepQ ? kDim / 16 : 1][4];
  const int a_row = lane & 15, a_chunk = lane >> 4;                       // of q
  const int b_row = (lane & 7) + (lane >> 4) * 8, b_chunk = lane >> 3 & 1;  // of k
  const int v_row = (lane & 7) + (lane >> 3 & 1) * 8, v_chunk = lane >> 4;  // of v

  constexpr bool kAhead = kGeneral && kTiles == 1;  // with more, registers are short
  uint32_t held[kAhead ? kKeys / 8 : 1][2];         // pairs of a block of the mask
  const auto fetch = [&](int j) {
    if constexpr (kAhead) {
      if (!pairs || j >= steps || !changes(j)) return;
      const int first = begin + j * kKeys;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const T *from = static_cast<const T *>(a.mask) + mask.row[warp_row + h * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const int key = first + n * 8 + (lane & 3) * 2;
          held[n][h] = key < limit[0][h] ? *reinterpret_cast<const uint32_t *>(from + key) : 0u;
        }
      }
    }
  };
  fetch(j);
  bool loaded = false;
  for (int odd = 0; j < steps; odd ^= 1) {
    const int first = begin + j * kKeys, after = next_of(j + 1);
    const uint32_t stage = static_cast<uint32_t>(odd * kBlockBytes);
    if (after < steps) {
      const int next = (odd ^ 1) * kBlockBytes, next_key = begin + after * kKeys;
      copy_block<T, kDim>(k_shared + next, k, a.k_row, next_key, all, dim, aligned);
      copy_block<T, kDim>(v_shared + next, v, a.v_row, next_key, all, value_dim, aligned);
      end_copies();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const bool changed = changes(j);
    if constexpr (S::kKeepQ) {
      if (!loaded) {
        loaded = true;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) {
            load_matrices<false>(kept[t][d],
                                 q_at + place<kChunks>(warp_row + t * 16 + a_row, d * 2 + a_chunk));
          }
        }
      }
    }

    float s[kTiles][kKeys / 8][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if constexpr (S::kKeepQ) {
#pragma unroll
          for (int i = 0; i < 4; ++i) left[t][i] = kept[t][d][i];
        } else {
          load_matrices<false>(left[t],
                               q_at + place<kChunks>(warp_row + t * 16 + a_row, d * 2 + a_chunk));
        }
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t right[4];
        load_matrices<false>(right, k_at + stage + place<kChunks>(n * 8 + b_row, d * 2 + b_chunk));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<T>(s[t][n], left[t], right[0], right[1]);
          multiply_add<T>(s[t][n + 1], left[t], right[2], right[3]);
        }
      }
    }

    if (capped) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[t][n][i] = a.softcap * kLog2E * tanh_of_log2(s[t][n][i] * cap_scale);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      int low[2] = {0, 0};
      if (kGeneral) low[0] = unit.floor_of(a, limit[t][0]), low[1] = unit.floor_of(a, limit[t][1]);
      finish_scores<kKeys / 8>([&](int n, int i) -> float & { return s[t][n][i]; },
                               [&](int n, int h) {
                                 if constexpr (kAhead) {
                                   if (pairs) return unpack<T>(held[n][h]);
                                 }
                                 const int key = first + n * 8 + (lane & 3) * 2;
                                 const int64_t row = mask.row[warp_row + t * 16 + h * 8 + lane / 4];
                                 return mask_pair<T>(a, row, key, limit[t][h], pairs);
                               },
                               first + (lane & 3) * 2, limit[t], low, factor_first, kGeneral && changed,
                               first + kKeys > fewest || first < highest_low);
    }
    fetch(after);

#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = top[t][h];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          most = fmaxf(most, fmaxf(s[t][n][2 * h], s[t][n][2 * h + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float shift = most == -INFINITY ? 0.0f : most * scale;
        const float factor = power_of_two(fmaf(top[t][h], scale, -shift));
        const bool higher = __any_sync(0xffffffffu, most != top[t][h]);
        top[t][h] = most;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            s[t][n][i] = power_of_two(fmaf(s[t][n][i], scale, -shift));
            added += s[t][n][i];
          }
        }
        total[t][h] = fmaf(total[t][h], factor, added);  // of this lane's keys
        if (higher) {  // seldom after the first blocks
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n) {
            out[t][n][2 * h] *= factor;
            out[t][n][2 * h + 1] *= factor;
          }
        }
      }
    }

#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t left[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        left[t][0] = pack<T>(s[t][2 * n][0], s[t][2 * n][1]);
        left[t][1] = pack<T>(s[t][2 * n][2], s[t][2 * n][3]);
        left[t][2] = pack<T>(s[t][2 * n + 1][0], s[t][2 * n + 1][1]);
        left[t][3] = pack<T>(s[t][2 * n + 1][2], s[t][2 * n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kDim / 8; d += 2) {
        uint32_t right[4];
        load_matrices<true>(right, v_at + stage + place<kChunks>(n * 16 + v_row, d + v_chunk));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<T>(out[t][d], left[t], right[0], right[1]);
          multiply_add<T>(out[t][d + 1], left[t], right[2], right[3]);
        }
      }
    }
    __syncthreads();  // before this stage is written again
    j = after;
  }
  wait_for_copies<0>();

#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float whole = total[t][h];
      whole += __shfl_xor_sync(0xffffffffu, whole, 1);
      whole += __shfl_xor_sync(0xffffffffu, whole, 2);
      const int64_t row = unit.first + warp_row + t * 16 + h * 8 + lane / 4;
      if (row >= unit.rows) continue;
      const bool nothing = top[t][h] == -INFINITY && whole == 0.0f;
      const float share = nothing ? 0.0f : 1.0f / whole;
      T *to = static_cast<T *>(a.out) + unit.out_offset(a, row);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const int column = n * 8 + (lane & 3) * 2;
        const uint32_t both = pack<T>(out[t][n][2 * h] * share, out[t][n][2 * h + 1] * share);
        if (paired) {
          if (column < value_dim) *reinterpret_cast<uint32_t *>(to + column) = both;
        } else {
          uint16_t *one = reinterpret_cast<uint16_t *>(to + column);
          if (column < value_dim) one[0] = static_cast<uint16_t>(both);
          if (column + 1 < value_dim) one[1] = static_cast<uint16_t>(both >> 16);
        }
      }
      if ((lane & 3) == 0) {
        constexpr float kLn2 = 0.6931471805599453f;
        a.lse[unit.lse_offset(a, row)] =
            nothing ? -INFINITY : (top[t][h] * scale + log2f(whole)) * kLn2;
      }
    }
  }
#endif
}

// Whether all of these rows can be copied in pieces of 16 bytes.
inline bool in_chunks(const void *data, int64_t dim, int64_t batch, int64_t head, int64_t row) {
  return reinterpret_cast<uint64_t>(data) % 16 == 0 && (dim | batch | head | row) % 8 == 0;
}

template <class T, int kDim>
int32_t launch_mma(const AttentionArgs &a, cudaStream_t stream) {
  using S = MmaShape<kDim>;
  const bool aligned = in_chunks(a.q, a.dim, a.q_batch, a.q_head, a.q_row) &&
                       in_chunks(a.k, a.dim, a.k_batch, a.k_head, a.k_row) &&
                       in_chunks(a.v, a.value_dim, a.v_batch, a.v_head, a.v_row);
  const bool paired = reinterpret_cast<uint64_t>(a.out) % 4 == 0 &&
                      (a.value_dim | a.out_batch | a.out_head | a.out_row) % 2 == 0;
  // With few rows most of its 192 queries would be none.
  const int64_t rows = a.heads / a.kv_heads * a.most_queries;
  if (aligned && rows > S::kQueries / 2 && has_hopper_attention()) {
    return attention_hopper(a, paired, stream);
  }
  const bool general = a.mask != nullptr || a.softcap > 0.0f || a.window > 0;
  const auto kernel = general ? attention_mma_kernel<T, kDim, true> : attention_mma_kernel<T, kDim, false>;
  return launch_attention(a, kernel, S::kQueries, S::kThreads, S::kBytes, stream, aligned, paired,
                          mask_reads(a));
}

}  // namespace
}  // namespace hfp::cuda
