"""The whole loop by its commands, on the CPU: a C++ file, a project, an op, a fused block."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import check_cases
import pytest

from hfpatch import cli
from hfpatch.lab.experience import Log

SLOW = """
extern "C" void solve(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) {
    double sum = 0;
    for (int j = 1; j < 200; ++j) sum += x[i] * static_cast<double>(j);
    y[i] = static_cast<float>(sum);
  }
}
"""
FAST = SLOW.replace(
    """    double sum = 0;
    for (int j = 1; j < 200; ++j) sum += x[i] * static_cast<double>(j);
    y[i] = static_cast<float>(sum);
""",
    "    y[i] = x[i] * 19900;\n",
)
REF = """
def reference(x, **_):
    return x * 19900


def work(x, **_):
    return {"bytes": 8 * x.numel(), "flops": 400 * x.numel()}
"""
WHY = ("--hypothesis", "It is added up.", "--rationale", "A sum is known.",
       "--expected", "Much less time.")  # fmt: skip


class Commands:
    """Steps of one lab, with their statuses."""

    def __init__(self, out: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out, self.log, self.capsys = out, log, capsys

    def __call__(self, step: str, *words: str, status: int = 0) -> dict[str, Any]:
        log = ("--log", str(self.log)) if step in ("record", "recommend") else ()
        assert cli.main(["lab", step, *words, "--out", str(self.out), "--json", *log]) == status
        found: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        assert found.get("status", found.get("error", {}).get("status")) == status
        return found

    def refused(self, step: str, *words: str, status: int = 3) -> str:
        return str(self(step, *words, status=status)["error"]["message"])

    def hypothesis(self, change: str = "one product for a sum", *words: str) -> None:
        self("hypothesis", "--change", change, *WHY, *words)


@pytest.fixture
def commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path / "lab", tmp_path / "log.jsonl", capsys)


@pytest.mark.exhaustive
def test_the_loop_of_a_file(commands: Commands, tmp_path: Path) -> None:
    """Each step is refused before its time; a wrong version is a failure; the best one is named."""
    kernel, ref = tmp_path / "double.cpp", tmp_path / "ref.py"
    kernel.write_text(SLOW)
    ref.write_text(REF)
    assert "has no lab" in commands.refused("check")
    words = (str(kernel), "--ref", str(ref), "--iterations", "2", "--size", "n=20000")
    commands("init", *words)
    assert "has a lab already" in commands.refused("init", *words)
    assert "was not checked" in commands.refused("profile")
    assert commands("check")["passed"]
    assert "was not profiled" in commands.refused("hypothesis", "--change", "a b", *WHY)
    assert commands("status")["next"] == "profile"
    profile = commands("profile")
    assert profile["source"] == "roofline" and profile["bottleneck"]["kind"] in (
        "compute",
        "latency",
    )
    assert "no counters" in (commands.out / "v0" / "ncu_summary.md").read_text()
    assert "for" in commands("recommend")
    assert "there is no hypothesis" in commands.refused("next", str(kernel))
    two = ("--change", "a b", "--change", "c d")
    assert "one change a version" in commands.refused("hypothesis", *two, *WHY, status=2)
    commands.hypothesis()
    assert "comments and spaces left out" in commands.refused("next")
    kernel.write_text(
        FAST.replace("int n) {", "int n) {\n  const int from = 0;").replace("i = 0", "i = from")
        + "\nint other() { return 3; }\n"
    )
    assert "2 changes at once" in commands.refused("next")
    kernel.write_text(FAST)
    assert commands("next")["version"] == 1
    assert "was not recorded" in commands.refused("next")
    assert "was not checked as it is" in commands.refused("record")
    assert commands("check")["passed"]
    assert "was not profiled as it is" in commands.refused("record")
    commands("profile")
    shown = commands.out / "v1" / "double.cpp"
    shown.write_text(FAST + "\n")  # another file than the one that was checked
    assert "changed since its check" in commands.refused("profile")
    shown.write_text(FAST)
    record = commands("record")
    assert record["outcome"] == "success" and record["gain"] > 2
    assert "recorded already" in commands.refused("record")
    # a wrong version: no profile, and a failure in the log
    assert commands("status")["next"] == "hypothesis"
    commands.hypothesis("an element less")
    kernel.write_text(FAST.replace("i < n", "i < n - 1"))
    commands("next")
    assert not commands("check", status=1)["passed"]
    assert "did not pass its check" in commands.refused("profile")
    assert commands("record")["outcome"] == "failure"
    assert commands("status")["next"] == "report"
    assert "all 2 iterations are done" in commands.refused("next")
    report = commands("report")
    assert report["best"] == 1 and report["gain"] > 2
    assert set(report["times"]) >= {"v0", "v1", "eager"}
    assert {"torch.compile"} <= {*report["times"], *report["absent"]}
    text = (commands.out / "final_report.md").read_text()
    assert "v1 is" in text and "1 won, 1 lost" in text and "one product for a sum" in text
    assert "| eager |" in (commands.out / "benchmark.md").read_text()
    entries = Log(commands.log).entries()
    assert [e.outcome for e in entries] == ["success", "failure"]
    assert entries[0].op == "double" and entries[0].chip == "cpu" and entries[0].backend == "cpp"
    assert entries[0].metrics["us before"] > entries[0].metrics["us after"] > 0
    assert "not written" in entries[1].note and entries[1].gain is None
    files = {p.name for p in (commands.out / "v1").iterdir()}
    assert files >= {
        "correctness.md", "ncu_summary.md", "ncu_details.md", "hypothesis.md", "change.diff",
        "record.json",
    }  # fmt: skip


CRASHES = """
extern "C" void solve(const float* x, float* y, int n) { *(volatile int*)0 = 1; }
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CRASHES, "SIGSEGV"),
        (SLOW.replace("double sum = 0;", "double sum = ;"), "the compiler refused it"),
        (SLOW.replace("int n", "Matrix n"), "`n` is a `Matrix`"),
    ],
)
def test_versions_that_do_not_run(
    commands: Commands, tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "k.cpp").write_text(source)
    (tmp_path / "ref.py").write_text(REF)
    commands("init", str(tmp_path / "k.cpp"), "--ref", str(tmp_path / "ref.py"),
             "--iterations", "1", "--size", "n=100")  # fmt: skip
    found = commands("check", status=1)
    assert said in found["rows"][0]["found"]


