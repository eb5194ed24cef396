"""Text that somebody else may have written, as it may be shown."""

from __future__ import annotations

_LONGEST = 8000  # characters


def printable(text: str, longest: int = _LONGEST) -> str:
    """Text without what a terminal obeys or a reader does not see: escape sequences, controls but
    for the end of a line, marks that turn the direction of writing. What is very long is cut."""
    if len(text) > longest:
        text = text[:longest] + "…"
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
