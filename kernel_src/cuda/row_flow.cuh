// row_flow.cuh: the greatest of many wide rows, for topk and sample (sm_90).
//
// A CTA stays on its SM and takes row after row. One thread has them copied to shared memory, some
// 96 KB ahead (cp.async.bulk). Most warps, the readers, keep the greatest value of each piece of a row,
// of two vectors, and go on to the next row. Each of the others, the rankers, does all that is left of
// one row (row_top.cuh says what) while others are read. It waits for nobody, so that there is no
// barrier in it.
//
// What a ranker cannot do, as of many equal values, is left to the end, when the whole CTA does it.
#pragma once

#include "async_copy.cuh"
#include "row_top.cuh"

namespace hfp::cuda {

inline constexpr int kReaders = 512;             // threads
template <class T>
inline constexpr int kMostRankers = sizeof(T) == 4 ? 6 : 11;  // warps; there is no room for more
inline constexpr int kFlowVectors = 4;           // of a reader at a time
inline constexpr int kStages = 3;                // of so many vectors, on their way
inline constexpr int kPieceVectors = 2;          // each kReaders behind the one before
inline constexpr int kFewestRankers = 4;         // with fewer the readers wait for them
inline constexpr unsigned kFlowListed = 256;     // in the list of a row
inline constexpr int64_t kMostFlowWanted = 64;   // k; more would be too many for the list
inline constexpr int64_t kFlowWidth = 1024;      // vectors of a row, the fewest

// In shared memory: a row on its way from the readers to its ranker.
struct FlowRow {
  uint32_t own[kReaders];  // the greatest key of each reader
  uint64_t list[kFlowListed + 2];
  union {  // one after the other
    struct {
      uint64_t ranked[kFlowListed], room[kFlowListed];
    };
    struct {
      uint16_t reaching[kReaders];
      uint32_t again[kFlowListed];
    };
  };
  // Behind it the pieces: words of kReaders each, in the order in which they are read.
  __device__ __forceinline__ uint32_t *pieces() { return reinterpret_cast<uint32_t *>(this + 1); }
};

inline constexpr int kWavePieces = kFlowVectors / kPieceVectors;

struct FlowPlan {
  int rankers;
  int words;      // of pieces, of each reader
  int row_bytes;  // of a FlowRow and its pieces
};

// ---------------------------------------------------------------------------------------------
// Readers

// The greatest of one piece, or of two in a half type, in a word.
template <class T>
__device__ __forceinline__ uint32_t piece_word(const Greatest<T> *piece) {
  if constexpr (sizeof(T) == 4) {
    return piece[0].key;
  } else {
    return Greatest<T>::greater(__byte_perm(piece[0].pair, piece[1].pair, 0x5410),
                                __byte_perm(piece[0].pair, piece[1].pair, 0x7632));
  }
}

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

// What is on its way from memory, kReaders * kFlowVectors vectors a stage.
struct Ring {
  static constexpr uint32_t kVectors = kReaders * kFlowVectors;
  static constexpr int kBytes = static_cast<int>(kVectors) * kVectorBytes;
  Mailbox come[kStages], gone[kStages];
};

// Whose turn it is.
struct Stage {
  int at = 0;
  uint32_t turn;
  __device__ __forceinline__ explicit Stage(uint32_t turn) : turn(turn) {}
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) at = 0, turn ^= 1;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One row, by one thread.
template <class T>
__device__ __forceinline__ void feed_row(Ring &ring, unsigned char *stages, Stage &stage,
                                         const T *x, uint32_t cols) {
  const uint32_t vectors = cols / kVectorOf<T>;
  for (uint32_t first = 0; first < vectors; first += Ring::kVectors) {
    const uint32_t bytes = min(vectors - first, Ring::kVectors) * kVectorBytes;
    Mailbox &come = ring.come[stage.at];
    ring.gone[stage.at].wait(stage.turn);
    come.announce(static_cast<int>(bytes));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(stages + stage.at * Ring::kBytes)),
        "l"(x + first * kVectorOf<T>), "r"(bytes), "r"(shared_address(&come.barrier))
        : "memory");
    stage.next(kStages);
  }
}

