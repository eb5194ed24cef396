"""`hfpatch.loss` against transformers' losses: values, gradients, `Trainer`, what goes to them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer
import zoo
from torch import Tensor
from transformers import BertForMaskedLM
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

import hfpatch
import hfpatch.loss
from hfpatch import handover, loss

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLASSES = 199


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels must be there, and nothing is handed over without a test saying so."""
    monkeypatch.setattr(loss, "_warned", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hands over to transformers")
        yield


def llama(dtype: torch.dtype = torch.float32) -> Any:
    model = zoo.ENTRIES["llama"].build(dtype)
    assert model.config.vocab_size == CLASSES
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def logits_and_labels(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 7, CLASSES, generator=torch.Generator().manual_seed(2)) * 4
    labels = tokens(3, 7)
    labels[1, 2:5] = -100
    return x.to(dtype), labels


def value_and_gradient(function: Any, logits: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, ...]:
    leaf = logits.clone().requires_grad_()
    value = function(leaf, *args, **kw)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11), torch.tensor([11])], ids=repr)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(loss.causal_lm, ForCausalLMLoss), (loss.masked_lm, ForMaskedLMLoss)],
    ids=["causal", "masked"],
)
def test_it_is_that_of_transformers(ours: Any, theirs: Any, items: Any, dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(dtype)
    args = (labels, CLASSES, items)
    value, gradient = value_and_gradient(ours, logits, *args, unknown="of the forward")
    expected, truth = value_and_gradient(theirs, logits.double(), *args)
    assert value.dtype == torch.float32
    assert value.shape == ()
    torch.testing.assert_close(value, expected.squeeze(), rtol=1e-6, atol=0, check_dtype=False)
    assert gradient.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), truth, rtol=eps, atol=2e-7)


def test_labels_that_are_shifted_already() -> None:
    logits, labels = logits_and_labels(torch.float32)
    for ignore_index in (-100, 5):
        options = {"shift_labels": labels, "ignore_index": ignore_index}
        target = labels.clamp_min(0) if ignore_index == 5 else labels
        options["shift_labels"] = target
        value, gradient = value_and_gradient(loss.causal_lm, logits, None, CLASSES, **options)
        expected, truth = value_and_gradient(ForCausalLMLoss, logits, None, CLASSES, **options)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)], ids=repr)
def test_no_label_counts(items: Any) -> None:
    logits, labels = logits_and_labels(torch.float32)
    value, gradient = value_and_gradient(loss.causal_lm, logits, labels * 0 - 100, CLASSES, items)
    assert value.isnan()  # as transformers'
    assert (gradient == 0).all()


