// decode_model.cpp: validates and reads the `model` of hfp_decode_step; see decode_model.h.
#include "decode_model.h"

#include <cmath>

namespace hfp {

namespace {

constexpr int64_t kScaleBytes = 4;  // behind a row of 8-bit integers

bool of_bytes(const DLTensor *w) {
  return w && w->dtype.code == kDLInt && w->dtype.bits == 8 && w->dtype.lanes == 1;
}

DecodeProduct product_of(const HfpTensorList &model, int64_t place) {
  const DLTensor *w = model.tensors[place];
  if (!w) return {};
  const int64_t stride = w->strides && w->shape[0] > 1 ? w->strides[0] : w->shape[1];
  const bool bytes = of_bytes(w);
  const int64_t in = w->shape[1] - (bytes ? kScaleBytes : 0);
  return {data_of(w), data_of(model.tensors[place + 1]), w->shape[0], in, stride, bytes};
}

OfHeads of_heads(const DLTensor *t) {
  if (t && t->dtype.code == kDLInt && t->dtype.bits == 64 && t->dtype.lanes == 1) {
    return OfHeads::kAddresses;
  }
  return t && t->ndim == 2 ? OfHeads::kRow : OfHeads::kTheSame;
}

DecodeNorm norm_of(const HfpTensorList &model, int64_t place, int64_t mode, const float *numbers) {
  if (mode == 0) return {};
  const DLTensor *weight = model.tensors[place], *bias = model.tensors[place + 1];
  return {static_cast<int>(mode), data_of(weight), data_of(bias), numbers[kEps], numbers[kOffset],
          of_heads(weight ? weight : bias)};
}

int64_t more(int64_t a, int64_t b) { return a > b ? a : b; }

// Whether there are such addresses: all of a tensor of one or two dimensions, its rows contiguous,
// spans fewer than 2^63 bytes.
bool spans(const DLTensor &t, int64_t element) {
  const int64_t last = t.shape[t.ndim - 1], rows = t.ndim == 2 ? t.shape[0] : 1;
  const int64_t step = t.ndim == 2 && t.strides && rows > 1 ? t.strides[0] : last;
  const uint64_t start = reinterpret_cast<uint64_t>(t.data);
  int64_t reach, bytes;
  return t.byte_offset <= static_cast<uint64_t>(INT64_MAX) && start + t.byte_offset >= start &&
         !mul_overflows(rows - 1, step, &reach) && !add_overflows(reach, last, &reach) &&
         !mul_overflows(reach, element, &bytes);
}

}  // namespace

DecodeRope DecodeArgs::rope(int64_t i) const {
  const DLTensor *inv_freq = model->tensors[kDecodeRopes + i];
  const int64_t *p = plan + kPlanHead + 2 * i;
  return {static_cast<const float *>(data_of(inv_freq)), inv_freq->shape[0], p[0] != 0, p[1] != 0,
          numbers[kNumbersHead + i]};
}

DecodeLayer DecodeArgs::layer(int64_t i) const {
  const int64_t place = kDecodeRopes + ropes + i * HFP_DECODE_TENSORS;
  const int64_t *p = plan + kPlanHead + 2 * ropes + i * HFP_DECODE_PLAN;
  const float *n = numbers + kNumbersHead + ropes + i * HFP_DECODE_NUMBERS;
  const auto norm = [&](int64_t k) {
    return norm_of(*model, place + 2 * k, p[kModes + k], n + 2 * k);
  };
  DecodeLayer l;
  l.before_attention = norm(0);
  l.after_attention = norm(1);
  l.before_mlp = norm(2);
  l.after_mlp = norm(3);
  l.q_norm = norm(4);
  l.k_norm = norm(5);
  l.q = product_of(*model, place + kQ);
  l.k = product_of(*model, place + kK);
  l.v = product_of(*model, place + kV);
  l.o = product_of(*model, place + kO);
  l.gate = product_of(*model, place + kGate);
  l.up = product_of(*model, place + kUp);
  l.down = product_of(*model, place + kDown);
  l.sinks = data_of(model->tensors[place + kSinks]);
  l.heads = p[kHeads];
  l.key_heads = p[kKeyHeads];
  l.dim = p[kHeadDim];
  l.rope = p[kRope];
  l.norm_across = p[kAcross] != 0;
  l.norm_after_rope = p[kAfterRope] != 0;
  l.window = p[kWindow];
  l.activation = static_cast<int>(p[kActivation]);
  l.parallel = p[kParallel] != 0;
  l.scale = n[kScale];
  l.softcap = n[kSoftcap];
  l.clip = n[kClip];
  l.multiplier = n[kMultiplier];
  return l;
}

bool DecodeModelReader::host(const char *name, const DLTensor *raw, bool integers, int64_t least,
                             const DLTensor **out) {
  // The numbers lie on the CPU wherever the model does.
  if (!raw) return check_.fail("`%s` must be a tensor, got NULL", name);
  if (raw->device.device_type != kDLCPU) {
    return check_.fail("`%s` must be on the CPU, got DLPack device type %d; move it there", name,
                       raw->device.device_type);
  }
  const DLDataType wanted = integers ? DLDataType{kDLInt, 64, 1} : DLDataType{kDLFloat, 32, 1};
  if (raw->dtype.code != wanted.code || raw->dtype.bits != wanted.bits || raw->dtype.lanes != 1) {
    return check_.fail("`%s` must be %s, got %s; convert it first", name,
                       integers ? "int64" : "float32", DTypeText(raw->dtype).text);
  }
  const bool flat = raw->ndim == 1 && raw->shape && raw->shape[0] >= 0 &&
                    (!raw->strides || raw->shape[0] <= 1 || raw->strides[0] == 1);
  if (!flat) return check_.fail("`%s` must be contiguous, of 1 dimension, got %d", name, raw->ndim);
  if (raw->shape[0] < least) {
    return check_.fail("`%s` must have at least %lld elements, got %lld", name,
                       static_cast<long long>(least), static_cast<long long>(raw->shape[0]));
  }
  if (!spans(*raw, wanted.bits / 8)) {
    return check_.fail("`%s` must span fewer than 2^63 bytes, got shape %s", name,
                       ShapeText(*raw).text);
  }
  if (!raw->data || reinterpret_cast<uint64_t>(data_of(raw)) % (wanted.bits / 8) != 0) {
    return check_.fail("`%s` must point to data that is aligned to its element size; copy it", name);
  }
  if (!check_.pointer(name, data_of(raw), raw->device)) return false;
  *out = raw;
  return true;
}

bool DecodeModelReader::tensor(int64_t layer, const char *part, const char *leaf,
                               const DLTensor *raw, int ndim, int64_t first, int64_t last,
                               bool fp32) {
  const DType wanted = fp32 ? DType::F32 : args_->type;
  DType type = DType::F32;
  const auto fits = [](int64_t size, int64_t expected) {
    return expected < 0 ? size > 0 : size == expected;
  };
  const bool shaped = raw && raw->shape && raw->ndim == ndim && fits(raw->shape[0], first) &&
                      (ndim == 1 || fits(raw->shape[1], last));
  const bool plain = shaped && (!raw->strides || ((ndim == 1 || raw->shape[0] == 1 ||
                                                   raw->strides[0] >= raw->shape[1]) &&
                                                  (raw->shape[ndim - 1] == 1 ||
                                                   raw->strides[ndim - 1] == 1)));
  if (plain && supported(raw->dtype, &type) && type == wanted && raw->data &&
      spans(*raw, size_of(wanted)) && !checks_pointers() &&
      raw->device.device_type == device_.device_type &&
      (device_.device_type == kDLCPU || raw->device.device_id == device_.device_id) &&
      reinterpret_cast<uint64_t>(data_of(raw)) % static_cast<uint64_t>(size_of(wanted)) == 0) {
    return true;
  }
  const DecodeName name(layer, part, leaf);
  Tensor parsed;
  if (!check_.parsed(name.text, raw, &parsed)) return false;
  if (parsed.type != wanted) {
    return check_.fail("`%s` must be %s%s, got %s; convert it first", name.text, name_of(wanted),
                       fp32 ? "" : " like `embedding`", name_of(parsed.type));
  }
  if (!shaped) {
    const long long sizes[2] = {first, last};
    char text[64];
    if (ndim == 1) std::snprintf(text, sizeof text, "[%lld]", sizes[0]);
    else std::snprintf(text, sizeof text, "[%lld, %lld]", sizes[0], sizes[1]);
    return check_.fail("`%s` must have shape %s%s, got %s", name.text, text,
                       first < 0 || last < 0 ? " (-1: any size above 0)" : "", ShapeText(*raw).text);
  }
  if (plain) return true;
  return check_.fail("`%s` must have contiguous rows that do not overlap, got another layout; copy it",
                     name.text);
}

bool DecodeModelReader::number(int64_t layer, const char *name, float value, float least) {
  if (std::isfinite(value) && value >= least) return true;
  const DecodeName full(layer, name, "");
  if (least == -INFINITY) return check_.fail("`%s` must be finite, got %g", full.text, value);
  return check_.fail("`%s` must be finite and >= %g, got %g", full.text, least, value);
}

bool DecodeModelReader::choice(int64_t layer, const char *name, int64_t value, int64_t low,
                               int64_t high) {
  if (value >= low && value <= high) return true;
  return check_.fail("`%s` must be from %lld to %lld, got %lld", DecodeName(layer, name, "").text,
                     static_cast<long long>(low), static_cast<long long>(high),
                     static_cast<long long>(value));
}

bool DecodeModelReader::addresses(int64_t layer, const char *part, const char *leaf,
                                  const DLTensor *raw, int64_t heads) {
  const bool here = raw->device.device_type == device_.device_type &&
                    (device_.device_type == kDLCPU || raw->device.device_id == device_.device_id);
  const bool plain = raw->ndim == 1 && raw->shape && raw->shape[0] == heads && raw->data &&
                     (!raw->strides || heads == 1 || raw->strides[0] == 1) &&
                     reinterpret_cast<uint64_t>(data_of(raw)) % sizeof(int64_t) == 0;
  if (!here || !plain) {
    return check_.fail("`%s` must be a contiguous tensor of %lld addresses, int64 on the device of"
                       " `embedding`, got shape %s on %s; make it so",
                       DecodeName(layer, part, leaf).text, static_cast<long long>(heads),
                       raw->ndim > 0 && raw->shape ? ShapeText(*raw).text : "[]",
                       device_name(raw->device.device_type));
  }
  if (device_.device_type != kDLCPU) return true;
  const uint64_t *each = static_cast<const uint64_t *>(data_of(raw));
  for (int64_t h = 0; h < heads; ++h) {
    if (each[h] != 0 && each[h] % static_cast<uint64_t>(size_of(args_->type)) == 0) continue;
    return check_.fail("`%s` must hold the aligned address of head %lld's, got %llu",
                       DecodeName(layer, part, leaf).text, static_cast<long long>(h),
                       static_cast<unsigned long long>(each[h]));
  }
  return true;
}

bool DecodeModelReader::norm_tensor(int64_t layer, const char *part, const char *leaf,
                                    const DLTensor *raw, int64_t width, int64_t heads, OfHeads of) {
  if (!raw) return true;
  if (heads > 0 && of_heads(raw) != of) {
    return check_.fail("`%s` must be one for all heads, a row for each, or addresses, as"
                       " `weight` is; make both alike",
                       DecodeName(layer, part, leaf).text);
  }
  if (heads > 0 && of == OfHeads::kAddresses) return addresses(layer, part, leaf, raw, heads);
  if (heads == 0 || of == OfHeads::kTheSame) return tensor(layer, part, leaf, raw, 1, width, 0);
  if (!tensor(layer, part, leaf, raw, 2, heads, width)) return false;
  if (!raw->strides || heads == 1 || raw->strides[0] == width) return true;
  return check_.fail("`%s` must be contiguous, got rows %lld elements apart; copy it",
                     DecodeName(layer, part, leaf).text, static_cast<long long>(raw->strides[0]));
}

bool DecodeModelReader::none(int64_t layer, const char *part, const char *leaf, int64_t place) {
  if (!at(place)) return true;
  return check_.fail("`%s` must be NULL where the model has no `%s`, got a tensor",
                     DecodeName(layer, part, leaf).text, DecodeName(layer, part, "").text);
}

bool DecodeModelReader::norm(int64_t layer, const char *part, int64_t mode, int64_t place,
                             int64_t width, const float *numbers, int64_t heads) {
  if (mode == 0) return none(layer, part, "weight", place) && none(layer, part, "bias", place + 1);
  const int64_t kind = mode & ~static_cast<int64_t>(HFP_DECODE_NORM_ROUNDED);
  if (kind != HFP_DECODE_NORM_RMS && kind != HFP_DECODE_NORM_LAYER) {
    return check_.fail("`%s` must have a mode of 0, 1, 2, 5 or 6, got %lld",
                       DecodeName(layer, part, "").text, static_cast<long long>(mode));
  }
  const OfHeads of = of_heads(at(place) ? at(place) : at(place + 1));
  if (!norm_tensor(layer, part, "weight", at(place), width, heads, of) ||
      !norm_tensor(layer, part, "bias", at(place + 1), width, heads, of)) {
    return false;
  }
  return number(layer, part, numbers[kEps], 0) && number(layer, part, numbers[kOffset], -INFINITY);
}

bool DecodeModelReader::byte_rows(int64_t layer, const char *part, const DLTensor *w, int64_t out,
                                  int64_t in) {
  const bool there = w->data && w->device.device_type == kDLCPU && device_.device_type == kDLCPU;
  const bool shaped = w->ndim == 2 && w->shape && (out < 0 ? w->shape[0] > 0 : w->shape[0] == out) &&
                      w->shape[1] == in + kScaleBytes;
  const DecodeName name(layer, part, "weight");
  if (there && shaped && spans(*w, 1) &&
      (!w->strides || (w->strides[1] == 1 && (w->shape[0] == 1 || w->strides[0] >= w->shape[1])))) {
    return check_.pointer(name.text, data_of(w), w->device);
  }
  if (!there) {
    return check_.fail("`%s` must be on the CPU with all of the model where it is int8, got another"
                       " device; give it in the dtype of `embedding`",
                       name.text);
  }
  if (!shaped) {
    return check_.fail("`%s` must have shape [%lld, %lld + 4] where it is int8 (-1: any size above 0),"
                       " got %s",
                       name.text, static_cast<long long>(out), static_cast<long long>(in),
                       w->ndim == 2 && w->shape ? ShapeText(*w).text : "another number of sizes");
  }
  return check_.fail("`%s` must have contiguous rows that do not overlap, got another layout; copy it",
                     name.text);
}

bool DecodeModelReader::product(int64_t layer, const char *part, int64_t place, int64_t out,
                                int64_t in) {
  const DLTensor *w = at(place);
  if (of_bytes(w) ? !byte_rows(layer, part, w, out, in)
                  : !tensor(layer, part, "weight", w, 2, out, in)) {
    return false;
  }
  return !at(place + 1) || tensor(layer, part, "bias", at(place + 1), 1, at(place)->shape[0], 0);
}

bool DecodeModelReader::layer(int64_t i, DecodeSizes *sizes) {
  const int64_t place = kDecodeRopes + args_->ropes + i * HFP_DECODE_TENSORS;
  const int64_t *p = args_->plan + kPlanHead + 2 * args_->ropes + i * HFP_DECODE_PLAN;
  const float *n = args_->numbers + kNumbersHead + args_->ropes + i * HFP_DECODE_NUMBERS;
  constexpr int64_t kMost = 1 << 20;
  bool ok = choice(i, "attention.heads", p[kHeads], 1, kMost) &&
            choice(i, "attention.key_heads", p[kKeyHeads], 1, p[kHeads]) &&
            choice(i, "attention.head_dim", p[kHeadDim], 1, kMost) &&
            choice(i, "attention.rope", p[kRope], -1, args_->ropes - 1) &&
            choice(i, "attention.norm_across", p[kAcross], 0, 1) &&
            choice(i, "attention.norm_after_rope", p[kAfterRope], 0, 1) &&
            choice(i, "attention.window", p[kWindow], 0, INT64_MAX) &&
            choice(i, "parallel", p[kParallel], 0, 1) &&
            number(i, "attention.scale", n[kScale], -INFINITY) &&
            number(i, "attention.softcap", n[kSoftcap], 0) &&
            number(i, "attention.clip", n[kClip], 0) &&
            number(i, "residual_multiplier", n[kMultiplier], -INFINITY);
  if (!ok) return false;
  if (p[kActivation] != HFP_DECODE_RELU_SQUARED &&
      !choice(i, "mlp.activation", p[kActivation], 0, HFP_ACT_COUNT - 1)) {
    return false;
  }
  const int64_t heads = p[kHeads], key_heads = p[kKeyHeads], dim = p[kHeadDim], x = args_->width;
  if (heads % key_heads != 0) {
    return check_.fail("`%s` must be a multiple of `key_heads` (%lld), got %lld",
                       DecodeName(i, "attention.heads", "").text, static_cast<long long>(key_heads),
                       static_cast<long long>(heads));
  }
  if (p[kRope] >= 0 && at(kDecodeRopes + p[kRope])->shape[0] > dim / 2) {
    return check_.fail("`ropes[%lld].inv_freq` must have at most %lld elements for layer %lld, got"
                       " %lld",
                       static_cast<long long>(p[kRope]), static_cast<long long>(dim / 2),
                       static_cast<long long>(i),
                       static_cast<long long>(at(kDecodeRopes + p[kRope])->shape[0]));
  }
  const bool across = p[kAcross] != 0;
  const int64_t q_normed = across ? heads * dim : dim, k_normed = across ? key_heads * dim : dim;
  ok = norm(i, "before_attention", p[kModes], place + kBeforeAttention, x, n) &&
       norm(i, "after_attention", p[kModes + 1], place + kAfterAttention, x, n + 2) &&
       norm(i, "before_mlp", p[kModes + 2], place + kBeforeMlp, x, n + 4) &&
       norm(i, "after_mlp", p[kModes + 3], place + kAfterMlp, x, n + 6) &&
       norm(i, "attention.q_norm", p[kModes + 4], place + kQNorm, q_normed, n + 8,
            across ? 0 : heads) &&
       norm(i, "attention.k_norm", p[kModes + 5], place + kKNorm, k_normed, n + 10,
            across ? 0 : key_heads) &&
       product(i, "attention.q", place + kQ, heads * dim, x) &&
       product(i, "attention.k", place + kK, key_heads * dim, x) &&
       product(i, "attention.v", place + kV, key_heads * dim, x) &&
       product(i, "attention.o", place + kO, x, heads * dim);
  if (!ok) return false;
  // Without any of the three products the layer ends behind attention.
  const bool half = !at(place + kUp) && !at(place + kGate) && !at(place + kDown);
  if (!half && !product(i, "mlp.up", place + kUp, -1, x)) return false;
  const int64_t inner = half ? 0 : at(place + kUp)->shape[0];
  ok = (half ? none(i, "mlp.up", "bias", place + kUp + 1) &&
                   none(i, "mlp.down", "bias", place + kDown + 1)
             : product(i, "mlp.down", place + kDown, x, inner)) &&
       (at(place + kGate) ? product(i, "mlp.gate", place + kGate, inner, x)
                          : none(i, "mlp.gate", "bias", place + kGate + 1)) &&
       (!at(place + kSinks) || tensor(i, "attention.sinks", "", at(place + kSinks), 1, heads, 0));
  if (!ok) return false;
  sizes->qkv = more(sizes->qkv, (heads + 2 * key_heads) * dim);
  sizes->attended = more(sizes->attended, heads * dim);
  sizes->inner = more(sizes->inner, inner);
  sizes->group = more(sizes->group, heads / key_heads);
  sizes->dim = more(sizes->dim, dim);
  sizes->key_heads = more(sizes->key_heads, key_heads);
  return true;
}

bool DecodeModelReader::read(const HfpTensorList *model, DecodeArgs *args) {
  if (!model) return check_.fail("`model` must be a list, got NULL");
  if (model->count < kDecodeRopes || !model->tensors) {
    return check_.fail("`model` must hold at least %lld tensors, got %lld",
                       static_cast<long long>(kDecodeRopes), static_cast<long long>(model->count));
  }
  model_ = model;
  args_ = args;
  const DLTensor *plan = nullptr, *numbers = nullptr;
  if (!host("plan", at(kDecodePlan), true, kPlanHead, &plan) ||
      !host("numbers", at(kDecodeNumbers), false, kNumbersHead, &numbers)) {
    return false;
  }
  args->model = model;
  args->plan = static_cast<const int64_t *>(data_of(plan));
  args->numbers = static_cast<const float *>(data_of(numbers));
  constexpr int64_t kMost = 1 << 16;
  if (!choice(-1, "plan.layers", args->plan[0], 1, kMost) ||
      !choice(-1, "plan.ropes", args->plan[1], 0, kMost)) {
    return false;
  }
  const int64_t layers = args->layers = args->plan[0], ropes = args->ropes = args->plan[1];
  const int64_t tensors = kDecodeRopes + ropes + layers * HFP_DECODE_TENSORS;
  if (model->count != tensors) {
    return check_.fail("`model` must hold %lld tensors for %lld layers and %lld ropes, got %lld",
                       static_cast<long long>(tensors), static_cast<long long>(layers),
                       static_cast<long long>(ropes), static_cast<long long>(model->count));
  }
  if (!host("plan", plan, true, kPlanHead + 2 * ropes + layers * HFP_DECODE_PLAN, &plan) ||
      !host("numbers", numbers, false, kNumbersHead + ropes + layers * HFP_DECODE_NUMBERS,
            &numbers)) {
    return false;
  }
  Tensor embedding;
  if (!check_.parsed("embedding", at(kDecodeEmbedding), &embedding)) return false;
  if (embedding.raw->ndim != 2 || embedding.numel == 0 || !embedding.contiguous) {
    return check_.fail("`embedding` must be contiguous, of shape [vocab, hidden], got %s",
                       ShapeText(*embedding.raw).text);
  }
  device_ = embedding.raw->device;
  args->on_cpu = device_.device_type == kDLCPU;
  args->type = embedding.type;
  args->embedding = embedding.data;
  args->embeddings = embedding.raw->shape[0];
  args->width = embedding.last();
  const float *n = args->numbers;
  const char *const scales[] = {"embedding_scale", "logit_scale"};
  for (int i = 0; i < 2; ++i) {
    if (!number(-1, scales[i], n[i], -INFINITY)) return false;
  }
  if (!number(-1, "logit_softcap", n[2], 0) || !product(-1, "head", kDecodeHead, -1, args->width) ||
      !norm(-1, "final_norm", args->plan[2], kDecodeFinalNorm, args->width, n + 3)) {
    return false;
  }
  for (int64_t i = 0; i < ropes; ++i) {
    if (!tensor(-1, "ropes", "inv_freq", at(kDecodeRopes + i), 1, -1, 0, true) ||
        !choice(-1, "ropes.interleaved", args->plan[kPlanHead + 2 * i], 0, 1) ||
        !choice(-1, "ropes.rounded", args->plan[kPlanHead + 2 * i + 1], 0, 1) ||
        !number(-1, "ropes.scaling", n[kNumbersHead + i], -INFINITY)) {
      return false;
    }
    args->sizes.pairs += at(kDecodeRopes + i)->shape[0];
  }
  for (int64_t i = 0; i < layers; ++i) {
    if (!layer(i, &args->sizes)) return false;
  }
  args->embedding_scale = n[0];
  args->logit_scale = n[1];
  args->logit_softcap = n[2];
  args->head = product_of(*model, kDecodeHead);
  args->final_norm = norm_of(*model, kDecodeFinalNorm, args->plan[2], n + 3);
  args->vocab = args->head.out;
  return true;
}

bool DecodeModelReader::apart(const char *name, const Tensor &result) const {
  const char *begin = result.data, *end = begin + result.numel * size_of(result.type);
  // The plan and the numbers lie on the CPU wherever the model does.
  for (int64_t i = args_->on_cpu ? kDecodePlan : kDecodeEmbedding; i < model_->count; ++i) {
    const DLTensor *t = at(i);
    if (!t) continue;
    const int64_t rows = t->ndim == 2 ? t->shape[0] : 1, last = t->shape[t->ndim - 1];
    const int64_t step = t->ndim == 2 && t->strides && rows > 1 ? t->strides[0] : last;
    const char *from = static_cast<const char *>(data_of(t));
    const char *to = from + ((rows - 1) * step + last) * (t->dtype.bits / 8);
    if (begin < to && from < end) {
      return check_.fail("`%s` must not overlap `model[%lld]`, got tensors that share memory; clone"
                         " one of them",
                         name, static_cast<long long>(i));
    }
  }
  return true;
}

}  // namespace hfp
