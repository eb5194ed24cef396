"""Logits that are made when somebody reads them; a cross entropy of them never does.

In training the head of a language model returns `DeferredLogits` (`deferred_tensor`). What a model
does to its logits before the loss is written down (casts, shapes, some of the rows or classes, a
bias, a scale, a softcap): here is what is known of that. `torch.nn.functional.cross_entropy` of
them runs `head_loss.linear_cross_entropy`; so every loss function that ends there is served,
transformers' own and the user's. Of `log_softmax` the value at a class of each row, and the sum
over the classes, are made without it; of the logits themselves that value, their `logsumexp` and,
without gradients, their mean (`deferred_losses`, `deferred_values`).
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.losses.deferred_losses import cross_entropy, nll_loss
from hfpatch.losses.deferred_tensor import (
    COMMUTES,
    RECORDED,
    Adapter,
    DeferredLogits,
    cast,
    dtype_of,
    meta_of,
    shape_of,
    then,
)
from hfpatch.losses.deferred_values import (
    gather,
    logsumexp,
    mean,
    sum_of_classes,
    take_along_dim,
)
from hfpatch.ops import KERNEL_DTYPES

__all__ = ["Adapter", "DeferredLogits"]

# What a model does to its logits before the loss. Each returns None for what it does not know.


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    dtype = kwargs.pop("dtype", None) or (args[0] if len(args) == 1 else None)
    if kwargs or len(args) > 1 or not isinstance(dtype, torch.dtype):
        return None
    return cast(logits, dtype)


def _view(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> DeferredLogits | None:
    return _shaped(logits, shape, kwargs, copies=False)


def _reshape(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> DeferredLogits | None:
    return _shaped(logits, shape, kwargs, copies=True)


def _shaped(
    logits: DeferredLogits, shape: tuple[Any, ...], kwargs: Any, *, copies: bool
) -> DeferredLogits | None:
    if kwargs:
        return None
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not sizes or not all(isinstance(s, int) for s in sizes):
        return None
    old = shape_of(logits)
    if list(sizes).count(-1) == 1:
        known = -math.prod(sizes)
        if not known or math.prod(old) % known:
            return None
        sizes = tuple(math.prod(old) // known if s == -1 else s for s in sizes)
    if math.prod(sizes) != math.prod(old) or sizes[-1] != old[-1]:
        return None
    if sizes == old:
        return logits
    try:
        return then(logits, "shape", sizes, meta_of(logits).view(sizes))
    except RuntimeError:  # its elements lie too far apart
        return then(logits, "copy", sizes, torch.empty(sizes, device="meta")) if copies else None


def _flatten(
    logits: DeferredLogits, start_dim: Any = 0, end_dim: Any = -1
) -> DeferredLogits | None:
    old = shape_of(logits)
    if not all(isinstance(d, int) and -len(old) <= d < len(old) for d in (start_dim, end_dim)):
        return None
    first, last = start_dim % len(old), end_dim % len(old)
    if first > last:
        return None
    sizes = (*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :])
    return _shaped(logits, sizes, {}, copies=True)


def _contiguous(logits: DeferredLogits) -> DeferredLogits | None:
    if meta_of(logits).is_contiguous():
        return logits
    shape = shape_of(logits)
    return then(logits, "copy", shape, torch.empty(shape, device="meta"))


def _item(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    """Some of the rows, as `logits[..., :-1, :]`, `logits[:, 0]`, `logits[mask]`, and of the
    classes those that follow each other."""
    parts = _parts(index if isinstance(index, tuple) else (index,), shape_of(logits))
    if parts is None or type(parts[-1]) is not slice:
        return None
    rows, classes = (*parts[:-1], slice(None)), parts[-1]
    try:
        if any(isinstance(p, Tensor) for p in rows):
            return _picked(logits, rows) if classes == slice(None) else None
        start, stop, by = classes.indices(shape_of(logits)[-1])
        if by != 1 or stop <= start:
            return None
        if rows != (slice(None),) * len(rows) or classes == slice(None):
            logits = then(logits, "rows", rows, meta_of(logits)[rows])
        if stop - start == shape_of(logits)[-1]:
            return logits
        part = slice(start, stop)
        return then(logits, "classes", part, meta_of(logits)[..., part])
    except (ValueError, TypeError, IndexError):  # PyTorch's own error is the original's
        return None


def _parts(given: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """One for each dimension, masks by the numbers that they choose; None for what is not known."""
    parts: list[Any] = []
    sizes: list[int | None] = []  # of what masks are for
    for p in given:
        if type(p) is Tensor and p.dtype == torch.bool and p.dim():
            parts += p.nonzero(as_tuple=True)
            sizes += p.shape
            continue
        if type(p) is Tensor and p.dtype == torch.int64 and p.dim():
            p = p.clone()  # it may be written to
        elif p is not Ellipsis and type(p) not in (slice, int):
            return None
        parts.append(p)
        sizes.append(None)
    at = [i for i, p in enumerate(parts) if p is Ellipsis]
    missing = len(shape) - len(parts) + len(at)
    if len(at) > 1 or missing < 0:
        return None
    first = at[0] if at else len(parts)
    parts[first : first + 1] = [slice(None)] * missing
    sizes[first : first + 1] = [None] * missing
    if any(of not in (None, size) for of, size in zip(sizes, shape, strict=True)):
        return None
    return tuple(parts)


def _picked(logits: DeferredLogits, rows: tuple[Any, ...]) -> DeferredLogits:
    """The rows of these numbers: a copy."""
    shape = shape_of(logits)
    # an index that does not fit, or is out of range, is an error of now
    logits._head.hidden.detach().new_empty(()).expand(shape[:-1])[rows[:-1]]
    on_meta = [torch.empty_like(p, device="meta") if isinstance(p, Tensor) else p for p in rows]
    return then(logits, "picked", rows, meta_of(logits)[tuple(on_meta)])


def _transpose(logits: DeferredLogits, dim0: Any, dim1: Any) -> DeferredLogits | None:
    """Of two dimensions that are not the classes'."""
    count = len(shape_of(logits))
    if not all(type(d) is int and -count <= d < count for d in (dim0, dim1)):
        return None
    dims = dim0 % count, dim1 % count
    if count - 1 in dims:
        return None
    return then(logits, "swap", dims, meta_of(logits).transpose(*dims))


