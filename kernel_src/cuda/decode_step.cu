// decode_step.cu: a decoding step on CUDA: the kernels of all layers, one after the other in the stream. The
// first kernel and norms of rows are here, products and attention in decode_*.cuh.
#include "../products.h"
#include "decode_common.cuh"

namespace hfp::cuda::decode {

namespace {

struct Begin {
  const int64_t *ids, *positions;
  const void *embeds, *embedding;
  void *hidden;
  int64_t embeddings;
  int columns;
  float scale;
  // Of one rope at a time; `half` 0: no table.
  const float *inv_freq;
  float *table;
  int half;
  bool rounded;
  float scaling;
  bool state;  // whether the hidden state is written too
};

// A query's hidden state, and its cosines and sines.
template <class T>
__global__ void __launch_bounds__(256) decode_begin_kernel(const __grid_constant__ Begin p) {
  let_next_start();
  wait_for_previous<false>();
  const int64_t row = blockIdx.x;
  if (p.state) {
    T *const to = static_cast<T *>(p.hidden) + row * p.columns;
    const int64_t id = p.embeds == nullptr ? p.ids[row] : 0;
    const bool known = id >= 0 && id < p.embeddings;
    const T *const from = p.embeds != nullptr ? static_cast<const T *>(p.embeds) + row * p.columns
                                              : static_cast<const T *>(p.embedding) + (known ? id : 0) * p.columns;
    const bool scaled = p.embeds == nullptr && p.scale != 1.0f;
    for (int i = threadIdx.x; i < p.columns; i += blockDim.x) {
      const float x = load_one(from + i);
      to[i] = from_float<T>(!known ? NAN : scaled ? x * p.scale : x);
    }
  }
  const float position = static_cast<float>(p.positions[row]);
  float *const table = p.table + row * 2 * p.half;
  for (int i = threadIdx.x; i < p.half; i += blockDim.x) {
    // Not sincosf, whose way for large angles needs a stack: turns to half circles, the whole ones off, exactly.
    const double half_turns = static_cast<double>(position * p.inv_freq[i]) * 0.318309886183790671538;
    float s, c;
    sincospif(static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns)), &s, &c);
    s *= p.scaling, c *= p.scaling;
    table[i] = p.rounded ? rounded<T>(c) : c;
    table[p.half + i] = p.rounded ? rounded<T>(s) : s;
  }
}

// The sum over the CTA, in the order of the warps; all threads get it.
__device__ __forceinline__ float row_sum(float x, float *of_warps) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
  __syncthreads();
  return sum;
}

// A CTA a row. An RMS norm's sums are those of decode_product.cuh, and its threads' elements.
template <class T>
__global__ void __launch_bounds__(kThreads) decode_norm_kernel(const __grid_constant__ NormRow p) {
  __shared__ float of_warps[kWarps];
  let_next_start();
  wait_for_previous<false>();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * p.columns;
  const T *const x = static_cast<const T *>(p.x) + at;
  T *const out = static_cast<T *>(p.out) + at;
  const float columns = static_cast<float>(p.columns);
  const int own = own_piece(threadIdx.x / 32) * 8;
  const auto each = [&](auto &&fn) {
    for (int first = own; first < p.columns; first += kThreads * 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (first + j < p.columns) fn(first + j);
      }
    }
  };
  float mean = 0.0f, scale = 1.0f;
  if (p.norm.present()) {
    if (p.norm.layer()) {
      each([&](int i) { mean += load_one(x + i); });
      mean = row_sum(mean, of_warps) / columns;
    }
    float square = 0.0f;
    each([&](int i) {
      const float d = load_one(x + i) - mean;
      square = fmaf(d, d, square);
    });
    scale = rsqrtf(row_sum(square, of_warps) / columns + p.norm.eps);
  }
  each([&](int i) {
    float y = load_one(x + i);
    if (p.norm.present()) {
      y = (y - mean) * scale;
      if (p.norm.rounded()) y = rounded<T>(y);
      if (p.norm.weight != nullptr) y *= parameter<T>(p.norm.weight, i) + p.norm.offset;
      y += parameter<T>(p.norm.bias, i);
      y = rounded<T>(y);
    }
    if (p.residual != nullptr) {
      if (p.multiplier != 1.0f) y = rounded<T>(y * p.multiplier);
      y += load_one(static_cast<const T *>(p.residual) + at + i);
    }
    out[i] = from_float<T>(y);
  });
}

template <class Params>
int32_t launch_typed(DType type, void (*f32)(Params), void (*f16)(Params), void (*bf16)(Params), dim3 grid,
                     int threads, Params &p, void *stream, bool early) {
  const auto kernel = type == DType::F32 ? f32 : type == DType::F16 ? f16 : bf16;
  return launch_step(kernel, grid, threads, 0, p, stream, early);
}

