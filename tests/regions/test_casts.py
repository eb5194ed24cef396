"""Ops between a cast to fp32 and one back: they are given what was cast, and round once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks_single import ROWS
from support.captured import captured
from test_blocks_single import build, call_of
from torch import Tensor, nn

import hfpatch
from hfpatch.regions.capture import capture
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.nodes import Fused, value
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import take_apart

D = 16


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight, self.bias = (nn.Parameter(torch.randn(D, generator=g)) for _ in range(2))
        self.eval().requires_grad_(False)


def _norm(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (D,)) * (1 + m) + m


def _gate(s: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return x.float() + y * m


CODE: dict[str, tuple[Callable[..., Any], list[str], int]] = {
    "a modulated norm": (lambda *a: _norm(*a).type_as(a[1]), ["norm_modulate"], 0),
    "a gated sum": (lambda *a: _gate(*a).type_as(a[1]), ["gate_residual"], 0),
    "a gated sum of casts": (
        lambda s, x, y, m: (m * y.float() + x.float()).type_as(x), ["gate_residual"], 0,
    ),
    "read before it is cast back": (
        lambda *a: (n := _norm(*a), n.type_as(a[1]) + n.mean())[1], ["norm_modulate"], 2,
    ),
    "not cast back": (_norm, ["norm_modulate"], 1),
    "cast to another half type": (lambda *a: _norm(*a).half(), ["norm_modulate"], 2),
    "of fp32": (lambda s, x, y, m: _norm(s, m + x, y, m).type_as(x), ["norm_modulate"], 1),
    "a gate of another shape": (
        lambda s, x, y, m: (x.float() + y * m[:, :, :1]).type_as(x), [], 2,
    ),
    "a sum of another shape": (
        lambda s, x, y, m: (x[:, :1].float() + y * m).type_as(x), [], 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CODE)
def test_casts_around_an_op(what: str) -> None:
    code, ops, casts = CODE[what]
    toy = type("Toy", (Toy,), {"forward": code})()
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, 5, D, generator=g).bfloat16() for _ in range(2))
    given = [x, y, torch.randn(3, 1, D, generator=g)]
    structure, tensors, _ = take_apart(given, {})
    found = capture(toy, structure, tensors, {}, ())
    (exact,) = Interpreter(toy, torch.float64).run(found.graph, given)
    rewrite(found.graph, frozenset())
    found.graph.lint()
    fused = [n for n in found.graph.nodes if isinstance(n.target, Fused)]
    assert [n.target.op for n in fused] == ops
    assert sum(n.target is torch.ops.aten.to.dtype for n in found.graph.nodes) == casts
    assert all(value(n).dtype == torch.bfloat16 for n in fused) is (casts == 0 or not fused)
    (out,) = Interpreter(toy, torch.float64).run(found.graph, given)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    (ours,), theirs = Interpreter(toy, None).run(found.graph, given), toy(*given)
    assert ours.dtype == theirs.dtype
    error, allowed = ((t.double() - exact).square().mean().sqrt() for t in (ours, theirs))
    assert error <= 1.1 * allowed + torch.finfo(torch.float32).eps


def test_a_block_that_modulates_in_fp32(kernels_module: object) -> None:
    """Wan: no pass over its tokens casts them."""
    row = ROWS["wan"]
    with captured():
        root, given = build(row, torch.bfloat16), call_of(row, dtype=torch.bfloat16)
        hfpatch.apply(root)
        with torch.no_grad():
            root.block(**given)
        (c,) = hfpatch.status(root).plan.candidates
    assert c.state == "fused" and c.after <= 20, c