def _plus(logits: DeferredLogits, bias: Any, **kwargs: Any) -> DeferredLogits | None:
    """A bias of all rows, as transformers' `final_logits_bias`."""
    shape = shape_of(logits)
    if (
        kwargs
        or type(bias) not in (Tensor, nn.Parameter)
        or bias.dtype not in KERNEL_DTYPES
        or not 1 <= bias.dim() <= len(shape)
        or tuple(bias.shape) != (*(1,) * (bias.dim() - 1), shape[-1])
        or bias.device != logits._head.hidden.device
    ):
        return None
    dtype = torch.promote_types(dtype_of(logits), bias.dtype)
    # who writes to the bias later does not write to these logits
    return then(logits, "add", bias.clone(), dtype=dtype)


def _times(logits: DeferredLogits, number: Any, **kwargs: Any) -> DeferredLogits | None:
    return _scaled(logits, "mul", number, kwargs)


def _over(logits: DeferredLogits, number: Any, **kwargs: Any) -> DeferredLogits | None:
    return _scaled(logits, "div", number, kwargs)


def _scaled(logits: DeferredLogits, step: str, number: Any, kwargs: Any) -> DeferredLogits | None:
    if kwargs or type(number) not in (int, float) or not math.isfinite(number) or not number:
        return None
    return then(logits, step, number)


def _tanh(logits: DeferredLogits) -> DeferredLogits | None:
    return then(logits, "tanh", None)


