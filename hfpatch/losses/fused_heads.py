"""Fused heads of others, as TRL's: their function of a head's product replaced by ours.

TRL's trainers put a forward on a model that hands the last hidden states, the head's weight and the
labels to a function of autograd's. On a CPU ours takes less time and half the memory (see
benchmarks/notes-training.md). The forward stays: a function of the same code and closure stands in
for it, which finds ours under the one name. It is recognised by what it calls, a function with the
arguments of TRL's, and that one is proven to compute what ours does: log-probabilities, entropy,
means of the logits and hits, and their gradients.

What is passed is looked at in each call; whatever was not proven goes to the forward's own.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hfpatch import swap
from hfpatch.losses.head_loss import Options, loss_of_head, product_dtype, refusal
from hfpatch.losses.head_rows import Form, statistics
from hfpatch.losses.taken import (
    STAND_IN,
    Place,
    StandIn,
    called_by,
    forwards_of,
    head_of,
    reached,
    stand_in_of,
)
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.other_globals import takes_others, with_globals
from hfpatch.planning.plan import FUSED_HEAD, Skip, Swap
from hfpatch.planning.settings import Settings, matches
from hfpatch.proof.keys import names_of
from hfpatch.proof.subject import autocasts, class_of, plain, watched
from hfpatch.proof.trial import Limits

#: Where ours was measured to be faster.
_DEVICES = frozenset({"cpu"})
_NAMES = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip
#: What ours makes, in the order in which it is returned; the third is log_sum_sq_probs.
_OUTPUTS = frozenset({"log_probs", "entropy", "mean_logits", "is_top1"})
_RESULTS = 5
_ALL = ("log_probs", "entropy", "mean_logits", "is_top1")
#: Temperature, softcap, scale, whether with a bias, outputs.
_CASES: tuple[tuple[float, float | None, float, bool, tuple[str, ...]], ...] = (
    (1.0, None, 1.0, False, ("log_probs",)),
    (1.0, None, 1.0, True, _ALL),
    (0.7, 3.0, 0.5, True, _ALL),
    (2.0, None, 0.25, False, ("log_probs", "entropy")),
)
#: What proofs found, by the function, its code and the dtype; the last ones are kept.
_proofs: dict[Any, tuple[float, float] | str] = {}
_MOST = 32


@dataclass(frozen=True)
class Fused:
    """A model to serve: its forward, the name of the function in it, and the report's entry."""

    owner: nn.Module
    forward: types.FunctionType
    name: str
    proven: frozenset[torch.dtype]  # of the product
    entry: Swap


def offer(
    modules: Iterable[tuple[str, nn.Module]], settings: Settings
) -> tuple[list[Fused], list[Skip]]:
    """The models among `modules`, by path, whose fused head is served, and why others are not."""
    found: list[Fused] = []
    skips: list[Skip] = []
    sources = settings.sources
    if not settings.training or sources.assumed is not None:
        return found, skips
    for path, owner in modules:
        if not swap.may_have_fused_head(owner) or (head := head_of(owner)) is None:
            continue
        head = called_by(head)
        name = class_of(owner).__name__
        if settings.include is not None and not matches(settings.include, path, name):
            continue
        for function, called in _candidates(owner):
            if matches(settings.exclude, path, name):
                skips.append(Skip(path, name, "excluded", "matched by `exclude`"))
                break
            where = f"`{function.__globals__.get('__name__')}.{function.__code__.co_name}`"
            if (why := _unfit(head)) is not None:
                skips.append(Skip(path, name, *why))
                break
            errors = {d: _errors(function.__globals__[called], d) for d in KERNEL_DTYPES}
            own = errors[head.weight.dtype]  # type: ignore[index]
            if isinstance(own, str):
                skips.append(Skip(path, name, "mismatch", f"the head of {where}: {own}"))
                break
            # another than the weight's under autocast, or where the head is cast
            proven = frozenset(d for d, found in errors.items() if not isinstance(found, str))
            entry = Swap(
                path, name, FUSED_HEAD, f"the function of a head's product in {where}", "hfpatch",
                "", ("cpu",), *own, settings.mode,
            )  # fmt: skip
            found.append(Fused(owner, function, called, proven, entry))
            break
    return found, skips


def _candidates(owner: nn.Module) -> Iterator[tuple[types.FunctionType, str]]:
    """(a forward, the name by which it finds its function of autograd's)."""
    for place in forwards_of(owner).places:
        mark = stand_in_of(place.held)
        function = place.function if mark is None else mark.forward
        if not takes_others(function.__code__):
            continue
        named = [n for n in function.__code__.co_names if _is_alike(function.__globals__.get(n))]
        if len(named) == 1:
            yield function, named[0]


def _is_alike(value: Any) -> bool:
    """Whether a value is a function of autograd's that takes what TRL's does."""
    if not (isinstance(value, type) and issubclass(value, torch.autograd.Function)):
        return False
    if not all(isinstance(f, types.FunctionType) for f in (value.forward, value.backward)):
        return False
    code = value.forward.__code__
    return code.co_varnames[1 : code.co_argcount] == _NAMES


