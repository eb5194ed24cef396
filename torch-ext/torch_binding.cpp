// torch_binding.cpp: the torch operators, made from HFP_OP_TABLE and HFP_LIST_OP_TABLE. Stable ABI
// only.
//
// Each row of the tables becomes two operators, or the first alone if it has no result:
//
//   name(<arguments>) -> Tensor                          allocates its result by the result rule
//   name_out(Tensor(a!) out, <arguments>) -> ()          writes to the caller's tensor
//
// and each row of HFP_IN_PLACE_TABLE
//
//   name_(Tensor(a!) x, ...) -> ()                       writes over that argument; no result, since
//                                                        torch.compile takes no result that is an alias
//
// The row's schema is parsed at compile time and checked against the C function's parameters. A new
// operator therefore needs no line here, unless it brings a new result rule (`Rule` below).
//
// What happens between Python and the kernel is the cost of a small model, so this file calls the C
// shim directly and allocates nothing but the result. A copy is made only of an input whose layout
// the kernels do not walk.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "calls.h"
#include "hfpatch.h"
#include "op_table.h"
#include "registration.h"

namespace {

using namespace hfp_torch;

// What libtorch calls the dtypes and devices; asked once: the numbers are not part of its ABI.
struct Codes {
  int32_t f32 = aoti_torch_dtype_float32();
  int32_t f16 = aoti_torch_dtype_float16();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t i64 = aoti_torch_dtype_int64();
  int32_t cuda = aoti_torch_device_type_cuda();
  int32_t cpu = aoti_torch_device_type_cpu();
  DLDataType dlpack[64] = {};

  Codes() {
    const auto put = [this](int32_t code, uint8_t kind, uint8_t bits) {
      if (code >= 0 && code < 64) dlpack[code] = {kind, bits, 1};
    };
    put(f32, kDLFloat, 32);
    put(f16, kDLFloat, 16);
    put(bf16, kDLBfloat, 16);
    // No kernel takes these; they are here so that the error can name what came.
    constexpr uint8_t kComplex = 5, kBool = 6, kE4M3 = 10, kE4M3FNUZ = 11, kE5M2 = 12,
                      kE5M2FNUZ = 13;  // DLPack's codes
    put(aoti_torch_dtype_float64(), kDLFloat, 64);
    put(aoti_torch_dtype_uint8(), kDLUInt, 8);
    put(aoti_torch_dtype_uint16(), kDLUInt, 16);
    put(aoti_torch_dtype_uint32(), kDLUInt, 32);
    put(aoti_torch_dtype_uint64(), kDLUInt, 64);
    put(aoti_torch_dtype_int8(), kDLInt, 8);
    put(aoti_torch_dtype_int16(), kDLInt, 16);
    put(aoti_torch_dtype_int32(), kDLInt, 32);
    put(i64, kDLInt, 64);
    put(aoti_torch_dtype_bool(), kBool, 8);
    put(aoti_torch_dtype_complex32(), kComplex, 32);
    put(aoti_torch_dtype_complex64(), kComplex, 64);
    put(aoti_torch_dtype_complex128(), kComplex, 128);
    put(aoti_torch_dtype_float8_e4m3fn(), kE4M3, 8);
    put(aoti_torch_dtype_float8_e4m3fnuz(), kE4M3FNUZ, 8);
    put(aoti_torch_dtype_float8_e5m2(), kE5M2, 8);
    put(aoti_torch_dtype_float8_e5m2fnuz(), kE5M2FNUZ, 8);
  }
};

const Codes codes;

// ---------------------------------------------------------------------------------------------
// Tensors

struct View {
  DLTensor tensor;
  int32_t dtype, device_type;  // libtorch's codes
};

// None for a Tensor argument arrives as an undefined tensor; says what the C function says of NULL.
inline void check_defined(const char *operation, AtenTensorHandle handle, std::string_view name) {
  bool defined = false;
  HFP_SHIM(operation, aoti_torch_is_defined(handle, &defined));
  if (__builtin_expect(!defined, 0)) {
    throw std::runtime_error(std::string("hfp_") + operation + ": `" + std::string(name) +
                             "` must be a tensor, got NULL");
  }
}

// What a DLTensor says of `handle`; the shape and strides are borrowed from the tensor.
inline void describe(const char *operation, AtenTensorHandle handle, bool writable, View &view) {
  DLTensor &t = view.tensor;
  int64_t ndim = 0;
  HFP_SHIM(operation, aoti_torch_get_dim(handle, &ndim));
  HFP_SHIM(operation, aoti_torch_get_sizes(handle, &t.shape));
  HFP_SHIM(operation, aoti_torch_get_strides(handle, &t.strides));
  HFP_SHIM(operation, aoti_torch_get_dtype(handle, &view.dtype));
  HFP_SHIM(operation, aoti_torch_get_device_type(handle, &view.device_type));
  HFP_SHIM(operation, aoti_torch_get_device_index(handle, &t.device.device_id));
  if (writable) {
    HFP_SHIM(operation, torch_get_mutable_data_ptr(handle, &t.data));
  } else {
    // Through the const getter, a lazily copied tensor stays shared.
    HFP_SHIM(operation, torch_get_const_data_ptr(handle, const_cast<const void **>(&t.data)));
  }
  t.ndim = static_cast<int32_t>(ndim);
  t.dtype = static_cast<uint32_t>(view.dtype) < 64 ? codes.dlpack[view.dtype] : DLDataType{};
  t.device.device_type = view.device_type == codes.cuda ? kDLCUDA : kDLCPU;
  t.byte_offset = 0;
  if (t.device.device_type == kDLCPU) t.device.device_id = 0;  // torch says -1
}

// A list argument. The C functions take its tensors as they are, or refuse them: nothing is copied.
class List {
 public:
  // Takes over the list and every tensor in it, whatever happens.
  void take(const char *operation, StableListHandle list) {
    std::size_t size = 0;
    AOTITorchError status = torch_list_size(list, &size);
    if (status == AOTI_TORCH_SUCCESS) {
      handles_ = std::make_unique<Handle[]>(size);
      views_ = std::make_unique<View[]>(size);
      pointers_ = std::make_unique<DLTensor *[]>(size);
      for (std::size_t i = 0; i < size && status == AOTI_TORCH_SUCCESS; ++i) {
        StableIValue item = 0;
        status = torch_list_get_item(list, i, &item);
        handles_[i].take(reinterpret_cast<AtenTensorHandle>(static_cast<uintptr_t>(item)));
        pointers_[i] = &views_[i].tensor;
      }
      tensors = {pointers_.get(), static_cast<int64_t>(size)};
    }
    torch_delete_list(list);
    if (status != AOTI_TORCH_SUCCESS) fail(operation, "torch_list_get_item");
  }

