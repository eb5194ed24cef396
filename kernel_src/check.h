// check.h: validation of one call, shared by every function of api.cpp.
//
// Check parses each tensor argument once. The first failure stores the message of hfp_last_error()
// and every later step answers false, so a function reads as one chain of steps.
#pragma once

#include <cfloat>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "overlap.h"
#include "pointers.h"

namespace hfp {

constexpr int32_t kMaxDims = 64;
constexpr std::size_t kMessageSize = 1024;

// A validated tensor argument; present == false for an optional one that is NULL.
struct Tensor {
  const char *name = nullptr;
  const DLTensor *raw = nullptr;
  bool present = false, contiguous = false;
  char *data = nullptr;
  DType type = DType::F32;
  int64_t numel = 0;
  Rows rows;  // over all dimensions but the last

  int64_t last() const { return rows.cols; }
};

inline Input input_of(const Tensor &t) { return {t.data, t.type, t.rows}; }

// A vector of the columns of `like`, which all of its rows read.
inline Input column_vector(const Tensor &t, const Tensor &like) {
  Rows rows;
  rows.rows = rows.n2 = like.rows.rows;
  rows.cols = like.rows.cols;
  return {t.data, t.type, rows};
}

class Check {
 public:
  explicit Check(const char *function) : function_(function) {}

  // A required input of any shape with at least one dimension. The first one sets the device.
  // `replaced_by` names the only result that may be the same view; kAny: every one; nullptr: none.
  // An array: the same address in every source, which a literal need not have.
  static constexpr char kAny[] = "";
  bool input(const char *name, const DLTensor *raw, Tensor *tensor, const char *replaced_by = kAny);
  // A tensor of which nothing is known yet; `writes` for a result.
  bool parsed(const char *name, const DLTensor *raw, Tensor *tensor) {
    return parse(name, raw, tensor);
  }
  // An optional [size] input; `like` names the tensor whose last dimension that is.
  bool param(const char *name, const DLTensor *raw, const Tensor &like, Tensor *tensor);
  // An input that applies to every row of `like`: see "modulation tensor" in hfpatch.h. Its `rows`
  // are those of `like`, with stride 0 where it is broadcast.
  bool modulation(const char *name, const DLTensor *raw, const Tensor &like, Tensor *tensor);
  // The rows of `tensor`, each cut into groups of `size` columns, which divides them.
  bool groups(const Tensor &tensor, int64_t size, Rows *rows);
  // Both present: the same dtype, the same shape.
  bool same_type(const Tensor &a, const Tensor &b);
  bool same_shape(const Tensor &a, const Tensor &b);
  // The contiguous result: the shape of `like`, its last dimension divided by `divisor`.
  bool output(DLTensor *raw, const Tensor &like, int64_t divisor, DType type, Tensor *tensor,
              const char *name = "out");

  // The same for results (not const) and inputs of other names and shapes.
  bool shaped(const char *name, DLTensor *raw, int32_t ndim, const int64_t *shape, DType type,
              Tensor *tensor);
  bool shaped(const char *name, const DLTensor *raw, int32_t ndim, const int64_t *shape, DType type,
              Tensor *tensor);
  // Notes that the call writes to `tensor`; `output`, `shaped` and `indices_apart` do it themselves.
  bool writes(const Tensor &tensor);
  // Notes that it reads a contiguous tensor of bytes, which has no `Tensor`.
  void reads_bytes(const char *name, const void *data, int64_t count);
  // A required contiguous int64 tensor of that shape; returns its elements in `data`. A result may
  // lie where an input does, which is read first.
  bool indices(const char *name, const DLTensor *raw, int32_t ndim, const int64_t *shape,
               Tensor *tensor);
  // The same for a result that must lie apart from all else.
  bool indices_apart(const char *name, const DLTensor *raw, int32_t ndim, const int64_t *shape,
                     Tensor *tensor);

  bool in_range(const char *name, int64_t value, int64_t count, const char *choices);
  // Finite, also as a float, and at least `low`.
  bool number(const char *name, double value, double low, const char *expected);
  // That the memory is the device's, if HFPATCH_CHECK_POINTERS is 1. `input`, `parsed`, `shaped` and
  // `indices` do it themselves.
  bool pointer(const char *name, const void *data, const DLDevice &device);

  bool fail(const char *format, ...) __attribute__((format(printf, 2, 3)));
  // Returns the status.
  int32_t out_of_memory(int64_t bytes) {
    return status_ = set_error(HFP_OUT_OF_MEMORY,
                               "%s: needs %lld bytes of the host's memory, got none; free some",
                               function_, static_cast<long long>(bytes));
  }

