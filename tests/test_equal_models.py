"""Models whose classes say what is equal: what is known of one is not of the other, and `apply` and
`restore` never ask."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from expect import assert_same_dicts, snapshot
from support.recordings import MODELS, ids
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch import swap
from hfpatch.errors import PatchError

TOKENS = ids(1, "cpu", 9)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """There must be something to swap."""


class ByContent(nn.Module):
    """Equal as its tags are, element by element: a tensor, which is neither true nor false."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64))
        self.tag = torch.arange(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def __eq__(self, other: object) -> Any:
        return self.tag == other.tag  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return 1


class AllEqual(ByContent):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = ByContent.__hash__


class Refusing(LlamaForCausalLM):  # type: ignore[misc]
    """Says that it is not to be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    def __hash__(self) -> int:
        return 1


class RefusingNorm(LlamaRMSNorm):  # type: ignore[misc]
    __eq__ = Refusing.__eq__

    # PyTorch keeps modules in sets: those that are one, or lie apart, are not compared there
    def __hash__(self) -> int:
        return id(self)


def of_class(cls: Any = Refusing, **more: Any) -> Any:
    config = LlamaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return cls(config).eval().requires_grad_(False)


def test_restore_and_a_second_model() -> None:
    first, second = ByContent(), ByContent()
    dicts = snapshot(first), snapshot(second)
    for model in (first, second):
        assert len(hfpatch.apply(model).swaps) == 1
        assert len(hfpatch.apply(model).swaps) == 1
        assert len(hfpatch.status(model).swaps) == 1
    for model, before in zip((first, second), dicts, strict=True):
        with hfpatch.applied(model, exclude="LayerNorm"):
            assert not hfpatch.status(model).swaps
        assert hfpatch.restore(model) == 1
        assert hfpatch.restore(model) == 0
        assert_same_dicts(before, model)


def test_what_is_known_of_one_is_not_of_the_other() -> None:
    first, second = AllEqual(), AllEqual()
    hfpatch.apply(first, exclude="LayerNorm")
    assert hfpatch.status(first).skips and not hfpatch.status(second).skips
    hfpatch.apply(second)
    assert hfpatch.status(first).skips
    hfpatch.restore(second)
    assert hfpatch.status(first).skips, "the other one was forgotten"


def test_a_later_model_in_the_same_memory_is_another() -> None:
    held: set[int] = set()
    reused = 0
    for _ in range(200):
        model = AllEqual()
        reused += id(model) in held
        held.add(id(model))
        assert not hfpatch.status(model).skips
        hfpatch.apply(model, exclude="LayerNorm")
        assert hfpatch.status(model).skips
        del model
        gc.collect()
    assert reused, "none came to lie where one was before: this tests nothing"


def test_captured_blocks_and_texts() -> None:
    """Steps of a class that is not the library's are left to their parts."""
    first, second, plain = of_class(), of_class(), of_class(LlamaForCausalLM)
    with torch.no_grad():
        for model in (first, second):
            hfpatch.apply(model, blocks=True)
            wanted = plain.generate(TOKENS, max_new_tokens=6, do_sample=False)
            assert torch.equal(model.generate(TOKENS, max_new_tokens=6, do_sample=False), wanted)
            logits = [model(TOKENS).logits for _ in range(2)]
            torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-4)
            assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
        copied = copy.deepcopy(first)
        assert torch.equal(copied.generate(TOKENS, max_new_tokens=6, do_sample=False), wanted)
        for model in (first, second, copied):
            assert hfpatch.restore(model)
            assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_times_are_of_one_model() -> None:
    first, second = of_class(), of_class()
    for model in (first, second):
        hfpatch.apply(model, gain="time", decoding=False)
    with torch.no_grad():
        for _ in range(3):
            first(TOKENS)
    assert hfpatch.status(first).plan.times and not hfpatch.status(second).plan.times
    hfpatch.restore(second)
    assert hfpatch.status(first).plan.times
    hfpatch.restore(first)
    assert not hfpatch.status(first).plan.times


