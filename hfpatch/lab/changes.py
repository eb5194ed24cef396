"""What differs between two versions, and whether that is one change as far as a diff shows.

Changed lines are gathered into places: a function, or what stands between functions. Two places are
one change where they share a word that the change is about, as a constant and its uses do. Blank
lines, indentation and comments are no changes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from hfpatch.lab.workspace import source_files

_WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.]*")
#: Words that any change may have, and so tie nothing together.
_COMMON = {
    "auto", "bool", "break", "case", "char", "const", "constexpr", "continue", "def", "do",
    "double", "else", "extern", "float", "for", "from", "if", "import", "in", "int", "int64_t",
    "inline", "long", "return", "short", "signed", "sizeof", "size_t", "static", "struct",
    "switch", "template", "typename", "uint32_t", "unsigned", "using", "void", "while", "None",
    "True", "False", "self", "and", "or", "not", "is", "global", "device", "__global__",
    "__device__", "__restrict__", "__shared__", "__launch_bounds__", "__forceinline__",
    "threadIdx", "blockIdx", "blockDim", "gridDim", "x", "y", "z", "tl", "torch", "i", "j", "k",
    "n", "0", "1", "2", "0.0", "1.0", "0.0f", "1.0f", "f",
}  # fmt: skip
#: A line that begins a function, in C or in Python.
_FUNCTION = re.compile(
    r"^\s*(?:def\s+(\w+)\s*\(|(?:[\w:<>,*&\s\"()]*?)\b(\w+)\s*\([^;]*$)", re.ASCII
)
_OPENS_A_SPACE = re.compile(r'(?:inline\s+)?namespace\b[^;]*\{$|extern\s+"C"\s*\{$')
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "else", "sizeof", "defined"}


@dataclass
class Place:
    """Changed lines that stand together.

    Attributes:
        where: `file: function`.
        lines: with "-" and "+" before them.
        words: what changed in them.
    """

    where: str
    lines: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)


def differences(before: Path, after: Path) -> tuple[list[Place], str]:
    """The places where two versions differ, and the whole unified diff.

    Args:
        before, after: two files, or two trees.
    """
    places: list[Place] = []
    text: list[str] = []
    for name, old, new in _pairs(before, after):
        if old == new:
            continue
        text += difflib.unified_diff(
            old.splitlines(), new.splitlines(), f"a/{name}", f"b/{name}", lineterm=""
        )
        places += _places(name, old, new)
    return places, "\n".join(text)


def independent(places: list[Place]) -> list[list[Place]]:
    """The places in groups: those of a group are one change."""
    groups: list[list[Place]] = []
    for place in places:
        tied = [g for g in groups if any(_tied(place, other) for other in g)]
        rest = [g for g in groups if g not in tied]
        groups = [*rest, [*(p for g in tied for p in g), place]]
    return groups


def _tied(a: Place, b: Place) -> bool:
    return a.where == b.where or bool(a.words & b.words)


def _pairs(before: Path, after: Path) -> list[tuple[str, str, str]]:
    """Names with both texts; what one has not is empty there."""
    if before.is_file():
        return [(after.name, _text(before), _text(after))]
    names = {p.relative_to(root).as_posix() for root in (before, after) for p in source_files(root)}
    return [(name, _text(before / name), _text(after / name)) for name in sorted(names)]


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    return path.read_bytes().decode("utf-8", errors="replace")


def _places(name: str, old: str, new: str) -> list[Place]:
    python = name.endswith(".py")
    a, b = _significant(old, python), _significant(new, python)
    matcher = difflib.SequenceMatcher(None, [t for t, _ in a], [t for t, _ in b], autojunk=False)
    found: dict[str, Place] = {}
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        removed, added = a[i1:i2], b[j1:j2]
        function = (added or removed)[0][1]
        where = f"{name}: {function}"
        place = found.setdefault(where, Place(where))
        place.lines += [f"-{t}" for t, _ in removed] + [f"+{t}" for t, _ in added]
        gone = _words(t for t, _ in removed)
        come = _words(t for t, _ in added)
        place.words |= gone ^ come
        if not gone ^ come:  # only moved about
            place.words |= gone
    return list(found.values())


def _words(lines: object) -> set[str]:
    found: set[str] = set()
    for line in lines:  # type: ignore[attr-defined]
        found |= set(_WORD.findall(line))
    return found - _COMMON


def _significant(text: str, python: bool) -> list[tuple[str, str]]:
    """Lines without comments and spaces at their ends, each with the function that it stands in."""
    if python:
        text = re.sub(r"(?m)(?<!['\"\w])#[^\n'\"]*$", "", text)
    else:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", "", text)
    found: list[tuple[str, str]] = []
    function, depth = "outside of functions", 0
    for line in text.splitlines():
        bare = " ".join(line.split())
        if not bare:
            continue
        begins = depth == 0 if not python else not line[:1].isspace()
        if begins:
            match = _FUNCTION.match(line)
            named = (match[1] or match[2]) if match else None
            if named and named not in _NOT_FUNCTIONS:
                function = named
            elif python or not bare.startswith(("{", ")")):
                function = _before(function, bare, python)
        found.append((bare, function))
        if not python and not _OPENS_A_SPACE.match(bare):
            depth = max(0, depth + line.count("{") - line.count("}"))
            if depth == 0 and "}" in line:
                function = "outside of functions"
    return found


def _before(function: str, bare: str, python: bool) -> str:
    """The place of a line at the outermost level that begins no function."""
    if python:
        return function if bare.startswith((")", "]", "}")) else "outside of functions"
    # the parameters of a function that began on a line before, or a declaration of its own
    ended = bare.endswith(";") and function == "outside of functions"
    return "outside of functions" if ended else function
