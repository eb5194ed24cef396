"""LTX-Video's VAE: its residual blocks, causal convolutions and upsamplers in channels-last memory.

    h = conv1(silu(norm1(x) * (1 + scale1) + shift1))
    h = conv2(silu(norm2(h) * (1 + scale2) + shift2));  x = shortcut(x) + h

The classes move the channels to the back for each norm, and repeat and concatenate frames before
each convolution, which puts the video into another layout each time. Here it stays in the layout
that the convolutions work in: a norm reads rows as they lie, with the bias of the convolution
before it, and its SiLU is written straight into a buffer with room for the repeated frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.blocks.base import BlockSubject, HandedBack
from hfpatch.blocks.projections import is_plain_convolution, without_bias
from hfpatch.proof.subject import Forward, Tensor


class LtxResnetSubject(BlockSubject):
    argument = "inputs"
    ops = ("rms_norm_silu", "add_bias")
    title = "fused block: bias, norm and SiLU into padded frames, channels last"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.modulated = module._parameters.get("scale_shift_table") is not None

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        return [
            *(block.norm1, block.norm2, block.nonlinearity),
            *(block.conv1, block.conv2, block.dropout),
        ]

    @staticmethod
    def odd(block: Any) -> str | None:
        if block.per_channel_scale1 is not None or block.per_channel_scale2 is not None:
            return "it injects noise"
        if type(block.nonlinearity) is not nn.SiLU:
            return f"its activation is `{type(block.nonlinearity).__name__}`"
        if block.dropout.p:
            return "it has a dropout"
        for norm in (block.norm1, block.norm2):
            if type(norm).__name__ != "RMSNorm" or norm.weight is not None or norm.bias is not None:
                return "its norms are no `RMSNorm`s without weights"
        if block.norm1.eps != block.norm2.eps:
            return "its norms differ in eps"
        for conv in (block.conv1, block.conv2):
            if type(conv).__name__ != "LTXVideoCausalConv3d" or conv.conv.stride != (1, 1, 1):
                return "its convolutions are no `LTXVideoCausalConv3d`s of stride 1"
        return None

    @classmethod
    def projection(cls, block: Any) -> Any:
        return block.conv1.conv

    def build(self, m: Any) -> Any:
        shortcut = m.conv_shortcut is not None
        return type(m)(
            in_channels=16,
            out_channels=24 if shortcut else 16,
            eps=m.norm3.eps if shortcut else 1e-6,
            is_causal=m.conv1.is_causal,
            timestep_conditioning=m.scale_shift_table is not None,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        m: Any = block
        channels = m.conv1.in_channels
        video = torch.randn(2, channels, 3, 4, 5, generator=generator)
        time = None
        if m.scale_shift_table is not None:
            time = torch.randn(2, 4 * channels, 1, 1, 1, generator=generator)
        return {"inputs": video, "temb": time}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        modulated = self.modulated
        norm_silu = bind("rms_norm_silu", into=1, eps=self.module.norm1.eps)  # type: ignore[union-attr]
        add = bind("add_bias", into=1)

        def activated(conv: Any, video: Tensor, bias: Any, scale: Any, shift: Any) -> Tensor:
            """SiLU of the norm of `video + bias`, with the frames that `conv` adds."""
            rows = _rows(video)
            padded, inner = _with_room(conv, rows)
            for i in range(rows.shape[0]):  # the frames of one sample lie together
                modulation = (None, None) if scale is None else (scale[i], shift[i])
                norm_silu(inner[i], rows[i], bias, None, *modulation)
            return _repeat_frames(conv, padded)

        def fused(block: Any, inputs: Tensor, temb: Any = None, generator: Any = None) -> Tensor:
            table = block.scale_shift_table
            if (
                inputs.ndim != 5
                or (table is not None) != modulated
                or (modulated and not _is_per_sample(temb, inputs))
                or not (_takes_rows(block.conv1, inputs) and _takes_rows(block.conv2, inputs))
            ):
                raise HandedBack
            shift1 = scale1 = shift2 = scale2 = None
            if modulated:
                time = temb.view(inputs.shape[0], 4, -1) + table
                shift1, scale1, shift2, scale2 = time.unbind(1)
            x = _rows(inputs).permute(0, 4, 1, 2, 3)  # all that follows keeps its layout
            h = activated(block.conv1, x, None, scale1, shift1)
            h, bias = without_bias(block.conv1.conv, h)
            h = activated(block.conv2, h, bias, scale2, shift2)
            h, bias = without_bias(block.conv2.conv, h)
            if block.norm3 is not None:
                x = block.norm3(_rows(x)).permute(0, 4, 1, 2, 3)
            if block.conv_shortcut is not None:
                x = block.conv_shortcut(x)
            return _plus(add, h, bias, x)

        return fused


class LtxConvSubject(BlockSubject):
    """A causal convolution of a video in channels-last memory, which `torch.cat` would undo."""

    ops = ("add_bias",)
    title = "convolution: padded frames and bias, channels last"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        return []

    @staticmethod
    def is_another(block: Any) -> bool:
        size = getattr(block, "kernel_size", None)
        return isinstance(size, tuple) and size[0] == 1  # adds no frames

    @staticmethod
    def odd(block: Any) -> str | None:
        return None if type(block.conv) is nn.Conv3d else "its convolution is no `nn.Conv3d`"

    @classmethod
    def projection(cls, block: Any) -> Any:
        return block.conv

    def build(self, m: Any) -> Any:
        return type(m)(
            in_channels=16,
            out_channels=24,
            kernel_size=m.kernel_size,
            stride=m.conv.stride,
            is_causal=m.is_causal,
            padding_mode=m.conv.padding_mode,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        video = torch.randn(2, 16, 4, 6, 5, generator=generator)
        return {"hidden_states": video.to(memory_format=torch.channels_last_3d)}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        add = bind("add_bias", into=1)

        def fused(block: Any, hidden_states: Tensor) -> Tensor:
            x = hidden_states
            if x.ndim != 5 or x.is_contiguous() or not (_is_rows(x) and _takes_rows(block, x)):
                raise HandedBack
            padded, inner = _with_room(block, _rows(x))
            inner.copy_(_rows(x))
            h, bias = without_bias(block.conv, _repeat_frames(block, padded))
            return _plus(add, h, bias, None)

        return fused


class LtxUpsamplerSubject(BlockSubject):
    """A convolution whose channels become pixels. The rows of its weight are put into the order in
    which the pixels' channels lie together, so that they are moved as they are."""

    ops = ("add_bias",)
    title = "upsampler: channels to pixels, channels last"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        return [block.conv]

    @staticmethod
    def odd(block: Any) -> str | None:
        if block.residual:
            return "it adds its input"
        if type(block.conv).__name__ != "LTXVideoCausalConv3d":
            return "its convolution is no `LTXVideoCausalConv3d`"
        return None

    @classmethod
    def projection(cls, block: Any) -> Any:
        return block.conv.conv

    def build(self, m: Any) -> Any:
        return type(m)(
            in_channels=16 * m.upscale_factor,
            stride=m.stride,
            is_causal=m.conv.is_causal,
            upscale_factor=m.upscale_factor,
            padding_mode=m.conv.conv.padding_mode,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        m: Any = block
        video = torch.randn(2, m.conv.in_channels, 3, 4, 5, generator=generator)
        return {"hidden_states": video}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        add = bind("add_bias", into=1)

        def fused(block: Any, hidden_states: Tensor) -> Tensor:
            conv, (st, sh, sw) = block.conv.conv, block.stride
            count = st * sh * sw
            if (
                hidden_states.ndim != 5
                or not is_plain_convolution(conv, hidden_states)
                or conv.groups != 1
                or conv.out_channels % count
                or not _takes_rows(block.conv, hidden_states)
            ):
                raise HandedBack
            rows = hidden_states.permute(0, 2, 3, 4, 1)  # in any layout: it is copied anyway
            padded, inner = _with_room(block.conv, rows)
            inner.copy_(rows)
            x = _repeat_frames(block.conv, padded)
            channels = conv.out_channels // count
            weight = conv.weight.unflatten(0, (channels, count)).permute(1, 0, 3, 4, 5, 2)
            weight = weight.contiguous().flatten(0, 1).permute(0, 4, 1, 2, 3)
            h = conv._conv_forward(x, weight, None)
            if conv.bias is not None:
                h = _plus(add, h, conv.bias.view(channels, count).t().flatten(), None)
            h = _rows(h)  # [B, T, H, W, count * C]
            b, t, y, x_ = h.shape[:4]
            video = h.new_empty(b, t * st, y * sh, x_ * sw, channels)
            pixels = h.view(b, t, y, x_, st, sh, sw, channels).permute(0, 1, 4, 2, 5, 3, 6, 7)
            places = video.view(b, t, st, y, sh, x_, sw, channels)
            if channels * video.element_size() % 16 == 0:  # moved 16 bytes at a time
                places, pixels = (v.view(torch.complex128) for v in (places, pixels))
            places.copy_(pixels)
            return video[:, st - 1 :].permute(0, 4, 1, 2, 3)

        return fused


# ---------------------------------------------------------------------------------------------
# Videos as rows of channels


def _is_per_sample(time: Tensor | None, video: Tensor) -> bool:
    """Whether there is one timestep for each sample: not one per pixel, nor one for all."""
    return time is not None and time.shape[:1] + time.shape[2:] == (video.shape[0], 1, 1, 1)


def _is_rows(video: Tensor) -> bool:
    return video.permute(0, 2, 3, 4, 1).is_contiguous()


def _rows(video: Tensor) -> Tensor:
    """[B, C, T, H, W] as [B, T, H, W, C]: a view if it is in channels-last memory, else a copy."""
    return video.permute(0, 2, 3, 4, 1).contiguous()


def _added_frames(conv: Any) -> tuple[int, int]:
    """How often a `LTXVideoCausalConv3d` repeats the first and the last frame."""
    size = conv.kernel_size[0]
    return (size - 1, 0) if conv.is_causal else ((size - 1) // 2, (size - 1) // 2)


def _takes_rows(conv: Any, video: Tensor) -> bool:
    """Whether PyTorch convolves such a video in channels-last memory. On a CPU it does not if the
    video is small and fp32: it would be put into planes again before each convolution."""
    inner = conv.conv
    if video.device.type != "cpu" or video.dtype != torch.float32 or is_compiling():
        return True
    if not is_plain_convolution(inner, video):
        return True
    b, _, t, h, w = video.shape
    # what it will be given, in no memory: the choice is by sizes
    like = video.new_empty(()).expand(b, inner.in_channels, t + sum(_added_frames(conv)), h, w)
    chosen = torch._C._select_conv_backend(
        like, inner.weight, None, inner.stride, inner.padding, inner.dilation, False, (0, 0, 0),
        inner.groups, None,
    )  # fmt: skip
    return chosen.name != "Slow3d"


def _with_room(conv: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for `rows` and the frames that `conv` adds, and the part of it that is for `rows`."""
    before, after = _added_frames(conv)
    frames = rows.shape[1]
    padded = rows.new_empty((rows.shape[0], before + frames + after, *rows.shape[2:]))
    return padded, padded[:, before : before + frames]


def _repeat_frames(conv: Any, padded: Tensor) -> Tensor:
    """What `_with_room` made, the added frames filled in, as [B, C, T, H, W]."""
    before, after = _added_frames(conv)
    if before:
        padded[:, :before] = padded[:, before : before + 1]
    if after:
        padded[:, -after:] = padded[:, -after - 1 : -after]
    return padded.permute(0, 4, 1, 2, 3)


def _plus(add: Callable[..., Any], h: Tensor, bias: Tensor | None, x: Tensor | None) -> Tensor:
    """`h + bias + x`, in the memory of `h`, which is a convolution's result."""
    if bias is None:
        return h if x is None else h + x
    if not _is_rows(h):
        h = h + bias[:, None, None, None]
        return h if x is None else h + x
    rows = _rows(h)
    add(rows, rows, bias, None if x is None else _rows(x))
    return h
