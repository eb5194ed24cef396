"""One kernel, or several of the same thing, checked and then timed: whoever wrote them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfpatch.bench.spread import Gain, Spread
from hfpatch.errors import VerificationError
from hfpatch.text import shown

Function = Callable[..., Any]
#: How far results may be from the reference's, in epsilons of their dtype, relative to the largest.
_EPSILONS = 64
#: Copies of the inputs together exceed this: more than the last cache of most machines.
_COLD_BYTES, _MOST_COPIES = 256 * 2**20, 64


@dataclass(frozen=True)
class KernelTime:
    """What one function came to; times in microseconds, each a `Spread`.

    Attributes:
        cold: inputs that are in no cache; a GPU's own time there.
        warm: the same inputs each time.
        host: until the call returns with the GPU idle; None on a CPU, where it is the call itself.
        peak_bytes: the most memory that a call held, its inputs left out.
        error: largest difference from the reference, relative to its largest value; None if none
            was given.
        captured: whether GPU time is of CUDA graphs; else of events, with gaps of the host in it.
    """

    name: str
    cold: Spread
    warm: Spread
    host: Spread | None
    peak_bytes: int
    error: float | None
    captured: bool = False
    warm_us: tuple[float, ...] = field(default=(), repr=False)
    cold_us: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        host = "" if self.host is None else f", host {self.host.text('µs')}"
        return shown(
            f"{self.name}: cold {self.cold.text('µs')}, warm {self.warm.text('µs')}{host}, "
            f"{self.peak_bytes / 2**20:.2f} MiB"
        )


@dataclass(frozen=True)
class Comparison:
    """Functions of the same thing, timed in turns; the first is what gains are of."""

    times: tuple[KernelTime, ...]

    def __getitem__(self, name: str) -> KernelTime:
        for row in self.times:
            if row.name == name:
                return row
        raise KeyError(f"`{name}`: expected one of {', '.join(row.name for row in self.times)}")

    def gain(self, name: str, cache: str = "cold") -> Gain:
        """How many times faster than the first, with the first "cold" or "warm"."""
        if cache not in ("cold", "warm"):
            raise ValueError(f"`cache` must be 'cold' or 'warm', got {cache!r}")
        return Gain.of(getattr(self.times[0], f"{cache}_us"), getattr(self[name], f"{cache}_us"))

    def __str__(self) -> str:
        """A row per function: medians with the quartiles."""
        head = ("", "cold µs", "warm µs", "host µs", "MiB", "error", f"of {self.times[0].name}")
        rows = [head]
        for i, t in enumerate(self.times):
            rows.append(
                (
                    t.name,
                    _cell(t.cold),
                    _cell(t.warm),
                    "-" if t.host is None else _cell(t.host),
                    f"{t.peak_bytes / 2**20:.2f}",
                    "-" if t.error is None else f"{t.error:.1e}",
                    str(self.gain(t.name)) if i else "",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return shown(
            "\n".join(
                "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
                for row in rows
            )
        )


def _cell(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def benchmark_kernel(
    fn: Function,
    *inputs: Any,
    warmup: int = 20,
    iters: int = 100,
    reference: Function | None = None,
) -> KernelTime:
    """Time one function of tensors: a user's, a Triton kernel's, a Hub kernel's, an op of ours.

    Before it is timed it must give finite results where the reference does, twice the same shapes,
    and leave its inputs as they are.

    Args:
        fn: called with `inputs`.
        *inputs: tensors on one device, and whatever else it takes.
        warmup: calls before the timed ones.
        iters: timed calls.
        reference: what it should compute; None checks the rest alone.

    Raises:
        VerificationError: its results are not the reference's, or it writes over an input.
        TypeError, ValueError: no function, no tensor, or numbers that cannot be.
    """
    name = str(getattr(fn, "__name__", type(fn).__name__))
    found = _measured({name: fn}, inputs, reference, warmup, iters)
    return found[0]


def compare(
    functions: Mapping[str, Function],
    inputs: Sequence[Any],
    reference: Function | None = None,
    *,
    warmup: int = 20,
    iters: int = 100,
) -> Comparison:
    """Time functions of the same thing in turns, after their results were compared.

    Args:
        functions: by the name that they are shown under; gains are over the first.
        inputs: what each is called with: tensors on one device, and whatever else they take.
        reference: what they should compute; None: what the first does.
        warmup: calls before the timed ones.
        iters: timed calls.

    Raises:
        VerificationError: one computes something else, or writes over an input; says which.
        TypeError, ValueError: as of `benchmark_kernel`.
    """
    if not isinstance(functions, Mapping) or not functions:
        raise TypeError(
            "`functions` must be a dict of names to functions with at least one entry, got "
            f"{functions!r}"
        )
    if not isinstance(inputs, Sequence):
        raise TypeError(
            f"`inputs` must be a tuple or list of arguments, got {type(inputs).__name__}; write "
            "`(x,)` for one"
        )
    if reference is None and len(functions) > 1:
        reference = next(iter(functions.values()))
    return Comparison(tuple(_measured(functions, inputs, reference, warmup, iters)))


# Checking ---------------------------------------------------------------------------------------


def _check(name: str, fn: Function, inputs: Sequence[Any], expected: list[Tensor] | None) -> float:
    """The largest relative error; raises where it is too large."""
    given = _copied(inputs)
    got = _tensors(fn(*given))
    before, after = _tensors(list(inputs)), _tensors(given)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            raise VerificationError(
                f"`{name}` writes over its tensor {i}, so its calls would not repeat each other; "
                "time a function that copies it first"
            )
    if expected is None:
        return 0.0
    if [t.shape for t in got] != [t.shape for t in expected]:
        raise VerificationError(
            f"`{name}` returns {[list(t.shape) for t in got]}, expected the reference's "
            f"{[list(t.shape) for t in expected]}"
        )
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not (a.is_floating_point() and b.is_floating_point()):
            if not torch.equal(a, b):
                raise VerificationError(f"`{name}` returns other integers than the reference")
            continue
        x, y = a.double(), b.double()
        real = y.isfinite()
        same_odd = torch.equal(x[~real].nan_to_num(), y[~real].nan_to_num())
        if not (torch.equal(x.isfinite(), real) and same_odd):
            raise VerificationError(
                f"`{name}` returns NaN or infinity where the reference has none, or the reverse"
            )
        if not real.any():
            continue
        error = float((x - y)[real].abs().max() / y[real].abs().max().clamp_min(1e-30))
        limit = _EPSILONS * max(torch.finfo(t.dtype).eps for t in (a, b))
        if error > limit:
            raise VerificationError(
                f"`{name}` is {error:.2e} from the reference, relative to its largest value; "
                f"expected at most {limit:.2e} ({_EPSILONS} epsilons of {a.dtype})"
            )
        worst = max(worst, error)
    return worst


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _copied(inputs: Sequence[Any]) -> list[Any]:
    """Copies with the strides of the originals."""
    return [
        pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, given)
        for given in inputs
    ]


# Timing -----------------------------------------------------------------------------------------


def _measured(
    functions: Mapping[str, Function],
    inputs: Sequence[Any],
    reference: Function | None,
    warmup: int,
    iters: int,
) -> list[KernelTime]:
    for name, fn in (*functions.items(), ("reference", reference)):
        if fn is not None and not callable(fn):
            raise TypeError(f"`{name}` must be callable, got {type(fn).__name__}")
    for name, value, least in (("warmup", warmup, 0), ("iters", iters, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")
    given = _tensors(list(inputs))
    devices = {t.device for t in given}
    if len(devices) != 1:
        raise ValueError(
            f"`inputs` must have tensors on one device, got {sorted(map(str, devices)) or 'none'}"
        )
    cuda = devices.pop().type == "cuda"
    with torch.no_grad():
        expected = None if reference is None else _tensors(reference(*_copied(inputs)))
        errors = {name: _check(name, fn, inputs, expected) for name, fn in functions.items()}
        size = max(1, sum(t.numel() * t.element_size() for t in given))
        copies = [_copied(inputs) for _ in range(max(2, min(_MOST_COPIES, _COLD_BYTES // size)))]
        time_all = _cuda_times if cuda else _cpu_times
        cold, captured = time_all(functions, copies, warmup, iters)
        warm, _ = time_all(functions, copies[:1], warmup, iters)
        found = []
        for name, fn in functions.items():
            host = _host_times(fn, copies[0], iters) if cuda else None
            found.append(
                KernelTime(
                    name,
                    Spread.of(cold[name]),
                    Spread.of(warm[name]),
                    None if host is None else Spread.of(host),
                    _peak(fn, copies[0], cuda),
                    None if expected is None else errors[name],
                    name in captured,
                    tuple(warm[name]),
                    tuple(cold[name]),
                )
            )
    return found


Times = tuple[dict[str, list[float]], set[str]]


def _cpu_times(
    functions: Mapping[str, Function], copies: list[list[Any]], warmup: int, iters: int
) -> Times:
    """Each call by the clock, the functions in turns, the copies one after another.

    A function has a copy to itself in a turn, or the one before would warm it.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    at = 0
    for turn in range(-warmup, iters):
        for name, fn in functions.items():
            given = copies[at % len(copies)]
            at += 1
            start = time.perf_counter()
            fn(*given)
            seconds = time.perf_counter() - start
            if turn >= 0:
                times[name].append(seconds * 1e6)
    return times, set()


