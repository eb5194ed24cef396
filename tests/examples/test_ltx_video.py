"""examples/ltx_video.py with every flag that a CPU has, on the small model with random weights."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from PIL import Image
from programs import EXAMPLES, run

SMALL = ("--random-weights", "small", "--device", "cpu", "--height", "64", "--width", "96",
         "--num-frames", "9", "--steps", "3")  # fmt: skip

pytestmark = pytest.mark.slow


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


ALL = ("eager", "compile", "kernels", "kernels + compile", "eager, _native_math")
NAMES = ["v.mp4", "v_1.mp4", "v_eager.mp4", "v_eager_1.mp4", "v_difference.png", "v_compare.png",
         "v_compare.json"]  # fmt: skip


@pytest.fixture(scope="module")
def ltx_video() -> Iterator[ModuleType]:
    """examples/ltx_video.py in this process: no fresh interpreter for each test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("ltx_video")


def active_backend() -> str:
    return str(_AttentionBackendRegistry.get_active_backend()[0].value)


class Compiler:
    """Stands in for inductor, which takes a minute: what the flag compiles needs no C++. What it
    has compiled shows in a profile."""

    seconds = 0.3
    region = "compiled region"

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        time.sleep(self.seconds)

        def run(*inputs: Any) -> Any:
            with torch.profiler.record_function(self.region):
                return graph(*inputs)

        return run


@dataclass
class Compared:
    """What one run of everything that a CPU has left behind."""

    folder: Path
    said: str
    result: dict[str, Any]
    attention: str  # diffusers' default, afterwards
    graphs: int  # that were compiled


@pytest.fixture(scope="module")
def compared(ltx_video: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    folder = tmp_path_factory.mktemp("compared") / "new"
    compiler = Compiler()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            LTXVideoTransformer3DModel,
            "compile",
            lambda self, **options: torch.nn.Module.compile(self, backend=compiler, **options),
        )
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            ltx_video.main([*SMALL, "--batch-size", "2", "--compare", "--compile", "--difference",
                            "--repeats", "3", "--profile", str(folder / "profile"),
                            "--output", str(folder / "v.mp4")])  # fmt: skip
    result = json.loads((folder / "v_compare.json").read_text(encoding="utf-8"))
    return Compared(folder, said.getvalue(), result, active_backend(), compiler.graphs)


def test_video_compared(compared: Compared) -> None:
    result = compared.result
    settings = {"batch_size": 2, "num_frames": 9, "height": 64, "width": 96, "steps": 3,
                "repeats": 3, "dtype": "float32", "weights": "random (small)",
                "attention_backend": None}  # fmt: skip
    assert {k: result[k] for k in settings} == settings
    runs = result["runs"]
    assert tuple(runs) == ALL
    eager = runs["eager"]
    for name, row in runs.items():
        parts = [row[f"{part}_seconds"] for part in ("prepare", "denoise", "decode")]
        assert min(parts) > 0
        assert row["seconds"] == pytest.approx(sum(parts), rel=0.05)
        assert len(row["step_seconds"]) == 3
        assert row["denoise_seconds"] == pytest.approx(sum(row["step_seconds"]))
        assert row["iterations_per_second"] == pytest.approx(3 / row["denoise_seconds"])
        assert row["step_ms"] == pytest.approx(statistics.median(row["step_seconds"][1:]) * 1e3)
        assert row["peak_memory_gib"] is None and row["launches_per_step"] is None
        assert ("report" in row) == name.startswith("kernels")
        if name != "eager":
            assert row["speed_up"] == pytest.approx(eager["seconds"] / row["seconds"])
            assert row["step_speed_up"] == pytest.approx(eager["step_ms"] / row["step_ms"])
            # fp32 through 3 steps and the decoder: one rounding to 8 bits apart at most
            assert row["max_pixel_difference"] <= 1
            assert row["latents_relative_difference"] < 1e-5
    assert runs["kernels"]["report"]["swaps"]
    for other in ("kernels", "eager, _native_math"):
        assert runs[other]["latents_relative_difference"] > 0, "0: nothing ran differently"
    assert runs["kernels"]["operators_per_step"] < eager["operators_per_step"]
    assert runs["eager, _native_math"]["operators_per_step"] == eager["operators_per_step"]
    assert compared.graphs == 2, "each variant compiles the model once, as one graph"
    for name in ("compile", "kernels + compile"):
        assert runs[name]["first_step_seconds"] > Compiler.seconds, "the compiler's time is in it"
    assert result["speed_up"] == runs["kernels"]["speed_up"]


