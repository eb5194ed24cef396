"""Parts of files that are written by hand otherwise."""

from __future__ import annotations

from header import HeaderError


def between(name: str, text: str, start: str, end: str, inside: str) -> str:
    """`text` with `inside` between two of its lines.

    Raises:
        HeaderError: it has not both lines, in this order; `name` is the file's.
    """
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise HeaderError(f"`{name}` has no lines {start.strip()!r} and {end.strip()!r}")
    return before + start + inside + end + after