  // No result overlaps another tensor, except for the same view where that is allowed. `run` asks
  // itself; who looks at values first asks before.
  bool disjoint();

  // The end of every function: does nothing for an empty result, else calls the backend.
  // cuda may be nullptr.
  template <class Args, class Cuda>
  int32_t run(const Tensor &out, const Args &args, int32_t (*cpu)(const Args &), Cuda cuda,
              void *stream) {
    if (out.numel == 0) return HFP_OK;
    if (!disjoint()) return status_;
    if (device_.device_type == kDLCPU) return cpu(args);
    if constexpr (!std::is_null_pointer<Cuda>::value) {
      return cuda(args, device_.device_id, stream);
    }
    (void)stream;
    return set_error(HFP_NOT_AVAILABLE,
                     "%s: this build has no CUDA kernels; build with nvcc, or pass CPU tensors",
                     function_);
  }

  int32_t status() const { return status_; }

 private:
  bool parse(const char *name, const DLTensor *raw, Tensor *tensor);
  bool strides(Tensor *tensor);
  void reads(const Tensor &tensor, const char *replaced_by);
  const char *function_;
  int32_t status_ = HFP_OK;
  const char *device_owner_ = nullptr;
  DLDevice device_ = {};

  struct Access {
    const char *name, *replaced_by;  // nullptr, kAny, or the name of a result
    bool written;
    Span span;
  };
  static constexpr int kMaxAccesses = 16;  // the tensors of any function
  Access accesses_[kMaxAccesses];
  int count_ = 0;
};

// Elementwise kernels see contiguous tensors as a single row.
inline Rows one_row(const Tensor &t) {
  Rows rows;
  rows.rows = 1;
  rows.cols = t.numel;
  return rows;
}

// --- implementation ---------------------------------------------------------------------------


// "[2, 3, 4]"; long shapes end in "...]".
struct ShapeText {
  char text[192];

  explicit ShapeText(const DLTensor &t, int64_t last_divisor = 1) {
    std::size_t used = 0;
    text[used++] = '[';
    for (int32_t i = 0; i < t.ndim; ++i) {
      const int64_t size = i + 1 == t.ndim ? t.shape[i] / last_divisor : t.shape[i];
      char item[32];
      const int n = std::snprintf(item, sizeof item, i ? ", %lld" : "%lld",
                                  static_cast<long long>(size));
      if (used + static_cast<std::size_t>(n) + sizeof ", ...]" > sizeof text) {
        for (const char *p = ", ..."; *p; ++p) text[used++] = *p;
        break;
      }
      for (int k = 0; k < n; ++k) text[used++] = item[k];
    }
    text[used++] = ']';
    text[used] = '\0';
  }
};

struct DTypeText {
  char text[48];

