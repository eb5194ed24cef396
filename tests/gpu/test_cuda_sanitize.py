"""Every kernel once, with small shapes, for compute-sanitizer: see `sanitize.sh`.

Tensors are made on the CPU and copied: no kernel of torch runs, so all that the tools see is ours.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from op_samples import BY_ID, DTYPES
from proofs import FILL, LAYOUTS, MARGIN, assert_same_bits
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]
#: (columns, batch): each way of `rows.cuh` to share out a row; those of many rows in bf16 only.
SMALL = [(34, 3), (64, 3), (256, 2), (512, 2), (1024, 2), (20000, 1), (50000, 1)]
MANY = [(1024, 720), (2048, 360), (4096, 180)]


def on_gpu(t: Tensor) -> Tensor:
    """A copy with the strides of `t`: its whole memory is copied, gaps included."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return memory.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("name", BY_ID)
def test_every_kernel(name: str, kernels_module: ModuleType) -> None:
    sample = BY_ID[name]
    shapes = [(d, *s) for d in DTYPES for s in SMALL] + [(torch.bfloat16, *s) for s in MANY]
    for dtype, width, n in shapes:
        host = sample.make(dtype, n, width)
        like = sample.call_all(kernels_module, host, width)
        for shift in (0, 1):  # the bands and a misaligned start, for outputs; then inputs too
            views = {
                k: on_gpu(LAYOUTS["misaligned"][0](t) if shift and t.is_floating_point() else t)
                for k, t in host.items()
            }
            twice = []
            for _ in range(2):
                offset = [MARGIN + shift * r.is_floating_point() for r in like]
                bands = [
                    torch.full((r.numel() + 2 * MARGIN + 1,), FILL).to(r.dtype).cuda() for r in like
                ]
                outs = [
                    b[o : o + r.numel()].view(r.shape)
                    for b, o, r in zip(bands, offset, like, strict=True)
                ]
                sample.call_out(kernels_module, outs, views, width)
                for b, o, r in zip(bands, offset, like, strict=True):
                    memory = b.cpu()
                    assert bool((memory[:o] == FILL).all()), name
                    assert bool((memory[o + r.numel() :] == FILL).all()), name
                twice.append(sample.meant([o.cpu() for o in outs]))
            assert_same_bits(*twice, f"{name} {dtype} {width} columns, shift {shift}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_that_a_cluster_shares(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """`group_norm` of groups that one CTA would not hold alone: sm_90's distributed memory."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 5000, generator=generator).to(dtype)
    weight, bias = torch.randn(2, 12, generator=generator).to(dtype)
    y = kernels_module.group_norm(x.cuda(), weight.cuda(), bias.cuda(), 2, 1e-5, True, False)
    expected = kernels_module.group_norm(x, weight, bias, 2, 1e-5, True, False)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=eps, atol=max(eps, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_shared_memory(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """The gradient of a layer norm that is too wide for its sums to stay in registers."""
    generator = torch.Generator().manual_seed(0)
    grad, x = torch.randn(2, 5, 16384, generator=generator).to(dtype)
    weight, bias = torch.randn(2, 16384, generator=generator).to(dtype)
    tail = (1e-5, 3)
    operator = kernels_module.ops.layer_norm_backward.default
    ours = operator(*(t.cuda() for t in (grad, x, weight, bias)), *tail)
    expected = operator(grad, x, weight, bias, *tail)
    eps = 4 * torch.finfo(dtype).eps
    for a, b in zip(ours[:3], expected[:3], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16392, 32768])
def test_a_pair_of_rows_in_registers(
    width: int, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """The gradient of `softmax` of many wide rows: a warp holds a part of both inputs."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(260, width, generator=generator).to(dtype)
    y = torch.rand(260, width, generator=generator).to(dtype)
    operator = kernels_module.ops.softmax_backward.default
    ours, _ = operator(grad.cuda(), y.cuda(), 0.5)
    part, _ = operator(grad[-2:].cuda(), y[-2:].cuda(), 0.5)  # few rows: another kernel
    assert_same_bits([ours[-2:].cpu()], [part.cpu()], f"{dtype} {width} columns")
    wide = grad[:3].double() * y[:3].double()
    expected = 0.5 * (wide - y[:3].double() * wide.sum(-1, keepdim=True))
    torch.testing.assert_close(ours[:3].cpu().double(), expected, rtol=0.02, atol=0.05)
