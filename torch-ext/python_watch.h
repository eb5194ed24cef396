// python_watch.h: whether what Python objects hold is what they held: dictionaries, tensors' memory.
//
// A model has thousands of them, which decoding looks at for each token. What is noted once becomes a
// function of nothing, that looks.
//
// Python's stable ABI of 3.9 only.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "python_torch.h"

namespace {

// What objects held. It keeps them and what they held alive: an address is nobody else's meanwhile.
class Noted {
 public:
  virtual ~Noted() {
    for (PyObject *object : kept_) Py_DECREF(object);
  }
  virtual bool same() = 0;
  // What Python's collector asks: a model's parts may hold what looks at them.
  int visit(visitproc visited, void *arg) const {
    for (PyObject *object : kept_)
      if (const int stop = visited(object, arg)) return stop;
    return 0;
  }

 protected:
  PyObject *keep(PyObject *object) {
    Py_INCREF(object);
    kept_.push_back(object);
    return object;
  }

 private:
  std::vector<PyObject *> kept_;
};

// A number that a dictionary has anew after each change, behind its size: in Python up to 3.13. It is
// no interface of Python's: whether it is there is tried (find_versions).
bool dicts_have_versions = false;

uint64_t version_of(PyObject *dict) {
  return word<uint64_t>(reinterpret_cast<uintptr_t>(dict), sizeof(PyObject) + sizeof(Py_ssize_t));
}

// How many items it has, before that number: tried with it.
bool has_size(PyObject *dict, Py_ssize_t size) {
  if (!dicts_have_versions) return PyDict_Size(dict) == size;
  return word<Py_ssize_t>(reinterpret_cast<uintptr_t>(dict), sizeof(PyObject)) == size;
}

// The values of dictionaries, one after the other.
class NotedValues : public Noted {
 public:
  void note(PyObject *dict) {
    PyObject *key = nullptr, *value = nullptr;
    const std::size_t begin = values_.size();
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) values_.push_back(keep(value));
    dicts_.push_back({keep(dict), version_of(dict), begin, values_.size()});
  }
  bool same() override {
    for (Dict &known : dicts_)
      if (!(dicts_have_versions && version_of(known.dict) == known.version) && !compare(known)) return false;
    return true;
  }

 private:
  struct Dict {
    PyObject *dict;
    uint64_t version;
    std::size_t begin, end;  // of its values
  };

  bool compare(Dict &known) {
    PyObject *key = nullptr, *value = nullptr;
    std::size_t next = known.begin;
    for (Py_ssize_t at = 0; PyDict_Next(known.dict, &at, &key, &value); ++next)
      if (next == known.end || values_[next] != value) return false;
    known.version = version_of(known.dict);
    return next == known.end;
  }

  std::vector<Dict> dicts_;
  std::vector<PyObject *> values_;
};

class NotedSizes : public Noted {
 public:
  void note(PyObject *dict) { dicts_.push_back({keep(dict), PyDict_Size(dict)}); }
  bool same() override {
    for (const auto &[dict, size] : dicts_)
      if (!has_size(dict, size)) return false;
    return true;
  }

 private:
  struct Dict {
    PyObject *dict;
    Py_ssize_t size;
  };
  std::vector<Dict> dicts_;
};

