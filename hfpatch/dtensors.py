"""What this process has of DTensors (FSDP2, tensor parallel): for `hfpatch.optim`.

PyTorch's optimizers and its clipping run DTensors through a dispatcher of their own, operator by
operator, which takes tens of microseconds a tensor. Parts of equal placement need none of it: AdamW
updates each element by itself, and a norm is one reduction over the processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfpatch.handover import tensor_refusal
from hfpatch.kernels.sources import local_package
from hfpatch.proof.subject import is_dtensor


def parts_here(tensors: Sequence[Any]) -> list[Tensor] | None:
    """This process's parts of DTensors that are all spread alike; None where they are not. Without
    gradients."""
    if not all(map(is_dtensor, tensors)):
        return None
    placements, mesh = tensors[0].placements, tensors[0].device_mesh
    if any(place.is_partial() for place in placements):
        return None
    for t in tensors[1:]:
        if t.placements != placements or t.device_mesh != mesh:
            return None
    return [t.to_local() for t in tensors]


def can_clip(grads: Sequence[Any], norm_type: float) -> bool:
    """Whether `clip` takes these. All processes must answer alike, or they would wait for one
    another: nothing is asked that one of them may see otherwise."""
    if not grads or float(norm_type) not in (2.0, math.inf) or not all(map(is_dtensor, grads)):
        return False
    if torch.compiler.is_compiling() or len(set(map(id, grads))) < len(grads):
        return False
    mesh = grads[0].device_mesh
    if any(g.device_mesh != mesh or not _known(g.placements) for g in grads):
        return False
    empty = (torch.empty(0, dtype=t, device=grads[0].device) for t in {g.dtype for g in grads})
    return all(tensor_refusal("grad_norm", t) is None for t in empty)


def _known(placements: tuple[Any, ...]) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    return all(type(place) in (Replicate, Shard) for place in placements)


def clip(
    grads: Sequence[Any], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of what `can_clip` takes: a DTensor, fp32."""
    from torch.distributed.tensor import DTensor, Replicate

    kernels = local_package().module
    mesh = grads[0].device_mesh
    by_dims: dict[tuple[int, ...], list[Tensor]] = {}
    with torch.no_grad():
        for g in grads:
            dims = tuple(i for i, place in enumerate(g.placements) if place.is_shard())
            by_dims.setdefault(dims, []).append(g.to_local())
        parts = [part for found in by_dims.values() for part in found]
        norms = [
            _over(mesh, dims, _norm(kernels, found, norm_type), norm_type)
            for dims, found in by_dims.items()
        ]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type).float()
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the total norm of the gradients is {total.item()}, expected a finite one; look "
                "for NaN or overflow, or pass `error_if_nonfinite=False`"
            )
        _scale(kernels, [p for p in parts if p.numel()], total, max_norm)
        torch.autograd.graph.increment_version(grads)
        everywhere = [Replicate()] * mesh.ndim
        return DTensor.from_local(total, mesh, everywhere, run_check=False)


def _scale(kernels: Any, parts: list[Tensor], total: Tensor, max_norm: float) -> None:
    """By the kernel; by PyTorch what it does not take: with gaps, or memory that two share."""
    places = Counter(p.data_ptr() for p in parts)
    theirs = [p for p in parts if not p.is_contiguous() or places[p.data_ptr()] > 1]
    if len(theirs) < len(parts):
        left = set(map(id, theirs))
        kernels.clip_grads([p for p in parts if id(p) not in left], total, max_norm)
    if theirs:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for part in theirs:
            part.mul_(factor.to(part.dtype))


def _norm(kernels: Any, parts: list[Tensor], norm_type: float) -> Tensor:
    """Of all parts; 0 of none, which a small parameter leaves to most processes."""
    there = [p.contiguous() for p in parts if p.numel()]
    if not there:
        return torch.zeros((), dtype=torch.float32, device=parts[0].device)
    norm: Tensor = kernels.grad_norm(there, norm_type)
    return norm


def _over(mesh: Any, dims: tuple[int, ...], norm: Tensor, norm_type: float) -> Tensor:
    """The norm of all processes' parts from each one's, fp64: the square of an fp32 norm may be too
    large for fp32."""
    from torch.distributed import ReduceOp, all_reduce

    if norm_type == math.inf:
        # a reduction may drop NaN, so whether there is one goes beside it
        both = torch.stack([norm.isnan().double(), norm.double().nan_to_num(0.0, math.inf)])
        for dim in dims:
            all_reduce(both, ReduceOp.MAX, group=mesh.get_group(dim))
        return torch.where(both[0] > 0, math.nan, both[1])
    square = norm.double().square()
    for dim in dims:
        all_reduce(square, group=mesh.get_group(dim))
    return square.sqrt()