  void describe_all(const char *operation, bool writable) {
    for (int64_t i = 0; i < tensors.count; ++i)
      describe(operation, handles_[i].get(), writable, views_[i]);
  }

  const View *first() const { return tensors.count > 0 ? &views_[0] : nullptr; }

  HfpTensorList tensors = {nullptr, 0};

 private:
  std::unique_ptr<Handle[]> handles_;
  std::unique_ptr<View[]> views_;
  std::unique_ptr<DLTensor *[]> pointers_;
};

// Replaces the tensor by a contiguous copy.
[[gnu::noinline]] void make_contiguous(const char *operation, Handle &handle, View &view) {
  const DLTensor &t = view.tensor;
  check_dims(operation, t.ndim);
  int64_t strides[kMaxDims];
  contiguous_strides(t.ndim, t.shape, strides);
  int32_t device_index = 0;
  HFP_SHIM(operation, aoti_torch_get_device_index(handle.get(), &device_index));
  AtenTensorHandle copy = nullptr;
  HFP_SHIM(operation, aoti_torch_empty_strided(t.ndim, t.shape, strides, view.dtype,
                                               view.device_type, device_index, &copy));
  Handle owner;
  owner.take(copy);
  HFP_SHIM(operation, aoti_torch_copy_(copy, handle.get(), /*non_blocking=*/0));
  aoti_torch_delete_tensor_object(handle.release());
  handle.take(owner.release());
  describe(operation, copy, false, view);
}

// ---------------------------------------------------------------------------------------------
// One operator

template <class Op>
struct Binding : Row<Op> {
  using Table = Row<Op>;
  using Table::find;
  using Table::is_list;
  using Table::kArgs;
  using Table::kArguments;
  using Table::kLists;
  using Table::kOutputs;
  using Table::lists_before;


