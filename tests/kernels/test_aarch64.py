"""The CPU kernels of aarch64: every op of the header, by the C interface's own tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import c_api
import emulated
import pytest
import run_emulated


@pytest.mark.slow
@pytest.mark.timeout(1500)  # on a machine with other work; alone it is about a minute
def test_every_op_on_aarch64() -> None:
    """Shapes, dtypes, strides, rounding points and errors, against fp64; in one process, so that an
    op that no test calls is seen."""
    if missing := emulated.missing():
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, str(Path(run_emulated.__file__)), "--quick"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["never_called"] == []
    assert found["passed"] >= 5 * len(c_api.CALLS)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert emulated.missing() == (
        "no aarch64-linux-gnu-g++ and no qemu-aarch64-static: "
        "apt-get install g++-aarch64-linux-gnu qemu-user-static"
    )
