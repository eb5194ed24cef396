"""What of a Hub kernel lies in the local cache: commits and variants.

Nothing here uses the network, and nothing here is believed: what the cache may be trusted for is in
`hfpatch.hub.evidence`. The layout is huggingface_hub's; `KERNELS_CACHE` moves it, as it does for
`kernels`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from hfpatch.files import read_regular
from hfpatch.hub.spec import is_commit


def cache_dir() -> Path:
    """Where kernels are cached."""
    from kernels import hf_hub

    return Path(hf_hub.CACHE_DIR or constants.HF_HUB_CACHE).expanduser()


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return bool(constants.HF_HUB_OFFLINE)


def leads_out(folder: Path) -> bool:
    """Whether a folder of the cache, as far as it is there, is a link to somewhere else."""
    return not folder.resolve().is_relative_to(cache_dir().resolve())


@dataclass(frozen=True)
class CachedRepo:
    """One repository's folder in the cache."""

    repo: str

    @property
    def folder(self) -> Path:
        return cache_dir() / repo_folder_name(repo_id=self.repo, repo_type="kernel")

    def commit_of(self, ref: str) -> str | None:
        """The commit that a version or branch was when it was downloaded, as the cache says."""
        try:
            commit = read_regular(self.folder / "refs" / ref, 200).decode().strip()
        except (OSError, ValueError):
            return None
        return commit if is_commit(commit) else None  # it becomes a part of a path

    def remember(self, ref: str, commit: str) -> None:
        """Note which commit a version or branch is from now on, where huggingface_hub looks too."""
        path = self.folder / "refs" / ref
        if self.commit_of(ref) == commit or leads_out(path.parent):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # by a name that nobody can have put a link under before
            descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        except OSError:
            return  # a cache that is read-only
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(commit)
            os.chmod(new, 0o644)  # others may read the cache
            os.replace(new, path)  # whole, whoever reads it now
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new)

    def refs(self) -> list[str]:
        """The versions and branches that were downloaded."""
        folder = self.folder / "refs"
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    def build(self, commit: str) -> Path:
        """The folder of variants of a commit, which may not be there."""
        return self.folder / "snapshots" / commit / "build"

    def complete(self, commit: str, variant: str, files: Iterable[str]) -> bool:
        """Whether these files of a variant, by their paths in it, are all here."""
        path = self.build(commit) / variant
        return all((path / name).is_file() for name in files)