  // The arguments of one call, taken off the boxed stack: it owns every handle there.
  struct Call {
    Handle handles[kArguments];
    View views[kArguments];
    double floats[kArguments];
    int64_t ints[kArguments];
    std::array<List, kLists> lists;

    // `replaced`: a bit for each argument that the call writes over, which must stay the caller's.
    explicit Call(const StableIValue *stack, uint64_t replaced = 0) {
      // Own everything first, so that an exception below leaks nothing.
      for (std::size_t i = 0; i < kArguments; ++i) {
        switch (kArgs[i].kind) {
          case Kind::Tensor:
            handles[i].take(pointer<AtenTensorHandle>(stack[i]));
            break;
          case Kind::OptionalTensor:
            // None is a null pointer; a value comes in a cell on the heap that is ours to free.
            if (auto *cell = pointer<StableIValue *>(stack[i])) {
              handles[i].take(pointer<AtenTensorHandle>(*cell));
              delete cell;
            }
            break;
          case Kind::List:
          case Kind::MutableList:
            break;  // below: taking them may throw
          case Kind::Float:
            std::memcpy(&floats[i], &stack[i], sizeof(double));
            break;
          default:
            std::memcpy(&ints[i], &stack[i], sizeof(int64_t));
        }
      }
      if constexpr (kLists > 0) take_lists(stack);
      for (std::size_t i = 0; i < kArguments; ++i) {
        if (handles[i].get() == nullptr) continue;
        const bool own = (replaced >> i & 1) != 0;
        check_defined(Op::name, handles[i].get(), kArgs[i].name);
        describe(Op::name, handles[i].get(), own, views[i]);
        if (__builtin_expect(!own && !walkable(views[i].tensor), 0))
          make_contiguous(Op::name, handles[i], views[i]);
      }
    }

    void take_lists(const StableIValue *stack) {
      for (std::size_t i = 0; i < kArguments; ++i) {
        if (is_list(i))
          lists[lists_before(i)].take(Op::name, pointer<StableListHandle>(stack[i]));
      }
      for (std::size_t i = 0; i < kArguments; ++i) {
        if (is_list(i))
          lists[lists_before(i)].describe_all(Op::name, kArgs[i].kind == Kind::MutableList);
      }
    }

    // The tensor whose device the call runs on; null if its list is empty.
    const View *anchor() const {
      if constexpr (is_list(0)) return lists[0].first();
      else return &views[0];
    }

    template <class T>
    static T pointer(StableIValue value) {
      return reinterpret_cast<T>(static_cast<uintptr_t>(value));
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
        const DLTensor *tensor = handles[I].get() != nullptr ? &views[I].tensor : nullptr;
        return tensor;
      }
    }

    template <std::size_t... O, std::size_t... I>
    void run(View *outs, std::index_sequence<O...>, std::index_sequence<I...>) {
      const View *first = anchor();
      const Launch launch(Op::name, first != nullptr ? first->tensor : DLTensor{});
      const int32_t status =
          Op::function(&outs[O].tensor..., argument<I>()..., launch.stream);
      if (__builtin_expect(status != HFP_OK, 0)) throw std::runtime_error(hfp_last_error());
    }

    // Sums over the rows that share a row of the parameter; see hfp_mul_add_backward.
    void sum_partials(const DLTensor &parameter, int64_t *shape) const {
      constexpr int needs = find("needs");
      static_assert(needs >= 0, "result rule \"sums\": needs `needs`");
      const DLTensor &x = views[0].tensor;
      const int64_t cols = x.ndim > 0 ? x.shape[x.ndim - 1] : 0;
      int64_t rows = 1, sums = 1;
      for (int32_t i = 0; i + 1 < x.ndim; ++i) rows *= x.shape[i];
      for (int32_t i = 0; i + 1 < parameter.ndim; ++i) sums *= parameter.shape[i];
      const int64_t wanted = (ints[needs] & 1) + (ints[needs] >> 1 & 1);
      shape[0] = wanted > 0 ? hfp_sum_partial_rows(rows, cols, sums) : 0;
      shape[1] = wanted * cols;
    }