  explicit DTypeText(DLDataType t) {
    const char *kind = t.code == kDLInt      ? "int"
                       : t.code == kDLUInt   ? "uint"
                       : t.code == kDLFloat  ? "float"
                       : t.code == kDLBfloat ? "bfloat"
                                             : nullptr;
    if (t.lanes != 1) {
      std::snprintf(text, sizeof text, "%s%d with %d lanes", kind ? kind : "type code", t.bits,
                    t.lanes);
    } else if (kind) {
      std::snprintf(text, sizeof text, "%s%d", kind, t.bits);
    } else {
      std::snprintf(text, sizeof text, "DLPack type code %d of %d bits", t.code, t.bits);
    }
  }
};

inline const char *device_name(int32_t type) {
  return type == kDLCPU ? "cpu" : type == kDLCUDA ? "cuda" : "another device";
}

inline bool supported(DLDataType t, DType *type) {
  if (t.lanes != 1) return false;
  if (t.code == kDLFloat && t.bits == 32) return *type = DType::F32, true;
  if (t.code == kDLFloat && t.bits == 16) return *type = DType::F16, true;
  if (t.code == kDLBfloat && t.bits == 16) return *type = DType::BF16, true;
  return false;
}

inline bool add_overflows(int64_t a, int64_t b, int64_t *sum) {
  return __builtin_add_overflow(a, b, sum);
}
inline bool mul_overflows(int64_t a, int64_t b, int64_t *product) {
  return __builtin_mul_overflow(a, b, product);
}

inline const char *name_of(DType type) {
  return type == DType::F32 ? "float32" : type == DType::F16 ? "float16" : "bfloat16";
}

inline bool Check::fail(const char *format, ...) {
  char text[kMessageSize];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  status_ = set_error(HFP_INVALID_ARGUMENT, "%s: %s", function_, text);
  return false;
}

inline bool Check::parse(const char *name, const DLTensor *raw, Tensor *tensor) {
  *tensor = Tensor();
  tensor->name = name;
  tensor->raw = raw;
  if (!raw) return fail("`%s` must be a tensor, got NULL", name);
  const DLTensor &t = *raw;
  if (t.ndim < 1 || t.ndim > kMaxDims) {
    return fail("`%s` must have 1 to %d dimensions, got %d", name, kMaxDims, t.ndim);
  }
  if (!t.shape) return fail("`%s` must have a shape, got shape == NULL", name);
  if (!supported(t.dtype, &tensor->type)) {
    return fail("`%s` must be float32, float16 or bfloat16, got %s; convert it first", name,
                DTypeText(t.dtype).text);
  }
  const DLDevice device = t.device;
  if (device.device_type != kDLCPU && device.device_type != kDLCUDA) {
    return fail("`%s` must be on the CPU or on a CUDA device, got DLPack device type %d", name,
                device.device_type);
  }
  if (device.device_type == kDLCUDA && device.device_id < 0) {
    return fail("`%s` must have a CUDA device id >= 0, got %d", name, device.device_id);
  }
  if (!device_owner_) {
    device_owner_ = name;
    device_ = device;
  } else if (device.device_type != device_.device_type ||
             (device.device_type == kDLCUDA && device.device_id != device_.device_id)) {
    return fail("`%s` must be on the device of `%s` (%s:%d), got %s:%d; move one of them", name,
                device_owner_, device_name(device_.device_type), device_.device_id,
                device_name(device.device_type), device.device_id);
  }

  // Sizes first without the zeros: a zero must not hide a size that overflows or is negative.
  int64_t product = 1;
  bool empty = false;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0) {
      return fail("`%s` must have sizes >= 0, got shape %s", name, ShapeText(t).text);
    }
    if (t.shape[i] == 0) {
      empty = true;
    } else if (mul_overflows(product, t.shape[i], &product)) {
      return fail("`%s` must have fewer than 2^63 bytes, got shape %s", name, ShapeText(t).text);
    }
  }
  int64_t bytes;
  if (mul_overflows(product, size_of(tensor->type), &bytes)) {
    return fail("`%s` must have fewer than 2^63 bytes, got shape %s", name, ShapeText(t).text);
  }
  tensor->present = true;
  tensor->numel = empty ? 0 : product;
  tensor->rows.cols = t.shape[t.ndim - 1];
  if (empty) {  // no element is read: strides and data may be anything
    tensor->contiguous = true;
    return true;
  }
  if (!t.data) {
    return fail("`%s` must point to data, got data == NULL for shape %s", name, ShapeText(t).text);
  }
  const uint64_t address = reinterpret_cast<uint64_t>(t.data) + t.byte_offset;
  if (t.byte_offset > static_cast<uint64_t>(INT64_MAX) || address < t.byte_offset) {
    return fail("`%s` must have a byte_offset below 2^63, got %llu", name,
                static_cast<unsigned long long>(t.byte_offset));
  }
  if (address % static_cast<uint64_t>(size_of(tensor->type)) != 0) {
    return fail("`%s` must be aligned to its element size of %d bytes, got address %llu; copy it",
                name, static_cast<int>(size_of(tensor->type)),
                static_cast<unsigned long long>(address));
  }
  tensor->data = static_cast<char *>(t.data) + t.byte_offset;
  if (checks_pointers() && !pointer(name, tensor->data, device)) return false;
  return strides(tensor);
}

inline bool Check::pointer(const char *name, const void *data, const DLDevice &device) {
#if defined(CUDA_KERNEL)
  if (!checks_pointers()) return true;
  int owner = 0;
  const PointerMemory memory = cuda::memory_of(data, &owner);
  if (device.device_type == kDLCPU && memory == PointerMemory::Device) {
    return fail("`%s` must point to the host's memory, as its device cpu:0 says, got memory of cuda:%d;"
                " copy it, or say kDLCUDA", name, owner);
  }
  if (device.device_type == kDLCUDA && memory == PointerMemory::Host) {
    return fail("`%s` must point to memory of cuda:%d, as its device says, got the host's; copy it, or"
                " say kDLCPU", name, device.device_id);
  }
  if (device.device_type == kDLCUDA && memory == PointerMemory::Device && owner != device.device_id) {
    return fail("`%s` must point to memory of cuda:%d, as its device says, got memory of cuda:%d; copy"
                " it, or name that device", name, device.device_id, owner);
  }
#else
  (void)name, (void)data, (void)device;  // all memory is the host's
#endif
  return true;
}

