"""Rows of blocks_single.py for the families whose files are newer, tested alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from blocks_row import Call, Draw, Row, tables
from torch import Tensor, nn


def turns(draw: Draw, *shape: int) -> Tensor:
    """Complex RoPE tables, which are complex64 in every model."""
    angles = draw(*shape).float()
    return torch.polar(torch.ones_like(angles), angles)


def keys(batch: int, tokens: int) -> Tensor:
    """[batch, tokens], bool: the last sample is shorter where it can be."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[-1, max(1, tokens - 3) :] = False
    return mask


# Z-Image, Lumina 2 -------------------------------------------------------------------------------


def z_image(modulation: bool = True) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

        return ZImageTransformerBlock(3, 96, 6, 6, 1e-5, True, modulation)

    return make


def z_image_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {
        "x": draw(batch, tokens, 96),
        "attn_mask": None,
        "freqs_cis": turns(draw, batch, tokens, 8),
        "adaln_input": draw(batch, 96),
    }


def z_image_masked(draw: Draw, batch: int, tokens: int) -> Call:
    return z_image_call(draw, batch, tokens) | {"attn_mask": keys(batch, tokens)}


def z_image_text(draw: Draw, batch: int, tokens: int) -> Call:
    return z_image_masked(draw, batch, tokens) | {"adaln_input": None}


def z_image_per_token(draw: Draw, batch: int, tokens: int) -> Call:
    """Z-Image Omni: each token has one of two timesteps."""
    noise = torch.zeros(batch, tokens)
    noise[:, ::2] = 1
    both = {"adaln_noisy": draw(batch, 96), "adaln_clean": draw(batch, 96)}
    return z_image_call(draw, batch, tokens) | {"adaln_input": None, "noise_mask": noise} | both


def lumina2(modulation: bool = True, kv_heads: int = 2) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock

        return Lumina2TransformerBlock(96, 6, kv_heads, 32, 1.0, 1e-5, modulation)

    return make


def lumina2_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {
        "hidden_states": draw(batch, tokens, 96),
        "attention_mask": None,
        # Lumina 2 makes its tables in complex128
        "image_rotary_emb": turns(draw, batch, tokens, 8).to(torch.complex128),
        "temb": draw(batch, 96),
    }


def lumina2_masked(draw: Draw, batch: int, tokens: int) -> Call:
    return lumina2_call(draw, batch, tokens) | {"attention_mask": keys(batch, tokens)}


def lumina2_text(draw: Draw, batch: int, tokens: int) -> Call:
    mask = keys(batch, tokens).long()  # as a tokenizer gives it
    return lumina2_call(draw, batch, tokens) | {"attention_mask": mask, "temb": None}


# CogVideoX ---------------------------------------------------------------------------------------


def cogvideox(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

        return CogVideoXBlock(96, 6, 16, 40, **settings)

    return make


def cogvideox_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {
        "hidden_states": draw(batch, tokens, 96),
        "encoder_hidden_states": draw(batch, 7, 96),
        "temb": draw(batch, 40),
        "image_rotary_emb": tables(draw, tokens, 16),
    }


def cogvideox_learned(draw: Draw, batch: int, tokens: int) -> Call:
    """The 2B model has learned positions."""
    return cogvideox_call(draw, batch, tokens) | {"image_rotary_emb": None}


def cogvideox_joined(draw: Draw, batch: int, tokens: int) -> Call:
    """Its first block gets the two halves of one tensor."""
    call = cogvideox_call(draw, batch, tokens)
    both = torch.cat((call["encoder_hidden_states"], call["hidden_states"]), 1)
    return call | {"hidden_states": both[:, 7:], "encoder_hidden_states": both[:, :7]}


def cogvideox_masked(draw: Draw, batch: int, tokens: int) -> Call:
    mask = torch.zeros(batch, 1, 7 + tokens)
    mask[:, :, -2:] = -10000.0
    return cogvideox_call(draw, batch, tokens) | {"attention_kwargs": {"attention_mask": mask}}


# Mochi -------------------------------------------------------------------------------------------


def mochi(last: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_mochi import MochiTransformerBlock

        return MochiTransformerBlock(96, 6, 16, 40, context_pre_only=last)

    return make


def mochi_call(draw: Draw, batch: int, tokens: int) -> Call:
    angles = draw(tokens, 6, 8).float()  # a table per head
    return {
        "hidden_states": draw(batch, tokens, 96),
        "encoder_hidden_states": draw(batch, 7, 40),
        "temb": draw(batch, 96),
        "encoder_attention_mask": torch.ones(batch, 7, dtype=torch.bool),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def mochi_padded(draw: Draw, batch: int, tokens: int) -> Call:
    return mochi_call(draw, batch, tokens) | {"encoder_attention_mask": keys(batch, 7)}


def mochi_gaps(draw: Draw, batch: int, tokens: int) -> Call:
    mask = keys(batch, 7)
    mask[:, 1:3] = False
    mask[0] = False
    return mochi_call(draw, batch, tokens) | {"encoder_attention_mask": mask}


ROWS: dict[str, Row] = {
    "z-image": Row(
        z_image(),
        {"no mask": z_image_call, "mask": z_image_masked},
        aside=("attention_norm1", "ffn_norm2", "attention", "attention.norm_q", "feed_forward"),
        linear="attention.to_v",
        inside="attention",
        handed_back={"per token": z_image_per_token},
    ),
    "z-image text": Row(
        z_image(modulation=False),
        {"mask": z_image_text},
        aside=("ffn_norm1",),
        linear="feed_forward.w3",
        inside="attention",
    ),
    "lumina 2": Row(
        lumina2(),
        {"no mask": lumina2_call, "mask": lumina2_masked},
        aside=("norm1", "norm1.norm", "norm2", "attn", "feed_forward.silu"),
        linear="norm1.linear",
        inside="attn",
    ),
    "lumina 2 text": Row(
        lumina2(modulation=False, kv_heads=6),
        {"mask": lumina2_text},
        aside=("norm1",),
        linear="attn.to_k",
        inside="attn",
    ),
    "cogvideox": Row(
        cogvideox(attention_bias=True),
        {"rope": cogvideox_call, "no rope": cogvideox_learned, "joined": cogvideox_joined},
        aside=("norm1", "norm1.norm", "norm2.silu", "attn1.norm_q"),
        linear="norm2.linear",
        handed_back={"attention mask": cogvideox_masked},
    ),
    "cogvideox without norms of q and k": Row(
        cogvideox(qk_norm=False, norm_elementwise_affine=False), {"rope": cogvideox_call}
    ),
    "mochi": Row(
        mochi(),
        {"full": mochi_call, "padded": mochi_padded, "gaps": mochi_gaps},
        aside=("norm1", "norm1_context.norm", "norm3.norm", "norm4_context", "attn1.norm_added_k"),
        linear="attn1.add_q_proj",
    ),
    "mochi's last": Row(
        mochi(last=True),
        {"padded": mochi_padded},
        aside=("norm1_context.norm", "norm2"),
        linear="norm1_context.linear_1",
    ),
}
