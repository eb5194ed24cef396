"""What differs between two versions, and whether that is one change as far as a diff shows.

Changed lines are gathered into places. Lines that differ in numbers alone are a place for each
number, called after the word before it: a block size, a number of warps. Other lines of a function
are one place, and so is each line outside of functions. Places are one change where they are about
the same word, where one function calls the other, or where numbers change alike (256 and 255 to 512
and 511).
Blank lines, indentation, comments and docstrings are no changes.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from hfpatch.lab.workspace import source_files

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\S")
_KEYWORD = re.compile(r"\b([A-Za-z_]\w*)=(\d+(?:\.\d+)?)\b(?![.\w])")
_NAME = re.compile(r"[A-Za-z_]")
_TYPES = {"int", "float", "constexpr", "const", "static", "auto", "dim3", "unsigned", "tl"}
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
    r"^\s*(?:def\s+(\w+)\s*\(|(?:[\w:<>,*&\s\"()]*?)\b(\w+)\s*\([^;{]*(?:\{.*)?$)", re.ASCII
)
_OPENS_A_SPACE = re.compile(r'(?:inline\s+)?namespace\b[^;]*\{$|extern\s+"C"\s*\{$')
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "else", "sizeof", "defined"}


@dataclass
class Place:
    """Changed lines that belong together.

    Attributes:
        where: `file: function`, or `file: name` of a number.
        function: that they stand in; "" outside of functions.
        lines: with "-" and "+" before them.
        words: what changed in them.
        mentioned: every word of them, and, of a function, of all that it says.
        numbers: before and after, where numbers alone changed.
    """

    where: str
    function: str = ""
    lines: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)
    numbers: tuple[float, float] | None = None


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
    if a.where == b.where or a.words & b.words:
        return True
    if a.numbers is not None and b.numbers is not None:
        return any((a.numbers[0] + d, a.numbers[1] + d) == b.numbers for d in (-1.0, 0.0, 1.0))
    if a.numbers is not None or b.numbers is not None:
        number, other = (a, b) if a.numbers is not None else (b, a)
        return bool(number.words & other.words)
    return a.function in b.mentioned or b.function in a.mentioned


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
    said: dict[str, set[str]] = {}
    for line, function in (*a, *b):
        said.setdefault(function, set()).update(_WORD.findall(line))
    matcher = difflib.SequenceMatcher(None, [t for t, _ in a], [t for t, _ in b], autojunk=False)
    found: dict[str, Place] = {}
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        removed, added = a[i1:i2], b[j1:j2]
        numbers = _numbers([t for t, _ in removed], [t for t, _ in added])
        if numbers is not None:
            for word, before, after, gone, come in numbers:
                place = Place(f"{name}: {word} {before:g} to {after:g}", removed[0][1])
                place.lines, place.words = [f"-{gone}", f"+{come}"], {word}
                place.mentioned, place.numbers = {word}, (before, after)
                found.setdefault(place.where, place)
            continue
        for function in dict.fromkeys(f for _, f in (*removed, *added)):
            here = [[t for t, f in lines if f == function] for lines in (removed, added)]
            if function:
                _note(found, f"{name}: {function}", function, here[0], here[1], said[function])
                continue
            for gone, come in itertools.zip_longest(*here):  # a line each
                less, more = ([] if line is None else [str(line)] for line in (gone, come))
                _note(found, f"{name}: `{(more or less)[0][:40]}`", "", less, more, set())
    return list(found.values())


def _note(
    found: dict[str, Place],
    where: str,
    function: str,
    removed: list[str],
    added: list[str],
    said: set[str],
) -> None:
    place = found.setdefault(where, Place(where, function))
    place.lines += [f"-{t}" for t in removed] + [f"+{t}" for t in added]
    gone, come = _words(removed), _words(added)
    place.words |= (gone ^ come) or gone  # or only moved about
    place.mentioned |= (gone | come | said) - _COMMON


def _numbers(
    removed: list[str], added: list[str]
) -> list[tuple[str, float, float, str, str]] | None:
    """The numbers that changed, with the word before each, and the lines; None where more did."""
    if len(removed) != len(added):
        return None
    found = []
    for gone, come in zip(removed, added, strict=True):
        named, renamed = dict(_KEYWORD.findall(gone)), dict(_KEYWORD.findall(come))
        if _without_keywords(gone) == _without_keywords(come):  # `num_warps=8` came, or changed
            for word in {**named, **renamed}:
                x, y = (float(d.get(word, "nan")) for d in (named, renamed))
                if x != y:
                    found.append((word, x, y, gone, come))
            continue
        a, b = _TOKEN.findall(gone), _TOKEN.findall(come)
        if len(a) != len(b):
            return None
        word = ""
        for x, y in zip(a, b, strict=True):
            if x != y:
                before, after = _value(x), _value(y)
                if before is None or after is None:
                    return None
                found.append((word or gone[:40], before, after, gone, come))
            elif _NAME.match(x) and x not in _TYPES:
                word = x
    return found


def _without_keywords(line: str) -> str:
    return re.sub(r"[\s,]+", " ", _KEYWORD.sub(" ", line)).replace("( ", "(").replace(" )", ")")


def _value(token: str) -> float | None:
    try:
        return float(token.rstrip("fFuUlL"))
    except ValueError:
        return None


def _words(lines: list[str]) -> set[str]:
    return {word for line in lines for word in _WORD.findall(line)} - _COMMON


def _significant(text: str, python: bool) -> list[tuple[str, str]]:
    """Lines without comments and spaces at their ends, each with the function that it stands in."""
    if python:
        text = re.sub(r'(?m)^\s*(?:"""(?:.|\n)*?"""|"[^"\n]*")\s*$', "", text)
        text = re.sub(r"(?m)(?<!['\"\w])#[^\n'\"]*$", "", text)
    else:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", "", text)
    found: list[tuple[str, str]] = []
    function, depth = "", 0
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
                function = ""
    return found


def _before(function: str, bare: str, python: bool) -> str:
    """The place of a line at the outermost level that begins no function."""
    if python:
        return function if bare.startswith((")", "]", "}")) else ""
    # the parameters of a function that began on a line before, or a declaration of its own
    ended = bare.endswith(";") and function == ""
    return "" if ended else function