// How many items instances' dictionaries have, and what under some names, null where nothing. Python's
// versions of such say every change that is made through `nn.Module.__setattr__` or the dictionary.
class NotedAttributes : public Noted {
 public:
  explicit NotedAttributes(PyObject *names) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) names_.push_back(keep(PyTuple_GetItem(names, i)));
  }
  void note(PyObject *dict) {
    for (PyObject *name : names_) {
      PyObject *value = PyDict_GetItemWithError(dict, name);
      values_.push_back(value == nullptr ? nullptr : keep(value));
    }
    dicts_.push_back({keep(dict), version_of(dict), PyDict_Size(dict)});
  }
  bool same() override {
    for (std::size_t i = 0; i < dicts_.size(); ++i)
      if (!(dicts_have_versions && version_of(dicts_[i].dict) == dicts_[i].version) && !compare(i)) return false;
    return true;
  }

 private:
  struct Dict {
    PyObject *dict;
    uint64_t version;
    Py_ssize_t size;
  };

  bool compare(std::size_t i) {
    if (PyDict_Size(dicts_[i].dict) != dicts_[i].size) return false;
    for (std::size_t n = 0; n < names_.size(); ++n)
      if (PyDict_GetItemWithError(dicts_[i].dict, names_[n]) != values_[i * names_.size() + n]) return false;
    dicts_[i].version = version_of(dicts_[i].dict);
    return true;
  }

  std::vector<PyObject *> names_;
  std::vector<Dict> dicts_;
  std::vector<PyObject *> values_;
};

class NotedPlaces : public Noted {
 public:
  bool note(const Shown &t) {
    places_.push_back({keep(t.tensor), t.data, t.offset});
    return layout_.shows(t);
  }
  bool same() override {
    for (const auto &[tensor, data, offset] : places_)
      if (!layout_.is_at(tensor, data, offset)) return false;
    return true;
  }

 private:
  struct Place {
    PyObject *tensor;
    uintptr_t data;
    int64_t offset;
  };
  std::vector<Place> places_;
};

// What a question has as its `__self__`: a capsule would hide from Python's collector what it keeps.
struct Holder {
  PyObject ob_base;
  Noted *noted;  // null once the collector took it apart
};

int holder_clear(PyObject *self) {
  delete std::exchange(reinterpret_cast<Holder *>(self)->noted, nullptr);
  return 0;
}

int holder_traverse(PyObject *self, visitproc visited, void *arg) {
  if (const int stop = visited(reinterpret_cast<PyObject *>(Py_TYPE(self)), arg)) return stop;
  const Noted *noted = reinterpret_cast<Holder *>(self)->noted;
  return noted != nullptr ? noted->visit(visited, arg) : 0;
}

void holder_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  holder_clear(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject *>(type));
}

PyType_Slot holder_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(holder_traverse)},
                              {Py_tp_clear, reinterpret_cast<void *>(holder_clear)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(holder_dealloc)},
                              {0, nullptr}};
PyType_Spec holder_spec = {"hfpatch_kernels.Noted", sizeof(Holder), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, holder_slots};

PyObject *noted_is_same(PyObject *self, PyObject *) {
  Noted *noted = reinterpret_cast<Holder *>(self)->noted;
  return PyBool_FromLong(noted != nullptr && noted->same());
}
PyMethodDef noted_method = {"is_same", noted_is_same, METH_NOARGS, "Whether it is what was noted."};

PyObject *question_of(std::unique_ptr<Noted> noted) {
  static PyObject *const type = PyType_FromSpec(&holder_spec);
  if (type == nullptr) return nullptr;
  PyObject *self = PyType_GenericAlloc(reinterpret_cast<PyTypeObject *>(type), 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<Holder *>(self)->noted = noted.release();
  PyObject *question = PyCFunction_New(&noted_method, self);
  Py_DECREF(self);
  return question;
}

// Notes each of a list of dictionaries.
template <typename T>
PyObject *note_dicts(std::unique_ptr<T> noted, PyObject *dicts) {
  for (Py_ssize_t i = 0; i < PyList_Size(dicts); ++i) {
    PyObject *dict = PyList_GetItem(dicts, i);
    if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "expected dictionaries, got %R", dict);
    noted->note(dict);
  }
  return PyErr_Occurred() == nullptr ? question_of(std::move(noted)) : nullptr;
}

PyObject *note_values(PyObject *, PyObject *args) {
  PyObject *dicts = nullptr;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &dicts)) return nullptr;
  return note_dicts(std::make_unique<NotedValues>(), dicts);
}

