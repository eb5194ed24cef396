"""Heads whose weight a forward above them takes: the report and `status` say so, a call warns."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layers import batch, build
from torch import Tensor, nn

import hfpatch

TAKES = "takes the head's weight itself"
MAY = "may take the head's weight itself"
Whole = dict[str, Any]


def _loss(lm_head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden[:, :-1], lm_head.weight).float()  # type: ignore[arg-type]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def fused_forward(self: Any, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
    """As Liger's: the head is handed on, and another function reads its weight."""
    hidden = self.model(input_ids=input_ids).last_hidden_state
    return types.SimpleNamespace(loss=_loss(self.lm_head, hidden, labels))


def wrapped(model: Any) -> None:
    """As TRL's: by the name of the forward that it stands for, which it calls for other calls."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def inner(self: Any, *args: Any, fused: bool = False, **kwargs: Any) -> Any:
        if not fused:
            return before(*args, **kwargs)
        hidden = self.base_model(kwargs["input_ids"]).last_hidden_state
        found = self.get_output_embeddings()
        logits = F.linear(hidden[:, :-1], found.weight, found.bias)
        labels = kwargs["labels"][:, 1:]
        return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    model.forward = types.MethodType(inner, model)


def on_instance(model: Any) -> None:
    model.forward = types.MethodType(fused_forward, model)


def said(report: Any) -> list[str]:
    return [n for n in report.notes if "the head's weight" in n]


def loss_of(model: Any, **more: Any) -> Tensor:
    ids = batch()
    loss: Tensor = model(input_ids=ids, labels=ids, **more).loss
    return loss


@pytest.mark.parametrize(
    ("put", "name", "more"),
    [(on_instance, "fused_forward", {}), (wrapped, "inner", {"fused": True})],
    ids=["instance", "wrapper"],
)
@pytest.mark.parametrize("first", [False, True])
def test_whose_forward_takes_the_weight_is_said(
    put: Callable[[Any], None], name: str, more: Whole, first: bool
) -> None:
    truth = build()
    put(truth)
    expected = loss_of(truth, **more)

    model = build()
    if first:
        put(model)
    report = hfpatch.apply(model, mode="training")
    assert bool(said(report)) == first
    if not first:
        put(model)
    (note,) = said(hfpatch.status(model))
    assert note.startswith("`lm_head`: ") and f".{name}`" in note and TAKES in note
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(loss_of(model, **more), expected)
    heard = [str(w.message) for w in seen if "the head's weight" in str(w.message)]
    assert len(heard) == (0 if first else 1)  # the report has said it

    del model.forward
    assert not said(hfpatch.status(model))


def test_a_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(type(model), "forward", fused_forward)
    (note,) = said(hfpatch.plan(model, mode="training"))
    assert f"{__name__}.fused_forward` stands in" in note
    assert said(hfpatch.apply(model, mode="training")) == [note]
    monkeypatch.undo()
    assert not said(hfpatch.status(model))


def test_a_class_that_takes_it_by_its_own_forward() -> None:
    model = build()

    class Fused(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = hidden.to(self.lm_head.weight.dtype) @ self.lm_head.weight.T
            return types.SimpleNamespace(loss=self.loss_function(logits, labels, 99))

    model.__class__ = Fused
    (note,) = said(hfpatch.apply(model, mode="training"))
    assert "the forward of `Fused` takes" in note


def test_a_forward_that_says_nothing_of_the_head_may_take_it() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    model.forward = lambda **kwargs: fused_forward(model, **kwargs)
    (note,) = said(hfpatch.status(model))
    assert TAKES in note
    model.forward = lambda **kwargs: kwargs["how"](model, **kwargs)
    (note,) = said(hfpatch.status(model))
    assert MAY in note and ".<lambda>`" in note


def test_wrappers_that_call_the_models_own_forward_are_not_suspected() -> None:
    from accelerate import Accelerator
    from accelerate.hooks import ModelHook, add_hook_to_module
    from accelerate.state import AcceleratorState

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(*args, **kwargs)

    for order in (0, 1):
        for around in ("accelerate", "hook", "closure"):
            model = build()
            if order:
                hfpatch.apply(model, mode="training")
            if around == "accelerate":
                AcceleratorState._reset_state(True)
                Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
            elif around == "hook":
                add_hook_to_module(model, ModelHook())
            else:
                model.forward = timed(model.forward)
            if not order:
                assert not said(hfpatch.apply(model, mode="training"))
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                loss_of(model).backward()  # type: ignore[no-untyped-call]
            assert not said(hfpatch.status(model)), (order, around)


def test_a_head_that_is_not_swapped_is_not_spoken_of() -> None:
    model = build()
    on_instance(model)
    assert not said(hfpatch.apply(model, mode="training", exclude="lm_head"))
    assert not said(hfpatch.apply(model))
    assert not said(hfpatch.status(model))


def test_a_copy_is_not_warned_of_for_the_original() -> None:
    model = build()
    hfpatch.apply(model, mode="training")
    other = copy.deepcopy(model)
    on_instance(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        loss_of(other)
    assert not said(hfpatch.status(other)) and said(hfpatch.status(model))


def test_restore_leaves_the_forward_above() -> None:
    model = build()
    wrapped(model)
    before = model.__dict__["forward"]
    hfpatch.apply(model, mode="training")
    hfpatch.restore(model)
    assert model.__dict__["forward"] is before
    assert "forward" not in model.lm_head.__dict__
