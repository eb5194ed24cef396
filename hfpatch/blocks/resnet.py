"""diffusers' `ResnetBlock2D`, of UNets and VAEs: each group norm with the SiLU behind it.

    h = conv1(silu(norm1(x))) + time[:, :, None, None];  x = shortcut(x) + conv2(silu(norm2(h)))

Convolutions, the time projection and the dropout are called as modules; of convolutions that are
nothing more, the first one's bias is added with the time, and the second's by the shortcut. Images
in channels-last memory stay so. Blocks that change the resolution, or scale by the time, are left
as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import odd_group_norms
from hfpatch.blocks.projections import (
    convolve_plain,
    is_plain_convolution,
    parameter,
    stays_channels_last,
    without_bias,
)
from hfpatch.proof.subject import Forward, Tensor


def group_norm(
    like: nn.GroupNorm, bind: Callable[..., Callable[..., Any]], silu: bool
) -> Callable[[Tensor, Any], Tensor]:
    """A function of an image [N, C, H, W] and a norm with the settings of `like`; the result is in
    channels-last memory where the image is."""
    settings = {"groups": like.num_groups, "eps": like.eps, "silu": silu}
    first = bind("group_norm", **settings, channels_last=False)
    last = bind("group_norm", **settings, channels_last=True)

    def normalize(x: Tensor, norm: Any) -> Tensor:
        weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
        n, c, h, w = x.shape
        if is_channels_last(x):  # of few calls: a UNet has dozens of these, and small images
            image = c * h * w
            y: Tensor = last(x.as_strided((n, h * w, c), (image, c, 1)), weight, bias)
            return y.as_strided((n, c, h, w), (image, 1, w * c, c))
        x = x.contiguous()
        y = first(x.view(n, c, h * w), weight, bias)
        return y.view(n, c, h, w)

    return normalize


def is_channels_last(x: Tensor) -> bool:
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    return stays_channels_last(x)


class ResnetSubject(BlockSubject):
    ops = ("group_norm",)
    title = "fused block: group norms with SiLU"
    argument = "input_tensor"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        return [block.norm1, block.norm2, block.nonlinearity]

    @staticmethod
    def odd(block: Any) -> str | None:
        if block.upsample is not None or block.downsample is not None:
            return "it changes the resolution"
        if block.time_embedding_norm != "default" and block.time_emb_proj is not None:
            return f"its time embedding is of type {block.time_embedding_norm!r}"
        if type(block.nonlinearity) is not nn.SiLU:
            return f"its activation is `{type(block.nonlinearity).__name__}`"
        if block.conv2.out_channels != block.out_channels:
            return "its second convolution has other channels than the first"
        return odd_group_norms(block, [block.norm1, block.norm2], block.conv1)

    @classmethod
    def projection(cls, block: Any) -> Any:
        return block.conv1

    def build(self, m: Any) -> Any:
        groups = m.norm1.num_groups
        shortcut = m.conv_shortcut
        return type(m)(
            in_channels=2 * groups,
            out_channels=(2 if shortcut is None else 3) * groups,
            temb_channels=None if m.time_emb_proj is None else 24,
            groups=groups,
            eps=m.norm1.eps,
            skip_time_act=m.skip_time_act,
            time_embedding_norm=m.time_embedding_norm,
            output_scale_factor=m.output_scale_factor,
            use_in_shortcut=shortcut is not None,
            conv_shortcut_bias=shortcut is not None and shortcut.bias is not None,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        m: Any = block
        image = torch.randn(2, m.in_channels, 6, 5, generator=generator)
        time = None if m.time_emb_proj is None else torch.randn(2, 24, generator=generator)
        return {"input_tensor": image, "temb": time}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        norm_silu = group_norm(m.norm1, bind, silu=True)
        activated = StepMemo(F.silu)  # every block of a step gets the same embedding

        def fused(
            block: Any, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any
        ) -> Tensor:
            x = input_tensor
            # without a projection the embedding is added as it is; without an embedding it fails
            odd = (temb is None) != (block.time_emb_proj is None)
            if args or kwargs or x.ndim != 4 or odd:
                raise HandedBack
            h = norm_silu(x, block.norm1)
            if block.time_emb_proj is not None:
                h, bias = without_bias(block.conv1, h)
                time = temb if block.skip_time_act or temb is None else activated(temb)
                time = block.time_emb_proj(time)
                h = h + (time if bias is None else time + bias)[:, :, None, None]
            else:
                h = block.conv1(h)
            h = block.dropout(norm_silu(h, block.norm2))
            if block.conv_shortcut is not None and is_plain_convolution(block.conv_shortcut, x):
                h, bias = without_bias(block.conv2, h)
                x = convolve_plain(block.conv_shortcut, x, bias)
            else:
                h = block.conv2(h)
                if block.conv_shortcut is not None:
                    x = block.conv_shortcut(x)
            h = x + h
            scale = block.output_scale_factor
            return h if scale == 1 else h / scale

        return fused
