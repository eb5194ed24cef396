"""`hfpatch/capi/signatures.py` and `functions.py`: the interface for Python."""

from __future__ import annotations

from header import Function, Header, Parameter

_NOTE = "Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit."
_TYPES = {"float": "float", "int": "int", "stream": "int | None = None"}
_LIST = "Iterable[Any] | None"


def signatures(header: Header) -> str:
    """Names, parameters and constants, as data."""
    lines = [
        f'"""Functions and constants of hfpatch.h.\n\n{_NOTE}\n"""',
        "",
        "from __future__ import annotations",
        "",
        f"ABI_VERSION = {header.abi}",
        "",
        "CONSTANTS: dict[str, int] = {",
        *(f'    "{name}": {value},' for name, value in sorted(header.constants.items())),
        "}",
        "",
        "#: By function: what it returns, and the kind and name of each parameter.",
        "SIGNATURES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {",
    ]
    for function in header.functions:
        lines.append(f'    "{function.name}": (')
        lines.append(f'        "{function.returns}",')
        if function.parameters:
            lines.append("        (")
            for p in function.parameters:
                kind = "list written" if p.written else p.kind
                lines.append(f'            ("{kind}", "{p.name}"),')
            lines.append("        ),")
            if len(function.parameters) == 1:
                lines[-3:] = [f"        ({lines[-2].strip()}),"]
        else:
            lines.append("        (),")
        lines.append("    ),")
    return "\n".join([*lines, "}"]) + "\n"


def functions(header: Header) -> str:
    """A method for each function."""
    parts = [
        f'"""The functions of hfpatch.h as methods.\n\n{_NOTE}\n"""\n\n'
        "from __future__ import annotations\n\n"
        "from collections.abc import Iterable\n"
        "from typing import Any\n\n"
        "from .library import Caller\n\n\n"
        "class Library(Caller):\n"
        '    """libhfpatch: a method for each function `hfp_NAME`, its arguments in C\'s order.\n\n'
        "    Tensors are any framework's, by `__dlpack__` or NumPy's array interface; results are\n"
        "    written to the first ones. `stream` is the address of a CUDA stream; ignored on the\n"
        "    CPU. A call that fails raises `HfpatchError`.\n"
        '    """\n'
    ]
    for function in (*header.ops, *header.sizes):
        parts.append("\n" + _method(function))
    return "".join(parts)


def _annotation(p: Parameter) -> str:
    if p.kind == "list":
        return _LIST
    return _TYPES.get(p.kind, "Any")


def _method(function: Function) -> str:
    parameters = [f"{p.name}: {_annotation(p)}" for p in function.parameters]
    names = [p.name for p in function.parameters]
    size = function.returns == "int"
    head = "".join(f"        {p},\n" for p in ["self", *parameters])
    optional = [f"`{p.name}`" for p in function.parameters if p.optional]
    doc = f"`{function.name}` of docs/c-api.md"
    if optional:
        doc += f".\n\n        May be None: {', '.join(optional)}.\n        "
    else:
        doc += "."
    doc = f'"""{doc}"""'
    call = "return self.size(" if size else "self.call("
    inside = "".join(f"            {name},\n" for name in [f'"{function.name}"', *names])
    return (
        f"    def {function.short}(\n{head}    ) -> {'int' if size else 'None'}:\n"
        f"        {doc}\n        {call}\n{inside}        )\n"
    )
