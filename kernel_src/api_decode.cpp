// api_decode.cpp: hfp_decode_step and the size of its workspace: validate (check.h, decode_model.h),
// fill in a backend's arguments (decode.h), dispatch on the device.
#include "decode_model.h"

using hfp::Check;
using hfp::DecodeArgs;
using hfp::DecodeModelReader;
using hfp::DType;
using hfp::Tensor;

namespace {

constexpr int64_t kMostQueries = 1 << 16;  // rows * tokens
constexpr int64_t kMostThreads = 1 << 12;

int64_t workspace_of(const DecodeArgs &args, const char *function) {
  if (args.on_cpu) return hfp::cpu::decode_workspace(args);
#if defined(CUDA_KERNEL)
  (void)function;
  return hfp::cuda::decode_workspace(args);
#else
  return hfp::set_error(HFP_NOT_AVAILABLE,
                        "%s: this build has no CUDA kernels; build with nvcc, or pass CPU tensors",
                        function);
#endif
}

// `what` it must be: so many rows and tokens.
bool sized(Check &check, const char *what, int64_t rows, int64_t tokens, int64_t threads) {
  if (rows < 1 || tokens < 1 || rows > kMostQueries || tokens > kMostQueries ||
      rows * tokens > kMostQueries) {
    return check.fail("%s from 1 to %lld, got %lld rows and %lld tokens", what,
                      static_cast<long long>(kMostQueries), static_cast<long long>(rows),
                      static_cast<long long>(tokens));
  }
  return check.in_range("threads", threads, kMostThreads, "from 0 to 4095");
}

// bool or uint8, which no other function takes: everything but the dtype is checked as for a half type
// would be, in elements of one byte.
bool mask_of(Check &check, const DLTensor *raw, const DLDevice &device, DecodeArgs *args) {
  if (!raw) return true;
  constexpr uint8_t kDLBool = 6;
  if ((raw->dtype.code != kDLBool && raw->dtype.code != kDLUInt) || raw->dtype.bits != 8 ||
      raw->dtype.lanes != 1) {
    return check.fail("`mask` must be bool or uint8, got %s; convert it first",
                      hfp::DTypeText(raw->dtype).text);
  }
  if (raw->device.device_type != device.device_type ||
      (device.device_type == kDLCUDA && raw->device.device_id != device.device_id)) {
    return check.fail("`mask` must be on the device of `embedding`, got %s:%d; move it there",
                      hfp::device_name(raw->device.device_type), raw->device.device_id);
  }
  if (raw->ndim != 2 || !raw->shape || raw->shape[0] != args->rows || raw->shape[1] < args->tokens) {
    return check.fail("`mask` must have shape [%lld, keys], got %s",
                      static_cast<long long>(args->rows),
                      raw->ndim > 0 && raw->shape ? hfp::ShapeText(*raw).text : "another");
  }
  int64_t bytes;
  const uint64_t start = reinterpret_cast<uint64_t>(raw->data);
  if (hfp::mul_overflows(raw->shape[0], raw->shape[1], &bytes) ||
      raw->byte_offset > static_cast<uint64_t>(INT64_MAX) || start + raw->byte_offset < start) {
    return check.fail("`mask` must span fewer than 2^63 bytes, got shape %s",
                      hfp::ShapeText(*raw).text);
  }
  const bool plain = !raw->strides || ((raw->shape[1] == 1 || raw->strides[1] == 1) &&
                                       (raw->shape[0] == 1 || raw->strides[0] == raw->shape[1]));
  if (!plain) return check.fail("`mask` must be contiguous, got a strided tensor");
  if (!raw->data) return check.fail("`mask` must point to data, got data == NULL");
  args->mask = static_cast<const uint8_t *>(hfp::data_of(raw));
  if (!check.pointer("mask", args->mask, raw->device)) return false;
  check.reads_bytes("mask", args->mask, bytes);
  args->mask_width = raw->shape[1];
  return true;
}

// What the CPU can see of the table and of the ids, before anything is written.
bool values(Check &check, const DecodeArgs &args) {
  const int64_t length = args.cache[0], needed = length + args.tokens;
  if (length < 0 || length > INT64_MAX / 2) {
    return check.fail("`cache[0]` must be a length >= 0, got %lld", static_cast<long long>(length));
  }
  for (int64_t i = 0; i < args.layers; ++i) {
    const int64_t *entry = args.cache + 1 + 3 * i;
    for (int k = 0; k < 2; ++k) {
      const uint64_t address = static_cast<uint64_t>(entry[k]);
      if (address == 0 || address % static_cast<uint64_t>(hfp::size_of(args.type)) != 0) {
        return check.fail("`cache[%lld]` must be the aligned address of layer %lld's %s, got %llu",
                          static_cast<long long>(1 + 3 * i + k), static_cast<long long>(i),
                          k ? "values" : "keys", static_cast<unsigned long long>(address));
      }
    }
    if (entry[2] < needed) {
      return check.fail("`cache[%lld]` must be a capacity of at least %lld keys for layer %lld, got"
                        " %lld; grow the cache",
                        static_cast<long long>(3 + 3 * i), static_cast<long long>(needed),
                        static_cast<long long>(i), static_cast<long long>(entry[2]));
    }
  }
  if (args.mask && args.mask_width < needed) {
    return check.fail("`mask` must have at least %lld columns, got %lld",
                      static_cast<long long>(needed), static_cast<long long>(args.mask_width));
  }
  for (int64_t i = 0; args.ids && i < args.queries(); ++i) {
    if (args.ids[i] < 0 || args.ids[i] >= args.embeddings) {
      return check.fail("`ids` must be from 0 to %lld, got %lld",
                        static_cast<long long>(args.embeddings - 1),
                        static_cast<long long>(args.ids[i]));
    }
  }
  return true;
}

}  // namespace

