"""The rotary embeddings on CUDA: values against fp64 and eager, layouts, in place, graphs."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

from hfpatch.ops import OPS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.rand(*shape, device="cuda") * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def twice(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def check(name: str, module: ModuleType, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """Our result, after a comparison with the formula in fp64 and, for what it rounds, in the
    dtype itself: half types round the norm twice at most, products once, the result once, each by
    half an eps of the largest value of a row; fp32 accumulates a few roundings over a row."""
    ours = getattr(module, name)(*args, **params)
    truth = OPS[name].reference(*map(wide, args), **params)
    pairs = [(ours, truth)] if isinstance(ours, Tensor) else list(zip(ours, truth, strict=True))
    for y, t in pairs:
        assert (y.shape, y.dtype) == (t.shape, args[0].dtype)
        assert y.is_contiguous()
        if y.numel() == 0:
            continue
        eps = tolerance("cuda rope", y.dtype)
        error = (y.double() - t).abs() / t.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert error.max().item() <= eps, (name, params, error.max().item())
    return ours


# A head's threads: a part of a warp, several passes of one, vectors of 16 and 8 bytes and single
# elements; D, R.
WIDTHS = [
    (64, 0),
    (128, 0),
    (96, 0),
    (72, 0),
    (80, 32),
    (256, 64),
    (2, 0),
    (6, 2),
    (33, 10),
    (127, 126),
    (1024, 0),
    (2048, 0),
    (2056, 1024),
    (6000, 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_rope(
    kernels_module: ModuleType, width: tuple[int, int], interleaved: bool, dtype: torch.dtype
) -> None:
    dim, rotary = width
    r = rotary or dim
    q, k = randn(2, 37, 6, dim, dtype=dtype), randn(2, 37, 2, dim, dtype=dtype)
    for table, repeated, rounded in itertools.product(
        {torch.float32, dtype}, (False, True), (False, True)
    ):
        cos, sin = tables(2, 37, r // 2, dtype=table)
        if repeated:
            cos, sin = twice(cos, interleaved), twice(sin, interleaved)
        params = {"interleaved": interleaved, "rotary_dim": rotary, "round_products": rounded}
        both = check("rope_qk", kernels_module, (q, k, cos, sin), params)
        single = [kernels_module.rope(t, cos, sin, **params) for t in (q, k)]
        assert all(map(torch.equal, both, single))
        # Products and sums are rounded one by one, as in eager: the same bits.
        eager = OPS["rope_qk"].reference(q, k, cos, sin, **params)
        assert all(map(torch.equal, both, eager)), (table, repeated, rounded)
        turned = [t.transpose(1, 2) for t in (q, k)]
        other = kernels_module.rope_qk(*turned, cos, sin, seq_dim=2, **params)
        assert all(torch.equal(o.transpose(1, 2), b) for o, b in zip(other, both, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_table_shapes(kernels_module: ModuleType, interleaved: bool, dtype: torch.dtype) -> None:
    b, s, h, d = 3, 11, 5, 64
    for shape, seq_dim, lead in [
        ((b, s, h, d), 1, (s,)),
        ((b, s, h, d), 1, (b, s)),
        ((b, s, h, d), 1, (1, s, 1)),
        ((b, s, h, d), 1, (b, s, h)),
        ((b, h, s, d), 2, (b, s)),
        ((b, h, s, d), 2, (1, h, s)),
        ((b, s, d), 1, (b, s)),
        ((b, s, d), 1, (s,)),
        ((s, h, d), 0, (s, 1)),
        ((s, d), 0, (s,)),
        ((b, 1, h, d), 1, (b, 1)),
    ]:
        x, table = randn(*shape, dtype=dtype), tables(*lead, d // 2)
        params = {"seq_dim": seq_dim, "interleaved": interleaved}
        check("rope", kernels_module, (x, *table), params)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_qk_norm_rope(
    kernels_module: ModuleType, across: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    # H, KV, D, R: the rows of q and k in one CTA or apart, in registers or read twice
    for (h, kv, d, rotary), angles in itertools.product(
        [
            (32, 32, 64, 0),
            (12, 12, 128, 0),
            (40, 40, 128, 0),
            (16, 4, 128, 64),
            (3, 3, 72, 24),
            (2, 1, 37, 10),
            (1, 1, 2048, 0),
            (8, 8, 1536, 0),
            (2, 2, 10000, 0),
            (160, 80, 128, 0),
            (300, 300, 128, 0),
            (64, 8, 96, 0),
        ],
        ("table", "heads", None),
    ):
        r = rotary or d
        q, k = randn(2, 19, h, d, dtype=dtype), randn(2, 19, kv, d, dtype=dtype) * 3
        cos = sin = None
        if angles == "heads" and h == kv:
            cos, sin = tables(2, 19, h, r // 2)
        elif angles is not None:
            cos, sin = tables(19, r // 2)
        sizes = [n * d if across else d for n in (h, kv)]
        rules: list[tuple[Any, dict[str, Any]]] = [
            (None, {"cast": "none"}),
            (dtype, {"cast": "input"}),
            (dtype, {"cast": "none", "weight_offset": 1.0}),
            (torch.float32, {"cast": "none"}),
        ]
        for weight_type, rule in rules:
            weights = [
                None if weight_type is None else randn(n).abs().to(weight_type) + 0.5 for n in sizes
            ]
            check(
                "qk_norm_rope",
                kernels_module,
                (q, k, *weights, cos, sin),
                {
                    "norm_across_heads": across,
                    "interleaved": interleaved,
                    "rotary_dim": rotary,
                    "eps": 1e-5,
                    **rule,
                },
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    """Enough threads for several heads in each; a number of heads that four does not divide."""
    for h, kv, d in [(32, 8, 128), (5, 2, 64), (30, 30, 64)]:
        tokens = 2**19 * 16 // ((h + kv) * d) + 5
        q, k = randn(2, tokens, h, d, dtype=dtype), randn(2, tokens, kv, d, dtype=dtype)
        for interleaved in (False, True):
            cos, sin = tables(tokens, d // 2)
            check("rope_qk", kernels_module, (q, k, cos, sin), {"interleaved": interleaved})
            w = randn(2, d, dtype=dtype).abs() + 0.5
            params = {"interleaved": interleaved, "cast": "input"}
            y = check("qk_norm_rope", kernels_module, (q, k, *w, cos, sin), params)
            again = kernels_module.qk_norm_rope(q[:, :7], k[:, :7], *w, cos[:7], sin[:7], **params)
            assert all(torch.equal(a, t[:, :7]) for a, t in zip(again, y, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_in_place_in_a_packed_buffer(
    kernels_module: ModuleType, shift: int, dtype: torch.dtype
) -> None:
    ops = kernels_module.ops
    for (h, d), across, interleaved in itertools.product(
        [(32, 64), (7, 72), (24, 128), (2, 4096)], (0, 1), (0, 1)
    ):
        memory = randn(2, 33, 3 * h * d + 16, dtype=dtype)
        packed = memory[..., shift : shift + 3 * h * d]
        q, k, v = (t.unflatten(-1, (h, d)) for t in packed.chunk(3, -1))
        before = memory.clone()
        cos, sin = tables(33, d // 2)
        weights = randn(2, h * d if across else d, dtype=dtype)
        codes = (1e-6, 0.0, 1, across, 1, interleaved, 0, 0)
        expected = ops.qk_norm_rope.default(
            q.contiguous(), k.contiguous(), *weights.clone(), cos, sin, *codes
        )
        ops.qk_norm_rope_out.default(q, k, q, k, *weights, cos, sin, *codes)
        for a, e in zip((q, k), expected, strict=True):
            # The order of the sum may follow the alignment.
            eps = max(torch.finfo(dtype).eps, 1e-6)
            scale = e.float().abs().amax(-1, keepdim=True)
            assert ((a.float() - e.float()).abs() <= 2.1 * eps * scale).all()
        changed = (memory != before) & ~before.isnan()
        outside = torch.ones_like(changed)
        outside[..., shift : shift + 2 * h * d] = False
        assert not (changed & outside).any()
        memory.copy_(before)
        codes = (1, interleaved, 0, 0)
        expected = ops.rope_qk.default(q, k, cos, sin, *codes)
        ops.rope_qk_out.default(q, k, q, k, cos, sin, *codes)
        assert all(map(torch.equal, (q, k), expected))
        assert torch.equal(v, before[..., shift : shift + 3 * h * d].chunk(3, -1)[2].view_as(v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama_and_ltx_as_eager(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = randn(2, 100, 32, 128, dtype=dtype).transpose(1, 2)
    k = randn(2, 100, 8, 128, dtype=dtype).transpose(1, 2)
    cos, sin = (twice(t, False) for t in tables(2, 100, 64, dtype=dtype))
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = kernels_module.rope_qk(q, k, cos, sin, seq_dim=2, round_products=True)
    assert all(map(torch.equal, ours, theirs))

    x = randn(2, 336, 2048, dtype=dtype)
    cos, sin = (twice(t, True) for t in tables(2, 336, 1024))
    assert torch.equal(
        kernels_module.rope(x, cos, sin, interleaved=True), apply_rotary_emb(x, (cos, sin))
    )


def test_zero_size(kernels_module: ModuleType) -> None:
    cos, sin = tables(3, 32)
    for shape in [(0, 3, 2, 64), (2, 3, 0, 64)]:
        x = randn(*shape, dtype=torch.bfloat16)
        assert kernels_module.rope(x, cos, sin).shape == x.shape
        assert kernels_module.qk_norm_rope(x, x, None, None, cos, sin)[1].shape == x.shape
    k = randn(2, 3, 1, 64)
    check(
        "qk_norm_rope",
        kernels_module,
        (k[:, :, :0], k, None, None, cos, sin),
        {"norm_across_heads": True},
    )


@pytest.mark.alone
def test_more_than_two_to_the_31_elements(kernels_module: ModuleType) -> None:
    tokens, h, d = 2**31 // 4096 + 5, 32, 128
    if torch.cuda.mem_get_info()[0] < 5 * tokens * h * d * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    x = torch.empty(1, tokens, h, d, device="cuda", dtype=torch.bfloat16).normal_()
    cos, sin = tables(tokens, d // 2)
    y = kernels_module.rope(x, cos, sin)
    for part in (slice(0, 3), slice(-3, None)):
        assert torch.equal(y[:, part], kernels_module.rope(x[:, part], cos[part], sin[part]))
    del y
    w = randn(h * d, dtype=torch.bfloat16)
    y, _ = kernels_module.qk_norm_rope(
        x, x[:, :, :1], w, w[:d], cos, sin, norm_across_heads=True, interleaved=True
    )
    for part in (slice(0, 3), slice(-3, None)):
        few, _ = kernels_module.qk_norm_rope(
            x[:, part],
            x[:, part, :1],
            w,
            w[:d],
            cos[part],
            sin[part],
            norm_across_heads=True,
            interleaved=True,
        )
        assert torch.equal(y[:, part], few)


def test_cuda_graph(kernels_module: ModuleType) -> None:
    q, k = randn(2, 2, 64, 32, 64, dtype=torch.bfloat16)
    w, (cos, sin) = randn(2, 2048, dtype=torch.bfloat16), tables(2, 64, 32, 32)

    def call() -> tuple[Tensor, Tensor]:
        return kernels_module.qk_norm_rope(
            q, k, *w, cos, sin, norm_across_heads=True, interleaved=True
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for _ in range(5):
        q.normal_(), k.normal_(), cos.uniform_()
        graph.replay()
        assert all(map(torch.equal, y, call()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_and_gradients(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    ops = kernels_module.ops
    q, k = randn(2, 3, 4, 64, dtype=dtype), randn(2, 3, 2, 64, dtype=dtype)
    table, w = tables(3, 32), randn(2, 64, dtype=dtype)
    torch.library.opcheck(ops.rope.default, (q, *table, 1, 0, 0, 1))
    torch.library.opcheck(ops.rope_qk.default, (q, k, *table, 1, 1, 0, 0))
    torch.library.opcheck(ops.qk_norm_rope.default, (q, k, *w, *table, 1e-6, 0.0, 1, 0, 1, 0, 0, 0))
    x = q.clone().requires_grad_()
    y = kernels_module.rope(x, *table, interleaved=True)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact = q.double().requires_grad_()
    y = OPS["rope"].reference(exact, *map(wide, table), interleaved=True)
    (expected,) = torch.autograd.grad(y, exact, torch.ones_like(y))
    eps = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((grad.double() - expected).abs() <= 2 * eps).all()