// One row, by the readers.
template <class T>
__device__ __forceinline__ void read_row(Ring &ring, const unsigned char *stages, Stage &stage,
                                         FlowRow &s, uint32_t cols) {
  constexpr int kInWord = 4 / sizeof(T);
  const uint32_t vectors = cols / kVectorOf<T>;
  uint32_t *word = s.pieces() + threadIdx.x;
  Greatest<T> all;
  for (uint32_t first = 0; first < vectors; first += Ring::kVectors) {
    const uint4 *from =
        reinterpret_cast<const uint4 *>(stages + stage.at * Ring::kBytes) + threadIdx.x;
    Vec<T, kVectorOf<T>> v[kFlowVectors];
    ring.come[stage.at].wait(stage.turn);
#pragma unroll
    for (int u = 0; u < kFlowVectors; ++u) {
      const uint32_t none = kMinusInfinities<T>;
      uint4 words = make_uint4(none, none, none, none);
      if (first + u * kReaders + threadIdx.x < vectors) words = from[u * kReaders];
      v[u].word[0] = words.x, v[u].word[1] = words.y;
      v[u].word[2] = words.z, v[u].word[3] = words.w;
    }
    __syncwarp();
    if (threadIdx.x % 32u == 0) ring.gone[stage.at].arrive();
    stage.next(kStages);
    Greatest<T> piece[kWavePieces];
#pragma unroll
    for (int u = 0; u < kFlowVectors; ++u) piece[u / kPieceVectors].add(v[u]);
#pragma unroll
    for (int j = 0; j < kWavePieces; j += kInWord) {
      *word = piece_word<T>(piece + j);
      word += kReaders;
#pragma unroll
      for (int i = 0; i < kInWord; ++i) all.add(piece[j + i]);
    }
  }
  s.own[threadIdx.x] = key_of(Greatest<T>::value(all.stored()));
}
#endif

// ---------------------------------------------------------------------------------------------
// Rankers

// put(place, bit) for each bit of the lanes' masks, at places one after the other from `first` on.
// Returns the place behind them.
template <class Put>
__device__ __forceinline__ unsigned append(unsigned first, uint32_t mask, const Put &put) {
  const unsigned lane = threadIdx.x % 32u, own = __popc(mask);
  unsigned upto = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, upto, by);
    if (lane >= by) upto += other;
  }
  for (unsigned place = first + upto - own; mask != 0; mask &= mask - 1, ++place) {
    put(place, __ffs(static_cast<int>(mask)) - 1);
  }
  return first + __shfl_sync(~0u, upto, 31);
}

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

