"""What is generated of the header: up to date, and true to it."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernel_src" / "hfpatch.h"


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bindings" / "generate"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A header to edit, and a root with the snapshot."""
    (tmp_path / "clib").mkdir()
    shutil.copy(ROOT / "clib" / "abi.txt", tmp_path / "clib")
    shutil.copy(HEADER, tmp_path / "hfpatch.h")
    return tmp_path


def edit(copy: Path, old: str, new: str) -> subprocess.CompletedProcess[str]:
    header = copy / "hfpatch.h"
    text = header.read_text()
    assert old in text
    header.write_text(text.replace(old, new))
    return generate("--header", header, "--root", copy)


def test_what_is_generated_is_up_to_date() -> None:
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_check_names_what_is_not(copy: Path) -> None:
    done = generate("--check", "--root", copy)
    assert done.returncode == 1
    assert "clib/stub.c" in done.stderr
    assert "run `python bindings/generate`" in done.stderr
    assert not (copy / "clib" / "stub.c").exists()


def test_the_card_has_every_op_and_says_what_it_computes() -> None:
    """A forward op of the header is a row, with words of its function's docstring."""
    header, _ = HEADER.read_text(encoding="utf-8").split("#define HFP_DECODE_TABLE(X)")
    ops = re.findall(r'X\((\w+), hfp_\w+, "', header)
    forward = [op for op in ops if not op.endswith(("_backward", "_with_gradient"))]
    text = (ROOT / "CARD.md").read_text(encoding="utf-8")
    row = r"^\| `(\w+)` \| (.+?) \| (?:`(\w+)`)? ?\| (fused)? ?\|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(forward) and len(forward) > 25
    assert all(words for _, words, _, _ in rows)
    in_place = {name for _, _, name, _ in rows if name}
    assert {"rms_norm_", "rope_qk_", "gate_residual_"} <= in_place
    assert {op for op, _, _, fused in rows if fused} >= {"rms_norm", "softmax", "rope", "mul_add"}


def test_the_card_needs_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bindings" / "generate"))
    card, header = importlib.import_module("card"), importlib.import_module("header")
    bare = tmp_path / "CARD.md"
    bare.write_text("# hfpatch-kernels\n", encoding="utf-8")
    monkeypatch.setattr(card, "CARD", bare)
    with pytest.raises(header.HeaderError, match="has no lines"):
        card.card(header.read_header(HEADER))


def test_a_changed_prototype_needs_a_new_version(copy: Path) -> None:
    done = edit(
        copy,
        "hfp_silu(DLTensor *out, const DLTensor *x,",
        "hfp_silu(DLTensor *out, const DLTensor *y,",
    )
    assert done.returncode == 1  # the op table says x
    assert "the op table says" in done.stderr


def test_a_changed_constant_needs_a_new_version(copy: Path) -> None:
    done = edit(copy, "HFP_ACT_RELU = 4", "HFP_ACT_RELU = 5")
    assert done.returncode == 1
    assert "raise `HFP_ABI_VERSION` in hfpatch.h, or keep:\n  HFP_ACT_RELU = 4" in done.stderr
    version = re.search(r"#define HFP_ABI_VERSION (\d+)", HEADER.read_text())
    assert version is not None
    higher = f"#define HFP_ABI_VERSION {int(version[1]) + 1}"
    assert edit(copy, version[0], higher).returncode == 0
    assert "HFP_ACT_RELU = 5" in (copy / "clib" / "abi.txt").read_text()


def test_a_function_that_goes_needs_a_new_version(copy: Path) -> None:
    gone = "HFP_EXPORT int64_t hfp_row_workspace(int64_t rows, int64_t cols);"
    done = edit(copy, gone, "")
    assert done.returncode == 1
    assert "hfp_row_workspace" in done.stderr


def test_a_function_that_is_added_is_compatible(copy: Path) -> None:
    there = "HFP_EXPORT int64_t hfp_row_workspace("
    done = edit(copy, there, "HFP_EXPORT int64_t hfp_new(int64_t rows);\n" + there)
    assert done.returncode == 0, done.stderr
    assert "int64_t hfp_new(int64_t rows)\n" in (copy / "clib" / "abi.txt").read_text()
    assert "hfp_new" in (copy / "clib" / "stub.c").read_text()


def test_a_type_that_the_generator_does_not_know(copy: Path) -> None:
    there = "HFP_EXPORT int64_t hfp_row_workspace("
    done = edit(copy, there, "HFP_EXPORT int64_t hfp_new(float rows);\n" + there)
    assert done.returncode == 1
    assert "`hfp_new`: the generator does not know the parameter `float rows`" in done.stderr


def test_an_op_without_a_prototype(copy: Path) -> None:
    done = edit(copy, "X(argmax, hfp_argmax,", "X(argmax, hfp_argmin,")
    assert done.returncode == 1
    assert "the op tables name functions without a prototype: hfp_argmin" in done.stderr
