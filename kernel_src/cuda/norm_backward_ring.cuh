// norm_backward_ring.cuh: the gradients of the norms of many rows in a half type, on sm_90: see
// norm_backward.cuh.
//
// Rows wait in shared memory, in a ring of kStages, where each thread copies (cp.async) what it will read
// itself: no barrier is needed for that. Its vectors lie at one distance there whatever the row's length,
// so that addresses take no instructions. A team of warps takes kRows rows at once: their sums share
// shuffles and barriers. Teams of a CTA have other rows each and do not wait for each other; what they have
// added up of the columns is one row of partial sums. A team may have warps in the kSize CTAs of a cluster,
// which have a part of the columns each: then a sum over a row goes by mail (mailbox.cuh), and a cluster
// leaves one row of partial sums. The sums over a row are added up in the order of norm_backward_kernel:
// the bits of dx are the same.
//
// Rows next to each other are of different CTAs, also in a round of kRows: at the end no CTA has more than a
// row more than another. Not so where rows share lines.
#pragma once

#include "async_copy.cuh"
#include "mailbox.cuh"
#include "norm_backward_row.cuh"
#include "ordered.cuh"

namespace hfp::cuda {

struct RingParams : NormBackwardParams {
  int of_cluster, of_team;  // rows between clusters, and between their teams
  int apart, step;          // rows between those of a team in a round, and between rounds
  int64_t x_apart, grad_apart, dx_apart, x_step, grad_step, dx_step;
};

#if __CUDA_ARCH__ >= 900
// As a predicated instruction: a branch would have the compiler compute in it again what it can.
__device__ __forceinline__ void store_if(bool yes, void *to, const uint32_t (&v)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n"
      "@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(static_cast<uint32_t>(yes)),
      "l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// Adds up `partial`, K * kWarps floats of shared memory: of K values, what each of a row's warps has.
template <int kWarps, int K>
__device__ __forceinline__ void sum_of_warps(float (&v)[K], const float *partial) {
  constexpr int kPerLane = K * kWarps > 32 ? K * kWarps / 32 : 1;
  static_assert(kPerLane <= kWarps, "a lane keeps one of its values");
  const int lane = threadIdx.x % 32u;
  float x[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = partial[(lane + 32 * i) % (K * kWarps)];
  // As sum_lanes_of_each, over kWarps lanes.
#pragma unroll
  for (int half = kPerLane / 2, bit = kWarps / 2; half > 0; half /= 2, bit /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? x[i + half] : x[i], give = upper ? x[i] : x[i + half];
      x[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
  }
#pragma unroll
  for (int bit = kWarps / 2 / kPerLane; bit > 0; bit /= 2) {
    x[0] += __shfl_xor_sync(~0u, x[0], bit);
  }
  constexpr int kAtOnce = K / kPerLane;  // values in the lanes of one x[i]
#pragma unroll
  for (int k = 0; k < K; ++k) {
    v[k] = __shfl_sync(~0u, x[0], k % kAtOnce * kWarps + k / kAtOnce * (kWarps / kPerLane));
  }
}

// A team of the CTA, `threads` of its threads; `warp`: of all warps of the row, this one.
template <int kTeams, int kSize>
struct RingTeam {
  int number, threads, warp, warps;
  bool first;  // thread of the team in this CTA

  // Sums of K values over a row's kWarps warps at most, K and kWarps powers of two. `partial`: K * kWarps
  // floats of shared memory that the sum before does not use; 0 for warps that there are not. use: how
  // many sums have used it and `mail`, which is for clusters, before.
  template <int kWarps, int K>
  __device__ __forceinline__ void sum(float (&v)[K], float *partial, Mailbox &mail, int use) const {
    constexpr int kSame = 32 / K;  // lanes that have the same value
    const int lane = threadIdx.x % 32u;
    const float of_warp[1] = {Group<32>::sum_lanes_of_each(v)};
    // Found again by a team alone rather than kept: it has no register for it.
    const int of_row = kTeams * kSize == 1 ? static_cast<int>(threadIdx.x / 32u) : warp;
    float *const to = partial + lane / kSame * kWarps + of_row;
    if constexpr (kSize == 1) {
      if (lane % kSame == 0) *to = of_warp[0];
      if constexpr (kTeams == 1) __syncthreads();
      else asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "r"(threads) : "memory");
    } else {
      // Before this warp's values, without which none can be a use ahead.
      if (first) mail.announce(warps * K * static_cast<int>(sizeof(float)));
      __syncwarp();
#pragma unroll
      for (int of = 0; of < kSize; of += kSame) {
        const int rank = of + lane % kSame;
        if (rank < kSize) mail.send(to, of_warp, rank);
      }
      mail.wait(use & 1);
    }
    sum_of_warps<kWarps>(v, partial);
  }
};
#endif

// kWarps: of a row, at most. kFloats: the weight is in registers, as fp32; else packed in shared memory.
// kMin: CTAs on an SM, at least.
template <bool kCentred, class T, int kVectors, int kRows, int kWarps, int kStages, bool kFloats,
          int kTeams, int kSize, int kMin>
__global__ void __launch_bounds__(32 * kWarps / kSize * kTeams, kMin)
    norm_backward_ring_kernel(const __grid_constant__ RingParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = 8, kSums = kCentred ? 2 : 1, kStats = kCentred ? 4 : 2, K = kStats * kRows;
  constexpr bool kOnce = kOneSum<kCentred, T, T, kVectors>;
  constexpr int kExchanges = kOnce ? 3 : 2;  // the last one for sums that are made again
  constexpr int kStride = 32 * kWarps / kSize * kTeams;    // between the vectors of a thread
  constexpr int kStage = kRows * 2 * kVectors * kStride;  // x and grad
  extern __shared__ __align__(kLineBytes) uint4 ring[];
  __shared__ float partials[kTeams][kExchanges][K * kWarps];
  __shared__ Mailbox mails[kSize > 1 ? kTeams : 1][kExchanges];

  // Clusters are for rows that fill their warps.
  const int threads = kSize > 1 ? 32 * kWarps / kSize : static_cast<int>(blockDim.x) / kTeams;
  const int number = kTeams > 1 ? static_cast<int>(threadIdx.x) / threads : 0;
  const int in_team = static_cast<int>(threadIdx.x) - number * threads;
  const int rank = kSize > 1 ? static_cast<int>(blockIdx.x % kSize) : 0;
  const int thread = rank * threads + in_team, across = kSize * threads;  // of those of a row
  const RingTeam<kTeams, kSize> team{number, threads, thread / 32, across / 32, in_team == 0};
  const int vectors = static_cast<int>(p.vectors);
  if constexpr (kSize > 1) {
    if (threadIdx.x < kExchanges * kTeams) {
      mails[threadIdx.x / kExchanges][threadIdx.x % kExchanges].init();
    }
    Team<true>::leave();
  } else {
    for (int i = threadIdx.x; i < kTeams * kExchanges * K * kWarps; i += blockDim.x) {
      partials[0][0][i] = 0.0f;
    }
  }
  float(*const partial)[K * kWarps] = partials[number];
  Mailbox *const mail = mails[kSize > 1 ? number : 0];
  const auto place = [&](uint4 *stage, int r, int i, int of_grad) {
    return stage + ((r * 2 + of_grad) * kVectors + i) * kStride;
  };
  // Only a thread's last vector may be past the end: it is 0, read from the first one's place.
  constexpr int kLast = kVectors - 1;
  const bool inside = thread + kLast * across < vectors;
  const int last = inside ? kLast * across * N : 0;
  const uint32_t last_bytes = inside ? sizeof(uint4) : 0;
  const bool any = inside || kVectors > 1;
  // dx has all rows, each of more than 1 KB: fewer than 2^31.
  const int rows = static_cast<int>(p.x_rows.rows);
  int row = static_cast<int>(blockIdx.x / kSize) * p.of_cluster + number * p.of_team, asked = row;
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.weight != nullptr) bring_row(p.weight, vectors);
  // Not where registers are short: four vectors gain nothing.
  if (kVectors < 4 && thread == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * p.apart;
      if (at >= rows) break;
      bring_row(static_cast<const T *>(p.x) + at * p.x_rows.s2, vectors);
      bring_row(static_cast<const T *>(p.grad) + at * p.grad_rows.s2, vectors);
    }
  }
  const int64_t col = any ? thread * N : 0;
  const T *x_at = static_cast<const T *>(p.x) + row * p.x_rows.s2 + col;
  const T *grad_at = static_cast<const T *>(p.grad) + row * p.grad_rows.s2 + col;
  T *dx_at = static_cast<T *>(p.dx) + row * p.x_rows.cols + thread * N;
  uint4 *const own = ring + threadIdx.x, *const end = own + kStages * kStage;
  uint4 *stage = own, *next = own;
  if constexpr (kSize == 1) __syncthreads();
  wait_for_previous();

  const auto ask_for_next = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (asked + r * p.apart >= rows) break;
      const T *x = x_at + r * p.x_apart, *grad = grad_at + r * p.grad_apart;
#pragma unroll
      for (int i = 0; i < kLast; ++i) {
        copy_later(place(next, r, i, 0), x + i * across * N);
        copy_later(place(next, r, i, 1), grad + i * across * N);
      }
      copy_later(place(next, r, kLast, 0), x + last, last_bytes);
      copy_later(place(next, r, kLast, 1), grad + last, last_bytes);
    }
    end_copies();
    asked += p.step, x_at += p.x_step, grad_at += p.grad_step;
    next += kStage;
    if (next == end) next = own;
  };
  const auto get = [&](float (&to)[N], const uint4 *from) {
    const uint4 v = *from;
    Vec<T, N> packed;
    packed.word[0] = v.x, packed.word[1] = v.y, packed.word[2] = v.z, packed.word[3] = v.w;
    packed.get(to);
  };
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) ask_for_next();

  ParamVec<T, N> packed[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) packed[i].zero();
  load_params(packed, p.weight, thread, across, vectors, 1.0f);
  float held[kVectors][N];
  uint4 *const weights = end;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kFloats) {
      packed[i].get(held[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        held[i][j] += p.weight_offset;
        asm volatile("" : "+f"(held[i][j]));  // else it is added again and again
      }
    } else {
      const uint32_t(&word)[4] = packed[i].word;
      weights[i * kStride] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  const auto factor = [&](float (&w)[N], int i) {
    if constexpr (kFloats) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = held[i][j];
    } else {
      get(w, weights + i * kStride);
      if constexpr (!kCentred) {
#pragma unroll
        for (int j = 0; j < N; ++j) w[j] += p.weight_offset;
      }
    }
  };

  Team<(kSize > 1)>::left();  // all have their mailboxes
  ColumnSums<false, kSums, kVectors, N> sums;
  // v: the sums of this stage's rows. Pointers, as cicc 13.0 breaks off at arrays of such a size in a lambda.
  const auto add_up = [&](auto from_0, float *v, const float *centre) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      constexpr int kSumOfD = kOnce ? 3 : 0;
      float of_row[kRowSums<kCentred, kOnce>] = {};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[N], g[N], w[N];
        get(x, place(stage, r, i, 0));
        get(g, place(stage, r, i, 1));
        factor(w, i);
        const float squares = of_row[0], sum = of_row[kSumOfD];
        add_products<from_0.value>(of_row, x, g, w, centre[r]);
        // Of columns that there are not, d is not 0.
        if (!from_0.value && i == kLast && !inside) of_row[0] = squares, of_row[kSumOfD] = sum;
      }
