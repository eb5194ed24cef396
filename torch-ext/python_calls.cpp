// python_calls.cpp: the operators as plain Python callables, past PyTorch's dispatcher.
//
// A call of an operator goes through a boxed stack, the dispatcher and a tensor handle for each
// argument: for a small model that is most of the time a call takes. Where nothing listens to the
// dispatcher, none of it is needed. `bind` gives a callable that reads the tensors through DLPack's
// exchange API (https://dmlc.github.io/dlpack/latest/), lets torch allocate the result and calls the
// C function. It takes ordinary tensors alone, and decides nothing: whatever it does not take (a
// subclass, a mode, a trace, the profiler, a layout that the kernels do not walk, an argument that
// the C function refuses) goes to the operator, which does it or says what is wrong.
//
// Without Python's headers there is no such module, and every call goes through the dispatcher.
#if __has_include(<Python.h>)

#include "python_torch.h"
#include "python_watch.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "calls.h"
#include "hfpatch.h"
#include "op_table.h"

// In the stable ABI from 3.10 on by name; Python 3.7 and newer know the convention.
#if !defined(METH_FASTCALL)
#define METH_FASTCALL 0x0080
#endif

namespace {

// ---------------------------------------------------------------------------------------------
// One bound operator

constexpr int kMaxArguments = 16, kMaxOutputs = 4;

struct Bound {
  PyObject *(*run)(const Bound &, PyObject *const *, Py_ssize_t);
  bool (*admit)(Bound &, PyObject *const *, Py_ssize_t);
  PyObject *fallback, *codes;  // the operator, and its numbers as a tuple
  bool scratch;                // the operator returns scratch memory behind its one result
  mutable Shape shapes[kMaxOutputs];  // of the results
  double floats[kMaxArguments];
  int64_t ints[kMaxArguments];
  // Of a guarded one: what its tensors must be; a dtype of no bits stands for None.
  PyObject *device = nullptr;  // what `is_autocast_enabled` takes for it
  int32_t device_type;
  DLDataType dtypes[kMaxArguments];
};

constexpr bool is_tensor(Kind kind) {
  return kind == Kind::Tensor || kind == Kind::OptionalTensor;
}

constexpr bool bindable(Rule rule) {
  return rule == Rule::LikeFirst || rule == Rule::LikeNamed || rule == Rule::Norm ||
         rule == Rule::Halved || rule == Rule::Modulated || rule == Rule::Groups;
}

template <class Op>
struct Runner : Row<Op> {
  using Table = Row<Op>;
  using Table::find;
  using Table::kArgs;
  using Table::kArguments;
  using Table::kOutputs;

  template <std::size_t O>
  static constexpr Rule rule() {
    return parse_rule(part(Op::result, O));
  }
  template <std::size_t... O>
  static constexpr bool all_bindable(std::index_sequence<O...>) {
    return (bindable(rule<O>()) && ...);
  }
  static constexpr bool kBindable = Table::kLists == 0 && kOutputs > 0 &&
                                    kArguments <= kMaxArguments && kOutputs <= kMaxOutputs &&
                                    all_bindable(std::make_index_sequence<kOutputs>{});
  // Scratch memory comes last and is not returned.
  static constexpr bool kScratch = rule<kOutputs - 1>() == Rule::Groups;
  static constexpr std::size_t kResults = kOutputs - kScratch;
  static_assert(!kScratch || kResults == 1, "scratch memory: of operators with one result");

  static constexpr Py_ssize_t kTensors = [] {
    Py_ssize_t n = 0;
    for (const Argument &a : kArgs) n += is_tensor(a.kind);
    return n;
  }();

  struct Call {
    const Bound &bound;
    PyObject *objects[kArguments] = {};  // borrowed; null for None
    DLTensor views[kArguments], outs[kOutputs];
    int64_t scratch_shape[4], scratch_strides[4];
    Handle scratch;

    // False: not a call for this way.
    bool take(PyObject *const *args) {
      for (std::size_t i = 0, next = 0; i < kArguments; ++i) {
        if (!is_tensor(kArgs[i].kind)) continue;
        PyObject *object = args[next++];
        if (object == Py_None) {
          if (kArgs[i].kind != Kind::OptionalTensor) return false;
          if (bound.device != nullptr && bound.dtypes[i].bits != 0) return false;
          continue;
        }
        if (!read(object, views[i]) || !walkable(views[i])) return false;
        if (bound.device != nullptr && (!same(views[i].dtype, bound.dtypes[i]) ||
                                        views[i].device.device_type != bound.device_type))
          return false;
        objects[i] = object;
      }
      return true;
    }

