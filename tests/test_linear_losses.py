"""Losses that take a head in place of logits, against formulas in fp64 on whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pieces import small_pieces
from torch import Tensor

from hfpatch import loss
from hfpatch.losses import head_loss

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLASSES, WIDTH = 199, 32
#: Of the largest value: roundings of the logits and of their gradient.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def largest(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small, odd pieces, and how many logits existed at a time."""
    return small_pieces(monkeypatch, 4096)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu") * scale


def targets(seed: int, *shape: int) -> Tensor:
    found = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[1::5] = -100
    return found


def leaves(dtype: torch.dtype, rows: tuple[int, ...], bias: bool, seed: int = 0) -> list[Any]:
    return [
        drawn(seed, *rows, WIDTH).to(dtype),
        drawn(seed + 100, CLASSES, WIDTH, scale=0.3).to(dtype),
        drawn(seed + 200, CLASSES).to(dtype) if bias else None,
    ]


def run(function: Any, tensors: list[Any]) -> list[Tensor]:
    own = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    value = function(*own)
    upstream = torch.linspace(0.5, 2.0, value.numel()).to(value).reshape(value.shape)
    return [
        value.detach(),
        *torch.autograd.grad(value, [t for t in own if t is not None], upstream),
    ]


def compare(ours: Any, theirs: Any, tensors: list[Any], steep: float = 1.0) -> None:
    """`theirs` in fp64; both take (hidden, weight, bias). `steep`: how much of a rounding of a
    log-probability the loss makes."""
    dtype = tensors[0].dtype
    found = run(ours, tensors)
    truth = run(theirs, [None if t is None else t.double() for t in tensors])
    for name, a, b in zip(("loss", "hidden", "weight", "bias"), found, truth, strict=False):
        assert a.shape == b.shape and a.isfinite().all(), name
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= steep * TOLERANCE[dtype], (name, float(error))


def whole(
    x: Tensor, w: Tensor, b: Any, scale: float = 1.0, cap: float = 0.0, t: float = 1.0
) -> Any:
    y = F.linear(x, w, b) * scale
    return (torch.tanh(y / cap) * cap if cap else y) / t


def log_probs(x: Tensor, w: Tensor, b: Any, target: Tensor, **kw: Any) -> Tensor:
    lp = whole(x, w, b, **kw).log_softmax(-1)
    return torch.where(target == -100, 0.0, lp.gather(-1, target.clamp(min=0)[..., None])[..., 0])


def entropy_of(x: Tensor, w: Tensor, b: Any, target: Tensor, **kw: Any) -> Tensor:
    lp = whole(x, w, b, **kw).log_softmax(-1)
    return torch.where(target == -100, 0.0, -(lp.exp() * lp).sum(-1))


FORMS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"scale": 0.5, "softcap": 3.0},
    {"scale": 2.0, "softcap": 3.0, "temperature": 1.5},
]


def short(form: dict[str, float]) -> dict[str, float]:
    return {{"softcap": "cap", "temperature": "t"}.get(k, k): v for k, v in form.items()}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs(dtype: torch.dtype, form: Any, bias: bool, largest: list[int]) -> None:
    target = targets(3, 3, 17)
    tensors = leaves(dtype, (3, 17), bias)
    compare(
        lambda x, w, b: loss.linear_log_probs(x, w, target, b, **form),
        lambda x, w, b: log_probs(x, w, b, target, **short(form)),
        tensors,
    )
    compare(
        lambda x, w, b: torch.stack([*loss.linear_log_probs_and_entropy(x, w, target, b, **form)]),
        lambda x, w, b: torch.stack(
            [log_probs(x, w, b, target, **short(form)), entropy_of(x, w, b, target, **short(form))]
        ),
        tensors,
    )
    assert max(largest) <= 17 * CLASSES, "all logits at once"


CROSS: list[dict[str, Any]] = [
    {"z_loss": 0.1},
    {"z_loss": 0.1, "label_smoothing": 0.2, "softcap": 4.0, "scale": 0.5},
    {"class_weight": True},
    {"class_weight": True, "label_smoothing": 0.2, "z_loss": 0.05},
    {"z_loss": 0.1, "reduction": "sum"},
    {"class_weight": True, "reduction": "none"},
    {"num_items": 17, "z_loss": 0.01},
    {"num_items": torch.tensor([17])},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CROSS, ids=str)
