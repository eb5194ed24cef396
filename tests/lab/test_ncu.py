"""Pages of Nsight Compute read, four limits told apart; the tool found, missing or refused."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

import pytest

from hfpatch.lab import bottleneck, ncu, profiles
from hfpatch.lab.problems import ToolMissing

#: Pages that a GPU's counters gave, see README.md there.
PAGES = Path(__file__).resolve().parent / "pages"

MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
POSSIBLE = "sm__maximum_warps_per_active_cycle_pct"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
LIMITS = {
    "launch__occupancy_limit_registers": "8",
    "launch__occupancy_limit_shared_mem": "32",
    "launch__occupancy_limit_warps": "8",
    "launch__occupancy_limit_blocks": "32",
}


def page(*kernels: dict[str, str], units: dict[str, str] | None = None) -> str:
    """A raw page as `ncu --csv --page raw` writes it."""
    names = ["ID", "Kernel Name", *dict.fromkeys(n for k in kernels for n in k)]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(names)
    writer.writerow(["", "", *((units or {}).get(n, "") for n in names[2:])])
    for i, kernel in enumerate(kernels):
        writer.writerow(
            [str(i), f"kernel_{i}(float *, int)", *(kernel.get(n, "n/a") for n in names[2:])]
        )
    return out.getvalue()


CASES: list[tuple[dict[str, str], str, str]] = [
    ({MEMORY: "91.2", COMPUTE: "20"}, "memory", "memory 91 %, compute 20 %"),
    ({MEMORY: "12", COMPUTE: "88"}, "compute", "compute 88 %"),
    (
        {MEMORY: "3", COMPUTE: "1", POSSIBLE: "50", "launch__waves_per_multiprocessor": "0.03",
         STALL.format("long_scoreboard"): "600", STALL.format("wait"): "2"},
        "latency",
        "waits longest for long_scoreboard (600.0 cycles an instruction); the grid fills 0.03",
    ),
    (
        {MEMORY: "20", COMPUTE: "5", POSSIBLE: "3.1", "launch__waves_per_multiprocessor": "62",
         "launch__occupancy_limit_shared_mem": "1"},
        "occupancy",
        "shared memory leaves room for 1 blocks on an SM, 3 % of its warps",
    ),
    (
        {MEMORY: "20", COMPUTE: "5", POSSIBLE: "25", "launch__waves_per_multiprocessor": "9",
         "launch__occupancy_limit_registers": "2"},
        "occupancy",
        "registers leaves room for 2 blocks",
    ),
    # few warps are no limit where memory is busy all the same, or where the grid is too small
    ({MEMORY: "90", COMPUTE: "5", POSSIBLE: "3", "launch__occupancy_limit_shared_mem": "1"},
     "memory", "memory 90 %"),
    ({MEMORY: "9", COMPUTE: "5", POSSIBLE: "3", "launch__occupancy_limit_shared_mem": "1",
      "launch__waves_per_multiprocessor": "0.1"}, "latency", "the grid fills 0.10"),
    ({COMPUTE: "5"}, "unknown", "no speed of light of memory"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kind", "said"), CASES)
def test_limits(values: dict[str, str], kind: str, said: str) -> None:
    (kernel,) = ncu.parse(page({**LIMITS, **values}))
    found = bottleneck.of_counters(kernel)
    assert found.kind == kind and said in found.reason and found.source == "counters"
    if kind != "unknown":
        assert {"memory %", "compute %"} <= set(found.numbers)


def test_units_and_odd_cells() -> None:
    text = page(
        {"gpu__time_duration.sum": "1,234.5", "dram__bytes.sum.per_second": "2.5",
         "lts__t_sector_hit_rate.pct": "n/a", "launch__grid_size": "1,024"},
        {"gpu__time_duration.sum": "99", "dram__bytes.sum.per_second": "(!) n/a",
         "launch__grid_size": ""},
        units={"gpu__time_duration.sum": "nsecond", "dram__bytes.sum.per_second": "Tbyte/second"},
    )  # fmt: skip
    around = f"==PROF== Connected to process 1\nhello, ID\n{text}\n==PROF== Disconnected\nbye\n"
    first, second = ncu.parse(around)
    assert first.values == {"time us": 1.2345, "DRAM GB/s": 2500.0, "blocks": 1024.0}
    assert second.values == {"time us": 0.099}
    assert ncu.longest([first, second]) is first


def test_details_are_read_as_well() -> None:
    light = ("0", "k(float*)", "9.0", "GPU Speed Of Light Throughput")
    rows = [
        ("ID", "Kernel Name", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"),
        (*light, "Memory Throughput", "%", "93.1"),
        (*light, "Compute (SM) Throughput", "%", "9"),
        (*light, "Duration", "us", "189.5"),
        (*light[:3], "Memory Workload Analysis", "Memory Throughput", "Tbyte/s", "2.9"),
        (*light[:3], "Occupancy", "Theoretical Occupancy", "%", "100"),
    ]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    (kernel,) = ncu.parse(out.getvalue())
    assert kernel.device == "9.0"
    assert kernel.values["memory %"] == 93.1 and kernel.values["DRAM GB/s"] == 2900
    assert bottleneck.of_counters(kernel).kind == "memory"


@pytest.mark.parametrize("text", ["", "no table\n", '"ID","Kernel Name"\n"",""\n'])
def test_pages_without_a_kernel(text: str) -> None:
    with pytest.raises(ncu.Unreadable):
        profiles.of_page(text)


def test_the_pages_for_people() -> None:
    values = {MEMORY: "91", COMPUTE: "20", "gpu__time_duration.sum": "5", POSSIBLE: "100",
              STALL.format("barrier"): "4", **LIMITS}  # fmt: skip
    us = {"median": 5.0, "low": 4.9, "high": 5.2, "rounds": 15}
    timed = {"us": us, "GB/s": 2700.0, "of copy": 0.9, "copy GB/s": 3000.0, "of arithmetic": None}
    found = {"version": 2, "roofline": timed, **profiles.of_page(page(values, values))}
    text = profiles.summary(found)
    assert text.startswith("# v2: memory-bound") and "From the hardware's counters" in text
    assert "| `kernel_1(float *, int)` | " in text
    text = profiles.details(found)
    for group in ("speed of light", "occupancy", "warp stalls"):
        assert f"### {group}" in text
    assert "| barrier | 4.00 |" in text


def _tool(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_tool_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match=r"not on PATH; install 2024\.3\.2 or newer"):
        ncu.find()
    for said, problem in (
        ("Version 2024.1.1.0 (build 1)", "is 2024.1.1, expected 2024.3.2"),
        ("hello", "says no version"),
    ):
        _tool(tmp_path, f"echo '{said}'")
        with pytest.raises(ToolMissing, match=problem):
            ncu.find()
    _tool(tmp_path, "echo 'NVIDIA (R) Nsight Compute'; echo 'Version 2025.3.1.0 (build 36398880)'")
    assert ncu.find() == (str(tmp_path / "ncu"), (2025, 3, 1))


def test_what_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks are left alone; a report is imported; without rights the reason is said."""
    (tmp_path / "page.csv").write_text(page({MEMORY: "91", COMPUTE: "20"}))
    words = tmp_path / "words"
    script = (
        f'if [ "$1" = --import ]; then cat {tmp_path}/page.csv; exit; fi\n'
        f'echo "$@" > {words}\n'
        'while [ "$1" != -o ]; do shift; done; touch "$2.ncu-rep"'
    )
    _tool(tmp_path / "bin", script)
    tool = str(tmp_path / "bin" / "ncu")
    env = dict(os.environ)
    text = ncu.collect(tool, ["program", "one"], env, tmp_path / "kernels", 60)
    assert profiles.of_page(text)["bottleneck"]["kind"] == "memory"
    said = words.read_text().split()
    assert said[:2] == ["--clock-control", "none"] and said[-2:] == ["program", "one"]
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    _tool(tmp_path / "bin", f"echo '{denied}'; exit 1")
    with pytest.raises(ncu.Unreadable, match=r"^ERR_NVGPUCTRPERM"):
        ncu.collect(tool, ["program"], env, tmp_path / "other", 60)


