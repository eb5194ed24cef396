"""Attention of captured blocks, by the kernel that is fastest for this GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

#: Below this many floating-point operations cuDNN's launch costs more than its kernel gains.
_SMALL = 12e9
_served: dict[Any, bool] = {}


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any, grouped: bool
) -> Tensor:
    """`F.scaled_dot_product_attention`; cuDNN's kernel where it serves the call and is faster.

    Args:
        q: [B, H, S, D].
        k, v: [B, H, T, D], or with fewer heads where `grouped`.
        mask, causal, scale: as PyTorch takes them.
    """
    if q.is_cuda and _by_cudnn(q, k, v, mask, causal, grouped):
        return torch.ops.aten._scaled_dot_product_cudnn_attention.default(  # type: ignore[no-any-return]
            q, k, v, mask, False, 0.0, causal, False, scale=scale
        )[0]
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )


def _by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool
) -> bool:
    if mask is not None:
        return False  # PyTorch's choice: cuDNN is given masks as numbers, made at each call
    key = (
        q.device.index, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        causal, grouped,
        torch.backends.cuda.cudnn_sdp_enabled(),
    )  # fmt: skip
    found = _served.get(key)
    if found is None:
        if len(_served) >= 4096:  # shapes of a long-lived server
            _served.clear()
        found = _served[key] = _serves(q, k, v, causal, grouped)
    return found


def _serves(q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> bool:
    batch, heads, length, dim = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * dim / (2 if causal else 1)
    if (
        q.dtype == torch.float32
        or dim > 128
        or flops < _SMALL
        or not torch.backends.cuda.cudnn_sdp_enabled()
        or torch.cuda.get_device_capability(q.device)[0] < 9
    ):
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))
