// list_overlap.h: whether tensors of lists share memory.
//
// They have no gaps, so that each is one stretch of memory, and stretches in the order of their
// addresses overlap where one begins before the last one ends. Where they do not come in that order
// they are sorted by digits, which takes as long for any order: 1200 of them (300 parameters with
// gradients and moments) in 10 us, where std::sort took 5 us to 40 us.
#pragma once

#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

#include "check_any_shape.h"

namespace hfp {

// An argument of a call, validated: a list, or one tensor. Both NULL: none.
struct ListAccess {
  const char *name;
  bool written;
  const HfpTensorList *list;
  const DLTensor *one = nullptr;

  int64_t count() const { return list ? list->count : one ? 1 : 0; }
  const DLTensor &operator[](int64_t i) const { return list ? *list->tensors[i] : *one; }
};

struct Stretch {
  uint64_t begin, end;
  int64_t place;  // among all tensors of the call, in the order of its arguments
  bool written;
};

// Sorts by `begin`, eight bits at a time; `spare` is as long. Returns the one that holds the result.
inline Stretch *sorted(Stretch *from, Stretch *spare, int64_t count) {
  constexpr int kBits = 8;
  uint64_t low = from[0].begin, high = low;
  for (int64_t i = 1; i < count; ++i) {
    if (from[i].begin < low) low = from[i].begin;
    if (from[i].begin > high) high = from[i].begin;
  }
  for (int shift = 0; shift < 64 && (high - low) >> shift != 0; shift += kBits) {
    const auto digit = [low, shift](const Stretch &s) {
      return ((s.begin - low) >> shift) & ((1 << kBits) - 1);
    };
    uint32_t next[(1 << kBits) + 1] = {};  // where the next stretch with this digit goes
    for (int64_t i = 0; i < count; ++i) ++next[digit(from[i]) + 1];
    for (int k = 0; k < 1 << kBits; ++k) next[k + 1] += next[k];
    for (int64_t i = 0; i < count; ++i) spare[next[digit(from[i])]++] = from[i];
    std::swap(from, spare);
  }
  return from;
}

// "grads[3]", or the name of a tensor that is no list.
struct PlaceText {
  char text[64];

  PlaceText(std::initializer_list<ListAccess> accesses, int64_t place) {
    const ListAccess *access = accesses.begin();
    for (; place >= access->count(); ++access) place -= access->count();
    if (access->list) {
      std::snprintf(text, sizeof text, "%s[%lld]", access->name, static_cast<long long>(place));
    } else {
      std::snprintf(text, sizeof text, "%s", access->name);
    }
  }
};

// Fails where a tensor that is written shares memory with any other one. Those on another device than
// `device`, numbers on the CPU for a call on a GPU, share none.
inline int32_t disjoint(Check &check, int32_t device,
                        std::initializer_list<ListAccess> accesses) {
  int64_t most = 0;
  for (const ListAccess &access : accesses) most += access.count();
  const std::unique_ptr<Stretch[]> memory(new (std::nothrow) Stretch[2 * most]);
  if (!memory) return check.out_of_memory(2 * most * static_cast<int64_t>(sizeof(Stretch)));
  Stretch *all = memory.get();
  int64_t count = 0, place = 0;
  bool ascending = true;
  for (const ListAccess &access : accesses) {
    for (int64_t i = 0; i < access.count(); ++i, ++place) {
      const DLTensor &t = access[i];
      const int64_t bytes = numel_of(t) * (t.dtype.bits / 8);
      if (bytes == 0 || t.device.device_type != device) continue;
      const uint64_t begin = reinterpret_cast<uint64_t>(t.data) + t.byte_offset;
      all[count] = {begin, begin + static_cast<uint64_t>(bytes), place, access.written};
      ascending = ascending && (count == 0 || begin >= all[count - 1].begin);
      ++count;
    }
  }
  if (!ascending) all = sorted(all, all + most, count);
  // Of the stretches so far, and of those that are written: the one that ends last.
  const Stretch *last = nullptr, *last_written = nullptr;
  for (const Stretch *s = all; s < all + count; ++s) {
    const Stretch *before = s->written ? last : last_written;
    if (before && s->begin < before->end) {
      // As elsewhere, the first one named is written; of two that are, the later argument.
      const bool later = before->written && (!s->written || before->place > s->place);
      const Stretch *one = later ? before : s, *other = later ? s : before;
      check.fail("`%s` must not overlap `%s`, got tensors that share memory; clone one of them",
                 PlaceText(accesses, one->place).text, PlaceText(accesses, other->place).text);
      return check.status();
    }
    if (!last || s->end > last->end) last = s;
    if (s->written && (!last_written || s->end > last_written->end)) last_written = s;
  }
  return HFP_OK;
}

}  // namespace hfp
