// row_flow_rank.cuh: what is left of a row whose pieces' greatest values are known, for row_flow.cuh (sm_90):
// a bound, the list of what reaches it (row_top.cuh says why there is little), and its order. By one warp,
// or two.
//
// Where too many values reach the bound, as of sorted rows or many equal values, the k-th greatest of some
// of them is another one. Where all of these are equal, one warp passes over the pieces in the order of
// their columns, and raises the bound as it goes.
#pragma once

#include "async_copy.cuh"
#include "row_top.cuh"

namespace hfp::cuda {

inline constexpr int kReaders = 512;          // threads that read
inline constexpr int kPieceVectors = 2;       // side by side: one sector
inline constexpr unsigned kFlowListed = 256;  // in the list of a row
inline constexpr unsigned kFlowTaken = 128;   // vectors that are read again at a time

// In shared memory: a row on its way from the readers to its ranker.
struct FlowRow {
  union {
    uint32_t own[kReaders];             // the greatest key of each reader
    uint4 taken[2][32][kPieceVectors];  // by each_reaching(), when a bound is known
  };
  uint32_t waiting[64];  // pieces, by the same
  unsigned reaching_count, again_count, listed;
  unsigned kept;  // by list_row_again(), for the other warp
  uint32_t tied;
  union {
    struct {
      uint64_t list[kFlowListed];
      union {  // one after the other
        struct {
          uint4 vector[kFlowTaken];
          uint32_t again[kFlowListed];
          uint16_t reaching[kReaders];
        };
        struct {
          uint64_t ranked[kFlowListed], room[kFlowListed];
        };
      };
    };
    uint64_t found[3 * kFlowListed];  // by list_row_again(): a list, and what comes at a time
  };
  // Behind it the pieces: words of kReaders each, in the order in which they are read.
  __device__ __forceinline__ uint32_t *pieces() { return reinterpret_cast<uint32_t *>(this + 1); }
};

// The i-th of a word.
template <class T>
__device__ __forceinline__ float piece_of(uint32_t word, int i) {
  if constexpr (sizeof(T) == 4) {
    return value_of(word);
  } else {
    const float2 two = unpack<T>(word);
    return i == 0 ? two.x : two.y;
  }
}

// The warps that rank a row.
template <int kTeam>
struct FlowTeam {
  static constexpr unsigned kThreads = 32 * kTeam;
  unsigned thread, barrier;
  __device__ __forceinline__ explicit FlowTeam(int ranker)
      : thread((threadIdx.x - kReaders) % kThreads), barrier(static_cast<unsigned>(ranker) + 1) {}
  __device__ __forceinline__ bool first_warp() const { return thread < 32; }
  __device__ __forceinline__ void sync() const {
    if constexpr (kTeam == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
    }
  }
};

// Whether a value's key is at least that.
struct Least {
  uint32_t key;
  float value;
  __device__ __forceinline__ explicit Least(uint32_t key) : key(key), value(value_of(key)) {}
  // In the order of key_of, NaN above all.
  __device__ __forceinline__ bool reached_by(float x) const { return x >= value || x != x; }
};

// What list_row() takes as the order; sample has another one for fp32.
struct KeyOrder {
  __device__ __forceinline__ uint32_t key(float value) const { return key_of(value); }
  __device__ __forceinline__ uint32_t of(uint32_t key) const { return key; }
  __device__ __forceinline__ bool reaches(float value, const Least &least) const {
    return least.reached_by(value);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// By one warp: of a row that has been read, in the order of key_of, a key that at least k values reach,
// and few more. Keys of the dtype have the same low bits.
template <int kDigits>
__device__ __forceinline__ Bound bound_of_row(const FlowRow &s, unsigned k) {
  constexpr int kSame = 32 - 8 * kDigits;
  const unsigned lane = threadIdx.x % 32u;
  // Of four readers, far from each other: what is great may be side by side.
  uint32_t key[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = reinterpret_cast<const uint4 *>(s.own)[32 * i + lane];
    key[0] = max(key[0], v.x), key[1] = max(key[1], v.y);
    key[2] = max(key[2], v.z), key[3] = max(key[3], v.w);
  }
  const uint32_t greatest = max_over_warp(max(max(key[0], key[1]), max(key[2], key[3])));
  if (k == 1) return {greatest, greatest};
  uint32_t low = min(min(key[0], key[1]), min(key[2], key[3]));
  low = ~max_over_warp(~low) >> kSame;  // all reach it
  uint32_t high = greatest >> kSame;    // fewer than k reach more than it
  const unsigned enough = k + k / 16 + 2;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count += __popc(__ballot_sync(~0u, key[i] >= middle << kSame));
    }
    if (count < k) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= enough) break;
    }
  }
  low <<= kSame;
  // All ones where the value is negative.
  return {low >> 31 ? low : low | ~(~0u << kSame), greatest};
}

