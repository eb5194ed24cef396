// op_table.h: the rows of HFP_OP_TABLE and HFP_LIST_OP_TABLE at compile time: the schema parsed and
// checked against the C function, the result rules. Both bindings are made from these.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "hfpatch.h"

namespace hfp_torch {

// ---------------------------------------------------------------------------------------------
// The schema string, at compile time

enum class Kind { Tensor, OptionalTensor, List, MutableList, Float, Int, Invalid };

struct Argument {
  Kind kind = Kind::Invalid;
  std::string_view name;
};

constexpr std::string_view trim(std::string_view s) {
  while (!s.empty() && s.front() == ' ') s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ') s.remove_suffix(1);
  return s;
}

// The i-th of the comma-separated parts of `list`; empty when there are fewer.
constexpr std::string_view part(std::string_view list, std::size_t i) {
  for (; i > 0; --i) {
    const std::size_t comma = list.find(',');
    if (comma == std::string_view::npos) return {};
    list.remove_prefix(comma + 1);
  }
  return trim(list.substr(0, list.find(',')));
}

constexpr std::size_t count_parts(std::string_view list) {
  std::size_t n = 0;
  while (!part(list, n).empty()) ++n;
  return n;
}

constexpr Argument parse_argument(std::string_view text) {
  const std::size_t space = text.find(' ');
  const std::string_view type = text.substr(0, space);
  const std::string_view name = trim(text.substr(space + 1));
  if (type == "Tensor") return {Kind::Tensor, name};
  if (type == "Tensor?") return {Kind::OptionalTensor, name};
  if (type == "Tensor[]") return {Kind::List, name};
  if (type.substr(0, 7) == "Tensor(" && type.find("!)[]") != std::string_view::npos)
    return {Kind::MutableList, name};
  if (type == "float") return {Kind::Float, name};
  if (type == "int") return {Kind::Int, name};
  return {Kind::Invalid, name};
}

// ---------------------------------------------------------------------------------------------
// The C function's parameters: outputs, arguments, stream

template <class T>
constexpr bool matches(Kind kind) {
  if (std::is_same_v<T, const DLTensor *>)
    return kind == Kind::Tensor || kind == Kind::OptionalTensor;
  if (std::is_same_v<T, const HfpTensorList *>)
    return kind == Kind::List || kind == Kind::MutableList;
  if (std::is_same_v<T, double>) return kind == Kind::Float;
  if (std::is_same_v<T, int64_t>) return kind == Kind::Int;
  return false;
}

template <class Function>
struct Signature;

template <class... Parameters>
struct Signature<int32_t (*)(Parameters...)> {
  using Tuple = std::tuple<Parameters...>;
  static constexpr std::size_t size = sizeof...(Parameters);
  static constexpr std::size_t outputs =
      (std::size_t{std::is_same_v<Parameters, DLTensor *>} + ... + 0);
};

// ---------------------------------------------------------------------------------------------
// Result rules: what the functional operator allocates

enum class Rule {
  LikeFirst,
  LikeNamed,  // "=A"
  Norm,
  Halved,
  Modulated,
  Rows,
  Weight,  // gradients of norms
  Bias,
  Partials,
  Scalar,
  Chunks,  // of lists
  Indices,  // row operations
  Workspace,
  Topk,
  TopkIndices,
  LikeIfNeeded,  // "=A&1"
  Sums,          // "sums=A"
  Groups,
  Product,  // of gemm
  ProductWorkspace,
  Attended,
  Balance,
  BalancePartials,
  Invalid
};

constexpr Rule parse_rule(std::string_view text) {
  if (!text.empty() && text.front() == '=') {
    return text.find('&') == std::string_view::npos ? Rule::LikeNamed : Rule::LikeIfNeeded;
  }
  if (text.substr(0, 5) == "sums=") return Rule::Sums;
  if (text == "x") return Rule::LikeFirst;
  if (text == "norm") return Rule::Norm;
  if (text == "halved") return Rule::Halved;
  if (text == "modulated") return Rule::Modulated;
  if (text == "rows") return Rule::Rows;
  if (text == "dweight") return Rule::Weight;
  if (text == "dbias") return Rule::Bias;
  if (text == "partials") return Rule::Partials;
  if (text == "scalar") return Rule::Scalar;
  if (text == "chunks") return Rule::Chunks;
  if (text == "indices") return Rule::Indices;
  if (text == "workspace") return Rule::Workspace;
  if (text == "topk") return Rule::Topk;
  if (text == "topk_indices") return Rule::TopkIndices;
  if (text == "groups") return Rule::Groups;
  if (text == "product") return Rule::Product;
  if (text == "product_workspace") return Rule::ProductWorkspace;
  if (text == "attended") return Rule::Attended;
  if (text == "balance") return Rule::Balance;
  if (text == "balance_partials") return Rule::BalancePartials;
  return Rule::Invalid;
}

// The argument that a rule names: "A" of "=A", "=A&1" and "sums=A".
constexpr std::string_view named(std::string_view rule) {
  const std::size_t equals = rule.find('=');
  if (equals == std::string_view::npos) return {};
  return rule.substr(equals + 1, rule.find('&') - equals - 1);
}

// ---------------------------------------------------------------------------------------------
// One row

template <class Op>
struct Row {
  using Sig = Signature<std::remove_const_t<decltype(Op::function)>>;
  static constexpr std::size_t kOutputs = Sig::outputs;
  static constexpr std::size_t kArguments = count_parts(Op::arguments);
  static constexpr auto kArgs = [] {
    std::array<Argument, kArguments> args{};
    for (std::size_t i = 0; i < kArguments; ++i) args[i] = parse_argument(part(Op::arguments, i));
    return args;
  }();

