// list_parts.h: a list of tensors shared out among threads as if it were one tensor, so that many
// small ones cost one parallel region.
#pragma once

#include "common.h"

namespace hfp {
namespace cpu {

template <class List>
struct ListWalk {
  const List *list;
  int64_t unit;  // elements that stay together

  int64_t units(int64_t i) const { return (list->size(i) + unit - 1) / unit; }
};

// Units [begin, end) of the whole list.
template <class List>
void walk_list(const ListWalk<List> &walk, int64_t begin, int64_t end) {
  int64_t first = 0;  // of tensor i
  for (int64_t i = 0; first < end && i < walk.list->count(); ++i) {
    const int64_t units = walk.units(i), next = first + units;
    if (next > begin && units > 0) {
      const int64_t from = (begin > first ? begin - first : 0) * walk.unit;
      const int64_t to = end < next ? (end - first) * walk.unit : walk.list->size(i);
      walk.list->run(i, from, to);
    }
    first = next;
  }
}

// list.run(i, begin, end) for all elements of all list.count() tensors, tensor i of list.size(i)
// elements, split at multiples of `unit`, at least `grain` elements to a thread.
template <class List>
void parallel_list(const List &list, int64_t unit, int64_t grain) {
  const ListWalk<List> walk = {&list, unit};
  int64_t units = 0;
  for (int64_t i = 0; i < list.count(); ++i) units += walk.units(i);
  parallel(walk_list<List>, walk, units, grain / unit, 1);
}

}  // namespace cpu
}  // namespace hfp
