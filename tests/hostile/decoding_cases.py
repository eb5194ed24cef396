"""What is done to a model that decodes, or to its cache, before or after `apply`."""

from __future__ import annotations

import collections
import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from twins import Run, chk, same, warm

import hfpatch

CASES: dict[str, Callable[[], Any]] = {}


def case(f: Callable[[], Any]) -> Callable[[], Any]:
    CASES[f.__name__] = f
    return f


def after(change, family="llama", restart=True, **more):
    """warm, change both, go on; compare."""
    run = Run(family, **more)
    warm(run)
    s0 = run.steps()
    assert not run.served or s0 > 0, "never served"
    run.each(change)
    if restart:
        chk(run.call(7, fresh=True), "prompt after")
    for i in range(3):
        chk(run.call(1), f"step {i} after")
    return f"served {run.served} {s0} -> {run.steps()}"


@case
def new_config_object():

    def ch(m):
        m.config = copy.deepcopy(m.config)
        m.config.final_logit_softcapping = 0.5

    return after(ch, "gemma2")


@case
def config_value():

    def ch(m):
        m.config.final_logit_softcapping = 0.5

    return after(ch, "gemma2")


@case
def inner_config_object():

    def ch(m):
        m.model.config = copy.deepcopy(m.model.config)
        m.model.config.num_hidden_layers = 2

    return after(ch, "llama")


@case
def embed_scale_buffer():

    def ch(m):
        m.model.embed_tokens.embed_scale.fill_(3.0)

    return after(ch, "gemma3")


@case
def embed_scale_assigned():

    def ch(m):
        m.model.embed_tokens.embed_scale = torch.tensor(3.0)

    return after(ch, "gemma3")


@case
def inv_freq_in_place():

    def ch(m):
        m.model.rotary_emb.inv_freq.mul_(0.3)

    return after(ch)


@case
def inv_freq_in_place_half():
    run = Run("llama", before=lambda m: m.half(), tol=0.03)
    warm(run)
    run.each(lambda m: m.model.rotary_emb.inv_freq.mul_(0.05))
    chk(run.call(7, fresh=True))
    for i in range(3):
        chk(run.call(1), f"half step {i}")
    return f"{run.served} {run.steps()}"


@case
def attention_scaling():

    def ch(m):
        m.model.rotary_emb.attention_scaling = 2.0

    return after(ch)


@case
def call_impl_on_instance():

    def ch(m):
        mlp = m.model.layers[1].mlp
        mlp._call_impl = lambda x, _m=mlp: 2 * type(_m).forward(_m, x)

    return after(ch)


@case
def call_impl_on_instance_leaf():

    def ch(m):
        mlp = m.model.layers[1].mlp.act_fn
        mlp._call_impl = lambda x, _m=mlp: 2 * type(_m).forward(_m, x)

    return after(ch)


@case
def class_call():
    cls = transformers.models.llama.modeling_llama.LlamaMLP

    def ch(m):
        cls.__call__ = lambda self, x: 2 * nn.Module.__call__(self, x)

    try:
        return after(ch)
    finally:
        del cls.__call__


@case
def class_forward_code():
    f = transformers.models.llama.modeling_llama.LlamaMLP.forward
    old = f.__code__

    def new(self, x):
        return 3 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def ch(m):
        f.__code__ = new.__code__

    try:
        return after(ch)
    finally:
        f.__code__ = old


@case
def rope_code():
    f = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    old = f.__code__

    def new(q, k, cos, sin, unsqueeze_dim=1):
        return (q, 2 * k)

    def ch(m):
        f.__code__ = new.__code__

    try:
        return after(ch)
    finally:
        f.__code__ = old


@case
def rotate_half_global():
    mod = transformers.models.llama.modeling_llama
    old = mod.rotate_half

    def ch(m):
        mod.rotate_half = lambda x: x * 0.5

    try:
        return after(ch)
    finally:
        mod.rotate_half = old


@case
def repeat_kv_in_sdpa():
    mod = transformers.integrations.sdpa_attention
    old = mod.repeat_kv

    def ch(m):
        mod.repeat_kv = lambda x, n: 2 * old(x, n)

    old2 = mod.use_gqa_in_sdpa

    def ch2(m):
        ch(m)
        mod.use_gqa_in_sdpa = lambda *a, **k: False

    try:
        return after(ch2)
    finally:
        mod.repeat_kv = old
        mod.use_gqa_in_sdpa = old2