#pragma unroll
      for (int i = 0; i < kStats; ++i) {
        v[kStats * r + i] = i < kRowSums<kCentred, kOnce> ? of_row[i] : 0.0f;
      }
    }
  };
  const auto sums_of = [&](const float *v, int r, auto &of_row) {
    int i = 0;
    for (float &sum : of_row) sum = v[kStats * r + i++];
  };
  int round = 0, again = 0;  // rounds whose sums were made again
  // As many for all teams of a CTA, of which some have no row in the last: their barriers come equally often,
  // by which racecheck tells what is before what.
  const auto first_of_cta = [&] {
    return kTeams > 1 && kSize == 1 ? row - number * p.of_team : row;
  };
#pragma unroll 1
  for (; first_of_cta() < rows; row += p.step, ++round) {
    ask_for_next();
    wait_for_copies<kStages - 1>();

    float mean[kRows] = {}, v[K];
    RowStats stats[kRows];
    if constexpr (kOnce) {
      add_up(std::true_type{}, v, mean);
      team.template sum<kWarps>(v, partial[round & 1], mail[round & 1], round >> 1);
      bool cancelled[kRows], any_cancelled = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float of_row[4];
        sums_of(v, r, of_row);
        stats[r] = one_sum_stats<T>(p, 0.0f, of_row, mean[r], cancelled[r]);
        any_cancelled = any_cancelled || cancelled[r];
      }
      if (any_cancelled) {
        add_up(std::false_type{}, v, mean);
        team.template sum<kWarps>(v, partial[2], mail[2], again++);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float of_row[4], rest;
          bool still;
          sums_of(v, r, of_row);
          if (cancelled[r]) stats[r] = one_sum_stats<T>(p, mean[r], of_row, rest, still);
        }
      }
    } else {
      if constexpr (kCentred) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            float x[N];
            get(x, place(stage, r, i, 0));
#pragma unroll
            for (int j = 0; j < N; ++j) mean[r] += x[j];
          }
        }
        team.template sum<kWarps>(mean, partial[0], mail[0], round);
