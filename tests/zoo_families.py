"""Small models of the diffusion families with newer fused blocks; see zoo.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo_models import Inputs, padded_mask


def z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=4,
        dim=128,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=48,
        axes_dims=[8, 12, 12],
        axes_lens=[128, 32, 32],
    )


def z_image_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    """Two images of one size, with prompts of different lengths."""
    return {
        "x": [torch.randn(4, 1, 8, 12, generator=g) for _ in range(2)],
        "t": torch.tensor([0.25, 0.125]),
        "cap_feats": [torch.randn(n, 48, generator=g) for n in (7, 40)],
    }


def of_list(result: Any) -> torch.Tensor:
    return torch.stack(list(result.sample))


def lumina2() -> nn.Module:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=96,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(8, 8, 8),
        axes_lens=(64, 32, 32),
        cap_feat_dim=48,
    )


def lumina2_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 8, 12, generator=g),
        "timestep": torch.tensor([0.25, 0.125]),
        "encoder_hidden_states": torch.randn(2, 7, 48, generator=g),
        "encoder_attention_mask": padded_mask(2, 7, 3),
    }


def cogvideox() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        time_embed_dim=32,
        text_embed_dim=48,
        num_layers=2,
        sample_width=6,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    )


def cogvideox_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    angles = torch.randn(3 * 4 * 3, 12, generator=g).repeat_interleave(2, -1)
    return {
        "hidden_states": torch.randn(2, 3, 4, 8, 6, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 48, generator=g),
        "timestep": torch.tensor([900, 300]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def mochi() -> nn.Module:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        num_layers=2,
        pooled_projection_dim=48,
        in_channels=4,
        text_embed_dim=64,
        time_embed_dim=32,
        max_sequence_length=7,
    )


def mochi_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 3, 8, 6, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_attention_mask": padded_mask(2, 7, 3).bool(),
    }


def ltx2() -> nn.Module:
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=32,
        cross_attention_dim=128,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=4,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=64,
        num_layers=2,
        caption_channels=48,
        rope_type="split",
    )


def ltx2_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    frames, height, width, audio = 2, 3, 4, 6
    mask = padded_mask(2, 7, 3)
    return {
        "hidden_states": torch.randn(2, frames * height * width, 16, generator=g),
        "audio_hidden_states": torch.randn(2, audio, 8, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 48, generator=g),
        "audio_encoder_hidden_states": torch.randn(2, 7, 48, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": audio,
    }


def both_streams(result: Any) -> torch.Tensor:
    return torch.cat([result.sample.flatten(1), result.audio_sample.flatten(1)], 1)


def sana() -> nn.Module:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=6,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=3,
        cross_attention_head_dim=32,
        cross_attention_dim=96,
        caption_channels=48,
        sample_size=8,
    )


def sana_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 8, 6, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 48, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_attention_mask": padded_mask(2, 7, 3),
    }
