"""Every kernel once, with small shapes, for compute-sanitizer: see `sanitize.sh`.

Tensors are made on the CPU and copied: no kernel of torch runs, so all that the tools see is ours.
`test_cuda_sanitize_reach.py` sees to it that no kernel is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from decoding.choice_cases import test_each_token_and_what_the_next_step_reads as visit_choice
from large_samples import LARGE
from list_samples import LISTS_BY_ID, LISTS_OF_DTYPES
from op_samples import BY_ID, DTYPES, Sample
from proofs import FILL, LAYOUTS, MARGIN, Guarded, assert_same_bits
from support.engines import SMALL as SMALL_DECODERS
from support.engines import visit as visit_decoder
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]
HALF = torch.bfloat16
#: (columns, batch): each way of `rows.cuh` to share out a row; those of many rows in bf16 only.
SMALL = [(34, 3), (64, 3), (256, 2), (512, 2), (1024, 2), (20000, 1), (50000, 1)]
MANY = [(1024, 720), (2048, 360), (4096, 180)]


def on_gpu(t: Tensor) -> Tensor:
    """A copy with the strides of `t`: its whole memory is copied, gaps included."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return memory.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.fixture(scope="session", autouse=True)
def _launched() -> Iterator[None]:
    """The names of the kernels that these tests launch, for `test_cuda_sanitize_reach.py`."""
    path = os.environ.get("HFPATCH_TEST_LAUNCHED")
    if path is None:  # the sanitizer and the profiler do not go together
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    Path(path).write_text(json.dumps([e.key for e in profile.key_averages()]), encoding="utf-8")


def visit(
    sample: Sample,
    kernels: ModuleType,
    dtype: torch.dtype,
    width: int,
    n: int,
    shifts: Sequence[int] = (0, 1),
) -> None:
    """Between bands; `shifts`: with a misaligned start too, of outputs, then of inputs."""
    host = sample.make(dtype, n, width)
    like = sample.call_all(kernels, host, width)
    for shift in shifts:
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
            sample.call_out(kernels, outs, views, width)
            for b, o, r in zip(bands, offset, like, strict=True):
                memory = b.cpu()
                assert bool((memory[:o] == FILL).all()), sample.id
                assert bool((memory[o + r.numel() :] == FILL).all()), sample.id
            twice.append(sample.meant([o.cpu() for o in outs]))
        assert_same_bits(*twice, f"{sample.id} {dtype} {width} columns, shift {shift}")


@pytest.mark.parametrize("name", BY_ID)
def test_every_kernel(name: str, kernels_module: ModuleType) -> None:
    shapes = [(d, *s) for d in DTYPES for s in SMALL] + [(HALF, *s) for s in MANY]
    for dtype, width, n in shapes:
        visit(BY_ID[name], kernels_module, dtype, width, n)


@pytest.mark.parametrize("name", LARGE)
def test_what_small_shapes_do_not_reach(name: str, kernels_module: ModuleType) -> None:
    sample, shapes = LARGE[name]
    for dtype, width, n in shapes:
        visit(sample, kernels_module, dtype, width, n, shifts=(0,))


