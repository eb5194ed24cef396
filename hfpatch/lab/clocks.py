"""The GPU's clocks: left alone, unless they shall be held for the length of a measurement."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from hfpatch.lab.problems import ToolMissing


@contextmanager
def locked(wanted: bool) -> Iterator[int | None]:
    """Hold the first GPU at the highest clock that it keeps, and give it back whatever happens.

    Yields:
        MHz; None where nothing was asked.

    Raises:
        ToolMissing: `nvidia-smi` is not here, or this user may not hold clocks.
    """
    if not wanted:
        yield None
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise ToolMissing("--lock-clocks: no `nvidia-smi` on PATH; install the driver's tools")
    said = _run(tool, "--query-gpu=clocks.default_applications.graphics", "--format=csv,noheader")
    found = re.search(r"(\d+) MHz", said)
    if found is None:
        said = _run(tool, "--query-gpu=clocks.max.graphics", "--format=csv,noheader")
        found = re.search(r"(\d+) MHz", said)
    if found is None:
        raise ToolMissing(f"--lock-clocks: `nvidia-smi` says no clock: {said.strip()[:200]}")
    clock = int(found[1])
    try:
        answer = _run(tool, "-i", "0", f"--lock-gpu-clocks={clock},{clock}")
        if "not" in answer.lower() and "locked" not in answer.lower():
            raise ToolMissing(
                f"--lock-clocks: {answer.strip()[:200]}; it takes the rights of an administrator: "
                "leave it out, versions are measured in turns"
            )
        yield clock
    finally:
        _run(tool, "-i", "0", "--reset-gpu-clocks")


def _run(tool: str, *words: str) -> str:
    done = subprocess.run(
        [tool, *words], capture_output=True, text=True, errors="replace", timeout=60
    )
    return done.stdout + done.stderr


def current() -> dict[str, str]:
    """Clocks of the first GPU now, by name; empty where they cannot be read."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm")
    said = _run(tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    cells = [c.strip() for c in said.splitlines()[0].split(",")] if said.strip() else []
    return dict(zip(names, cells, strict=False)) if len(cells) == len(names) else {}
