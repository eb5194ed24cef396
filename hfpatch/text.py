"""Text that somebody else may have written, as it may be shown, and what they may have meant."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

_LONGEST = 8000  # characters
_PLAIN = str.maketrans(
    {"─": "-", "→": "->", "×": "x", "·": "|", "…": "...", "µ": "u", "\ufffd": "?"}
)


def printable(text: str, longest: int = _LONGEST) -> str:
    """Text without what a terminal obeys or a reader does not see: escape sequences, controls other
    than the end of a line, marks that turn the direction of writing. What is very long is cut."""
    if len(text) > longest:
        text = text[:longest] + "…"
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def shown(text: str) -> str:
    """Text in the signs that standard output's encoding has, so that `print` of it cannot fail: a
    terminal of another language's, a pipe on Windows. In UTF-8 it is the text."""
    encoding = getattr(sys.stdout, "encoding", None)  # none in a notebook, or of a stream of theirs
    if not isinstance(encoding, str):
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # no encoding of Python's: what the stream does with text, it knows
        return text
    return text


def told(e: BaseException) -> str:
    """An error of somebody else's code, its type first; its words may be anything."""
    try:
        words = str(e)
    except Exception as again:  # its own `__str__`
        words = f"its words cannot be had: {type(again).__name__}"
    return f"{type(e).__name__}: {printable(words)}"


def meant(name: object, names: Iterable[str]) -> str:
    """Return " Did you mean `rms_norm`?", or "" where no name is near, to end a sentence with."""
    near = difflib.get_close_matches(str(name).lower(), list(names), 1, 0.6)
    return f" Did you mean `{near[0]}`?" if near else ""
