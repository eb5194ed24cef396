"""Proofs under autocast are made in first calls, in the middle of whatever the caller does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import autocast_cases as cases
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from autocast_cases import MODULES, WIDTH, Kernels, Pair, call, check, draw, off
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hfpatch.proof import probe
from hfpatch.proof.proofs import forget_proofs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LlamaMLP", "NewGELUActivation"])
def test_switched_nested_and_changed(name: str) -> None:
    """Each call is what it is where it stands, whatever came before."""
    # frozen: autocast keeps casts of weights that are not, also for another dtype of its own
    pair = Pair.of(MODULES[name]().requires_grad_(False))
    x = draw(FP32)

    def same() -> torch.dtype:
        got, expected = pair.patched(x), pair.plain(x)
        assert got.dtype == expected.dtype
        # outside of autocast, fp32 throughout
        inside = torch.is_autocast_enabled("cpu")
        assert off(got, expected) <= cases.noise(*([BF16] if inside else []), FP32)
        return got.dtype

    with torch.no_grad():
        for _ in range(3):
            assert same() == FP32
            with torch.autocast("cpu", BF16):
                bf16 = same()
                with torch.autocast("cpu", enabled=False):
                    assert same() == FP32
                with torch.autocast("cpu", FP16):
                    fp16 = same()
                assert same() == bf16
            assert (bf16, fp16) == ((BF16, FP16) if name == "LlamaMLP" else (FP32, FP32))
        with torch.autocast("cpu", BF16), Kernels() as seen:
            same()
        assert len(seen.names) == 1


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
def test_the_cache_of_weights(name: str) -> None:
    """Autocast casts a weight once for all calls of a region, also where the first one proved it;
    what is kept there is the model's alone."""
    pair = Pair.of(nn.Sequential(MODULES[name](), nn.Linear(WIDTH, WIDTH)), mode="training")
    forget_proofs()
    x = draw(FP32)
    with torch.autocast("cpu", BF16):
        counts = []
        for model in (pair.plain, pair.patched):
            first, second = Kernels(), Kernels()
            model(x)
            with first:
                model(x)
            with second:
                y = model(x)
            counts.append(second.casts)
            assert first.casts == second.casts
            y.float().sum().backward()
        assert counts[0] == counts[1]
    for p, q in zip(pair.plain.parameters(), pair.patched.parameters(), strict=True):
        assert p.dtype == q.dtype == FP32 and p.grad is not None and q.grad is not None
        assert off(q.grad, p.grad) <= cases.noise(BF16)


def _selective(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    keep = op in products
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "saved tensors": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_selective),
    },
}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
@pytest.mark.filterwarnings("ignore:hfpatch")  # a norm in "inference" hands over
def test_proven_inside_of_a_checkpoint(name: str, kind: str, mode: str) -> None:
    """It counts and keeps what happens in its forward, to find the same when it runs again."""
    forget_proofs()
    pair = Pair.of(MODULES[name](), mode=mode)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = draw(FP32).requires_grad_()
        with torch.autocast("cpu", BF16):
            y = checkpoint(model, x, **CHECKPOINTS[kind])
        return (
            list(torch.autograd.grad(y.float().pow(2).sum(), [x, *model.parameters()]))
            if (kind != "reentrant")
            else _backward(y, x, model)
        )

    for got, expected in zip(gradients(pair.patched), gradients(pair.plain), strict=True):
        assert got.dtype == expected.dtype and off(got, expected) <= cases.noise(BF16)


def _backward(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    y.float().pow(2).sum().backward()
    return [g for t in (x, *model.parameters()) if (g := t.grad) is not None]


def test_proven_in_inference_mode() -> None:
    forget_proofs()
    pair = Pair.of(LlamaRMSNorm(WIDTH), mode="training")
    with torch.inference_mode(), torch.autocast("cpu", BF16):
        torch.testing.assert_close(pair.patched(draw(FP32)), pair.plain(draw(FP32)))
    check(pair, draw(FP32), BF16, True)


def test_compiled() -> None:
    """While compiling, the originals: the graph is the unpatched model's."""
    pair = Pair.of(MODULES["LlamaMLP"]())
    x = draw(FP32)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(pair.patched, backend=backend, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        expected = pair.plain(x)
        for _ in range(2):  # not proven, and proven
            torch._dynamo.reset()
            assert torch.equal(compiled(x), expected)  # the graph's operators, called as they are
            pair.patched(x)
        assert targets and not any("hfpatch" in t for t in targets)
        with Kernels() as seen:
            pair.patched(x)
        assert seen.names == ["gated"]


def test_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is the original's, and the next one tries again."""
    x, prove = draw(FP32), probe.prove_autocast
    forget_proofs()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError

    pair = Pair.of(LlamaRMSNorm(WIDTH))
    monkeypatch.setattr(probe, "prove_autocast", fails)
    with pytest.warns(RuntimeWarning, match="no memory to prove its kernel with float32 input"):
        got = call(pair.patched, x, BF16, False)[0]
    assert torch.equal(got, call(pair.plain, x, BF16, False)[0])
    monkeypatch.setattr(probe, "prove_autocast", prove)
    check(pair, x, BF16, False)


def test_what_is_set_meanwhile() -> None:
    """A setting that is no longer the proven one, as without autocast."""
    pair = Pair.of(LlamaRMSNorm(WIDTH))
    check(pair, draw(FP32), BF16, False)
    pair.patched[0].variance_epsilon = pair.plain[0].variance_epsilon = 0.5
    with pytest.warns(RuntimeWarning, match="got other settings"):
        got = call(pair.patched, draw(FP32), BF16, False)[0]
    assert torch.equal(got, call(pair.plain, draw(FP32), BF16, False)[0])


def test_a_copy_beside_accelerates_hooks() -> None:
    """They copy what a forward holds into their own."""
    pair = Pair.of(MODULES["LlamaRMSNorm"]())
    add_hook_to_module(pair.patched[0], ModelHook())
    x = draw(FP32)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert off(copy.deepcopy(pair.patched)(x), pair.plain(x)) <= cases.noise(FP32)


def test_hooks_on_all_modules_see_no_proof() -> None:
    forget_proofs()
    pair = Pair.of(MODULES["LlamaMLP"](), mode="training")
    x = draw(FP32)
    with FlopCounterMode(display=False), pytest.warns(RuntimeWarning, match="hooks on all modules"):
        call(pair.patched, x, BF16, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(pair, x, BF16, True)
