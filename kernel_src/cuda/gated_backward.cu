// gated_backward.cu: the gradients of act(gate) * up; hfp_gated_backward and
// hfp_gated_packed_backward on CUDA. Three inputs and two results, so not elementwise.cuh's kernels.
#include "activations_grad.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

struct GatedBackwardParams {
  static constexpr bool kStartsEarly = true;
  void *dgate, *dup;
  const void *grad, *gate, *up;
  Rows grad_rows, gate_rows, up_rows;
  int64_t out_stride;
  int64_t vectors;  // in all
  int64_t row_vectors;
  FastDivisor divisor;
  bool one_row, fast_division;  // one_row: no division at all
};

// ---------------------------------------------------------------------------------------------
// Kernels

// One vector of each input is 48 bytes on their way per thread: enough with 1024 threads on an SM.
template <class T, int kActivation, int N>
__global__ void __launch_bounds__(kElementwiseThreads)
    gated_backward_kernel(const __grid_constant__ GatedBackwardParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t row = 0;
  if (!p.one_row) {
    row = p.fast_division ? static_cast<int64_t>(p.divisor.divide(static_cast<uint32_t>(at)))
                          : at / p.row_vectors;
  }
  const int64_t col = (at - row * p.row_vectors) * N;
  const T *from_gate = static_cast<const T *>(p.gate) + row_offset(p.gate_rows, row) + col;
  const T *from_grad = static_cast<const T *>(p.grad) + row_offset(p.grad_rows, row) + col;
  const T *from_up = static_cast<const T *>(p.up) + row_offset(p.up_rows, row) + col;
  int64_t to = row * p.out_stride + col;
  compute_now(from_gate, from_grad, from_up, to);
  if (at >= p.vectors) return;  // before the wait: see elementwise.cuh
  wait_for_previous();
  Vec<T, N> grad, gate, up;
  gate.template load<Cache::kStream>(from_gate);
  grad.template load<Cache::kStream>(from_grad);
  up.template load<Cache::kStream>(from_up);

  float g[N], x[N], u[N];
  gate.get(x);
  grad.get(g);
  up.get(u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Slope act = activate_slope<kActivation, sizeof(T) == 4>(x[i]);
    u[i] *= g[i] * act.slope;
    x[i] = act.value;
  }
  round_to<T>(x);  // act(gate), as the forward rounded it
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] *= x[i];
  store_as<T>(p.dgate, to, u);
  store_as<T>(p.dup, to, g);
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "gated_backward";

template <class T, int kActivation, int N>
int32_t launch_vectors(GatedBackwardParams &p, void *stream) {
  p.row_vectors = p.gate_rows.cols / N;
  p.vectors = p.gate_rows.rows * p.row_vectors;
  p.one_row = p.gate_rows.rows == 1;
  p.fast_division = p.vectors < (int64_t{1} << 31);
  if (!p.one_row && p.fast_division) p.divisor = FastDivisor(p.row_vectors);
  const int threads = elementwise_threads(p.vectors);
  return launch(&gated_backward_kernel<T, kActivation, N>, ctas(p.vectors, threads), threads, p,
                stream, kOp);
}

template <class T, int kActivation>
int32_t launch_kernel(GatedBackwardParams &p, void *stream) {
  constexpr int kWidest = kVectorBytes / static_cast<int>(sizeof(T));
  int n = kWidest;
  for (const Rows *rows : {&p.grad_rows, &p.gate_rows, &p.up_rows}) {
    const int widest = widest_vector(*rows, sizeof(T));
    n = widest < n ? widest : n;
  }
  while (n > 1 && p.gate_rows.rows > 1 && p.out_stride % n != 0) n /= 2;
  for (const void *pointer : {static_cast<const void *>(p.dgate), static_cast<const void *>(p.dup),
                              p.grad, p.gate, p.up}) {
    n = narrow_to_pointer(n, pointer, sizeof(T));
  }
  if (n == kWidest) return launch_vectors<T, kActivation, kWidest>(p, stream);
  if (n >= 2) return launch_vectors<T, kActivation, 2>(p, stream);
  return launch_vectors<T, kActivation, 1>(p, stream);
}

template <class T>
int32_t launch_typed(GatedBackwardParams &p, int activation, void *stream) {
  switch (activation) {
    case HFP_ACT_GELU_ERF: return launch_kernel<T, HFP_ACT_GELU_ERF>(p, stream);
    case HFP_ACT_GELU_TANH: return launch_kernel<T, HFP_ACT_GELU_TANH>(p, stream);
    case HFP_ACT_GELU_SIGMOID: return launch_kernel<T, HFP_ACT_GELU_SIGMOID>(p, stream);
    case HFP_ACT_SILU: return launch_kernel<T, HFP_ACT_SILU>(p, stream);
    default: return launch_kernel<T, HFP_ACT_RELU>(p, stream);
  }
}

}  // namespace

int32_t gated_backward(const GatedBackwardArgs &a, int device, void *stream) {
  if (a.gate_rows.rows <= 0 || a.gate_rows.cols <= 0) return HFP_OK;
  GatedBackwardParams p{};
  p.dgate = a.dgate;
  p.dup = a.dup;
  p.grad = a.grad;
  p.gate = a.gate;
  p.up = a.up;
  p.grad_rows = a.grad_rows;
  p.gate_rows = a.gate_rows;
  p.up_rows = a.up_rows;
  p.out_stride = a.out_stride;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (a.type) {
    case DType::F32: return launch_typed<float>(p, a.activation, stream);
    case DType::F16: return launch_typed<__half>(p, a.activation, stream);
    default: return launch_typed<__nv_bfloat16>(p, a.activation, stream);
  }
}

}  // namespace hfp::cuda
