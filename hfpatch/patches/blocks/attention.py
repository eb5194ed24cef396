"""Attention on the kernel that is fastest for this GPU, unless the user chose one."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hfpatch.patches.base import Tensor
from hfpatch.patches.blocks import flash3


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: Any = None
) -> Tensor:
    """Scaled dot-product attention of [B, S, H, D] tensors; the result is contiguous.

    Args:
        q, k, v: views as they are; nothing is copied for the kernel's sake.
        mask: what `F.scaled_dot_product_attention` takes as `attn_mask`.
        backend: the processor's `_attention_backend`; with it, or with diffusers' context manager,
            diffusers dispatches the call as it would unpatched.
    """
    dispatch = _dispatch()
    if (
        q.is_cuda
        and backend is None
        and dispatch._AttentionBackendRegistry.get_active_backend()[0]
        == dispatch.AttentionBackendName.NATIVE
    ):
        out = fastest(q, k, v, mask)
    else:
        out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    return out.contiguous()  # some backends, PyTorch's unfused one among them, answer [B, H, S, D]


@functools.cache
def _dispatch() -> Any:
    """diffusers' dispatcher, imported when a block first needs it."""
    from diffusers.models import attention_dispatch

    return attention_dispatch


def fastest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The fastest kernel: on Hopper FlashAttention-3 for much work, where it is installed, else
    cuDNN's, which is 1.6 times as fast as PyTorch's flash attention at head dim 64; on Ampere it is
    the slower one.

    Their operators are called themselves: choosing cuDNN's by the `sdpa_kernel` context takes 20 us
    of host time per call. A user's own such context, or switch, holds, and so does
    HFPATCH_ATTENTION.
    """
    if mask is None and flash3.serves(q, k, v):
        return flash3.attention(q, k, v)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if mask is None and enabled and _pays(q, k) and _cudnn_serves(q, k, v):
        out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, False, 0.0, False, False
        )[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def _pays(q: Tensor, k: Tensor) -> bool:
    """Whether the work is worth cuDNN's launch, which takes the host more than twice the time of
    flash attention's (236 us against 101 in pytorch/pytorch#191576).

    12 GFLOP take either kernel 30 to 50 us: a UNet's 1024 tokens, or a video's attention to its
    text, whose step then waits for the host. In a CUDA graph the launch costs nothing, but a graph
    gives the very bits of a call without one.
    """
    batch, heads, length, dim = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * dim
    return flops >= _SMALL


_SMALL = 12e9


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    key = (q.device.index, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride())
    found = _served.get(key)
    if found is None:
        if len(_served) >= 4096:  # shapes of a long-lived server
            _served.clear()
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
        found = _served[key] = (
            q.dtype != torch.float32
            and q.shape[-1] <= 128
            and torch.cuda.get_device_capability(q.device)[0] >= 9
            and torch.backends.cuda.can_use_cudnn_attention(params)
        )
    return found


_served: dict[Any, bool] = {}
