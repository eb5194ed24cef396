"""How a Hub kernel is named: `org/name@v1`, `org/name@<commit>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hfpatch.text import printable

# ASCII, and no part that begins with a dot or a dash: it becomes a folder and a part of an address
_PART = r"[A-Za-z0-9_][\w.-]*"
_SPEC = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<ref>{_PART}(?:/{_PART})*))?", re.ASCII)
_VERSION = re.compile(r"v(0|[1-9]\d{0,8})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_LONGEST = 300  # characters: of a name, the Hub takes 96


def is_commit(text: str) -> bool:
    """Whether this is the full name of a git commit."""
    return _COMMIT.fullmatch(text) is not None


@dataclass(frozen=True)
class HubSpec:
    """A repository and a reference in it.

    Attributes:
        repo: "org/name".
        ref: a version branch ("v1"), a commit (40 hexadecimal digits), or any branch or tag.
    """

    repo: str
    ref: str

    @classmethod
    def parse(cls, text: str, allow_branches: bool = False) -> HubSpec:
        """From "org/name@ref".

        Raises:
            ValueError: it names no repository, or (unless `allow_branches`) is not pinned to a
                version or a commit.
        """
        match = _SPEC.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"] or len(text) > _LONGEST:
            raise ValueError(
                f"`{printable(text, _LONGEST)}` is not a Hub kernel: expected `org/name@v1` or "
                "`org/name@<40-digit commit>`"
            )
        ref = match["ref"] or "main"
        spec = cls(match["repo"], ref)
        if not (allow_branches or spec.pinned):
            raise ValueError(
                f"`{text}` is not a pinned Hub kernel: write `org/name@v1` (a version) or "
                "`org/name@<40-digit commit>`; a branch can change under you, so it is taken only "
                "with `hub={'allow_branches': True}` (`--allow-branches`)"
            )
        return spec

    @property
    def pinned(self) -> bool:
        """Whether `ref` is a version or a commit, rather than a branch or tag of another name."""
        return self.version is not None or self.commit is not None

    @property
    def version(self) -> int | None:
        """The version that `ref` names, or None."""
        match = _VERSION.fullmatch(self.ref)
        return int(match[1]) if match else None

    @property
    def commit(self) -> str | None:
        """The commit that `ref` is, or None."""
        return self.ref if is_commit(self.ref) else None

    @property
    def publisher(self) -> str:
        """The organization or user."""
        return self.repo.split("/")[0]

    def __str__(self) -> str:
        return f"{self.repo}@{self.ref}"
