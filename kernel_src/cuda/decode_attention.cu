// decode_attention.cu: chooses among the kernels of decode_attention.cuh.
#include "decode_attention.cuh"

namespace hfp::cuda::decode {

namespace {

// What nearly every model asks for: one token a row, a head's elements all turned by halves, no more than a scale
// between a product and its weight.
bool is_usual(const Attention &a, int dim) {
  const auto plain = [](const DecodeNorm &norm) { return !norm.layer() && norm.bias == nullptr; };
  return a.tokens == 1 && a.blocks == 1 && a.dim == dim && a.table != nullptr && 2 * a.half == dim && !a.interleaved &&
         !a.across && !a.after_rope && a.mask == nullptr && a.sinks == nullptr && a.softcap == 0.0f &&
         a.window == 0 && plain(a.q_norm) && plain(a.k_norm);
}

template <class T, int kDim, int kQueries, int kWarps>
int32_t launch_warps(Attention &a, int rows, void *stream) {
  const int64_t room = int64_t{ctas_of_processor(kDim, kWarps)} * a.processors, heads = int64_t{a.key_heads} * a.blocks;
  // More parts than are read at once take longer to be put together; they pay where fewer would leave room. Not by
  // the number of rows: a row's bits are the same in every batch.
  a.parts = heads * kMostParts <= room ? kMostParts : kMostParts / 2;
  // A CTA for each part, or for several where there is no room for all.
  int ctas = a.parts;
  while (ctas > 1 && ctas * heads * rows > room) ctas /= 2;
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(a.key_heads * a.blocks),
                  static_cast<unsigned>(rows));
  const auto kernel = is_usual(a, kDim) ? &decode_attention_kernel<T, kDim, kQueries, kWarps, true>
                                        : &decode_attention_kernel<T, kDim, kQueries, kWarps, false>;
  return launch_step(kernel, grid, kWarps * 32, static_cast<int>(sizeof(AttentionShared<T, kDim, kQueries, kWarps>)), a,
                     stream);
}

template <class T, int kDim, int kQueries>
int32_t launch_for(Attention &a, int rows, void *stream) {
  if constexpr (kDim == 128) {
    if (a.beside_products) return launch_warps<T, kDim, kQueries, 4>(a, rows, stream);
  }
  return launch_warps<T, kDim, kQueries, 8>(a, rows, stream);
}

// Kernels for fewer queries than a block's most have it in fewer registers.
template <class T, int kDim>
int32_t launch_queries(Attention &a, int rows, void *stream) {
  const int queries = a.group() * a.tokens;
  a.blocks = 1;
  if (queries == 1) return launch_for<T, kDim, 1>(a, rows, stream);
  if (queries == 2) return launch_for<T, kDim, 2>(a, rows, stream);
  if constexpr (kDim > 128) {
    a.blocks = (queries + 3) / 4;
    return launch_for<T, kDim, 4>(a, rows, stream);
  } else {
    if (queries <= 4) return launch_for<T, kDim, 4>(a, rows, stream);
    a.blocks = (queries + 7) / 8;
    return launch_for<T, kDim, 8>(a, rows, stream);
  }
}

template <class T>
int32_t launch_dim(Attention &a, int rows, void *stream) {
  if (a.dim <= 64) return launch_queries<T, 64>(a, rows, stream);
  if (a.dim <= 96) return launch_queries<T, 96>(a, rows, stream);
  if (a.dim <= 128) return launch_queries<T, 128>(a, rows, stream);
  return launch_queries<T, 256>(a, rows, stream);
}

}  // namespace

bool takes_attention(DType type, const DecodeLayer &layer, const DecodeArgs &args, const Device &device) {
  constexpr int64_t kMostRows = 65535, kLeastShared = 96 << 10;  // gridDim.z; what the largest kernel needs
  return type != DType::F32 && device.tensor_cores && device.shared_limit >= kLeastShared &&
         layer.dim % 8 == 0 && layer.dim <= 256 && args.tokens <= kNewKeys && args.rows <= kMostRows &&
         layer.key_heads * layer.group() * args.tokens <= kMostRows;
}

int32_t run_attention(DType type, Attention a, int rows, void *stream) {
  return type == DType::BF16 ? launch_dim<__nv_bfloat16>(a, rows, stream) : launch_dim<__half>(a, rows, stream);
}

}  // namespace hfp::cuda::decode
