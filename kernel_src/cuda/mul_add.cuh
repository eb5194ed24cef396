// mul_add.cuh: out = x * factor + summand, of which the factor, and perhaps the summand, is broadcast
// over rows: mul_add and gate_residual.
#pragma once

#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// `streamed`: x and the summand come first, then the factor; else x, factor and summand.
template <bool streamed>
inline constexpr int kFactor = streamed ? 2 : 1;
template <bool streamed>
inline constexpr int kSummand = streamed ? 1 : 2;

template <bool kStreamedSummand>
struct MulAdd {
  static constexpr int kInputs = 3, kStreamed = kStreamedSummand ? 2 : 1;
  static const char *name() { return kStreamedSummand ? "gate_residual" : "mul_add"; }

  bool eager;  // round the product

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[3]) const {
    const Vec<T, N> &factor = in[kFactor<kStreamedSummand>];
    const Vec<T, N> &summand = in[kSummand<kStreamedSummand>];
    if (eager) return add(multiply(in[0], factor), summand);
    float x[N], f[N], s[N];
    in[0].get(x);
    factor.get(f);
    summand.get(s);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = __fadd_rn(__fmul_rn(x[i], f[i]), s[i]);
    return rounded<T>(x);
  }
};

struct MulAddMixedParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *in[3];
  Rows rows[3];
  int64_t vectors;  // in all
  int64_t row_vectors;
  FastDivisor divisor;
  DType param_type, out_type;
  bool fast_division;  // vectors < 2^31
  bool eager;          // round the product to out_type
};

// ---------------------------------------------------------------------------------------------
// Kernels

// The parameters have another dtype than x. All rows are one sequence of vectors, as in
// elementwise.cuh.
template <class T, int N, bool kStreamedSummand>
__global__ void __launch_bounds__(kElementwiseThreads)
    mul_add_mixed_kernel(const __grid_constant__ MulAddMixedParams p) {
  constexpr int kF = kFactor<kStreamedSummand>, kS = kSummand<kStreamedSummand>;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = p.fast_division
                          ? static_cast<int64_t>(p.divisor.divide(static_cast<uint32_t>(at)))
                          : at / p.row_vectors;
  const int64_t col = (at - row * p.row_vectors) * N;
  const T *from = static_cast<const T *>(p.in[0]) + row_offset(p.rows[0], row) + col;
  int64_t factor_at = row_offset(p.rows[kF], row) + col;
  int64_t summand_at = row_offset(p.rows[kS], row) + col;
  compute_now(from, factor_at, summand_at);
  if (at >= p.vectors) return;  // before the wait: see elementwise.cuh
  wait_for_previous();

  Vec<T, N> x;
  x.template load<Cache::kStream>(from);
  float y[N], factor[N], summand[N];
  if constexpr (kStreamedSummand) {
    Vec<T, N> held;
    held.template load<Cache::kStream>(static_cast<const T *>(p.in[kS]) + summand_at);
    held.get(summand);
  } else {
    load_any(summand, p.in[kS], p.param_type, summand_at);
  }
  load_any(factor, p.in[kF], p.param_type, factor_at);
  x.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], factor[i]);
  if (p.eager) round_any(y, p.out_type);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(y[i], summand[i]);
  store_any(p.out, p.out_type, at * N, y);
}

// ---------------------------------------------------------------------------------------------
// Launchers

template <class T, int N, bool kStreamedSummand>
int32_t launch_mixed(MulAddMixedParams &p, void *stream) {
  p.row_vectors = p.rows[0].cols / N;
  p.vectors = p.rows[0].rows * p.row_vectors;
  p.fast_division = p.vectors < (int64_t{1} << 31);
  if (p.fast_division) p.divisor = FastDivisor(p.row_vectors);
  return launch(&mul_add_mixed_kernel<T, N, kStreamedSummand>, ctas(p.vectors, kElementwiseThreads),
                kElementwiseThreads, p, stream, MulAdd<kStreamedSummand>::name());
}

template <class T, bool kStreamedSummand>
int32_t launch_mul_add(const Elementwise<3> &e, DType type, DType param_type, DType out_type,
                       bool eager, void *stream) {
  if (param_type == type) {
    return launch_elementwise<T>(e, MulAdd<kStreamedSummand>{eager}, stream);
  }
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  MulAddMixedParams p{};
  p.out = e.out;
  bool aligned = e.rows[0].cols % N == 0 && pointer_aligned(e.out);
  for (int k = 0; k < 3; ++k) {
    p.in[k] = e.in[k];
    p.rows[k] = e.rows[k];
    const DType of = k < MulAdd<kStreamedSummand>::kStreamed ? type : param_type;
    aligned = aligned && rows_aligned(e.rows[k], e.in[k], size_of(of));
  }
  p.param_type = param_type;
  p.out_type = out_type;
  p.eager = eager;
  if (aligned) return launch_mixed<T, N, kStreamedSummand>(p, stream);
  return launch_mixed<T, 1, kStreamedSummand>(p, stream);
}

// in, rows: x and the tensors that have its type, then those of `param_type`, see kFactor.
template <bool kStreamedSummand>
int32_t launch_mul_add(const Elementwise<3> &e, DType type, DType param_type, DType out_type,
                       bool eager, int device, void *stream) {
  if (e.rows[0].rows <= 0 || e.rows[0].cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) {
    return check(guard.status(), MulAdd<kStreamedSummand>::name());
  }
  const auto run = [&](auto *launcher) {
    return launcher(e, type, param_type, out_type, eager, stream);
  };
  switch (type) {
    case DType::F32: return run(&launch_mul_add<float, kStreamedSummand>);
    case DType::F16: return run(&launch_mul_add<__half, kStreamedSummand>);
    default: return run(&launch_mul_add<__nv_bfloat16, kStreamedSummand>);
  }
}

}  // namespace
}  // namespace hfp::cuda
