"""Row operations: softmax, argmax, topk and random sampling over the last dimension."""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ._ops import ops
from ._second import no_gradients

_softmax = ops.softmax.default
_softmax_backward = ops.softmax_backward.default
_argmax = ops.argmax.default
_topk = ops.topk.default
_sample = ops.sample.default


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, scale):
        ctx.set_materialize_grads(False)
        out, _ = _softmax(x, mask, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if grad is None:
            return no_gradients(ctx)
        (out,) = ctx.saved_tensors
        dx, _ = _softmax_backward(grad, out, ctx.scale)
        return dx, None, None


def softmax(x: Tensor, mask: Optional[Tensor] = None, scale: float = 1.0) -> Tensor:
    """``softmax(scale * x + mask)`` over the last dimension, fp32 inside, rounded once.

    As in `torch.softmax`, a row is NaN throughout if its greatest value is not finite: if it holds
    a NaN or ``+inf``, or nothing but ``-inf``. A gradient of ``mask`` goes through the formula in
    plain PyTorch.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        mask: added to ``scale * x``; fp32, fp16 or bf16, of the shape ``[D]``, ``[B, D]`` (where
            ``x`` has three dimensions or more) or that of ``x`` with dimensions of size 1 where it
            repeats.
        scale: any finite number.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if torch.is_grad_enabled():
        if mask is not None and mask.requires_grad:
            if mask.dim() == 2 and x.dim() > 2:  # per sample
                mask = mask.reshape(mask.shape[0], *[1] * (x.dim() - 2), mask.shape[1])
            return torch.softmax(x.float() * scale + mask.float(), -1).to(x.dtype)
        if x.requires_grad:
            return _Softmax.apply(x, mask, scale)
    return _softmax(x, mask, scale)[0]


def argmax(x: Tensor) -> Tensor:
    """The index of the greatest value of the last dimension.

    NaN counts as the greatest, and -0 equals 0, as in `torch.argmax`; of equal values, the first.

    Args:
        x: ``[..., D]``, ``D`` at least 1; fp32, fp16 or bf16.

    Returns:
        ``[...]``, int64.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; says which.
    """
    if x.dim() == 1:
        return _argmax(x.unsqueeze(0))[0].squeeze(0)
    return _argmax(x)[0]


def topk(x: Tensor, k: int) -> Tuple[Tensor, Tensor]:
    """The ``k`` greatest values of the last dimension, in descending order, and their indices.

    Only the ``k`` that were found are sorted. NaN counts as the greatest, and -0 equals 0. Of equal
    values, those with the lowest indices, in their order: the result is determined by the input.

    Args:
        x: ``[..., D]``; fp32, fp16 or bf16.
        k: from 1 to the smaller one of ``D`` and 2048.

    Returns:
        values ``[..., k]`` in the dtype of ``x``, with the gradient of a gather, and indices
        ``[..., k]``, int64.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if x.dim() == 1:
        values, indices = topk(x.unsqueeze(0), k)
        return values.squeeze(0), indices.squeeze(0)
    if x.requires_grad and torch.is_grad_enabled():
        indices = _topk(x.detach(), k)[1]
        return x.gather(-1, indices), indices
    return _topk(x, k)


def _parameter(value, dtype, none):
    """(tensor or None, number) as the operator takes them."""
    if isinstance(value, Tensor):
        return value.to(dtype).contiguous(), none
    return None, value


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Optional[Tensor] = None,
    temperature: Union[float, Tensor] = 1.0,
    top_k: Union[int, Tensor] = 0,
    top_p: Union[float, Tensor] = 1.0,
    min_p: Union[float, Tensor] = 0.0,
) -> Tensor:
    """Draw one token for each row of logits, without a sort.

    With ``z = logits / temperature`` in fp32, these tokens are kept, each step applied to what the
    one before it has left; it is what `TemperatureLogitsWarper`, `TopKLogitsWarper`,
    `TopPLogitsWarper` and `MinPLogitsWarper` of transformers keep, in that order:

    - ``top_k``: those with ``z`` at least the ``top_k``-th greatest one, hence all that equal it;
    - ``top_p``: in descending order, and of equal ``z`` the greater index first, those before which
      the probabilities (among what ``top_k`` has kept) add up to less than ``top_p``; always the
      first one. Probabilities are added up as integers, in steps of at most 2**-24 of the greatest
      (2**-42 up to 131072 columns, 2**-39 up to 262144);
    - ``min_p``: those with at least ``min_p`` times the probability of the most probable one.

    Of these, one is drawn by its probability, with the Gumbel-max method: the greatest
    ``z - log(E)``, where ``E``, exponentially distributed, is made of word ``i % 4`` of
    Philox-4x32-10 (Salmon et al., SC 2011) under the key ``seed`` at the counter
    ``(i // 4, 0, position)`` for token ``i``.

    A row's token depends on that row, its seed, position and parameters only: not on the batch, the
    order of its rows, or the device, except for the last bits of ``exp`` and ``log``. The same seed
    needs another position for every new token of a text. Rows whose greatest ``z`` is not finite
    (NaN, infinities) give `argmax`.

    Args:
        logits: ``[..., V]``, ``V`` from 1 to 2**23; fp32, fp16 or bf16.
        seeds: ``[...]``, int64.
        positions: ``[...]``, int64; 0 if None.
        temperature: a number >= 0, or one per row, ``[...]``. 0: `argmax`.
        top_k: a number >= 0, or one per row. 0: all.
        top_p: from 0 to 1, or one per row. 1: all.
        min_p: from 0 to 1, or one per row. 0: all.

    Values of parameters that are given per row are on the device and cannot be refused: a
    ``temperature`` that is not above 0 is 0, a ``top_k`` not above 0 is 0, ``top_p`` and ``min_p``
    are cut to [0, 1], and NaN is 1 and 0.

    Returns:
        ``[...]``, int64.

    Raises:
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    temperatures, temperature = _parameter(temperature, torch.float32, 1.0)
    top_ks, top_k = _parameter(top_k, torch.int64, 0)
    top_ps, top_p = _parameter(top_p, torch.float32, 1.0)
    min_ps, min_p = _parameter(min_p, torch.float32, 0.0)
    return _sample(
        logits.detach(), seeds, positions, temperatures, top_ks, top_ps, min_ps,
        temperature, top_k, top_p, min_p,
    )  # fmt: skip
