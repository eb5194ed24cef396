"""examples/ltx_video.py on a GPU: what a CPU does not have, graphs, launches and memory."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ltx_video() -> Iterator[ModuleType]:
    for package in ("imageio", "imageio_ffmpeg", "PIL"):
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("ltx_video")
        for name in ("ltx_video", "_common", "_pictures"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def result(ltx_video: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("example")
    ltx_video.main(["--random-weights", "small", "--height", "64", "--width", "96",
                    "--num-frames", "9", "--steps", "4", "--cuda-graphs", "--difference",
                    "--profile", str(folder), "--output", str(folder / "v.mp4")])  # fmt: skip
    return json.loads((folder / "v_compare.json").read_text(encoding="utf-8"))


def test_pixels_are_the_hosts_own(ltx_video: ModuleType) -> None:
    """Those of one call are not where the next one's go, and are the CPU's."""
    to_pixels = importlib.import_module("_pictures").to_pixels
    first, second = torch.rand(2, 1, 5, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    pixels = [to_pixels(frames.cuda()) for frames in (first, second)]
    for got, frames in zip(pixels, (first, second), strict=True):
        assert (got == to_pixels(frames)).all()


def test_variants(result: Any) -> None:
    *variants, yardstick = result["runs"]
    assert variants == ["eager", "kernels", "kernels + graphs"]
    assert yardstick.startswith("eager, _native_")
    for row in result["runs"].values():
        assert row["peak_memory_gib"] > 0
        assert row["seconds"] == pytest.approx(
            row["prepare_seconds"] + row["denoise_seconds"] + row["decode_seconds"], rel=0.05
        )


def test_a_step_is_one_launch_with_graphs(result: Any) -> None:
    eager, kernels, graphs = (
        result["runs"][name] for name in ("eager", "kernels", "kernels + graphs")
    )
    assert kernels["launches_per_step"] < eager["launches_per_step"] / 2
    # one graph; around it the copies of its inputs and output, guidance and the scheduler
    assert graphs["launches_per_step"] < 60 < kernels["launches_per_step"]
    assert graphs["kernels_per_step"] > graphs["launches_per_step"], "those in the graph count"
    assert graphs["report"]["notes"] == []


def test_differences_are_of_rounding(result: Any) -> None:
    runs = dict(result["runs"])
    del runs["eager"]
    for row in runs.values():
        assert 0 < row["latents_relative_difference"] < 0.05  # bf16 through 4 steps


def test_profile_has_kernels(result: Any) -> None:
    texts = [Path(f).read_text(encoding="utf-8") for f in result["files"] if f.endswith(".txt")]
    assert len(texts) == 4
    for text in texts:
        assert " launches by the host, " in text
        decoding = text.partition(", decoding: ")[2]  # which kernels there are is cuDNN's choice
        assert len(re.findall(r"^ +[\d.]+ +[\d.]+% +\d+ ", decoding, re.MULTILINE)) > 5
