"""`hfpatch.attention.attention` on a GPU: each kernel that it takes against the formula in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hfpatch import attention as module
from hfpatch.attention import attention

pytestmark = pytest.mark.gpu


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(t.float().repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (how.get("scale") or q.shape[-1] ** -0.5)
    if how.get("softcap"):
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    late = k.shape[2] - q.shape[2]
    if how.get("causal"):
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(late)
        if how.get("window"):
            seen = seen.triu(late - how["window"] + 1)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "size",
    [(2, 8, 2, 200, 200, 64), (1, 16, 16, 1500, 1500, 64), (1, 16, 4, 2048, 2048, 128),
     (2, 8, 2, 33, 300, 128), (2, 8, 8, 1, 77, 64), (1, 8, 1, 130, 130, 256)],
    ids=str,
)  # fmt: skip
def test_is_the_formula(size: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, groups, queries, keys, dim = size
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads, dim, device="cuda").to(dtype).transpose(1, 2)
    kv = torch.randn(batch, keys, 2, groups, dim, device="cuda").to(dtype)
    k, v = (t.transpose(1, 2) for t in kv.unbind(2))
    seen = torch.rand(batch, 1, 1, keys, device="cuda") > 0.3
    seen[..., 0] = True
    late = torch.full((1, 1, queries, keys), torch.finfo(dtype).min, device="cuda", dtype=dtype)
    late = late.triu(1 + keys - queries)  # a causal mask, as models write it
    bias = torch.randn(1, heads, queries, keys, device="cuda").to(dtype)
    for how in (
        {}, {"causal": True}, {"causal": True, "window": 19, "scale": 0.1}, {"mask": seen},
        {"mask": bias}, {"causal": True, "mask": seen}, {"causal": True, "softcap": 5.0},
        {"softcap": 5.0, "mask": seen}, {"softcap": 5.0, "mask": bias, "scale": 0.3},
        {"softcap": 5.0, "mask": late}, {"causal": True, "softcap": 5.0, "window": 19},
    ):  # fmt: skip
        truth = exact(q, k, v, **how)
        for _ in range(2):
            out = attention(q, k, v, **how)
            assert out.dtype == dtype and out.shape == q.shape
            error = ((out.float() - truth).norm() / truth.norm()).item()
            # TF32 in the products of the formula, where fp32 may use it
            limit = max(2 * torch.finfo(dtype).eps, 2e-3)
            assert error <= limit, (how, error)


def test_kernels_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    q = torch.randn(1, 2048, 32, 128, device="cuda").bfloat16().transpose(1, 2)
    k = torch.randn(1, 2048, 8, 128, device="cuda").bfloat16().transpose(1, 2)
    for how, expected in (
        ({"causal": True}, "_cudnn"),
        ({"causal": True, "window": 512}, "_flash"),
        ({"causal": True, "window": 2048}, "_cudnn"),
        ({"causal": True, "softcap": 30.0}, "_own"),
    ):
        module._kernels.clear()  # a window that hides nothing is the same call as none
        attention(q, k, k, **how)
        (chosen,) = module._kernels.values()
        if getattr(chosen, "func", None) is module._flash3:
            chosen = chosen.keywords["other"]
        assert getattr(chosen, "func", chosen).__name__ == expected


def test_masks_of_long_heads_on_hopper() -> None:
    """By our own kernel, where no switch of PyTorch's is set and the layout is its kind."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    q = torch.randn(2, 300, 8, 256, device="cuda").half().transpose(1, 2)
    k, v = (torch.randn(2, 410, 4, 256, device="cuda").half().transpose(1, 2) for _ in range(2))
    seen = torch.rand(2, 1, 300, 410, device="cuda") > 0.5
    bias = torch.randn(8, 300, 410, device="cuda").half()[None]

    def chosen(*call: Any, mask: Tensor) -> str:
        module._kernels.clear()
        out = attention(*call, mask=mask)
        if call[0].dtype == torch.half:
            truth = exact(*call, mask=mask)
            assert (out.float() - truth).norm() <= 2e-3 * truth.norm()
        (kernel,) = module._kernels.values()
        return str(getattr(kernel, "func", kernel).__name__)

    for mask in (seen, seen[:1], seen[:, :, :1], bias, bias[:, :1], seen[0, 0]):
        assert chosen(q, k, v, mask=mask) == "_own"
    assert chosen(q[..., :64], k[..., :64], v[..., :64], mask=seen) == "kernel"
    assert chosen(q[:, :, :100], k, v, mask=seen[:, :, :100]) == "kernel"
    odd = torch.randn(2, 8, 300, 260, device="cuda").half()[..., :256]
    assert chosen(odd, k, v, mask=seen) == "_aligning"
    assert chosen(q.float(), k.float(), v.float(), mask=seen) != "_own"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert chosen(q, k, v, mask=seen) != "_own"
    for dim in (64, 80, 100, 128):  # rows that begin at no multiple of 16 bytes
        odd = torch.randn(2, 8, 300, dim + 1, device="cuda").half()[..., :dim]
        call = odd, k[..., :dim], v[..., :dim]
        assert chosen(*call, mask=seen) == "_aligning"
        assert chosen(odd, odd, odd, mask=seen[..., :300]) == "_aligning"
    late = seen.clone()
    late[1, :, 7] = False  # a query that sees nothing
    out = attention(q, k, v, mask=late)
    assert bool(out.isfinite().all()) and not bool(out[1, :, 7].any())


@pytest.mark.parametrize("dim", [96, 128, 256])
@pytest.mark.parametrize("groups", [1, 3])
def test_tiles_from_either_end_are_those_of_a_row_of_them(dim: int, groups: int) -> None:
    """Of few tiles a CTA has one from either end of a causal call; of many, two that follow each
    other. A row's bits are the same, and what the formula gives."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    torch.manual_seed(0)
    for queries, keys in (
        *((n, n) for n in (2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 700)),
        *((70, 300), (300, 1300), (200, 130)),
    ):
        heads = 2 * groups
        shapes = (queries, heads), (keys, 2), (keys, 2)
        q, k, v = (
            torch.randn(1, n, h, dim, device="cuda").bfloat16().transpose(1, 2) for n, h in shapes
        )
        how: dict[str, Any] = {"causal": True, "softcap": 5.0}
        if keys < queries:
            q = q[:, :, -keys:]  # causal calls have no more queries than keys
        alone = attention(q, k, v, **how)
        truth = exact(q, k, v, **how)
        assert (alone.float() - truth).norm() <= 4e-3 * truth.norm()
        many = 2 * 132 // 2 + 1
        together = attention(*(t.expand(many, -1, -1, -1) for t in (q, k, v)), **how)
        assert torch.equal(together[0], alone[0])
        assert torch.equal(together[-1], alone[0])