def _log_softmax(
    logits: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> DeferredLogits | None:
    """Of `torch.nn.functional`."""
    return _log_softmax_of(logits, dim, dtype)


def _log_softmax_of(logits: Any, dim: Any = None, dtype: Any = None) -> DeferredLogits | None:
    if dim not in (-1, len(shape_of(logits)) - 1) or type(dim) is not int:
        return None
    # what autocast, and the dtype that is asked for, make of theirs
    like = torch.empty(1, 1, dtype=dtype_of(logits), device=logits._head.hidden.device)
    wide = cast(logits, torch.log_softmax(like, -1, dtype).dtype)
    if wide is None:
        return None
    return then(wide, "log_softmax", None, torch.empty(shape_of(wide), device="meta"))


def _negative(logits: DeferredLogits) -> DeferredLogits | None:
    is_log = any(name == "log_softmax" for name, _ in logits._steps)
    return then(logits, "neg", None) if is_log else None


def _detached(logits: DeferredLogits) -> DeferredLogits | None:
    """Where the code that calls takes their mean, as logs do: others may keep them, and read them
    when the head's weight has changed."""
    caller = sys._getframe(2)
    if _called_next(caller.f_code).get(caller.f_lasti) != "mean":
        return None
    with torch.no_grad():
        return then(logits, "detach", None, meta_of(logits))


@functools.lru_cache(maxsize=64)
def _called_next(code: types.CodeType) -> dict[int, str]:
    """By the offset of an instruction the attribute that the next one loads of its result."""
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    return {
        a.offset: str(b.argval)
        for a, b in itertools.pairwise(steps)
        if b.opname in ("LOAD_METHOD", "LOAD_ATTR")
    }


def _each(logits: DeferredLogits, dim: Any = 0) -> tuple[DeferredLogits, ...] | None:
    """What iteration gives: a batch's sequences."""
    shape = shape_of(logits)
    if dim != 0 or type(dim) is not int or len(shape) < 3:
        return None
    found = []
    for number in range(shape[0]):
        rows = (number, *(slice(None),) * (len(shape) - 1))
        one = then(logits, "rows", rows, meta_of(logits)[number])
        one._of = logits, number
        found.append(one)
    return tuple(found)


RECORDED.update(
    {
        Tensor.float: lambda logits: cast(logits, torch.float32),
        Tensor.to: _to,
        Tensor.view: _view,
        Tensor.reshape: _reshape,
        torch.reshape: _reshape,
        Tensor.flatten: _flatten,
        torch.flatten: _flatten,
        Tensor.contiguous: _contiguous,
        Tensor.__getitem__: _item,
        Tensor.transpose: _transpose,
        torch.transpose: _transpose,
        Tensor.is_contiguous: lambda logits, **how: meta_of(logits).is_contiguous(**how),
        Tensor.stride: lambda logits, *dim, **how: meta_of(logits).stride(*dim, **how),
        Tensor.__add__: _plus,
        Tensor.__radd__: _plus,
        Tensor.add: _plus,
        torch.add: _plus,
        Tensor.__mul__: _times,
        Tensor.__rmul__: _times,
        Tensor.mul: _times,
        Tensor.__truediv__: _over,
        Tensor.div: _over,
        torch.mul: _times,
        torch.div: _over,
        torch.tanh: _tanh,
        Tensor.tanh: _tanh,
        F.cross_entropy: cross_entropy,
        F.nll_loss: nll_loss,
        F.log_softmax: _log_softmax,
        torch.log_softmax: _log_softmax_of,
        Tensor.log_softmax: _log_softmax_of,
        Tensor.__neg__: _negative,
        Tensor.neg: _negative,
        torch.neg: _negative,
        Tensor.gather: gather,
        torch.gather: gather,
        Tensor.take_along_dim: take_along_dim,
        torch.take_along_dim: take_along_dim,
        Tensor.logsumexp: logsumexp,
        torch.logsumexp: logsumexp,
        Tensor.mean: mean,
        torch.mean: mean,
        Tensor.detach: _detached,
        torch.detach: _detached,
        Tensor.unbind: _each,
        torch.unbind: _each,
        Tensor.sum: sum_of_classes,
        torch.sum: sum_of_classes,
    }
)
COMMUTES.update((Tensor.__add__, Tensor.__radd__, Tensor.add, torch.add))
