"""Stable Diffusion 3's transformer block, with 3.5's second attention of the image stream and the
last block's text stream that ends in the attention (diffusers, `JointTransformerBlock`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.joint import (
    JointKernels,
    JointSubject,
    added_qkv_of,
    qkv_of,
    tight,
    to_out,
    weights_of,
)
from hfpatch.blocks.parts import undispatched
from hfpatch.blocks.projections import feed_forward
from hfpatch.blocks.side_by_side import Part, Tokens
from hfpatch.proof.subject import Forward, Tensor


class Sd3Subject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm, gates"
    processor = "JointAttnProcessor2_0"

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        norms = (block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context)
        return [norm for norm in norms if norm is not None]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        norms = (block.norm1, block.norm1_context)
        return [*norms, *(norm.silu for norm in norms)]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if any(getattr(n, "emb", None) is not None for n in (block.norm1, block.norm1_context)):
            return "its AdaLN embeds the timestep itself"
        if block.context_pre_only != block.attn.context_pre_only:
            return "it and its attention differ in `context_pre_only`"
        return None

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            context_pre_only=m.context_pre_only,
            qk_norm=None if m.attn.norm_q is None else "rms_norm",
            use_dual_attention=m.use_dual_attention,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(2, 10, 64, generator=generator),
            "encoder_hidden_states": torch.randn(2, 6, 64, generator=generator),
            "temb": torch.randn(2, 64, generator=generator),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels = self.kernels(bind)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            joint_attention_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if (
                joint_attention_kwargs
                or block._chunk_size is not None
                or not h.dtype == text.dtype == temb.dtype
            ):
                raise HandedBack
            modulation = block.norm1.linear(kernels.silu(temb)).chunk(
                9 if block.use_dual_attention else 6, 1
            )
            text_modulation = block.norm1_context.linear(kernels.silu(temb))
            if block.context_pre_only:
                scale, shift = text_modulation.chunk(2, 1)
                text_modulation = (shift, scale)
            else:
                text_modulation = text_modulation.chunk(6, 1)
            a, image = block.attn, h.shape[1]
            parts = (
                _part(kernels, h, modulation[:2], qkv_of(a), (a.norm_q, a.norm_k)),
                _part(
                    kernels,
                    text,
                    text_modulation[:2],
                    added_qkv_of(a),
                    (a.norm_added_q, a.norm_added_k),
                ),
            )
            # its processor calls PyTorch's attention: the backends of diffusers do not apply
            attended = undispatched(*kernels.qkv(parts, a.heads)).flatten(2)
            second = None
            if block.use_dual_attention:
                second = _part(
                    kernels,
                    h,
                    modulation[6:8],
                    qkv_of(block.attn2),
                    (block.attn2.norm_q, block.attn2.norm_k),
                )
            if not block.context_pre_only:
                text_seen = a.to_add_out(tight(attended[:, image:]))
            seen = to_out(a)(tight(attended[:, :image]))
            if second is not None:
                # two gated sums before the norm: the first is made here, the second in `after`
                h = kernels.gate(h, modulation[2], seen)
                seen = undispatched(*kernels.qkv((second,), block.attn2.heads)).flatten(2)
                seen = to_out(block.attn2)(seen)
                modulation = (None, None, modulation[8], *modulation[3:6])
            h = kernels.after(h, modulation, seen, lambda x: feed_forward(block.ff, x))
            if block.context_pre_only:
                return None, h
            text = kernels.after(
                text,
                text_modulation,
                text_seen,
                lambda x: feed_forward(block.ff_context, x),
            )
            return text, h

        return fused


def _part(
    kernels: JointKernels, h: Tensor, modulation: Any, linears: Any, norms: tuple[Any, Any]
) -> Part:
    shift, scale = modulation
    x = kernels.modulate(h, scale, shift, None, None)
    return Part(x, linears, (Tokens(x.shape[1], *weights_of(norms), None),))
