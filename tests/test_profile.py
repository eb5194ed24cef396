"""`hfpatch profile`: the files it writes, what it finds, and its gate."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import check_cases
import pytest

from hfpatch import cli

FILES = {
    "profile.html",
    "profile.json",
    "profile_report.txt",
    "profile_trace.json",
    "profile_trace_eager.json",
}
WAITS = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 1e9:
            return x
        return y


def make():
    return Model(), {"x": torch.ones(2, 4)}


def linear():
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}
"""


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: a profile is about them."""


def profiled(out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["profile", *words, "--out", str(out)]) == status
    assert {path.name for path in out.iterdir()} == FILES
    found: dict[str, Any] = json.loads((out / "profile.json").read_text())
    return found


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    found = profiled(tmp_path / "out", folder, "--random-weights", "--seq-len", "16")
    eager, patched = found["profiles"]["eager"], found["profiles"]["patched"]
    assert 0 < patched["launches"] < eager["launches"]
    norm = "model.layers.0.input_layernorm"
    assert patched["modules"][norm]["launches"] == 1 < eager["modules"][norm]["launches"]
    assert patched["modules"][norm]["us"] > 0
    names = {row["name"] for row in patched["operators"]}
    assert "aten::mm" in names and any(name.endswith("::rms_norm") for name in names)
    assert sum(row["share"] for row in eager["operators"]) == pytest.approx(1)
    assert eager["gaps"]["longest_us"] <= eager["gaps"]["us"]
    trace = json.loads((tmp_path / "out" / "profile_trace.json").read_text())
    assert any(e.get("name") == f"module {norm}" for e in trace["traceEvents"])
    page = (tmp_path / "out" / "profile.html").read_text()
    assert norm in page and "<script" not in page
    said = capsys.readouterr().out
    assert norm in said and "nsys profile" in said and "ncu --set full" in said
    assert "--seq-len 16" in said


def test_decoding_steps_are_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a hook on a module would turn off."""
    folder = str(check_cases.write("zoo-llama", tmp_path))
    found = profiled(tmp_path / "out", folder, "--random-weights", "--new-tokens", "4")
    eager, patched = found["profiles"]["eager"], found["profiles"]["patched"]
    assert patched["launches"] < 0.7 * eager["launches"]
    assert not patched["modules"] and "modules are not timed apart" in capsys.readouterr().out


def test_a_pipeline(tmp_path: Path) -> None:
    folder = str(check_cases.write("zoo-ltx-pipeline", tmp_path))
    found = profiled(tmp_path / "out", folder, "--random-weights", "--steps", "1")
    paths = found["profiles"]["patched"]["modules"]
    assert any(path.startswith("transformer.") for path in paths)


@pytest.mark.filterwarnings("ignore:hfpatch. nothing was swapped")
def test_a_planted_item_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "waits.py"
    file.write_text(WAITS)
    line = 1 + WAITS.splitlines().index("        if y.sum().item() > 1e9:")
    gate = ("--max-syncs", "0")
    found = profiled(tmp_path / "out", f"{file}:make", *gate, status=1)
    (sync,) = found["profiles"]["patched"]["syncs"]
    assert sync["count"] == 1 and sync["at"] == f"{file}:{line} in forward"
    said = capsys.readouterr().out
    assert "gate missed: --max-syncs 0: got 1" in said and f"waits.py:{line}" in said
    profiled(tmp_path / "more", f"{file}:make", "--max-syncs", "1")
    assert profiled(tmp_path / "none", f"{file}:linear", *gate)["swapped"] == 0


def test_the_profiler_of_pytorch_says_nothing(tmp_path: Path) -> None:
    """It announces each start and stop on stderr, past Python."""
    (tmp_path / "makes.py").write_text(
        "import torch\n\n\ndef model():\n    m = torch.nn.Sequential(torch.nn.LayerNorm(64))\n"
        "    return m, {'input': torch.randn(4, 64)}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "hfpatch", "profile", "makes.py:model", "--out", "profile"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "wrote " in done.stdout
    assert "USDT" not in done.stderr and "profiler_start" not in done.stderr


class Nesting(HTMLParser):
    """Raises where an element ends that is not the one that began last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ended: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.ended.append(tag)


def test_every_element_of_the_page_ends(tmp_path: Path) -> None:
    (tmp_path / "makes.py").write_text(WAITS)
    profiled(tmp_path / "out", f"{tmp_path / 'makes.py'}:linear")
    (page,) = (tmp_path / "out").glob("*.html")
    found = Nesting(page.read_text(encoding="utf-8"))
    assert found.open == [] and found.ended.count("table") > 1


def test_shares_of_memory_and_compute_speed(tmp_path: Path) -> None:
    """Bytes and operations of the one product are those of its shapes."""
    file = tmp_path / "waits.py"
    file.write_text(WAITS)
    found = profiled(tmp_path / "out", f"{file}:linear")
    assert found["copy GB/s"] > 0 and found["product TFLOP/s"] > 0
    (row,) = [r for r in found["profiles"]["eager"]["work"] if r["name"] == "aten::addmm"]
    assert row["calls"] == 1 and row["flops"] == 2 * 2 * 4 * 4
    assert row["bytes"] == 4 * (4 + 2 * 4 + 4 * 4 + 2 * 4)
    seconds = row["us"] * 1e-6
    assert row["of copy"] == pytest.approx(row["bytes"] / seconds / found["copy GB/s"] / 1e9)
    assert (
        "Share of memory and compute speed, patched"
        in (tmp_path / "out" / "profile.html").read_text()
    )