@pytest.mark.parametrize("metrics", [False, True])
def test_cross_entropy(dtype: torch.dtype, options: Any, metrics: bool) -> None:
    if metrics and options.get("reduction") == "none":
        pytest.skip("metrics are of sums")
    target, kw = targets(3, 51), dict(options)
    class_weight = torch.linspace(0.1, 2.0, CLASSES) if kw.pop("class_weight", None) else None
    counted = target != -100

    def theirs(x: Tensor, w: Tensor, b: Any) -> Tensor:
        y = whole(x, w, b, kw.get("scale", 1.0), kw.get("softcap", 0.0))
        reduction, items = kw.get("reduction", "mean"), kw.get("num_items")
        z = kw.get("z_loss", 0.0) * y.logsumexp(-1).square() * counted
        value = F.cross_entropy(
            y, target, None if class_weight is None else class_weight.double(),
            label_smoothing=kw.get("label_smoothing", 0.0),
            reduction="sum" if items is not None else reduction,
        )  # fmt: skip
        if reduction == "none":
            return value + z
        if items is not None:
            return ((value + z.sum()) / items).reshape(())
        return value + (z.sum() if reduction == "sum" else z.sum() / counted.sum())

    function = loss.linear_cross_entropy
    if metrics:
        function = lambda *a, **k: loss.linear_cross_entropy_and_metrics(*a, **k).loss  # type: ignore  # noqa: E731
    compare(
        lambda x, w, b: function(x, w, target, b, class_weight=class_weight, **kw),
        theirs,
        leaves(dtype, (51,), True),
    )


def test_metrics() -> None:
    x, w, b = leaves(torch.float32, (51,), True)
    target = targets(3, 51)
    y = whole(x, w, b)
    target[:20] = y[:20].argmax(-1)
    target[3] = -100
    found = loss.linear_cross_entropy_and_metrics(x, w, target, b, z_loss=0.1)
    counted = target != -100
    assert float(found.accuracy) == pytest.approx(
        float((y.argmax(-1) == target)[counted].float().mean())
    )
    lp = y.log_softmax(-1)
    entropy = -(lp.exp() * lp).sum(-1)[counted].mean()
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(found.z_loss, 0.1 * y.logsumexp(-1)[counted].square().mean())
    torch.testing.assert_close(found.loss, F.cross_entropy(y, target) + found.z_loss)


# Distillation -------------------------------------------------------------------------------------


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Of probabilities, by the definition."""
    if beta in (0.0, 1.0):
        a, b = (q, p) if beta == 0.0 else (p, q)
        return (a * (a.log() - b.log())).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


DISTANCES: dict[str, tuple[Any, Any]] = {
    "jsd": (loss.linear_jsd, lambda p, q: jsd(p, q, 0.5)),
    "jsd 0.1": (lambda *a, **k: loss.linear_jsd(*a, beta=0.1, **k), lambda p, q: jsd(p, q, 0.1)),
    "jsd 0": (lambda *a, **k: loss.linear_jsd(*a, beta=0.0, **k), lambda p, q: jsd(p, q, 0.0)),
    "kl": (loss.linear_kl, lambda p, q: jsd(p, q, 0.0)),
    "reverse": (lambda *a, **k: loss.linear_kl(*a, reverse=True, **k), lambda p, q: jsd(p, q, 1.0)),
    "tvd": (loss.linear_tvd, lambda p, q: (p - q).abs().sum(-1) / 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("ready", [False, True], ids=["teacher's head", "teacher's logits"])
def test_distances(
    name: str, form: Any, ready: bool, dtype: torch.dtype, largest: list[int]
) -> None:
    ours, theirs = DISTANCES[name]
    if name == "tvd" and dtype != torch.float32:
        pytest.skip("its gradient jumps where p = q")
    kind = torch.float32 if dtype == torch.float32 else dtype
    hidden, weight = drawn(7, 3, 17, 24).to(kind), drawn(8, CLASSES, 24, scale=0.3).to(kind)
    mask = targets(3, 3, 17) != -100
    logits = F.linear(hidden.double(), weight.double())
    teacher = loss.Teacher(hidden, weight)
    if ready:
        teacher = loss.Teacher(logits.to(kind))
        logits = teacher.hidden.double()
    q = (logits / form.get("temperature", 1.0)).softmax(-1)

    def truth(x: Tensor, w: Tensor, b: Any) -> Tensor:
        found = theirs(whole(x, w, b, **short(form)).softmax(-1), q)
        return torch.where(mask, found, 0.0).sum() / mask.sum()

    compare(
        lambda x, w, b: ours(x, w, teacher, b, mask=mask, **form),
        truth,
        leaves(dtype, (3, 17), True),
    )
    assert max(largest) <= 17 * CLASSES, "all logits at once"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_odd_number_of_classes(
    form: Any, largest: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the head has more classes there, which no result knows."""
    monkeypatch.setattr(head_loss, "PADDED", frozenset({"cpu"}))
    test_log_probs(torch.bfloat16, form, True, largest)
    test_distances("jsd", form, False, torch.bfloat16, largest)


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_from_a_teacher_of_another_form(name: str) -> None:
    """With a width, a bias, a scale and a softcap of its own, none of them the student's."""
    ours, theirs = DISTANCES[name]
    x, w, _ = leaves(torch.float32, (3, 17), False)
    hidden, weight, bias = drawn(7, 3, 17, 40), drawn(8, CLASSES, 40, scale=0.3), drawn(9, CLASSES)
    teacher = loss.Teacher(hidden, weight, bias, scale=0.7, softcap=3.0)
    form = {"temperature": 1.5, "scale": 1.2}
    wide = (t.double() for t in (hidden, weight, bias))
    q = whole(*wide, scale=0.7, cap=3.0, t=1.5).softmax(-1)
    p = whole(x.double(), w.double(), None, scale=1.2, t=1.5).softmax(-1)
    got = ours(x, w, teacher, **form)
    torch.testing.assert_close(got.double(), theirs(p, q).mean(), rtol=1e-5, atol=1e-7)


