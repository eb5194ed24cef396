// row_top.cuh: the few values of a row that can be among its k greatest, for topk and sample.
//
// Each thread keeps the greatest value of its share of the row. What k of these reach, k values of
// the row reach, so that none of the k greatest is below it: of k = 50 some 60 values are left,
// wherever in the row the greatest ones are. The row is passed over once, and read again only in
// those pieces of the shares that have some of them. They are ranked by comparing each with all.
// Where there are more than the list holds, as of many equal values, row_select.cuh takes the row. Few
// rows are shared out (row_top_cluster.cuh), many wide ones taken one after the other (row_flow.cuh).
#pragma once

#include <algorithm>

#include "ordered.cuh"
#include "row_select.cuh"

namespace hfp::cuda {

// A row is one CTA's, of which several share an SM, so that some load while others rank; or, where
// rows are few, it is that of a CTA with an SM to itself, or of a cluster.
enum class Share { kSm, kCta, kCluster };

template <Share kShare>
inline constexpr int kTopThreads = kShare == Share::kSm ? 256 : 512;

// For __launch_bounds__. `wanted` CTAs where they share an SM, so many of clusters.
constexpr int top_ctas(Share share, int wanted, int cluster_ctas) {
  if (share == Share::kSm) return resident_ctas(kTopThreads<Share::kSm>, wanted * 256);
  return share == Share::kCluster ? cluster_ctas : 1;
}

inline constexpr int kTopVectors = 4, kTopShift = 2;  // of a thread, on their way; the logarithm
inline constexpr int kTopPieces = 4096;          // of a CTA
inline constexpr unsigned kMostTopPieces = 512;  // that are read again
inline constexpr unsigned kMostTop = 512;        // in the list
inline constexpr unsigned kMostCompared = 128;   // each with all; more are sorted

// ---------------------------------------------------------------------------------------------
// The greatest of a thread's values

// Of half types two at once, by an instruction that keeps a NaN; of equal ones, -0 or 0.
template <class T>
struct Greatest {
  using Stored = uint16_t;
  uint32_t pair = kMinusInfinities<T>;

  __device__ __forceinline__ static uint32_t greater(uint32_t a, uint32_t b) {
    return max_two<T, true>(a, b);
  }
  __device__ __forceinline__ void add(const Greatest &other) { pair = greater(pair, other.pair); }
  __device__ __forceinline__ void add(const Vec<T, kVectorOf<T>> &v) {
    pair = greater(pair, greater(greater(v.word[0], v.word[1]), greater(v.word[2], v.word[3])));
  }
  __device__ __forceinline__ Stored stored() const {
    return static_cast<Stored>(greater(pair, pair >> 16));
  }
  __device__ __forceinline__ static float value(Stored stored) { return unpack<T>(stored).x; }
};

template <>
struct Greatest<float> {
  using Stored = uint32_t;
  uint32_t key = 0;

  __device__ __forceinline__ void add(const Greatest &other) { key = max(key, other.key); }
  __device__ __forceinline__ void add(const Vec<float, kVectorOf<float>> &v) {
#pragma unroll
    for (int i = 0; i < kVectorOf<float>; ++i) key = max(key, key_of(__uint_as_float(v.word[i])));
  }
  __device__ __forceinline__ Stored stored() const { return key; }
  __device__ __forceinline__ static float value(Stored stored) { return value_of(stored); }
};

// ---------------------------------------------------------------------------------------------
// The list

struct Bound {
  uint32_t key, greatest;
};

template <class T, int kThreads>
struct TopShared {
  union {  // one after the other
    typename Greatest<T>::Stored piece[kTopPieces];
    struct {
      uint64_t ranked[kMostTop], room[kMostTop];  // and what is made of each
    };
    SelectShared select;
  };
  uint32_t key[kThreads];  // the greatest of each thread
  uint32_t again[kMostTopPieces];
  uint64_t list[kMostTop];
  uint64_t weight[kMostCompared];
  uint16_t place[kMostCompared];
  unsigned pieces, listed;
  Bound bound;
};

// By one warp: a bound that at least k of the keys, one of each thread, reach, and few more.
template <int kThreads>
__device__ __forceinline__ Bound bound_of(const uint32_t *keys, unsigned k) {
  uint32_t key[kThreads / 32], low = ~0u, high = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    key[i] = 0;
    if (32 * i >= blockDim.x) continue;
    key[i] = keys[32 * i + threadIdx.x % 32u];
    low = min(low, key[i]);
    high = max(high, key[i]);
  }
  const uint32_t greatest = max_over_warp(high);
  if (k == 1) return {greatest, greatest};
  if (k > blockDim.x) return {0, greatest};
  const unsigned enough = k + k / 16 + 2;
  low = ~max_over_warp(~low);  // all reach it
  high = greatest;              // fewer than k reach more than it
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) count += __popc(__ballot_sync(~0u, key[i] >= middle));
    if (count < k) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= enough) break;
    }
  }
  return {low, greatest};
}