    // What a product needs; tensors of other dimensions are the C function's to refuse.
    template <Rule rule>
    void product_of(int32_t &ndim, int64_t *shape, int32_t &dtype) const {
      constexpr int transpose_a = find("transpose_a"), transpose_b = find("transpose_b");
      static_assert(transpose_a >= 0 && transpose_b >= 0 && kArgs[1].kind == Kind::Tensor,
                    "result rule \"product\": needs two tensors, `transpose_a` and `transpose_b`");
      const DLTensor &a = views[0].tensor, &b = views[1].tensor;
      int64_t batch = 1, m = 0, n = 0, k = 0;
      if (a.ndim == b.ndim && a.ndim >= 2 && a.ndim <= 3) {
        const int32_t first = a.ndim - 2;
        const bool left = ints[transpose_a] != 0, right = ints[transpose_b] != 0;
        m = a.shape[first + (left ? 1 : 0)];
        k = a.shape[first + (left ? 0 : 1)];
        n = b.shape[first + (right ? 0 : 1)];
        if (first == 1) {
          batch = a.shape[0] != 1 ? a.shape[0] : b.shape[0];
          constexpr int c = find("c");
          if (c >= 0 && batch == 1 && handles[c].get() && views[c].tensor.ndim == 3)
            batch = views[c].tensor.shape[0];
        }
      }
      if constexpr (rule == Rule::ProductWorkspace) {
        ndim = 1;
        shape[0] = hfp_gemm_workspace(batch, m, n, k, a.device.device_type);
        dtype = codes.f32;
      } else {
        shape[0] = batch;
        shape[ndim > 2 ? 1 : 0] = m;
        shape[ndim > 2 ? 2 : 1] = n;
        if (ndim != 3) ndim = 2;
      }
    }

    void run(View *outs) {
      run(outs, std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kArguments>{});
    }

    int32_t norm_dtype() const {
      constexpr int weight = find("weight"), cast = find("cast");
      static_assert(weight >= 0 && cast >= 0, "result rule \"norm\": needs `weight` and `cast`");
      const int32_t x = views[0].dtype;
      if (handles[weight].get() == nullptr) return x;
      const int32_t w = views[weight].dtype;
      switch (ints[cast]) {
        case HFP_CAST_INPUT:
          return x == w ? x : codes.f32;  // any two different floating types here promote to fp32
        case HFP_CAST_WEIGHT:
          return w;
        default:
          return x;
      }
    }

    static int64_t rows_of(const DLTensor &x) {
      int64_t rows = 1;
      for (int32_t i = 0; i + 1 < x.ndim; ++i) rows *= x.shape[i];
      return rows;
    }

    // The gradients of a norm's parameters, and the sums that they are made of; see hfpatch.h.
    template <Rule rule>
    void parameter_gradient(const DLTensor &x, int64_t *shape, int32_t &dtype) const {
      constexpr int needs = find("needs");
      constexpr int parameter = find(rule == Rule::Bias ? "bias" : "weight");
      static_assert(needs >= 0 && parameter >= 0,
                    "result rules of norms: need `needs`, `weight` and `bias`");
      const int64_t cols = x.ndim > 0 ? x.shape[x.ndim - 1] : 0;
      if constexpr (rule == Rule::Partials) {
        const int64_t rows = rows_of(x);
        const int64_t wanted = (ints[needs] & 1) + (ints[needs] >> 1 & 1);
        shape[0] = wanted > 0 ? hfp_partial_rows(rows, cols) : 0;
        shape[1] = wanted * cols;
        dtype = codes.f32;
      } else {
        constexpr int64_t bit = rule == Rule::Bias ? HFP_NEED_BIAS : HFP_NEED_WEIGHT;
        const bool wanted = (ints[needs] & bit) != 0 && handles[parameter].get() != nullptr;
        shape[0] = wanted ? cols : 0;
        if (wanted) dtype = views[parameter].dtype;
      }
    }

    template <std::size_t O>
    void allocate(Handle &handle, View &out) const {
      constexpr Rule rule = parse_rule(part(Op::result, O));
      constexpr bool of_list = rule == Rule::Chunks || (rule == Rule::Scalar && kLists > 0);
      if constexpr (of_list) allocate_of_list<O>(handle, out);
      else allocate_of_tensor<O>(handle, out);
    }

