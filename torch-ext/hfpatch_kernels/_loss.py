"""The public losses."""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from . import _autograd, _codes
from ._ops import ops
from ._second import no_gradients

_REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    num_items: Union[int, float, Tensor, None] = None,
    gradient_with_loss: Optional[bool] = None,
) -> Tensor:
    """Cross entropy over the last dimension, in fp32, without a copy of the logits.

    With ``z = logits``, or ``softcap * tanh(logits / softcap)`` if ``softcap > 0`` (Gemma 2), and
    ``s = label_smoothing`` (Szegedy et al., arXiv:1512.00567), a row's loss is::

        logsumexp(z) - (1 - s) * z[target] - s * mean(z)

    as `torch.nn.functional.cross_entropy` of ``z.float()`` has it.

    The gradient of the mean or sum is made together with it: the logits are read once, where a
    backward of its own reads them again. It is that of an upstream gradient of 1, as
    ``loss.backward()`` has. Another one, of a loss that is divided or scaled afterwards, costs a
    pass over the gradient in the backward, and a second rounding; hence ``num_items``. From the
    forward to the backward the gradient is held beside the logits.

    Args:
        logits: ``[..., V]``, at least two dimensions; fp32, fp16 or bf16.
        target: ``[...]``, int64. Another class than 0 to ``V - 1`` gives NaN, since its value is on
            the device.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the rows that are not ignored.
        ignore_index: rows with this target have loss and gradient 0, and are not read.
        label_smoothing: from 0 to 1.
        softcap: 0 for none.
        num_items: what the mean divides by in place of the number of rows that are not ignored:
            ``num_items_in_batch`` of transformers, the tokens of all batches that are accumulated.
            A number above 0, or a tensor of one element.
        gradient_with_loss: whether the gradient is made with the mean or sum. By default it is,
            except for fp16, whose gradients wait for the loss scale, and under `torch.compile`,
            where ``True`` is taken for the default too.

    Returns:
        fp32: a scalar, or ``[...]`` for ``reduction="none"``. The mean over no row is NaN.

    Raises:
        ValueError: ``reduction`` is not one of the three; ``num_items`` is not for the mean, or not
            above 0; ``gradient_with_loss=True`` for ``"none"``.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if reduction not in _REDUCTIONS:
        _codes.reject("reduction", reduction, _REDUCTIONS)
    if num_items is not None:
        num_items = _checked_num_items(num_items, reduction)
    if gradient_with_loss and reduction == "none":
        raise ValueError(
            "`gradient_with_loss`: expected a reduction of 'mean' or 'sum', got 'none'; "
            "the gradient of each row's loss is not known in the forward"
        )
    target = target.contiguous()  # often a slice, one token to the right
    if logits.requires_grad and torch.is_grad_enabled():
        compiling = torch.compiler.is_compiling()
        if gradient_with_loss is None:
            gradient_with_loss = logits.dtype != torch.float16
        if gradient_with_loss and reduction != "none" and not compiling:
            codes = (ignore_index, label_smoothing, softcap)
            return _with_gradient(logits, target, reduction, num_items, codes)
        codes = _codes.constants(ignore_index, label_smoothing, softcap)
        loss = _autograd.CrossEntropy.apply(logits, target, *codes)
    else:
        loss, _ = ops.cross_entropy.default(logits, target, ignore_index, label_smoothing, softcap)
    if reduction == "none":
        return loss
    # As the kernel that makes the gradient too: the loss does not depend on whether one is wanted.
    total = loss.sum(dtype=torch.float64)
    if reduction == "mean":
        if num_items is None:
            num_items = (target != ignore_index).sum().to(torch.float32)
        elif not isinstance(num_items, Tensor):
            num_items = loss.new_full((), num_items)
        total = total * num_items.reciprocal()
    return total.to(torch.float32)


def _checked_num_items(num_items, reduction):
    if reduction != "mean":
        raise ValueError(
            "`num_items`: expected a reduction of 'mean', got {!r}; divide the result by it".format(
                reduction
            )
        )
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(
                "`num_items`: expected one element, got a tensor of shape {}".format(
                    list(num_items.shape)
                )
            )
        return num_items.detach().to(torch.float32).reshape(())
    if not num_items > 0:
        raise ValueError("`num_items`: expected a number above 0, got {!r}".format(num_items))
    return num_items


def _with_gradient(logits, target, reduction, num_items, codes):
    divisor, divisor_tensor = 1.0, None
    if reduction == "mean":
        divisor = 0.0  # the rows that are not ignored
        if isinstance(num_items, Tensor):
            divisor_tensor = num_items
        elif num_items is not None:
            divisor = float(num_items)
    return _autograd.TotalCrossEntropy.apply(logits, target, divisor_tensor, divisor, *codes)


def cross_entropy_log_probs(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy` of each row, and the logarithm of every token's probability.

    A gradient goes through the formula in plain PyTorch.

    Args:
        logits: ``[..., V]``, at least two dimensions; fp32, fp16 or bf16.
        target: ``[...]``, int64.
        ignore_index: rows with this target have loss and lse 0; their log-probabilities are made.
        label_smoothing: from 0 to 1.
        softcap: 0 for none.

    Returns:
        The losses and the logarithms of the sums of ``exp``, fp32 ``[...]``, and the
        log-probabilities, ``[..., V]`` in the dtype of ``logits``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return ops.cross_entropy_log_probs.default(
            logits, target, ignore_index, label_smoothing, softcap
        )
    z = logits.float()
    if softcap > 0:
        z = softcap * torch.tanh(z / softcap)
    lse = z.logsumexp(-1)
    kept = target != ignore_index
    at = z.gather(-1, torch.where(kept, target, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * at - label_smoothing * z.mean(-1)
    log_probs = (z - lse.unsqueeze(-1)).to(logits.dtype)
    return torch.where(kept, loss, 0.0), torch.where(kept, lse, 0.0), log_probs


class _LoadBalancing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, mask, k):
        ctx.set_materialize_grads(False)
        loss, stats, _ = ops.load_balancing_loss.default(logits, mask, k)
        ctx.save_for_backward(logits, stats, *(() if mask is None else (mask,)))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if grad is None:
            return no_gradients(ctx)
        logits, stats, *mask = ctx.saved_tensors
        given = mask[0] if mask else None
        grad = grad.to(torch.float32)
        return ops.load_balancing_loss_backward.default(grad, logits, stats, given), None, None


def load_balancing_loss(logits: Tensor, k: int, mask: Optional[Tensor] = None) -> Tensor:
    """The loss that keeps the load of experts even.

    Fedus et al., arXiv:2101.03961, equations 4 to 6; ``load_balancing_loss_func`` of transformers:
    ``E * sum(f * P)``, where ``f`` is the share of tokens that have an expert among their ``k`` and
    ``P`` its mean probability.

    Args:
        logits: ``[T, E]`` of the router, all layers' one after the other; fp32, fp16 or bf16; ``E``
            from 1 to 1024.
        k: experts of a token.
        mask: ``[T]``, the tokens' weights, 0 for padding; None: 1.

    Returns:
        fp32, a scalar; 0 where no token counts.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if mask is not None:
        mask = mask.to(torch.float32).contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return _LoadBalancing.apply(logits, mask, k)
    return ops.load_balancing_loss.default(logits, mask, k)[0]
