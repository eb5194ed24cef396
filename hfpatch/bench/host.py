"""The suite `host`: what one call costs on the host, the GPU's own time left out.

The tensors are so small that the host is what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hfpatch
from hfpatch.bench import formulas
from hfpatch.bench.cases import CASES
from hfpatch.bench.inputs import label, make_inputs
from hfpatch.bench.peers import OURS, function_of, prepare
from hfpatch.bench.shapes import shapes_of
from hfpatch.bench.timing import Call, host_times
from hfpatch.sources import local_package

Tensor = torch.Tensor

_HIDDEN = 2048


class BenchRMSNorm(nn.Module):
    """transformers' `LlamaRMSNorm`, under a name that no model has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return formulas.llama_norm(x, self.weight)


def norm_rows(package: Any, device: torch.device) -> list[dict[str, Any]]:
    """Every way to call one RMS norm, and `x * x` as the least that a call costs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, hidden = (8, _HIDDEN) if device.type == "cuda" else (1, 8)
    x = torch.randn(rows, 1, hidden, device=device, dtype=dtype)
    eager, fused = BenchRMSNorm(hidden).to(device, dtype), nn.RMSNorm(hidden, formulas.EPS)
    fused = fused.to(device, dtype)
    model = nn.Sequential(BenchRMSNorm(hidden).to(device, dtype))
    hfpatch.register("BenchRMSNorm", family="norm")
    report = hfpatch.apply(model, verify=True)
    if len(report.swaps) != 1:
        raise RuntimeError(f"the norm of the host suite was not patched:\n{report}")
    patched = model[0]
    weight, out = fused.weight.detach(), torch.empty_like(x)
    op, op_out = package.ops.rms_norm.default, package.ops.rms_norm_out.default
    params = {"eps": formulas.EPS, "cast": "input"}
    kernel = local_package().kernel("rms_norm")
    bound, bound_into = kernel.bind(params), kernel.bind_into(1, params)
    calls: dict[str, Call] = {
        "eager LlamaRMSNorm module": lambda: eager(x),
        "torch.nn.RMSNorm module": lambda: fused(x),
        "patched LlamaRMSNorm module": lambda: patched(x),
        "F.rms_norm": lambda: F.rms_norm(x, (hidden,), weight, formulas.EPS),
        "hfpatch function": lambda: package.rms_norm(x, weight, None, formulas.EPS),
        "hfpatch op": lambda: op(x, weight, None, formulas.EPS, 0.0, 1),
        "hfpatch op, out variant": lambda: op_out(out, x, weight, None, formulas.EPS, 0.0, 1),
        "hfpatch bound call": lambda: bound(x, weight, None),
        "hfpatch bound call, out variant": lambda: bound_into(out, x, weight, None),
        "x * x": lambda: x * x,
    }
    with torch.no_grad():
        times = host_times(calls)
    return [{"call": name, "us": us} for name, us in times.items()]


def op_rows(package: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each op next to its eager formula, on the smallest shape of its table."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for case in CASES:
        if case.mode != "forward" or not hasattr(package.ops, case.op):
            continue
        if case.shapes == "parameters":  # making their lists takes the host longer than the op
            continue
        shape = min(shapes_of(case.shapes, device.type), key=lambda s: _size(s.values()))
        if device.type == "cpu":  # a call's own cost, not the arithmetic's
            shape = {name: min(size, 8) for name, size in shape.items()}
        inputs = make_inputs(case.inputs, shape, dtype, device)
        if case.adjust is not None:
            inputs = tuple(case.adjust(*inputs))
        calls: dict[str, Call] = {}
        for peer in ("eager", OURS):
            fn = function_of(peer, case, package)
            assert fn is not None
            calls[peer] = prepare(peer, case, fn, inputs)
        with torch.no_grad():
            times = host_times(calls, calls=100, rounds=7)
        yield {"op": case.name, "shape": label(shape), **{f"{k}_us": v for k, v in times.items()}}


def _size(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
