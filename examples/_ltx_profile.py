"""One denoising step under torch.profiler: launches, a table by kernel, a Chrome trace."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _quiet import silence_profiler
from torch.profiler import ProfilerActivity, profile

# Host calls that put work on the GPU; a graph is one of them, however many kernels it holds.
_LAUNCH = re.compile(r"^(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")
_OPERATOR = re.compile(r"^\w+::\w+")


@dataclass(frozen=True)
class Counts:
    """What one phase did.

    launches: calls of the host that start kernels, graphs or copies on the GPU; None on a CPU.
    kernels: what ran on the GPU, those inside of graphs included; None on a CPU.
    operators: PyTorch's operators that no other operator called.
    """

    launches: int | None
    kernels: int | None
    operators: int


class Recording:
    """A profile of what ran between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        silence_profiler()
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        self._wait()
        self._profile.start()

    def stop(self) -> None:
        self._wait()
        self._profile.stop()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _kernels(self) -> list[Any]:
        return [
            e
            for e in self._profile.events()
            if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
        ]

    def counts(self) -> Counts:
        host = [e for e in self._profile.events() if e.device_type.name == "CPU"]
        operators = sum(bool(_OPERATOR.match(e.name)) and not _inside_operator(e) for e in host)
        if self.device.type != "cuda":
            return Counts(None, None, operators)
        launches = sum(bool(_LAUNCH.match(e.name)) for e in host)
        return Counts(launches, len(self._kernels()), operators)

    def table(self, title: str, rows: int = 40) -> str:
        """Kernels (on a CPU: operators) by total time."""
        total: Counter[str] = Counter()
        count: Counter[str] = Counter()
        counts = self.counts()
        if counts.kernels is None:
            for e in self._profile.key_averages():
                if _OPERATOR.match(e.key):
                    name = _short(e.key)
                    total[name] += e.self_cpu_time_total
                    count[name] += e.count
            what = f"{counts.operators} operators called by the model"
        else:
            for e in self._kernels():
                name = _short(e.name)
                total[name] += e.time_range.elapsed_us()
                count[name] += 1
            what = f"{counts.launches} launches by the host, {counts.kernels} kernels on the GPU"
        busy = sum(total.values())
        lines = [f"{title}: {what}, {busy / 1e3:.3f} ms in them", ""]
        if busy:
            lines.append(f"{'total ms':>10}  {'share':>6}  {'calls':>6}  {'mean us':>9}  name")
        for name, us in total.most_common(rows):
            lines.append(
                f"{us / 1e3:10.3f}  {us / busy:6.1%}  {count[name]:6d}  "
                f"{us / count[name]:9.1f}  {name}"
            )
        if len(total) > rows:
            rest = sum(us for _, us in total.most_common()[rows:])
            lines.append(f"{rest / 1e3:10.3f}  {rest / busy:6.1%}  in {len(total) - rows} others")
        return "\n".join(lines) + "\n"

    def save_trace(self, file: Path) -> Path:
        """For chrome://tracing or https://ui.perfetto.dev."""
        self._profile.export_chrome_trace(str(file))
        return file


def _inside_operator(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _OPERATOR.match(parent.name):
            return True
        parent = parent.cpu_parent
    return False


def _short(name: str) -> str:
    """A kernel's name without its template arguments, unless they are what tells it apart."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"^_hfpatch_kernels_\w+::", "hfpatch::", name)  # a build's operators
    name = name.replace("(anonymous namespace)::", "")
    if not re.search("nvjet|gemm|cutlass|cudnn", name):
        name = re.sub(r"[<(].*", "", name)
    return name[:90]
