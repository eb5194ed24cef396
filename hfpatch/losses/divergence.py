"""Distances of a student's distribution from a teacher's, over a head's classes, without logits.

As in `head_rows`: some rows' logits of both at a time in the forward, some classes' in the
backward. Of each row are kept both `lse` and one number: with p the student's and q the teacher's
probabilities, each distance here but one has the gradient ``c * p * (r - sum(p * r))`` of the
student's logits, where r is the distance's derivative by p; the sum is that number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hfpatch.losses import head_loss
from hfpatch.losses.head_loss import (
    check_head,
    check_tensors,
    check_tensors_or_none,
    product_dtype,
    shaped,
)
from hfpatch.losses.head_rows import Form, rows_at_a_time
from hfpatch.proof.subject import no_gradients


@dataclass(frozen=True)
class Teacher:
    """Where a teacher's logits come from. Build one, and give it to `linear_jsd` and its kin.

    Attributes:
        hidden: ``[..., H']``, or ``[..., V]`` logits where `weight` is None; no gradient.
        weight: ``[V, H']``: the width may differ from the student's, the classes may not.
        bias: ``[V]`` or None.
        scale, softcap: of the teacher's logits, where `weight` is given.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0


def linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
) -> Tensor:
    """The generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649, equation 1).

    ``beta KL(q || m) + (1 - beta) KL(p || m)`` with ``m = beta q + (1 - beta) p``, p the student
    and q the teacher. As there, and in TRL, `beta` 0 means ``KL(q || p)`` (forward) and 1 means
    ``KL(p || q)`` (reverse), not the limits of the formula, which are 0.

    Args:
        hidden: ``[..., H]``, the student's; fp32, fp16, bf16 or fp64.
        weight: ``[V, H]``, the student's head.
        teacher: what makes the teacher's logits, of the same rows.
        bias: ``[V]`` or None.
        mask: ``[...]`` or None: rows where it is 0 do not count.
        beta: 0 to 1.
        temperature: what both logits are divided by, more than 0. The result is not multiplied by
            its square.
        scale: of the student's logits: see `linear_cross_entropy`.
        softcap: of the student's logits: see `linear_cross_entropy`.
        reduction: ``"mean"`` over the rows that count (0 where none does), ``"sum"`` or ``"none"``.
        num_items: what the sum is divided by in place of their number; for ``reduction="mean"``.

    Returns:
        fp32 (fp64 of fp64), in nats: 0 dimensions, or ``[...]`` for ``reduction="none"``. It has
        gradients of `hidden`, `weight` and `bias`.

    Raises:
        ValueError: shapes that do not belong together; an option out of its range.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta`: expected 0 to 1, got {beta}")
    return _distance(
        "jsd", beta, hidden, weight, teacher, bias, mask, Form(scale, softcap, temperature),
        reduction, num_items,
    )  # fmt: skip


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reverse: bool = False,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
) -> Tensor:
    """``KL(teacher || student)``, or `reverse`: ``KL(student || teacher)``; else `linear_jsd`."""
    return _distance(
        "jsd", float(reverse), hidden, weight, teacher, bias, mask,
        Form(scale, softcap, temperature), reduction, num_items,
    )  # fmt: skip


def linear_tvd(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Total variation distance, ``sum(|p - q|) / 2`` (arXiv:2307.15190); else `linear_jsd`."""
    return _distance(
        "tvd", 0.0, hidden, weight, teacher, bias, mask, Form(scale, softcap, temperature),
        reduction, num_items,
    )  # fmt: skip


def _distance(
    kind: str,
    beta: float,
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    bias: Tensor | None,
    mask: Tensor | None,
    form: Form,
    reduction: str,
    num_items: Tensor | float | None,
) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction`: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"`num_items`: expected it with `reduction='mean'`, got {reduction!r}")
    check_tensors(hidden=hidden, weight=weight)
    check_tensors_or_none(mask=mask)
    shape = hidden.shape[:-1]
    check_head(hidden, weight, torch.zeros(shape, dtype=torch.int64, device="cpu"), bias)
    _check_teacher(teacher, shape, len(weight))
    if mask is not None and mask.shape != shape:
        raise ValueError(f"`mask`: expected shape {list(shape)}, got {list(mask.shape)}")
    flat = hidden.reshape(-1, hidden.shape[-1])
    if mask is None:
        counted = torch.ones(len(flat), dtype=torch.bool, device=hidden.device)
    else:
        counted = mask.to(hidden.device).reshape(-1) != 0
    apply: Any = _Distance.apply
    heads = ((hidden, weight), (teacher.hidden, teacher.weight))
    dtypes = [x.dtype if w is None else product_dtype(x, w) for x, w in heads]
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = apply(flat, weight, bias, teacher, counted, form, kind, float(beta), dtypes)
    if reduction == "none":
        return shaped(found, shape)
    total = found.sum(dtype=torch.float64)
    if reduction == "mean":
        items = counted.sum().clamp(min=1) if num_items is None else num_items
        total = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return shaped(total.to(found.dtype), ())


def _check_teacher(teacher: Teacher, shape: torch.Size, classes: int) -> None:
    if not isinstance(teacher, Teacher):
        raise TypeError(
            f"`teacher`: expected `hfpatch.loss.Teacher(hidden, weight)` or `Teacher(logits)`, got "
            f"{type(teacher).__name__}"
        )
    hidden, weight = teacher.hidden, teacher.weight
    for name, given in (("hidden", hidden), ("weight", weight), ("bias", teacher.bias)):
        if not isinstance(given, Tensor) and (given is not None or name == "hidden"):
            raise TypeError(
                f"`teacher`: expected a tensor as its `{name}`, got {type(given).__name__}"
            )
    width = classes if weight is None else weight.shape[-1]
    if hidden.shape != (*shape, width):
        name = "logits" if weight is None else "hidden"
        raise ValueError(
            f"`teacher`: expected {name} of shape {[*shape, width]}, got {list(hidden.shape)}"
        )
    if weight is not None and weight.shape[0] != classes:
        raise ValueError(
            f"`teacher`: expected a head of the student's {classes} classes, got {len(weight)}; "
            "the two must share a tokenizer"
        )
    if teacher.bias is not None and (weight is None or teacher.bias.shape != (classes,)):
        raise ValueError(
            f"`teacher`: expected a bias of shape [{classes}] with a weight, got "
            f"{list(teacher.bias.shape)}{' without one' if weight is None else ''}"
        )


class _Logits:
    """A teacher's logits, [rows, classes] of both slices, fp32, divided by the temperature."""

    def __init__(self, teacher: Teacher, student: Form, dtype: torch.dtype) -> None:
        self.x = teacher.hidden.detach().reshape(-1, teacher.hidden.shape[-1])
        self.weight = None if teacher.weight is None else teacher.weight.detach().to(dtype)
        self.bias = None if teacher.bias is None else teacher.bias.detach().to(dtype)
        ready = self.weight is None
        scale, softcap = (1.0, 0.0) if ready else (teacher.scale, teacher.softcap)
        self.form = Form(scale, softcap, student.temperature)

    @functools.cached_property
    def _whole(self) -> tuple[Tensor, Tensor | None]:
        """The head of all classes: the forward asks for them for some rows after others."""
        assert self.weight is not None
        return head_loss.evened(self.weight, self.bias)

    def of(self, rows: slice, classes: slice, dtype: torch.dtype) -> Tensor:
        if self.weight is None:
            # a copy, which is written over
            return self.form.wide(self.x[rows, classes].to(dtype, copy=True))
        bias = None if self.bias is None else self.bias[classes]
        weight = self.weight[classes]
        every = len(weight) == len(self.weight)
        head = self._whole if every else head_loss.evened(weight, bias)
        y = head_loss._logits(self.x[rows], *head, self.form.scale, len(weight))
        return self.form.wide(y).to(dtype)


def _derivative(kind: str, beta: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    """r, see the module; a new tensor."""
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).sign_().mul_(0.5)
    if beta == 1.0:
        return log_p - log_q
    return (log_p - _log_mixture(beta, log_p, log_q)).mul_(1 - beta)


def _log_mixture(beta: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = torch.tensor([1 - beta, beta], dtype=torch.float64, device="cpu").log().tolist()
    return torch.logaddexp(log_p + p, log_q + q)


class _Distance(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None -> distance [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        counted: Tensor,
        form: Form,
        kind: str,
        beta: float,
        dtypes: list[torch.dtype],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        own = weight.to(dtypes[0])
        own_bias = None if bias is None else bias.to(dtypes[0])
        own, own_bias = head_loss.evened(own, own_bias)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        source, whole = _Logits(teacher, form, dtypes[1]), slice(None)
        # distance, both lse, and sum(p * r)
        found = hidden.new_zeros((4, len(hidden)), dtype=wide)
        step = rows_at_a_time(len(weight), 4)
        for at in range(0, len(hidden), step):
            part = slice(at, at + step)
            y = head_loss._logits(hidden[part], own, own_bias, form.scale, len(weight))
            log_p = form.wide(y)
            log_q = source.of(part, whole, wide)
            lse_p, lse_q = log_p.logsumexp(-1), log_q.logsumexp(-1)
            log_p.sub_(lse_p[:, None])
            log_q.sub_(lse_q[:, None])
            mean = torch.zeros_like(lse_p)
            if kind == "tvd":
                difference = log_p.exp().sub_(log_q.exp())
                distance = difference.abs().sum(-1) / 2
            elif beta == 0.0:
                distance = (log_q.exp() * (log_q - log_p)).sum(-1)
            if kind == "tvd" or beta != 0.0:
                r = _derivative(kind, beta, log_p, log_q).mul_(log_p.exp())
                mean = r.sum(-1)
            if kind == "jsd" and beta == 1.0:
                distance = mean
            elif kind == "jsd" and beta != 0.0:
                of_teacher = log_q - _log_mixture(beta, log_p, log_q)
                distance = mean + beta * of_teacher.mul_(log_q.exp()).sum(-1)
            valid = counted[part]
            for row, value in zip(found, (distance, lse_p, lse_q, mean), strict=True):
                row[part] = value.masked_fill(~valid, 0.0)
        ctx.teacher, ctx.form, ctx.kind, ctx.beta, ctx.dtypes = teacher, form, kind, beta, dtypes
        ctx.save_for_backward(hidden, weight, bias, counted, found)
        return found[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return no_gradients(ctx)
        hidden, weight, bias, counted, found = ctx.saved_tensors
        wanted = (*ctx.needs_input_grad[:3], False, False)
        grads = head_loss.Gradients(hidden, weight, bias, None, None, wanted, ctx.dtypes[0])
        form, kind, beta = ctx.form, ctx.kind, ctx.beta
        source, whole = _Logits(ctx.teacher, form, ctx.dtypes[1]), slice(None)
        _, lse_p, lse_q, mean = found
        for part in grads.parts(4):
            y = form.wide(grads.logits(part, form.scale))
            log_p = y - lse_p[:, None]
            log_q = source.of(whole, part, y.dtype).sub_(lse_q[:, None])
            if kind == "jsd" and beta == 0.0:
                d = log_p.exp().sub_(log_q.exp())
            else:
                d = _derivative(kind, beta, log_p, log_q).sub_(mean[:, None]).mul_(log_p.exp())
            d.mul_(upstream[:, None])
            d = form.backward(d, y).masked_fill_(~counted[:, None], 0.0)
            grads.add(part, d.to(ctx.dtypes[0]))
        return *grads.results()[:3], None, None, None, None, None, None
