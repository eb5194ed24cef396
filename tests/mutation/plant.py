"""Faults for a mutation run: one small change of a source file each.

Python is changed by its syntax tree (comparisons, arithmetic, constants, conditions, returned
values, calls that are left out), C++ by its tokens. A fault is text for text, so lines stay where
they were.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """`old` at `start` of the file becomes `new`. line: of the change, from 1."""

    path: str
    line: int
    start: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The file's text with the fault in it."""
        assert source[self.start : self.start + len(self.old)] == self.old
        return source[: self.start] + self.new + source[self.start + len(self.old) :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_short(self.old)} -> {_short(self.new)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


_COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}


class _Python(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.lines = [0]
        for line in source.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.bytes = source.encode()
        self.found: list[Fault] = []

    def _at(self, line: int, column: int) -> int:
        """Offset in characters of a position of the syntax tree (which counts bytes)."""
        return len(self.bytes[: self.lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def _add(self, line: int, start: int, end: int, new: str) -> None:
        self.found.append(Fault(self.path, line, start, self.source[start:end], new))

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(node.lineno, *self._span(node), new)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        at = self.source.find(old, start, end)
        if at >= 0:
            line = self.source.count("\n", 0, at) + 1
            self._add(line, at, at + len(old), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, *_COMPARED[type(op)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _COMPUTED:
            self._between(node.left, node.right, *_COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between(node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add(node.lineno, start, self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value + 1))
        elif isinstance(value, float):
            self._replace(node, repr(value * 2 if value else 1.0))

    def visit_If(self, node: ast.If) -> None:
        for new in ("True", "False"):
            self._replace(node.test, new)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for new in ("True", "False"):
            self._replace(node.test, new)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._replace(node.value, "None")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def visit_If_type_checking(self, node: ast.If) -> bool:
        return "TYPE_CHECKING" in ast.dump(node.test)

    def visit_Assert(self, node: ast.Assert) -> None:
        """They state what holds; without them nothing is different."""


def python_faults(path: str, source: str) -> list[Fault]:
    """Every fault that can be planted in a Python file; a few leave it none (`is_source`)."""
    visitor = _Python(path, source)
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.If) and visitor.visit_If_type_checking(node):
            continue
        visitor.visit(node)
    return [f for f in visitor.found if f.old != f.new]


def is_source(fault: Fault, source: str) -> bool:
    """Whether the file is still one with the fault; of C++ its compiler will say."""
    if not fault.path.endswith(".py"):
        return True
    try:
        ast.parse(fault.applied(source))
    except SyntaxError:
        return False
    return True


#: Tokens of C++ and what they become. Templates, casts and shifts are left alone.
_TOKENS: tuple[tuple[str, str], ...] = (
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " / "),
    (r" / ", " * "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+= ", " -= "),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"(?<![\w.])0\.5f?\b", "0.25f"),
    (r"(?<![\w.])1\.0f?\b", "1.5f"),
    (r"(?<=return )-1\b", "0"),
)


def cpp_faults(path: str, source: str) -> list[Fault]:
    """Every fault that can be planted in a C++ file by its tokens, outside of comments, strings,
    templates' heads and preprocessor lines. Some do not compile; those are not counted."""
    found = []
    at = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = re.sub(r'"(?:\\.|[^"\\])*"', lambda m: " " * len(m[0]), line).split("//")[0]
        plain = not code.lstrip().startswith(("#", "template", "static_assert", "*", "/*"))
        for pattern, new in _TOKENS if plain and "<<" not in code else ():
            for m in re.finditer(pattern, code):
                found.append(Fault(path, number, at + m.start(), m[0], new))
        at += len(line)
    return found


def planted(root: Path, paths: Iterable[str], count: int, seed: int) -> Iterator[Fault]:
    """`count` faults of all that can be planted in `paths` (under root), drawn without putting
    back; every file's share is that of its possible faults."""
    sources = {path: (root / path).read_text(encoding="utf-8") for path in paths}
    faults: list[Fault] = []
    for path, source in sources.items():
        faults += (python_faults if path.endswith(".py") else cpp_faults)(path, source)
    random.Random(seed).shuffle(faults)
    # A file is parsed for the faults that are drawn alone: there are tens of thousands.
    yield from itertools.islice((f for f in faults if is_source(f, sources[f.path])), count)
