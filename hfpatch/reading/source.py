"""The syntax tree of a function, known to be the code that runs.

`inspect` finds text by file and line, and the file may have changed, or the code object been
exchanged. So the tree that was found is compiled again and compared with the function's code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Iterator

from hfpatch.reading.values import Unexplained

FunctionTree = ast.FunctionDef | ast.Lambda


def tree_of(function: types.FunctionType) -> FunctionTree:
    """The tree of a function or lambda.

    Raises:
        Unexplained: there is no source, or it is not that of the function's code.
    """
    code, known = function.__code__, function.__globals__
    libraries = [n for n in code.co_names if isinstance(known.get(n), types.ModuleType)]
    return _tree_of(code, tuple(libraries))


@functools.lru_cache(maxsize=4096)
def _tree_of(code: types.CodeType, libraries: tuple[str, ...]) -> FunctionTree:
    try:
        lines, _ = inspect.getsourcelines(code)
        module = _parsed(lines)
    except (OSError, TypeError, SyntaxError, IndexError, ValueError) as e:
        raise Unexplained(f"the source of `{_name(code)}` cannot be read") from e
    wanted = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    for node in ast.walk(module):
        if (
            isinstance(node, wanted)
            and (isinstance(node, ast.Lambda) or node.name == code.co_name)
            and any(
                _same(found, code)
                for imported in (*_subsets(libraries), code.co_names)
                for found in _compiled(node, code, imported)
            )
        ):
            return node
    raise Unexplained(f"the source of `{_name(code)}` is not the code that runs")


def _name(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them first: a file may have a library by `import *`, which counts as no import."""
    for size in range(len(names), -1, -1) if len(names) <= 4 else [len(names)]:
        yield from itertools.combinations(names, size)


def _parsed(lines: list[str]) -> ast.Module:
    """The statement in these lines, or a lambda in the middle of one."""
    text = "".join(lines)
    if text[:1].isspace():  # not dedented, which would change texts of several lines
        text = "if True:\n" + text
    try:
        return ast.parse(text)
    except SyntaxError:
        start = text.index("lambda")
        for end in range(len(text), start, -1):
            try:
                return ast.parse(text[start:end])
            except SyntaxError:
                continue
        raise


def _compiled(
    node: FunctionTree, code: types.CodeType, imported: tuple[str, ...]
) -> list[types.CodeType]:
    """Code objects of that name in `node`, compiled where the function stood: in a class of that
    name (private names, `super()`), in a function that has its free variables, in a file that
    imports these names (Python calls what lies in them in another way)."""
    outer = ", ".join(n for n in code.co_freevars if n != "__class__")
    parts = _name(code).split(".")
    owner = parts[-2] if len(parts) > 1 and parts[-2].isidentifier() else None
    inner = f"class {owner}:\n  pass" if owner else "pass"
    imports = "".join(f"import {n}\n" for n in imported)
    frame = ast.parse(f"{imports}def outer({outer}):\n {inner}")
    function = frame.body[-1]
    assert isinstance(function, ast.FunctionDef)
    holder = function.body[0] if owner else function
    assert isinstance(holder, (ast.ClassDef, ast.FunctionDef))
    plain: ast.stmt = ast.Expr(node) if isinstance(node, ast.Lambda) else _undecorated(node)
    holder.body = [plain]
    flags = code.co_flags & 0xFF0000  # of `from __future__` imports
    try:
        whole = compile(
            ast.fix_missing_locations(frame), "<read>", "exec", flags=flags, dont_inherit=True
        )
    except (SyntaxError, ValueError):
        return []
    return [c for c in _codes(whole) if c.co_name == code.co_name]


def _undecorated(node: ast.FunctionDef) -> ast.FunctionDef:
    """The function alone: decorators, defaults and annotations are no part of its code object."""
    values = {name: getattr(node, name) for name in node._fields}
    bare = ast.FunctionDef(**{**values, "decorator_list": [], "returns": None})
    return ast.copy_location(bare, node)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    found = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found + [deeper for c in found for deeper in _codes(c)]


def _same(ours: types.CodeType, theirs: types.CodeType) -> bool:
    def parts(code: types.CodeType) -> tuple[object, ...]:
        return (
            code.co_code,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR),
            getattr(code, "co_exceptiontable", b""),
            len(code.co_consts),
        )

    return parts(ours) == parts(theirs) and all(
        map(_same_constants, ours.co_consts, theirs.co_consts)
    )


def _same_constants(ours: object, theirs: object) -> bool:
    """Also of what is in a tuple: a constant that was put there may be of a class of its own."""
    if isinstance(ours, types.CodeType) and isinstance(theirs, types.CodeType):
        return _same(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if type(ours) is tuple and type(theirs) is tuple:
        return len(ours) == len(theirs) and all(map(_same_constants, ours, theirs))
    return repr(ours) == repr(theirs)
