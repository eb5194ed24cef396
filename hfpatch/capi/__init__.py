"""The C interface of the kernels, for Python: libhfpatch by ctypes.

The tensors of any framework, by DLPack or NumPy's array interface::

    from hfpatch import capi

    library = capi.Library("build/clib/lib/libhfpatch.so")
    library.rms_norm(out, x, weight, None, 1e-6, 0.0, capi.HFP_CAST_NONE)

The folder needs the standard library only: a copy of it works without hfpatch and PyTorch.
Reference: docs/c-api.md; what a caller can rely on: docs/c-rules.md.
"""

from __future__ import annotations

from .functions import Library
from .library import HfpatchError
from .signatures import ABI_VERSION, CONSTANTS
from .tensors import DLDataType, DLDevice, DLTensor, HfpTensorList, dltensor

__all__ = [
    "ABI_VERSION",
    "CONSTANTS",
    "DLDataType",
    "DLDevice",
    "DLTensor",
    "HfpTensorList",
    "HfpatchError",
    "Library",
    "dltensor",
]


def __getattr__(name: str) -> int:
    """The constants of the header: `capi.HFP_CAST_NONE`."""
    try:
        return CONSTANTS[name]
    except KeyError:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`") from None
