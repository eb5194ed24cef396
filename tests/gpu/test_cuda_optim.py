"""AdamW, the gradient norm and clipping on CUDA: numbers, graphs, streams, size."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfpatch import optim

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(300, 257), (7,), (), (0, 3), (4096,), (2, 3, 64), (1_000_003,), (8192,), (8193,)]
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
INF = float("inf")


def randn(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def misaligned(t: Tensor) -> Tensor:
    """The same values one element further in memory."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def error(y: Tensor, truth: Tensor) -> float:
    return ((y.double() - truth.double()).norm() / truth.double().norm()).item()


def train(make: Any, dtype: torch.dtype, values: torch.dtype, steps: int = 20, **hyper: Any) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(randn(s, values).to(dtype)) for s in SHAPES]
    optimizer = make(params, **(HYPER | hyper))
    for _ in range(steps):
        for p in params:
            p.grad = randn(p.shape, values).to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{}, {"amsgrad": True}, {"maximize": True}, {"capturable": True}, {"fused": True}],
    ids=str,
)  # fmt: skip
def test_adamw(kernels_module: ModuleType, dtype: torch.dtype, hyper: dict[str, Any]) -> None:
    """No farther from fp64 than PyTorch's own in that dtype, and one rounding; the same bits.

    PyTorch's fused step, which computes in fp32 as ours does: the plain one of fp16 divides by 0
    where an average of squares and `eps` vanish.
    """
    plain = {k: v for k, v in hyper.items() if k in ("amsgrad", "maximize")}
    truth = train(torch.optim.AdamW, torch.float64, dtype, foreach=False, **plain)
    theirs = train(torch.optim.AdamW, dtype, dtype, fused=True, **plain)
    ours = train(optim.AdamW, dtype, dtype, **hyper)
    assert all(map(torch.equal, ours, train(optim.AdamW, dtype, dtype, **hyper)))
    if "capturable" in hyper or "fused" in hyper:  # where a step is read does not change it
        assert all(map(torch.equal, ours, train(optim.AdamW, dtype, dtype, **plain)))
    a, b, t = (torch.cat([p.flatten() for p in some]) for some in (ours, theirs, truth))
    assert a.isfinite().all() and b.isfinite().all()
    assert error(a, t) <= error(b, t) + torch.finfo(dtype).eps


@pytest.mark.parametrize("count", [1, 47, 60, 200, 500, 1500])
def test_many_tensors(kernels_module: ModuleType, count: int) -> None:
    """Small and large tables, one launch and several; aligned or not, the same bits."""
    k = kernels_module
    sizes = [(i * 37) % 5000 for i in range(count)]
    lists = [[randn(n) for n in sizes] for _ in range(2)]
    lists += [[randn(n).square() for n in sizes] for _ in range(2)]
    steps = [torch.full((), 3.0 + i % 5, device="cuda") for i in range(count)]
    shifted = [[misaligned(t) for t in some] for some in lists]
    alone = [[t.clone() for t in some] for some in lists]
    k.adamw_step(*lists, steps)
    k.adamw_step(*shifted, steps)
    for i in range(count):
        k.adamw_step(*[some[i : i + 1] for some in alone], steps[i : i + 1])
    for some, moved, each in zip(lists, shifted, alone, strict=True):
        assert all(map(torch.equal, some, moved))
        assert all(map(torch.equal, some, each))
    flat = torch.cat([g.double() for g in lists[1]])
    norm = k.grad_norm(lists[1])
    torch.testing.assert_close(norm.double(), flat.norm(), rtol=1e-6, atol=0)
    assert torch.equal(norm, k.grad_norm(shifted[1]))
    k.clip_grads(lists[1], norm, 0.5)
    torch.testing.assert_close(
        torch.cat(lists[1]).double(), flat * (0.5 / (flat.norm() + 1e-6)), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("grad_dtype", ["half", "fp32"])
def test_masters(kernels_module: ModuleType, dtype: torch.dtype, grad_dtype: str) -> None:
    k = kernels_module
    masters = [randn(s) for s in SHAPES]
    params = [m.to(dtype) for m in masters]
    alone = [m.clone() for m in masters]
    moments = [[torch.zeros_like(m) for m in masters] for _ in range(4)]
    for i in range(5):
        grads = [randn(s, dtype) for s in SHAPES]
        wide = [g.float() for g in grads]
        steps = [torch.full((), i + 1.0, device="cuda") for _ in SHAPES]
        given = wide if grad_dtype == "fp32" else grads
        k.adamw_step(params, given, *moments[:2], steps, masters=masters)
        k.adamw_step(alone, wide, *moments[2:], steps)
    assert all(map(torch.equal, masters, alone))
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(params, masters, strict=True))


