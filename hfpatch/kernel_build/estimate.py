"""How long a build will take: by what its files took elsewhere, and by what they take here."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

#: Seconds of one core of a cloud machine with two (g++ 12, CUDA 13.0): of a `.cu` file for one
#: architecture, of others once. Files below 5 s are as others.
_SECONDS = {
    "sample.cu": 34, "decode_attention.cu": 25, "fused_norm.cu": 20, "qk_norm_rope.cu": 19,
    "attention.cu": 18, "layer_norm_backward.cu": 16, "topk.cu": 15, "softmax.cu": 15,
    "broadcast_backward.cu": 14, "layer_norm.cu": 13, "attention_hopper.cu": 13,
    "rms_norm_backward.cu": 13, "gated.cu": 12, "rms_norm.cu": 11,
    "cross_entropy_with_gradient.cu": 10, "decode_product.cu": 9, "softmax_backward.cu": 9,
    "cross_entropy.cu": 8, "rope.cu": 8, "group_norm.cu": 7, "gated_norm.cu": 6, "adamw.cu": 6,
    "norm_backward.cpp": 24, "broadcast_backward.cpp": 13, "decode_step.cpp": 13,
    "attention.cpp": 12, "torch_binding.cpp": 9, "softmax.cpp": 9, "layer_norm.cpp": 8,
    "rms_norm.cpp": 6, "rope.cpp": 6, "gated.cpp": 6, "fused_norm.cpp": 5,
}  # fmt: skip
_OTHERS = 3.0


def cost(source: str, archs: int) -> float:
    """Seconds of one core that a source takes, for so many architectures where it is CUDA's."""
    seconds = _SECONDS.get(Path(source).name, _OTHERS)
    return seconds * max(1, archs) if source.endswith(".cu") else seconds


def said(seconds: float) -> str:
    """ "20 s", "4 min", "1 h 10 min": as exact as an estimate is."""
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    minutes = round(seconds / 60)
    return f"{max(1, minutes)} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Estimate:
    """What is left of a build whose parts cost `costs` in all, on `jobs` cores."""

    def __init__(self, costs: Sequence[float], jobs: int) -> None:
        self._longest = max(costs, default=0.0)
        self._left = sum(costs)
        self._jobs = max(1, jobs)
        self._expected = self._took = 0.0
        self.start = time.perf_counter()

    def done(self, cost: float, seconds: float, compiled: bool) -> None:
        """One part is done; what was compiled says how fast this machine is."""
        self._left = max(0.0, self._left - cost)
        if compiled:
            self._expected += cost
            self._took += seconds

    def left(self) -> float:
        """Seconds from now."""
        # the first few files say little, and are the slow ones: the table counts for 30 s of them
        scale = (self._took + 30.0) / (self._expected + 30.0)
        return scale * max(self._left / self._jobs, min(self._longest, self._left))

    def __str__(self) -> str:
        return said(self.left())


_LINE = re.compile(r"\[(\d+)/(\d+)\]")


def worth_showing(line: str) -> bool:
    """Of the lines of a build those that a terminal gets where pip hides the rest: a tenth."""
    match = _LINE.search(line)
    if match is None:
        return True
    at, all_ = int(match[1]), int(match[2])
    return at == all_ or at * 10 // all_ > (at - 1) * 10 // all_