// Fills in `contiguous` and `rows`: merges the leading dimensions that one stride can walk.
inline bool Check::strides(Tensor *tensor) {
  const DLTensor &t = *tensor->raw;
  const int32_t last = t.ndim - 1;
  if (t.strides && t.shape[last] > 1 && t.strides[last] != 1) {
    return fail("`%s` must have stride 1 in its last dimension, got stride %lld;"
                " call .contiguous()",
                tensor->name, static_cast<long long>(t.strides[last]));
  }
  // Sizes and strides of the merged dimensions, innermost first.
  int64_t sizes[HFP_MAX_OUTER_DIMS] = {1, 1, 1}, steps[HFP_MAX_OUTER_DIMS] = {0, 0, 0};
  static_assert(HFP_MAX_OUTER_DIMS == 3, "Rows has three outer dimensions");
  int merged = 0;
  int64_t expected = t.shape[last];  // the stride that a contiguous tensor has here
  int64_t reach = t.shape[last];     // elements between the two ends of the view
  tensor->contiguous = true;
  for (int32_t i = last - 1; i >= 0; --i) {
    const int64_t size = t.shape[i];
    if (size == 1) continue;
    const int64_t step = t.strides ? t.strides[i] : expected;
    int64_t span;
    if (step == INT64_MIN || mul_overflows(size - 1, step < 0 ? -step : step, &span) ||
        add_overflows(reach, span, &reach)) {
      return fail("`%s` must span fewer than 2^63 bytes, got stride %lld in dimension %d of"
                  " shape %s",
                  tensor->name, static_cast<long long>(step), i, ShapeText(t).text);
    }
    if (step != expected) tensor->contiguous = false;
    expected *= size;
    int64_t joined;
    if (merged > 0 && !mul_overflows(sizes[merged - 1], steps[merged - 1], &joined) &&
        joined == step) {
      sizes[merged - 1] *= size;
      continue;
    }
    if (merged == HFP_MAX_OUTER_DIMS) {
      return fail("`%s` must have leading dimensions that merge into at most %d strides,"
                  " got shape %s; call .contiguous()",
                  tensor->name, HFP_MAX_OUTER_DIMS, ShapeText(t).text);
    }
    sizes[merged] = size;
    steps[merged] = step;
    ++merged;
  }
  int64_t reach_bytes;
  if (mul_overflows(reach, size_of(tensor->type), &reach_bytes)) {
    return fail("`%s` must span fewer than 2^63 bytes, got shape %s", tensor->name,
                ShapeText(t).text);
  }
  Rows &rows = tensor->rows;
  rows.rows = sizes[0] * sizes[1] * sizes[2];
  rows.n2 = sizes[0];
  rows.n1 = sizes[1];
  rows.s2 = steps[0];
  rows.s1 = steps[1];
  rows.s0 = steps[2];
  return true;
}

inline Span span_of(const Tensor &t) { return Span(t.data, size_of(t.type), t.rows, t.contiguous); }

inline void Check::reads(const Tensor &tensor, const char *replaced_by) {
  if (tensor.numel == 0 || count_ == kMaxAccesses) return;
  accesses_[count_++] = {tensor.name, replaced_by, false, span_of(tensor)};
}

inline bool Check::writes(const Tensor &tensor) {
  if (tensor.numel > 0 && count_ < kMaxAccesses) {
    accesses_[count_++] = {tensor.name, nullptr, true, span_of(tensor)};
  }
  return true;
}

inline void Check::reads_bytes(const char *name, const void *data, int64_t count) {
  if (count == 0 || count_ == kMaxAccesses) return;
  Rows rows;
  rows.rows = 1;
  rows.cols = count;
  accesses_[count_++] = {name, nullptr, false, Span(static_cast<const char *>(data), 1, rows, true)};
}

