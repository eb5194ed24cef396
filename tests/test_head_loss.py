"""The loss without the logits: `linear_cross_entropy`, and heads whose logits are deferred."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainer
import zoo
from expect import assert_same_dicts, snapshot
from support.nearness import Draw, assert_as_near, draw
from support.pieces import small_pieces
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.loss.loss_utils import ForCausalLMLoss

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.losses import head_loss
from hfpatch.losses.deferred_logits import DeferredLogits
from hfpatch.losses.head_loss import linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLASSES = 199
HEAD = "logits made only where they are read"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"scale": 0.25},
    {"softcap": 3.0, "scale": 2.0, "label_smoothing": 0.2},
    {"recompute": True},
    {"recompute": False},
    {"recompute": True, "softcap": 3.0, "scale": 2.0, "label_smoothing": 0.2},
    {"recompute": False, "softcap": 3.0, "scale": 2.0, "label_smoothing": 0.2},
]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small pieces, so that every size has several, and how many logits existed at a time."""
    return small_pieces(monkeypatch, 4096)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def targets(seed: int, *shape: int) -> Tensor:
    found = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[1::5] = -100
    return found


def plain(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """What a model and its loss do, in eager PyTorch; fp64 stays fp64."""
    logits = F.linear(
        hidden, weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
    )
    if scale != 1.0:
        logits = logits * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat = target.reshape(-1)
    loss = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        flat,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def loss_and_gradients(
    function: Any, leaves: list[Tensor | None], target: Tensor, **kw: Any
) -> Any:
    own = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    loss = function(own[0], own[1], target, own[2], **kw)
    upstream = torch.linspace(0.5, 2.0, loss.numel()).to(loss).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, [t for t in own if t is not None], upstream)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_no_farther_from_fp64_than_pytorch(
    dtype: torch.dtype, options: Any, with_bias: bool, largest: list[int]
) -> None:
    draws: list[list[Draw]] = []
    like_plain = {name: value for name, value in options.items() if name != "recompute"}
    for seed in range(12):
        leaves: list[Tensor | None] = [
            drawn(seed, 3, 17, 32).to(dtype),
            drawn(seed + 100, CLASSES, 32, scale=0.3).to(dtype),
            drawn(seed + 200, CLASSES).to(dtype) if with_bias else None,
        ]
        target = targets(seed, 3, 17)
        wide = [None if t is None else t.double() for t in leaves]
        ours = loss_and_gradients(linear_cross_entropy, leaves, target, **options)
        rows = zip(
            ours,
            loss_and_gradients(plain, leaves, target, **like_plain),
            loss_and_gradients(plain, wide, target, **like_plain),
            strict=True,
        )
        draws.append([draw(*row) for row in rows])
    assert max(largest) <= 17 * CLASSES, "all logits at once"
    for name, found in zip(
        ("loss", "hidden", "weight", "bias"), zip(*draws, strict=True), strict=False
    ):
        assert_as_near(found, dtype, name, like=16 if name == "loss" else 64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_odd_number_of_classes(
    dtype: torch.dtype, options: Any, largest: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the head has more classes there, of no probability."""
    monkeypatch.setattr(head_loss, "PADDED", frozenset({"cpu"}))
    assert head_loss.is_odd(torch.empty(1, dtype=dtype), CLASSES)
    test_no_farther_from_fp64_than_pytorch(dtype, options, True, largest)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ignored", [CLASSES, CLASSES + 1, -7])
def test_classes_that_are_none_may_be_ignored(
    ignored: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the head has a further class of that number."""
    leaves = [drawn(1, 40, 32).bfloat16(), drawn(2, CLASSES, 32).bfloat16(), None]
    target = targets(3, 40)
    target[target == -100] = ignored
    options = {"ignore_index": ignored, "recompute": recompute}
    expected = loss_and_gradients(linear_cross_entropy, leaves, target, **options)
    monkeypatch.setattr(head_loss, "PADDED", frozenset({"cpu"}))
    found = loss_and_gradients(linear_cross_entropy, leaves, target, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_size_of_the_pieces_changes_roundings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [drawn(1, 40, 32), drawn(2, CLASSES, 32), None]
    whole = loss_and_gradients(linear_cross_entropy, leaves, targets(3, 40))
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 1)
    monkeypatch.setattr(head_loss, "ROWS_BYTES", 1)
    monkeypatch.setattr(head_loss, "LEAST", 7)
    pieces = loss_and_gradients(linear_cross_entropy, leaves, targets(3, 40))
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fp32_parameters_under_autocast(largest: list[int]) -> None:
    x, w, target = drawn(1, 30, 16).bfloat16(), drawn(2, CLASSES, 16), targets(3, 30)
    ours = loss_and_gradients(linear_cross_entropy, [x, w, None], target)
    theirs = loss_and_gradients(plain, [x, w, None], target)
    assert ours[2].dtype == torch.float32
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_fp32_head_of_half_states(dtype: torch.dtype, options: Any, largest: list[int]) -> None:
    """As near fp64 as whole logits in fp32 of hidden states that are widened."""
    draws: list[list[Draw]] = []
    like_plain = {name: value for name, value in options.items() if name != "recompute"}

    def widened(hidden: Tensor, *args: Any, **kw: Any) -> Tensor:
        return plain(hidden if hidden.dtype == torch.float64 else hidden.float(), *args, **kw)

    for seed in range(12):
        x, target = drawn(seed, 3, 17, 32).to(dtype), targets(seed, 3, 17)
        leaves = [x, drawn(seed + 100, CLASSES, 32, scale=0.3), drawn(seed + 200, CLASSES)]
        wide: list[Tensor | None] = [t.double() for t in leaves]
        ours = loss_and_gradients(linear_cross_entropy, leaves, target, **options)
        theirs = loss_and_gradients(widened, leaves, target, **like_plain)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
        truth = loss_and_gradients(widened, wide, target, **like_plain)
        draws.append([draw(*row) for row in zip(ours, theirs, truth, strict=True)])
    assert max(largest) <= 17 * CLASSES, "all logits at once"
    for name, found in zip(
        ("loss", "hidden", "weight", "bias"), zip(*draws, strict=True), strict=True
    ):
        kept = dtype if name == "hidden" else torch.float32
        assert_as_near(found, kept, name, like=16 if name == "loss" else 64)


def test_rows_that_do_not_count() -> None:
    x, w = drawn(1, 6, 16).requires_grad_(), drawn(2, CLASSES, 16).requires_grad_()
    none = torch.full((6,), -100)
    loss = linear_cross_entropy(x, w, none)
    assert loss.isnan()  # as PyTorch's mean over nothing
    assert linear_cross_entropy(x, w, none, reduction="sum") == 0
    linear_cross_entropy(x, w, none, reduction="sum", label_smoothing=0.1).backward()
    assert not x.grad.any() and not w.grad.any()  # type: ignore[union-attr]
    with torch.no_grad():
        x[2] = float("inf")
    one = none.clone()
    one[0] = 5
    x.grad = None
    linear_cross_entropy(x, w, one).backward()
    assert x.grad[0].any() and not x.grad[1:].any()  # type: ignore[index]


def test_empty() -> None:
    x, w = torch.empty(0, 16, requires_grad=True), drawn(1, 20, 16).requires_grad_()
    loss = linear_cross_entropy(x, w, torch.empty(0, dtype=torch.int64), reduction="sum")
    loss.backward()
    assert loss == 0 and x.grad.shape == (0, 16) and not w.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen(frozen: str) -> None:
    x, w, target = drawn(1, 30, 16), drawn(2, CLASSES, 16), targets(3, 30)
    leaf = w if frozen == "hidden" else x
    leaf.requires_grad_()
    (ours,) = torch.autograd.grad(linear_cross_entropy(x, w, target), leaf)
    (theirs,) = torch.autograd.grad(plain(x, w, target, None), leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(20, 15)}, r"`weight`: expected \[V, 16\].*got \[20, 15\]"),
        (
            {"target": torch.zeros(4, dtype=torch.int64)},
            r"`target`: expected shape \[3\].*got \[4\]",
        ),
        ({"target": torch.zeros(3)}, "`target`: expected integers, got torch.float32"),
        ({"bias": torch.zeros(3)}, r"`bias`: expected \[20\], got \[3\]"),
        ({"reduction": "most"}, "`reduction`: expected 'mean', 'sum' or 'none', got 'most'"),
    ],
)
def test_bad_input(changed: dict[str, Any], message: str) -> None:
    good = {
        "hidden": torch.zeros(3, 16),
        "weight": torch.zeros(20, 16),
        "target": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**good, **changed})