@case
def cache_update_class():
    old = DynamicCache.update

    def new(self, k, v, i, *a, **kw):
        return old(self, k * 0.5, v, i, *a, **kw)

    def ch(m):
        DynamicCache.update = new

    try:
        return after(ch)
    finally:
        DynamicCache.update = old


@case
def layer_update_class():
    old = DynamicLayer.update

    def new(self, k, v, *a, **kw):
        return old(self, k * 0.5, v, *a, **kw)

    def ch(m):
        DynamicLayer.update = new

    try:
        return after(ch)
    finally:
        DynamicLayer.update = old


@case
def cache_update_instance():
    run = Run()
    warm(run)
    chk(run.call(7, fresh=True))
    for c in run.caches:
        old = c.update
        c.update = lambda k, v, i, *a, _o=old, **kw: _o(k * 0.5, v, i, *a, **kw)
    for i in range(3):
        chk(run.call(1), f"step {i}")


@case
def cache_layer_update_instance():
    run = Run()
    warm(run)
    chk(run.call(7, fresh=True))
    chk(run.call(1))
    for c in run.caches:
        layer = c.layers[1]
        layer.update = lambda k, v, *a, _l=layer, **kw: type(_l).update(_l, k * 0.5, v, *a, **kw)
    for i in range(3):
        chk(run.call(1), f"step {i}")


@case
def held_view_written_later():
    run = Run()
    warm(run)
    held = [c.layers[0].keys for c in run.caches]
    chk(run.call(1))
    for h in held:
        h.zero_()
    for i in range(2):
        chk(run.call(1), f"step {i}")


@case
def current_view_written():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers[0].keys[:, :, 2:4] = 0
    for i in range(2):
        chk(run.call(1), f"step {i}")


@case
def keys_are_contiguous():
    run = Run()
    warm(run)
    a, b = [c.layers[0].keys for c in run.caches]
    assert a.is_contiguous() == b.is_contiguous(), "stride"
    a.view(-1)


@case
def use_cache_config_false():
    run = Run(before=lambda m: setattr(m.config, "use_cache", False))
    warm(run)
    return run.steps()


@case
def use_cache_zero():
    run = Run()
    chk(run.call(7))
    for i in range(3):
        chk(run.call(1, use_cache=0), f"step {i}")


