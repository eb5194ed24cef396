// check_any_shape.h: validation of tensors of any shape, none (0 dimensions) and any strides without gaps
// too: those of lists, and single numbers.
#pragma once

#include "check.h"

namespace hfp {

inline int64_t numel_of(const DLTensor &t) {
  int64_t numel = 1;
  for (int32_t i = 0; i < t.ndim; ++i) numel *= t.shape[i];
  return numel;
}

// Whether every element between the first and the last one belongs to the tensor, once. The
// dimensions are taken from the smallest stride up; there are few of them.
inline bool dense(const DLTensor &t) {
  if (!t.strides) return true;
  int64_t expected = 1;
  for (;;) {
    int64_t next = 0;  // the size of the dimensions whose stride is `expected`
    for (int32_t i = 0; i < t.ndim; ++i) {
      if (t.shape[i] != 1 && t.strides[i] == expected) {
        if (next != 0) return false;
        next = t.shape[i];
      }
    }
    if (next == 0) break;
    expected *= next;
  }
  return expected == numel_of(t);
}

// Tensor i of a list (or, if i < 0, an argument of its own), whatever its shape, as one row of elements
// in the order of memory.
inline bool list_tensor(Check &check, const char *list, int64_t i, const DLTensor *raw,
                        Tensor *tensor) {
  const auto fails = [&](const char *name) {
    if (!raw) return !check.fail("`%s` must be a tensor, got NULL", name);
    if (raw->ndim < 0 || raw->ndim > kMaxDims || (raw->ndim > 0 && !raw->shape)) {
      return !check.fail("`%s` must have a shape of 0 to %d dimensions, got %d", name,
                         kMaxDims, raw->ndim);
    }
    int64_t one = 1;
    DLTensor plain = *raw;
    plain.strides = nullptr;
    if (plain.ndim == 0) {
      plain.ndim = 1;
      plain.shape = &one;
    }
    // A list's are compared by list_overlap.h: a Check has no room for them.
    if (!(i < 0 ? check.input(name, &plain, tensor) : check.parsed(name, &plain, tensor))) {
      return true;
    }
    tensor->raw = raw;
    if (tensor->numel > 0 && !dense(*raw)) {
      return !check.fail("`%s` must have strides without gaps or overlaps, got shape %s; copy it",
                         name, ShapeText(*raw).text);
    }
    return false;
  };
  // The name with the index only when it is needed: formatting costs as much as the check.
  if (!fails(list)) return true;
  if (i < 0) return false;
  char name[64];
  std::snprintf(name, sizeof name, "%s[%lld]", list, static_cast<long long>(i));
  fails(name);
  return false;
}

// One fp32 element on the device of the call, or on the CPU; NULL leaves *scalar as it is.
inline bool scalar(Check &check, const char *function, const char *name, int64_t i, const DLTensor *raw,
                   const Tensor &like, Scalar *scalar, int32_t *status) {
  if (!raw) return true;
  Check on_host(function);
  const bool host = raw->device.device_type == kDLCPU;
  Check &checks = host && like.raw->device.device_type != kDLCPU ? on_host : check;
  Tensor t;
  const bool ok = list_tensor(checks, name, i, raw, &t);
  if (ok && (t.type != DType::F32 || t.numel != 1)) {
    checks.fail("`%s` must be float32 of one element%s, got %s of shape %s", name,
                i < 0 ? "" : " each", name_of(t.type), ShapeText(*raw).text);
  }
  *status = checks.status();
  if (*status != HFP_OK) return false;
  *scalar = Scalar();
  if (host) scalar->value = *reinterpret_cast<const float *>(t.data);
  else scalar->pointer = reinterpret_cast<const float *>(t.data);
  return true;
}

// A result or an input of one fp32 element on the device of the call.
inline bool one_number(Check &check, const char *name, const DLTensor *raw, Tensor *tensor) {
  if (!list_tensor(check, name, -1, raw, tensor)) return false;
  if (tensor->type == DType::F32 && tensor->numel == 1) return true;
  return check.fail("`%s` must be float32 of one element, got %s of shape %s", name,
                    name_of(tensor->type), ShapeText(*raw).text);
}

}  // namespace hfp