inline bool Check::disjoint() {
  for (int i = 0; i < count_; ++i) {
    if (!accesses_[i].written) continue;
    for (int j = 0; j < count_; ++j) {
      const Access &out = accesses_[i], &in = accesses_[j];
      if (i == j || (in.written && j < i) || !overlap(out.span, in.span)) continue;
      const bool allowed = in.replaced_by && (in.replaced_by == kAny ||
                                              std::strcmp(in.replaced_by, out.name) == 0);
      if (allowed && out.span.same_as(in.span)) continue;
      if (allowed) {
        return fail("`%s` must be exactly the view `%s` (in place) or not overlap it, got tensors"
                    " that share memory in part; clone one of them", out.name, in.name);
      }
      return fail("`%s` must not overlap `%s`, got tensors that share memory; clone one of them",
                  out.name, in.name);
    }
  }
  return true;
}

inline bool Check::input(const char *name, const DLTensor *raw, Tensor *tensor,
                         const char *replaced_by) {
  if (!parse(name, raw, tensor)) return false;
  reads(*tensor, replaced_by);
  return true;
}

inline bool Check::param(const char *name, const DLTensor *raw, const Tensor &like,
                         Tensor *tensor) {
  *tensor = Tensor();
  if (!raw) return true;
  if (!parse(name, raw, tensor)) return false;
  if (raw->ndim != 1 || raw->shape[0] != like.last()) {
    return fail("`%s` must have shape [%lld] to match the last dimension of `%s`, got %s", name,
                static_cast<long long>(like.last()), like.name, ShapeText(*raw).text);
  }
  reads(*tensor, nullptr);
  return true;
}

inline bool Check::same_type(const Tensor &a, const Tensor &b) {
  if (!a.present || !b.present || a.type == b.type) return true;
  return fail("`%s` must have the dtype of `%s` (%s), got %s; convert one of them", b.name, a.name,
              name_of(a.type), name_of(b.type));
}

inline bool Check::same_shape(const Tensor &a, const Tensor &b) {
  bool same = a.raw->ndim == b.raw->ndim;
  for (int32_t i = 0; same && i < a.raw->ndim; ++i) same = a.raw->shape[i] == b.raw->shape[i];
  if (same) return true;
  return fail("`%s` must have the shape of `%s` %s, got %s", b.name, a.name,
              ShapeText(*a.raw).text, ShapeText(*b.raw).text);
}

inline bool Check::modulation(const char *name, const DLTensor *raw, const Tensor &like,
                              Tensor *tensor) {
  *tensor = Tensor();
  // The first parse finds what is wrong with the tensor itself, the second its rows.
  if (!parse(name, raw, tensor)) return false;
  const DLTensor &x = *like.raw, &t = *raw;
  const bool per_sample = t.ndim == 2 && x.ndim > 2;
  bool fits = t.ndim == 1 || t.ndim == x.ndim || per_sample;
  fits = fits && t.shape[t.ndim - 1] == like.last();
  int64_t strides[kMaxDims];
  int64_t stride = 1;  // of a contiguous tensor; meaningless, and not used, if `t` is empty
  for (int32_t i = x.ndim - 1; fits && i >= 0; --i) {
    strides[i] = 0;
    const int32_t last = x.ndim - 1;
    const int32_t from = i == last ? t.ndim - 1 : per_sample ? (i == 0 ? 0 : -1)
                                              : t.ndim == 1  ? -1
                                                             : i;
    if (from < 0) continue;
    fits = t.shape[from] == x.shape[i] || t.shape[from] == 1;
    if (t.shape[from] != 1) strides[i] = t.strides ? t.strides[from] : stride;
    if (tensor->numel > 0) stride *= t.shape[from];
  }
  if (!fits) {
    return fail("`%s` must have shape [%lld], [B, %lld], or that of `%s` %s with sizes 1 where it is"
                " broadcast, got %s",
                name, static_cast<long long>(like.last()), static_cast<long long>(like.last()),
                like.name, ShapeText(x).text, ShapeText(t).text);
  }
  DLTensor broadcast = t;
  broadcast.ndim = x.ndim;
  broadcast.shape = x.shape;
  broadcast.strides = strides;
  if (!parse(name, &broadcast, tensor)) return false;
  tensor->raw = raw;
  reads(*tensor, nullptr);
  return true;
}

inline bool Check::output(DLTensor *raw, const Tensor &like, int64_t divisor, DType type,
                          Tensor *tensor, const char *name) {
  if (!parse(name, raw, tensor)) return false;
  if (tensor->type != type) {
    return fail("`%s` must be %s, got %s", name, name_of(type), name_of(tensor->type));
  }
  bool same = raw->ndim == like.raw->ndim;
  for (int32_t i = 0; same && i < raw->ndim; ++i) {
    const int64_t size = like.raw->shape[i];
    same = raw->shape[i] == (i + 1 == raw->ndim ? size / divisor : size);
  }
  if (!same) {
    return fail("`%s` must have shape %s to match `%s`, got %s", name,
                ShapeText(*like.raw, divisor).text, like.name, ShapeText(*raw).text);
  }
  if (!tensor->contiguous) {
    return fail("`%s` must be contiguous, got a strided tensor", name);
  }
  return writes(*tensor);
}

