"""Are a kernel's gradients those of the formula, however it is differentiated?

What decides is the same as of values, `hfpatch.foreign.compare`, with the allowance of gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from hfpatch.errors import FAILURES
from hfpatch.foreign import reads
from hfpatch.foreign.compare import Asked, Tensors, listed, slack_of, wide, wrong_rows
from hfpatch.foreign.memory import bits
from hfpatch.proof.trial import LIMITS
from hfpatch.text import told

Tensor = torch.Tensor

#: Of the largest of all rows, what a row of a gradient is measured by at least: in such a row large
#: terms cancel.
_FLOOR = 2.0**-6
#: Gradients of a result: see `upstream`.
_UPSTREAMS = (
    *("dense", "repeated", "transposed", "cut out", "summed", "large", "huge", "small", "nan"),
)
#: Those with which inputs are results of other operators; with others they are leaves.
_OF_RESULTS = ("dense", "summed", "small")
#: Those where leaves have a gradient of a backward before.
_ACCUMULATED = ("repeated", "cut out")


def wrong_gradients(
    asked: Asked, fn: Callable[..., Any], tensors: Tensors, context: Callable[[], Any]
) -> str | None:
    """Differentiate `fn` and the formula by every floating tensor, and by some of them alone; with
    dense, repeated and transposed gradients of the result, with one that is cut out of a larger
    one, with that of a sum, with large and small ones and with NaN. Why they differ, or None.

    Nothing that backward is given or was left by forward may be written to, nor may a second
    backward through the same graph give something else.
    """
    floating = [i for i, t in enumerate(tensors) if t is not None and t.is_floating_point()]
    wanted = [floating, *([[i] for i in floating] if len(floating) > 1 else [])]
    if len(floating) > 2:  # some are frozen
        wanted += [[i for i in floating if i != frozen] for frozen in floating]
    for places in wanted:
        for kind in _UPSTREAMS if places is floating else ("dense",):
            why = _wrong_gradient(asked, fn, tensors, places, kind, context)
            if why is not None:
                which = " and ".join(map(str, places))
                names = "" if places is floating else f" by argument {which} alone"
                return f"{why} ({kind} gradient of its result{names})"
    return None


def state_of_backward(
    fn: Callable[..., Any], asks: Callable[[], str | None]
) -> tuple[str | None, list[str]]:
    """What `asks` says, which differentiates a kernel, and the names of what the kernel reads that
    changes with each time: such a backward, wrong from some number on, cannot be found."""
    before = reads.key_of(fn)
    why = asks()
    after = reads.key_of(fn)
    if why is not None or after == before:  # else it may have compiled something
        return why, []
    why = asks()
    now = reads.key_of(fn)
    return why, reads.names_changed(after, now) if now != after else []


def _wrong_gradient(
    asked: Asked,
    fn: Callable[..., Any],
    tensors: Tensors,
    places: list[int],
    kind: str,
    context: Callable[[], Any],
) -> str | None:
    def leaves(widened: bool) -> list[Tensor | None]:
        """Parameters where they are; what is one tensor in two places is one leaf."""
        made: dict[int, Tensor] = {}
        for i, t in enumerate(tensors):
            if t is None:
                continue
            if id(t) not in made:
                one = (wide(t) if widened else t).detach().clone()
                is_one = isinstance(t, nn.Parameter)
                made[id(t)] = nn.Parameter(one, requires_grad=False) if is_one else one
            if i in places:
                made[id(t)].requires_grad_()
        return [None if t is None else made[id(t)] for t in tensors]

    plain_in, exact_in, our_in = leaves(False), leaves(True), leaves(False)
    try:
        plain, ups, theirs = _differentiate(asked.formula, plain_in, places, kind)
        _, _, truth = _differentiate(asked.formula, exact_in, places, kind)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not a call of this op
        return None
    befores = [None if t is None else t.detach().clone() for t in our_in]
    summed_up = _accumulated(our_in, kind)
    called = our_in
    try:
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            between = None
            if kind in _OF_RESULTS:
                called = results_of_others(our_in)
            with context():
                y = fn(*called)
                if kind == "dense":  # another call before the backward, whose own comes behind it
                    between = _between(fn, leaves(False), places, ups)
            if not all(isinstance(t, Tensor) and t.requires_grad for t in listed(y)):
                return "its result has no gradient"
            as_it_was = [bits(t.detach()).clone() for t in listed(y)]
            their_ups = [u.clone() if kind == "dense" else u for u in ups]
            wants: Any = [our_in[i] for i in places]
            mine = torch.autograd.grad(
                listed(y), wants, their_ups, allow_unused=True, retain_graph=True
            )
            kept = [None if g is None else g.clone() for g in mine]
            if between is not None:
                between()
                if not all(
                    a is None or b is None or torch.equal(bits(a), bits(b))
                    for a, b in zip(mine, kept, strict=True)
                ):
                    return "is written to by a later backward"
            again = torch.autograd.grad(listed(y), wants, ups, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as e:
        return f"failed: {told(e)}"
    if kind == "dense" and any(not torch.equal(a, b) for a, b in zip(their_ups, ups, strict=True)):
        return "writes to the gradient of its result, which others may read"
    if not all(torch.equal(a, bits(t.detach())) for a, t in zip(as_it_was, listed(y), strict=True)):
        return "writes to its result"
    if not all(torch.equal(bits(t.grad), b) for t, b in summed_up):
        return "writes to the `.grad` of an input"
    for a, b in zip(befores, called, strict=True):
        if a is not None and b is not None and not torch.equal(bits(a), bits(b.detach())):
            return "writes to an input"
    rows = max(t.numel() // max(t.shape[-1], 1) for t in listed(plain))
    found_all: Any = zip(places, kept, again, theirs, truth, strict=True)  # None: unused
    for place, ours, second, their, true in found_all:
        name = f"argument {place}"
        missing = [g is None for g in (ours, second, their, true)]
        if any(missing):
            if not all(missing):
                return f"is not that of the same tensors: {name}"
            continue
        if ours.dtype != their.dtype or ours.shape != their.shape:
            return f"is {ours.dtype} {list(ours.shape)} for {name}, expected {their.dtype}"
        summed = max(1.0, rows**0.5 / 8) if ours.numel() < listed(plain)[0].numel() else 1.0
        slack = LIMITS.gradient * slack_of(tensors)(ours.dtype) * summed
        for found in (ours, second):

            def wrong(plain: Tensor, found: Tensor = found, true: Tensor = true) -> str | None:
                return wrong_rows(found, plain, true, slack, lambda: true, _FLOOR)  # noqa: B023

            if (why := wrong(their)) is None:
                continue
            fused = _differentiate_fused(asked, leaves(False), places, kind)
            other = None if fused is None else fused[places.index(place)]
            if other is None or wrong(other) is not None:
                return f"is wrong for {name}: {why}"
    return None


def _accumulated(leaves: list[Tensor | None], kind: str) -> list[tuple[Any, Tensor]]:
    """Leaves that have a gradient already, as those of a second backward have, and its bits."""
    found: list[tuple[Any, Tensor]] = []
    for t in {id(t): t for t in leaves if t is not None and t.requires_grad}.values():
        if kind in _ACCUMULATED:
            t.grad = torch.ones_like(t)
            found.append((t, bits(t.grad).clone()))
    return found


def results_of_others(inputs: Any, places: bool | set[int] = True) -> Any:
    """Inputs as a module gets them: those that need gradients as results of another operator, all
    or those at `places` among the leaves of `inputs`, except parameters."""
    made: dict[int, Tensor] = {}
    numbers = itertools.count()

    def one(value: Any) -> Any:
        here = next(numbers)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if not value.requires_grad or not (places if isinstance(places, bool) else here in places):
            return value
        return made.setdefault(id(value), value.clone())

    return pytree.tree_map(one, inputs)


def _between(
    fn: Callable[..., Any], tensors: list[Tensor | None], places: list[int], ups: list[Tensor]
) -> Callable[[], Any]:
    """A call with other values; the function is its backward."""
    with torch.no_grad():
        for t in {id(t): t for t in tensors if t is not None}.values():
            if t.is_floating_point():
                t.mul_(0.75)
    y = listed(fn(*tensors))
    wanted: Any = [tensors[i] for i in places]
    return lambda: torch.autograd.grad(y, wanted, [0.5 * u for u in ups], allow_unused=True)


def _differentiate(
    formula: Callable[[Tensors], Any], tensors: list[Tensor | None], places: list[int], kind: str
) -> tuple[Any, list[Tensor], tuple[Tensor | None, ...]]:
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        y = formula(tensors)
        ups = [upstream(t, kind, i) for i, t in enumerate(listed(y))]
        wanted: Any = [tensors[i] for i in places]
        found = torch.autograd.grad(listed(y), wanted, ups, allow_unused=True)
    return y, ups, found


def _differentiate_fused(
    asked: Asked, tensors: list[Tensor | None], places: list[int], kind: str
) -> tuple[Tensor | None, ...] | None:
    """The gradients of PyTorch's fused operators, whose sums in half precision are their own."""
    try:
        return _differentiate(asked.fused, tensors, places, kind)[2]
    except (AttributeError, RuntimeError):  # they do not take the call
        return None


