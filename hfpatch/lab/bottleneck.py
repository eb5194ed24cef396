"""What limits a kernel: memory, compute, latency or occupancy, with the numbers that decided."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hfpatch.lab.ncu import Kernel

#: A unit that is busy for as much of the time is the limit: Nsight Compute's own bound.
BUSY = 60.0
#: Less of the possible warps than this hides little.
FEW_WARPS = 50.0


@dataclass(frozen=True)
class Bottleneck:
    """Attributes:
    kind: "memory", "compute", "latency", "occupancy", or "unknown" where the numbers are missing.
    reason: why, with the numbers.
    numbers: those that decided.
    source: "counters" of the hardware, or "roofline" from timings.
    """

    kind: str
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)
    source: str = "counters"

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def of_counters(kernel: Kernel) -> Bottleneck:
    """From a kernel's counters.

    A unit that is busy for 60 % of the time or more is the limit. Where none is, warps wait:
    because the SM has room for too few (registers, shared memory), which is occupancy, or for
    another reason, which is latency.
    """
    v = kernel.values
    memory = max((v[n] for n in ("memory %", "DRAM %") if n in v), default=None)
    compute = v.get("compute %")
    if memory is None or compute is None:
        missing = "memory" if memory is None else "compute"
        return Bottleneck("unknown", f"the page has no speed of light of {missing}")
    numbers = {"memory %": memory, "compute %": compute}
    if max(memory, compute) >= BUSY:
        kind = "memory" if memory >= compute else "compute"
        parts: dict[str, float] = {n: v[n] for n in ("DRAM %", "L2 %", "L1 %") if n in v}
        where = ""
        if kind == "memory" and parts:
            unit = max(parts, key=lambda n: parts[n])
            numbers |= parts
            where = f"; the busiest part of it is {unit.removesuffix(' %')} at {parts[unit]:.0f} %"
        reason = f"memory {memory:.0f} %, compute {compute:.0f} % of their peak{where}"
        return Bottleneck(kind, reason, numbers)
    idle = f"neither memory ({memory:.0f} %) nor compute ({compute:.0f} %) is busy"
    limit = _limited_by(v)
    for name in ("occupancy %", "possible occupancy %", "waves"):
        if name in v:
            numbers[name] = v[name]
    possible = v.get("possible occupancy %")
    if limit and possible is not None and possible < FEW_WARPS and v.get("waves", 1.0) >= 0.9:
        blocks = v[limit]
        numbers[limit] = blocks
        return Bottleneck(
            "occupancy",
            f"{idle}, and {limit.removeprefix('blocks by ')} leaves room for {blocks:.0f} blocks "
            f"on an SM, {possible:.0f} % of its warps",
            numbers,
        )
    waits = ""
    if kernel.stalls:
        name = max(kernel.stalls, key=lambda n: kernel.stalls[n])
        numbers[f"stalled {name}"] = kernel.stalls[name]
        waits = (
            f"; a warp waits longest for {name} ({kernel.stalls[name]:.1f} cycles an instruction)"
        )
    if v.get("waves", 1.0) < 0.9:
        waits += f"; the grid fills {v['waves']:.2f} of the GPU"
    return Bottleneck("latency", f"{idle}{waits}", numbers)


def _limited_by(values: dict[str, float]) -> str | None:
    """The resource that leaves room for fewer blocks than warps and blocks would."""
    names = ("blocks by registers", "blocks by shared memory")
    free = min(
        (values[n] for n in ("blocks by warps", "blocks by SM") if n in values), default=None
    )
    found = {n: values[n] for n in names if n in values}
    if not found or free is None:
        return None
    least = min(found, key=lambda n: found[n])
    return least if found[least] < free else None


def of_roofline(found: dict[str, Any]) -> Bottleneck:
    """From timings: bytes and operations of a call against what this machine was measured to do."""
    shares = {k: found[k] for k in ("of copy", "of arithmetic") if found.get(k) is not None}
    numbers = {**shares, "us": found["us"]["median"]}
    memory, compute = shares.get("of copy", 0.0), shares.get("of arithmetic")
    said = f"{memory:.0%} of a copy's speed" + (
        "" if compute is None else f", {compute:.0%} of a product's operations"
    )
    if memory * 100 >= BUSY and memory >= (compute or 0.0):
        return Bottleneck("memory", said, numbers, "roofline")
    if compute is not None and compute * 100 >= BUSY:
        return Bottleneck("compute", said, numbers, "roofline")
    if compute is None:
        return Bottleneck(
            "unknown",
            f"{said}; how much it computes is not known: `work(**kwargs)` in ref.py may return "
            '{"bytes": …, "flops": …}',
            numbers,
            "roofline",
        )
    return Bottleneck(
        "latency",
        f"{said}; latency and occupancy cannot be told apart without counters",
        numbers,
        "roofline",
    )
