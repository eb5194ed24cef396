"""The LTX-Video pipeline with random weights: real classes, nothing to download."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

# Architecture of the small model: LTX-Video's own classes, fewer and narrower layers.
SMALL_TRANSFORMER = {
    "num_layers": 4,
    "num_attention_heads": 8,
    "cross_attention_dim": 512,
    "caption_channels": 256,
}
SMALL_VAE = {
    "block_out_channels": (16, 32, 32, 32),
    "decoder_block_out_channels": (32, 64, 64, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}


def build_pipeline(full: bool, device: torch.device, dtype: torch.dtype) -> LTXPipeline:
    """LTX-Video with random weights: the published architecture if `full`, else the small one."""
    torch.manual_seed(0)
    with torch.device(device):  # two billion parameters are drawn faster on the GPU
        transformer = LTXVideoTransformer3DModel(**({} if full else SMALL_TRANSFORMER))
        vae = AutoencoderKLLTXVideo(**({} if full else SMALL_VAE))
    for model in (transformer, vae):
        torch.nn.Module.to(model.eval(), dtype)  # diffusers' own `to` warns at every cast
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        shift_terminal=0.1,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
    )
    return LTXPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=scheduler,
        text_encoder=None,
        tokenizer=None,
    )
