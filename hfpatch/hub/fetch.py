"""A variant's files: what the Hub says they are, and how they come into the cache."""

from __future__ import annotations

import contextvars
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelIntegrityError
from hfpatch.hub.cache import CachedRepo, cache_dir, leads_out
from hfpatch.hub.guard import current_guard
from hfpatch.progress import bar, part_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

METADATA = "metadata.json"
SIGNATURE = "metadata.json.sigstore"
#: Bytes of the metadata, and of their signature.
LARGEST_METADATA = 4 << 20
#: Bytes of one file, and how many there may be.
LARGEST_FILE = 16 << 30
MOST_FILES = 4096

_HEX = {40: re.compile(r"[0-9a-f]{40}", re.ASCII), 64: re.compile(r"[0-9a-f]{64}", re.ASCII)}
_LONGEST_PATH = 400  # characters, and 255 of a part


@dataclass(frozen=True)
class Listed:
    """A file as the Hub lists it: its size in bytes, and its sha256 (a large file) or else git's
    own hash, a sha1 over its size and content."""

    size: int
    hash: str

    def differs(self, data: bytes) -> bool:
        """Whether a content is another one than was listed."""
        if len(self.hash) == 64:
            return hashlib.sha256(data).hexdigest() != self.hash
        framed = b"blob %d\0" % len(data) + data
        return hashlib.sha1(framed, usedforsecurity=False).hexdigest() != self.hash


def check_path(path: str) -> None:
    """Raises KernelIntegrityError where a file's path in a variant is none that can be stored."""
    parts = path.split("/")
    why = ""
    if not path or not path.isprintable() or "\\" in path or len(path) > _LONGEST_PATH:
        why = "no name of a file"
    elif any(p in ("", ".", "..") or p != p.strip() or len(p.encode()) > 255 for p in parts):
        why = "no path within a folder"
    elif unicodedata.normalize("NFC", path) != path:
        why = "written in two ways that look alike"
    elif "__pycache__" in parts or path.casefold().endswith((".pyc", ".pyo")):
        why = "bytecode, which would be run in place of a source"
    if why:
        raise KernelIntegrityError(f"`{path[:200]}` is {why}; nothing was imported")


def check_paths(paths: Iterable[str]) -> None:
    """`check_path` for each; and no two that a file system may take for one."""
    seen: dict[str, str] = {}
    for path in paths:
        check_path(path)
        other = seen.setdefault(path.casefold(), path)
        if other != path:
            raise KernelIntegrityError(
                f"`{other}` and `{path}` are one file where case does not count; nothing was "
                "imported"
            )


def listing(api: HfApi, repo: str, commit: str, variant: str) -> dict[str, Listed]:
    """The files of a variant at a commit, by their paths in it.

    Raises:
        KernelIntegrityError: the listing holds what cannot be a file of a variant.
    """
    from huggingface_hub.hf_api import RepoFile

    start = f"build/{variant}/"
    rows = api.list_repo_tree(
        repo, path_in_repo=start[:-1], recursive=True, revision=commit, repo_type="kernel"
    )
    found: dict[str, Listed] = {}
    for count, row in enumerate(islice(rows, 2 * MOST_FILES + 1)):
        if count == 2 * MOST_FILES or len(found) > MOST_FILES:
            raise KernelIntegrityError(f"`{variant}` has more than {MOST_FILES} files")
        if not isinstance(row, RepoFile):
            continue
        path = row.path
        if not path.startswith(start) or path[len(start) :] in found:
            raise KernelIntegrityError(
                f"the Hub lists `{path[:200]}` among the files of `{variant}`"
            )
        found[path[len(start) :]] = _listed(path, row)
    check_paths(found)
    if METADATA not in found:
        raise KernelIntegrityError(f"`{variant}` has no `{METADATA}`, so it is no published kernel")
    return found


def _listed(path: str, row: Any) -> Listed:
    size, hash = (row.size, row.blob_id) if row.lfs is None else (row.lfs.size, row.lfs.sha256)
    digits = 40 if row.lfs is None else 64
    limit = LARGEST_METADATA if path.endswith((METADATA, SIGNATURE)) else LARGEST_FILE
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= limit:
        raise KernelIntegrityError(f"the Hub gives {size!r} as the size of `{path}`")
    if not isinstance(hash, str) or not _HEX[digits].fullmatch(hash):
        raise KernelIntegrityError(f"the Hub gives {hash!r} as the hash of `{path}`, which is none")
    return Listed(size, hash)


def fetch(api: HfApi, repo: str, commit: str, variant: str, files: Mapping[str, Listed]) -> None:
    """Bring files of a variant into the cache; those that are there already stay as they are.

    Each is stored under the hash that the listing has for it; an answer under any other name is
    refused before it is written. Whether its content has that hash is for who reads it.

    Raises:
        KernelIntegrityError: the Hub answers with something else than it listed, or what would be
            written to is a link to somewhere else.
    """
    cached = CachedRepo(repo)
    build = cached.build(commit) / variant
    locks = cache_dir() / ".locks" / cached.folder.name  # huggingface_hub's
    for folder in {cached.folder / "blobs", locks, *((build / path).parent for path in files)}:
        if leads_out(folder):
            raise KernelIntegrityError(
                f"`{folder}` is a link that leads out of the cache; nothing was written there. "
                "Delete it and try again"
            )
    guard = current_guard()
    for path, row in files.items():
        guard.hashes[f"/{commit}/build/{variant}/{path}"] = row.hash
    guard.largest = max([guard.largest, *(row.size for row in files.values())])

    size = sum(row.size for row in files.values())
    with bar(f"hfpatch: {repo}", "B", size, scaled=True) as progress:

        def download(path: str) -> None:
            api.hf_hub_download(
                repo,
                f"build/{variant}/{path}",
                repo_type="kernel",
                revision=commit,
                cache_dir=cache_dir(),
                tqdm_class=part_of(progress),
            )

        download(METADATA)
        rest = [path for path in files if path != METADATA]
        with ThreadPoolExecutor(max_workers=8) as pool:
            running = [pool.submit(contextvars.copy_context().run, download, p) for p in rest]
            for future in running:
                future.result()
