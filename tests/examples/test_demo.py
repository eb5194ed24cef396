"""examples/demo.py: what it shows on which machine, and its last sentence."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import EXAMPLES, run

from hfpatch.bench.spread import Gain

FASTER, NOISE = Gain(1.5, 1.4, 1.6, 5), Gain(1.02, 0.9, 1.1, 5)


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("demo")


class Shown:
    """Stands in for the two examples, which have tests of their own."""

    def __init__(self, demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.video: list[str] = []
        self.chat: list[str] = []
        monkeypatch.setattr(demo.ltx_video, "main", self._video)
        monkeypatch.setattr(demo.llm_generate, "main", self._chat)

    def _video(self, argv: list[str]) -> dict[str, Any]:
        self.video = argv
        runs = {"eager": {"all_seconds": [3.0, 3.1, 2.9]}, "kernels": {"all_seconds": [2.0] * 3}}
        return {"runs": runs}

    def _chat(self, argv: list[str]) -> dict[str, Any]:
        self.chat = argv
        return {"runs": {"original": {"all_seconds": [2.0] * 5},
                         "patched": {"all_seconds": [1.0] * 5}}}  # fmt: skip


def test_a_cpu_shows_a_chat_and_a_decoding(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(demo, monkeypatch)
    monkeypatch.setattr(demo, "has_weights", lambda: True)
    decode = demo.decode
    monkeypatch.setattr(demo, "decode", lambda device, dtype: decode(device, dtype, 2, frames=1))
    gains = demo.main(["--device", "cpu"])
    assert list(gains) == ["a chat", "a video's decoding"] and not shown.video
    assert shown.chat == ["--device", "cpu", "--dtype", "float32", "--compare"]
    text = capsys.readouterr().out
    assert "LTXVideoResnetBlock3d" in text, "the report of the VAE"
    assert "the videos differ by" in text and float(text.split("differ by ")[1].split()[0]) < 1e-4
    last = text.strip().splitlines()[-1]
    assert last.startswith("Gained on cpu (") and "a chat 2.00x (2.00 to 2.00)" in last
    assert "NVIDIA GPU" in last and last.endswith("says what yours gets.")


def test_a_gpu_shows_the_video(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(demo, monkeypatch)
    monkeypatch.setattr(demo, "has_weights", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(demo, "device_name", lambda device: "cuda (a GPU)")
    gains = demo.main(["--device", "cuda", "--output", "film.mp4"])
    assert list(gains) == ["a video"] and not shown.chat
    assert shown.video == ["--device", "cuda", "--dtype", "bfloat16", "--random-weights",
                           "--compare", "--repeats", "3", "--output", "film.mp4"]  # fmt: skip
    text = capsys.readouterr().out
    assert "no chat: `pip install" in text
    assert "Gained on cuda (a GPU): a video 1.50x (1.45 to 1.55); there" in text


@pytest.mark.parametrize(
    ("gains", "start"),
    [
        ({"a chat": FASTER}, "Gained on here: a chat 1.50x (1.40 to 1.60); there is"),
        ({"a chat": FASTER, "a video": NOISE},
         "Gained on here: a chat 1.50x (1.40 to 1.60), a video 1.02x, within noise (0.90 to 1.10)"),
        ({"a chat": NOISE}, "No gain was shown on here (a chat 1.02x, within noise"),
        ({}, "Nothing could be shown here; there is"),
    ],
)  # fmt: skip
def test_the_last_sentence_is_one_and_honest(
    demo: ModuleType, gains: dict[str, Gain], start: str
) -> None:
    said = demo.last_sentence(gains, "cpu", "here")
    assert said.startswith(start)
    assert said.endswith(".") and ". " not in said


def test_what_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").mkdir()
    done = run("ltx_video.py", "--random-weights", "--output", "a.mp4", cwd=tmp_path)
    assert done.returncode == 1 and "loading" not in done.stdout
    assert done.stderr == "error: `--output`: `a.mp4` is a folder, expected a file's name\n"


def test_bench_finds_it_too(tmp_path: Path) -> None:
    from hfpatch import cli

    (tmp_path / "file").write_text("")
    output = str(tmp_path / "file" / "ops.json")
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["bench", "ops", "--op", "silu", "--device", "cpu", "--output", output]))
    assert ended.value.code == 2


def test_a_read_only_file_and_a_full_folder(tmp_path: Path, monkeypatch: Any) -> None:
    from hfpatch.bench import output

    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"kept": True}))
    output.require_writable(kept)
    assert json.loads(kept.read_text()) == {"kept": True}, "it is not written to"
    output.require_writable(tmp_path / "new" / "deep" / "file.json")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    monkeypatch.setattr(output.os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="may not be written"):
        output.require_writable(kept)
    monkeypatch.undo()

    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match=r"nothing can be written to the folder .*No space left"):
        output.require_writable(kept)


def test_a_chart_has_no_legend_without_a_bar(demo: ModuleType, tmp_path: Path, monkeypatch: Any):  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    figure = importlib.import_module("matplotlib.figure").Figure
    show = importlib.import_module("_ltx_show")
    legends: list[list[str]] = []
    original = figure.legend
    monkeypatch.setattr(
        figure, "legend",
        lambda self, handles, labels, **k: (legends.append(labels),
                                            original(self, handles, labels, **k))[1],
    )  # fmt: skip
    run = {"seconds": 2.0, "prepare_seconds": 0.001, "denoise_seconds": 1.5,
           "decode_seconds": 0.5, "step_ms": 100.0}  # fmt: skip
    show.save_chart({"eager": run, "kernels": run}, "title", tmp_path / "a.png")
    show.save_chart({"eager": run | {"prepare_seconds": 0.1}}, "title", tmp_path / "b.png")
    assert legends == [["denoising", "decoding"], ["before", "denoising", "decoding"]]
