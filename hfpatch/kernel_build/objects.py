"""Sources compiled at once, and only those that changed.

An object that another build of the project has is taken from there: the CPU's kernels are part of
the build for CUDA and of the C library too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commands import run as run_command
from .commands import write
from .errors import KernelBuildError
from .estimate import Estimate
from .ptxas import parse_ptxas
from .toolchain import jobs


@dataclass(frozen=True)
class Unit:
    """One source file to compile; the command ends with the object."""

    label: str
    command: tuple[str, ...]
    object: Path
    cost: float = 0.0  # see `estimate.cost`


#: Macros that builds set each to something else, and few sources read.
_MACROS = ("CPU_KERNEL", "CUDA_KERNEL", "HFP_CUDA_ARCHS", "TORCH_TARGET_VERSION")


class Objects:
    """The objects of `units`, compiled in the directory `root`.

    `tools`: what else they depend on, such as versions of compilers; `say` gets a line for each;
    `cxx_version` of the C++ compiler; `others`: folders of other builds, which may have the same
    objects.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        root: Path,
        tools: str,
        say: Callable[[str], None],
        cxx_version: str = "",
        others: Sequence[Path] = (),
    ) -> None:
        self.units = units
        self.root = root
        self.tools = tools
        self.say = say
        self.cxx_version = cxx_version
        self.others = others

    def compile(self) -> list[Path]:
        """Their paths, in the order of `units`.

        Raises:
            KernelBuildError: a compiler failed; those that had not begun are not started.
        """
        (found,) = compile_all([self])
        if isinstance(found, KernelBuildError):
            raise found
        return found

    def fresh(self, unit: Unit) -> bool:
        """Whether its object is there, of the same command and files."""
        try:
            record = json.loads(unit.object.with_suffix(".json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        key: object = record.get("key")
        return unit.object.is_file() and key == self._key(unit, record.get("deps", []))

    def compile_unit(self, unit: Unit) -> bool:
        """Returns whether a compiler ran: an object is reused while its command and files last."""
        if self.fresh(unit) or self._borrowed(unit):
            return False
        state = unit.object.with_suffix(".json")
        state.unlink(missing_ok=True)
        # Another build may be at the same file.
        partial = unit.object.with_suffix(f".{os.getpid()}.o")
        depfile = partial.with_suffix(".d")
        command = [*unit.command[:-1], str(partial), "-MMD", "-MF", str(depfile)]
        start = time.time()
        try:
            said = run_command(command, cwd=self.root)
            deps = _parse_depfile(depfile.read_text(encoding="utf-8"))
            os.replace(partial, unit.object)
        finally:
            partial.unlink(missing_ok=True)
            depfile.unlink(missing_ok=True)
        # A file that was written meanwhile may have been read before: compiled again next time.
        key = None if self._changed_since(start, deps) else self._key(unit, deps)
        record = {"key": key, "deps": deps, "kernels": parse_ptxas(said)}
        record["shared"] = None if key is None else self._shared_key(unit, deps)
        write(state, json.dumps(record))
        return True

    def _borrowed(self, unit: Unit) -> bool:
        """Whether another build had this object, which is copied then."""
        for folder in self.others:
            there = folder / unit.object.name
            state = there.with_suffix(".json")
            try:
                text = state.read_text(encoding="utf-8")
                record = json.loads(text)
                # what was generated there is looked at here
                deps = [d.replace(str(folder), str(unit.object.parent)) for d in record["deps"]]
                key = record.get("shared")
                if key is None or key != self._shared_key(unit, deps):
                    continue
                partial = unit.object.with_suffix(f".{os.getpid()}.o")
                shutil.copyfile(there, partial)
                if state.read_text(encoding="utf-8") != text:  # compiled anew meanwhile
                    partial.unlink()
                    continue
            except (OSError, ValueError, KeyError, TypeError):
                continue
            own = unit.object.with_suffix(".json")
            own.unlink(missing_ok=True)
            os.replace(partial, unit.object)
            record = {"key": self._key(unit, deps), "deps": deps, "kernels": [], "shared": key}
            write(own, json.dumps(record))
            return True
        return False

    def _shared_key(self, unit: Unit, deps: Sequence[str]) -> str | None:
        """Of an object, whichever build made it; None where builds differ in more than what this
        source does not read."""
        folder = str(unit.object.parent)  # and of generated headers

        def said(word: str) -> bytes:
            """Without where it is: paths in objects begin at the project."""
            return word.replace(folder, "@").replace(str(self.root), "@root").encode() + b"\0"

        if not unit.object.name.endswith(".cpp.o") or not self.cxx_version:
            return None
        sha = hashlib.sha256(self.cxx_version.encode())
        paths = [self.root / dep for dep in deps]
        for dep, path in zip(deps, paths, strict=True):
            content = path.read_bytes() if path.is_file() else b""
            if any(macro.encode() in content for macro in _MACROS):
                return None
            sha.update(said(dep) + content)
        words = iter(unit.command[:-2])  # without -o and the object
        for word in words:
            if word == "-isystem":
                at = next(words)
                if any(path.is_relative_to(at) for path in paths):
                    return None
            elif word.startswith("-ffile-prefix-map=") and not any(
                str(path).startswith(word.split("=")[1]) for path in paths
            ):
                pass  # of headers that it does not include
            elif not word.startswith(tuple(f"-D{macro}" for macro in _MACROS)):
                sha.update(said(word))
        return sha.hexdigest()

    def resources(self) -> list[dict[str, Any]]:
        """What ptxas said of every kernel when it was compiled; see `parse_ptxas`."""
        found = []
        for unit in self.units:
            record = json.loads(unit.object.with_suffix(".json").read_text(encoding="utf-8"))
            found += [{"file": unit.object.stem, **kernel} for kernel in record["kernels"]]
        return found

    def _changed_since(self, start: float, deps: list[str]) -> bool:
        files = (self.root / dep for dep in deps)
        return any(not file.is_file() or file.stat().st_mtime > start for file in files)

    def _key(self, unit: Unit, deps: list[str]) -> str:
        sha = hashlib.sha256("\0".join(unit.command).encode())
        sha.update(self.tools.encode())
        for dep in deps:
            path = self.root / dep
            sha.update(dep.encode() + b"\0")
            sha.update(path.read_bytes() if path.is_file() else b"")
        return sha.hexdigest()


def compile_all(builds: Sequence[Objects]) -> list[list[Path] | KernelBuildError]:
    """Compiles several builds at once, so that no core waits for the last files of the first one.

    An object that two of them may share is compiled by the first one.

    Returns:
        Of each build what `Objects.compile` returns, or the error that stopped it alone.
    """
    runs = [_Run(objects) for objects in builds]
    costs = [cost for run in runs for cost in run.stale.values()]
    estimate = Estimate(costs, jobs())
    for run in runs:
        run.begin(estimate)
    parts = [(run, unit) for run in runs for unit in run.objects.units]
    owners: dict[str, _Run] = {}
    for run, unit in parts:
        owners.setdefault(unit.object.name, run)
    # What may be copied comes last: by then it is being compiled.
    copied = [part for part in parts if owners[part[1].object.name] is not part[0]]
    first = sorted(
        (part for part in parts if owners[part[1].object.name] is part[0]),
        key=lambda part: -part[1].cost,
    )
    with ThreadPoolExecutor(jobs()) as pool:
        for run, unit in [*first, *copied]:
            other = owners[unit.object.name].futures.get(unit.object.name)
            run.futures[unit.object.name] = pool.submit(run.one, unit, other)
        try:
            return [run.result() for run in runs]
        except BaseException:
            for run in runs:
                run.cancel()
            raise


class _Run:
    """One of the builds that `compile_all` compiles."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.futures: dict[str, Future[None]] = {}
        self.stale = {u.object: u.cost for u in objects.units if not objects.fresh(u)}
        self._done = 0
        self._lock = threading.Lock()

    def begin(self, estimate: Estimate) -> None:
        """`estimate`: of all builds."""
        self._estimate = estimate
        if self.stale:
            self.objects.say(
                f"{len(self.stale)} of {len(self.objects.units)} files to compile, {jobs()} at "
                f"once: about {estimate}"
            )

    def one(self, unit: Unit, other: Future[None] | None) -> None:
        """Compiles `unit`, behind `other`, which may make the same object."""
        if other is not None:
            wait([other])
        start = time.perf_counter()
        compiled = self.objects.compile_unit(unit)
        seconds = time.perf_counter() - start
        count = len(self.objects.units)
        with self._lock:
            self._done += 1
            self._estimate.done(self.stale.get(unit.object, 0.0), seconds, compiled)
            took = f"{seconds:.1f} s" if compiled else "up to date"
            left = f", about {self._estimate} left" if compiled and self._done < count else ""
            self.objects.say(f"[{self._done}/{count}] {unit.label} {took}{left}")

    def result(self) -> list[Path] | KernelBuildError:
        try:
            for future in as_completed(self.futures.values()):
                future.result()
        except KernelBuildError as e:
            self.cancel()
            return e
        return [unit.object for unit in self.objects.units]

    def cancel(self) -> None:
        for future in self.futures.values():
            future.cancel()


def other_builds(cache: Path, own: Path) -> list[Path]:
    """Folders of objects except `own` under `cache`, the project's, which nobody else writes to."""
    found = [*cache.glob("kernel_build/*"), *cache.glob("clib/*")]
    return sorted(folder for folder in found if folder.is_dir() and folder != own)


def _parse_depfile(text: str) -> list[str]:
    names = text.replace("\\\n", " ").split(":", 1)[-1]
    return sorted({n.replace("\\ ", " ") for n in re.split(r"(?<!\\)\s+", names) if n})
