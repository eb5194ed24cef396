"""Losses of deferred logits in pieces: cross entropy, and what it takes of logits.

Each function has the arguments of PyTorch's of that name, and returns None where such a loss needs
the logits whole: the tensor makes them then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfpatch.losses.deferred_tensor import (
    STEPS,
    DeferredLogits,
    added_by,
    cast,
    dtype_of,
    records_gradients,
    shape_of,
)
from hfpatch.losses.head_log_probs import LogProbsOfHead, at_and_sum
from hfpatch.losses.head_loss import Options, check_head, loss_of_head
from hfpatch.losses.logits_hooks import Formula, LogitsHooks
from hfpatch.proof.subject import autocasts

#: Reductions as PyTorch's C++ functions number them.
_NONE, _SUM = 0, 2
#: How far the factors of logits may go.
_FAR = 2.0**20


def _form(steps: list[tuple[str, Any]], half: bool) -> tuple[float, float] | None:
    """(scale, softcap) of the steps, or None where they are not of that form, or where a scale
    comes behind the cast of a half type, and is not rounded to it."""
    names = [name for name, _ in steps]
    if not {"log_softmax", "neg"}.isdisjoint(names):
        return None
    scaled = [i for i, name in enumerate(names) if name in ("mul", "div", "tanh")]
    if scaled and "add" in names[scaled[0] :]:
        return None
    numbers = [(n, v) for n, v in steps if n in ("mul", "div", "tanh")]
    cap = 0.0
    if "tanh" in names:
        if names.count("tanh") > 1 or len(numbers) < 2 or numbers[-2][0] != "tanh":
            return None
        name, value = numbers[-1]
        cap = float(value if name == "mul" else 1 / value)
        numbers = numbers[:-2]
        if cap <= 0:
            return None
    scale = 1.0
    for name, value in numbers:
        scale *= value if name == "mul" else 1 / value
        if not 1 / _FAR < abs(scale) < _FAR:  # on the way the logits might be infinite, or zero
            return None
    if cap:  # c * tanh(s * y) is the softcap c of s * c * y
        scale *= cap
    if abs(scale - 1) < 1e-12:
        return 1.0, cap
    first = next(i for i, n in enumerate(names) if n in ("mul", "div"))
    return None if half and "to" in names[:first] else (scale, cap)


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    device = logits._head.hidden.device.type
    if dtype_of(logits) != torch.float32 and autocasts(device):
        logits = cast(logits, torch.float32)  # as autocast does
    if (
        _reads_targets(logits, target, reduction)
        or weight is not None
        or size_average is not None
        or reduce is not None
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    pieces = Pieces.of(logits)
    if pieces is None:
        return None

    def loss_of(values: Tensor, summed: bool) -> Tensor:
        # what `torch.nn.functional.cross_entropy` calls: its name may be somebody else's by now
        found: Tensor = torch.ops.aten.cross_entropy_loss.default(
            values, target, None, _SUM if summed else _NONE, ignore_index, label_smoothing
        )
        return found

    return pieces.loss(target, loss_of, int(ignore_index), float(label_smoothing), reduction)


def nll_loss(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    """Of logarithms of probabilities: the cross entropy of what they were made of."""
    if (
        _reads_targets(logits, target, reduction)
        or weight is not None
        or size_average is not None
        or reduce is not None
        or (pieces := Pieces.of(logits, of_log_probs=True)) is None
        or pieces.sign < 0
    ):
        return None

    def loss_of(values: Tensor, summed: bool) -> Tensor:
        found: Tensor = torch.ops.aten.nll_loss_nd.default(
            values, target, None, _SUM if summed else _NONE, ignore_index
        )
        return found

    loss = pieces.loss(target, loss_of, int(ignore_index), 0.0, reduction)
    return loss.float() if autocasts(loss.device.type) else loss


def _reads_targets(logits: DeferredLogits, target: Any, reduction: str) -> bool:
    """Whether a loss of these targets reads the logits."""
    shape = shape_of(logits)
    return (
        type(target) is not Tensor
        or target.dtype != torch.int64
        or len(shape) != 2
        or tuple(target.shape) != shape[:-1]
        or target.device != logits._head.hidden.device
        or reduction not in ("mean", "sum", "none")
    )


#: Steps that choose and order rows.
_OF_ROWS = frozenset({"shape", "copy", "rows", "picked", "swap", "detach"})


@dataclass(frozen=True)
class Pieces:
    """What losses in pieces take of logits, or of their log-probabilities, times `sign`."""

    logits: DeferredLogits
    steps: list[tuple[str, Any]]
    hidden: Tensor  # of their rows
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    options: Options
    sign: int

    @staticmethod
    def of(logits: DeferredLogits, of_log_probs: bool = False) -> Pieces | None:
        """None if the loss needs them whole."""
        steps, head = logits.steps(), logits._head
        if steps is None:
            return None
        names = [name for name, _ in steps]
        before = steps
        if of_log_probs:
            at = names.index("log_softmax") if "log_softmax" in names else len(names)
            if not set(names[at + 1 :]) <= _OF_ROWS | {"neg"} or at == len(names):
                return None
            before = [s for s in steps if s[0] not in ("log_softmax", "neg")]
            if "neg" in names[:at]:
                return None
        form = _form(before, head.hidden.dtype != torch.float32)
        found = None if form is None else _parameters(logits, before)
        if form is None or found is None:
            return None
        head.check_unchanged()
        hidden = head.hidden
        for name, value in steps:
            if name in ("shape", "copy"):
                hidden = hidden.reshape(*value[:-1], hidden.shape[-1])
            elif name in ("rows", "picked"):
                hidden = hidden[value]
            elif name == "swap":
                hidden = hidden.transpose(*value)
        weight, bias, bias_dtype, a, b = found
        options = Options(-100, 0.0, *form, hidden.dtype, bias_dtype, hidden.dtype)
        if head.adapter is not None:
            _, _, scaling, dtype = head.adapter
            options = options._replace(adapter_dtype=dtype, scaling=scaling)
        sign = -1 if names.count("neg") % 2 else 1
        return Pieces(logits, steps, hidden, (weight, bias, a, b), options, sign)

    @property
    def records(self) -> bool:
        return torch.is_grad_enabled() and records_gradients(self.logits)

    @property
    def trained(self) -> Tensor | None:
        """What was added, where it has a gradient: as `_parameters` has it, one alone."""
        return next((t for t in added_by(self.steps) if t.requires_grad), None)

    @property
    def sources(self) -> list[Tensor | None]:
        """The head's tensors, where others were made of them."""
        whole = self.logits._head.tensors
        if self.trained is not None:
            whole[2] = self.trained
        made = (None, *self.parameters)
        return [None if t is own else t for t, own in zip(whole, made, strict=True)]

    def hooks(self, loss_of: Callable[[Tensor, bool], Tensor]) -> LogitsHooks:
        head, trained = self.logits._head, self.trained

        def product(*tensors: Tensor | None) -> Tensor:
            own = list(tensors)
            if trained is not None:  # it has the place of the head's
                own[2] = head.bias
            logits: Tensor = head.like(own).product()
            return logits

        made_by = [_step(name, value, trained) for name, value in self.steps]
        return LogitsHooks(Formula(product, made_by, loss_of, trained))

    def consumed(self, hooks: LogitsHooks) -> None:
        """A loss was made of them; one without gradients takes nothing."""
        if self.records:
            self.logits.consumed(hooks)

    def loss(
        self,
        target: Tensor,
        loss_of: Callable[[Tensor, bool], Tensor],
        ignore_index: int,
        smoothing: float,
        reduction: str,
    ) -> Tensor:
        """Their cross entropy, in their dtype. loss_of: the same of logits that are made."""
        hidden, (weight, bias, a, b) = self.hidden, self.parameters
        hooks = self.hooks(loss_of)
        options = self.options._replace(ignore_index=ignore_index, smoothing=smoothing)
        device = hidden.device.type
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(self.records):
            check_head(hidden, weight, target, bias, ignore_index)
            loss = loss_of_head(
                hidden, weight, target, bias, options, reduction,
                adapter=(a, b), hooks=hooks, sources=self.sources,
            )  # fmt: skip
            loss = loss.to(dtype_of(self.logits))  # of half types it is rounded to them
        self.consumed(hooks)
        return loss

    def at_and_sum(self, target: Tensor) -> Tensor:
        """[2, N]: the log-probabilities of the targets [N], and the sums over the classes."""
        hidden, (weight, bias, a, b) = self.hidden, self.parameters

        sign = self.sign  # what hooks hold must not hold the logits, which hold what is found

        def loss_of(values: Tensor, _: bool) -> Tensor:
            flat = values.float().reshape(-1, values.shape[-1])
            return at_and_sum(sign * flat, target)

        hooks, flat = self.hooks(loss_of), hidden.reshape(-1, hidden.shape[-1])
        device = hidden.device.type
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(self.records):
            apply: Any = LogProbsOfHead.apply
            found: Tensor = apply(
                flat, weight, bias, a, b, target, self.options, hooks, *self.sources
            )
        self.consumed(hooks)
        return found


