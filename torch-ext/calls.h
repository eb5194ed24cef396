// calls.h: what a call from torch needs, whichever way it comes in: layouts, the device's stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "hfpatch.h"

#if defined(CUDA_KERNEL)
// The shim declares it for builds of torch with USE_CUDA only; the library exports it in all.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);
#endif

namespace hfp_torch {

constexpr int kMaxDims = 64;  // at::TensorIterator's own limit

// A shim call failed: libtorch has written its own message to the log.
[[noreturn, gnu::noinline]] inline void fail(const char *operation, const char *call) {
  throw std::runtime_error(std::string("hfpatch: `") + operation + "`: torch refused `" + call +
                           "`");
}

#define HFP_SHIM(operation, call)                                       \
  do {                                                                  \
    if (__builtin_expect((call) != AOTI_TORCH_SUCCESS, 0)) fail(operation, #call); \
  } while (0)

// A tensor handle that this call owns and deletes.
class Handle {
 public:
  Handle() = default;
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;
  ~Handle() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  void take(AtenTensorHandle handle) { handle_ = handle; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Whether the kernels can walk it: unit last stride, and few enough outer dimensions after merging
// those that are evenly spaced.
inline bool walkable(const DLTensor &t) {
  if (t.ndim == 0) return true;
  int64_t i = t.ndim - 1;
  if (t.strides[i] != 1) return false;
  int groups = 0;
  int64_t expected = -1;
  for (--i; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    if (t.strides[i] != expected && ++groups > HFP_MAX_OUTER_DIMS) return false;
    expected = t.strides[i] * t.shape[i];
  }
  return true;
}

// Contiguous strides, as torch computes them (a dimension of size 0 counts as 1).
inline void contiguous_strides(int32_t ndim, const int64_t *shape, int64_t *strides) {
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i] > 1 ? shape[i] : 1;
  }
}

inline void check_dims(const char *operation, int32_t ndim) {
  if (__builtin_expect(ndim > kMaxDims, 0)) {
    throw std::runtime_error(std::string("hfpatch: `") + operation +
                             "`: expected at most 64 dimensions, got " + std::to_string(ndim));
  }
}

// Shape [N, groups, 1 + parts, 2] of a group norm's statistics; a call that the C function refuses
// gets any shape. Returns the number of dimensions.
inline int32_t group_statistics(const DLTensor &x, int64_t groups, bool channels_last,
                                int64_t *shape) {
  const bool valid = x.ndim == 3;
  const int64_t channels = valid ? x.shape[channels_last ? 2 : 1] : 0;
  // No channels are divided by any number of groups.
  const int64_t count = groups > 0 && (groups <= channels || channels == 0) ? groups : 0;
  shape[0] = valid ? x.shape[0] : 0;
  shape[1] = count;
  shape[2] = 1 + (valid ? hfp_group_parts(channels, x.shape[channels_last ? 1 : 2], count,
                                          channels_last ? 1 : 0)
                        : 1);
  shape[3] = 2;
  return 4;
}

// Makes the tensors' device current for the launch, if it is not, and finds torch's stream there.
class Launch {
 public:
  Launch(const char *operation, const DLTensor &first) {
#if defined(CUDA_KERNEL)
    if (first.device.device_type != kDLCUDA) return;
    const int32_t device = first.device.device_id;
    int32_t current = -1;
    HFP_SHIM(operation, aoti_torch_get_current_device_index(&current));
    if (current != device) HFP_SHIM(operation, aoti_torch_create_device_guard(device, &guard_));
    const AOTITorchError status = aoti_torch_get_current_cuda_stream(device, &stream);
    if (status != AOTI_TORCH_SUCCESS) {
      release();
      fail(operation, "aoti_torch_get_current_cuda_stream");
    }
#else
    (void)operation, (void)first;
#endif
  }
  Launch(const Launch &) = delete;
  Launch &operator=(const Launch &) = delete;
  ~Launch() { release(); }

  void *stream = nullptr;

 private:
  void release() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(std::exchange(guard_, nullptr));
  }
  DeviceGuardHandle guard_ = nullptr;
};

}  // namespace hfp_torch
