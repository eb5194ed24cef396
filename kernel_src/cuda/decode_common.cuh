// decode_common.cuh: what the kernels of a decoding step share.
//
// They are launched one after the other with programmatic dependent launch: a kernel reads weights before
// wait_for_previous, and what other kernels of the step wrote after it, from L2, since L1 may hold it as
// it was a layer ago. Every thread that has work waits, and at least one of each kernel, or the kernel after
// next could overtake: it waits for this one's end. The first kernel of a step is launched without: what runs
// before may be what writes the weights.
#pragma once

#include "../decode.h"
#include "activations.cuh"
#include "common.cuh"

namespace hfp::cuda::decode {

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat162float(x);
  else return __half2float(x);
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return __float2half_rn(x);
}
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// What an earlier kernel of the step wrote.
template <class T>
__device__ __forceinline__ float load_one(const T *from) {
  if constexpr (sizeof(T) == 4) {
    return __ldcg(from);
  } else {
    const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short *>(from));
    return to_float(*reinterpret_cast<const T *>(&bits));
  }
}

template <class T>
union Eight {
  uint4 bits;
  T value[8];
};

// Of a parameter, which nothing writes. Not __ldg of a half type: that is no volatile asm, so the compiler moves
// it in front of tests, for null or the end of a row, that it stands behind.
template <class T>
__device__ __forceinline__ float load_parameter(const T *from) {
  if constexpr (sizeof(T) == 4) {
    return __ldg(from);
  } else {
    const unsigned short bits = __ldg(reinterpret_cast<const unsigned short *>(from));
    return to_float(*reinterpret_cast<const T *>(&bits));
  }
}

// Element i of a parameter that may be missing, then 0.
template <class T>
__device__ __forceinline__ float parameter(const void *pointer, int i) {
  return pointer != nullptr ? load_parameter(static_cast<const T *>(pointer) + i) : 0.0f;
}

// Of kernels whose CTAs take rows of x.
inline constexpr int kWarps = 16;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kChunk = 64;  // elements of a row that a warp takes at a time: a line of 128 bytes

// The eight elements of a row that a thread takes of each kThreads * 8, by their number: those of its warp's chunks.
// The order in which a row's squares are summed, by every kernel that norms one.
__device__ __forceinline__ int own_piece(int warp) {
  const int lane = threadIdx.x % 32;
  return (warp + lane / 8 * kWarps) * (kChunk / 8) + lane % 8;
}

// All of a warp's lanes get the sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

constexpr int kNoActivation = -1;

template <class T>
__device__ __forceinline__ float activated(int activation, float x) {
  constexpr bool kAccurate = std::is_same_v<T, float>;
  switch (activation) {
    case HFP_ACT_GELU_ERF: return activate<HFP_ACT_GELU_ERF, kAccurate>(x);
    case HFP_ACT_GELU_TANH: return activate<HFP_ACT_GELU_TANH, kAccurate>(x);
    case HFP_ACT_GELU_SIGMOID: return activate<HFP_ACT_GELU_SIGMOID, kAccurate>(x);
    case HFP_ACT_SILU: return activate<HFP_ACT_SILU, kAccurate>(x);
    case HFP_ACT_RELU: return activate<HFP_ACT_RELU, kAccurate>(x);
    default: {  // HFP_DECODE_RELU_SQUARED
      const float y = activate<HFP_ACT_RELU, kAccurate>(x);
      return y * y;
    }
  }
}

// What becomes of the sum of a product's row, in this order; each step rounds.
struct Finish {
  float clip = 0.0f;  // 0: none
  int activation = kNoActivation;
  float scale = 1.0f, softcap = 0.0f;  // of logits
  const void *residual = nullptr;      // of the rows of `out`
  float multiplier = 1.0f;
  bool wide = false;  // `out` is fp32
};

inline constexpr int kMaxRows = HFP_DECODE_ROWS;  // of x, of which the tensor-core kernels read the weights once

inline constexpr int kFewRows = 4;  // of which all products of a short layer share multiprocessors

