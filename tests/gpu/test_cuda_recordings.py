"""Recordings of transformers models: masks, caches and attention as in a call outside of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recordings import MODELS, calls_of, ids, tensors

import hfpatch
from hfpatch import attention
from hfpatch.graphs import recording as graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def close(found: Any, expected: Any) -> None:
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_every_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    own = F.scaled_dot_product_attention

    def spy(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        how = (is_causal, k.shape[1] != q.shape[1])
        asked.append((attn_mask is None, *how, torch.cuda.is_current_stream_capturing()))
        return own(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "_PYTORCHS", spy)  # what fused blocks call
    model = MODELS[name]().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    for kind, make in calls_of(name, model, "cuda").items():
        with torch.no_grad():
            hfpatch.apply(model, decoding=False)
            model(**make(1))  # blocks are captured
            expected = [model(**make(seed)) for seed in (1, 2)]
            asked.clear()
            model(**make(1))
            outside = [a[:3] for a in asked]
            hfpatch.apply(model, cuda_graphs=True, decoding=False)
            for turn, seed in enumerate((1, 1, 2, 1, 2)):
                asked.clear()
                close(model(**make(seed)), expected[seed - 1])
                if turn == 1:
                    assert [a[:3] for a in asked if a[3]] == outside, (name, kind)
                elif turn:
                    assert not asked
        assert len(graphs._graphs[model].recorded) == 1, (kind, hfpatch.status(model))
        hfpatch.restore(model)


@pytest.mark.parametrize("gain", [None, "time"])
def test_auto_keeps_one_way(gain: str | None) -> None:
    model = MODELS["qwen3"]().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    given = {"input_ids": ids(1, "cuda")}
    with torch.no_grad():
        expected = model(**given)
        hfpatch.apply(model, cuda_graphs="auto", gain=gain, decoding=False)
        for _ in range(24):
            close(model(**given), expected)
    (timed,) = (t for t in hfpatch.status(model).plan.times if t.op == "cuda_graphs")
    assert timed.kept == "patched", timed  # so small a model waits for its launches
    assert timed.original_ms > timed.patched_ms > 0
    inside = [t for t in hfpatch.status(model).plan.times if t.op != "cuda_graphs"]
    assert bool(inside) == (gain is not None)


def test_a_value_that_is_read_is_asked_again() -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
            return x * 2 if flags.all() else x + flags.sum().item()

    model = Reads().eval()
    hfpatch.apply(model, cuda_graphs=True)
    x = torch.arange(4.0, device="cuda")
    full, part = torch.ones(3, device="cuda"), torch.tensor([1.0, 0, 1], device="cuda")
    for flags in (full, full, part, full, part, part, full, part):
        expected = x * 2 if flags is full else x + 2
        assert torch.equal(model(x, flags), expected)
        assert torch.equal(model(x, flags.clone()), expected)
    assert len(graphs._graphs[model].recorded) == 2
    full[0] = 0  # in place: the next look sees it
    assert torch.equal(model(x, full), x + 2)
