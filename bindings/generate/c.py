"""`bindings/c/dispatch.h`: a function by its name, for the program that goes through vectors."""

from __future__ import annotations

from header import Header

_VALUE = {
    "output": "c->value[{i}].tensor",
    "tensor": "c->value[{i}].tensor",
    "list": "&c->value[{i}].list",
    "float": "c->value[{i}].number",
    "int": "c->value[{i}].integer",
    "stream": "c->stream",
}


def dispatch(header: Header) -> str:
    parts = [
        "/* Written by `python bindings/generate` from kernel_src/hfpatch.h; do not edit. */\n"
        "static int32_t dispatch(const char *name, const struct call *c) {\n"
    ]
    for function in header.ops:
        inside = ", ".join(_VALUE[p.kind].format(i=i) for i, p in enumerate(function.parameters))
        parts.append(
            f'  if (strcmp(name, "{function.name}") == 0) return {function.name}({inside});\n'
        )
    return "".join([*parts, '  fprintf(stderr, "no function %s\\n", name);\n  exit(2);\n}\n'])
