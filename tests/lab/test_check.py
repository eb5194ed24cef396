"""What a check finds of kernels that are wrong, each in its own way; clocks and environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hfpatch import cli
from hfpatch.lab import clocks, environment, steps
from hfpatch.lab.checking import check
from hfpatch.lab.guarded import guarded
from hfpatch.lab.problems import ToolMissing
from hfpatch.lab.subjects import Unfit, load
from hfpatch.lab.turns import outcome
from hfpatch.lab.workspace import Lab, digest, source_files

GOOD = """
extern "C" void solve(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = 2 * x[i];
}
"""
REF = """
def reference(x, **_):
    return 2 * x
"""
SETTINGS: dict[str, Any] = {
    "sizes": [{"n": 100}], "seeds": 2, "device": "cpu", "dtype": "float32", "flags": [],
    "derive": True, "threads": 1,
}  # fmt: skip


def lab_of(tmp_path: Path, source: str, ref: str = REF, suffix: str = ".cpp", **more: Any) -> Lab:
    kernel, reference = tmp_path / f"kernel{suffix}", tmp_path / "ref.py"
    kernel.write_text(source)
    reference.write_text(ref)
    subject = {**steps.kind_of(kernel), "name": "double", "original": str(kernel)}
    return steps.init(tmp_path / "lab", subject, kernel, reference, 2, {**SETTINGS, **more})


def rows_of(tmp_path: Path, source: str, ref: str = REF, **more: Any) -> dict[str, Any]:
    lab = lab_of(tmp_path, source, ref, **more)
    found = check(load(lab, 0), lab.data["sizes"], 2, lab.data["derive"])
    rows = {r["check"]: r for r in found["rows"]}
    assert found["passed"] == all(r["passed"] is not False for r in rows.values())
    return rows


def test_a_right_kernel(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, GOOD)
    assert all(r["passed"] for r in rows.values())
    assert list(rows)[:3] == ["sizes n=100", "sizes n=99", "sizes n=15"]


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


WRONG = [
    (changed("2 * x[i]", "2.001f * x[i]"), "sizes n=100", "from the reference, relative"),
    (changed("i < n; ++i", "i < n - 1; ++i"), "sizes n=100", "not written"),
    (changed("i < n; ++i", "i < (n + 3) / 4 * 4; ++i"), "writes beyond its outputs",
     "elements behind it, the nearest 0 away"),
    (changed("y[i] = 2", "y[i - 2] = 2"), "writes beyond its outputs", "2 elements before it"),
    (changed("y[i] = 2 * x[i]", "y[i] = 2 * x[i], ((float*)x)[i] = 0"), "inputs unwritten", "`x`"),
    (changed("2 * x[i]", "x[i] != x[i] ? 0 : 2 * x[i]"), "odd values", "nan in `x`"),
    (changed("2 * x[i]", "x[i] > 1e30f ? 1e30f : 2 * x[i]"), "odd values", "inf in `x`"),
    ("static int calls;" + changed("2 * x[i]", "2 * x[i] * (1 + 1e-7f * (++calls % 7))"),
     "the same bits twice", "`y` has other bits"),
    (changed("i < n; ++i", "i < n / 16 * 16 + (n > 99 ? n % 16 : 0); ++i"), "sizes n=99",
     "not written"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "said"), WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_kernel(tmp_path: Path, source: str, name: str, said: str) -> None:
    rows = rows_of(tmp_path, source)
    assert rows[name]["passed"] is False and said in rows[name]["found"], rows[name]


def test_what_ref_may_say(tmp_path: Path) -> None:
    loose = REF + "\nRTOL = 0.01\nSPECIAL = False\nDETERMINISTIC = False\nEXACT_SIZES = True\n"
    rows = rows_of(tmp_path, changed("2 * x[i]", "2.001f * x[i]"), loose, derive=False)
    assert rows["sizes n=100"]["passed"] and rows["odd values"]["passed"] is None
    assert rows["the same bits twice"]["passed"] is None and "sizes n=99" not in rows


INOUT = """
extern "C" void solve(const float* x, float* y, float* scratch, int n) {
  for (int i = 0; i < n; ++i) scratch[i] = 2 * x[i];
  for (int i = 0; i < n; ++i) y[i] += scratch[i];
}
"""
INOUT_REF = """
INOUT = ["y"]
SCRATCH = ["scratch"]


def reference(x, y, **_):
    y += 2 * x
"""


def test_outputs_that_are_read_and_scratch(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, INOUT, INOUT_REF)
    assert all(r["passed"] for r in rows.values()), rows


PYTHON = """
import torch


def setup(rows=3, columns=40, seed=0, device="cpu", dtype=torch.bfloat16):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {"inputs": {"x": x.t(), "y": torch.empty_like(x.t())}, "outputs": ["y"]}


def run_kernel(x, y):
    y.copy_(x.float() * 2)
