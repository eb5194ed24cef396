"""The suite `host`: what one call costs on the host, the GPU's own time left out.

The tensors are so small that the host is what takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hfpatch
from hfpatch.bench import formulas
from hfpatch.bench.cases import CASES
from hfpatch.bench.inputs import Shape, label, make_inputs
from hfpatch.bench.peers import OURS, function_of, prepare
from hfpatch.bench.shapes import shapes_of
from hfpatch.bench.timing import Call, host_times
from hfpatch.kernels.sources import local_package

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
    """Each op next to its eager formula, on the smallest shape of its table.

    Of a gradient ours is the operator alone, and the formula's is autograd's, of a graph that is
    kept.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for case in CASES:
        if case.shapes == "parameters" or not hasattr(package.ops, case.op):
            continue
        shape = _smallest(case.shapes, device)
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
        yield _row(case.name, shape, calls)
    yield from _list_rows(package, device)


def _list_rows(package: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Ops over lists next to PyTorch's own over the same lists: making them, as the formulas of the
    suite `ops` do, would take the host longer than the op."""
    shape = _smallest("parameters", device)
    if device.type == "cpu":
        shape = {**shape, "N": 8}
    made = (torch.rand(tuple(shape.values()), device=device) for _ in range(4))
    params, grads, ms, vs = (t.unbind(0) for t in made)
    one = torch.ones((), device=device)
    steps = [one] * len(grads)
    norms = torch.nn.utils
    calls: dict[str, tuple[Call, Call]] = {
        "adamw_step": (
            lambda: torch._fused_adamw_(
                params, grads, ms, vs, [], steps, amsgrad=False, maximize=False, **formulas.ADAMW
            ),
            lambda: package.adamw_step(params, grads, ms, vs, steps, **formulas.ADAMW),
        ),
        "grad_norm": (lambda: norms.get_total_norm(grads), lambda: package.grad_norm(grads)),
        "clip_grads": (
            lambda: torch._foreach_mul_(grads, torch.clamp(0.9999 / (one + 1e-6), max=1.0)),
            lambda: package.clip_grads(grads, one, 0.9999),
        ),
        "scale_grads": (
            lambda: torch._foreach_mul_(grads, one),
            lambda: package.scale_grads(grads, one),
        ),
    }
    for op, (eager, ours) in calls.items():
        if hasattr(package.ops, op):
            yield _row(op, shape, {"eager": eager, OURS: ours})


def _row(op: str, shape: Shape, calls: dict[str, Call]) -> dict[str, Any]:
    with torch.no_grad():
        times = host_times(calls, calls=100, rounds=7)
    return {"op": op, "shape": label(shape), **{f"{k}_us": v for k, v in times.items()}}


def _smallest(kind: str, device: torch.device) -> Shape:
    return min(shapes_of(kind, device.type), key=lambda shape: math.prod(shape.values()))
