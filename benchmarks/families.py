"""Real configurations of further diffusion transformers, random weights.

Each function gives (model, step), as in models.py; weights are drawn on the GPU in bf16: LTX-2
takes 38 GB, Mochi 20 GB. Sizes are those of the released models' configurations (their
`transformer/config.json`), given here where they are not the class's defaults. Fewer pixels and
layers are for trying a case out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint import DEVICE, DTYPE, Case, case, randn


def z_image(pixels: int = 1024, layers: int = 30) -> Case:
    """Z-Image(-Turbo) (6B), 1024 x 1024, batch 1: 4096 image and 128 text tokens, no padding."""
    from diffusers import ZImageTransformer2DModel

    inputs = (
        [randn(16, 1, pixels // 8, pixels // 8)],
        torch.full((1,), 0.5, device=DEVICE, dtype=DTYPE),
        [randn(128, 2560)],
    )
    model, _ = case(lambda: ZImageTransformer2DModel(n_layers=layers, axes_lens=[1536, 512, 512]))
    # it gives a list of images
    return model, lambda m: (torch.stack(m(*inputs, return_dict=False)[0]),)


def lumina2(pixels: int = 1024, layers: int = 26) -> Case:
    """Lumina-Image 2.0 (2.6B), 1024 x 1024: 4096 image and 256 text tokens, 56 of them padding.

    Batch 1: its pipeline runs the two halves of the guidance one by one.
    """
    from diffusers import Lumina2Transformer2DModel

    mask = torch.ones(1, 256, device=DEVICE, dtype=torch.int64)
    mask[:, 200:] = 0
    return case(
        lambda: Lumina2Transformer2DModel(cap_feat_dim=2304, num_layers=layers),
        hidden_states=randn(1, 16, pixels // 8, pixels // 8),
        timestep=torch.full((1,), 0.5, device=DEVICE, dtype=DTYPE),
        encoder_hidden_states=randn(1, 256, 2304),
        encoder_attention_mask=mask,
    )


def cogvideox(frames: int = 49, layers: int = 42, height: int = 480, width: int = 720) -> Case:
    """CogVideoX-5B, 49 frames of 480 x 720, batch 2 (classifier-free guidance): 17550 video and
    226 text tokens."""
    from diffusers import CogVideoXTransformer3DModel

    latent = ((frames - 1) // 4 + 1, height // 8, width // 8)
    tokens = latent[0] * (latent[1] // 2) * (latent[2] // 2)
    angles = torch.randn(tokens, 32, device=DEVICE).repeat_interleave(2, -1)
    return case(
        lambda: CogVideoXTransformer3DModel(
            num_attention_heads=48, num_layers=layers, use_rotary_positional_embeddings=True
        ),
        hidden_states=randn(2, latent[0], 16, *latent[1:]),
        encoder_hidden_states=randn(2, 226, 4096),
        timestep=torch.tensor([500, 500], device=DEVICE),
        image_rotary_emb=(angles.cos(), angles.sin()),
    )


def mochi(frames: int = 31, layers: int = 48, height: int = 480, width: int = 848) -> Case:
    """Mochi 1 preview (10B), 31 frames of 480 x 848, batch 2 (classifier-free guidance): 9540 video
    tokens and 256 text tokens, of which 60 and 8 are no padding."""
    from diffusers import MochiTransformer3DModel

    mask = torch.zeros(2, 256, device=DEVICE, dtype=torch.bool)
    mask[0, :8] = mask[1, :60] = True
    return case(
        lambda: MochiTransformer3DModel(num_layers=layers),
        hidden_states=randn(2, 12, (frames - 1) // 6 + 1, height // 8, width // 8),
        encoder_hidden_states=randn(2, 256, 4096),
        timestep=torch.tensor([500, 500], device=DEVICE),
        encoder_attention_mask=mask,
    )


def ltx2(frames: int = 121, layers: int = 48, height: int = 512, width: int = 768) -> Case:
    """LTX-2 (19B), 121 frames of 512 x 768 with 5 s of audio, batch 2 (classifier-free guidance):
    6144 video, 126 audio and 1024 text tokens."""
    from diffusers import LTX2VideoTransformer3DModel

    latent = ((frames - 1) // 8 + 1, height // 32, width // 32)
    audio = round(frames / 24 * 25)
    mask = torch.ones(2, 1024, device=DEVICE, dtype=DTYPE)
    return case(
        lambda: LTX2VideoTransformer3DModel(num_layers=layers, rope_type="split"),
        hidden_states=randn(2, latent[0] * latent[1] * latent[2], 128),
        audio_hidden_states=randn(2, audio, 128),
        encoder_hidden_states=randn(2, 1024, 3840),
        audio_encoder_hidden_states=randn(2, 1024, 3840),
        timestep=torch.tensor([500.0, 500.0], device=DEVICE, dtype=DTYPE),
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=latent[0],
        height=latent[1],
        width=latent[2],
        audio_num_frames=audio,
    )


def sana(pixels: int = 1024, layers: int = 20) -> Case:
    """Sana 1.6B, 1024 x 1024, batch 2 (classifier-free guidance): 1024 image tokens, 300 text
    tokens with a mask."""
    from diffusers import SanaTransformer2DModel

    mask = torch.ones(2, 300, device=DEVICE, dtype=torch.int64)
    mask[:, 100:] = 0
    return case(
        lambda: SanaTransformer2DModel(num_layers=layers),
        hidden_states=randn(2, 32, pixels // 32, pixels // 32),
        encoder_hidden_states=randn(2, 300, 2304),
        timestep=torch.tensor([500, 500], device=DEVICE),
        encoder_attention_mask=mask,
    )


def _prompt(tokens: int, kept: int) -> torch.Tensor:
    mask = torch.zeros(1, tokens, device=DEVICE, dtype=torch.int64)
    mask[:, :kept] = 1
    return mask


def hunyuan_video15(
    frames: int = 25, layers: int = 54, height: int = 480, width: int = 848
) -> Case:
    """HunyuanVideo 1.5 (8B), 25 frames of 480 x 848, batch 1, text to video: 11130 video tokens and
    1985 of the conditions, of which 80 are no padding. Eager makes a mask of all by all tokens."""
    from diffusers import HunyuanVideo15Transformer3DModel

    return case(
        lambda: HunyuanVideo15Transformer3DModel(num_layers=layers, task_type="t2v"),
        hidden_states=randn(1, 65, (frames - 1) // 4 + 1, height // 16, width // 16),
        timestep=torch.full((1,), 500.0, device=DEVICE, dtype=DTYPE),
        encoder_hidden_states=randn(1, 1000, 3584),
        encoder_attention_mask=_prompt(1000, 80),
        encoder_hidden_states_2=randn(1, 256, 1472),
        encoder_attention_mask_2=_prompt(256, 0),
        image_embeds=torch.zeros(1, 729, 1152, device=DEVICE, dtype=DTYPE),
    )


def hunyuan_image(pixels: int = 2048, layers: tuple[int, int] = (20, 40)) -> Case:
    """HunyuanImage 2.1 (17B), 2048 x 2048, batch 1: 4096 image tokens, 1128 of the text, of which
    120 are no padding."""
    from diffusers import HunyuanImageTransformer2DModel

    return case(
        lambda: HunyuanImageTransformer2DModel(
            num_layers=layers[0], num_single_layers=layers[1], text_embed_2_dim=1472
        ),
        hidden_states=randn(1, 64, pixels // 32, pixels // 32),
        timestep=torch.full((1,), 500.0, device=DEVICE, dtype=DTYPE),
        encoder_hidden_states=randn(1, 1000, 3584),
        encoder_attention_mask=_prompt(1000, 100),
        encoder_hidden_states_2=randn(1, 128, 1472),
        encoder_attention_mask_2=_prompt(128, 20),
    )


CASES: dict[str, Callable[[], Case]] = {
    "z-image 1024px": z_image,
    "lumina-2 1024px": lumina2,
    "cogvideox-5b 49 frames": cogvideox,
    "mochi-1 31 frames": mochi,
    "ltx-2 121 frames": ltx2,
    "sana-1.6b 1024px": sana,
    "hunyuan-video-1.5 25 frames": hunyuan_video15,
    "hunyuan-image-2.1 2048px": hunyuan_image,
}
