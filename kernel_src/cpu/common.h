// common.h: what the CPU kernels share that does not depend on the instruction set: the choice of
// the instruction set, threads, and walking rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace hfp {
namespace cpu {

enum class Simd : int32_t { Baseline = 0, Avx2 = 1, Avx512 = 2 };

// What this CPU has, lowered by the environment variable HFPATCH_SIMD; decided once.
Simd simd();

// The function of that name compiled for the instruction set in use (see foreach_simd.h).
#if defined(__x86_64__)
#define HFP_FOR_SIMD(function)                                                                     \
  (simd() == Simd::Avx512 ? avx512::function                                                       \
   : simd() == Simd::Avx2 ? avx2::function                                                         \
                          : baseline::function)
#else
#define HFP_FOR_SIMD(function) (baseline::function)
#endif

// A thread gets at least this many elements: about 10 us of work. Waking a thread costs a few.
constexpr int64_t kGrainElements = 32768;

// Whether a call that moves so many bytes writes its result, which is no input, past the caches: a
// plain store reads what it overwrites, a third of what softmax moves and a quarter of its
// gradient's. The result is not in the caches for the next call then, which costs less than was
// saved unless all of this call was in a cache of 32 MB. Not to memory that malloc has just got: at
// the first store the system clears each page, and leaves that in the caches.
bool streams(int64_t moved, const void *out, int64_t out_bytes);

// fn(args, begin, end) over [0, units), split among OpenMP's threads at multiples of `align`, at
// least `grain` units each. The pragma stands here, outside of the multiversioned functions: a
// body that OpenMP outlines need not inherit their target. Inside a parallel region of the caller
// the call stays on its thread.
template <class Args>
void parallel(void (*fn)(const Args &, int64_t, int64_t), const Args &args, int64_t units,
              int64_t grain, int64_t align) {
#if defined(_OPENMP)
  int64_t threads = units / (grain < 1 ? 1 : grain);
  if (threads > 1 && !omp_in_parallel()) {
    const int64_t most = omp_get_max_threads();
    if (threads > most) threads = most;
  } else {
    threads = 1;
  }
  if (threads > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      // The team may be smaller than asked for, so its real size decides the split.
      const int64_t team = omp_get_num_threads();
      int64_t share = (units + team - 1) / team;
      share = (share + align - 1) / align * align;
      const int64_t begin = share * omp_get_thread_num();
      const int64_t end = begin + share < units ? begin + share : units;
      if (begin < end) fn(args, begin, end);
    }
    return;
  }
#else
  (void)grain, (void)align;
#endif
  fn(args, 0, units);
}

inline int64_t rows_grain(int64_t cols) {
  return cols >= kGrainElements ? 1 : kGrainElements / cols;
}

// Into how many parts a sum over `rows` is split, at most `most`. Each part's sums are written and
// read again: with 16 rows to a part that is little next to the rows themselves. How many threads
// there are must not matter: another split rounds differently.
constexpr int64_t kPartRows = 16;
inline int64_t summed_parts(int64_t rows, int64_t rows_of_part, int64_t most) {
  const int64_t parts = rows < rows_of_part ? 1 : rows / rows_of_part;
  return parts < most ? parts : most;
}

// Walks the element offsets of consecutive rows without a division per row.
class RowCursor {
 public:
  RowCursor(const Rows &rows, int64_t row) : rows_(rows) { move_to(row); }

  void move_to(int64_t row) {
    const int64_t outer = row / rows_.n2;
    i2_ = row - outer * rows_.n2;
    const int64_t i0 = outer / rows_.n1;
    i1_ = outer - i0 * rows_.n1;
    base0_ = i0 * rows_.s0;
    offset_ = base0_ + i1_ * rows_.s1 + i2_ * rows_.s2;
  }

  int64_t offset() const { return offset_; }

  void next() {
    offset_ += rows_.s2;
    if (++i2_ < rows_.n2) return;
    i2_ = 0;
    if (++i1_ == rows_.n1) {
      i1_ = 0;
      base0_ += rows_.s0;
    }
    offset_ = base0_ + i1_ * rows_.s1;
  }

 private:
  const Rows &rows_;
  int64_t i1_, i2_, base0_, offset_;
};

inline const char *at(const void *data, int64_t element, DType type) {
  return static_cast<const char *>(data) + element * size_of(type);
}
inline char *at(void *data, int64_t element, DType type) {
  return static_cast<char *>(data) + element * size_of(type);
}

}  // namespace cpu
}  // namespace hfp
