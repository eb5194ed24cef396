"""Attention in products and a softmax: which ways of writing it become one op, and which do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

import hfpatch
from hfpatch.regions.capture import capture
from hfpatch.regions.interpret import Interpreter
from hfpatch.regions.nodes import Attend
from hfpatch.regions.rules import rewrite
from hfpatch.regions.structure import take_apart

Code = Callable[..., torch.Tensor]


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.eval().requires_grad_(False)


def rewritten(code: Code, *tensors: torch.Tensor) -> tuple[Graph, list[torch.Tensor], list[Any]]:
    """The rewritten graph, what it gives in fp64, and its attention."""
    sizes = [t.shape[1] for t in tensors]

    def forward(self: Any, *given: torch.Tensor) -> torch.Tensor:
        # a model's heads are numbers of its configuration
        return code(*(t.reshape(-1, n, *t.shape[2:]) for t, n in zip(given, sizes, strict=True)))

    cls = type("Toy", (_Toy,), {"forward": forward})
    toy = cls()
    structure, taken, _ = take_apart(tensors, {})
    found = capture(toy, structure, taken, {}, ())
    rewrite(found.graph, frozenset())
    out = Interpreter(toy, torch.float64).run(found.graph, list(tensors))
    return found.graph, out, [n for n in found.graph.nodes if isinstance(n.target, Attend)]


def drawn(heads: int = 4, groups: int = 4, keys: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(heads + groups + keys)
    q = torch.randn(3, heads, 7, 8, generator=g)
    k, v = (torch.randn(3, groups, keys, 8, generator=g) for _ in range(2))
    bias = torch.randn(1, heads, 7, keys, generator=g)
    mask = torch.zeros(3, 1, 7, keys).masked_fill(torch.rand(3, 1, 7, keys, generator=g) > 0.7, -9)
    return [q, k, v, bias, mask]


def soft(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(scores / cap) * cap


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


sdpa = nn.functional.scaled_dot_product_attention
#: The code; heads of keys; scale and cap of the op.
WRITTEN: dict[str, tuple[Code, int, float, float | None]] = {
    "plain": (lambda q, k, v, b, m: soft(q @ k.transpose(2, 3) * 0.3, v), 4, 0.3, None),
    "divided": (lambda q, k, v, b, m: soft(q @ k.mT / math.sqrt(8), v), 4, 8**-0.5, None),
    "bias": (lambda q, k, v, b, m: soft(q @ k.transpose(-1, -2) + b, v), 4, 1.0, None),
    "bias and mask": (
        lambda q, k, v, b, m: soft(m + (q @ k.transpose(2, 3) * 0.5 + b), v), 4, 0.5, None,
    ),
    "scaled with its bias": (
        lambda q, k, v, b, m: soft((q @ k.transpose(2, 3) + b) * 0.25 + m, v), 4, 0.25, None,
    ),
    "scaled before": (lambda q, k, v, b, m: soft((q * 0.3) @ k.transpose(2, 3), v), 4, 1.0, None),
    "capped": (
        lambda q, k, v, b, m: soft(capped(q @ k.transpose(2, 3) * 0.3, 2.0) + m, v), 4, 0.3, 2.0,
    ),
    "capped, grouped": (
        lambda q, k, v, b, m: soft(
            capped(q @ repeated(k, 2).transpose(2, 3) * 0.3, 5.0) + m, repeated(v, 2)
        ), 2, 0.3, 5.0,
    ),
    "one head of keys": (
        lambda q, k, v, b, m: soft(q @ k.transpose(2, 3) * 0.3 + m, v), 1, 0.3, None,
    ),
    "keys as they lie": (
        lambda q, k, v, b, m: soft(q @ k.transpose(1, 2).permute(0, 2, 3, 1), v), 4, 1.0, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRITTEN))
def test_is_one_op(what: str) -> None:
    code, groups, scale, cap = WRITTEN[what]
    tensors = drawn(groups=groups)
    graph, (out,), found = rewritten(code, *tensors)
    (attend,) = found
    assert attend.target.scale == pytest.approx(scale)
    assert attend.target.softcap == cap
    assert attend.args[1].meta["val"].shape[1] == groups  # grouped heads as they are
    assert not any("softmax" in str(n.target) for n in graph.nodes)
    expected = code(*(t.double() for t in tensors))
    if what != "scaled before":  # soft() rounds to fp32 here, and nowhere in the graph
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


LEFT: dict[str, Code] = {
    "a mask under the cap": lambda q, k, v, b, m: soft(capped(q @ k.mT + m, 2.0), v),
    "a cap of another size": lambda q, k, v, b, m: soft(capped(q @ k.mT, 2.0) * 3 + m, v),
    "tanh without a cap": lambda q, k, v, b, m: soft(torch.tanh(q @ k.mT) + m, v),
    "weights are used too": lambda q, k, v, b, m: (w := torch.softmax(q @ k.mT, -1)) @ v + w.mean(),
    "scores are used too": lambda q, k, v, b, m: soft(s := q @ k.mT, v) + s.mean(),
    "of another dimension": lambda q, k, v, b, m: torch.softmax(q @ k.mT, -2) @ v,
    "weights scaled by a tensor": lambda q, k, v, b, m: soft(q @ k.mT * b, v),
    "a causal form of other sizes": lambda q, k, v, b, m: sdpa(
        q, torch.cat((k, k), 2), torch.cat((v, v), 2), is_causal=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(LEFT))
def test_is_left(what: str) -> None:
    _, (out,), found = rewritten(LEFT[what], *drawn())
    assert not found
    expected = LEFT[what](*(t.double() for t in drawn()))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_another_dtype_is_left() -> None:
    q, k, v, _, mask = drawn()
    code = lambda q, k, v, m: soft(q @ k.mT + m, v)  # noqa: E731
    assert len(rewritten(code, q, k, v, mask)[2]) == 1
    half = [t.bfloat16() for t in (q, k, v)]
    assert not rewritten(code, *half, mask)[2]  # the least number of fp32 is -inf in bf16


@pytest.mark.parametrize("seed", [5, 7])
def test_what_ties_in_fp32_is_told_in_fp64(seed: int) -> None:
    """A token whose two best experts tie in fp32 goes to another in a right graph: the block of a
    model in half precision was left to its parts, by the luck of its numbers."""
    from transformers import SwitchTransformersConfig, SwitchTransformersModel

    torch.manual_seed(seed)
    config = SwitchTransformersConfig(
        vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=2,
        num_decoder_layers=2, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0,
    )  # fmt: skip
    model = SwitchTransformersModel(config).bfloat16().eval().requires_grad_(False)
    tokens = torch.randint(3, 90, (3, 50))
    given = {"input_ids": tokens, "decoder_input_ids": tokens[:, :13]}
    hfpatch.apply(model, blocks=True)
    for _ in range(2):
        assert model(**given)[0].isfinite().all()
    blocks = hfpatch.status(model).plan.candidates
    assert [(c.state, c.reason) for c in blocks] == [("fused", "")] * 4
    assert all(c.error <= 1.25 * c.original + 2**-8 for c in blocks)
