"""Kernel packages for the tests, and what makes this process look like a new one."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import kernels.importer

from hfpatch.hub.load import forget_packages
from hfpatch.proof.proofs import forget_proofs

_ids = itertools.count()


def fresh() -> None:
    """As a new process would start: nothing loaded, proven or connected."""
    huggingface_hub.close_session()
    kernels.importer._loaded_kernels.clear()
    forget_packages()
    forget_proofs()


SILU = """
import torch

def silu(x):
    return torch.nn.functional.silu(x)

__all__ = ["silu"]
"""


def package(
    source: str = SILU, variant: str = "torch-cpu", digest: bool = True, name: str = "toy",
    more: dict[str, str] | None = None, **metadata: Any,
) -> dict[str, bytes]:  # fmt: skip
    """The files of a kernel package in Python, as a kernel builder lays them out."""
    files = {"__init__.py": source.encode()}
    files |= {path: text.encode() for path, text in (more or {}).items()}
    data = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{next(_ids)}",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        **metadata,
    }
    if digest:
        hashes = {
            p: base64.b64encode(hashlib.sha256(d).digest()).decode() for p, d in files.items()
        }
        data["digest"] = {"algorithm": "sha256", "files": hashes}
    files["metadata.json"] = json.dumps(data).encode()
    return {f"build/{variant}/{path}": content for path, content in files.items()}


def build_files(folder: Path) -> dict[str, bytes]:
    """The files of a built package (`hfpatch/_kernels`), as they are uploaded."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted((folder / "build").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and "-cpu-" in str(path)
    }
