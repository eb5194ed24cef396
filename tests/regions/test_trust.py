"""What changes after captured blocks were proven is noticed at the call; what cannot be captured is
left alone, with the line that stopped it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from regions.families import build
from torch import nn
from torch.nn.utils import parametrize

import hfpatch
from hfpatch import swap
from hfpatch.regions import capture as capturing
from hfpatch.regions import kind as kind_module
from hfpatch.regions import offer
from hfpatch.regions.caches import state_of
from hfpatch.regions.capture import Uncapturable, capture, numbers_of
from hfpatch.regions.emit import emit
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.nodes import Constant, Project
from hfpatch.regions.offer import forget
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import Structure, take_apart


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def run(model: Any, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**call)[0]
    return out


def fused(name: str) -> tuple[Any, dict[str, Any]]:
    """A model whose blocks run fused."""
    model, inputs = build(name)
    call = inputs(2, 9)
    hfpatch.apply(model, decoding=False, blocks=True)
    run(model, call)
    run(model, call)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    return model, call


def layer_of(model: Any) -> Any:
    return model.layers[1]


def _double(module: Any, args: Any, out: Any) -> Any:
    first = out[0] if isinstance(out, tuple) else out
    return (first * 2, *out[1:]) if isinstance(out, tuple) else first * 2


def _set_forward(m: Any) -> None:
    original = m.forward
    m.forward = lambda *a, **k: _double(m, a, original(*a, **k))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook on attention": lambda b: b.self_attn.register_forward_hook(_double),
    "hook on a norm": lambda b: b.input_layernorm.register_forward_hook(_double),
    "hook on a layer": lambda b: b.self_attn.q_proj.register_forward_hook(_double),
    "hook on the MLP": lambda b: b.mlp.register_forward_hook(_double),
    "hook on the activation": lambda b: b.mlp.act_fn.register_forward_hook(_double),
    "hook on the block": lambda b: b.register_forward_hook(_double),
    "forward of attention": lambda b: _set_forward(b.self_attn),
    "forward of the MLP": lambda b: _set_forward(b.mlp),
    "forward of a layer": lambda b: _set_forward(b.mlp.down_proj),
    "scaling": lambda b: setattr(b.self_attn, "scaling", 0.5),
    "eps": lambda b: setattr(b.input_layernorm, "variance_epsilon", 0.5),
    "eps of each row": lambda b: setattr(
        b.input_layernorm, "variance_epsilon", torch.linspace(0.1, 1.0, 9)[:, None]
    ),
    "another activation": lambda b: setattr(b.mlp, "act_fn", nn.ReLU()),
    "another layer": lambda b: setattr(b.mlp, "down_proj", nn.Linear(96, 64)),
    "no norm": lambda b: setattr(b, "post_attention_layernorm", nn.Identity()),
    "a setting of the config": lambda b: setattr(
        b.self_attn.config, "_attn_implementation", "eager"
    ),
    "weights written in place": lambda b: b.mlp.up_proj.weight.data.mul_(3),
    "weights exchanged": lambda b: setattr(
        b.self_attn.v_proj, "weight", nn.Parameter(torch.randn(32, 64))
    ),
    "causal": lambda b: setattr(b.self_attn, "is_causal", False),
    "a class of one's own": lambda b: setattr(
        b.mlp, "__class__", type("Own", (type(b.mlp),), {"forward": lambda s, x: x})
    ),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_a_change_after_apply_counts(what: str) -> None:
    model, call = fused("llama")
    before = run(model, call)
    torch.manual_seed(3)
    CHANGES[what](layer_of(model))
    found = run(model, call)
    plain, _ = build("llama")
    torch.manual_seed(3)
    CHANGES[what](layer_of(plain))
    expected = run(plain, call)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    if what not in ("a setting of the config",):
        assert not torch.allclose(found, before, rtol=1e-3), "the change changes nothing"


def test_a_module_appended_to_a_list_counts() -> None:
    """Code that goes over a list runs it, though all that was there is as it was."""
    model, call = fused("mobilebert")
    plain, _ = build("mobilebert")
    before = run(model, call)
    for changed in (model, plain):
        ffn = changed.encoder.layer[1].ffn
        ffn.append(copy.deepcopy(ffn[0]))
    found, expected = run(model, call), run(plain, call)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.allclose(found, before, rtol=1e-3), "the change changes nothing"


def _deberta(**more: Any) -> tuple[Any, dict[str, Any]]:
    """One whose blocks run fused, and its call."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16, initializer_range=0.3,
        relative_attention=True, pos_att_type=["c2p", "p2c"], **more,
    )  # fmt: skip
    model = DebertaV2Model(config).eval()
    call = {"input_ids": torch.arange(12).view(2, 6)}
    hfpatch.apply(model, blocks=True)
    for _ in range(2):
        run(model, call)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    return model, call