inline bool Check::groups(const Tensor &tensor, int64_t size, Rows *rows) {
  *rows = tensor.rows;
  const int64_t count = tensor.last() / size;
  rows->cols = size;
  if (count == 1) return true;
  rows->rows *= count;
  if (rows->n2 == 1 || rows->s2 == tensor.last()) {  // evenly spaced throughout
    rows->n2 *= count;
    rows->s2 = size;
    return true;
  }
  if (tensor.rows.rows > rows->n1 * rows->n2) {
    return fail("`%s` must have leading dimensions that merge into at most %d strides beside its"
                " groups, got shape %s; call .contiguous()",
                tensor.name, HFP_MAX_OUTER_DIMS - 1, ShapeText(*tensor.raw).text);
  }
  rows->s0 = rows->s1;
  rows->n1 = rows->n2;
  rows->s1 = rows->s2;
  rows->n2 = count;
  rows->s2 = size;
  return true;
}

inline bool Check::shaped(const char *name, DLTensor *raw, int32_t ndim, const int64_t *shape,
                          DType type, Tensor *tensor) {
  const int before = count_;
  if (!shaped(name, static_cast<const DLTensor *>(raw), ndim, shape, type, tensor)) return false;
  count_ = before;
  return writes(*tensor);
}

inline bool Check::shaped(const char *name, const DLTensor *raw, int32_t ndim,
                          const int64_t *shape, DType type, Tensor *tensor) {
  if (!parse(name, raw, tensor)) return false;
  if (tensor->type != type) {
    return fail("`%s` must be %s, got %s", name, name_of(type), name_of(tensor->type));
  }
  bool same = raw->ndim == ndim;
  for (int32_t i = 0; same && i < ndim; ++i) same = raw->shape[i] == shape[i];
  if (!same) {
    DLTensor expected = *raw;
    expected.ndim = ndim;
    expected.shape = const_cast<int64_t *>(shape);
    return fail("`%s` must have shape %s, got %s", name, ShapeText(expected).text,
                ShapeText(*raw).text);
  }
  if (!tensor->contiguous) return fail("`%s` must be contiguous, got a strided tensor", name);
  reads(*tensor, nullptr);
  return true;
}

inline bool Check::indices(const char *name, const DLTensor *raw, int32_t ndim,
                           const int64_t *shape, Tensor *tensor) {
  if (!raw) return fail("`%s` must be a tensor, got NULL", name);
  if (raw->dtype.code != kDLInt || raw->dtype.bits != 64 || raw->dtype.lanes != 1) {
    return fail("`%s` must be int64, got %s; convert it first", name, DTypeText(raw->dtype).text);
  }
  // Everything but the dtype is checked as for a float tensor of half the element size.
  DLTensor as_float = *raw;
  as_float.dtype = {kDLFloat, 32, 1};
  const DLTensor *read = &as_float;  // not a result
  const int before = count_;
  if (!shaped(name, read, ndim, shape, DType::F32, tensor)) return false;
  if (count_ > before) accesses_[before].span = Span(tensor->data, 8, tensor->rows, true);
  tensor->raw = raw;
  if (reinterpret_cast<uint64_t>(tensor->data) % sizeof(int64_t) != 0) {
    return fail("`%s` must be aligned to its element size of 8 bytes; copy it", name);
  }
  return true;
}

inline bool Check::indices_apart(const char *name, const DLTensor *raw, int32_t ndim,
                                 const int64_t *shape, Tensor *tensor) {
  const int before = count_;
  if (!indices(name, raw, ndim, shape, tensor)) return false;
  if (count_ > before) accesses_[before].written = true;
  return true;
}

inline bool Check::in_range(const char *name, int64_t value, int64_t count,
                            const char *choices) {
  if (value >= 0 && value < count) return true;
  return fail("`%s` must be %s, got %lld", name, choices, static_cast<long long>(value));
}

inline bool Check::number(const char *name, double value, double low,
                          const char *expected) {
  const double size = value < 0 ? -value : value;
  if (size <= FLT_MAX && value >= low) return true;  // false for NaN
  return fail("`%s` must be %s, got %g", name, expected, value);
}

}  // namespace hfp
