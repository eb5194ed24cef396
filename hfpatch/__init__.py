"""hfpatch: fast fused kernels in HuggingFace models, proven, reported and reversible."""

from hfpatch.announce import set_verbosity
from hfpatch.apply import apply, plan, restore, status
from hfpatch.interface import include_dir
from hfpatch.registry import register

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "apply",
    "include_dir",
    "plan",
    "register",
    "restore",
    "set_verbosity",
    "status",
]