@pytest.mark.parametrize(("name", "dtype"), LISTS_OF_DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_every_kernel_over_lists(
    shift: int, name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    """With a table of few tensors, of some and, once, of more than a launch takes."""
    sample = LISTS_BY_ID[name]
    lists = [((40000,), (7,), (), (0, 3), (4097,)), ((3,),) * 60]
    if (dtype, shift) == (HALF, 0):  # each is an allocation under the tool
        lists.append(((5,),) * 600)
    for shapes in lists:
        twice = []
        for _ in range(2):
            bands: list[tuple[Guarded, Tensor]] = []

            def between_bands(t: Tensor, bands: list[tuple[Guarded, Tensor]] = bands) -> Tensor:
                host = Guarded(t, shift)
                host.out.copy_(t)
                bands.append((host, host.all.cuda()))
                return bands[-1][1][host.at].view(t.shape)

            made = sample.make(dtype, shapes=shapes, change=between_bands)
            for number in sample.numbers:
                value = made[number]
                made[number] = (
                    [t.cuda() for t in value] if isinstance(value, list) else value.cuda()
                )
            twice.append([t.cpu() for t in sample.call(kernels_module, made)])
            for host, memory in bands:
                host.all = memory.cpu()
                host.assert_bands(name)
        assert_same_bits(*twice, f"{name} {dtype} {len(shapes)} tensors, shift {shift}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_of_many_rows(dim: int, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """By wgmma, with blocks of keys that a mask hides, shows, and changes."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 200, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, 1, 700, dim, generator=generator).to(dtype)
    hidden = torch.full((200, 700), -torch.inf, dtype=dtype).triu(501)
    for mask in (None, hidden, hidden == 0):
        operator = partial(kernels_module.ops.attention.default, q.cuda(), k.cuda(), v.cuda())
        given = None if mask is None else mask.cuda()
        twice = [
            [t.cpu() for t in operator(given, None, None, None, dim**-0.5, 1, 0, 0, 0.0)]
            for _ in range(2)
        ]
        assert_same_bits(*twice, f"attention {dtype} {dim}")


def test_products_of_nothing(kernels_module: ModuleType) -> None:
    """Sums of no products are what is added to them."""
    a, b, c = torch.zeros(5, 0), torch.zeros(0, 7), torch.ones(5, 7)
    for dtype in DTYPES:
        one, two, three = (t.to(dtype).cuda() for t in (a, b, c))
        out = kernels_module.ops.gemm.default(one, two, three, 1.0, 2.0, 0, 0)[0]
        assert torch.equal(out.cpu(), 2 * c.to(dtype))


def test_rows_that_divide_in_three_places(kernels_module: ModuleType) -> None:
    """More than the elementwise kernels' tables of rows hold: one element a thread."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        gate = torch.randn(3, 2, 6, 40, generator=generator).to(dtype)
        gate = gate.permute(2, 1, 0, 3).unflatten(0, (2, 3))  # leading dimensions: (ab), c, d
        up = torch.randn(3, 2, 6, 40, generator=generator).to(dtype)
        up = up.transpose(0, 1).unflatten(2, (2, 3))  # a, b, (cd)
        operator = kernels_module.ops.gated.default
        strided = operator(on_gpu(gate), on_gpu(up), 3)
        plain = operator(on_gpu(gate.contiguous()), on_gpu(up.contiguous()), 3)
        assert_same_bits([strided.cpu()], [plain.cpu()], str(dtype))


@pytest.mark.parametrize(
    ("shape", "groups", "last"),
    [
        # groups that one CTA would not hold alone: sm_90's distributed memory
        ((2, 12, 5000), 2, False),
        # several slabs, parts and rows of a thread, the last of each not whole
        ((2, 1001, 160), 16, True),
    ],
    ids=["a group that a cluster shares", "slabs of channels last"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    groups: int,
    last: bool,
    kernels_module: ModuleType,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight, bias = torch.randn(2, shape[2 if last else 1], generator=generator).to(dtype)
    tail = (groups, 1e-5, True, last)
    y = kernels_module.group_norm(x.cuda(), weight.cuda(), bias.cuda(), *tail)
    expected = kernels_module.group_norm(x, weight, bias, *tail)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL_DECODERS)
def test_decoding(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """A decoding step's kernels, launched and from their graph."""
    if name == "many rows" and os.environ.get("HFPATCH_TEST_TOOL") == "initcheck":
        pytest.skip("cuBLASLt's kernel writes the logits, in stores that initcheck does not see")
    visit_decoder(SMALL_DECODERS[name], dtype, kernels_module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 1000, 151936])
def test_greedy_tokens(vocab: int, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """The kernel that ends a greedy step, and what it writes beside the token."""
    visit_choice("cuda", dtype, 1, 5, vocab)
