"""Training: the AdamW step, and the norm and clipping of gradients, over lists of tensors."""

from typing import Iterable, Optional, Sequence, Union

import torch
from torch import Tensor

from . import _codes, calls
from ._ops import ops

_adamw_step = ops.adamw_step.default
_grad_norm = ops.grad_norm.default
_clip_grads = ops.clip_grads.default
_scale_grads = ops.scale_grads.default


def _changed(tensors: Sequence[Tensor]) -> None:
    """Raise the version counters, so that autograd sees what was written in place."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: Union[float, Tensor] = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    clip_coef: Optional[Tensor] = None,
    grad_scale: Optional[Tensor] = None,
    found_inf: Optional[Tensor] = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) on all parameters, in place.

    The formula is that of `torch.optim.AdamW`, in fp32 whatever the dtypes, each result rounded
    once. All tensors of a list have one dtype; the tensors of a parameter have its shape and
    strides, which leave neither gaps nor overlaps (contiguous, transposed, channels last).

    Args:
        params: fp32, fp16 or bf16.
        grads: in the dtype of ``params`` or, with ``masters``, fp32. They are only read.
        exp_avgs, exp_avg_sqs: the first and second moments; in the dtype of ``params`` or fp32.
        steps: fp32, one element each: how many steps there were, this one included. On the device
            of ``params`` (read by the kernel, so a captured CUDA graph may change them) or the CPU.
        max_exp_avg_sqs: for AMSGrad (Reddi et al., arXiv:1904.09237); in the moments' dtype.
        masters: fp32 weights to make the step on; ``params`` (fp16 or bf16) receive them rounded.
        lr: learning rate; a number, or an fp32 tensor of one element.
        beta1, beta2: decay of the moments, from 0 to below 1.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        maximize: go up the gradient.
        clip_coef: fp32, one element; gradients are multiplied by it.
        grad_scale: fp32, one element; gradients are divided by it (`torch.amp.GradScaler`).
        found_inf: fp32, one element; if not 0, nothing is changed.

    Raises:
        RuntimeError: lists, dtypes, devices, shapes or values that the kernel refuses; says which.
    """
    if not params and not steps:
        return  # the dispatcher finds no kernel for no tensors
    lr_tensor = lr if isinstance(lr, Tensor) else None
    arguments = (
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps,
        lr_tensor, clip_coef, grad_scale, found_inf,
        0.0 if lr_tensor is not None else lr, beta1, beta2, eps, weight_decay, int(maximize),
    )  # fmt: skip
    with torch.no_grad():
        if torch.compiler.is_compiling() or not calls.over_lists("adamw_step", *arguments):
            _adamw_step(*arguments)
        _changed([*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *masters])


def grad_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements of all tensors, as if they were one vector.

    Sums in fp32 over parts of fixed size, which are added up in fp64, in order: the same input
    gives the same bits. Nothing waits for the device.

    Args:
        tensors: at least one; fp32, fp16 or bf16 (they may differ), on one device, with strides
            that leave neither gaps nor overlaps.
        norm_type: 2 or infinity (the largest magnitude).

    Returns:
        fp32, 0 dimensions, on the device of the tensors. NaN if there is a NaN.

    Raises:
        ValueError: another ``norm_type``, or no tensors.
        RuntimeError: a dtype, device or layout that the kernel refuses; says which.
    """
    code = _codes.GRAD_NORMS.get(float(norm_type))
    if code is None:
        _codes.reject("norm_type", norm_type, _codes.GRAD_NORMS)
    if not tensors:
        raise ValueError("`tensors`: expected at least one tensor, got none")
    with torch.no_grad():
        return _grad_norm(tensors, code)[0]


def clip_grads(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """``grads *= min(1, max_norm / (total_norm + 1e-6))``, in place.

    Args:
        grads: as in `grad_norm`.
        total_norm: fp32, one element, on the device of ``grads``; read by the kernel.
        max_norm: at least 0, may be infinite.

    Raises:
        RuntimeError: a dtype, device, layout or value that the kernel refuses.
    """
    with torch.no_grad():
        compiling = torch.compiler.is_compiling()
        if compiling or not calls.over_lists("clip_grads", grads, total_norm, float(max_norm)):
            _clip_grads(grads, total_norm, max_norm)
        _changed(grads)


def scale_grads(grads: Sequence[Tensor], factor: Tensor) -> None:
    """``grads *= factor``, in place; where it is 1, which the kernel sees, nothing is touched.

    Args:
        grads: as in `grad_norm`.
        factor: fp32, one element, on the device of ``grads``.

    Raises:
        RuntimeError: a dtype, device or layout that the kernel refuses.
    """
    with torch.no_grad():
        if torch.compiler.is_compiling() or not calls.over_lists("scale_grads", grads, factor):
            _scale_grads(grads, factor)
        _changed(grads)


def clip_grad_norm_(
    parameters: Union[Tensor, Iterable[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``, without a synchronization.

    As `torch.nn.utils.clip_grad_norm_`, but the norm is in fp32 also where gradients are not.

    Args:
        parameters: each once; those without a gradient are passed over; on one device or several.
        max_norm: at least 0, may be infinite (then a finite norm changes nothing).
        norm_type: 2 or infinity.
        error_if_nonfinite: raise if the norm is NaN or infinite, which waits for the device.

    Returns:
        The total norm before clipping: fp32, 0 dimensions, on the first gradient's device.

    Raises:
        ValueError: another ``norm_type``.
        RuntimeError: gradients that the kernel refuses; says which. Or ``error_if_nonfinite``, and
            the norm is not finite: then nothing is changed.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    by_device = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    if not by_device:
        return torch.tensor(0.0)
    norms = [grad_norm(grads, norm_type) for grads in by_device.values()]
    total = norms[0]
    if len(norms) > 1:
        to = total.device
        gathered = [norm.to(to, non_blocking=to.type == "cuda") for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(gathered), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            "the total norm of the gradients is {}, expected a finite one; look for NaN or "
            "overflow, or pass `error_if_nonfinite=False`".format(total.item())
        )
    for device, grads in by_device.items():
        # a copy to the host must have arrived when the CPU reads it
        here = total.to(device, non_blocking=device.type == "cuda")
        clip_grads(grads, here, max_norm)
    return total