def _follows(model: Any, call: dict[str, Any], before: torch.Tensor) -> None:
    """A change behind `apply` is in what the model gives."""
    found = run(model, call)
    hfpatch.restore(model)
    expected = run(model, call)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.allclose(found, before, rtol=1e-3), "the change changes nothing"


@pytest.mark.parametrize("how", ["another", "written to"])
def test_a_list_of_settings_counts(how: str) -> None:
    model, call = _deberta(norm_rel_ebd="layer_norm")
    before = run(model, call)
    attention = model.encoder.layer[0].attention.self
    if how == "another":
        attention.pos_att_type = ["c2p"]
    else:
        attention.pos_att_type.remove("p2c")
    _follows(model, call, before)


def test_a_block_that_is_handed_a_parameter_is_captured() -> None:
    """A weight of the model, such as DeBERTa's table of relative positions, is read live."""
    model, call = _deberta()
    before = run(model, call)
    with torch.no_grad():
        model.encoder.rel_embeddings.weight.mul_(2)
    _follows(model, call, before)


@pytest.mark.parametrize("order", ["captured before", "not captured yet"])
def test_weights_that_are_read_with_another_sign(order: str) -> None:
    """A kernel reads memory. Such a model's blocks are another kind than those of its twins."""
    forget()
    if order == "captured before":
        fused("bert")
    model, inputs = build("bert")
    call = inputs(2, 9)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            with torch.no_grad():
                module.weight.normal_(generator=torch.Generator().manual_seed(1))
            module.weight = nn.Parameter(torch._neg_view(module.weight.data))
    expected = run(model, call)
    hfpatch.apply(model, blocks=True)
    for _ in range(2):
        torch.testing.assert_close(run(model, call), expected, rtol=1e-4, atol=1e-5)
    (reason,) = {c.reason for c in hfpatch.status(model).plan.candidates}
    assert "does not hold its values" in reason
    fused("bert")


class _Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


def test_weights_that_are_made_once_for_a_while() -> None:
    """In `parametrize.cached()` a capture's calls keep none of theirs, which have no data."""
    entry = zoo.ENTRIES["flux"]
    model = entry.build(torch.float32)
    for module in list(model.modules()):
        if "RMSNorm" in type(module).__name__:
            parametrize.register_parametrization(module, "weight", _Scaled())
    call = {**entry.inputs(model), "return_dict": False}
    with parametrize.cached():
        expected = run(model, call)
    forget()
    hfpatch.apply(model, blocks=True)
    with parametrize.cached():
        for _ in range(2):
            torch.testing.assert_close(run(model, call), expected, rtol=1e-4, atol=1e-5)
        made = list(parametrize._cache.values())
        assert made and {type(t) for t in made} == {torch.Tensor}
    assert not parametrize._cache