    template <std::size_t O>
    void allocate_of_list(Handle &handle, View &out) const {
      constexpr Rule rule = parse_rule(part(Op::result, O));
      static_assert(is_list(0), "result rules \"scalar\" and \"chunks\": need a list first");
      const View *first = anchor();
      if (first == nullptr) {
        throw std::runtime_error(std::string("hfpatch: `") + Op::name + "`: `" +
                                 std::string(kArgs[0].name) +
                                 "`: expected at least one tensor, got an empty list");
      }
      const int64_t size = rule == Rule::Chunks ? hfp_norm_partials(&lists[0].tensors) : 1;
      const int64_t stride = 1;
      AtenTensorHandle result = nullptr;
      HFP_SHIM(Op::name,
               aoti_torch_empty_strided(rule == Rule::Chunks ? 1 : 0, &size, &stride, codes.f32,
                                        first->device_type, first->tensor.device.device_id,
                                        &result));
      handle.take(result);
      describe(Op::name, result, true, out);
    }

    template <std::size_t O>
    void allocate_of_tensor(Handle &handle, View &out) const {
      constexpr std::string_view text = part(Op::result, O);
      constexpr Rule rule = parse_rule(text);
      static_assert(rule != Rule::Invalid, "HFP_OP_TABLE: unknown result rule");
      constexpr bool has_name =
          rule == Rule::LikeNamed || rule == Rule::LikeIfNeeded || rule == Rule::Sums;
      constexpr int source = has_name ? find(named(text)) : 0;
      static_assert(source >= 0 && kArgs[source < 0 ? 0 : source].kind == Kind::Tensor,
                    "HFP_OP_TABLE: a result rule names no Tensor argument");
      const DLTensor &x = views[source].tensor;
      int32_t ndim = x.ndim;
      check_dims(Op::name, ndim);
      int64_t shape[kMaxDims], strides[kMaxDims];
      for (int32_t i = 0; i < ndim; ++i) shape[i] = x.shape[i];
      int32_t dtype = views[source].dtype;
      if constexpr (rule == Rule::Halved) {
        if (ndim > 0) shape[ndim - 1] /= 2;  // an odd size is the C function's to refuse
      } else if constexpr (rule == Rule::Norm) {
        dtype = norm_dtype();
      } else if constexpr (rule == Rule::Modulated) {
        constexpr int cast = find("cast");
        static_assert(cast >= 0 && kArguments > 1 && kArgs[1].kind == Kind::Tensor,
                      "result rule \"modulated\": needs a second tensor and `cast`");
        // Any two different floating types here promote to fp32.
        if (ints[cast] == HFP_CAST_INPUT && views[1].dtype != dtype) dtype = codes.f32;
      } else if constexpr (rule == Rule::Scalar) {
        ndim = 0;
        dtype = codes.f32;
      } else if constexpr (rule == Rule::Rows) {
        if (ndim > 0) --ndim;
        dtype = codes.f32;
      } else if constexpr (rule == Rule::LikeIfNeeded) {
        constexpr int needs = find("needs");
        static_assert(needs >= 0, "result rule \"=NAME&BIT\": needs `needs`");
        if ((ints[needs] & (text.back() - '0')) == 0) shape[0] = 0, ndim = 1;
      } else if constexpr (rule == Rule::Sums) {
        sum_partials(x, shape);
        ndim = 2;
        dtype = codes.f32;
      } else if constexpr (rule == Rule::Weight || rule == Rule::Bias || rule == Rule::Partials) {
        parameter_gradient<rule>(x, shape, dtype);
        ndim = rule == Rule::Partials ? 2 : 1;
      } else if constexpr (rule == Rule::Indices) {
        if (ndim > 0) --ndim;
        dtype = codes.i64;
      } else if constexpr (rule == Rule::Workspace) {
        shape[0] = hfp_row_workspace(rows_of(x), x.ndim > 0 ? x.shape[x.ndim - 1] : 0);
        ndim = 1;
        dtype = codes.i64;
      } else if constexpr (rule == Rule::Topk || rule == Rule::TopkIndices) {
        constexpr int k = find("k");
        static_assert(k >= 0, "result rule \"topk\": needs `k`");
        // A k out of range is the C function's to refuse, before it looks at the results.
        if (ndim > 0 && ints[k] < x.shape[ndim - 1]) shape[ndim - 1] = ints[k] < 0 ? 0 : ints[k];
        if (rule == Rule::TopkIndices) dtype = codes.i64;
      } else if constexpr (rule == Rule::Groups) {
        static_assert(find("groups") >= 0 && find("channels_last") >= 0,
                      "result rule \"groups\": needs `groups` and `channels_last`");
        ndim = group_statistics(x, ints[find("groups")], ints[find("channels_last")] != 0, shape);
        dtype = codes.f32;
      }
      if constexpr (rule == Rule::Product || rule == Rule::ProductWorkspace) {
        product_of<rule>(ndim, shape, dtype);
      } else if constexpr (rule == Rule::Attended) {
        constexpr int v = find("v");
        static_assert(v >= 0, "result rule \"attended\": needs `v`");
        const DLTensor &value = views[v].tensor;
        if (ndim > 0 && value.ndim > 0) shape[ndim - 1] = value.shape[value.ndim - 1];
      } else if constexpr (rule == Rule::Balance || rule == Rule::BalancePartials) {
        const int64_t tokens = ndim > 0 ? shape[0] : 0, experts = ndim > 0 ? shape[ndim - 1] : 0;
        ndim = 1;
        shape[0] = 2 * experts + 1;
        if (rule == Rule::BalancePartials) shape[0] *= hfp_balance_parts(tokens);
        dtype = codes.f32;
      }
      contiguous_strides(ndim, shape, strides);
      AtenTensorHandle result = nullptr;
      HFP_SHIM(Op::name,
               aoti_torch_empty_strided(ndim, shape, strides, dtype, views[source].device_type,
                                        x.device.device_id, &result));
      handle.take(result);
      describe(Op::name, result, true, out);
    }

