// decode.h: what hfp_decode_step hands to a backend; internal, as kernels.h.
//
// The description of a model stays what the caller gave: a list of tensors and two arrays of numbers.
// `layer` and `rope` read one part of it at a time, so that nothing is allocated.
#pragma once

#include "kernels.h"

#if defined(__CUDACC__)
#define HFP_HOST_DEVICE __host__ __device__
#else
#define HFP_HOST_DEVICE
#endif

namespace hfp {

// What each head has of a norm of q or k.
enum class OfHeads {
  kTheSame,    // as all others; across the heads: its part of all
  kRow,        // a row of weight and bias, [heads, dim]
  kAddresses,  // a weight and a bias that lie where int64 [heads] say
};

struct DecodeNorm {
  int mode;  // 0: there is none
  const void *weight, *bias;  // null: none
  float eps, offset;
  OfHeads heads;

  HFP_HOST_DEVICE bool present() const { return mode != 0; }
  HFP_HOST_DEVICE bool layer() const { return (mode & HFP_DECODE_NORM_LAYER) != 0; }
  HFP_HOST_DEVICE bool rounded() const { return (mode & HFP_DECODE_NORM_ROUNDED) != 0; }
};

struct DecodeProduct {
  const void *weight, *bias;
  int64_t out, in, stride;  // stride: of a row, in elements
  bool bytes;  // rows of `in` 8-bit integers, each row's fp32 scale behind them
};

struct DecodeRope {
  const float *inv_freq;
  int64_t half;  // pairs
  bool interleaved, rounded;
  float scaling;
};

struct DecodeLayer {
  DecodeNorm before_attention, after_attention, before_mlp, after_mlp, q_norm, k_norm;
  DecodeProduct q, k, v, o, gate, up, down;  // gate.weight null: none; up.weight null: no MLP
  const void *sinks;
  int64_t heads, key_heads, dim;
  int64_t rope;  // -1: none
  bool norm_across, norm_after_rope, parallel;
  int64_t window;  // 0: all
  int activation;
  float scale, softcap, clip, multiplier;

  int64_t q_width() const { return heads * dim; }
  int64_t k_width() const { return key_heads * dim; }
  int64_t qkv_width() const { return q_width() + 2 * k_width(); }
  int64_t group() const { return heads / key_heads; }
};

// The greatest sizes of all layers.
struct DecodeSizes {
  int64_t qkv = 0, attended = 0, inner = 0, group = 0, dim = 0, key_heads = 0;
  int64_t pairs = 0;  // of all ropes
};

struct DecodeArgs {
  DType type;  // of weights, cache, embeds and hidden
  DType logits_type;
  int64_t rows, tokens, width, vocab;  // width: of the hidden state
  int64_t embeddings;                  // rows of the embedding
  int64_t layers, ropes;
  DecodeSizes sizes;
  bool on_cpu;
  const HfpTensorList *model;
  const int64_t *plan;
  const float *numbers;
  const void *embedding;
  float embedding_scale, logit_scale, logit_softcap;
  DecodeProduct head;
  DecodeNorm final_norm;

  void *logits, *hidden;  // null: not asked for
  float *workspace;
  const int64_t *cache, *ids, *positions;
  const void *embeds;
  const uint8_t *mask;
  int64_t mask_width;
  bool last_only;  // logits of each row's last token alone
  int64_t most_keys, threads;

  DecodeLayer layer(int64_t i) const;
  DecodeRope rope(int64_t i) const;
  int64_t queries() const { return rows * tokens; }
};

namespace cpu {
int64_t decode_workspace(const DecodeArgs &);
int32_t decode_step(const DecodeArgs &);
}  // namespace cpu

namespace cuda {
int64_t decode_workspace(const DecodeArgs &);
int32_t decode_step(const DecodeArgs &, int device, void *stream);
}  // namespace cuda

}  // namespace hfp
