"""Reading files that somebody else may have put there: within bounds, and in one meaning only."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any


def read_regular(path: Path, limit: int) -> bytes:
    """A regular file's bytes; neither a pipe nor a device is waited for or read.

    Raises:
        OSError: it cannot be read, is something else, or is larger than `limit` bytes.
    """
    data = read_start(path, limit + 1)
    if len(data) > limit:
        raise OSError(f"`{path}` is larger than {limit} bytes")
    return data


def read_start(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a regular file.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # not every system has each
    if "\0" in str(path):
        raise OSError(f"{str(path)!r} is no path: it has a zero byte")
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"`{path}` is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def strict_json(data: bytes) -> Any:
    """JSON that every parser reads alike: UTF-8, no key twice in an object, no number that is none.

    Raises:
        ValueError: it is not that.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:100]!r} stands there twice")
        found[key] = value
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:50]} is too large")
    return value