"""


def test_a_python_file_with_strided_inputs(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, PYTHON, suffix=".py", sizes=[])
    assert lab.data["subject"]["backend"] == "python"
    found = check(load(lab, 0), [{}], 2, True)
    assert found["passed"], found["rows"]


@pytest.mark.parametrize(
    ("source", "ref", "said"),
    [
        ('extern "C" void solve(const float* x, int n) {}', REF, "expected one that it writes to"),
        (GOOD, "def other(): pass", "no `reference"),
        (GOOD, "def reference(x, **_): pass", "returned no tensor and wrote to no output"),
        (GOOD, REF + "\ndef setup(n): return {'x': 3}", "made no `y`|contiguous tensor"),
        (GOOD, REF + "\ndef setup(n): return 3", "returned a int; expected a dict"),
        (GOOD, "1 / 0", "ZeroDivisionError"),
        (GOOD, REF + "\nINOUT = ['z']\n", "`INOUT` names `z`"),
    ],
)
def test_what_is_no_subject(tmp_path: Path, source: str, ref: str, said: str) -> None:
    with pytest.raises(Unfit, match=said):
        rows_of(tmp_path, source, ref)


def test_canaries_stand_around_every_tensor() -> None:
    x = torch.arange(12.0).reshape(3, 4).t()
    held = guarded({"x": x, "y": torch.zeros(5), "n": 3}, ("y",))
    assert torch.equal(held.inputs["x"], x) and held.inputs["x"].stride() == x.stride()
    assert held.inputs["y"].isnan().all() and held.inputs["n"] == 3 and held.touched() == []
    base = held.inputs["y"]
    torch.as_strided(base, (1,), (1,), base.storage_offset() - 1).fill_(1)
    torch.as_strided(base, (2,), (1,), base.storage_offset() + 7).fill_(1)
    before, behind = held.touched()
    assert before == "`y`: 1 elements before it, the nearest 1 away"
    assert behind == "`y`: 2 elements behind it, the nearest 2 away"


def test_noise() -> None:
    base = [100.0, 101.0, 99.0, 100.5, 99.5] * 3
    again = [100.2, 100.8, 99.3, 100.1, 99.9] * 3
    assert outcome(base, again, [50.0] * 15)["outcome"] == "success"
    assert outcome(base, again, [99.9] * 15)["outcome"] == "neutral"
    assert outcome(base, again, [130.0] * 15)["outcome"] == "failure"
    wild = [60.0, 140.0] * 7 + [100.0]  # what differs by itself as much shows nothing
    assert outcome(base, wild, [90.0] * 15)["outcome"] == "neutral"


# Tools ------------------------------------------------------------------------------------------


def test_a_missing_compiler_stops_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of(tmp_path, GOOD)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolMissing, match=r"needs a C\+\+ compiler"):
        steps.check(lab, 0, 120)
    assert lab.result(0, "correctness") is None


def test_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "env", "--backend", "cpu", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "env_check.md").read_text()
    assert text == capsys.readouterr().out[:-1] and "| torch | " in text
    found = environment.report("cuda")
    names = [n["name"] for n in found["needs"]]
    for name in ("GPU", "CUDA (nvcc)", "Nsight Compute", "Python", "torch", "triton"):
        assert name in names
    if not torch.cuda.is_available():
        assert not found["fits"] and "GPU" in found["missing"] and "profile" in found["stopped"]
        status = cli.main(["lab", "env", "--backend", "cuda", "--out", str(tmp_path)])
        assert status == 4
        assert "**missing** | stops check, profile" in (tmp_path / "env_check.md").read_text()


def test_clocks_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, said = tmp_path / "nvidia-smi", tmp_path / "said"
    script = (
        f'echo "$@" >> {said}\n'
        'case "$*" in *query*) echo "1755 MHz";; *) echo "GPU clocks set";; esac\n'
    )
    tool.write_text(f"#!/bin/sh\n{script}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    with clocks.locked(False) as clock:
        assert clock is None and not said.exists()

    def work() -> None:
        with clocks.locked(True) as held:
            assert held == 1755
            raise KeyError

    with pytest.raises(KeyError):
        work()
    lines = said.read_text().splitlines()
    assert "--lock-gpu-clocks=1755,1755" in lines[-2] and lines[-1] == "-i 0 --reset-gpu-clocks"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ToolMissing, match="no `nvidia-smi`"), clocks.locked(True):
        pass


@pytest.mark.parametrize("linked", [True, False])
def test_c_files(tmp_path: Path, linked: bool) -> None:
    """With `extern "C"` a .c file is C++, without it C."""
    source = GOOD if linked else GOOD.replace('extern "C" ', "")
    lab = lab_of(tmp_path, source, suffix=".c")
    assert lab.data["subject"]["backend"] == "cpp"
    assert check(load(lab, 0), [{"n": 50}], 2, False)["passed"]


def test_the_sources_of_a_project(tmp_path: Path) -> None:
    """Only what is built from: a checkout has much else."""
    text = '[torch]\nsrc = ["torch-ext/b.cpp"]\n[kernel.k]\nsrc = ["src/k.cu"]\n'
    for name in ("build.toml", "torch-ext/b.cpp", "torch-ext/k/__init__.py", "src/k.cu", "src/h.h",
                 "build/x/k.so", ".venv/lib/a.py", "tests/t.py", "src/__pycache__/a.pyc",
                 "notes.txt", "CARD.md"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = [p.relative_to(tmp_path).as_posix() for p in source_files(tmp_path)]
    assert sorted(found) == ["CARD.md", "build.toml", "src/h.h", "src/k.cu", "torch-ext/b.cpp",
                             "torch-ext/k/__init__.py"]  # fmt: skip
    before = digest(tmp_path)
    (tmp_path / "tests" / "t.py").write_text("other")
    assert digest(tmp_path) == before
    (tmp_path / "src" / "h.h").write_text("other")
    assert digest(tmp_path) != before
