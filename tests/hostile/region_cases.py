"""What is done to a model of transformers, or to a captured block, before and after `apply`."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from twins import chk, outcome, same

import hfpatch

CASES: dict[str, Callable[[], Any]] = {}
S = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


def llama(**k):
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(**{**S, "num_key_value_heads": 2, "attention_bias": True, **k})
    )


def qwen3(**k):
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**S, num_key_value_heads=2, head_dim=16, **k))


def gemma2(**k):
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**S, num_key_value_heads=2, head_dim=16, sliding_window=6, **k)
    )


def bert(**k):
    return tf.BertModel(tf.BertConfig(**S, **k))


def vit(**k):
    return tf.ViTModel(
        tf.ViTConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            **k,
        )
    )


def gpt2(**k):
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99, **k))


def t5(**k):
    return tf.T5EncoderModel(
        tf.T5Config(
            d_model=64,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            d_kv=16,
            vocab_size=99,
            feed_forward_proj="gated-gelu",
            **k,
        )
    )


def phi(**k):
    return tf.PhiForCausalLM(tf.PhiConfig(**S, **k))


def clip(**k):
    return tf.CLIPTextModel(tf.CLIPTextConfig(**{**S, "bos_token_id": 1, "eos_token_id": 2}, **k))


def whisper(**k):
    return tf.models.whisper.modeling_whisper.WhisperEncoder(
        tf.WhisperConfig(
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=96,
            num_mel_bins=8,
            max_source_positions=12,
            **k,
        )
    )


FAM = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "bert": bert,
    "vit": vit,
    "gpt2": gpt2,
    "t5": t5,
    "phi": phi,
    "clip": clip,
    "whisper": whisper,
}
IDSR = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))


def inputs(name, tokens=7, batch=2):
    g = torch.Generator().manual_seed(tokens + batch)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=g)}
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 24, generator=g)}
    return {"input_ids": torch.randint(3, 99, (batch, tokens), generator=g)}


def randomize(m):
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() < 2:
                p.copy_(0.7 + 0.3 * torch.randn(p.shape, generator=g))
            else:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** (-0.5))
    return m.eval().requires_grad_(False)


def layers(m):
    return max(
        (x for x in m.modules() if isinstance(x, nn.ModuleList) and len(x) == 2),
        key=lambda layer: sum(p.numel() for p in layer.parameters()),
    )


def fl(o):
    if isinstance(o, Exception):
        return o
    if isinstance(o, torch.Tensor):
        return o
    if hasattr(o, "items"):
        return {k: fl(v) for k, v in o.items() if v is not None}
    if isinstance(o, (tuple, list)):
        return [fl(v) for v in o]
    return o


class Pair:
    def __init__(self, name, before=None, **k):
        self.name = name
        torch.manual_seed(0)
        self.m = randomize(FAM[name](**k))
        if before:
            before(self.m)
        self.t = copy.deepcopy(self.m)
        self.report = hfpatch.apply(self.m, decoding=False, blocks=True)
        self.fused = None

    def call(self, tokens=7, batch=2, context=torch.no_grad, **kw):
        i = inputs(self.name, tokens, batch)
        outs = []
        for x in (self.m, self.t):
            k = {a: copy.deepcopy(v) for a, v in kw.items()}
            with context():
                outs.append(fl(outcome(partial(x, **i, **k))))
        return same(*outs)

    def status(self):
        s = hfpatch.status(self.m)
        return [(c.path, c.state, c.reason[:80]) for c in getattr(s, "candidates", ())]

    def each(self, f):
        for x in (self.m, self.t):
            f(x)


def fusedness(p):
    ok = 0
    for mod in p.m.modules():
        f = mod.__dict__.get("forward")
        k = getattr(getattr(getattr(f, "__func__", None), "__hfpatch__", None), "details", None)
        k = getattr(k, "kind", None)
        if k is not None:
            ok += bool(k.decided)
    return ok


def warm_(p, **kw):
    for i in range(3):
        chk(p.call(**kw), f"warm {i}")


def later(name, f, **k):
    p = Pair(name, **k)
    warm_(p)
    n = fusedness(p)
    p.each(f)
    chk(p.call(), "after")
    chk(p.call(), "after 2")
    chk(p.call(tokens=5), "other size")
    return f"fused {n}"


def earlier(name, f, **k):
    p = Pair(name, before=f, **k)
    warm_(p)
    chk(p.call(tokens=5), "other size")
    chk(p.call(tokens=1), "one")
    chk(p.call(tokens=7, batch=1))
    chk(p.call(tokens=7, batch=1))
    return f"fused {fusedness(p)}"


def reg(name, f, fams=None, when="both", **k):
    for fam in fams or FAM:
        if when in ("both", "after"):
            CASES[f"{name}/{fam}/after"] = lambda fam=fam: later(fam, f, **k)
        if when in ("both", "before"):
            CASES[f"{name}/{fam}/before"] = lambda fam=fam: earlier(fam, f, **k)


def blk(m):
    return layers(m)[1]


def norms(b):
    return [x for x in b.modules() if "norm" in type(x).__name__.lower() and (not x._modules)]


def lins(b):
    return [x for x in b.modules() if isinstance(x, nn.Linear) or type(x).__name__ == "Conv1D"]


reg("nothing", lambda m: None, when="before")


def norm_none(m):
    for n in norms(blk(m))[:1]:
        n.weight = None


reg("norm weight None", norm_none)


def norm_bias_none(m):
    for n in norms(blk(m))[:1]:
        if getattr(n, "bias", None) is not None:
            n.bias = None


reg("norm bias None", norm_bias_none, ["bert", "vit", "gpt2", "phi", "clip", "whisper"])


def norm_scalar(m):
    norms(blk(m))[0].weight = nn.Parameter(torch.tensor([2.0]), requires_grad=False)


reg("norm weight of one", norm_scalar, ["llama", "t5", "qwen3"])


def norm_hidden(m):
    norms(blk(m))[0].__dict__["weight"] = torch.full((64,), 3.0)


reg("norm weight hidden", norm_hidden)


def norm_double(m):
    norms(blk(m))[0].double()


reg("norm double", norm_double, ["llama", "qwen3", "bert", "t5"])


def lin_hidden(m):
    layer = lins(blk(m))[0]
    layer.__dict__["weight"] = torch.full_like(layer.weight, 0.1)


reg("linear weight hidden", lin_hidden)


def lin_bias_none(m):
    for layer in lins(blk(m))[:2]:
        if getattr(layer, "bias", None) is not None:
            layer.bias = None if isinstance(layer, nn.Linear) else layer.bias


reg("linear bias none", lin_bias_none, ["llama", "bert", "vit", "clip", "phi"])


def lin_double(m):
    lins(blk(m))[-1].double()


reg("last linear double", lin_double, ["llama", "bert", "t5", "gpt2"])


class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def weight(self):
        return self.inner.weight

    @property
    def bias(self):
        return self.inner.bias

    @property
    def in_features(self):
        return self.inner.in_features

    @property
    def out_features(self):
        return self.inner.out_features

    def forward(self, *a, **k):
        return 2 * self.inner(*a, **k)


def wrap_each(i):

    def f(m):
        b = blk(m)
        path = [
            n
            for n, x in b.named_modules()
            if isinstance(x, nn.Linear) or type(x).__name__ == "Conv1D"
        ][i]
        par, _, n = path.rpartition(".")
        p = b.get_submodule(par)
        p._modules[n] = Wrap(p._modules[n])

    return f


for i in (0, 2, -1):
    reg(f"wrapped linear {i}", wrap_each(i))


def sub_forward(m):
    b = blk(m)
    for _n, c in list(b.named_children())[:1]:
        c.forward = (
            lambda f: (
                lambda *a, **k: (
                    tuple(
                        2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                        for x in r
                    )
                    if isinstance((r := f(*a, **k)), tuple)
                    else 2 * r
                )
            )
        )(c.forward)


reg("child forward", sub_forward)


def call_impl(m):
    b = blk(m)
    for x in b.modules():
        if not x._modules and x is not b and (not isinstance(x, nn.Dropout)):
            x.__dict__["_call_impl"] = (lambda f: lambda *a, **k: 2 * f(*a, **k))(x._call_impl)
            return


reg("first leaf _call_impl", call_impl)


def hook(m):
    for x in list(blk(m).modules())[1:4]:
        x.register_forward_hook(
            lambda mm, a, y: (
                tuple(
                    t * 1.5 if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                    for t in y
                )
                if isinstance(y, tuple)
                else y * 1.5
            )
        )


reg("hooks", hook)


def bhook(m):
    blk(m).register_forward_hook(
        lambda mm, a, y: (
            tuple(
                t * 1.5 if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in y
            )
            if isinstance(y, tuple)
            else y * 1.5
        )
    )


reg("block hook", bhook)


def act(m):
    for x in blk(m).modules():
        for n, c in list(x._modules.items()):
            if (
                c is not None
                and (not c._modules)
                and (not list(c.parameters()))
                and (not isinstance(c, nn.Dropout))
                and ("drop" not in n)
            ):
                x._modules[n] = nn.ReLU()
                return


reg("activation replaced", act)


def floats(m):
    for x in blk(m).modules():
        for k, v in list(x.__dict__.items()):
            if type(v) is float and (not k.startswith("_")) and ("drop" not in k) and (k != "p"):
                x.__dict__[k] = v * 2 + 0.05


reg("floats", floats)


def flags(m):
    for x in blk(m).modules():
        for k, v in list(x.__dict__.items()):
            if type(v) is bool and (not k.startswith("_")) and (k not in ("training",)):
                x.__dict__[k] = not v


reg("flags", flags)


def train_part(m):
    next(iter(blk(m).children())).train()
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0
        for k, v in list(x.__dict__.items()):
            if "drop" in k and type(v) is float:  # T5 drops scores by a number of its own
                x.__dict__[k] = 0.0


reg("train a part", train_part)


def props(m):
    n = norms(blk(m))[0]
    n.__class__ = type(
        type(n).__name__,
        (type(n),),
        {"variance_epsilon": property(lambda s: 0.5), "eps": property(lambda s: 0.5)},
    )


reg("norm class with property", props)


def bprops(m):
    b = blk(m)
    b.__class__ = type(type(b).__name__, (type(b),), {})


reg("block subclass", bprops)


def bprops2(m):
    b = blk(m)
    c = type(b)

    def forward(self, *a, **k):
        r = c.forward(self, *a, **k)
        return (
            tuple(2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in r)
            if isinstance(r, tuple)
            else 2 * r
        )

    b.__class__ = type(c.__name__, (c,), {"forward": forward})


reg("block subclass forward", bprops2)


def impl_eager(m):
    m.set_attn_implementation("eager")


reg(
    "eager",
    impl_eager,
    ["llama", "bert", "vit", "gpt2", "clip", "whisper", "phi", "qwen3", "gemma2"],
)


def own_attn(m):
    A = ALL_ATTENTION_FUNCTIONS

    def f(module, q, k, v, mask, **kw):
        o, w = A["sdpa"](module, q, k, v, mask, **kw)
        return (2 * o, w)

    A.register("mine_x", f)
    m.config._attn_implementation = "mine_x"
    for x in m.modules():
        if "config" in x.__dict__:
            x.config._attn_implementation = "mine_x"


reg("own attention", own_attn, ["llama", "vit", "gpt2", "clip", "whisper", "phi", "qwen3"])


def cfg_vals(m):
    c = m.config
    for k in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(c, k, None) is not None:
            setattr(c, k, 0.7)


reg("softcaps", cfg_vals, ["gemma2"])


def cfg_obj(m):
    b = blk(m)
    for x in b.modules():
        if "config" in x.__dict__:
            c = copy.deepcopy(x.config)
            c._attn_implementation = "eager"
            c.hidden_act = "relu"
            x.__dict__["config"] = c


reg("config per module", cfg_obj, ["llama", "bert", "vit", "clip"])


def hidden_child(m):
    b = blk(m)
    n, c = next(iter(b.named_children()))
    b.__dict__[n] = (
        lambda f: (
            lambda *a, **k: (
                tuple(
                    2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in r
                )
                if isinstance((r := f(*a, **k)), tuple)
                else 2 * r
            )
        )
    )(c)


reg("hidden child", hidden_child)


def hidden_child2(m):
    for x in blk(m).modules():
        for n, c in x._modules.items():
            if c is not None and isinstance(c, nn.Linear):
                x.__dict__[n] = (lambda f: lambda *a: 2 * f(*a))(c)
                return


reg("hidden linear", hidden_child2)


def inplace_weights(m):
    for p in blk(m).parameters():
        p.mul_(1.2)


reg("weights in place", inplace_weights)


def new_weights(m):
    for x in blk(m).modules():
        for n, p in list(x._parameters.items()):
            if p is not None:
                x._parameters[n] = nn.Parameter(p * 1.2, requires_grad=False)


reg("weights replaced", new_weights)


def noncontig(m):
    for x in blk(m).modules():
        for n, p in list(x._parameters.items()):
            if p is not None and p.dim() == 2:
                x._parameters[n] = nn.Parameter(p.t().contiguous().t(), requires_grad=False)
            elif p is not None:
                x._parameters[n] = nn.Parameter(torch.stack([p, p], -1)[:, 0], requires_grad=False)


reg("weights strided", noncontig)


def swap_layers(m):
    layer = layers(m)
    a, b = (layer._modules["0"], layer._modules["1"])
    layer._modules["0"], layer._modules["1"] = (b, a)


reg("layers swapped", swap_layers)


def same_layer(m):
    layer = layers(m)
    layer._modules["1"] = layer._modules["0"]


reg("layer twice", same_layer)


def pos_emb(m):
    mod = sys.modules[type(blk(m)).__module__]
    if hasattr(mod, "apply_rotary_pos_emb") and (not getattr(mod, "_saved", None)):
        mod._saved = mod.apply_rotary_pos_emb
        count = []

        def f(q, k, *a, **kw):
            count.append(1)
            q, k = mod._saved(q, k, *a, **kw)
            return (q * 2, k) if len(count) % 2 else (q, k)

        mod.apply_rotary_pos_emb = f


def pos_restore(name):

    def go():
        try:
            p = Pair(name, before=pos_emb)
            mod = sys.modules[type(blk(p.m)).__module__]

            def seq(x):
                mod.apply_rotary_pos_emb.__closure__[0].cell_contents.clear() if isinstance(
                    mod.apply_rotary_pos_emb.__closure__[0].cell_contents, list
                ) else mod.apply_rotary_pos_emb.__closure__[1].cell_contents.clear()
                with torch.no_grad():
                    return [fl(x(**inputs(name))) for _ in range(4)]

            a = seq(p.m)
            b = seq(p.t)
            chk(same(a, b))
        finally:
            for _q in (llama, phi, qwen3):
                mod = sys.modules[f"transformers.models.{name}.modeling_{name}"]
                if hasattr(mod, "_saved"):
                    mod.apply_rotary_pos_emb = mod._saved
                    del mod._saved

    return go


for n in ("llama", "qwen3", "phi"):
    CASES[f"counting rope helper/{n}"] = pos_restore(n)


def modes():

    def mk(name):

        def go():
            p = Pair(name)
            warm_(p)

            class T(TorchFunctionMode):
                def __torch_function__(self, f, t, a=(), k=None):
                    r = f(*a, **k or {})
                    return r * 1.5 if f is torch.nn.functional.linear else r

            @contextlib.contextmanager
            def c():
                with torch.no_grad(), T():
                    yield

            chk(p.call(context=c), "mode")
            chk(p.call(), "plain")

            @contextlib.contextmanager
            def ac():
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    yield

            inputs(name)
            for _x in (p.m, p.t):
                pass

            @contextlib.contextmanager
            def dd():
                torch.set_default_dtype(torch.float64)
                try:
                    with torch.no_grad():
                        yield
                finally:
                    torch.set_default_dtype(torch.float32)

            chk(p.call(context=dd), "default dtype")
            chk(p.call(context=torch.inference_mode), "inference")
            chk(p.call(context=torch.enable_grad), "grad")
            old = nn.Linear.forward
            nn.Linear.forward = lambda s, x: 1.5 * old(s, x)
            try:
                chk(p.call(), "linear class")
            finally:
                nn.Linear.forward = old
            old = nn.Module.__call__
            nn.Module.__call__ = lambda s, *a, **k: (
                lambda y: y * 1.5 if isinstance(s, (nn.LayerNorm, nn.Linear)) else y
            )(old(s, *a, **k))
            try:
                chk(p.call(), "module call")
            finally:
                nn.Module.__call__ = old
            old = nn.LayerNorm.forward
            nn.LayerNorm.forward = lambda s, x: 1.5 * old(s, x)
            try:
                chk(p.call(), "layernorm class")
            finally:
                nn.LayerNorm.forward = old
            cls = type(blk(p.m))
            old = cls.forward
            cls.forward = lambda s, *a, **k: (
                lambda r: (
                    tuple(
                        2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                        for x in r
                    )
                    if isinstance(r, tuple)
                    else 2 * r
                )
            )(old(s, *a, **k))
            try:
                chk(p.call(), "block class")
            finally:
                cls.forward = old
            for mod in {type(x) for x in blk(p.m).modules()} - {
                cls,
                nn.Linear,
                nn.Dropout,
                nn.ModuleList,
                nn.LayerNorm,
            }:
                old = mod.forward
                mod.forward = lambda s, *a, _o=old, **k: (
                    lambda r: (
                        tuple(
                            2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                            for x in r
                        )
                        if isinstance(r, tuple)
                        else 2 * r
                    )
                )(_o(s, *a, **k))
                try:
                    chk(p.call(), f"class {mod.__name__}")
                finally:
                    mod.forward = old
                mod.__call__ = lambda s, *a, **k: (
                    lambda r: (
                        tuple(
                            2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                            for x in r
                        )
                        if isinstance(r, tuple)
                        else 2 * r
                    )
                )(nn.Module.__call__(s, *a, **k))
                try:
                    chk(p.call(), f"call of {mod.__name__}")
                finally:
                    del mod.__call__
            h = torch.nn.modules.module.register_module_forward_hook(
                lambda m, a, y: y * 1.5 if isinstance(m, nn.Linear) else None
            )
            try:
                chk(p.call(), "global hook")
            finally:
                h.remove()
            chk(p.call(), "end")
            return f"fused {fusedness(p)}"

        return go

    for n in FAM:
        CASES[f"modes/{n}"] = mk(n)


modes()


def codes(name):

    def go():
        p = Pair(name)
        warm_(p)
        b = blk(p.m)
        for x in b.modules():
            f = type(x).forward
            if (
                not hasattr(f, "__code__")
                or f.__closure__
                or (not type(x).__module__.startswith("transformers"))
            ):
                continue
            old, d, kd = (f.__code__, f.__defaults__, f.__kwdefaults__)
            orig = type(f)(old, f.__globals__, f.__name__, d, None)
            orig.__kwdefaults__ = kd
            f.__globals__["_orig_x"] = orig

            def new(self, *args, **kwargs):
                r = _orig_x(self, *args, **kwargs)  # noqa: F821
                return (
                    tuple(
                        2 * x if hasattr(x, "is_floating_point") and x.is_floating_point() else x
                        for x in r
                    )
                    if isinstance(r, tuple)
                    else 2 * r
                )

            f.__code__ = new.__code__
            try:
                chk(p.call(), f"code of {type(x).__name__}")
            finally:
                f.__code__ = old
        return f"fused {fusedness(p)}"

    return go


for n in FAM:
    CASES[f"codes/{n}"] = codes(n)


def masks(name):

    def go():
        p = Pair(name)
        g = torch.Generator().manual_seed(0)
        for i in range(6):
            m = (torch.rand(2, 7, generator=g) > 0.3).long()
            m[:, -1] = 1
            m[:, 0] = 1
            chk(p.call(attention_mask=m), f"mask {i}")
            chk(p.call(attention_mask=torch.ones(2, 7, dtype=torch.long)), "ones")
            chk(p.call(), "none")
        m = torch.ones(2, 7, dtype=torch.long)
        m[1] = 0
        chk(p.call(attention_mask=m), "row masked")
        chk(p.call(attention_mask=torch.ones(2, 7, dtype=torch.bool)), "bool")
        chk(p.call(output_attentions=True))
        chk(p.call(output_hidden_states=True))
        chk(p.call(return_dict=False))
        for t in (1, 2, 3, 7, 12):
            chk(p.call(tokens=t))
            chk(p.call(tokens=t, batch=1))
            chk(p.call(tokens=t, batch=3))
        return f"fused {fusedness(p)}"

    return go


for n in ("llama", "qwen3", "gemma2", "bert", "gpt2", "t5", "phi", "clip"):
    CASES[f"masks/{n}"] = masks(n)


def _logits(x, i, c):
    return x(**i, past_key_values=c).logits


def cachecase(name, patch=None, inst=None):

    def go():
        p = Pair(name)
        undo = patch() if patch else lambda: None
        try:
            for r in range(3):
                cs = [DynamicCache(config=x.config) for x in (p.m, p.t)]
                if inst:
                    [inst(c) for c in cs]
                for t in (7, 1, 3):
                    outs = []
                    for x, c in zip((p.m, p.t), cs, strict=False):
                        with torch.no_grad():
                            outs.append(fl(outcome(partial(_logits, x, inputs(name, t), c))))
                    chk(same(*outs), f"{r} {t}")
                if not inst:
                    chk(same(cs[0], cs[1]), "caches")
            return f"fused {fusedness(p)}"
        finally:
            undo()

    return go


def cls_patch():
    old = DynamicLayer.update
    DynamicLayer.update = lambda s, k, v, *a, **kw: old(s, k * 0.5, v, *a, **kw)

    def undo():
        DynamicLayer.update = old

    return undo


def inst_patch(c):
    o = c.update
    c.update = lambda k, v, i, *a, **kw: (lambda r: (r[0] * 0.5, r[1]))(o(k, v, i, *a, **kw))


for n in ("llama", "qwen3", "gemma2", "gpt2", "phi"):
    CASES[f"cache/{n}"] = cachecase(n)
    CASES[f"cache class/{n}"] = cachecase(n, cls_patch)
    CASES[f"cache inst/{n}"] = cachecase(n, None, inst_patch)


def outputs_alias(name):

    def go():
        p = Pair(name)
        warm_(p)
        held = []
        for x in (p.m, p.t):
            rec = []
            h = blk(x).register_forward_hook(
                lambda m, a, k, y, rec=rec: rec.append((a, k, y)), with_kwargs=True
            )
            with torch.no_grad():
                x(**inputs(name))
            h.remove()
            held.append(rec[0])

        def ids(r):
            a, k, y = r
            ins = [
                t for t in torch.utils._pytree.tree_leaves((a, k)) if isinstance(t, torch.Tensor)
            ]
            outs = [t for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, torch.Tensor)]
            return (
                [[o is i for i in ins] for o in outs],
                [
                    [o.untyped_storage().data_ptr() == i.untyped_storage().data_ptr() for i in ins]
                    for o in outs
                ],
                [(tuple(o.shape), o.dtype) for o in outs],
                type(y),
            )

        a, b = (ids(held[0]), ids(held[1]))
        assert a == b, (a, b)
        return f"fused {fusedness(p)}"

    return go


for n in FAM:
    CASES[f"alias/{n}"] = outputs_alias(n)
