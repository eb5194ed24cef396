"""What losses need of each row of a linear head's logits, which never exist all at once.

Log-probability of the target, `lse` (the logarithm of the sum of exponentials), a weighted mean of
the logits, entropy, and the class of the largest logit: each is made of some rows' logits at a time
in the forward. In the backward the logits of some classes are made once more, as in `head_loss`,
whose gradients of the head these are. All by PyTorch's operators in fp32 (fp64 stays fp64);
where `head_loss` has a kernel for what is asked, `linear_log_probs` takes that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hfpatch.losses import head_loss
from hfpatch.losses.head_loss import (
    check_head,
    check_tensors_or_none,
    linear_cross_entropy,
    refusal,
    shaped,
)
from hfpatch.proof.subject import no_gradients


class LogProbs(NamedTuple):
    """Of `linear_log_probs_and_entropy`. Both ``[...]``, fp32, in nats; 0 where ignored.

    Attributes:
        log_probs: of each target.
        entropy: of each row's distribution.
    """

    log_probs: Tensor
    entropy: Tensor


class CrossEntropy(NamedTuple):
    """Of `linear_cross_entropy_and_metrics`. fp32, 0 dimensions; the loss has gradients.

    Attributes:
        loss: the z-loss included.
        z_loss: that part of it.
        accuracy: the share of counted rows whose largest logit is the target's, 0 to 1.
        entropy: the mean over the counted rows, in nats.
    """

    loss: Tensor
    z_loss: Tensor
    accuracy: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Form:
    """What becomes of a head's result: ``softcapped(result * scale) / temperature``.

    The product with `scale` is rounded to the dtype of the hidden states, the rest is fp32.
    """

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"`temperature`: expected more than 0, got {self.temperature}")
        if not self.softcap >= 0:
            raise ValueError(f"`softcap`: expected 0 (none) or more, got {self.softcap}")

    def wide(self, logits: Tensor) -> Tensor:
        """[rows, classes] in fp32 of what `head_loss` gives, which may be written over."""
        y = logits if logits.dtype == torch.float64 else logits.float()
        if self.softcap:
            y = y.div_(self.softcap).tanh_().mul_(self.softcap)
        return y if self.temperature == 1.0 else y.div_(self.temperature)

    def backward(self, d: Tensor, y: Tensor) -> Tensor:
        """The gradient of the head's result from `d`, that of `y = wide(...)`; over `d`."""
        if self.temperature != 1.0:
            d.div_(self.temperature)
        if self.softcap:
            d.mul_(1 - (y * (self.temperature / self.softcap)).square_())
        return d if self.scale == 1.0 else d.mul_(self.scale)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """The logarithm of each target's probability under a linear head, without its logits.

    ``log_softmax(softcapped(linear(hidden, weight, bias) * scale).float() / temperature)`` at the
    target, with gradients of `hidden`, `weight` and `bias`. It is what DPO, GRPO and their kin
    start from; under `torch.no_grad` it is their reference.

    Args:
        hidden: ``[..., H]``; fp32, fp16 or bf16, or fp64.
        weight: ``[V, H]``, of the dtype of `hidden`; another is rounded to it, but an fp32 one of
            half hidden states without autocast, whose logits are fp32.
        target: ``[...]``, integers; `ignore_index`, or 0 to ``V - 1``. No token is shifted here.
        bias: ``[V]`` or None.
        ignore_index: rows with this target give 0, and no gradient.
        scale: what the logits are multiplied with, before the softcap.
        softcap: 0, or the c of ``c * tanh(logits / c)``.
        temperature: what the logits are divided by, more than 0.

    Returns:
        ``[...]``, fp32 (fp64 of fp64), in nats.

    Raises:
        ValueError: shapes or dtypes that do not belong together; on a CPU a target out of range,
            which gives NaN on a GPU.
    """
    check_head(hidden, weight, target, bias, ignore_index)
    form = Form(scale, softcap, temperature)
    if (temperature == 1.0 or not softcap) and refusal(hidden, weight) is None:
        return -linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            reduction="none",
            ignore_index=ignore_index,
            scale=scale / temperature,
            softcap=softcap,
        )
    found = statistics(hidden, weight, target, bias, ignore_index, form)
    return shaped(found.log_probs, target.shape)


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    temperature: float = 1.0,
) -> LogProbs:
    """`linear_log_probs`, and the entropy of each row, with gradients too (an entropy bonus)."""
    check_head(hidden, weight, target, bias, ignore_index)
    form = Form(scale, softcap, temperature)
    found = statistics(hidden, weight, target, bias, ignore_index, form, entropy=True)
    assert found.entropy is not None
    return LogProbs(*(shaped(t, target.shape) for t in (found.log_probs, found.entropy)))


