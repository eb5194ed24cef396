"""A build in the Kernel Hub's layout: a directory ``build/<variant>/``."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .builder import Builder
from .commands import write

_OPS_PY = """\
from pathlib import Path

import torch

ops = torch.ops.{id}

# Another copy of this build may be loaded already; its operators are these.
if not hasattr(ops, "{probe}"):
    torch.ops.load_library(str(Path(__file__).parent / "{library}"))


def add_op_namespace_prefix(op_name):
    return "{id}::" + op_name
"""

_COMPAT_PY = """\
import importlib.util
import sys
from pathlib import Path

# Versions of `kernels` that look for the package inside the variant directory land here.
_path = Path(__file__).resolve().parent.parent / "__init__.py"
_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _path)
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
globals().update({{k: v for k, v in vars(sys.modules[_name]).items() if not k.startswith("__")}})
__all__ = sys.modules[_name].__all__
"""


def digest(variant: Path) -> dict[str, Any]:
    """The ``digest`` entry of ``metadata.json``: base64 SHA-256 of each file of ``variant``."""
    files = {}
    for path in sorted(variant.rglob("*")):
        name = path.relative_to(variant).as_posix()
        if not path.is_file() or path.suffix == ".pyc" or "__pycache__" in path.parts:
            continue
        if name in ("metadata.json", "metadata.json.sigstore"):
            continue
        files[name] = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    return {"algorithm": "sha256", "files": files}


def up_to_date(builder: Builder, variant: Path) -> bool:
    """Whether `variant` is what `builder` builds, undamaged."""
    try:
        metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and bool(
        metadata.get("id") == builder.id and metadata.get("digest") == digest(variant)
    )


def write_variant(builder: Builder, final: Path, objects: Sequence[Path]) -> None:
    """Links `objects` and puts the variant in the place of what is at `final`."""
    project = builder.project
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".tmp-") as temporary:
        root = Path(temporary) / builder.variant
        root.mkdir()
        library = f"{builder.id}.abi3.so"
        builder.link(objects, root / library)
        source = project.root / "torch-ext" / project.package
        for path in project.python_files():
            write(root / path.relative_to(source), path.read_text(encoding="utf-8"))
        names = {"id": builder.id, "library": library, "probe": project.first_op()}
        write(root / "_ops.py", _OPS_PY.format(**names))
        write(root / project.package / "__init__.py", _COMPAT_PY.format(**names))
        backend: dict[str, Any] = {"type": project.backend}
        if builder.archs:
            backend["archs"] = list(builder.archs)
        metadata = {
            "name": project.general["name"],
            "id": builder.id,
            "version": project.general["version"],
            "license": project.general["license"],
            "python-depends": project.depends("python-depends"),
            "backend": backend,
            "digest": digest(root),
        }
        metadata |= {k: project.general[k] for k in ("upstream", "source") if k in project.general}
        if kernel_depends := project.depends("kernel-depends"):
            metadata["kernel-depends"] = kernel_depends
        write(root / "metadata.json", json.dumps(metadata, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        os.replace(root, final)
