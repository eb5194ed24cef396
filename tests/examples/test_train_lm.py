"""`examples/train_lm.py` as a user runs it, with small settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import parse, run, run_json

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_the_curves_agree(tmp_path: Path) -> None:
    result = run_json("train_lm.py", "--steps", "3", "--sequence-length", "12",
                      cwd=tmp_path)  # fmt: skip
    runs = result["runs"]
    assert list(runs) == ["original", "patched"]
    assert (result["dtype"], result["tokens_per_step"]) == ("float32", 12)
    for one in runs.values():
        assert len(one["losses"]) == 3 and len(one["all_seconds"]) == 2
        assert one["peak_bytes"] > 1 << 30, "weights, gradients and two moments"
    pairs = list(zip(runs["original"]["losses"], runs["patched"]["losses"], strict=True))
    assert runs["original"]["losses"][2] < runs["original"]["losses"][0], "of the same tokens"
    assert max(abs(a - b) for a, b in pairs) == result["largest_difference"] < 1e-4
    assert "linear_cross_entropy" in {s["op"] for s in runs["patched"]["report"]["swaps"]}
    assert (tmp_path / "outputs" / "train_lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nothing.txt"], "argument --text: expected a file, got 'nothing.txt'"),
        (["--learning-rate", "0"], "argument --learning-rate: expected more than 0, got 0.0"),
    ],
)
def test_it_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("train_lm.py", *arguments) == 2
    assert message in capsys.readouterr().err


def test_refusals_reach_the_shell(tmp_path: Path) -> None:
    done = run("train_lm.py", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --steps: expected at least 3, got 1" in done.stderr