// What of a multiprocessor a product of few rows takes. Short ones lie two to a multiprocessor: the next one copies its
// first weights, and waits, beside this one's work. But never two CTAs of one, for then another multiprocessor would
// have none: of each two in turn the one takes more than half of the registers, the other of the shared memory.
enum class Share { kWhole, kMoreRegisters, kMoreMemory };

// One product, or several of one x, one below the other; `pairs`: act(x gate) * (x up), of equal size.
struct Product {
  const void *weight[3];
  const void *bias[3];  // of each part, or null
  int end[3];           // where a part ends, in rows of all
  int64_t stride[3];    // of a weight's row, in elements
  int columns, rows;    // rows of x
  const void *x;
  int64_t x_stride;  // of a row
  const void *norm_weight;  // an RMS norm of x by the way, or null. Tensor cores only
  float eps, norm_offset;
  bool round_normed;
  void *out;
  int64_t out_columns;
  Finish finish;
  Share share = Share::kWhole;
};

template <class T>
__device__ __forceinline__ float bias_at(const Product &p, int part, int row) {
  return parameter<T>(p.bias[part], row);
}

template <class T>
__device__ __forceinline__ float residual_at(const Product &p, int row, int column) {
  if (p.finish.residual == nullptr) return 0.0f;
  return load_one(static_cast<const T *>(p.finish.residual) + static_cast<int64_t>(row) * p.out_columns + column);
}

// Stores the result at `column` of `row`; sum: bias included.
template <class T>
__device__ __forceinline__ void finish_one(const Product &p, int row, int column, float sum, float residual) {
  const Finish &f = p.finish;
  const int64_t at = static_cast<int64_t>(row) * p.out_columns + column;
  float y = rounded<T>(sum);
  if (f.clip > 0.0f) {  // not fminf, which drops NaN
    y = y > f.clip ? f.clip : y;
    y = y < -f.clip ? -f.clip : y;
  }
  if (f.activation != kNoActivation) y = rounded<T>(activated<T>(f.activation, y));
  if (f.scale != 1.0f) y = rounded<T>(y * f.scale);
  if (f.softcap > 0.0f) y = rounded<T>(rounded<T>(tanhf(rounded<T>(y / f.softcap))) * f.softcap);
  if (f.residual != nullptr) {
    if (f.multiplier != 1.0f) y = rounded<T>(y * f.multiplier);
    y += residual;
  }
  if (f.wide) static_cast<float *>(p.out)[at] = rounded<T>(y);
  else static_cast<T *>(p.out)[at] = from_float<T>(y);
}

template <class T>
__device__ __forceinline__ void finish_pair(const Product &p, int row, int column, float gate, float up) {
  const float act = rounded<T>(activated<T>(p.finish.activation, rounded<T>(gate)));
  static_cast<T *>(p.out)[static_cast<int64_t>(row) * p.out_columns + column] =
      from_float<T>(act * rounded<T>(up));
}

// ---------------------------------------------------------------------------------------------

// A norm of rows, with what follows it: out = residual + multiplier * norm(x), or the norm alone.
struct NormRow {
  DecodeNorm norm;  // mode 0: x as it is
  const void *x, *residual;
  void *out;
  int columns;
  float multiplier;
};

// Attention of a layer, by the kernels of decode_attention.cuh or decode_plain.cuh.
struct Attention {
  const void *qkv;  // [rows * tokens, (heads + 2 key_heads) * dim]
  void *out;        // [rows * tokens, heads * dim]
  const int64_t *cache;  // hfp_decode_step's
  int layer, tokens, heads, key_heads, dim;
  const float *table;  // [rows * tokens, 2, half]: cosines, sines; null: no rotation
  int half;  // pairs; 0: no rotation
  bool interleaved, round_products;
  const uint8_t *mask;
  int64_t mask_width;
  DecodeNorm q_norm, k_norm;
  bool across, after_rope;
  float scale, softcap;
  int64_t window;
  const void *sinks;
  int parts, blocks;     // blocks: of queries
  bool clusters;         // a block's CTAs are one
  int64_t most_keys;     // hfp_decode_step's
  bool beside_products;  // of a short layer (Share)
  float *partial;        // [rows, key heads, blocks, parts, queries of a block, 2 + dim]
  unsigned int *arrived;  // [rows, key heads, blocks], 0

