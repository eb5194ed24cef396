"""Several timings of one thing: their median, how far they scatter, and whether two differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Fewer timings than these have no quartiles worth the name: their whole range is taken.
_FEWEST = 5


@dataclass(frozen=True)
class Spread:
    """Timings of one thing.

    Attributes:
        median: of all of them, in their own unit.
        low, high: the first and third quartile; of fewer than five timings the least and the most.
        count: how many there are.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Raises ValueError where there is no timing."""
        if not times:
            raise ValueError("`times` is empty: there is nothing to take a median of")
        if len(times) < _FEWEST:
            low, high = min(times), max(times)
        else:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(statistics.median(times), low, high, len(times))

    def text(self, unit: str, form: str = ".2f") -> str:
        """As "2.31 s (2.28 to 2.45)"; of a single timing without the range."""
        median = f"{self.median:{form}} {unit}"
        return median if self.count == 1 else f"{median} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class Gain:
    """How many times faster `after` is than `before`.

    Attributes:
        ratio: of the medians.
        low, high: what it comes to at the worse and the better end of both spreads.
        count: timings of the one that has fewer.
    """

    ratio: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Gain:
        """Of the timings of both; raises ValueError where one has none."""
        a, b = Spread.of(before), Spread.of(after)
        count = min(a.count, b.count)
        return cls(a.median / b.median, a.low / b.high, a.high / b.low, count)

    @property
    def within_noise(self) -> bool:
        """Whether the spreads overlap, so that no difference was shown."""
        return self.count > 1 and self.low <= 1 <= self.high

    def __str__(self) -> str:
        """As "1.21x (1.18 to 1.25)", "1.02x, within noise (0.97 to 1.06)" or "…, measured once"."""
        if self.count == 1:
            return f"{self.ratio:.2f}x, measured once"
        noise = ", within noise" if self.within_noise else ""
        return f"{self.ratio:.2f}x{noise} ({self.low:.2f} to {self.high:.2f})"
