"""Attention on the fastest kernel that is right for it, chosen once per kind of call.

The kernels, for [batch, heads, length, head dim] tensors as `F.scaled_dot_product_attention` takes
them:

- FlashAttention-3 on Hopper, where it is installed, for much work without a mask;
- cuDNN's on Hopper and later, for work that is worth its launch. Its operator is called itself:
  choosing it by the `sdpa_kernel` context takes 20 us of host time per call;
- PyTorch's flash attention with a window, which skips what the window hides; with a mask the same
  takes 2.4 times as long as without one;
- our own for capped scores in half types, of which PyTorch has no fused one, and on Hopper for
  heads of more than 128 columns with a mask, which cuDNN's does not take: 69 us where PyTorch's
  takes 133 (a window of 512 of 2048 positions, 4 heads of 256, H100);
- what PyTorch chooses. Grouped heads are given to it as they are, but where it would fall back to
  its unfused formula for them.

A user's own `sdpa_kernel` context, or switch, holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from hfpatch.blocks import flash3
from hfpatch.blocks.memo import keep_for_capture, stream_of
from hfpatch.errors import KernelLoadError
from hfpatch.kernels.config import ATTENTION, attention_choice
from hfpatch.proof.subject import Tensor

#: Not what somebody may have put in its place when a kernel is chosen, which is kept.
_PYTORCHS: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
_Kernel = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], Tensor]
_aten = torch.ops.aten
#: Less work than this many FLOP is not worth cuDNN's launch, which takes the host more than twice
#: the time of flash attention's (236 us against 101 in pytorch/pytorch#191576). 12 GFLOP take
#: either kernel 30 to 50 us: a UNet's 1024 tokens, or a video's attention to its text, whose step
#: then waits for the host. In a CUDA graph the launch costs nothing, but a graph gives the very
#: bits of a call without one.
SMALL = 12e9
#: Kinds of calls that are remembered: shapes of a long-lived server.
_MOST = 4096
_FUSED = (torch.bfloat16, torch.float16)
#: What `torch.backends.cuda` asks: its own functions take three times as long.
_flash_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled
_efficient_enabled: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled
_grad_enabled = torch.is_grad_enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, by the fastest kernel that is right for it.

    Args:
        q: [B, H, Sq, D]; views as they are: nothing is copied where a kernel takes it.
        k, v: [B, G, Sk, D] and [B, G, Sk, Dv]: query head h attends to the keys of head h·G//H. G
            divides H.
        mask: what `F.scaled_dot_product_attention` takes as `attn_mask`, broadcast to [B, H, Sq,
            Sk]: bool, True where a key is attended to, or a bias in q's dtype. A mask that masks
            nothing costs its kernel: leave it out (`masks.masks_nothing`).
        causal: the queries are the last Sq of the Sk positions, and attend to no later one.
        scale: of the scores; None: D**-0.5.
        window: a query attends to its own position and the `window` - 1 before it; with `causal`
            alone. One that is not shorter than the text is left out.
        softcap: scores become softcap · tanh(scores / softcap), before mask and bias.

    Returns:
        [B, H, Sq, Dv] in q's dtype.

    Raises:
        ValueError: `window` without `causal`, or less than 1.
    """
    shape, keys = q.shape, k.shape
    if window is not None:
        if not causal or window < 1:
            raise ValueError(f"`window` must be at least 1, with `causal=True`; got {window}")
        if window >= keys[2]:
            window = None
    if causal and shape[2] == 1 and window is None:
        causal = False  # the last position attends to all
    if is_compiling():
        return _choose(q, k, v, mask, causal, window, softcap, False)(q, k, v, mask, scale)
    grad = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    key = (
        shape, keys, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        causal, window, softcap, grad, _flash_enabled(), _efficient_enabled(), _cudnn_enabled(),
        os.environ.get(ATTENTION),
    )  # fmt: skip
    kernel = _kernels.get(key)
    if kernel is None:
        if len(_kernels) >= _MOST:
            _kernels.clear()
        kernel = _kernels[key] = _choose(q, k, v, mask, causal, window, softcap, grad)
    return kernel(q, k, v, mask, scale)


