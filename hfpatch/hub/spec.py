"""How a Hub kernel is named: `org/name@v1`, `org/name@<commit>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPEC = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<ref>[\w.-]+(?:/[\w.-]+)*))?$")
_VERSION = re.compile(r"^v(\d+)$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


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
        match = _SPEC.match(text)
        if match is None:
            raise ValueError(
                f"`{text}` is not a Hub kernel: expected `org/name@v1` or "
                "`org/name@<40-digit commit>`"
            )
        ref = match["ref"] or "main"
        if not allow_branches and not (_VERSION.match(ref) or _COMMIT.match(ref)):
            raise ValueError(
                f"`{text}` is not a pinned Hub kernel: write `org/name@v1` (a version) or "
                "`org/name@<40-digit commit>`; a branch can change under you, so it is taken only "
                "with `hub={'allow_branches': True}`"
            )
        return cls(match["repo"], ref)

    @property
    def version(self) -> int | None:
        """The version that `ref` names, or None."""
        match = _VERSION.match(self.ref)
        return int(match[1]) if match else None

    @property
    def commit(self) -> str | None:
        """The commit that `ref` is, or None."""
        return self.ref if _COMMIT.match(self.ref) else None

    @property
    def publisher(self) -> str:
        """The organization or user."""
        return self.repo.split("/")[0]

    def __str__(self) -> str:
        return f"{self.repo}@{self.ref}"
