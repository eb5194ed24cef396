"""What is done to a decoder layer behind `apply(mode="training")`, one thing each: its gradients
are those of its unpatched twin, and a warning says that the layer runs as it is."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.test_layers import assert_equal, batch, build, gradients, layers_of

import hfpatch

Change = Callable[[Any, pytest.MonkeyPatch], object]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y

    return call


def own_forward(of: Callable[[Any], Any]) -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        of(layer).forward = doubled(of(layer).forward)

    return change


def own_call(of: Callable[[Any], Any]) -> Change:
    return lambda layer, patch: of(layer).__dict__.update(_call_impl=doubled(of(layer)._call_impl))


def hooked(of: Callable[[Any], Any]) -> Change:
    return lambda layer, patch: of(layer).register_forward_hook(lambda m, a, y: 2 * y)


def backward_hooked(of: Callable[[Any], Any]) -> Change:
    return lambda layer, patch: of(layer).register_full_backward_hook(
        lambda m, grads, ups: (2 * grads[0],)
    )


def own_class(of: Callable[[Any], Any]) -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        cls = type(of(layer))
        own = {"forward": lambda self, *args, **kw: doubled(cls.forward)(self, *args, **kw)}
        of(layer).__class__ = type(cls.__name__, (cls,), own)

    return change


def of_class(of: Callable[[Any], Any], name: str = "forward") -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        cls = type(of(layer))
        was = getattr(cls, name)
        if getattr(was, "twice", False):  # of the twin's layer
            return
        twice = doubled(was)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return twice(self, *args, **kwargs)

        call.twice = True  # type: ignore[attr-defined]
        patch.setattr(cls, name, call, raising=False)

    return change


_KEPT: dict[str, Any] = {}


def _through(self, *args, **kwargs):  # type: ignore[no-untyped-def]
    return 2 * _KEPT["forward"](self, *args, **kwargs)


def code_of_the_norms(layer: Any, patch: pytest.MonkeyPatch) -> None:
    was = type(layer.input_layernorm).forward
    if was.__code__ is _through.__code__:
        return
    _KEPT["forward"] = types.FunctionType(was.__code__, was.__globals__)
    patch.setattr(was, "__code__", _through.__code__)
    patch.setitem(was.__globals__, "_KEPT", _KEPT)


def setting(of: Callable[[Any], Any], name: str, value: Any) -> Change:
    def change(layer: Any, patch: pytest.MonkeyPatch) -> None:
        assert hasattr(of(layer), name)
        setattr(of(layer), name, value)

    return change


def layer_norm(layer: Any, patch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight.copy_(layer.input_layernorm.weight)
    layer.input_layernorm = norm


def hidden(of: Callable[[Any], Any], name: str = "weight") -> Change:
    return lambda layer, patch: of(layer).__dict__.update(
        {name: 2 * getattr(of(layer), name).detach()}
    )


def rotation(layer: Any, patch: pytest.MonkeyPatch) -> None:
    found = type(layer.self_attn).forward.__globals__
    was = found["apply_rotary_pos_emb"]
    if getattr(was, "twice", False):
        return

    def twice(*args: Any, **kwargs: Any) -> Any:
        q, k = was(*args, **kwargs)
        return 2 * q, k

    twice.twice = True  # type: ignore[attr-defined]
    patch.setitem(found, "apply_rotary_pos_emb", twice)


def itself(layer: Any) -> Any:
    return layer


def mlp(layer: Any) -> Any:
    return layer.mlp


def act(layer: Any) -> Any:
    return layer.mlp.act_fn


def attention(layer: Any) -> Any:
    return layer.self_attn


def norm(layer: Any) -> Any:
    return layer.input_layernorm


CHANGES: dict[str, tuple[str, Change]] = {
    "activation exchanged": ("Llama", lambda m, p: setattr(m.mlp, "act_fn", nn.Tanh())),
    "activation hooked": ("Llama", hooked(act)),
    "activation's gradient hooked": ("Llama", backward_hooked(act)),
    "activation's forward": ("Llama", own_forward(act)),
    "activation's call": ("Llama", own_call(act)),
    "activation's class": ("Llama", own_class(act)),
    "activation's forward, for all": ("Llama", of_class(act)),
    "MLP's forward": ("Llama", own_forward(mlp)),
    "MLP's call": ("Llama", own_call(mlp)),
    "MLP's class": ("Llama", own_class(mlp)),
    "MLP's forward, for all": ("Llama", of_class(mlp)),
    "MLP's call, for all": ("Llama", of_class(mlp, "__call__")),
    "MLP hooked": ("Llama", hooked(mlp)),
    "MLP hides a product": ("Llama", lambda m, p: m.mlp.__dict__.update(up_proj=m.mlp.gate_proj)),
    "attention's forward, for all": ("Qwen3", of_class(attention)),
    "attention's class": ("Qwen3", own_class(attention)),
    "attention's dropout": ("Qwen3", setting(attention, "attention_dropout", 1.0)),
    "attention's scale": ("Qwen3", setting(attention, "scaling", 1.5)),
    "norm's forward": ("Llama", own_forward(norm)),
    "norm's class": ("Llama", own_class(norm)),
    "norm's forward, for all": ("Llama", of_class(norm)),
    "norm's call, for all": ("Llama", of_class(norm, "__call__")),
    "norm's code": ("Llama", code_of_the_norms),
    "norm's eps": ("Llama", setting(norm, "variance_epsilon", 3.0)),
    "norm is another": ("Llama", layer_norm),
    "norm hides its weight": ("Llama", hidden(norm)),
    "product hides its weight": ("Llama", hidden(lambda m: m.self_attn.q_proj)),
    "norm of queries alone": (
        "Qwen3",
        setting(lambda m: m.self_attn.q_norm, "variance_epsilon", 3.0),
    ),
    "norm of keys alone": ("Qwen3", setting(lambda m: m.self_attn.k_norm, "variance_epsilon", 3.0)),
    "layer's class": ("Llama", own_class(itself)),
    "layer's forward, for all": ("Llama", of_class(itself)),
    "factor of the sums": ("Granite", setting(itself, "residual_multiplier", 2.0)),
    "rotation": ("Llama", rotation),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_was_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, change = CHANGES[name]
    model, twin = build(family), build(family)
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 2
    plain = gradients(twin)
    assert_equal(gradients(model), plain)
    for each in (model, twin):
        change(each.model.layers[1], monkeypatch)
    theirs = gradients(twin)
    assert any(not torch.equal(theirs.get(k, v), v) for k, v in plain.items()), "nothing changed"
    assert_equal(gradients(model), theirs)


@pytest.mark.parametrize("whole", [False, True])
def test_weights_at_an_odd_address(whole: bool) -> None:
    """As in a buffer of somebody's own format: PyTorch's operators on a CPU take them."""
    model, twin = build("Qwen3"), build("Qwen3")
    hfpatch.apply(model, mode="training")
    for each in (model, twin):
        for p in (each if whole else each.model.layers[1].input_layernorm).parameters():
            memory = bytearray(p.nbytes + 1)
            there = torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=1)
            p.data = there.view(p.shape).copy_(p.detach())
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_norms_of_two_eps_before_apply(which: str) -> None:
    model, twin = build("Qwen3"), build("Qwen3")
    for each in (model, twin):
        getattr(each.model.layers[0].self_attn, which).variance_epsilon = 3.0
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), gradients(twin))


def test_a_change_is_announced_once() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gradients(model)
        gradients(model)
    said = "`LlamaDecoderLayer` got other settings"
    assert len([w for w in seen if said in str(w.message)]) == 1
    model = build()
    hfpatch.apply(model, mode="training")
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(copied)


class _Uneven(nn.Module):
    """RoPE tables whose halves differ."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inv_freq = inner.inv_freq
        self.attention_scaling = 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x, position_ids)
        ramp = torch.linspace(0.5, 1.5, cos.shape[-1])
        return cos * ramp, sin * ramp


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Glm", "Cohere"])
@pytest.mark.parametrize("before", [True, False])
def test_tables_whose_halves_differ(family: str, before: bool) -> None:
    model, twin = build(family), build(family)
    for each in (model, twin):
        if before:
            each.model.rotary_emb = _Uneven(each.model.rotary_emb)
    hfpatch.apply(model, mode="training")
    if not before:
        assert_equal(gradients(model), gradients(twin))
        for each in (model, twin):
            each.model.rotary_emb = _Uneven(each.model.rotary_emb)
    assert_equal(gradients(model), gradients(twin))