def test_a_loop_that_never_ends_is_ended(commands: Commands, tmp_path: Path) -> None:
    endless = SLOW.replace("double sum = 0;", "while (*(volatile const float*)x < 1e30f) {}")
    (tmp_path / "k.cpp").write_text(
        endless.replace("sum +=", "y[i] +=").replace("y[i] = static_cast<float>(sum);", "")
    )
    (tmp_path / "ref.py").write_text(REF)
    commands("init", str(tmp_path / "k.cpp"), "--ref", str(tmp_path / "ref.py"),
             "--iterations", "1", "--size", "n=10")  # fmt: skip
    found = commands("check", "--timeout", "8", status=1)
    assert "did not end within 8 s" in found["rows"][0]["found"]


@pytest.mark.exhaustive
def test_an_op(commands: Commands, kernels_module: object) -> None:
    commands("init", "--op", "rms_norm", "--iterations", "1", "--size", "B=1,S=64,D=256",
             "--device", "cpu")  # fmt: skip
    source = commands.out / "v0" / "kernel.py"
    assert "run_kernel" in source.read_text()
    assert commands("check")["passed"]
    assert commands("profile")["roofline"]["bytes"] == 4 * (2 * 64 * 256 + 256)
    commands.hypothesis("PyTorch's own operator")
    text = source.read_text().replace(
        "return ops.called(CASE, ops.kernels(), inputs)", "return CASE.eager(*inputs.values())"
    )
    (commands.out / "kernel.py").write_text(text)
    assert commands("next")["version"] == 1
    assert commands("check")["passed"]
    commands("profile")
    assert commands("record")["outcome"] in ("failure", "neutral", "success")


@pytest.mark.exhaustive
def test_a_fused_block(commands: Commands, tmp_path: Path, kernels_module: object) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    words = ("--model", folder, "--random-weights", "--iterations", "1", "--device", "cpu")
    commands("init", "--region", "model.layers.0", *words)
    found = commands("check")
    assert found["passed"], found["rows"]
    assert commands("profile")["roofline"]["us"]["median"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_kernel_project(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["kernel", "new", "my-kernel"]) == 0
    commands.capsys.readouterr()
    commands("init", "my-kernel", "--function", "relu_squared", "--iterations", "1",
             "--device", "cpu")  # fmt: skip
    assert commands("check")["passed"]
    commands("profile")
    commands.hypothesis("the comparison the other way round")
    source = tmp_path / "my-kernel" / "kernel_src" / "formulas.h"
    text = source.read_text()
    assert "x < 0.0f" in text
    source.write_text(text.replace("x < 0.0f", "x <= 0.0f", 1))
    made = commands("next")
    assert made["version"] == 1 and "formulas.h" in made["changed"][0]
    assert commands("check")["passed"]
    commands("profile")
    assert commands("record")["outcome"] in ("success", "failure", "neutral")


def test_bad_usage(commands: Commands, tmp_path: Path) -> None:
    kernel = tmp_path / "k.cpp"
    kernel.write_text(SLOW)
    (tmp_path / "k.txt").write_text("")
    (tmp_path / "ref.py").write_text(REF)
    ref = ("--ref", str(tmp_path / "ref.py"))
    for words, said in (
        ((str(kernel), *ref, "--iterations", "0"), "--iterations 0: expected at least 1"),
        ((str(kernel), "--iterations", "1"), "has no reference"),
        (("--iterations", "1"), "expected one of"),
        ((str(tmp_path / "k.txt"), *ref, "--iterations", "1"), "expected a .cu, .c, .cpp or .py"),
        ((str(kernel), *ref, "--iterations", "1", "--size", "n"), "names with numbers"),
        *(
            ((str(kernel), *ref, "--iterations", "1", "--size", f"n={n}"), "numbers above 0")
            for n in ("0", "-3", "nan", "inf")
        ),
        ((str(kernel), *ref, "--iterations", "1", "--device", "cuda"), "runs on the CPU"),
        (("--op", "no_op", "--iterations", "1"), "no such op; there are: rms_norm"),
        (("--region", "a.b", "--iterations", "1"), "name it by --model"),
    ):
        assert said in commands.refused("init", *words, status=2)
    assert not commands.out.exists()
    shutil.rmtree(commands.out, ignore_errors=True)
