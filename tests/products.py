"""Products, attention, pairs and losses of the C interface against formulas in fp64, on any device.

`tests/kernels/test_c_api_products.py` calls this on CPUs, `tests/gpu/test_cuda_products.py` and
`benchmarks/clib_products.py` on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
#: Of a result that is rounded once, relative to the largest value; fp32 sums in another order.
BOUNDS = {F32: 4e-6, F16: 1.1e-3, BF16: 8.5e-3}
INF = float("inf")


class Products:
    """The functions on one device, with the buffers that a caller has to bring.

    Args:
        library: `capi.Library`.
        device: "cpu" or "cuda".
    """

    def __init__(self, library: Any, device: str) -> None:
        self.library, self.device = library, device
        self.generator = torch.Generator().manual_seed(0)

    @property
    def stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None

    def random(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def call(self, name: str, *arguments: Any) -> None:
        self.library.call(f"hfp_{name}", *arguments, self.stream)

    def empty(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """Filled with what no result is."""
        return torch.full(shape, 77.0, dtype=dtype, device=self.device)

    def gemm(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0,
        ta: int = 0, tb: int = 0, out: Tensor | None = None, workspace: int | None = None,
    ) -> Tensor:  # fmt: skip
        m, k = (a.shape[-1], a.shape[-2]) if ta else (a.shape[-2], a.shape[-1])
        n = b.shape[-2] if tb else b.shape[-1]
        batch = max(a.shape[0], b.shape[0]) if a.dim() == 3 else 1
        kind = 2 if self.device == "cuda" else 1
        if workspace is None:
            workspace = self.library.size("hfp_gemm_workspace", batch, m, n, k, kind)
        scratch = torch.empty(workspace, device=self.device)
        if out is None:
            out = self.empty(*((batch,) if a.dim() == 3 else ()), m, n, dtype=a.dtype)
        name = "gemm_batched" if a.dim() == 3 else "gemm"
        self.call(name, out, scratch, a, b, c, alpha, beta, ta, tb)
        return out

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
        starts: tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None,
        scale: float | None = None, causal: int = 0, most: int = 0, out: Tensor | None = None,
        window: int = 0, softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if out is None:
            out = self.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse = self.empty(*q.shape[:-1])
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        packed = starts or (None, None)
        self.call(
            "attention", out, lse, q, k, v, mask, *packed, lengths, scale, causal, most, window,
            softcap,
        )  # fmt: skip
        return out, lse


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: int,
    lengths: Tensor | None = None, window: int = 0, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In fp64, with a matrix of scores."""
    heads = q.shape[1] // k.shape[1]
    q = q.double()
    k, v = (t.double().repeat_interleave(heads, 1) for t in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask.double()
    queries, keys = scores.shape[-2:]
    row = torch.arange(queries, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)[None]
    for sample in range(scores.shape[0]):
        length = keys if lengths is None else max(0, min(keys, int(lengths[sample])))
        hidden = column >= length
        if causal:
            hidden = hidden | (column > row + length - queries)
            if window:
                hidden = hidden | (column <= row + length - queries - window)
        scores[sample] = scores[sample].masked_fill(hidden, -INF)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isneginf()[..., None], 0, scores.softmax(-1))
    return weights @ v, lse


def close(found: Tensor, truth: Tensor, dtype: torch.dtype, what: Any, factor: float = 1.0) -> None:
    """Within `BOUNDS` of the largest value; what no result is must not be left anywhere."""
    assert found.shape == truth.shape, what
    if not found.numel():
        return
    error = (found.double() - truth).abs().max().item()
    largest = truth.abs().max().item()
    assert error <= BOUNDS[dtype] * factor * largest + 1e-12, (what, error, largest)


def close_attention(
    found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], dtype: torch.dtype, what: Any
) -> None:
    # On a GPU the weights are rounded too; both are relative to the largest value.
    close(found[0], truth[0], dtype, what, 2.0)
    lse, exact = found[1], truth[1]
    assert torch.equal(lse.isinf(), exact.isinf()), what
    finite = ~exact.isinf()
    if finite.any():
        error = (lse.double() - exact)[finite].abs().max().item()
        assert error <= 4e-6 * (1 + exact[finite].abs().max().item()), (what, error)


GEMM_SIZES = (
    (1, 1, 1), (3, 5, 7), (1, 64, 300), (4, 129, 1025), (5, 33, 17), (29, 70, 513), (57, 600, 300),
    (15, 31, 2000), (6, 9, 0), (64, 128, 256),
)  # fmt: skip


