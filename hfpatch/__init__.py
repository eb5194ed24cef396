"""hfpatch: fast fused kernels in HuggingFace models, proven, reported and reversible."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from hfpatch.announce import set_verbosity
from hfpatch.apply import apply, plan, restore, status
from hfpatch.context import applied
from hfpatch.interface import include_dir
from hfpatch.progress import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from hfpatch.registry import register
from hfpatch.report import Report

if TYPE_CHECKING:
    from hfpatch import bench, callbacks, functional, layers, loss, optim
    from hfpatch.hub.options import HubOptions

__version__ = "0.1.0"
__all__ = [
    "HubOptions",
    "Report",
    "__version__",
    "applied",
    "apply",
    "are_progress_bars_disabled",
    "bench",
    "callbacks",
    "disable_progress_bars",
    "enable_progress_bars",
    "functional",
    "include_dir",
    "layers",
    "loss",
    "optim",
    "plan",
    "register",
    "restore",
    "set_verbosity",
    "status",
]

#: Imported when they are first asked for, so that `import hfpatch` stays light.
_MODULES = ("bench", "callbacks", "functional", "layers", "loss", "optim")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import_module(f"hfpatch.{name}")
    if name == "HubOptions":
        return _import_module("hfpatch.hub.options").HubOptions
    raise AttributeError(f"module 'hfpatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