// The workspace: what the kernels hand on.
struct Buffers {
  int64_t hidden, middle, normed, wide, qkv, attended, inner, table, partial, arrived, sums, total;
  int64_t columns = 0;  // of sums; 0: there are none

  explicit Buffers(const DecodeArgs &args) {
    const int64_t n = args.queries(), bytes = size_of(args.type);
    const DecodeSizes &s = args.sizes;
    int64_t at = 0;
    const auto take = [&at](int64_t size) {
      const int64_t here = at;
      at += (size + 255) / 256 * 256;
      return here;
    };
    hidden = take(n * args.width * bytes);
    middle = take(n * args.width * bytes);
    normed = take(n * args.width * bytes);
    wide = take(n * args.width * bytes);  // a product whose norm comes after it
    qkv = take(n * s.qkv * bytes);
    attended = take(n * s.attended * bytes);
    inner = take(n * s.inner * bytes);
    table = take(n * 2 * s.pairs * 4);
    // A block's queries are 1, 2, 4 or 8, and where there are more, heads of more than 128 have blocks of 4.
    const int64_t queries = s.group * args.tokens, blocks = (queries + 3) / 4;
    const int64_t in_blocks = queries <= 2 ? queries : queries <= 4 ? 4 : (queries + 7) / 8 * 8;
    const int64_t heads = args.rows * s.key_heads;
    int64_t parts = heads * in_blocks * kMostParts * (s.dim + 2) * 4;
    if (n > kMaxRows && many_supported()) {
      columns = args.width;
      if (columns < s.qkv) columns = s.qkv;
      if (columns < 2 * s.inner) columns = 2 * s.inner;
      if (parts < kCudaGemmWorkspace) parts = kCudaGemmWorkspace;
    }
    sums = take(n * columns * 4);
    partial = take(parts);  // and cuBLASLt's: neither needs it beside the other
    arrived = take(heads * blocks * 4);
    total = at + 256;  // to begin at a multiple
  }
};

class Step {
 public:
  Step(const DecodeArgs &args, const Device &device, void *stream)
      : args_(args), buffers_(args), device_(device), stream_(stream) {
    const uintptr_t past = reinterpret_cast<uintptr_t>(args.workspace) % 256;
    base_ = reinterpret_cast<char *>(args.workspace) + (256 - past) % 256;
    hidden_ = at(buffers_.hidden), middle_ = at(buffers_.middle);
  }

  int32_t run() {
    int32_t status = begin();
    for (int64_t i = 0; status == HFP_OK && i < args_.layers; ++i) status = layer(i);
    return status == HFP_OK ? finish() : status;
  }

 private:
  char *at(int64_t offset) const { return base_ + offset; }
  int rows() const { return static_cast<int>(args_.queries()); }
  int width() const { return static_cast<int>(args_.width); }

  int32_t begin() {
    Begin p{};
    p.ids = args_.ids, p.positions = args_.positions;
    p.embeds = args_.embeds, p.embedding = args_.embedding;
    p.hidden = hidden_;
    p.embeddings = args_.embeddings;
    p.columns = width();
    p.scale = args_.embedding_scale;
    p.state = true;
    float *table = reinterpret_cast<float *>(at(buffers_.table));
    for (int64_t r = 0; r < args_.ropes || r == 0; ++r) {
      p.table = table;
      if (r < args_.ropes) {
        const DecodeRope rope = args_.rope(r);
        p.inv_freq = rope.inv_freq;
        p.half = static_cast<int>(rope.half);
        p.rounded = rope.rounded;
        p.scaling = rope.scaling;
        table += args_.queries() * 2 * rope.half;
      }
      const int32_t status =
          launch_typed(args_.type, &decode_begin_kernel<float>, &decode_begin_kernel<__half>,
                       &decode_begin_kernel<__nv_bfloat16>, dim3(static_cast<unsigned>(rows())), 256, p, stream_,
                       r > 0);
      if (status != HFP_OK) return status;
      p.state = false;
    }
    return HFP_OK;
  }

  Product product(const void *x, const DecodeProduct *const *parts, int count, void *out) const {
    Product p{};
    int end = 0;
    for (int i = 0; i < 3; ++i) {
      if (i < count) {
        p.weight[i] = parts[i]->weight, p.bias[i] = parts[i]->bias, p.stride[i] = parts[i]->stride;
        end += static_cast<int>(parts[i]->out);
      }
      p.end[i] = end;
    }
    p.columns = static_cast<int>(parts[0]->in);
    p.rows = rows();
    p.x = x, p.x_stride = p.columns;
    p.out = out, p.out_columns = end;
    return p;
  }

