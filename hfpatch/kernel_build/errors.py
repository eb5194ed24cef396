"""Errors of a build of kernels."""

from __future__ import annotations


class KernelBuildError(RuntimeError):
    """The kernels could not be built; the message ends with what the failing command said."""


class ToolchainMissing(KernelBuildError):
    """The machine lacks what the build needs: a compiler, torch's headers, nvcc, a GPU."""
