// tensor_list.cuh: one launch over many tensors.
//
// The tensors are described by a table in the kernel's parameters: nothing has to be allocated or
// copied to the device, and a captured graph keeps the table. Each tensor is cut into chunks, and a
// CTA takes one chunk. A table has two sizes, since every launch hands over all of it: up to 4 KB,
// and up to 32 KB where the toolkit lets kernels have as much.
#pragma once

#include "common.cuh"

namespace hfp::cuda {

inline constexpr int kListThreads = 256;

// A Table has kCapacity, first[kCapacity] (the first chunk of each tensor, in this launch), count.
// The last tensor whose first chunk is not after `chunk`: tensors without chunks are not in tables.
template <class Table>
__device__ __forceinline__ int find_tensor(const Table &table, uint32_t chunk) {
  // Where every tensor up to here has one chunk, it is that one: a search is eight loads in turn.
  if (chunk < static_cast<uint32_t>(table.count) && table.first[chunk] == chunk) {
    return static_cast<int>(chunk);
  }
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first[middle] <= chunk) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Fills tables with the tensors [0, count) of `source`, and launches one after the other:
//   source.chunks(i)          of tensor i; may be 0
//   source.put(table, at, i)  describes tensor i in place `at`
//   source.launch(table, grid)
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
    table.first[table.count] = static_cast<uint32_t>(grid);
    source.put(table, table.count, i);
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

}  // namespace hfp::cuda
