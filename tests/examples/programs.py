"""The examples run as programs, against this checkout, without a network."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The finished example, run in `cwd` against this checkout, by one thread: where other tests
    share the processors two wait for each other at every operator."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env={"OMP_NUM_THREADS": "1"}
        | os.environ
        | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )


def parse(script: str, *arguments: str) -> int:
    """The exit status of an example that refuses its arguments, in this process: argparse alone
    does not need a fresh interpreter each time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(Path(script).stem).parse_arguments(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def run_json(script: str, *arguments: str, cwd: Path) -> Any:
    """What the example printed under --json; nothing else may be on stdout."""
    done = run(script, *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
