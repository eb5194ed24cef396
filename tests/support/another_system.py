"""A script: this process as one of macOS or Windows, as far as Python shows a program where it is.

    python tests/support/another_system.py win32 FOLDER

Modules and functions that are there on POSIX alone are taken away, then hfpatch is imported whole
and used as on such a machine: without compiled kernels. Prints JSON.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import os
import pkgutil
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "syslog", "posix"}
#: What `os` lacks on Windows.
POSIX_NAMES = (
    *("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "geteuid", "getgid"),
    *("getpgid", "getuid", "killpg", "lchown", "mkfifo", "openpty", "pread", "sched_getaffinity"),
    *("setsid", "sysconf", "uname", "wait4"),
)
NAMES = {"win32": ("Windows", "AMD64"), "darwin": ("Darwin", "arm64")}


class _NotHere:
    """A finder that finds no module of POSIX's."""

    def find_spec(self, name: str, *args: Any) -> None:
        if name in POSIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become(system: str) -> None:
    """Libraries are imported before, since theirs are made for the system that this really is."""
    import diffusers  # noqa: F401
    import huggingface_hub
    import kernels.variants  # noqa: F401
    import rich.console  # noqa: F401
    import transformers  # noqa: F401
    from transformers import TrainerCallback  # noqa: F401
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: F401

    assert huggingface_hub.HfApi
    sys.meta_path.insert(0, _NotHere())  # type: ignore[arg-type]
    for name in POSIX_MODULES:
        sys.modules.pop(name, None)
    name, machine = NAMES[system]
    sys.platform = system
    platform.system = lambda: name
    platform.machine = lambda: machine
    if system == "win32":
        for posix in POSIX_NAMES:
            if hasattr(os, posix):
                delattr(os, posix)


def imported() -> list[str]:
    """Modules of hfpatch that cannot be imported."""
    import hfpatch

    failed = []
    for module in pkgutil.walk_packages(hfpatch.__path__, "hfpatch."):
        if "_kernels" in module.name or ".templates" in module.name or "__main__" in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except Exception as e:
            failed.append(f"{module.name}: {type(e).__name__}: {e}")
    return failed


def used(folder: Path) -> dict[str, Any]:
    """What a user of such a machine sees."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    import hfpatch
    from hfpatch import cli, kernel_build
    from hfpatch.kernels import builds, sources

    sources.LOCAL_BUILD = folder / "_kernels"
    builds.beside = list
    os.environ["HFPATCH_STATE"] = str(folder / "state")
    model = torch.nn.Sequential(LlamaRMSNorm(64), torch.nn.GELU()).requires_grad_(False)
    x = torch.randn(3, 64)
    expected = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hfpatch.apply(model)
    report = hfpatch.apply(model, kernels="torch")
    near = torch.allclose(model(x), expected, atol=1e-5)
    restored = hfpatch.restore(model)
    planned = hfpatch.plan(model, device="cuda:9.0")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main(["env", "--json"])
    result = kernel_build.build_available(Path(__file__).parents[2], folder / "out", None, False)
    (folder / "a.bin").write_bytes(b"a\r\nb\x1a\n")
    from hfpatch.files import read_regular

    return {
        "sources": sorted({s.source for s in report.swaps}),
        "near": near,
        "restored": restored,
        "warned": [str(w.message) for w in caught if "hfpatch" in str(w.message)],
        "planned": [s.source for s in planned.swaps],
        "env": [status, json.loads(said.getvalue())["local build"]],
        "missing": result.missing,
        "failed": result.failed,
        "bytes": list(read_regular(folder / "a.bin", 100)),
    }


if __name__ == "__main__":
    become(sys.argv[1])
    opened: list[str] = []
    plain_open = builtins.open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, Path)) and str(file).startswith(("/dev/", "/proc/")):
            opened.append(str(file))
        return plain_open(file, *args, **kwargs)

    builtins.open = watched
    found = {"not imported": imported(), **used(Path(sys.argv[2])), "opened": opened}
    print(json.dumps(found))
