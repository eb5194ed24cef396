"""The operators over lists as torch has them: schemas, fakes, errors, versions, the package."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

INF = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 40), (), (0, 2), (17,)]
NUMBERS = (1e-2, 0.9, 0.99, 1e-8, 0.1, 0)


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).to(dtype) for shape in SHAPES]


def step_arguments(dtype: torch.dtype, amsgrad: bool) -> tuple[Any, ...]:
    lists = [tensors(dtype, seed) for seed in range(5)]
    tops = lists[4] if amsgrad else []
    steps = [torch.tensor(2.0) for _ in SHAPES]
    scalars = (None, torch.tensor(0.5), None, torch.tensor(0.0))
    return (*lists[:4], tops, [], steps, *scalars, *NUMBERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    ops = kernels_module.ops
    for amsgrad in (False, True):
        torch.library.opcheck(ops.adamw_step.default, step_arguments(dtype, amsgrad))
    torch.library.opcheck(ops.grad_norm.default, (tensors(dtype), 0))
    outs = (torch.empty(()), torch.empty(3))
    torch.library.opcheck(ops.grad_norm_out.default, (*outs, tensors(dtype), 1))
    torch.library.opcheck(ops.clip_grads.default, (tensors(dtype), torch.tensor(9.0), 1.0))


def test_schemas_say_what_is_changed(kernels_module: ModuleType) -> None:
    schema = kernels_module.ops.adamw_step.default._schema
    changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert changed == ["params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"]
    assert not schema.returns


def test_step_takes_parameters_and_raises_versions(kernels_module: ModuleType) -> None:
    params = [torch.nn.Parameter(t) for t in tensors()]
    expected = [torch.nn.Parameter(t.clone()) for t in tensors()]
    reference = torch.optim.AdamW(expected, lr=1e-2)
    grads, ms, vs = tensors(seed=1), *([torch.zeros(s) for s in SHAPES] for _ in range(2))
    for e, g in zip(expected, grads, strict=True):
        e.grad = g
    reference.step()
    seen = [p._version for p in params]
    steps = [torch.tensor(1.0)] * len(params)
    kernels_module.adamw_step(params, grads, ms, vs, steps, lr=1e-2)
    assert all(p._version > old for p, old in zip(params, seen, strict=True))
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)


def test_masters(kernels_module: ModuleType) -> None:
    masters = [t.clone() for t in tensors()]
    params = [t.bfloat16() for t in masters]
    ms, vs = ([torch.zeros(s) for s in SHAPES] for _ in range(2))
    alone = [t.clone() for t in masters], *([torch.zeros(s) for s in SHAPES] for _ in range(2))
    for i in range(5):
        grads = tensors(torch.bfloat16, seed=i)
        steps = [torch.tensor(i + 1.0)] * len(params)
        kernels_module.adamw_step(params, grads, ms, vs, steps, masters=masters)
        wide = [g.float() for g in grads]
        kernels_module.adamw_step(alone[0], wide, *alone[1:], steps)
    assert all(map(torch.equal, masters, alone[0]))
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, masters, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("max_norm", [0.1, 100.0, INF])
def test_clip_grad_norm_(kernels_module: ModuleType, norm_type: float, max_norm: float) -> None:
    ours, theirs = ([torch.nn.Parameter(t) for t in tensors()] for _ in range(2))
    for some in (ours, theirs):
        for p, g in zip(some, tensors(seed=3), strict=True):
            p.grad = g.clone()
        some.append(torch.nn.Parameter(torch.ones(3)))  # without a gradient
    got = kernels_module.clip_grad_norm_(ours, max_norm, norm_type)
    # PyTorch refuses the infinity norm of an empty tensor
    want = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], max_norm, norm_type)
    torch.testing.assert_close(got, want)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert kernels_module.clip_grad_norm_([ours[-1]], 1.0).item() == 0


def test_errors(kernels_module: ModuleType) -> None:
    k = kernels_module
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1.0, float("nan"), 2.0])
    with pytest.raises(ValueError, match=r"`norm_type`: expected one of 2.0, inf, got 3"):
        k.grad_norm([p], 3)
    with pytest.raises(ValueError, match=r"`tensors`: expected at least one tensor, got none"):
        k.grad_norm([])
    k.adamw_step([], [], [], [], [])
    k.clip_grads([], torch.tensor(1.0), 1.0)
    with pytest.raises(RuntimeError, match=r"total norm of the gradients is nan, expected a finit"):
        k.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert p.grad[0] == 1  # nothing was changed
    with pytest.raises(RuntimeError, match=r"`tensors\[1\]` must be float32, float16 or bfloat16"):
        k.grad_norm([p, p.double()])
    with pytest.raises(RuntimeError, match=r"`grads` must have 1 tensors like `params`, got 0"):
        k.adamw_step([p], [], [p], [p], [torch.tensor(1.0)])