// By one warp: pair(key, col) of all whose key is at least `least`, in any order, in s.list. Returns
// how many, which may be more than there is room for. order.key(value) is the key, order.of(key_of)
// the same.
template <class T, class Order, class Pair>
__device__ __forceinline__ unsigned list_row(FlowRow &s, const T *x, uint32_t cols, int words,
                                             uint32_t least, const Order &order, const Pair &pair) {
  constexpr int N = kVectorOf<T>, kInWord = 4 / sizeof(T);
  const uint32_t vectors = cols / N;
  const unsigned lane = threadIdx.x % 32u;
  // Readers
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = reinterpret_cast<const uint4 *>(s.own)[32 * i + lane];
    mask |= static_cast<uint32_t>(order.of(v.x) >= least) << 4 * i;
    mask |= static_cast<uint32_t>(order.of(v.y) >= least) << (4 * i + 1);
    mask |= static_cast<uint32_t>(order.of(v.z) >= least) << (4 * i + 2);
    mask |= static_cast<uint32_t>(order.of(v.w) >= least) << (4 * i + 3);
  }
  const unsigned readers = append(0, mask, [&](unsigned place, int bit) {
    s.reaching[place] = static_cast<uint16_t>(bit / 4 * 128 + lane * 4 + bit % 4);
  });
  __syncwarp();
  // Pieces of theirs, of two readers for each lane at a time
  const Least reach(least);
  unsigned pieces = 0;
  for (unsigned i = lane; i - lane < readers; i += 64) {
    constexpr int kWords = 8;  // at a time
    const uint32_t reader[2] = {i < readers ? s.reaching[i] : 0u,
                                i + 32 < readers ? s.reaching[i + 32] : 0u};
    for (int first = 0; first < words; first += kWords) {
      mask = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (i + 32 * r >= readers) continue;
        const uint32_t *const word = s.pieces() + first * kReaders + reader[r];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if (first + w >= words) continue;
          const uint32_t both = word[w * kReaders];
#pragma unroll
          for (int j = 0; j < kInWord; ++j) {
            const bool has = order.reaches(piece_of<T>(both, j), reach);
            mask |= static_cast<uint32_t>(has) << ((r * kWords + w) * kInWord + j);
          }
        }
      }
      pieces = append(pieces, mask, [&](unsigned place, int bit) {
        const int of_reader = kWords * kInWord;
        const uint32_t piece = first * kInWord + bit % of_reader;
        if (place < kFlowListed) {
          s.again[place] = piece * kPieceVectors * kReaders + reader[0] +
                           (bit < of_reader ? 0u : reader[1] - reader[0]);
        }
      });
    }
  }
  if (pieces > kFlowListed) return kFlowListed + 1;
  __syncwarp();
  // Their elements
  constexpr int kVectors = 4;  // of a lane at a time
  unsigned n = 0;
  for (unsigned first = 0; first < pieces * kPieceVectors; first += 32 * kVectors) {
    Vec<T, N> v[kVectors];
    uint32_t at[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const unsigned i = first + 32 * u + lane;
      at[u] = vectors;
      if (i < pieces * kPieceVectors) {
        at[u] = s.again[i / kPieceVectors] + i % kPieceVectors * kReaders;
      }
      if (at[u] < vectors) v[u].template load<Cache::kStream>(x + at[u] * N);
    }
    mask = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (at[u] >= vectors) continue;
      float value[N];
      v[u].get(value);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        mask |= static_cast<uint32_t>(order.reaches(value[j], reach)) << (u * N + j);
      }
    }
    n = append(n, mask, [&](unsigned place, int bit) {
      const int u = bit / N, j = bit % N, w = j * static_cast<int>(sizeof(T)) / 4;
      uint32_t word = 0, col = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t of_vector = w < 2 ? (w == 0 ? v[i].word[0] : v[i].word[1])
                                         : (w == 2 ? v[i].word[2] : v[i].word[3]);
        word = u == i ? of_vector : word;
        col = u == i ? at[i] * N + j : col;
      }
      float value;
      if constexpr (sizeof(T) == 4) {
        value = __uint_as_float(word);
      } else {
        const float2 two = unpack<T>(word);
        value = j % 2 == 0 ? two.x : two.y;
      }
      if (place < kFlowListed) s.list[place] = pair(order.key(value), col);
    });
  }
  return n;
}

// By one warp: s.ranked becomes the n that are listed, descending.
__device__ __forceinline__ void rank_list(FlowRow &s, unsigned n) {
  const unsigned lane = threadIdx.x % 32u;
  __syncwarp();
  if (lane == 0) s.list[n] = 0;  // compared in twos
  __syncwarp();
  const ulonglong2 *const twos = reinterpret_cast<const ulonglong2 *>(s.list);
  for (unsigned first = 0; first < n; first += 64) {
    const unsigned i = first + lane;
    const uint64_t a = i < n ? s.list[i] : 0, b = i + 32 < n ? s.list[i + 32] : 0;
    unsigned above_a = 0, above_b = 0;
#pragma unroll 4
    for (unsigned j = 0; j < (n + 1) / 2; ++j) {
      const ulonglong2 two = twos[j];
      above_a += two.x > a, above_b += two.x > b;
      above_a += two.y > a, above_b += two.y > b;
    }
    if (i < n) s.ranked[above_a] = a;
    if (i + 32 < n) s.ranked[above_b] = b;
  }
  __syncwarp();
}

// ---------------------------------------------------------------------------------------------
// The CTA

template <class T>
inline constexpr int kFlowThreads = kReaders + 32 * (kMostRankers<T> + 1);  // and a warp that feeds

