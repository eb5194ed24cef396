// decode_plain.cu: launches the kernels of decode_plain.cuh.
#include "decode_plain.cuh"

namespace hfp::cuda::decode {

namespace {

template <class T>
int32_t launch_product(Product &p, bool pairs, void *stream) {
  const int columns = pairs ? p.end[0] : p.end[2];
  const dim3 grid(static_cast<unsigned>((columns + kPlainWarps - 1) / kPlainWarps));
  return pairs ? launch_step(&decode_plain_product_kernel<T, true>, grid, kPlainThreads, 0, p, stream)
               : launch_step(&decode_plain_product_kernel<T, false>, grid, kPlainThreads, 0, p, stream);
}

template <class T>
int32_t launch_attention(Attention &a, int rows, void *stream) {
  const unsigned queries = static_cast<unsigned>(rows * a.tokens);
  PlainPrepare p{a};
  const int32_t status = launch_step(&decode_plain_prepare_kernel<T>,
                                     dim3(static_cast<unsigned>(a.heads + a.key_heads), queries), 32, 0, p, stream);
  if (status != HFP_OK) return status;
  return launch_step(&decode_plain_attention_kernel<T>, dim3(static_cast<unsigned>(a.heads), queries), kPlainThreads,
                     0, a, stream);
}

}  // namespace

int32_t run_plain_product(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, void *stream) {
  const int32_t status = norm_before(type, &p, norm, normed, stream);
  if (status != HFP_OK) return status;
  switch (type) {
    case DType::F32: return launch_product<float>(p, pairs, stream);
    case DType::F16: return launch_product<__half>(p, pairs, stream);
    default: return launch_product<__nv_bfloat16>(p, pairs, stream);
  }
}

int32_t run_plain_attention(DType type, Attention a, int rows, void *stream) {
  switch (type) {
    case DType::F32: return launch_attention<float>(a, rows, stream);
    case DType::F16: return launch_attention<__half>(a, rows, stream);
    default: return launch_attention<__nv_bfloat16>(a, rows, stream);
  }
}

}  // namespace hfp::cuda::decode