def test_a_call_in_training_mode_decides_nothing() -> None:
    """Its dropout cannot be captured; the calls in evaluation mode that follow can be."""
    forget()
    model, inputs = build("bert")
    call = inputs(2, 9)
    hfpatch.apply(model, blocks=True)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for parts in ([model], dropouts):
        for part in parts:
            part.train()
        run(model, call)
        now = hfpatch.status(model).plan.candidates
        assert {c.state for c in now} == {"left"}
        assert all("in training mode" in c.reason for c in now)
        model.eval()
        assert {c.state for c in hfpatch.status(model).plan.candidates} == {"at its first call"}
    run(model, call)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_call_with_a_hook_inside_decides_nothing(how: str) -> None:
    """Who looks at a model first, and then takes the hooks off, has its blocks fused; and so has
    another model of the kind, which never had any."""
    forget()
    model, inputs = build("llama")
    call = inputs(2, 9)
    expected = run(model, call)
    other = copy.deepcopy(model)
    for m in (model, other):
        hfpatch.apply(m, decoding=False, blocks=True)
    places = [block.self_attn.q_proj for block in model.layers]
    seen: list[int] = []
    for place in places:
        if how == "hook":
            place.register_forward_hook(lambda *_: seen.append(1))
        else:
            place.forward = lambda x, own=place.forward: own(x)
    for _ in range(3):
        torch.testing.assert_close(run(model, call), expected)
    assert len(seen) == (9 if how == "hook" else 0)
    now = hfpatch.status(model).plan.candidates
    assert {c.state for c in now} == {"left"}
    assert all("somebody's" in c.reason for c in now)
    assert {c.state for c in hfpatch.status(other).plan.candidates} == {"at its first call"}
    torch.testing.assert_close(run(other, call), expected)
    assert {c.state for c in hfpatch.status(other).plan.candidates} == {"fused"}

    forget()  # as if there were no other model
    hfpatch.apply(model, decoding=False, blocks=True)
    run(model, call)
    for place in places:
        place._forward_hooks.clear()
        place.__dict__.pop("forward", None)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"at its first call"}
    for _ in range(2):
        torch.testing.assert_close(run(model, call), expected)
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


CHANGED_BEFORE: dict[str, Callable[[Any], Any]] = {
    "a subclass of its processor": lambda b: setattr(
        b.attn, "processor", type("Own", (type(b.attn.processor),), {})()
    ),
    "a setting of a norm": lambda b: setattr(b.norm1.norm, "eps", 0.5),
    "fused projections": lambda b: b.attn.fuse_projections(),
    "a part's class": lambda b: setattr(b, "act_mlp", nn.ReLU()),
}


@pytest.mark.parametrize("what", list(CHANGED_BEFORE))
def test_a_block_that_is_changed_before_its_first_call_decides_nothing(what: str) -> None:
    """Neither that blocks of its kind are left, nor that theirs is a capture of what it became:
    those of other models, and its own when it is again what it was, run fused."""
    from diffusers import ChromaTransformer2DModel

    from hfpatch.coverage.small_diffusers import diffusers_model
    from hfpatch.inputs import sample_inputs

    forget()
    torch.manual_seed(0)
    model: Any = diffusers_model(ChromaTransformer2DModel).eval().requires_grad_(False)
    inputs, other = sample_inputs(model, batch=2), copy.deepcopy(model)
    before = run(model, inputs)
    for m in (model, other):
        hfpatch.apply(m, decoding=False, blocks=True)
    single = "act_mlp" in what or "part" in what
    blocks = model.single_transformer_blocks if single else model.transformer_blocks
    for block in blocks:
        CHANGED_BEFORE[what](block)
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    for _ in range(2):
        torch.testing.assert_close(run(model, inputs), run(plain, inputs), rtol=1e-4, atol=1e-4)
    kind = "single_transformer_blocks" if single else "transformer_blocks"

    def states(of: Any) -> set[tuple[str, bool]]:
        found = hfpatch.status(of).plan.candidates
        return {(c.state, "call `apply`" in c.reason) for c in found if c.path.startswith(kind)}

    assert states(model) == {("left", True)}
    assert states(other) == {("at its first call", False)}
    for _ in range(2):
        torch.testing.assert_close(run(other, inputs), before, rtol=1e-4, atol=1e-4)
    assert states(other) == {("fused", False)}
    assert states(model) == {("left", True)}


class Meanwhile(list[Any]):
    """The captures of one structure; who goes over them loses the turn to another thread."""

    other: Callable[[], object]

    def __iter__(self) -> Any:
        self.other()
        return super().__iter__()


def test_another_thread_decides_meanwhile() -> None:
    """`dictionary changed size during iteration` came out of `status`, and of the model's calls."""
    model, call = fused("llama")
    kind: Any = swap.swapped(layer_of(model)).details.kind  # type: ignore[union-attr]
    for structure, found in kind.variants.items():
        held = kind.variants[structure] = Meanwhile(found)
        held.other = lambda: kind.variants.setdefault(object(), [])
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    expected = run(model, call)
    longer = {"input_ids": call["input_ids"].repeat(1, 2), "output_attentions": True}
    run(model, longer)  # a call of another kind
    torch.testing.assert_close(run(model, call), expected)
    forget()