// Which elements of a word, one or two, reach a bound that is no NaN: bit 0 and, of the second one, bit 16.
template <class T, class Order>
struct Reaching {
  const Order &order;
  Least least;
  uint32_t twice = 0;  // of half types, the least value of T that reaches it, in both halves

  __device__ __forceinline__ Reaching(const Order &order, uint32_t key) : order(order), least(key) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      twice = __bfloat16_as_ushort(__float2bfloat16_ru(least.value)) * 0x00010001u;
    } else if constexpr (std::is_same_v<T, __half>) {
      twice = __half_as_ushort(__float2half_ru(least.value)) * 0x00010001u;
    }
  }
  __device__ __forceinline__ uint32_t in(uint32_t word) const {  // NaN does
    if constexpr (sizeof(T) == 4) {
      return order.reaches(__uint_as_float(word), least);
    } else {
      using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      return 0x00010001u & __hgeu2_mask(*reinterpret_cast<const Two *>(&word),
                                        *reinterpret_cast<const Two *>(&twice));
    }
  }
  __device__ __forceinline__ uint32_t in_pieces(uint32_t word) const {
    return sizeof(T) == 4 ? order.reaches(value_of(word), least) : in(word);
  }
};

// put(place, bit) for each bit of the lanes' masks, at places from *count on, in any order.
template <class Put>
__device__ __forceinline__ void add_to(unsigned *count, uint32_t mask, const Put &put) {
  if (mask == 0) return;
  unsigned place = atomicAdd(count, static_cast<unsigned>(__popc(mask)));
#pragma unroll 1
  do {
    put(place, __ffs(static_cast<int>(mask)) - 1);
    mask &= mask - 1, ++place;
  } while (mask != 0);
}

// pair(key, col) of all whose key is at least `least`, in any order, in s.list. Returns how many, which
// may be more than there is room for, or kTooMany. order.key(value) is the key, order.of(key_of) the same.
// As loops: few warps pass through here, and each waits for every line of code.
inline constexpr unsigned kTooMany = ~0u;
template <class T, int kTeam, class Order, class Pair>
__device__ __forceinline__ unsigned list_row(FlowRow &s, const T *x, uint32_t cols, int words,
                                             uint32_t least, const Order &order, const Pair &pair,
                                             const FlowTeam<kTeam> &team) {
  constexpr int N = kVectorOf<T>, kInWord = 4 / sizeof(T);
  constexpr int kBits = 16;  // of a mask, for words; the others are of their second elements
  constexpr unsigned kThreads = FlowTeam<kTeam>::kThreads;
  if (sizeof(T) == 2 && least > kKeyOfInfinity) return kTooMany;  // NaN
  const uint32_t vectors = cols / N;
  if (team.thread == 0) s.reaching_count = s.again_count = s.listed = 0;
  // Readers
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4 / kTeam; ++i) {
    const uint4 v = reinterpret_cast<const uint4 *>(s.own)[kThreads * i + team.thread];
    mask |= static_cast<uint32_t>(order.of(v.x) >= least) << 4 * i;
    mask |= static_cast<uint32_t>(order.of(v.y) >= least) << (4 * i + 1);
    mask |= static_cast<uint32_t>(order.of(v.z) >= least) << (4 * i + 2);
    mask |= static_cast<uint32_t>(order.of(v.w) >= least) << (4 * i + 3);
  }
  team.sync();
  add_to(&s.reaching_count, mask, [&](unsigned place, int bit) {
    s.reaching[place] = static_cast<uint16_t>((bit / 4 * kThreads + team.thread) * 4 + bit % 4);
  });
  team.sync();
  const unsigned readers = s.reaching_count;
  if (readers > kFlowListed) return kTooMany;  // each has a piece
  // Pieces of theirs
  const Reaching<T, Order> reaching(order, least);
