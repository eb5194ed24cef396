"""What a kernel that is not ours is asked at `apply`: sizes, layouts, values, calls one after the
other, gradients, and what it leaves behind in memory and in the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.errors import FAILURES
from hfpatch.foreign import reads
from hfpatch.foreign.compare import Asked, form_of, keeps, wrong_values
from hfpatch.foreign.device import waits, wrong_on_streams
from hfpatch.foreign.gradients import state_of_backward, wrong_gradients
from hfpatch.foreign.process import Process, unseeded
from hfpatch.foreign.samples import Sample, samples_of
from hfpatch.proof.keys import Same
from hfpatch.text import told

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]
Context = Callable[[], AbstractContextManager[Any]]

#: How often one call is repeated; and one of a kernel that keeps state.
_REPEATS, _MORE_REPEATS = 40, 300
#: Results that are held at once.
_HELD = 24


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Attributes:
        why: why the kernel is not used, or None.
        state: names of what it reads that changes from call to call: each of its calls is compared
            then.
        waits: what makes the host wait in a call, or None.
    """

    why: str | None = None
    state: tuple[str, ...] = ()
    waits: str | None = None


# What was asked before: of equal functions with equal parameters, about tensors alike.
_known: dict[Any, Verdict] = {}
_MOST = 1024


def forget() -> None:
    """Drop every verdict."""
    _known.clear()


def challenge(
    fn: Callable[..., Any],
    call: Callable[..., Any],
    asked: Asked,
    given: Tensors,
    context: Context,
    *,
    few: bool = False,
    differentiated: Callable[..., Any] | None = None,
) -> Verdict:
    """Ask a kernel everything.

    Args:
        fn: the user's function, whose closures and globals are looked at.
        call: the same, bound to the parameters of the op.
        asked: the op and its parameters.
        given: the tensors of one call of the probe.
        context: what calls run in, e.g. autocast.
        few: only a handful of sizes.
        differentiated: the call whose gradients are compared, or None.
    """
    like = tuple(
        None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.device, type(t))
        for t in given
    )
    modes = tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )
    key = (
        Same(fn),
        reads.key_of(fn),
        asked.op,
        tuple(sorted(asked.params.items())),
        like,
        modes,
        few,
        differentiated is not None,
        len(set(map(id, given))),
    )
    if (found := _known.get(key)) is None:
        found = _challenge(fn, call, asked, given, context, few, differentiated)
        _known[key] = found
        while len(_known) > _MOST:
            del _known[next(iter(_known))]
    return found


@unseeded()
def _challenge(
    fn: Callable[..., Any],
    call: Callable[..., Any],
    asked: Asked,
    given: Tensors,
    context: Context,
    few: bool,
    differentiated: Callable[..., Any] | None,
) -> Verdict:
    inquiry = _Inquiry(call, asked, context)
    try:
        for i, sample in enumerate(samples_of(asked.op, given, few=few)):
            inquiry.ask(sample, must=i == 0)
            if differentiated is not None and sample.smooth and _small(sample):
                inquiry.differentiate(sample, differentiated)
        repeated = inquiry.smallest
        if repeated is None:
            raise _Wrong("failed with every size that it was asked about")
        state = inquiry.repeat(repeated, fn, differentiated is not None)
        if differentiated is not None:
            inquiry.differentiate_again(repeated, fn, differentiated, state)
        tensors = repeated.tensors
        if (why := wrong_on_streams(asked, call, tensors)) is not None:
            raise _Wrong(why)
        return Verdict(None, tuple(state), waits(call, tensors))
    except _Wrong as e:
        return Verdict(str(e))
    except torch.OutOfMemoryError:
        raise
    except FAILURES as e:  # of a call that is made again: each first one's is looked at above
        return Verdict(f"failed: {told(e)}")
    finally:
        inquiry.set_back()


class _Wrong(Exception):
    """Why a kernel is not used."""


def _small(sample: Sample) -> bool:
    tensors = [t for t in sample.tensors if t is not None]
    # of rows of one or two elements a layer norm makes nothing but roundings
    return sum(t.numel() for t in tensors) < 50_000 and all(t.shape[-1] > 3 for t in tensors)


