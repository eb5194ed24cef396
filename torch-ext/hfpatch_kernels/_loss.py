"""The public losses."""

from torch import Tensor, is_grad_enabled

from . import _autograd, _codes
from ._ops import ops

_REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Cross entropy over the last dimension, in fp32, without a copy of the logits.

    With ``z = logits``, or ``softcap * tanh(logits / softcap)`` if ``softcap > 0`` (Gemma 2), and
    ``s = label_smoothing`` (Szegedy et al., arXiv:1512.00567), a row's loss is::

        logsumexp(z) - (1 - s) * z[target] - s * mean(z)

    as `torch.nn.functional.cross_entropy` of ``z.float()`` has it. The backward computes the
    softmax from the logits again.

    Args:
        logits: ``[..., V]``, at least two dimensions; fp32, fp16 or bf16.
        target: ``[...]``, int64. Another class than 0 to ``V - 1`` gives NaN, since its value is on
            the device.
        reduction: ``"none"``, ``"sum"``, or ``"mean"`` over the rows that are not ignored.
        ignore_index: rows with this target have loss and gradient 0, and are not read.
        label_smoothing: from 0 to 1.
        softcap: 0 for none.

    Returns:
        fp32: a scalar, or ``[...]`` for ``reduction="none"``. The mean over no row is NaN.

    Raises:
        ValueError: ``reduction`` is not one of the three.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if reduction not in _REDUCTIONS:
        _codes.reject("reduction", reduction, _REDUCTIONS)
    target = target.contiguous()  # often a slice, one token to the right
    if logits.requires_grad and is_grad_enabled():
        codes = _codes.constants(ignore_index, label_smoothing, softcap)
        loss = _autograd.CrossEntropy.apply(logits, target, *codes)
    else:
        loss, _ = ops.cross_entropy.default(logits, target, ignore_index, label_smoothing, softcap)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()