// Vector `at` of a row of so many; what lies past its end is -inf.
template <class T, bool kAligned>
__device__ __forceinline__ void load_or_infinity(Vec<T, kVectorOf<T>> &v, const T *x, uint32_t at,
                                                 uint32_t vectors, uint32_t cols) {
  constexpr int N = kVectorOf<T>;
  constexpr uint32_t kElement = sizeof(T) == 4 ? 0xffffffffu : 0xffffu;
  if (at < vectors) {
    load_vector<T, kAligned>(v, x, at, cols);
  } else {
    v.zero();
  }
  if (at < vectors && (kAligned || at * N + N <= cols)) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (at * N + i < cols) continue;
    v.word[i * sizeof(T) / 4] |= kMinusInfinities<T> & (kElement << i * sizeof(T) % 4 * 8);
  }
}

// By the first threads of a CTA: the n of the list, descending, in `ranked`, and the place of each in
// the list. Each is compared with all.
__device__ __forceinline__ void compare_listed(const uint64_t *list, uint64_t *ranked,
                                               uint16_t *place, unsigned n, unsigned threads) {
  constexpr unsigned kLanes = 8;  // compare one with all
  const unsigned lane = threadIdx.x % kLanes, in_warp = threadIdx.x % 32u / kLanes;
  for (unsigned i = threadIdx.x / 32u * (32 / kLanes); i < n; i += threads / kLanes) {
    const bool here = i + in_warp < n;
    const uint64_t one = here ? list[i + in_warp] : 0;
    unsigned rank = 0;
    for (unsigned j = lane; j < n; j += kLanes) rank += list[j] > one;
#pragma unroll
    for (unsigned by = kLanes / 2; by > 0; by /= 2) rank += __shfl_xor_sync(~0u, rank, by);
    if (here && lane == 0) ranked[rank] = one, place[rank] = static_cast<uint16_t>(i + in_warp);
  }
}

