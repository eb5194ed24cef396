"""What a device can do at most, as measured: bytes a second of a copy, operations of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def copy_call(device: torch.device) -> tuple[Call, float]:
    """A copy of 256 MB (of 64 on a CPU), and its bytes, read and written."""
    count = (64 if device.type == "cuda" else 16) * 2**20
    a = torch.ones(count, device=device)
    b = torch.empty_like(a)
    return lambda: b.copy_(a), 8.0 * count


def product_call(device: torch.device, dtype: torch.dtype) -> tuple[Call, float]:
    """A large matrix product, and its operations."""
    n = 4096 if device.type == "cuda" else 512
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * n**3


def peaks(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a product in `dtype`."""
    from hfpatch.bench.timing import cpu_microseconds, gpu_microseconds

    found = []
    for call, work in (copy_call(device), product_call(device, dtype)):
        if device.type == "cuda":
            us = gpu_microseconds([call])
        else:
            us = cpu_microseconds({"": [call]}, budget_s=0.2)[""]
        found.append(work / us * 1e6)
    return found[0], found[1]
