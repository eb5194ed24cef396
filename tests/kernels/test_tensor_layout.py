"""Tensors are read off torch's own objects: whatever they are, calls see what torch shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfpatch
from hfpatch.kernels.sources import local_package

WIDTH = 48


@pytest.fixture
def norm(kernels_module: object) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The bound call, whose tensors are read each time."""
    bound = local_package().kernel("rms_norm").bind({"eps": 1e-6, "cast": "none"})
    return lambda x, w: bound(x, w, None)


def _check(norm: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> None:
    wanted = F.rms_norm(x.double(), (x.shape[-1],), w.double(), 1e-6)
    for _ in range(3):  # the first of a form is read by DLPack
        torch.testing.assert_close(norm(x, w).double(), wanted, rtol=1e-2, atol=1e-2)


def test_the_layout_is_known(kernels_module: object) -> None:
    """Where it is not, calls are slower and nobody is told: with this torch it is."""
    assert local_package().module.calls._layout_is_known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", range(1, 9))
def test_ranks_and_dtypes(norm: Callable[..., torch.Tensor], rank: int, dtype: torch.dtype) -> None:
    shape = [2, 1, 3, 2, 1, 2, 2][: rank - 1]
    for _ in range(2):
        x = torch.randn(*shape, WIDTH).to(dtype)
        w = nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
        _check(norm, x, w)
        if rank > 2:
            _check(norm, x.transpose(0, 1), w)


def test_the_same_tensor_with_other_parts(norm: Callable[..., torch.Tensor]) -> None:
    """What is read is read at each call: sizes, strides, place, memory."""
    x, w = torch.randn(6, WIDTH), torch.randn(WIDTH)
    _check(norm, x, w)
    x.unsqueeze_(0)
    _check(norm, x, w)
    x.squeeze_(0).t_()
    x.t_()
    _check(norm, x, w)
    x.data = torch.randn(9, WIDTH)[2:]
    _check(norm, x, w)
    x.data = x.data[::2]
    _check(norm, x, w)
    x.set_(torch.randn(4 * WIDTH).untyped_storage(), WIDTH, (2, WIDTH), (WIDTH, 1))
    _check(norm, x, w)
    x.resize_(5, WIDTH).normal_()
    _check(norm, x, w)
    torch.utils.swap_tensors(x, torch.randn(3, WIDTH))
    _check(norm, x, w)
    x.data = x.data.double().float()
    _check(norm, x, w)
    assert norm(x[:0], w).shape == (0, WIDTH)


def test_dtypes_that_change_in_place(norm: Callable[..., torch.Tensor]) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        layer.to(dtype)
        _check(norm, torch.randn(5, WIDTH).to(dtype), layer.bias.detach())
        with torch.no_grad():
            _check(norm, layer.weight, layer.bias)


def test_values_with_another_sign_than_in_memory(norm: Callable[..., torch.Tensor]) -> None:
    x, w = torch.randn(4, WIDTH), torch.randn(WIDTH)
    _check(norm, x, w)
    _check(norm, torch._neg_view(x), w)
    _check(norm, x, torch._neg_view(w))
    _check(norm, torch.complex(x, x).conj().imag, w)


def test_in_inference_mode_and_out_of_it(norm: Callable[..., torch.Tensor]) -> None:
    x, w = torch.randn(4, WIDTH), torch.randn(WIDTH)
    _check(norm, x, w)
    with torch.inference_mode():
        made = torch.randn(4, WIDTH)
        _check(norm, made, w)
        _check(norm, x, w)
    _check(norm, made, w)


def test_memory_that_two_share_until_one_writes(kernels_module: object) -> None:
    """A lazy clone of a parameter stays what it is when an optimizer step writes to that."""
    lazy_clone = torch._lazy_clone  # type: ignore[attr-defined]
    parameters = [nn.Parameter(torch.randn(40)) for _ in range(5)]
    plain = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, plain, strict=True):
        q.grad = torch.randn(40)
        p.grad = q.grad.clone()
    ours, theirs = hfpatch.optim.AdamW(parameters), torch.optim.AdamW(plain)
    for _ in range(4):
        before = [p.detach().clone() for p in parameters]
        lazy = [lazy_clone(p.detach()) for p in parameters]
        ours.step()
        theirs.step()
        for p, q, was, held in zip(parameters, plain, before, lazy, strict=True):
            assert torch.equal(held, was)
            torch.testing.assert_close(p, q)


def test_parameters_whose_memory_is_exchanged(kernels_module: object) -> None:
    parameters = [nn.Parameter(torch.randn(n)) for n in (8, 40, 3)]
    plain = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours, theirs = hfpatch.optim.AdamW(parameters), torch.optim.AdamW(plain)
    for step in range(6):
        for p, q in zip(parameters, plain, strict=True):
            if step % 2:
                p.data = p.data.clone()
            if step == 3:
                p.data = torch.cat([torch.zeros(7), p.data])[7:]
            q.grad = torch.randn(q.shape)
            p.grad = torch.cat([q.grad, q.grad])[q.numel() :] if step % 3 else q.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(parameters, plain, strict=True):
        torch.testing.assert_close(p, q)