def linear_cross_entropy_and_metrics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> CrossEntropy:
    """`linear_cross_entropy` with what is watched beside it, made of the same pieces of logits.

    Args:
        hidden: ``[..., H]``; this and what follows is as `linear_cross_entropy` has it.
        weight: ``[V, H]``.
        target: ``[...]``, int64.
        bias: ``[V]`` or None.
        ignore_index: rows with this target do not count.
        label_smoothing: from 0 to 1.
        scale: of the logits.
        softcap: of the logits; 0 for none.
        reduction: ``"mean"`` or ``"sum"``.
        z_loss: adds ``z_loss * lse ** 2`` of each row, which keeps logits small (PaLM,
            arXiv:2204.02311).
        class_weight: ``[V]`` or None: `torch.nn.functional.cross_entropy`'s `weight`, whose mean is
            over the targets' weights. It does not weigh the z-loss.
        num_items: what the sums are divided by in place of the number of rows that count, where
            gradients are accumulated over batches.

    Returns:
        `CrossEntropy`. Means over no row are NaN.

    Raises:
        ValueError: as `linear_cross_entropy`; a `class_weight` of another shape.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction`: expected 'mean' or 'sum', got {reduction!r}")
    check_head(hidden, weight, target, bias, ignore_index)
    loss, z, found = weighted_rows(
        hidden, weight, target, bias, ignore_index, label_smoothing, Form(scale, softcap),
        z_loss, class_weight, metrics=True,
    )  # fmt: skip
    count = found.counted.sum()
    assert found.entropy is not None and found.best is not None
    rows = target.to(hidden.device).reshape(-1)
    right = ((found.best == rows) & found.counted).sum()
    total, z_total = reduced(loss, z, reduction, found, rows, class_weight, num_items)
    return CrossEntropy(
        total,
        z_total.detach(),
        right / count,
        (found.entropy.detach().sum(dtype=torch.float64) / count).float(),
    )


class Statistics(NamedTuple):
    """Of each of N rows; fp32 (fp64 of fp64)."""

    log_probs: Tensor
    lse: Tensor
    mean: Tensor | None  # sum(class_weight * logits) / V
    entropy: Tensor | None
    best: Tensor | None  # the class of the largest logit, without gradient
    counted: Tensor  # bool: not ignored


def statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    form: Form,
    *,
    mean: bool = False,
    class_weight: Tensor | None = None,
    entropy: bool = False,
    best: bool = False,
) -> Statistics:
    """Of the rows of a head that `check_head` has seen, in one pass over its logits."""
    rows = target.to(hidden.device, torch.int64).reshape(-1)
    counted = rows != ignore_index
    flat = hidden.reshape(-1, hidden.shape[-1])
    wants = (mean, entropy, best)
    dtype = head_loss.product_dtype(hidden, weight)
    apply: Any = _Statistics.apply
    with torch.autocast(hidden.device.type, enabled=False):
        found = apply(flat, weight, bias, rows, counted, form, wants, class_weight, dtype)
    log_probs, lse, means, entropies, classes = found
    return Statistics(
        log_probs,
        lse,
        means if mean else None,
        entropies if entropy else None,
        classes if best else None,
        counted,
    )


def weighted_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    form: Form,
    z_loss: float,
    class_weight: Tensor | None,
    metrics: bool = False,
) -> tuple[Tensor, Tensor, Statistics]:
    """(cross entropy, z-loss, statistics), of each of N rows; 0 where ignored."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing`: expected 0 to 1, got {label_smoothing}")
    classes = weight.shape[0]
    check_tensors_or_none(class_weight=class_weight)
    if class_weight is not None and class_weight.shape != (classes,):
        raise ValueError(f"`class_weight`: expected [{classes}], got {list(class_weight.shape)}")
    found = statistics(
        hidden, weight, target, bias, ignore_index, form,
        mean=bool(label_smoothing), class_weight=class_weight, entropy=metrics, best=metrics,
    )  # fmt: skip
    loss = -found.log_probs
    share: Tensor | float = 1.0
    if class_weight is not None:
        own = class_weight.to(loss.device, loss.dtype)
        share = own.mean()
        loss = loss * own[_safe(target.to(loss.device), found.counted, classes)]
    if label_smoothing:
        assert found.mean is not None
        spread = share * found.lse - found.mean
        loss = (1 - label_smoothing) * loss + label_smoothing * spread
    return loss, z_loss * found.lse.square(), found


