"""One change or two, as far as a diff shows; the parameters of `solve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfpatch.lab.changes import differences, independent
from hfpatch.lab.signature import parse_solve

STUDIES = Path(__file__).resolve().parents[2] / "benchmarks" / "lab"
CUDA = (STUDIES / "softmax_cuda" / "v1.cu").read_text()
TRITON = (STUDIES / "attention_triton" / "v0.py").read_text()


def groups(tmp_path: Path, before: str, after: str, suffix: str = ".cu") -> list[list[str]]:
    a, b = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    a.write_text(before)
    b.write_text(after)
    places, _ = differences(a, b)
    return [[p.where for p in group] for group in independent(places)]


def change(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


ONE = [
    (".cu", CUDA, [("kThreads = 256", "kThreads = 512")]),
    (".cu", CUDA, [("expf(", "__expf(")]),
    (".py", TRITON, [("num_stages=1", "num_stages=3")]),
    (".py", TRITON, [("num_stages=1", "num_stages=1, num_warps=8")]),
    (".py", TRITON, [("tl.exp(", "tl.exp2("), ("width**-0.5,", "width**-0.5 * 1.4427,")]),
    (".c", "int f() { return 256; }\nint g() { return 255; }\n",
     [("256", "512"), ("255", "511")]),
]  # fmt: skip
TWO = [
    (".cu", CUDA, [("kThreads = 256", "kThreads = 512"), ("kHeld = 16", "kHeld = 8")]),
    (".cu", CUDA, [("kThreads = 256", "kThreads = 512"), ("expf(", "__expf(")]),
    (".py", TRITON, [("KEYS=32, num_stages=1", "KEYS=64, num_stages=3")]),
    (".py", TRITON, [("num_stages=1", "num_stages=1, num_warps=8"), ("tl.exp(", "tl.exp2(")]),
    (".c", "int f() { return a(); }\nint g() { return b(); }\n",
     [("a()", "c()"), ("b()", "d()")]),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "text", "pairs"), ONE)
def test_one_change(tmp_path: Path, suffix: str, text: str, pairs: list[tuple[str, str]]) -> None:
    assert len(groups(tmp_path, text, change(text, *pairs), suffix)) == 1


@pytest.mark.parametrize(("suffix", "text", "pairs"), TWO)
def test_two_changes(tmp_path: Path, suffix: str, text: str, pairs: list[tuple[str, str]]) -> None:
    assert len(groups(tmp_path, text, change(text, *pairs), suffix)) == 2


def test_comments_and_spaces_are_no_change(tmp_path: Path) -> None:
    more = "// A note.\n" + CUDA.replace("  float sum = 0;", "\n    float sum = 0;  /* of a row */")
    assert groups(tmp_path, CUDA, more) == []
    assert groups(tmp_path, TRITON, TRITON.replace("passes over", "goes over"), ".py") == []
    assert groups(tmp_path, TRITON, TRITON + "# a note\n", ".py") == []


def test_trees_differ_by_their_files(tmp_path: Path) -> None:
    for name, text in (("a", "int f() { return x; }\n"), ("b", "int f() { return y; }\n")):
        (tmp_path / name / "build").mkdir(parents=True)
        (tmp_path / name / "f.c").write_text(text)
        (tmp_path / name / "build" / "f.o").write_text(name)  # what was built is no source
    (tmp_path / "b" / "g.c").write_text("int g() { return 1; }\n")
    places, diff = differences(tmp_path / "a", tmp_path / "b")
    assert [p.where.split(":")[0] for p in places] == ["f.c", "g.c"]
    assert "+int f() { return y; }" in diff and len(independent(places)) == 2


@pytest.mark.parametrize("study", sorted(p.parent.name for p in STUDIES.glob("*/study.json")))
def test_the_case_studies_make_one_change_at_a_time(study: str) -> None:
    folder = STUDIES / study
    plan = json.loads((folder / "study.json").read_text())
    files = [plan["kernel"], *(v["file"] for v in plan["versions"])]
    for version in plan["versions"]:
        places, _ = differences(folder / files[version["from"]], folder / version["file"])
        assert len(independent(places)) == 1, version["file"]


SOURCE = """// extern "C" void solve(int wrong);
#include <cuda_fp16.h>
extern "C" void solve(const float* __restrict__ x, __half *y, const int64_t indices[],
                      /* rows */ int n, size_t big = 0, double eps, cudaStream_t stream) {
}
"""


def test_the_parameters_of_solve() -> None:
    found = [(p.name, p.kind, p.dtype, p.whole) for p in parse_solve(SOURCE)]
    assert found == [
        ("x", "input", torch.float32, False),
        ("y", "output", torch.float16, False),
        ("indices", "input", torch.int64, False),
        ("n", "scalar", None, True),
        ("big", "scalar", None, True),
        ("eps", "scalar", None, False),
        ("stream", "stream", None, False),
    ]
    plain = parse_solve("void helper(int);\nvoid solve(const float *x, float *y, int n) {}")
    block = parse_solve('extern "C" {\nint other();\nvoid solve(float* y) {}\n}')
    assert [p.name for p in plain] == ["x", "y", "n"] and [p.name for p in block] == ["y"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('extern "C" void run(float* x) {}', "found no such function"),
        ("", "found no such function"),
        ('extern "C" void solve() {}', "no parameters"),
        ('extern "C" void solve(Matrix* x) {}', "points to `Matrix`"),
        ('extern "C" void solve(float* x, dim3 n) {}', "`n` is a `dim3`"),
    ],
)
def test_what_is_no_solve(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_solve(source)
