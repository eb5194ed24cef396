// decode_model.h: validates and reads the `model` of hfp_decode_step.
//
// Two steps for each tensor: a test that costs nothing, since a model has hundreds of them and this
// runs with every token on the CPU, and where that fails the search for what to say.
#pragma once

#include "check.h"
#include "decode.h"

namespace hfp {

// Where things stand in the lists; see hfpatch.h.
enum DecodePlace : int64_t {
  kDecodePlan, kDecodeNumbers, kDecodeEmbedding, kDecodeHead, kDecodeHeadBias, kDecodeFinalNorm,
  kDecodeFinalNormBias, kDecodeRopes,
};
enum DecodeTensor : int64_t {
  kBeforeAttention = 0, kAfterAttention = 2, kBeforeMlp = 4, kAfterMlp = 6, kQNorm = 8, kKNorm = 10,
  kQ = 12, kK = 14, kV = 16, kO = 18, kGate = 20, kUp = 22, kDown = 24, kSinks = 26,
};
enum DecodePlanField : int64_t {
  kModes = 0, kHeads = 6, kKeyHeads, kHeadDim, kRope, kAcross, kAfterRope, kWindow, kActivation,
  kParallel,
};
enum DecodeNumber : int64_t { kEps = 0, kOffset = 1, kScale = 12, kSoftcap, kClip, kMultiplier };
constexpr int64_t kPlanHead = 3, kNumbersHead = 5;
static_assert(kSinks + 1 == HFP_DECODE_TENSORS && kParallel + 1 == HFP_DECODE_PLAN &&
                  kMultiplier + 1 == HFP_DECODE_NUMBERS,
              "hfpatch.h and decode_model.h differ");

inline const void *data_of(const DLTensor *t) {
  return t ? static_cast<const char *>(t->data) + t->byte_offset : nullptr;
}

// A model's names as spec.py has them, for messages.
struct DecodeName {
  char text[96];
  DecodeName(int64_t layer, const char *part, const char *leaf) {
    char head[32] = "";
    if (layer >= 0) std::snprintf(head, sizeof head, "layers[%lld].", static_cast<long long>(layer));
    std::snprintf(text, sizeof text, "%s%s%s%s", head, part, *leaf ? "." : "", leaf);
  }
};

class DecodeModelReader {
 public:
  explicit DecodeModelReader(Check &check, const char *function)
      : check_(check), function_(function) {}

  // Fills in all of `args` that does not depend on the call's other tensors.
  bool read(const HfpTensorList *model, DecodeArgs *args);
  const DLDevice &device() const { return device_; }
  // Whether a result lies in a tensor of the model.
  bool apart(const char *name, const Tensor &result) const;

 private:
  bool host(const char *name, const DLTensor *raw, bool integers, int64_t least, const DLTensor **out);
  // A tensor of `ndim` dimensions; a size of -1 may be anything.
  bool tensor(int64_t layer, const char *part, const char *leaf, const DLTensor *raw, int ndim,
              int64_t first, int64_t last, bool fp32 = false);
  // A norm of rows; with `heads` above 0 of q's or k's heads, each of which may have its own.
  bool norm(int64_t layer, const char *part, int64_t mode, int64_t place, int64_t width,
            const float *numbers, int64_t heads = 0);
  // A norm's weight or bias.
  bool norm_tensor(int64_t layer, const char *part, const char *leaf, const DLTensor *raw,
                   int64_t width, int64_t heads, OfHeads of);
  // int64 [heads] of addresses, which only a CPU can look at.
  bool addresses(int64_t layer, const char *part, const char *leaf, const DLTensor *raw,
                 int64_t heads);
  bool product(int64_t layer, const char *part, int64_t place, int64_t out, int64_t in);
  // That nothing stands there: it would be read by nobody, and looked at by nobody.
  bool none(int64_t layer, const char *part, const char *leaf, int64_t place);
  // A weight of 8-bit integers.
  bool byte_rows(int64_t layer, const char *part, const DLTensor *w, int64_t out, int64_t in);
  bool layer(int64_t i, DecodeSizes *sizes);
  bool number(int64_t layer, const char *name, float value, float least);
  bool choice(int64_t layer, const char *name, int64_t value, int64_t low, int64_t high);
  const DLTensor *at(int64_t place) const { return model_->tensors[place]; }

  Check &check_;
  const char *function_;
  const HfpTensorList *model_ = nullptr;
  DecodeArgs *args_ = nullptr;
  DLDevice device_ = {};
};

}  // namespace hfp