#pragma unroll 1
  for (unsigned i = team.thread; i < readers; i += kThreads) {
    const unsigned reader = s.reaching[i];
#pragma unroll 1
    for (int first = 0; first < words; first += kBits) {
      const uint32_t *word = s.pieces() + first * kReaders + reader;
      const int past = min(words - first, kBits);
      mask = 0;
#pragma unroll 4
      for (int w = 0; w < past; ++w, word += kReaders) mask |= reaching.in_pieces(*word) << w;
      add_to(&s.again_count, mask, [&](unsigned place, int bit) {
        const uint32_t piece = (first + bit % kBits) * kInWord + bit / kBits;
        if (place < kFlowListed) s.again[place] = kPieceVectors * (piece * kReaders + reader);
      });
    }
  }
  team.sync();
  const unsigned pieces = s.again_count;
  if (pieces > kFlowListed) return kTooMany;
  // Their elements
  const auto vector_at = [&](unsigned i) {
    return i < pieces * kPieceVectors ? s.again[i / kPieceVectors] + i % kPieceVectors : vectors;
  };
#pragma unroll 1
  for (unsigned first = 0; first < pieces * kPieceVectors; first += kFlowTaken) {
#pragma unroll
    for (unsigned i = team.thread; i < kFlowTaken; i += kThreads) {
      const uint32_t at = vector_at(first + i);
      if (at < vectors) copy_later(s.vector + i, x + at * N);
    }
    end_copies();
    wait_for_copies<0>();
    mask = 0;
#pragma unroll 1
    for (unsigned i = team.thread, shift = 0; i < kFlowTaken; i += kThreads, shift += 4) {
      if (vector_at(first + i) >= vectors) continue;
      const uint4 v = s.vector[i];
      mask |= (reaching.in(v.x) | reaching.in(v.y) << 1 | reaching.in(v.z) << 2 |
               reaching.in(v.w) << 3) << shift;
    }
    add_to(&s.listed, mask, [&](unsigned place, int bit) {
      const unsigned i = bit % kBits / 4 * kThreads + team.thread;
      const unsigned j = bit % 4 * kInWord + bit / kBits;
      const float value = static_cast<float>(reinterpret_cast<const T *>(s.vector + i)[j]);
      if (place < kFlowListed) s.list[place] = pair(order.key(value), vector_at(first + i) * N + j);
    });
  }
  team.sync();
  return s.listed;
}

// By one warp, of n pairs.
__device__ __forceinline__ unsigned count_at_least(const uint64_t *pairs, unsigned n, uint32_t key) {
  unsigned count = 0;
#pragma unroll 4
  for (unsigned i = threadIdx.x % 32u; i < n; i += 32) {
    count += static_cast<uint32_t>(pairs[i] >> 32) >= key;
  }
  return __reduce_add_sync(~0u, count);
}

// The k-th greatest key of n pairs, all of which reach `least`.
template <int kDigits>
__device__ __forceinline__ uint32_t key_of_kth(const uint64_t *pairs, unsigned n, unsigned k,
                                               uint32_t least) {
  constexpr int kSame = 32 - 8 * kDigits;
  uint32_t greatest = 0;
#pragma unroll 4
  for (unsigned i = threadIdx.x % 32u; i < n; i += 32) {
    greatest = max(greatest, static_cast<uint32_t>(pairs[i] >> 32));
  }
  uint32_t low = least >> kSame, high = max_over_warp(greatest) >> kSame;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    if (count_at_least(pairs, n, middle << kSame) >= k) low = middle;
    else high = middle - 1;
  }
  low <<= kSame;
  // All ones where the value is negative, or NaN.
  return low >> 31 && low <= kKeyOfInfinity ? low : low | ~(~0u << kSame);
}

