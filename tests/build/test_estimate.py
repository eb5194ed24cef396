"""How long a build says that it will take, and what pip lets through of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hfpatch.kernel_build import worth_showing
from hfpatch.kernel_build.estimate import Estimate, cost, said
from hfpatch.kernel_build.objects import Objects, Unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "5 s"), (12, "10 s"), (52, "50 s"), (56, "1 min"), (149, "2 min"), (3600, "1 h 0 min"),
     (4210, "1 h 10 min")],
)  # fmt: skip
def test_said_as_exactly_as_it_is_known(seconds: float, text: str) -> None:
    assert said(seconds) == text


def test_the_table_names_files_that_are_there() -> None:
    from hfpatch.kernel_build import estimate

    names = {p.name for d in ("kernel_src", "torch-ext") for p in (ROOT / d).rglob("*")}
    assert set(estimate._SECONDS) <= names


def test_architectures_count_for_cuda_alone() -> None:
    assert cost("kernel_src/cuda/rope.cu", 4) == 4 * cost("kernel_src/cuda/rope.cu", 1)
    assert cost("kernel_src/cpu/rope.cpp", 4) == cost("kernel_src/cpu/rope.cpp", 0)


def test_a_slow_machine_is_noticed() -> None:
    estimate = Estimate([10.0] * 20, 2)
    assert estimate.left() == 100.0
    for _ in range(10):
        estimate.done(10.0, 30.0, True)  # three times as long as in the table
    assert 2 * 50.0 < estimate.left() < 3 * 50.0
    for _ in range(10):
        estimate.done(10.0, 30.0, True)
    assert estimate.left() == 0.0


def test_one_long_file_is_waited_for() -> None:
    assert Estimate([40.0, 1.0], 16).left() == 40.0


def test_a_build_says_how_long_and_how_far(tmp_path: Path) -> None:
    """With a compiler that copies: the first run has all to do, the second nothing."""
    compiler = tmp_path / "compile.py"
    compiler.write_text(
        "import pathlib, sys\n"
        "target, deps = sys.argv[sys.argv.index('-o') + 1], sys.argv[-1]\n"
        "pathlib.Path(target).write_text('object')\n"
        "pathlib.Path(deps).write_text(target + ': a.cpp')\n"
    )
    (tmp_path / "a.cpp").touch()
    units = [
        Unit(f"g++ {n}", (sys.executable, str(compiler), "-o", str(tmp_path / f"{n}.o")),
             tmp_path / f"{n}.o", 60.0)
        for n in "abc"
    ]  # fmt: skip
    lines: list[str] = []
    Objects(units, tmp_path, "tools", lines.append).compile()
    assert re.fullmatch(r"3 of 3 files to compile, \d+ at once: about [0-9a-z ]+", lines[0])
    assert re.fullmatch(r"\[1/3\] g\+\+ [abc] \d+\.\d s, about [0-9a-z ]+ left", lines[1])
    assert re.fullmatch(r"\[3/3\] g\+\+ [abc] \d+\.\d s", lines[3])
    lines.clear()
    Objects(units, tmp_path, "tools", lines.append).compile()
    assert [line.split(" ", 3)[3] for line in lines] == ["up to date"] * 3


def test_a_tenth_is_worth_a_terminals_while() -> None:
    lines = [f"hfpatch-kernels cuda: [{i}/63] nvcc x.cu" for i in range(1, 64)]
    shown = [line for line in lines if worth_showing(line)]
    assert len(shown) == 10 and shown[-1] == lines[-1]
    assert worth_showing("63 of 63 files to compile, 2 at once: about 9 min")
