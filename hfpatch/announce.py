"""What a user must hear of, beside the report: a warning, and a record of the logger `hfpatch`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from torch import jit, nn

from hfpatch.planning.plan import Plan, Skip

_LEVELS = ("debug", "info", "warning", "error", "critical")
#: Kinds of skips that are no loss: the original is as fast, or the user wanted it.
_WANTED = {"no gain", "off", "excluded"}

logger = logging.getLogger("hfpatch")
logger.addHandler(logging.NullHandler())  # an application's handlers show it, or the warning does


def set_verbosity(level: str | int) -> None:
    """How much hfpatch says besides its reports.

    Args:
        level: "debug", "info", "warning" (the default), "error" or "critical", or a number of
            `logging`. Above "warning" no warning is given either.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if isinstance(level, bool) or not isinstance(level, (str, int)):
        raise TypeError(f"`level` must be a str or an int, got {type(level).__name__}")
    if isinstance(level, str) and level.lower() not in _LEVELS:
        raise ValueError(f"`level` must be one of {', '.join(_LEVELS)}, got {level!r}")
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def announce(text: str, stacklevel: int = 2) -> None:
    """One RuntimeWarning and one record; `stacklevel` counts from the caller, as of `warnings`."""
    if not logger.isEnabledFor(logging.WARNING):
        return
    logger.warning(text)
    warnings.warn(f"hfpatch: {text}", RuntimeWarning, stacklevel=stacklevel + 1)


def announce_in_call(text: str, stacklevel: int = 2) -> None:
    """The same inside of a call of a model, which goes on where a filter makes an error of it."""
    if logger.isEnabledFor(logging.WARNING):
        logger.warning(text)
        warn_in_call(f"hfpatch: {text}", RuntimeWarning, stacklevel + 1)


def warn_in_call(text: str, category: type[Warning], stacklevel: int) -> None:
    """A warning that is shown, and not raised, where a filter makes an error of it: the original
    does not raise there, and what the call wrote by then, as to a cache, would be half of it."""
    try:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    except Warning as e:
        _not_raised(e, stacklevel)


def _not_raised(warning: Warning, stacklevel: int) -> None:
    frame = sys._getframe(1)
    for _ in range(stacklevel):  # from `warn_in_call` on
        frame = frame.f_back or frame
    warnings.showwarning(warning, type(warning), frame.f_code.co_filename, frame.f_lineno)


def what_was_lost(
    decided: Plan,
    roots: Sequence[tuple[str, nn.Module]],
    failures: Sequence[str],
    included: bool = False,
) -> list[str]:
    """Of an `apply`: kernels that could not be had, or why nothing at all was swapped; `included`:
    whether `include` was given."""
    if failures:
        return list(failures)
    without = [s for s in decided.skips if s.kind == "unavailable"]
    if decided.swaps:
        return [_stay(decided, without)] if without else []
    if not decided.skips:
        if decided.candidates:
            return []  # its blocks are proven at their first call
        if any(isinstance(root, jit.ScriptModule) for _, root in roots):
            why = "it is a ScriptModule, whose forwards cannot be replaced; patch the model that "
            why += "it was made from, and call that: torch.jit keeps no kernels"
        elif included:
            said = [n for n in decided.notes if "`include`" in n]
            why = "`include` selects no module that hfpatch has a kernel for"
            why += f": {said[0]}" if said else ""
        else:
            why = (
                "none of its modules is of a class that hfpatch knows; `hfpatch.register` adds one"
            )
        return [f"nothing was swapped in `{decided.model}`: {why}"]
    lost = [s for s in decided.skips if s.kind not in _WANTED]
    if not lost:
        return []
    return [f"nothing was swapped in `{decided.model}`: {_stay(decided, without or lost)}"]


def _stay(decided: Plan, skips: Sequence[Skip]) -> str:
    """What to say of modules that could not be swapped."""
    first = next((s for s in skips if s.path), skips[0])
    named = f"`{first.path}`" if first.path else "the model itself"
    return (
        f"{len(skips)} modules of `{decided.model}` stay as they are, {named} because: "
        f"{first.reason}; the report has all reasons"
    )
