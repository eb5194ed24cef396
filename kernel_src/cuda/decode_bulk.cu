// decode_bulk.cu: launches the kernels of decode_bulk.cuh.
#include "decode_bulk.cuh"

namespace hfp::cuda::decode {

namespace {

// Of shared memory, beside the ring.
int bytes_beside(const Product &p) {
  const int sums = kWarps * p.rows * kRowSums * 4, squares = kBulkRows * kWarps * 4;
  return p.rows * staged_row_bytes(p.columns) + sum_buffers(p.rows) * sums + squares;
}

constexpr int kMailboxes = 256;
constexpr int kFewestWhole = 8, kFewestShared = 3;
// Of kMoreRegisters, by which two of these do not fit on a multiprocessor, and one beside kMoreMemory does.
constexpr int kIdleThreads = 128;
constexpr int kAllRegisters = 64 << 10, kMore = (bulk_threads(2) + kIdleThreads) * kSharedRegisters;
static_assert(2 * kMore > kAllRegisters && kMore + bulk_threads(2) * kSharedRegisters <= kAllRegisters);

// Of shared memory, what a CTA may have beside what the driver takes.
int shared_bytes(const Device &device, Share share) {
  constexpr int kBeyondHalf = 4 << 10;
  const int all = device.shared_limit + kReservedShared, more = all / 2 + kBeyondHalf;
  if (share == Share::kWhole) return device.shared_limit;
  return (share == Share::kMoreMemory ? more : all - more) - kReservedShared;
}

int slots_beside(const Product &p, const Device &device, Share share) {
  const int slots = (shared_bytes(device, share) - kMailboxes - bytes_beside(p)) / kSlotBytes;
  return slots < kMostSlots ? slots : kMostSlots;
}

template <class T, bool kPairs>
int32_t launch_rows(const Product &p, const Device &device, void *stream) {
  const int units = ((kPairs ? p.end[0] : p.end[2]) + kUnit - 1) / kUnit;
  const dim3 grid(static_cast<unsigned>(units < device.processors ? units : device.processors));
  const bool shared =
      p.share != Share::kWhole && (!kPairs || p.rows <= kFewRows) && slots_beside(p, device, p.share) >= kFewestShared;
  const Share share = shared ? p.share : Share::kWhole;
  Bulk b{p, slots_beside(p, device, share)};
  const int bytes = share == Share::kMoreMemory ? shared_bytes(device, share) - kMailboxes
                                                : b.slots * kSlotBytes + bytes_beside(p);
  if (shared) {
    const int threads = bulk_threads(2) + (share == Share::kMoreRegisters ? kIdleThreads : 0);
    if (p.rows == 1) return launch_step(&decode_bulk_kernel<T, kPairs, 1, 2>, grid, threads, bytes, b, stream);
    if (p.rows <= kFewRows) {
      return launch_step(&decode_bulk_kernel<T, kPairs, kFewRows, 2>, grid, threads, bytes, b, stream);
    }
    if constexpr (!kPairs) {
      return launch_step(&decode_bulk_kernel<T, kPairs, kBulkRows, 2>, grid, threads, bytes, b, stream);
    }
  }
  const auto kernel =
      p.rows == 1 ? &decode_bulk_kernel<T, kPairs, 1, 1> : &decode_bulk_kernel<T, kPairs, kBulkRows, 1>;
  return launch_step(kernel, grid, bulk_threads(1), bytes, b, stream);
}

template <class T>
int32_t launch_for(const Product &p, bool pairs, const Device &device, void *stream) {
  return pairs ? launch_rows<T, true>(p, device, stream) : launch_rows<T, false>(p, device, stream);
}

}  // namespace

bool bulk_copies_supported() {
  return early_start_supported(reinterpret_cast<const void *>(&decode_bulk_kernel<__half, false, 1, 1>));
}

bool takes_bulk(const Product &p, const Device &device) {
  return device.bulk_copies && p.rows <= kBulkRows && p.columns <= kMostSlabs * kSlab &&
         slots_beside(p, device, Share::kWhole) >= kFewestWhole;
}

int32_t run_bulk(DType type, Product p, bool pairs, const Device &device, void *stream) {
  return type == DType::BF16 ? launch_for<__nv_bfloat16>(p, pairs, device, stream)
                             : launch_for<__half>(p, pairs, device, stream);
}

}  // namespace hfp::cuda::decode