def test_distances_reduced() -> None:
    x, w, _ = leaves(torch.float32, (4, 5), False)
    teacher = loss.Teacher(drawn(9, 4, 5, CLASSES))
    each = loss.linear_jsd(x, w, teacher, reduction="none")
    assert each.shape == (4, 5) and (each > 0).all() and (each < math.log(2)).all()
    for got, expected in (
        (loss.linear_jsd(x, w, teacher, reduction="sum"), each.sum()),
        (loss.linear_jsd(x, w, teacher, num_items=7), each.sum() / 7),
    ):
        torch.testing.assert_close(got, expected)
    none = torch.zeros(4, 5)
    assert loss.linear_jsd(x, w, teacher, mask=none) == 0
    same = loss.linear_jsd(x, w, loss.Teacher(x, w))
    assert abs(float(same)) < 1e-6


# Preferences --------------------------------------------------------------------------------------
# The formulas of TRL 1.16 (DPOTrainer, CPOTrainer, ORPOTrainer, KTOTrainer, GRPOTrainer), over
# fp64 log-probabilities of whole logits.

BETA = 0.4


def pairs() -> tuple[Tensor, Tensor]:
    target = targets(3, 6, 9)
    target[0, 4:] = -100
    reference = torch.where(target == -100, 0.0, -5 + drawn(5, 6, 9).double())
    return target, reference


def dpo(kind: str, lp: Tensor, reference: Tensor, n: Tensor, s: float) -> Tensor:
    ls = F.logsigmoid
    sums, ref = lp.sum(-1), reference.sum(-1)
    (c, r), (nc, nr) = (sums - ref).chunk(2), n.chunk(2)
    z = BETA * (c - r)
    if kind == "sigmoid":
        return -ls(z) * (1 - s) - ls(-z) * s
    if kind == "robust":
        return (-(1 - s) * ls(z) + s * ls(-z)) / (1 - 2 * s)
    if kind == "exo_pair":
        p = torch.sigmoid(z)
        return p * (p.log() - math.log(1 - s)) + (1 - p) * ((1 - p).log() - math.log(s))
    if kind.startswith("aot"):
        if kind == "aot":
            (pc, pr), (fc, fr) = sums.chunk(2), ref.chunk(2)
            d = (pc - pr).sort()[0] - (fc - fr).sort()[0]
        else:
            d = c.sort()[0] - r.sort()[0]
        return -ls(BETA * d) * (1 - s) - ls(-BETA * d) * s
    e = torch.sigmoid(z / 0.05)
    return {
        "hinge": (1 - z).clamp(min=0),
        "ipo": (c / nc - r / nr - 1 / (2 * BETA)) ** 2,
        "nca_pair": -ls(BETA * c) - 0.5 * ls(-BETA * c) - 0.5 * ls(-BETA * r),
        "bco_pair": -ls(BETA * c) - ls(-BETA * r),
        "sppo_hard": (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
        "apo_zero": 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r),
        "apo_down": torch.sigmoid(BETA * c) + 1 - torch.sigmoid(z),
        "discopop": -ls(z) * (1 - e) + torch.exp(-z) * e,
        "sigmoid_norm": -ls(BETA * (c / nc - r / nr)),
    }[kind]