@pytest.mark.parametrize("wrong", [-1, CLASSES, 1 << 40])
@pytest.mark.parametrize("ours", [loss.causal_lm, loss.masked_lm])
def test_labels_that_are_no_class(ours: Any, wrong: int) -> None:
    """PyTorch's cross entropy, and so transformers' loss, raises an IndexError."""
    logits, labels = logits_and_labels(torch.float32)
    labels[0, 1] = wrong
    with pytest.raises(IndexError, match=rf"`labels`: expected 0 to {CLASSES - 1}.*got {wrong}"):
        ours(logits, labels, CLASSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_items_under_another_default_device(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(torch.float32)
    logits = logits.to(dtype)  # of fp64 the loss is handed over
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        value = loss.masked_lm(logits, labels, CLASSES, 0)
        expected = ForMaskedLMLoss(logits, labels, CLASSES, torch.tensor(0, device="cpu"))
    assert value.device.type == "cpu"
    assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_of_a_model(patched: bool, dtype: torch.dtype) -> None:
    model, ids = llama(dtype), tokens(2, 12)
    if patched:
        hfpatch.apply(model, mode="training")

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        value = model(input_ids=ids, labels=ids).loss
        value.backward()
        return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    value, gradient = step()
    model.loss_function = hfpatch.loss.causal_lm
    fused_value, fused_gradient = step()
    torch.testing.assert_close(fused_value, value, rtol=1e-6, atol=0)
    size = gradient.abs().max()
    eps = torch.finfo(dtype).eps
    assert (fused_gradient - gradient).abs().max() <= 4 * eps * size
    del model._loss_function
    assert model.loss_function is ForCausalLMLoss


def test_of_a_masked_model() -> None:
    model = BertForMaskedLM(zoo.ENTRIES["bert"].build(torch.float32).config).eval()
    ids = tokens(2, 12)
    own = model(ids, labels=ids).loss
    model.loss_function = hfpatch.loss.masked_lm
    torch.testing.assert_close(model(ids, labels=ids).loss, own, rtol=1e-6, atol=0)


def test_trainer_logs_the_same(tmp_path: Path) -> None:
    """Of batches that are accumulated `Trainer` counts the tokens, by which the model divides."""
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(48, 10)]
    for i, row in enumerate(rows):  # of different counts
        row["labels"] = row["labels"].clone()
        row["labels"][: i % 7] = -100
    logs = []
    for fused in (False, True):
        model = llama()
        if fused:
            model.loss_function = hfpatch.loss.causal_lm
        options = {"gradient_accumulation_steps": 3}
        logs.append(trainer.logged(model, rows, tmp_path / str(fused), 4, **options))
    for ours, theirs in zip(logs[1], logs[0], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    model, ids = llama(dtype), tokens(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    model.loss_function = hfpatch.loss.causal_lm
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    actual.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_copy_of_the_model_keeps_it() -> None:
    model, ids = llama(), tokens(2, 12)
    model.loss_function = hfpatch.loss.causal_lm
    other = copy.deepcopy(model)
    assert other.loss_function is hfpatch.loss.causal_lm
    assert torch.equal(other(ids, labels=ids).loss, model(ids, labels=ids).loss)


class Labelled(Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize(
    ("logits", "why"),
    [
        (torch.randn(2, 5, CLASSES, dtype=torch.float64), "dtype torch.float64"),
        (torch.randn(2, 5, CLASSES).as_subclass(Labelled), "`Labelled` is a tensor subclass"),
    ],
    ids=["fp64", "subclass"],
)
def test_what_is_handed_over(logits: Tensor, why: str) -> None:
    labels = tokens(2, 5)
    message = f"`hfpatch.loss.causal_lm` hands over to transformers' own: 1 × {why}"
    with pytest.warns(UserWarning, match=message) as caught:
        value = loss.causal_lm(logits, labels, CLASSES, 3)
    assert caught[0].filename == __file__
    assert torch.equal(value, ForCausalLMLoss(logits, labels, CLASSES, 3))
    loss.causal_lm(logits, labels, CLASSES)  # the second time without a warning


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "local_kernel", lambda op, device: "no compiled kernels here")
    logits, labels = logits_and_labels(torch.bfloat16)
    with pytest.warns(UserWarning, match="1 × no compiled kernels here"):
        value = loss.masked_lm(logits, labels, CLASSES)
    assert torch.equal(value, ForMaskedLMLoss(logits, labels, CLASSES))


def test_bad_input() -> None:
    logits, labels = logits_and_labels(torch.float32)
    with pytest.raises(ValueError, match=r"`vocab_size`: expected .* dimension, 199, got 96"):
        loss.causal_lm(logits, labels, 96)
    with pytest.raises(ValueError, match="`labels`: expected labels, or `shift_labels`"):
        loss.causal_lm(logits, None, CLASSES)
    with pytest.raises(ValueError, match=r"`labels`: expected shape \[3, 7\], .* got \[3, 6\]"):
        loss.masked_lm(logits, labels[:, 1:], CLASSES)
    with pytest.raises(ValueError, match=r"`labels`: expected integers, got torch.float32"):
        loss.masked_lm(logits, labels.float(), CLASSES)


LOGITS, LABELS = torch.ones(2, 5, 11), torch.ones(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: hfpatch.loss.masked_lm(None, LABELS, 11), TypeError, "`logits`.*got NoneType"),
        (lambda: hfpatch.loss.masked_lm(LOGITS, [1], 11), TypeError, "`labels`.*got list"),
        (lambda: hfpatch.loss.causal_lm(LOGITS, [1], 11), TypeError, "`labels`.*got list"),
        (lambda: hfpatch.loss.masked_lm(LOGITS, LABELS > 0, 11), ValueError, "got torch.bool"),
        (lambda: hfpatch.loss.masked_lm(LOGITS.sum(), LABELS, 11), ValueError, "there is none"),
        (
            lambda: hfpatch.loss.linear_cross_entropy(LOGITS, LOGITS[0], None),
            TypeError,
            "`target`: expected a tensor, got NoneType",
        ),
        (
            lambda: hfpatch.loss.linear_cross_entropy(LOGITS, LOGITS[0], LABELS, 3),
            TypeError,
            "`bias`: expected a tensor, got int",
        ),
    ],
)
def test_what_is_no_tensor(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()