def _unfit(head: nn.Module) -> tuple[str, str] | None:
    """(the kind, the reason) why a head's product is not ours to make."""
    weight = head._parameters.get("weight")
    if type(head) is not nn.Linear or weight is None or not plain(weight):
        return "unsupported", "the head below its fused one is no plain linear layer"
    if weight.device.type not in _DEVICES:
        where = weight.device.type
        return "no gain", f"its fused head was not measured to be slower than ours on {where}"
    why = refusal(weight, weight)
    return None if why is None else ("unsupported", f"its fused head: {why}")


def _errors(function: Any, dtype: torch.dtype) -> tuple[float, float] | str:
    key = (function, *_Surroundings(function).codes, dtype)
    if key not in _proofs:
        try:
            _proofs[key] = _prove(function, dtype)
        except Exception as e:  # somebody else's function may raise anything
            _proofs[key] = f"its function could not be compared ({type(e).__name__}: {e})"
        while len(_proofs) > _MOST:
            del _proofs[next(iter(_proofs))]
    return _proofs[key]


def _prove(function: Any, dtype: torch.dtype) -> tuple[float, float] | str:
    """Its results and gradients against ours, on small samples in several pieces."""
    half = dtype != torch.float32
    eps = torch.finfo(dtype).eps
    off = Limits.formula_half if half else Limits.formula_fp32
    farther = Limits.kernel_half if half else Limits.kernel_fp32
    worst = (0.0, 0.0)
    for temperature, softcap, scale, with_bias, outputs in _CASES:
        settings = (temperature, 16, softcap, scale, outputs)
        ours, theirs, truth = (
            _results(make, as_, dtype, with_bias, settings)
            for make, as_ in ((_ours, dtype), (function.apply, dtype), (_ours, torch.float64))
        )
        for i, (a, b, right) in enumerate(zip(ours, theirs, truth, strict=True)):
            if (a is None) != (b is None) or (b is None) != (right is None):
                return "its function returns other things than ours"
            if a is None or b is None or right is None:
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                return "its function returns other shapes or dtypes than ours"
            if a.dtype == torch.bool:
                # of logits that are rounded alike two may be the largest
                if not half and not torch.equal(a, b):
                    return "its function finds other hits than ours"
                continue
            factor = Limits.gradient if i >= _RESULTS else 1.0
            largest = max(right.abs().max().item(), 1e-9)
            error, original = ((x.double() - right).abs().max().item() for x in (a, b))
            if not original <= factor * off * eps * largest:
                return (
                    f"its function is off ours in fp64 by {original / largest:.2g} of the largest "
                    "value"
                )
            if not error <= original + factor * farther * eps * largest:
                return f"ours would be off by {error / largest:.2g} of the largest value"
            worst = max(worst, (error / largest, original / largest + factor * farther * eps))
    return worst


def _results(
    make: Callable[..., Any],
    dtype: torch.dtype,
    rounded: torch.dtype,
    with_bias: bool,
    settings: tuple[Any, ...],
) -> list[Tensor | None]:
    """Results and gradients; what is drawn is rounded to `rounded` first."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        # logits of a few units, as a model's: an entropy is the difference of two such
        x = 0.5 * torch.randn(shape, generator=generator)
        return x.to(rounded).to(dtype).requires_grad_()

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        leaves = [drawn(21, 24), drawn(50, 24), *([drawn(50)] if with_bias else [])]
        hidden, weight, bias = (*leaves, None)[:3]
        targets = torch.randint(50, (21,), generator=generator)
        found = make(hidden, weight, bias, targets, *settings)
        if len(found) != _RESULTS:
            raise ValueError(f"{len(found)} results")
        with_gradients = [t for t in found if t is not None and t.requires_grad]
        upstream = [torch.linspace(-1.0, 2.0, t.numel()).to(t.dtype) for t in with_gradients]
        gradients = torch.autograd.grad(with_gradients, leaves, upstream)
        return [*(None if t is None else t.detach() for t in found), *gradients]


# --- the function -------------------------------------------------------------------------------


def _ours(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    outputs: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    """As TRL's function: `scale` is multiplied in fp32, so it is part of what follows the logits.

    c * tanh(s * y / c) / T is the softcap c / s of y, divided by T / s.
    """
    kind = hidden.device.type
    x = hidden.to(torch.get_autocast_dtype(kind)) if autocasts(kind) else hidden
    cap, divided = (softcap or 0.0) / scale, temperature / scale
    # The kernel has no division behind the softcap, and a scale of its is rounded to a half type.
    kernel = divided == 1.0 or (not cap and x.dtype == torch.float32)
    if set(outputs) <= {"log_probs"} and kernel and x.dtype in KERNEL_DTYPES:
        dtype = product_dtype(x, weight)
        options = Options(-100, 0.0, 1.0 / divided, cap, dtype, dtype, dtype)
        with torch.autocast(kind, enabled=False):
            loss = loss_of_head(x, weight, targets, bias, options, "none")
        return -loss, None, None, None, None
    form = Form(1.0, cap, divided)
    found = statistics(
        x, weight, targets, bias, -100, form, mean="mean_logits" in outputs,
        entropy="entropy" in outputs, best="is_top1" in outputs,
    )  # fmt: skip
    return (
        found.log_probs,
        found.entropy,
        None,
        None if found.mean is None else found.mean.detach(),
        None if found.best is None else found.best == targets,
    )


class _Surroundings:
    """What a function of autograd's runs: its code, and the functions of its package that this
    finds by their names."""

    def __init__(self, function: Any) -> None:
        self._function, self._named = function, list(_named(function))
        self.codes = self._codes()

    def _codes(self) -> tuple[Any, ...]:
        own = (self._function.forward, self._function.backward)
        named = (value for _, _, value in self._named)
        return tuple(getattr(f, "__code__", None) for f in (*own, *named))

    def are_there(self) -> bool:
        """Whether all of it is as it was."""
        return self._codes() == self.codes and all(
            home.get(name) is value for home, name, value in self._named
        )


def _named(function: Any) -> Iterator[tuple[dict[str, Any], str, types.FunctionType]]:
    for own in (function.forward, function.backward):
        for one in reached(own):
            for name in sorted(names_of(one.__code__)):
                value = one.__globals__.get(name)
                if isinstance(value, types.FunctionType):
                    yield one.__globals__, name, value


class _Served:
    """What a stand-in finds under the name of the forward's function of autograd's."""

    def __init__(
        self, function: Any, current: Callable[[], Any], proven: frozenset[torch.dtype]
    ) -> None:
        """current: what the forward itself would find now."""
        self._function, self._current, self._proven = function, current, proven
        self._around = _Surroundings(function)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """With the arguments of TRL's."""
        now = self._current()
        if now is self._function and not kwargs and self._around.are_there():
            given = _proven_arguments(args, self._proven)
            if given is not None:
                found = _ours(*given)
                # What is not finite is so in other places of theirs, and a half type's overflow
                # comes at another product.
                if found[0] is not None and bool(found[0].detach().isfinite().all()):
                    return found
        return now.apply(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)


