"""The sources in `build.toml`: what lies in `kernel_src/`. kernel-builder wants each file named."""

from __future__ import annotations

from pathlib import Path

from header import ROOT, Header
from section import between

BUILD = ROOT / "build.toml"
KERNELS = ROOT / "kernel_src"
_SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
_START = "# Sources of {}: written by `python bindings/generate`.\n"
_END = "# End of the sources.\n"


def build_toml(header: Header) -> str:
    """`build.toml` with the files of both backends.

    One CUDA build serves the tensors of an offloaded model as well, so the CPU's are in it too.
    """
    text = BUILD.read_text(encoding="utf-8")
    for backend, folders in (("cpu", (".", "cpu")), ("cuda", (".", "cpu", "cuda"))):
        text = between(BUILD.name, text, _START.format(backend), _END, _listed(_files(*folders)))
    return text


def _files(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((KERNELS / folder).iterdir())
        if path.suffix in _SUFFIXES
    ]


def _listed(files: list[Path]) -> str:
    names = [f'  "{path.relative_to(ROOT).as_posix()}",\n' for path in files]
    return "src = [\n" + "".join(names) + "]\n"