def gemm_cases(
    p: Products, dtype: torch.dtype, most: float = INF
) -> Iterator[tuple[str, Callable[[], None]]]:
    def one(m: int, n: int, k: int, ta: int, tb: int) -> None:
        a = p.random(*((k, m) if ta else (m, k)), dtype=dtype)
        b = p.random(*((n, k) if tb else (k, n)), dtype=dtype)
        c = p.random(m, n, dtype=dtype)
        product = (a.T if ta else a).double() @ (b.T if tb else b).double()
        what = (dtype, m, n, k, ta, tb)
        close(p.gemm(a, b, ta=ta, tb=tb), product, dtype, what)
        close(
            p.gemm(a, b, c, 0.5, -2.0, ta, tb), 0.5 * product - 2 * c.double(), dtype, (what, "c")
        )
        out = c.clone()
        p.gemm(a, b, out, 0.5, -2.0, ta, tb, out=out)
        close(out, 0.5 * product - 2 * c.double(), dtype, (what, "in place"))
        wide = torch.full((a.shape[0], a.shape[1] + 8), float("nan"), dtype=dtype, device=p.device)
        wide[:, : a.shape[1]] = a
        room = torch.full((m, n + 8), 5.0, dtype=dtype, device=p.device)
        p.gemm(wide[:, : a.shape[1]], b, ta=ta, tb=tb, out=room[:, :n])
        close(room[:, :n], product, dtype, (what, "strided"))
        assert (room[:, n:] == 5).all(), (what, "between the rows")
        if p.device == "cuda":
            close(p.gemm(a, b, ta=ta, tb=tb, workspace=0), product, dtype, (what, "no workspace"))

    def batched(batch: int, m: int) -> None:
        a = p.random(batch, m, 40, dtype=dtype)
        for shared in (1, batch):
            b = p.random(shared, 40, 24, dtype=dtype)
            close(
                p.gemm(a, b), a.double() @ b.double(), dtype, ("batched", dtype, batch, m, shared)
            )
            b = p.random(shared, 24, 40, dtype=dtype)
            truth = a.double() @ b.double().mT
            close(p.gemm(a, b, tb=1), truth, dtype, ("batched", dtype, batch, m, shared))

    for size in (size for size in GEMM_SIZES if math.prod(size) <= most):
        for ta in (0, 1):
            for tb in (0, 1):
                args = (*size, ta, tb)
                yield f"gemm {dtype} {args}", lambda args=args: one(*args)  # type: ignore[misc]
    for batch in (1, 2, 37):
        for m in (2, 19):
            pair = (batch, m)
            yield f"gemm_batched {dtype} {pair}", lambda pair=pair: batched(*pair)  # type: ignore[misc]


#: batch, heads of q, of k, queries, keys, columns of q and k, of v
ATTENTION_SIZES = (
    (1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 9, 8, 8), (1, 3, 3, 33, 70, 64, 64),
    (2, 6, 1, 17, 130, 80, 40),
    (1, 2, 1, 40, 300, 256, 256), (1, 8, 2, 1, 257, 128, 128), (2, 2, 2, 7, 0, 16, 16),
    (1, 2, 2, 100, 40, 33, 65), (1, 2, 2, 300, 300, 64, 64), (1, 2, 1, 200, 200, 128, 128),
    (2, 2, 1, 257, 700, 128, 64), (1, 4, 2, 130, 1000, 40, 48),
)  # fmt: skip