#pragma unroll
        for (int r = 0; r < kRows; ++r) mean[r] *= p.inverse_cols;
      }
      add_up(std::bool_constant<!kCentred>{}, v, mean);
      // With one sum a round, the rounds take turns.
      const int turn = kCentred ? 1 : round & 1, use = kCentred ? round : round >> 1;
      team.template sum<kWarps>(v, partial[turn], mail[turn], use);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float of_row[kRowSums<kCentred, false>];
        sums_of(v, r, of_row);
        stats[r] = row_stats<kCentred>(p, mean[r], of_row);
      }
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r * p.apart >= rows - row) break;
      const RowStats &s = stats[r];
      T *const dx = dx_at + r * p.dx_apart;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[N], g[N], w[N];
        get(x, place(stage, r, i, 0));
        get(g, place(stage, r, i, 1));
        factor(w, i);
        if constexpr (kCentred) {
#pragma unroll
          for (int j = 0; j < N; ++j) x[j] -= s.centre;
          sums.add(1, i, g);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          w[j] = fmaf(g[j] * w[j], s.scale, fmaf(x[j], -s.slope, -s.shift));
        }
        Vec<T, N> out;
        out.set(w);
        store_if(i < kLast || inside, dx + i * across * N, out.word);
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = s.template hat<kOnce>(x[j]);
        if (!kCentred && p.hat_type != DType::F32) round_to<T>(x);
        sums.add(0, i, g, x);
      }
    }
    dx_at += p.dx_step;
    stage += kStage;
    if (stage == end) stage = own;
  }

  if (!p.need_weight && !p.need_bias) return;
  float *out = p.partials + static_cast<int64_t>(blockIdx.x / kSize) * p.partial_cols;
  if constexpr (kTeams == 1) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      if (k == 0 ? !p.need_weight : !p.need_bias) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float sum[N];
        sums.get(k, i, sum);
        if (i < kLast || inside) store_halves(out, thread + i * across, p.x_rows.cols, sum);
      }
      out += p.x_rows.cols;
    }
  } else {
    // Halves of the vectors, in the order of the teams.
    float4 *const all = reinterpret_cast<float4 *>(ring);
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSums; ++k)
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float sum[N];
        sums.get(k, i, sum);
        float4 *const halves = all + (k * kVectors + i) * 2 * kStride + threadIdx.x;
        halves[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        halves[kStride] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      }
    __syncthreads();
