"""`hfpatch.attention.attention` against the formula in fp64: masks, windows, groups, caps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfpatch import attention as module
from hfpatch.attention import attention


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition, row by row."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    late = k.shape[2] - q.shape[2]
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        scores = k[b, h // groups] @ q[b, h, i] * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            row = mask.expand(q.shape[0], q.shape[1], q.shape[2], -1)[b, h, i]
            scores = (
                scores.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else scores + row
            )
        for j in range(k.shape[2]):
            hidden = causal and (j > i + late or (window is not None and j <= i + late - window))
            if hidden:
                scores[j] = -torch.inf
        out[b, h, i] = torch.softmax(scores, 0) @ v[b, h // groups]
    return out


def draw(
    heads: int,
    groups: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    dim: int = 16,
    out: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(heads + groups + queries + keys)
    q = torch.randn(2, queries, heads, dim, generator=g, dtype=torch.float64)
    k = torch.randn(2, keys, groups, dim, generator=g, dtype=torch.float64)
    v = torch.randn(2, keys, groups, out, generator=g, dtype=torch.float64)
    # as models give them: transposed views
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    return q, k, v


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> None:
    truth = exact(q, k, v, **how)
    assert out.shape == truth.shape and out.dtype == q.dtype
    error = ((out.double() - truth).norm() / truth.norm()).item()
    assert error <= 2 * torch.finfo(q.dtype).eps, (error, how)


SIZES = [(4, 4, 9, 9), (4, 2, 9, 9), (6, 1, 3, 11), (4, 2, 1, 7), (2, 2, 5, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_the_formula(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    q, k, v = draw(*size, dtype)
    g = torch.Generator().manual_seed(1)
    seen = torch.rand(2, 1, size[2], size[3], generator=g) > 0.4
    seen[..., -1] = seen[..., 0] = True
    bias = torch.randn(1, size[0], size[2], size[3], generator=g).to(dtype)
    causal_with_mask = seen.clone()
    for row in range(size[2]):  # a row that sees nothing has no value
        causal_with_mask[:, :, row, size[3] - size[2] + row] = True
    for how in (
        {},
        {"scale": 0.3},
        {"causal": True},
        {"causal": True, "window": 3, "scale": 0.2},
        {"causal": True, "window": size[3]},
        {"causal": True, "window": 100},
        {"mask": seen},
        {"mask": bias},
        {"mask": causal_with_mask, "causal": True},
        {"mask": bias, "causal": True, "window": 2},
        {"softcap": 2.0},
        {"softcap": 2.0, "causal": True},
        {
            "softcap": 2.0,
            "causal": True,
            "window": 3,
            "mask": causal_with_mask & (bias[:1, :1] < 9),
        },
        {"softcap": 1.5, "mask": bias, "scale": 0.5},
    ):
        if how.get("softcap") and how.get("window"):
            how["mask"] = None
        for _ in range(2):  # chosen, and remembered
            check(attention(q, k, v, **how), q, k, v, **how)


def test_layers_of_a_model_share_a_mask() -> None:
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    seen = module._seen(q, k, None)
    assert module._seen(q.clone(), k.clone(), None) is seen
    windowed = module._seen(q, k, 2)
    assert windowed is not seen and windowed.sum() == 6


def test_values_of_another_size() -> None:
    q, k, v = draw(4, 2, 6, 6, torch.float32, dim=16, out=24)
    check(attention(q, k, v, causal=True), q, k, v, causal=True)
    check(attention(q, k, v, softcap=1.0), q, k, v, softcap=1.0)


def test_gradients_pass() -> None:
    for how in ({}, {"causal": True, "window": 2}, {"softcap": 1.0}):
        tensors = [t.requires_grad_() for t in draw(4, 2, 5, 5, torch.float64)]
        out = attention(*tensors, **how)
        ours = torch.autograd.grad(out.square().sum(), tensors)
        expected = torch.autograd.grad(exact(*tensors, **how).square().sum(), tensors)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_bad_windows() -> None:
    q, k, v = draw(2, 2, 4, 4, torch.float32)
    for how in ({"window": 2}, {"window": 0, "causal": True}):
        with pytest.raises(ValueError, match="`window` must be at least 1, with `causal=True`"):
            attention(q, k, v, **how)


def test_a_window_as_long_as_the_text_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        given.append((args[3] is None, args[5], kwargs["enable_gqa"]))
        return own(*args, **kwargs)

    monkeypatch.setattr(module, "_PYTORCHS", spy)
    monkeypatch.setattr(module, "_kernels", {})  # a kind that was chosen before keeps PyTorch's
    q, k, v = draw(4, 2, 8, 8, torch.float32)
    attention(q, k, v, causal=True, window=8)
    attention(q, k, v, causal=True, window=7)
    attention(q[:, :, :1], k, v, causal=True)
    attention(q[:, :, :1], k, v, causal=True, window=3)
    assert given == [
        (True, True, True),
        (False, False, True),
        (True, False, True),
        (False, False, True),
    ]


class Kernels:
    """Which kernel a call would take on a Hopper GPU, without one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)
    ) -> None:
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda t: True))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)

    def __call__(self, *size: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> str:
        heads, groups, queries, keys = size
        q = torch.empty(1, heads, queries, 128, dtype=dtype, device="meta")
        k = torch.empty(1, groups, keys, 128, dtype=dtype, device="meta")
        how = {"causal": False, "window": None, "softcap": None, "mask": None} | how
        chosen: Any = module._choose(
            q,
            k,
            k,
            how["mask"],
            how["causal"],
            how["window"],
            how["softcap"],
            how.get("grad", False),
        )
        if getattr(chosen, "func", None) is module._flash3:
            chosen = chosen.keywords["other"]
        chosen = getattr(chosen, "func", chosen)
        return str(chosen.__qualname__.partition(".")[0])


def test_masks_of_long_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernel does not take them; ours does, on Hopper, unless a user's switch is set."""
    monkeypatch.setattr(module, "_own_kernel", lambda *tensors: "operator")

    def chosen(
        capability: tuple[int, int] = (9, 0), dim: int = 256, queries: int = 2048, **how: Any
    ) -> bool:
        Kernels(monkeypatch, capability)
        dtype = torch.bfloat16
        q = torch.empty(1, queries, 8, how.get("width", dim), dtype=dtype, device="meta")
        q = q[..., :dim].transpose(1, 2)
        k = torch.empty(1, 4, 2048, dim, dtype=dtype, device="meta")
        mask = torch.empty(1, 1, queries, 2048, dtype=how.get("mask", torch.bool), device="meta")
        grad = how.get("grad", False)
        kernel: Any = module._choose(q, k, k, mask, False, None, None, grad)
        return getattr(kernel, "func", None) is module._own

    assert chosen() and chosen(mask=torch.bfloat16) and chosen(dim=136)
    assert not chosen(capability=(8, 0)) and not chosen(capability=(10, 0))
    assert not chosen(dim=128) and not chosen(queries=1) and not chosen(mask=torch.float32)
    assert not chosen(width=257) and not chosen(grad=True)
    for switch in ("_flash_enabled", "_efficient_enabled", "_cudnn_enabled"):
        with monkeypatch.context() as context:
            context.setattr(module, switch, lambda: False)
            assert not chosen()


def test_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernels(monkeypatch)
    assert kernel(32, 8, 2048, 2048, causal=True) == "_cudnn"
    assert kernel(32, 32, 2048, 2048) == "_cudnn"
    assert kernel(32, 8, 256, 256, causal=True) == "_torch"  # too little for cuDNN's launch
    assert kernel(32, 8, 2048, 2048, causal=True, window=512) == "_flash"
    assert kernel(32, 8, 64, 2048, causal=True) == "_flash"  # the last positions, not the first
    mask = torch.ones(1, dtype=torch.bool)
    for unfused, expected in ((False, "_torch"), (True, "_expanding")):
        monkeypatch.setattr(module, "_unfused", lambda *tensors, unfused=unfused: unfused)
        assert kernel(32, 8, 2048, 2048, mask=mask) == expected
        assert kernel(32, 32, 2048, 2048, mask=mask) == "_torch"
    assert kernel(32, 8, 2048, 2048, causal=True, softcap=50.0) == "_formula"
    assert kernel(32, 8, 2048, 2048, dtype=torch.float32, causal=True) == "_torch"
    assert kernel(32, 8, 2048, 2048, dtype=torch.float32, causal=True, window=64) == "_masked"
    assert kernel(32, 8, 2048, 2048, causal=True, grad=True) == "_torch"
    assert kernel(32, 8, 2048, 2048, causal=True, window=64, grad=True) == "_masked"
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel(32, 8, 2048, 2048, causal=True) == "_torch"
        assert kernel(32, 8, 2048, 2048, causal=True, window=512) == "_masked"
    ampere = Kernels(monkeypatch, (8, 0))
    assert ampere(32, 8, 2048, 2048, causal=True) == "_torch"
    assert ampere(32, 8, 2048, 2048, causal=True, window=512) == "_flash"


def test_a_users_switch_holds_for_kinds_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernels", {})
    q, k, v = draw(2, 2, 4, 4, torch.float32)
    attention(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        attention(q, k, v)
    attention(q, k, v)
    assert len(module._kernels) == 2


def test_rows_that_lie_apart_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias by distances has its heads innermost. PyTorch has its formula alone for that, which
    takes GPUs several times as long."""
    given: list[tuple[Tensor | None, ...]] = []
    pytorchs = module._PYTORCHS

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        given.append(args[:4])
        return pytorchs(*args, **kwargs)

    monkeypatch.setattr(module, "_PYTORCHS", seen)
    monkeypatch.setattr(module, "_kernels", {})
    q, k, v = draw(4, 4, 6, 9, torch.float32)
    g = torch.Generator().manual_seed(2)
    bias = torch.randn(6, 9, 4, generator=g).permute(2, 0, 1)[None]
    apart = k.transpose(2, 3).contiguous().transpose(2, 3)
    for mask in (bias, bias.expand(2, -1, -1, -1), bias[:, :1, :, :1].expand(2, 4, 6, 9), None):
        for _ in range(2):
            check(attention(q, apart, v, mask=mask), q, k, v, mask=mask)
    check(attention(q, apart, v, mask=bias, causal=True), q, k, v, mask=bias, causal=True)
    check(attention(q, apart, v, mask=bias, softcap=2.0), q, k, v, mask=bias, softcap=2.0)
    assert len(given) == 9
    assert all(t.stride(-1) == 1 for held in given for t in held if t is not None)
    assert {tuple(held[3].shape) for held in given[:6]} == {(1, 4, 6, 9), (1, 1, 6, 9)}
    nothing = torch.empty(2, 4, 16, 0).transpose(2, 3)
    assert attention(nothing, nothing, nothing).shape == (2, 4, 0, 16)


def test_the_variable_counts_for_calls_of_a_kind_that_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, choose = [], module._choose

    def counted(*args: Any) -> Any:
        chosen.append(1)
        return choose(*args)

    monkeypatch.setattr(module, "_choose", counted)
    monkeypatch.setattr(module, "_kernels", {})
    q = torch.randn(1, 2, 5, 16)
    results = [module.attention(q, q, q) for _ in range(2)]
    assert len(chosen) == 1
    monkeypatch.setenv("HFPATCH_ATTENTION", "torch")
    results.append(module.attention(q, q, q))
    assert len(chosen) == 2 and all(torch.equal(results[0], r) for r in results)
