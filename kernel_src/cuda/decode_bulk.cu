// decode_bulk.cu: launches the kernels of decode_bulk.cuh.
#include "decode_bulk.cuh"

namespace hfp::cuda::decode {

namespace {

// Of shared memory, beside the ring.
int bytes_beside(const Product &p) {
  const int sums = kWarps * p.rows * kRound * kUnit * 4, squares = kBulkRows * kWarps * 4;
  return p.rows * staged_row_bytes(p.columns) + sum_buffers(p.rows) * sums + squares;
}

int slots_beside(const Product &p, const Device &device) {
  constexpr int kMailboxes = 256;
  const int slots = (device.shared_limit - kMailboxes - bytes_beside(p)) / kSlotBytes;
  return slots < kMostSlots ? slots : kMostSlots;
}

template <class T, bool kPairs>
int32_t launch_rows(Bulk &b, const Device &device, void *stream) {
  const int units = ((kPairs ? b.p.end[0] : b.p.end[2]) + kUnit - 1) / kUnit;
  const int grid = units < device.processors ? units : device.processors;
  const auto kernel = b.p.rows == 1 ? &decode_bulk_kernel<T, kPairs, true> : &decode_bulk_kernel<T, kPairs, false>;
  return launch_step(kernel, dim3(static_cast<unsigned>(grid)), kBulkThreads,
                     b.slots * kSlotBytes + bytes_beside(b.p), b, stream);
}

template <class T>
int32_t launch_for(Bulk &b, bool pairs, const Device &device, void *stream) {
  return pairs ? launch_rows<T, true>(b, device, stream) : launch_rows<T, false>(b, device, stream);
}

}  // namespace

bool bulk_copies_supported() {
  return early_start_supported(reinterpret_cast<const void *>(&decode_bulk_kernel<__half, false, true>));
}

bool takes_bulk(const Product &p, const Device &device) {
  return device.bulk_copies && p.rows <= kBulkRows && p.columns <= kMostSlabs * kSlab &&
         slots_beside(p, device) >= kFewestSlots;
}

int32_t run_bulk(DType type, Product p, bool pairs, const Device &device, void *stream) {
  Bulk b{p, slots_beside(p, device)};
  return type == DType::BF16 ? launch_for<__nv_bfloat16>(b, pairs, device, stream)
                             : launch_for<__half>(b, pairs, device, stream);
}

}  // namespace hfp::cuda::decode
