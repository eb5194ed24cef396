"""One timer. GPU time: graph replays over rotating buffers; host time: one eager call, apart.

Peers are measured in turns within one run, so that a clock that drifts or a neighbour that wakes
up meets all of them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hfpatch.graphs.captures import abandon

Call = Callable[[], Any]


# ------------------------------------------------------------------------------ GPU time


class Replay:
    """Calls captured in one CUDA graph.

    The results of all calls stay alive in the graph's memory, so that the outputs rotate like the
    inputs; a single output buffer would be overwritten in the L2 cache and never reach memory.
    `keep=False` frees each, and the next call writes to the same place.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        stream: torch.cuda.Stream,
        target_us: float,
        *,
        keep: bool = True,
    ) -> None:
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            calls[0]()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            # not `torch.cuda.graph`: it empties the allocator's cache each time
            self._graph.capture_begin(pool)
            try:
                self._results = []
                for call in calls:
                    result = call()
                    if keep:
                        self._results.append(result)
                    del result
                self._graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
                abandon(self._graph, pool, stream)  # a peer that cannot be captured is one row's
                raise
        self._stream, self._calls = stream, len(calls)
        self._loops = 1
        self.microseconds()
        self._loops = max(1, int(target_us / max(self.microseconds() * len(calls), 1.0)))

    def microseconds(self) -> float:
        """GPU time of one call, over enough replays to last about `target_us`."""
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            for _ in range(self._loops):
                self._graph.replay()
            end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._loops / self._calls


def interleaved(replays: Mapping[str, Replay], rounds: int = 7) -> dict[str, float]:
    """Median GPU microseconds of one call of each, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.microseconds())
    return {name: statistics.median(values) for name, values in times.items()}


def gpu_microseconds(calls: Sequence[Call], *, target_us: float = 3000.0) -> float:
    """Median GPU time of one call, microseconds.

    `calls` are the same work on different buffers: enough of them that together they exceed the L2
    cache make it a cold measurement, a single one a warm one. They are captured in one CUDA graph,
    repeated until a replay lasts about `target_us`, so launch gaps are the GPU's own.
    """
    return interleaved({"": Replay(calls, torch.cuda.Stream(), target_us)})[""]  # type: ignore[no-untyped-call]


def copy_bytes_per_second(gigabytes: int = 1) -> float:
    """Speed of a large device copy, bytes read and written."""
    a = torch.randn(gigabytes * 2**28, device="cuda")
    b = torch.empty_like(a)
    ways: tuple[Call, ...] = (lambda: b.copy_(a), lambda: torch.neg(a, out=b))
    best = min(gpu_microseconds([way], target_us=10000) for way in ways)
    return 2 * a.numel() * a.element_size() / (best * 1e-6)


# ------------------------------------------------------------------------------ CPU and host time


def cpu_microseconds(
    peers: Mapping[str, Sequence[Call]], *, budget_s: float = 0.5
) -> dict[str, float]:
    """Wall time of one call of each on the CPU, microseconds: the best of many turns.

    The best, not the median: other work on the machine only ever adds time.
    """

    def turn(calls: Sequence[Call]) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    for calls in peers.values():
        turn(calls)
    best = {name: turn(calls) for name, calls in peers.items()}
    once = sum(best[name] * len(calls) for name, calls in peers.items())
    for _ in range(max(5, min(200, int(budget_s / max(once, 1e-9))))):
        for name, calls in peers.items():
            best[name] = min(best[name], turn(calls))
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _synchronizer() -> Call:
    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def host_times(peers: Mapping[str, Call], *, calls: int = 300, rounds: int = 9) -> dict[str, float]:
    """Host time of one eager call of each, microseconds: the best of turns, the GPU kept idle."""
    sync = _synchronizer()
    best = dict.fromkeys(peers, float("inf"))
    for call in peers.values():
        for _ in range(20):
            call()
    for _ in range(rounds):
        for name, call in peers.items():
            sync()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
            sync()
    return {name: seconds * 1e6 for name, seconds in best.items()}


def host_microseconds(call: Call, *, calls: int = 300, rounds: int = 7) -> float:
    """`host_times` of one call."""
    return host_times({"": call}, calls=calls, rounds=rounds)[""]


def step_milliseconds(call: Call, *, warmup: int = 3, steps: int = 10) -> float:
    """Median wall time of a model step in milliseconds, the device synchronized around each."""
    sync = _synchronizer()
    for _ in range(warmup):
        call()
    times = []
    for _ in range(steps):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def queued_milliseconds(call: Call, *, warmup: int = 3, steps: int = 10) -> float:
    """Wall time of a model step in milliseconds where steps are queued one behind another.

    So does a denoising loop, which waits for the device at its end: what the host does before a
    step's first kernel is hidden by the step before.
    """
    sync = _synchronizer()
    for _ in range(warmup):
        call()
    sync()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    sync()
    return (time.perf_counter() - start) / steps * 1e3