_kernels: dict[Any, _Kernel] = {}


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    grad: bool,
) -> _Kernel:
    """The kernel for calls of this kind."""
    free = not grad and not is_compiling()
    eager = free and q.is_cuda
    if softcap is not None:
        own = _own_kernel(q, k, v, mask) if eager else None
        kernel: _Kernel = partial(_formula, causal=causal, window=window, softcap=softcap)
        if own is not None:
            kernel = partial(_own, own, causal=causal, window=window, softcap=softcap)
    elif mask is None and (window is not None or (causal and q.shape[2] != k.shape[2])):
        # PyTorch's own `is_causal` means the first positions, and knows no window
        flash = eager and _flash_serves(q, k, v)
        kernel = partial(_flash if flash else _masked, causal=causal, window=window)
    elif mask is not None and causal:
        kernel = partial(_masked, causal=causal, window=window)
    elif eager and mask is not None and (own := _own_masked(q, k, v, mask)) is not None:
        kernel = partial(_own, own, causal=False, window=None, softcap=0.0)
    elif eager and mask is None and worth_cudnn(q, k, causal) and _cudnn_serves(q, k, v, causal):
        kernel = partial(_cudnn, causal=causal)
    else:
        kernel = _torch(q, k, v, mask, causal)
    if free and mask is None and flash3.pays(q.shape, k.shape, causal, window):
        return partial(_flash3, causal=causal, window=window, softcap=softcap, other=kernel)
    return kernel


def _own_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    """The raw operator of our `attention` into given memory, if there is one for these."""
    if (
        attention_choice() is not None
        or not q.dtype == k.dtype == v.dtype
        or q.dtype not in _FUSED
        or any(t.dim() != 4 or t.stride(-1) != 1 for t in (q, k, v))
        or not 0 < max(q.shape[-1], v.shape[-1]) <= 256
        or (mask is not None and mask.dim() not in (2, 4))
        or torch.cuda.get_device_capability(q.device)[0] < 8  # no tensor cores for it before
    ):
        return None
    from hfpatch.kernels.sources import local_package  # it loads kernels

    try:
        package = local_package()
    except (KernelLoadError, ValueError):  # the report has said so
        return None
    kernel = package.kernel("attention")
    return kernel.raw_into if kernel.refuses("cuda") is None else None


def _own_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    """Our operator where it is faster than what PyTorch has for a mask: wgmma, for long heads."""
    if (
        not (_flash_enabled() and _efficient_enabled() and _cudnn_enabled())  # a user's choice
        or max(q.shape[-1], v.shape[-1]) <= 128
        or q.shape[2] < 128
        or mask.dtype not in (torch.bool, q.dtype)
        or torch.cuda.get_device_capability(q.device)[0] != 9
        or any(s % 8 for t in (q, k, v) for s in (t.shape[-1], *t.stride()[:-1]))
    ):
        return None
    return _own_kernel(q, k, v, mask)


def worth_cudnn(q: Tensor, k: Tensor, causal: bool = False) -> bool:
    """Whether the work is worth cuDNN's launch."""
    batch, heads, length, dim = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * dim
    return flops >= (2 * SMALL if causal else SMALL)


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    cuda: Any = torch.backends.cuda
    grouped = q.shape[1] != k.shape[1]
    return bool(
        cuda.cudnn_sdp_enabled()
        and q.dtype in _FUSED
        and max(q.shape[-1], v.shape[-1]) <= 128
        and torch.cuda.get_device_capability(q.device)[0] >= 9
        and cuda.can_use_cudnn_attention(cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped))
    )


def _flash_serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What PyTorch's flash attention is for, whose own test knows no window."""
    cuda: Any = torch.backends.cuda
    dim = q.shape[-1]
    return bool(
        cuda.flash_sdp_enabled()
        and torch.version.hip is None
        and q.dtype in _FUSED
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and dim == k.shape[-1] <= 256
        and dim % 8 == 0
        and q.shape[0] == k.shape[0]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[2] <= k.shape[2]
        and min(q.numel(), k.numel()) > 0
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and torch.cuda.get_device_capability(q.device)[0] >= 8
    )


# -------------------------------------------------------------------------------------------------
# The kernels


def _lies_apart(t: Tensor | None) -> bool:
    """Whether a row's elements are no neighbours, as a bias by buckets of distance has its heads
    innermost. No fused kernel reads that; PyTorch would fall back to its formula, in fp32."""
    return t is not None and t.shape[-1] > 1 and t.stride(-1) != 1 and t.numel() > 0


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, *, causal: bool
) -> Tensor:
    """Of copies whose rows lie together."""
    q, k, v = (t.contiguous() if _lies_apart(t) else t for t in (q, k, v))
    if mask is not None and _lies_apart(mask):
        for dim in range(mask.dim() - 1):  # what is the same for all is copied once
            if mask.stride(dim) == 0:
                mask = mask.narrow(dim, 0, 1)
        mask = mask.contiguous()
    return _torch(q, k, v, mask, causal)(q, k, v, mask, scale)