  __host__ __device__ int group() const { return heads / key_heads; }
  __host__ __device__ int width() const { return (heads + 2 * key_heads) * dim; }
};

// What of a norm a lane needs for a head; loaded before wait_for_previous. `from`: where the head begins in it.
template <class T, int kDim>
struct HeadNorm {
  static constexpr int kEach = (kDim + 31) / 32;
  float weight[kEach], bias[kEach];

  // kUsual: without a bias, the same for all heads.
  template <bool kUsual = false>
  __device__ __forceinline__ void load(const DecodeNorm &norm, int from, int dim, int lane) {
    if (!norm.present()) return;
    const void *all = norm.weight, *all_bias = norm.bias;
    if (!kUsual && norm.heads == OfHeads::kAddresses) {
      const auto own = [&](const void *addresses) -> const void * {
        if (addresses == nullptr) return nullptr;
        return reinterpret_cast<const void *>(__ldg(static_cast<const unsigned long long *>(addresses) + from / dim));
      };
      all = own(all), all_bias = own(all_bias), from = 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = min(lane + 32 * i, dim - 1);
      weight[i] = all != nullptr ? parameter<T>(all, from + d) + norm.offset : 1.0f;
      if constexpr (!kUsual) bias[i] = parameter<T>(all_bias, from + d);
    }
  }

  // A head's own, or what all have; not of a norm across the heads.
  template <bool kUsual = false>
  __device__ __forceinline__ void load_head(const DecodeNorm &norm, int head, int dim, int lane) {
    load<kUsual>(norm, kUsual || norm.heads == OfHeads::kTheSame ? 0 : head * dim, dim, lane);
  }
};

// A warp's head: norm and rotation of `row` + `column` to `to`; `scratch`: kDim floats of the warp's own. `row`:
// all `width` elements of q or k, for a norm across its heads, whose parameters are loaded here. `held`: whether
// `of_head` is of this head; else they are too.
template <class T, int kDim, bool kUsual = false>
__device__ __forceinline__ void prepare_head(const Attention &a, const DecodeNorm &norm,
                                             const HeadNorm<T, kDim> &of_head, bool held, const T *row, int width,
                                             int column, const float *table, T *to, float *scratch, int lane) {
  constexpr int kEach = (kDim + 31) / 32;
  const int dim = kUsual ? kDim : a.dim, half = kUsual ? kDim / 2 : a.half;
  const bool across = !kUsual && a.across, after_rope = !kUsual && a.after_rope;
  const bool interleaved = !kUsual && a.interleaved, layer = !kUsual && norm.layer();
  float v[kEach], cosine[kEach], sine[kEach];
  HeadNorm<T, kDim> by = of_head;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = lane + 32 * i;
    v[i] = d < dim ? load_one(row + column + d) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = lane + 32 * i;
    if (d < 2 * half) {  // half is 0 where there is no table
      const int pair = interleaved ? d / 2 : d >= half ? d - half : d;
      cosine[i] = __ldcg(table + pair), sine[i] = __ldcg(table + half + pair);
    }
  }
  const auto normalize = [&] {
    float mean = 0.0f, square = 0.0f;
    const int count = across ? width : dim;
    if (across || (!kUsual && !held)) by.load(norm, column, dim, lane);
    if (across) {
      if (layer) {
        for (int d = lane; d < width; d += 32) mean += load_one(row + d);
        mean = warp_sum(mean) / static_cast<float>(width);
      }
      for (int d = lane; d < width; d += 32) {
        const float x = load_one(row + d) - mean;
        square = fmaf(x, x, square);
      }
    } else {
      if (layer) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) mean += v[i];
        mean = warp_sum(mean) / static_cast<float>(dim);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float x = lane + 32 * i < dim ? v[i] - mean : 0.0f;
        square = fmaf(x, x, square);
      }
    }
    const float scale = rsqrtf(warp_sum(square) / static_cast<float>(count) + norm.eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float y = (v[i] - mean) * scale;
      if (norm.rounded()) y = rounded<T>(y);
      v[i] = rounded<T>(kUsual ? y * by.weight[i] : y * by.weight[i] + by.bias[i]);
    }
  };
  // One copy of each in the code: a step's kernels evict each other's, and fetching it takes longer than running it.