// rank(s, row, wait) for each of the CTA's rows, by one warp, where wait() is until the row has been
// read. Returns when all are done, on all threads.
template <class T, class Params, class Rank>
__device__ __forceinline__ void flow(const Params &p, const void *x, unsigned char *memory,
                                     const Rank &rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Ring ring;
  __shared__ Mailbox full[kMostRankers<T>], empty[kMostRankers<T>];
  const int rankers = p.plan.rankers;
  if (threadIdx.x < kStages) {
    ring.come[threadIdx.x].init();
    ring.gone[threadIdx.x].init(kReaders / 32);
  }
  if (threadIdx.x < rankers) {
    full[threadIdx.x].init(kReaders / 32);
    empty[threadIdx.x].init();
  }
  __syncthreads();
  wait_for_previous();
  const int64_t rows = p.x_rows.rows;
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const bool lane0 = threadIdx.x % 32u == 0;
  const int warp = static_cast<int>(threadIdx.x) / 32 - kReaders / 32;
  const auto row_of = [&](int slot) -> FlowRow & {
    return *reinterpret_cast<FlowRow *>(memory + kStages * Ring::kBytes + slot * p.plan.row_bytes);
  };
  if (warp < 0) {
    Stage stage(0), slot(1);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      empty[slot.at].wait(slot.turn);
      read_row<T>(ring, memory, stage, row_of(slot.at), cols);
      __syncwarp();
      if (lane0) full[slot.at].arrive();
      slot.next(rankers);
    }
  } else if (warp < rankers) {
    uint32_t turn = 0;
    const int64_t step = static_cast<int64_t>(gridDim.x) * rankers;
    for (int64_t row = blockIdx.x + static_cast<int64_t>(gridDim.x) * warp; row < rows; row += step) {
      rank(row_of(warp), row, [&] { full[warp].wait(turn); });
      __syncwarp();
      if (lane0) empty[warp].arrive();
      turn ^= 1;
    }
  } else if (lane0) {
    Stage stage(1);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      feed_row(ring, memory, stage, static_cast<const T *>(x) + row_offset(p.x_rows, row), cols);
    }
  }
  __syncthreads();
#endif
}

// ---------------------------------------------------------------------------------------------
// Launching

inline int sm_count(int device) {
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return sms;
}

// Whether rows are long enough, and so many that all SMs have about as many of them; and there has to
// be room for some at a time.
template <class T>
bool plan_flow(const Rows &r, int device, FlowPlan &plan) {
  constexpr int64_t element_bytes = sizeof(T);
  constexpr int kDeclared = 1 << 10;  // at most, of shared memory
  const int64_t vectors = r.cols * element_bytes / kVectorBytes;
  const int64_t sms = sm_count(device);
  if (vectors < kFlowWidth || sms == 0 || r.rows <= 2 * sms ||
      r.rows * 8 < (r.rows + sms - 1) / sms * sms * 7) {
    return false;
  }
  const int64_t waves = (vectors + Ring::kVectors - 1) / Ring::kVectors;
  const int64_t words = waves * kWavePieces * element_bytes / 4;
  const int64_t bytes = static_cast<int64_t>(sizeof(FlowRow)) + words * kReaders * 4;
  const int64_t most = (shared_memory_limit() - kDeclared - kStages * Ring::kBytes) / bytes;
  if (most < kFewestRankers) return false;
  plan.rankers = static_cast<int>(most < kMostRankers<T> ? most : kMostRankers<T>);
  plan.words = static_cast<int>(words);
  plan.row_bytes = static_cast<int>(bytes);
  return true;
}

template <class Params>
int32_t launch_flow(void (*kernel)(Params), Params &p, int device, void *stream, const char *op) {
  const int64_t sms = sm_count(device);
  const int64_t grid = p.x_rows.rows < sms ? p.x_rows.rows : sms;
  return launch(kernel, grid, kReaders + 32 * (p.plan.rankers + 1), p, stream, op,
                kStages * Ring::kBytes + p.plan.rankers * p.plan.row_bytes);
}

}  // namespace hfp::cuda
