"""Numbers of each row of deferred logits, or of their log-probabilities, without the logits.

Each function has the arguments of PyTorch's of that name, and returns None where such a number
needs the logits whole: the tensor makes them then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hfpatch.losses.deferred_losses import Pieces
from hfpatch.losses.deferred_tensor import DeferredLogits, dtype_of, shape_of
from hfpatch.losses.head_row_values import (
    Classes,
    ValuesOfHead,
    logits_at,
    mean_of_logits,
    sum_and_at,
)
from hfpatch.proof.saved import saving_is_watched


def gather(logits: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Tensor | None:
    """Of logits, or of log-probabilities, those of one class in each row."""
    shape = shape_of(logits)
    if (
        type(dim) is not int
        or dim not in (-1, len(shape) - 1)
        or sparse_grad
        or type(index) is not Tensor
        or index.dtype != torch.int64
        or tuple(index.shape) != (*shape[:-1], 1)
        or index.device != logits._head.hidden.device
    ):
        return None
    target = index.reshape(-1)
    # PyTorch's own error is the original's. A GPU is not waited for: there it is one of the device
    if target.device.type == "cpu" and ((target < 0) | (target >= shape[-1])).any():
        return None
    is_log = any(name == "log_softmax" for name, _ in logits._steps)
    if not is_log or _turn(logits) is not None:
        if (values := _Values.of(logits, at_once=True)) is None:
            return None
        at = values.at(target, index.shape)
        found = at - values.sums.reshape(index.shape) if is_log else at
        return found.to(dtype_of(logits))
    if (pieces := Pieces.of(logits, of_log_probs=True)) is None:
        return None
    found = pieces.at_and_sum(target)
    logits._rows = None if saving_is_watched() else (pieces.records, found)
    return (pieces.sign * found[0].reshape(index.shape)).to(dtype_of(logits))


def take_along_dim(logits: Any, indices: Any, dim: Any = None) -> Tensor | None:
    """The same of indices that are spread over nothing, and count from the end where PyTorch's do:
    before 2.13 one out of range is an error, which is the original's."""
    if type(indices) is Tensor and indices.dtype == torch.int64 and _wraps():
        indices = indices.remainder(shape_of(logits)[-1])
    return gather(logits, dim, indices)


@functools.cache
def _wraps() -> bool:
    try:
        found = torch.take_along_dim(torch.arange(3), torch.tensor([-1]), 0)
    except (IndexError, RuntimeError):
        return False
    return found.tolist() == [2]


def logsumexp(logits: Any, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """Over the classes."""
    shape = shape_of(logits)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) != 1 or type(dims[0]) is not int or dims[0] not in (-1, len(shape) - 1):
        return None
    if any(name in ("log_softmax", "neg") for name, _ in logits._steps):
        return None
    if (values := _Values.of(logits)) is None:
        return None
    like = torch.empty(1, 1, dtype=dtype_of(logits), device=values.sums.device)
    # of its own memory, for it may be written to; and in the dtype of autocast
    result = values.sums.reshape(*shape[:-1], *(1,) * bool(keepdim)).clone()
    return result.to(torch.logsumexp(like, -1).dtype)


