// gate_residual.cu: out = residual + gate * x, the gate broadcast over rows; hfp_gate_residual on
// CUDA.
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

struct GateResidualParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *residual, *gate, *x;
  Rows residual_rows, gate_rows, x_rows;
  int64_t vectors;  // in all
  int64_t row_vectors;
  FastDivisor divisor;
  DType gate_type, out_type;
  bool fast_division;  // vectors < 2^31
  bool eager;          // round the product to out_type
};

// ---------------------------------------------------------------------------------------------
// Kernels

// All rows are one sequence of vectors, so that narrow rows fill the CTAs as well as wide ones.
// One vector of each tensor per thread: two loads of HBM on their way, see kVectorsPerThread.
// kSameType: the gate has dtype T.
template <class T, int N, bool kSameType>
__global__ void __launch_bounds__(kBroadcastThreads)
    gate_residual_kernel(const __grid_constant__ GateResidualParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kBroadcastThreads + threadIdx.x;
  const int64_t row = p.fast_division
                          ? static_cast<int64_t>(p.divisor.divide(static_cast<uint32_t>(at)))
                          : at / p.row_vectors;
  const int64_t col = (at - row * p.row_vectors) * N;

  const T *from_x = static_cast<const T *>(p.x) + row_offset(p.x_rows, row) + col;
  const T *from_residual =
      static_cast<const T *>(p.residual) + row_offset(p.residual_rows, row) + col;
  int64_t from = row_offset(p.gate_rows, row) + col;
  compute_now(from_x, from_residual, from);
  wait_for_previous();
  if (at >= p.vectors) return;
  Vec<T, N> x, residual;
  x.template load<Cache::kStream>(from_x);
  residual.template load<Cache::kStream>(from_residual);
  float y[N], r[N], g[N];
  if constexpr (kSameType) {
    Vec<T, N> gate;
    gate.template load<Cache::kReadOnly>(static_cast<const T *>(p.gate) + from);
    gate.get(g);
  } else {
    load_any(g, p.gate, p.gate_type, from);
  }
  x.get(y);
  residual.get(r);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fmul_rn(g[i], y[i]);
  if (p.eager) {
    if constexpr (kSameType) round_to<T>(y);
    else round_any(y, p.out_type);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(r[i], y[i]);
  if constexpr (kSameType) store_as<T>(p.out, at * N, y);
  else store_any(p.out, p.out_type, at * N, y);
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "gate_residual";

template <class T, int N>
int32_t launch_vectors(GateResidualParams &p, DType type, void *stream) {
  p.row_vectors = p.x_rows.cols / N;
  p.vectors = p.x_rows.rows * p.row_vectors;
  p.fast_division = p.vectors < (int64_t{1} << 31);
  if (p.fast_division) p.divisor = FastDivisor(p.row_vectors);
  // No grid limit is in the way: 2^31 CTAs of 256 elements or more are beyond any memory.
  const int64_t grid = (p.vectors + kBroadcastThreads - 1) / kBroadcastThreads;
  auto *kernel = p.gate_type == type ? &gate_residual_kernel<T, N, true>
                                     : &gate_residual_kernel<T, N, false>;
  return launch(kernel, grid, kBroadcastThreads, p, stream, kOp);
}

template <class T>
int32_t launch_typed(GateResidualParams &p, DType type, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const bool aligned = p.x_rows.cols % N == 0 && rows_aligned(p.x_rows, p.x, sizeof(T)) &&
                       rows_aligned(p.residual_rows, p.residual, sizeof(T)) &&
                       rows_aligned(p.gate_rows, p.gate, size_of(p.gate_type)) &&
                       pointer_aligned(p.out);
  if (aligned) return launch_vectors<T, N>(p, type, stream);
  return launch_vectors<T, 1>(p, type, stream);
}

}  // namespace

int32_t gate_residual(const GateResidualArgs &a, int device, void *stream) {
  if (a.x_rows.rows <= 0 || a.x_rows.cols <= 0) return HFP_OK;
  GateResidualParams p{};
  p.out = a.out;
  p.residual = a.residual;
  p.gate = a.gate;
  p.x = a.x;
  p.residual_rows = a.residual_rows;
  p.gate_rows = a.gate_rows;
  p.x_rows = a.x_rows;
  p.gate_type = a.gate_type;
  p.out_type = a.out_type;
  p.eager = a.eager;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.type, stream);
    case DType::F16: return launch_typed<__half>(p, a.type, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.type, stream);
  }
}

}  // namespace hfp::cuda
