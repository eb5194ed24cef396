"""Layers and tables of captured blocks that change while text, timestep and step stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from expect import relative_error
from torch import Tensor, nn

import hfpatch
from hfpatch import packing

ENTRY = zoo.ENTRIES["ltx"]


@pytest.fixture
def packed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing is for GPUs; here the CPU's tensors count as such."""

    def can_pack(linears: Any) -> bool:
        plain = all(type(m) is nn.Linear and not packing.is_hooked(m) for m in linears)
        storages = {m.weight.untyped_storage().data_ptr() for m in linears if plain}
        return plain and len(storages) == len(linears)

    monkeypatch.setattr(packing, "can_pack", can_pack)


def build() -> tuple[Any, dict[str, Any], Tensor]:
    model = ENTRY.build(torch.float32)
    inputs = ENTRY.inputs(model, torch.float32)
    return model, inputs, ENTRY.run(model, inputs)


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.transformer_blocks[1].attn2.to_v.weight.mul_(3)
        model.transformer_blocks[0].attn2.to_k.bias.add_(1)


def exchange(model: Any) -> None:
    attn = model.transformer_blocks[1].attn2
    attn.to_k.weight = nn.Parameter(attn.to_k.weight.detach() * -2)


def wrap(model: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.weight, self.bias = base.weight, base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) * 2

    attn = model.transformer_blocks[0].attn2
    attn.to_v = Scaled(attn.to_v)


def hook(model: Any) -> None:
    model.transformer_blocks[1].attn2.to_v.register_forward_hook(lambda m, a, y: y * 2)


CHANGES = pytest.mark.parametrize(
    "change", [write_in_place, exchange, wrap, hook], ids=lambda f: f.__name__
)


@CHANGES
@pytest.mark.usefixtures("packed_on_cpu", "kernels_module")
def test_changed_text_layers_are_noticed(change: Any) -> None:
    model, inputs, before = build()
    twin, _, _ = build()
    hfpatch.apply(model)
    for _ in range(2):
        ENTRY.run(model, inputs)
    change(model)
    change(twin)
    expected = ENTRY.run(twin, inputs)
    assert relative_error(expected, before) > 1e-3
    assert relative_error(ENTRY.run(model, inputs), expected) < 1e-5


def given_to_a_block(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model calls its second block with."""
    calls: list[dict[str, Any]] = []
    handle = model.transformer_blocks[1].register_forward_pre_hook(
        lambda m, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    ENTRY.run(model, inputs)
    handle.remove()
    return calls[0]


@CHANGES
@pytest.mark.usefixtures("packed_on_cpu", "kernels_module")
def test_a_block_called_with_the_same_text_after_a_change(change: Any) -> None:
    """Values of a step are kept by what they are made of; here that is the same objects."""
    model, inputs, _ = build()
    given = given_to_a_block(model, inputs)
    hfpatch.apply(model)
    block = model.transformer_blocks[1]
    with torch.no_grad():
        block(**given)  # decides
        first = block(**given)
        change(model)
        again = block(**given)
        expected = type(block).forward(block, **given)
    assert relative_error(again, expected) < 1e-5
    if change is not wrap:  # it changes the other block
        assert relative_error(again, first) > 1e-3


def add_to_table(block: Any) -> None:
    with torch.no_grad():
        block.scale_shift_table.add_(1.0)


def load_tables(block: Any) -> None:
    block.load_state_dict({k: v + 0.3 for k, v in block.state_dict().items()})


def another_table(block: Any) -> None:
    block.scale_shift_table = nn.Parameter(block.scale_shift_table.detach() - 0.5)


@pytest.mark.parametrize(
    "change", [add_to_table, load_tables, another_table], ids=lambda f: f.__name__
)
@pytest.mark.usefixtures("kernels_module")
def test_a_changed_table_between_calls_with_the_same_timestep(change: Any) -> None:
    """A table is the block's own: nothing that is kept by the timestep alone may be made of it."""
    model, inputs, _ = build()
    given = given_to_a_block(model, inputs)
    hfpatch.apply(model)
    for block in list(model.transformer_blocks)[:2]:
        with torch.no_grad():
            block(**given)  # decides
            first = block(**given)
            change(block)
            again = block(**given)
            expected = type(block).forward(block, **given)
        assert relative_error(first, expected) > 1e-3
        assert relative_error(again, expected) < 1e-5
