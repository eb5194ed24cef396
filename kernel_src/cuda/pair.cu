// pair.cu: a + alpha * b, a * b and x * factor; hfp_add, hfp_mul and hfp_scale on CUDA.
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

struct AddPair {
  static constexpr int kInputs = 2;
  static const char *name() { return "add"; }
  float alpha;

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float a[N], b[N];
    in[0].get(a);
    in[1].get(b);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = __fadd_rn(a[i], __fmul_rn(alpha, b[i]));
    return rounded<T>(a);
  }
};

struct MultiplyPair {
  static constexpr int kInputs = 2;
  static const char *name() { return "mul"; }

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[2]) const {
    float a[N], b[N];
    in[0].get(a);
    in[1].get(b);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] *= b[i];
    return rounded<T>(a);
  }
};

struct Scaled {
  static constexpr int kInputs = 1;
  static const char *name() { return "scale"; }
  float factor;

  template <class T, int N>
  __device__ __forceinline__ Vec<T, N> operator()(const Vec<T, N> (&in)[1]) const {
    float a[N];
    in[0].get(a);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] *= factor;
    return rounded<T>(a);
  }
};

template <class T>
int32_t run(const PairArgs &p, void *stream) {
  if (p.b == nullptr) {
    const Elementwise<1> e{p.out, {p.a}, {p.a_rows}};
    return launch_elementwise<T>(e, Scaled{p.alpha}, stream);
  }
  const Elementwise<2> e{p.out, {p.a, p.b}, {p.a_rows, p.b_rows}};
  if (p.product) return launch_elementwise<T>(e, MultiplyPair{}, stream);
  return launch_elementwise<T>(e, AddPair{p.alpha}, stream);
}

}  // namespace

int32_t pair(const PairArgs &p, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "pair");
  switch (p.type) {
    case DType::F32: return run<float>(p, stream);
    case DType::F16: return run<__half>(p, stream);
    default: return run<__nv_bfloat16>(p, stream);
  }
}

}  // namespace hfp::cuda
