"""`hfpatch.lock`: which commit a version was, and the sha256 of each of its variants.

Beside it stands `kernels.lock`, the same pins in the format of the `kernels` package, whose parser
takes no further fields; `kernels download` and `kernels.load_kernel` read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.errors import KernelLoadError
from hfpatch.hub.spec import HubSpec, is_commit

FILE = "hfpatch.lock"
KERNELS_FILE = "kernels.lock"
_FORMAT = 1


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
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}, expected {_FORMAT}")
            kernels = dict(_row(row) for row in data["kernels"])
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as e:
            raise KernelLoadError(
                f"the lock file `{path}` cannot be read ({type(e).__name__}: {e}); write it with "
                "`hfpatch lock org/name@v1`"
            ) from e
        return cls(path, kernels)

    def write(self) -> None:
        """Write `hfpatch.lock` and, beside it, `kernels.lock`."""
        rows = [
            {"kernel": spec, "commit": lock.commit, "variants": dict(sorted(lock.variants.items()))}
            for spec, lock in sorted(self.kernels.items())
        ]
        text = json.dumps({"format": _FORMAT, "kernels": rows}, indent=2) + "\n"
        theirs = self.path.with_name(KERNELS_FILE)
        try:
            pins = self._pins(theirs)
            self.path.write_text(text, encoding="utf-8")
            theirs.write_text(pins, encoding="utf-8")
        except OSError as e:
            raise KernelLoadError(f"the lock file `{self.path}` cannot be written: {e}") from e

    def _pins(self, path: Path) -> str:
        """Our pins as `kernels` writes them, and those of `path` (`kernels lock`) beside them."""
        from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

        locks = {}
        if path.is_file():
            try:
                locks = dict(KernelLocks.from_json(path.read_text(encoding="utf-8")).items())
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


def _row(row: dict[str, Any]) -> tuple[str, Locked]:
    """A kernel of the file; its parts become parts of paths, so they must be what they should."""
    spec = HubSpec.parse(row["kernel"], allow_branches=True)
    if not is_commit(row["commit"]):
        raise ValueError(f"`{spec}` is locked to {row['commit']!r}, which is no commit")
    variants = {str(name): str(hash) for name, hash in row["variants"].items()}
    return str(spec), Locked(row["commit"], variants)