    template <std::size_t I>
    auto argument() const {
      if constexpr (kArgs[I].kind == Kind::Float) {
        return bound.floats[I];
      } else if constexpr (kArgs[I].kind == Kind::Int) {
        return bound.ints[I];
      } else {
        const DLTensor *tensor = objects[I] != nullptr ? &views[I] : nullptr;
        return tensor;
      }
    }

    // The argument whose dtype result O has, and whose shape unless the rule says another; -1 where
    // no argument has that dtype.
    template <std::size_t O>
    int source() const {
      constexpr Rule r = rule<O>();
      if constexpr (r == Rule::LikeNamed) {
        return find(named(part(Op::result, O)));
      } else if constexpr (r == Rule::Norm) {
        constexpr int weight = find("weight"), cast = find("cast");
        if (objects[weight] == nullptr || same(views[0].dtype, views[weight].dtype)) return 0;
        if (bound.ints[cast] == HFP_CAST_NONE) return 0;
        return bound.ints[cast] == HFP_CAST_WEIGHT || views[weight].dtype.bits == 32 ? weight : -1;
      } else if constexpr (r == Rule::Modulated) {
        if (same(views[0].dtype, views[1].dtype)) return 0;
        if (bound.ints[find("cast")] != HFP_CAST_INPUT || views[0].dtype.bits == 32) return 0;
        return views[1].dtype.bits == 32 ? 1 : -1;
      } else {
        return 0;
      }
    }

    template <std::size_t O>
    bool allocate(Owned &result) {
      const int from = source<O>();
      if (from < 0 || objects[from] == nullptr) return false;
      const DLTensor &like = views[from];
      if constexpr (rule<O>() == Rule::Groups) {
        return allocate_scratch();
      } else if constexpr (rule<O>() == Rule::Halved) {
        if (like.ndim == 0 || like.ndim > kMaxDims) return false;
        int64_t shape[kMaxDims];
        std::memcpy(shape, like.shape, static_cast<std::size_t>(like.ndim) * sizeof(int64_t));
        shape[like.ndim - 1] /= 2;
        result.take(empty(objects[from], like, like.ndim, shape, bound.shapes[O]));
      } else {
        const DLTensor &shaped = rule<O>() == Rule::LikeNamed ? like : views[0];
        result.take(empty(objects[from], like, shaped.ndim, shaped.shape, bound.shapes[O]));
      }
      return result.get() != nullptr && read(result.get(), outs[O]);
    }

    // Memory that only the kernel sees: never a Python object.
    bool allocate_scratch() {
      const DLTensor &x = views[0];
      DLTensor &out = outs[kOutputs - 1];
      const int32_t ndim = group_statistics(x, bound.ints[find("groups")],
                                            bound.ints[find("channels_last")] != 0, scratch_shape);
      contiguous_strides(ndim, scratch_shape, scratch_strides);
      const bool cuda = x.device.device_type == kDLCUDA;
      AtenTensorHandle handle = nullptr;
      if (aoti_torch_empty_strided(
              ndim, scratch_shape, scratch_strides, aoti_torch_dtype_float32(),
              cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
              x.device.device_id, &handle) != AOTI_TORCH_SUCCESS)
        return false;
      scratch.take(handle);
      if (aoti_torch_get_data_ptr(handle, &out.data) != AOTI_TORCH_SUCCESS) return false;
      out.device = x.device;
      out.dtype = {kDLFloat, 32, 1};
      out.ndim = ndim;
      out.shape = scratch_shape;
      out.strides = scratch_strides;
      out.byte_offset = 0;
      return true;
    }

    template <std::size_t... O, std::size_t... I>
    bool launch(std::index_sequence<O...>, std::index_sequence<I...>) {
      int32_t status = HFP_LAUNCH_FAILED;
      PyThreadState *const thread = PyEval_SaveThread();
      try {
        const Launch device(Op::name, views[0]);
        status = Op::function(&outs[O]..., argument<I>()..., device.stream);
      } catch (const std::exception &) {  // the operator fails alike, and says so
      }
      PyEval_RestoreThread(thread);
      return status == HFP_OK;
    }

    bool launch() {
      return launch(std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kArguments>{});
    }
  };

