"""Nsight Compute: is it here, how it is run, and what its CSV pages say.

Both pages are read: `--page raw` (a column per metric, units in the second row) and
`--page details` (a row per metric). Names of metrics differ between versions, so each value is
looked for under several.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.lab.problems import ToolMissing

MIN_VERSION = (2024, 3, 2)
SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "LaunchStats",
    "SchedulerStats", "WarpStateStats", "InstructionStats", "SourceCounters",
)  # fmt: skip
#: Values by name: the group that they are shown in, and the metrics that they may be.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "time us": ("time", ("gpu__time_duration.sum", "Duration")),
    "memory %": (
        "speed of light",
        (
            "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
            "gpu__compute_memory_access_throughput.avg.pct_of_peak_sustained_elapsed",
            "Memory Throughput",
        ),
    ),
    "compute %": (
        "speed of light",
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "Compute (SM) Throughput"),
    ),
    "DRAM %": (
        "memory",
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "DRAM Throughput",
        ),
    ),
    "L2 %": (
        "memory",
        ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "L2 Cache Throughput"),
    ),
    "L1 %": (
        "memory",
        (
            "l1tex__throughput.avg.pct_of_peak_sustained_active",
            "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
            "L1/TEX Cache Throughput",
        ),
    ),
    "DRAM GB/s": ("memory", ("dram__bytes.sum.per_second",)),
    "L1 hits %": ("memory", ("l1tex__t_sector_hit_rate.pct", "L1/TEX Hit Rate")),
    "L2 hits %": ("memory", ("lts__t_sector_hit_rate.pct", "L2 Hit Rate")),
    "bytes of a loaded sector %": (
        "memory",
        (
            "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct",
            "smsp__sass_average_data_bytes_per_sector_mem_global.pct",
        ),
    ),
    "instructions a cycle": (
        "compute",
        ("sm__inst_executed.avg.per_cycle_active", "Executed Ipc Active"),
    ),
    "issue slots busy %": (
        "compute",
        ("sm__inst_issued.avg.pct_of_peak_sustained_active", "Issue Slots Busy"),
    ),
    "occupancy %": (
        "occupancy",
        ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
    ),
    "possible occupancy %": (
        "occupancy",
        ("sm__maximum_warps_per_active_cycle_pct", "Theoretical Occupancy"),
    ),
    "blocks by registers": (
        "occupancy", ("launch__occupancy_limit_registers", "Block Limit Registers"),
    ),
    "blocks by shared memory": (
        "occupancy", ("launch__occupancy_limit_shared_mem", "Block Limit Shared Mem"),
    ),
    "blocks by warps": ("occupancy", ("launch__occupancy_limit_warps", "Block Limit Warps")),
    "blocks by SM": ("occupancy", ("launch__occupancy_limit_blocks", "Block Limit SM")),
    "registers": ("launch", ("launch__registers_per_thread", "Registers Per Thread")),
    "threads a block": ("launch", ("launch__block_size", "Block Size")),
    "blocks": ("launch", ("launch__grid_size", "Grid Size")),
    "waves": ("launch", ("launch__waves_per_multiprocessor", "Waves Per SM")),
    "eligible warps": (
        "warps", ("smsp__warps_eligible.avg.per_cycle_active", "Eligible Warps Per Scheduler"),
    ),
    "cycles an instruction": (
        "warps",
        (
            "smsp__average_warp_latency_per_inst_issued.ratio",
            "smsp__average_warps_active_per_issue_active.ratio",
            "Warp Cycles Per Issued Instruction",
        ),
    ),
    "threads of a warp": (
        "divergence",
        (
            "smsp__thread_inst_executed_per_inst_executed.ratio",
            "Avg. Active Threads Per Warp",
        ),
    ),
    "threads not predicated off": (
        "divergence",
        (
            "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio",
            "Avg. Not Predicated Off Threads Per Warp",
        ),
    ),
    "uniform branches %": (
        "divergence",
        ("smsp__sass_average_branch_targets_threads_uniform.pct", "Branch Efficiency"),
    ),
}  # fmt: skip
_STALL = re.compile(
    r"smsp__average_warps?_(?:issue_stalled|latency_issue_stalled)_(\w+?)"
    r"(?:_per_issue_active|_not_issued_per_issue_active)?\.ratio$"
)
_TIMES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3,
          "s": 1e6, "second": 1e6}  # fmt: skip
_BYTES = {"byte": 1e-9, "Kbyte": 1e-6, "Mbyte": 1e-3, "Gbyte": 1.0, "Tbyte": 1e3, "B": 1e-9,
          "KB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3}  # fmt: skip


@dataclass
class Kernel:
    """One launch that Nsight Compute saw.

    Attributes:
        values: by the names of `METRICS`; what was not there is left out.
        stalls: cycles that a warp waits for one instruction to be issued, by reason.
        raw: every number, by the tool's own name.
    """

    name: str
    device: str
    values: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)


def find() -> tuple[str, tuple[int, int, int]]:
    """The tool and its version.

    Raises:
        ToolMissing: it is not here, or too old; says what to do.
    """
    wanted = ".".join(map(str, MIN_VERSION))
    path = shutil.which("ncu")
    if path is None:
        raise ToolMissing(
            f"Nsight Compute (`ncu`) is not on PATH; install {wanted} or newer, or go on with a "
            "roofline from timings: `hfpatch lab profile --roofline`"
        )
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ToolMissing(f"`{path} --version` did not run: {e}; install it again") from e
    found = re.search(r"Version (\d{4})\.(\d+)\.(\d+)", said) or re.search(
        r"\b(20\d\d)\.(\d+)\.(\d+)", said
    )
    if found is None:
        raise ToolMissing(f"`{path} --version` says no version: {said.strip()[:200]!r}")
    version = (int(found[1]), int(found[2]), int(found[3]))
    if version < MIN_VERSION:
        got = ".".join(map(str, version))
        raise ToolMissing(
            f"Nsight Compute is {got}, expected {wanted} or newer; upgrade it, or go on with a "
            "roofline from timings: `hfpatch lab profile --roofline`"
        )
    return path, version


def collect(tool: str, command: list[str], env: dict[str, str], out: Path, seconds: float) -> str:
    """Run a command under Nsight Compute; returns its raw page as CSV.

    Args:
        out: the report without its suffix; `.ncu-rep` is left there for the tool's own window.

    Raises:
        Unreadable: the counters could not be read; says why.
    """
    sections = [word for name in SECTIONS for word in ("--section", name)]
    asked = [tool, "--clock-control", "none", "--profile-from-start", "off", "--launch-count", "64",
             "-f", "-o", str(out), *sections, *command]  # fmt: skip
    try:
        done = subprocess.run(
            asked, env=env, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as e:
        raise Unreadable(f"`ncu` did not end within {seconds:g} s") from e
    said = done.stdout + done.stderr
    report = out.with_name(f"{out.name}.ncu-rep")
    problems = [line.strip() for line in said.splitlines() if "==ERROR==" in line]
    if not report.is_file() or problems:
        why = problems[0] if problems else (said.strip().splitlines() or ["it said nothing"])[-1]
        raise Unreadable(why.replace("==ERROR== ", ""))
    page = subprocess.run(
        [tool, "--import", str(report), "--csv", "--page", "raw"],
        capture_output=True, text=True, errors="replace", timeout=seconds,
    )  # fmt: skip
    if page.returncode != 0 or not page.stdout.strip():
        raise Unreadable(f"`ncu --import` failed: {(page.stdout + page.stderr).strip()[:300]}")
    return page.stdout


class Unreadable(Exception):
    """The hardware's counters could not be read here; the message says why."""