PyObject *note_sizes(PyObject *, PyObject *args) {
  PyObject *dicts = nullptr;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &dicts)) return nullptr;
  return note_dicts(std::make_unique<NotedSizes>(), dicts);
}

PyObject *note_attributes(PyObject *, PyObject *args) {
  PyObject *dicts = nullptr, *names = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &dicts, &PyTuple_Type, &names)) return nullptr;
  return note_dicts(std::make_unique<NotedAttributes>(names), dicts);
}

// find_versions(dict, changes): whether each change of a dictionary gives it another version, and its
// size lies where `has_size` looks.
PyObject *find_versions(PyObject *, PyObject *args) {
  PyObject *dict = nullptr, *changes = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &dict, &PyList_Type, &changes)) return nullptr;
  std::vector<uint64_t> seen{version_of(dict)};
  const auto size_is_there = [dict] {
    return word<Py_ssize_t>(reinterpret_cast<uintptr_t>(dict), sizeof(PyObject)) == PyDict_Size(dict);
  };
  bool anew = size_is_there();
  for (Py_ssize_t i = 0; i < PyList_Size(changes); ++i) {
    PyObject *result = PyObject_CallObject(PyList_GetItem(changes, i), nullptr);
    if (result == nullptr) return nullptr;
    Py_DECREF(result);
    const uint64_t version = version_of(dict);
    anew = anew && std::find(seen.begin(), seen.end(), version) == seen.end() && size_is_there();
    seen.push_back(version);
  }
  dicts_have_versions = anew && seen.size() > 1;
  return PyBool_FromLong(dicts_have_versions);
}

// A list of (tensor, address of its C++ object, of its storage's, where that begins, offset, keys).
bool read_shown(PyObject *list, std::vector<Shown> &shown) {
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    unsigned long long impl = 0, storage = 0, data = 0, keys = 0;
    long long offset = 0;
    PyObject *tensor = nullptr;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "OKKKLK", &tensor, &impl, &storage, &data, &offset, &keys))
      return false;
    shown.push_back({tensor, static_cast<uintptr_t>(impl), static_cast<uintptr_t>(storage),
                     static_cast<uintptr_t>(data), offset, keys});
  }
  return true;
}

// find_layout(examples, size of a tensor's Python object, lazily): whether torch's objects are as
// expected. `lazily()` makes the first example's storage one that is copied when it is written to.
PyObject *find_layout(PyObject *, PyObject *args) {
  PyObject *list = nullptr, *lazily = nullptr;
  Py_ssize_t size = 0;
  std::vector<Shown> examples;
  if (!PyArg_ParseTuple(args, "O!nO", &PyList_Type, &list, &size, &lazily) || !read_shown(list, examples))
    return nullptr;
  std::vector<DLTensor> views(examples.size());
  bool known = true;
  for (std::size_t i = 0; known && i < examples.size(); ++i) known = read(examples[i].tensor, views[i]);
  known = known && layout_.find(examples, views, size);
  if (known) {
    const uintptr_t storage = examples[0].storage, before = layout_.deleter(storage);
    PyObject *kept = PyObject_CallObject(lazily, nullptr);
    known = layout_.find_lazy(storage, before) && kept != nullptr;
    if (kept == nullptr) return nullptr;
    Py_DECREF(kept);
  }
  return PyBool_FromLong(known);
}

// note_places(tensors as Python shows them): None where they are not all laid out as expected.
PyObject *note_places(PyObject *, PyObject *args) {
  PyObject *list = nullptr;
  std::vector<Shown> shown;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list) || !read_shown(list, shown)) return nullptr;
  auto noted = std::make_unique<NotedPlaces>();
  bool as_expected = layout_.known();
  for (std::size_t i = 0; as_expected && i < shown.size(); ++i) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(shown[i].tensor));
    as_expected = (type == torch_.tensor || type == torch_.parameter) && noted->note(shown[i]);
  }
  if (as_expected) return question_of(std::move(noted));
  Py_RETURN_NONE;
}

}  // namespace