def test_a_rotation_of_ones_own_without_frequencies() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = position_ids[..., None] * torch.logspace(0, -2, 8).repeat(2)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    model, twin = build(), build()
    model.model.rotary_emb, twin.model.rotary_emb = Own(), Own()
    report = hfpatch.apply(model, mode="training")
    assert layers_of(report) == 0
    assert any("inv_freq" in s.reason for s in report.skips)
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("name", ["scaling", "dropout", "softcap", "sliding_window"])
def test_an_argument_of_attention_that_a_layer_is_given(name: str) -> None:
    model, twin = build(), build()
    hfpatch.apply(model, mode="training")
    got: list[Any] = []
    for each in (model, twin):
        try:
            each(input_ids=torch.tensor([[3, 4, 5]]), **{name: 0.5})
            got.append(None)
        except Exception as e:
            got.append(type(e))
    assert got[0] == got[1]


@pytest.mark.parametrize("what", ["the layer's input", "its norm's weight"])
@pytest.mark.parametrize("adapted", [False, True])
def test_what_was_written_to_before_the_backward_is_an_error(what: str, adapted: bool) -> None:
    """Also where tensors are made again of it: never another gradient."""
    model = build()
    if adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
        model = peft.get_peft_model(model, config)
    hfpatch.apply(model, mode="training")
    layer = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
    loss = model(input_ids=batch(), labels=batch(), output_hidden_states=True)
    with torch.no_grad():
        if what == "the layer's input":
            loss.hidden_states[0].mul_(0.5)
        else:
            layer.input_layernorm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.loss.backward()