def calm(dtype: torch.dtype, rows: tuple[int, ...], bias: bool = True) -> list[Any]:
    """Small logits: a sequence's log-probability is a sum, and a loss of it may be steep."""
    x, w, b = leaves(dtype, rows, bias)
    return [x * 0.25, w * 0.25, None if b is None else b * 0.25]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
             "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"]
)  # fmt: skip
@pytest.mark.parametrize("free", [False, True], ids=["reference", "reference-free"])
def test_dpo(kind: str, free: bool, dtype: torch.dtype, largest: list[int]) -> None:
    target, reference = pairs()
    if kind == "discopop" or (free and kind == "exo_pair"):
        # exponentials of 20 times a log-ratio say little about roundings of half types
        dtype = torch.float32
    if free:
        reference = torch.zeros_like(reference)
    elif kind != "ipo":  # a policy near its reference, as one is
        x, w, b = (t.double() for t in calm(dtype, (6, 9)))
        reference = log_probs(x, w, b, target) + 0.05 * reference
    smoothing = 0.1 if kind in ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired") else 0.0
    n = (target != -100).sum(-1)
    tensors = calm(dtype, (6, 9))
    for given in (reference, reference.sum(-1)):
        compare(
            lambda x, w, b, given=given: loss.linear_dpo(
                x, w, target, b, reference=None if free else given, beta=BETA, loss_type=kind,
                label_smoothing=smoothing,
            ).loss,
            lambda x, w, b: dpo(kind, log_probs(x, w, b, target), reference, n, smoothing).mean(),
            tensors,
            20.0 if kind == "discopop" else 1.0,  # a sigmoid of log-ratios over 0.05
        )  # fmt: skip
    assert max(largest) <= 20 * CLASSES


