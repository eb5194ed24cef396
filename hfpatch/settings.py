"""The arguments of `apply` and `plan`, checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.sources import Sources

MODES = ("inference", "training")


@dataclass(frozen=True)
class Settings:
    """The arguments of `apply`, checked."""

    sources: Sources
    mode: str = "inference"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    verify: bool = True
    strict: bool = False
    assume_device: str | None = None  # plan weights on the meta device as if they were there

    @property
    def training(self) -> bool:
        return self.mode == "training"


def check_settings(
    mode: str,
    kernels: Any,
    include: Any,
    exclude: Any,
    verify: bool,
    strict: bool,
    hub: Any = None,
) -> Settings:
    """Settings from the raw arguments.

    Raises:
        ValueError, TypeError: an argument is not what it must be; the message says what it may be.
    """
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return Settings(
        Sources.parse(kernels, strict, hub),
        mode,
        None if include is None else _patterns("include", include),
        () if exclude is None else _patterns("exclude", exclude),
        bool(verify),
        bool(strict),
    )


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for p in patterns:
        if not isinstance(p, str):
            raise TypeError(
                f"`{name}` must be a glob or a sequence of globs over module paths and class "
                f"names, got an item of type {type(p).__name__}"
            )
    return patterns


def matches(patterns: Sequence[str], path: str, class_name: str) -> bool:
    """Whether one of the globs matches a module's path or the name of its class."""
    return any(fnmatch.fnmatchcase(path, p) or fnmatch.fnmatchcase(class_name, p) for p in patterns)
