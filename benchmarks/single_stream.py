"""Real configurations of UNets and single-stream diffusion transformers, random weights.

Each function gives (model, step), as in models.py. Weights are drawn on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE, DTYPE = "cuda", torch.bfloat16
Case = tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def case(make: Callable[[], torch.nn.Module], **inputs: Any) -> Case:
    with torch.device(DEVICE):
        model = make().to(DTYPE).eval()
    return model, lambda m: m(**inputs, return_dict=False)


def wan(frames: int = 49) -> Case:
    """Wan 2.1 T2V 1.3B, 480 x 832, batch 1; in fp32 what `from_pretrained` keeps in fp32."""
    from diffusers import WanTransformer3DModel

    model, step = case(
        lambda: WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30),
        hidden_states=randn(1, 16, (frames - 1) // 4 + 1, 60, 104),
        encoder_hidden_states=randn(1, 512, 4096),
        timestep=torch.tensor([500], device=DEVICE),
    )
    keep = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if keep & set(name.split(".")):
            tensor.data = tensor.data.float()
    return model, step


def sdxl(channels_last: bool = False) -> Case:
    """Stable Diffusion XL's UNet, 1024 x 1024, batch 2 (classifier-free guidance)."""
    from diffusers import UNet2DConditionModel

    model, step = case(
        lambda: UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        sample=randn(2, 4, 128, 128),
        timestep=torch.tensor(500, device=DEVICE),
        encoder_hidden_states=randn(2, 77, 2048),
        added_cond_kwargs={"text_embeds": randn(2, 1280), "time_ids": randn(2, 6)},
    )
    return (model.to(memory_format=torch.channels_last) if channels_last else model), step


def sd15() -> Case:
    """Stable Diffusion 1.5's UNet, 512 x 512, batch 2."""
    from diffusers import UNet2DConditionModel

    return case(
        lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
        sample=randn(2, 4, 64, 64),
        timestep=torch.tensor(500, device=DEVICE),
        encoder_hidden_states=randn(2, 77, 768),
    )


def pixart() -> Case:
    """PixArt-Sigma XL, 1024 x 1024, batch 2, 300 text tokens with a mask."""
    from diffusers import PixArtTransformer2DModel

    return case(
        lambda: PixArtTransformer2DModel(
            sample_size=128,
            interpolation_scale=2,
            caption_channels=4096,
            use_additional_conditions=False,
        ),
        hidden_states=randn(2, 4, 128, 128),
        encoder_hidden_states=randn(2, 300, 4096),
        timestep=torch.tensor([500, 500], device=DEVICE),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        encoder_attention_mask=torch.ones(2, 300, device=DEVICE, dtype=DTYPE),
    )


CASES: dict[str, Callable[[], Case]] = {
    "wan-2.1-1.3b 49 frames": wan,
    "sdxl-unet": sdxl,
    "sdxl-unet channels-last": lambda: sdxl(channels_last=True),
    "sd-1.5-unet": sd15,
    "pixart-sigma": pixart,
}
