"""What a fused forward takes for granted of the numbers in its inputs: looked at once per tensor.

A model makes its RoPE tables and its mask once and hands them to all of its blocks. The look waits
for the GPU, once for each of them, and never where a graph is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hfpatch.patches.base import Tensor
from hfpatch.patches.blocks.memo import for_a_graph, version

#: (id of a tensor, what was asked) -> (the tensor, how often it was written to, the answer).
_known: dict[tuple[int, Any], tuple[weakref.ref[Tensor], int | None, bool]] = {}
_MOST = 64


def hold_twice(tables: Sequence[Tensor], interleaved: bool) -> bool:
    """Whether each value of RoPE tables, [..., D], stands twice, as the kernels read them: in
    columns i and i + D / 2 or, `interleaved`, in columns 2i and 2i + 1."""
    return all(_look(t, interleaved, _adjacent if interleaved else _halves) for t in tables)


def has_open_rows(mask: Tensor) -> bool:
    """Whether no row of an additive mask, [..., keys], is -inf throughout: softmax makes NaN of
    such a row, and attention's kernels 0."""
    return _look(mask, "rows", _rows)


def is_above_inf(mask: Tensor) -> bool:
    """Whether nowhere in an additive mask is -inf."""
    return _look(mask, "inf", lambda t: ~t.isneginf().any())


def _halves(t: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return (first == second).all()


def _adjacent(t: Tensor) -> Tensor:
    return (t[..., ::2] == t[..., 1::2]).all()


def _rows(mask: Tensor) -> Tensor:
    return ~mask.isneginf().all(-1).any()


def _look(t: Tensor, what: Any, ask: Callable[[Tensor], Tensor]) -> bool:
    key = (id(t), what)
    held = _known.get(key)
    counted = version(t)
    # of tensors of inference mode, whose writes are not counted, on a GPU the first look must do
    known = counted is not None or t.is_cuda
    if known and held is not None and held[0]() is t and held[1] == counted:
        return held[2]
    if t.is_cuda and (for_a_graph() or torch.cuda.is_current_stream_capturing()):
        return True  # the run before, which was no recording, was looked at
    with torch.no_grad():
        found = bool(ask(t))
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = weakref.ref(t), counted, found
    return found
