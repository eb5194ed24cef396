"""HunyuanVideo's transformer blocks: double-stream, then single-stream (diffusers,
`HunyuanVideoTransformerBlock`, `HunyuanVideoSingleTransformerBlock`). Only image tokens turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.joint import JointSubject, compact, image_stream, text_stream, weights_of
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import drawing
from hfpatch.blocks.side_by_side import Tokens, joined
from hfpatch.proof.subject import Forward, Tensor

Masking = Callable[
    [Tensor | None, tuple[Tensor, Tensor] | None], tuple[Tensor | None, Tensor | None]
]


def _sample(generator: torch.Generator, tables: str) -> dict[str, Any]:
    draw = drawing(generator)
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


class HunyuanVideoSubject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gates"
    processor = "HunyuanVideoAttnProcessor2_0"

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        norms = (block.norm1, block.norm1_context)
        return [*norms, *(norm.silu for norm in norms)]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if block.attn.add_q_proj is None or block.attn.to_add_out is None:
            return "its attention has no projections of the text"
        if block.norm1.emb is not None or block.norm1_context.emb is not None:
            return "its AdaLN embeds the timestep itself"
        return None

    def build(self, m: Any) -> Any:
        return type(m)(num_attention_heads=4, attention_head_dim=16, mlp_ratio=4.0)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return _sample(generator, "freqs_cis")

    @staticmethod
    def masking() -> Masking:
        """What makes of the call's mask and tables the keys that are attended to, and which text
        tokens' attention gives nothing."""
        return lambda mask, tables: (mask, None)

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of, masking = self.kernels(bind), StepMemo(compact), self.masking()

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
                raise HandedBack
            kept, dropped = masking(attention_mask, freqs_cis)
            a = block.attn
            streams = (
                image_stream(
                    a,
                    h,
                    block.norm1.linear(kernels.silu(temb)).chunk(6, 1),
                    None if freqs_cis is None else tables_of(*freqs_cis),
                    block.ff,
                ),
                text_stream(
                    a,
                    text,
                    block.norm1_context.linear(kernels.silu(temb)).chunk(6, 1),
                    None,
                    block.ff_context,
                ),
            )
            backend = a.processor._attention_backend
            return tuple(kernels.double(streams, a.heads, kept, backend, dropped))

        return fused


class HunyuanVideoSingleSubject(JointSubject):
    title = "fused block: AdaLN, attention and MLP in parallel, qk norm + RoPE, gate"
    processor = "HunyuanVideoAttnProcessor2_0"

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm.norm]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        return [block.norm, block.norm.silu, block.act_mlp]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if block.attn.add_q_proj is not None or block.attn.to_out is not None:
            return "its attention has projections of the text or of its output"
        approximate = block.act_mlp.approximate
        return None if approximate == "tanh" else f"its MLP has gelu(approximate={approximate!r})"

    def build(self, m: Any) -> Any:
        return type(m)(num_attention_heads=4, attention_head_dim=16)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return _sample(generator, "image_rotary_emb")

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of = self.kernels(bind), StepMemo(compact)

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
                raise HandedBack
            a, split = block.attn, h.shape[1]
            h = joined(h, text)
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            norms = weights_of((a.norm_q, a.norm_k))
            tokens = (Tokens(split, *norms, tables), Tokens(text.shape[1], *norms, None))
            h = kernels.single(block, h, temb, tokens, attention_mask)
            return h[:, :split], h[:, split:]

        return fused
