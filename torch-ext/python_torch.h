// python_torch.h: what python_calls.cpp asks of torch through Python: the views of tensors, who
// listens to operators, memory for results.
//
// Python's stable ABI of 3.9 only.
#pragma once

#if !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x03090000
#endif
#include <Python.h>

#if defined(__linux__)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "calls.h"
#include "hfpatch.h"
#include "python_layout.h"

namespace {  // with `torch_`: each build in a process has its own

using namespace hfp_torch;

// ---------------------------------------------------------------------------------------------
// DLPack's exchange API, version 1

struct ExchangeApi {
  struct {
    uint32_t major, minor;
    void *previous;
  } header;
  void *managed_tensor_allocator;
  void *managed_tensor_from_py_object_no_sync;
  void *managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out);
  void *current_work_stream;
};

// A function of nothing. Most of torch's are built in: they are entered where Python's call would
// enter them, which is most of what such a call takes.
class Question {
 public:
  void take(PyObject *callable) {
    Py_INCREF(callable);
    callable_ = callable;
    if (!PyCFunction_Check(callable)) return;
    const PyCFunction entry = PyCFunction_GetFunction(callable);
    const int flags = PyCFunction_GetFlags(callable);
    if (flags == METH_NOARGS) plain_ = entry;
    if (flags == (kFastcall | METH_KEYWORDS))
      fast_ = reinterpret_cast<Fast>(reinterpret_cast<void (*)()>(entry));
  }
  PyObject *ask() const {
    if (plain_ != nullptr) return plain_(PyCFunction_GetSelf(callable_), nullptr);
    if (fast_ != nullptr) return fast_(PyCFunction_GetSelf(callable_), nullptr, 0, nullptr);
    return PyObject_CallObject(callable_, nullptr);
  }

 private:
  static constexpr int kFastcall = 0x80;  // METH_FASTCALL, in the stable ABI from 3.10
  using Fast = PyObject *(*)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
  PyObject *callable_ = nullptr;
  PyCFunction plain_ = nullptr;
  Fast fast_ = nullptr;
};

constexpr Py_ssize_t kMaxListeners = 8;

// The hooks that `Module._call_impl` looks at: a module's, and those on all modules.
constexpr const char *kHookNames[] = {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks",
                                      "_forward_pre_hooks"};
constexpr const char *kHookOnAllNames[] = {"_global_backward_hooks", "_global_backward_pre_hooks",
                                           "_global_forward_hooks", "_global_forward_pre_hooks"};
constexpr std::size_t kHooks = std::size(kHookNames);
static_assert(std::size(kHookOnAllNames) == kHooks);

// What `setup` was given; the references live as long as the process.
struct Torch {
  const ExchangeApi *api = nullptr;
  PyObject *tensor = nullptr, *parameter = nullptr;         // types
  PyObject *new_empty_strided = nullptr;
  // Of (shape, strides, dtype), past the dispatcher: on the CPU, on the current CUDA device; or None.
  PyObject *empty_cpu = nullptr, *empty_cuda = nullptr;
  PyObject *float32 = nullptr, *float16 = nullptr, *bfloat16 = nullptr;  // dtypes
  // True while something listens to operators. The first ones show in the dispatcher's state, too.
  Question listeners[kMaxListeners];
  Py_ssize_t listeners_count = 0, listeners_of_state = 0;
  Question autocast_anywhere;
  PyObject *autocast_enabled = nullptr;
  PyObject *forward_ad = nullptr;  // dict of the module: `_current_level` >= 0 in a dual level
  PyObject *current_level = nullptr, *requires_grad = nullptr;  // names of attributes
  PyObject *forward = nullptr, *code = nullptr, *dict = nullptr, *parameters = nullptr;
  PyObject *call_impl = nullptr, *hooks[kHooks] = {}, *hooks_on_all[kHooks] = {};
  PyObject *module_call_impl = nullptr;  // the function that `torch.nn.Module` has
  PyObject *of_modules = nullptr;        // dict of its file, where hooks on all modules are
  PyCFunction is_neg = nullptr;  // `Tensor.is_neg`, entered as a method without arguments
};

Torch torch_;

// ---------------------------------------------------------------------------------------------
// The dispatcher's state of a thread

// What the thread includes in dispatching or excludes from it beside the defaults, c10's
// PODLocalDispatchKeySet: dispatch modes, transforms and autocast show in it. Reading two words takes
// 3 ns where asking torch for these takes 200. It is no part of a stable interface: `calls.py` looks
// whether it shows them, and without it all are asked.
struct State {
  uint64_t included, excluded;
  bool operator==(const State &o) const { return included == o.included && excluded == o.excluded; }
};

void *libc10_ = nullptr;  // null: not to be read
constexpr int kMostPlain = 4;
State plain_[kMostPlain];  // in which nothing of that is on
int plain_count_ = 0;