class _Inquiry:
    def __init__(self, call: Callable[..., Any], asked: Asked, context: Context) -> None:
        self._call, self._asked, self._context = call, asked, context
        self._generator = torch.Generator().manual_seed(5)
        self._before = Process.now()
        self.smallest: Sample | None = None

    def ask(self, sample: Sample, must: bool) -> None:
        """Two calls with other contents at the same place; both results must be right, the first
        also after the second. A size that the kernel refuses is none that it gets wrong."""
        results: list[tuple[list[Tensor | None], Any]] = []
        expected: Any = None
        for _ in range(2):
            sample.draw(self._generator)
            tensors = sample.tensors
            if expected is None:
                try:
                    expected = self._asked.formula(tensors)
                except Exception:  # a width that the parameters do not allow
                    return
            copies = [None if t is None else t.detach().clone() for t in tensors]
            sample.remember()
            try:
                with self._context():
                    y = self._call(*tensors)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as e:
                self._left_alone(sample)
                if must:
                    raise _Wrong(f"failed: {told(e)}") from e
                return
            self._left_alone(sample)
            if (why := form_of(y, expected, tensors)) is not None:
                raise _Wrong(f"{why}, with {sample.what}")
            if (why := keeps(y)) is not None:
                raise _Wrong(f"{why}, with {sample.what}")
            results.append((copies, y))
        for copies, y in results:
            if (why := wrong_values(self._asked, copies, y)) is not None:
                raise _Wrong(f"is wrong with {sample.what}: {why}")
        if sample.smooth and (self.smallest is None or _size(sample) < _size(self.smallest)):
            if all(t is None or t.numel() >= 24 for t in sample.tensors):
                self.smallest = sample
        elif self.smallest is None and must:
            self.smallest = sample

    def set_back(self) -> None:
        """What is left changed by a call that was wrong, or that an interrupt ended."""
        self._before.changed()

    def _left_alone(self, sample: Sample) -> None:
        if (place := sample.written()) is not None:
            raise _Wrong(f"wrote to its argument {place}, or beside it, with {sample.what}")
        if changed := self._before.changed():
            raise _Wrong(f"changed {', '.join(changed)}")

    def repeat(self, sample: Sample, fn: Callable[..., Any], recorded: bool) -> list[str]:
        """The same call again and again, at its old place and at new ones; names of what changes
        each time."""
        state = reads.iterators_of(fn) + reads.others_of(fn)
        before = reads.key_of(fn)
        self._repeat(sample, 4)
        if (after := reads.key_of(fn)) != before:
            state += reads.names_changed(before, after)
        self._repeat(sample, _MORE_REPEATS if state else _REPEATS)
        self._left_alone(sample)
        self._hold(sample, recorded=False)
        if recorded:
            self._hold(sample, recorded=True)
        return list(dict.fromkeys(state))

    def _repeat(self, sample: Sample, times: int) -> None:
        sample.draw(self._generator)
        tensors = sample.tensors
        sample.remember()
        first: Any = None
        for i in range(times):
            # elsewhere in every second call: a result that is kept by its input's address is stale
            now = tensors if i % 2 else [None if t is None else t.clone() for t in tensors]
            with self._context():
                y = self._call(*now)
            if first is not None and _equal(first, y):
                continue
            if (why := form_of(y, self._asked.formula(now), now)) is None:
                why = wrong_values(self._asked, now, y)
            if why is not None:
                raise _Wrong(f"is wrong with {sample.what} when it is called again: {why}")
            first = y

    def _hold(self, sample: Sample, recorded: bool) -> None:
        """Results of other contents, all of them right when the last one is there: a kernel may
        have several buffers for its results, in turns."""
        held: list[tuple[list[Tensor | None], Any]] = []
        for _ in range(_HELD):
            sample.draw(self._generator)
            copies = [None if t is None else t.clone() for t in sample.tensors]
            given = [
                t.clone().requires_grad_() if recorded and _floats(t) else t  # type: ignore[union-attr]
                for t in copies
            ]
            with torch.set_grad_enabled(recorded), self._context():
                held.append((copies, _detached(self._call(*given))))
        for copies, y in held:
            if (why := wrong_values(self._asked, copies, y)) is not None:
                raise _Wrong(f"is wrong with {sample.what} when others are called after it: {why}")
        if changed := self._before.changed():
            raise _Wrong(f"changed {', '.join(changed)}")

    def differentiate(self, sample: Sample, fn: Callable[..., Any]) -> None:
        sample.draw(self._generator)
        tensors = sample.tensors
        if (why := wrong_gradients(self._asked, fn, tensors, self._context)) is not None:
            raise _Wrong(f"has a gradient that {why}, with {sample.what}")
        if changed := self._before.changed():
            raise _Wrong(f"changed {', '.join(changed)} in its backward")

    def differentiate_again(
        self, sample: Sample, fn: Callable[..., Any], call: Callable[..., Any], state: list[str]
    ) -> None:
        """Does its backward keep something that changes each time? Its calls are compared, where
        they keep `state`; a backward is autograd's to call."""

        def asks() -> str | None:
            return wrong_gradients(self._asked, call, sample.tensors, self._context)

        why, changed = state_of_backward(fn, asks)
        if why is not None:
            raise _Wrong(f"has a gradient that {why}, with {sample.what}, when it is called again")
        if names := [n for n in changed if n not in state]:
            raise _Wrong(
                "has a backward that keeps state which changes with each call: "
                + ", ".join(f"`{n}`" for n in names)
            )


def _floats(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point()


def _detached(y: Any) -> Any:
    if isinstance(y, (tuple, list)):
        return type(y)(map(_detached, y))
    return y.detach() if isinstance(y, Tensor) else y


def _size(sample: Sample) -> int:
    return sum(t.numel() for t in sample.tensors if t is not None)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
