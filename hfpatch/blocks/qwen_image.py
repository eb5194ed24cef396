"""Qwen-Image's double-stream transformer block (diffusers, `QwenImageTransformerBlock`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.joint import (
    JointFamily,
    JointSubject,
    Stream,
    Tables,
    added_qkv_of,
    qkv_of,
    to_out,
    within_range,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.projections import feed_forward
from hfpatch.proof.subject import Forward, Tensor


class QwenImageSubject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gates"
    processor = "QwenDoubleStreamAttnProcessor2_0"

    @classmethod
    def attentions(cls, block: Any) -> list[Any]:
        return [block.attn]

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.img_norm1, block.img_norm2, block.txt_norm1, block.txt_norm2]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        return [block.img_mod, block.txt_mod, block.img_mod[0], block.txt_mod[0]]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        mods = [[type(m) for m in mod] for mod in (block.img_mod, block.txt_mod)]
        if any(mod[0] is not nn.SiLU or len(mod) != 2 for mod in mods):
            return "its modulation is no SiLU and a linear layer"
        if block.zero_cond_t:
            return "its image tokens have one of two timesteps each"
        return None

    def build(self, block: Any) -> nn.Module:
        made: nn.Module = type(block)(dim=64, num_attention_heads=4, attention_head_dim=16)
        return made

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def turns(tokens: int) -> Tensor:
            return torch.polar(torch.ones(tokens, 8), draw(tokens, 8))

        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        return {
            "hidden_states": draw(2, 10, 64),
            "encoder_hidden_states": draw(2, 6, 64),
            "encoder_hidden_states_mask": mask,
            "temb": draw(2, 64),
            "image_rotary_emb": (turns(10), turns(6)),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, original = self.kernels(bind), self.handed_back()
        image_tables, text_tables, joint_mask = (
            StepMemo(_real_tables),
            StepMemo(_real_tables),
            StepMemo(_joint_mask),
        )

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            encoder_hidden_states_mask: Tensor | None,
            temb: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            joint_attention_kwargs: dict[str, Any] | None = None,
            modulate_index: Any = None,
        ) -> Any:
            h, text, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
            if (
                joint_attention_kwargs
                or modulate_index is not None
                or image_rotary_emb is None
                or (mask is not None and mask.dtype != torch.bool)
                or not h.dtype == text.dtype == temb.dtype
            ):
                return original(
                    block,
                    h,
                    text,
                    mask,
                    temb,
                    image_rotary_emb,
                    joint_attention_kwargs,
                    modulate_index,
                )
            a = block.attn
            image_turns, text_turns = image_rotary_emb
            streams = (
                Stream(
                    h,
                    block.img_mod[1](kernels.silu(temb)).chunk(6, -1),
                    qkv_of(a),
                    (a.norm_q, a.norm_k),
                    image_tables(image_turns),
                    to_out(a),
                    lambda x: feed_forward(block.img_mlp, x),
                ),
                Stream(
                    text,
                    block.txt_mod[1](kernels.silu(temb)).chunk(6, -1),
                    added_qkv_of(a),
                    (a.norm_added_q, a.norm_added_k),
                    text_tables(text_turns),
                    a.to_add_out,
                    lambda x: feed_forward(block.txt_mlp, x),
                ),
            )
            # The original has text first. Attention knows no order; with text last its padding is
            # at the end, where leaving it out costs nothing.
            mask = None if mask is None else joint_mask(mask, image_turns)
            h, text = kernels.double(streams, a.heads, mask, a.processor._attention_backend)
            return within_range(text), within_range(h)

        return fused


def _real_tables(turns: Tensor) -> Tables:
    """cos and sin of complex tables [S, D / 2]."""
    return turns.real.contiguous(), turns.imag.contiguous()


def _joint_mask(text_mask: Tensor, image_turns: Tensor) -> Tensor:
    """[B, 1, 1, image + text]: every image token, and the text tokens of the mask."""
    return F.pad(text_mask, (image_turns.shape[0], 0), value=True)[:, None, None]


QWEN_IMAGE = JointFamily("^QwenImageTransformerBlock$", QwenImageSubject)