#pragma unroll 1
    for (int half = number; half < kSums * kVectors * 2; half += kTeams) {
      const int k = half / (2 * kVectors), vector = thread + half / 2 % kVectors * across;
      if (vector >= vectors || (k == 0 ? !p.need_weight : !p.need_bias)) continue;
      float sum[4] = {};
#pragma unroll
      for (int t = 0; t < kTeams; ++t) {
        const float4 four = all[half * kStride + t * threads + in_team];
        sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
      }
      float *const to = out + (k == 1 && p.need_weight ? p.x_rows.cols : 0);
      store_half(to, vector, half % 2 != 0, p.x_rows.cols, sum);
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launcher

// With these numbers, if the GPU has room for such rings, and rows for all teams; false if not.
template <bool kCentred, class T, int kVectors, int kRows, int kWarps, int kStages, bool kFloats,
          int kTeams = 1, int kSize = 1>
bool launch_ring_of(const NormBackwardParams &rows, SumPartialsParams &sums, int device,
                    void *stream, const char *op, int32_t *status) {
  constexpr int kOfCta = kWarps / kSize * kTeams, kMin = kTeams == 1 && kOfCta < 16 ? 16 / kOfCta : 1;
  constexpr int kAtOnce = kTeams * kRows;
  const int ctas = kTeams * kSize > 1 ? 1 : ring_ctas(kCentred, rows.vectors);
  const int64_t most = (rows.x_rows.rows + kAtOnce - 1) / kAtOnce;
  int64_t wanted = kSize > 2 ? kRingEights : kFullSms * ctas / kSize;
  if (kTeams > 1 && most < wanted) return false;
  if (kSize > 1 && sums.rows < wanted) return false;
  auto *kernel = &norm_backward_ring_kernel<kCentred, T, kVectors, kRows, kWarps, kStages, kFloats,
                                            kTeams, kSize, kMin>;
  if (!has_clusters(reinterpret_cast<const void *>(kernel), device)) return false;
  if (shared_memory_limit() < kRingMemory) return false;
  constexpr int kPlaces = 2 * kRows * kStages + (kFloats ? 0 : 1);  // of a vector of columns
  constexpr int kBytes = 32 * kOfCta * kVectors * kPlaces * static_cast<int>(sizeof(uint4));
  constexpr int kFixed = kTeams * (kOneSum<kCentred, T, T, kVectors> ? 3 : 2) *
                         ((kCentred ? 4 : 2) * kRows * kWarps * 4 + 8);
  static_assert(kTeams == 1 || kPlaces >= (kCentred ? 4 : 2), "the sums of the teams find room");
  const int bytes = shared_memory_of_wave(kBytes, kFixed, ctas);
  const int threads = cta_threads(rows.vectors, kVectors) / kSize * kTeams;
  if constexpr (kSize > 1) {
    static ClusterRoom room;
    if (room.of(kernel, threads, bytes, kSize, device) < wanted) return false;
  }
  RingParams p{rows};
  if (most < wanted) wanted = most;
  if (wanted < sums.rows) sums.rows = wanted;
  sums.halves = true;
  const int clusters = static_cast<int>(sums.rows), teams = clusters * kTeams;
  const bool lines = p.vectors % (kLineBytes / kVectorBytes) == 0;
  const bool spread = lines && (kSize <= 2 || p.x_rows.rows < kSpreadRingRows);
  p.of_cluster = spread ? 1 : kAtOnce;
  p.of_team = spread ? clusters : kRows;
  p.apart = spread ? teams : 1;
  p.step = teams * kRows;
  p.x_apart = p.apart * p.x_rows.s2, p.x_step = p.step * p.x_rows.s2;
  p.grad_apart = p.apart * p.grad_rows.s2, p.grad_step = p.step * p.grad_rows.s2;
  p.dx_apart = p.apart * p.x_rows.cols, p.dx_step = p.step * p.x_rows.cols;
  if constexpr (kSize > 1) {
    *status = launch_clusters(kernel, sums.rows, threads, p, stream, op, bytes, kSize);
  } else {
    *status = launch(kernel, sums.rows, threads, p, stream, op, bytes);
  }
  return true;
}

// By norm_backward_ring_kernel, where grad and weight have the dtype of x; false where not. A thread
// has as many vectors as in norm_backward_kernel, which adds up its sums in this order.
template <bool kCentred, class T>
bool launch_ring(const NormBackwardParams &p, SumPartialsParams &sums, int device, void *stream,
                 const char *op, int32_t *status) {
  if constexpr (sizeof(T) != 2) return false;
  else {
    if (p.vectors < kMinRingVectors || p.x_rows.rows * p.vectors < kRingVectors) return false;
    if (!p.x_rows.uniform() || !p.grad_rows.uniform()) return false;
    const auto by = [&](auto of) { return of(p, sums, device, stream, op, status); };
    // Clusters, for rows that have as many warps.
    const bool shared = p.x_rows.rows >= kSharedRingRows;
    if constexpr (kCentred) {
      if (shared && p.vectors > 4 * 480 && by(&launch_ring_of<true, T, 4, 1, 16, 2, false, 8, 8>)) {
        return true;
      }
      if (p.vectors > kMaxThreads) return by(&launch_ring_of<true, T, 4, 1, 16, 2, false>);
      if (shared && p.vectors > 2 * 480 && by(&launch_ring_of<true, T, 2, 1, 16, 2, true, 2, 2>)) {
        return true;
      }
      if (p.vectors <= 128 && by(&launch_ring_of<true, T, 2, 2, 2, 3, true, 4>)) return true;
      if (p.vectors <= 128 && by(&launch_ring_of<true, T, 2, 1, 2, 3, true, 4>)) return true;
      if (p.vectors <= 256) return by(&launch_ring_of<true, T, 2, 2, 4, 3, true>);
      if (p.vectors < 448 && by(&launch_ring_of<true, T, 2, 2, 8, 2, true, 2>)) return true;
      if (p.vectors < 512) return by(&launch_ring_of<true, T, 2, 2, 8, 3, true>);
      if (p.vectors == 512 && p.x_rows.rows >= 2 * kSharedRingRows) {
        return by(&launch_ring_of<true, T, 2, 1, 8, 4, true>);
      }
      if (p.vectors == 512) return by(&launch_ring_of<true, T, 2, 2, 8, 2, true>);
      return by(&launch_ring_of<true, T, 2, 1, 16, 3, true>);
    } else {
      if (shared && p.vectors > 4 * 480 && by(&launch_ring_of<false, T, 4, 1, 16, 2, true, 8, 8>)) {
        return true;
      }
      if (p.vectors > kMaxThreads) return by(&launch_ring_of<false, T, 4, 1, 16, 2, true>);
      if (p.vectors <= 128 && by(&launch_ring_of<false, T, 1, 2, 4, 3, true, 4>)) return true;
      if (p.vectors <= 128) return by(&launch_ring_of<false, T, 1, 2, 4, 3, true>);
      if (p.vectors <= 256) return by(&launch_ring_of<false, T, 1, 2, 8, 2, true>);
      if (p.vectors < 512) return by(&launch_ring_of<false, T, 1, 4, 16, 2, true>);
      if (p.vectors == 512) return by(&launch_ring_of<false, T, 1, 2, 16, 2, true>);
      if (shared && p.vectors > 31 * 32 && by(&launch_ring_of<false, T, 1, 1, 32, 2, true, 2, 2>)) {
        return true;
      }
      if (shared) return by(&launch_ring_of<false, T, 1, 1, 32, 3, true>);
      return by(&launch_ring_of<false, T, 1, 2, 32, 2, true>);
    }
  }
}

}  // namespace hfp::cuda
