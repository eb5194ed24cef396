"""Two ways to compute the same, timed in turns on the calls that come; the faster one is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: Times that differ by less, of the longer one, are taken for equal; by more, need half the rounds.
NOISE, CLEAR = 0.02, 0.25


@dataclass
class Taken:
    """What calls took, in seconds.

    Attributes:
        host: until the call returned.
        device: on a GPU, from its beginning to the end of its work there; on a CPU as `host`.
    """

    host: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def best(self, host_counts: bool) -> float:
        """The least time of a call: others only add to it."""
        if not self.device:
            return float("inf")
        return max(min(self.host), min(self.device)) if host_counts else min(self.device)


class Race:
    """Which of two ways, 0 or 1, is faster, found out while both are of use: a call goes one way.

    Where they are equally fast the one is kept that takes less of host and device together.

    Args:
        host_counts: whether a call is not over before its host is done; not so in a CUDA graph.
        queued: on a GPU, begin behind work that lasts longer than the host needs, so that `device`
            holds no time that it waited for the host.
        warm: the ways whose next call may be counted; else a first one, which may load and plan, is
            not.
        rounds: calls of each way that decide, where they are not clearly apart before.
    """

    def __init__(
        self,
        host_counts: bool = True,
        queued: bool = False,
        warm: tuple[bool, bool] = (False, False),
        rounds: int = 3,
    ) -> None:
        self.taken = (Taken(), Taken())
        self.winner: int | None = None
        self._host_counts, self._queued, self._rounds = host_counts, queued, rounds
        self._warm = list(warm)
        self._last = 0

    def turn(self) -> int:
        """The way that the next call goes."""
        for way in (0, 1):
            if not self._warm[way]:
                return way
        first, second = (len(t.device) for t in self.taken)
        return 1 - self._last if first == second else int(second < first)

    def run(self, call: Callable[[], T], device: torch.device) -> T:
        """Make the call of this turn, on `device`, and count it.

        What it raises gets out, and is not counted.
        """
        way = self.turn()
        if device.type == "cuda":
            result, host, busy = self._on_gpu(call, device)
        else:
            result, host, busy = _on_cpu(call)
        if self._warm[way]:
            self.taken[way].host.append(host)
            self.taken[way].device.append(busy)
        self._warm[way] = True
        self._last = way
        self._judge(min(len(t.device) for t in self.taken))
        return result

    def _judge(self, rounds: int) -> None:
        if not rounds:
            return
        first, second = self.best(0), self.best(1)
        apart = abs(first - second) / max(first, second)
        if rounds < self._rounds and (rounds < (self._rounds + 1) // 2 or apart < CLEAR):
            return
        if apart <= NOISE:
            first, second = (min(t.host) + min(t.device) for t in self.taken)
        self.winner = 0 if first < second else 1

    def milliseconds(self, way: int) -> float | None:
        """`best`, for people; None before a call was timed."""
        return 1e3 * self.best(way) if self.taken[way].device else None

    def best(self, way: int) -> float:
        """Seconds of a call by this way."""
        return self.taken[way].best(self._host_counts)

    def _on_gpu(self, call: Callable[[], T], device: torch.device) -> tuple[T, float, float]:
        cuda: Any = torch.cuda
        with cuda.device(device):
            stream = cuda.current_stream()
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            stream.synchronize()
            if self._queued:
                _hold_back(max((t.host[-1] for t in self.taken if t.host), default=1e-3))
            begin.record(stream)
            start = time.perf_counter()
            result = call()
            host = time.perf_counter() - start
            end.record(stream)
            end.synchronize()
            return result, host, begin.elapsed_time(end) / 1e3


def _on_cpu(call: Callable[[], T]) -> tuple[T, float, float]:
    start = time.perf_counter()
    result = call()
    taken = time.perf_counter() - start
    return result, taken, taken


def _hold_back(seconds: float) -> None:
    """Keep the current stream busy for somewhat longer."""
    cycles = int(min(1.5 * seconds + 50e-6, 0.02) * 2e9)
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