def _cuda_times(
    functions: Mapping[str, Function], copies: list[list[Any]], warmup: int, iters: int
) -> Times:
    """GPU time by graph replays; of what cannot be captured, by events."""
    from hfpatch.bench.timing import Replay

    replays: dict[str, Any] = {}
    for name, fn in functions.items():
        for i in range(max(warmup, 1)):
            fn(*copies[i % len(copies)])
        torch.cuda.synchronize()
        calls = [lambda fn=fn, given=given: fn(*given) for given in copies]
        try:
            replays[name] = Replay(calls, torch.cuda.Stream(), 1000.0)  # type: ignore[no-untyped-call]
        except RuntimeError:  # it waits for the host, or allocates outside of torch
            continue
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(iters):
        for name, fn in functions.items():
            if name in replays:
                times[name].append(replays[name].microseconds())
                continue
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            fn(*copies[turn % len(copies)])
            end.record()
            end.synchronize()
            times[name].append(float(start.elapsed_time(end)) * 1e3)
    return times, set(replays)


def _host_times(fn: Function, given: list[Any], iters: int) -> list[float]:
    """Microseconds until a call returns, the GPU idle before it."""
    times = []
    for _ in range(iters):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn(*given)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def _peak(fn: Function, given: list[Any], cuda: bool) -> int:
    """The most bytes of tensors that a call held at once, beyond what was there before."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn(*given)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        fn(*given)
    held = most = 0
    inner: Any = profile.profiler
    events = [e for e in inner.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return int(most)
