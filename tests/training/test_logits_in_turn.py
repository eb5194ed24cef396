"""Logits at a class of each row and their `logsumexp`, of some sequences after others."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nearness import assert_as_near, draw
from test_layers import lora
from test_log_softmax_losses import CLASSES, at, batch, built, patched, pieces, step, whole
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.losses.deferred_logits import DeferredLogits

__all__ = ["pieces"]


def selective(logits: Tensor, ids: Tensor) -> Tensor:
    """As `selective_log_softmax` of TRL 1.16 on a CPU."""
    index = ids.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=index)
        sums = torch.stack([torch.logsumexp(one, dim=-1) for one in logits])
        return (chosen - sums.unsqueeze(-1)).squeeze(-1)
    found = []
    for one, labels in zip(logits, index, strict=True):
        found.append(F.log_softmax(one, dim=-1).gather(dim=-1, index=labels))
    return torch.stack(found).squeeze(-1)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return selective(logits, ids[:, 1:]).float().square().mean() + logits.detach().mean()


@pytest.mark.parametrize("kind", ["llama", "tied", "bert", "gemma2"])
def test_the_head_is_multiplied_once_each_way(kind: str, pieces: list[int]) -> None:
    """For the values of all sequences together; only under a cap its mean is made of logits."""
    model, twin = patched(built(kind)), built(kind)
    ids, _ = batch()
    theirs = step(twin, loss_of(twin, ids))
    pieces.clear()
    ours = step(model, loss_of(model, ids))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 3e-5 * b.abs().max()
    assert sum(pieces) == (3 if kind == "gemma2" else 2) * 24 * CLASSES
    assert max(pieces) < 24 * CLASSES and not whole(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_half_types_are_as_near(kind: str, autocast: bool, dtype: torch.dtype) -> None:
    losses, gradients = [], []
    for seed in range(10):
        wide = built(kind, seed).double()
        twin = copy.deepcopy(wide).to(torch.float32 if autocast else dtype)
        model = patched(copy.deepcopy(twin))
        ids, _ = batch(seed)
        found = []
        for m in (model, twin, wide):
            with torch.autocast("cpu", dtype, enabled=autocast and m is not wide):
                logits = m(input_ids=ids).logits
                loss = selective(logits, ids).float().square().mean()
                average = logits.detach().mean()
            assert average.dtype == logits.dtype
            found.append(step(m, loss))
        assert found[0][0].dtype == found[1][0].dtype
        losses.append(draw(*(f[0] for f in found)))
        gradients.append(draw(*(f[1] for f in found)))
        assert not whole(model)
    assert_as_near(losses, dtype, "loss", like=8)
    assert_as_near(gradients, dtype, "gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cap", [False, True])
def test_means_are_pytorchs(dtype: torch.dtype, cap: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 40, 32).to(dtype), torch.randn(CLASSES, 32).to(dtype)
    bias = torch.randn(CLASSES).to(dtype).requires_grad_()
    y = DeferredLogits.of(hidden, weight, bias)
    deferred = y[1:, :-1].float()
    deferred = torch.tanh(deferred / 3) * 3 if cap else deferred
    made = F.linear(hidden, weight, bias)[1:, :-1].float()
    made = torch.tanh(made / 3) * 3 if cap else made
    found = deferred.detach().mean()
    assert type(found) is Tensor and not found.requires_grad and deferred._made is None
    torch.testing.assert_close(found, made.detach().mean(), rtol=1e-3, atol=2e-4)


def test_detached_logits_that_are_kept_are_made() -> None:
    """They may be read, or written to, behind an optimizer's step."""
    model, twin = patched(built()), built()
    ids, _ = batch()
    kept = []
    for m in (model, twin):
        logits = m(input_ids=ids).logits
        kept.append(logits.detach())
        at(logits.log_softmax(-1), ids).mean().backward()
        with torch.no_grad():
            m.lm_head.weight.mul_(2.0)
    assert type(kept[0]) is Tensor
    torch.testing.assert_close(*kept)


