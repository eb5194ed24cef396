"""`hfpatch.lock`: which commit a version was, and the sha256 of each of its variants.

Beside it stands `kernels.lock`, the same pins in the format of the `kernels` package, whose parser
takes no further fields; `kernels download` and `kernels.load_kernel` read it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.errors import KernelLoadError
from hfpatch.files import read_regular, strict_json
from hfpatch.hub.fetch import check_path
from hfpatch.hub.spec import HubSpec, is_commit

FILE = "hfpatch.lock"
KERNELS_FILE = "kernels.lock"
#: Bytes of a lock file.
LARGEST_LOCK = 16 << 20
_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Locked:
    """One kernel of a lock file: its commit, and {variant: sha256 of its metadata}."""

    commit: str
    variants: dict[str, str]


@dataclass(frozen=True)
class LockFile:
    """The pins of a project; see `read` and `write`."""

    path: Path
    kernels: dict[str, Locked]  # by "org/name@v1"

    @classmethod
    def read(cls, path: Path) -> LockFile:
        """From an `hfpatch.lock`.

        Raises:
            KernelLoadError: it is missing or not a lock file.
        """
        try:
            kernels = _rows(strict_json(read_regular(path, LARGEST_LOCK)))
        except (
            OSError, AttributeError, KeyError, TypeError, ValueError, KernelLoadError
        ) as e:  # fmt: skip
            raise KernelLoadError(
                f"the lock file `{path}` cannot be read ({type(e).__name__}: {e}); write it with "
                "`hfpatch lock org/name@v1`"
            ) from e
        return cls(path, kernels)

    def write(self) -> None:
        """Write `hfpatch.lock` and, beside it, `kernels.lock`.

        Raises:
            KernelLoadError: they cannot be written, or one of them is a link or no regular file:
                what it leads to is nobody's to write over.
        """
        rows = [
            {"kernel": spec, "commit": lock.commit, "variants": dict(sorted(lock.variants.items()))}
            for spec, lock in sorted(self.kernels.items())
        ]
        text = json.dumps({"format": _FORMAT, "kernels": rows}, indent=2) + "\n"
        theirs = self.path.with_name(KERNELS_FILE)
        try:
            for path in (self.path, theirs):
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    raise OSError(f"`{path}` is a link, or no regular file")
            pins = self._pins(theirs)
            _replace(self.path, text)
            _replace(theirs, pins)
        except OSError as e:
            raise KernelLoadError(f"the lock file `{self.path}` cannot be written: {e}") from e

    def _pins(self, path: Path) -> str:
        """Our pins as `kernels` writes them, and those of `path` (`kernels lock`) beside them."""
        from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

        locks = {}
        if path.is_file():
            try:
                data = read_regular(path, LARGEST_LOCK)
                strict_json(data)
                locks = dict(KernelLocks.from_json(data.decode("utf-8")).items())
            except ValueError as e:
                raise KernelLoadError(
                    f"`{path}`, which would be written too, is no lock file of `kernels` ({e}); "
                    "move it away"
                ) from e
        for text, lock in self.kernels.items():
            spec = HubSpec.parse(text, allow_branches=True)
            version = (
                KernelVersion.Version(spec.version)
                if spec.version is not None
                else KernelVersion.Revision(spec.ref)
            )
            locks[KernelDependency(spec.repo, version)] = KernelLock(lock.commit)
        return str(KernelLocks(locks).to_json())

    def of(self, spec: HubSpec) -> Locked:
        """What is locked for a kernel.

        Raises:
            KernelLoadError: it is not in the file.
        """
        locked = self.kernels.get(str(spec))
        if locked is None:
            known = ", ".join(sorted(self.kernels)) or "nothing"
            raise KernelLoadError(
                f"`{spec}` is not in the lock file `{self.path}`, which lists {known}. Lock it: "
                f"`hfpatch lock {spec}`"
            )
        return locked


def _replace(path: Path, text: str) -> None:
    """Write a file whole, whoever reads it now; a link in its place is not followed."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(new, mode)
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise


def _rows(data: Any) -> dict[str, Locked]:
    """The kernels of a file, each once; what is said twice would be chosen by its order."""
    if not isinstance(data, dict) or not isinstance(data["kernels"], list):
        raise ValueError("it holds no list of kernels")
    if type(data["format"]) is not int or data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r}, expected {_FORMAT}")
    found: dict[str, Locked] = {}
    for row in data["kernels"]:
        name, locked = _row(row)
        other = next((n for n in found if n.casefold() == name.casefold()), None)
        if other is not None:
            raise ValueError(f"`{name}` stands there twice (`{other}`)")
        found[name] = locked
    return found


def _row(row: dict[str, Any]) -> tuple[str, Locked]:
    """A kernel of the file; its parts become parts of paths, so they must be what they should."""
    unknown = sorted(set(row) - {"kernel", "commit", "variants"})
    if unknown:
        raise ValueError(f"a kernel has no key {unknown[0]!r}")
    spec = HubSpec.parse(row["kernel"], allow_branches=True)
    commit, variants = row["commit"], row["variants"]
    if not isinstance(commit, str) or not is_commit(commit):
        raise ValueError(f"`{spec}` is locked to {commit!r}, which is no commit")
    if spec.commit is not None and spec.commit != commit:
        raise ValueError(f"`{spec}` is locked to {commit}, which is another commit")
    for name, hash in variants.items():
        check_path(name)
        if "/" in name or not _SHA256.fullmatch(hash):
            raise ValueError(f"`{spec}`: {name!r} is locked to {hash!r}, which is no sha256")
    return str(spec), Locked(commit, dict(variants))
