"""Where the C interface of the kernels is declared."""

from __future__ import annotations

from pathlib import Path


def include_dir() -> Path:
    """The folder of ``hfpatch.h``, for a compiler's ``-I``.

    Raises:
        FileNotFoundError: this installation lacks the header.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "include", package.parent / "kernel_src"):
        if (folder / "hfpatch.h").is_file():
            return folder
    raise FileNotFoundError(
        f"`hfpatch.h` is neither in `{package / 'include'}` nor in the source tree; install "
        "hfpatch again"
    )
