// row_split.cuh: where a row of several tensors starts, with one division for all of them.
//
// Rows of a batch often share a tensor (a scale and a shift per sample), so that a row's number has to be
// divided into the batch's and its own. row_offset does that in 64 bits for any strides, once for each
// tensor: some 45 instructions, which the loads wait for.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

// Row (i0 * n1 + i1) * n2 + i2 of tensor k starts i0 * s0[k] + i1 * s1[k] + i2 * s2[k] vectors behind
// its first row, with one n1 and n2 for all. Rows are below 2^31, all
// their vectors and the offsets below 2^32.
template <int kTensors>
struct RowSplit {
  uint32_t s0[kTensors], s1[kTensors], s2[kTensors];
  uint32_t n1, n2;
  FastDivisor by_n1, by_n2;

  struct Row {
    uint32_t i0, i1, i2;
  };
#ifdef __CUDACC__
  __device__ __forceinline__ Row row(uint32_t number) const {
    const uint32_t outer = by_n2.divide(number), i0 = by_n1.divide(outer);
    return {i0, outer - i0 * n1, number - outer * n2};
  }
  __device__ __forceinline__ uint32_t start(const Row &row, int k) const {
    return row.i0 * s0[k] + row.i1 * s1[k] + row.i2 * s2[k];
  }
#endif
};

inline int64_t row_start(const Rows &r, int64_t row) {
  const int64_t outer = row / r.n2;
  return outer / r.n1 * r.s0 + outer % r.n1 * r.s1 + row % r.n2 * r.s2;
}

// In vectors of n elements; false where 32 bits do not hold it, where a stride is below 0, or where the
// tensors divide the rows in more than two places. A tensor that is absent has strides of 0.
template <int kTensors>
bool split_rows(const Rows (&tensors)[kTensors], int n, RowSplit<kTensors> *split) {
  const int64_t rows = tensors[0].rows, vectors = tensors[0].cols / n;
  if (rows >= int64_t{1} << 31 || rows * vectors >= int64_t{1} << 32) return false;
  int64_t n2 = rows, block = rows;  // of n1 * n2 rows
  for (int k = 0; k < kTensors; ++k) {
    const Rows &r = tensors[k];
    for (const int64_t place : {r.n2, r.n1 * r.n2}) {
      if (place <= 1 || place >= rows || place == n2 || place == block) continue;
      if (block != n2) return false;
      if (n2 == rows) n2 = block = place;
      else if (place < n2) n2 = place;
      else block = place;
    }
  }
  if (block % n2 != 0 || rows % block != 0) return false;
  for (int k = 0; k < kTensors; ++k) {
    const Rows &r = tensors[k];
    const int64_t s2 = n2 > 1 ? row_start(r, 1) : 0, s1 = n2 < rows ? row_start(r, n2) : 0;
    const int64_t s0 = block < rows ? row_start(r, block) : 0;
    if (s0 < 0 || s1 < 0 || s2 < 0) return false;
    if (row_start(r, rows - 1) / n + vectors >= int64_t{1} << 32) return false;
    split->s0[k] = static_cast<uint32_t>(s0 / n);
    split->s1[k] = static_cast<uint32_t>(s1 / n);
    split->s2[k] = static_cast<uint32_t>(s2 / n);
  }
  split->n1 = static_cast<uint32_t>(block / n2);
  split->n2 = static_cast<uint32_t>(n2);
  split->by_n1 = FastDivisor(split->n1);
  split->by_n2 = FastDivisor(split->n2);
  return true;
}

}  // namespace hfp::cuda
