"""Whether a result can be written, asked before what takes minutes to make it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def require_writable(path: Path) -> None:
    """Make the folder of a file that will be written, and see that the file can be.

    Nothing is written to the file itself.

    Raises:
        OSError: it cannot: it is a folder, may not be written, or its folder cannot be made or may
            not be written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder, expected a file's name")
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(f"the folder `{folder}` cannot be made: {e.strerror}") from e
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"`{path}` may not be written")
    try:
        # asked of the file system: a mount may be read-only, or full, whatever the mode says
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as e:
        raise OSError(f"nothing can be written to the folder `{folder}`: {e.strerror}") from e
