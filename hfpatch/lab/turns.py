"""Times of calls in turns: each has one in each round, so that a clock that drifts meets all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hfpatch.bench.spread import Spread
from hfpatch.lab.checking import copied
from hfpatch.lab.subjects import Inputs, Subject

Call = Callable[[], Any]
ROUNDS = 15
_TARGET_US = 3000.0
#: A turn on a CPU is the least of so many: other work on the machine only ever adds time.
_LEAST_OF = 4
#: Copies of the inputs together exceed this, so that they come from memory.
_COLD = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
_MOST_COPIES = 16


def calls_of(subject: Subject, inputs: Inputs, run: Callable[[Inputs], Any]) -> list[Call]:
    """Calls on copies of the inputs, as many as no cache holds."""
    size = sum(t.numel() * t.element_size() for t in inputs.values() if isinstance(t, Tensor))
    count = max(2, min(_MOST_COPIES, _COLD[subject.device.type] // max(size, 1)))
    copies = [copied(inputs) for _ in range(count)]
    return [partial(run, given) for given in copies]


def in_turns(
    calls: Mapping[str, Sequence[Call]],
    cuda: bool,
    graphs: Mapping[str, bool],
    rounds: int = ROUNDS,
) -> dict[str, list[float]]:
    """Microseconds of one call of each, one value a round.

    Args:
        calls: by name; the same work on other copies of its inputs.
        cuda: whether the GPU's time is wanted: of CUDA graphs where that can be, else by events
            around enough calls that the host is ahead.
        graphs: which may be captured.
    """
    timers: dict[str, Call] = {}
    for name, some in calls.items():
        timers[name] = _cuda_timer(some, graphs.get(name, False)) if cuda else _cpu_timer(some)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    return found


def _cpu_timer(calls: Sequence[Call]) -> Call:
    def turn(loops: int) -> float:
        start = time.perf_counter()
        for _ in range(loops):
            for call in calls:
                call()
        return (time.perf_counter() - start) * 1e6 / loops / len(calls)

    turn(1)
    once = turn(1) * len(calls)
    loops = max(1, min(1000, int(_TARGET_US / _LEAST_OF / max(once, 0.1))))
    return lambda: min(turn(loops) for _ in range(_LEAST_OF))


def _cuda_timer(calls: Sequence[Call], graph: bool) -> Call:
    from hfpatch.bench.timing import Replay

    for call in calls:
        call()
    torch.cuda.synchronize()
    if graph:
        try:
            return Replay(calls, torch.cuda.Stream(), _TARGET_US).microseconds  # type: ignore[no-untyped-call]
        except RuntimeError:  # it waits for the host, or launches on another stream
            torch.cuda.synchronize()

    def turn(loops: int) -> float:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize()
        start.record()
        for _ in range(loops):
            for call in calls:
                call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / loops / len(calls)

    turn(1)
    once = turn(1) * len(calls)
    loops = max(1, min(1000, int(_TARGET_US / max(once, 0.1))))
    return lambda: turn(loops)


def as_data(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, microseconds."""
    spread = Spread.of(times)
    return {"median": spread.median, "low": spread.low, "high": spread.high, "rounds": spread.count}


def outcome(
    before: Sequence[float], again: Sequence[float], after: Sequence[float]
) -> dict[str, Any]:
    """Whether `after` is faster than `before` beyond noise.

    Compared are the two times of each round, which stood beside each other. Noise is how far two
    measurements of the same version differ so: their median, or half of what lies between their
    quartiles, whichever is more, and half a per cent at least.

    Returns:
        `outcome`: "success", "failure" or "neutral"; `gain`, `noise`, and the gain's quartiles.
    """
    gain = Spread.of([a / b for a, b in zip(before, after, strict=True)])
    same = Spread.of([a / b for a, b in zip(before, again, strict=True)])
    noise = max(abs(same.median - 1), (same.high - same.low) / 2, 0.005)
    if gain.low > 1 and gain.median > 1 + noise:
        said = "success"
    elif gain.high < 1 and gain.median < 1 - noise:
        said = "failure"
    else:
        said = "neutral"
    return {
        "outcome": said,
        "gain": gain.median,
        "gain at the worse end": gain.low,
        "gain at the better end": gain.high,
        "noise": noise,
    }
