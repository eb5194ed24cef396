"""What can go wrong, as types. Every message says what was expected, what came, what to do next."""

from __future__ import annotations


class HfpatchError(RuntimeError):
    """Base of every error that hfpatch raises for something that went wrong while it worked."""


class KernelLoadError(HfpatchError):
    """A kernel source (local build, Hub repository, registered kernel) could not be loaded."""


class VerificationError(HfpatchError):
    """A kernel does not compute what the module computes (raised under `strict=True` only)."""


class PatchError(HfpatchError):
    """A model could not be patched; it was rolled back and is as it was before the call."""