def test_video_comparison_leaves_the_files_that_it_names(compared: Compared) -> None:
    files = [Path(f) for f in compared.result["files"]]
    assert all(file.stat().st_size for file in files)
    assert [f.name for f in files[: len(NAMES)]] == NAMES
    videos = [decode(compared.folder / name) for name in NAMES[:4]]
    assert all(v.shape == (9, 64, 96, 3) for v in videos)
    assert all(v.std() > 5 for v in videos), "a blank video shows nothing"
    assert np.abs(videos[0].astype(int) - videos[1]).mean() > 5, "the batch is two videos"
    with Image.open(compared.folder / "v_difference.png") as picture:  # 4 times enlarged
        assert picture.size == (3 * 4 * 96 + 2 * 4, 4 * (4 * 64 + 28) + 3 * 4)
    with Image.open(compared.folder / "v_compare.png") as chart:
        assert chart.size == (1200, round((1.5 + 0.45 * 5) * 120))
        colors = chart.convert("RGB").getcolors(maxcolors=10**6)
        assert len(colors) > 50, "an empty chart has few colors"


def test_video_comparison_is_one_table(compared: Compared) -> None:
    lines = compared.said.splitlines()
    (head,) = (n for n, row in enumerate(lines) if " × step " in row)
    rows = lines[head + 2 : head + 2 + len(ALL)]
    runs = compared.result["runs"]
    for line, (name, row) in zip(rows, runs.items(), strict=True):
        cells = line.removeprefix(f" {name} ").split()
        assert cells[0] == f"{row['seconds']:.2f}"
        assert str(row["operators_per_step"]) in cells
    assert f"{runs['kernels']['latents_relative_difference']:.1e}" in rows[2]
    assert "relative difference from eager: kernels " in compared.said
    assert compared.attention == "native", "what --difference set is taken back"


def test_video_profiles(compared: Compared) -> None:
    folder = compared.folder / "profile"
    stems = ("eager", "compile", "kernels", "kernels+compile", "eager-_native_math")
    assert {f.name for f in folder.iterdir()} == {
        f"{stem}.{ending}" for stem in stems for ending in ("step.json", "decode.json", "txt")
    }
    for stem, row in zip(stems, compared.result["runs"].values(), strict=True):
        text = (folder / f"{stem}.txt").read_text(encoding="utf-8")
        assert f"one denoising step: {row['operators_per_step']} operators" in text
        step, decoding = text.split(", decoding: ")
        assert "aten::addmm" in step
        assert "conv3d" in decoding
        assert ("hfpatch::" in step) == (stem == "kernels"), "compiled, the original runs"
        trace = json.loads((folder / f"{stem}.step.json").read_text(encoding="utf-8"))
        names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
        assert names.count("aten::addmm") == 47, "4 blocks of 10 linears, 7 around: one step"
        regions = [e for e in trace["traceEvents"] if e["name"] == Compiler.region]
        assert len(regions) == ("compile" in stem), "the step is one compiled graph"


@pytest.mark.parametrize(
    ("name", "is_launch"),
    [
        ("cudaLaunchKernel", True),
        ("cudaLaunchKernelExC", True),
        ("cuLaunchKernelEx", True),  # Triton's and cuDNN's
        ("cudaGraphLaunch", True),
        ("cudaMemcpyAsync", True),
        ("cudaMemsetAsync", True),
        ("cudaStreamSynchronize", False),
        ("cudaFuncSetAttribute", False),
        ("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", False),
    ],
)
def test_what_counts_as_a_launch(ltx_video: ModuleType, name: str, is_launch: bool) -> None:
    del ltx_video  # examples/ is on the path
    profiles = importlib.import_module("_ltx_profile")
    assert bool(profiles._LAUNCH.match(name)) == is_launch


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void hfp::cuda::(anonymous namespace)::k<float, 8>(hfp::cuda::P)", "hfp::cuda::k"),
        ("void at::native::elementwise_kernel<128, 2>(int)", "at::native::elementwise_kernel"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",) * 2,
    ],
)
def test_names_in_a_profile(ltx_video: ModuleType, name: str, short: str) -> None:
    del ltx_video
    assert importlib.import_module("_ltx_profile")._short(name) == short