def _proven_arguments(args: tuple[Any, ...], proven: frozenset[torch.dtype]) -> Any:
    """What `_ours` is given, or None where these are not such as were proven."""
    if len(args) != len(_NAMES):
        return None
    hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs = args
    given = [hidden, weight, targets] if bias is None else [hidden, weight, targets, bias]
    if not all(isinstance(t, Tensor) and plain(t) for t in given) or watched():
        return None
    if torch._C._len_torch_dispatch_stack() or any(hasattr(t, "ds_id") for t in given):
        return None  # DeepSpeed's are empty behind the forward
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if autocasts(kind) else hidden.dtype
    if (
        kind not in _DEVICES
        or any(t.device.type != kind for t in given)
        or dtype not in proven
        or any(t.dtype not in KERNEL_DTYPES for t in given if t is not targets)
        or hidden.dim() != 2
        or weight.dim() != 2
        or not hidden.numel()
        or not weight.numel()
        or hidden.shape[1] != weight.shape[1]
        or targets.dtype != torch.int64
        or targets.shape != hidden.shape[:1]
        or (bias is not None and bias.shape != weight.shape[:1])
        or refusal(hidden, weight) is not None
    ):
        return None
    for number in (temperature, scale, 1.0 if softcap is None else softcap):
        if type(number) not in (int, float) or not 0 < number < math.inf:
            return None
    if type(outputs) is not tuple or not set(outputs) <= _OUTPUTS:
        return None
    if int(targets.min()) < 0 or int(targets.max()) >= len(weight):
        return None  # which theirs makes something of
    return hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs


def _stand_in(fused: Fused) -> Callable[..., Any]:
    own, name = fused.forward, fused.name
    served = _Served(own.__globals__[name], lambda: own.__globals__[name], fused.proven)
    other = with_globals(own, {name: served})
    code = own.__code__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # the compiler reads a function's globals by itself
        if is_compiling() or own.__code__ is not code:
            return own(self, *args, **kwargs)
        return other(self, *args, **kwargs)

    for attribute in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(own, attribute):
            setattr(forward, attribute, getattr(own, attribute))
    forward.__dict__.update(own.__dict__)  # what it wraps, by which its signature is read
    setattr(forward, STAND_IN, StandIn(forward, own, fused.entry))
    return forward


# --- on a model ---------------------------------------------------------------------------------


def exchange(fresh: Iterable[Fused], done: list[Callable[[], object]]) -> None:
    """Put stand-ins on models that have none; appends what undoes it, step by step."""
    for fused in fresh:
        stand_in = _stand_in(fused)
        for place in list(forwards_of(fused.owner).places):
            if place.function is fused.forward:
                place.exchange(stand_in, done)
        for attribute, value in list(fused.owner.__dict__.items()):
            saved = Place(value, swap.Slot(fused.owner, attribute).set)  # to be put back
            if saved.function is fused.forward:
                saved.exchange(stand_in, done)
