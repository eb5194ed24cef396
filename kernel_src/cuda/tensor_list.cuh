// tensor_list.cuh: one launch over many tensors.
//
// The tensors are described by a table in the kernel's parameters: nothing has to be allocated or
// copied to the device, and a captured graph keeps the table. Each tensor is cut into chunks, and a
// CTA takes one chunk. A table has two or three sizes, since every launch hands over all of it: up to
// 4 KB, and up to 32 KB where the toolkit lets kernels have as much.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

inline constexpr int kListThreads = 256;

// The last of `count` tensors whose first chunk is not after `chunk`: tensors without chunks are not
// in tables. first(i): the first chunk of tensor i.
template <class First>
__device__ __forceinline__ int search_tensor(int count, uint32_t chunk, const First &first) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first(middle) <= chunk) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The same for a Table that has all of a tensor together, in entry[kCapacity]. Where all of them have
// as many of the grid's `chunks`, the first guess is right; else a search is up to ten loads in turn.
template <class Table>
__device__ __forceinline__ int find_entry(const Table &table, uint32_t chunk, uint32_t chunks) {
  const int last = table.count - 1;
  int guess = static_cast<int>(
      __fdividef((static_cast<float>(chunk) + 0.5f) * static_cast<float>(table.count),
                 static_cast<float>(chunks)));
  guess = guess < last ? guess : last;
  if (table.entry[guess].first <= chunk &&
      (guess == last || table.entry[guess + 1].first > chunk)) {
    return guess;
  }
  return search_tensor(table.count, chunk, [&table](int i) { return table.entry[i].first; });
}

// Fills tables with the tensors [0, count) of `source`, and launches one after the other:
//   source.chunks(i)                 of tensor i; may be 0
//   source.put(table, at, i, first)  describes tensor i in place `at`; its first chunk of the launch
//   source.launch(table, grid)
// A Table has kCapacity and count.
template <class Table, class Source>
int32_t launch_tables(const Source &source, int64_t count, Table &table) {
  table.count = 0;
  int64_t grid = 0;
  for (int64_t i = 0; i <= count; ++i) {
    const int64_t chunks = i < count ? source.chunks(i) : 0;
    const bool full = table.count == Table::kCapacity || grid + chunks > kMaxGrid;
    if (table.count > 0 && (i == count || full)) {
      const int32_t status = source.launch(table, grid);
      if (status != HFP_OK) return status;
      table.count = 0;
      grid = 0;
    }
    if (chunks == 0) continue;
    source.put(table, table.count, i, static_cast<uint32_t>(grid));
    ++table.count;
    grid += chunks;
  }
  return HFP_OK;
}

#if CUDART_VERSION >= 12010
inline constexpr int kLargeTable = 32000;  // bytes; a kernel has 32764
#else
inline constexpr int kLargeTable = 4000;  // 4096
#endif
inline constexpr int kSmallTable = 4000;
// For some 270 tensors: what a launch hands over takes the GPU time before the first thread runs.
inline constexpr int kMiddleTable = kLargeTable < 17400 ? kLargeTable : 17400;

}  // namespace hfp::cuda