  static constexpr bool is_list(std::size_t i) {
    return kArgs[i].kind == Kind::List || kArgs[i].kind == Kind::MutableList;
  }
  // How many of the first `end` arguments are lists.
  static constexpr std::size_t lists_before(std::size_t end) {
    std::size_t n = 0;
    for (std::size_t i = 0; i < end; ++i) n += is_list(i) ? 1 : 0;
    return n;
  }
  static constexpr std::size_t kLists = lists_before(kArguments);

  // -1: there is none of that name.
  static constexpr int find(std::string_view name) {
    for (std::size_t i = 0; i < kArguments; ++i)
      if (kArgs[i].name == name) return static_cast<int>(i);
    return -1;
  }

  template <std::size_t... I>
  static constexpr bool parameters_match(std::index_sequence<I...>) {
    return (matches<std::tuple_element_t<kOutputs + I, typename Sig::Tuple>>(kArgs[I].kind) && ...);
  }

  static_assert(Sig::size == kOutputs + kArguments + 1,
                "HFP_OP_TABLE: the schema and the C function differ in the number of arguments");
  static_assert(parameters_match(std::make_index_sequence<kArguments>{}),
                "HFP_OP_TABLE: the schema and the C function differ in the type of an argument");
  static_assert(kArguments > 0 && (kArgs[0].kind == Kind::Tensor || is_list(0)),
                "HFP_OP_TABLE: the first argument must be a Tensor or a list");
  static_assert(kOutputs == 0 ? std::string_view(Op::result) == "none"
                              : count_parts(Op::result) == kOutputs,
                "HFP_OP_TABLE: one result rule per output, separated by commas");
};

#define HFP_OP(NAME, FUNCTION, RESULT, ARGUMENTS)            \
  struct NAME##_op {                                         \
    static constexpr const char *name = #NAME;               \
    static constexpr const char *out_name = #NAME "_out";    \
    static constexpr auto function = &FUNCTION;              \
    static constexpr const char *result = RESULT;            \
    static constexpr const char *arguments = ARGUMENTS;      \
  };
HFP_OP_TABLE(HFP_OP)
HFP_LIST_OP_TABLE(HFP_OP)
#undef HFP_OP

}  // namespace hfp_torch
