// mul_add.cu: out = a * b + c, b and c broadcast over rows; hfp_mul_add on CUDA.
#include "elementwise.cuh"

namespace hfp::cuda {
namespace {

struct MulAddParams {
  static constexpr bool kStartsEarly = true;
  void *out;
  const void *a, *b, *c;
  Rows a_rows, b_rows, c_rows;
  int64_t vectors;  // in all
  int64_t row_vectors;
  FastDivisor divisor;
  DType param_type, out_type;
  bool fast_division;  // vectors < 2^31
  bool eager;          // round the product to out_type
};

// ---------------------------------------------------------------------------------------------
// Kernels

// All rows are one sequence of vectors, so that narrow rows fill the CTAs as well as wide ones.
// kSameType: b and c have dtype T.
template <class T, int N, bool kSameType>
__global__ void __launch_bounds__(kBroadcastThreads)
    mul_add_kernel(const __grid_constant__ MulAddParams p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kBroadcastThreads + threadIdx.x;
  const int64_t row = p.fast_division
                          ? static_cast<int64_t>(p.divisor.divide(static_cast<uint32_t>(at)))
                          : at / p.row_vectors;
  const int64_t col = (at - row * p.row_vectors) * N;

  const T *from_a = static_cast<const T *>(p.a) + row_offset(p.a_rows, row) + col;
  int64_t b_at = row_offset(p.b_rows, row) + col, c_at = row_offset(p.c_rows, row) + col;
  compute_now(from_a, b_at, c_at);
  wait_for_previous();
  if (at >= p.vectors) return;
  Vec<T, N> a;
  a.template load<Cache::kStream>(from_a);
  float y[N], b[N], c[N];
  if constexpr (kSameType) {
    Vec<T, N> held_b, held_c;
    held_b.template load<Cache::kReadOnly>(static_cast<const T *>(p.b) + b_at);
    held_c.template load<Cache::kReadOnly>(static_cast<const T *>(p.c) + c_at);
    held_b.get(b);
    held_c.get(c);
  } else {
    load_any(b, p.b, p.param_type, b_at);
    load_any(c, p.c, p.param_type, c_at);
  }
  a.get(y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fmul_rn(y[i], b[i]);
  if (p.eager) {
    if constexpr (kSameType) round_to<T>(y);
    else round_any(y, p.out_type);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = __fadd_rn(y[i], c[i]);
  if constexpr (kSameType) store_as<T>(p.out, at * N, y);
  else store_any(p.out, p.out_type, at * N, y);
}

// ---------------------------------------------------------------------------------------------
// Launchers

constexpr char kOp[] = "mul_add";

template <class T, int N>
int32_t launch_vectors(MulAddParams &p, DType type, void *stream) {
  p.row_vectors = p.a_rows.cols / N;
  p.vectors = p.a_rows.rows * p.row_vectors;
  p.fast_division = p.vectors < (int64_t{1} << 31);
  if (p.fast_division) p.divisor = FastDivisor(p.row_vectors);
  // No grid limit is in the way: 2^31 CTAs of 256 elements or more are beyond any memory.
  const int64_t grid = (p.vectors + kBroadcastThreads - 1) / kBroadcastThreads;
  auto *kernel = p.param_type == type ? &mul_add_kernel<T, N, true> : &mul_add_kernel<T, N, false>;
  return launch(kernel, grid, kBroadcastThreads, p, stream, kOp);
}

template <class T>
int32_t launch_typed(MulAddParams &p, DType type, void *stream) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(T));
  const bool aligned = p.a_rows.cols % N == 0 && rows_aligned(p.a_rows, p.a, sizeof(T)) &&
                       rows_aligned(p.b_rows, p.b, size_of(p.param_type)) &&
                       rows_aligned(p.c_rows, p.c, size_of(p.param_type)) &&
                       pointer_aligned(p.out);
  if (aligned) return launch_vectors<T, N>(p, type, stream);
  return launch_vectors<T, 1>(p, type, stream);
}

}  // namespace

int32_t mul_add(const MulAddArgs &args, int device, void *stream) {
  if (args.a_rows.rows <= 0 || args.a_rows.cols <= 0) return HFP_OK;
  MulAddParams p{};
  p.out = args.out;
  p.a = args.a;
  p.b = args.b;
  p.c = args.c;
  p.a_rows = args.a_rows;
  p.b_rows = args.b_rows;
  p.c_rows = args.c_rows;
  p.param_type = args.param_type;
  p.out_type = args.out_type;
  p.eager = args.eager;

  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), kOp);
  switch (args.type) {
    case DType::F32: return launch_typed<float>(p, args.type, stream);
    case DType::F16: return launch_typed<__half>(p, args.type, stream);
    default: return launch_typed<__nv_bfloat16>(p, args.type, stream);
  }
}

}  // namespace hfp::cuda
