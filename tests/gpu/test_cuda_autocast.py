"""Autocast of CUDA: norms and powers run in fp32 there, other than on the CPU."""

from __future__ import annotations

import copy
import warnings

import autocast_cases as cases
import pytest
import torch
import zoo
from autocast_cases import HALVES, MODULES, Kernels, Pair, call, check, draw, off
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfpatch
from hfpatch.proof.proofs import forget_proofs

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "gradients"])
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, autocast: torch.dtype, recorded: bool) -> None:
    cases.check_module(name, autocast, recorded, "cuda")


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "NewGELUActivation"])
def test_half_in_and_fp32_out(name: str) -> None:
    """What autocast makes fp32 stays so: no rounding to bf16 on the way."""
    pair = Pair.of(MODULES[name](), "cuda", mode="training", kernels="local")
    if call(pair.plain, draw(BF16, "cuda"), BF16, False)[0].dtype != FP32:
        pytest.skip(f"this PyTorch leaves {name} in bf16 under autocast")
    y, gradients = call(pair.patched, draw(BF16, "cuda"), BF16, True)
    exact, _ = call(copy.deepcopy(pair.plain).double(), draw(BF16, "cuda").double(), BF16, True)
    assert y.dtype == FP32 and off(y, exact) < 1e-5
    assert gradients.pop("input").dtype == BF16
    assert all(g.dtype == FP32 for g in gradients.values())


@pytest.mark.parametrize("autocast", HALVES, ids=str)
def test_gated_norm(autocast: torch.dtype) -> None:
    cases.check_gated_norm(autocast, "cuda")


@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "t5-v1.1", "bert", "vit"])
def test_steps_of_training(name: str, autocast: torch.dtype) -> None:
    """Losses of AdamW under autocast, with the gradients of fp16 scaled."""
    entry = zoo.ENTRIES[name]
    model = entry.build().cuda()
    plain = copy.deepcopy(model)
    inputs = {
        k: v.cuda() if isinstance(v, torch.Tensor) else v
        for k, v in entry.inputs(model, FP32).items()
    }
    hfpatch.apply(model, mode="training")

    def losses(m: nn.Module) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cuda", enabled=autocast == torch.float16)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        found = []
        for _ in range(5):
            with torch.autocast("cuda", autocast):
                loss = entry.output(m(**inputs)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hfpatch")
        got = losses(model)
    notes = hfpatch.status(model).notes
    assert any(" on cuda" in n and ": the kernel" in n for n in notes), notes
    torch.testing.assert_close(got, losses(plain), rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.filterwarnings("ignore:hfpatch")
def test_proven_inside_of_a_checkpoint(mode: str, reentrant: bool) -> None:
    """With `reentrant`, in "inference", in autograd's own thread, which the proof of gradients
    needs too."""
    forget_proofs()
    pair = Pair.of(MODULES["LlamaMLP"](), "cuda", mode=mode)
    found = []
    for model in (pair.patched, pair.plain):
        x = draw(FP32, "cuda").requires_grad_()
        with torch.autocast("cuda", BF16):
            y = checkpoint(model, x, use_reentrant=reentrant)
        y.float().pow(2).sum().backward()
        found.append(x.grad)
    assert off(*found) <= cases.noise(BF16)


def test_captured() -> None:
    """Nothing is proven while a graph is captured; what was proven is captured."""
    forget_proofs()
    pair = Pair.of(MODULES["LlamaRMSNorm"](), "cuda")
    x = draw(FP32, "cuda")
    results = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.autocast("cuda", BF16, cache_enabled=False):
            with torch.cuda.stream(stream):
                pair.plain(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph), Kernels() as seen:
                y = pair.patched(x)
            graph.replay()
            results.append((y.clone(), len(seen.names)))
            expected = pair.plain(x)
            pair.patched(x)
    assert [n for _, n in results] == [0, 1]
    for y, _ in results:
        assert off(y, expected) <= cases.noise(FP32)


def test_moved_to_the_gpu() -> None:
    pair = Pair.of(MODULES["LlamaRMSNorm"]())
    pair.patched.cuda(), pair.plain.cuda()
    check(pair, draw(FP32, "cuda"), BF16, False)