  template <std::size_t... O>
  static PyObject *functional(const Bound &bound, PyObject *const *args,
                              std::index_sequence<O...>) {
    Call call{bound};
    Owned results[kOutputs];  // empty where it is scratch
    if (!call.take(args) || !(call.template allocate<O>(results[O]) && ...) || !call.launch())
      return nullptr;
    if constexpr (kResults == 1) return results[0].release();
    PyObject *tuple = PyTuple_New(kResults);
    if (tuple == nullptr) return nullptr;
    for (std::size_t i = 0; i < kResults; ++i)
      PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), results[i].release());
    return tuple;
  }

  static PyObject *run(const Bound &bound, PyObject *const *args, Py_ssize_t count) {
    if (count != kTensors) return nullptr;
    return functional(bound, args, std::make_index_sequence<kOutputs>{});
  }

  // Takes what these tensors are as the guard.
  static bool admit(Bound &bound, PyObject *const *args, Py_ssize_t count) {
    if (count != kTensors) return false;
    Call call{bound};
    if (!call.take(args)) return false;
    for (std::size_t i = 0; i < kArguments; ++i)
      bound.dtypes[i] = call.objects[i] != nullptr ? call.views[i].dtype : DLDataType{};
    bound.device_type = call.views[0].device.device_type;
    bound.device = bound.device_type == kDLCUDA ? PyTuple_New(0) : Py_BuildValue("(s)", "cpu");
    return bound.device != nullptr;
  }

  // The results come first and are written.
  static PyObject *run_into(const Bound &bound, PyObject *const *args, Py_ssize_t count) {
    if (count != kTensors + static_cast<Py_ssize_t>(kOutputs)) return nullptr;
    Call call{bound};
    for (std::size_t i = 0; i < kOutputs; ++i)
      if (!read(args[i], call.outs[i])) return nullptr;
    if (!call.take(args + kOutputs) || !call.launch()) return nullptr;
    Py_INCREF(Py_None);
    return Py_None;
  }
};

// ---------------------------------------------------------------------------------------------
// The module

#define HFP_STRING_(X) #X
#define HFP_STRING(X) HFP_STRING_(X)

// Of this build alone: another's may be laid out differently.
constexpr const char *kCapsule = HFP_STRING(TORCH_EXTENSION_NAME) ".bound";

void destroy(PyObject *capsule) {
  auto *bound = static_cast<Bound *>(PyCapsule_GetPointer(capsule, kCapsule));
  if (bound == nullptr) return;
  Py_XDECREF(bound->fallback);
  Py_XDECREF(bound->codes);
  Py_XDECREF(bound->device);
  delete bound;
}

PyObject *dispatch(const Bound &bound, PyObject *const *args, Py_ssize_t count) {
  const Py_ssize_t codes = PyTuple_Size(bound.codes);
  const Owned all(PyTuple_New(count + codes));
  if (all.get() == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count + codes; ++i) {
    PyObject *item = i < count ? args[i] : PyTuple_GetItem(bound.codes, i - count);
    Py_INCREF(item);
    PyTuple_SetItem(all.get(), i, item);
  }
  Owned result(PyObject_CallObject(bound.fallback, all.get()));
  if (result.get() == nullptr || !bound.scratch) return result.release();
  PyObject *first = PyTuple_GetItem(result.get(), 0);
  Py_XINCREF(first);
  return first;
}

PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  const auto *bound = static_cast<Bound *>(PyCapsule_GetPointer(self, kCapsule));
  if (bound == nullptr) return nullptr;
  if (unheard()) {
    if (PyObject *result = bound->run(*bound, args, count)) return result;
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // the operator says it, if it is an error
  return dispatch(*bound, args, count);
}

