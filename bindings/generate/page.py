"""`docs/c-api.md`: the reference of the C interface."""

from __future__ import annotations

import re
import textwrap

from header import Function, Header, Parameter

_START = """\
# C interface: reference

Every function of [`kernel_src/hfpatch.h`](../kernel_src/hfpatch.h), version {abi}. This page is
written by `python bindings/generate`. How to build and link: [c-library.md](c-library.md).

Results come first, then inputs, then the stream. The table of a function says what a caller
allocates for each result; `NULL` marks what may be left out.

"""
_KINDS = {
    "output": "result",
    "tensor": "tensor",
    "list": "list",
    "float": "`double`",
    "int": "`int64_t`",
    "stream": "stream",
}
_RULES = {
    "x": "shape and dtype of the first tensor",
    "norm": "shape of the first tensor; its dtype, or by `cast`",
    "halved": "dtype of the first tensor; its shape with the last dimension halved",
    "modulated": "shape of the first tensor; its dtype, under `HFP_CAST_INPUT` promoted with the "
    "second's",
    "rows": "fp32, the shape of the first tensor without its last dimension",
    "scalar": "fp32, one element",
    "dweight": "`[D]` in the dtype of `weight`, if `needs` has `HFP_NEED_WEIGHT`",
    "dbias": "`[D]` in the dtype of `bias`, if `needs` has `HFP_NEED_BIAS`",
    "groups": "fp32 `[N, groups, hfp_group_parts(…) + 1, 2]`",
    "partials": "fp32 `[hfp_partial_rows(rows, D), K D]`",
    "indices": "int64, the shape of the first tensor without its last dimension",
    "workspace": "int64 `[hfp_row_workspace(rows, V)]`",
    "topk": "the first tensor's shape, the last dimension `k`; its dtype",
    "topk_indices": "the first tensor's shape, the last dimension `k`; int64",
    "product": "the first tensor's dtype; `[M, N]` or `[B, M, N]`",
    "product_workspace": "fp32 `[hfp_gemm_workspace(…)]`",
    "attended": "shape and dtype of the first tensor, the last dimension that of `v`",
    "balance": "fp32 `[2 E + 1]`",
    "balance_partials": "fp32 `[hfp_balance_parts(T) (2 E + 1)]`",
    "own": "as above",
    "own?": "as above, or `NULL`",
    "chunks": "fp32 `[hfp_norm_partials(tensors)]`",
}


def page(header: Header) -> str:
    parts = [_START.format(abi=header.abi)]
    parts.append("## Functions\n\n| function | results |\n|---|---|\n")
    for function in header.ops:
        outputs = [f"`{p.name}`" for p in function.parameters if p.kind == "output"]
        changed = [f"`{p.name}` (in place)" for p in function.parameters if p.written]
        link = f"[`{function.name}`](#{function.name})"
        parts.append(f"| {link} | {', '.join(outputs + changed)} |\n")
    parts.append("\n")
    shown = ""
    for function in header.functions:
        parts.append(f"### `{function.name}`\n\n```c\n{_prototype(function)}\n```\n\n")
        if function.doc == shown:
            parts.append("Described with the function before.\n\n")
        elif function.doc:
            parts.append(f"```text\n{_wrapped(function.doc)}\n```\n\n")
        shown = function.doc
        if function.op:
            parts.append(_table(function) + "\n")
    parts.append("## Constants\n\n| name | value |\n|---|---|\n")
    parts += [
        f"| `{name}` | {value} |\n"
        for name, value in sorted(header.constants.items())
        if not name.endswith("_COUNT")
    ]
    return "".join(parts)


def _prototype(function: Function) -> str:
    whole = re.sub(r" (\*?\w+[,)])", r"~\1", function.prototype + ";")  # a type and its name
    return textwrap.fill(whole, 96, subsequent_indent="    ").replace("~", " ")


def _wrapped(doc: str) -> str:
    """As the header has it; only what is longer than a line of this page is broken."""
    lines = []
    for line in doc.splitlines():
        indent = re.match(r" *", line)
        assert indent is not None
        lines += textwrap.wrap(line, 100, subsequent_indent=indent[0]) or [""]
    return "\n".join(lines)


def _table(function: Function) -> str:
    rules = [rule.strip() for rule in function.results.split(",")]
    rows = ["| argument | what | |", "|---|---|---|"]
    for i, p in enumerate(function.parameters):
        note = _rule(rules[i]) if p.kind == "output" else _note(p)
        rows.append(f"| `{p.name}` | {_KINDS[p.kind]} | {note} |")
    return "\n".join(rows) + "\n"


def _note(p: Parameter) -> str:
    if p.optional:
        return "or `NULL`"
    if p.written:
        return "changed in place"
    return "`cudaStream_t`, `NULL`: the default one; ignored on the CPU" * (p.kind == "stream")


def _rule(rule: str) -> str:
    if rule in _RULES:
        return _RULES[rule]
    if rule.startswith("sums="):
        of = rule.removeprefix("sums=")
        return f"fp32 `[hfp_sum_partial_rows(rows, D, rows of {of}), K D]`"
    of, _, bit = rule.removeprefix("=").partition("&")
    found = f"shape and dtype of `{of}`"
    return found + (f", if `needs` has {bit}" if bit else "")
