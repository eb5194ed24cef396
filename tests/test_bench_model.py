"""`hfpatch bench model`: every modality, what is compared, the gates, and docs/measuring.md."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import check_cases
import pytest
import torch
from test_docs import ROOT, blocks

from hfpatch import cli
from hfpatch.bench import ways

QUICK = ("--random-weights", "--iterations", "2", "--warmup", "1")


@pytest.fixture(autouse=True)
def _quick(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short turns: nothing here is about how fast something is."""
    monkeypatch.setattr(ways, "_TURN_SECONDS", 0.0)


def measured(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["bench", "model", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    found["by name"] = {row["way"]: row for row in found["ways"]}
    return found


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    sizes = ("--seq-len", "9", "--batch-size", "3")
    found = measured(capsys, folder, *QUICK, *sizes, "--ways", "patched,graphs")
    assert found["inputs"]["input_ids"] == [3, 9]
    assert (found["unit"], found["exact"]) == ("tokens", "fp64")
    eager, patched, graphs = (found["by name"][n] for n in ("eager", "patched", "graphs"))
    assert "need a GPU" in graphs["unavailable"] and "wall_ms" not in graphs
    assert patched["swapped"] > 0 and patched["apply_s"] > 0
    for row in (eager, patched):
        wall = row["wall_ms"]
        assert wall["least"] <= wall["median"] <= wall["most"] and wall["rounds"] == 2
        assert row["per second"] == pytest.approx(27e3 / wall["median"])
        assert 0 < row["from_exact"] < 1e-5
    assert eager["from_eager"] == 0 < patched["from_eager"] < 1e-5
    assert 0 < patched["launches"] < eager["launches"]
    assert patched["speed-up"] == pytest.approx(
        eager["wall_ms"]["median"] / patched["wall_ms"]["median"]
    )


def test_new_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    found = measured(capsys, folder, *QUICK, "--new-tokens", "4", "--dtype", "bfloat16")
    assert (found["unit"], found["exact"]) == ("new tokens", "fp32")
    row = found["by name"]["eager"]
    assert row["per second"] == pytest.approx(4e3 / row["wall_ms"]["median"])
    assert row["launches"] > 0 and "launches" not in found["by name"]["patched"]


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("siglip-vision", (), {"pixel_values": [1, 3, 32, 32]}),
        ("zoo-ltx-pipeline", ("--steps", "3", "--num-frames", "17"), {"num_frames": 17}),
    ],
)
def test_other_modalities(
    name: str,
    sizes: tuple[str, ...],
    shape: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = measured(capsys, str(check_cases.write(name, tmp_path)), *QUICK, *sizes)
    assert found["inputs"].items() >= shape.items()
    assert found["by name"]["patched"]["swapped"] > 0
    if "--steps" in sizes:
        row = found["by name"]["eager"]
        assert found["unit"] == "steps"
        assert row["per second"] == pytest.approx(3e3 / row["wall_ms"]["median"])


PIPELINES = {
    "sd": {"height": 32, "num_inference_steps": 3},
    "sdxl": {"height": 32, "num_inference_steps": 3},
    "flux": {"height": 32, "num_inference_steps": 3},
    "wan": {"height": 32, "num_inference_steps": 3, "num_frames": 5},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_whole_pipelines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """End to end, with the decoder of latents, and the picture is compared."""
    file = Path(__file__).with_name("small_pipelines.py")
    sizes = ["--height", "32", "--width", "32", "--steps", "3"]
    sizes += ["--num-frames", "5"] if "num_frames" in PIPELINES[name] else []
    found = measured(capsys, f"{file}:{name}", *QUICK[1:], *sizes)
    assert found["inputs"].items() >= PIPELINES[name].items()
    eager, patched = found["by name"]["eager"], found["by name"]["patched"]
    assert found["unit"] == "steps" and eager["per second"] > 0
    assert patched["swapped"] > 0 and 0 < patched["from_eager"] < 1e-4
    assert eager["launches"] > 100 < patched["launches"]
    assert found["exact"] == "fp64"
    assert 0 < patched["from_exact"] < 1e-4 and 0 < eager["from_exact"] < 1e-4


def test_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(check_cases.write("zoo-llama", tmp_path))
    gates = ("--min-speedup", "1000", "--max-launches", "1")
    found = measured(capsys, folder, *QUICK, *gates, status=1)
    assert [line.split()[0] for line in found["gates missed"]] == [gates[0], gates[2]]
    words = [folder, *QUICK, "--min-speedup", "0.001", "--max-launches", "9999"]
    assert measured(capsys, *words)["gates missed"] == []


def function_of(folder: Path, made: str) -> str:
    """FILE.py:function of one that returns this."""
    file = folder / "mine.py"
    file.write_text(f"import torch\n\n\ndef make():\n    torch.manual_seed(0)\n    return {made}\n")
    return f"{file}:make"


def test_a_function_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a way that computes something else gets no time."""
    made = "torch.nn.Linear(4, 4), {'input': torch.ones(2, 4)}"
    found = measured(capsys, function_of(tmp_path, made), "--iterations", "1")
    assert found["inputs"] == {"input": [2, 4]} and found["unit"] == "calls"
    row = ways.Measured("patched")
    good = [torch.ones(3)]
    ways._judge(row, [torch.full((3,), 1.1)], good, good, torch.float32)
    assert row.failed and "outputs are wrong" in row.problem
    row = ways.Measured("compile")
    ways._judge(row, [torch.tensor([1, 1, torch.nan])], good, [], torch.float32)
    assert row.failed and "NaN" in row.problem


def test_a_model_without_a_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dtype is that of its inputs."""
    made = "torch.nn.SiLU(), {'input': torch.ones(2, 4, dtype=torch.bfloat16)}"
    found = measured(capsys, function_of(tmp_path, made), "--iterations", "1")
    assert found["dtype"] == "bfloat16" and found["exact"] == "fp32"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compiled_ways_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder, picture = str(check_cases.write("zoo-llama", tmp_path)), tmp_path / "times.svg"
    options = ("--ways", "compile,blocks", "--plot", str(picture))
    found = measured(capsys, folder, *QUICK, *options)
    for name in ("compile", "blocks"):
        assert found["by name"][name]["from_eager"] < 1e-5
        assert found["by name"][name]["first_call_s"] > 0
    assert "<svg" in picture.read_text()


COMMANDS = [
    line
    for block in blocks(ROOT / "docs" / "measuring.md")
    if block.info == "sh"
    for line in block.code.splitlines()
    if line.startswith("hfpatch ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_page(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_cases.write("zoo-llama", tmp_path).rename(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    if "bench model" in line and "--json" not in line:
        shown = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
        head, rest = said.split("\n", 1)
        assert f"{head}\n" in shown
        labels = {row.split("  ")[0].strip() for row in rest.splitlines() if row[:1].isalpha()}
        for label in labels - {"tokens per s", "modules swapped", "from fp64", "of eager"}:
            assert label.split(":")[0].split(" [")[0] in shown, label
