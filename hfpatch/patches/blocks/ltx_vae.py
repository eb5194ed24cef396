"""`LTXVideoResnetBlock3d`, of LTX-Video's VAE: its norms over channels, without copies around them.

    h = conv1(silu(norm1(x) * (1 + scale1) + shift1))
    h = conv2(silu(norm2(h) * (1 + scale2) + shift2));  x = shortcut(x) + h

The class moves the channels to the back for each norm, and repeats and concatenates frames before
each convolution. Here the video stays in channels-last memory, which the convolutions keep, so that
the norm reads rows as they lie; the SiLU writes straight into a buffer with room for the repeated
frames. Inner convolutions, the shortcut and its norm are called as modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.patches.base import Forward, Tensor
from hfpatch.patches.blocks.parts import BlockFamily, ModelBlock, small

_silu_into = torch.ops.aten.silu.out


class LtxResnetSubject(ModelBlock):
    processor = ""
    argument = "inputs"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.modulated = module._parameters.get("scale_shift_table") is not None
        self.ops = ("norm_modulate",) if self.modulated else ("rms_norm",)
        self.title = "fused block: channels-last norms, SiLU into padded frames"

    @staticmethod
    def attentions(block: Any) -> tuple[Any, ...]:
        return ()

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

    @staticmethod
    def projection(block: Any) -> Any:
        return block.conv1.conv

    def tiny(self, generator: torch.Generator) -> nn.Module:
        m: Any = self.module
        shortcut = m.conv_shortcut is not None

        def make() -> nn.Module:
            return type(m)(  # type: ignore[no-any-return]
                in_channels=16,
                out_channels=24 if shortcut else 16,
                eps=m.norm3.eps if shortcut else 1e-6,
                is_causal=m.conv1.is_causal,
                timestep_conditioning=m.scale_shift_table is not None,
            )

        return small(make, generator)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        m: Any = block
        channels = m.conv1.in_channels
        video = torch.randn(2, channels, 3, 4, 5, generator=generator)
        time = None
        if m.scale_shift_table is not None:
            time = torch.randn(2, 4 * channels, 1, 1, 1, generator=generator)
        return {"inputs": video, "temb": time}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        eps, modulated = m.norm1.eps, self.modulated
        if modulated:
            modulate = bind("norm_modulate", eps=eps, norm="rms", cast="input")
        else:
            norm = bind("rms_norm", eps=eps, cast="none")

        def activated(conv: Any, video: Tensor, scale: Any, shift: Any) -> Tensor:
            """Norm and SiLU of [B, C, T, H, W], with the frames that `conv` adds in front and
            behind; in channels-last memory."""
            rows = _rows(video)
            shape = rows.shape
            flat = rows.flatten(1, 3)
            if scale is None:
                y = norm(flat, None, None)
            else:
                y = modulate(flat, scale, shift, None, None)
            frames, size = shape[1], conv.kernel_size[0]
            before = size - 1 if conv.is_causal else (size - 1) // 2
            after = 0 if conv.is_causal else before
            padded = y.new_empty((shape[0], before + frames + after, *shape[2:]))
            _silu_into(y.view(shape), out=padded[:, before : before + frames])
            if before:
                padded[:, :before] = padded[:, before : before + 1]
            if after:
                padded[:, -after:] = padded[:, -after - 1 : -after]
            return padded.permute(0, 4, 1, 2, 3)  # type: ignore[no-any-return]

        def fused(block: Any, inputs: Tensor, temb: Any = None, generator: Any = None) -> Tensor:
            table = block.scale_shift_table
            if (
                inputs.ndim != 5
                or (table is not None) != modulated
                or (modulated and not _is_per_sample(temb, inputs))
            ):
                return type(block).forward(block, inputs, temb, generator)  # type: ignore[no-any-return]
            shift1 = scale1 = shift2 = scale2 = None
            if modulated:
                time = temb.view(inputs.shape[0], 4, -1) + table
                shift1, scale1, shift2, scale2 = time.unbind(1)
            x = _rows(inputs).permute(0, 4, 1, 2, 3)  # all that follows keeps its layout
            h = activated(block.conv1, x, scale1, shift1)
            h = block.conv1.conv(h)
            h = activated(block.conv2, h, scale2, shift2)
            h = block.conv2.conv(h)
            if block.norm3 is not None:
                x = block.norm3(_rows(x)).permute(0, 4, 1, 2, 3)
            if block.conv_shortcut is not None:
                x = block.conv_shortcut(x)
            return h + x  # type: ignore[no-any-return]

        return fused


def _is_per_sample(time: Tensor | None, video: Tensor) -> bool:
    """Whether there is one timestep for each sample: not one per pixel, nor one for all."""
    return time is not None and time.shape[:1] + time.shape[2:] == (video.shape[0], 1, 1, 1)


def _rows(video: Tensor) -> Tensor:
    """[B, C, T, H, W] as [B, T, H, W, C]: a view if it is in channels-last memory, else a copy."""
    return video.permute(0, 2, 3, 4, 1).contiguous()


class LtxVaeBlocks(BlockFamily):
    classes = ("LTXVideoResnetBlock3d",)
    subject = LtxResnetSubject
