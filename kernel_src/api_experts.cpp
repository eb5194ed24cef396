// api_experts.cpp: the loss that balances the load of experts: validate (check.h), fill in a backend's
// arguments (kernels.h), dispatch on the device.
#include "check_any_shape.h"

HFP_BACKENDS(balance, BalanceArgs)
HFP_BACKENDS(balance_backward, BalanceArgs)

using hfp::BalanceArgs;
using hfp::Check;
using hfp::DType;
using hfp::Tensor;

namespace {

constexpr int64_t kTokensOfPart = 64, kMostParts = 256;

bool logits_of(Check &check, const DLTensor *logits, Tensor *x) {
  if (!check.input("logits", logits, x)) return false;
  if (logits->ndim != 2) {
    return check.fail("`logits` must have shape [tokens, experts], got %s",
                      hfp::ShapeText(*logits).text);
  }
  if (x->last() < 1 || x->last() > HFP_MAX_EXPERTS) {
    return check.fail("`logits` must have 1 to %d experts, got %lld", HFP_MAX_EXPERTS,
                      static_cast<long long>(x->last()));
  }
  return true;
}

bool mask_of(Check &check, const DLTensor *mask, const Tensor &x, Tensor *m) {
  *m = Tensor();
  return !mask || check.shaped("mask", mask, 1, x.raw->shape, DType::F32, m);
}

}  // namespace

extern "C" {

int64_t hfp_balance_parts(int64_t tokens) {
  const int64_t parts = tokens > 0 ? (tokens + kTokensOfPart - 1) / kTokensOfPart : 1;
  return parts < kMostParts ? parts : kMostParts;
}

int32_t hfp_load_balancing_loss(DLTensor *loss, DLTensor *stats, DLTensor *partials,
                                const DLTensor *logits, const DLTensor *mask, int64_t k,
                                void *stream) {
  Check check("hfp_load_balancing_loss");
  Tensor l, s, p, x, m;
  if (!logits_of(check, logits, &x) || !mask_of(check, mask, x, &m)) return check.status();
  if (k < 1 || k > x.last()) {
    check.fail("`k` must be from 1 to the number of experts %lld, got %lld",
               static_cast<long long>(x.last()), static_cast<long long>(k));
    return check.status();
  }
  const int64_t width = 2 * x.last() + 1, parts = hfp_balance_parts(logits->shape[0]);
  const int64_t room = parts * width;
  const bool ok = hfp::one_number(check, "loss", loss, &l) && check.writes(l) &&
                  check.shaped("stats", stats, 1, &width, DType::F32, &s) &&
                  check.shaped("partials", partials, 1, &room, DType::F32, &p);
  if (!ok) return check.status();
  BalanceArgs args = {};
  args.loss = reinterpret_cast<float *>(l.data);
  args.stats = reinterpret_cast<float *>(s.data);
  args.partials = reinterpret_cast<float *>(p.data);
  args.logits = x.data;
  args.mask = reinterpret_cast<const float *>(m.data);
  args.type = x.type;
  args.rows = x.rows;
  if (x.numel == 0) args.rows.rows = 0;
  args.parts = parts;
  args.k = static_cast<int>(k);
  return check.run(l, args, &hfp::cpu::balance, HFP_CUDA(balance), stream);
}

int32_t hfp_load_balancing_loss_backward(DLTensor *dlogits, const DLTensor *grad,
                                         const DLTensor *logits, const DLTensor *stats,
                                         const DLTensor *mask, void *stream) {
  Check check("hfp_load_balancing_loss_backward");
  Tensor o, g, x, s, m;
  if (!hfp::one_number(check, "grad", grad, &g) || !logits_of(check, logits, &x) ||
      !mask_of(check, mask, x, &m)) {
    return check.status();
  }
  const int64_t width = 2 * x.last() + 1;
  const bool ok = check.shaped("stats", stats, 1, &width, DType::F32, &s) &&
                  check.shaped("dlogits", dlogits, 2, x.raw->shape, x.type, &o);
  if (!ok) return check.status();
  BalanceArgs args = {};
  args.dlogits = o.data;
  args.grad = reinterpret_cast<const float *>(g.data);
  args.saved = reinterpret_cast<const float *>(s.data);
  args.logits = x.data;
  args.mask = reinterpret_cast<const float *>(m.data);
  args.type = x.type;
  args.rows = x.rows;
  return check.run(o, args, &hfp::cpu::balance_backward, HFP_CUDA(balance_backward), stream);
}

}  // extern "C"
