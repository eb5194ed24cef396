"""Callbacks that apply hfpatch for a training of transformers or a generation of diffusers.

`hfpatch.callbacks.TrainerCallback` and `hfpatch.callbacks.PipelineCallback`; each imports its
library when it is first asked for.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.callbacks.pipeline import PipelineCallback
    from hfpatch.callbacks.trainer import TrainerCallback

__all__ = ["PipelineCallback", "TrainerCallback"]

_MODULES = {"PipelineCallback": "pipeline", "TrainerCallback": "trainer"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(_import_module(f"hfpatch.callbacks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'hfpatch.callbacks' has no attribute {name!r}")