def roofline(**changes: Any) -> dict[str, Any]:
    return {"us": {"median": 5.0}, "of copy": 0.2, "of arithmetic": None, **changes}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (roofline(**{"of copy": 0.9}), "memory"),
        (roofline(**{"of copy": 0.9, "of arithmetic": 0.95}), "compute"),
        (roofline(**{"of arithmetic": 0.8}), "compute"),
        (roofline(**{"of arithmetic": 0.1}), "latency"),
        (roofline(), "unknown"),
    ],
)
def test_a_roofline_from_timings(found: dict[str, Any], kind: str) -> None:
    limit = bottleneck.of_roofline(found)
    assert limit.kind == kind and limit.source == "roofline"


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.csv")), ids=lambda p: p.stem)
def test_pages_of_a_gpu(path: Path) -> None:
    """A file is called after what limits the kernel: `memory-copy.csv`."""
    found = profiles.of_page(path.read_text())
    assert found["bottleneck"]["kind"] == path.stem.split("-")[0], found["bottleneck"]
    (kernel, *_) = found["kernels"]
    groups = {ncu.METRICS[name][0] for name in kernel["values"]}
    assert groups >= {"time", "speed of light", "memory", "compute", "occupancy", "launch"}
    assert kernel["stalls"] and "threads of a warp" in kernel["values"]