def attention_cases(
    p: Products, dtype: torch.dtype, most: float = INF
) -> Iterator[tuple[str, Callable[[], None]]]:
    def one(sizes: tuple[int, ...], causal: int) -> None:
        batch, heads, kv_heads, queries, keys, dim, value_dim = sizes
        q = p.random(batch, heads, queries, dim, dtype=dtype)
        k = p.random(batch, kv_heads, keys, dim, dtype=dtype)
        v = p.random(batch, kv_heads, keys, value_dim, dtype=dtype)
        # as models write it: the least number of the dtype, in some rows for all keys
        least = p.random(batch, 1, queries, keys) > 0.3
        least[..., ::3, :] = True
        least = least.float() * torch.finfo(torch.bfloat16).min
        # causal, with padding on the left: whole blocks hidden, others as they are
        shown = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=p.device)
        shown = shown.tril(keys - queries)
        shown[0, ..., : keys // 3] = False
        wide = dtype if dtype == torch.bfloat16 else F32
        triangles = [
            shown, (~shown).to(wide) * torch.finfo(torch.bfloat16).min,
            torch.zeros_like(shown, dtype=dtype).masked_fill(~shown, -INF),
        ]  # fmt: skip
        masks = (
            *(triangles if keys >= 200 else ()),
            None, p.random(batch, 1, queries, keys), p.random(1, 1, 1, keys, dtype=dtype),
            p.random(batch, heads, queries, keys) > -0.5, p.random(queries, keys) > 1.2,
            least,
        )  # fmt: skip
        for mask in masks:
            for some in (False, True):
                lengths = torch.randint(keys + 2, (batch,), generator=p.generator) if some else None
                lengths = lengths if lengths is None else lengths.to(p.device)
                found = p.attention(q, k, v, mask, lengths=lengths, causal=causal)
                truth = attention_formula(q, k, v, mask, dim**-0.5, causal, lengths)
                kind = None if mask is None else (tuple(mask.shape), mask.dtype)
                # whose sums of exponentials are about that number
                if mask is least or mask is triangles[1]:
                    close(found[0], truth[0], dtype, (dtype, sizes, causal, "least", lengths), 2.0)
                    continue
                close_attention(found, truth, dtype, (dtype, sizes, causal, kind, lengths))
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        out = p.empty(batch, queries, heads, value_dim, dtype=dtype).transpose(1, 2)
        scale = -(dim**-0.5)
        found = p.attention(*turned, out=out, scale=scale)
        close_attention(found, attention_formula(q, k, v, None, scale, 0), dtype, ("views", sizes))

    def narrow(sizes: tuple[int, ...], window: int, softcap: float) -> None:
        batch, heads, kv_heads, queries, keys, dim, value_dim = sizes
        q = p.random(batch, heads, queries, dim, dtype=dtype)
        k = p.random(batch, kv_heads, keys, dim, dtype=dtype)
        v = p.random(batch, kv_heads, keys, value_dim, dtype=dtype)
        lengths = torch.randint(keys + 2, (batch,), generator=p.generator).to(p.device)
        bias = p.random(batch, heads, queries, keys, dtype=dtype)
        for mask, some, scale in ((None, None, 0.3), (None, lengths, -0.3), (bias, None, 0.3)):
            options = {"window": window, "softcap": softcap}
            found = p.attention(q, k, v, mask, lengths=some, scale=scale, causal=1, **options)
            truth = attention_formula(q, k, v, mask, scale, 1, some, **options)
            close_attention(found, truth, dtype, (dtype, sizes, window, softcap, some))
        one = p.attention(q[..., -1:, :], k, v, scale=0.3, causal=1, window=window, softcap=softcap)
        all_of = p.attention(q, k, v, scale=0.3, causal=1, window=window, softcap=softcap)
        if queries > 1 and heads == kv_heads and p.device == "cpu":
            close(one[0], all_of[0][..., -1:, :].double(), dtype, ("alone", sizes))

    def packed(causal: int) -> None:
        q = p.random(1, 4, 20, 16, dtype=dtype)
        k, v = p.random(1, 2, 31, 16, dtype=dtype), p.random(1, 2, 31, 24, dtype=dtype)
        starts = torch.tensor([[0, 3, 3, 20], [0, 10, 12, 31]], device=p.device)
        out, lse = p.attention(q, k, v, starts=(starts[0], starts[1]), causal=causal, most=17)
        for i in range(3):
            a, b, c, d = (int(x) for x in (*starts[0, i : i + 2], *starts[1, i : i + 2]))
            if a < b:
                truth = attention_formula(
                    q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], None, 0.25, causal
                )
                close_attention((out[:, :, a:b], lse[:, :, a:b]), truth, dtype, ("packed", i))

    for sizes in (s for s in ATTENTION_SIZES if s[0] * s[1] * math.prod(s[3:6]) <= most):
        for causal in (0, 1):
            args = (sizes, causal)
            yield f"attention {dtype} {args}", lambda args=args: one(*args)  # type: ignore[misc]
        for window, softcap in ((1, 0.0), (37, 1.5), (0, 0.7), (128, 50.0), (10**6, 0.0)):
            options = (sizes, window, softcap)
            yield (
                f"attention {dtype} {options}",
                lambda options=options: narrow(*options),  # type: ignore[misc]
            )
    for causal in (0, 1):
        yield f"attention packed {dtype} {causal}", lambda causal=causal: packed(causal)  # type: ignore[misc]