def test_video_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("ltx_video.py", *SMALL, "--output", "file/v.mp4", cwd=tmp_path)
    assert done.returncode == 1
    assert "`--output`: the folder `file` cannot be made" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_video_with_another_attention_backend(
    ltx_video: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
    with contextlib.redirect_stdout(io.StringIO()):
        ltx_video.main([*SMALL, "--steps", "2", "--attention-backend", "_Native_Math",
                        "--difference", "native", "--profile", str(tmp_path / "p"),
                        "--output", str(tmp_path / "v.mp4")])  # fmt: skip
    result = json.loads((tmp_path / "v_compare.json").read_text(encoding="utf-8"))
    assert result["attention_backend"] == "_native_math"
    assert list(result["runs"]) == ["eager", "kernels", "eager, native"]
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    for stem, expected in (("eager", False), ("kernels", False), ("eager-native", True)):
        assert (fused in (tmp_path / "p" / f"{stem}.txt").read_text()) == expected, stem


def test_video_without_matplotlib(
    ltx_video: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ltx_video.main([*SMALL, "--steps", "2", "--warmup-iterations", "0", "--compare", "--json",
                    "--output", str(tmp_path / "v.mp4")])  # fmt: skip
    stdout, stderr = capsys.readouterr()
    result = json.loads(stdout)
    assert "no bar chart: matplotlib is not installed; run `pip install" in stderr
    assert not (tmp_path / "v_compare.png").exists()
    assert result == json.loads((tmp_path / "v_compare.json").read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_video_original_alone(tmp_path: Path) -> None:
    done = run("ltx_video.py", *SMALL, "--no-optimized-kernels", "--warmup-iterations", "0",
               "--dtype", "bfloat16", "--guidance-scale", "1", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bfloat16" in done.stdout
    assert "96 x 64" in done.stdout
    assert "it/s" in done.stdout
    assert "swapped" not in done.stdout
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
        (["--difference", "--no-optimized-kernels"], "drop --no-optimized-kernels"),
        (
            ["--device", "cpu", "--cuda-graphs"],
            "argument --cuda-graphs: needs a GPU, the device is cpu",
        ),
        (["--profile", __file__], "test_ltx_video.py' is a file, not a folder"),
        (
            ["--attention-backend", "flashy"],
            "argument --attention-backend: 'flashy' cannot be used on cpu: diffusers knows no such "
            "one; these can: _native_math, ",
        ),
        (["--attention-backend", "_native_flash"], "`attn_mask` is not supported"),
        (["--attention-backend", "flashy"], "from the Kernel Hub: _flash_3_hub, "),
        (["--difference", "native"], "argument --difference: 'native' is what eager runs with"),
        (["--repeats", "0"], "argument --repeats: expected at least 1, got 0"),
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
    near, far = original.copy(), original.copy()
    far[1, 2, 10, 20] = 105  # one pixel of one frame of the second video, 5 levels
    far[0, 0, 30, 40] = 98
    near[1, 2, 50, 60] = 99
    difference = pictures.pixel_difference(original, far)
    assert difference.max_pixel_difference == 5
    assert difference.mean_pixel_difference == pytest.approx((5 * 3 + 2 * 3) / original.size)

    videos = {"near": near, "far": far}
    file = pictures.save_differences(original, videos, tmp_path / "c.png")
    picture = np.asarray(Image.open(file))
    row = 4 * 64 + pictures.CAPTION_HEIGHT + pictures.GAP
    for i, ((y, x), level) in enumerate({(50, 60): 51, (10, 20): 255}.items()):
        panels = picture[i * row + pictures.CAPTION_HEIGHT :: 4][:64]
        right = panels[:, 2 * (4 * 96 + pictures.GAP) :: 4]
        assert right.shape == (64, 96, 3)
        assert (right[y, x] == level).all(), "5 levels at full brightness, 1 level at a fifth"
        assert right.sum() == 3 * level, "and nothing else: the other video's pixel is not in it"


def test_pixels_round_and_clip(pictures: ModuleType) -> None:
    levels = torch.tensor([-0.1, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.2])
    frames = torch.stack([levels, levels.flip(0), levels], -2)[
        None, None, :, None
    ]  # [1, 1, 3, 1, 6]
    pixels = pictures.to_pixels(frames)
    assert (pixels.shape, pixels.dtype) == ((1, 1, 1, 6, 3), np.uint8)
    assert pixels[..., 0].ravel().tolist() == [0, 0, 0, 1, 255, 255]
    assert pixels[..., 1].ravel().tolist() == [255, 255, 1, 0, 0, 0]
    assert frames.min() < 0, "the frames stay as they were"


def test_pixels_are_those_of_diffusers_own_arrays(pictures: ModuleType) -> None:
    from diffusers.video_processor import VideoProcessor

    video = torch.randn(2, 3, 4, 8, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors, arrays = (
        VideoProcessor(8).postprocess_video(video, output_type=kind) for kind in ("pt", "np")
    )
    expected = np.rint(arrays * 255).astype(np.uint8)
    assert (pictures.to_pixels(tensors) == expected).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_variants_take_turns(
    ltx_video: ModuleType, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Not where one is compiled: it would be again at each turn."""
    order: list[tuple[str, int]] = []

    def measure(pipe: Any, args: Any, variant: Any, repeats: int, *rest: Any) -> Any:
        order.append((variant.name, repeats))
        return SimpleNamespace(variant=variant)

    def once_more(pipe: Any, args: Any, measured: Any) -> Any:
        order.append((measured.variant.name, 1))
        return measured

    monkeypatch.setattr(ltx_video, "measure", measure)
    monkeypatch.setattr(ltx_video, "once_more", once_more)
    variants = [ltx_video.EAGER, ltx_video.Variant(kernels=True, compiled=compiled)]
    names = [variant.name for variant in variants]
    args = SimpleNamespace(repeats=3)
    ltx_video.measure_all(None, args, variants, SimpleNamespace(say=print), [])
    if compiled:
        assert order == [(name, 3) for name in names]
    else:
        assert order == [(name, 1) for name in names * 3]
