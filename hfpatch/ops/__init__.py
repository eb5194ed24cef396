"""The ops that kernels are written for: one file per op, one readable PyTorch formula each."""

import pkgutil
from importlib import import_module

from hfpatch.ops.base import KERNEL_DTYPES, Op

_MODULES = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
#: Every op by name: the `Op`s of this folder's files.
OPS: dict[str, Op] = {
    op.name: op for module in _MODULES for op in vars(module).values() if isinstance(op, Op)
}

__all__ = ["KERNEL_DTYPES", "OPS", "Op"]
