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
    return z_image_call(draw, batch, tokens) | {"adaln_input": None}


def z_image_text_masked(draw: Draw, batch: int, tokens: int) -> Call:
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
    return lumina2_call(draw, batch, tokens) | {"temb": None}


def lumina2_text_masked(draw: Draw, batch: int, tokens: int) -> Call:
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


# LTX-2 -------------------------------------------------------------------------------------------


def ltx2(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock

        return LTX2VideoTransformerBlock(96, 6, 16, 96, 48, 6, 8, 48, **settings)

    return make


def ltx2_call(
    draw: Draw,
    batch: int,
    tokens: int,
    per_token: bool = False,
    split: bool = True,
    mods: int = 6,
    prompts: bool = False,
) -> Call:
    audio, text = 5, 7

    def rotary(length: int, width: int) -> tuple[Tensor, Tensor]:
        if not split:
            return tables(draw, batch, length, width)
        angles = draw(batch, 6, length, width // 12).float()
        return angles.cos(), angles.sin()

    steps = (tokens, audio) if per_token else (1, 1)
    call = {
        "hidden_states": draw(batch, tokens, 96),
        "audio_hidden_states": draw(batch, audio, 48),
        "encoder_hidden_states": draw(batch, text, 96),
        "audio_encoder_hidden_states": draw(batch, text, 48),
        "temb": draw(batch, steps[0], mods * 96),
        "temb_audio": draw(batch, steps[1], mods * 48),
        "temb_ca_scale_shift": draw(batch, steps[0], 4 * 96),
        "temb_ca_audio_scale_shift": draw(batch, steps[1], 4 * 48),
        "temb_ca_gate": draw(batch, steps[0], 96),
        "temb_ca_audio_gate": draw(batch, steps[1], 48),
        "video_rotary_emb": rotary(tokens, 96),
        "audio_rotary_emb": rotary(audio, 48),
        "ca_video_rotary_emb": rotary(tokens, 48),
        "ca_audio_rotary_emb": rotary(audio, 48),
    }
    if prompts:
        call |= {"temb_prompt": draw(batch, 1, 192), "temb_prompt_audio": draw(batch, 1, 96)}
    return call


def ltx2_with(**more: Any) -> Callable[[Draw, int, int], Call]:
    return lambda d, b, t: ltx2_call(d, b, t) | more


def ltx2_masked(draw: Draw, batch: int, tokens: int) -> Call:
    call = ltx2_call(draw, batch, tokens)
    like = call["hidden_states"]
    text = torch.zeros(batch, 1, 7)
    text[-1, :, 5:] = -10000.0
    itself = torch.zeros(batch, tokens, tokens)
    itself[:, :, tokens // 2 + 1 :] = -10000.0
    return call | {
        "encoder_attention_mask": text.to(like),
        "audio_encoder_attention_mask": text.to(like),
        "self_attention_mask": itself.to(like),
    }


def ltx2_perturbed(draw: Draw, batch: int, tokens: int) -> Call:
    mask = torch.ones(batch, 1, 1)
    mask[0] = 0.0
    call = ltx2_call(draw, batch, tokens, mods=9, prompts=True)
    return call | {"perturbation_mask": mask.to(call["hidden_states"])}


# Sana --------------------------------------------------------------------------------------------


def sana(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.sana_transformer import SanaTransformerBlock

        sizes = {"num_cross_attention_heads": 3, "cross_attention_head_dim": 32}
        return SanaTransformerBlock(96, 6, 16, cross_attention_dim=96, **sizes, **settings)

    return make


def sana_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {
        "hidden_states": draw(batch, tokens * 3, 96),
        "encoder_hidden_states": draw(batch, 7, 96),
        "encoder_attention_mask": None,
        "timestep": draw(batch, 6 * 96),
        "height": tokens,
        "width": 3,
    }


def sana_masked(draw: Draw, batch: int, tokens: int) -> Call:
    call = sana_call(draw, batch, tokens)
    mask = torch.zeros(batch, 1, 7)
    mask[-1, :, 5:] = -10000.0
    return call | {"encoder_attention_mask": mask.to(call["hidden_states"])}


# HunyuanVideo 1.5, HunyuanImage ------------------------------------------------------------------


def hunyuan(module: str, name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import importlib

        where = importlib.import_module(f"diffusers.models.transformers.{module}")
        return getattr(where, name)(6, 16, 4.0)

    return make


def hunyuan_video15_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {
        "hidden_states": draw(batch, tokens, 96),
        "encoder_hidden_states": draw(batch, 7, 96),
        "temb": draw(batch, 96),
        "attention_mask": torch.ones(batch, 7, dtype=torch.bool),
        "freqs_cis": tables(draw, tokens, 16),
    }


def hunyuan_video15_padded(draw: Draw, batch: int, tokens: int) -> Call:
    return hunyuan_video15_call(draw, batch, tokens) | {"attention_mask": keys(batch, 7)}


def hunyuan_image_call(draw: Draw, batch: int, tokens: int) -> Call:
    call = hunyuan_video15_call(draw, batch, tokens) | {"attention_mask": None}
    call["image_rotary_emb"] = call.pop("freqs_cis")
    return call


def hunyuan_image_padded(draw: Draw, batch: int, tokens: int) -> Call:
    mask = torch.nn.functional.pad(keys(batch, 7), (tokens, 0), value=True)[:, None, None]
    return hunyuan_image_call(draw, batch, tokens) | {"attention_mask": mask}


LTX23: dict[str, Any] = {
    "video_gated_attn": True,
    "audio_gated_attn": True,
    "video_cross_attn_adaln": True,
    "audio_cross_attn_adaln": True,
    "perturbed_attn": True,
    "rope_type": "split",
}


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
        {"no mask": z_image_text, "mask": z_image_text_masked},
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
        {"no mask": lumina2_text, "mask": lumina2_text_masked},
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
        waits=True,
    ),
    "mochi's last": Row(
        mochi(last=True),
        {"padded": mochi_padded},
        aside=("norm1_context.norm", "norm2"),
        linear="norm1_context.linear_1",
        waits=True,
    ),
    "ltx-2": Row(
        ltx2(rope_type="split"),
        {
            "per sample": ltx2_call,
            "per token": lambda d, b, t: ltx2_call(d, b, t, per_token=True),
            "masks": ltx2_masked,
            "streams apart": ltx2_with(
                use_a2v_cross_attention=False, use_v2a_cross_attention=False
            ),
            "to the video": ltx2_with(use_v2a_cross_attention=False),
            "to the audio": ltx2_with(use_a2v_cross_attention=False),
        },
        aside=("norm1", "audio_norm3", "video_to_audio_norm", "attn2", "audio_attn1.norm_k"),
        linear="audio_to_video_attn.to_q",
    ),
    "ltx-2.3": Row(
        ltx2(**LTX23),
        {"prompts": lambda d, b, t: ltx2_call(d, b, t, mods=9, prompts=True)},
        aside=("audio_to_video_norm",),
        linear="attn1.to_gate_logits",
        handed_back={"perturbed": ltx2_perturbed},
    ),
    "ltx-2.5": Row(
        ltx2(**(LTX23 | {"perturbed_attn": False, "ff_bias": False, "elementwise_affine": True})),
        {"no prompts": lambda d, b, t: ltx2_call(d, b, t, mods=9)},
        linear="audio_ff.net.0.proj",
    ),
    "ltx-2 interleaved": Row(
        ltx2(), {"per sample": lambda d, b, t: ltx2_call(d, b, t, split=False)}
    ),
    "sana": Row(
        sana(),
        {"no mask": sana_call, "mask": sana_masked},
        aside=("norm1", "norm2", "attn1", "ff", "attn2"),
        linear="attn2.to_q",
    ),
    "sana with norms of q and k": Row(
        sana(qk_norm="rms_norm_across_heads", attention_bias=False, norm_elementwise_affine=True),
        {"mask": sana_masked},
        linear="attn1.to_q",
        aside=("attn2",),
    ),
    "hunyuan-video 1.5": Row(
        hunyuan("transformer_hunyuan_video15", "HunyuanVideo15TransformerBlock"),
        {"full": hunyuan_video15_call, "padded": hunyuan_video15_padded},
        aside=("norm1", "norm1_context.norm", "norm2_context", "attn", "attn.norm_added_q"),
        linear="attn.add_v_proj",
        inside="attn",
    ),
    "hunyuan-image": Row(
        hunyuan("transformer_hunyuanimage", "HunyuanImageTransformerBlock"),
        {"no mask": hunyuan_image_call, "padded": hunyuan_image_padded},
        aside=("norm1_context", "attn.norm_k"),
        linear="ff.net.2",
        inside="attn",
    ),
    "hunyuan-image single": Row(
        hunyuan("transformer_hunyuanimage", "HunyuanImageSingleTransformerBlock"),
        {"no mask": hunyuan_image_call, "padded": hunyuan_image_padded},
        aside=("norm", "attn.norm_q"),
        linear="proj_mlp",
        inside="attn",
    ),
}
