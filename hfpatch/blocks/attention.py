"""Attention on the kernel that is fastest for this GPU, unless the user chose one."""

from __future__ import annotations

import functools
from typing import Any

from hfpatch import attention as general
from hfpatch.proof.dispatch import is_replaced
from hfpatch.proof.subject import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: Any = None
) -> Tensor:
    """Scaled dot-product attention of [B, S, H, D] tensors; the result is contiguous.

    Args:
        q, k, v: views as they are; nothing is copied for the kernel's sake.
        mask: what `F.scaled_dot_product_attention` takes as `attn_mask`.
        backend: the processor's `_attention_backend`; with it, with diffusers' context manager, or
            where somebody put a function of his own in the place of PyTorch's or of diffusers',
            diffusers dispatches the call as it would unpatched.
    """
    dispatch = _dispatch()
    if q.is_cuda and backend is None and is_native(dispatch):
        out = fastest(q, k, v, mask)
    else:
        out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    return out.contiguous()  # some backends, PyTorch's unfused one among them, answer [B, H, S, D]


def is_native(dispatch: Any) -> bool:
    """Whether diffusers would call PyTorch's own attention, asked at each call."""
    name, function = dispatch._AttentionBackendRegistry.get_active_backend()
    return (
        name == dispatch.AttentionBackendName.NATIVE
        and function is dispatch._native_attention
        and not is_replaced()
    )


@functools.cache
def _dispatch() -> Any:
    """diffusers' dispatcher, imported when a block first needs it."""
    from diffusers.models import attention_dispatch

    return attention_dispatch


def fastest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`hfpatch.attention.attention` of [B, S, H, D] tensors. HFPATCH_ATTENTION holds."""
    return general.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask=mask
    ).transpose(1, 2)
