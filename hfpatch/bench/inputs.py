"""Random inputs from a line of text, so that a case of the benchmark is one row of a table.

    "x B S D; scale B 1 D; target B S int<V; lse B S fp32; q B S H D third"

A tensor is a name and its dimensions: a letter of the shape, a number, or a product of both
(`H*D`). After them may stand `fp32` (else the dtype of the run), `int<V` for class indices, `third`
for one of three parts of a packed tensor, as q is of a QKV projection, and for RoPE's tables
`halves` or `pairs`: each value stands twice in the last dimension, half of it or one element apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Tensor = torch.Tensor
Shape = Mapping[str, int]


def make_inputs(
    spec: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """The tensors of `spec`, with fresh random values.

    Raises:
        ValueError: a dimension that `shape` has not.
    """
    return tuple(_tensor(part.split(), shape, dtype, device) for part in spec.split(";"))


def takes_a_dtype(spec: str) -> bool:
    """Whether a tensor of `spec` has the dtype of the run: else all of it is fp32 (or indices)."""
    return any(
        "fp32" not in words and not any(word.startswith("int<") for word in words)
        for words in (part.split() for part in spec.split(";"))
    )


def _tensor(words: list[str], shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    name, *dims = words
    sizes: list[int] = []
    third, classes, twice = False, 0, ""
    for word in dims:
        if word == "fp32":
            dtype = torch.float32
        elif word == "third":
            third = True
        elif word in ("halves", "pairs"):
            twice = word
        elif word.startswith("int<"):
            classes = _size(word[4:], shape, name)
        else:
            sizes.append(_size(word, shape, name))
    if classes:
        return torch.randint(classes, sizes, device=device)
    if third:  # dimension 2 is that of the three parts
        return _normal([*sizes[:2], 3, *sizes[2:]], dtype, device).select(2, 0)
    if twice:
        half = _normal([*sizes[:-1], sizes[-1] // 2], dtype, device)
        return torch.cat((half, half), -1) if twice == "halves" else half.repeat_interleave(2, -1)
    return _normal(sizes, dtype, device)


def _normal(sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(sizes, device=device, dtype=dtype)


def _size(word: str, shape: Shape, name: str) -> int:
    def one(factor: str) -> int:
        if factor.isdigit():
            return int(factor)
        if factor not in shape:
            raise ValueError(f"input `{name}`: `{factor}` is not a dimension of {dict(shape)}")
        return shape[factor]

    return math.prod(one(factor) for factor in word.split("*"))


def label(shape: Shape) -> str:
    """`4x1024x2048`: how `--shape` and the tables call a shape."""
    return "x".join(str(size) for size in shape.values())


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