// list_row(), and where it has found too many, again with a bound that k of these reach.
template <int kDigits, class T, int kTeam, class Order, class Pair>
__device__ __forceinline__ unsigned list_greatest_of(FlowRow &s, const T *x, uint32_t cols, int words,
                                                     unsigned k, uint32_t *least, const Order &order,
                                                     const Pair &pair, const FlowTeam<kTeam> &team) {
#pragma unroll 1
  while (true) {
    const unsigned n = list_row(s, x, cols, words, *least, order, pair, team);
    if (n <= kFlowListed || n == kTooMany) return n;
    const uint32_t better = key_of_kth<kDigits>(s.list, kFlowListed, k, *least);
    if (better <= *least) return kTooMany;
    *least = better;
    team.sync();  // all have read how many there were
  }
}

// put(rank, pair) for each of the n that are listed.
template <int kTeam, class Put>
__device__ __forceinline__ void rank_list(const FlowRow &s, unsigned n, const FlowTeam<kTeam> &team,
                                          const Put &put) {
  constexpr unsigned kThreads = FlowTeam<kTeam>::kThreads, kOwn = 2 / kTeam;  // of a thread at a time
  const ulonglong2 *const twos = reinterpret_cast<const ulonglong2 *>(s.list);
#pragma unroll 1
  for (unsigned first = team.thread; first < n; first += kOwn * kThreads) {
    uint64_t own[kOwn];
    unsigned above[kOwn];
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      own[i] = first + i * kThreads < n ? s.list[first + i * kThreads] : ~uint64_t{0};
      above[i] = n % 2 != 0 && s.list[n - 1] > own[i];
    }
#pragma unroll 4
    for (unsigned j = 0; j < n / 2; ++j) {
      const ulonglong2 two = twos[j];
#pragma unroll
      for (unsigned i = 0; i < kOwn; ++i) above[i] += two.x > own[i], above[i] += two.y > own[i];
    }
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      if (first + i * kThreads < n) put(above[i], own[i]);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Where too many reach the bound, by one warp

// Over the lanes: what is before this one's, and the sum.
__device__ __forceinline__ unsigned before_lane(unsigned own, unsigned *sum) {
  const unsigned lane = threadIdx.x % 32u;
  unsigned upto = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, upto, by);
    if (lane >= by) upto += other;
  }
  *sum = __shfl_sync(~0u, upto, 31);
  return upto - own;
}

// take(elements, at) for what is in the pieces that reach `least`, two vectors of each lane at a time, in
// the order of their columns. at: the first one, behind the row where there is none; the second one may
// be. `least` may rise meanwhile; 0: none reaches it.
template <class T, class Order, class Take>
__device__ __forceinline__ void each_reaching(FlowRow &s, const T *x, uint32_t cols, int words,
                                              const Order &order, const uint32_t &least,
                                              const Take &take) {
  constexpr int N = kVectorOf<T>, kInWord = 4 / sizeof(T), kSteps = kReaders / 32;
  const uint32_t vectors = cols / N;
  const unsigned lane = threadIdx.x % 32u;
  const int steps = words * kInWord * kSteps;
  int step = 0;
  unsigned waiting = 0;
  uint32_t coming_at = vectors;
#pragma unroll 1
  for (unsigned turn = 0;; ++turn) {
#pragma unroll 1
    for (; waiting < 32 && step < steps; ++step) {
      const auto reaches = [&](int step) {
        const uint32_t piece = step / kSteps, reader = step % kSteps * 32 + lane;
        const uint32_t word = s.pieces()[piece / kInWord * kReaders + reader];
        return order.reaches(piece_of<T>(word, piece % kInWord), Least(least));
      };
      if (step % 4 == 0) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) any = reaches(step + i) || any;
        if (!__any_sync(~0u, any)) {
          step += 3;
          continue;
        }
      }
      const uint32_t piece = step / kSteps, reader = step % kSteps * 32 + lane;
      const bool has = reaches(step);
      const unsigned mask = __ballot_sync(~0u, has);
      if (has) {
        s.waiting[waiting + __popc(mask & ~(~0u << lane))] =
            kPieceVectors * (piece * kReaders + reader);
      }
      waiting += __popc(mask);
    }
    __syncwarp();
    const bool more = waiting > 0 && least != 0;
    uint32_t at = vectors;
    if (more) {
      if (lane < waiting) at = s.waiting[lane];
      const uint32_t rest = s.waiting[lane + 32];
      __syncwarp();
      s.waiting[lane] = rest;
      waiting -= min(waiting, 32u);
#pragma unroll
      for (int u = 0; u < kPieceVectors; ++u) {
        if (at + u < vectors) copy_later(&s.taken[turn % 2][lane][u], x + (at + u) * N);
      }
    }
    end_copies();
    if (turn > 0) {
      wait_for_copies<1>();
      take(reinterpret_cast<const T *>(s.taken[1 - turn % 2][lane]), coming_at);
      __syncwarp();
    }
    if (!more) break;
    coming_at = at;
  }
}