# Models ------------------------------------------------------------------------------------------

#: Tied and own heads, a softcap (gemma2), a mixture of experts, a recurrence.
MODELS = ["llama", "gemma2", "qwen3-next", "bert"]


def training_model(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    if name == "bert":
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(seed)
        config = BertConfig(vocab_size=CLASSES, hidden_size=32, num_hidden_layers=1)
        config.num_attention_heads, config.intermediate_size = 2, 64
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        return BertForMaskedLM(config).to(dtype).train()
    return zoo.ENTRIES[name].build(dtype, seed).train().requires_grad_(True)


def ids_of(model: Any, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(model.config.vocab_size, 100), (2, 13), generator=generator)


def step(model: Any, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **kwargs).loss
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


def head_of(report: Any) -> list[str]:
    return [s.path for s in report.swaps if s.op == "linear_cross_entropy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_models_loss_and_gradients(name: str, dtype: torch.dtype, largest: list[int]) -> None:
    losses, gradients = [], []
    for seed in range(4):
        model = training_model(name, dtype, seed)
        wide = copy.deepcopy(model).double()
        before = snapshot(model)
        found = [[step(m, ids_of(model, s)) for s in range(3)] for m in (model, wide)]
        report = hfpatch.apply(model, mode="training", include=["Linear"])
        assert len(head_of(report)) == 1, report
        ours = [step(model, ids_of(model, s)) for s in range(3)]
        for mine, theirs, truth in zip(ours, *found, strict=True):
            losses.append(draw(mine[0], theirs[0], truth[0]))
            gradients.append(draw(mine[1], theirs[1], truth[1]))
        model.zero_grad()
        hfpatch.restore(model)
        assert_same_dicts(before, model)
    assert largest, "the loss was taken of whole logits"
    assert_as_near(gradients, dtype, name)
    assert_as_near(losses, dtype, name, like=8)


def test_only_training_has_it() -> None:
    model = training_model()
    assert not head_of(hfpatch.plan(model))
    assert head_of(hfpatch.plan(model, mode="training")) == ["lm_head"]
    hfpatch.apply(model, mode="training")
    ids = ids_of(model)
    assert type(model(input_ids=ids).logits) is DeferredLogits
    with torch.no_grad():
        assert type(model(input_ids=ids).logits) is Tensor
    model.eval()
    assert type(model(input_ids=ids).logits) is Tensor


def test_apply_makes_no_model_warn_that_it_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says so, once in a process, where a model inside is asked for its loss."""
    said: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    model = zoo.ENTRIES["llama"].build()
    assert head_of(hfpatch.apply(model, mode="training")) == ["lm_head"]
    assert not said


def test_logits_are_there_for_who_reads_them(largest: list[int]) -> None:
    model = training_model()
    ids = ids_of(model)
    expected = model(input_ids=ids).logits
    hfpatch.apply(model, mode="training", include="lm_head")
    logits = model(input_ids=ids, labels=ids).logits
    assert logits.shape == expected.shape and logits.dtype == expected.dtype
    assert logits.requires_grad and isinstance(logits, Tensor)
    assert logits._made is None  # none of these needed values
    assert torch.equal(logits, expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits[:, -1], expected[:, -1])
    assert torch.equal(logits[..., 3], expected[..., 3])
    assert torch.equal(torch.tensor(logits.detach().numpy()), expected.detach())
    assert torch.equal(torch.softmax(logits / 0.7, -1), torch.softmax(expected / 0.7, -1))
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), expected.detach())
    assert torch.equal(copy.deepcopy(logits.detach()), expected.detach())
    assert str(logits) == str(logits.materialized())
    # gradients through logits that were read
    (ours,) = torch.autograd.grad(logits.log_softmax(-1)[0, 1, 2], model.lm_head.weight)
    (theirs,) = torch.autograd.grad(expected.log_softmax(-1)[0, 1, 2], model.lm_head.weight)
    assert torch.equal(ours, theirs)


def test_logits_of_weights_that_have_moved_on_are_refused() -> None:
    model = training_model()
    hfpatch.apply(model, mode="training")
    ids = ids_of(model)
    output = model(input_ids=ids, labels=ids)
    read = model(input_ids=ids, labels=ids).logits
    read.sum()
    output.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(HfpatchError, match="read them before the weights change"):
        output.logits.argmax(-1)
    read.argmax(-1)  # made before


@torch.no_grad()
def _without_gradients(logits: Tensor) -> Tensor:
    return logits.float()


@torch.inference_mode()
def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


class _Square(torch.autograd.Function):
    """A loss of somebody else's, applied to the logits as they are; Liger's is such a function."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits.float() ** 2).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * gradient * logits / logits.numel()


def bias_of(logits: Tensor) -> Tensor:
    """A constant that looks like one that is learned."""
    return torch.linspace(-2, 2, logits.shape[-1]).flip(0).roll(17).to(logits.dtype)


LOSSES: dict[str, Any] = {
    "an autograd function": lambda logits, ids: _Square.apply(logits),
    "an autograd function of logits that moved": lambda logits, ids: _Square.apply(
        torch.tanh(logits[..., 1:, :].float().reshape(-1, logits.shape[-1]) / 3) * 3
    ),
    "an autograd function beside a cross entropy": lambda logits, ids: (
        _Square.apply(logits)
        + F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1))
    ),
    "a part without gradients": lambda logits, ids: (
        F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1))
        + F.cross_entropy(_without_gradients(logits).view(-1, logits.shape[-1]), ids.view(-1))
    ),
    "a metric first": lambda logits, ids: (
        (_argmax(logits) == ids).float().mean() * 0
        + F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1))
    ),
    "shifted by hand": lambda logits, ids: F.cross_entropy(
        logits[..., :-1, :].contiguous().float().view(-1, logits.size(-1)), ids[..., 1:].reshape(-1)
    ),
    "label smoothing": lambda logits, ids: F.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), ids.reshape(-1), label_smoothing=0.1
    ),
    "class weights": lambda logits, ids: F.cross_entropy(
        logits.float().flatten(0, 1), ids.flatten(), weight=torch.linspace(0, 1, logits.shape[-1])
    ),
    "a module": lambda logits, ids: nn.CrossEntropyLoss(reduction="sum")(
        logits.float().view(-1, logits.shape[-1]), ids.view(-1)
    ),
    "per token": lambda logits, ids: F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), ids.view(-1), reduction="none"
    ).max(),
    "channels second": lambda logits, ids: F.cross_entropy(logits.float().transpose(1, 2), ids),
    "of its own dtype": lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    "by hand": lambda logits, ids: -logits.log_softmax(-1).gather(-1, ids[..., None]).mean(),
    "scaled and capped": lambda logits, ids: F.cross_entropy(
        (torch.tanh(logits * 0.5 / 4.0) * 4.0).float().view(-1, logits.shape[-1]), ids.view(-1)
    ),
    "scaled behind the cast": lambda logits, ids: F.cross_entropy(
        (logits.float() / 1.7).view(-1, logits.shape[-1]), ids.view(-1)
    ),
    "flattened": lambda logits, ids: F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()),
    "flattened, from the end": lambda logits, ids: F.cross_entropy(
        torch.flatten(logits[..., :-1, :].float(), end_dim=-2), ids[..., 1:].flatten()
    ),
    "reshaped by a function": lambda logits, ids: F.cross_entropy(
        torch.reshape(logits.float(), (-1, logits.shape[-1])), torch.reshape(ids, (-1,))
    ),
    "all in one dimension": lambda logits, ids: logits.float().flatten().square().mean(),
    "a bias": lambda logits, ids: F.cross_entropy(
        (logits + bias_of(logits)).flatten(0, 1), ids.flatten()
    ),
    "a bias in front": lambda logits, ids: F.cross_entropy(
        torch.add(bias_of(logits)[None], logits).float().flatten(0, 1), ids.flatten()
    ),
    "a bias of another dtype": lambda logits, ids: F.cross_entropy(
        (logits + bias_of(logits).float()).flatten(0, 1), ids.flatten()
    ),
    "a bias behind the cast": lambda logits, ids: F.cross_entropy(
        (logits.float() + bias_of(logits)).flatten(0, 1), ids.flatten()
    ),
    "two biases and a softcap": lambda logits, ids: F.cross_entropy(
        (torch.tanh((bias_of(logits) + logits + bias_of(logits)) / 4.0) * 4.0).flatten(0, 1),
        ids.flatten(),
    ),
    "a bias behind a scale": lambda logits, ids: F.cross_entropy(
        (logits * 0.5 + bias_of(logits)).flatten(0, 1), ids.flatten()
    ),
    "twice a bias": lambda logits, ids: F.cross_entropy(
        torch.add(logits, bias_of(logits), alpha=2).flatten(0, 1), ids.flatten()
    ),
    "logits times alpha": lambda logits, ids: F.cross_entropy(
        torch.add(bias_of(logits), logits, alpha=2).flatten(0, 1), ids.flatten()
    ),
    "one number for each row": lambda logits, ids: F.cross_entropy(
        (logits + ids[..., None].to(logits)).flatten(0, 1), ids.flatten()
    ),
    "rows of a mask": lambda logits, ids: F.cross_entropy(
        logits[..., :-1, :][ids[..., 1:] > 40].contiguous().float(), ids[..., 1:][ids[..., 1:] > 40]
    ),
    "a mask behind a slice": lambda logits, ids: F.cross_entropy(
        logits[:, ids[0] > 40].flatten(0, 1), ids[:, ids[0] > 40].flatten()
    ),
    "a mask of two dimensions": lambda logits, ids: F.cross_entropy(
        logits[(ids > 40) | (ids < 20), :], ids[(ids > 40) | (ids < 20)]
    ),
    "rows by their numbers": lambda logits, ids: F.cross_entropy(
        logits[torch.tensor([1, 0, 1]), torch.tensor([3, -2, 3])],
        ids[torch.tensor([1, 0, 1]), torch.tensor([3, -2, 3])],
    ),
    "one row": lambda logits, ids: F.cross_entropy(logits[:, -2], ids[:, -2]),
    "rows the other way round": lambda logits, ids: F.cross_entropy(
        logits.transpose(0, 1).contiguous().view(-1, logits.size(-1)).float(),
        ids.transpose(0, 1).flatten(),
    ),
    "some classes": lambda logits, ids: F.cross_entropy(
        logits[:, 1:, 2:101].float().reshape(-1, 99), ids[:, 1:].flatten() - 2
    ),
    "some classes of a capped sum": lambda logits, ids: F.cross_entropy(
        (torch.tanh((logits + bias_of(logits)).float() / 5.0) * 5.0)[..., :-7].flatten(0, 1),
        ids.flatten(),
    ),
    "every other class": lambda logits, ids: F.cross_entropy(
        logits[..., ::2].float().flatten(0, 1), ids.flatten() // 2
    ),
    "twice": lambda logits, ids: (
        F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1))
        + 1e-3 * logits.float().logsumexp(-1).square().mean()
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(LOSSES))
def test_any_loss_of_the_users(name: str, dtype: torch.dtype) -> None:
    model = training_model(dtype=dtype)
    ids, weight = ids_of(model), model.lm_head.weight
    found = []
    for _ in range(2):
        loss = LOSSES[name](model(input_ids=ids).logits, ids)
        found.append((loss.detach(), *torch.autograd.grad(loss, [weight, model.model.norm.weight])))
        hfpatch.apply(model, mode="training", include="lm_head")
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 8 * eps * theirs.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_logits_of_a_masked_model(
    dtype: torch.dtype, autocast: bool, reduction: str, largest: list[int]
) -> None:
    """BERT takes its loss of the logits as they are: of a half type, or by autocast in fp32. It is
    as near fp64 as PyTorch's, and no logits are made."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=CLASSES, num_attention_heads=2, **sizes)
    whole = BertForMaskedLM(config).train().double()
    model = copy.deepcopy(whole).to(torch.float32 if autocast else dtype)
    twin = copy.deepcopy(model)
    hfpatch.apply(model, mode="training", include="cls.predictions.decoder")
    largest.clear()  # of the proof's
    ids, labels = torch.randint(CLASSES, (3, 21)), targets(1, 3, 21)

    def outcome(m: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype, enabled=autocast and m is not whole):
            logits = m(input_ids=ids).logits
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.double().sum(), [m.get_output_embeddings().weight])
        return loss, gradient

    (ours, mine), (theirs, other), (true, best) = map(outcome, (model, twin, whole))
    assert ours.dtype == theirs.dtype == (torch.float32 if autocast else dtype)
    assert largest and max(largest) < ids.numel() * CLASSES
    eps = torch.finfo(dtype).eps
    for got, like, want in ((ours, theirs, true), (mine, other, best)):
        error, expected = ((t.double() - want).abs().max() for t in (got, like))
        assert error <= 1.2 * expected + eps * want.abs().max()


WITHOUT_LOGITS = [
    "flattened",
    "flattened, from the end",
    "reshaped by a function",
    "a bias",
    "a bias in front",
    "a bias of another dtype",
    "a bias behind the cast",
    "two biases and a softcap",
    "rows of a mask",
    "a mask behind a slice",
    "a mask of two dimensions",
    "rows by their numbers",
    "one row",
    "rows the other way round",
    "some classes",
    "some classes of a capped sum",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WITHOUT_LOGITS)
def test_what_is_written_down_makes_no_logits(name: str, dtype: torch.dtype) -> None:
    model = training_model(dtype=dtype)
    hfpatch.apply(model, mode="training", include="lm_head")
    ids = ids_of(model)
    logits = model(input_ids=ids).logits
    LOSSES[name](logits, ids).backward()
    assert logits._made is None


def the_model_with(change: Any = None) -> tuple[Any, Any]:
    twin = training_model()
    if change is not None:
        change(twin)
    model = copy.deepcopy(twin)
    assert head_of(hfpatch.apply(model, mode="training", include="lm_head")) == ["lm_head"]
    return model, twin


def with_bias(model: Any) -> None:
    torch.manual_seed(1)
    old = model.lm_head
    model.lm_head = nn.Linear(old.in_features, old.out_features)


USES = ["a loss", "a hook that looks", "a hook that changes", "an early hook", "a function"]
USES += ["two losses", "twice differentiated"]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("of", [None, with_bias], ids=["no bias", "a bias of the head's"])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_added_bias_that_is_learned(
    use: str, of: Any, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recompute:
        monkeypatch.setattr(head_loss, "TIME_FIRST", frozenset())
    found = []
    for model in the_model_with(of):
        model.set_attn_implementation("eager")
        ids = ids_of(model)
        bias = bias_of(model.lm_head.weight[:, 0]).clone().requires_grad_()
        raw = model(input_ids=ids).logits
        logits = raw + bias
        heard: list[Tensor] = []
        if use == "a function":
            loss: Any = _Square.apply(logits)
        else:
            loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1))
        if use == "two losses":
            loss = loss + F.cross_entropy(raw[:, 0], ids[:, 0]) + (logits[0] * 0.1).square().mean()
        elif use == "a hook that looks":
            logits.register_hook(lambda g, heard=heard: heard.append(g * 1.0))
            raw.register_hook(lambda g, heard=heard: heard.append(g * 1.0))
        elif use == "a hook that changes":
            logits.register_hook(lambda g: g * 3.0)
        elif use == "an early hook":
            raw.register_hook(lambda g: g * 3.0)
        leaves = [bias, *model.parameters()]
        if use == "twice differentiated":
            (first,) = torch.autograd.grad(loss, bias, create_graph=True)
            loss = loss + first.square().sum()
        loss.backward()
        found.append([loss.detach(), *heard, *(p.grad for p in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


FORMS: dict[str, Any] = {
    "cross entropy": lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten() - 2),
    "a sum": lambda y, ids: F.cross_entropy(
        y.flatten(0, 1), ids.flatten() - 2, reduction="sum", label_smoothing=0.1
    ),
    "log-probabilities": lambda y, ids: (
        lambda lp: lp.gather(-1, ids[..., None] - 2).mean() + lp.sum(-1).mean() / 50
    )(y.log_softmax(-1)),
}


@pytest.mark.parametrize("at", ["the head's", "with a bias", "of some classes", "the last"])
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in FORMS), ("cross entropy", True)]
)
def test_hooks_where_some_classes_are_left_out(
    name: str, compiled: bool, change: bool, at: str
) -> None:
    """What a hook changes may reach classes that the loss leaves out."""
    found = []
    for model in the_model_with(with_bias):
        model.lm_head.bias.requires_grad_(False)
        ids = ids_of(model)
        bias = bias_of(model.lm_head.weight[:, 0]).clone().requires_grad_()
        made = {"the head's": model(input_ids=ids).logits}
        made["with a bias"] = made["the head's"] + bias
        made["of some classes"] = made["with a bias"][..., 2:103]
        made["the last"] = torch.tanh(made["of some classes"] / 3.0) * 3.0
        loss = FORMS[name](made["the last"], ids)
        heard: list[Tensor] = []

        def hook(g: Tensor, heard: list[Tensor] = heard) -> Tensor | None:
            heard.append(g * 1.0)
            return g * 3.0 + 1e-3 if change else None

        made[at].register_hook(hook)
        if compiled:
            with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
                loss.backward()
        else:
            loss.backward()
        leaves = [bias, *(p for p in model.parameters() if p.requires_grad)]
        found.append([loss.detach(), *heard, *(p.grad for p in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_added_bias_that_is_written_to_after() -> None:
    found = []
    for model in the_model_with():
        ids, bias = ids_of(model), bias_of(model.lm_head.weight[:, 0])
        logits = model(input_ids=ids).logits + bias
        bias.zero_()
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        found.append([loss.detach(), logits.detach() * 1.0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_mask_that_is_written_to_after() -> None:
    found = []
    for model in the_model_with():
        ids = ids_of(model)
        mask, labels = ids > 40, ids[ids > 40]
        logits = model(input_ids=ids).logits[mask]
        mask.fill_(False)
        found.append([F.cross_entropy(logits, labels).detach()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


INDICES: dict[str, Any] = {
    "a mask of fewer rows": lambda y: y[torch.ones(2, 5, dtype=torch.bool)],
    "a mask of more rows": lambda y: y[torch.ones(2, 40, dtype=torch.bool)],
    "a mask of fewer batches": lambda y: y[torch.ones(1, dtype=torch.bool)],
    "a row that is not there": lambda y: y[:, 99],
    "rows that are not there": lambda y: y[:, torch.tensor([1, 99])],
    "too many": lambda y: y[0, 0, 0, 0],
    "two ellipses": lambda y: y[..., ..., 0],
    "no rows": lambda y: y[torch.zeros(2, 13, dtype=torch.bool)],
    "no classes": lambda y: y[..., 3:3],
    "a step back": lambda y: y[..., ::-1],
    "a new dimension": lambda y: y[:, None],
    "a list": lambda y: y[:, [1, 2]],
    "a flag": lambda y: y[True],
    "a number of no dimension": lambda y: y[torch.tensor(1)],
    "a mask of no dimension": lambda y: y[torch.tensor(True)],
    "a mask of everything": lambda y: y[torch.ones_like(y, dtype=torch.bool)],
    "bytes": lambda y: y[:, torch.ones(13, dtype=torch.uint8)],
    "lists around a slice": lambda y: y[torch.tensor([0, 1]), :, torch.tensor([3, 4])],
    "rows by two lists, of a slice": lambda y: y[torch.tensor([[0], [1]]), torch.tensor([0, 2])],
    "a class": lambda y: y[:, :, 3],
    "a bias of another size": lambda y: y + torch.ones(5),
    "a bias of more dimensions": lambda y: y + torch.ones(1, 1, 1, y.shape[-1]),
    "a bias of integers": lambda y: y + torch.arange(y.shape[-1]),
    "a bias of fp64": lambda y: y + torch.ones(y.shape[-1], dtype=torch.float64),
    "a number": lambda y: y + 1.0,
    "classes and rows": lambda y: y.transpose(1, 2),
    "dimensions that are not there": lambda y: y.transpose(0, 5),
    "how it lies": lambda y: y[:, :5].stride(),
    "how one dimension lies": lambda y: y.transpose(0, 1).stride(0),
    "whether it lies in a row": lambda y: y[:, 1].is_contiguous(),
    "whether it lies in a row, in a format": lambda y: y.is_contiguous(
        memory_format=torch.contiguous_format
    ),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_or_a_sum_is_the_originals(name: str) -> None:
    model, twin = the_model_with()
    ids = ids_of(model)
    found: list[Any] = []
    for m in (model, twin):
        logits = m(input_ids=ids).logits
        try:
            found.append(INDICES[name](logits))
        except Exception as e:
            found.append(e)
    ours, theirs = found
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs), ours
        return
    if not isinstance(theirs, Tensor):
        assert ours == theirs
        return
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    assert torch.equal(ours, theirs)


#: A checkpoint runs its loss twice, the second time with logits that the first one made.
CHECKPOINTED = (
    "by hand",
    "twice",
    "flattened",
    "of its own dtype",
    "a metric first",
    "channels second",
    "scaled and capped",
)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_around_a_loss_of_logits(name: str, reentrant: bool) -> None:
    model = training_model()
    ids, weight = ids_of(model), model.lm_head.weight
    found = []
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=ids).logits
        loss: Any = torch.utils.checkpoint.checkpoint(
            LOSSES[name], logits, ids, use_reentrant=reentrant
        )
        loss.backward()
        found.append((loss.detach(), weight.grad, model.model.norm.weight.grad))
        hfpatch.apply(model, mode="training", include="lm_head")
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_transformers_loss_and_ours_with_items() -> None:
    import hfpatch.loss

    for function in (ForCausalLMLoss, hfpatch.loss.causal_lm):
        model = training_model()
        ids = ids_of(model)
        expected = step(model, ids, num_items_in_batch=torch.tensor(40))
        hfpatch.apply(model, mode="training", include="lm_head")
        model.loss_function = function
        for ours, theirs in zip(
            step(model, ids, num_items_in_batch=torch.tensor(40)), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, largest: list[int]) -> None:
    model = training_model()
    ids = ids_of(model)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            loss = model(input_ids=ids, labels=ids).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, [model.lm_head.weight])))
        hfpatch.apply(model, mode="training", include="lm_head")
    assert largest
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-3)


@pytest.mark.parametrize("first", ["patched", "cast"])
def test_an_fp32_head_whose_input_a_hook_casts(first: str, largest: list[int]) -> None:
    """As PEFT and TRL make one (`cast_lm_head_to_fp32`)."""

    def cast(model: Any) -> None:
        model.lm_head.float().register_forward_pre_hook(
            lambda m, args: (args[0].to(torch.float32), *args[1:])
        )

    model = training_model(dtype=torch.bfloat16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    twin = copy.deepcopy(model)
    cast(twin)
    if first == "cast":
        cast(model)
    report = hfpatch.apply(model, mode="training", include="lm_head")
    assert head_of(report) == ["lm_head"]
    if first == "patched":
        cast(model)
    ids = ids_of(model)
    output = model(input_ids=ids, labels=ids)
    assert output.logits.dtype == torch.float32 and output.logits._made is None
    output.loss.backward()
    expected = twin(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0.0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype == q.grad.dtype  # type: ignore[union-attr]
        eps = 1e-5 if name == "lm_head.weight" else 2**-7
        off = (p.grad - q.grad).abs().max()  # type: ignore[operator]
        assert off <= eps * q.grad.abs().max(), name  # type: ignore[union-attr]


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda m, args, out: out * 2)


def replaced(model: Any) -> None:
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * 3


def hooked_before(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


@pytest.mark.parametrize("change", [hooked, hooked_before, replaced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", ["patched", "changed"])
def test_what_stands_at_the_head_is_honoured(change: Any, first: str) -> None:
    model, plain_model = training_model(), training_model()
    change(plain_model)
    if first == "changed":
        change(model)
    hfpatch.apply(model, mode="training")
    if first == "patched":
        change(model)
    ids = ids_of(model)
    for ours, theirs in zip(step(model, ids), step(plain_model, ids), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_no_plain_linear_layer_is_left_alone() -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = training_model()
    model.lm_head = Head(model.config.hidden_size, model.config.vocab_size, bias=False)
    report = hfpatch.apply(model, mode="training")
    assert not head_of(report)
    assert any(s.path == "lm_head" and "`Head`" in s.reason for s in report.skips), report


def test_checkpointing_and_accumulation() -> None:
    pair = []
    for patched in (False, True):
        model = training_model()
        model.gradient_checkpointing_enable()
        if patched:
            hfpatch.apply(model, mode="training")
        for seed in (1, 2):
            ids = ids_of(model, seed)
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        pair.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)


def test_compiled() -> None:
    model = training_model()
    ids = ids_of(model)
    expected = step(model, ids)
    hfpatch.apply(model, mode="training")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for ours, theirs in zip(step(compiled, ids), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_trainer(tmp_path: Path) -> None:
    found = []
    for patched in (False, True):
        model = training_model()
        if patched:
            hfpatch.apply(model, mode="training")
        rows = [{"input_ids": r, "labels": r} for r in ids_of(model).tolist() * 2]
        logged = trainer.logged(model, rows, tmp_path / str(patched), 3)
        found.append(torch.tensor([[e["loss"], e["grad_norm"]] for e in logged]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
