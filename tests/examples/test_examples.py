"""The examples as a user runs them: as programs, on a CPU, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import EXAMPLES, run, run_json

pytestmark = pytest.mark.slow


def test_chat_compared(tmp_path: Path) -> None:
    result = run_json("llm_generate.py", "--prompt", "What is the capital of France?",
                      "--max-new-tokens", "12", "--compare", cwd=tmp_path)  # fmt: skip
    runs = result["runs"]
    assert "Paris" in runs["original"]["answer"]
    assert runs["patched"]["tokens"] == runs["original"]["tokens"]
    assert result["identical"] is True
    assert result["dtype"] == "float32"
    for timing in runs.values():
        assert 0 < len(timing["tokens"]) <= 12
        assert timing["measured_tokens"] == 64, "a short answer is no measurement"
        assert len(timing["all_seconds"]) == 5
        assert timing["seconds"] == sorted(timing["all_seconds"])[2]
        assert timing["tokens_per_second"] == pytest.approx(64 / timing["seconds"])
    medians = [runs[label]["seconds"] for label in ("original", "patched")]
    assert result["speed_up"] == pytest.approx(medians[0] / medians[1])
    assert isinstance(result["within_noise"], bool)
    classes = {s["class_name"] for s in result["report"]["swaps"]}
    assert classes == {"LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm"}


def test_chat_refuses_an_empty_prompt(tmp_path: Path) -> None:
    done = run("llm_generate.py", "--prompt", " ", cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --prompt: expected some text" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "argument --rows: expected at least 1, got 0"),
        (["--compare"], "unrecognized arguments: --compare"),  # it has no such way
    ],
)
def test_hub_kernels_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run("hub_kernels.py", "run", "org/name@v1", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("script", ["transformers_minimal.py", "diffusers_minimal.py"])
def test_minimal(script: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= 30, "short enough to paste"
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " swapped, " in done.stdout
    difference = float(done.stdout.partition("largest difference: ")[2].split()[0])
    assert 0 < difference < 1e-5, "0 would mean that nothing ran differently"
    assert "restored, bit for bit: True" in done.stdout


def test_triton_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run("triton_kernels.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 swapped" in done.stdout and "example-kernel" in done.stdout
    assert float(done.stdout.partition("largest difference: ")[2].split()[0]) < 1e-5
    assert "restored, bit for bit: True" in done.stdout


def test_triton_kernels_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = run("triton_kernels.py", cwd=tmp_path)
    assert done.returncode == 1 and "Triton is not installed" in done.stderr
