// emulated.cpp: calls the C interface for a process of another architecture (emulated.py), which
// sends each call, with the memory that it may touch, to stdin, and reads the memory from stdout.
//
// A call: length and name; number of buffers, each its address there, size and bytes; how many
// words of that memory hold addresses, and where; then the arguments in the order of the C function,
// without the stream. Numbers are 8 bytes, little-endian.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hfpatch.h"

namespace {

void take(void *bytes, size_t size) {
  if (size == 0) return;
  if (std::fread(bytes, 1, size, stdin) != size) std::exit(0);  // the caller is done
}

template <class T>
T number() {
  T value;
  take(&value, sizeof value);
  return value;
}

std::string text() {
  std::string found(number<int64_t>(), '\0');
  take(&found[0], found.size());
  return found;
}

void give(const void *bytes, size_t size) { std::fwrite(bytes, 1, size, stdout); }

// Memory of the caller's, at the same place of a cache line, so that what is aligned there is here.
struct Buffer {
  static constexpr uint64_t kLine = 64;

  uint64_t address, size;
  std::vector<char> memory;
  char *data;

  Buffer() : address(number<uint64_t>()), size(number<uint64_t>()), memory(size + 2 * kLine) {
    const uint64_t start = reinterpret_cast<uint64_t>(memory.data());
    data = memory.data() + (address - start) % kLine;
    take(data, size);
  }

  bool holds(uint64_t place) const { return address <= place && place < address + size; }
};

// One call's arguments; deques, for what they hold is pointed to.
class Call {
 public:
  Call() : buffers_(number<int64_t>()) {
    for (int64_t left = number<int64_t>(); left > 0; --left) {
      words_.emplace_back(static_cast<uint64_t *>(local(number<uint64_t>())), 0);
      auto &[word, before] = words_.back();
      before = *word;
      *word = reinterpret_cast<uint64_t>(local(before));
    }
  }

  template <class T>
  T get() {
    if constexpr (std::is_same_v<T, void *>) {
      return nullptr;  // the stream
    } else if constexpr (!std::is_pointer_v<T>) {
      return number<T>();
    } else if constexpr (std::is_same_v<T, const HfpTensorList *>) {
      return list();
    } else {
      return tensor();
    }
  }

  void answer(int64_t result, const std::string &words) const {
    for (const auto &[word, before] : words_) *word = before;
    const int64_t length = static_cast<int64_t>(words.size());
    give(&result, sizeof result);
    give(&length, sizeof length);
    give(words.data(), words.size());
    for (const Buffer &buffer : buffers_) give(buffer.data, buffer.size);
    std::fflush(stdout);
  }

 private:
  void *local(uint64_t place) const {
    for (const Buffer &buffer : buffers_) {
      if (buffer.holds(place)) return buffer.data + (place - buffer.address);
    }
    return reinterpret_cast<void *>(place);  // NULL, or that of a tensor without elements
  }

  int64_t *numbers(int64_t count) {
    if (number<int64_t>() == 0) return nullptr;
    numbers_.emplace_back(count + 1);
    take(numbers_.back().data(), count * sizeof(int64_t));
    return numbers_.back().data();
  }

  DLTensor *tensor() {
    if (number<int64_t>() == 0) return nullptr;
    tensors_.emplace_back();
    DLTensor &t = tensors_.back();
    t.device.device_type = static_cast<int32_t>(number<int64_t>());
    t.device.device_id = static_cast<int32_t>(number<int64_t>());
    t.ndim = static_cast<int32_t>(number<int64_t>());
    t.dtype.code = static_cast<uint8_t>(number<int64_t>());
    t.dtype.bits = static_cast<uint8_t>(number<int64_t>());
    t.dtype.lanes = static_cast<uint16_t>(number<int64_t>());
    t.data = local(number<uint64_t>());
    t.byte_offset = number<uint64_t>();
    t.shape = numbers(t.ndim);
    t.strides = numbers(t.ndim);
    return &t;
  }

  const HfpTensorList *list() {
    if (number<int64_t>() == 0) return nullptr;
    const int64_t count = number<int64_t>();
    members_.emplace_back(count + 1);
    for (int64_t i = 0; i < count; ++i) members_.back()[i] = tensor();
    lists_.push_back(HfpTensorList{members_.back().data(), count});
    return &lists_.back();
  }

  std::deque<Buffer> buffers_;
  std::vector<std::pair<uint64_t *, uint64_t>> words_;  // with what stood there
  std::deque<DLTensor> tensors_;
  std::deque<std::vector<int64_t>> numbers_;
  std::deque<std::vector<DLTensor *>> members_;
  std::deque<HfpTensorList> lists_;
};

template <class R, class... A>
std::function<int64_t(Call &)> reading(R (*function)(A...)) {
  return [function](Call &call) {
    const std::tuple<A...> arguments{call.get<A>()...};  // in their order, as braces have it
    return static_cast<int64_t>(std::apply(function, arguments));
  };
}

}  // namespace

int main() {
  std::map<std::string, std::function<int64_t(Call &)>> functions{
      {"hfp_abi_version", reading(hfp_abi_version)},
      {"hfp_partial_rows", reading(hfp_partial_rows)},
      {"hfp_norm_partials", reading(hfp_norm_partials)},
      {"hfp_row_workspace", reading(hfp_row_workspace)},
      {"hfp_sum_partial_rows", reading(hfp_sum_partial_rows)},
      {"hfp_group_parts", reading(hfp_group_parts)},
      {"hfp_gemm_workspace", reading(hfp_gemm_workspace)},
      {"hfp_balance_parts", reading(hfp_balance_parts)},
      {"hfp_decode_workspace", reading(hfp_decode_workspace)},
#define HFP_ROW(name, function, result, schema) {#function, reading(function)},
      HFP_OP_TABLE(HFP_ROW) HFP_LIST_OP_TABLE(HFP_ROW) HFP_DECODE_TABLE(HFP_ROW)
#undef HFP_ROW
  };
  for (;;) {
    const std::string name = text();
    Call call;
    if (name == "hfp_build_info") {
      call.answer(0, hfp_build_info());
      continue;
    }
    const auto found = functions.find(name);
    if (found == functions.end()) {
      std::fprintf(stderr, "emulated.cpp knows no function `%s`; add it to main\n", name.c_str());
      return 1;
    }
    const int64_t result = found->second(call);
    call.answer(result, hfp_last_error());
  }
}
