"""Tensors with canaries around them, and outputs that show which elements were not written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Bytes before and behind each tensor: a block of threads that runs on past the end is seen.
PAD = 1 << 16
#: What lies around outputs; around inputs lies 0xFF, which is NaN: what is read there spreads.
_AROUND_OUTPUT, _AROUND_INPUT, _UNWRITTEN = 0xA5, 0xFF, 0xFF


@dataclass
class Guarded:
    """Inputs of a call whose tensors are copies, each inside a larger buffer."""

    inputs: dict[str, Any]
    _buffers: dict[str, tuple[Tensor, int, int]] = field(default_factory=dict)

    def touched(self) -> list[str]:
        """Names of the tensors around which something was written, and where."""
        found = []
        for name, (buffer, end, pattern) in self._buffers.items():
            before, behind = buffer[:PAD], buffer[end:]
            for where, part, first in (("before", before, -PAD), ("behind", behind, 0)):
                wrong = (part != pattern).nonzero()
                if len(wrong):
                    at = int(wrong[0 if where == "behind" else -1]) + first
                    size = self.inputs[name].element_size()
                    count = -(-len(wrong) // size)
                    place = at // size if where == "behind" else -(at // size)
                    found.append(f"`{name}`: {count} elements {where} it, the nearest {place} away")
        return found


def guarded(
    inputs: dict[str, Any], outputs: tuple[str, ...], inout: tuple[str, ...] = ()
) -> Guarded:
    """Copies of all tensors with canaries around; outputs that are not read are poisoned.

    A poisoned element is NaN, or -1 of whole numbers (165 of bytes that are not numbers).
    """
    found = Guarded({})
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            found.inputs[name] = value
            continue
        writes = name in outputs
        found.inputs[name], entry = _inside(value, _AROUND_OUTPUT if writes else _AROUND_INPUT)
        found._buffers[name] = entry
        if writes and name not in inout:
            buffer, end, _ = entry
            buffer[PAD:end] = 1 if value.dtype == torch.bool else _UNWRITTEN
    return found


def _inside(value: Tensor, pattern: int) -> tuple[Tensor, tuple[Tensor, int, int]]:
    spans = [(s - 1) * t for s, t in zip(value.shape, value.stride(), strict=True)]
    count = 0 if value.numel() == 0 else 1 + sum(spans)
    size = value.element_size()
    end = PAD + count * size
    whole = -(-(end + PAD) // 16) * 16
    buffer = torch.full((whole,), pattern, dtype=torch.uint8, device=value.device)
    elements = buffer.view(value.dtype)
    copy = elements.as_strided(value.shape, value.stride(), PAD // size)
    copy.copy_(value)
    return copy, (buffer, end, pattern)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.contiguous(), b.contiguous()
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.numel() else True
