"""The table of functions in `CARD.md`: the header's ops, in the words of the package's functions.

The rest of the card is written by hand. It is a Jinja template of kernel-builder's.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from header import ROOT, Header, HeaderError
from package import public_functions
from section import between

CARD = ROOT / "CARD.md"
PACKAGE = ROOT / "torch-ext" / "hfpatch_kernels"
_START = "<!-- The table is written by `python bindings/generate`. -->\n"
_END = "<!-- End of the table. -->\n"
#: What an op is for beside the forward of another, which is where its row says so.
_GRADIENTS = ("_backward", "_with_gradient")
#: Whose gradient is the same kernel with -sin, so that it has no row of its own in the header.
_TURNED_BACK = ("rope", "rope_qk", "qk_norm_rope")


def card(header: Header) -> str:
    """`CARD.md` with the table of these ops.

    Raises:
        HeaderError: an op has no public function, or that has no docstring; or the card has no
            place for the table.
    """
    text = CARD.read_text(encoding="utf-8")
    return between(CARD.name, text, _START, _END, _table(header))


def _table(header: Header) -> str:
    described = _described(PACKAGE)
    ops = [function.op for function in header.operators]
    lines = ["", "| function | computes | in place | gradient |", "|---|---|---|---|"]
    for op in ops:
        if op.endswith(_GRADIENTS):
            continue
        if op not in described:
            raise HeaderError(
                f"op `{op}` of the header has no function with a docstring in `{PACKAGE.name}`"
            )
        in_place = f"`{op}_`" if f"{op}_" in described else ""
        own = op in _TURNED_BACK or any(op + ending in ops for ending in _GRADIENTS)
        gradient = "fused" if own else ""
        lines.append(f"| `{op}` | {described[op]} | {in_place} | {gradient} |")
    return "\n".join([*lines, "", ""])


def _described(package: Path) -> dict[str, str]:
    """The first sentence of each public function's docstring, by its name."""
    found: dict[str, str] = {}
    for name, module in public_functions(package).items():
        for function in ast.parse((package / f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(function, ast.FunctionDef) and function.name == name:
                doc = ast.get_docstring(function)
                if doc is not None:
                    found[name] = _sentence(doc)
    return found


def _sentence(doc: str) -> str:
    first = " ".join(doc.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return re.sub(r"\.$", "", first)