def test_training() -> None:
    model, plain = of_class(), of_class(LlamaForCausalLM)
    hfpatch.apply(model.requires_grad_(True), mode="training")
    losses = [m(TOKENS, labels=TOKENS).loss for m in (model, plain.requires_grad_(True))]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    assert hfpatch.restore(model)


def test_parts_that_refuse_to_be_compared() -> None:
    model = MODELS["mistral"]().eval().requires_grad_(False)
    for path, norm in list(model.named_modules()):
        if path.endswith("norm"):
            norm.__class__ = RefusingNorm
    before = snapshot(model)
    for arguments in ({}, {"blocks": True}, {"mode": "training"}, {"gain": "time"}):
        hfpatch.apply(model, **arguments)
        with torch.no_grad():
            for _ in range(2):
                model(TOKENS)
        hfpatch.status(model)
        hfpatch.restore(model)
        assert_same_dicts(before, model)


# What an apply leaves, and when it goes ---------------------------------------------------------


class Counting(ByContent):
    """Raises when its modules are asked for the n-th time."""

    left = 10**9

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        type(self).left -= 1
        if type(self).left == 0:
            raise RuntimeError("not now")
        return super().named_modules(*args, **kwargs)


@pytest.fixture
def counting() -> Any:
    yield Counting()
    Counting.left = 10**9


@pytest.mark.parametrize("patched", [False, True], ids=["fresh", "patched"])
def test_apply_fails_wherever_it_walks_the_model(counting: Counting, patched: bool) -> None:
    """Also behind the swaps: then they are taken back, and what was known is known again."""
    hfpatch.apply(counting)  # proofs are made by now
    hfpatch.restore(counting)
    if patched:
        hfpatch.apply(counting, exclude="net.0")
    before, said = snapshot(counting), hfpatch.status(counting).plan
    walks = 0
    while True:
        walks += 1
        Counting.left = walks
        failed = ""
        try:
            hfpatch.apply(counting)
        except (RuntimeError, PatchError) as e:
            failed = str(e)
        Counting.left = 10**9
        if not failed:
            break
        assert "not now" in failed
        assert_same_dicts(before, counting)
        now = hfpatch.status(counting).plan
        assert (now.swaps, now.skips, now.notes) == (said.swaps, said.skips, said.notes)
    assert walks > 3
    assert len(hfpatch.status(counting).swaps) == 1


def test_nothing_is_said_of_decoding_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_class(LlamaForCausalLM)
    real = swap.Slot.set

    def broken(slot: swap.Slot, value: Any) -> None:
        if slot.owner is model.model.norm:
            raise RuntimeError("swap")
        real(slot, value)

    monkeypatch.setattr(swap.Slot, "set", broken)
    with pytest.raises(PatchError, match="swap"):
        hfpatch.apply(model)
    assert not hfpatch.status(model).notes


def test_restore_that_fails_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the model is patched still: by whom, and with what, is known until it is not."""
    model = of_class(LlamaForCausalLM)
    hfpatch.apply(model, exclude="LlamaMLP", decoding=False)
    skips = hfpatch.status(model).skips
    real = swap.Slot.clear

    def stuck(slot: swap.Slot) -> None:
        if slot.owner is model.model.norm:
            raise OSError("stuck")
        real(slot)

    monkeypatch.setattr(swap.Slot, "clear", stuck)
    with pytest.raises(PatchError, match=r"call `hfpatch\.restore` again"):
        hfpatch.restore(model)
    assert hfpatch.status(model).skips == skips and len(hfpatch.status(model).swaps) == 1
    monkeypatch.setattr(swap.Slot, "clear", real)
    with hfpatch.applied(model, exclude="*"):
        pass
    assert hfpatch.status(model).skips == skips  # as it was asked for, the whole of it
    hfpatch.restore(model)
    assert not hfpatch.status(model).skips and not hfpatch.status(model).swaps
