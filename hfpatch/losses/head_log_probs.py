"""Log-probabilities of a linear head's rows, of which two numbers are asked for, without logits.

`log_softmax` of logits, its value at a row's target, and its sum over all classes: what losses are
made of that are written with these operators, as label smoothing of transformers' `Trainer`. As in
`head_loss`, some rows' logits at a time in the forward, some classes' in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfpatch.losses.head_loss import (
    Gradients,
    Options,
    Own,
    by_hooks,
    by_operators,
    likenesses,
    none,
    others,
    rows_of_bytes,
)
from hfpatch.losses.logits_hooks import LogitsHooks
from hfpatch.proof.subject import only_by_operators


def at_and_sum(log_probs: Tensor, target: Tensor) -> Tensor:
    """[2, N] of [N, V]: at the targets, and the sums over the classes."""
    return torch.stack([log_probs.gather(1, target[:, None])[:, 0], log_probs.sum(-1)])


class LogProbsOfHead(torch.autograd.Function):
    """hidden [N, H], the head, target [N] in range -> `at_and_sum` of `log_softmax`, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        options: Options,
        hooks: LogitsHooks,
        *sources: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        own = Own(weight, bias, a, b, options)
        found = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        lses = torch.empty_like(found[0])
        count = rows_of_bytes(len(weight) * torch.float32.itemsize)
        for start in range(0, len(hidden), count):
            part = slice(start, start + count)
            x = hidden[part]
            y = capped(own.logits(x, own.low(x)), options.softcap)
            lse = torch.logsumexp(y, -1)
            found[0, part] = y.gather(1, target[part, None])[:, 0] - lse
            found[1, part] = y.sub_(lse[:, None]).sum(-1)
            lses[part] = lse
        ctx.options, ctx.hooks, ctx.of_sources = options, hooks, likenesses(sources)
        ctx.save_for_backward(hidden, weight, bias, a, b, target, lses)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return none(ctx)
        *head, target, lse = ctx.saved_tensors
        if (changed := by_hooks(ctx, grad)) is not None:
            return changed
        wanted, options = ctx.needs_input_grad[:5], ctx.options
        if only_by_operators(grad):

            def of_logits(wide: Tensor) -> Tensor:
                return at_and_sum(wide.log_softmax(-1), target)

            return *by_operators(head, wanted, options, grad, of_logits), *others(ctx)
        hidden, weight, bias, a, b = head
        softcap, scale = options.softcap, options.scale
        with torch.autocast(grad.device.type, enabled=False):  # it may be on around a backward
            at, of_sum = grad
            # d(log p of the target) = 1 at it - p, d(sum of log p) = 1 - V p
            of_p = -(at + len(weight) * of_sum)[:, None]
            grads = Gradients(hidden, weight, bias, a, b, wanted, options.dtype, options)
            for part in grads.parts(torch.float32.itemsize):
                z = grads.logits(part, scale)
                y = capped(z, softcap)
                d = (y - lse[:, None]).exp_().mul_(of_p).add_(of_sum[:, None])
                inside = (target >= part.start) & (target < part.stop)
                column = torch.where(inside, target - part.start, 0)[:, None]
                d.scatter_add_(1, column, (at * inside)[:, None])
                if softcap:
                    d.mul_(1 - (y / softcap).square_())
                if scale != 1.0:
                    d.mul_(scale)
                grads.add(part, d.to(z.dtype))
        return *grads.results(), *others(ctx)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """In fp32, of logits that may be written over."""
    y = logits.float()
    return y.div_(softcap).tanh_().mul_(softcap) if softcap else y
