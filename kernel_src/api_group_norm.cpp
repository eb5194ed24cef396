// api_group_norm.cpp: hfp_group_norm of hfpatch.h: validate (check.h), fill in a backend's arguments
// (kernels.h), dispatch on the device.
#include "check.h"

HFP_BACKENDS(group_norm, GroupNormArgs)

using hfp::Check;
using hfp::DType;
using hfp::Tensor;

extern "C" {

// A part is what one CTA sums: at most 256 of them to a group. Channels-last, a CTA sums all groups
// of some positions, so that the parts of a group are smaller.
int64_t hfp_group_parts(int64_t channels, int64_t positions, int64_t groups,
                        int64_t channels_last) {
  if (channels <= 0 || positions <= 0 || groups <= 0 || channels % groups != 0) return 1;
  int64_t elements;
  if (__builtin_mul_overflow(channels / groups, positions, &elements)) return 1;
  const int64_t least = channels_last ? 512 : 4096;
  int64_t parts = elements / least + (elements % least != 0);
  if (parts > 256) parts = 256;
  return channels_last && parts > positions ? positions : parts;
}

int32_t hfp_group_norm(DLTensor *out, DLTensor *stats, const DLTensor *x, const DLTensor *weight,
                       const DLTensor *bias, int64_t groups, double eps, int64_t silu,
                       int64_t channels_last, void *stream) {
  Check check("hfp_group_norm");
  Tensor o, a, w, b, s;
  if (!check.in_range("silu", silu, 2, "0 or 1") ||
      !check.in_range("channels_last", channels_last, 2, "0 or 1") || !check.input("x", x, &a)) {
    return check.status();
  }
  if (x->ndim != 3 || !a.contiguous) {
    check.fail("`x` must be contiguous and have 3 dimensions, [N, C, S] or, with `channels_last`,"
               " [N, S, C], got %d dimensions%s",
               x->ndim, a.contiguous ? "" : " and a strided tensor");
    return check.status();
  }
  const int64_t channels = x->shape[channels_last ? 2 : 1];
  const int64_t positions = x->shape[channels_last ? 1 : 2];
  if (groups < 1 || channels % groups != 0) {
    check.fail("`groups` must be at least 1 and divide the channels of `x` (%lld), got %lld",
               static_cast<long long>(channels), static_cast<long long>(groups));
    return check.status();
  }
  // The parameters have one element per channel, which need not be the last dimension of x.
  int64_t like_shape[1] = {channels};
  DLTensor like_raw = *x;
  like_raw.ndim = 1;
  like_raw.shape = like_shape;
  like_raw.strides = nullptr;
  Tensor like = a;
  like.raw = &like_raw;
  like.rows.cols = channels;
  const int64_t parts = hfp_group_parts(channels, positions, groups, channels_last);
  const int64_t stats_shape[4] = {x->shape[0], groups, parts + 1, 2};
  const bool ok = check.param("weight", weight, like, &w) && check.param("bias", bias, like, &b) &&
                  check.same_type(w, b) && check.number("eps", eps, 0, "finite and >= 0") &&
                  check.output(out, a, 1, a.type, &o) &&
                  check.shaped("stats", stats, 4, stats_shape, DType::F32, &s);
  if (!ok) return check.status();
  hfp::GroupNormArgs args = {};
  args.out = o.data;
  args.stats = reinterpret_cast<float *>(s.data);
  args.x = a.data;
  args.weight = w.data;
  args.bias = b.data;
  args.type = a.type;
  args.weight_type = w.present ? w.type : b.present ? b.type : a.type;
  args.batch = x->shape[0];
  args.channels = channels;
  args.positions = positions;
  args.groups = groups;
  args.parts = parts;
  args.eps = static_cast<float>(eps);
  args.silu = silu != 0;
  args.channels_last = channels_last != 0;
  return check.run(o, args, &hfp::cpu::group_norm, HFP_CUDA(group_norm), stream);
}

}  // extern "C"
