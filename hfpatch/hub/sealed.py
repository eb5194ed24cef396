"""A variant's files, read once: what is compared is what is imported.

Whoever may write to the cache may write between a check and a use. So each file is read a single
time, into a folder that only this user can enter, and hashed on the way; checks, metadata and the
import all take what was read then. Names and links in the cache say nothing of a content.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hfpatch.errors import KernelIntegrityError
from hfpatch.files import strict_json
from hfpatch.hub import elf
from hfpatch.hub.evidence import state_folder
from hfpatch.hub.fetch import (
    LARGEST_FILE,
    LARGEST_METADATA,
    METADATA,
    MOST_FILES,
    SIGNATURE,
    Listed,
    check_paths,
)

_AGAIN = "Delete `{folder}` and download it again: `hfpatch download`"
_CHUNK = 1 << 20
_LARGEST_SOURCE = 16 << 20  # bytes of a Python file
_NOEXEC = getattr(os, "ST_NOEXEC", 8)


@dataclass(frozen=True)
class Sealed:
    """A variant as it was read.

    Attributes:
        variant: its name.
        files: the sha256 of each file, in hexadecimal, by its path in the variant.
        metadata: `kernels.Metadata`, parsed from what was read.
        kept: the content of the metadata, their signature, and the Python files.
        folder: where the copies are; None if none was made. It is removed with the process.
        content: one hash for all of it.
    """

    variant: str
    files: dict[str, str]
    metadata: Any
    kept: dict[str, bytes] = field(repr=False)
    folder: Path | None
    content: str

    def discard(self) -> None:
        """Remove the copies."""
        if self.folder is not None:
            _remove(self.folder)


def seal(variant: Path, expected: Mapping[str, Listed | str] | None, copy: bool = True) -> Sealed:
    """Read a variant's folder and compare it, with what is expected and with its own digests.

    Args:
        variant: the folder.
        expected: for each file what the Hub listed, or its sha256 as it was compared before. None:
            of a folder of the user's own (LOCAL_KERNELS): its digests alone are compared.
        copy: make copies that can be imported; else the content is only compared.

    Raises:
        KernelIntegrityError: a file is damaged, missing, or too much, or is no regular file; or a
            library asks for what no kernel needs.
        ValueError: the metadata are none.
    """
    if expected is not None:
        check_paths(expected)
    folder = _private_folder() if copy else None
    try:
        return _seal(variant, expected, folder)
    except BaseException:
        if folder is not None:
            _remove(folder)
        raise


def _seal(
    variant: Path, expected: Mapping[str, Listed | str] | None, folder: Path | None
) -> Sealed:
    from kernels import Metadata

    found = _Found(variant, folder)
    problems: list[str] = []
    # what describes the others comes first; nothing else is read of what is none
    for path in sorted(found.paths, key=lambda p: (p != METADATA, p)):
        if expected is not None and path not in expected:
            problems.append(f"`{path}` was put there by somebody else")
            continue
        row = expected[path] if expected is not None else None
        got = found.read(path, row)
        if (wrong := _wrong(row, got)) is not None:
            problems.append(f"`{path}` is damaged: its hash is {wrong[0]}, expected {wrong[1]}")
        if path == METADATA and problems:
            break
    problems += [f"`{path}` is missing" for path in expected or () if path not in found.paths]
    _refuse(variant, problems)
    if METADATA not in found.read_:
        raise KernelIntegrityError(f"`{variant.name}` has no `{METADATA}`")
    data = found.kept[METADATA]
    raw = strict_json(data)
    metadata = Metadata.from_bytes(data)
    if metadata.digest is not None:
        algorithm = str(metadata.digest.algorithm).lower()
        _refuse(variant, _digest_problems(raw, algorithm, found))
    elif expected is None:
        raise KernelIntegrityError(
            f"the metadata of `{variant.name}` hold no digest of its files, so nothing says that "
            "they are what was built. Build it again by a newer kernel-builder, or by `hfpatch "
            "kernel build`"
        )
    _refuse(variant, found.libraries)
    files = {path: got.sha256 for path, got in found.read_.items()}
    lines = "".join(f"{hash} {path}\n" for path, hash in sorted(files.items()))
    content = hashlib.sha256(f"{variant.name}\n{lines}".encode()).hexdigest()
    return Sealed(variant.name, files, metadata, found.kept, folder, content)


def _refuse(variant: Path, problems: list[str]) -> None:
    if problems:
        shown = "; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if problems[3:] else "")
        raise KernelIntegrityError(
            f"`{variant.name}` is not what was published, or must not be loaded: {shown}. "
            + _AGAIN.format(folder=_repo_folder(variant))
        )


@dataclass
class _Got:
    """The hashes of a file, in the forms in which they are announced."""

    size: int
    sha256: str
    sha512: bytes
    git: str


@dataclass
class _Found:
    """The files of a folder, each read at most once."""

    variant: Path
    folder: Path | None
    paths: set[str] = field(default_factory=set)
    read_: dict[str, _Got] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = set(_walk(self.variant))
        check_paths(self.paths)

    def read(self, path: str, row: Listed | str | None) -> _Got:
        limit = LARGEST_FILE
        if path in (METADATA, SIGNATURE):
            limit = LARGEST_METADATA
        elif path.endswith(".py"):
            limit = _LARGEST_SOURCE
        if isinstance(row, Listed):
            limit = min(limit, row.size)
        keep = path in (METADATA, SIGNATURE) or path.endswith(".py")
        with _regular(self.variant / path) as source, self._copy(path) as copy:
            size, data = os.fstat(source.fileno()).st_size, []
            sha256, sha512 = hashlib.sha256(), hashlib.sha512()
            git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            announced = isinstance(row, Listed) and len(row.hash) == 40
            # what is announced in another way is not computed: a library may be large
            hashes = [sha256, *([git] * announced), *([sha512] * self._demands_sha512())]
            left = limit + 1
            while left and (chunk := source.read(min(_CHUNK, left))):
                left -= len(chunk)
                for hash in hashes:
                    hash.update(chunk)
                copy.write(chunk)
                if keep:
                    data.append(chunk)
            if not left:
                raise KernelIntegrityError(
                    f"`{self.variant.name}`: `{path}` is damaged: it has more than the {limit} "
                    f"bytes that are expected. {_AGAIN.format(folder=_repo_folder(self.variant))}"
                )
            if self.folder is not None:
                copy.seek(0)
                self._look(path, copy)
            else:
                source.seek(0)
                self._look(path, source)
        if keep:
            self.kept[path] = b"".join(data)
        got = _Got(limit + 1 - left, sha256.hexdigest(), sha512.digest(), git.hexdigest())
        self.read_[path] = got
        return got

    def _demands_sha512(self) -> bool:
        """Whether the metadata, which are read first, may hold digests of that kind."""
        return b"sha512" in self.kept.get(METADATA, b"").lower()

    @contextlib.contextmanager
    def _copy(self, path: str) -> Iterator[Any]:
        if self.folder is None:
            with open(os.devnull, "wb") as nothing:
                yield nothing
            return
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with target.open("x+b") as file:
            yield file
        target.chmod(0o500 if path.endswith(".so") else 0o400)

    def _look(self, path: str, file: BinaryIO) -> None:
        """What a library would do as it is loaded."""
        head = file.read(4)
        if head != elf.MAGIC and not (path.endswith(".so") and sys.platform == "linux"):
            return
        try:
            problems = elf.examine(file).problems
        except ValueError as e:
            problems = (f"cannot be loaded: {e}",)
        self.libraries += [f"`{path}` {p}" for p in problems]


def _wrong(row: Listed | str | None, got: _Got) -> tuple[str, str] | None:
    """The hash that a file has and the one that was expected, if they differ."""
    if row is None:
        return None
    expected = row if isinstance(row, str) else row.hash
    have = got.sha256 if len(expected) == 64 else got.git
    return None if have == expected else (have, expected)


def _digest_problems(raw: Any, algorithm: str, found: _Found) -> list[str]:
    """Files that are not as the metadata say; all but the metadata and their signature are in."""
    digests = raw["digest"]["files"]
    files = set(found.paths) - {METADATA, SIGNATURE}
    problems = [f"`{p}` is not in the digest" for p in sorted(files - set(digests))]
    problems += [f"`{p}`, which is in the digest, is missing" for p in sorted(set(digests) - files)]
    for path in sorted(files & set(digests)):
        got = found.read_[path]
        have = got.sha512 if algorithm == "sha512" else bytes.fromhex(got.sha256)
        text = base64.b64encode(have).decode()
        if text != digests[path]:
            problems.append(f"`{path}`: its {algorithm} is {text}, the digest's {digests[path]!r}")
    return problems


def _walk(folder: Path, start: str = "") -> Iterator[str]:
    """Paths of files below a folder. Bytecode that a program left in `__pycache__` is passed over:
    it is not copied."""
    for count, entry in enumerate(sorted(os.scandir(folder), key=lambda e: e.name), 1):
        if count > 2 * MOST_FILES:
            raise KernelIntegrityError(f"`{folder.name}` has more than {2 * MOST_FILES} entries")
        path = start + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield path
        elif entry.name != "__pycache__":
            if path.count("/") > 30:
                raise KernelIntegrityError(f"`{folder.name}` is nested too deeply")
            yield from _walk(Path(entry.path), path + "/")
        else:
            for left in _walk(Path(entry.path), path + "/"):
                if not left.endswith(".pyc"):
                    yield left


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    try:
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as e:
        raise KernelIntegrityError(f"`{path.name}` cannot be read: {e}") from e
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise KernelIntegrityError(f"`{path.name}` is no regular file; nothing was imported")
        yield file


def _repo_folder(variant: Path) -> Path:
    snapshots = [p for p in variant.parents if p.name == "snapshots"]
    return snapshots[0].parent if snapshots else variant


# ------------------------------------------------------------------------------ the copies

_folders: set[Path] = set()
_owner = os.getpid()


def _private_folder() -> Path:
    """A fresh folder that only this user can enter, where libraries can be loaded from."""
    shared = Path(tempfile.gettempdir())
    parent: Path | None = None
    if _no_execution(shared):
        state = state_folder(make=True)
        if state is not None and not _no_execution(state):
            parent = state
    folder = Path(tempfile.mkdtemp(prefix="hfpatch-", dir=parent))  # 0700
    _folders.add(folder)
    return folder


def _no_execution(folder: Path) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & _NOEXEC)
    except (OSError, AttributeError):
        return False


def _remove(folder: Path) -> None:
    _folders.discard(folder)
    shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _remove_all() -> None:
    if os.getpid() == _owner:  # not a fork's
        for folder in list(_folders):
            _remove(folder)
