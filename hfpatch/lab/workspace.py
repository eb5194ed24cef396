"""A lab's folder on disk: `lab.json`, `ref.py`, and a folder `v{n}/` for each version.

Everything that a step found lies there as JSON beside the page for people, so that any step can be
made by hand, by a script, or in another process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.lab.problems import Refused

SCHEMA = 1
#: Files of a kernel project that stand beside its folders.
_BESIDE = {"build.toml", "flake.nix", "flake.lock", "CARD.md", "README.md"}
#: What is no source: what was built, caches, version control.
_NOT_SOURCES = {"build", "result", ".cache", ".git", "__pycache__", ".pytest_cache", "_kernels"}


@dataclass
class Lab:
    """An open lab.

    Attributes:
        root: its folder.
        data: what `lab.json` says: the subject, `iterations`, `sizes`, `versions`, …
    """

    root: Path
    data: dict[str, Any]

    @classmethod
    def make(cls, root: Path, data: dict[str, Any]) -> Lab:
        """A new lab in a folder that has none.

        Raises:
            Refused: there is one.
        """
        if (root / "lab.json").exists():
            raise Refused(f"`{root}` has a lab already; go on with it, or name another --out")
        root.mkdir(parents=True, exist_ok=True)
        lab = cls(root.resolve(), {"schema": SCHEMA, **data, "versions": []})
        lab.save()
        return lab

    @classmethod
    def open(cls, root: Path) -> Lab:
        """The lab of a folder.

        Raises:
            Refused: there is none, or one of another schema.
        """
        try:
            data = json.loads((root / "lab.json").read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise Refused(f"`{root}` has no lab: make one with `hfpatch lab init … --out`") from e
        except ValueError as e:
            raise Refused(f"`{root}/lab.json` is no JSON: {e}") from e
        if not isinstance(data, dict):
            raise Refused(f"`{root}/lab.json` holds a {type(data).__name__}, expected an object")
        if data.get("schema") != SCHEMA:
            raise Refused(
                f"`{root}/lab.json` has schema {data.get('schema')!r}, expected {SCHEMA}: it is of "
                "another version of hfpatch"
            )
        return cls(root.resolve(), data)

    def save(self) -> None:
        write_json(self.root / "lab.json", self.data)

    # Versions -----------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The newest version's number."""
        return len(self.data["versions"]) - 1

    def folder(self, n: int) -> Path:
        return self.root / f"v{n}"

    def kernel(self, n: int) -> Path:
        """The file of version n, or its source tree."""
        return self.folder(n) / str(self.data["subject"]["file"])

    def number(self, wanted: int | None) -> int:
        """`wanted`, or the newest.

        Raises:
            ValueError: there is no such version.
        """
        if wanted is None:
            return self.last
        if not 0 <= wanted <= self.last:
            raise ValueError(f"--version {wanted}: expected 0 to {self.last}")
        return wanted

    def add(self, source: Path, base: int | None) -> int:
        """Copy a file or a tree as the next version; returns its number."""
        n = self.last + 1
        folder = self.folder(n)
        if folder.exists():  # of a step that was cut off before it was noted
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        target = self.kernel(n)
        if source.is_dir():
            for path in source_files(source):
                to = target / path.relative_to(source)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
        else:
            shutil.copy2(source, target)
        self.data["versions"].append({"n": n, "from": base, "sha256": digest(target)})
        self.save()
        return n

    def digest(self, n: int) -> str:
        """sha256 of what version n is now, with the reference that it is compared with."""
        reference = self.root / "ref.py"
        ref = reference.read_bytes() if reference.is_file() else b""
        return hashlib.sha256(digest(self.kernel(n)).encode() + ref).hexdigest()

    def result(self, n: int, name: str) -> dict[str, Any] | None:
        """What a step wrote about version n as `v{n}/{name}.json`; None if it has not run."""
        path = self.folder(n) / f"{name}.json"
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def fresh(self, n: int, name: str) -> dict[str, Any] | None:
        """The same, if it was found of the files as they are now."""
        found = self.result(n, name)
        return found if found is not None and found.get("sha256") == self.digest(n) else None

    def require_checked(self, n: int) -> dict[str, Any]:
        """The passed check of version n as it is now.

        Raises:
            Refused: it was not checked, did not pass, or was changed since.
        """
        found = self.result(n, "correctness")
        if found is None:
            raise Refused(f"v{n} was not checked: run `hfpatch lab check` first")
        if found["sha256"] != self.digest(n):
            raise Refused(f"v{n} or `ref.py` was changed since its check: check it again")
        if not found["passed"]:
            raise Refused(f"v{n} did not pass its check; `v{n}/correctness.md` says why")
        return found

    def gain(self, n: int) -> float | None:
        """How many times as fast as v0 version n is: the product of the gains on its way; None
        where one of them has none."""
        gain, at = 1.0, n
        while at:
            record = self.result(at, "record")
            if record is None or record["gain"] is None:
                return None
            gain, at = gain * record["gain"], record["from"]
        return gain

    def best(self) -> int:
        """The fastest version whose record says success; v0 where none does."""
        best, most = 0, 1.0
        for n in range(1, self.last + 1):
            record, gain = self.result(n, "record"), self.gain(n)
            if gain is not None and record and record["outcome"] == "success" and gain > most:
                best, most = n, gain
        return best


def source_files(root: Path) -> Iterator[Path]:
    """The sources of a tree, in order; what was built, caches, links and hidden folders are none.

    Of a kernel project: `build.toml` and what stands beside it for the Hub, the Python package, and
    the folders of the files that it names.
    """
    tops = _tops(root)
    for folder, folders, files in os.walk(root):
        top = Path(folder) == root
        folders[:] = sorted(
            name
            for name in folders
            if name not in _NOT_SOURCES
            and not name.startswith(".")
            and not (top and tops is not None and name not in tops)
        )
        for name in sorted(files):
            path = Path(folder) / name
            if top and tops is not None and name not in _BESIDE:
                continue
            if path.is_file() and not path.is_symlink():
                yield path


def _tops(root: Path) -> set[str] | None:
    """The folders of a kernel project that have sources; None where there is no `build.toml`."""
    if not (root / "build.toml").is_file():
        return None
    named = re.findall(r'"([\w.-]+)/[^"\s]+"', (root / "build.toml").read_text(encoding="utf-8"))
    return {"torch-ext", *named}


def digest(path: Path) -> str:
    """sha256 of a file, or of the names and contents of a tree's sources."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    found = hashlib.sha256()
    for file in source_files(path):
        name = file.relative_to(path).as_posix()
        found.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all: a reader beside never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(data, indent=1, sort_keys=False) + "\n", encoding="utf-8")
    os.replace(new, path)
