// sample.cu: one token of each row of logits, at random; hfp_sample on CUDA.
//
// The greatest of z - log(E) among what top-k, top-p and min-p keep is the token. Where that is
// little, it is listed and ranked (row_top.cuh, row_flow.cuh). Else top-k and top-p are thresholds,
// found by a radix select (row_select.cuh) over counts and over probabilities, and nothing is sorted.
// Probabilities are in fixed point, so that no sum depends on its order.
#include "sample_row.cuh"

namespace hfp::cuda {
namespace {

template <class T, bool kAligned>
constexpr int kSampleCtas = !kAligned ? 3 : std::is_same_v<T, __nv_bfloat16> ? 5 : 4;  // without spills

// Top-p alone: of so many threads the greatest reach the bound. The list is mostly long enough for
// what a language model makes.
constexpr unsigned kTopPWanted = 128, kTopPVectors = 512;  // of rows that are not shorter

template <class T, DType kType, bool kAligned, Share kShare>
__global__ void __launch_bounds__(kTopThreads<kShare>, top_ctas(kShare, kSampleCtas<T, kAligned>, 1))
    sample_kernel(const __grid_constant__ SampleParams p) {
  constexpr bool kCluster = kShare == Share::kCluster;
  using Top = TopOf<T, kAligned, kShare>;
  __shared__ typename Top::Shared s;
  __shared__ unsigned long long all_weights, other_weights, listed_weights;  // of the first CTA
  __shared__ uint32_t most;
  using CTAs = Team<kCluster>;
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const T *x = static_cast<const T *>(p.logits) + row_offset(p.x_rows, row);
  Top top_of(s, x, cols);
  wait_for_previous();
  const SampleRow r = sample_row(p, row, cols);
  LogitsRow<T, kType, kAligned, kShare> share{
      x, cols, CTAs::rank() * blockDim.x + threadIdx.x, CTAs::size() * blockDim.x,
      r.temperature > 0.0f ? r.temperature : 1.0f};
  const auto seed_of_row = [&] { return static_cast<uint64_t>(p.seeds[row]); };
  const auto position_of_row = [&] {
    return p.positions ? static_cast<uint64_t>(p.positions[row]) : 0;
  };
  uint64_t seed = 0, position = 0;
  if (kShare != Share::kSm) seed = seed_of_row(), position = position_of_row();
  if (threadIdx.x == 0) {
    all_weights = other_weights = listed_weights = 0;
    most = kKeyOfMinusInfinity;
  }

  const bool greedy = r.temperature == 0.0f;
  const bool top_p_alone =
      !greedy && r.top_k == 0 && r.top_p < 1.0f && cols >= kTopPVectors * kVectorOf<T>;
  const bool few = greedy ? !kCluster : top_p_alone || (r.top_k > 0 && r.top_k <= kMostWanted);
  // An infinite temperature makes NaN of infinities, which then are not ordered as they were.
  if (few && is_finite(r.temperature)) {
    const auto key = [&](float value) { return share.key(value); };
    const unsigned k = greedy        ? 1
                       : top_p_alone ? (kCluster ? kTopPWanted : min(blockDim.x / 2, kTopPWanted))
                                     : static_cast<unsigned>(r.top_k);
    const Bound bound = top_of.bound(k, key);
    const float top = share.score_of(bound.greatest & share.kMask);
    const bool finite = is_finite(top), weigh = top_p_alone && finite;
    const int bits = weight_bits(cols);
    const auto weight = [&](uint32_t key) {
      return static_cast<unsigned long long>(weight_of(expf(share.score_of(key) - top), bits));
    };
    unsigned n = kMostTop + 1;
    // Where temperature has made infinities of fp32, the order is that of the logits.
    if (finite || greedy || sizeof(T) != 4) {
      // No token of -inf is drawn where the greatest one is finite.
      const uint32_t least = finite ? max(bound.key, kKeyOfMinusInfinity + 1) : bound.greatest;
      if (weigh) {
        if (kCluster) CTAs::sync();  // the first CTA's sums are 0
        const unsigned long long sum =
            sum_over_warp(top_of.own != 0 && top_of.own < least ? weight(top_of.own) : 0);
        if (threadIdx.x % 32u == 0) atomicAdd(CTAs::at(&other_weights, 0), sum);
      }
      n = top_of.list(least, key, [&](uint32_t key, uint32_t i) {
        if (weigh) atomicAdd(CTAs::at(&listed_weights, 0), weight(key));
        return static_cast<uint64_t>(key) << 32 | i;  // of equal ones the last is the first
      });
    }
    uint64_t total = 0;
    if (kCluster && weigh) CTAs::sync();  // they are complete
    if (weigh && n <= kMostTop) {
      // Other weights: one token's of each thread. In a flat row they are enough to say that the
      // target is not among those listed.
      const uint64_t listed = *CTAs::at(&listed_weights, 0);
      if (listed < weight_target(r.top_p, listed + *CTAs::at(&other_weights, 0))) {
        n = kMostTop + 1;
      } else {
        const unsigned long long sum = sum_over_warp(share.weights(top));
        if (threadIdx.x % 32u == 0) atomicAdd(CTAs::at(&all_weights, 0), sum);
        CTAs::sync();
        total = *CTAs::at(&all_weights, 0);
        if (listed < weight_target(r.top_p, total)) n = kMostTop + 1;
      }
    }
    if (n <= kMostTop) {
      CTAs::leave();
      if (CTAs::rank() == 0) {
        uint32_t token = 0;
        if (kShare == Share::kSm) seed = seed_of_row(), position = position_of_row();
        const auto weigh_all = [&](const uint64_t *tokens, uint64_t *weights, unsigned first) {
          weigh_listed(share, tokens, n, weights, s.room, r.min_p, top, seed, position,
                       threadIdx.x - first, blockDim.x - first);
        };
        if (greedy || !finite) {
          token = static_cast<uint32_t>(top_of.ranked(n)[n - 1]);
        } else if (kShare != Share::kSm && n <= kMostCompared &&
                   blockDim.x >= 2 * kMostCompared) {
          // Half of the threads weigh while the others rank.
          const unsigned half = blockDim.x / 64 * 32;
          if (threadIdx.x < half) {
            compare_listed(s.list, s.ranked, s.place, n, half);
          } else {
            weigh_all(s.list, s.weight, half);
          }
          __syncthreads();
          if (threadIdx.x < 32) {
            token = draw_listed(
                s.ranked, n, s.weight, s.room, [&](unsigned i) { return s.place[i]; }, s.list, r,
                total);
          }
        } else {
          const uint64_t *const tokens = top_of.ranked(n);
          uint64_t *const upto = tokens == s.list ? s.ranked : s.list;
          weigh_all(tokens, upto, 0);
          __syncthreads();
          if (threadIdx.x < 32) {
            token = draw_listed(
                tokens, n, upto, s.room, [](unsigned i) { return i; }, upto, r, total);
          }
        }
        if (threadIdx.x == 0) p.out[row] = token;
      }
      CTAs::left();
      return;
    }
    CTAs::sync();  // the first CTA's counts have been read
  } else {
    top_of.skip();
  }

  const uint64_t best = draw_row<T, kType, kAligned, kShare>(p, row, s.select, &most);
  if (CTAs::rank() == 0 && threadIdx.x == 0) p.out[row] = index_of(best);
  CTAs::sync();  // no CTA ends while another one reads its shared memory
}

// The CTA's rows whose token is -1. Apart: within the kernel it would cost the others registers.
template <class T, DType kType>
__device__ __noinline__ void draw_left(const SampleParams &p, SelectShared &s, uint32_t *most) {
  for (int64_t row = blockIdx.x; row < p.x_rows.rows; row += gridDim.x) {
    const bool done = p.out[row] >= 0;
    if (threadIdx.x == 0) *most = kKeyOfMinusInfinity;
    __syncthreads();  // until all have asked
    if (done) continue;
    const uint64_t best = draw_row<T, kType, true, Share::kSm>(p, row, s, most);
    if (threadIdx.x == 0) p.out[row] = index_of(best);
    __syncthreads();  // *most and s are free
  }
}

// Rows of whole vectors whose temperature or top_k, up to kMostFlowWanted, leaves few.
template <class T, DType kType, int kTeam>
__global__ void __launch_bounds__(kFlowThreads<T, kTeam>, 1)
    sample_flow_kernel(const __grid_constant__ SampleParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(kLineBytes) unsigned char memory[];
  __shared__ uint32_t most, left;
  if (threadIdx.x == 0) left = 0;
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  flow<T, kTeam>(p, p.logits, memory, [&](FlowRow &s, int64_t row, const auto &team,
                                          const auto &wait) {
    constexpr int kDigits = key_digits(kType);
    SampleRow r = sample_row(p, row, cols);
    r.top_k = p.top_k;  // of greedy rows none is asked for
    const uint64_t seed = static_cast<uint64_t>(p.seeds[row]);
    const uint64_t position = p.positions ? static_cast<uint64_t>(p.positions[row]) : 0;
    const LogitsRow<T, kType, true, Share::kSm> share{
        static_cast<const T *>(p.logits) + row_offset(p.x_rows, row), cols, 0, 0,
        r.temperature > 0.0f ? r.temperature : 1.0f};
    const bool greedy = r.temperature == 0.0f;
    wait();
    const unsigned wanted = greedy ? 1 : static_cast<unsigned>(p.top_k);
    const Bound bound = bound_of_row<kDigits>(s, wanted);
    const uint32_t greatest = share.of(bound.greatest);
    const float top = share.score_of(greatest & share.kMask);
    const bool finite = is_finite(top);
    unsigned n = kFlowListed + 1;
    uint32_t tied = 0;
    // Else, see sample_kernel, the order may be another one.
    if (is_finite(r.temperature) && (finite || greedy || sizeof(T) != 4)) {
      uint32_t least = finite ? max(share.of(bound.key), kKeyOfMinusInfinity + 1) : greatest;
      const auto pair = [](uint32_t key, uint32_t i) { return uint64_t{key} << 32 | i; };
      n = list_greatest_of<kDigits>(s, share.x, cols, p.plan.words, wanted, &least, share, pair, team);
      if (n > kFlowListed) {
        if (team.first_warp()) {
          const bool first = greedy || !finite;  // of those that are equal
          s.kept = list_row_again<kDigits>(s, share.x, cols, p.plan.words, first ? 1 : wanted, !first,
                                           least, share, pair, &tied);
          s.tied = tied;
        }
        team.sync();
        n = s.kept, tied = s.tied;
      }
    }
    if (n > kFlowListed) {
      if (team.thread == 0) p.out[row] = -1, left = 1;
      return;
    }
    rank_list(s, n, team, [&](unsigned rank, uint64_t token) { s.ranked[rank] = token; });
    team.sync();
    uint32_t token;
    if (greedy || !finite) {
      token = static_cast<uint32_t>(s.ranked[n - 1]);
    } else {
      weigh_listed(share, s.ranked, n, s.list, s.room, r.min_p, top, seed, position, team.thread,
                   team.kThreads);
      team.sync();
      if (!team.first_warp()) return;
      const auto draw = [&](uint64_t total) {
        return draw_listed(
            s.ranked, n, s.list, s.room, [](unsigned i) { return i; }, s.list, r, total);
      };
      token = tied == 0 ? draw(0)
                        : draw_tied(s, share, p.plan.words, n, tied, r, top, seed, position, draw);
    }
    if (team.thread == 0) p.out[row] = token;
  });
  if (left != 0) draw_left<T, kType>(p, *reinterpret_cast<SelectShared *>(memory), &most);
#endif
}

template <class T, DType kType, bool kAligned>
int32_t launch_aligned(SampleParams &p, int device, void *stream) {
  // Passes over the row take long enough to be worth large CTAs for as many rows as run at once.
  const bool greedy = p.temperatures == nullptr && p.temperature == 0.0f;
  if constexpr (kAligned) {
    void (*const kernel)(SampleParams) = &sample_flow_kernel<T, kType, 1>;
    const bool few = p.top_ks == nullptr && p.top_k > 0 && p.top_k <= kMostFlowWanted &&
                     p.top_k < p.x_rows.cols;
    if ((greedy || few) && plan_flow<T>(p.x_rows, device, p.plan) &&
        has_clusters(reinterpret_cast<const void *>(kernel), device)) {
      return launch_flow(kernel, &sample_flow_kernel<T, kType, kLargeTeam<T>>, p, device, stream,
                         "sample");
    }
  }
  const bool passes = !greedy && p.top_ks == nullptr && (p.top_k == 0 || p.top_k > kMostWanted);
  return launch_top(&sample_kernel<T, kType, kAligned, Share::kSm>,
                    &sample_kernel<T, kType, kAligned, Share::kCta>,
                    &sample_kernel<T, kType, kAligned, Share::kCluster>, p, sizeof(T), device,
                    stream, "sample", passes ? 2 * kCtaRows : kCtaRows,
                    passes ? kTopClusterRows : kClusterRows);
}

template <class T, DType kType>
int32_t launch_for(SampleParams &p, int device, void *stream) {
  return rows_of_vectors(p.x_rows, p.logits, sizeof(T))
             ? launch_aligned<T, kType, true>(p, device, stream)
             : launch_aligned<T, kType, false>(p, device, stream);
}

}  // namespace

int32_t sample(const SampleArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  SampleParams p{};
  p.out = a.out;
  p.logits = a.logits;
  p.x_rows = a.rows;
  p.seeds = a.seeds;
  p.positions = a.positions;
  p.top_ks = a.top_ks;
  p.temperatures = a.temperatures;
  p.top_ps = a.top_ps;
  p.min_ps = a.min_ps;
  p.temperature = a.temperature;
  p.top_p = a.top_p;
  p.min_p = a.min_p;
  p.top_k = a.top_k;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "sample");
  switch (a.type) {
    case DType::F32: return launch_for<float, DType::F32>(p, device, stream);
    case DType::F16: return launch_for<__half, DType::F16>(p, device, stream);
    default: return launch_for<__nv_bfloat16, DType::BF16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
