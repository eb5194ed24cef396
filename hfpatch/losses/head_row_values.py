"""`logsumexp` of a linear head's rows, and its logits at one class of each, without the logits.

The classes may be asked for later than the sums are made, and of some rows after others, as by code
that goes over a batch's sequences in turn. One function of autograd's makes the sums of all rows,
and gives zeros of no memory to speak of, to which the logits at the classes are added: the gradient
of those is theirs. So the head's products are made once for all of them in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfpatch.losses.head_log_probs import capped
from hfpatch.losses.head_loss import (
    Gradients,
    Options,
    Own,
    by_hooks,
    by_operators,
    likenesses,
    none,
    ops,
    others,
    padded_logits,
    rows_of_bytes,
)
from hfpatch.losses.logits_hooks import LogitsHooks
from hfpatch.proof.subject import only_by_operators


def sum_and_at(logits: Tensor, target: Tensor) -> Tensor:
    """[2, N] of [N, V]: `logsumexp`, and the logits at the targets; of a negative one any."""
    at = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    return torch.stack([logits.logsumexp(-1), at])


@dataclass
class Classes:
    """target: int64 [N], the class that was asked for in each row, or -1. are_all: no -1."""

    target: Tensor
    are_all: bool = False


class ValuesOfHead(torch.autograd.Function):
    """hidden [N, H], the head -> [2, N] in fp32: `logsumexp`, and zeros.

    known: a row's class is written there before a gradient comes to its zero, which is that of the
    logit at the class.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        known: Classes,
        options: Options,
        hooks: LogitsHooks,
        *sources: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        own = Own(weight, bias, a, b, options)
        found = hidden.new_zeros((2, len(hidden)), dtype=torch.float32)
        count = rows_of_bytes(options.bytes_of(len(weight)))
        for start in range(0, len(hidden), count):
            part = slice(start, start + count)
            x = hidden[part]
            found[0, part] = sums_of(own.logits(x, own.low(x)), options.softcap)
        ctx.options, ctx.hooks, ctx.of_sources = options, hooks, likenesses(sources)
        ctx.known = known  # not among what is saved, for it is written to
        ctx.save_for_backward(hidden, weight, bias, a, b, found[0].clone())
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return none(ctx)
        *head, lse = ctx.saved_tensors
        known = ctx.known
        target = known.target
        if (changed := by_hooks(ctx, grad)) is not None:
            return changed
        wanted, options = ctx.needs_input_grad[:5], ctx.options
        if only_by_operators(grad):

            def of_logits(wide: Tensor) -> Tensor:
                return sum_and_at(wide, target)

            return *by_operators(head, wanted, options, grad, of_logits), *others(ctx)
        hidden, weight, bias, a, b = head
        softcap, scale = options.softcap, options.scale
        with torch.autocast(grad.device.type, enabled=False):  # it may be on around a backward
            of_sum, at = grad
            grads = Gradients(hidden, weight, bias, a, b, wanted, options.dtype, options)
            whole = known.are_all and not softcap
            for part in grads.parts(hidden.element_size() if whole else torch.float32.itemsize):
                if whole:  # by the kernel, which gives softmax - 1 at the class, times a factor
                    d = grads.of_logits(part, target, lse, of_sum, options)
                    add_at(d, part, target, (of_sum + at) * scale)
                    grads.add(part, d)
                    continue
                z = grads.logits(part, scale)
                y = capped(z, softcap)
                d = (y - lse[:, None]).exp_().mul_(of_sum[:, None])
                add_at(d, part, target, at)
                if softcap:
                    d.mul_(1 - (y / softcap).square_())
                if scale != 1.0:
                    d.mul_(scale)
                grads.add(part, d.to(z.dtype))
        return *grads.results(), *others(ctx)


def sums_of(logits: Tensor, softcap: float) -> Tensor:
    """fp32 [n]: `logsumexp` of [n, V], of a head's `Own.logits`."""
    none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    z = logits if softcap else padded_logits(logits, -torch.inf)
    _, found = ops().cross_entropy.default(z, none, -100, 0.0, softcap)
    return found  # type: ignore[no-any-return]


def add_at(d: Tensor, part: slice, target: Tensor, values: Tensor) -> None:
    """Add values [N] to d [N, part] at those classes of [N] that are in it."""
    inside = (target >= part.start) & (target < part.stop)
    column = torch.where(inside, target - part.start, 0)[:, None]
    d.scatter_add_(1, column, (values * inside)[:, None].to(d.dtype))


def logits_at(
    hidden: Tensor, head: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    target: Tensor, options: Options,
) -> Tensor:  # fmt: skip
    """fp32 [N], without gradients: of hidden [N, H] the logits at target [N].

    head: weight, bias, A and B of an adapter.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return capped(Own(*head, options).logits_at(hidden, target), options.softcap)


def mean_of_logits(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    options: Options,
) -> Tensor:
    """fp32 [], without gradients: the mean of all logits of hidden [N, H], N at least one."""
    count = len(hidden) * len(head[0])
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        own = Own(*head, options)
        if options.softcap or options.dtype == torch.float16:  # whose products may overflow
            total = hidden.new_zeros((), dtype=torch.float64)
            for x in torch.split(hidden, rows_of_bytes(len(head[0]) * torch.float32.itemsize)):
                total += capped(own.logits(x, own.low(x)), options.softcap).sum()
            return (total / count).float()
        # the sum of a product is the product of sums
        sums = [_summed(hidden) @ _summed(own.weight)]
        if own.bias is not None:
            sums.append(len(hidden) * _summed(own.bias))
        if (low := own.low(hidden)) is not None and own.b is not None:
            sums.append(_summed(low) @ _summed(own.b))
        return (torch.stack(sums).sum() * (own.scale / count)).float()


def _summed(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=torch.float64)