def _step(name: str, value: Any, trained: Tensor | None) -> Callable[[Tensor, Any], Tensor]:
    if value is trained is not None:
        return lambda y, own: y + own[2]
    return lambda y, _: STEPS[name](y, value)


def _parameters(
    logits: DeferredLogits, steps: list[tuple[str, Any]]
) -> tuple[Tensor, Tensor | None, torch.dtype, Tensor | None, Tensor | None] | None:
    """The head of the logits that steps make: weight, bias, the dtype that the bias is added in,
    and A and B of the adapter. None where several biases have gradients."""
    hidden, weight, bias, a, b = logits._head.tensors
    assert hidden is not None and weight is not None
    trained = [t for t in (bias, *added_by(steps)) if t is not None and t.requires_grad]
    if len(trained) > 1:
        return None
    dtype = bias_dtype = hidden.dtype
    for name, value in steps:
        if name == "to":
            dtype = value
        elif name == "add":
            dtype = bias_dtype = torch.promote_types(dtype, value.dtype)
            value = value.reshape(-1).to(dtype)
            bias = value if bias is None else bias.to(dtype) + value
        elif name == "classes":
            weight, bias, b = (None if t is None else t[value] for t in (weight, bias, b))
            assert weight is not None
    return weight, bias, bias_dtype, a, b
