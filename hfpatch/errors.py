"""What can go wrong, as types. Every message says what was expected, what came, what to do next."""

from __future__ import annotations

from hfpatch.text import printable

#: What somebody else's code may end in and is its failure: `sys.exit()` too, but not Ctrl-C.
FAILURES = (Exception, SystemExit, GeneratorExit)


class HfpatchError(RuntimeError):
    """Base of every error that hfpatch raises for something that went wrong while it worked."""


class KernelLoadError(HfpatchError):
    """A kernel source (local build, Hub repository, registered kernel) could not be loaded.

    Its message may hold names and answers of somebody else's; what a terminal would obey is out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class KernelIntegrityError(KernelLoadError):
    """A kernel's files are not what was published, locked or signed; nothing was imported."""


class KernelUntrustedError(KernelLoadError):
    """A kernel's publisher or commit is not trusted, and `trust_remote_code` does not name it."""


class NoCompatibleVariantError(KernelLoadError):
    """A kernel has no build for this torch, CUDA, ABI or machine; the message has the trace."""


class VerificationError(HfpatchError):
    """A kernel does not compute what the module computes (raised under `strict=True` only)."""


class PatchError(HfpatchError):
    """A model could not be patched; it was rolled back and is as it was before the call."""


class DecodingError(HfpatchError, ValueError):
    """The decoding engine cannot run a model, or was given what does not fit it.

    Nothing was written.
    """


class TargetOutOfRangeError(ValueError, IndexError):
    """A class of a loss that there is no logit for; PyTorch's own functions raise an IndexError."""