def reduced(
    loss: Tensor,
    z: Tensor,
    reduction: str,
    found: Statistics,
    rows: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """(the whole loss, the z-loss in it) of `weighted_rows`, 0 dimensions."""
    total, z_total = loss.sum(dtype=torch.float64), z.sum(dtype=torch.float64)
    dtype = loss.dtype
    if num_items is not None:
        items = num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items
        total, z_total = total / items, z_total / items
    elif reduction == "mean":
        count = found.counted.sum()
        weights = count
        if class_weight is not None:
            own = class_weight.to(loss.device, torch.float64)
            weights = (own[_safe(rows, found.counted, len(own))] * found.counted).sum()
        total, z_total = total / weights, z_total / count
    return shaped((total + z_total).to(dtype), ()), shaped(z_total.to(dtype), ())


def _safe(target: Tensor, counted: Tensor, classes: int) -> Tensor:
    """Indices that exist: of ignored rows the first class, of rows out of range the nearest."""
    return target.reshape(-1).masked_fill(~counted, 0).clamp(0, classes - 1)


def rows_at_a_time(classes: int, size: int) -> int:
    return max(head_loss.LEAST, head_loss.CHUNK_BYTES // max(classes * size, 1))


class _Statistics(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, target [N], counted [N] -> `Statistics`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        counted: Tensor,
        form: Form,
        wants: tuple[bool, bool, bool],
        class_weight: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        own = weight.to(dtype)
        own_bias = None if bias is None else bias.to(dtype)
        own, own_bias = head_loss.evened(own, own_bias)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        spread = None if class_weight is None else class_weight.to(hidden.device, wide)
        count, classes = len(hidden), len(weight)
        log_probs, lses, means, entropies = hidden.new_zeros((4, count), dtype=wide)
        best = torch.zeros_like(target)
        step = rows_at_a_time(classes, 4)
        for at in range(0, count, step):
            part = slice(at, at + step)
            y = form.wide(head_loss._logits(hidden[part], own, own_bias, form.scale, classes))
            valid, t = counted[part], target[part]
            lse = torch.logsumexp(y, -1)
            lp = y.gather(1, _safe(t, valid, classes)[:, None])[:, 0] - lse
            lp.masked_fill_(valid & ((t < 0) | (t >= classes)), float("nan"))
            log_probs[part] = lp.masked_fill_(~valid, 0.0)
            lses[part] = lse.masked_fill(~valid, 0.0)
            if wants[0]:
                mean = y.mean(-1) if spread is None else y @ spread / classes
                means[part] = mean.masked_fill_(~valid, 0.0)
            if wants[2]:
                best[part] = y.argmax(-1)
            if wants[1]:  # over y
                p = (y - lse[:, None]).exp_()
                entropies[part] = (lse - y.mul_(p).sum(-1)).masked_fill_(~valid, 0.0)
        ctx.form, ctx.class_weight, ctx.dtype = form, class_weight, dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(hidden, weight, bias, target, counted, lses, entropies)
        # a tensor of its own each, which the user may write to
        return log_probs.clone(), lses.clone(), means.clone(), entropies.clone(), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return no_gradients(ctx)
        hidden, weight, bias, target, counted, lse, entropy = ctx.saved_tensors
        wanted = (*ctx.needs_input_grad[:3], False, False)
        grads = head_loss.Gradients(hidden, weight, bias, None, None, wanted, ctx.dtype)
        of_log_prob, of_lse, of_mean, of_entropy, _ = upstream
        classes, form = len(weight), ctx.form
        factor = torch.zeros_like(lse)  # of each row's softmax
        if of_lse is not None:
            factor = factor + of_lse
        if of_log_prob is not None:
            factor = factor - of_log_prob
        for part in grads.parts(4):
            y = form.wide(grads.logits(part, form.scale))
            log_p = y - lse[:, None]
            d = log_p.exp()
            if of_entropy is None:
                d.mul_(factor[:, None])
            else:
                d.mul_(factor[:, None] - of_entropy[:, None] * (log_p + entropy[:, None]))
            if of_mean is not None:
                each = 1.0 if ctx.class_weight is None else ctx.class_weight.to(d)[part]
                d.add_(of_mean[:, None] * (each / classes))
            if of_log_prob is not None:
                inside = counted & (target >= part.start) & (target < part.stop)
                at = torch.where(inside, target - part.start, 0)[:, None]
                d.scatter_add_(1, at, (of_log_prob * inside)[:, None].to(d.dtype))
            # of a row that is ignored nothing counts, also no infinity
            d = form.backward(d, y).masked_fill_(~counted[:, None], 0.0)
            grads.add(part, d.to(ctx.dtype))
        return *grads.results()[:3], None, None, None, None, None, None
