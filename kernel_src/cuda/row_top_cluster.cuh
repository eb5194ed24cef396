// row_top_cluster.cuh: the few values of a row that can be among its k greatest (row_top.cuh), where
// rows are few and each is that of a cluster (sm_90).
//
// The row lies in registers from the only time it is read. Every group of lanes sends its greatest
// value to all CTAs, which find the k-th greatest of them: what reaches it is in the list. Each CTA
// then says to all how many it has, and sends them to the first one. Whoever waits, waits for what is
// sent (mailbox.cuh), not for a barrier of the cluster.
#pragma once

#include "mailbox.cuh"
#include "row_top.cuh"

namespace hfp::cuda {

inline constexpr int kClusterHeld = 8;  // vectors of a thread in registers; others are read again
inline constexpr unsigned kMostGroups = 512;
inline constexpr unsigned kMostTaken = 128, kMostSent = 128;  // of a CTA: vectors, and what they have

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
struct ClusterTopShared {
  union {  // one after the other
    struct {
      uint64_t ranked[kMostTop], room[kMostTop];  // and what is made of each
    };
    SelectShared select;
  };
  uint64_t list[kMostTop], own[kMostSent], sent[kClusterSize][kMostSent];
  alignas(16) uint32_t group[kMostGroups];  // the greatest key of each
  uint4 vector[kMostTaken];  // of this CTA's share, that have some of what is listed
  uint32_t taken_at[kMostTaken], rest_at[kMostTaken];
  uint64_t weight[kMostCompared];
  uint16_t place[kMostCompared];
  unsigned count[kClusterSize];
  unsigned taken, rests, found, listed;
  uint32_t bound, greatest;
  Mailbox groups_mail, count_mail, list_mail;
};

template <class T, bool kAligned>
struct ClusterTop {
  static constexpr int N = kVectorOf<T>;
  using Shared = ClusterTopShared;
  using CTAs = Team<true>;
  Shared &s;
  const T *x;
  uint32_t cols, vectors, first, step;
  uint32_t own = 0, of_rest = 0;  // this thread's greatest key, and that of what it does not hold
  Vec<T, N> held[kClusterHeld];

  __device__ __forceinline__ ClusterTop(Shared &s, const T *x, uint32_t cols)
      : s(s),
        x(x),
        cols(cols),
        vectors((cols + N - 1) / N),
        first((threadIdx.x / 32u * CTAs::size() + CTAs::rank()) * 32u + threadIdx.x % 32u),
        step(CTAs::size() * blockDim.x) {
    if (threadIdx.x == 0) s.groups_mail.init(), s.count_mail.init(), s.list_mail.init();
    __syncwarp();
    CTAs::leave();  // until skip() or bound() no other CTA may write to this one's memory
  }

  // Instead of bound().
  __device__ __forceinline__ void skip() const { CTAs::left(); }

  // Whether threads have u + 1 vectors, asked for half of those that they can hold at once.
  __device__ __forceinline__ bool has(int u) const {
    return u < kClusterHeld / 2 || vectors > kClusterHeld / 2 * step;
  }

  __device__ __forceinline__ static void send(Mailbox &mail, void *to, uint32_t v, unsigned rank) {
    const float one[1] = {__uint_as_float(v)};
    mail.send(static_cast<float *>(to), one, rank);
  }
  __device__ __forceinline__ static void send(Mailbox &mail, void *to, uint64_t v, unsigned rank) {
    const float two[2] = {__uint_as_float(static_cast<uint32_t>(v)),
                          __uint_as_float(static_cast<uint32_t>(v >> 32))};
    mail.send(static_cast<float *>(to), two, rank);
  }

  // A key that at least k of the row reach. key(value) must be ordered as the values are.
  template <class Key>
  __device__ __forceinline__ Bound bound(unsigned k, const Key &key) {
    const unsigned lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, warps = blockDim.x / 32u;
    unsigned lanes = 32;  // of a group; of k and more groups, so that not too many reach the bound
    while (CTAs::size() * warps * (32 / lanes) * 3 < k * 4) lanes /= 2;
    const unsigned here = warps * (32 / lanes), groups = CTAs::size() * here;
    if (threadIdx.x == 0) {
      s.taken = s.rests = s.found = 0, s.bound = ~0u;
      s.groups_mail.announce(static_cast<int>(groups * sizeof(uint32_t)));
      s.count_mail.announce(static_cast<int>(CTAs::size() * sizeof(unsigned)));
    }
    Greatest<T> all;
#pragma unroll
    for (int u = 0; u < kClusterHeld; ++u) {
      if (has(u)) load_or_infinity<T, kAligned>(held[u], x, first + u * step, vectors, cols);
    }
    for (uint32_t at = first + kClusterHeld * step; at < vectors; at += step * kTopVectors) {
      Vec<T, N> v[kTopVectors];
#pragma unroll
      for (int u = 0; u < kTopVectors; ++u) {
        load_or_infinity<T, kAligned>(v[u], x, at + u * step, vectors, cols);
      }
#pragma unroll
      for (int u = 0; u < kTopVectors; ++u) all.add(v[u]);
    }
    of_rest = key(Greatest<T>::value(all.stored()));
#pragma unroll
    for (int u = 0; u < kClusterHeld; ++u) {
      if (has(u)) all.add(held[u]);
    }
    own = key(Greatest<T>::value(all.stored()));
    uint32_t of_group = own;
    if (lanes == 32) {
      of_group = max_over_warp(own);
    } else {
      for (unsigned by = lanes / 2; by > 0; by /= 2) {
        of_group = max(of_group, __shfl_xor_sync(~0u, of_group, by));
      }
    }
    CTAs::left();
    const unsigned group = CTAs::rank() * here + warp * (32 / lanes) + lane / lanes;
    for (unsigned rank = lane % lanes; rank < CTAs::size(); rank += lanes) {
      send(s.groups_mail, s.group + group, of_group, rank);
    }
    s.groups_mail.wait(0);
    // The k-th greatest: the least that fewer than k are above.
    const unsigned parts = groups < blockDim.x ? blockDim.x / groups : 1, part = threadIdx.x % parts;
    uint32_t least = ~0u;
    for (unsigned i = threadIdx.x / parts; i < groups; i += blockDim.x / parts) {
      const uint32_t one = s.group[i];
      unsigned above = 0;
#pragma unroll 8
      for (unsigned j = part; j < groups / 4; j += parts) {
        const uint4 others = reinterpret_cast<const uint4 *>(s.group)[j];
        above += others.x > one, above += others.y > one;
        above += others.z > one, above += others.w > one;
      }
      for (unsigned by = parts / 2; by > 0; by /= 2) above += __shfl_xor_sync(~0u, above, by);
      if (above < k) least = min(least, one);
      if (above == 0) s.greatest = one;
    }
    least = ~max_over_warp(~least);
    if (lane == 0) atomicMin(&s.bound, least);
    __syncthreads();
    return {s.bound, s.greatest};
  }

