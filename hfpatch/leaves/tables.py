"""What a fused forward takes for granted of the numbers in its inputs: looked at once per tensor.

A model makes its RoPE tables and its mask once and hands them to all of its blocks. The look waits
for the GPU, once for each of them, and never where a graph is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hfpatch.blocks.memo import for_a_graph
from hfpatch.proof.subject import Tensor, version

#: (id of a tensor, what was asked) -> (the tensor, how often it was written to, the answer).
_known: dict[tuple[int, Any], tuple[weakref.ref[Tensor], int | None, bool]] = {}
_MOST = 64


def hold_twice(tables: Sequence[Tensor], interleaved: bool) -> bool:
    """Whether each value of RoPE tables, [..., D], stands twice, as the kernels read them: in
    columns i and i + D / 2 or, `interleaved`, in columns 2i and 2i + 1."""
    return _look(tables, interleaved, _adjacent if interleaved else _halves)


def rows_are_open(masks: Sequence[Tensor]) -> bool:
    """Whether no row of additive masks, [..., keys], is -inf throughout: softmax makes NaN of
    such a row, and attention's kernels 0."""
    return _look(masks, "rows", lambda t: ~t.isneginf().all(-1).any())


def without_inf(masks: Sequence[Tensor]) -> bool:
    """Whether nowhere in additive masks is -inf."""
    return _look(masks, "inf", lambda t: ~t.isneginf().any())


def _halves(t: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return (first == second).all()


def _adjacent(t: Tensor) -> Tensor:
    return (t[..., ::2] == t[..., 1::2]).all()


def _look(tensors: Sequence[Tensor], what: Any, ask: Callable[[Tensor], Tensor]) -> bool:
    """Whether `ask` says so of all; those that were not looked at are waited for together."""
    unknown = []
    for t in tensors:
        held = _known.get((id(t), what))
        counted = version(t)
        # of tensors of inference mode, whose writes are not counted, a GPU's first look must do
        may_hold = counted is not None or t.is_cuda
        if may_hold and held is not None and held[0]() is t and held[1] == counted:
            if not held[2]:
                return False
        else:
            unknown.append(t)
    if not unknown:
        return True
    if unknown[0].is_cuda and (for_a_graph() or torch.cuda.is_current_stream_capturing()):
        return True  # the run before, which was no recording, was looked at
    with torch.no_grad():
        found = torch.stack([ask(t) for t in unknown]).tolist()
    if len(_known) >= _MOST:
        _known.clear()
    for t, answer in zip(unknown, found, strict=True):
        _known[id(t), what] = weakref.ref(t), version(t), answer
    return all(found)