  int32_t run_any(const Product &p, bool pairs, const DecodeNorm &norm) const {
    void *normed = at(buffers_.normed);
    if (p.rows > kMaxRows && buffers_.columns > 0) {
      return run_many(args_.type, p, pairs, norm, normed, reinterpret_cast<float *>(at(buffers_.sums)),
                      buffers_.columns, reinterpret_cast<float *>(at(buffers_.partial)), device_, stream_);
    }
    return takes_product(args_.type, p, device_)
               ? run_product(args_.type, p, pairs, norm, normed, device_, stream_)
               : run_plain_product(args_.type, p, pairs, norm, normed, stream_);
  }

  // With more than a few rows half of the warps cost a product more than it gains.
  Share share(const Product &p, Share of_short) const {
    return short_layer_ && p.rows <= kFewRows ? of_short : Share::kWhole;
  }

  // out = residual + multiplier * after(x W^T)
  int32_t into_stream(const DecodeProduct &w, const void *x, const DecodeNorm &after, float multiplier,
                      const void *residual, void *out) const {
    const DecodeProduct *const parts[] = {&w};
    Product p = product(x, parts, 1, after.present() ? at(buffers_.wide) : out);
    p.share = share(p, Share::kMoreMemory);
    if (!after.present()) p.finish.residual = residual, p.finish.multiplier = multiplier;
    const int32_t status = run_any(p, false, DecodeNorm{});
    if (status != HFP_OK || !after.present()) return status;
    return run_norm(args_.type, {after, p.out, residual, out, width(), multiplier}, rows(), stream_);
  }

  int32_t attention(const DecodeLayer &layer, int64_t index) const {
    Attention a{};
    a.qkv = at(buffers_.qkv), a.out = at(buffers_.attended);
    a.cache = args_.cache;
    a.layer = static_cast<int>(index), a.tokens = static_cast<int>(args_.tokens);
    a.heads = static_cast<int>(layer.heads), a.key_heads = static_cast<int>(layer.key_heads);
    a.dim = static_cast<int>(layer.dim);
    if (layer.rope >= 0) {
      const float *table = reinterpret_cast<const float *>(at(buffers_.table));
      for (int64_t r = 0; r < layer.rope; ++r) table += args_.queries() * 2 * args_.rope(r).half;
      const DecodeRope rope = args_.rope(layer.rope);
      a.table = table, a.half = static_cast<int>(rope.half);
      a.interleaved = rope.interleaved, a.round_products = rope.rounded;
    }
    a.mask = args_.mask, a.mask_width = args_.mask_width;
    a.q_norm = layer.q_norm, a.k_norm = layer.k_norm;
    a.across = layer.norm_across, a.after_rope = layer.norm_after_rope;
    a.scale = layer.scale, a.softcap = layer.softcap, a.window = layer.window;
    a.sinks = layer.sinks;
    a.most_keys = args_.most_keys;
    a.beside_products = short_layer_;
    a.partial = reinterpret_cast<float *>(at(buffers_.partial));
    a.arrived = reinterpret_cast<unsigned int *>(at(buffers_.arrived));
    const int rows = static_cast<int>(args_.rows);
    return takes_attention(args_.type, layer, args_, device_) ? run_attention(args_.type, a, rows, device_, stream_)
                                                              : run_plain_attention(args_.type, a, rows, stream_);
  }

  // Whether each of a layer's products would fit into the multiprocessors' shared memory: then it is for the most part
  // there before it begins, if its CTAs lie beside those of the one before (Share). Longer ones need all of the memory,
  // for more copies on their way.
  bool is_short(const DecodeLayer &l) const {
    constexpr int kTwoRings = 200 << 10;  // of shared memory; other GPUs take decode_product.cuh's kernels
    const int64_t most = int64_t{device_.processors} * device_.shared_limit;
    const auto bytes = [&](const DecodeProduct &w) {
      return w.weight == nullptr ? 0 : w.out * w.in * size_of(args_.type);
    };
    return device_.bulk_copies && device_.shared_limit >= kTwoRings &&
           bytes(l.q) + bytes(l.k) + bytes(l.v) <= most && bytes(l.o) <= most &&
           bytes(l.gate) + bytes(l.up) <= most && bytes(l.down) <= most;
  }