def test_what_a_preference_tells() -> None:
    target, reference = pairs()
    x, w, b = calm(torch.float32, (6, 9))
    found = loss.linear_dpo(x, w, target, b, reference=reference, beta=BETA)
    sums = log_probs(x, w, b, target).sum(-1)
    torch.testing.assert_close(found.chosen_log_probs, sums[:3])
    torch.testing.assert_close(found.rejected_log_probs, sums[3:])
    rewards = (BETA * (sums - reference.sum(-1))).float()
    torch.testing.assert_close(found.chosen_rewards, rewards[:3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.rejected_rewards, rewards[3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo"])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_cpo(kind: str, alpha: float, dtype: torch.dtype) -> None:
    target, _ = pairs()

    def theirs(x: Tensor, w: Tensor, b: Any) -> Tensor:
        lp, counted = log_probs(x, w, b, target), target != -100
        values = lp.sum(-1) / (counted.sum(-1) if kind in ("ipo", "simpo") else 1)
        d = values[:3] - values[3:]
        if kind == "simpo":
            d = d - 0.5 / BETA
        z = BETA * d
        found = -F.logsigmoid(z) * 0.9 - F.logsigmoid(-z) * 0.1
        if kind == "hinge":
            found = (1 - z).clamp(min=0)
        elif kind == "ipo":
            found = (d - 1 / (2 * BETA)) ** 2
        return found.mean() + alpha * -lp[:3].sum() / counted[:3].sum()

    options = {"beta": BETA, "label_smoothing": 0.1}
    compare(
        lambda x, w, b: (
            loss.linear_cpo(x, w, target, b, loss_type=kind, cpo_alpha=alpha, **options).loss
        ),
        theirs,
        calm(dtype, (6, 9)),
    )
    if kind == "simpo" and not alpha:
        compare(
            lambda x, w, b: loss.linear_simpo(x, w, target, b, gamma=0.5, **options).loss,
            theirs,
            calm(dtype, (6, 9)),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prompt", [False, True])
def test_orpo(prompt: bool, dtype: torch.dtype) -> None:
    target, _ = pairs()
    whole_target = target[:3].clone()
    if prompt:
        whole_target[:, 3] = torch.where(target[:3, 3] == -100, 11, target[:3, 3])
        whole_target[0, 6] = 12

    def theirs(x: Tensor, w: Tensor, b: Any) -> Tensor:
        lp = log_probs(x, w, b, target)
        values = lp.sum(-1) / (target != -100).sum(-1)
        odds = values - torch.log(-torch.expm1(values))
        nll = F.cross_entropy(whole(x[:3], w, b).flatten(0, 1), whole_target.flatten())
        return nll - BETA * F.logsigmoid(odds[:3] - odds[3:]).mean()

    compare(
        lambda x, w, b: (
            loss.linear_orpo(
                x, w, target, b, beta=BETA, nll_target=whole_target if prompt else None
            ).loss
        ),
        theirs,
        calm(dtype, (6, 9)),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind: str, dtype: torch.dtype) -> None:
    target, reference = pairs()
    x, w, b = (t.double() for t in calm(dtype, (6, 9)))
    reference = log_probs(x, w, b, target) + 0.05 * reference
    wanted = torch.tensor([1, 0, 0, 1, 1, 0])
    kl = 0.3 if kind == "kto" else 0.0

    def theirs(x: Tensor, w: Tensor, b: Any) -> Tensor:
        d = (log_probs(x, w, b, target) - reference).sum(-1)
        good = 1 - torch.sigmoid(BETA * (d - kl))
        bad = 1 - torch.sigmoid(BETA * (kl - d))
        return torch.where(wanted.bool(), 1.5 * good, 0.5 * bad).mean()

    compare(
        lambda x, w, b: loss.linear_kto(
            x, w, target, wanted, b, reference=reference, kl=torch.tensor(0.3), beta=BETA,
            loss_type=kind, desirable_weight=1.5, undesirable_weight=0.5,
        ).loss,
        theirs,
        calm(dtype, (6, 9)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo"])
def test_grpo(kind: str, kl: float, level: str, dtype: torch.dtype) -> None:
    target, _ = pairs()
    mask = (target != -100).double()
    x, w, b = (t.double() for t in calm(dtype, (6, 9)))
    now = log_probs(x, w, b, target, t=0.9)
    # on both sides of the clip, none within the rounding of its edges
    old = now + torch.tensor([0.0, 0.1, -0.1, 0.6, -0.6]).repeat(11)[:54].view(6, 9).double()
    ref = now + 0.2 * drawn(6, 6, 9).double()
    advantages = drawn(7, 6)
    delta = 1.5 if kind == "dapo" else None
    options = {"epsilon_low": 0.2, "epsilon_high": 0.3 if kind != "cispo" else 1.4, "beta": kl}

    def theirs(x: Tensor, w: Tensor, b: Any) -> Tensor:
        new = log_probs(x, w, b, target, t=0.9)
        log_ratio = (new - old) * mask
        if level == "sequence":
            log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        ratio, gain = log_ratio.exp(), advantages.double()[:, None]
        if kind == "cispo":
            each = -ratio.clamp(max=1.4).detach() * gain * new
        elif kind == "sapo":
            gate = torch.where(gain > 0, 1.0, 1.05)
            each = -torch.sigmoid(gate * (ratio - 1)) * 4 / gate * gain
        else:
            first = ratio if delta is None else ratio.clamp(max=delta)
            each = -torch.minimum(first * gain, ratio.clamp(0.8, 1.3) * gain)
        if kl:
            each = each + kl * (torch.exp(ref - new) - (ref - new) - 1)
        each = each * mask
        return {
            "grpo": (each.sum(-1) / mask.sum(-1)).mean(),
            "sapo": (each.sum(-1) / mask.sum(-1)).mean(),
            "bnpo": each.sum() / mask.sum(),
            "dr_grpo": each.sum() / (6 * 20),
            "luspo": each.sum(-1).mean(),
        }.get(kind, each.sum() / 31)

    compare(
        lambda x, w, b: loss.linear_grpo(
            x, w, target, advantages, b, old_log_probs=old, ref_log_probs=ref, delta=delta,
            loss_type=kind, importance_sampling_level=level, max_completion_length=20,
            num_items=31, temperature=0.9, **options,
        ).loss,
        theirs,
        calm(dtype, (6, 9)),
    )  # fmt: skip


def test_grpo_of_the_policy_that_sampled() -> None:
    target, _ = pairs()
    x, w, b = calm(torch.float32, (6, 9))
    x.requires_grad_()
    advantages = drawn(7, 6)
    found = loss.linear_grpo(x, w, target, advantages, b, loss_type="bnpo")
    counted = (target != -100).sum(-1)
    expected = -(advantages * counted).sum() / counted.sum()
    torch.testing.assert_close(found.loss.detach(), expected)
    assert found.clip_ratio == 0 and found.kl == 0
    found.loss.backward()
    assert x.grad.abs().max() > 0  # type: ignore[union-attr]
    assert not x.grad[target == -100].any()  # type: ignore[index]
    # what is given of ignored tokens may be anything
    old = torch.where(target == -100, float("-inf"), found.log_probs)
    again = loss.linear_grpo(x, w, target, advantages, b, loss_type="bnpo", old_log_probs=old)
    torch.testing.assert_close(again.loss, found.loss)


# What is asked of all -----------------------------------------------------------------------------


def every(x: Tensor, w: Tensor, target: Tensor, b: Any = None) -> dict[str, Tensor]:
    """x [2 n, S, H]"""
    teacher = loss.Teacher(drawn(9, *target.shape, CLASSES))
    advantages = torch.ones(len(target), device="cpu")
    return {
        "log_probs": loss.linear_log_probs(x, w, target, b).sum(),
        "entropy": loss.linear_log_probs_and_entropy(x, w, target, b).entropy.sum(),
        "z": loss.linear_cross_entropy(x, w, target, b, z_loss=0.1, reduction="sum"),
        "jsd": loss.linear_jsd(x, w, teacher, b, mask=target != -100),
        "dpo": loss.linear_dpo(x, w, target, b, reference=None).loss,
        "grpo": loss.linear_grpo(x, w, target, advantages, b).loss,
        "kto": loss.linear_kto(x, w, target, advantages, b, reference=None).loss,
    }


def test_all_ignored() -> None:
    x, w = drawn(1, 4, 5, WIDTH).requires_grad_(), drawn(2, CLASSES, WIDTH).requires_grad_()
    for name, value in every(x, w, torch.full((4, 5), -100)).items():
        assert value.isfinite(), name
        gx, gw = torch.autograd.grad(value, [x, w])
        assert not gx.any() and not gw.any(), name


def test_under_another_default_device() -> None:
    x, w, target = drawn(1, 4, 5, WIDTH), drawn(2, CLASSES, WIDTH), targets(3, 4, 5)
    w.requires_grad_()
    expected = every(x, w, target)
    with torch.device("meta"):
        found = every(x, w, target)
        for name, value in found.items():
            value.backward()
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    x, w = torch.empty(*shape, WIDTH).requires_grad_(), drawn(2, CLASSES, WIDTH).requires_grad_()
    for name, value in every(x, w, torch.empty(shape, dtype=torch.int64)).items():
        gx, gw = torch.autograd.grad(value, [x, w])
        assert gx.shape == x.shape and not gw.nan_to_num().any(), name


def test_nan_comes_out_and_only_where_it_went_in() -> None:
    x, w = drawn(1, 4, 5, WIDTH), drawn(2, CLASSES, WIDTH)
    target = torch.randint(CLASSES, (4, 5))
    clean = loss.linear_log_probs_and_entropy(x, w, target)
    x[1, 2] = float("nan")
    found = loss.linear_log_probs_and_entropy(x, w, target)
    for a, b in zip(found, clean, strict=True):
        assert a.isnan().nonzero().tolist() == [[1, 2]]
        torch.testing.assert_close(a.nan_to_num(0), b.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.0)))  # fmt: skip  # noqa: E501
    for name, value in every(x, w, target).items():
        assert value.isnan() or name == "kto", name  # TRL's leaves NaN out of its mean
    target[1, 2] = -100  # nobody asks for that row
    for name, value in every(x, w, target).items():
        assert value.isfinite(), name


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen(frozen: str) -> None:
    x, w = drawn(1, 4, 5, WIDTH), drawn(2, CLASSES, WIDTH)
    target = targets(3, 4, 5)
    leaf = w if frozen == "hidden" else x
    expected = every(x.requires_grad_(), w.requires_grad_(), target)
    truth = {n: torch.autograd.grad(v, leaf)[0] for n, v in expected.items()}
    (x if frozen == "hidden" else w).requires_grad_(False)
    for name, value in every(x, w, target).items():
        torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], truth[name])


def test_fp32_parameters_under_autocast() -> None:
    x, w, target = drawn(1, 4, 5, WIDTH).bfloat16(), drawn(2, CLASSES, WIDTH), targets(3, 4, 5)
    w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for name, value in every(x, w, target).items():
            assert torch.autograd.grad(value, w)[0].dtype == torch.float32, name
            assert value.dtype == torch.float32, name


@pytest.mark.parametrize("rows", [(6, 9), (0, 9)], ids=["rows", "none"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_fp32_head_of_half_states(
    dtype: torch.dtype, rows: tuple[int, int], largest: list[int]
) -> None:
    """Its logits are fp32: the loss and the weight's gradient are as near as those of fp32."""
    x, (_, w, b), target = calm(dtype, rows)[0], calm(torch.float32, rows), targets(3, *rows)
    own = [t.requires_grad_() for t in (x, w, b)]
    wide = [t.detach().double().requires_grad_() for t in own]
    found, truth = every(own[0], own[1], target, own[2]), every(wide[0], wide[1], target, wide[2])
    for name in found:
        assert found[name].dtype == torch.float32, name
        error = (found[name].double() - truth[name]).abs()
        assert not rows[0] or error <= 2e-5 * truth[name].abs().clamp(min=1), name
        pairs_of = zip(
            own,
            torch.autograd.grad(found[name], own),
            torch.autograd.grad(truth[name], wide),
            strict=True,
        )
        for leaf, a, e in pairs_of:
            assert a.dtype == leaf.dtype and a.shape == leaf.shape, name
            if rows[0]:
                eps = 2e-5 if leaf is not x else torch.finfo(dtype).eps
                # what is below the smallest number of fp16 is rounded to its multiples
                least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                assert (a.double() - e).abs().max() <= eps * e.abs().max() + least, (name, a.dtype)
    assert max(largest) <= 20 * CLASSES, "all logits at once"


def test_an_fp32_teacher_of_half_states() -> None:
    x, w, _ = calm(torch.float32, (6, 9))
    hidden, weight = drawn(7, 6, 9, 24).bfloat16(), drawn(8, CLASSES, 24, scale=0.3)
    ours = loss.linear_jsd(x, w, loss.Teacher(hidden, weight))
    whole_teacher = loss.Teacher(hidden.double(), weight.double())
    truth = loss.linear_jsd(x.double(), w.double(), whole_teacher)
    torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=1e-7)


def good() -> dict[str, Any]:
    return {
        "hidden": torch.zeros(4, 5, WIDTH),
        "weight": torch.zeros(CLASSES, WIDTH),
        "target": torch.zeros(4, 5, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        ("log_probs", {"target": torch.full((4, 5), 199)}, "`target`: expected 0 to 198, or "
         "`ignore_index` -100, got 199; is the tokenizer larger"),
        ("cross_entropy", {"target": torch.full((4, 5), -1)}, "expected 0 to 198.*got -1"),
        ("log_probs", {"temperature": 0.0}, "`temperature`: expected more than 0, got 0.0"),
        ("log_probs", {"weight": torch.zeros(9, 3)}, r"`weight`: expected \[V, 32\].*got \[9, 3\]"),
        ("cross_entropy", {"class_weight": torch.ones(3), "bias": None},
         r"`class_weight`: expected \[199\], got \[3\]"),
        ("cross_entropy", {"num_items": 3, "reduction": "sum"}, "`num_items`: expected it with"),
        ("dpo", {"reference": None, "loss_type": "best"}, "`loss_type`: expected one of sigmoid,"),
        ("dpo", {"reference": None, "beta": 0.0}, "`beta`: expected more than 0, got 0.0"),
        ("dpo", {"reference": torch.zeros(3)}, r"`reference`: .* \[4, 5\] or \[4\], got \[3\]"),
        ("dpo", {"reference": None, "loss_type": "exo_pair"}, "`label_smoothing`: expected more"),
        ("cpo", {"hidden": torch.zeros(3, 5, WIDTH), "target": torch.zeros(3, 5).long()},
         r"`target`: expected \[2 B, S\].* got \[3, 5\]"),
        ("orpo", {"nll_target": torch.zeros(4, 5).long()}, r"`nll_target`: .*\[2, 5\].*\[4, 5\]"),
        ("kto", {"desirable": torch.ones(3), "reference": None}, r"`desirable`: .*got \[3\]"),
        ("grpo", {"advantages": torch.ones(3)}, r"`advantages`: expected .*got \[3\]"),
        ("grpo", {"advantages": torch.ones(4), "beta": 0.1}, "`ref_log_probs`: expected them"),
        ("grpo", {"advantages": torch.ones(4), "loss_type": "dr_grpo"}, "`max_completion_length`"),
    ],
)  # fmt: skip
def test_bad_input(function: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(loss, f"linear_{function}")(**{**good(), **changed})


@pytest.mark.parametrize(
    ("function", "changed", "name", "kind"),
    [
        *((f, {"target": None}, "target", "NoneType") for f in
          ("dpo", "cpo", "simpo", "orpo", "kto", "grpo", "log_probs", "cross_entropy")),
        *((f, {"hidden": [1.0]}, "hidden", "list") for f in
          ("dpo", "cpo", "simpo", "orpo", "kto", "grpo", "log_probs", "jsd", "kl", "tvd")),
        *((f, {"weight": 3}, "weight", "int") for f in ("dpo", "orpo", "kto", "grpo", "jsd")),
        *((f, {"bias": [0.0]}, "bias", "list") for f in ("dpo", "cpo", "kto", "grpo", "tvd")),
        ("kto", {"desirable": [1, 0, 0, 1]}, "desirable", "list"),
        ("kto", {"reference": [0.0]}, "reference", "list"),
        ("dpo", {"reference": [0.0]}, "reference", "list"),
        ("orpo", {"nll_target": [[1]]}, "nll_target", "list"),
        ("grpo", {"advantages": None}, "advantages", "NoneType"),
        ("grpo", {"old_log_probs": [[0.0]]}, "old_log_probs", "list"),
        ("grpo", {"ref_log_probs": 0.0}, "ref_log_probs", "float"),
        ("cross_entropy", {"class_weight": [1.0]}, "class_weight", "list"),
        ("jsd", {"mask": [1]}, "mask", "list"),
    ],
)  # fmt: skip
def test_what_is_no_tensor(function: str, changed: dict[str, Any], name: str, kind: str) -> None:
    given = good()
    if function in ("jsd", "kl", "tvd"):
        del given["target"]
        given["teacher"] = loss.Teacher(torch.zeros(4, 5, CLASSES))
    given |= {
        "dpo": {"reference": None},
        "kto": {"reference": None, "desirable": torch.ones(4)},
        "grpo": {"advantages": torch.ones(4)},
    }.get(function, {})
    with pytest.raises(TypeError, match=f"`{name}`: expected a tensor, got {kind}$"):
        getattr(loss, f"linear_{function}")(**{**given, **changed})


def test_a_teacher_of_no_tensor() -> None:
    given = good()
    hidden: Any = [0.0]
    with pytest.raises(TypeError, match="`teacher`: expected a tensor as its `hidden`, got list"):
        loss.linear_jsd(given["hidden"], given["weight"], loss.Teacher(hidden))


#: Of which rows nothing counts, and whether the loss is then a number.
WITHOUT_A_TOKEN: list[tuple[str, dict[str, Any], tuple[int, ...], bool]] = [
    ("simpo", {}, (0,), False),
    ("simpo", {}, (2,), False),
    ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0}, (3,), False),
    ("cpo", {"loss_type": "ipo", "cpo_alpha": 0.0}, (0,), False),
    ("cpo", {"loss_type": "sigmoid"}, (0,), True),
    ("cpo", {"loss_type": "hinge"}, (3,), True),
    ("cpo", {"loss_type": "sigmoid"}, (0, 1), False),
    ("cpo", {"loss_type": "sigmoid", "cpo_alpha": 0.0}, (0, 1), True),
    ("orpo", {}, (0,), False),
    ("orpo", {}, (3,), False),
]


@pytest.mark.parametrize(("function", "options", "ignored", "finite"), WITHOUT_A_TOKEN, ids=str)
def test_rows_without_a_token(
    function: str, options: Any, ignored: tuple[int, ...], finite: bool
) -> None:
    """A mean over no token is NaN, as in TRL's formulas; sums are 0."""
    x, w = drawn(1, 4, 5, WIDTH).requires_grad_(), drawn(2, CLASSES, WIDTH).requires_grad_()
    target = torch.randint(CLASSES, (4, 5), generator=torch.Generator().manual_seed(0))
    target[list(ignored)] = -100
    found = getattr(loss, f"linear_{function}")(x, w, target, **options)
    assert found.loss.isfinite() == finite and found.loss.isnan() != finite
    found.loss.backward()
    assert x.grad is not None and x.grad[list(ignored)].nan_to_num().abs().max() == 0


@pytest.mark.parametrize(
    ("teacher", "options", "message"),
    [
        (loss.Teacher(torch.zeros(4, 5, 3)), {}, r"`teacher`: expected logits of shape"),
        (loss.Teacher(torch.zeros(4, 5, 3), torch.zeros(7, 3)), {}, "student's 199 classes, got 7"),
        (loss.Teacher(torch.zeros(4, 5, 3), torch.zeros(CLASSES, 2)), {}, "hidden of shape"),
        (loss.Teacher(torch.zeros(4, 5, CLASSES)), {"beta": 2.0}, "`beta`: expected 0 to 1, got 2"),
        (loss.Teacher(torch.zeros(4, 5, CLASSES)), {"mask": torch.ones(4)}, r"`mask`: .*got \[4\]"),
    ],
)  # fmt: skip
def test_bad_teachers(teacher: Any, options: Any, message: str) -> None:
    given = good()
    with pytest.raises(ValueError, match=message):
        loss.linear_jsd(given["hidden"], given["weight"], teacher, **options)