def test_dropout_in_training_mode() -> None:
    model, inputs = build("bert")
    call = inputs(2, 9)
    hfpatch.apply(model, blocks=True)
    run(model, call)
    before = run(model, call)
    model.train()
    assert not torch.equal(run(model, call), before)
    model.eval()
    assert torch.equal(run(model, call), before)


def test_gradients_go_to_the_original() -> None:
    model, call = fused("llama")
    model.requires_grad_(True)
    out = model(**call)[0]
    out.sum().backward()
    assert all(p.grad is not None for p in model.layers.parameters())


def test_the_mode_of_gradients_stays() -> None:
    """PhiMoE counts its experts' tokens in `torch.no_grad()`. A capture has that as a function of
    its own, which left gradients switched off for the whole process."""
    from transformers import PhimoeConfig, PhimoeModel

    config = PhimoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = PhimoeModel(config).eval().requires_grad_(False)
    hfpatch.apply(model, decoding=False, blocks=True)
    for _ in range(3):
        model(torch.arange(9)[None], use_cache=False)
        assert torch.is_grad_enabled()
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


def test_hooks_on_all_modules_fire() -> None:
    model, call = fused("llama")
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, o: seen.append(type(m).__name__)
    )
    try:
        run(model, call)
    finally:
        handle.remove()
    assert seen.count("LlamaRMSNorm") == 7 and seen.count("LlamaMLP") == 3


