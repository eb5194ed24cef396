"""diffusers' `Transformer2DModel` over images, as UNets have it: what stands around its blocks.

    y = proj_out(blocks(proj_in(norm(x)))) + x, pixels as tokens between the projections

An image in channels-last memory is its tokens, so nothing is copied on the way in or out, and the
result is in channels-last memory too: the class's own forward makes it contiguous, and every layer
behind it converts it back. The blocks and linear projections are called as modules, and so are
convolutions that are more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack
from hfpatch.blocks.parts import odd_group_norms
from hfpatch.blocks.projections import convolve
from hfpatch.blocks.resnet import group_norm
from hfpatch.proof.subject import Forward, Tensor


class Transformer2DSubject(BlockSubject):
    ops = ("group_norm",)
    title = "frame of transformer blocks: group norm, no copies of channels-last images"
    called = ("transformer_blocks",)

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        return [block.norm]

    @staticmethod
    def odd(block: Any) -> str | None:
        if not block.is_input_continuous:
            return "its input is no image"
        return odd_group_norms(block, [block.norm], block.proj_in)

    @classmethod
    def projection(cls, block: Any) -> Any:
        return block.proj_in

    def build(self, m: Any) -> Any:
        config = m.config
        return type(m)(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=2 * m.norm.num_groups,
            num_layers=1,
            norm_num_groups=m.norm.num_groups,
            cross_attention_dim=None if config.cross_attention_dim is None else 48,
            attention_bias=config.attention_bias,
            activation_fn=config.activation_fn,
            use_linear_projection=m.use_linear_projection,
            only_cross_attention=config.only_cross_attention,
            double_self_attention=config.double_self_attention,
            norm_type=config.norm_type,
            norm_elementwise_affine=config.norm_elementwise_affine,
            norm_eps=config.norm_eps,
        )

    def settle(self, block: Any, m: Any) -> None:
        block.norm.eps = m.norm.eps  # the class has one value, a user may set another

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        m: Any = block
        image = torch.randn(2, m.in_channels, 4, 3, generator=generator)
        given: dict[str, Any] = {"hidden_states": image.to(memory_format=torch.channels_last)}
        if m.config.cross_attention_dim is not None:
            given["encoder_hidden_states"] = torch.randn(2, 6, 48, generator=generator)
        return given | {"return_dict": False}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        m: Any = self.module
        normalize = group_norm(m.norm, bind, silu=False)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None = None,
            timestep: Any = None,
            added_cond_kwargs: Any = None,
            class_labels: Any = None,
            cross_attention_kwargs: dict[str, Any] | None = None,
            attention_mask: Tensor | None = None,
            encoder_attention_mask: Tensor | None = None,
            return_dict: bool = True,
        ) -> Any:
            masks = (attention_mask, encoder_attention_mask)
            if (
                cross_attention_kwargs
                or hidden_states.ndim != 4
                or any(mask is not None and mask.ndim == 2 for mask in masks)
            ):
                raise HandedBack
            x = normalize(hidden_states, block.norm)
            linear = block.use_linear_projection
            if not linear:
                x = convolve(block.proj_in, x)
            n, _, height, width = x.shape
            x = x.permute(0, 2, 3, 1).reshape(n, height * width, x.shape[1])
            if linear:
                x = block.proj_in(x)
            for inner in block.transformer_blocks:
                x = inner(
                    x,
                    attention_mask=attention_mask,
                    encoder_hidden_states=encoder_hidden_states,
                    encoder_attention_mask=encoder_attention_mask,
                    timestep=timestep,
                    cross_attention_kwargs=cross_attention_kwargs,
                    class_labels=class_labels,
                )
            if linear:
                x = block.proj_out(x)
            x = x.reshape(n, height, width, x.shape[-1]).permute(0, 3, 1, 2)
            if hidden_states.is_contiguous():
                x = x.contiguous()
            if not linear:
                x = convolve(block.proj_out, x)
            x = x + hidden_states
            return Transformer2DModelOutput(sample=x) if return_dict else (x,)

        return fused
