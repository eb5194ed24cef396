// python_layout.h: tensors read off torch's own objects: 5 ns where DLPack's exchange takes 60.
//
// Where these have what is read is no interface of torch's. It is found by trying, with tensors of
// which Python says all parts, and nothing is read this way where one of them is elsewhere. Of each
// form of tensor (dtype, device, dispatch keys) the first is read by DLPack, and both must agree: so
// what is no ordinary tensor, or is to be read with another sign, has a form that is not known.
//
// Python's stable ABI of 3.9 only.
#pragma once

#if !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x03090000
#endif
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hfpatch.h"

namespace {

template <typename T>
T word(uintptr_t object, std::size_t at) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char *>(object) + at, sizeof(T));
  return value;
}

inline uintptr_t address(const PyObject *object) { return reinterpret_cast<uintptr_t>(object); }

// One tensor as Python shows it: its C++ object, its storage's, where that begins, the first element's
// place in it, and its dispatch keys.
struct Shown {
  PyObject *tensor;
  uintptr_t impl, storage, data;
  int64_t offset;
  uint64_t keys;
};

class Layout {
 public:
  // So many dimensions are told in a tensor's object itself.
  static constexpr std::size_t kInside = 5;

  bool known() const { return known_; }

  // Whether torch's objects are as expected. The examples are dense tensors of the CPU whose parts are
  // such that no other word is the same in all of them; `views`: DLPack's, of each.
  bool find(const std::vector<Shown> &examples, const std::vector<DLTensor> &views, std::size_t size) {
    known_ = false;
    count_ = 0;
    const auto object = [](const Shown &t) { return address(t.tensor); };
    const auto impl = [](const Shown &t) { return t.impl; };
    const auto storage = [](const Shown &t) { return t.storage; };
    impl_ = first_word<uintptr_t>(examples, size, object, impl);
    storage_ = first_word<uintptr_t>(examples, kImplBytes, impl, storage);
    offset_ = first_word<int64_t>(examples, kImplBytes, impl, [](const Shown &t) { return t.offset; });
    data_ = first_word<uintptr_t>(examples, kStorageBytes, storage, [](const Shown &t) { return t.data; });
    const std::size_t before = (1 + 2 * kInside) * sizeof(int64_t);  // how many dimensions, sizes, strides
    if (examples.empty() || impl_ == 0 || storage_ == 0 || data_ == 0 || offset_ <= before) return false;
    rank_ = offset_ - before;
    for (std::size_t i = 0; i < examples.size(); ++i)
      if (!is_as_expected(examples[i], views[i])) return false;
    for (std::size_t i = 0; i < examples.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) {
        const bool same = std::memcmp(&views[i].dtype, &views[j].dtype, sizeof(DLDataType)) == 0;
        if (same != (dtype_code(examples[i].impl) == dtype_code(examples[j].impl))) return false;
      }
    return known_ = true;
  }

  // The storage of a tensor that shares it until one of both writes (`torch._lazy_clone`), as it was
  // before. What would be written to is somebody else's.
  bool find_lazy(uintptr_t storage, uintptr_t before) {
    lazy_ = word<uintptr_t>(storage, data_ + sizeof(void *));
    return known_ = known_ && lazy_ != 0 && lazy_ != before;
  }
  uintptr_t deleter(uintptr_t storage) const { return word<uintptr_t>(storage, data_ + sizeof(void *)); }

  // Whether a tensor's parts lie where Python says, and whether they still do.
  bool shows(const Shown &t) const {
    return known_ && word<uintptr_t>(address(t.tensor), impl_) == t.impl &&
           word<uintptr_t>(t.impl, storage_) == t.storage && word<uintptr_t>(t.storage, data_) == t.data &&
           word<int64_t>(t.impl, offset_) == t.offset;
  }
  bool is_at(PyObject *tensor, uintptr_t begin, int64_t first) const {
    const auto impl = word<uintptr_t>(address(tensor), impl_);
    const auto storage = word<uintptr_t>(impl, storage_);  // null: it is another, a sparse one, by now
    return storage != 0 && word<int64_t>(impl, offset_) == first && word<uintptr_t>(storage, data_) == begin;
  }

  // A view of a tensor of a known form, which is a torch.Tensor or torch.nn.Parameter.
  bool read(PyObject *tensor, DLTensor &view) const {
    if (count_ == 0) return false;
    const auto impl = word<uintptr_t>(address(tensor), impl_);
    const uint64_t kind = kind_of(impl), keys = word<uint64_t>(impl, keys_at());
    for (std::size_t i = 0; i < count_; ++i)
      if (forms_[i].kind == kind && forms_[i].keys == keys) return view_of(impl, forms_[i], view);
    return false;
  }

