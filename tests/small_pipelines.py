"""Whole pipelines, small: without text encoders, since embeddings stand for a prompt."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
)


def _unet(**more):
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=48,
        attention_head_dim=8,
        **more,
    )


def _vae(channels=4, **more):
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=16,
        **more,
    )


def sd():
    torch.manual_seed(0)
    return StableDiffusionPipeline(
        vae=_vae(), text_encoder=None, tokenizer=None, unet=_unet(), scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl():
    torch.manual_seed(0)
    unet = _unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        use_linear_projection=True,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None,
        unet=unet, scheduler=DDIMScheduler(steps_offset=1, clip_sample=False), add_watermarker=False,
    )  # fmt: skip


def flux():
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    vae = _vae(
        4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.3
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=transformer,
    )  # fmt: skip


def wan():
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=256, ffn_dim=32, num_layers=2,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    return WanPipeline(
        tokenizer=None, text_encoder=None, transformer=transformer, vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip
