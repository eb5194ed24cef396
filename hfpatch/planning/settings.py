"""The arguments of `apply` and `plan`, checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpatch.kernels.sources import Sources
from hfpatch.planning.elsewhere import is_here, parse_device
from hfpatch.text import meant

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
    device: str | None = None  # where weights are planned to be, wherever they are now
    #: Notes on patterns that select no single module, each with the paths that the pattern matches:
    #: it may select one of them as a block, a decoder layer or a model that generates.
    selecting_none: list[tuple[frozenset[str], str]] = field(default_factory=list, compare=False)
    #: Paths of those, and of their parts, that `exclude` left as they are.
    left_out: set[str] = field(default_factory=set, compare=False)

    @property
    def training(self) -> bool:
        return self.mode == "training"


def check_settings(
    mode: str,
    kernels: Any,
    include: Any,
    exclude: Any,
    verify: Any,
    strict: Any,
    hub: Any = None,
    device: Any = None,
) -> Settings:
    """Settings from the raw arguments.

    Raises:
        ValueError, TypeError: an argument is not what it must be; the message says what it may be.
    """
    if mode not in MODES:
        raise ValueError(
            f"`mode` must be one of {', '.join(map(repr, MODES))}, got {mode!r}."
            f"{meant(mode, MODES)}"
        )
    for name, value in (("verify", verify), ("strict", strict)):
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be a bool, got {value!r}")
    planned = parse_device(device)
    sources = Sources.parse(kernels, strict, hub)
    if planned is not None and not is_here(planned):
        sources.assumed = planned
    return Settings(
        sources,
        mode,
        None if include is None else _patterns("include", include),
        () if exclude is None else _patterns("exclude", exclude),
        verify,
        strict,
        None if planned is None else planned.type,
    )


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    listed = isinstance(value, Iterable) and not isinstance(value, bytes | Mapping | type)
    patterns = tuple(value) if listed else (value,)
    for p in patterns:
        if not isinstance(p, str):
            named = f"a class: write its name, {p.__name__!r}" if isinstance(p, type) else repr(p)
            raise TypeError(
                f"`{name}` must be a glob or a sequence of globs over module paths and class "
                f"names, got {named}"
            )
    return patterns


def matches(patterns: Sequence[str], path: str, class_name: str) -> bool:
    """Whether one of the globs matches a module's path or the name of its class.

    A path also matches without the `_orig_mod` that `torch.compile` puts into it.
    """
    names = {path, class_name}
    if "_orig_mod" in path:
        names.add(".".join(part for part in path.split(".") if part != "_orig_mod"))
    return any(fnmatch.fnmatchcase(name, p) for name in names for p in patterns)
