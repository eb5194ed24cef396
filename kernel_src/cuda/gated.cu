// gated.cu: out = act(gate) * up, also of clamped tensors; hfp_gated, hfp_gated_packed and
// hfp_gated_clamped on CUDA. Shazeer, arXiv:2002.05202.
#include "activations.cuh"
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

// act(gate) is rounded to the dtype before it is multiplied, as in eager PyTorch.
template <int kActivation>
struct Gated {
  static constexpr int kInputs = 2;
  static const char *name() { return "gated"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float gate[N];
    in[0].get(gate);
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = activate<kActivation, sizeof(T) == 4>(gate[i]);
    return multiply(rounded<T>(gate), in[1]);
  }
};

// min(max(x, low), high), NaN kept, as torch.clamp: high where low is above it.
__device__ __forceinline__ float clamped(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// The same of clamped tensors. Every operator of eager rounds; bounds are rounded to T, so that what
// is clamped is of T.
template <int kActivation>
struct GatedClamped {
  static constexpr int kInputs = 2;
  static const char *name() { return "gated_clamped"; }
  GatedClamps c;

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    // Of two at a time, as half types are converted.
    float gates[2] = {c.gate_min, c.gate_max}, acts[2] = {c.act_min, c.act_max};
    float ups[2] = {c.up_min, c.up_max};
    round_to<T>(gates), round_to<T>(acts), round_to<T>(ups);
    float gate[N], up[N];
    in[0].get(gate);
    in[1].get(up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x = clamped(gate[i], gates[0], gates[1]);
      if constexpr (kActivation == HFP_ACT_SILU) {
        gate[i] = times_sigmoid<sizeof(T) == 4>(x, c.alpha * x);
      } else {
        gate[i] = activate<kActivation, sizeof(T) == 4>(x);
      }
    }
    round_to<T>(gate);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gate[i] = clamped(gate[i], acts[0], acts[1]);
      up[i] = clamped(up[i], ups[0], ups[1]) + c.up_offset;
    }
    return multiply(rounded<T>(gate), rounded<T>(up));
  }
};

template <class T>
int32_t launch_clamped(const Elementwise<2> &e, const GatedArgs &a, void *stream) {
  const GatedClamps &c = a.clamps;
  switch (a.activation) {
    case HFP_ACT_GELU_ERF:
      return launch_elementwise<T>(e, GatedClamped<HFP_ACT_GELU_ERF>{c}, stream);
    case HFP_ACT_GELU_TANH:
      return launch_elementwise<T>(e, GatedClamped<HFP_ACT_GELU_TANH>{c}, stream);
    case HFP_ACT_GELU_SIGMOID:
      return launch_elementwise<T>(e, GatedClamped<HFP_ACT_GELU_SIGMOID>{c}, stream);
    case HFP_ACT_SILU: return launch_elementwise<T>(e, GatedClamped<HFP_ACT_SILU>{c}, stream);
    default: return launch_elementwise<T>(e, GatedClamped<HFP_ACT_RELU>{c}, stream);
  }
}

}  // namespace

int32_t gated(const GatedArgs &a, int device, void *stream) {
  Elementwise<2> e{};
  e.out = a.out;
  e.in[0] = a.gate;
  e.in[1] = a.up;
  e.rows[0] = a.gate_rows;
  e.rows[1] = a.up_rows;
  if (!a.clamped) return launch_activation<Gated>(e, a.type, a.activation, device, stream);
  if (e.rows[0].rows <= 0 || e.rows[0].cols <= 0) return HFP_OK;
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "gated_clamped");
  switch (a.type) {
    case DType::F32: return launch_clamped<float>(e, a, stream);
    case DType::F16: return launch_clamped<__half>(e, a, stream);
    default: return launch_clamped<__nv_bfloat16>(e, a, stream);
  }
}

}  // namespace hfp::cuda
