"""What may be loaded from the Hub, and on what terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hfpatch.hub.spec import HubSpec
from hfpatch.text import printable


@dataclass(frozen=True)
class HubOptions:
    """The `hub=` argument of `hfpatch.apply`; a dict of these names does as well.

    Attributes:
        trust_remote_code: False: only publishers that the Hub marks as trusted, and of them what
            is in a version branch or tag; a sequence: besides, "org/name": what that repository's
            branches and tags hold, and a commit of it that is asked for by its hash;
            "org/name@<commit>": that commit, whoever asks for it (a lock file, another kernel);
            True: any. Never taken from a config file.
        require_signed: refuse a kernel without a valid signature of a publisher that `kernels`
            knows (`kernels.verify.DEFAULT_POLICIES`).
        allow_branches: take branches and tags, whose content can change, besides versions and
            commits.
        lockfile: an `hfpatch.lock`: only what it lists is loaded, at its commit, if its sha256 is
            the locked one. It does not say that a publisher is trusted.
        repos: what the source "hub" stands for, in order of preference; empty: the repositories
            that hfpatch has adapters for.
    """

    trust_remote_code: bool | tuple[str, ...] = False
    require_signed: bool = False
    allow_branches: bool = False
    lockfile: Path | None = None
    repos: tuple[str, ...] = ()
    #: Why nothing may be loaded: set by `hfpatch.kernels.config`, for a file's options.
    refused: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name)))
        for repo in self.repos:
            HubSpec.parse(repo, self.allow_branches)

    @classmethod
    def of(cls, value: Any, defaults: HubOptions | None = None) -> HubOptions:
        """From None, a dict or HubOptions; what a dict leaves out is taken from `defaults`.

        Raises:
            TypeError, ValueError: a name or a value that is not one of an option's.
        """
        defaults = defaults or cls()
        if value is None:
            return defaults
        if isinstance(value, HubOptions):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"`hub` must be None, a dict or HubOptions, got {type(value).__name__}")
        names = [f.name for f in fields(cls) if f.name != "refused"]
        unknown = sorted(set(value) - set(names), key=str)
        if unknown:
            raise ValueError(
                f"`hub` has no option {unknown[0]!r}; the options are: {', '.join(names)}"
            )
        return replace(defaults, **value)

    def trusts(self, spec: HubSpec) -> bool:
        """Whether the user vouches for this repository, as its owner keeps it."""
        if isinstance(self.trust_remote_code, bool):
            return self.trust_remote_code
        return spec.repo in self.trust_remote_code

    def trusts_commit(self, repo: str, commit: str) -> bool:
        """Whether the user vouches for this commit, whatever branch it is in or not in."""
        if isinstance(self.trust_remote_code, bool):
            return self.trust_remote_code
        return f"{repo}@{commit}" in self.trust_remote_code


def _checked(name: str, value: Any) -> Any:
    if name == "lockfile":
        if value is None or isinstance(value, str | Path):
            return None if value is None else Path(value)
        raise TypeError(f"`hub['lockfile']` must be a path, got {type(value).__name__}")
    if name == "repos":
        return _strings(name, value)
    if name == "refused":
        return str(value)
    if name == "trust_remote_code" and not isinstance(value, bool):
        named = _strings(name, value)
        for text in named:
            try:
                spec = HubSpec.parse(text, allow_branches=True)
            except ValueError:
                spec = None
            if spec is None or ("@" in text and spec.commit is None):
                raise ValueError(
                    f"`hub['trust_remote_code']` lists `{printable(text, 200)}`; expected "
                    "`org/name` or `org/name@<40-digit commit>`"
                )
        return named
    if not isinstance(value, bool):
        raise TypeError(f"`hub[{name!r}]` must be True or False, got {value!r}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    known = isinstance(value, Sequence | Set) and not isinstance(value, str)
    if not known or not all(isinstance(v, str) for v in value):
        also = "True, False or " if name == "trust_remote_code" else ""
        raise TypeError(f"`hub[{name!r}]` must be {also}a sequence of repositories, got {value!r}")
    return tuple(value)