  // pair(key, col) of all that reach the bound, in any order, in the list of the first CTA. Returns how
  // many, which may be more than there is room for.
  template <class Key, class Pair>
  __device__ __forceinline__ unsigned list(uint32_t least, const Key &key, const Pair &pair) {
    const auto take = [&](const Vec<T, N> &v, uint32_t at) {
      Greatest<T> of_vector;
      of_vector.add(v);
      if (at >= vectors || key(Greatest<T>::value(of_vector.stored())) < least) return;
      const unsigned place = atomicAdd(&s.taken, 1u);
      if (place >= kMostTaken) return;
      s.taken_at[place] = at;
      s.vector[place] = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
    };
    const uint32_t held_vectors = kClusterHeld * step;
    if (own >= least) {
#pragma unroll
      for (int u = 0; u < kClusterHeld; ++u) {
        if (has(u)) take(held[u], first + u * step);
      }
      if (first + held_vectors < vectors && of_rest >= least) {
        const unsigned place = atomicAdd(&s.rests, 1u);
        if (place < kMostTaken) s.rest_at[place] = first + held_vectors;
      }
    }
    __syncthreads();
    if (vectors > held_vectors) {  // by all threads of the CTA
      const unsigned rests = min(s.rests, kMostTaken), rest = (vectors - held_vectors + step - 1) / step;
      for (unsigned i = threadIdx.x; i < rests * rest; i += blockDim.x) {
        const uint32_t at = s.rest_at[i / rest] + i % rest * step;
        Vec<T, N> v;
        load_or_infinity<T, kAligned>(v, x, at, vectors, cols);
        take(v, at);
      }
      __syncthreads();
    }
    const unsigned taken = s.taken;
    if (max(taken, s.rests) > kMostTaken && threadIdx.x == 0) s.found = kMostSent + 1;
    for (unsigned i = threadIdx.x; i < min(taken, kMostTaken) * N; i += blockDim.x) {
      const uint32_t col = s.taken_at[i / N] * N + i % N;
      const uint32_t found = key(static_cast<float>(reinterpret_cast<const T *>(s.vector)[i]));
      if (found < least || (!kAligned && col >= cols)) continue;
      const unsigned place = atomicAdd(&s.found, 1u);
      if (place < kMostSent) s.own[place] = pair(found, col);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const unsigned found = s.found;
      if (threadIdx.x < CTAs::size()) {
        send(s.count_mail, s.count + CTAs::rank(), found, threadIdx.x);
      }
      for (unsigned i = threadIdx.x; i < min(found, kMostSent); i += 32) {
        send(s.list_mail, s.sent[CTAs::rank()] + i, s.own[i], 0);
      }
    }
    s.count_mail.wait(0);
    unsigned n = 0, sent = 0;
    bool room = true;
#pragma unroll
    for (unsigned rank = 0; rank < CTAs::size(); ++rank) {
      const unsigned count = s.count[rank];
      n += count, sent += min(count, kMostSent);
      room = room && count <= kMostSent;
    }
    if (!room || n > kMostTop) n = kMostTop + 1;
    if (CTAs::rank() != 0) return n;
    if (threadIdx.x == 0) s.list_mail.announce(static_cast<int>(sent * sizeof(uint64_t)));
    s.list_mail.wait(0);
    if (n > kMostTop) return n;
    for (unsigned i = threadIdx.x; i < CTAs::size() * kMostSent; i += blockDim.x) {
      const unsigned rank = i / kMostSent, of_rank = i % kMostSent;
      if (of_rank >= s.count[rank]) continue;
      unsigned before = of_rank;
      for (unsigned r = 0; r < rank; ++r) before += s.count[r];
      s.list[before] = s.sent[rank][of_rank];
    }
    __syncthreads();
    return n;
  }

  __device__ __forceinline__ const uint64_t *ranked(unsigned n) const {
    return rank_listed(s.list, s.ranked, s.place, n);
  }
};

template <class T, bool kAligned, Share kShare>
using TopOf = std::conditional_t<kShare == Share::kCluster, ClusterTop<T, kAligned>,
                                 RowTop<T, kAligned, kShare>>;
#else  // no clusters are launched
template <class T, bool kAligned, Share kShare>
using TopOf = RowTop<T, kAligned, kShare>;
#endif

}  // namespace hfp::cuda