// By a CTA: the n of the list, descending, there or in `ranked`.
__device__ __forceinline__ const uint64_t *rank_listed(uint64_t *list, uint64_t *ranked,
                                                       uint16_t *place, unsigned n) {
  if (n > kMostCompared) {
    unsigned size = 2 * kMostCompared;
    while (size < n) size *= 2;
    for (unsigned i = n + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
    bitonic_sort(list, size);
    return list;
  }
  compare_listed(list, ranked, place, n, blockDim.x);
  __syncthreads();
  return ranked;
}

// A CTA's work on one row: bound(), list(), and where that has found room, ranked().
template <class T, bool kAligned, Share kShare>
struct RowTop {
  static constexpr int N = kVectorOf<T>;
  static constexpr int kThreads = kTopThreads<kShare>;
  using Shared = TopShared<T, kThreads>;
  Shared &s;
  const T *x;
  uint32_t cols, vectors, first, step;
  int shift;            // a piece: 1 << shift vectors, each `step` behind the one before
  uint32_t pieces = 0;  // of this thread
  uint32_t own = 0;     // its greatest key

  __device__ __forceinline__ RowTop(Shared &s, const T *x, uint32_t cols)
      : s(s),
        x(x),
        cols(cols),
        vectors((cols + N - 1) / N),
        first(threadIdx.x / 32u * 32u + threadIdx.x % 32u),  // else ptxas spills a register
        step(blockDim.x),
        shift(kTopShift) {
    const uint32_t most = kTopPieces / blockDim.x, share = (vectors + step - 1) / step;
    while ((share - 1) >> shift >= most) ++shift;
  }

  __device__ __forceinline__ void skip() const {}  // instead of bound()

  // key(value) must be ordered as the values are.
  template <class Key>
  __device__ __forceinline__ Bound bound(unsigned k, const Key &key) {
    if (threadIdx.x == 0) s.pieces = s.listed = 0;
    Greatest<T> all;
    for (uint32_t at = first; at < vectors; ++pieces) {
      Greatest<T> of_piece;
      for (uint32_t end = at + (step << shift); at != end; at += step * kTopVectors) {
        Vec<T, N> v[kTopVectors];
#pragma unroll
        for (int u = 0; u < kTopVectors; ++u) {
          load_or_infinity<T, kAligned>(v[u], x, at + u * step, vectors, cols);
        }
#pragma unroll
        for (int u = 0; u < kTopVectors; ++u) of_piece.add(v[u]);
      }
      s.piece[pieces * blockDim.x + threadIdx.x] = of_piece.stored();
      all.add(of_piece);
    }
    if (pieces > 0) own = key(Greatest<T>::value(all.stored()));
    s.key[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < 32) {
      const Bound bound = bound_of<kThreads>(s.key, k);
      if (threadIdx.x == 0) s.bound = bound;
    }
    __syncthreads();
    return s.bound;
  }

  // pair(key, col) of all that reach the bound meet, in any order, in the list. Returns how many, which
  // may be more than there is room for.
  template <class Key, class Pair>
  __device__ __forceinline__ unsigned list(uint32_t least, const Key &key, const Pair &pair) {
    if (own >= least) {
      for (uint32_t i = 0; i < pieces; ++i) {
        const auto greatest = s.piece[i * blockDim.x + threadIdx.x];
        if (key(Greatest<T>::value(greatest)) < least) continue;
        const unsigned place = atomicAdd(&s.pieces, 1u);
        if (place < kMostTopPieces) s.again[place] = first + (i << shift) * step;
      }
    }
    __syncthreads();
    const unsigned again = s.pieces;
    if (again > kMostTopPieces) {
      if (threadIdx.x == 0) s.listed = kMostTop + 1;
    } else {
      for (unsigned i = threadIdx.x; i < again << shift; i += blockDim.x) {
        const uint32_t at = s.again[i >> shift] + (i & ((1u << shift) - 1)) * step;
        if (at >= vectors) continue;
        Vec<T, N> v;
        load_vector<T, kAligned, Cache::kReadOnly>(v, x, at, cols);
        float value[N];
        v.get(value);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const uint32_t found = key(value[j]);
          if (found < least || (!kAligned && at * N + j >= cols)) continue;
          const unsigned place = atomicAdd(&s.listed, 1u);
          if (place < kMostTop) s.list[place] = pair(found, at * N + j);
        }
      }
    }
    __syncthreads();
    return s.listed;
  }

  __device__ __forceinline__ const uint64_t *ranked(unsigned n) const {
    return rank_listed(s.list, s.ranked, s.place, n);
  }
};

// ---------------------------------------------------------------------------------------------
// Launching

// cta_rows, cluster_rows: up to how many wide rows get the large CTAs, and the clusters.
template <class Params>
int32_t launch_top(void (*sm)(Params), void (*cta)(Params), void (*cluster)(Params), Params &p,
                   int64_t element_bytes, int device, void *stream, const char *op,
                   int64_t cta_rows = kCtaRows, int64_t cluster_rows = kTopClusterRows) {
  const bool few = p.x_rows.rows <= cta_rows && p.x_rows.cols * element_bytes >=
                                                    kClusterVectors * kVectorBytes;
  const int64_t vectors = (p.x_rows.cols * element_bytes + kVectorBytes - 1) / kVectorBytes;
  const int wanted = cta_threads((vectors + kClusterSize - 1) / kClusterSize, 1);
  return launch_team(few ? cta : sm, cluster, p, element_bytes,
                     few ? kTopThreads<Share::kCta> : kTopThreads<Share::kSm>,
                     std::min(wanted, kTopThreads<Share::kCluster>), device, stream, op,
                     cluster_rows);
}

}  // namespace hfp::cuda
