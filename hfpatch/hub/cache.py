"""What of a Hub kernel lies in the local cache: commits, complete variants, trusted publishers.

Nothing here uses the network. The layout is huggingface_hub's; `KERNELS_CACHE` moves it, as it
does for `kernels`. One file of our own is added per repository, `hfpatch-trusted`: the publisher
was found to be trusted when this was downloaded.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name

from hfpatch.hub.spec import is_commit


def cache_dir() -> Path:
    """Where kernels are cached."""
    from kernels import hf_hub

    return Path(hf_hub.CACHE_DIR or constants.HF_HUB_CACHE).expanduser()


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True)
class CachedRepo:
    """One repository's folder in the cache."""

    repo: str

    @property
    def folder(self) -> Path:
        return cache_dir() / repo_folder_name(repo_id=self.repo, repo_type="kernel")

    def commit_of(self, ref: str) -> str | None:
        """The commit that a version or branch was when it was downloaded."""
        try:
            commit = (self.folder / "refs" / ref).read_text().strip()
        except (OSError, ValueError):
            return None
        return commit if is_commit(commit) else None  # it becomes a part of a path

    def remember(self, ref: str, commit: str) -> None:
        """Note which commit a version or branch is from now on, where huggingface_hub looks too."""
        if self.commit_of(ref) == commit:
            return
        path = self.folder / "refs" / ref
        new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(commit)
            os.replace(new, path)  # whole, whoever reads it now
        except OSError:
            return  # a cache that is read-only: it is asked again

    def refs(self) -> list[str]:
        """The versions and branches that were downloaded."""
        folder = self.folder / "refs"
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    def build(self, commit: str) -> Path:
        """The folder of variants of a commit, which may not be there."""
        return self.folder / "snapshots" / commit / "build"

    def complete(self, commit: str, variant: str) -> bool:
        """Whether every file of a variant is here, as far as its metadata or the listing says.

        A variant that neither of them describes counts as complete only where it cannot be
        downloaded again anyway.
        """
        path = self.build(commit) / variant
        expected = self._listed(commit, variant) | _digested(path)
        if not expected:
            return offline() and (path / "metadata.json").is_file()
        return all((path / name).is_file() for name in (*expected, "metadata.json"))

    def _listed(self, commit: str, variant: str) -> set[str]:
        from huggingface_hub import get_cached_repo_tree

        start = f"build/{variant}/"
        try:
            tree = get_cached_repo_tree(
                self.repo, repo_type="kernel", revision=commit, cache_dir=cache_dir()
            )
        except (CachedRepoTreeNotFoundError, OSError, ValueError):
            return set()
        files = {f.path.removeprefix(start) for f in tree if f.path.startswith(start)}
        return {f for f in files if not f.endswith(".pyc") and "__pycache__/" not in f}

    @property
    def trusted(self) -> bool:
        """Whether its publisher was found to be trusted when it was downloaded."""
        return (self.folder / "hfpatch-trusted").is_file()

    def remember_trust(self) -> None:
        """Note that the publisher is trusted; in a read-only cache it is asked for again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "hfpatch-trusted").write_text(self.repo.split("/")[0] + "\n")
        except OSError:
            return


def _digested(path: Path) -> set[str]:
    from kernels import Metadata

    try:
        digest = Metadata.read_from_file(path / "metadata.json").digest
    except (OSError, ValueError):  # another process is downloading it
        return set()
    return set(digest.files) if digest is not None else set()
