"""Commands that a build runs, and what it reads and writes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import KernelBuildError


def run(command: Sequence[str], cwd: Path | None = None, check: bool = True) -> str:
    """What the command says.

    Raises:
        KernelBuildError: it could not be started or, with `check`, it failed.
    """
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},  # what is looked for in it is English
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise KernelBuildError(f"`{command[0]}` could not be started: {error}") from error
    if check and done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-40:])
        raise KernelBuildError(
            f"`{Path(command[0]).name}` failed with status {done.returncode}\n"
            f"command: {shlex.join(command)}\n{tail}"
        )
    return done.stdout


def search(pattern: str, text: str) -> str | None:
    """The first group of `pattern`, where `text` has it."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else None


def write(path: Path, text: str) -> None:
    """Writes `text`; a file that has it already keeps its time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