@pytest.mark.parametrize("where", ["batch", "sequence", "log-probabilities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_behind_the_loss(where: str, dtype: torch.dtype) -> None:
    """On all of them they are given the gradient; on one's turn none is made of its own."""
    found = []
    for m in (patched(built().to(dtype)), built().to(dtype)):
        ids, _ = batch()
        logits = m(input_ids=ids).logits
        turns = logits.unbind(0)
        values = [F.log_softmax(y, -1) for y in turns]
        chosen = [v.gather(-1, t[:, None]) for v, t in zip(values, ids, strict=True)]
        heard: list[Tensor] = []
        hooked = {"batch": logits, "sequence": turns[0], "log-probabilities": values[0]}[where]
        if type(hooked) is DeferredLogits and where != "batch":
            with pytest.raises(HfpatchError, match="asks for their gradient"):
                hooked.register_hook(heard.append)
            return
        hooked.register_hook(lambda g, heard=heard: heard.append(g * 1.0))
        found.append([*step(m, torch.stack(chosen).float().mean()), *heard])
    for ours, theirs in zip(*found, strict=True):
        near = 1e-4 if dtype == torch.float32 else 5e-2
        assert (ours - theirs).float().norm() <= near * theirs.float().norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_around_it(reentrant: bool, dtype: torch.dtype) -> None:
    found = []
    for m in (patched(built().to(dtype)), built().to(dtype)):
        ids, _ = batch()
        logits = m(input_ids=ids).logits
        y: Any = checkpoint(lambda y: selective(y, ids), logits, use_reentrant=reentrant)  # noqa: B023
        found.append(step(m, y.float().square().mean()))
    for ours, theirs in zip(*found, strict=True):
        near = 1e-4 if dtype == torch.float32 else 5e-2
        assert (ours - theirs).float().norm() <= near * theirs.float().norm()


def test_an_adapter_on_the_head(pieces: list[int]) -> None:
    pytest.importorskip("peft")
    found = []
    for is_patched in (True, False):
        model: Any = lora(built(), target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        if is_patched:
            hfpatch.apply(model, mode="training")
        pieces.clear()
        found.append(step(model, loss_of(model, batch()[0])))
        if is_patched:
            assert not whole(model) and max(pieces) < 24 * CLASSES
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 3e-5 * theirs.abs().max()


@pytest.mark.parametrize("wrong", [-1, -100, CLASSES])
def test_a_class_that_is_none_is_the_same_error(wrong: int) -> None:
    model = built()
    ids, _ = batch()
    target = ids.clone()
    target[1, 2] = wrong
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            at(model(input_ids=ids).logits, target)
        patched(model)


@pytest.mark.parametrize("wrong", [-1, -100, CLASSES, 3 * CLASSES + 2])
def test_a_class_along_a_dimension_is_counted_as_pytorch_counts(wrong: int) -> None:
    found = []
    for m in (patched(built()), built()):
        ids, _ = batch()
        target = ids.clone()
        target[1, 2] = wrong
        values = torch.take_along_dim(m(input_ids=ids).logits.log_softmax(-1), target[..., None], 2)
        found.append(step(m, values.square().mean()))
        assert not whole(m)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_results_may_be_written_to_and_detached() -> None:
    found = []
    for m in (patched(built()), built()):
        ids, _ = batch()
        logits = m(input_ids=ids).logits
        chosen = logits.gather(-1, ids[..., None])
        chosen.mul_(2.0).masked_fill_(ids[..., None] > 50, 0.0)
        sums, again = logits.logsumexp(-1), logits.logsumexp(-1)
        assert not logits.logsumexp(-1).detach_().requires_grad
        assert not logits.gather(-1, ids[..., None]).detach_().requires_grad
        found.append(step(m, chosen.mean() + sums.mean() + again.square().mean()))
        logits = m(input_ids=ids).logits
        with torch.no_grad():
            logits.logsumexp(-1).zero_()
            assert torch.equal(logits.logsumexp(-1), again)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_gradients_between() -> None:
    found = []
    for m in (patched(built()), built()):
        ids, _ = batch()
        logits = m(input_ids=ids).logits
        with torch.no_grad():
            metric = selective(logits, ids)
            average = logits.mean()
        assert not metric.requires_grad
        logits.retain_grad()  # nothing that has a gradient was made of them yet
        loss = selective(m(input_ids=ids).logits, ids).mean()
        found.append([metric, average, *step(m, loss)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_batch_of_gradients() -> None:
    factors, found = torch.tensor([1.0, -2.0, 0.5]), []
    for m in (patched(built()), built()):
        ids, _ = batch()
        hidden = m.model(input_ids=ids).last_hidden_state.detach().requires_grad_()
        loss = selective(m.lm_head(hidden), ids).square().mean()
        leaves = [hidden, m.lm_head.weight]
        found.append(torch.autograd.grad(loss, leaves, factors, is_grads_batched=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_weights_must_not_have_changed() -> None:
    model = patched(built())
    ids, _ = batch()
    logits = model(input_ids=ids).logits
    logits.gather(-1, ids[..., None])
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    for read in (lambda: logits.logsumexp(-1), lambda: logits.detach().mean()):
        with pytest.raises(HfpatchError, match="read them before the weights change"):
            read()


def test_nothing_is_kept_alive() -> None:
    model = patched(built())
    ids, _ = batch()
    gc.collect()
    gc.disable()
    try:
        output = model(input_ids=ids)
        logits = weakref.ref(output.logits)
        assert type(output.logits) is DeferredLogits
        loss = selective(output.logits, ids).mean()
        loss.backward()
        del loss, output
        assert logits() is None
    finally:
        gc.enable()
