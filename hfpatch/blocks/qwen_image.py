"""Qwen-Image's double-stream transformer block (diffusers, `QwenImageTransformerBlock`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.joint import JointSubject, image_stream, text_stream, within_range
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import drawing
from hfpatch.blocks.side_by_side import Tables
from hfpatch.proof.subject import Forward, Tensor


class QwenImageSubject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gates"
    processor = "QwenDoubleStreamAttnProcessor2_0"

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

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)

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
        kernels = self.kernels(bind)
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
                raise HandedBack
            a = block.attn
            image_turns, text_turns = image_rotary_emb
            streams = (
                image_stream(
                    a,
                    h,
                    block.img_mod[1](kernels.silu(temb)).chunk(6, -1),
                    image_tables(image_turns),
                    block.img_mlp,
                ),
                text_stream(
                    a,
                    text,
                    block.txt_mod[1](kernels.silu(temb)).chunk(6, -1),
                    text_tables(text_turns),
                    block.txt_mlp,
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