// Of the elements that a lane takes: a bit for each of which `is` holds.
template <class T, class Is>
__device__ __forceinline__ uint32_t bits_of_taken(const T *elements, uint32_t at, uint32_t cols,
                                                  const Is &is) {
  constexpr int N = kVectorOf<T>;
  uint32_t mask = 0;
#pragma unroll 4
  for (int j = 0; j < kPieceVectors * N; ++j) {
    const bool here = at * N + j < cols;
    mask |= static_cast<uint32_t>(here && is(static_cast<float>(elements[j]))) << j;
  }
  return mask;
}

// Of the n in s.found, in the order of their columns, the k greatest stay, and of what equals the last of
// them as many of the first ones as k has room for. all_equal: all of it or, if that is much, nothing of
// it, and *tied is its key. Returns how many. *least: the key that all reach, and then that others have to
// reach, 0 if none can.
template <int kDigits>
__device__ __forceinline__ unsigned cut_found(FlowRow &s, unsigned n, unsigned k, bool all_equal,
                                              uint32_t *least, uint32_t *tied) {
  const unsigned lane = threadIdx.x % 32u, before = ~(~0u << lane);
  const uint32_t last = key_of_kth<kDigits>(s.found, n, k, *least);
  unsigned equal = k - (last == ~0u ? 0 : count_at_least(s.found, n, last + 1));
  *tied = 0;
  if (all_equal) {
    equal = n;
    if (count_at_least(s.found, n, last) > kFlowListed / 2) equal = 0, *tied = last;
  }
  *least = all_equal && *tied == 0 ? last : last + 1;
  unsigned left = 0;
#pragma unroll 1
  for (unsigned first = 0; first < n; first += 32) {
    const uint64_t one = first + lane < n ? s.found[first + lane] : 0;
    const uint32_t key = static_cast<uint32_t>(one >> 32);
    const unsigned ties = __ballot_sync(~0u, first + lane < n && key == last);
    const bool stays = key > last || (ties >> lane & 1u && __popc(ties & before) < equal);
    const unsigned stay = __ballot_sync(~0u, stays);
    if (stays) s.found[left + __popc(stay & before)] = one;
    __syncwarp();
    left += __popc(stay);
    equal -= min(equal, static_cast<unsigned>(__popc(ties)));
  }
  return left;
}

// Where list_row() has found too many: the k greatest, and what equals the last of them, all or the first
// ones, in s.list. Returns how many. *tied: if not 0, what equals that key belongs in the list and is not there.
template <int kDigits, class T, class Order, class Pair>
__device__ __forceinline__ unsigned list_row_again(FlowRow &s, const T *x, uint32_t cols, int words,
                                                   unsigned k, bool all_equal, uint32_t least,
                                                   const Order &order, const Pair &pair,
                                                   uint32_t *tied) {
  unsigned n = 0;
  *tied = 0;
  each_reaching(s, x, cols, words, order, least, [&](const T *elements, uint32_t at) {
    const Least reach(least);
    uint32_t mask = bits_of_taken(elements, at, cols, [&](float value) {
      return order.reaches(value, reach);
    });
    if (least == 0) mask = 0;
    unsigned more;
    unsigned place = n + before_lane(__popc(mask), &more);
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1, ++place) {
      const int j = __ffs(static_cast<int>(mask)) - 1;
      s.found[place] = pair(order.key(static_cast<float>(elements[j])), at * kVectorOf<T> + j);
    }
    n += more;
    __syncwarp();
    if (n >= kFlowListed) n = cut_found<kDigits>(s, n, k, all_equal, &least, tied);
  });
  if (n >= k) *tied = 0;
  return n;
}
#endif

}  // namespace hfp::cuda
