"""`hfpatch.loss.causal_lm` and `masked_lm`: transformers' losses, on the fused cross entropy.

Import it by name (`import hfpatch.loss`): `import hfpatch` alone does not load it. A model takes
one by transformers' own setting, before or after `apply`:

    model.loss_function = hfpatch.loss.causal_lm
    del model._loss_function  # the model's own again

What begins with `linear_` takes a head's input and weight in place of logits, which then never
exist all at once: cross entropy, and losses of preferences, rewards and distillation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.errors import KernelLoadError
from hfpatch.handover import local_kernel, tensor_refusal, warn_of_handover
from hfpatch.kernels.sources import Kernel, local_package
from hfpatch.losses.deferred_logits import DeferredLogits
from hfpatch.losses.divergence import Teacher, linear_jsd, linear_kl, linear_tvd
from hfpatch.losses.head_loss import check_targets, linear_cross_entropy
from hfpatch.losses.head_rows import (
    CrossEntropy,
    LogProbs,
    linear_cross_entropy_and_metrics,
    linear_log_probs,
    linear_log_probs_and_entropy,
)
from hfpatch.losses.preference import (
    Grpo,
    Kto,
    Preference,
    linear_cpo,
    linear_dpo,
    linear_grpo,
    linear_kto,
    linear_orpo,
    linear_simpo,
)
from hfpatch.ops import KERNEL_DTYPES

__all__ = [
    "CrossEntropy",
    "Grpo",
    "Kto",
    "LogProbs",
    "Preference",
    "Teacher",
    "causal_lm",
    "linear_cpo",
    "linear_cross_entropy",
    "linear_cross_entropy_and_metrics",
    "linear_dpo",
    "linear_grpo",
    "linear_jsd",
    "linear_kl",
    "linear_kto",
    "linear_log_probs",
    "linear_log_probs_and_entropy",
    "linear_orpo",
    "linear_simpo",
    "linear_tvd",
    "masked_lm",
]

_warned: set[str] = set()


def _load() -> Callable[..., Tensor] | None:
    try:
        function: Callable[..., Tensor] = local_package().module.cross_entropy
    except KernelLoadError:  # said at the first call
        return None
    return function


# A global, which `torch.compile` follows.
_cross_entropy = _load()


def causal_lm(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The mean cross entropy of each token and the label of the next one.

    Where `hfpatch.apply(mode="training")` defers the logits, the loss is taken without them, as
    transformers' own function would.

    `transformers.loss.loss_utils.ForCausalLMLoss`, in fp32 as there, without an fp32 copy of the
    logits and of their gradient. The gradient is made with the loss, and divided by
    `num_items_in_batch` in fp32: see `cross_entropy` of the kernel package.

    Args:
        logits: ``[..., S, vocab_size]``; fp32, fp16 or bf16. Others, and tensor subclasses, go to
            transformers' function, with a warning (under `torch.compile` without one).
        labels: ``[..., S]``, integers; may be None where `shift_labels` are given.
        vocab_size: the size of the last dimension of the logits.
        num_items_in_batch: what the sum is divided by, as `Trainer` gives it for accumulated
            batches; None: the number of labels that are not ignored.
        ignore_index: labels that do not count.
        shift_labels: ``[..., S]``, the labels of the next tokens, where the caller shifts them.
        kwargs: what a model's forward was given besides; not used, as in transformers.

    Returns:
        fp32, 0 dimensions.

    Raises:
        TypeError: logits or labels that are no tensors.
        ValueError: `vocab_size` is not the size of the logits' last dimension; neither `labels` nor
            `shift_labels` are given; labels of another shape, or that are no integers.
        TargetOutOfRangeError: on a CPU, a label that is no class; on a GPU the loss is NaN.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("`labels`: expected labels, or `shift_labels`, got None for both")
        if not isinstance(labels, Tensor):
            raise TypeError(f"`labels`: expected a tensor, got {type(labels).__name__}")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return _mean("causal_lm", logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """The mean cross entropy of each token and its own label; else as `causal_lm`.

    `transformers.loss.loss_utils.ForMaskedLMLoss`.
    """
    return _mean("masked_lm", logits, labels, vocab_size, num_items_in_batch, ignore_index)


def _mean(
    who: str,
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    items: Tensor | int | None,
    ignore_index: int,
) -> Tensor:
    for name, given in (("logits", logits), ("labels", target)):
        if not isinstance(given, Tensor):
            raise TypeError(f"`{name}`: expected a tensor, got {type(given).__name__}")
    if logits.dim() == 0 or logits.shape[-1] != vocab_size:
        size = logits.shape[-1] if logits.dim() else "of which there is none"
        raise ValueError(
            f"`vocab_size`: expected the size of the logits' last dimension, {size}, "
            f"got {vocab_size}"
        )
    if target.shape != logits.shape[:-1] and target.numel() * vocab_size != logits.numel():
        raise ValueError(
            f"`labels`: expected shape {list(logits.shape[:-1])}, that of the logits without their "
            f"last dimension, got {list(target.shape)}"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"`labels`: expected integers, got {target.dtype}")
    if isinstance(items, int) and items <= 0:
        items = torch.tensor(float(items), device="cpu")  # PyTorch divides by it
    if type(logits) is DeferredLogits or not _has_kernel(who, logits):
        return _original(logits, target, items, ignore_index)
    target = target.to(logits.device, torch.int64).reshape(logits.shape[:-1])
    if logits.dim() == 1:
        logits, target = logits[None], target[None]
    if type(target) is Tensor:
        check_targets(target, vocab_size, ignore_index, "labels")
    assert _cross_entropy is not None
    return _cross_entropy(logits, target, "mean", ignore_index, num_items=items)


def _original(
    logits: Tensor, target: Tensor, items: Tensor | int | None, ignore_index: int
) -> Tensor:
    from transformers.loss.loss_utils import fixed_cross_entropy

    wide = logits.float().reshape(-1, logits.shape[-1])
    target = target.reshape(-1).to(logits.device)
    loss: Tensor = fixed_cross_entropy(wide, target, items, ignore_index)
    return loss


def _has_kernel(who: str, logits: Tensor) -> bool:
    if torch.compiler.is_compiling():  # a graph has no place for a warning
        return logits.dtype in KERNEL_DTYPES and bool(_known(logits.device.type))
    why = tensor_refusal("cross_entropy", logits)
    if why is not None and why not in _warned:
        _warned.add(why)
        warn_of_handover(f"loss.{who}", "transformers' own", [why])
    return why is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _known(device: str) -> bool:
    return isinstance(local_kernel("cross_entropy", device), Kernel)
