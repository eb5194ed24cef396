"""Decoder layers whose weights are of other sizes than their configuration says, as pruning leaves
them: they train as their unpatched twins do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training.test_layers import assert_equal, batch, build, gradients, layers_of, lora

import hfpatch


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cut(linear: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Leave the first rows and columns of a weight."""
    linear.weight = nn.Parameter(linear.weight.detach()[:rows, :columns].clone())
    linear.out_features, linear.in_features = linear.weight.shape
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[:rows].clone())


def heads(layer: Any) -> None:
    """Half of its heads are gone, of queries as of keys."""
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(attention, name)
        _cut(linear, len(linear.weight) // 2)
    _cut(attention.o_proj, columns=attention.q_proj.out_features)


def key_heads(layer: Any) -> None:
    attention = layer.self_attn
    for name in ("k_proj", "v_proj"):
        linear = getattr(attention, name)
        _cut(linear, len(linear.weight) // 2)
    attention.num_key_value_groups *= 2


def width(layer: Any) -> None:
    """Of its MLP."""
    for name in ("gate_proj", "up_proj"):
        _cut(getattr(layer.mlp, name), 40)
    _cut(layer.mlp.down_proj, columns=40)


def one_gate(layer: Any) -> None:
    """Its MLP's gate is one number a token."""
    _cut(layer.mlp.gate_proj, 1)


def one_bias(layer: Any) -> None:
    """Its products add one number to all that they give."""
    for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
        linear.bias = nn.Parameter(torch.tensor([0.3]))


def one_weight(layer: Any) -> None:
    """Its norms have one weight for all of a row."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight = nn.Parameter(torch.tensor([0.7]))


CHANGES = (heads, key_heads, width, one_gate, one_bias, one_weight)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen2"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_pruned_layer(change: Callable[[Any], None], family: str, before: bool) -> None:
    model, twin = build(family), build(family)
    for m in (model, twin) if before else (twin,):
        change(m.model.layers[1])
    assert layers_of(hfpatch.apply(model, mode="training")) == 2
    if not before:
        gradients(model)
        change(model.model.layers[1])
    assert_equal(gradients(model), gradients(twin))
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), gradients(twin))


def test_pruned_heads_with_adapters() -> None:
    model, twin = build("Llama"), build("Llama")
    for m in (model, twin):
        heads(m.model.layers[0])
    model, twin = lora(model), lora(twin)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_that_give_one_number(dtype: torch.dtype) -> None:
    """PyTorch adds an adapter's part of one column to all of the product's."""
    twin = lora(build(dtype=dtype))
    model = copy.deepcopy(twin)
    assert layers_of(hfpatch.apply(model, mode="training")) == 2
    for m in (model, twin):
        layer: Any = m.get_base_model().model.layers[1]
        for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj):
            side = linear.lora_B["default"]
            side.weight = nn.Parameter(side.weight.detach()[:1].clone())
    half = dtype == torch.bfloat16
    assert_equal(gradients(model), gradients(twin), 3e-2 if half else 2e-5)


@pytest.mark.parametrize("family", ["SmolLM3", "Cohere2"])
def test_heads_of_another_size_where_nothing_turns_them(family: str) -> None:
    """Without RoPE nothing else says how a row is cut into heads."""
    more = {"no_rope_layers": [1, 0]} if family == "SmolLM3" else {}
    more |= {"layer_types": ["full_attention"] * 2} if family == "Cohere2" else {}
    model, twin = build(family, **more), build(family, **more)
    for m in (model, twin):
        m.model.layers[1].self_attn.head_dim //= 2
    report = hfpatch.apply(model, mode="training")
    assert "model.layers.1" not in {s.path for s in report.swaps}
    assert any("`model.layers.1.self_attn`" in s.reason for s in report.skips)
    assert_equal(gradients(model), gradients(twin))
    assert model(input_ids=batch()).logits.allclose(twin(input_ids=batch()).logits, atol=1e-4)
