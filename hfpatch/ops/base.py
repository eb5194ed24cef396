"""What an op is: a name, a readable PyTorch formula, and how a kernel for it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor

#: dtypes every kernel computes; anything else goes to the original forward.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Example:
    """A call of an op by tensors alone, of which a benchmark and tests are made.

    Attributes:
        inputs: its tensors as `hfpatch.bench.inputs` writes them, those that may be left out last:
            "x R D" has rows, "bias D" is a vector of their columns.
        shapes: a kind of `hfpatch.bench.shapes`: the sizes that are measured.
        eager: the formula as models write it, each step rounded: what it is measured against.
    """

    inputs: str
    shapes: str
    eager: Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op. Kernels attach to it by name and are called with the reference's own signature.

    Attributes:
        name: the op's name, as in `kernels={name: ...}` and in the C header's op table.
        reference: the formula in plain PyTorch: any floating dtype, any device, differentiable.
            fp64 inputs are computed in fp64 throughout, which makes it the probe's ground truth.
            Returns a tensor, or a tuple of those that the C function writes, in its order.
        aten: the same with PyTorch's fused operators where it has them: what runs when no compiled
            kernel can be had.
        encode: keyword parameters of `reference` to the integer and float codes of the raw
            operator, in the order of the C schema; tensors come before them.
        beats_single_kernel: device types on which our kernel was measured faster than the single
            fused ATen kernel of the same formula (docs/performance.md). Elsewhere a module that is
            one ATen kernel already is left alone: swapping it would only add host time.
        direct: whether the raw operator takes the reference's tensors, then the codes, and returns
            what the reference does. Otherwise (a workspace, more tensors) only the package's
            function is called.
        scratch: how many tensors the raw operator returns behind those of `reference`: memory that
            the kernel works in.
        captured: whether a rule of `hfpatch.regions.rules` puts it into captured blocks, which
            need its kernel then.
        example: for ops whose benchmark and test samples follow from their tensors; None: they are
            rows of `hfpatch.bench.cases` and `tests/op_samples.py`.
    """

    name: str
    reference: Callable[..., Any]
    aten: Callable[..., Any]
    encode: Callable[[dict[str, Any]], tuple[Any, ...]]
    beats_single_kernel: frozenset[str] = frozenset()
    direct: bool = True
    scratch: int = 0
    captured: bool = False
    example: Example | None = None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp32, or fp64 when any input is fp64 (the ground truth of the probe)."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32
