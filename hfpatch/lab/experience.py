"""The experience log: what was tried on kernels, and what came of it, one JSON object a line.

Two logs are read: the one that hfpatch ships (`experience.jsonl` beside this file, of what its own
kernels have shown) and the user's. A line is appended whole under a lock, so two processes may
write at once; a line that was cut off, or is of a newer schema, is skipped and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hfpatch.lab.problems import Refused

SCHEMA = 1
OUTCOMES = ("success", "failure", "neutral")
BOTTLENECKS = ("memory", "compute", "latency", "occupancy", "unknown")
SHIPPED = Path(__file__).with_name("experience.jsonl")
#: A longer line is no entry.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One thing that was tried.

    Attributes:
        op: what the kernel computes: `softmax`, `rms_norm`, …
        backend: "cuda", "triton", "cpp", "python" or "project".
        chip: "H100", "sm_90", "cpu", …
        bottleneck: what limited the kernel before: one of `BOTTLENECKS`.
        technique: the one change, in a few words.
        outcome: "success", "failure" (slower, or wrong) or "neutral" (within noise).
        gain: how many times faster it became, at the shape said; None where that is not known.
        shape, dtype: what was measured.
        hypothesis, rationale: what was expected, and why.
        metrics: numbers by name: microseconds before and after, shares, counters.
        note: anything else, with more figures.
        source: where it comes from.
        time: seconds since 1970; 0 where that is not known.
        schema: of this record.
        id: made of all of the above.
    """

    op: str
    backend: str
    chip: str
    bottleneck: str
    technique: str
    outcome: str
    gain: float | None = None
    shape: str = ""
    dtype: str = ""
    hypothesis: str = ""
    rationale: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""
    source: str = ""
    time: float = 0.0
    schema: int = SCHEMA
    id: str = ""

    def __post_init__(self) -> None:
        for name in ("op", "backend", "chip", "technique"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"`{name}` of an entry must be a text that says something")
        for name in ("shape", "dtype", "hypothesis", "rationale", "note", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` of an entry must be a text")
        for name, known in (("outcome", OUTCOMES), ("bottleneck", BOTTLENECKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` of an entry must be one of {', '.join(known)}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.gain is not None and not _positive(self.gain):
            raise ValueError(f"`gain` of an entry must be a ratio above 0, got {self.gain!r}")
        if not isinstance(self.metrics, dict) or not all(
            isinstance(k, str) and _finite(v) for k, v in self.metrics.items()
        ):
            raise ValueError("`metrics` of an entry must be finite numbers by name")
        if not _finite(self.time):
            raise ValueError(f"`time` of an entry must be seconds, got {self.time!r}")
        if self.schema != SCHEMA:
            raise ValueError(f"`schema` of an entry must be {SCHEMA}, got {self.schema!r}")
        made = self._made_id()
        if self.id not in ("", made):
            raise ValueError(f"`id` of an entry is {self.id!r}, its content's is {made!r}")
        object.__setattr__(self, "id", made)

    def _made_id(self) -> str:
        content = {k: v for k, v in asdict(self).items() if k != "id"}
        text = json.dumps(content, sort_keys=True, ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def line(self) -> bytes:
        """As it stands in a log, the end of the line included."""
        kept = {k: v for k, v in asdict(self).items() if v not in ("", None, {})}
        return json.dumps(kept, ensure_ascii=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Entry:
        """From a line of a log.

        Raises:
            ValueError: it is none of this schema.
        """
        data = json.loads(line.decode("utf-8"))
        if not isinstance(data, dict):
            raise ValueError("an entry must be an object")
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"an entry of schema {SCHEMA} has no `{unknown[0]}`")
        try:
            return cls(**data)
        except TypeError as e:
            raise ValueError(str(e)) from e


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _finite(value) and value > 0


@dataclass
class Log:
    """A log file. `skipped` counts lines of the last reading that are no entries."""

    path: Path
    skipped: int = 0

    def entries(self) -> list[Entry]:
        """All of them, in the order of the file, each once; an empty list where there is none."""
        self.skipped = 0
        found: dict[str, Entry] = {}
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            try:
                if len(line) > _LONGEST:
                    raise ValueError("too long")
                entry = Entry.read(line)
            except (ValueError, RecursionError):
                self.skipped += 1
                continue
            found.setdefault(entry.id, entry)
        return list(found.values())

    def append(self, entries: Iterable[Entry]) -> int:
        """Add those that are not there yet; returns how many that were.

        Raises:
            Refused: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as descriptor:
                known = {e.id for e in self.entries()}
                new = {e.id: e for e in entries if e.id not in known}
                data = b"".join(e.line() for e in new.values())
                if data and not _ends_whole(descriptor):
                    data = b"\n" + data  # of a writer that was cut off: its line stays its own
                while data:
                    data = data[os.write(descriptor, data) :]
                return len(new)
        except OSError as e:
            raise Refused(f"the experience log `{self.path}` cannot be written: {e}") from e


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending, for this process alone."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        try:
            import fcntl
        except ImportError:  # Windows: a lock of the first byte
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined,unused-ignore]
            try:
                yield descriptor
            finally:
                os.lseek(descriptor, 0, os.SEEK_SET)
                msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # given back when it is closed
            yield descriptor
    finally:
        os.close(descriptor)


def _ends_whole(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return True
    os.lseek(descriptor, size - 1, os.SEEK_SET)
    return os.read(descriptor, 1) == b"\n"


def user_log(named: Path | None) -> Log:
    """The user's log: the file that is named, or that of hfpatch's state folder.

    Raises:
        Refused: no folder is the user's alone.
    """
    if named is not None:
        return Log(named)
    from hfpatch.hub.evidence import state_folder

    folder = state_folder(make=True)
    if folder is None:
        raise Refused("no state folder is yours alone; name a file by --log")
    return Log(folder / "experience.jsonl")


def both(named: Path | None) -> list[Entry]:
    """What hfpatch ships, then the user's own."""
    found = {e.id: e for e in (*Log(SHIPPED).entries(), *user_log(named).entries())}
    return list(found.values())


def merge(into: Log, other: Path) -> tuple[int, int]:
    """Add another log's entries; returns how many were added, and lines that were none.

    Raises:
        Refused: there is no such file.
    """
    if not other.is_file():
        raise Refused(f"`{other}` is no file; expected an experience log")
    log = Log(other)
    added = into.append(log.entries())
    return added, log.skipped


def matches(entry: Entry, words: Iterable[str]) -> bool:
    """Whether every word stands in some field of it."""
    text = " ".join(
        (entry.op, entry.backend, entry.chip, entry.bottleneck, entry.technique, entry.outcome,
         entry.shape, entry.dtype, entry.hypothesis, entry.rationale, entry.note)
    ).lower()  # fmt: skip
    return all(word.lower() in text for word in words)


def stats(entries: Iterable[Entry]) -> dict[str, Any]:
    """Counts by field, and by bottleneck how often what was tried won."""
    found = list(entries)
    counted = {
        name: dict(Counter(str(getattr(e, name)) for e in found).most_common())
        for name in ("outcome", "op", "backend", "chip", "bottleneck")
    }
    won = {
        name: {
            "tried": len(those),
            "won": sum(e.outcome == "success" for e in those),
        }
        for name in BOTTLENECKS
        if (those := [e for e in found if e.bottleneck == name])
    }
    return {"entries": len(found), **counted, "won by bottleneck": won}


def now() -> float:
    return round(time.time(), 3)
