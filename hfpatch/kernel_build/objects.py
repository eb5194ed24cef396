"""Sources compiled at once, and only those that changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commands import run, write
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


class Objects:
    """The objects of `units`, compiled in the directory `root`.

    `tools`: what else they depend on, such as versions of compilers; `say` gets a line for each.
    """

    def __init__(
        self, units: Sequence[Unit], root: Path, tools: str, say: Callable[[str], None]
    ) -> None:
        self.units = units
        self.root = root
        self.tools = tools
        self.say = say

    def compile(self) -> list[Path]:
        """Their paths, in the order of `units`.

        Raises:
            KernelBuildError: a compiler failed; those that had not begun are not started.
        """
        done = 0
        lock = threading.Lock()
        stale = {unit.object: unit.cost for unit in self.units if not self._fresh(unit)}
        estimate = Estimate(list(stale.values()), jobs())
        if stale:
            self.say(
                f"{len(stale)} of {len(self.units)} files to compile, {jobs()} at once: about "
                f"{estimate}"
            )

        def one(unit: Unit) -> None:
            nonlocal done
            start = time.perf_counter()
            compiled = self._compile_unit(unit)
            seconds = time.perf_counter() - start
            with lock:
                done += 1
                estimate.done(stale.get(unit.object, 0.0), seconds, compiled)
                took = f"{seconds:.1f} s" if compiled else "up to date"
                left = f", about {estimate} left" if compiled and done < len(self.units) else ""
                self.say(f"[{done}/{len(self.units)}] {unit.label} {took}{left}")

        with ThreadPoolExecutor(jobs()) as pool:
            futures = [pool.submit(one, unit) for unit in self.units]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        return [unit.object for unit in self.units]

    def _fresh(self, unit: Unit) -> bool:
        """Whether its object is there, of the same command and files."""
        try:
            record = json.loads(unit.object.with_suffix(".json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        key: object = record.get("key")
        return unit.object.is_file() and key == self._key(unit, record.get("deps", []))

    def _compile_unit(self, unit: Unit) -> bool:
        """Returns whether a compiler ran: an object is reused while its command and files last."""
        if self._fresh(unit):
            return False
        state = unit.object.with_suffix(".json")
        state.unlink(missing_ok=True)
        # Another build may be at the same file.
        partial = unit.object.with_suffix(f".{os.getpid()}.o")
        depfile = partial.with_suffix(".d")
        command = [*unit.command[:-1], str(partial), "-MMD", "-MF", str(depfile)]
        start = time.time()
        try:
            said = run(command, cwd=self.root)
            deps = _parse_depfile(depfile.read_text(encoding="utf-8"))
            os.replace(partial, unit.object)
        finally:
            partial.unlink(missing_ok=True)
            depfile.unlink(missing_ok=True)
        # A file that was written meanwhile may have been read before: compiled again next time.
        key = None if self._changed_since(start, deps) else self._key(unit, deps)
        record = {"key": key, "deps": deps, "kernels": parse_ptxas(said)}
        write(state, json.dumps(record))
        return True

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


def _parse_depfile(text: str) -> list[str]:
    names = text.replace("\\\n", " ").split(":", 1)[-1]
    return sorted({n.replace("\\ ", " ") for n in re.split(r"(?<!\\)\s+", names) if n})