#pragma unroll 1
  for (bool turned_already = false;; turned_already = true) {
    if (norm.present() && after_rope == turned_already) normalize();
    if (turned_already) break;
    if (half <= 0) continue;
#pragma unroll
    for (int i = 0; i < kEach; ++i) scratch[lane + 32 * i] = v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = lane + 32 * i;
      if (d >= 2 * half) continue;
      const bool second = interleaved ? (d & 1) != 0 : d >= half;
      const float other = scratch[interleaved ? d ^ 1 : second ? d - half : d + half];
      const float turned = second ? other : -other;
      v[i] = a.round_products ? rounded<T>(rounded<T>(v[i] * cosine[i]) + rounded<T>(turned * sine[i]))
                              : rounded<T>(fmaf(v[i], cosine[i], turned * sine[i]));
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int d = lane + 32 * i;
    if (d < dim) to[d] = from_float<T>(v[i]);
  }
}

// ---------------------------------------------------------------------------------------------

constexpr int kReservedShared = 1 << 10;  // of each CTA, by the driver

// `early`: as this header's first lines say. `cluster`: CTAs of one.
template <class Params>
int32_t launch_step(void (*kernel)(Params), dim3 grid, int threads, int bytes, Params &params, void *stream,
                    bool early = true, int cluster = 1) {
  constexpr const char *kOp = "decode_step";
  const cudaError_t allowed = allow_shared_memory(kernel, bytes);
  if (allowed != cudaSuccess) return check(allowed, kOp);
  const void *function = reinterpret_cast<const void *>(kernel);
  // A multiprocessor that must divide its memory anew between L1 and shared memory waits until it is empty.
  const cudaError_t divided = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared);
  if (divided != cudaSuccess) return check(divided, kOp);
  void *arguments[] = {&params};
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (early && early_start_supported(function)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  return check(cudaLaunchKernelExC(&config, function, arguments), kOp);
}

// What the device is, asked once a step.
struct Device {
  int index, processors, shared_limit;
  bool tensor_cores;  // bf16 and fp16 mma and cp.async, in the code that the GPU runs
  bool bulk_copies;   // cp.async.bulk too
};

// decode_product.cu: whether the tensor-core kernels take this product; if so it is launched, in rounds of kMaxRows
// rows. `norm`: not yet applied to p.x, or none; `normed`: a buffer for it.
bool takes_product(DType type, const Product &p, const Device &device);
int32_t run_product(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, const Device &device,
                    void *stream);
Device device_of(int device);

// decode_bulk.cu: the same for up to eight rows of x, from sm_90 on, with the norm that p has.
bool takes_bulk(const Product &p, const Device &device);
int32_t run_bulk(DType type, Product p, bool pairs, const Device &device, void *stream);
bool bulk_copies_supported();

// decode_many.cu: the same of more than kMaxRows rows of x, by cuBLASLt. `sums`: [p.rows, `columns`] fp32, scratch;
// `library`: kCudaGemmWorkspace bytes of cuBLASLt's.
bool many_supported();
int32_t run_many(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, float *sums, int64_t columns,
                 float *library, const Device &device, void *stream);

// decode_attention.cu
constexpr int kMostParts = 32;  // of a sequence's keys
bool takes_attention(DType type, const DecodeLayer &layer, const DecodeArgs &args, const Device &device);
int32_t run_attention(DType type, Attention a, int rows, const Device &device, void *stream);
inline int queries_of_block(int64_t dim) { return dim > 128 ? 4 : 8; }

// decode_plain.cu: any size, alignment and dtype.
int32_t run_plain_product(DType type, Product p, bool pairs, const DecodeNorm &norm, void *normed, void *stream);
int32_t run_plain_attention(DType type, Attention a, int rows, void *stream);

// decode_step.cu
int32_t run_norm(DType type, NormRow p, int rows, void *stream);
// Norms p's x, if there is a norm, to `normed`, whose rows are neighbours; then it is p's x.
int32_t norm_before(DType type, Product *p, const DecodeNorm &norm, void *normed, void *stream);

}  // namespace hfp::cuda::decode