extern "C" {

int64_t hfp_decode_workspace(const HfpTensorList *model, int64_t rows, int64_t tokens,
                             int64_t threads) {
  constexpr const char *kName = "hfp_decode_workspace";
  Check check(kName);
  DecodeModelReader reader(check, kName);
  DecodeArgs args = {};
  if (!sized(check, "`rows` * `tokens` must be", rows, tokens, threads) || !reader.read(model, &args)) return check.status();
  args.rows = rows;
  args.tokens = tokens;
  args.threads = threads;
  return workspace_of(args, kName);
}

int32_t hfp_decode_step(DLTensor *logits, DLTensor *hidden, DLTensor *workspace,
                        const HfpTensorList *model, const DLTensor *cache, const DLTensor *ids,
                        const DLTensor *embeds, const DLTensor *positions, const DLTensor *mask,
                        int64_t most_keys, int64_t threads, void *stream) {
  constexpr const char *kName = "hfp_decode_step";
  Check check(kName);
  DecodeModelReader reader(check, kName);
  DecodeArgs args = {};
  Tensor out, state, scratch, table, tokens, given, places;
  if (!positions || positions->ndim != 2 || !positions->shape) {
    check.fail("`positions` must be a tensor of shape [rows, tokens]");
    return check.status();
  }
  args.rows = positions->shape[0];
  args.tokens = positions->shape[1];
  args.threads = threads;
  args.most_keys = most_keys;
  const int64_t shape[3] = {args.rows, args.tokens, 0};
  if (most_keys < 0) {
    check.fail("`most_keys` must be 0 or more");
    return check.status();
  }
  if (!sized(check, "`positions` must have a number of elements", args.rows, args.tokens, threads) || !reader.read(model, &args) ||
      !check.indices("positions", positions, 2, shape, &places)) {
    return check.status();
  }
  const int64_t entries = 1 + 3 * args.layers;
  bool ok = check.indices("cache", cache, 1, &entries, &table);
  if (ok && !ids && !embeds) ok = check.fail("`ids` must be a tensor where `embeds` is NULL");
  const int64_t states[3] = {args.rows, args.tokens, args.width};
  ok = ok && (embeds ? check.shaped("embeds", embeds, 3, states, args.type, &given)
                     : check.indices("ids", ids, 2, shape, &tokens));
  ok = ok && mask_of(check, mask, reader.device(), &args);
  if (!ok) return check.status();
  if (!hidden && !logits) {
    check.fail("`logits` must be a tensor where `hidden` is NULL");
    return check.status();
  }
  if (logits && (logits->ndim != 3 || !logits->shape)) {
    check.fail("`logits` must be a tensor of shape [rows, tokens or 1, vocab]");
    return check.status();
  }
  args.last_only = logits && logits->shape[1] == 1;
  const int64_t wanted[3] = {args.rows, args.last_only ? 1 : args.tokens, args.vocab};
  if (logits) hfp::supported(logits->dtype, &args.logits_type);
  if (args.logits_type != DType::F32) args.logits_type = args.type;
  ok = (!logits || check.shaped("logits", logits, 3, wanted, args.logits_type, &out)) &&
       (!hidden || check.shaped("hidden", hidden, 3, states, args.type, &state));
  if (!ok) return check.status();
  const int64_t needed = workspace_of(args, kName);
  if (needed < 0) return static_cast<int32_t>(needed);
  int64_t size = workspace && workspace->ndim == 1 && workspace->shape ? workspace->shape[0] : 0;
  if (size < needed) size = needed;
  ok = check.shaped("workspace", workspace, 1, &size, DType::F32, &scratch) &&
       (!logits || reader.apart("logits", out)) && reader.apart("workspace", scratch) &&
       (!hidden || reader.apart("hidden", state));
  if (!ok) return check.status();
  args.logits = out.data;
  args.hidden = state.data;
  args.workspace = reinterpret_cast<float *>(scratch.data);
  args.cache = reinterpret_cast<const int64_t *>(table.data);
  args.ids = embeds ? nullptr : reinterpret_cast<const int64_t *>(tokens.data);
  args.embeds = given.data;
  args.positions = reinterpret_cast<const int64_t *>(places.data);
  if (args.on_cpu && !values(check, args)) return check.status();
  return check.run(logits ? out : state, args, &hfp::cpu::decode_step, HFP_CUDA(decode_step), stream);
}

}  // extern "C"
