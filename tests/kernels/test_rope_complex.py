"""Complex RoPE tables: against diffusers' own functions, one launch, gradients, errors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import KernelError
from test_c_api import (
    DTYPES,
    built,  # noqa: F401  (fixtures, as is `lib`)
    call,
    lib,  # noqa: F401
    same_bits,
)
from torch import Tensor

from hfpatch.ops import OPS

B, S, H, D = 2, 5, 3, 24


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(*shape: int) -> Tensor:
    """exp(i angle), complex64; some angles are large, as those of long videos."""
    angle = draw(*shape, seed=9) * 40
    return torch.polar(torch.ones_like(angle), angle)


def assert_as_eager(actual: Tensor, expected: Tensor) -> None:
    """One rounding of fp32 for each product; a half type shows that in few results."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    eps = torch.finfo(actual.dtype).eps
    difference = (actual.double() - expected.double()).abs()
    assert (difference <= 2 * eps * (1 + expected.double().abs())).all()
    if actual.dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_diffusers(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    q, k = draw(B, S, H, D, dtype=dtype), draw(B, S, 1, D, dtype=dtype, seed=1)
    for freqs in (table(1, S, D // 2), table(B, S, D // 2)):  # Lumina, Z-Image
        expected = [apply_rotary_emb(t, freqs, use_real=False) for t in (q, k)]
        assert_as_eager(kernels_module.rope(q, freqs, interleaved=True), expected[0])
        both = kernels_module.rope_qk(q, k, freqs, interleaved=True)
        for actual, e in zip(both, expected, strict=True):
            assert_as_eager(actual, e)
    freqs = table(S, D // 2)  # Qwen-Image
    expected = [apply_rotary_emb_qwen(t, freqs, use_real=False) for t in (q, k)]
    for actual, e in zip(
        kernels_module.rope_qk(q, k, freqs, interleaved=True), expected, strict=True
    ):
        assert_as_eager(actual, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_z_images_attention(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernels_module: ModuleType
) -> None:
    """Its processor turns q and k after their norms; what it hands to the attention is compared."""
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers import transformer_z_image as z

    seen = []

    def dispatch(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        seen.append((q, k))
        return v

    monkeypatch.setattr(z, "dispatch_attention_fn", dispatch)
    attention = Attention(
        query_dim=H * D, heads=H, dim_head=D, qk_norm="rms_norm", eps=1e-5, bias=False,
        out_bias=False, processor=z.ZSingleStreamAttnProcessor(),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for norm in (attention.norm_q, attention.norm_k):
            norm.weight.copy_(draw(D).abs() + 0.5)
        x, freqs = draw(B, S, H * D, dtype=dtype), table(B, S, D // 2)
        attention(x, freqs_cis=freqs)
        q, k = (p(x).unflatten(-1, (H, D)) for p in (attention.to_q, attention.to_k))
        weights = (attention.norm_q.weight, attention.norm_k.weight)
        fused = kernels_module.qk_norm_rope(
            q, k, *weights, freqs, eps=1e-5, cast="weight", interleaved=True
        )
    for actual, e in zip(fused, seen[0], strict=True):
        eps = max(torch.finfo(dtype).eps, 1e-6)
        # A norm that is rounded to its neighbour moves both columns of its pair.
        assert ((actual.double() - e.double()).abs() <= 2 * eps * e.abs().amax()).all()
        if dtype != torch.float32:
            assert (actual != e).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_real_tables_result(lib, dtype):
    """Bit for bit that of cos and sin apart, in every layout of the table."""
    for shape, seq_dim, leads in (
        ((B, S, H, D), 1, [(S,), (1, S), (B, S), (B, S, 1), (1, S, H), (B, S, H)]),
        ((B, H, S, D), 2, [(S,), (B, S), (B, 1, S), (B, H, S)]),
        ((B, S, D), 1, [(S,), (B, S)]),
        ((S, D), 0, [(S,)]),
    ):
        x = draw(*shape, dtype=dtype)
        for lead in leads:
            for rotary in (D, D - 4, 2):
                freqs = table(*lead, rotary // 2)
                real = torch.view_as_real(freqs)
                cos, sin = freqs.real.contiguous(), freqs.imag.contiguous()
                codes = (seq_dim, 1, rotary, 0)
                expected = call(lib, "rope", x, cos, sin, *codes)
                assert same_bits(call(lib, "rope", x, real, None, *codes), expected)
                norm = (1e-6, 0.0, 1, 0, *codes)
                ours, theirs = ([torch.empty_like(x) for _ in range(2)] for _ in range(2))
                w = draw(D, dtype=dtype, seed=2).abs()
                lib.call("qk_norm_rope", *ours, x, x * 1, w, w, real, None, *norm)
                lib.call("qk_norm_rope", *theirs, x, x * 1, w, w, cos, sin, *norm)
                assert all(map(same_bits, ours, theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_per_token_of_a_video(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    """3-D RoPE: the axes' angles side by side, one row per token, other ones per sample."""
    frames, height, width = 2, 3, 4
    grid = torch.cartesian_prod(*(torch.arange(float(n)) for n in (frames, height, width)))
    tokens = len(grid)
    angle = torch.cat([grid[:, [i]] * torch.rand(D // 6)[None] for i in range(3)], -1)
    angle = torch.stack((angle, angle + 1))  # [B, S, D / 2]
    q, k = (draw(B, tokens, H, D, dtype=dtype, seed=i) for i in (0, 1))
    for a in (angle, angle[0]):
        freqs = torch.polar(torch.ones_like(a), a)
        compact = freqs.real.contiguous(), freqs.imag.contiguous()
        wide = [f.repeat_interleave(2, -1) for f in compact]  # [B, S, D] or [S, D]
        reference = OPS["rope_qk"].reference(q, k, *wide, interleaved=True)
        for tables in (wide, compact, (freqs,)):
            actual = kernels_module.rope_qk(q, k, *tables, interleaved=True)
            for y, e in zip(actual, reference, strict=True):
                assert_as_eager(y, e)
        reference = OPS["rope_qk"].reference(q, k, freqs, None, interleaved=True)
        assert all(map(torch.equal, reference, OPS["rope_qk"].reference(q, k, *wide, 1, True)))


def test_gradients_in_place_and_compiled(kernels_module: ModuleType) -> None:
    freqs = table(S, D // 2)
    for conjugated in (freqs, freqs.conj()):  # lazily
        q, k = (draw(B, S, H, D, seed=i).requires_grad_() for i in (0, 1))
        y = kernels_module.rope_qk(q, k, conjugated, interleaved=True)
        seeds = [draw(B, S, H, D, seed=i) for i in (2, 3)]
        for grad, g in zip(torch.autograd.grad(y, (q, k), seeds), seeds, strict=True):
            back = torch.view_as_complex(g.unflatten(-1, (-1, 2))) * conjugated[:, None].conj()
            torch.testing.assert_close(grad, torch.view_as_real(back).flatten(-2))
        x = draw(B, S, H, D)
        expected = kernels_module.rope(x, conjugated, interleaved=True)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda t, f: kernels_module.rope(t, f, interleaved=True), backend="aot_eager"
        )
        assert torch.equal(compiled(x, conjugated), expected)
        assert kernels_module.rope_(x, conjugated, interleaved=True) is x
        assert torch.equal(x, expected)


X = torch.ones(B, S, H, D)
T = torch.ones(S, D // 2, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, T, None, 1, 0, 0, 0), r"`interleaved` must be 1 for a complex table, got 0"),
        (
            (X, T[..., 0].contiguous(), None, 1, 1, 0, 0),
            r"`cos` must be the real view .*\[5, 12\]",
        ),
        ((X, T[:, :7], None, 1, 1, 0, 0), r"`cos`, a complex table, must have 12 columns, got 7"),
        ((X, T[:4], None, 1, 1, 0, 0), r"`cos` must have the shape of `x`"),
        ((X, torch.ones(S, D // 2, 4)[..., :2], None, 1, 1, 0, 0), r"last two dimensions cont"),
        ((X, T.to(torch.float16), None, 1, 1, 0, 0), r"`cos` must be float32 or have the dtype"),
    ],
)
def test_bad_calls(lib, args, message):
    with pytest.raises(KernelError, match=message):
        lib.call("rope", torch.empty_like(X), *args)


def test_bad_torch_calls(kernels_module: ModuleType) -> None:
    freqs = table(S, D // 2)
    with pytest.raises(RuntimeError, match="`sin`: expected None next to a complex `cos`"):
        kernels_module.rope(X, freqs, freqs, interleaved=True)
    with pytest.raises(RuntimeError, match="`cos` must be a tensor where `sin` is one"):
        kernels_module.qk_norm_rope(X, X, None, None, None, freqs.imag)
    with pytest.raises(RuntimeError, match="`cos`: expected a table that needs no gradient"):
        kernels_module.rope(X, freqs.clone().requires_grad_(), interleaved=True)
