"""Repositories as a Hub keeps them: files by content, commits, branches and tags. In memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

LFS_SUFFIXES = (".so", ".dylib", ".dll", ".bin", ".safetensors")
LFS_FROM = 10 * 1024 * 1024  # bytes: larger files are LFS whatever their name


@dataclass(frozen=True)
class Blob:
    """A file's content, and whether it is stored by LFS."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        """git's own object id: of the content, or of the LFS pointer."""
        data = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            "version https://git-lfs.github.com/spec/v1\n"
            f"oid sha256:{self.sha256}\nsize {len(self.data)}\n"
        ).encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


Files = dict[str, Blob]


@dataclass
class Repo:
    """Branches, tags, and the files of every commit."""

    kind: str
    name: str
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)  # "refs/pr/1", which anybody can open

    def commit(self, branch: str, files: Files, message: str) -> str:
        refs = self.pulls if branch.startswith("refs/pr/") else self.branches
        parent = refs.get(branch, "") or (self.branches.get("v1", "") if refs is self.pulls else "")
        content = "".join(f"{p} {b.oid}\n" for p, b in sorted(files.items()))
        sha = hashlib.sha1(f"{parent}\n{message}\n{content}".encode()).hexdigest()
        self.commits[sha] = files
        self.parents.setdefault(sha, parent)
        refs[branch] = sha
        return sha

    def history(self, sha: str) -> list[str]:
        """A commit and those that it was made after, newest first."""
        found = []
        while sha in self.commits and sha not in found:
            found.append(sha)
            sha = self.parents.get(sha, "")
        return found

    def resolve(self, revision: str) -> str | None:
        """A branch, a tag, a full ref, a commit or a part of its hash, as a commit."""
        if revision in self.pulls:
            return self.pulls[revision]
        revision = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        parts = [c for c in self.commits if len(sha) >= 7 and c.startswith(sha.lower())]
        return sha if sha in self.commits else parts[0] if len(parts) == 1 else None
