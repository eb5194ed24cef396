"""The examples as a user runs them: as programs, on a CPU, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import EXAMPLES, parse, run, run_json

pytestmark = pytest.mark.slow


#: The example, but for how many tokens are timed at least: 64 of them take most of its time.
FEWER = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import llm_generate
llm_generate.leave_out_unused()
llm_generate.MEASURED_TOKENS = 16
llm_generate.main()
"""


def test_chat_compared(tmp_path: Path) -> None:
    """test_chat_streamed runs the example as it is."""
    program = tmp_path / "fewer.py"
    program.write_text(FEWER)
    question = ("--prompt", "What is the capital of France?", "--max-new-tokens", "12")
    result = run_json(str(program), *question, "--compare", "--turns", "3", cwd=tmp_path)
    runs = result["runs"]
    assert "Paris" in runs["original"]["answer"]
    assert runs["patched"]["tokens"] == runs["original"]["tokens"]
    assert result["identical"] is True
    assert result["dtype"] == "float32"
    for timing in runs.values():
        assert 0 < len(timing["tokens"]) <= 12
        assert timing["measured_tokens"] == 16, "a short answer is no measurement"
        assert len(timing["all_seconds"]) == 3
        assert timing["seconds"] == sorted(timing["all_seconds"])[1]
        assert timing["tokens_per_second"] == pytest.approx(16 / timing["seconds"])
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


@pytest.mark.exhaustive
def test_chat_of_several_texts_that_are_drawn(tmp_path: Path) -> None:
    texts = ("--max-new-tokens", "8", "--batch-size", "3", "--sample", "--output", "a/chat.png")
    result = run_json("llm_generate.py", *texts, "--compare", "--turns", "1", cwd=tmp_path)
    assert result["identical"] is True and result["sampled"] is True
    runs = result["runs"]
    assert all(len(r["tokens"]) % 3 == 0 and len(r["ms_a_token"]) == 63 for r in runs.values())
    for timing in runs.values():
        whole = timing["first_token_seconds"] + sum(timing["ms_a_token"]) / 1e3
        assert whole == pytest.approx(timing["seconds"], rel=0.5)
    assert (tmp_path / "a" / "chat.png").stat().st_size > 10_000


@pytest.mark.exhaustive  # torch.compile takes a minute
def test_chat_in_three_ways(tmp_path: Path) -> None:
    ways = ("--compare", "--compile", "--output", "chat.png")
    result = run_json(
        "llm_generate.py", "--max-new-tokens", "8", *ways, "--turns", "1", cwd=tmp_path
    )
    assert list(result["runs"]) == ["original", "compiled", "patched"]
    assert result["identical"] is True and result["speed_up_over_compiled"] > 0
    assert len({tuple(r["tokens"]) for r in result["runs"].values()}) == 1
    assert (tmp_path / "chat.png").stat().st_size > 10_000


def test_chat_streamed(tmp_path: Path) -> None:
    done = run("llm_generate.py", "--max-new-tokens", "6", "--stream", "--turns", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is" in done.stdout and "first token, ms" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream", "--batch-size", "2"], "argument --stream: expected --batch-size 1"),
        (["--output", "a.png"], "argument --output: shows what --compare measures"),
        (["--batch-size", "0"], "argument --batch-size: expected at least 1, got 0"),
        (["--compile"], "argument --compile: is one of the ways that --compare measures"),
    ],
)
def test_chat_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """test_chat_refuses_an_empty_prompt asks the program itself."""
    assert parse("llm_generate.py", *arguments) == 2
    assert message in capsys.readouterr().err


def test_chat_with_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = run("llm_generate.py", "--model", "./nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: " in done.stderr and "Traceback" not in done.stderr