def upstream(y: Tensor, kind: str, seed: int) -> Tensor:
    """A gradient of `y`, the same whatever its dtype."""
    generator = torch.Generator().manual_seed(11 + seed)
    if kind == "summed":  # as `y.sum().backward()` gives it
        return torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)
    if kind == "repeated":  # as `y.sum(0).backward()` gives it
        row = torch.randn(y.shape[-1:], generator=generator, device="cpu")
        return row.bfloat16().to(y.device).to(y.dtype).expand(y.shape)
    if kind == "cut out":
        return _cut_out(y, generator)
    if kind == "transposed" and y.dim() > 1:
        shape = (*y.shape[:-2], y.shape[-1], y.shape[-2])
        drawn = torch.randn(shape, generator=generator, device="cpu").transpose(-1, -2)
    else:
        drawn = torch.randn(y.shape, generator=generator, device="cpu")
    if kind == "large" and y.dtype != torch.float16:  # as a loss that is scaled gives it
        drawn = drawn * 2.0**20
    if kind == "huge" and y.dtype != torch.float16:  # what a clamp would cut
        drawn = drawn * 2.0**80
    if kind == "small" and y.dtype != torch.float16:  # as a mean over many gives it
        drawn = drawn * 2.0**-30
    if kind == "nan" and y.numel():  # as a loss that overflowed gives it
        drawn.view(-1)[y.numel() // 2] = float("nan")
    return drawn.bfloat16().to(y.device).to(y.dtype)


def _cut_out(y: Tensor, generator: torch.Generator) -> Tensor:
    """As the backward of a `torch.cat` gives it: of more rows where there are batches of them, and
    else of wider rows, off an aligned address."""
    if not y.dim():
        return torch.randn((), generator=generator, device="cpu").to(y.device).to(y.dtype)
    dim = -2 if y.dim() > 2 else -1
    shape = list(y.shape)
    shape[dim] += 3
    drawn = torch.randn(shape, generator=generator, device="cpu").bfloat16().to(y.device)
    return drawn.to(y.dtype).narrow(dim, 1, y.shape[dim])


def _same(x: Tensor) -> Tensor:
    return x