def test_tensors_of_inference_mode() -> None:
    """A mask of packed rows made there, and embeddings that gradients are asked of."""
    model, twin = build(), build()
    hfpatch.apply(model, mode="training")
    positions = torch.cat((torch.arange(6), torch.arange(7)))[None].repeat(2, 1)
    with torch.inference_mode():
        ours, theirs = (m(input_ids=batch(), position_ids=positions).logits for m in (model, twin))
        embeds = model.model.embed_tokens(batch())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    found = []
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
        each(inputs_embeds=embeds, labels=batch()).loss.backward()
        found.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    assert_equal(found[0], found[1])


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("all_behind", [False, True])
def test_a_layer_made_double(family: str, all_behind: bool) -> None:
    """For which there are no kernels: it runs as it is, and the error is PyTorch's where what is
    behind it is not double."""
    model, twin = build(family, tie_word_embeddings=False), build(family, tie_word_embeddings=False)
    hfpatch.apply(model, mode="training")
    found = []
    for each in (model, twin):
        each.model.layers[1 if all_behind else 0].double()
        if all_behind:
            each.model.norm.double()
            each.lm_head.double()
            found.append(gradients(each))
        else:
            with pytest.raises(RuntimeError) as raised:
                gradients(each)
            found.append(str(raised.value))
    if all_behind:
        assert found[0]["model.layers.1.mlp.up_proj.weight"].dtype == torch.float64
        assert_equal(*found)
    else:
        assert found[0] == found[1]
