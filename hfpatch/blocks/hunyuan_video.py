"""HunyuanVideo's transformer blocks: double-stream, then single-stream (diffusers,
`HunyuanVideoTransformerBlock`, `HunyuanVideoSingleTransformerBlock`). Only image tokens turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.flux import FluxSingleSubject, FluxSubject
from hfpatch.blocks.joint import (
    JointFamily,
    Part,
    Stream,
    Tokens,
    added_qkv_of,
    compact,
    joined,
    mlp,
    mlp_first,
    product_of_two,
    qkv_of,
    to_out,
    weights_of,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.projections import feed_forward
from hfpatch.proof.subject import Forward, Tensor


def _sample(generator: torch.Generator, tables: str) -> dict[str, Any]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    angles = draw(10, 8).repeat_interleave(2, -1)
    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    mask[1, ..., 13:] = False
    return {
        "hidden_states": draw(2, 10, 64),
        "encoder_hidden_states": draw(2, 6, 64),
        "temb": draw(2, 64),
        "attention_mask": mask,
        tables: (angles.cos(), angles.sin()),
    }


class HunyuanVideoSubject(FluxSubject):
    processor = "HunyuanVideoAttnProcessor2_0"

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if block.attn.add_q_proj is None or block.attn.to_add_out is None:
            return "its attention has no projections of the text"
        return super().unfit(block)

    def build(self, block: Any) -> nn.Module:
        made: nn.Module = type(block)(num_attention_heads=4, attention_head_dim=16, mlp_ratio=4.0)
        return made

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return _sample(generator, "freqs_cis")

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of, original = self.kernels(bind), StepMemo(compact), self.handed_back()

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            attention_mask: Tensor | None = None,
            freqs_cis: tuple[Tensor, Tensor] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if not h.dtype == text.dtype == temb.dtype:
                return original(block, h, text, temb, attention_mask, freqs_cis, *args, **kwargs)
            a = block.attn
            streams = (
                Stream(
                    h,
                    block.norm1.linear(kernels.silu(temb)).chunk(6, 1),
                    qkv_of(a),
                    (a.norm_q, a.norm_k),
                    None if freqs_cis is None else tables_of(*freqs_cis),
                    to_out(a),
                    lambda x: feed_forward(block.ff, x),
                ),
                Stream(
                    text,
                    block.norm1_context.linear(kernels.silu(temb)).chunk(6, 1),
                    added_qkv_of(a),
                    (a.norm_added_q, a.norm_added_k),
                    None,
                    a.to_add_out,
                    lambda x: feed_forward(block.ff_context, x),
                ),
            )
            backend = a.processor._attention_backend
            return tuple(kernels.double(streams, a.heads, attention_mask, backend))

        return fused


class HunyuanVideoSingleSubject(FluxSingleSubject):
    processor = "HunyuanVideoAttnProcessor2_0"

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if block.attn.add_q_proj is not None or block.attn.to_out is not None:
            return "its attention has projections of the text or of its output"
        return super().unfit(block)

    def build(self, block: Any) -> nn.Module:
        made: nn.Module = type(block)(num_attention_heads=4, attention_head_dim=16)
        return made

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return _sample(generator, "image_rotary_emb")

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of, original = self.kernels(bind), StepMemo(compact), self.handed_back()

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            attention_mask: Tensor | None = None,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if not h.dtype == text.dtype == temb.dtype:
                return original(
                    block, h, text, temb, attention_mask, image_rotary_emb, *args, **kwargs
                )
            a, split = block.attn, h.shape[1]
            h = joined(h, text)
            shift, scale, gate = block.norm.linear(kernels.silu(temb)).chunk(3, 1)
            x = kernels.modulate(h, scale, shift, None, None)
            made = mlp_first(block, x)
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            norms = weights_of((a.norm_q, a.norm_k))
            tokens = (Tokens(split, *norms, tables), Tokens(text.shape[1], *norms, None))
            q, k, v = kernels.qkv((Part(x, qkv_of(a), tokens),), a.heads)
            backend = a.processor._attention_backend
            attended = kernels.attention(q, k, v, attention_mask, backend=backend).flatten(2)
            made = mlp(block, x) if made is None else made
            h = kernels.gate(h, gate, product_of_two(block.proj_out, attended, made))
            return h[:, :split], h[:, split:]

        return fused


HUNYUAN_VIDEO = JointFamily("^HunyuanVideoTransformerBlock$", HunyuanVideoSubject)
HUNYUAN_VIDEO_SINGLE = JointFamily(
    "^HunyuanVideoSingleTransformerBlock$", HunyuanVideoSingleSubject
)
