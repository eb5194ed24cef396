"""FLUX.1's transformer blocks: double-stream, then single-stream with attention and MLP in parallel
(diffusers, `FluxTransformerBlock`, `FluxSingleTransformerBlock`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.joint import (
    JointSubject,
    compact,
    image_stream,
    text_stream,
    weights_of,
    within_range,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import drawing
from hfpatch.blocks.side_by_side import Tokens, joined, rows
from hfpatch.proof.subject import Forward, Tensor


def sample(generator: torch.Generator) -> dict[str, Any]:
    """Arguments of a small block: 6 text and 10 image tokens of 64 channels, 4 heads."""

    draw = drawing(generator)
    angles = draw(16, 8).repeat_interleave(2, -1)
    return {
        "hidden_states": draw(2, 10, 64),
        "encoder_hidden_states": draw(2, 6, 64),
        "temb": draw(2, 64),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


class FluxSubject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gates"
    processor = "FluxAttnProcessor"
    like = ("encoder_hidden_states", "hidden_states")
    anchor = ("norm1", "linear", "weight")

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        norms = (block.norm1, block.norm1_context)
        return [*norms, *(norm.silu for norm in norms)]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if block.norm1.emb is not None or block.norm1_context.emb is not None:
            return "its AdaLN embeds the timestep itself"
        return None

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return sample(generator)

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of = self.kernels(bind), StepMemo(compact)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            joint_attention_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if joint_attention_kwargs or not h.dtype == text.dtype == temb.dtype:
                raise HandedBack
            a, split = block.attn, text.shape[1]
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            modulation = block.norm1.linear(kernels.silu(temb)).chunk(6, 1)  # the original's first
            streams = (
                text_stream(
                    a,
                    text,
                    block.norm1_context.linear(kernels.silu(temb)).chunk(6, 1),
                    rows(tables, 0, split),
                    block.ff_context,
                ),
                image_stream(a, h, modulation, rows(tables, split, split + h.shape[1]), block.ff),
            )
            backend = a.processor._attention_backend
            text, h = kernels.double(streams, a.heads, None, backend, order=(1, 0))
            return within_range(text), h

        return fused


class FluxSingleSubject(JointSubject):
    title = "fused block: AdaLN, attention and MLP in parallel, qk norm + RoPE, gate"
    processor = "FluxAttnProcessor"
    like = ("encoder_hidden_states", "hidden_states")
    anchor = ("norm", "linear", "weight")

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm.norm]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        return [block.norm, block.norm.silu, block.act_mlp]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        approximate = block.act_mlp.approximate
        return None if approximate == "tanh" else f"its MLP has gelu(approximate={approximate!r})"

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return sample(generator)

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of = self.kernels(bind), StepMemo(compact)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            joint_attention_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if joint_attention_kwargs or not h.dtype == text.dtype == temb.dtype:
                raise HandedBack
            a, split = block.attn, text.shape[1]
            h = joined(text, h)
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            tokens = Tokens(h.shape[1], *weights_of((a.norm_q, a.norm_k)), tables)
            h = within_range(kernels.single(block, h, temb, (tokens,)))
            return h[:, :split], h[:, split:]

        return fused