    template <std::size_t... O>
    void functional(StableIValue *stack, std::index_sequence<O...>) {
      Handle results[kOutputs + 1];  // an array of none is not C++
      View outs[kOutputs + 1];
      (allocate<O>(results[O], outs[O]), ...);
      run(outs);
      for (std::size_t i = 0; i < kOutputs; ++i)
        stack[i] = static_cast<StableIValue>(reinterpret_cast<uintptr_t>(results[i].release()));
    }
  };

  static void functional(StableIValue *stack, uint64_t, uint64_t) {
    Call call(stack);
    call.functional(stack, std::make_index_sequence<kOutputs>{});
  }

  static void out(StableIValue *stack, uint64_t, uint64_t) {
    static_assert(kOutputs > 0);
    Handle results[kOutputs];
    for (std::size_t i = 0; i < kOutputs; ++i)
      results[i].take(reinterpret_cast<AtenTensorHandle>(static_cast<uintptr_t>(stack[i])));
    Call call(stack + kOutputs);
    View outs[kOutputs];
    for (std::size_t i = 0; i < kOutputs; ++i) {
      check_defined(Op::name, results[i].get(), "out");
      describe(Op::name, results[i].get(), true, outs[i]);
    }
    call.run(outs);
  }

  // "rms_norm(Tensor x, ...) -> Tensor"
  static std::string schema() {
    std::string result = kOutputs == 0 ? "()" : "Tensor";
    if (kOutputs > 1) {
      result = "(Tensor";
      for (std::size_t i = 1; i < kOutputs; ++i) result += ", Tensor";
      result += ")";
    }
    return std::string(Op::name) + "(" + Op::arguments + ") -> " + result;
  }

  // "rms_norm_out(Tensor(a!) out, Tensor x, ...) -> ()"; several outputs: out0, out1, ...
  static std::string out_schema() {
    std::string outs;
    for (std::size_t i = 0; i < kOutputs; ++i) {
      outs += std::string("Tensor(") + static_cast<char>('a' + i) + "!) out";
      outs += (kOutputs > 1 ? std::to_string(i) : std::string()) + ", ";
    }
    return std::string(Op::name) + "_out(" + outs + Op::arguments + ") -> ()";
  }
};

