"""What is done to a model behind `apply`, which decoding steps see at the next sequence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding.families import make
from transformers import DynamicCache, LlamaForCausalLM

import hfpatch

IDS = torch.arange(1, 13)[None]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def steps(model: Any) -> torch.Tensor:
    """Logits of a prompt and of one step after the other."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = [model(IDS[:, :4], past_key_values=cache).logits[:, -1]]
        for i in range(4, IDS.shape[1]):
            found.append(model(IDS[:, i : i + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(found)


def _layer(model: Any) -> Any:
    return model.model.layers[0]


def transposed_data(model: Any) -> None:
    weight = _layer(model).self_attn.q_proj.weight
    weight.data = weight.data.T


def transposed_in_place(model: Any) -> None:
    with torch.no_grad():
        _layer(model).self_attn.q_proj.weight.t_()


def narrower_mlp(model: Any) -> None:
    mlp = _layer(model).mlp
    for name in ("gate_proj", "up_proj"):
        mlp.get_parameter(f"{name}.weight").data = mlp.get_parameter(f"{name}.weight").data[:80]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :80]


def expanded_norm(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data = weight.data[:1].expand(128)


def negated_norm(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data = torch._neg_view(weight.data)


def negated_norm_by_a_new_weight(model: Any) -> None:
    norm = _layer(model).input_layernorm
    norm.weight = torch.nn.Parameter(torch._neg_view(norm.weight.data))


def negated_projection(model: Any) -> None:
    weight = _layer(model).mlp.up_proj.weight
    weight.data = torch._neg_view(weight.data)


def _doubles(forward: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    return doubled


def another_class(model: Any) -> None:
    model.__class__ = type("Doubled", (type(model),), {"forward": _doubles(type(model).forward)})


def _own_call(part: Callable[[Any], Any]) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        module = part(model)
        own = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            return result * 2 if isinstance(result, torch.Tensor) else result

        module._compiled_call_impl = call

    return put


def hidden_head(model: Any) -> None:
    head = model.lm_head
    model.__dict__["lm_head"] = lambda x: head(x) * 3


def other_weights(model: Any) -> None:
    norm = _layer(model).input_layernorm
    norm.__dict__["_parameters"] = {"weight": torch.nn.Parameter(norm.weight.detach() * 2)}


def other_children(model: Any) -> None:
    layers = list(model.model.layers)
    model.model.layers.__dict__["_modules"] = {"0": layers[1], "1": layers[0]}


def other_hooks(model: Any) -> None:
    hooks = {1: lambda module, args, output: output * 2}
    _layer(model).mlp.__dict__["_forward_hooks"] = hooks


def turned_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


def larger_epsilon(model: Any) -> None:
    _layer(model).input_layernorm.variance_epsilon = 10.0


CHANGES: dict[str, Callable[[Any], None]] = {
    "a weight's data is its transpose": transposed_data,
    "a weight is transposed in place": transposed_in_place,
    "an MLP is made narrower": narrower_mlp,
    "a norm's weight is one number": expanded_norm,
    "a norm's weight is read with another sign": negated_norm,
    "a norm's new weight is read with another sign": negated_norm_by_a_new_weight,
    "a projection's weight is read with another sign": negated_projection,
    "the model is of another class": another_class,
    "an MLP is called otherwise": _own_call(lambda m: _layer(m).mlp),
    "an activation is called otherwise": _own_call(lambda m: _layer(m).mlp.act_fn),
    "a projection is called otherwise": _own_call(lambda m: _layer(m).mlp.gate_proj),
    "a norm is called otherwise": _own_call(lambda m: m.model.norm),
    "an attribute hides the head": hidden_head,
    "a norm's weight is in another dict": other_weights,
    "the layers are in another dict": other_children,
    "hooks are in another dict": other_hooks,
    "a buffer was written to": turned_otherwise,
    "a norm's epsilon is another": larger_epsilon,
}
WAYS: dict[str, dict[str, Any]] = {"steps": {}, "blocks": {"decoding": False, "blocks": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_sequences(change: str, way: str) -> None:
    model = make("llama", num_key_value_heads=4, mlp_bias=False)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, **WAYS[way])
        before = steps(model)
        torch.testing.assert_close(before, steps(twin), rtol=1e-4, atol=1e-4)
        for m in (model, twin):
            CHANGES[change](m)
        expected = steps(twin)
        assert (expected - before).abs().max() > 0.05, "it changes nothing"
        for _ in range(2):
            torch.testing.assert_close(steps(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_another_forward(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", num_key_value_heads=4, mlp_bias=False)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, **WAYS[way])
        steps(model)
        monkeypatch.setattr(LlamaForCausalLM, "forward", _doubles(LlamaForCausalLM.forward))
        torch.testing.assert_close(steps(model), steps(twin), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            ours, theirs = (m(IDS).logits for m in (model, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parts_that_were_compiled_before() -> None:
    """Decoding leaves a model to its parts whose layers somebody had compiled."""
    model = make("llama", num_key_value_heads=4, mlp_bias=False)
    twin = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    report = hfpatch.apply(model)
    assert not any(s.op == "decoding" for s in report.swaps)
    assert any("Module.compile" in s.reason for s in report.skips), report
    torch.testing.assert_close(steps(model), steps(twin), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_the_model_itself_compiled() -> None:
    """That runs the forward, and with it the steps."""
    model = make("llama", num_key_value_heads=4, mlp_bias=False)
    model.compile(backend="eager")
    assert any(s.op == "decoding" for s in hfpatch.apply(model).swaps)
    torch._dynamo.reset()


CALLED: list[str] = []


class Listing(LlamaForCausalLM):
    """Its code notes its calls in a list of its file's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLED.append("forward")
        return super().forward(*args, **kwargs)


class Counting(LlamaForCausalLM):
    built = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).built += 1


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_model_that_writes_elsewhere(mode: str) -> None:
    """No small model of its class is built and run."""
    config = make("llama", num_key_value_heads=4, mlp_bias=False).config
    listing, counting = Listing(config).eval(), Counting(config).eval()
    CALLED.clear()
    before = Counting.built
    for model, name in ((listing, "CALLED"), (counting, "built")):
        report = hfpatch.apply(model, mode=mode)
        assert not any(s.op in ("decoding", "decoder layer") for s in report.swaps)
        assert any(f"names `{name}`" in s.reason for s in report.skips), report
    assert not CALLED and Counting.built == before
