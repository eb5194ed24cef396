"""What `kernel_src/hfpatch.h` declares: functions, op tables and constants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernel_src" / "hfpatch.h"

#: Types of parameters by how C spells them: an output tensor, an input tensor, a list of tensors,
#: numbers and the stream.
KINDS = {
    "DLTensor *": "output",
    "const DLTensor *": "tensor",
    "const HfpTensorList *": "list",
    "double ": "float",
    "int64_t ": "int",
    "void *": "stream",
}


class HeaderError(RuntimeError):
    """The header says what the generator does not know, or contradicts itself."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    `optional`: a tensor that may be NULL; `written`: a list whose tensors are changed.
    """

    kind: str
    name: str
    optional: bool = False
    written: bool = False

    @property
    def c(self) -> str:
        spelled = next(c for c, kind in KINDS.items() if kind == self.kind)
        return f"{spelled}{self.name}"


@dataclass(frozen=True)
class Function:
    """One function: `returns` is "status", "int" or "text"; `op` is its name in an op table,
    `schema` its arguments there.

    `operator`: an operator of torch is made of it; else it goes by addresses that a tensor holds.
    """

    name: str
    returns: str
    parameters: tuple[Parameter, ...]
    doc: str
    op: str = ""
    results: str = ""
    schema: str = ""
    operator: bool = True

    @property
    def short(self) -> str:
        return self.name.removeprefix("hfp_")

    @property
    def prototype(self) -> str:
        types = {"status": "int32_t ", "int": "int64_t ", "text": "const char *"}
        inside = ", ".join(p.c for p in self.parameters) or "void"
        return f"{types[self.returns]}{self.name}({inside})"


@dataclass(frozen=True)
class Header:
    abi: int
    functions: tuple[Function, ...]
    constants: dict[str, int]
    in_place: tuple[str, ...]
    #: The names in the op tables, in their order.
    rows: tuple[str, ...]

    @property
    def ops(self) -> list[Function]:
        """The functions of the op tables, which return a status, as they are declared."""
        return [f for f in self.functions if f.op]

    @property
    def operators(self) -> list[Function]:
        """Those of which an operator of torch is made."""
        return [f for f in self.ops if f.operator]

    @property
    def sizes(self) -> list[Function]:
        """Those that say how large a buffer must be."""
        return [f for f in self.functions if f.returns == "int"]


_COMMENT = r"/\*(?P<comment>(?:[^*]|\*(?!/))*)\*/"
_PROTOTYPE = (
    r"HFP_EXPORT\s+(?P<type>const char \*|int32_t |int64_t )\s*(?P<name>hfp_\w+)"
    r"\((?P<inside>[^)]*)\);"
)


def read_header(path: Path = HEADER) -> Header:
    """
    Raises:
        HeaderError: a type of parameter is new, or an op table and a prototype disagree.
    """
    text = path.read_text(encoding="utf-8")
    operators = {**_table(text, "HFP_OP_TABLE"), **_table(text, "HFP_LIST_OP_TABLE")}
    tables = {**operators, **_table(text, "HFP_DECODE_TABLE")}
    body = text[text.index("#ifdef __cplusplus") : text.index("#define HFP_IN_PLACE_TABLE")]
    rows = tuple(op for op, _, _ in operators.values())
    functions = []
    doc, last_end = "", 0
    for match in re.finditer(f"{_COMMENT}|{_PROTOTYPE}", body):
        if match["comment"] is not None:
            doc = _plain(match["comment"])
            continue
        own = tables.pop(match["name"], None)
        functions.append(_function(match, doc, own, match["name"] in operators))
        last_end = match.end()
    if tables:
        raise HeaderError(f"the op tables name functions without a prototype: {', '.join(tables)}")
    if not last_end:
        raise HeaderError(f"`{path}` declares no function")
    constants = {n: int(v) for n, v in re.findall(r"\b(HFP_[A-Z0-9_]+)\s*=\s*(-?\d+)", text)}
    constants |= {n: int(v) for n, v in re.findall(r"#define (HFP_[A-Z0-9_]+) (\d+)", text)}
    constants |= {n: int(v) for n, v in re.findall(r"\b(kDL[A-Za-z]+) = (\d+)", text)}
    table = _table_text(text, "HFP_IN_PLACE_TABLE")
    in_place = tuple(re.findall(r"X\((\w+), \"", table))
    return Header(constants["HFP_ABI_VERSION"], tuple(functions), constants, in_place, rows)


def _table(text: str, name: str) -> dict[str, tuple[str, str, list[tuple[str, str]]]]:
    """By function: the op, its results, its (type, name) arguments."""
    row = re.compile(r"X\(\s*(\w+)\s*,\s*(\w+)\s*,\s*\"([^\"]+)\"\s*,((?:[\s\\]*\"[^\"]*\")+)\s*\)")
    found = {}
    for op, function, results, strings in row.findall(_table_text(text, name)):
        arguments = "".join(re.findall(r'"([^"]*)"', strings)).split(",")
        pairs = [tuple(part.split()) for part in arguments]
        found[function] = (op, results, [(kind, name) for kind, name in pairs])
    return found


def _table_text(text: str, name: str) -> str:
    table = re.match(r"(?:.*\\\n)*.*\n", text.split(f"#define {name}(X)", 1)[1])
    assert table is not None
    return table[0]


def _function(
    match: re.Match[str],
    doc: str,
    own: tuple[str, str, list[tuple[str, str]]] | None,
    operator: bool,
) -> Function:
    name = match["name"]
    returns = {"int32_t ": "status", "int64_t ": "int", "const char *": "text"}[match["type"]]
    parameters = []
    inside = " ".join(match["inside"].split())
    for part in [] if inside == "void" else inside.split(", "):
        kind = next((k for c, k in KINDS.items() if re.fullmatch(re.escape(c) + r"\w+", part)), "")
        if not kind:
            raise HeaderError(f"`{name}`: the generator does not know the parameter `{part}`")
        parameters.append(Parameter(kind, re.split(r"[ *]", part)[-1]))
    if own is None:
        return Function(name, returns, tuple(parameters), doc)
    op, results, arguments = own
    outputs = 0 if results == "none" else results.count(",") + 1
    middle = parameters[outputs:-1]
    kinds = {"Tensor": "tensor", "Tensor?": "tensor", "float": "float", "int": "int"}
    expected = [(kinds.get(kind, "list"), argument) for kind, argument in arguments]
    if (
        [(p.kind, p.name) for p in middle] != expected
        or any(p.kind != "output" for p in parameters[:outputs])
        or parameters[-1].kind != "stream"
    ):
        raise HeaderError(
            f"`{name}`: the op table says {outputs} results and {expected}, the prototype "
            f"{[(p.kind, p.name) for p in parameters]}"
        )
    for i, rule in enumerate(results.split(",")[:outputs]):
        p = parameters[i]
        parameters[i] = Parameter(p.kind, p.name, rule.strip().endswith("?"))
    for i, (kind, _) in enumerate(arguments):
        p = middle[i]
        middle[i] = Parameter(p.kind, p.name, kind == "Tensor?", "!" in kind)
    parameters = [*parameters[:outputs], *middle, parameters[-1]]
    schema = ", ".join(f"{kind} {argument}" for kind, argument in arguments)
    return Function(name, returns, tuple(parameters), doc, op, results, schema, operator)


def _plain(comment: str) -> str:
    """A comment's text, without the asterisks at its left."""
    lines = [re.sub(r"^ \* ?| $", "", line) for line in comment.split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip()
