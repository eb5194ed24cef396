"""What this user was told by the Hub about what lies in a cache; kept where only the user writes.

A cache may be shared: whoever may write to it can put any file there, under any name, and any note
beside it. So nothing in the cache says what may be trusted. That is kept in a folder of the user's
own: HFPATCH_STATE, else `hfpatch` in XDG_STATE_HOME (`~/.local/state`). A folder or file there that
belongs to or can be written by somebody else counts as none: the Hub is asked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.files import read_regular, strict_json
from hfpatch.hub.cache import cache_dir
from hfpatch.hub.spec import is_commit

_FORMAT = 1
_LARGEST = 64 << 20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
#: After so long the Hub is asked anew whether a publisher and a commit are trusted.
LIFETIME = 7 * 24 * 3600  # seconds


@dataclass
class CommitEvidence:
    """What is known of a commit.

    Attributes:
        via: the branch or tag that it was found in, e.g. "heads/v1"; empty: none was looked for.
        asked: when, in seconds since 1970.
        variants: {variant: {path: sha256}} of what was compared with the Hub's listing.
    """

    via: str = ""
    asked: float = 0.0
    variants: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Evidence:
    """What is known of a repository, in one cache and at one endpoint.

    Attributes:
        publisher: when the Hub last said that the publisher is trusted; 0: never.
        refs: {version or branch: commit} as it was when it was downloaded.
        commits: by hash.
    """

    publisher: float = 0.0
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, CommitEvidence] = field(default_factory=dict)

    @classmethod
    def read(cls, repo: str) -> Evidence:
        """Of a repository; empty where there is none, or none that can be believed."""
        folder = state_folder()
        if folder is None:
            return cls()
        path = folder / _name(repo)
        try:
            if not _private(path):
                return cls()
            return _parse(strict_json(read_regular(path, _LARGEST)), repo)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, repo: str) -> bool:
        """Keep it; False where there is no folder for it, and the Hub will be asked again."""
        folder = state_folder(make=True)
        if folder is None:
            return False
        data = json.dumps({"format": _FORMAT, **_where(repo), **asdict(self)})
        try:
            descriptor, new = tempfile.mkstemp(dir=folder)  # 0600
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(data)
            os.replace(new, folder / _name(repo))  # whole, whoever reads it now
        except OSError:
            return False
        return True

    def commit(self, commit: str) -> CommitEvidence:
        """What is known of a commit, to be added to."""
        return self.commits.setdefault(commit, CommitEvidence())


def fresh(asked: float) -> bool:
    """Whether an answer of then still counts; a clock that went back does not make it count."""
    return 0 <= time.time() - asked < LIFETIME


def state_folder(make: bool = False) -> Path | None:
    """The folder, if there is one that only this user can write to."""
    named = os.environ.get("HFPATCH_STATE") or os.environ.get("XDG_STATE_HOME")
    try:
        path = Path(named) if named else Path.home() / ".local" / "state"
        path = path.expanduser() if os.environ.get("HFPATCH_STATE") else path / "hfpatch"
        if make:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700)
        return path if _private(path) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def _private(path: Path) -> bool:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _where(repo: str) -> dict[str, str]:
    from huggingface_hub import constants

    return {
        "endpoint": constants.ENDPOINT.rstrip("/"),
        "cache": str(cache_dir().resolve()),
        "repo": repo,
    }


def _name(repo: str) -> str:
    text = json.dumps(_where(repo), sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _parse(data: Any, repo: str) -> Evidence:
    if data["format"] != _FORMAT or {k: data[k] for k in _where(repo)} != _where(repo):
        raise ValueError("it is of something else")
    commits = {}
    for commit, row in data["commits"].items():
        variants = {v: dict(files) for v, files in row["variants"].items()}
        hashes = [h for files in variants.values() for h in files.values()]
        if not is_commit(commit) or not all(_SHA256.fullmatch(h) for h in hashes):
            raise ValueError("it holds what is no hash")
        commits[commit] = CommitEvidence(str(row["via"]), float(row["asked"]), variants)
    refs = {str(k): str(v) for k, v in data["refs"].items()}
    if not all(map(is_commit, refs.values())):
        raise ValueError("it holds what is no commit")
    return Evidence(float(data["publisher"]), refs, commits)
