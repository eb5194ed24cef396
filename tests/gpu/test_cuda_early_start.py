"""Kernels that start before the previous one ends must read what it wrote, whatever it was."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.gpu

ROUNDS = 300


def _chain(k: ModuleType, pause: Callable[[], None]) -> list[torch.Tensor]:
    """Each kernel depends on the last one's data or parameters, in reused memory."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    x, w, b = draw(300, 512), draw(512), draw(512)
    square = draw(512, 512) * 0.04
    scale, shift, gate = draw(1, 512), draw(1, 512), draw(1, 512)
    steps: list[Callable[[], object]] = [
        lambda: w.mul_(-1.0),  # parameters written right before they are read
        lambda: x.copy_(k.rms_norm(x, w, None, 1e-6, 0.0, "input")),
        lambda: x.copy_(x @ square),  # cuBLAS before and after
        lambda: b.add_(0.125).clamp_(-1, 1),
        lambda: x.copy_(k.layer_norm(x, w, b, 1e-5)),
        lambda: x.copy_(k.gelu(x, "tanh")),
        lambda: scale.mul_(0.5).add_(w[None] * 0.25),
        lambda: x.copy_(k.norm_modulate(x[None], scale, shift, None, None, 1e-6, "rms")[0]),
        lambda: gate.copy_(scale),
        lambda: x.copy_(k.gate_residual(x[None], gate, x[None] @ square)[0]),
    ]
    seen = []
    for _ in range(ROUNDS):
        for step in steps:
            step()
            pause()
        seen.append(x.float().sum(dtype=torch.float64))
    return [x, w, b, torch.stack(seen)]


def test_a_chain_of_dependent_kernels_equals_the_synchronized_one(
    kernels_module: ModuleType,
) -> None:
    with torch.no_grad():
        expected = _chain(kernels_module, torch.cuda.synchronize)
        got = _chain(kernels_module, lambda: None)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.isfinite(got[0]).all()


def test_capture_with_a_fork_and_a_join(kernels_module: ModuleType) -> None:
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        a = kernels_module.rms_norm(x, w, None, 1e-6, 0.0, "input")
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            b = kernels_module.gelu(a, "tanh")
        c = kernels_module.silu(a)
        main.wait_stream(side)
        return kernels_module.rms_norm(b + c, w, None, 1e-6, 0.0, "input")

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(100):
        x.copy_(x.roll(1, 0))
        out.zero_()
        graph.replay()
        expected = expected.roll(1, 0)
        assert torch.equal(out, expected)


def test_a_kernel_after_a_copy_from_the_host_and_a_memset(kernels_module: ModuleType) -> None:
    host = torch.randn(64, 4096, dtype=torch.bfloat16).pin_memory()
    x = torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        x.zero_()
        assert not kernels_module.silu(x).any()
        x.copy_(host, non_blocking=True)
        got = kernels_module.silu(x)
        torch.cuda.synchronize()
        assert torch.equal(got, kernels_module.silu(x))
