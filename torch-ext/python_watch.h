// python_watch.h: whether what Python objects hold is what they held: dictionaries, tensors' memory.
//
// A model has thousands of them, which decoding looks at for each token. Each function answers a
// question of two lists, and False where the lists are not of the kind.
//
// Python's stable ABI of 3.9 only.
#pragma once

#include "python_torch.h"

namespace {

// A call's arguments, of which the first and the last are lists.
struct Lists {
  PyObject *first, *last;
  Lists(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected)
      : first(count == expected ? args[0] : nullptr), last(count == expected ? args[count - 1] : nullptr) {
    if (first == nullptr || !PyList_Check(first) || !PyList_Check(last)) first = nullptr;
  }
  // Whether they are lists of one length.
  bool paired() const { return first != nullptr && PyList_Size(first) == PyList_Size(last); }
};

PyObject *answer(bool yes) {
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  return PyBool_FromLong(yes);
}

// values_are(dicts, objects): whether the values of all dicts, one after the other, are these objects.
PyObject *values_are(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const Lists lists(args, count, 2);
  bool same = lists.first != nullptr;
  Py_ssize_t next = 0;
  const Py_ssize_t all = same ? PyList_Size(lists.last) : 0;
  for (Py_ssize_t i = 0; same && i < PyList_Size(lists.first); ++i) {
    PyObject *dict = PyList_GetItem(lists.first, i), *key = nullptr, *value = nullptr;
    same = PyDict_Check(dict);
    for (Py_ssize_t at = 0; same && PyDict_Next(dict, &at, &key, &value);)
      same = next < all && PyList_GetItem(lists.last, next++) == value;
  }
  return answer(same && next == all);
}

// sizes_are(dicts, sizes)
PyObject *sizes_are(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const Lists lists(args, count, 2);
  bool same = lists.paired();
  for (Py_ssize_t i = 0; same && i < PyList_Size(lists.first); ++i) {
    PyObject *dict = PyList_GetItem(lists.first, i);
    same = PyDict_Check(dict) && PyDict_Size(dict) == PyLong_AsSsize_t(PyList_GetItem(lists.last, i));
  }
  return answer(same);
}

// items_are(dicts, name, addresses): whether each dict has by that name the object at that address.
PyObject *items_are(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const Lists lists(args, count, 3);
  bool same = lists.paired();
  for (Py_ssize_t i = 0; same && i < PyList_Size(lists.first); ++i) {
    PyObject *dict = PyList_GetItem(lists.first, i);
    PyObject *item = PyDict_Check(dict) ? PyDict_GetItemWithError(dict, args[1]) : nullptr;
    same = item != nullptr && item == PyLong_AsVoidPtr(PyList_GetItem(lists.last, i));
  }
  return answer(same);
}

// lie_at(tensors, addresses): whether each tensor's first element lies there.
PyObject *lie_at(PyObject *, PyObject *const *args, Py_ssize_t count) {
  const Lists lists(args, count, 2);
  bool same = torch_.api != nullptr && lists.paired();
  for (Py_ssize_t i = 0; same && i < PyList_Size(lists.first); ++i) {
    DLTensor tensor;
    same = read(PyList_GetItem(lists.first, i), tensor) &&
           static_cast<char *>(tensor.data) + tensor.byte_offset ==
               PyLong_AsVoidPtr(PyList_GetItem(lists.last, i));
  }
  return answer(same);
}

}  // namespace
