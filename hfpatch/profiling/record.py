"""One call of a model under PyTorch's profiler: operators, gaps, launches and times of modules."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpatch.profiling.syncs import Syncs
from hfpatch.profiling.work import Work, shares
from hfpatch.text import told

_MODULE = "module "
#: Shorter gaps are the profiler's own.
_GAP_US = 5.0


@dataclass
class Recorded:
    """What one call came to; times in microseconds, with what the profiler itself costs.

    Attributes:
        operators: by name: calls and time of their own.
        gaps: count, sum and the longest, between kernels on a GPU, else between operators.
        modules: by path: calls, launches (kernels or operators) and time: of the kernels on a
            GPU, else in the forward.
        work: operators with bytes, operations and their shares of a copy's and a product's speed.
        syncs: where the host reads a value, see `Syncs.rows`.
    """

    operators: list[dict[str, Any]] = field(default_factory=list)
    gaps: dict[str, float] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    work: list[dict[str, Any]] = field(default_factory=list)
    total_us: float = 0.0
    launches: int = 0


def record(
    call: Callable[[], Any],
    modules: list[tuple[str, nn.Module]],
    cuda: bool,
    trace: Path,
    speed: tuple[float, float],
) -> Recorded:
    """Profile one call behind a first one; the Chrome trace goes to `trace`.

    Args:
        speed: bytes a second of a copy, operations a second of a product.

    Raises:
        ValueError: the first call fails.
    """
    found = Recorded()
    with torch.no_grad():
        try:
            call()
        except Exception as e:  # of the model's own code, or memory
            raise ValueError(f"the model did not run: {told(e)}") from e
        with Syncs() as syncs:
            call()
        found.syncs = syncs.rows()
        with Work() as work:
            call()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        with ExitStack() as stack:
            for path, module in modules:
                before, after = _hooks(path, cuda)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
            start = time.perf_counter()
            with torch.profiler.profile(activities=activities) as profile:
                call()
                if cuda:
                    torch.cuda.synchronize()
            found.total_us = (time.perf_counter() - start) * 1e6
    profile.export_chrome_trace(str(trace))
    _read(profile, cuda, found)
    found.work = shares(work.found, _times(profile, cuda), speed)
    return found


def _times(profile: Any, cuda: bool) -> dict[str, float]:
    """Microseconds by operator: of the kernels that it launched itself, or on the CPU its own."""
    found: dict[str, float] = {}
    for e in profile.events():
        if e.device_type.name != "CPU" or "::" not in e.name:
            continue
        us = sum(float(k.duration) for k in e.kernels) if cuda else float(e.self_cpu_time_total)
        found[e.name] = found.get(e.name, 0.0) + us
    return found


def _hooks(path: str, cuda: bool) -> tuple[Any, Any]:
    """A range around a module's forward, only while it is profiled; on a GPU one of NVTX as well,
    which Nsight Systems and Nsight Compute show."""
    entered: list[Any] = []

    def before(*_: Any) -> None:
        entered.append(torch.profiler.record_function(f"{_MODULE}{path}"))
        entered[-1].__enter__()
        if cuda:
            torch.cuda.nvtx.range_push(path)  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        if cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        entered.pop().__exit__(None, None, None)

    return before, after


def _read(profile: Any, cuda: bool, found: Recorded) -> None:
    events = list(profile.events())
    host = [e for e in events if e.device_type.name == "CPU"]
    ranges = [e for e in host if e.name.startswith(_MODULE)]
    kernels = [e for e in events if e.device_type.name == "CUDA" and _MODULE not in e.name]
    operators = [e for e in host if e.name.startswith(("aten::", "hfpatch", "_hfpatch"))]
    work = kernels if cuda else operators
    found.launches = len(work)
    totals: dict[str, list[float]] = {}
    for e in work:
        own = float(e.time_range.elapsed_us()) if cuda else float(e.self_cpu_time_total)
        row = totals.setdefault(e.name, [0.0, 0.0])
        row[0] += 1.0
        row[1] += own
    order = sorted(totals.items(), key=lambda item: -item[1][1])
    whole = sum(us for _, (_, us) in order) or 1.0
    found.operators = [
        {"name": name, "calls": int(calls), "us": us, "share": us / whole}
        for name, (calls, us) in order
    ]
    spans = sorted((float(e.time_range.start), float(e.time_range.end)) for e in work)
    gaps, end = [], None
    for first, last in spans:
        if end is not None and first - end > _GAP_US:
            gaps.append(first - end)
        end = last if end is None else max(end, last)
    found.gaps = {"count": len(gaps), "us": sum(gaps), "longest_us": max(gaps, default=0.0)}
    if cuda:  # each kernel at the host's operator that launched it
        launched = [
            (float(e.time_range.start), len(e.kernels), sum(float(k.duration) for k in e.kernels))
            for e in host
            if e.kernels and e not in ranges
        ]
    else:
        launched = [(float(e.time_range.start), 1, 0.0) for e in operators]
    for e in ranges:
        path = e.name.removeprefix(_MODULE)
        module = found.modules.setdefault(path, {"calls": 0, "us": 0.0, "launches": 0})
        first, last = float(e.time_range.start), float(e.time_range.end)
        inside = [(count, us) for start, count, us in launched if first <= start <= last]
        module["calls"] += 1
        module["us"] += sum(us for _, us in inside) if cuda else last - first
        module["launches"] += sum(count for count, _ in inside)
