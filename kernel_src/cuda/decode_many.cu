// decode_many.cu: products of more rows of x than the tensor-core kernels take at once, by cuBLASLt, which reads the
// weights once for all of them. What follows the sums is computed by a kernel behind it, with the same roundings as
// behind the sums of decode_product.cuh.
#include "../products.h"
#include "decode_common.cuh"

namespace hfp::cuda::decode {

namespace {

// What becomes of sums [p.rows, stride], of `columns` columns from `first` on; of pairs, whose second half follows
// the first at p.end[0].
struct Sums {
  Product p;
  const float *sums;
  int64_t stride;
  int first, columns;
};

constexpr int kFinishThreads = 256;

template <class T, bool kPairs>
__global__ void __launch_bounds__(kFinishThreads) decode_finish_kernel(const __grid_constant__ Sums s) {
  const Product &p = s.p;
  let_next_start();
  const int at = static_cast<int>(blockIdx.x) * kFinishThreads + static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.y), column = s.first + at;
  const bool there = at < s.columns;
  const int part = kPairs ? 0 : column >= p.end[1] ? 2 : column >= p.end[0] ? 1 : 0;
  const int begin = part == 2 ? p.end[1] : part == 1 ? p.end[0] : 0;
  float bias[2] = {0.0f, 0.0f};
  if (there) {
    bias[0] = bias_at<T>(p, part, column - begin);
    if constexpr (kPairs) bias[1] = bias_at<T>(p, 1, column);
  }
  wait_for_previous<false>();
  if (!there) return;
  const float *const sum = s.sums + row * s.stride + at;
  if constexpr (kPairs) {
    finish_pair<T>(p, row, column, __ldcg(sum) + bias[0], __ldcg(sum + p.end[0]) + bias[1]);
  } else {
    finish_one<T>(p, row, column, __ldcg(sum) + bias[0], residual_at<T>(p, row, column));
  }
}

template <class T>
int32_t launch_finish(Sums &s, bool pairs, void *stream) {
  const unsigned across = static_cast<unsigned>((s.columns + kFinishThreads - 1) / kFinishThreads);
  const dim3 grid(across, static_cast<unsigned>(s.p.rows));
  return pairs ? launch_step(&decode_finish_kernel<T, true>, grid, kFinishThreads, 0, s, stream)
               : launch_step(&decode_finish_kernel<T, false>, grid, kFinishThreads, 0, s, stream);
}

// Whether a product's sums, rounded once, are what it gives.
bool nothing_follows(const Product &p, bool pairs) {
  const Finish &f = p.finish;
  return !pairs && p.bias[0] == nullptr && p.bias[1] == nullptr && p.bias[2] == nullptr && f.clip <= 0.0f &&
         f.activation == kNoActivation && f.scale == 1.0f && f.softcap <= 0.0f && f.residual == nullptr && !f.wide;
}

}  // namespace

bool many_supported() { return gemm_backend() == HFP_GEMM_CUBLASLT; }

int32_t run_many(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, float *sums, int64_t columns,
                 float *library, const Device &device, void *stream) {
  int32_t status = norm_before(type, &p, norm, normed, stream);
  if (status != HFP_OK) return status;
  const int64_t bytes = size_of(type);
  GemmArgs g{};
  g.workspace = library, g.workspace_bytes = kCudaGemmWorkspace;
  g.a = p.x, g.a_row = p.x_stride;
  g.type = type;
  g.batch = 1, g.m = p.rows, g.k = p.columns;
  g.b_transposed = true;
  g.alpha = 1.0f;
  const bool direct = nothing_follows(p, pairs);
  // fp32 logits lie where their sums do.
  const bool in_place = !direct && p.finish.wide && p.finish.residual == nullptr;
  g.wide = !direct;
  char *const to = static_cast<char *>(direct || in_place ? p.out : static_cast<void *>(sums));
  const int all = pairs ? 2 * p.end[0] : p.end[2];
  const int64_t most = direct || in_place || columns > all ? all : columns;
  g.out_row = direct || in_place ? p.out_columns : most;
  const int64_t out_bytes = g.wide ? 4 : bytes;

  Sums s{p, reinterpret_cast<const float *>(to), g.out_row, 0, 0};
  // What lies one below the other in memory is one product.
  for (int first = 0; first < all;) {
    const int last = first + static_cast<int>(most) < all ? first + static_cast<int>(most) : all;
    for (int at = first; at < last;) {
      int part = 0, begin = 0, end = p.end[0];
      while (at >= end) {
        ++part;
        begin = end;
        end = pairs ? all : p.end[part];
      }
      const char *const weight = static_cast<const char *>(p.weight[part]) + (at - begin) * p.stride[part] * bytes;
      for (int next = part + 1; end < last && p.stride[next] == p.stride[part]; ++next) {
        if (static_cast<const char *>(p.weight[next]) != weight + (end - at) * p.stride[part] * bytes) break;
        end = pairs ? all : p.end[next];
      }
      if (end > last) end = last;
      g.b = weight, g.b_row = p.stride[part];
      g.n = end - at;
      g.out = to + (direct || in_place ? at : at - first) * out_bytes;
      status = gemm(g, device.index, stream);
      if (status != HFP_OK) return status;
      at = end;
    }
    if (!direct) {
      s.first = first, s.columns = pairs ? p.end[0] : last - first;
      status = type == DType::F32   ? launch_finish<float>(s, pairs, stream)
               : type == DType::F16 ? launch_finish<__half>(s, pairs, stream)
                                    : launch_finish<__nv_bfloat16>(s, pairs, stream);
      if (status != HFP_OK) return status;
    }
    first = last;
  }
  return HFP_OK;
}

}  // namespace hfp::cuda::decode
