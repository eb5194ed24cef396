"""The examples as a user runs them: as programs, on a CPU, without a network."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("--random-weights", "small", "--device", "cpu", "--height", "64", "--width", "96",
         "--num-frames", "9", "--steps", "3")  # fmt: skip

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The finished example, run in `cwd` against this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_json(script: str, *arguments: str, cwd: Path) -> Any:
    """What the example printed under --json; nothing else may be on stdout."""
    done = run(script, *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def decode(file: Path) -> np.ndarray:
    """[frames, height, width, 3]"""
    import imageio.v3 as imageio

    return imageio.imread(file, plugin="FFMPEG")


@pytest.fixture
def pictures() -> Iterator[ModuleType]:
    """examples/_pictures.py"""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("_pictures")
    finally:
        sys.path.remove(str(EXAMPLES))


# LTX-Video ---------------------------------------------------------------------------------------


def test_video_compared(tmp_path: Path) -> None:
    result = run_json("ltx_video.py", *SMALL, "--batch-size", "2", "--compare",
                      "--output", "new/v.mp4", cwd=tmp_path)  # fmt: skip
    settings = {"batch_size": 2, "num_frames": 9, "height": 64, "width": 96, "steps": 3,
                "dtype": "float32", "weights": "random (small)", "compiled": False}  # fmt: skip
    assert {k: result[k] for k in settings} == settings
    for timing in result["runs"].values():
        assert 0 < timing["denoise_seconds"] < timing["seconds"]
        assert timing["iterations_per_second"] == pytest.approx(3 / timing["denoise_seconds"])
    original, patched = result["runs"]["original"], result["runs"]["patched"]
    assert result["speed_up"] == pytest.approx(original["seconds"] / patched["seconds"])
    assert result["report"]["swaps"]
    # fp32 through 3 steps and the decoder: one rounding to 8 bits apart at most
    assert result["max_pixel_difference"] <= 1

    names = ["v.mp4", "v_1.mp4", "v_original.mp4", "v_original_1.mp4", "v_compare.png"]
    assert [Path(f).name for f in result["files"]] == names
    folder = tmp_path / "new"
    videos = [decode(folder / name) for name in names[:4]]
    assert all(v.shape == (9, 64, 96, 3) for v in videos)
    assert all(v.std() > 5 for v in videos), "a blank video shows nothing"
    assert np.abs(videos[0].astype(int) - videos[1]).mean() > 5, "the batch is two videos"
    with Image.open(folder / "v_compare.png") as picture:
        assert picture.size == (3 * 4 * 96 + 2 * 4, 4 * 64 + 28)  # 4 times enlarged


def test_video_original_alone(tmp_path: Path) -> None:
    done = run("ltx_video.py", *SMALL, "--no-optimized-kernels", "--warmup-iterations", "0",
               "--dtype", "bfloat16", "--guidance-scale", "1", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bfloat16" in done.stdout
    assert "96 x 64" in done.stdout
    assert "it/s" in done.stdout
    assert "patched" not in done.stdout
    assert "3/3" in done.stderr, "the progress bar"
    assert decode(tmp_path / "outputs" / "ltx_video.mp4").shape == (9, 64, 96, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-frames", "10"], "8 k + 1 frames, got 10; try 9 or 17"),
        (["--height", "100"], "argument --height: expected a multiple of 32, got 100; try 96"),
        (["--width", "16"], "argument --width: expected at least 32, got 16"),
        (["--steps", "1"], "argument --steps: expected at least 2, got 1"),
        (["--batch-size", "two"], "argument --batch-size: expected an integer, got 'two'"),
        (["--output", "film.avi"], "expected a name ending in .mp4, got 'film.avi'"),
        (["--compare", "--no-optimized-kernels"], "drop --no-optimized-kernels"),
        (["--device", "cuda"], "'cuda' is not there, PyTorch sees 0 GPUs; use --device cpu"),
        (["--device", "abacus"], "expected cpu, cuda or cuda:N, got 'abacus'"),
    ],
)
def test_video_refuses(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: argparse alone does not need a fresh interpreter each time."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("ltx_video").parse_arguments(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_video_refusals_reach_the_shell(tmp_path: Path) -> None:
    done = run("ltx_video.py", *SMALL, "--num-frames", "12", cwd=tmp_path)
    assert done.returncode == 2
    assert "try 9 or 17" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_video_says_what_to_do_without_the_weights(tmp_path: Path) -> None:
    done = run("ltx_video.py", "--model", "./nowhere", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "`--model ./nowhere` could not be loaded" in done.stderr
    assert "--random-weights" in done.stderr
    assert "Traceback" not in done.stderr


def test_picture_shows_the_worst_frame(pictures: ModuleType, tmp_path: Path) -> None:
    original = np.full((2, 3, 64, 96, 3), 100, np.uint8)
    patched = original.copy()
    patched[1, 2, 10, 20] = 105  # one pixel of one frame of the second video, 5 levels
    patched[0, 0, 30, 40] = 98
    difference = pictures.pixel_difference(original, patched)
    assert difference.max_pixel_difference == 5
    assert difference.mean_pixel_difference == pytest.approx((5 * 3 + 2 * 3) / original.size)

    file = pictures.save_comparison(original, patched, tmp_path / "c.png")
    panels = np.asarray(Image.open(file))[pictures.CAPTION_HEIGHT :: 4, :]
    right = panels[:, 2 * (4 * 96 + pictures.GAP) :: 4]
    assert right.shape == (64, 96, 3)
    assert (right[10, 20] == 255).all(), "5 levels amplified to full brightness"
    assert right.sum() == 3 * 255, "and nothing else: the other video's pixel is not in it"


def test_pixels_round_and_clip(pictures: ModuleType) -> None:
    frames = np.array([-0.1, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.2])
    assert pictures.to_pixels(frames).tolist() == [0, 0, 0, 1, 255, 255]


# Chat and the minimal examples -------------------------------------------------------------------


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
        speed = len(timing["tokens"]) / timing["seconds"]
        assert timing["tokens_per_second"] == pytest.approx(speed)
    assert {s["class_name"] for s in result["report"]["swaps"]} == {"LlamaMLP", "LlamaRMSNorm"}


def test_chat_refuses_an_empty_prompt(tmp_path: Path) -> None:
    done = run("llm_generate.py", "--prompt", " ", cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --prompt: expected some text" in done.stderr


@pytest.mark.parametrize("script", ["transformers_minimal.py", "diffusers_minimal.py"])
def test_minimal(script: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= 30, "short enough to paste"
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " swapped, " in done.stdout
    difference = float(done.stdout.partition("largest difference: ")[2].split()[0])
    assert 0 < difference < 1e-5, "0 would mean that nothing ran differently"
    assert "restored, bit for bit: True" in done.stdout