// The operator that writes over arguments; `Replaced::names` says which, one per result.
template <class Op, class Replaced>
struct InPlace {
  using Functional = Binding<Op>;
  static constexpr std::size_t kOutputs = Functional::kOutputs;

  static constexpr int argument(std::size_t output) {
    return Functional::find(part(Replaced::names, output));
  }

  static constexpr bool valid() {
    for (std::size_t i = 0; i < kOutputs; ++i) {
      if (argument(i) < 0 || Functional::kArgs[argument(i)].kind != Kind::Tensor) return false;
    }
    return count_parts(Replaced::names) == kOutputs;
  }
  static_assert(valid(), "HFP_IN_PLACE_TABLE: one Tensor argument per result");

  static constexpr uint64_t mask() {
    uint64_t bits = 0;
    for (std::size_t i = 0; i < kOutputs; ++i) bits |= uint64_t{1} << argument(i);
    return bits;
  }

  static void run(StableIValue *stack, uint64_t, uint64_t) {
    typename Functional::Call call(stack, mask());
    View outs[kOutputs];
    for (std::size_t i = 0; i < kOutputs; ++i) outs[i] = call.views[argument(i)];
    try {
      call.run(outs);
    } catch (const std::runtime_error &error) {
      throw std::runtime_error(std::string(error.what()) + " (in place: the result is `" +
                               Replaced::names + "`)");
    }
  }

  // "rope_qk_(Tensor(a!) q, Tensor(b!) k, Tensor cos, ...) -> ()"
  static std::string schema() {
    std::string text = std::string(Op::name) + "_(";
    for (std::size_t i = 0; i < Functional::kArguments; ++i) {
      if (i > 0) text += ", ";
      char alias = 0;
      for (std::size_t o = 0; o < kOutputs; ++o) {
        if (argument(o) == static_cast<int>(i)) alias = static_cast<char>('a' + o);
      }
      if (alias == 0) {
        text += std::string(part(Op::arguments, i));
      } else {
        text += std::string("Tensor(") + alias + "!) " + std::string(Functional::kArgs[i].name);
      }
    }
    return text + ") -> ()";
  }
};

template <class Op>
void define(torch::stable::detail::StableLibrary &ops) {
  ops.def(Binding<Op>::schema().c_str());
  if constexpr (Binding<Op>::kOutputs > 0) ops.def(Binding<Op>::out_schema().c_str());
}

template <class Op>
void implement(torch::stable::detail::StableLibrary &ops) {
  ops.impl(Op::name, &Binding<Op>::functional);
  if constexpr (Binding<Op>::kOutputs > 0) ops.impl(Op::out_name, &Binding<Op>::out);
}

#define HFP_IN_PLACE(NAME, ARGUMENTS)                        \
  struct NAME##_replaced {                                   \
    static constexpr const char *name = #NAME "_";           \
    static constexpr const char *names = ARGUMENTS;          \
  };
HFP_IN_PLACE_TABLE(HFP_IN_PLACE)
#undef HFP_IN_PLACE

}  // namespace

#define HFP_DEFINE(NAME, ...) define<NAME##_op>(ops);
#define HFP_IMPLEMENT(NAME, ...) implement<NAME##_op>(ops);
#define HFP_DEFINE_IN_PLACE(NAME, ARGUMENTS) \
  ops.def(InPlace<NAME##_op, NAME##_replaced>::schema().c_str());
#define HFP_IMPLEMENT_IN_PLACE(NAME, ARGUMENTS) \
  ops.impl(NAME##_replaced::name, &InPlace<NAME##_op, NAME##_replaced>::run);

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  HFP_OP_TABLE(HFP_DEFINE)
  HFP_LIST_OP_TABLE(HFP_DEFINE)
  HFP_IN_PLACE_TABLE(HFP_DEFINE_IN_PLACE)
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  HFP_OP_TABLE(HFP_IMPLEMENT)
  HFP_LIST_OP_TABLE(HFP_IMPLEMENT)
  HFP_IN_PLACE_TABLE(HFP_IMPLEMENT_IN_PLACE)
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  HFP_OP_TABLE(HFP_IMPLEMENT)
  HFP_LIST_OP_TABLE(HFP_IMPLEMENT)
  HFP_IN_PLACE_TABLE(HFP_IMPLEMENT_IN_PLACE)
}
#endif