// The same for tensors like those it was guarded with; NotImplemented for any other call, and for
// those that differentiation or autocast takes part in.
PyObject *call_guarded(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  const auto *bound = static_cast<Bound *>(PyCapsule_GetPointer(self, kCapsule));
  if (bound == nullptr) return nullptr;
  if (unheard() && !differentiated(args, count, bound->device)) {
    if (PyObject *result = bound->run(*bound, args, count)) return result;
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

template <class Function>
PyCFunction fastcall(Function *function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef call_method = {"call", fastcall(call), METH_FASTCALL,
                           "A kernel of tensors, bound to its numbers."};
PyMethodDef guarded_method = {"call_guarded", fastcall(call_guarded), METH_FASTCALL,
                              "The same, or NotImplemented."};

// Reads the operator's numbers from a tuple; false with an exception set.
template <class Op>
bool read_codes(PyObject *codes, Bound &bound) {
  Py_ssize_t next = 0;
  for (std::size_t i = 0; i < Row<Op>::kArguments; ++i) {
    const Kind kind = Row<Op>::kArgs[i].kind;
    if (is_tensor(kind)) continue;
    PyObject *item = PyTuple_GetItem(codes, next++);  // an IndexError says too few
    if (item == nullptr) return false;
    if (kind == Kind::Float) bound.floats[i] = PyFloat_AsDouble(item);
    else bound.ints[i] = PyLong_AsLongLong(item);
    if (PyErr_Occurred() != nullptr) return false;
  }
  if (next == PyTuple_Size(codes)) return true;
  PyErr_Format(PyExc_TypeError, "`codes` of `%s`: expected %zd numbers, got %zd", Op::name, next,
               PyTuple_Size(codes));
  return false;
}

// 1: bound, 0: another name or not to be bound, -1: an exception is set.
template <class Op>
int bind_row(std::string_view name, bool into, PyObject *codes, Bound &bound) {
  if constexpr (Runner<Op>::kBindable) {
    if (name != Op::name) return 0;
    if (into && Runner<Op>::kScratch) return 0;
    bound.scratch = Runner<Op>::kScratch;
    bound.run = into ? &Runner<Op>::run_into : &Runner<Op>::run;
    bound.admit = &Runner<Op>::admit;
    return read_codes<Op>(codes, bound) ? 1 : -1;
  } else {
    (void)name, (void)into, (void)codes, (void)bound;
    return 0;
  }
}

// bind(name, into, codes, operator) -> callable of the tensors, or None
PyObject *bind(PyObject *, PyObject *arguments) {
  const char *name = nullptr;
  int into = 0;
  PyObject *codes = nullptr, *fallback = nullptr;
  if (!PyArg_ParseTuple(arguments, "spO!O", &name, &into, &PyTuple_Type, &codes, &fallback))
    return nullptr;
  auto *bound = new Bound{};
  int found = 0;
#define HFP_BIND(NAME, ...) \
  if (found == 0) found = bind_row<NAME##_op>(name, into != 0, codes, *bound);
  if (torch_.api != nullptr) {
    HFP_OP_TABLE(HFP_BIND)
  }
#undef HFP_BIND
  if (found != 1) {
    delete bound;
    if (found < 0) return nullptr;
    Py_INCREF(Py_None);
    return Py_None;
  }
  Py_INCREF(fallback), Py_INCREF(codes);
  bound->fallback = fallback;
  bound->codes = codes;
  const Owned self(PyCapsule_New(bound, kCapsule, destroy));
  if (self.get() == nullptr) return nullptr;
  return PyCFunction_NewEx(&call_method, self.get(), nullptr);
}

// guard(bound, *tensors) -> callable of tensors like these, or None
PyObject *guard(PyObject *, PyObject *arguments) {
  const Py_ssize_t count = PyTuple_Size(arguments);
  PyObject *args[kMaxArguments];
  PyObject *bare = count > 0 ? PyTuple_GetItem(arguments, 0) : nullptr;
  if (bare == nullptr || count > kMaxArguments || !PyCFunction_Check(bare)) {
    PyErr_SetString(PyExc_TypeError, "`guard`: expected what `bind` returned, then tensors");
    return nullptr;
  }
  const auto *from = static_cast<Bound *>(
      PyCapsule_GetPointer(PyCFunction_GetSelf(bare), kCapsule));
  if (from == nullptr) return nullptr;
  for (Py_ssize_t i = 1; i < count; ++i) args[i - 1] = PyTuple_GetItem(arguments, i);
  auto *bound = new Bound(*from);
  bound->device = nullptr;
  if (!bound->admit(*bound, args, count - 1)) {
    Py_XDECREF(bound->device);
    delete bound;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    Py_INCREF(Py_None);
    return Py_None;
  }
  Py_INCREF(bound->fallback), Py_INCREF(bound->codes);
  const Owned self(PyCapsule_New(bound, kCapsule, destroy));
  if (self.get() == nullptr) return nullptr;
  return PyCFunction_NewEx(&guarded_method, self.get(), nullptr);
}

// ---------------------------------------------------------------------------------------------
// A module whose forward is one guarded operator of its input and its parameters

// Whether the dimensions before the last lie in memory as they come. Those of stride 0 lie anywhere.
bool in_order(const DLTensor &x) {
  int64_t before = INT64_MAX;
  for (int32_t i = 0; i + 1 < x.ndim; ++i) {
    if (x.shape[i] <= 1 || x.strides[i] <= 0) continue;
    if (x.strides[i] > before) return false;
    before = x.strides[i];
  }
  return true;
}

// What `of_module` was given, in its order; the names and what is said of them are tuples.
enum Of { kGuarded, kClass, kForward, kCoded, kCode, kRead, kSettings, kNames, kThere, kInOrder, kOf };

// A module's `__dict__`; null, perhaps with an exception set, where it is none.
Owned attributes_of(PyObject *module) {
  Owned held(PyObject_GetAttr(module, torch_.dict));
  const bool known = held.get() != nullptr && PyDict_Check(held.get());
  return Owned(known ? held.release() : nullptr);
}

// The guarded operator's result; null, perhaps with an exception set: not a call for this way.
PyObject *call_unchanged(PyObject *self, PyObject *module, PyObject *attributes, PyObject *x) {
  const auto of = [self](Of what) { return PyTuple_GetItem(self, what); };
  if (reinterpret_cast<PyObject *>(Py_TYPE(module)) != of(kClass)) return nullptr;
  if (reinterpret_cast<PyObject *>(Py_TYPE(x)) != torch_.tensor) return nullptr;
  if (PyObject_IsTrue(of(kInOrder)) != 0) {
    DLTensor view;
    if (!read(x, view) || !in_order(view)) return nullptr;
  }
  // its class, or the code of its class, was patched
  if (Owned(PyObject_GetAttr(of(kClass), torch_.forward)).get() != of(kForward)) return nullptr;
  if (Owned(PyObject_GetAttr(of(kCoded), torch_.code)).get() != of(kCode)) return nullptr;
  if (of(kRead) != Py_None) {
    const Owned settings(PyObject_CallFunctionObjArgs(of(kRead), attributes, nullptr));
    if (settings.get() == nullptr ||
        PyObject_RichCompareBool(settings.get(), of(kSettings), Py_EQ) != 1)
      return nullptr;
  }
  const Owned parameters =
      kept(PyDict_GetItemWithError(attributes, torch_.parameters));
  if (parameters.get() == nullptr || !PyDict_Check(parameters.get())) return nullptr;

  PyObject *args[kMaxArguments] = {x};
  const Py_ssize_t count = PyTuple_Size(of(kNames));
  bool known = true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *name = PyTuple_GetItem(of(kNames), i);
    // an attribute of that name hides the parameter
    const bool there = PyTuple_GetItem(of(kThere), i) == Py_True;
    known = known && !(there && PyDict_Contains(attributes, name) != 0);
    PyObject *found = known ? PyDict_GetItemWithError(parameters.get(), name) : nullptr;
    args[1 + i] = found != nullptr ? found : Py_None;
    Py_INCREF(args[1 + i]);
    if (args[1 + i] == Py_None) continue;
    known = reinterpret_cast<PyObject *>(Py_TYPE(found)) == torch_.parameter;
  }
  PyObject *result = nullptr;
  if (known && PyErr_Occurred() == nullptr) result = call_guarded(
      PyCFunction_GetSelf(of(kGuarded)), args, 1 + count);
  for (Py_ssize_t i = 0; i < count; ++i) Py_DECREF(args[1 + i]);
  return result;
}

PyObject *call_module(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count == 2) {
    const Owned attributes = attributes_of(args[0]);
    PyObject *held = attributes.get();
    PyObject *result = held == nullptr ? nullptr : call_unchanged(self, args[0], held, args[1]);
    if (result != nullptr) return result;
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

PyMethodDef module_method = {"call_module", fastcall(call_module), METH_FASTCALL,
                             "Of a module and its input: the guarded call, or NotImplemented."};

// of_module(guarded, cls, forward, coded, code, read, settings, names, there, in_order) -> callable
// of (module, x). What it was given is its `__self__`, where Python's collector sees it.
PyObject *of_module(PyObject *, PyObject *arguments) {
  PyObject *guarded = PyTuple_Size(arguments) == kOf ? PyTuple_GetItem(arguments, kGuarded) : nullptr;
  const bool known = guarded != nullptr && PyCFunction_Check(guarded) &&
                     PyCapsule_IsValid(PyCFunction_GetSelf(guarded), kCapsule) &&
                     PyTuple_Check(PyTuple_GetItem(arguments, kNames)) &&
                     PyTuple_Check(PyTuple_GetItem(arguments, kThere)) &&
                     PyTuple_Size(PyTuple_GetItem(arguments, kNames)) < kMaxArguments &&
                     PyTuple_Size(PyTuple_GetItem(arguments, kNames)) ==
                         PyTuple_Size(PyTuple_GetItem(arguments, kThere));
  if (!known) {
    PyErr_SetString(PyExc_TypeError,
                    "`of_module`: expected what `guard` returned, then what its docstring says");
    return nullptr;
  }
  return PyCFunction_NewEx(&module_method, arguments, nullptr);
}

// ---------------------------------------------------------------------------------------------
// A module's call, past `Module._call_impl` where that would do nothing but call the forward

// Whether no hook would run, and the forward is still the one that was given.
bool unhooked(PyObject *module, PyObject *held, PyObject *forward) {
  PyObject *cls = reinterpret_cast<PyObject *>(Py_TYPE(module));
  if (Owned(PyObject_GetAttr(cls, torch_.call_impl)).get() != torch_.module_call_impl) return false;
  if (PyDict_GetItemWithError(held, torch_.forward) != forward) return false;
  if (PyDict_Contains(held, torch_.call_impl) != 0) return false;
  const auto none = [](PyObject *dict, PyObject *name) {
    PyObject *hooks = PyDict_GetItemWithError(dict, name);
    return hooks != nullptr && PyDict_Check(hooks) && PyDict_Size(hooks) == 0;
  };
  for (std::size_t i = 0; i < kHooks; ++i)
    if (!none(held, torch_.hooks[i]) || !none(torch_.of_modules, torch_.hooks_on_all[i])) return false;
  return true;
}

// direct(quick, forward, module, args, kwargs) -> result, or NotImplemented
PyObject *direct(PyObject *, PyObject *const *given, Py_ssize_t count) {
  const bool known = count == 5 && PyList_Check(given[0]) && PyTuple_Check(given[3]) &&
                     PyDict_Check(given[4]);
  if (!known) {
    PyErr_SetString(PyExc_TypeError,
                    "`direct`: expected a list, a forward, a module, a tuple and a dict");
    return nullptr;
  }
  PyObject *module = given[2], *result = nullptr;
  // held while it runs: a call in another thread may exchange it
  const Owned quick(PySequence_GetItem(given[0], 0));
  if (quick.get() != nullptr && PyCFunction_Check(quick.get()) &&
      PyCFunction_GetFunction(quick.get()) == module_method.ml_meth && PyTuple_Size(given[3]) == 1 &&
      PyDict_Size(given[4]) == 0) {
    const Owned attributes = attributes_of(module);
    PyObject *held = attributes.get();
    if (held != nullptr && unhooked(module, held, given[1]))
      result = call_unchanged(PyCFunction_GetSelf(quick.get()), module, held,
                              PyTuple_GetItem(given[3], 0));
  }
  if (result != nullptr) return result;
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

// ---------------------------------------------------------------------------------------------
// Operators over lists, which write into them and return nothing

// A list's or tuple's tensors, which it keeps alive.
struct Members {
  Owned items;
  std::unique_ptr<DLTensor[]> views;
  std::unique_ptr<DLTensor *[]> pointers;
  HfpTensorList tensors = {nullptr, 0};

  bool take(PyObject *sequence) {
    if (!PyList_Check(sequence) && !PyTuple_Check(sequence)) return false;
    items.take(PySequence_Tuple(sequence));
    if (items.get() == nullptr) return false;
    const Py_ssize_t count = PyTuple_Size(items.get());
    views = std::make_unique<DLTensor[]>(static_cast<std::size_t>(count));
    pointers = std::make_unique<DLTensor *[]>(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!read(PyTuple_GetItem(items.get(), i), views[i])) return false;
      pointers[i] = &views[i];
    }
    tensors = {pointers.get(), count};
    return true;
  }
};

template <class Op>
struct ListRunner : Row<Op> {
  using Table = Row<Op>;
  using Table::is_list;
  using Table::kArgs;
  using Table::kArguments;
  using Table::kLists;
  using Table::lists_before;

  Members lists[kLists];
  DLTensor views[kArguments];
  bool given[kArguments] = {};
  double floats[kArguments];
  int64_t ints[kArguments];

  // False, perhaps with an exception set: not a call for this way.
  bool take(PyObject *const *args) {
    for (std::size_t i = 0; i < kArguments; ++i) {
      if (is_list(i)) {
        if (!lists[lists_before(i)].take(args[i])) return false;
      } else if (is_tensor(kArgs[i].kind)) {
        given[i] = args[i] != Py_None;
        if (given[i] ? !read(args[i], views[i]) : kArgs[i].kind != Kind::OptionalTensor)
          return false;
      } else if (kArgs[i].kind == Kind::Float) {
        if (!PyFloat_Check(args[i]) && !PyLong_Check(args[i])) return false;
        floats[i] = PyFloat_AsDouble(args[i]);
      } else {
        if (!PyLong_Check(args[i])) return false;
        ints[i] = PyLong_AsLongLong(args[i]);
      }
    }
    return PyErr_Occurred() == nullptr && lists[0].tensors.count > 0;
  }

  template <std::size_t I>
  auto argument() const {
    if constexpr (kArgs[I].kind == Kind::Float) {
      return floats[I];
    } else if constexpr (kArgs[I].kind == Kind::Int) {
      return ints[I];
    } else if constexpr (is_list(I)) {
      const HfpTensorList *list = &lists[lists_before(I)].tensors;
      return list;
    } else {
      const DLTensor *tensor = given[I] ? &views[I] : nullptr;
      return tensor;
    }
  }

  template <std::size_t... I>
  bool launch(std::index_sequence<I...>) const {
    int32_t status = HFP_LAUNCH_FAILED;
    PyThreadState *const thread = PyEval_SaveThread();
    try {
      const Launch device(Op::name, lists[0].views[0]);
      status = Op::function(argument<I>()..., device.stream);
    } catch (const std::exception &) {  // the operator fails alike, and says so
    }
    PyEval_RestoreThread(thread);
    return status == HFP_OK;
  }
};

// 1: done, 0: refused, -1: another name.
template <class Op>
int run_lists(PyObject *name, PyObject *const *args, Py_ssize_t count) {
  if constexpr (Row<Op>::kOutputs == 0) {
    if (PyUnicode_CompareWithASCIIString(name, Op::name) != 0 || count != static_cast<Py_ssize_t>(Row<Op>::kArguments)) return -1;
    ListRunner<Op> runner;
    return runner.take(args) && runner.launch(std::make_index_sequence<Row<Op>::kArguments>{});
  } else {
    (void)name, (void)args, (void)count;
    return -1;
  }
}

// over_lists(name, *arguments of the operator) -> True: done, False: refused, and nothing was
// written; None: something listens to operators, or this is no such operator.
PyObject *over_lists(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count == 0 || !PyUnicode_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "`name`: expected a string");
    return nullptr;
  }
  int found = -1;
  if (torch_.api != nullptr && unheard()) {
#define HFP_RUN(NAME, ...) \
  if (found < 0) found = run_lists<NAME##_op>(args[0], args + 1, count - 1);
    HFP_LIST_OP_TABLE(HFP_RUN)
#undef HFP_RUN
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();  // the operator says it, if it is an error
  if (found < 0) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  return PyBool_FromLong(found);
}

// count(tensors, by) -> bool: adds a number to step counts, fp32 scalars on the CPU; False: a tensor
// is none of these, and no count has changed.
PyObject *count_steps(PyObject *, PyObject *arguments) {
  PyObject *sequence = nullptr;
  double by = 0;
  if (!PyArg_ParseTuple(arguments, "Od", &sequence, &by)) return nullptr;
  Members steps;
  bool known = torch_.api != nullptr && steps.take(sequence);
  for (int64_t i = 0; known && i < steps.tensors.count; ++i) {
    const DLTensor &t = steps.views[i];
    known = t.device.device_type == kDLCPU && t.ndim == 0 && t.data != nullptr &&
            same(t.dtype, {kDLFloat, 32, 1});
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  for (int64_t i = 0; known && i < steps.tensors.count; ++i) {
    const DLTensor &t = steps.views[i];
    *reinterpret_cast<float *>(static_cast<char *>(t.data) + t.byte_offset) +=
        static_cast<float>(by);
  }
  return PyBool_FromLong(known);
}

// `is_neg` of a new tensor: a builtin without arguments, whose function is that of all tensors; null
// where this torch has it otherwise.
PyObject *is_neg_of(PyObject *tensor) {
  const Owned made(PyObject_CallObject(tensor, nullptr));
  Owned method(made.get() != nullptr ? PyObject_GetAttrString(made.get(), "is_neg") : nullptr);
  const bool known = method.get() != nullptr && PyCFunction_Check(method.get()) &&
                     PyCFunction_GetFlags(method.get()) == METH_NOARGS &&
                     PyCFunction_GetSelf(method.get()) == made.get();
  return known ? method.release() : nullptr;
}

// read_state(path of libc10, or None: no more) -> whether the dispatcher's state can be read
PyObject *read_state(PyObject *, PyObject *arguments) {
  const char *path = nullptr;
  if (!PyArg_ParseTuple(arguments, "z", &path)) return nullptr;
  libc10_ = nullptr, plain_count_ = 0;
#if defined(__linux__)
  if (path != nullptr) libc10_ = dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
  if (state_of_thread() == nullptr) libc10_ = nullptr;
#endif
  return PyBool_FromLong(libc10_ != nullptr);
}

// note_plain(): in the thread's state, as it is now, no mode, transform or autocast is on
PyObject *note_plain(PyObject *, PyObject *) {
  const State *state = state_of_thread();
  if (state != nullptr && plain_count_ < kMostPlain) plain_[plain_count_++] = *state;
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject *is_plain(PyObject *, PyObject *) { return PyBool_FromLong(plain()); }

// setup(exchange_api, Tensor, Parameter, new_empty_strided, empty_cpu, empty_cuda,
//       (float32, float16, bfloat16), listeners, how many of them show in the dispatcher's state,
//       _is_any_autocast_enabled, is_autocast_enabled,
//       forward_ad.__dict__, Module._call_impl, torch.nn.modules.module.__dict__) -> bool
PyObject *setup(PyObject *, PyObject *arguments) {
  Torch given;
  PyObject *capsule = nullptr, *listeners = nullptr, *autocast_anywhere = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOOOOO(OOO)O!nOOO!OO!", &capsule, &given.tensor, &given.parameter,
                        &given.new_empty_strided, &given.empty_cpu, &given.empty_cuda,
                        &given.float32, &given.float16, &given.bfloat16, &PyTuple_Type,
                        &listeners, &given.listeners_of_state, &autocast_anywhere,
                        &given.autocast_enabled,
                        &PyDict_Type, &given.forward_ad, &given.module_call_impl, &PyDict_Type,
                        &given.of_modules))
    return nullptr;
  const auto *api =
      static_cast<const ExchangeApi *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  const Owned is_neg(is_neg_of(given.tensor));
  if (PyErr_Occurred() != nullptr) return nullptr;
  const bool known = api->header.major == 1 && api->dltensor_from_py_object_no_sync != nullptr &&
                     is_neg.get() != nullptr && PyTuple_Size(listeners) <= kMaxListeners;
  if (known && torch_.api == nullptr) {
    for (PyObject *object : {given.tensor, given.parameter, given.new_empty_strided,
                             given.empty_cpu, given.empty_cuda, given.float32, given.float16,
                             given.bfloat16, given.autocast_enabled, given.forward_ad,
                             given.module_call_impl, given.of_modules})
      Py_INCREF(object);
    given.current_level = PyUnicode_InternFromString("_current_level");
    given.requires_grad = PyUnicode_InternFromString("requires_grad");
    given.forward = PyUnicode_InternFromString("forward");
    given.code = PyUnicode_InternFromString("__code__");
    given.dict = PyUnicode_InternFromString("__dict__");
    given.parameters = PyUnicode_InternFromString("_parameters");
    given.call_impl = PyUnicode_InternFromString("_call_impl");
    for (std::size_t i = 0; i < kHooks; ++i) {
      given.hooks[i] = PyUnicode_InternFromString(kHookNames[i]);
      given.hooks_on_all[i] = PyUnicode_InternFromString(kHookOnAllNames[i]);
    }
    given.is_neg = PyCFunction_GetFunction(is_neg.get());
    given.autocast_anywhere.take(autocast_anywhere);
    for (; given.listeners_count < PyTuple_Size(listeners); ++given.listeners_count)
      given.listeners[given.listeners_count].take(
          PyTuple_GetItem(listeners, given.listeners_count));
    if (PyErr_Occurred() != nullptr) return nullptr;
    given.api = api;
    torch_ = given;
  }
  return PyBool_FromLong(known);
}

PyMethodDef methods[] = {
    {"over_lists", fastcall(over_lists), METH_FASTCALL,
     "over_lists(name, *arguments) -> done, refused, or None: not tried"},
    {"count", count_steps, METH_VARARGS, "count(tensors, by) -> whether they were counted"},
    {"bind", bind, METH_VARARGS, "bind(name, into, codes, operator) -> callable or None"},
    {"guard", guard, METH_VARARGS, "guard(bound, *tensors) -> callable or None"},
    {"of_module", of_module, METH_VARARGS, "of_module(guarded, ...) -> callable of (module, x)"},
    {"direct", fastcall(direct), METH_FASTCALL,
     "direct(quick, forward, module, args, kwargs) -> result, or NotImplemented"},
    {"note_values", note_values, METH_VARARGS, "note_values(dicts) -> callable"},
    {"note_sizes", note_sizes, METH_VARARGS, "note_sizes(dicts) -> callable"},
    {"note_attributes", note_attributes, METH_VARARGS, "note_attributes(dicts, names) -> callable"},
    {"find_versions", find_versions, METH_VARARGS, "find_versions(dict, changes) -> bool"},
    {"find_layout", find_layout, METH_VARARGS, "find_layout(examples, size) -> bool"},
    {"note_places", note_places, METH_VARARGS, "note_places(shown) -> callable or None"},
    {"read_state", read_state, METH_VARARGS, "read_state(path of libc10 or None) -> bool"},
    {"note_plain", note_plain, METH_NOARGS, "note_plain(): the dispatcher's state is a plain one"},
    {"is_plain", is_plain, METH_NOARGS, "is_plain() -> whether it is known to be one"},
    {"setup", setup, METH_VARARGS, "setup(exchange_api, ...) -> whether this torch is known"},
    {nullptr, nullptr, 0, nullptr}};

#define HFP_INIT_(NAME) PyInit_##NAME
#define HFP_INIT(NAME) HFP_INIT_(NAME)

PyModuleDef module = {PyModuleDef_HEAD_INIT, HFP_STRING(TORCH_EXTENSION_NAME),
                      "The operators as plain callables.", 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC HFP_INIT(TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&module); }

#endif