def parse(text: str) -> list[Kernel]:
    """The kernels of a CSV page, raw or details.

    Lines of the tool or of the program around the table are passed over; a value that is no number
    is left out.

    Raises:
        ValueError: there is no such table in it.
    """
    rows = list(csv.reader(io.StringIO(_table(text))))
    if not rows:
        raise ValueError('expected a CSV page of `ncu`, whose first column is "ID"')
    head = [cell.strip() for cell in rows[0]]
    if "Metric Name" in head:
        return _details(head, rows[1:])
    return _raw(head, rows[1:])


def _table(text: str) -> str:
    """The lines of the table: from its head to the last line that is of it."""
    lines = text.splitlines()
    start = next((i for i, li in enumerate(lines) if re.match(r'\s*"?ID"?,"?\w', li)), None)
    if start is None:
        return ""
    kept = [lines[start]]
    for line in lines[start + 1 :]:
        if line.startswith("==") or not line.strip():
            continue
        kept.append(line)
    return "\n".join(kept)


def _number(text: str) -> float | None:
    """ "1,234.5" is a number, "n/a" and "(1, 2)" are none."""
    bare = text.strip().replace(",", "").removesuffix("%")
    try:
        value = float(bare)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def _raw(head: list[str], rows: list[list[str]]) -> list[Kernel]:
    units = {}
    if rows and not rows[0][0].strip():  # the second row has no ID: it has the units
        units = dict(zip(head, (c.strip() for c in rows[0]), strict=False))
        rows = rows[1:]
    found = []
    for row in rows:
        if len(row) != len(head) or _number(row[0]) is None:
            continue  # a line of the program between them
        cells = dict(zip(head, row, strict=True))
        kernel = Kernel(cells.get("Kernel Name", "?"), _device(cells))
        for name, cell in cells.items():
            value = _number(cell)
            if value is not None and name not in ("ID", "Process ID", "Context", "Stream", "CC"):
                kernel.raw[name] = _in_unit(name, value, units.get(name, ""))
        found.append(_filled(kernel))
    return found


