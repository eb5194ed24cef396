"""The parameters of `extern "C" void solve(...)`, read off the source."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import torch

#: Element types by their C names, without `const` and the like.
_ELEMENTS = {
    "float": torch.float32,
    "double": torch.float64,
    "__half": torch.float16,
    "half": torch.float16,
    "_Float16": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "nv_bfloat16": torch.bfloat16,
    "int": torch.int32,
    "int32_t": torch.int32,
    "unsigned int": torch.int32,
    "uint32_t": torch.int32,
    "long": torch.int64,
    "long long": torch.int64,
    "int64_t": torch.int64,
    "short": torch.int16,
    "int16_t": torch.int16,
    "char": torch.int8,
    "signed char": torch.int8,
    "int8_t": torch.int8,
    "unsigned char": torch.uint8,
    "uint8_t": torch.uint8,
    "bool": torch.bool,
}
_SCALARS: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "unsigned int": ctypes.c_uint,
    "unsigned": ctypes.c_uint,
    "uint32_t": ctypes.c_uint32,
    "long": ctypes.c_long,
    "unsigned long": ctypes.c_ulong,
    "long long": ctypes.c_longlong,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "short": ctypes.c_short,
    "bool": ctypes.c_bool,
}
_STREAMS = {"cudaStream_t", "CUstream"}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: as in the source.
        kind: "input" (a pointer to const), "output" (any other pointer), "scalar" or "stream".
        dtype: of a pointer's elements.
        ctype: what ctypes passes.
    """

    name: str
    kind: str
    dtype: torch.dtype | None
    ctype: Any

    @property
    def whole(self) -> bool:
        """Whether it is a whole number, such as a size."""
        return self.kind == "scalar" and self.ctype not in (ctypes.c_float, ctypes.c_double)


def parse_solve(source: str) -> list[Parameter]:
    """The parameters of `solve`, in order.

    Raises:
        ValueError: there is no such function, or one of its types is not known; says which are.
    """
    text = re.sub(r"/\*.*?\*/", " ", source, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", " ", text)
    linked = r'extern\s+"C"[^;{}]*?\bvoid\s+solve\s*\('
    found = re.search(linked, text)
    if found is None and (re.search(r'extern\s+"C"\s*\{', text) or 'extern "C"' not in text):
        found = re.search(r"\bvoid\s+solve\s*\(", text)  # in a block of them, or plain C
    if found is None:
        raise ValueError(
            'expected `extern "C" void solve(...)`, whose parameters are the tensors as pointers '
            "(those to const are inputs) and the sizes; found no such function"
        )
    depth, end = 1, found.end()
    while end < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    words = text[found.end() : end - 1].strip()
    if words in ("", "void"):
        raise ValueError("`solve` has no parameters; expected pointers to its inputs and outputs")
    return [_parameter(part.strip()) for part in words.split(",")]


def _parameter(text: str) -> Parameter:
    text = re.sub(r"=.*$", "", text)
    text = re.sub(r"^(.*?)(\w+)\s*\[[^\]]*\]\s*$", r"\1* \2", text, flags=re.DOTALL)  # `float x[]`
    match = re.match(r"(.*?)(\w+)\s*$", text.strip(), re.DOTALL)
    if match is None:
        raise ValueError(f"`solve`: expected a type and a name, got `{text}`")
    spelled, name = match[1], match[2]
    words = re.sub(r"\b(__restrict__|__restrict|restrict|volatile|struct)\b", " ", spelled)
    pointer = "*" in words
    const = bool(re.search(r"\bconst\b", words.split("*")[0]))
    bare = " ".join(re.sub(r"\bconst\b|\*|\bstd::", " ", words).split())
    if bare in _STREAMS or (pointer and bare == "void" and name == "stream"):
        return Parameter(name, "stream", None, ctypes.c_void_p)
    if pointer:
        if bare not in _ELEMENTS:
            raise ValueError(
                f"`solve`: `{name}` points to `{bare}`; expected one of {', '.join(_ELEMENTS)}"
            )
        kind = "input" if const else "output"
        return Parameter(name, kind, _ELEMENTS[bare], ctypes.c_void_p)
    if bare not in _SCALARS:
        raise ValueError(
            f"`solve`: `{name}` is a `{bare}`; expected a pointer, or one of {', '.join(_SCALARS)}"
        )
    return Parameter(name, "scalar", None, _SCALARS[bare])