def test_attentions_that_are_asked_for_are_given() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=199, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(config).eval().requires_grad_(False)
    call = {"input_ids": torch.arange(18).reshape(2, 9)}
    asked = call | {"output_attentions": True, "output_hidden_states": True}
    expected = model(**asked)
    hfpatch.apply(model, blocks=True)
    for _ in range(2):
        run(model, call)
    for _ in range(2):
        found = model(**asked)
        for a, b in (
            (found.attentions, expected.attentions),
            (found.hidden_states, expected.hidden_states),
        ):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert (x - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss", "Phimoe"])
def test_a_proof_leaves_nothing_among_what_a_call_collects(family: str) -> None:
    """Routers and experts are called by the proof as they are, with the hooks by which transformers
    collects `router_logits`: the first call of each kind gave the proof's too."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99, head_dim=16, moe_intermediate_size=32,
        num_local_experts=4, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    ids = torch.randint(3, 99, (2, 9))
    padded = torch.ones_like(ids)
    padded[1, :4] = 0
    calls = [
        {"input_ids": ids, "labels": ids, "output_router_logits": True, "use_cache": False} | more
        for more in ({}, {"attention_mask": padded})
    ]
    expected = [model(**call) for call in calls]
    hfpatch.apply(model, decoding=False, blocks=True)
    for call, wanted in zip(calls, expected, strict=True):
        for _ in range(2):
            found = model(**call)
            assert len(found.router_logits) == len(wanted.router_logits) == 2
            for name in ("loss", "aux_loss"):
                assert torch.allclose(found[name], wanted[name], rtol=1e-5)


def test_copies_and_pickles() -> None:
    model, call = fused("qwen3")
    expected = run(model, call)
    twin = copy.deepcopy(model)
    twin.layers[0].mlp.up_proj.weight.mul_(2)
    assert torch.equal(run(model, call), expected)
    assert not torch.allclose(run(twin, call), expected, rtol=1e-3)
    back = pickle.loads(pickle.dumps(model))
    assert swap.swapped(back.layers[0]) is None
    assert (run(back, call) - expected).abs().max() <= 1e-5 * expected.abs().max()
    hfpatch.restore(twin)
    assert torch.equal(run(model, call), expected)


def test_lora_after_apply() -> None:
    peft = pytest.importorskip("peft")
    model, call = fused("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    with_lora = peft.get_peft_model(model, config).eval()
    found = run(with_lora, call)
    plain, _ = build("llama")
    torch.manual_seed(5)
    expected = run(peft.get_peft_model(plain, config).eval(), call)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_projections_that_are_fused_later_count() -> None:
    """The processor asks its attention for `fused_projections`, which is its class's until then;
    an adapter on the layer that stands for q, k and v from then on was left out."""
    from diffusers import ChromaTransformer2DModel
    from peft import LoraConfig

    from hfpatch.coverage.small_diffusers import diffusers_model
    from hfpatch.inputs import sample_inputs

    torch.manual_seed(0)
    model: Any = diffusers_model(ChromaTransformer2DModel).eval().requires_grad_(False)
    inputs, patched = sample_inputs(model, batch=2), copy.deepcopy(model)
    hfpatch.apply(patched, decoding=False, blocks=True)
    before = run(model, inputs)
    for _ in range(2):
        torch.testing.assert_close(run(patched, inputs), before, rtol=1e-4, atol=1e-4)
    assert {c.state for c in hfpatch.status(patched).plan.candidates} == {"fused"}
    for each in (model, patched):
        with torch.no_grad():
            each.fuse_qkv_projections()
        torch.manual_seed(1)
        each.add_adapter(LoraConfig(r=4, target_modules=["to_qkv"], init_lora_weights=False))
    adapted = run(model, inputs)
    assert not torch.allclose(adapted, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(run(patched, inputs), adapted, rtol=1e-4, atol=1e-4)


def test_left_out_and_switched_off() -> None:
    model, _ = build("llama")
    assert not hfpatch.apply(model, blocks=False).plan.candidates
    some = hfpatch.apply(model, blocks=True, exclude="layers.1").plan.candidates
    assert [c.path for c in some] == ["layers.0", "layers.2"]
    assert not hfpatch.apply(model, blocks=True, exclude="*mlp*").plan.candidates
    assert not hfpatch.apply(model, blocks=True, mode="training").plan.candidates
    assert not hfpatch.apply(model, blocks=True, kernels="torch").plan.candidates
    for device in ("cpu", "cuda:9.0"):
        none = hfpatch.plan(model, blocks=None, device=device).candidates
        assert none == hfpatch.plan(model, device=device).candidates
        assert bool(none) is (device != "cpu")
    assert hfpatch.apply(model, blocks=None).swaps
    with pytest.raises(TypeError, match="`blocks` must be 'auto', True or False, got 3"):
        hfpatch.apply(model, blocks=3)  # type: ignore[arg-type]


def test_a_class_that_is_not_the_library_s_is_no_candidate() -> None:
    model, _ = build("llama")
    cls = type("LlamaDecoderLayer", (type(model.layers[0]),), {})
    model.layers[0].__class__ = cls
    assert [c.path for c in hfpatch.apply(model, blocks=True).plan.candidates] == [
        "layers.1",
        "layers.2",
    ]


def test_blocks_of_a_sequence_go_by_their_names() -> None:
    model, _ = build("bert")
    first, second = model.encoder.layer[:2]
    named = nn.Sequential(OrderedDict(entry=first, exit=second))
    planned = hfpatch.plan(named, blocks=True, include="exit")
    assert [c.path for c in planned.candidates] == ["exit"]


def test_plan_does_not_run_or_write() -> None:
    model, _ = build("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    forget()
    planned = hfpatch.plan(model, blocks=True)
    assert {c.state for c in planned.candidates} == {"at its first call"}
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class _Toy(nn.Module):
    """Something whose code is one line."""

    layer_idx = 0

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.code = code
        self.layer_idx = 3
        self.plain = torch.ones(4)
        self.count = 0
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return self.code(self, x, cache)


def _captured(code: Callable[..., Any], *args: Any) -> Any:
    toy = _Toy(code)
    toy.__dict__["code"] = None
    type(toy).forward = lambda self, x, cache=None: code(self, x, cache)  # type: ignore[method-assign]
    structure, tensors, _ = take_apart((torch.randn(2, 4), *args), {})
    return capture(toy, structure, tensors, {}, numbers_of(toy))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a value decides": (
        lambda m, x, c: x if x.sum() > 0 else -x,
        "data-dependent|item|Guard|guard",
    ),
    "its number in a tensor": (lambda m, x, c: x + torch.tensor(m.layer_idx), "which one it is"),
    "its number as a size": (lambda m, x, c: x.new_ones(m.layer_idx), "which one it is"),
    "random": (lambda m, x, c: x + torch.rand_like(x), "random numbers"),
    "dropout": (lambda m, x, c: nn.functional.dropout(x, 0.5, True), "random numbers"),
    "writes its input": (lambda m, x, c: x.mul_(2), "writes to a tensor"),
    "writes a parameter": (lambda m, x, c: m.lin.bias.mul_(2) + x, "writes to a tensor"),
    "writes a slice of its input": (
        lambda m, x, c: (x[:, 1:].copy_(x[:, :-1]), x)[1],
        "writes to a tensor",
    ),
    "a view by an operator that is not known is read behind the write": (
        lambda m, x, c: (y := m.lin(x), z := torch.einsum("ij->ji", y), y[0].mul_(2), z)[3],
        "writes",
    ),
    "a view of its input": (
        lambda m, x, c: (z := x[:1], z[:, 2:].mul_(2), m.lin(x))[2],
        "writes",
    ),
    **{
        f"writes its input, which `{name}` gave back": (code, "writes to a tensor")
        for name, code in {
            "type_as": lambda m, x, c: m.lin(x.type_as(x).add_(1)),
            "einsum": lambda m, x, c: m.lin(torch.einsum("ij->ij", x).add_(1)),
            "broadcast_tensors": lambda m, x, c: m.lin(torch.broadcast_tensors(x, x)[0].add_(1)),
            "sum_to_size": lambda m, x, c: m.lin(x.sum_to_size(x.shape).add_(1)),
            "cartesian_prod": lambda m, x, c: torch.cartesian_prod(x.view(-1)).add_(1),
            "atleast_1d": lambda m, x, c: m.lin(torch.atleast_1d(x).add_(1)),
            "split": lambda m, x, c: torch.tensor_split(x, 2, -1)[0].add_(1),
        }.items()
    },
    "another name of what was written is read": (
        lambda m, x, c: (y := m.lin(x), z := torch.einsum("ij->ij", y), y.add_(1), z)[3],
        "writes to a tensor",
    ),
    "enables gradients": (
        lambda m, x, c: torch.enable_grad()(m.lin)(x),
        "calls `_set_grad_enabled`",
    ),
    "a plain tensor": (lambda m, x, c: x + m.plain, "Tensor|tensor"),
    "its number": (lambda m, x, c: x * m.layer_idx, "which one it is in its list"),
    "branches on its number": (lambda m, x, c: x if m.layer_idx % 2 else -x, "which one it is"),
    "an odd result": (lambda m, x, c: object(), "`object`"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_cannot_be_captured(what: str) -> None:
    code, why = REFUSED[what]
    own = _Toy.forward
    try:
        with pytest.raises(Uncapturable, match=why):
            _captured(code)
    finally:
        _Toy.forward = own  # type: ignore[method-assign]


def test_a_write_to_a_tensor_of_its_own_is_no_write() -> None:
    own = _Toy.forward

    def code(m: Any, x: Any, c: Any) -> Any:
        y = m.lin(x)
        y += x
        y.mul_(2)
        return y

    try:
        found = _captured(code)
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    assert not any("_." in str(n.target) for n in found.graph.nodes)


def test_a_write_to_what_the_cache_gives_back() -> None:
    """Those are the cache's own tensors."""
    from transformers import DynamicCache

    def code(m: Any, x: Any, cache: Any) -> Any:
        keys, values = cache.update(*[m.lin(x).view(2, 1, 1, 4) for _ in range(2)], m.layer_idx)
        keys.mul_(2)
        return keys + values

    own = _Toy.forward
    toy = _Toy(code)
    toy.__dict__["code"] = None
    _Toy.forward = lambda self, x, cache=None: code(self, x, cache)  # type: ignore[method-assign]
    try:
        structure, tensors, cache = take_apart((torch.randn(2, 4),), {"cache": DynamicCache()})
        found = state_of(cache, toy, numbers_of(toy))
        assert not isinstance(found, str)
        whole = Structure(structure.shape, found[0])
        with pytest.raises(Uncapturable, match="writes to a tensor"):
            capture(toy, whole, tensors + found[1], {}, numbers_of(toy))
    finally:
        _Toy.forward = own  # type: ignore[method-assign]


def test_writes_that_round_or_broadcast() -> None:
    """fp32 added to bf16, and a row put in the place of several."""
    own = _Toy.forward

    def code(m: Any, x: Any, c: Any) -> Any:
        y = torch.einsum("ij,kj->ik", x, m.lin.weight).bfloat16()
        y += x * 0.3
        z = torch.zeros_like(y)
        z[:, 1:3] = y[:, :1]
        z *= 1.5
        return z + y

    try:
        found = _captured(code)
        x = torch.randn(2, 4)
        toy = _Toy(code)
        (out,) = Interpreter(toy, None).run(found.graph, [x])
        assert torch.equal(out, code(toy, x, None))
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    assert not any("_." in str(n.target) for n in found.graph.nodes)


def test_a_list_as_an_index_is_a_constant() -> None:
    own = _Toy.forward
    try:
        found = _captured(lambda m, x, c: m.lin(x)[..., [2, 0]] * torch.tensor([1.0, 2.0]))
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    held = [n.target.tensor for n in found.graph.nodes if isinstance(n.target, Constant)]
    assert sorted(t.tolist() for t in held) == [[1.0, 2.0], [2, 0]]


def _split(m: Any, x: Any, c: Any) -> Any:
    """RoPE by halves, as LTX-2 writes it: both views are there before the first write."""
    parts = m.lin(x).reshape(2, 2, 2)
    first, second = parts[..., :1, :], parts[..., 1:, :]
    out = parts * x[:, None, :2]
    one, two = out[..., :1, :], out[..., 1:, :]
    one.addcmul_(-x[:, None, 2:], second)
    two.addcmul_(x[:, None, 2:], first)
    return out.reshape(2, 4)


def _overlapping(m: Any, x: Any, c: Any) -> Any:
    y = m.lin(x)
    left, right = y[:, :3], y[:, 1:]
    left.mul_(2)
    before = right * 1.0
    right += left * 3
    left.copy_(x[:, :3])
    return before + right + left * y[:, :3]


def _views_of_views(m: Any, x: Any, c: Any) -> Any:
    y = m.lin(x)
    turned = y.t().unsqueeze(0)
    row, rest = y[0], y[1:]
    result = row.mul_(3)
    rest[:, 1:].sub_(x[1:, 1:])
    return turned.squeeze(0).t() + result + rest


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x, c: (y := m.lin(x), y[0].mul_(2), y)[2],
        lambda m, x, c: (y := m.lin(x), z := y.t(), y[:, :2].copy_(x[:, :2]), z * 1)[3],
        lambda m, x, c: (y := m.lin(x), z := y[:, 1:], z.mul_(2), z.add_(x[:, 1:]), y * 1)[4],
        _split,
        _overlapping,
        _views_of_views,
    ],
)
def test_writes_through_views_of_which_there_are_several(code: Callable[..., Any]) -> None:
    own = _Toy.forward
    try:
        found = _captured(code)
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    found.graph.lint()
    toy, x = _Toy(code), torch.randn(2, 4)
    expected = code(toy, x.clone(), None)
    (out,) = Interpreter(toy, None).run(found.graph, [x])
    run, source = emit(found.graph, toy, found.result, lambda op, params: None)
    given = x.clone()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(run(toy, [given], None), expected)
    assert torch.equal(given, x)
    assert not any("_." in str(n.target) for n in found.graph.nodes)
    rows = any("select" in str(n.target) for n in found.graph.nodes)
    assert rows or "into(" in source, "a slice is written in place, as in the original"