const State *state_of_thread() {
#if defined(__linux__)
  thread_local const State *found = nullptr;
  if (found == nullptr && libc10_ != nullptr)
    found = static_cast<const State *>(dlsym(libc10_, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  return libc10_ != nullptr ? found : nullptr;
#else
  return nullptr;
#endif
}

// Whether no dispatch mode, transform or autocast is on; false also where that is not known.
bool plain() {
  const State *state = state_of_thread();
  for (int i = 0; state != nullptr && i < plain_count_; ++i)
    if (*state == plain_[i]) return true;
  return false;
}

// A reference that this scope owns.
class Owned {
 public:
  explicit Owned(PyObject *object = nullptr) : object_(object) {}
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() { Py_XDECREF(object_); }
  void take(PyObject *object) { object_ = object; }
  PyObject *get() const { return object_; }
  PyObject *release() { return std::exchange(object_, nullptr); }

 private:
  PyObject *object_;
};

Owned kept(PyObject *borrowed) {
  Py_XINCREF(borrowed);
  return Owned(borrowed);
}

bool is_true(const Owned &answer) {  // an error counts as true
  return answer.get() == nullptr || PyObject_IsTrue(answer.get()) != 0;
}

// Whether nobody would miss the operator.
bool unheard() {
  for (Py_ssize_t i = plain() ? torch_.listeners_of_state : 0; i < torch_.listeners_count; ++i) {
    if (is_true(Owned(torch_.listeners[i].ask()))) return false;
  }
  return true;
}

// Whether differentiation or autocast would take part in a call with these arguments.
bool differentiated(PyObject *const *args, Py_ssize_t count, PyObject *device) {
  PyObject *level = PyDict_GetItemWithError(torch_.forward_ad, torch_.current_level);
  if (level == nullptr || PyLong_AsLong(level) >= 0) return true;
  // The first two are quicker, and most often say it all.
  if (!plain() && is_true(Owned(torch_.autocast_anywhere.ask())) &&
      is_true(Owned(PyObject_CallObject(torch_.autocast_enabled, device))))
    return true;
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (args[i] != Py_None && is_true(Owned(PyObject_GetAttr(args[i], torch_.requires_grad))))
      return true;
  }
  return false;
}

bool read(PyObject *object, DLTensor &tensor) {
  PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(object));
  if (type != torch_.tensor && type != torch_.parameter) return false;
  if (layout_.read(object, tensor)) return true;
  // with another sign than memory has, of which DLPack says nothing; a form of its own by its keys
  if (is_true(Owned(torch_.is_neg(object, nullptr)))) return false;
  if (torch_.api->dltensor_from_py_object_no_sync(object, &tensor) != 0) return false;
  if (tensor.ndim != 0 && tensor.strides == nullptr) return false;
  layout_.learn(object, tensor);
  return true;
}

bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

PyObject *tuple_of(int32_t count, const int64_t *values) {
  PyObject *tuple = PyTuple_New(count);
  for (int32_t i = 0; tuple != nullptr && i < count; ++i) {
    PyObject *value = PyLong_FromLongLong(values[i]);
    if (value == nullptr || PyTuple_SetItem(tuple, i, value) != 0) {
      Py_DECREF(tuple);
      return nullptr;
    }
  }
  return tuple;
}

PyObject *dtype_of(DLDataType type) {  // null: none that kernels write
  if (type.code == kDLBfloat) return torch_.bfloat16;
  if (type.code != kDLFloat) return nullptr;
  return type.bits == 32 ? torch_.float32 : type.bits == 16 ? torch_.float16 : nullptr;
}

// PyTorch's quickest way to memory on that device; null where there is none.
PyObject *empty_on(DLDevice device) {
  PyObject *function = nullptr;
  if (device.device_type == kDLCPU) {
    function = torch_.empty_cpu;
  } else if (device.device_type == kDLCUDA) {
    int32_t current = -1;
    if (aoti_torch_get_current_device_index(&current) != AOTI_TORCH_SUCCESS) return nullptr;
    if (current == device.device_id) function = torch_.empty_cuda;
  }
  return function == Py_None ? nullptr : function;
}

// A shape and its contiguous strides as Python has them, kept from one call to the next.
class Shape {
 public:
  Shape() = default;
  Shape(const Shape &) {}  // a copy makes its own
  Shape &operator=(const Shape &) = delete;
  ~Shape() { Py_XDECREF(sizes), Py_XDECREF(strides); }

  bool set(int32_t ndim, const int64_t *shape) {
    if (ndim == ndim_ && std::equal(shape, shape + ndim, shape_)) return true;
    if (ndim > kMaxDims) return false;
    int64_t steps[kMaxDims];
    contiguous_strides(ndim, shape, steps);
    // Python's collector may run for a new tuple, and its finalizers come here: both are made first.
    Owned new_sizes(tuple_of(ndim, shape)), new_strides(tuple_of(ndim, steps));
    if (new_sizes.get() == nullptr || new_strides.get() == nullptr) return false;
    new_sizes.take(std::exchange(sizes, new_sizes.get()));
    new_strides.take(std::exchange(strides, new_strides.get()));
    ndim_ = ndim <= kDims ? ndim : -1;
    if (ndim <= kDims) std::copy_n(shape, ndim, shape_);
    return true;
  }

  PyObject *sizes = nullptr, *strides = nullptr;

 private:
  static constexpr int32_t kDims = 8;
  int32_t ndim_ = -1;
  int64_t shape_[kDims];
};

// An uninitialized contiguous tensor of that shape, else like `source`. kept: of the call before.
PyObject *empty(PyObject *source, const DLTensor &like, int32_t ndim, const int64_t *shape,
                Shape &kept) {
  if (!kept.set(ndim, shape)) return nullptr;
  Py_INCREF(kept.sizes), Py_INCREF(kept.strides);  // should another thread come here meanwhile
  const Owned sizes(kept.sizes), steps(kept.strides);
  PyObject *const dtype = dtype_of(like.dtype), *const function = empty_on(like.device);
  if (dtype != nullptr && function != nullptr)
    return PyObject_CallFunctionObjArgs(function, sizes.get(), steps.get(), dtype, nullptr);
  return PyObject_CallFunctionObjArgs(torch_.new_empty_strided, source, sizes.get(), steps.get(),
                                      nullptr);
}

}  // namespace
