"""examples/quickstart.ipynb runs from top to bottom in a fresh kernel and shows its results."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import EXAMPLES, ROOT

nbformat = pytest.importorskip("nbformat", reason="requirements/docs.txt is not installed")
nbclient = pytest.importorskip("nbclient", reason="requirements/docs.txt is not installed")
pytest.importorskip("ipykernel", reason="requirements/docs.txt is not installed")

FILE = EXAMPLES / "quickstart.ipynb"
pytestmark = pytest.mark.slow


def outputs(cell: Any, kind: str) -> str:
    """What a cell shows of one MIME type; "text" is what it prints."""
    found = [o.get("data", {}).get(kind, "") if kind != "text" else o.get("text", "")
             for o in cell.outputs]  # fmt: skip
    return "".join(found)


def test_the_notebook_shows_the_report_the_video_and_the_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    by_start = {c.source.partition("\n")[0]: c for c in notebook.cells if c.cell_type == "code"}
    plan = outputs(by_start["hfpatch.plan(pipe)"], "text/html")
    report = outputs(by_start["report = hfpatch.apply(pipe)"], "text/html")
    assert "to swap" in plan and "LTXPipeline" in report and "<table" in report
    assert "LTXVideoTransformerBlock" in report
    video = by_start["import base64"]
    coded = re.search(r"data:video/mp4;base64,([\w+/=]+)", outputs(video, "text/html"))
    assert coded is not None and b"ftyp" in base64.b64decode(coded[1])[:16]
    difference = re.search(r"pixel: (\d+) of 255", outputs(video, "text"))
    assert difference is not None and int(difference[1]) <= 2
    assert outputs(by_start["report.plot();"], "image/png")


def test_the_committed_notebook_holds_no_outputs() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
