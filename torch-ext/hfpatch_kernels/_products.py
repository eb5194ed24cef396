"""Matrix products and attention. For programs without cuBLAS and cuDNN at hand; `apply` leaves
theirs where they are."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ._ops import ops

_gemm = ops.gemm.default
_gemm_batched = ops.gemm_batched.default
_attention = ops.attention.default


def _recorded(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _plain_product(a, b, c, alpha, beta, transpose_a, transpose_b):
    left = (a.mT if transpose_a else a).float()
    right = (b.mT if transpose_b else b).float()
    out = alpha * (left @ right)
    return (out if c is None else out + beta * c.float()).to(a.dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Tensor:
    """``alpha * a @ b + beta * c``, sums in fp32, rounded once.

    On the CPU fp32 goes to the system's OpenBLAS, MKL or BLIS where there is one; on CUDA all goes
    to cuBLASLt, without TF32. A gradient goes through the formula in plain PyTorch.

    Args:
        a: ``[M, K]``, or ``[K, M]`` with ``transpose_a``; fp32, fp16 or bf16.
        b: ``[K, N]``, or ``[N, K]`` with ``transpose_b``, as a linear layer's weight; that dtype.
        c: ``[M, N]`` of that dtype, or None.
        alpha: a factor of the product.
        beta: a factor of ``c``.
        transpose_a: whether ``a`` is transposed.
        transpose_b: whether ``b`` is transposed.

    Returns:
        ``[M, N]`` in the dtype of ``a``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; or there is no cuBLASLt.
    """
    if _recorded(a, b, c):
        return _plain_product(a, b, c, alpha, beta, transpose_a, transpose_b)
    return _gemm(a, b, c, alpha, beta, int(transpose_a), int(transpose_b))[0]


def gemm_batched(
    a: Tensor,
    b: Tensor,
    c: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Tensor:
    """`gemm` of each pair of a batch.

    Args:
        a: ``[B, M, K]``, or ``[B, K, M]`` with ``transpose_a``; fp32, fp16 or bf16. Here and below
            a batch of 1 serves all.
        b: ``[B, K, N]``, or ``[B, N, K]`` with ``transpose_b``; of that dtype.
        c: ``[B, M, N]`` of that dtype, or None.
        alpha: a factor of the products.
        beta: a factor of ``c``.
        transpose_a: whether ``a`` is transposed.
        transpose_b: whether ``b`` is transposed.

    Returns:
        ``[B, M, N]`` in the dtype of ``a``.

    Raises:
        RuntimeError: a dtype, device or shape that the kernel refuses; or there is no cuBLASLt.
    """
    if _recorded(a, b, c):
        return _plain_product(a, b, c, alpha, beta, transpose_a, transpose_b)
    return _gemm_batched(a, b, c, alpha, beta, int(transpose_a), int(transpose_b))[0]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    k_lengths: Optional[Tensor] = None,
    q_starts: Optional[Tensor] = None,
    k_starts: Optional[Tensor] = None,
    most_queries: int = 0,
    window: Optional[int] = None,
    softcap: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """``softmax(capped(scale * q @ k.mT) + mask) @ v`` for each head, without a matrix of scores.

    Blocks of keys at a time (Dao et al., arXiv:2205.14135), fp32 inside; on CUDA the weights of
    half types are rounded to the dtype before they are multiplied with ``v``. There is no gradient.

    Args:
        q: ``[B, H, S, D]``; fp32, fp16 or bf16; ``D`` from 1 to 256. Views of ``[B, S, H, D]`` are
            taken as they are.
        k: ``[B, G, L, D]``, of that dtype; ``G`` divides ``H``, and each head of ``k`` serves
            ``H / G`` heads of ``q`` that follow each other.
        v: ``[B, G, L, E]``, of that dtype; ``E`` from 1 to 256.
        mask: broadcast to ``[B, H, S, L]``, or ``[S, L]``; added, or of bool: where False, a key is
            not seen.
        scale: of the scores; None: ``D ** -0.5``.
        causal: whether query ``i`` sees the keys up to ``i + L - S`` only.
        k_lengths: int64 ``[B]``: how many keys each sample has.
        q_starts: int64 ``[N + 1]``: with ``k_starts``, ``N`` samples lie one after the other in
            ``q`` ``[1, H, S, D]`` and ``k``, ``v`` ``[1, G, L, ...]``; where each begins.
        k_starts: int64 ``[N + 1]``.
        most_queries: with ``q_starts``, the most queries of a sample; 0: as many as there are.
        window: with ``causal``, how many keys a query sees at most: the last ones, its own
            included.
        softcap: 0, or the ``c`` of ``capped(s) = c * tanh(s / c)``.

    Returns:
        ``[B, H, S, E]`` in the dtype of ``q``, and the logarithm of the sum of ``exp`` of each
        query's scores, fp32 ``[B, H, S]``. A query that sees no key has 0 and ``-inf``.

    Raises:
        NotImplementedError: a tensor requires a gradient.
        RuntimeError: a dtype, device, shape or value that the kernel refuses; says which.
    """
    if _recorded(q, k, v, mask):
        raise NotImplementedError(
            "`attention`: expected tensors that require no gradient, got one that does; use "
            "torch.nn.functional.scaled_dot_product_attention, or call it under torch.no_grad()"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _attention(
        q, k, v, mask, q_starts, k_starts, k_lengths, scale, int(causal), most_queries,
        window or 0, softcap,
    )  # fmt: skip
    if q_starts is not None:
        _clear_unused(out, lse, q_starts)
    return out, lse


def _clear_unused(out, lse, starts):
    """0 and -inf where no sample has a query, which the kernel leaves as it was."""
    place = torch.arange(out.shape[2], device=out.device)
    unused = (place < starts[0]) | (place >= starts[-1])
    out.masked_fill_(unused[:, None], 0)
    lse.masked_fill_(unused, float("-inf"))
