"""Liger's package beside hfpatch, by `use_liger_kernel=True`: Liger's loss wins, and is said."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
FORWARD = "liger_kernel.transformers.model.llama.lce_forward"


def run(when: str, folder: Path) -> dict[str, Any]:
    own = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "liger_run.py"), when, str(folder)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_with_ligers_own_loss(tmp_path: Path) -> None:
    for name in ("liger_kernel", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    theirs = run("never", tmp_path)
    for when in ("before", "behind"):
        ours = run(when, tmp_path)
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
        for name, weights in theirs["weights"].items():
            own = torch.tensor(ours["weights"][name])
            torch.testing.assert_close(own, torch.tensor(weights), atol=2e-5, rtol=1e-3)
        said = "status" if when == "before" else "report"
        assert any(FORWARD in note and "head's weight itself" in note for note in ours[said])
        warned = [w for w in ours["warned"] if "the head's weight" in w]
        assert len(warned) == (1 if when == "before" else 0)
        assert ours["forward"] == theirs["forward"] == FORWARD.rpartition(".")[0]
