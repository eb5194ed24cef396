"""Real configurations of the joint-attention diffusion transformers, random weights.

Each function gives (model, step), as in models.py. Weights are drawn on the GPU in bf16: FLUX.1-dev
takes 24 GB, Qwen-Image 41 GB, FLUX.2-dev 64 GB, which leaves no room for an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEVICE, DTYPE = "cuda", torch.bfloat16
Case = tuple[torch.nn.Module, Callable[[torch.nn.Module], Any]]


@contextmanager
def _drawn_in_bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.set_default_dtype(before)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def case(make: Callable[[], torch.nn.Module], **inputs: Any) -> Case:
    with _drawn_in_bf16():
        model = make().eval().requires_grad_(False)
    return model, lambda m: m(**inputs, return_dict=False)


def _grid_ids(rows: int, columns: int, axes: int) -> torch.Tensor:
    """Position ids of an image's tokens, [rows * columns, axes]: row and column on axes 1 and 2."""
    ids = torch.zeros(rows, columns, axes, device=DEVICE)
    ids[..., 1] = torch.arange(rows, device=DEVICE)[:, None]
    ids[..., 2] = torch.arange(columns, device=DEVICE)[None, :]
    return ids.reshape(-1, axes)


def flux(batch: int = 1, layers: tuple[int, int] = (19, 38)) -> Case:
    """FLUX.1-dev (12B), 1024 x 1024: 4096 image and 512 text tokens."""
    from diffusers import FluxTransformer2DModel

    return case(
        lambda: FluxTransformer2DModel(
            num_layers=layers[0], num_single_layers=layers[1], guidance_embeds=True
        ),
        hidden_states=randn(batch, 4096, 64),
        encoder_hidden_states=randn(batch, 512, 4096),
        pooled_projections=randn(batch, 768),
        timestep=torch.full((batch,), 0.5, device=DEVICE, dtype=DTYPE),
        guidance=torch.full((batch,), 3.5, device=DEVICE),
        img_ids=_grid_ids(64, 64, 3),
        txt_ids=torch.zeros(512, 3, device=DEVICE),
    )


def flux2(batch: int = 1, layers: tuple[int, int] = (8, 48)) -> Case:
    """FLUX.2-dev (32B, all 8 + 48 blocks), 1024 x 1024: 4096 image and 512 text tokens."""
    from diffusers import Flux2Transformer2DModel

    text = torch.zeros(512, 4, device=DEVICE)
    text[:, 3] = torch.arange(512, device=DEVICE)
    return case(
        lambda: Flux2Transformer2DModel(num_layers=layers[0], num_single_layers=layers[1]),
        hidden_states=randn(batch, 4096, 128),
        encoder_hidden_states=randn(batch, 512, 15360),
        timestep=torch.full((batch,), 0.5, device=DEVICE, dtype=DTYPE),
        guidance=torch.full((batch,), 4.0, device=DEVICE),
        img_ids=_grid_ids(64, 64, 4),
        txt_ids=text,
    )


def sd35_medium(batch: int = 2) -> Case:
    """Stable Diffusion 3.5 medium (2.5B), 1024 x 1024, batch 2 (classifier-free guidance)."""
    from diffusers import SD3Transformer2DModel

    return case(
        lambda: SD3Transformer2DModel(
            sample_size=128,
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
        hidden_states=randn(batch, 16, 128, 128),
        encoder_hidden_states=randn(batch, 333, 4096),
        pooled_projections=randn(batch, 2048),
        timestep=torch.full((batch,), 500.0, device=DEVICE),
    )


def qwen_image(batch: int = 1, layers: int = 60) -> Case:
    """Qwen-Image (20B, all 60 blocks), 1024 x 1024: 4096 image and 256 text tokens."""
    from diffusers import QwenImageTransformer2DModel

    return case(
        lambda: QwenImageTransformer2DModel(num_layers=layers),
        hidden_states=randn(batch, 4096, 64),
        encoder_hidden_states=randn(batch, 256, 3584),
        timestep=torch.full((batch,), 0.5, device=DEVICE, dtype=DTYPE),
        img_shapes=[[(1, 64, 64)]] * batch,
    )


def hunyuan_video(frames: int = 33, layers: tuple[int, int] = (20, 40)) -> Case:
    """HunyuanVideo (13B), 33 frames of 544 x 960: 18360 image tokens, 256 text tokens with 200
    of padding."""
    from diffusers import HunyuanVideoTransformer3DModel

    mask = torch.zeros(1, 256, device=DEVICE, dtype=torch.int64)
    mask[:, :56] = 1
    return case(
        lambda: HunyuanVideoTransformer3DModel(num_layers=layers[0], num_single_layers=layers[1]),
        hidden_states=randn(1, 16, (frames - 1) // 4 + 1, 544 // 8, 960 // 8),
        timestep=torch.tensor([500], device=DEVICE),
        encoder_hidden_states=randn(1, 256, 4096),
        encoder_attention_mask=mask,
        pooled_projections=randn(1, 768),
        guidance=torch.tensor([6000.0], device=DEVICE, dtype=DTYPE),
    )


CASES: dict[str, Callable[[], Case]] = {
    "flux.1-dev 1024px": flux,
    "flux.2-dev 1024px": flux2,
    "sd3.5-medium 1024px": sd35_medium,
    "qwen-image 1024px": qwen_image,
    "hunyuan-video 33 frames": hunyuan_video,
}