@pytest.mark.parametrize("dtypes", [*[[t] for t in DTYPES], DTYPES], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_norm_and_clip(kernels_module: ModuleType, dtypes: Any, norm_type: float) -> None:
    k = kernels_module
    grads = [randn(s, t) for s, t in zip(SHAPES, itertools.cycle(dtypes), strict=False)]
    flat = torch.cat([g.flatten().double() for g in grads])
    norm = k.grad_norm(grads, norm_type)
    truth = torch.linalg.vector_norm(flat, norm_type)
    torch.testing.assert_close(norm.double(), truth, rtol=1e-6, atol=0)
    assert torch.equal(norm, k.grad_norm(grads, norm_type))
    before = [g.clone() for g in grads]
    k.clip_grads(grads, norm, 1e9)  # larger than the norm: nothing changes
    assert all(map(torch.equal, grads, before))
    k.clip_grads(grads, norm, 0.25)
    for g, old in zip(grads, before, strict=True):
        factor = torch.tensor(0.25, device="cuda") / (norm + 1e-6)
        assert torch.equal(g, (old.float() * factor).to(g.dtype))
    for bad in (INF, float("nan")):
        grads[6][123_456] = bad
        got = k.grad_norm(grads, norm_type)
        assert got.isnan() if bad != bad else got == INF


def test_clip_grad_norm_and_scaler(kernels_module: ModuleType) -> None:
    def run(make: Any, clip: Any, fused: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
        optimizer = make(model.parameters(), fused=fused, **HYPER)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(randn((32, 64))).square().mean()
            scaler.scale(loss * (INF if step == 3 else 1.0)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                clip(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert {s["step"].item() for s in optimizer.state.values()} == {5.0}
        return list(model.parameters())

    for fused, clipped in itertools.product((None, True), (False, True)):
        ours = run(optim.AdamW, optim.clip_grad_norm_ if clipped else None, fused)
        theirs = run(torch.optim.AdamW, nn.utils.clip_grad_norm_ if clipped else None, fused)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nothing_waits_for_the_device(kernels_module: ModuleType) -> None:
    params = [nn.Parameter(randn(s)) for s in SHAPES]
    optimizers = [optim.AdamW(params, capturable=c, **HYPER) for c in (False, True)]
    for p in params:
        p.grad = randn(p.shape)
    for optimizer in optimizers:
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for optimizer in optimizers:
            optim.clip_grad_norm_(params, 1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph(kernels_module: ModuleType) -> None:
    """A captured step follows its gradients, its count and its learning rate."""
    torch.manual_seed(0)
    start = [randn(s) for s in SHAPES]
    grads = [[randn(s) for s in SHAPES] for _ in range(10)]
    rates = [1e-2 / (i + 1) for i in range(10)]

    def build() -> tuple[list[nn.Parameter], Any, Tensor]:
        params = [nn.Parameter(t.clone()) for t in start]
        for p in params:
            p.grad = torch.zeros_like(p)
        lr = torch.tensor(1e-2, device="cuda")
        return params, optim.AdamW(params, lr=lr, capturable=True, weight_decay=0.1), lr

    def load(params: list[nn.Parameter], lr: Tensor, i: int) -> None:
        lr.fill_(rates[i])
        for p, g in zip(params, grads[i], strict=True):
            assert p.grad is not None
            p.grad.copy_(g)

    eager, optimizer, lr = build()
    for i in range(10):
        load(eager, lr, i)
        optim.clip_grad_norm_(eager, 1.0)
        optimizer.step()

    captured, optimizer, lr = build()
    load(captured, lr, 0)
    optim.clip_grad_norm_(captured, 1.0)
    optimizer.step()  # makes the state
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optim.clip_grad_norm_(captured, 1.0)
        optimizer.step()
    for i in range(1, 10):
        load(captured, lr, i)
        graph.replay()
    assert all(map(torch.equal, eager, captured))
    plain = optim.AdamW([nn.Parameter(randn(3))])
    plain.param_groups[0]["params"][0].grad = randn(3)
    plain.step()
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        plain.step()


def test_another_stream(kernels_module: ModuleType) -> None:
    params = [randn(1 << 22) for _ in range(4)]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    expected = [p.clone() for p in params]
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.ones((), device="cuda") for _ in params]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grads = [p * 0.5 for p in params]
        kernels_module.adamw_step(params, grads, *moments, steps)
        norm = kernels_module.grad_norm(params)
    torch.cuda.current_stream().wait_stream(stream)
    kernels_module.adamw_step(expected, [p * 0.5 for p in expected], *zeros, steps)
    assert all(map(torch.equal, params, expected))
    assert torch.equal(norm, kernels_module.grad_norm(expected))


def test_mixed_devices(kernels_module: ModuleType) -> None:
    k, p = kernels_module, randn(4)
    with pytest.raises(RuntimeError, match=r"on the device of `params` \(cuda:0\), got cpu"):
        k.adamw_step([p], [p.cpu()], [p], [p], [torch.tensor(1.0)])
    with pytest.raises(RuntimeError, match=r"must be on the device of `tensors`"):
        k.grad_norm([p, p.cpu()])
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match=r"\(cuda:0\), got cuda:1"):
            k.grad_norm([p, p.to("cuda:1")])
    on_both = [nn.Parameter(p.clone()), nn.Parameter(p.cpu())]
    for q in on_both:
        q.grad = torch.ones_like(q)
    optim.AdamW(on_both, **HYPER).step()  # an optimizer may hold both
    torch.testing.assert_close(on_both[0].cpu(), on_both[1])
    total = k.clip_grad_norm_(on_both, 1.0)
    torch.testing.assert_close(total.cpu(), torch.tensor(8.0).sqrt())


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(kernels_module: ModuleType) -> None:
    n = 2**31 + 4100
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * 2 * n + 2 * 2**30:
        pytest.skip(f"needs {4 * 2 * n / 2**30 + 2:.0f} GiB of free GPU memory")
    k = kernels_module
    lists = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    p, g, m, v = lists
    g[0], g[-1] = 3.0, 4.0
    assert k.grad_norm([g]).item() == 5.0
    k.clip_grads([g], torch.tensor(5.0, device="cuda"), 2.5)
    assert g[0].item() == 1.5 and g[-1].item() == 2.0
    k.scale_grads([g], torch.tensor(2.0, device="cuda"))
    assert g[0].item() == 3.0 and g[-1].item() == 4.0 and g[1:-1].count_nonzero().item() == 0
    k.adamw_step([p], [g], [m], [v], [torch.tensor(1.0)], lr=1.0, weight_decay=0.0)
    assert p[0].item() == -1.0 and p[-1].item() == -1.0
    assert p[1:-1].count_nonzero().item() == 0