  int32_t layer(int64_t index) {
    const DecodeLayer l = args_.layer(index);
    short_layer_ = is_short(l);
    char *const hidden = hidden_, *const middle = middle_;
    const DecodeProduct *const qkv[] = {&l.q, &l.k, &l.v};
    Product p = product(hidden, qkv, 3, at(buffers_.qkv));
    p.finish.clip = l.clip;
    // However many rows: beside it attention asks for its keys.
    if (short_layer_) p.share = Share::kMoreRegisters;
    int32_t status = run_any(p, false, l.before_attention);
    if (status == HFP_OK) status = attention(l, index);
    if (status == HFP_OK) {
      status = into_stream(l.o, at(buffers_.attended), l.after_attention, l.multiplier, hidden, middle);
    }
    if (status != HFP_OK) return status;
    if (l.up.weight == nullptr) {  // what it is behind attention is the layer's result
      hidden_ = middle, middle_ = hidden;
      return HFP_OK;
    }
    // Side by side the MLP is given the layer's input too, and the sum is (x + attention) + mlp.
    const void *x = l.parallel ? hidden : middle;
    const DecodeNorm &norm = l.parallel && !l.before_mlp.present() ? l.before_attention : l.before_mlp;
    const bool gated = l.gate.weight != nullptr;
    const DecodeProduct *const gate_up[] = {gated ? &l.gate : &l.up, &l.up};
    p = product(x, gate_up, gated ? 2 : 1, at(buffers_.inner));
    p.out_columns = l.up.out;
    p.finish.activation = l.activation;
    p.share = share(p, Share::kMoreRegisters);
    status = run_any(p, gated, norm);
    if (status != HFP_OK) return status;
    return into_stream(l.down, at(buffers_.inner), l.after_mlp, l.multiplier, middle, hidden);
  }

  int32_t finish() const {
    const int64_t step = args_.last_only ? args_.tokens : 1;
    char *x = hidden_;
    DecodeNorm norm = args_.final_norm;
    if (args_.hidden != nullptr) {
      const int32_t status =
          run_norm(args_.type, {norm, x, nullptr, args_.hidden, width(), 1.0f}, rows(), stream_);
      if (status != HFP_OK) return status;
      x = static_cast<char *>(args_.hidden);
      norm = {};
    }
    if (args_.logits == nullptr) return HFP_OK;
    const DecodeProduct *const parts[] = {&args_.head};
    Product p = product(x + (step - 1) * args_.width * size_of(args_.type), parts, 1, args_.logits);
    p.rows = static_cast<int>(args_.queries() / step);
    p.x_stride = step * args_.width;
    p.finish.scale = args_.logit_scale, p.finish.softcap = args_.logit_softcap;
    p.finish.wide = args_.logits_type == DType::F32;
    p.share = share(p, Share::kMoreRegisters);
    return run_any(p, false, norm);
  }

  const DecodeArgs &args_;
  const Buffers buffers_;
  const Device device_;
  void *const stream_;
  char *base_;
  bool short_layer_ = false;  // the layer that is launched, or was last
  char *hidden_, *middle_;  // the residual stream, and what it is behind a layer's attention
};

}  // namespace

int32_t run_norm(DType type, NormRow p, int rows, void *stream) {
  return launch_typed(type, &decode_norm_kernel<float>, &decode_norm_kernel<__half>,
                      &decode_norm_kernel<__nv_bfloat16>, dim3(static_cast<unsigned>(rows)), kThreads, p, stream,
                      true);
}

int32_t norm_before(DType type, Product *p, const DecodeNorm &norm, void *normed, void *stream) {
  if (!norm.present()) return HFP_OK;
  const int64_t bytes = size_of(type);
  // Rows of x that are not neighbours, one by one: the head's, of a row's last token.
  const bool together = p->x_stride == p->columns;
  for (int r = 0; r < (together ? 1 : p->rows); ++r) {
    const NormRow one{norm, static_cast<const char *>(p->x) + r * p->x_stride * bytes, nullptr,
                      static_cast<char *>(normed) + static_cast<int64_t>(r) * p->columns * bytes, p->columns, 1.0f};
    const int32_t status = run_norm(type, one, together ? p->rows : 1, stream);
    if (status != HFP_OK) return status;
  }
  p->x = normed;
  p->x_stride = p->columns;
  return HFP_OK;
}

}  // namespace hfp::cuda::decode

namespace hfp::cuda {

int64_t decode_workspace(const DecodeArgs &args) { return (decode::Buffers(args).total + 3) / 4; }

int32_t decode_step(const DecodeArgs &args, int device, void *stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return check(guard.status(), "decode_step");
  constexpr int64_t kMostColumns = 1 << 30, kMostQueries = 65535, kMostDim = 256;
  if (args.queries() > kMostQueries || args.sizes.dim > kMostDim || args.vocab > kMostColumns ||
      args.sizes.qkv > kMostColumns || args.sizes.inner > kMostColumns) {
    return set_error(HFP_NOT_AVAILABLE,
                     "hfp_decode_step: `model` must have a head_dim of at most 256 on CUDA, and a step at most 65535"
                     " tokens, got %lld and %lld",
                     static_cast<long long>(args.sizes.dim), static_cast<long long>(args.queries()));
  }
  return decode::Step(args, decode::device_of(device), stream).run();
}

}  // namespace hfp::cuda
