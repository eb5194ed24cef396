"""What is done to the logits of a model in training, and to its head."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decoding.families import make
from expect import relative_error
from support.nearness import Draw, assert_as_near
from torch import nn
from torch.overrides import TorchFunctionMode
from twins import chk, outcome, same

import hfpatch
from hfpatch.errors import HfpatchError

CASES: dict[str, Callable[[], Any]] = {}
V = 300


def pair(family="llama", dtype=torch.float32, **more):
    m = make(family, **more).train().to(dtype)
    for mod in m.modules():
        if isinstance(mod, nn.Dropout):
            mod.p = 0.0
    m.requires_grad_(True)
    t = copy.deepcopy(m)
    r = hfpatch.apply(m, mode="training")
    assert any(s.op == "linear_cross_entropy" for s in r.swaps), r
    return (m, t)


IDS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
LAB = IDS.clone()
LAB[0, :3] = -100


#: Inputs that decide about a case in half types.
DRAWS = 6


def draw_of(ours, theirs, exact):
    """The errors against fp32 of all results together."""
    error = []
    for found in (ours, theirs):
        pairs = zip([found[0], *found[1]], [exact[0], *exact[1]], strict=True)
        parts = [relative_error(a, b) ** 2 for a, b in pairs if isinstance(b, torch.Tensor)]
        error.append((sum(parts) / len(parts)) ** 0.5)
    return Draw(*error)


@contextlib.contextmanager
def drawn(seed):
    """Other tokens in `IDS`, and in the labels that count."""
    before = IDS.clone(), LAB.clone()
    IDS.copy_(torch.randint(3, V, IDS.shape, generator=torch.Generator().manual_seed(seed)))
    LAB.copy_(torch.where(LAB == -100, LAB, IDS))
    try:
        yield
    finally:
        IDS.copy_(before[0])
        LAB.copy_(before[1])


def both(
    f,
    family="llama",
    dtype=torch.float32,
    tol=0.0003,
    grads=True,
    context=contextlib.nullcontext,
    loud=False,
    **more,
):
    m, t = pair(family, dtype, **more)
    half = dtype != torch.float32 or context is not contextlib.nullcontext
    models = [(m, context), (t, context)]
    if half:
        models.append((copy.deepcopy(t).float(), contextlib.nullcontext))

    def outcomes():
        outs = []
        for x, around in models:
            x.zero_grad()

            def go(x=x, around=around):
                with around():
                    r = f(x)
                if isinstance(r, torch.Tensor) and r.requires_grad and grads and (r.numel() == 1):
                    r.backward()
                g = (
                    {n: None if p.grad is None else p.grad.clone() for n, p in x.named_parameters()}
                    if grads
                    else {}
                )
                if isinstance(r, torch.Tensor):
                    r = r.detach() if type(r) is torch.Tensor else r.clone().detach()
                return (r, [g[k] for k in sorted(g)])

            outs.append(outcome(go))
        return outs

    outs = outcomes()
    if loud and isinstance(outs[0], HfpatchError):
        return "said"
    chk(same(outs[0], outs[1], math.inf if half else tol))
    if isinstance(outs[1], Exception):
        return "raised " + type(outs[1]).__name__
    if half:
        draws = [draw_of(*outs)]
        for seed in range(2, DRAWS + 1):
            with drawn(seed):
                outs = outcomes()
            chk(same(outs[0], outs[1], math.inf))
            draws.append(draw_of(*outs))
        assert_as_near(draws, torch.bfloat16)
    return ""


def ce(logits, t=LAB, **k):
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), t.reshape(-1), **k)


def add(name, f, **k):
    CASES[name] = lambda: both(f, **k)


def lg(m):
    return m(input_ids=IDS).logits


add("plain", lambda m: m(input_ids=IDS, labels=LAB).loss)
add("own ce", lambda m: ce(lg(m)))


def scaled_then_zero(m):
    logits = lg(m)
    s = logits / 2.0
    logits.detach().zero_()
    return ce(s)


add("scaled then parent zeroed (detach)", scaled_then_zero)


def scaled_then_inplace(m):
    logits = lg(m)
    s = logits * 2.0
    with torch.no_grad():
        logits.mul_(3.0)
    return ce(s)


add("scaled then parent written", scaled_then_inplace)


def view_then_inplace(m):
    logits = lg(m)
    s = logits.view(-1, V)
    with torch.no_grad():
        logits[:, :, 5] = -30.0
    return ce(s)


add("view then parent written", view_then_inplace)


def rows_then_inplace(m):
    logits = lg(m)
    s = logits[:, :-1]
    with torch.no_grad():
        logits[:, :, 5] = -30.0
    return ce(s, LAB[:, 1:])


add("rows then parent written", rows_then_inplace)


def child_written(m):
    logits = lg(m)
    s = logits[:, :-1]
    with torch.no_grad():
        s.detach().zero_()
    return ce(logits)


add("child view written, parent read", child_written)


def view_written(m):
    logits = lg(m)
    s = logits.view(-1, V)
    with torch.no_grad():
        s[:, 4] = -50.0
    return ce(logits)


add("view child setitem, parent used", view_written)


def tanh_parent(m):
    logits = lg(m)
    s = torch.tanh(logits / 5.0) * 5.0
    with torch.no_grad():
        logits.zero_()
    return ce(s)


add("softcap then parent zeroed", tanh_parent)


def cast_parent(m):
    logits = lg(m)
    s = logits.float()
    with torch.no_grad():
        logits.zero_()
    return ce(s)


add("cast then zeroed fp32", cast_parent)
add("cast then zeroed bf16", cast_parent, dtype=torch.bfloat16)
add("labels out of range", lambda m: ce(lg(m), torch.full_like(LAB, V)))
add("labels -1", lambda m: ce(lg(m), torch.where(LAB == -100, -1, LAB)))
add("labels -1 ignore -1", lambda m: ce(lg(m), torch.where(LAB == -100, -1, LAB), ignore_index=-1))
add("ignore index in range", lambda m: ce(lg(m), LAB.clamp(0), ignore_index=int(LAB[1, 2])))
add("all ignored", lambda m: ce(lg(m), torch.full_like(LAB, -100)))
add("all ignored sum", lambda m: ce(lg(m), torch.full_like(LAB, -100), reduction="sum"))
add("none reduction", lambda m: (ce(lg(m), reduction="none") * torch.arange(18.0)).sum())
add("bad reduction", lambda m: ce(lg(m), reduction="means"))
add("smoothing", lambda m: ce(lg(m), label_smoothing=0.3))
add("smoothing 1.5", lambda m: ce(lg(m), label_smoothing=1.5))
add("smoothing neg", lambda m: ce(lg(m), label_smoothing=-0.1))
add("smoothing all", lambda m: ce(lg(m), label_smoothing=1.0))
add("weight", lambda m: ce(lg(m), weight=torch.linspace(0.1, 2, V)))
add(
    "prob targets",
    lambda m: F.cross_entropy(lg(m).view(-1, V), torch.softmax(torch.ones(18, V), -1)),
)
add("int32 targets", lambda m: ce(lg(m), LAB.int()))
add("uint8 targets", lambda m: ce(lg(m), LAB.clamp(0).to(torch.uint8)))
add("3d CE", lambda m: F.cross_entropy(lg(m).transpose(1, 2), LAB))
add("negative scale", lambda m: ce(lg(m) * -1.5))
add("scale zero", lambda m: ce(lg(m) * 0))
add("huge scale", lambda m: ce(lg(m) * 1e38))
add("up and down", lambda m: ce(lg(m) * 1e38 / 1e38))
add("tiny and up", lambda m: ce(lg(m) / 1e38 / 100000000.0 * 1e38 * 100000000.0))
add("inf scale", lambda m: ce(lg(m) / float("inf")))
add("scale int", lambda m: ce(lg(m) * 3))
add("rdiv", lambda m: ce(3 / (lg(m) + 100)))
add("scale np", lambda m: ce(lg(m) * np.float64(2.5)))
add("scale tensor", lambda m: ce(lg(m) * torch.tensor(2.5)))
add("scale bool", lambda m: ce(lg(m) * True))
add("alpha div trunc", lambda m: ce(torch.div(lg(m), 2.0, rounding_mode="floor")))
add("cap negative", lambda m: ce(torch.tanh(lg(m) / 5) * -5.0))
add("cap neg inner", lambda m: ce(torch.tanh(lg(m) / -5) * 5.0))
add("cap no mul", lambda m: ce(torch.tanh(lg(m))))
add("cap then scale", lambda m: ce(torch.tanh(lg(m) / 5) * 5.0 * 2.0))
add("scale cap", lambda m: ce(torch.tanh(lg(m) * 2 / 5) * 5.0))
add("two tanh", lambda m: ce(torch.tanh(torch.tanh(lg(m)) * 2) * 3))
add("cap div", lambda m: ce(torch.tanh(lg(m) / 5) / 0.2))
add(
    "backward twice",
    lambda m: (lambda logits: (logits.backward(retain_graph=True), logits)[1])(ce(lg(m))),
)


def two_losses(m):
    logits = lg(m)
    return ce(logits) + 0.001 * logits.float().logsumexp(-1).pow(2).mean()


add("ce and z", two_losses)


def z_first(m):
    logits = lg(m)
    z = logits.float().logsumexp(-1).pow(2).mean()
    return ce(logits) + 0.001 * z


add("z and ce", z_first)
add("two ce", lambda m: (lambda logits: ce(logits) + 0.5 * ce(logits[:, :4], LAB[:, :4]))(lg(m)))


def grad_of_logits(m):
    logits = lg(m)
    loss = ce(logits)
    (g,) = torch.autograd.grad(loss, logits)
    return g


add("autograd.grad of logits", grad_of_logits, loud=True, grads=False)


def retain_before(m):
    logits = lg(m)
    logits.retain_grad()
    ce(logits).backward()
    return logits.grad


add("retain_grad before", retain_before, grads=False)


def retain_after(m):
    o = m(input_ids=IDS, labels=LAB)
    o.logits.retain_grad()
    o.loss.backward()
    return o.logits.grad


add("retain_grad after loss", retain_after, loud=True, grads=False)


def hook_after(m):
    o = m(input_ids=IDS, labels=LAB)
    o.logits.register_hook(lambda g: g * 2)
    return o.loss


add("hook after loss", hook_after)


def hook_before(m):
    logits = lg(m)
    logits.register_hook(lambda g: g * 2)
    return ce(logits)


add("hook before loss", hook_before)


def hook_on_child(m):
    logits = lg(m)
    s = logits * 2.0
    s.register_hook(lambda g: g * 3)
    return ce(logits) + ce(s)


add("hook on a child", hook_on_child)


def backward_inputs(m):
    logits = lg(m)
    ce(logits).backward(inputs=[logits])
    return logits.grad


add("backward(inputs=[logits])", backward_inputs, loud=True, grads=False)
add("detach", lambda m: ce(lg(m).detach()) + ce(lg(m)))
add(
    "no_grad reading",
    lambda m: (
        lambda logits: (
            [None for _ in [0] if torch.no_grad().__enter__()],
            torch.set_grad_enabled(True),
            ce(logits),
        )[2]
    )(lg(m)),
)


def inplace_div(m):
    logits = lg(m)
    logits /= 2.0
    return ce(logits)


add("/=", inplace_div)


def inplace_view(m):
    logits = lg(m)
    v = logits[..., :10]
    v.add_(1.0)
    return ce(logits)


add("slice of classes add_", inplace_view)


def setitem(m):
    logits = lg(m)
    logits[:, :, 0] = -10000.0
    return ce(logits)


add("setitem", setitem)


def masked(m):
    return ce(lg(m).masked_fill(torch.arange(V) < 5, -1000000000.0))


add("masked_fill", masked)
add(
    "out=",
    lambda m: (lambda logits, o: (torch.exp(logits.detach(), out=o), o.sum())[1])(
        lg(m), torch.empty(2, 9, V)
    ),
    grads=False,
)
add("cat", lambda m: ce(torch.cat([lg(m), lg(m)]), torch.cat([LAB, LAB])))
add("stack", lambda m: ce(torch.stack([lg(m), lg(m)]), torch.stack([LAB, LAB])))
add("where", lambda m: ce(torch.where(lg(m) > 0, lg(m), 0.1)))
add("matmul", lambda m: (lg(m) @ torch.ones(V, 2)).sum())
add("rmatmul", lambda m: (torch.ones(2, 9) @ lg(m)).sum())
add("einsum", lambda m: torch.einsum("bsv->b", lg(m)).sum())
add("index tensor", lambda m: ce(lg(m)[:, torch.tensor([1, 3, 5])], LAB[:, [1, 3, 5]]))
add("bool mask", lambda m: F.cross_entropy(lg(m)[LAB != -100], LAB[LAB != -100]))
add("None index", lambda m: ce(lg(m)[None], LAB[None]))
add("int index", lambda m: ce(lg(m)[0], LAB[0]))
add("neg step", lambda m: ce(lg(m)[:, ::-1]))
add("step 2", lambda m: ce(lg(m)[:, ::2], LAB[:, ::2]))
add("ellipsis", lambda m: ce(lg(m)[..., :-1, :], LAB[..., 1:]))
add(
    "slice vocab",
    lambda m: F.cross_entropy(lg(m)[..., :200].reshape(-1, 200), LAB.clamp(max=199).reshape(-1)),
)
add("empty rows", lambda m: ce(lg(m)[:, :0], LAB[:, :0]))
add("empty rows sum", lambda m: ce(lg(m)[:, :0], LAB[:, :0], reduction="sum"))
add("too many", lambda m: ce(lg(m)[:, :, :, :]))
add("out of range slices", lambda m: ce(lg(m)[:, 3:100], LAB[:, 3:]))
add("numpy", lambda m: torch.from_numpy(lg(m).detach().numpy().copy()), grads=False)
add("asarray", lambda m: torch.tensor(np.asarray(lg(m).detach())), grads=False)
add("tolist", lambda m: torch.tensor(lg(m).tolist()), grads=False)
add("numpy requires grad", lambda m: lg(m).numpy(), grads=False)
add("as_tensor", lambda m: torch.as_tensor(lg(m).detach()), grads=False)
add("torch.tensor", lambda m: torch.tensor(lg(m)), grads=False)
add("deepcopy nonleaf", lambda m: copy.deepcopy(lg(m)), grads=False)
add("deepcopy detached", lambda m: copy.deepcopy(lg(m).detach()), grads=False)
add("pickle", lambda m: pickle.loads(pickle.dumps(lg(m).detach())), grads=False)
add("pickle graph", lambda m: pickle.loads(pickle.dumps(lg(m))), grads=False)


def save(m):
    b = io.BytesIO()
    torch.save(lg(m).detach(), b)
    b.seek(0)
    return torch.load(b)


add("torch.save", save, grads=False)
add("item", lambda m: torch.tensor(lg(m)[0, 0, 0].item()), grads=False)
add("argmax", lambda m: lg(m).argmax(-1), grads=False)
add("topk", lambda m: lg(m).topk(3).values, grads=False)
add("iter", lambda m: ce(torch.stack(list(lg(m)))))
add("len/eq", lambda m: torch.tensor(len(lg(m))), grads=False)
add("repr", lambda m: (str(lg(m))[:20], torch.ones(1))[1], grads=False)
add("dlpack", lambda m: torch.from_dlpack(lg(m).detach()), grads=False)
add("data", lambda m: lg(m).data, grads=False)


def data_zero(m):
    logits = lg(m)
    logits.data.zero_()
    return ce(logits)


add("data zero", data_zero)


def data_zero_scaled(m):
    logits = lg(m)
    s = logits / 3.0
    logits.data.zero_()
    return ce(s)


add("data zero after scale", data_zero_scaled)
add(
    "storage write",
    lambda m: (lambda logits: (logits.untyped_storage().fill_(0), ce(logits))[1])(lg(m)),
)
add("autocast", lambda m: ce(lg(m)), context=lambda: torch.autocast("cpu", torch.bfloat16))
add(
    "autocast labels",
    lambda m: m(input_ids=IDS, labels=LAB).loss,
    context=lambda: torch.autocast("cpu", torch.bfloat16),
)
add("bf16", lambda m: m(input_ids=IDS, labels=LAB).loss, dtype=torch.bfloat16)
add(
    "bf16 half CE",
    lambda m: F.cross_entropy(lg(m).view(-1, V), LAB.view(-1)),
    dtype=torch.bfloat16,
)
add("gemma2", lambda m: m(input_ids=IDS, labels=LAB).loss, family="gemma2")
add("granite", lambda m: m(input_ids=IDS, labels=LAB).loss, family="granite")
add("cohere", lambda m: m(input_ids=IDS, labels=LAB).loss, family="cohere")
add("tied", lambda m: m(input_ids=IDS, labels=LAB).loss, family="llama-tied")


def frozen_head(m):
    m.lm_head.weight.requires_grad_(False)
    return ce(lg(m))


add("frozen head", frozen_head)


def frozen_all(m):
    m.requires_grad_(False)
    return ce(lg(m))


add("frozen all", frozen_all)


def only_head(m):
    m.model.requires_grad_(False)
    return ce(lg(m))


add("only head", only_head)


def step_between(m):
    logits = lg(m)
    with torch.no_grad():
        m.lm_head.weight.mul_(1.5)
    return ce(logits)


CASES["step between (error)"] = lambda: (
    lambda m, t: chk(type(outcome(lambda: step_between(m))).__name__ == "HfpatchError")
)(*pair())


def opt_between():
    from hfpatch.optim import AdamW

    m, _t = pair()
    o = m(input_ids=IDS, labels=LAB)
    o.loss.backward()
    AdamW(m.parameters(), lr=0.1).step()
    r = outcome(lambda: o.logits.sum())
    chk(type(r).__name__ == "HfpatchError", r)


CASES["hfpatch AdamW between (error)"] = opt_between


def head_hook_after(m):
    m.lm_head.register_forward_hook(lambda mm, a, o: o * 2)
    return ce(lg(m))


add("head hook", head_hook_after)


def head_prehook(m):
    m.lm_head.register_forward_pre_hook(lambda mm, a: (a[0] * 2,))
    return ce(lg(m))


add("head prehook", head_prehook)


def head_call_impl(m):
    h = m.lm_head
    h._call_impl = lambda x: 2 * F.linear(x, h.weight)
    return ce(lg(m))


add("head call impl", head_call_impl)


def linear_forward(m):
    old = nn.Linear.forward
    nn.Linear.forward = lambda s, x: 2 * old(s, x)
    try:
        return ce(lg(m))
    finally:
        nn.Linear.forward = old


add("nn.Linear.forward", linear_forward)


def head_class(m):
    m.lm_head.__class__ = type(
        "L2", (nn.Linear,), {"forward": lambda s, x: 2 * F.linear(x, s.weight, s.bias)}
    )
    return ce(lg(m))


add("head class", head_class)


def head_class_prop(m):
    m.lm_head.__class__ = type(
        "L3", (nn.Linear,), {"weight": property(lambda s: s._parameters["weight"] * 2)}
    )
    return ce(lg(m))


add("head class weight property", head_class_prop)


def head_shadow(m):
    m.lm_head.__dict__["weight"] = nn.Parameter(torch.ones(V, 128))
    return ce(lg(m))


add("head shadow weight", head_shadow)


def fmode(m):

    class T(TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            r = f(*a, **k or {})
            return r * 2 if f is F.linear else r

    with T():
        logits = lg(m)
    return ce(logits)


add("function mode", fmode)


def fmode_ce(m):
    logits = lg(m)

    class T(TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            r = f(*a, **k or {})
            return r * 2 if f is F.cross_entropy else r

    with T():
        return ce(logits)


add("function mode at CE", fmode_ce)


def ce_replaced(m):
    old = F.cross_entropy
    F.cross_entropy = lambda *a, **k: 2 * old(*a, **k)
    try:
        return m(input_ids=IDS, labels=LAB).loss
    finally:
        F.cross_entropy = old


add("F.cross_entropy replaced", ce_replaced)


def ckpt(m):
    m.gradient_checkpointing_enable()
    return m(input_ids=IDS, labels=LAB).loss


add("checkpointing", ckpt)


def ckpt_loss(m):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda i: ce(m(input_ids=i).logits), IDS, use_reentrant=False)


add("checkpointed whole", ckpt_loss)


def scripted(m):

    @torch.jit.script
    def loss(logits: torch.Tensor, t: torch.Tensor):
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), t.view(-1))

    return loss(lg(m), LAB)


add("scripted loss", scripted)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx, g):
        (logits,) = ctx.saved_tensors
        return 2 * logits * g


add("own function", lambda m: Own.apply(lg(m)))


class OwnW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.mark_dirty(logits)
        logits.mul_(2)
        return logits

    @staticmethod
    def backward(ctx, g):
        return 2 * g


add("own writing function", lambda m: ce(OwnW.apply(lg(m))), grads=False)


def saved_hooks(m):
    with torch.autograd.graph.save_on_cpu():
        return ce(lg(m))


add("save on cpu", saved_hooks)


def anomaly(m):
    with torch.autograd.set_detect_anomaly(True):
        return ce(lg(m))


add("anomaly", anomaly)


def create_graph(m):
    logits = ce(lg(m))
    (g,) = torch.autograd.grad(logits, m.lm_head.weight, create_graph=True)
    return g.pow(2).sum() * 0 + logits


add("create graph", create_graph, grads=False)


def hidden_written(m):
    h = m.model(input_ids=IDS).last_hidden_state.clone()
    logits = m.lm_head(h)
    h.mul_(2)
    return logits.detach()


add("hidden written after", hidden_written, loud=True, grads=False)


def gradhook_weight(m):
    m.lm_head.weight.register_hook(lambda g: g * 3)
    return ce(lg(m))


add("weight grad hook", gradhook_weight)


def weight_noncontig(m):
    w = m.lm_head.weight
    m.lm_head.weight = nn.Parameter(w.detach().t().contiguous().t())
    return ce(lg(m))


add("weight strides", weight_noncontig)


def inf_logits(m):
    with torch.no_grad():
        m.lm_head.weight[7] = float("inf")
    return ce(lg(m))


add("inf weight", inf_logits)


def nan_logits(m):
    with torch.no_grad():
        m.lm_head.weight[7, 3] = float("nan")
    return ce(lg(m))


add("nan weight", nan_logits)


def large_logits(m):
    with torch.no_grad():
        m.lm_head.weight.mul_(1e18)
    return ce(lg(m))


add("large weight", large_logits)


def target_grad_written(m):
    t = LAB.clone()
    logits = ce(lg(m), t)
    t.zero_()
    return logits


add("labels written after", target_grad_written)


def double_default(m):
    torch.set_default_dtype(torch.float64)
    try:
        return ce(lg(m))
    finally:
        torch.set_default_dtype(torch.float32)


add("default float64", double_default)


def logits_attr(m):
    logits = lg(m)
    logits.note = 3
    return torch.tensor(logits.note)


add("attribute", logits_attr, grads=False)


def dict_key(m):
    logits = lg(m)
    d = {logits: 1}
    return torch.tensor(d[logits])


add("as key", dict_key, grads=False)


def is_ops(m):
    logits = lg(m)
    return torch.tensor(
        [
            float(logits.is_contiguous()),
            float(logits.requires_grad),
            float(logits.is_leaf),
            logits.dim(),
            logits.stride(0),
            logits.element_size(),
            logits.nbytes,
            float(torch.is_tensor(logits)),
            float(isinstance(logits, torch.FloatTensor)),
            logits.itemsize,
            float(logits.is_floating_point()),
            float(logits.grad is None),
            float(logits.grad_fn is None),
            float(logits.names == (None,) * 3),
            logits.storage_offset(),
            logits.output_nr,
            logits._version,
        ]
    )


add("properties", is_ops, grads=False)


def gather_lp(m):
    return -torch.log_softmax(lg(m).float(), -1).gather(-1, LAB.clamp(0)[..., None]).mean()


add("gather log softmax", gather_lp)
add(
    "kl",
    lambda m: F.kl_div(
        F.log_softmax(lg(m), -1), F.softmax(torch.ones(2, 9, V), -1), reduction="batchmean"
    ),
)
add("nll", lambda m: F.nll_loss(F.log_softmax(lg(m), -1).view(-1, V), LAB.view(-1)))
add(
    "crossentropy module",
    lambda m: nn.CrossEntropyLoss(label_smoothing=0.1)(lg(m).view(-1, V), LAB.view(-1)),
)
add("mse", lambda m: F.mse_loss(lg(m), torch.zeros(2, 9, V)))
add("keyword CE", lambda m: F.cross_entropy(input=lg(m).view(-1, V), target=LAB.view(-1)))
add(
    "target deferred-like",
    lambda m: F.cross_entropy(
        torch.linspace(-3, 3, 18 * V).view(18, V).sin(), lg(m).view(-1, V).softmax(-1)
    ),
)
add("functional ops order", lambda m: ce(lg(m).permute(1, 0, 2), LAB.t()))
add("expand", lambda m: ce(lg(m)[:1].expand(3, -1, -1), LAB[:1].expand(3, -1)))
add("flatten", lambda m: F.cross_entropy(lg(m).flatten(0, 1), LAB.flatten()))
add("unflatten", lambda m: F.cross_entropy(lg(m).reshape(-1, V), LAB.flatten()))
add("view dtype", lambda m: lg(m).detach().view(torch.int32).sum(), grads=False)
add("view same", lambda m: ce(lg(m).view(2, 9, V)))
add("view -1 -1", lambda m: ce(lg(m).view(-1, -1)))
add("view as list", lambda m: ce(lg(m).view([18, V])))
add("view size=", lambda m: ce(lg(m).view(size=(18, V))))
add("reshape 0", lambda m: ce(lg(m).reshape(0, V)))
add("type_as", lambda m: ce(lg(m).type_as(torch.ones(1, dtype=torch.float64))))
add("double", lambda m: ce(lg(m).double()))
add("to copy", lambda m: ce(lg(m).to(torch.float32, copy=True)))
add("to device", lambda m: ce(lg(m).to("cpu")))
add("to other", lambda m: ce(lg(m).to(torch.ones(1))))
add("half up", lambda m: ce(lg(m).bfloat16()), tol=0.03)


def to_copy_then(m):
    logits = lg(m)
    c = logits.to(torch.float32, copy=True)
    with torch.no_grad():
        logits.zero_()
    return ce(c)


add("to copy then zero", to_copy_then)


def contiguous_alias(m):
    logits = lg(m)[:, :-1]
    c = logits.contiguous()
    with torch.no_grad():
        logits.zero_()
    return ce(c, LAB[:, 1:])


add("contiguous of a slice, then zero", contiguous_alias)


def reshape_alias(m):
    logits = lg(m)[:, :-1]
    c = logits.reshape(-1, V)
    with torch.no_grad():
        logits.zero_()
    return F.cross_entropy(c, LAB[:, 1:].reshape(-1))


add("reshape of a slice, then zero", reshape_alias)
