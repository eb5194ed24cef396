// topk.cu: the k greatest values of each row, descending; hfp_topk on CUDA. Where k is small, what
// can be among them is listed and ranked (row_top.cuh, row_flow.cuh). Where it is not, or too many can
// be, a radix select (row_select.cuh) finds which they are, and only these are sorted.
#include "row_flow.cuh"
#include "row_top_cluster.cuh"

namespace hfp::cuda {
namespace {

struct TopkParams {
  static constexpr bool kStartsEarly = true;
  void *values;
  int64_t *indices;
  const void *x;
  Rows x_rows;
  int64_t first_row;
  int k;
  FlowPlan plan;
};

constexpr int kTopkThreads = 1024;

// One row of the result.
template <class T>
struct Result {
  const TopkParams &p;
  const T *x;
  int64_t row;

  __device__ __forceinline__ void put(unsigned rank, uint64_t pair) const {
    const uint32_t index = index_of(pair);
    const int64_t at = row * p.k + rank;
    p.indices[at] = index;
    T value = static_cast<T>(value_of(static_cast<uint32_t>(pair >> 32)));
    const float same = static_cast<float>(value);
    if (same == 0.0f || same != same) value = x[index];  // of which not all have the same bits
    static_cast<T *>(p.values)[at] = value;
  }
};

// By digits: the k greatest meet, in any order, in `list` of the first CTA. *listed is 0.
template <class T, DType kType, bool kAligned, bool kCluster, int kVectors>
__device__ __forceinline__ void list_greatest(SelectShared &s, const T *x, uint32_t cols, int k,
                                              uint64_t *list, unsigned *listed) {
  using CTAs = Team<kCluster>;
  const uint32_t first = CTAs::rank() * blockDim.x + threadIdx.x, step = CTAs::size() * blockDim.x;
  int round = 0;
  uint64_t left = 0, all = 0;
  const Prefix least = select_prefix<kCluster>(
      s, round, k, key_digits(kType), 24, left, all, [&](const auto &f) {
        each_element<T, kAligned, kVectors>(x, cols, first, step,
                                            [&](float value, uint32_t) { f(key_of(value)); });
      });
  // Of those that are equal, the first ones.
  const bool tied = left < all;
  const int digits = index_digits(cols);
  const uint32_t index_mask = ~0u >> (32 - 8 * digits);
  Prefix least_index;
  if (tied) {
    least_index = select_prefix<kCluster>(
        s, round, left, digits, 8 * digits - 8, left, all, [&](const auto &f) {
          each_element<T, kAligned, kVectors>(x, cols, first, step, [&](float value, uint32_t i) {
            if (least.has(key_of(value))) f(~i & index_mask);
          });
        });
  }
  uint64_t *const to = CTAs::at(list, 0);
  unsigned *const count = CTAs::at(listed, 0);
  each_element<T, kAligned, kVectors>(x, cols, first, step, [&](float value, uint32_t i) {
    const uint32_t key = key_of(value);
    if (key < least.bits) return;
    if (tied && least.has(key) && (~i & index_mask) < least_index.bits) return;
    to[atomicAdd(count, 1u)] = pair_of(key, i);
  });
  CTAs::sync();
}

// CTAs on an SM, of rows and of clusters: as many as there can be without spills.
template <class T, bool kAligned>
constexpr int topk_ctas() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (kAligned && !std::is_same_v<T, __half>) return 6;
#endif
  return kAligned ? 5 : 4;
}
template <class T, bool kAligned>
constexpr int kTopkClusterCtas = kAligned && sizeof(T) == 2 ? 2 : 1;

// k up to kMostWanted.
template <class T, DType kType, bool kAligned, Share kShare>
__global__ void __launch_bounds__(kTopThreads<kShare>,
                                  top_ctas(kShare, topk_ctas<T, kAligned>(),
                                           kTopkClusterCtas<T, kAligned>))
    topk_few_kernel(const __grid_constant__ TopkParams p) {
  constexpr bool kCluster = kShare == Share::kCluster;
  using Top = TopOf<T, kAligned, kShare>;
  __shared__ typename Top::Shared s;
  using CTAs = Team<kCluster>;
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  Top top(s, x, cols);
  wait_for_previous();
  const auto key = [](float value) { return key_of(value); };
  const Bound bound = top.bound(p.k, key);
  unsigned n = top.list(bound.key, key,
                        [](uint32_t key, uint32_t index) { return pair_of(key, index); });
  if (n > kMostTop) {
    constexpr int kVectors = kShare == Share::kSm ? 1 : kSelectVectors;
    CTAs::sync();  // s.listed has been read
    if (threadIdx.x == 0) s.listed = 0;
    list_greatest<T, kType, kAligned, kCluster, kVectors>(s.select, x, cols, p.k, s.list,
                                                          &s.listed);
    n = p.k;
  }
  CTAs::leave();
  if (CTAs::rank() == 0) {
    const uint64_t *const ranked = top.ranked(n);
    const Result<T> result{p, x, row};
    for (int i = threadIdx.x; i < p.k; i += blockDim.x) result.put(i, ranked[i]);
  }
  CTAs::left();
}

template <class T, DType kType, bool kAligned, bool kCluster>
__global__ void __launch_bounds__(kTopkThreads)
    topk_kernel(const __grid_constant__ TopkParams p) {
  __shared__ SelectShared s;
  __shared__ uint64_t list[HFP_MAX_TOPK];
  __shared__ unsigned listed;
  using CTAs = Team<kCluster>;
  const int64_t row = p.first_row + blockIdx.x / CTAs::size();
  const T *x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row);
  wait_for_previous();
  if (threadIdx.x == 0) listed = 0;
  list_greatest<T, kType, kAligned, kCluster, kSelectVectors>(
      s, x, static_cast<uint32_t>(p.x_rows.cols), p.k, list, &listed);
  if (CTAs::rank() != 0) return;
  int size = 1;
  while (size < p.k) size *= 2;
  for (int i = p.k + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
  bitonic_sort(list, size);
  const Result<T> result{p, x, row};
  for (int i = threadIdx.x; i < p.k; i += blockDim.x) result.put(i, list[i]);
}

// k up to kMostFlowWanted, rows of whole vectors. Of the bounds the 1 is a CTA: without it ptxas spills.
template <class T, DType kType, int kTeam>
__global__ void __launch_bounds__(kFlowThreads<T, kTeam>, 1)
    topk_flow_kernel(const __grid_constant__ TopkParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(kLineBytes) unsigned char memory[];
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  flow<T, kTeam>(p, p.x, memory, [&](FlowRow &s, int64_t row, const auto &team, const auto &wait) {
    constexpr int kDigits = key_digits(kType);
    const Result<T> result{p, static_cast<const T *>(p.x) + row_offset(p.x_rows, row), row};
    const auto pair = [](uint32_t key, uint32_t i) { return pair_of(key, i); };
    wait();
    uint32_t least = bound_of_row<kDigits>(s, p.k).key;
    unsigned n = list_greatest_of<kDigits>(s, result.x, cols, p.plan.words, p.k, &least, KeyOrder{},
                                           pair, team);
    if (n > kFlowListed) {
      if (team.first_warp()) {
        uint32_t tied;
        s.kept = list_row_again<kDigits>(s, result.x, cols, p.plan.words, p.k, false, least,
                                         KeyOrder{}, pair, &tied);
      }
      team.sync();
      n = s.kept;
    }
    rank_list(s, n, team, [&](unsigned rank, uint64_t one) {
      if (rank < p.k) result.put(rank, one);
    });
  });
#endif
}

template <class T, DType kType, bool kAligned>
int32_t launch_aligned(TopkParams &p, int device, void *stream) {
  if constexpr (kAligned) {
    void (*const kernel)(TopkParams) = &topk_flow_kernel<T, kType, 1>;
    if (p.k <= kMostFlowWanted && p.k < p.x_rows.cols &&
        plan_flow<T>(p.x_rows, device, p.plan) &&
        has_clusters(reinterpret_cast<const void *>(kernel), device)) {
      return launch_flow(kernel, &topk_flow_kernel<T, kType, kLargeTeam<T>>, p, device, stream,
                         "topk");
    }
  }
  if (p.k <= kMostWanted) {
    const bool wide = p.x_rows.cols * int64_t{sizeof(T)} >= 8192 * kVectorBytes;
    return launch_top(&topk_few_kernel<T, kType, kAligned, Share::kSm>,
                      &topk_few_kernel<T, kType, kAligned, Share::kCta>,
                      &topk_few_kernel<T, kType, kAligned, Share::kCluster>, p, sizeof(T), device,
                      stream, "topk", kCtaRows, wide ? kTopClusterRows : kClusterRows);
  }
  return launch_team(&topk_kernel<T, kType, kAligned, false>,
                     &topk_kernel<T, kType, kAligned, true>, p, sizeof(T), kTopkThreads,
                     kTopkThreads, device, stream, "topk");
}

template <class T, DType kType>
int32_t launch_for(TopkParams &p, int device, void *stream) {
  return rows_of_vectors(p.x_rows, p.x, sizeof(T))
             ? launch_aligned<T, kType, true>(p, device, stream)
             : launch_aligned<T, kType, false>(p, device, stream);
}

}  // namespace

int32_t topk(const TopkArgs &a, int device, void *stream) {
  if (a.rows.rows <= 0 || a.rows.cols <= 0) return HFP_OK;
  TopkParams p{};
  p.values = a.values;
  p.indices = a.indices;
  p.x = a.x;
  p.x_rows = a.rows;
  p.k = a.k;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "topk");
  switch (a.type) {
    case DType::F32: return launch_for<float, DType::F32>(p, device, stream);
    case DType::F16: return launch_for<__half, DType::F16>(p, device, stream);
    default: return launch_for<__nv_bfloat16, DType::BF16>(p, device, stream);
  }
}

}  // namespace hfp::cuda
