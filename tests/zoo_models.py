"""How the models of the zoo are made, what goes in and which tensor comes out; see zoo.py.

Makers take nothing and give a model; samples take the model and a generator and give the keyword
arguments of one forward, floating tensors in fp32; outputs take the result and give a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
VOCAB = 199


# Samples ---------------------------------------------------------------------------------------


def tokens(g: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=g)


def padded_mask(batch: int, length: int, padding: int) -> torch.Tensor:
    """[batch, length] of ones; the last row ends in `padding` zeros."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - padding :] = 0
    return mask


def text(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": tokens(g, 2, 12)}


def causal(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": tokens(g, 2, 12), "use_cache": False}


def masked_text(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": tokens(g, 2, 12), "attention_mask": padded_mask(2, 12, 3)}


def seq2seq(model: nn.Module, g: torch.Generator) -> Inputs:
    return masked_text(model, g) | {"decoder_input_ids": tokens(g, 2, 7), "use_cache": False}


def logits(result: Any) -> torch.Tensor:
    return result.logits


def hidden(result: Any) -> torch.Tensor:
    return result.last_hidden_state


def sample(result: Any) -> torch.Tensor:
    return result.sample


# transformers ----------------------------------------------------------------------------------

# Three query heads per key-value head and a width that is no power of two: the shapes that break
# kernels are not the round ones.
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def decoder(family: str, config: str | None = None, **settings: Any) -> Callable[[], nn.Module]:
    """`{family}ForCausalLM` with `DECODER` and `settings`; `config` names another config class."""

    def make() -> nn.Module:
        import transformers

        config_class = getattr(transformers, config or f"{family}Config")
        return getattr(transformers, f"{family}ForCausalLM")(config_class(**(DECODER | settings)))

    return make


#: The state-space half of Bamba and Falcon-H1.
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

#: One layer of linear attention, one of full attention.
HYBRID = ["linear_attention", "full_attention"]

QWEN3_NEXT = {
    "head_dim": 24,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
    "layer_types": HYBRID,
}

KIMI_LINEAR = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 6,
    "layer_types": HYBRID,
    "mlp_layer_types": ["dense", "dense"],
}


def falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def t5(class_name: str, projection: str) -> Callable[[], nn.Module]:
    """T5 1.0 has `relu`, 1.1 (and the text encoders of LTX, Flux, SD3) `gated-gelu`."""

    def make() -> nn.Module:
        import transformers

        config = transformers.T5Config(
            vocab_size=VOCAB,
            d_model=96,
            d_kv=16,
            d_ff=160,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=6,
            feed_forward_proj=projection,
            tie_word_embeddings=projection == "relu",
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
        return getattr(transformers, class_name)(config)

    return make


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            max_position_embeddings=64,
        )
    )


def clip_text() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            max_position_embeddings=64,
            hidden_act="quick_gelu",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            image_size=32,
            patch_size=8,
        )
    )


def vit_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g)}


# diffusers -------------------------------------------------------------------------------------


def ltx() -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=32,
        cross_attention_dim=128,
        num_layers=2,
        caption_channels=64,
    )


def ltx_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    frames, height, width = 2, 3, 4
    return {
        "hidden_states": torch.randn(2, frames * height * width, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 8, 64, generator=g),
        "encoder_attention_mask": padded_mask(2, 8, 3),
        "timestep": torch.tensor([900, 300]),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=48,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def flux_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    rows, columns, text = 4, 6, 7
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return {
        "hidden_states": torch.randn(2, rows * columns, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 64, generator=g),
        "pooled_projections": torch.randn(2, 48, generator=g),
        # Flux multiplies both by 1000 in the dtype of the model: these products are exact in bf16
        "timestep": torch.tensor([0.25, 0.125]),
        "guidance": torch.tensor([4.0, 2.0]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        timestep_guidance_channels=32,
        axes_dims_rope=(8, 8, 8, 8),
    )


def flux2_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    rows, columns, text = 4, 6, 7
    image_ids, text_ids = torch.zeros(rows, columns, 4), torch.zeros(text, 4)
    image_ids[..., 1] = torch.arange(rows)[:, None]
    image_ids[..., 2] = torch.arange(columns)[None, :]
    text_ids[:, 3] = torch.arange(text)
    return {
        "hidden_states": torch.randn(2, rows * columns, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 64, generator=g),
        "timestep": torch.tensor([0.25, 0.125]),
        "guidance": torch.tensor([4.0, 2.0]),
        "img_ids": image_ids.reshape(-1, 4),
        "txt_ids": text_ids,
    }


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
    )


def qwen_image_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4 * 6, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "encoder_hidden_states_mask": padded_mask(2, 7, 3),
        "timestep": torch.tensor([0.25, 0.125]),
        "img_shapes": [[(1, 4, 6)]] * 2,
    }


def hunyuan_video() -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=64,
        pooled_projection_dim=48,
        rope_axes_dim=(8, 12, 12),
    )


def hunyuan_video_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 3, 8, 6, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "encoder_attention_mask": padded_mask(2, 7, 3),
        "pooled_projections": torch.randn(2, 48, generator=g),
        "guidance": torch.tensor([4000.0, 2000.0]),
    }


def unet() -> nn.Module:
    """Stable Diffusion 1.5 in small: its block types, GEGLU feed-forwards, 8 attention heads."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=96,
        attention_head_dim=8,
    )


def unet_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_hidden_states": torch.randn(2, 7, 96, generator=g),
    }


def sd3() -> nn.Module:
    """Stable Diffusion 3.5: RMS-normed queries and keys, one block with dual attention."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=128,
        pooled_projection_dim=48,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def sd3_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "pooled_projections": torch.randn(2, 48, generator=g),
        "timestep": torch.tensor([900, 300]),
    }


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=32,
        ffn_dim=256,
        num_layers=2,
        rope_max_seq_len=32,
    )


def wan_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 2, 6, 8, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "timestep": torch.tensor([900, 300]),
    }


def ltx_vae() -> nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        latent_channels=16,
        block_out_channels=(16, 32, 32, 32),
        decoder_block_out_channels=(16, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def ltx_pipeline() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    pipe = LTXPipeline(
        transformer=ltx(),
        vae=ltx_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        tokenizer=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ltx_pipeline_sample(pipe: Any, g: torch.Generator) -> Inputs:
    """9 frames of 64 x 64 with guidance; latents, since a generator would be consumed."""
    return {
        "prompt_embeds": torch.randn(1, 8, 64, generator=g),
        "prompt_attention_mask": padded_mask(1, 8, 3),
        "negative_prompt_embeds": torch.randn(1, 8, 64, generator=g),
        "negative_prompt_attention_mask": padded_mask(1, 8, 5),
        "latents": torch.randn(1, 2 * 2 * 2, 16, generator=g),
        "num_frames": 9,
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "output_type": "pt",
    }


def frames(result: Any) -> torch.Tensor:
    return result.frames
