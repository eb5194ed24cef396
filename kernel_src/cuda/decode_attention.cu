// decode_attention.cu: chooses among the kernels of decode_attention.cuh.
#include "decode_attention.cuh"

namespace hfp::cuda::decode {

namespace {

constexpr int kLeastShared = 96 << 10;  // what the largest kernel needs

// What nearly every model asks for: one token a row, a head's elements all turned by halves, no more than a scale
// between a product and its weight, which all heads share.
bool is_usual(const Attention &a, int dim) {
  const auto plain = [](const DecodeNorm &norm) {
    return !norm.layer() && norm.bias == nullptr && norm.heads == OfHeads::kTheSame;
  };
  return a.tokens == 1 && a.blocks == 1 && a.dim == dim && a.table != nullptr && 2 * a.half == dim && !a.interleaved &&
         !a.across && !a.after_rope && a.mask == nullptr && a.sinks == nullptr && a.softcap == 0.0f &&
         a.window == 0 && plain(a.q_norm) && plain(a.k_norm);
}

// Of shared memory, of which three do not fit: else one multiprocessor would have three CTAs and another one.
int more_than_third(const Device &device) { return (device.shared_limit + kReservedShared) / 3; }

template <class T, int kDim, int kQueries, int kWarps>
int32_t launch_warps(Attention &a, int rows, const Device &device, void *stream) {
  using Shared = AttentionShared<T, kDim, kQueries, kWarps>;
  static_assert(Shared::bytes(false) <= kLeastShared);
  constexpr int kThreads = kWarps * 32;
  const auto usual_kernel = &decode_attention_kernel<T, kDim, kQueries, kWarps, true>;
  const bool usual = is_usual(a, kDim);
  const auto bytes = [&](bool clusters) {
    const int needed = Shared::bytes(clusters), least = kWarps == 4 ? more_than_third(device) : 0;
    return needed > least ? needed : least;
  };
  const int64_t room = int64_t{ctas_of_processor(kDim, kWarps)} * device.processors;
  const int64_t heads = int64_t{a.key_heads} * a.blocks;
  // More parts than are read at once take longer to be put together; they pay where fewer would leave room. Not by
  // the number of rows: a row's bits are the same in every batch.
  a.parts = heads * kMostParts <= room ? kMostParts : kMostParts / 2;
  // A CTA for each part, or for several where there is no room for all.
  int ctas = a.parts;
  while (ctas > 1 && ctas * heads * rows > room) ctas /= 2;
  // A cluster lies in one part of the GPU, and these have odd numbers of multiprocessors: many take longer than they
  // gain.
  const bool few = heads * rows * kClusterSize <= device.processors;
  if (usual && few && device.bulk_copies && a.most_keys > 0 && a.most_keys <= kClusterKeys) {
    static ClusterRoom clusters;
    a.clusters = clusters.of(usual_kernel, kThreads, bytes(true), kClusterSize, device.index) >= heads * rows;
    if (a.clusters) ctas = kClusterSize;
  }
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(heads), static_cast<unsigned>(rows));
  const auto kernel = usual ? usual_kernel : &decode_attention_kernel<T, kDim, kQueries, kWarps, false>;
  return launch_step(kernel, grid, kThreads, bytes(a.clusters), a, stream, true, a.clusters ? kClusterSize : 1);
}

template <class T, int kDim, int kQueries>
int32_t launch_for(Attention &a, int rows, const Device &device, void *stream) {
  if constexpr (kDim == 128) {
    if (a.beside_products) return launch_warps<T, kDim, kQueries, 4>(a, rows, device, stream);
  }
  return launch_warps<T, kDim, kQueries, 8>(a, rows, device, stream);
}

// Kernels for fewer queries than a block's most have it in fewer registers.
template <class T, int kDim>
int32_t launch_queries(Attention &a, int rows, const Device &device, void *stream) {
  const int queries = a.group() * a.tokens;
  a.blocks = 1;
  if (queries == 1) return launch_for<T, kDim, 1>(a, rows, device, stream);
  if (queries == 2) return launch_for<T, kDim, 2>(a, rows, device, stream);
  if constexpr (kDim > 128) {
    a.blocks = (queries + 3) / 4;
    return launch_for<T, kDim, 4>(a, rows, device, stream);
  } else {
    if (queries <= 4) return launch_for<T, kDim, 4>(a, rows, device, stream);
    a.blocks = (queries + 7) / 8;
    return launch_for<T, kDim, 8>(a, rows, device, stream);
  }
}

template <class T>
int32_t launch_dim(Attention &a, int rows, const Device &device, void *stream) {
  if (a.dim <= 64) return launch_queries<T, 64>(a, rows, device, stream);
  if (a.dim <= 96) return launch_queries<T, 96>(a, rows, device, stream);
  if (a.dim <= 128) return launch_queries<T, 128>(a, rows, device, stream);
  return launch_queries<T, 256>(a, rows, device, stream);
}

}  // namespace

bool takes_attention(DType type, const DecodeLayer &layer, const DecodeArgs &args, const Device &device) {
  constexpr int64_t kMostRows = 65535;  // gridDim.z
  return type != DType::F32 && device.tensor_cores && device.shared_limit >= kLeastShared &&
         layer.dim % 8 == 0 && layer.dim <= 256 && args.tokens <= kNewKeys && args.rows <= kMostRows &&
         layer.key_heads * layer.group() * args.tokens <= kMostRows;
}

int32_t run_attention(DType type, Attention a, int rows, const Device &device, void *stream) {
  return type == DType::BF16 ? launch_dim<__nv_bfloat16>(a, rows, device, stream)
                             : launch_dim<__half>(a, rows, device, stream);
}

}  // namespace hfp::cuda::decode
