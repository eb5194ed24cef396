"""Hooks that are put on a model's logits behind its loss: FSDP2's, DeepSpeed's, and yours."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_layers import build
from torch import Tensor, nn

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.losses.logits_hooks import DeferredGradient

Found = tuple[Tensor, dict[str, Tensor], list[Any]]
#: What is done to a model's result, and the list that a hook writes to: the loss.
Case = Callable[[Any, list[Any]], Tensor]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def pair(family: str = "Llama", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    twin = build(family, dtype)
    model = copy.deepcopy(twin)
    report = hfpatch.apply(model, mode="training")
    assert any(s.op == "linear_cross_entropy" for s in report.swaps), report
    return model, twin


def text(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (2, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def outcome(model: Any, case: Case, tokens: int) -> Found:
    model.zero_grad(set_to_none=True)
    heard: list[Any] = []
    loss = case(model(**text(tokens), use_cache=False), heard)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, heard


def assert_near(ours: Any, theirs: Any, most: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=most, atol=most * theirs.abs().max().item())


CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def one_that_looks(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: heard.append(g * 1.0))
    return out.loss  # type: ignore[no-any-return]


@case
def one_that_gives_it_back(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: g)
    return out.loss  # type: ignore[no-any-return]


@case
def one_that_gives_another(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: g * 3.0 + 0.01)
    return out.loss  # type: ignore[no-any-return]


@case
def one_that_writes_to_it(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: heard.append(g.mul_(0.5).shape))
    return out.loss  # type: ignore[no-any-return]


@case
def two_in_turn(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    out.logits.register_hook(lambda g: heard.append(g + 0.0))
    return out.loss  # type: ignore[no-any-return]


@case
def one_that_was_taken_away(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: g * 100.0).remove()
    return out.loss  # type: ignore[no-any-return]


@case
def of_a_scaled_loss(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: heard.append(g.float().norm()))
    return out.loss * 128.0  # type: ignore[no-any-return]


@case
def beside_logits_that_are_read_for_a_metric(out: Any, heard: list[Any]) -> Tensor:
    with torch.no_grad():
        heard.append(out.logits.float().mean())
    out.logits.register_hook(lambda g: None)
    return out.loss  # type: ignore[no-any-return]


@case
def beside_another_use(out: Any, heard: list[Any]) -> Tensor:
    out.logits.register_hook(lambda g: None)
    return out.loss + 1e-3 * out.logits.float().square().mean()  # type: ignore[no-any-return]


#: Fewer tokens than the hidden states are wide, and more: the loss's gradients are made in its
#: backward, or in its forward.
TOKENS = (12, 60)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", CASES)
def test_a_hook_behind_the_loss(name: str, tokens: int) -> None:
    model, twin = pair()
    ours, theirs = (outcome(m, CASES[name], tokens) for m in (model, twin))
    assert_near(ours[0], theirs[0], 1e-5)
    for path, g in theirs[1].items():
        assert_near(ours[1][path], g, 2e-4)
    assert len(ours[2]) == len(theirs[2])
    for a, b in zip(ours[2], theirs[2], strict=True):
        if isinstance(b, Tensor):
            assert_near(a, b, 2e-4)
        else:
            assert a == b


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_logits_that_were_scaled_or_capped(family: str, tokens: int) -> None:
    """The model returns what it made of the head's result; the hook is on that."""
    model, twin = pair(family)
    for name in ("one_that_looks", "one_that_gives_another"):
        ours, theirs = (outcome(m, CASES[name], tokens) for m in (model, twin))
        for path, g in theirs[1].items():
            assert_near(ours[1][path], g, 5e-4)
        for a, b in zip(ours[2], theirs[2], strict=True):
            assert_near(a, b, 5e-4)


@pytest.mark.parametrize("tokens", TOKENS)
def test_bf16_under_autocast(tokens: int) -> None:
    model, twin = pair()
    found = []
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(outcome(m, CASES["one_that_gives_another"], tokens))
    truth = outcome(twin, CASES["one_that_gives_another"], tokens)
    for path, true in truth[1].items():
        own, original = ((f[1][path] - true).norm() for f in found)
        assert own <= 1.3 * original + torch.finfo(torch.bfloat16).eps * true.norm(), path


@pytest.mark.parametrize("tokens", TOKENS)
def test_gradients_of_gradients(tokens: int) -> None:
    found = []
    for m in pair():
        out = m(**text(tokens), use_cache=False)
        out.logits.register_hook(lambda g: g * 2.0)
        weight = m.lm_head.weight
        (g,) = torch.autograd.grad(out.loss, weight, create_graph=True)
        found.append((g.detach(), *torch.autograd.grad(g.square().sum(), weight)))
    for a, b in zip(*found, strict=True):
        assert_near(a, b, 5e-4)


@pytest.mark.parametrize("tokens", TOKENS)
def test_who_does_not_look_has_no_logits_made(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    given: list[Tensor] = []
    made: list[int] = []
    linear = nn.functional.linear

    def seen(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if w is model.lm_head.weight:
            made.append(x.numel())
        return linear(x, w, b)

    out = model(**text(tokens), use_cache=False)
    out.logits.register_hook(given.append)
    monkeypatch.setattr(nn.functional, "linear", seen)
    monkeypatch.setattr(DeferredGradient, "made", lambda self: pytest.fail("it was made"))
    out.loss.backward()
    assert [type(g) for g in given] == [DeferredGradient]
    assert given[0].shape == (2, tokens, 99) and given[0].dtype == torch.float32
    assert not made


def test_the_part_of_a_gradient_is_nobodys() -> None:
    """Where the logits are used elsewhere too, the hook is due a sum that no one place has."""
    model, twin = pair()
    for m in (model, twin):
        out = m(**text(12), use_cache=False)
        out.logits.register_hook(lambda g: g * 2.0)
        loss = out.loss + out.logits.float().square().mean()
        if m is twin:
            loss.backward()
        else:
            with pytest.raises(HfpatchError, match=r"`logits`: a hook .* only a part.*exclude="):
                loss.backward()


def test_one_hook_for_several_tensors_is_an_error() -> None:
    """PyTorch counts which of their nodes a backward comes to: not to that of these logits."""
    model, _ = pair()
    out = model(**text(12), use_cache=False)
    with pytest.raises(HfpatchError, match="`logits`: `register_hook` asks"):
        torch.autograd.graph.register_multi_grad_hook((out.loss, out.logits), lambda grads: None)


def test_a_loss_of_ones_own_of_the_same_logits() -> None:
    for m in pair():
        logits = m(input_ids=text(12)["input_ids"], use_cache=False).logits
        rows = logits.float().view(-1, 99), text(12)["labels"].flatten()
        loss = nn.functional.cross_entropy(*rows) + nn.functional.cross_entropy(*rows)
        seen: list[Any] = []
        logits.register_hook(seen.append)
        loss.backward()  # one that does not look is called for each
        assert seen


def test_nothing_is_kept_alive() -> None:
    model, _ = pair()
    gc.collect()
    gc.disable()
    try:
        out = model(**text(12), use_cache=False)
        held = weakref.ref(out.logits._head.hidden)
        out.logits.register_hook(lambda g: None)
        out.loss.backward()
        del out
        assert held() is None
    finally:
        gc.enable()


def test_without_gradients_the_error_is_pytorchs() -> None:
    messages = []
    for m in pair():
        m.requires_grad_(False)
        out = m(**text(12), use_cache=False)
        with pytest.raises(RuntimeError) as e:
            out.logits.register_hook(lambda g: None)
        messages.append(str(e.value))
    assert messages[0] == messages[1]
