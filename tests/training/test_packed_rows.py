"""Several sequences in a row: each is attended to by itself, without the mask that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from decoding.families import device
from torch import Tensor
from training.test_layers import assert_equal, batch, build, gradients, served

import hfpatch
from hfpatch.training import packed

__all__ = ["served"]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_several_sequences_in_a_row(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask reaches PyTorch's attention, and gradients are those of the sequences apart."""
    more = {} if family == "Llama" else {"sliding_window": 4}
    model = build(family, **more)
    lengths = [(5, 1, 7), (6, 7)][:rows]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    inputs: dict[str, Any] = {"position_ids": positions.to(device()), "use_cache": False}
    inputs["input_ids"] = inputs["labels"] = batch(rows)
    theirs = gradients(model, **inputs)
    hfpatch.apply(model, mode="training")
    masks: list[Any] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spied(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        masks.append(attn_mask)
        return plain(q, k, v, attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    assert_equal(gradients(model, **inputs), theirs)
    assert len(masks) == 2 * sum(map(len, lengths))
    assert all(m is None or m.shape[-1] <= 7 for m in masks)


def test_hooks_on_layers_and_layers_as_they_are_are_given_the_mask() -> None:
    """So it must be made, and hold what the original's holds."""
    model, twin = build(), build()
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None].repeat(2, 1)
    inputs: dict[str, Any] = {"position_ids": positions.to(device()), "use_cache": False}
    hfpatch.apply(model, mode="training")
    found: list[Tensor] = []
    for m in (model, twin):
        for layer in m.model.layers:
            layer.register_forward_pre_hook(
                lambda layer, args, kwargs: found.append(kwargs["attention_mask"]),
                with_kwargs=True,
            )
        m.model.layers[1].mlp.register_forward_hook(lambda *_: None)  # it runs as it is
    assert_equal(gradients(model, **inputs), gradients(twin, **inputs))
    ours, theirs = found[:2], found[2:]
    assert len(theirs) == 2 and tuple(theirs[0].shape) == (2, 1, 13, 13)
    assert all(type(a) is Tensor and torch.equal(a, theirs[0]) for a in (*ours, *theirs))


def test_a_mask_that_says_more_than_the_positions_is_used() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    positions = torch.arange(13).expand(2, -1)
    mask = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13).clone()
    mask[:, :, 9, 3] = False
    inputs = {"position_ids": positions, "attention_mask": mask}
    ours = gradients(model, **inputs)
    hfpatch.restore(model)
    assert_equal(ours, gradients(model, **inputs))


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("wrong", [None, (0, 0, 12, 11), (1, 0, 6, 0), (1, 0, 3, 4)])
def test_a_mask_is_compared_part_by_part(
    wrong: tuple[int, ...] | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong in any row of it is seen, whatever fits into a part."""
    positions = torch.tensor([[*range(5), *range(8)], [*range(2), *range(11)]])
    number = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [1] * 11])
    mask = (number[:, :, None] == number[:, None, :]).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    mask = mask[:, None].clone()
    if wrong is not None:
        mask[wrong] ^= True
    for most in (1, 26, 70, 1 << 20):
        monkeypatch.setattr(packed, "_COMPARED", most)
        found = packed.sequences_of(mask.clone(), positions, window, 2)
        assert (found is None) == (wrong is not None)
        if found is not None:
            assert found.lengths == [5, 8, 2, 11]


@pytest.mark.parametrize("positions", [True, False])
def test_what_a_collator_without_padding_gives(positions: bool, served: dict[str, int]) -> None:
    """`cu_seq_lens_q` and its like go to the attention function: flash attention reads them, and
    PyTorch's does not, so that without positions rows are one sequence in the original too."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    inputs = dict(collate([{"input_ids": [3, 4, 5, 6, 7]}, {"input_ids": [*range(20, 33)]}]))
    if not positions:
        del inputs["position_ids"]
    model = build()
    theirs = gradients(model, **inputs)
    hfpatch.apply(model, mode="training")
    assert_equal(gradients(model, **inputs), theirs)
    assert served == {"front": 2, "back": 2}
