"""Losses that take `log_softmax` of a model's logits, as the label smoothing of `Trainer` does."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainer
from support.nearness import assert_as_near, draw
from support.pieces import small_pieces
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.trainer_pt_utils import LabelSmoother

import hfpatch
from hfpatch.losses.deferred_logits import DeferredLogits

CLASSES, WIDTH = 97, 32


@pytest.fixture(autouse=True)
def pieces(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small pieces, and how many logits existed at a time."""
    return small_pieces(monkeypatch, 2048)


def built(kind: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": CLASSES,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model: Any
    if kind == "bert":  # a bias
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForMaskedLM(BertConfig(**sizes, **dropouts))
    elif kind == "gemma2":  # a softcap
        config = Gemma2Config(**sizes, head_dim=16, num_key_value_heads=1, pad_token_id=0)
        config.final_logit_softcapping = 0.5
        model = Gemma2ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))
    return model.train()


def patched(model: Any) -> Any:
    report = hfpatch.apply(model, mode="training", include="Linear")
    assert len([s for s in report.swaps if s.op == "linear_cross_entropy"]) == 1, report
    return model


def whole(model: Any) -> list[str]:
    return [n for n in hfpatch.status(model).notes if "made whole" in n]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, CLASSES, (2, 13), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def smoothed(model: Any, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
    loss: Tensor = LabelSmoother(0.1)(model(input_ids=ids), labels, **more)
    return loss


def step(model: Any, loss: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


@pytest.mark.parametrize("more", [{}, {"shift_labels": True}], ids=["own", "next"])
@pytest.mark.parametrize("items", [None, 40, torch.tensor(40)], ids=["", "number", "tensor"])
@pytest.mark.parametrize("kind", ["llama", "tied", "bert", "gemma2"])
def test_label_smoothing_is_its_twins(
    kind: str, more: dict[str, Any], items: Any, pieces: list[int]
) -> None:
    twin = built(kind)
    model = patched(copy.deepcopy(twin))
    pieces.clear()
    ids, labels = batch()
    given = {**more, "num_items_in_batch": items}
    found = [step(m, smoothed(m, ids, labels, **given)) for m in (model, twin)]
    for ours, theirs in zip(*found, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    assert pieces and max(pieces) < 24 * CLASSES and not whole(model)
    # once for all rows in the forward, once for all classes in the backward
    rows = 24 if more else 26
    assert sum(pieces) == 2 * rows * CLASSES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_label_smoothing_of_half_types_is_as_near(
    kind: str, autocast: bool, dtype: torch.dtype
) -> None:
    losses, gradients = [], []
    for seed in range(10):
        wide = built(kind, seed).double()
        twin = copy.deepcopy(wide).to(torch.float32 if autocast else dtype)
        model = patched(copy.deepcopy(twin))
        ids, labels = batch(seed)
        found = []
        for m in (model, twin, wide):
            with torch.autocast("cpu", dtype, enabled=autocast and m is not wide):
                loss = smoothed(m, ids, labels, shift_labels=True)
            found.append(step(m, loss))
        assert found[0][0].dtype == found[1][0].dtype
        losses.append(draw(*(f[0] for f in found)))
        gradients.append(draw(*(f[1] for f in found)))
        assert not whole(model)
    assert_as_near(losses, dtype, "loss", like=8)
    assert_as_near(gradients, dtype, "gradients")


def test_label_smoothing_of_a_trainer(tmp_path: Path) -> None:
    found = []
    for is_patched in (False, True):
        model = built()
        if is_patched:
            patched(model)
        rows = [{"input_ids": r, "labels": r} for r in batch()[0].tolist() * 2]
        folder = tmp_path / str(is_patched)
        logged = trainer.logged(model, rows, folder, 3, label_smoothing_factor=0.1)
        found.append(torch.tensor([[e["loss"], e["grad_norm"]] for e in logged]))
        assert not whole(model)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def log_probs(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits.log_softmax(-1)  # type: ignore[no-any-return]


def at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


SERVED: dict[str, Any] = {
    "at labels": lambda m, ids: at(log_probs(m, ids), ids).mean(),
    "at next labels": lambda m, ids: at(log_probs(m, ids)[:, :-1], ids[:, 1:]).square().mean(),
    "by a function": lambda m, ids: (
        torch.gather(torch.log_softmax(m(input_ids=ids).logits.float(), dim=2), 2, ids[..., None])
    ).exp().sum(),
    "in another dtype": lambda m, ids: at(
        F.log_softmax(m(input_ids=ids).logits, dim=-1, dtype=torch.float32), ids
    ).min(),
    "negative likelihood": lambda m, ids: F.nll_loss(
        F.log_softmax(m(input_ids=ids).logits, -1).flatten(0, 1), ids.flatten(), ignore_index=7
    ),
    "a sum of likelihoods": lambda m, ids: F.nll_loss(
        log_probs(m, ids).view(-1, CLASSES), ids.view(-1), reduction="sum"
    ),
    "a likelihood of each": lambda m, ids: F.nll_loss(
        log_probs(m, ids).view(-1, CLASSES), ids.view(-1), reduction="none"
    ).max(),
    "sums alone": lambda m, ids: (-log_probs(m, ids)).sum(-1).square().mean(),
    "sums before values": lambda m, ids: (
        (lambda lp: lp.sum(2, keepdim=True).mean() + 3.0 * at(lp, ids).mean())(log_probs(m, ids))
    ),
    "values of two classes": lambda m, ids: (
        (lambda lp: at(lp, ids).mean() - at(-lp, ids.flip(1)).mean() + lp.sum([-1]).mean() / 9)(
            -log_probs(m, ids)
        )
    ),
    "a bias and a cap": lambda m, ids: at(
        (torch.tanh((m(input_ids=ids).logits + torch.linspace(-1, 1, CLASSES)) / 2) * 2)
        .float()
        .log_softmax(-1),
        ids,
    ).mean(),
    "some rows and classes": lambda m, ids: at(
        m(input_ids=ids).logits[:, :, 3:].log_softmax(-1)[ids > 40], ids[ids > 40] - 3
    ).mean(),
    "values of logits": lambda m, ids: at(m(input_ids=ids).logits, ids).mean(),
    "logsumexp alone": lambda m, ids: m(input_ids=ids).logits.logsumexp(-1).square().mean(),
    "its own dimension": lambda m, ids: torch.logsumexp(
        m(input_ids=ids).logits[:, 1:], dim=(2,), keepdim=True
    ).sum(),
    "logits and logsumexp": lambda m, ids: (
        (lambda y: (at(y, ids) - torch.logsumexp(y, 2)).square().mean())(m(input_ids=ids).logits)
    ),
    "logsumexp in turn": lambda m, ids: (
        (lambda y: (at(y, ids) - torch.stack([torch.logsumexp(r, -1) for r in y])).exp().sum())(
            m(input_ids=ids).logits
        )
    ),
    "log-probabilities in turn": lambda m, ids: torch.stack(
        [
            F.log_softmax(y, -1).gather(-1, t)
            for y, t in zip(m(input_ids=ids).logits[:, 2:], ids[:, 2:, None], strict=True)
        ]
    ).square().mean(),
    "one of them twice": lambda m, ids: (
        lambda y: (
            sum(at(r, t).sum() for r, t in zip(y, ids, strict=True))
            - 2.0 * at(y.unbind()[1], ids[1].flip(0)).sum()
            + at(y, ids.flip(1)).square().mean()
            + torch.stack([r.logsumexp(-1) for r in y]).mean()
        )
    )(m(input_ids=ids).logits),
    "in turn and all": lambda m, ids: (
        lambda y: (
            at(y.unbind(0)[1].log_softmax(-1), ids[1]).mean()
            + at(y.log_softmax(-1), ids).square().mean()
        )
    )(m(input_ids=ids).logits),
    "along a dimension": lambda m, ids: torch.take_along_dim(
        log_probs(m, ids), ids.unsqueeze(-1), dim=2
    ).mean(),
    "values under a cap": lambda m, ids: (
        lambda y: (at(y, ids) - 0.5 * y.logsumexp(-1)).mean()
    )(torch.tanh((m(input_ids=ids).logits + torch.linspace(-1, 1, CLASSES)) / 2) * 2),
    "a temperature": lambda m, ids: (
        lambda y: (at(y, ids[:, 1:]) - torch.stack([r.logsumexp(-1) for r in y])).mean()
    )(m(input_ids=ids).logits[:, :-1] / 0.7),
    "means beside it": lambda m, ids: (
        lambda y: at(y.log_softmax(-1), ids).mean() + 3.0 * y[:, 1:].detach().mean()
    )(m(input_ids=ids).logits),
}  # fmt: skip

WHOLE: dict[str, Any] = {
    "another dimension": lambda m, ids: m(input_ids=ids).logits.log_softmax(1).square().mean(),
    "several values": lambda m, ids: (
        log_probs(m, ids).gather(-1, torch.stack([ids, ids - 1], -1)).mean()
    ),
    "fewer rows": lambda m, ids: log_probs(m, ids).gather(-1, ids[:, :4, None]).mean(),
    "all values": lambda m, ids: (lambda lp: -(lp.exp() * lp).sum(-1).mean())(log_probs(m, ids)),
    "the sum of everything": lambda m, ids: log_probs(m, ids).sum(),
    "sums over rows": lambda m, ids: log_probs(m, ids).sum(1).square().mean(),
    "class weights": lambda m, ids: F.nll_loss(
        log_probs(m, ids).flatten(0, 1), ids.flatten(), weight=torch.linspace(0, 1, CLASSES)
    ),
    "negated likelihood": lambda m, ids: F.nll_loss(
        -log_probs(m, ids).flatten(0, 1), ids.flatten()
    ),
    "likelihood of logits": lambda m, ids: F.nll_loss(
        m(input_ids=ids).logits.flatten(0, 1), ids.flatten()
    ),
    "cross entropy of it": lambda m, ids: F.cross_entropy(
        log_probs(m, ids).flatten(0, 1), ids.flatten()
    ),
    "times a number": lambda m, ids: at(log_probs(m, ids) * 2.0, ids).mean(),
    "negated before": lambda m, ids: at((-m(input_ids=ids).logits).log_softmax(-1), ids).mean(),
    "twice": lambda m, ids: at(log_probs(m, ids).log_softmax(-1) , ids).mean(),
    "a mean of some that are detached": lambda m, ids: (
        lambda y: at(y.log_softmax(-1), ids).mean() + 3.0 * y.detach()[:, 1:].mean()
    )(m(input_ids=ids).logits),
    "a mean that is trained": lambda m, ids: m(input_ids=ids).logits.mean(),
    "means of rows": lambda m, ids: (
        lambda y: at(y.log_softmax(-1), ids).mean() + y.detach().mean(-1).square().mean()
    )(m(input_ids=ids).logits),
    "logsumexp of rows": lambda m, ids: m(input_ids=ids).logits.logsumexp(1).square().mean(),
    "logsumexp of log-probabilities": lambda m, ids: (
        (log_probs(m, ids) * 2.0).logsumexp(-1).square().mean()
    ),
    "classes in turn": lambda m, ids: sum(
        y.square().mean() for y in m(input_ids=ids).logits.unbind(2)
    ),
    "sequences in turn": lambda m, ids: sum(y.square().mean() for y in m(input_ids=ids).logits),
    "sums of logits": lambda m, ids: m(input_ids=ids).logits.sum(-1).mean(),
    "in fp64": lambda m, ids: at(
        m(input_ids=ids).logits.log_softmax(-1, dtype=torch.float64), ids
    ).mean(),
    "values and the rest": lambda m, ids: (
        (lambda lp: at(lp, ids).mean() + lp[..., 3].mean() + lp.sum(-1).mean())(log_probs(m, ids))
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("name", [*SERVED, *WHOLE])
def test_any_use_is_its_twins(name: str, kind: str) -> None:
    twin = built(kind)
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    use = {**SERVED, **WHOLE}[name]
    found = [step(m, use(m, ids)) for m in (model, twin)]
    for ours, theirs in zip(*found, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours - theirs).abs().max() <= 3e-5 * theirs.abs().max()
    assert bool(whole(model)) == (name in WHOLE), whole(model)


@pytest.mark.parametrize("name", SERVED)
def test_gradients_of_gradients(name: str) -> None:
    twin = built()
    twin.set_attn_implementation("eager")
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    found = []
    for m in (model, twin):
        loss = SERVED[name](m, ids)
        first = torch.autograd.grad(
            loss, [m.lm_head.weight, m.model.norm.weight], create_graph=True
        )
        found.append(step(m, loss + sum(g.square().sum() for g in first)))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_checkpoint_around_the_loss(outside: bool, reentrant: bool) -> None:
    twin = built()
    model = patched(copy.deepcopy(twin))
    ids, labels = batch()
    found = []
    for m in (model, twin):
        logits = m(input_ids=ids).logits
        given = -logits.log_softmax(-1) if outside else logits

        def loss_of(values: Tensor) -> Tensor:
            if not outside:
                return LabelSmoother(0.1)([values], labels)
            return at(values, ids).mean() + values.sum(-1).mean() / CLASSES

        loss: Any = checkpoint(loss_of, given, use_reentrant=reentrant)
        found.append(step(m, loss))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 3e-5 * theirs.abs().max()


@pytest.mark.parametrize("on", ["logits", "log-probabilities", "both"])
@pytest.mark.parametrize("change", [False, True])
def test_hooks_behind_the_loss(on: str, change: bool) -> None:
    twin = built()
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    found = []
    for m in (model, twin):
        heard: list[Tensor] = []

        def hook(g: Tensor, heard: list[Tensor] = heard) -> Tensor | None:
            heard.append(g * 1.0)
            return g * 3.0 + 0.01 if change else None

        logits = m(input_ids=ids).logits
        values = -logits.log_softmax(-1)
        loss = at(values, ids).mean() + values.sum(-1).mean() / 50
        if on != "log-probabilities":
            logits.register_hook(hook)
        if on != "logits":
            values.register_hook(hook)
        found.append([*step(m, loss), *heard])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_batch_of_gradients() -> None:
    twin = built()
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    factors, found = torch.tensor([1.0, -2.0, 0.5]), []
    for m in (model, twin):
        hidden = m.model(input_ids=ids).last_hidden_state.detach().requires_grad_()
        values = -m.lm_head(hidden).log_softmax(-1)
        loss = at(values, ids).mean() + values.sum(-1).mean() / 50
        leaves = [hidden, m.lm_head.weight]
        found.append(torch.autograd.grad(loss, leaves, factors, is_grads_batched=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, -100, CLASSES])
def test_a_class_that_is_none_is_the_same_error(wrong: int) -> None:
    model = built()
    ids, _ = batch()
    target = ids.clone()
    target[1, 2] = wrong
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of bounds"):
            at(log_probs(model, ids), target)
        patched(model)
    with pytest.raises(IndexError):
        F.nll_loss(log_probs(model, ids).flatten(0, 1), target.abs().flatten() + CLASSES)


def test_results_may_be_written_to_and_detached() -> None:
    twin = built()
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    found = []
    for m in (model, twin):
        values = log_probs(m, ids)
        chosen = values.gather(-1, ids[..., None])
        chosen.mul_(2.0).masked_fill_(ids[..., None] > 50, 0.0)
        total = values.sum(-1)
        total.masked_fill_(ids < 20, 1.0)
        found.append(step(m, chosen.mean() + total.mean() / 30))
        assert not values.sum(-1).detach_().requires_grad
        assert not values.gather(-1, ids[..., None]).detach_().requires_grad
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_gradients_between() -> None:
    twin = built()
    model = patched(copy.deepcopy(twin))
    ids, _ = batch()
    found = []
    for m in (model, twin):
        values = log_probs(m, ids)
        with torch.no_grad():
            metric = at(values, ids)
        assert not metric.requires_grad
        found.append([metric, *step(m, values.sum(-1).mean() / 9 + at(values, ids).mean())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_alive() -> None:
    model = patched(built())
    ids, _ = batch()
    gc.collect()
    gc.disable()
    try:
        output = model(input_ids=ids)
        logits = weakref.ref(output.logits)
        values = -output.logits.log_softmax(-1)
        assert type(values) is DeferredLogits
        held = weakref.ref(values)
        loss = at(values, ids).mean() + values.sum(-1).mean()
        del values
        assert held() is None
        loss.backward()
        del loss, output
        assert logits() is None
    finally:
        gc.enable()