def test_writes_to_slices_of_a_tensor_of_its_own() -> None:
    own = _Toy.forward

    def code(m: Any, x: Any, c: Any) -> Any:
        y = m.lin(x)
        z = y.view(2, 2, 2).transpose(1, 2)
        z[:, 1:] = z[:, :1] * 2
        z[:, :, 0] = x[:, :2]
        return z.transpose(1, 2).reshape(2, 4) + 1

    try:
        found = _captured(code)
        x = torch.randn(3, 4)[:2]
        toy = _Toy(code)
        (out,) = Interpreter(toy, None).run(found.graph, [x])
        assert torch.equal(out, code(toy, x, None))
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    names = [str(n.target) for n in found.graph.nodes]
    assert not any("copy_" in n for n in names)
    assert "aten.slice_scatter.default" in names and "aten.select_scatter.default" in names


def test_a_layer_of_a_layer_s_product() -> None:
    own = _Toy.forward
    try:
        found = _captured(lambda m, x, c: m.lin(m.lin(x)) + m.lin(x))
    finally:
        _Toy.forward = own  # type: ignore[method-assign]
    before = {str(n.target) for n in found.graph.nodes}
    rewrite(found.graph, frozenset({"lin"}))  # it checks the order of its nodes
    assert before and sum(isinstance(n.target, Project) for n in found.graph.nodes) == 2


