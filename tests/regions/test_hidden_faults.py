"""A wrong rewrite is found at the proof also where the numbers of a fresh model hide it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from regions.families import build
from torch import nn
from torch.fx import Graph
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

import hfpatch
from hfpatch.leaves.tables import hold_twice, rows_are_open
from hfpatch.regions import rules
from hfpatch.regions.disturbed import Disturbed
from hfpatch.regions.nodes import Attend, Fused
from hfpatch.regions.offer import forget

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    """The compiled kernels must be there; what was captured with a planted fault goes."""
    forget()
    yield
    forget()


def closed_gates() -> tuple[Any, dict[str, Any]]:
    """Branches that LayerScale multiplies by 0."""
    config = Dinov2Config(**SIZES, image_size=28, patch_size=14, layerscale_value=0.0)
    return Dinov2Model(config), {"pixel_values": torch.randn(2, 3, 28, 28)}


def small_gates() -> tuple[Any, dict[str, Any]]:
    config = Dinov2Config(**SIZES, image_size=28, patch_size=14, layerscale_value=1e-6)
    return Dinov2Model(config), {"pixel_values": torch.randn(2, 3, 28, 28)}


def no_output() -> tuple[Any, dict[str, Any]]:
    """Branches whose last layer gives 0."""
    model, inputs = closed_gates()
    for name, p in model.named_parameters():
        if "lambda" in name:
            nn.init.ones_(p)
        if "output.dense" in name or "fc2" in name:
            nn.init.zeros_(p)
    return model, inputs


def fresh_biases() -> tuple[Any, dict[str, Any]]:
    """Biases of 0, and a mask of 0."""
    model = BertModel(BertConfig(**SIZES, intermediate_size=96, vocab_size=99))
    return model, {"input_ids": torch.arange(9)[None], "attention_mask": torch.zeros(1, 1, 9, 9)}


def another_eps(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.target, Fused) and "eps" in node.target.formula.params:
            params = {**node.target.formula.params, "eps": 1e-3}
            node.target = Fused(node.target.op, params)
    return iter(())


def no_bias(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.target, Fused) and node.target.op.endswith("layer_norm"):
            node.args = (*node.args[:-1], None)
    return iter(())


def no_mask(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.target, Attend):
            node.args = (*node.args[:3], None)
    return iter(())


def states(model: nn.Module) -> set[tuple[str, str]]:
    return {(c.state, c.reason) for c in hfpatch.status(model).plan.candidates}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (closed_gates, another_eps),
        (small_gates, another_eps),
        (no_output, another_eps),
        (fresh_biases, no_bias),
        (fresh_biases, no_mask),
    ],
)
def test_a_fault_that_the_numbers_hide(
    make: Callable[[], Any],
    fault: rules.Row,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = make()
    model = model.eval().to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        hfpatch.apply(model, blocks=True)
        model(**inputs)
        assert {s for s, _ in states(model)} == {"fused"}
        hfpatch.restore(model)
        forget()
        monkeypatch.setattr(rules, "ROWS", (*rules.ROWS, fault))
        hfpatch.apply(model, blocks=True)
        model(**inputs)
    ((state, why),) = states(model)
    assert state == "left"
    assert why.startswith("with other numbers in its parameters and inputs")


def test_the_other_numbers() -> None:
    layer = nn.Linear(64, 80)
    nn.init.zeros_(layer.weight[3])
    nn.init.zeros_(layer.bias)
    norm = nn.BatchNorm1d(8)
    with torch.no_grad():
        before = [copy.deepcopy(m.state_dict()) for m in (layer, norm)]
        disturbed = Disturbed(torch.device("cpu"))
        other = disturbed.block(nn.Sequential(layer, layer, norm))
        assert other[0].weight is other[1].weight is not layer.weight
        assert torch.equal(other[0].weight[4:], layer.weight[4:])
        assert other[0].weight[3].ne(0).all()
        assert other[0].bias.ne(0).all()
        assert other[2].running_var.gt(0).all()
        table, mask = torch.zeros(1, 5, 16), torch.zeros(2, 1, 7, 7)
        seen, drawn = torch.ones(2, 7, dtype=torch.bool), torch.randn(3, 4)
        t, m, s, d = disturbed.inputs([table, mask, seen, drawn])
        assert d is drawn
        assert t.ne(0).any(-1).all()
        assert hold_twice([t], True) and hold_twice([t], False)
        assert m.ne(0).any() and rows_are_open([m])
        assert s.any(-1).all() and not s.all()
    for module, held in zip((layer, norm), before, strict=True):
        assert all(torch.equal(t, held[n]) for n, t in module.state_dict().items())


def test_somebodys_wrapper_keeps_its_numbers() -> None:
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.bias)
    layer.forward = lambda x, own=layer.forward: own(x)  # type: ignore[method-assign]
    other = Disturbed(torch.device("cpu")).block(nn.Sequential(layer, nn.Linear(4, 4)))
    assert other[0] is layer


def test_other_numbers_are_a_patched_norms_as_well() -> None:
    """Its call past `Module._call_impl` is bound to the model's own, with the model's numbers."""
    model, _ = build("llama")
    hfpatch.apply(model, blocks=False)
    norm = model.layers[0].input_layernorm
    x = torch.randn(3, norm.weight.shape[0])
    other = Disturbed(torch.device("cpu")).block(model.layers[0]).input_layernorm
    assert not torch.equal(other.weight, norm.weight)
    with torch.no_grad():
        expected = type(norm).forward(other, x)
        torch.testing.assert_close(other(x), expected)
        assert not torch.allclose(norm(x), expected)