def mean(
    logits: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    """Of all of them, without gradients: a number to be logged."""
    if dim is not None or keepdim or dtype is not None:
        return None
    pieces = Pieces.of(logits)
    if pieces is None or pieces.records or not pieces.hidden.numel():
        return None
    flat = pieces.hidden.reshape(-1, pieces.hidden.shape[-1])
    return mean_of_logits(flat, pieces.parameters, pieces.options).to(dtype_of(logits))


def _turn(logits: DeferredLogits) -> tuple[DeferredLogits, int] | None:
    """Of logits, or log-probabilities, of one of several sequences: the logits that were iterated
    over, and its number."""
    if saving_is_watched():  # a checkpoint that runs its part again begins in the middle
        return None
    at: DeferredLogits | None = logits
    while at is not None and at._of is None:
        if at._step is None or at._step[0] not in ("to", "log_softmax"):
            return None
        at = at._before
    return None if at is None else at._of


class _Values:
    """Sums and values of the rows of some logits, of which `sums` are one's turn."""

    def __init__(self, made: _Made, part: slice, number: int | None) -> None:
        self._made, self._part, self._number = made, part, number
        self.sums = made.found[0, part]

    @staticmethod
    def of(logits: DeferredLogits, at_once: bool = False) -> _Values | None:
        """None where the logits are needed whole. at_once: for one `at`."""
        if logits.steps() is None:
            return None
        whole, number = _turn(logits) or (logits, None)
        pieces = Pieces.of(whole)
        if pieces is None:
            return None
        made: _Made | None = whole._values
        if made is None or made.records != pieces.records or (at_once and made.has(number)):
            made = _Made(pieces)
            whole._values = None if saving_is_watched() else made
        count = made.rows
        each = count // shape_of(whole)[0] if number is not None else count
        start = each * (number or 0)
        return _Values(made, slice(start, start + each), number)

    def at(self, target: Tensor, shape: torch.Size) -> Tensor:
        """fp32, the logits at the target [n], in a shape of n elements."""
        zeros, found = self._made.at(self._part, self._number, target)
        return zeros.reshape(shape) + found.reshape(shape)


class _Made:
    """What `ValuesOfHead` made of some logits' rows."""

    def __init__(self, pieces: Pieces) -> None:
        self.records, self._head, self._options = pieces.records, pieces.parameters, pieces.options
        self._hidden = pieces.hidden.reshape(-1, pieces.hidden.shape[-1])
        self.rows = len(self._hidden)
        target = torch.full((self.rows,), -1, dtype=torch.int64, device=self._hidden.device)
        self.known = Classes(target)
        self._asked: set[int | None] = set()  # what classes were asked of; None: of all

        def loss_of(values: Tensor, _: bool) -> Tensor:
            return sum_and_at(values.float().reshape(-1, values.shape[-1]), target)

        hooks = pieces.hooks(loss_of)
        with (
            torch.autocast(self._hidden.device.type, enabled=False),
            torch.set_grad_enabled(self.records),
        ):
            apply: Any = ValuesOfHead.apply
            self.found: Tensor = apply(
                self._hidden, *self._head, self.known, self._options, hooks, *pieces.sources
            )
        pieces.consumed(hooks)

    def has(self, number: int | None) -> bool:
        """Whether classes of these rows, or of some of them, were asked for."""
        return bool(self._asked) and (number is None or not self._asked.isdisjoint((number, None)))

    def at(self, part: slice, number: int | None, target: Tensor) -> tuple[Tensor, Tensor]:
        """What has the gradient of the logits there, and the logits."""
        self._asked.add(number)
        self.known.target[part] = target
        self.known.are_all = None in self._asked or len(self._asked) * len(target) == self.rows
        found = logits_at(self._hidden[part], self._head, target, self._options)
        return self.found[1, part], found


def sum_of_classes(
    logits: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    """Of log-probabilities those of all classes."""
    shape = shape_of(logits)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) != 1 or type(dims[0]) is not int or dims[0] not in (-1, len(shape) - 1):
        return None
    pieces = Pieces.of(logits, of_log_probs=True)
    if pieces is None:
        return None
    # what is made with the value of one class serves for the sum too: see `gather`
    records, found = logits._rows or (None, None)
    if found is None or records != pieces.records or saving_is_watched():
        rows = pieces.hidden.shape[:-1].numel()
        none = torch.zeros(rows, dtype=torch.int64, device=pieces.hidden.device)
        found = pieces.at_and_sum(none)
    like = torch.empty(1, 1, dtype=dtype_of(logits), device=found.device)
    result = pieces.sign * found[1].reshape(*shape[:-1], *(1,) * bool(keepdim))
    return result.to(like.sum(-1, dtype=dtype).dtype)
