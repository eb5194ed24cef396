"""Measuring: one timer, the peers, the suites; `benchmark_kernel` and `compare` for any kernel."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.bench.kernels import benchmark_kernel, compare

__all__ = ["benchmark_kernel", "compare"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from hfpatch.bench import (
            kernels,  # with torch's profiler, which the command line is without
        )

        return getattr(kernels, name)
    raise AttributeError(f"module 'hfpatch.bench' has no attribute {name!r}")
