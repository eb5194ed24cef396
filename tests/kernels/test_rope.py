"""The rotary embeddings as torch operators, against the functions of transformers and diffusers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hfpatch.ops import OPS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
B, S, H, KV, D = 2, 24, 4, 2, 64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def half_table(dtype: torch.dtype, width: int = D, batch: int = B) -> tuple[Tensor, Tensor]:
    """cos, sin [B, S, width], as transformers' rotary embeddings give them."""
    angle = torch.rand(batch, S, width // 2) * 30
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def twice_table(*shape: int) -> tuple[Tensor, Tensor]:
    """cos, sin, fp32, each value twice in neighbouring columns, as diffusers' give them."""
    angle = (torch.rand(*shape[:-1], shape[-1] // 2) * 30).repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def assert_same(ours: Any, theirs: Any, inexact: float = 0.0) -> None:
    """Half types: the same bits except a share `inexact`, where a different last bit in fp32 (the
    norm's sum; a fused multiply-add) tips a rounding. fp32: within a few units in the last place
    of the values that are added up, which are a few units in size. The dtype is the input's."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b.float(), rtol=0, atol=4e-6)
        else:
            assert a.dtype == b.dtype
            eps = torch.finfo(a.dtype).eps
            assert (a != b).float().mean().item() <= inexact
            assert ((a.float() - b.float()).abs() <= 2 * eps * b.float().abs() + 4e-2 * eps).all()


# -------------------------------------------------------------------------------------------------
# Against transformers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    projected = randn(B, S, (H + KV) * D, dtype=dtype)
    q = projected[..., : H * D].view(B, S, H, D).transpose(1, 2)
    k = projected[..., H * D :].view(B, S, KV, D).transpose(1, 2)
    cos, sin = half_table(dtype)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = kernels_module.rope_qk(q, k, cos, sin, seq_dim=2, round_products=True)
    assert_same(ours, theirs)
    single = [kernels_module.rope(t, cos, sin, 2, round_products=True) for t in (q, k)]
    assert all(map(torch.equal, single, ours))
    if dtype != torch.float32:  # the test can tell the rules apart
        other = kernels_module.rope_qk(q, k, cos, sin, seq_dim=2)
        assert (other[0] != theirs[0]).float().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cohere(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

    q, k = randn(B, H, S, D, dtype=dtype), randn(B, KV, S, D, dtype=dtype)
    cos, sin = (t.to(dtype) for t in twice_table(B, S, D))
    ours = kernels_module.rope_qk(q, k, cos, sin, seq_dim=2, interleaved=True)
    assert_same(ours, apply_rotary_pos_emb(q, k, cos, sin), 2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gptj(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    """Compact tables, partial rotation: the attention concatenates the rest."""
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    q, k = randn(2, B, S, H, D, dtype=dtype)
    cos, sin = (t[..., ::2].to(dtype).contiguous() for t in twice_table(B, S, 24))
    theirs = [
        torch.cat((apply_rotary_pos_emb(t[..., :24], sin, cos), t[..., 24:]), -1) for t in (q, k)
    ]
    ours = kernels_module.rope_qk(
        q, k, cos, sin, interleaved=True, rotary_dim=24, round_products=True
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phi(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    """Half style, partial rotation."""
    from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

    q, k = randn(B, H, S, 80, dtype=dtype), randn(B, KV, S, 80, dtype=dtype)
    cos, sin = half_table(dtype, 32)
    turned = apply_rotary_pos_emb(q[..., :32], k[..., :32], cos, sin)
    theirs = [torch.cat((t, x[..., 32:]), -1) for t, x in zip(turned, (q, k), strict=True)]
    ours = kernels_module.rope_qk(q, k, cos, sin, seq_dim=2, rotary_dim=32, round_products=True)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_head_norms(kernels_module: ModuleType, model: str, dtype: torch.dtype) -> None:
    """The q_norm, k_norm and rotation of an attention layer."""
    if model == "qwen3":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as Norm
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        rule: dict[str, Any] = {"cast": "input"}
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm as Norm
        from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

        rule = {"weight_offset": 1.0}
    norms = [Norm(D, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    q, k = randn(B, S, H, D, dtype=dtype), randn(B, S, KV, D, dtype=dtype)
    cos, sin = half_table(dtype)
    with torch.no_grad():
        normed = [n(t).transpose(1, 2) for n, t in zip(norms, (q, k), strict=True)]
        theirs = apply_rotary_pos_emb(*normed, cos, sin)
        ours = kernels_module.qk_norm_rope(
            q.transpose(1, 2),
            k.transpose(1, 2),
            norms[0].weight,
            norms[1].weight,
            cos,
            sin,
            1e-5,
            **rule,
            seq_dim=2,
            round_products=True,
        )
    assert_same(ours, theirs, 2e-2)


# -------------------------------------------------------------------------------------------------
# Against diffusers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flux(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    from diffusers.models.embeddings import apply_rotary_emb

    projected = randn(B, S, 3 * H * D, dtype=dtype)
    q, k, _ = (t.unflatten(-1, (H, D)) for t in projected.chunk(3, -1))
    cos, sin = twice_table(S, D)
    norms = [torch.nn.RMSNorm(D, 1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        theirs = [
            apply_rotary_emb(n(t), (cos, sin), sequence_dim=1)
            for n, t in zip(norms, (q, k), strict=True)
        ]
        ours = kernels_module.qk_norm_rope(
            q, k, norms[0].weight, norms[1].weight, cos, sin, interleaved=True
        )
    assert_same(ours, theirs, 1e-2)
    cos, sin = (t[0] for t in half_table(torch.float32, batch=1))
    theirs = apply_rotary_emb(q, (cos, sin), use_real_unbind_dim=-2, sequence_dim=1)
    assert_same([kernels_module.rope(q, cos, sin)], [theirs], 2e-3)  # Cosmos, CogView4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_z_image(kernels_module: ModuleType, dtype: torch.dtype) -> None:
    """Complex tables, viewed as cos and sin; its function is nested in the processor."""
    x = randn(B, S, H, D, dtype=dtype)
    table = torch.polar(torch.ones(B, S, D // 2), torch.rand(B, S, D // 2) * 30)
    pairs = torch.view_as_complex(x.float().reshape(B, S, H, D // 2, 2))
    theirs = torch.view_as_real(pairs * table.unsqueeze(2)).flatten(3).type_as(x)
    ours = kernels_module.rope(x, table.real, table.imag, interleaved=True)
    assert_same([ours], [theirs], 2e-3)


class Recorder:
    """Stands for the attention function of a processor, and keeps its q and k."""

    def __init__(self) -> None:
        self.qk: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        self.qk = (q, k)
        return v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_ltx(
    kernels_module: ModuleType, dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.transformers import transformer_ltx as ltx

    record = Recorder()
    monkeypatch.setattr(ltx, "dispatch_attention_fn", record)
    attn = ltx.LTXAttention(H * D, heads=H, kv_heads=H, dim_head=D).to(dtype)
    for norm in (attn.norm_q, attn.norm_k):
        torch.nn.init.normal_(norm.weight)
    x = randn(B, 2 * 3 * 4, H * D, dtype=dtype)
    tables = ltx.LTXVideoRotaryPosEmbed(H * D)(x, 2, 3, 4)
    with torch.no_grad():
        attn(x, image_rotary_emb=tables)
        q, k = attn.to_q(x), attn.to_k(x)
        if packed:
            q, k, _ = torch.cat((q, k, k), -1).chunk(3, -1)
        heads = [t.unflatten(-1, (H, D)) for t in (q, k)]
        cos, sin = (t.unflatten(-1, (H, D)) for t in tables)
        rule = (1e-5, 0.0, "none", True)
        weights = (attn.norm_q.weight, attn.norm_k.weight)
        ours = kernels_module.qk_norm_rope(*heads, *weights, cos, sin, *rule, interleaved=True)
        assert_same(ours, record.qk, 1e-2)
        compact = [t[..., ::2].contiguous() for t in (cos, sin)]
        again = kernels_module.qk_norm_rope(*heads, *weights, *compact, *rule, interleaved=True)
        assert all(map(torch.equal, again, ours))
        flat = kernels_module.qk_norm_rope(
            q, k, *weights, *tables, 1e-5, 0.0, "none", interleaved=True
        )  # one head of H D
        assert_same([t.unflatten(-1, (H, D)) for t in flat], record.qk, 1e-2)
        # In place in the packed buffer.
        kernels_module.ops.qk_norm_rope_out.default(
            *heads, *heads, *weights, *compact, 1e-5, 0.0, 0, 1, 1, 1, 0, 0
        )
        assert all(map(torch.equal, heads, ours))


@pytest.mark.parametrize("table_dtype", [torch.float32, None], ids=["fp32 table", "same dtype"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wan(
    kernels_module: ModuleType,
    dtype: torch.dtype,
    table_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from diffusers.models.transformers import transformer_wan as wan

    record = Recorder()
    monkeypatch.setattr(wan, "dispatch_attention_fn", record)
    attn = wan.WanAttention(H * D, heads=H, dim_head=D, processor=wan.WanAttnProcessor()).to(dtype)
    for norm in (attn.norm_q, attn.norm_k):
        torch.nn.init.normal_(norm.weight)
    latent = torch.empty(B, 4, 2, 6, 8)
    tables = wan.WanRotaryPosEmbed(D, (1, 2, 2), 64)(latent)
    tables = tuple(t.to(table_dtype or dtype) for t in tables)
    x = randn(B, 24, H * D, dtype=dtype)
    with torch.no_grad():
        attn(x, rotary_emb=tables)
        q, k = (m(x).unflatten(-1, (H, D)) for m in (attn.to_q, attn.to_k))
        ours = kernels_module.qk_norm_rope(
            q,
            k,
            attn.norm_q.weight,
            attn.norm_k.weight,
            *tables,
            attn.norm_q.eps,
            norm_across_heads=True,
            interleaved=True,
            round_products=True,
        )
    assert_same(ours, record.qk, 1e-2)


# -------------------------------------------------------------------------------------------------
# Reference, autograd, compilation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("round_products", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_reference(
    kernels_module: ModuleType, interleaved: bool, round_products: bool, dtype: torch.dtype
) -> None:
    """The formulas in `hfpatch.ops`, through the codes that `encode` gives the raw operator."""
    q, k = randn(B, H, S, D, dtype=dtype), randn(B, KV, S, D, dtype=dtype)
    params = {
        "seq_dim": 2,
        "interleaved": interleaved,
        "rotary_dim": 48,
        "round_products": round_products,
    }
    cos, sin = (t[..., :24].contiguous() for t in half_table(dtype, 48))
    qkn = {"eps": 1e-5, "cast": "input", "norm_across_heads": True, **params}
    weights = randn(H * D, dtype=dtype), randn(KV * D, dtype=dtype)
    for name, args, p in (
        ("rope", (q, cos, sin), params),
        ("rope_qk", (q, k, cos, sin), params),
        ("qk_norm_rope", (q, k, *weights, cos, sin), qkn),
    ):
        raw = getattr(kernels_module.ops, name).default(*args, *OPS[name].encode(p))
        for fn in (OPS[name].reference, OPS[name].aten, getattr(kernels_module, name)):
            other = fn(*args, **p)
            pair = ([raw], [other]) if name == "rope" else (raw, other)
            assert_same(*pair, 2e-2)


def gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    y = function(*leaves)
    y = y if isinstance(y, tuple) else (y,)
    torch.manual_seed(1)
    return list(torch.autograd.grad(y, leaves, [torch.randn_like(t.float()).to(t) for t in y]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(
    kernels_module: ModuleType, interleaved: bool, wide: bool, dtype: torch.dtype
) -> None:
    q, k = randn(B, S, H, D, dtype=dtype), randn(B, S, KV, D, dtype=dtype)
    table = twice_table(S, 32) if interleaved else [t[0] for t in half_table(torch.float32, 32)]
    if not wide:
        table = [t[..., ::2] if interleaved else t[..., :16] for t in table]
    cos, sin = (t.contiguous() for t in table)
    rule = {"interleaved": interleaved, "rotary_dim": 32}
    weights = [randn(H * D, dtype=dtype), randn(KV * D, dtype=dtype)]
    norm = {**rule, "norm_across_heads": True, "eps": 1e-5}
    eps = max(torch.finfo(dtype).eps, 2e-6)
    for name, inputs, call in (
        ("rope", [q], lambda f, c, s: lambda x: f(x, c, s, **rule)),
        ("rope_qk", [q, k], lambda f, c, s: lambda x, y: f(x, y, c, s, **rule)),
        (
            "qk_norm_rope",
            [q, k, *weights],
            lambda f, c, s: lambda x, y, v, w: f(x, y, v, w, c, s, **norm),
        ),
    ):
        ours = gradients(call(getattr(kernels_module, name), cos, sin), inputs)
        wide_inputs = [i.double() for i in inputs]
        torch.manual_seed(1)
        formula = call(OPS[name].reference, cos.double(), sin.double())
        leaves = [i.requires_grad_() for i in wide_inputs]
        truth = formula(*leaves)
        truth = truth if isinstance(truth, tuple) else (truth,)
        seeds = [torch.randn(t.shape).to(dtype).double() for t in truth]
        expected = torch.autograd.grad(truth, leaves, seeds)
        for a, e, i in zip(ours, expected, inputs, strict=True):
            assert a.dtype == i.dtype
            # Rounded once by each of two operators, and the values that they multiply once each.
            assert (a.double() - e).abs().max() <= 4 * eps * e.abs().max(), name


def test_table_gradients_are_refused(kernels_module: ModuleType) -> None:
    x, (cos, sin) = torch.randn(B, S, H, D), twice_table(S, D)
    with pytest.raises(RuntimeError, match=r"`sin`: expected a table that needs no gradient"):
        kernels_module.rope(x, cos, sin.requires_grad_())
    with pytest.raises(RuntimeError, match=r"`cos`"):
        kernels_module.qk_norm_rope(x, x, None, None, cos.requires_grad_(), sin)
    with torch.no_grad():
        assert kernels_module.rope(x, cos, sin).shape == x.shape


@pytest.mark.parametrize("grad", [False, True])
def test_compile_without_graph_breaks(grad: bool, kernels_module: ModuleType) -> None:
    def block(q: Tensor, k: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = kernels_module.qk_norm_rope(q, k, w, w, cos, sin, cast="input")
        q, k = kernels_module.rope_qk(q, k, cos, sin)
        return kernels_module.rope(q, cos, sin) + k

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=False)
    q, k = (t.requires_grad_(grad) for t in torch.randn(2, B, S, H, D))
    w = torch.randn(D, requires_grad=grad)
    cos, sin = (t[0] for t in half_table(torch.float32))
    expected, actual = block(q, k, w, cos, sin), compiled(q, k, w, cos, sin)
    torch.testing.assert_close(actual, expected)
    if grad:
        pairs = (torch.autograd.grad(t.sum(), [q, k, w]) for t in (actual, expected))
        torch.testing.assert_close(*pairs)
    assert counter.frame_count == 1


def test_bad_calls(kernels_module: ModuleType) -> None:
    x, (cos, sin) = torch.randn(B, S, H, D), twice_table(S, D)
    with pytest.raises(ValueError, match="`cast`: expected one of"):
        kernels_module.qk_norm_rope(x, x, cast="output")
    with pytest.raises(RuntimeError, match="`cos` must have the shape of `x`"):
        kernels_module.rope(x, cos[:3], sin[:3])
    with pytest.raises(RuntimeError, match="`k` must have the shape of `q`"):
        kernels_module.rope_qk(x, x[:1], cos, sin)