def test_a_list_with_an_empty_place() -> None:
    model, inputs = build("llama")
    model.more = nn.ModuleList([None, nn.Linear(4, 4)])  # type: ignore[list-item]
    hfpatch.apply(model, decoding=False, blocks=True)
    run(model, inputs(2, 9))
    run(model, inputs(2, 9))
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}


class Loops(nn.Module):
    """As recurrent layers go over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for _ in range(300):
            y = y * 1.0
        return self.down(self.up(y))


def test_a_long_loop_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that is reached in less time."""
    assert capturing._MOST_CALLS == 5000
    monkeypatch.setattr(capturing, "_MOST_CALLS", 250)
    x = torch.randn(2, 8)
    structure, tensors, _ = take_apart((x,), {})
    with pytest.raises(Uncapturable, match="calls PyTorch more than 250 times"):
        capture(Loops(), structure, tensors, {}, ())


def test_windows_of_images_are_captured_by_numbers() -> None:
    """Code that fills an image up to whole windows decides by formulas of its sizes, so often that
    with symbols the first call of a small SAM took 8 s, of a Florence-2 20 s."""
    from transformers import SamVisionConfig, SamVisionModel

    torch.manual_seed(0)
    config = SamVisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, mlp_dim=48,
        image_size=80, patch_size=8, window_size=4, global_attn_indexes=[1],
    )  # fmt: skip
    model = SamVisionModel(config).eval()
    plain = copy.deepcopy(model)
    forget()
    hfpatch.apply(model, blocks=True)
    images = torch.randn(3, 3, 80, 80)
    for batch in (2, 2, 1, 1, 3, 2):
        with torch.no_grad():
            expected = plain(images[:batch]).last_hidden_state
            found = model(images[:batch]).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    decided = [v for kind in offer._kinds.values() for v in kind.decided]
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    assert max(len(v.shapes.guards) for v in decided) < 10