def other_cases(p: Products, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    def pairs() -> None:
        for shape, other in (((3, 5), (3, 5)), ((2, 7, 9), (9,)), ((2, 7, 9), (2, 1, 9)),
                             ((2, 7, 9), (2, 9)), ((70000,), (70000,)),
                             ((0, 4), (0, 4))):  # fmt: skip
            a, b = p.random(*shape, dtype=dtype), p.random(*other, dtype=dtype)
            wide = b[:, None] if len(other) == 2 and len(shape) == 3 else b
            out = p.empty(*shape, dtype=dtype)
            p.call("add", out, a, b, -0.5)
            close(out, a.double() - 0.5 * wide.double(), dtype, ("add", shape, other))
            p.call("mul", out, a, b)
            close(out, a.double() * wide.double(), dtype, ("mul", shape, other))
            p.call("scale", out, a, 3.7)
            close(out, a.double() * 3.7, dtype, ("scale", shape))
        wide = p.random(6, 11, dtype=dtype)
        out = p.empty(6, 8, dtype=dtype)
        p.call("mul", out, wide[:, 2:10], wide[:, 3:11])
        close(out, wide[:, 2:10].double() * wide[:, 3:11].double(), dtype, "mul strided")

    def log_probs() -> None:
        for rows, cols in ((1, 1), (5, 7), (3, 1000), (2, 50257)):
            for smoothing, cap in ((0.0, 0.0), (0.1, 5.0)):
                x = p.random(rows, cols, dtype=dtype) * 3
                target = torch.randint(cols, (rows,), generator=p.generator).to(p.device)
                target[0] = -100
                loss, lse = p.empty(rows), p.empty(rows)
                out = p.empty(rows, cols, dtype=dtype)
                args = (x, target, -100, smoothing, cap)
                p.call("cross_entropy_log_probs", loss, lse, out, *args)
                z = cap * torch.tanh(x.double() / cap) if cap else x.double()
                whole = z.logsumexp(-1)
                close(out, z - whole[:, None], dtype, ("log_probs", rows, cols))
                kept = target != -100
                at = z.gather(-1, target.clamp(0)[:, None])[:, 0]
                exact = whole - (1 - smoothing) * at - smoothing * z.mean(-1)
                close(loss, torch.where(kept, exact, 0.0), F32, ("loss", rows, cols), 4.0)
                close(lse, torch.where(kept, whole, 0.0), F32, ("lse", rows, cols), 4.0)

    def balance() -> None:
        for tokens, experts, k in (
            (1, 1, 1),
            (5, 7, 2),
            (1000, 64, 8),
            (300, 130, 130),
            (7, 1000, 4),
        ):
            x = p.random(tokens, experts, dtype=dtype)
            padding = (torch.rand(tokens, generator=p.generator) > 0.3).float().to(p.device)
            for mask in (None, padding):
                weights = torch.ones_like(padding).double() if mask is None else mask.double()
                if not weights.sum():
                    continue
                leaf = x.double().requires_grad_()
                # Of equal logits, which half types have, the first, which topk does not promise.
                chosen = x.double().sort(dim=-1, descending=True, stable=True).indices
                share = torch.zeros(experts, dtype=torch.double, device=p.device)
                for j in range(k):
                    share.index_add_(0, chosen[:, j], weights)
                share = share / weights.sum()
                mean = (weights[:, None] * leaf.softmax(-1)).sum(0) / weights.sum()
                truth = experts * (share * mean).sum()
                (truth * 1.7).backward()
                parts = p.library.size("hfp_balance_parts", tokens)
                loss, stats = p.empty(1), p.empty(2 * experts + 1)
                scratch = p.empty(parts * (2 * experts + 1))
                p.call("load_balancing_loss", loss, stats, scratch, x, mask, k)
                close(loss[0], truth.detach(), F32, ("balance", tokens, experts), 4.0)
                close(stats[:experts], share, F32, ("shares", tokens, experts), 4.0)
                dx = p.empty(tokens, experts, dtype=dtype)
                grad = torch.tensor([1.7], device=p.device)
                p.call("load_balancing_loss_backward", dx, grad, x, stats, mask)
                exact = leaf.grad
                assert exact is not None
                room = 1e-7 if dtype == F16 else 1e-8  # subnormal
                # f - sum(f p) cancels where every expert is chosen.
                terms = 1.7 * experts / weights.sum() * leaf.detach().softmax(-1) * share.max()
                room += BOUNDS[F32] * terms.max().item()
                error = (dx.double() - exact).abs().max().item()
                assert error <= BOUNDS[dtype] * exact.abs().max().item() + room, (tokens, experts)

    yield f"pairs {dtype}", pairs
    yield f"log_probs {dtype}", log_probs
    yield f"balance {dtype}", balance


def cases(p: Products, most: float = INF) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every case of every dtype: its name, and what raises where it fails; those products with at
    most so many multiplications."""
    for dtype in DTYPES:
        yield from other_cases(p, dtype)
        yield from gemm_cases(p, dtype, most)
        yield from attention_cases(p, dtype, most)