  // DLPack gave this view of a tensor: from now on those of its form are read as above.
  void learn(PyObject *tensor, const DLTensor &view) {
    if (!known_ || count_ == kForms) return;
    const auto impl = word<uintptr_t>(address(tensor), impl_);
    const Form form{kind_of(impl), word<uint64_t>(impl, keys_at()), view.dtype, view.device};
    for (std::size_t i = 0; i < count_; ++i)
      if (forms_[i].kind == form.kind && forms_[i].keys == form.keys) return;  // lazy, or of many dimensions
    DLTensor ours;
    if (view_of(impl, form, ours) && same(ours, view)) forms_[count_++] = form;
  }

 private:
  // So much of torch's objects is looked at, which are larger.
  static constexpr std::size_t kImplBytes = 176, kStorageBytes = 48, kForms = 32;
  // Behind the offset: the number of elements, then dtype (2 bytes), device (type, index, whether there
  // is one) and flags, then the dispatch keys.
  static constexpr uint64_t kKind = 0xffffffffff;
  std::size_t keys_at() const { return offset_ + 3 * sizeof(int64_t); }
  uint64_t kind_of(uintptr_t impl) const { return word<uint64_t>(impl, offset_ + 2 * sizeof(int64_t)) & kKind; }
  uint16_t dtype_code(uintptr_t impl) const { return static_cast<uint16_t>(kind_of(impl)); }

  struct Form {
    uint64_t kind, keys;
    DLDataType dtype;
    DLDevice device;
  };

  // The first of an object's words that is what `wanted` says, in all examples; 0: none.
  template <typename T, typename Object, typename Wanted>
  static std::size_t first_word(const std::vector<Shown> &examples, std::size_t end, Object object,
                                Wanted wanted) {
    for (std::size_t at = sizeof(void *); at + sizeof(T) <= end; at += sizeof(T)) {
      const bool all = std::all_of(examples.begin(), examples.end(), [&](const Shown &t) {
        return word<T>(object(t), at) == wanted(t);
      });
      if (all) return at;
    }
    return 0;
  }

  bool is_as_expected(const Shown &t, const DLTensor &view) const {
    const uint64_t device = kind_of(t.impl) >> 16;  // the CPU, type 0, without an index: -1
    DLTensor ours;
    return device == 0x01ff00 && word<uint64_t>(t.impl, keys_at()) == t.keys &&
           view_of(t.impl, Form{0, 0, view.dtype, view.device}, ours) && same(ours, view);
  }

  bool view_of(uintptr_t impl, const Form &form, DLTensor &view) const {
    const auto rank = word<uint64_t>(impl, rank_);
    const auto storage = word<uintptr_t>(impl, storage_);
    if (rank > kInside || storage == 0 || deleter(storage) == lazy_) return false;
    const auto count = word<int64_t>(impl, offset_ + sizeof(int64_t));
    const int64_t first = word<int64_t>(impl, offset_) * (form.dtype.bits / 8);
    view.data = count == 0 ? nullptr : reinterpret_cast<char *>(word<uintptr_t>(storage, data_)) + first;
    view.device = form.device;
    view.ndim = static_cast<int32_t>(rank);
    view.dtype = form.dtype;
    view.shape = reinterpret_cast<int64_t *>(impl + rank_ + sizeof(int64_t));
    view.strides = view.shape + kInside;
    view.byte_offset = 0;
    return true;
  }

  static bool same(const DLTensor &a, const DLTensor &b) {
    const std::size_t bytes = static_cast<std::size_t>(a.ndim) * sizeof(int64_t);
    return a.ndim == b.ndim && a.byte_offset == b.byte_offset && a.data == b.data && b.dtype.bits % 8 == 0 &&
           b.dtype.lanes == 1 && (a.ndim == 0 || (std::memcmp(a.shape, b.shape, bytes) == 0 && b.strides != nullptr &&
                                                  std::memcmp(a.strides, b.strides, bytes) == 0));
  }

  bool known_ = false;
  std::size_t impl_ = 0, storage_ = 0, data_ = 0, rank_ = 0, offset_ = 0;
  uintptr_t lazy_ = 0;
  Form forms_[kForms];
  std::size_t count_ = 0;
};

Layout layout_;

}  // namespace
