"""Of the torch package: `_table.py`, the rows of the header's op tables, and what `__init__.py`
exports.

A module of the package exports its functions without a leading underscore. Those of `INTERNAL` are
for the other modules.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from header import ROOT, Header, HeaderError
from section import between

PACKAGE = ROOT / "torch-ext" / "hfpatch_kernels"
#: Modules whose functions are for the package alone.
INTERNAL = frozenset({"_autograd", "_codes", "_fakes", "_ops", "_second", "_table"})
#: What else the package exports, and from where.
_ALSO = {"calls": "", "layers": "", "ops": "_ops", "add_op_namespace_prefix": "_ops"}
_EXPORTS = "# Exports: written by `python bindings/generate`.\n"
_END = "# End of the exports.\n"


def table(header: Header) -> str:
    """The op tables as data, for what is not compiled."""
    lines = [
        '"""The op tables of hfpatch.h.\n\n'
        "Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit.\n"
        '"""',
        "",
        "#: By operator: its result rules and the names of its arguments.",
        "OPS = {",
    ]
    for function in header.operators:
        names = [p.name for p in function.parameters if p.kind not in ("output", "stream")]
        lines += [
            f'    "{function.op}": (',
            f'        "{function.results}",',
            *_quoted(names),
            "    ),",
        ]
    lines += ["}", "#: Which have an operator that writes over arguments.", "IN_PLACE = ("]
    lines += [f'    "{op}",' for op in header.in_place]
    return "\n".join([*lines, ")"]) + "\n"


def _quoted(names: list[str]) -> list[str]:
    """One string of words in literals that fit into a line."""
    whole = " ".join(names)
    parts = [whole] if len(whole) < 90 else textwrap.wrap(whole, 85)
    return [*(f'        "{part} "' for part in parts[:-1]), f'        "{parts[-1]}",']


def exports(header: Header) -> str:
    """`__init__.py` with the imports and `__all__` of what the modules define."""
    path = PACKAGE / "__init__.py"
    found = public_functions(PACKAGE)
    if missing := [f.op for f in header.operators if f.op not in found and not _is_gradient(f.op)]:
        raise HeaderError(f"`{PACKAGE.name}` has no function for: {', '.join(missing)}")
    modules: dict[str, list[str]] = {}
    for name, module in [*found.items(), *_ALSO.items()]:
        modules.setdefault(module, []).append(name)
    lines = ["from . import _fakes as _fakes"]
    for module in sorted(modules):
        names = sorted(modules[module])
        line = f"from .{module} import {', '.join(names)}"
        if len(line) > 100:
            line = "\n".join([f"from .{module} import (", *(f"    {name}," for name in names), ")"])
        lines.append(line)
    names = sorted([*found, *_ALSO])
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in names), "]", ""]
    return between(path.name, path.read_text(encoding="utf-8"), _EXPORTS, _END, "\n".join(lines))


def public_functions(package: Path) -> dict[str, str]:
    """The module of each function that the package exports."""
    found = {}
    for file in sorted(package.glob("_*.py")):
        if file.stem == "__init__" or file.stem in INTERNAL:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name] = file.stem
    return found


def _is_gradient(op: str) -> bool:
    return op.endswith(("_backward", "_with_gradient"))