@case
def function_mode():

    class Twice(TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            r = f(*a, **k or {})
            return r * 2 if f is torch.nn.functional.silu else r

    run = Run()
    warm(run)
    for i in range(2):
        chk(run.call(1, context=lambda: stack(torch.no_grad(), Twice())), f"step {i}")


@contextlib.contextmanager
def stack(*cs):
    with contextlib.ExitStack() as s:
        for c in cs:
            s.enter_context(c)
        yield


@case
def device_context():
    run = Run()
    warm(run)
    for i in range(2):
        chk(run.call(1, context=lambda: stack(torch.no_grad(), torch.device("cpu"))), f"step {i}")


@case
def row_all_masked():
    run = Run(rows=2)
    chk(run.call(7))
    m = torch.ones(2, 8, dtype=torch.long)
    m[1] = 0
    for i in range(3):
        mm = torch.ones(2, 8 + i, dtype=torch.long)
        mm[1] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def own_position_masked():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        mm = torch.ones(2, 8 + i, dtype=torch.long)
        mm[1, -1] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def negative_positions():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        chk(run.call(1, position_ids=torch.tensor([[-5], [3]])), f"step {i}")


@case
def far_positions():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        chk(run.call(1, position_ids=torch.tensor([[100000 + i], [3000003]])), f"step {i}")


@case
def bool_mask():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        mm = torch.ones(2, 8 + i, dtype=torch.bool)
        mm[1, :3] = False
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def mask_of_twos():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        mm = torch.full((2, 8 + i), 2)
        mm[1, :3] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def mask_of_minus_ones():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        mm = torch.full((2, 8 + i), -1)
        mm[1, :3] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def mask_uint8_256():
    run = Run(rows=2)
    chk(run.call(7))
    for i in range(3):
        mm = torch.full((2, 8 + i), 256, dtype=torch.int32)
        mm[1, :3] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def eager_attention_after():

    def ch(m):
        m.set_attn_implementation("eager")

    return after(ch)


@case
def eager_all_masked():
    run = Run(rows=2, before=lambda m: m.set_attn_implementation("eager"))
    chk(run.call(7))
    for i in range(3):
        mm = torch.ones(2, 8 + i, dtype=torch.long)
        mm[1] = 0
        chk(run.call(1, attention_mask=mm), f"step {i}")


@case
def int_attribute_after_groups():

    def ch(m):
        m.model.layers[1].self_attn.is_causal = False

    return after(ch)


@case
def layer_order_after():

    def ch(m):
        m.model.layers = nn.ModuleList([m.model.layers[i] for i in (1, 0, 2, 3)])

    return after(ch)


@case
def layer_idx_after():

    def ch(m):
        m.model.layers[0].self_attn.layer_idx, m.model.layers[1].self_attn.layer_idx = (1, 0)

    return after(ch)


@case
def shared_layer_after():

    def ch(m):
        m.model.layers[2] = m.model.layers[1]

    return after(ch)


@case
def shared_layer_before():

    def ch(m):
        m.model.layers[2] = m.model.layers[1]

    run = Run(before=ch)
    warm(run)
    return run.steps()


@case
def training_submodule():

    def ch(m):
        m.model.layers[1].train()

    return after(ch)


@case
def attention_dropout_training():

    def ch(m):
        m.model.layers[1].self_attn.attention_dropout = 0.9

    return after(ch)


@case
def linear_forward_class():
    old = nn.Linear.forward

    def ch(m):
        nn.Linear.forward = lambda s, x: 1.5 * old(s, x)

    try:
        return after(ch)
    finally:
        nn.Linear.forward = old


@case
def module_call_class():
    old = nn.Module.__call__

    def new(self, *a, **k):
        r = old(self, *a, **k)
        return r * 1.5 if isinstance(self, nn.Linear) else r

    def ch(m):
        nn.Module.__call__ = new

    try:
        return after(ch)
    finally:
        nn.Module.__call__ = old


@case
def module_call_impl_class():
    old = nn.Module._call_impl

    def new(self, *a, **k):
        r = old(self, *a, **k)
        return r * 1.5 if isinstance(self, nn.Linear) else r

    def ch(m):
        nn.Module._call_impl = new

    try:
        return after(ch)
    finally:
        nn.Module._call_impl = old


@case
def getattr_on_module():

    def ch(m):
        m.model.layers[1].mlp.__dict__["gate_proj"] = (
            lambda x, _l=m.model.layers[1].mlp._modules["gate_proj"]: 2 * _l(x)
        )

    return after(ch)


@case
def logits_to_keep_tensor():
    run = Run()
    warm(run)
    chk(run.call(1, logits_to_keep=torch.tensor([0])))
    chk(run.call(3, logits_to_keep=2))
    chk(run.call(3, logits_to_keep=-1))
    chk(run.call(3, logits_to_keep=1))
    chk(run.call(3, logits_to_keep=0))
    chk(run.call(3, logits_to_keep=3))
    chk(run.call(1, logits_to_keep=True))


@case
def kwargs_odd():
    run = Run()
    warm(run)
    chk(run.call(1, cache_position=torch.tensor([10])))
    chk(run.call(1, return_dict=False))
    chk(run.call(1, return_dict=0))
    chk(run.call(1, output_hidden_states=True))
    chk(run.call(1, labels=torch.tensor([[5]])))
    chk(run.call(1, foo=None))
    chk(run.call(1, inputs_embeds=None))
    chk(run.call(1, use_cache=None))
    chk(run.call(1, use_cache=False))
    chk(run.call(1))


@case
def int32_ids():
    run = Run()
    warm(run)
    chk(run.call(1, ids=torch.tensor([[5]], dtype=torch.int32)))


@case
def float64_default():
    run = Run()
    warm(run)
    torch.set_default_dtype(torch.float64)
    try:
        chk(run.call(1))
    finally:
        torch.set_default_dtype(torch.float32)


@case
def inference_mode_cache():
    run = Run()
    chk(run.call(7, context=torch.inference_mode))
    for _i in range(3):
        chk(run.call(1, context=torch.inference_mode))
    for _i in range(3):
        chk(run.call(1))
    for _i in range(2):
        chk(run.call(1, context=torch.inference_mode))


@case
def grad_mode_steps():
    run = Run()
    warm(run)
    chk(run.call(1, context=torch.enable_grad))
    chk(run.call(1))


@case
def output_fields():
    run = Run()
    warm(run)
    with torch.no_grad():
        a, b = [
            m(input_ids=torch.tensor([[5]]), past_key_values=c)
            for m, c in zip((run.model, run.twin), run.caches, strict=False)
        ]
    assert type(a) is type(b) and list(a.keys()) == list(b.keys())
    assert a.logits.is_contiguous() == b.logits.is_contiguous()
    assert a.logits.stride() == b.logits.stride(), (a.logits.stride(), b.logits.stride())
    assert a.past_key_values is run.caches[0]


@case
def max_norm_embedding():

    def ch(m):
        m.model.embed_tokens.max_norm = 0.1

    return after(ch)


@case
def weight_version_tied():

    def ch(m):
        with torch.no_grad():
            m.lm_head.weight.data = m.lm_head.weight.data.clone() * 2

    return after(ch)


@case
def lm_head_bias_added():

    def ch(m):
        m.lm_head.bias = nn.Parameter(torch.ones(300), requires_grad=False)

    return after(ch)


@case
def norm_weight_shape_1():

    def ch(m):
        m.model.norm.weight = nn.Parameter(torch.ones(1) * 2, requires_grad=False)

    return after(ch)


@case
def cache_moved_dtype():
    run = Run()
    warm(run)
    for c in run.caches:
        for layer in c.layers:
            layer.keys, layer.values = (layer.keys.double(), layer.values.double())
    chk(run.call(1))


@case
def cache_of_other_length():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers[1].keys, c.layers[1].values = (
            c.layers[1].keys[:, :, 2:],
            c.layers[1].values[:, :, 2:],
        )
    chk(run.call(1))
    chk(run.call(1))


@case
def window_long():
    run = Run("mistral")
    chk(run.call(20, fresh=True))
    for i in range(20):
        chk(run.call(1), f"{i}")
    return run.steps()


@case
def window_changed_in_config():

    def ch(m):
        m.config.sliding_window = 5

    return after(ch, "mistral")


@case
def gemma3_window_changed():

    def ch(m):
        m.config.sliding_window = 5

    return after(ch, "gemma3")


@case
def layer_types_changed():

    def ch(m):
        m.config.layer_types = ["full_attention"] * len(m.config.layer_types)

    return after(ch, "qwen2-window")


@case
def olmo_clip():

    def ch(m):
        m.config.clip_qkv = 0.1

    return after(ch, "olmo")


@case
def granite_multiplier():

    def ch(m):
        m.config.logits_scaling = 2.0
        m.config.residual_multiplier = 0.9

    return after(ch, "granite")


@case
def granite_attr():

    def ch(m):
        m.model.embedding_multiplier = 3.0

    return after(ch, "granite")


@case
def hooks_full_backward():

    def ch(m):
        m.model.layers[0].register_full_backward_pre_hook(lambda *a: None)

    return after(ch)


def before(change, family="llama", **more):
    run = Run(family, before=change, **more)
    warm(run)
    for i in range(3):
        chk(run.call(1), f"step {i}")
    chk(run.call(12, fresh=True))
    for i in range(4):
        chk(run.call(1), f"again {i}")
    return f"served {run.served} {run.steps()}"


def both_ways(name, change, family="llama", **more):

    def b():
        return before(change, family, **more)

    def a():
        return after(change, family, **more)

    CASES[name + "/before"] = b
    CASES[name + "/after"] = a


def L(m, i=1):
    return m.model.layers[i]


both_ways(
    "sliding window int on one attn",
    lambda m: setattr(L(m).self_attn, "sliding_window", 3),
    "mistral",
)
both_ways(
    "window none on one attn", lambda m: setattr(L(m).self_attn, "sliding_window", None), "mistral"
)
both_ways(
    "attention_type on one layer",
    lambda m: setattr(L(m), "attention_type", "full_attention"),
    "qwen2-window",
)
both_ways(
    "attention_type gemma2",
    lambda m: [setattr(layer, "attention_type", "full_attention") for layer in m.model.layers],
    "gemma2",
)
both_ways(
    "layer order",
    lambda m: setattr(m.model, "layers", nn.ModuleList([m.model.layers[i] for i in (1, 0, 2, 3)])),
)
both_ways("layer dup", lambda m: m.model.layers.__setitem__(2, m.model.layers[1]))
both_ways(
    "config shared obj per module",
    lambda m: setattr(L(m).self_attn, "config", copy.deepcopy(m.config)),
)


def cfg_other(m):
    c = copy.deepcopy(m.config)
    c._attn_implementation = "eager"
    L(m).self_attn.config = c


both_ways("attn config other impl", cfg_other)


def odd_impl(m):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def twice(module, q, k, v, mask, **kw):
        f = ALL_ATTENTION_FUNCTIONS["sdpa"]
        o, w = f(module, q, k, v, mask, **kw)
        return (o * 2, w)

    ALL_ATTENTION_FUNCTIONS.register("twice_x", twice)
    c = copy.deepcopy(m.config)
    c._attn_implementation = "twice_x"
    L(m).self_attn.config = c


both_ways("attn config own impl on one layer", odd_impl)


def odd_impl_all(m):
    odd_impl(m)
    m.config._attn_implementation = "twice_x"


both_ways("own impl in config", odd_impl_all)


def eager_class(m):
    pass


both_ways(
    "num_key_value_groups",
    lambda m: setattr(L(m).self_attn, "num_key_value_groups", 1),
    "llama-tied",
)
both_ways("hidden act object", lambda m: setattr(L(m).mlp, "act_fn", nn.GELU()))
both_ways("norm eps int", lambda m: setattr(L(m).input_layernorm, "variance_epsilon", 1))
both_ways(
    "norm eps tensor",
    lambda m: setattr(L(m).input_layernorm, "variance_epsilon", torch.tensor(0.5)),
)
both_ways(
    "norm eps np", lambda m: setattr(L(m).input_layernorm, "variance_epsilon", np.float64(0.5))
)


class BigEps(float):
    def __add__(self, o):
        return o + 0.5

    def __radd__(self, o):
        return o + 0.5


both_ways(
    "norm eps float subclass",
    lambda m: setattr(L(m).input_layernorm, "variance_epsilon", BigEps(1e-06)),
)
both_ways("scaling float subclass", lambda m: setattr(L(m).self_attn, "scaling", BigEps(0.17)))
both_ways(
    "hidden weight",
    lambda m: L(m).mlp.gate_proj.__dict__.__setitem__(
        "weight", torch.ones_like(L(m).mlp.gate_proj.weight)
    ),
)
both_ways(
    "hidden norm weight",
    lambda m: m.model.norm.__dict__.__setitem__("weight", 3 * torch.ones_like(m.model.norm.weight)),
)
both_ways(
    "hidden layers", lambda m: m.model.__dict__.__setitem__("layers", list(m.model.layers)[:2])
)
both_ways(
    "hidden child layer_norm",
    lambda m: L(m).__dict__.__setitem__("input_layernorm", lambda x: x * 0.5),
)
both_ways(
    "hooks dict replaced",
    lambda m: (
        setattr(L(m).mlp, "_forward_hooks", collections.OrderedDict()),
        L(m).mlp.register_forward_hook(lambda mm, a, y: y * 2),
    ),
)
both_ways(
    "modules dict replaced",
    lambda m: setattr(L(m).mlp, "_modules", {**L(m).mlp._modules, "act_fn": nn.ReLU()}),
)
both_ways(
    "parameters dict replaced",
    lambda m: L(m).mlp.up_proj.__dict__.__setitem__(
        "_parameters",
        {
            "weight": nn.Parameter(2 * L(m).mlp.up_proj.weight.detach()),
            "bias": L(m).mlp.up_proj.bias,
        },
    ),
)
both_ways(
    "weight non contiguous",
    lambda m: setattr(
        L(m).mlp.up_proj,
        "weight",
        nn.Parameter(L(m).mlp.up_proj.weight.detach().t().contiguous().t(), requires_grad=False),
    ),
)
both_ways(
    "weight expanded",
    lambda m: setattr(
        L(m).mlp.up_proj,
        "weight",
        nn.Parameter(
            L(m).mlp.up_proj.weight.detach()[:1].expand_as(L(m).mlp.up_proj.weight),
            requires_grad=False,
        ),
    ),
)
both_ways(
    "weight strided data",
    lambda m: setattr(
        L(m).mlp.up_proj.weight, "data", L(m).mlp.up_proj.weight.detach().t().contiguous().t() * 1.5
    ),
)
both_ways(
    "norm weight strided",
    lambda m: setattr(
        m.model.norm,
        "weight",
        nn.Parameter(torch.linspace(0.5, 2, 256).view(128, 2)[:, 0], requires_grad=False),
    ),
)
both_ways("weight requires grad", lambda m: m.requires_grad_(True))
both_ways(
    "param subclass",
    lambda m: setattr(
        L(m).mlp.up_proj, "weight", type("P", (nn.Parameter,), {})(L(m).mlp.up_proj.weight.detach())
    ),
)
both_ways("linear with scale attr", lambda m: setattr(L(m).mlp.up_proj, "scale", 2.0))


class Lin(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


both_ways("linear class set", lambda m: setattr(L(m).mlp.up_proj, "__class__", Lin))
both_ways(
    "linear same-named",
    lambda m: setattr(
        L(m).mlp.up_proj,
        "__class__",
        type(
            "Linear",
            (nn.Linear,),
            {"forward": Lin.forward.__get__ and (lambda self, x: 2 * nn.Linear.forward(self, x))},
        ),
    ),
)


class Prop(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    variance_epsilon = property(lambda s: 0.5)


both_ways("norm class with property", lambda m: setattr(L(m).input_layernorm, "__class__", Prop))
both_ways("final norm class with property", lambda m: setattr(m.model.norm, "__class__", Prop))
both_ways(
    "rope replaced fn",
    lambda m: setattr(
        m.model.rotary_emb,
        "forward",
        lambda x, p: tuple(
            2 * t for t in type(m.model.rotary_emb).forward(m.model.rotary_emb, x, p)
        ),
    ),
)
both_ways("rope type attr", lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"))
both_ways(
    "rope config in module",
    lambda m: setattr(m.model.rotary_emb, "config", copy.deepcopy(m.config)),
)
both_ways(
    "inv_freq data",
    lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 2),
)
both_ways(
    "inv_freq fp64",
    lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq.double() * 2),
)
both_ways(
    "embedding hook-free subclass",
    lambda m: setattr(
        m.model.embed_tokens,
        "__class__",
        type(
            "Embedding", (nn.Embedding,), {"forward": lambda s, i: 2 * nn.Embedding.forward(s, i)}
        ),
    ),
)
both_ways("lm_head resized", lambda m: m.resize_token_embeddings(400))
both_ways("tied", lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight))
both_ways("dropout p", lambda m: setattr(L(m).self_attn, "attention_dropout", 0.5))
both_ways("gradient checkpointing", lambda m: m.gradient_checkpointing_enable())
both_ways("prepared bf16 norm", lambda m: m.model.norm.to(torch.bfloat16).float())
both_ways(
    "model forward patched",
    lambda m: setattr(m.model, "forward", (lambda f: lambda *a, **k: f(*a, **k))(m.model.forward)),
)


def root_forward(m):
    f = m.forward

    def g(*a, **k):
        o = f(*a, **k)
        o.logits = o.logits * 2
        return o

    m.forward = g


both_ways("root forward patched", root_forward)
both_ways(
    "root hook doubles",
    lambda m: m.register_forward_hook(
        lambda mm, a, o: type(o)(logits=o.logits * 2, past_key_values=o.past_key_values)
    ),
)
both_ways(
    "get_output_embeddings patched",
    lambda m: setattr(m, "get_output_embeddings", lambda: m.lm_head),
)
both_ways("layer list slice attr", lambda m: setattr(m.config, "num_hidden_layers", 3))
both_ways("model attr training false submodule", lambda m: setattr(L(m).mlp, "training", True))
both_ways(
    "gemma2 softcap attr",
    lambda m: setattr(L(m).self_attn, "attn_logit_softcapping", 1.0),
    "gemma2",
)
both_ways(
    "gemma2 query scale cfg", lambda m: setattr(m.config, "query_pre_attn_scalar", 1), "gemma2"
)
both_ways("gemma normalizer cfg", lambda m: setattr(m.config, "hidden_size", 64), "gemma")
both_ways(
    "gemma3 local rope",
    lambda m: [b.mul_(0.2) for n, b in m.model.rotary_emb.named_buffers() if "sliding" in n],
    "gemma3",
)
both_ways("granite residual layer", lambda m: setattr(L(m), "residual_multiplier", 3.0), "granite")
both_ways("granite scaling attn", lambda m: setattr(L(m).self_attn, "scaling", 0.5), "granite")
both_ways("cohere logit scale", lambda m: setattr(m, "logit_scale", 2.0), "cohere")
both_ways("glm partial rotary", lambda m: setattr(m.config, "partial_rotary_factor", 0.25), "glm")
both_ways("phi3 odd", lambda m: setattr(L(m).mlp, "activation_fn", nn.ReLU()), "phi3")
both_ways("olmo clip on config", lambda m: setattr(m.config, "clip_qkv", 0.2), "olmo")
both_ways(
    "qwen3 qnorm eps", lambda m: setattr(L(m).self_attn.q_norm, "variance_epsilon", 2.0), "qwen3"
)
both_ways(
    "qwen3 knorm weight hidden",
    lambda m: L(m).self_attn.k_norm.__dict__.__setitem__("weight", 3 * torch.ones(48)),
    "qwen3",
)
both_ways(
    "qwen3 q_norm identity", lambda m: setattr(L(m).self_attn, "q_norm", nn.Identity()), "qwen3"
)
both_ways("smollm3 rope flag", lambda m: setattr(L(m).self_attn, "use_rope", 0), "smollm3")
both_ways("smollm3 rope flag other", lambda m: setattr(L(m, 3).self_attn, "use_rope", 1), "smollm3")


@case
def two_caches_in_turn():
    run = Run(rows=2)
    chk(run.call(7))
    a = run.caches
    chk(run.call(5, fresh=True))
    b = run.caches
    for i in range(6):
        run.caches = a if i % 2 else b
        chk(run.call(1), f"{i}")
    return run.steps()


@case
def change_between_two_caches():
    run = Run(rows=2)
    chk(run.call(7))
    a = run.caches
    for _ in range(3):
        chk(run.call(1))
    chk(run.call(5, fresh=True))
    for _ in range(3):
        chk(run.call(1))
    run.each(lambda m: setattr(L(m).self_attn, "scaling", 0.9))
    run.caches = a
    for i in range(3):
        chk(run.call(1), f"{i}")


@case
def wide_tokens():
    run = Run(rows=2)
    chk(run.call(9))
    for t in (1, 2, 3, 8, 5, 1, 7):
        chk(run.call(t), f"{t}")
    for t in (1, 2, 3, 8, 5, 1, 7):
        chk(run.call(t), f"{t}")
    return run.steps()


@case
def many_rows():
    run = Run(rows=16)
    chk(run.call(9))
    for _i in range(3):
        chk(run.call(1))
    run = Run(rows=17)
    chk(run.call(9))
    for _i in range(3):
        chk(run.call(1))


@case
def rows_differ_from_cache():
    run = Run(rows=2)
    chk(run.call(9))
    chk(run.call(1))
    chk(run.call(1))
    chk(run.call(1, rows=1))
    chk(run.call(1, rows=2))


@case
def holes_in_mask_and_positions():
    run = Run(rows=3)
    chk(run.call(9))
    g = torch.Generator().manual_seed(0)
    for i in range(8):
        mm = (torch.rand(3, 10 + i, generator=g) > 0.4).long()
        mm[:, -1] = 1
        mm[:, 0] = 1
        chk(
            run.call(1, attention_mask=mm, position_ids=torch.randint(0, 40, (3, 1), generator=g)),
            f"{i}",
        )
    return run.steps()


@case
def mask_shorter_and_longer():
    run = Run(rows=2)
    chk(run.call(9))
    chk(run.call(1))
    chk(run.call(1))
    for n in (11, 13, 1, 12):
        chk(run.call(1, attention_mask=torch.ones(2, n, dtype=torch.long)), n)


@case
def masks_of_windows():
    run = Run("mistral", rows=2)
    chk(run.call(20))
    g = torch.Generator().manual_seed(0)
    for i in range(8):
        mm = (torch.rand(2, 21 + i, generator=g) > 0.4).long()
        mm[:, -1] = 1
        chk(run.call(1, attention_mask=mm), f"{i}")
    return run.steps()


@case
def strided_ids():
    run = Run(rows=2)
    chk(run.call(9))
    chk(run.call(1))
    chk(run.call(1))
    ids = torch.randint(0, 300, (2, 6))[:, ::6]
    chk(run.call(1, ids=ids))
    ids = torch.randint(0, 300, (1, 1)).expand(2, 1)
    chk(run.call(1, ids=ids))


@case
def functional_call_steps():
    run = Run(rows=1)
    chk(run.call(9))
    chk(run.call(1))
    chk(run.call(1))
    outs = []
    for m, c in zip((run.model, run.twin), run.caches, strict=False):
        p = {k: v * 1.1 for k, v in m.named_parameters()}
        with torch.no_grad():
            outs.append(
                torch.func.functional_call(
                    m, p, (), {"input_ids": torch.tensor([[7]]), "past_key_values": c}
                ).logits
            )
    chk(same(*outs))
    chk(run.call(1))


@case
def restore_in_the_middle():
    run = Run()
    warm(run)
    hfpatch.restore(run.model)
    chk(run.call(1))
    hfpatch.apply(run.model)
    chk(run.call(1))
    chk(run.call(1))
    run.model = copy.deepcopy(run.model)
    chk(run.call(1))
    chk(run.call(1))
    run.model = pickle.loads(pickle.dumps(run.model))
    chk(run.call(1))


@case
def cache_pickled_between():
    run = Run()
    warm(run)
    run.caches = [pickle.loads(pickle.dumps(c)) for c in run.caches]
    chk(run.call(1))
    chk(run.call(1))


@case
def cache_layers_swapped():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers[0], c.layers[1] = (c.layers[1], c.layers[0])
    chk(run.call(1))
    chk(run.call(1))


@case
def cache_layer_shared():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers[1] = copy.deepcopy(c.layers[0])
    chk(run.call(1))
    chk(run.call(1))


@case
def cache_layer_same_object():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers[1] = c.layers[0]
    chk(run.call(1))
    chk(run.call(1))


@case
def cache_extra_layer():
    run = Run()
    warm(run)
    for c in run.caches:
        c.layers.append(copy.deepcopy(c.layers[0]))
    chk(run.call(1))
    chk(run.call(1))


@case
def sliding_window_of_cache_layer():
    run = Run("mistral")
    warm(run)
    for c in run.caches:
        c.layers[1].sliding_window = 5
    for i in range(6):
        chk(run.call(1), i)


@case
def layer_class_changed():

    class Mine(DynamicLayer):
        def update(self, k, v, *a, **kw):
            return super().update(k * 0.5, v, *a, **kw)

    run = Run()
    warm(run)
    for c in run.caches:
        _ = c.layers[1].keys
        c.layers[1].__class__ = Mine
    for i in range(3):
        chk(run.call(1), i)


@case
def keys_read_every_step():
    run = Run()
    warm(run)
    held = []
    for _i in range(6):
        chk(run.call(1))
        held.append([c.layers[0].keys for c in run.caches])
    for a, b in held:
        chk(same(a, b))
        assert a.stride() == b.stride()
    return run.steps()


@case
def exception_in_hook_of_root():
    run = Run()
    warm(run)

    def boom(*a):
        raise ValueError("x")

    hs = [m.register_forward_hook(boom) for m in (run.model, run.twin)]
    chk(run.call(1))
    [h.remove() for h in hs]
    chk(run.call(1))


def _around(of):
    """A forward that somebody put around the one that stands there, which may be ours."""

    def ch(m):
        inner = of(m).forward
        of(m).forward = lambda *a, **k: inner(*a, **k) * 1.5

    return ch


@case
def forward_around_an_mlp():
    return after(_around(lambda m: m.model.layers[1].mlp))


@case
def forward_around_a_norm():
    return after(_around(lambda m: m.model.layers[1].input_layernorm))


@case
def forward_around_a_norm_before_the_next_apply():
    run = Run("llama")
    warm(run)
    run.each(_around(lambda m: m.model.layers[1].input_layernorm))
    hfpatch.apply(run.model)
    warm(run)


@case
def first_step_of_more_tokens_than_the_window():
    for family in ("gemma2", "gemma3", "mistral"):
        for tokens in (3, 9, 12):
            run = Run(family, **({"sliding_window": 8}))
            chk(run.call(5, fresh=True), f"{family} prompt")
            chk(run.call(tokens), f"{family} {tokens} at once")
            for i in range(3):
                chk(run.call(1), f"{family} {tokens} step {i}")


both_ways(
    "a window of 0 that none reads",
    lambda m: setattr(L(m).self_attn, "sliding_window", 0),
    "cohere2",
)
both_ways("a factor of 0", lambda m: setattr(L(m), "residual_multiplier", 0), "granite")
both_ways("a scale of 0", lambda m: setattr(L(m).self_attn, "scaling", 0.0))
both_ways("a negative scale", lambda m: setattr(L(m).self_attn, "scaling", -0.2))
