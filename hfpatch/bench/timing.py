"""One timer. GPU time: graph replays over rotating buffers; host time: one eager call, apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


def gpu_microseconds(
    calls: Sequence[Call], *, replays: int = 7, target_us: float = 3000.0
) -> float:
    """Median GPU time of one call, microseconds.

    `calls` are the same work on different buffers: enough of them that together they exceed the L2
    cache make it a cold measurement, a single one a warm one. They are captured in one CUDA graph,
    repeated until a replay lasts about `target_us`, so launch gaps are the GPU's own.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    once = _replay_us(graph, 1)
    loops = max(1, int(target_us / max(once, 1.0)))
    times = [_replay_us(graph, loops) / loops for _ in range(replays)]
    return statistics.median(times) / len(calls)


def _replay_us(graph: torch.cuda.CUDAGraph, loops: int) -> float:
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    start.record()
    for _ in range(loops):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def _synchronizer() -> Call:
    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def host_microseconds(call: Call, *, calls: int = 300, rounds: int = 7) -> float:
    """Host time of one eager call, microseconds: the best of several rounds, the GPU kept idle."""
    sync = _synchronizer()
    for _ in range(20):
        call()
    best = float("inf")
    for _ in range(rounds):
        sync()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        sync()
    return best * 1e6


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