def test_a_class_that_is_not_the_librarys_is_left_and_noted() -> None:
    """What its code does was not read by anybody; its norms are swapped as ever."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Block(LlamaDecoderLayer):
        pass

    model, inputs = build("llama")
    for layer in model.layers[1:]:
        layer.__class__ = Block
    call = inputs(2, 9)
    expected = run(model, call)
    report = hfpatch.apply(model, decoding=False, blocks=True)
    assert [c.path for c in report.plan.candidates] == ["layers.0"]
    (note,) = (n for n in report.notes if n.startswith("blocks are not captured"))
    assert "`layers.1` and 1 more" in note and "Block" in note
    assert any(s.path == "layers.1.input_layernorm" for s in report.swaps)
    torch.testing.assert_close(run(model, call), expected)


def test_refusals_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given another number at each call would be captured, and refused, at each."""
    tried = 0

    def refused(*args: Any, **kwargs: Any) -> Any:
        nonlocal tried
        tried += 1
        raise Uncapturable("none is taken")

    monkeypatch.setattr(kind_module, "capture", refused)
    forget()
    model, inputs = build("llama")
    call, plain = inputs(2, 9), copy.deepcopy(model)
    hfpatch.apply(model, decoding=False, blocks=True)
    for i in range(40):
        given = {**call, "strength": i / 64}
        torch.testing.assert_close(run(model, given), run(plain, given))
    assert tried == 12
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"left"}