def _details(head: list[str], rows: list[list[str]]) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for row in rows:
        if len(row) != len(head) or _number(row[0]) is None:
            continue
        cells = dict(zip(head, row, strict=True))
        kernel = found.setdefault(row[0], Kernel(cells.get("Kernel Name", "?"), _device(cells)))
        name, value = cells["Metric Name"].strip(), _number(cells.get("Metric Value", ""))
        if not name or value is None:
            continue
        unit = cells.get("Metric Unit", "").strip()
        if name == "Memory Throughput" and unit != "%":
            name = "dram__bytes.sum.per_second"  # the same words for another thing
        kernel.raw[name] = _in_unit(name, value, unit)
    return [_filled(k) for k in found.values()]


def _device(cells: dict[str, str]) -> str:
    return cells.get("device__attribute_display_name") or cells.get("CC", "")


def _in_unit(name: str, value: float, unit: str) -> float:
    """Times in microseconds, speeds in GB/s."""
    if name in ("gpu__time_duration.sum", "Duration"):
        return value * _TIMES.get(unit, 1e-3)
    if name == "dram__bytes.sum.per_second":
        return value * _BYTES.get(unit.split("/")[0], 1.0)
    return value


def _filled(kernel: Kernel) -> Kernel:
    for name, (_, candidates) in METRICS.items():
        for metric in candidates:
            if metric in kernel.raw:
                kernel.values[name] = kernel.raw[metric]
                break
    for metric, value in kernel.raw.items():
        match = _STALL.match(metric)
        if match and match[1] != "selected":
            kernel.stalls[match[1]] = value
    return kernel


def longest(kernels: list[Kernel]) -> Kernel:
    """The kernel that takes most of the time. Raises ValueError where there is none."""
    if not kernels:
        raise ValueError("Nsight Compute saw no kernel: the version launches none")
    return max(kernels, key=lambda k: k.values.get("time us", 0.0))


def as_data(kernels: list[Kernel]) -> list[dict[str, Any]]:
    return [
        {"name": k.name, "device": k.device, "values": k.values, "stalls": k.stalls, "raw": k.raw}
        for k in kernels
    ]
