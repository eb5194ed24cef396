"""Every op as a plain function: the compiled kernel where there is one, else PyTorch.

    y = hfpatch.functional.rms_norm(x, weight, eps=1e-6, cast="input")

Each has the signature, shapes and dtypes of its formula in `hfpatch.ops`. Where the kernel cannot
run (no build, no code for the device, another dtype or size) PyTorch's operators compute the same,
with one warning for each op and reason; HFPATCH_FALLBACK=error raises `KernelLoadError` instead.
Kernels without a backward compute what autograd records by their formula.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.announce import announce_in_call
from hfpatch.errors import KernelLoadError
from hfpatch.ops import KERNEL_DTYPES, OPS, Op
from hfpatch.ops.activation import ACTIVATIONS, APPROXIMATIONS
from hfpatch.ops.adaln import MODULATION_CASTS, NORMS
from hfpatch.ops.gated_norm import GATES
from hfpatch.ops.rms_norm import CASTS

if TYPE_CHECKING:
    Function = Callable[..., Any]

_warned: set[tuple[str, str]] = set()

#: By the annotation of a parameter of a tensor: whether None may stand there.
_TENSORS = {"Tensor": False, "Tensor | None": True}
#: Of these a tensor without dimensions is a value like others.
_ANY_SHAPE = ("gelu", "silu", "gated", "gated_clamped")
#: The most values that the kernel of `topk` finds.
_MOST = 2048
#: Names that an argument may be.
_NAMES: dict[str, Iterable[str]] = {
    "activation": ACTIVATIONS,
    "approximate": APPROXIMATIONS,
    "cast": CASTS,
    "gate_activation": GATES,
    "norm": NORMS,
}
#: Ops whose `cast` is one of fewer.
_MODULATIONS = (
    "norm_modulate",
    "gate_residual",
    "gate_residual_norm_modulate",
    "mul_add",
    "gated_rms_norm",
)
#: Numbers from 0 on, and the greatest that they may be.
_MOSTS = {
    "eps": math.inf,
    "temperature": math.inf,
    "top_k": math.inf,
    "top_p": 1.0,
    "min_p": 1.0,
}


def _tensors(
    name: str, takes: dict[str, bool | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors of a call, in the order of its parameters if those are given by position.

    Args:
        takes: of each parameter whether it may be None where it is no tensor; None: it may be else.
    """
    given = []
    for argument, value in (*zip(takes, args, strict=False), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            given.append(value)
            continue
        optional = takes.get(argument)
        if optional is False or (optional and value is not None):
            raise TypeError(
                f"`{name}`: `{argument}` must be a tensor{' or None' if optional else ''}, got "
                f"{type(value).__name__}; `torch.as_tensor` makes one of numbers"
            )
    return given


def _too_many(k: Any) -> str | None:
    """Why the kernel of `topk` cannot find so many; None if it can, or the call says more."""
    if isinstance(k, numbers.Integral) and not 1 <= int(k) <= _MOST:
        return f"it finds at most {_MOST} values"
    return None


def _why_not(name: str, first: Any, given: list[torch.Tensor]) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    from hfpatch.kernels.sources import local_package

    if not isinstance(first, torch.Tensor):
        return None  # the function itself says what it expects
    others = (t.dtype for t in given if t.is_floating_point() or t.is_complex())
    for dtype in (first.dtype, *others):
        if dtype not in KERNEL_DTYPES:
            return f"it computes float32, float16 and bfloat16, got {dtype}"
    least = 2 if name == "sample" else 1
    if first.dim() < least:
        return f"it computes tensors of at least {least} dimensions, got {first.dim()}"
    try:
        return local_package().kernel(name).refuses(first.device.type)
    except KernelLoadError as e:
        return str(e)


def _check(op: Op, given: dict[str, Any]) -> None:
    """Refuse what the formulas would compute something of, and what the kernels refuse."""
    argument, first = next(iter(given.items()))
    if not first.is_floating_point():
        raise TypeError(
            f"`{op.name}`: `{argument}` must have a floating dtype, got {first.dtype}; convert it "
            "first"
        )
    if first.dim() == 0 and op.name not in _ANY_SHAPE:
        raise ValueError(f"`{op.name}`: `{argument}` must have at least 1 dimension, got 0")
    for argument, names in _NAMES.items():
        if op.name in _MODULATIONS and argument == "cast":
            names = MODULATION_CASTS
        if argument in given and given[argument] not in [*names]:
            listed = ", ".join(map(repr, names))
            raise ValueError(
                f"`{op.name}`: `{argument}` must be one of {listed}; got {given[argument]!r}"
            )
    for argument, most in _MOSTS.items():
        value = given.get(argument, 0)
        if isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"`{op.name}`: `{argument}` must be a number, got {type(value).__name__}"
            )
        if not 0 <= float(value) <= most or value == math.inf:
            limit = "finite and at least 0" if most == math.inf else f"from 0 to {most:g}"
            raise ValueError(f"`{op.name}`: `{argument}` must be {limit}, got {value}")
    for argument in {"k", "top_k"}.intersection(given):
        if not hasattr(value := given[argument], "__index__"):
            raise TypeError(f"`{op.name}`: `{argument}` must be an int, got {type(value).__name__}")
    if "k" in given and not 1 <= given["k"] <= first.shape[-1]:
        raise ValueError(
            f"`topk`: `k` must be from 1 to the size of the last dimension, {first.shape[-1]}, got "
            f"{given['k']}"
        )
    if given.get("weight_offset") and given.get("cast") != "none":
        raise ValueError(
            f"`{op.name}`: `weight_offset` {given['weight_offset']} needs `cast='none'`, got "
            f"{given['cast']!r}"
        )


def _fall_back(name: str, why: str) -> None:
    """Say it once, or raise where that is asked for."""
    wanted = os.environ.get("HFPATCH_FALLBACK", "warn")
    if wanted not in ("warn", "error"):
        raise ValueError(f"HFPATCH_FALLBACK must be `warn` or `error`, got {wanted!r}")
    if wanted == "error":
        raise KernelLoadError(f"`{name}`: {why}; HFPATCH_FALLBACK=error refuses PyTorch's")
    if (name, why) not in _warned:
        _warned.add((name, why))
        announce_in_call(f"`{name}` is computed by PyTorch's operators: {why}", stacklevel=3)


def _function(name: str) -> Function:
    op = OPS[name]
    signature = inspect.signature(op.reference)
    parameters = list(signature.parameters)
    takes = {p.name: _TENSORS.get(p.annotation) for p in signature.parameters.values()}
    counted = name == "topk"

    @functools.wraps(op.reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        from hfpatch.kernels.sources import local_package

        given = _tensors(name, takes, args, kwargs)
        first = args[0] if args else kwargs.get(parameters[0])
        why = _why_not(name, first, given)
        if why is None and counted:
            why = _too_many(args[1] if len(args) > 1 else kwargs.get("k"))
        if why is None:
            return local_package().kernel(name).fn(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check(op, bound.arguments)
        _fall_back(name, why)
        return op.aten(*args, **kwargs)

    call.__module__ = __name__
    return call


_functions = {name: _function(name) for name in OPS}


def __getattr__(name: str) -> Any:
    if name in _functions:
        return _functions[name]
    raise AttributeError(
        f"module 'hfpatch.functional' has no op {name!r}: expected one of {', '.join(__dir__())}"
    )


def __dir__() -> list[str]:
    return sorted(_functions)
