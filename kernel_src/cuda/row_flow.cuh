// row_flow.cuh: the greatest of many wide rows, for topk and sample (sm_90).
//
// A CTA stays on its SM and takes row after row. One thread has them copied to shared memory, some
// 96 KB ahead (cp.async.bulk). Most warps, the readers, keep the greatest value of each piece of a row,
// of two vectors, and go on to the next row. Each of the others, or two of them together, the rankers, do
// all that is left of one row (row_flow_rank.cuh) while others are read.
#pragma once

#include "row_flow_rank.cuh"

namespace hfp::cuda {

// Of a CTA, of kTeam warps each; there is no room for more.
template <class T, int kTeam>
inline constexpr int kMostRankers = sizeof(T) == 4 ? 6 : kTeam == 2 ? 7 : 11;
template <class T>
inline constexpr int kLargeTeam = sizeof(T) == 4 ? 1 : 2;  // warps
inline constexpr int kFlowVectors = 4;           // of a reader at a time
inline constexpr int kStages = 3;                // of so many vectors, on their way
template <class T>
inline constexpr int kFewestRankers = sizeof(T) == 4 ? 4 : 3;  // with fewer the readers wait for them

inline constexpr int kWavePieces = kFlowVectors / kPieceVectors;

struct FlowPlan {
  int rankers, team;  // and warps of each
  int words;          // of pieces, of each reader
  int row_bytes;      // of a FlowRow and its pieces
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

// What is on its way from memory, kReaders * kFlowVectors vectors a stage.
struct Ring {
  static constexpr uint32_t kVectors = kReaders * kFlowVectors;
  static constexpr int kBytes = static_cast<int>(kVectors) * kVectorBytes;
  Mailbox come[kStages], gone[kStages];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One row, by one thread.
template <class T>
__device__ __forceinline__ void feed_row(Ring &ring, unsigned char *stages, RingTurn &stage,
                                         const T *x, uint32_t cols) {
  const uint32_t vectors = cols / kVectorOf<T>;
  for (uint32_t first = 0; first < vectors; first += Ring::kVectors) {
    const uint32_t bytes = min(vectors - first, Ring::kVectors) * kVectorBytes;
    Mailbox &come = ring.come[stage.at];
    ring.gone[stage.at].wait(stage.turn);
    come.announce(static_cast<int>(bytes));
    come.fetch(stages + stage.at * Ring::kBytes, x + first * kVectorOf<T>, bytes);
    stage.next(kStages);
  }
}

// One row, by the readers.
template <class T>
__device__ __forceinline__ void read_row(Ring &ring, const unsigned char *stages, RingTurn &stage,
                                         FlowRow &s, uint32_t cols) {
  constexpr int kInWord = 4 / sizeof(T);
  const uint32_t vectors = cols / kVectorOf<T>;
  uint32_t *word = s.pieces() + threadIdx.x;
  // Of every eight lanes four take the second vector of a piece first: else they share banks.
  const uint32_t one = kPieceVectors * threadIdx.x + (threadIdx.x >> 2 & 1u), other = one ^ 1u;
  Greatest<T> all;
  for (uint32_t first = 0; first < vectors; first += Ring::kVectors) {
    const uint4 *from = reinterpret_cast<const uint4 *>(stages + stage.at * Ring::kBytes);
    Vec<T, kVectorOf<T>> v[kFlowVectors];
    ring.come[stage.at].wait(stage.turn);
#pragma unroll
    for (int u = 0; u < kFlowVectors; ++u) {
      const uint32_t none = kMinusInfinities<T>;
      uint4 words = make_uint4(none, none, none, none);
      const uint32_t at = u / kPieceVectors * kPieceVectors * kReaders + (u % 2 == 0 ? one : other);
      if (first + at < vectors) words = from[at];
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
// The CTA

template <class T, int kTeam>
inline constexpr int kFlowThreads =
    kReaders + 32 * (kTeam * kMostRankers<T, kTeam> + 1);  // and a warp that feeds

// rank(s, row, team, wait) for each of the CTA's rows, by one team, where wait() is until the row has been
// read. Returns when all are done, on all threads.
template <class T, int kTeam, class Params, class Rank>
__device__ __forceinline__ void flow(const Params &p, const void *x, unsigned char *memory,
                                     const Rank &rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Ring ring;
  __shared__ Mailbox full[kMostRankers<T, kTeam>], empty[kMostRankers<T, kTeam>];
  const int rankers = p.plan.rankers;
  if (threadIdx.x < kStages) {
    ring.come[threadIdx.x].init();
    ring.gone[threadIdx.x].init(kReaders / 32);
  }
  if (threadIdx.x < rankers) {
    full[threadIdx.x].init(kReaders / 32);
    empty[threadIdx.x].init(kTeam);
  }
  __syncthreads();
  wait_for_previous();
  const int64_t rows = p.x_rows.rows;
  const uint32_t cols = static_cast<uint32_t>(p.x_rows.cols);
  const bool lane0 = threadIdx.x % 32u == 0;
  const int ranker = (static_cast<int>(threadIdx.x) - kReaders) / (32 * kTeam);
  const auto row_of = [&](int slot) -> FlowRow & {
    return *reinterpret_cast<FlowRow *>(memory + kStages * Ring::kBytes + slot * p.plan.row_bytes);
  };
  if (threadIdx.x < kReaders) {
    RingTurn stage(0), slot(1);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      empty[slot.at].wait(slot.turn);
      read_row<T>(ring, memory, stage, row_of(slot.at), cols);
      __syncwarp();
      if (lane0) full[slot.at].arrive();
      slot.next(rankers);
    }
  } else if (ranker < rankers) {
    uint32_t turn = 0;
    const int64_t step = static_cast<int64_t>(gridDim.x) * rankers;
    const FlowTeam<kTeam> team(ranker);
    for (int64_t row = blockIdx.x + static_cast<int64_t>(gridDim.x) * ranker; row < rows; row += step) {
      rank(row_of(ranker), row, team, [&] { full[ranker].wait(turn); });
      __syncwarp();
      if (lane0) empty[ranker].arrive();
      turn ^= 1;
    }
  } else if (lane0) {
    RingTurn stage(1);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      feed_row(ring, memory, stage, static_cast<const T *>(x) + row_offset(p.x_rows, row), cols);
    }
  }
  __syncthreads();
#endif
}

// ---------------------------------------------------------------------------------------------
// Launching

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
  if (most < kFewestRankers<T>) return false;
  const bool large =
      kLargeTeam<T> > 1 &&
      (most <= kFewRankers || r.rows <= kMostRankers<T, kLargeTeam<T>> * sms ||
       (vectors >= kPairVectors && r.rows >= kPairRows * sms));
  plan.team = large ? kLargeTeam<T> : 1;
  const int64_t can = large ? kMostRankers<T, kLargeTeam<T>> : kMostRankers<T, 1>;
  plan.rankers = static_cast<int>(most < can ? most : can);
  plan.words = static_cast<int>(words);
  plan.row_bytes = static_cast<int>(bytes);
  return true;
}

// kernel, team: of rankers of one warp, and of kLargeTeam.
template <class Params>
int32_t launch_flow(void (*kernel)(Params), void (*team)(Params), Params &p, int device, void *stream,
                    const char *op) {
  const int64_t sms = sm_count(device);
  const int64_t grid = p.x_rows.rows < sms ? p.x_rows.rows : sms;
  return launch(p.plan.team == 1 ? kernel : team, grid,
                kReaders + 32 * (p.plan.team * p.plan.rankers + 1), p, stream, op,
                kStages * Ring::kBytes + p.plan.rankers * p.plan.row_bytes);
}

}  // namespace hfp::cuda