def _torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> _Kernel:
    """PyTorch's choice for calls such as this."""
    if any(map(_lies_apart, (q, k, v, mask))):
        return partial(_gathered, causal=causal)
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and q.is_cuda and not _aligned(q, k, v):
        return _aligning
    if grouped and mask is not None and q.is_cuda and _unfused(q, k, v, mask):
        return _expanding

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        return _PYTORCHS(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)

    return kernel


def _aligned(*tensors: Tensor) -> bool:
    """Whether rows begin at 16 bytes. PyTorch's kernel for masks (2.11) does not look at that: it
    reads other rows, or ends in "misaligned address"."""
    return all(
        t.stride(-1) == 1 and not any(s * t.element_size() % 16 for s in t.stride()[:-1])
        for t in tensors
    )


def _aligning(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Rows that are copied to where a kernel may read them."""
    q, k, v = (t if _aligned(t) else t.contiguous() for t in (q, k, v))
    if not _aligned(q, k, v):  # rows of an odd size: PyTorch fills them up itself
        return _PYTORCHS(
            q, k, v, mask, 0.0, False, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _torch(q, k, v, mask)(q, k, v, mask, scale)


def _expanding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return _PYTORCHS(q, k, v, mask, 0.0, False, scale=scale)


def _unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Whether PyTorch has no kernel but its formula for grouped heads with a mask."""
    chosen = torch._fused_sdp_choice(q, k, v, mask, 0.0, False, enable_gqa=True)
    return bool(chosen == torch.nn.attention.SDPBackend.MATH.value)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, *, causal: bool
) -> Tensor:
    out: Tensor = _aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, False, 0.0, causal, False, scale=scale
    )[0]
    return out


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    out: Tensor = _aten._flash_attention_forward.default(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, queries, keys,
        0.0, causal and window is None, False, scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


def _flash3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    other: _Kernel,
) -> Tensor:
    form = flash3.Form(causal, window is not None, q.shape[1] != k.shape[1], softcap is not None)
    tensors = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not flash3.serves(*tensors, form=form):
        return other(q, k, v, mask, scale)
    return flash3.attention(
        *tensors, scale=scale, causal=causal, window=window, softcap=softcap
    ).transpose(1, 2)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """By a mask in place of what no kernel here knows."""
    seen = _seen(q, k, window)
    if mask is None:
        mask = seen
    elif mask.dtype == torch.bool:
        mask = mask & seen
    else:
        mask = mask.masked_fill(~seen, float("-inf"))
    return _torch(q, k, v, mask)(q, k, v, mask, scale)


def _own(
    operator: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Tensor:
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, queries, _ = q.shape
    # the heads of a position side by side, as the product behind it reads them
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    operator(
        out, lse, q, k, v, mask, None, None, None, scale, int(causal), 0, window or 0, softcap
    )  # fmt: skip
    return out


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Tensor:
    """In plain operators, with the roundings of transformers' own (`eager_attention_forward`)."""
    batch, heads, queries, dim = q.shape
    groups, keys = k.shape[1:3]
    # the heads of a group are rows of one product, so that keys are read as they are
    rows = q.reshape(batch, groups, heads // groups * queries, dim)
    scores = rows @ k.transpose(2, 3) * (dim**-0.5 if scale is None else scale)
    scores = (torch.tanh(scores / softcap) * softcap).view(batch, heads, queries, keys)
    if causal:
        scores = scores.masked_fill(~_seen(q, k, window), float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    out = weights.view(batch, groups, -1, keys) @ v
    return out.view(batch, heads, queries, v.shape[-1])


def _seen(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """[Sq, Sk], True where a key is not later than a query, nor out of its window.

    The last one is kept: all layers of a model ask for the same.
    """
    global _last
    stream = stream_of(q)
    key = (q.shape[2], k.shape[2], window, q.device, stream)
    held = _last
    if stream is not None and held is not None and held[0] == key:
        keep_for_capture(held[1])
        return held[1]
    query = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    position = torch.arange(k.shape[2], device=q.device)
    seen = position <= query
    if window is not None:
        seen = seen & (position > query - window)
    if stream is not None and not is_compiling() and seen.numel() <= _KEPT:
        _last = (key, seen)
    return seen


_last: tuple[Any, Tensor] | None = None
#: Bytes of a mask that may be kept.
_KEPT = 1 << 26
