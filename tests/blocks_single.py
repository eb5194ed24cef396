"""Fused single-stream blocks, a row each: how a small one is built, and calls that it must take.

Every row is tested alike by test_blocks_single.py. A new family is a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import blocks_families
import blocks_vae
import torch
from blocks_row import Call, Draw, MakeCall, Row, tables
from torch import Tensor, nn


def bias(batch: int, length: int) -> Tensor:
    """An additive mask [batch, 1, length] that hides the last two tokens of the last sample."""
    mask = torch.zeros(batch, 1, length)
    mask[-1, :, -2:] = -10000.0
    return mask


def wan(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        return WanTransformerBlock(96, 160, 6, **settings)

    return make


def wan_call(
    draw: Draw, batch: int, tokens: int, text: int = 7, modulations: tuple[int, ...] = ()
) -> Call:
    return {
        "hidden_states": draw(batch, tokens, 96),
        "encoder_hidden_states": draw(batch, text, 96),
        "temb": draw(batch, *modulations, 6, 96),
        "rotary_emb": tables(draw, 1, tokens, 1, 16),
    }


def wan_bf16_tables(draw: Draw, batch: int, tokens: int) -> Call:
    """`model.to(dtype)`, unlike `from_pretrained`, casts the tables too."""
    call = wan_call(draw, batch, tokens)
    like = call["hidden_states"].dtype
    return call | {"rotary_emb": tuple(t.to(like) for t in call["rotary_emb"])}


def basic(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.attention import BasicTransformerBlock

        return BasicTransformerBlock(96, 6, 16, **settings)

    return make


def basic_call(draw: Draw, batch: int, tokens: int) -> Call:
    return {"hidden_states": draw(batch, tokens, 96), "encoder_hidden_states": draw(batch, 7, 48)}


def basic_masked(draw: Draw, batch: int, tokens: int) -> Call:
    masks = {
        "attention_mask": bias(batch, tokens),
        "encoder_attention_mask": bias(batch, 7),
    }
    call = basic_call(draw, batch, tokens)
    return call | {k: m.to(call["hidden_states"].dtype) for k, m in masks.items()}


def alone(draw: Draw, batch: int, tokens: int) -> Call:
    return {"hidden_states": draw(batch, tokens, 96)}


def timed(call: MakeCall) -> MakeCall:
    def modulated(draw: Draw, batch: int, tokens: int) -> Call:
        return call(draw, batch, tokens) | {"timestep": draw(batch, 6 * 96)}

    return modulated


def channels_last(call: MakeCall) -> MakeCall:
    return with_images(call, lambda x: x.to(memory_format=torch.channels_last))


def strided(call: MakeCall) -> MakeCall:
    return with_images(call, lambda x: x.mT.contiguous().mT)


def with_images(call: MakeCall, change: Callable[[Tensor], Tensor]) -> MakeCall:
    def changed(draw: Draw, batch: int, tokens: int) -> Call:
        given = call(draw, batch, tokens)
        images = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.ndim == 4}
        return given | {k: change(x) for k, x in images.items()}

    return changed


def resnet(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.resnet import ResnetBlock2D

        return ResnetBlock2D(**({"in_channels": 24, "temb_channels": 20, "groups": 4} | settings))

    return make


def image(draw: Draw, batch: int, tokens: int) -> Call:
    return {"input_tensor": draw(batch, 24, tokens, 3), "temb": draw(batch, 20)}


def image_alone(draw: Draw, batch: int, tokens: int) -> Call:
    return image(draw, batch, tokens) | {"temb": None}


def image_to_add(draw: Draw, batch: int, tokens: int) -> Call:
    """As a VAE's decoder is called with `latent_embeds`."""
    return image(draw, batch, tokens) | {"temb": draw(batch, 24, 1, 1)}


def transformer_2d(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.transformers.transformer_2d import Transformer2DModel

        usual = {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 24,
            "norm_num_groups": 4,
            "cross_attention_dim": 48,
        }
        return Transformer2DModel(**(usual | settings))

    return make


def picture(draw: Draw, batch: int, tokens: int) -> Call:
    text = draw(batch, 6, 48)
    return {
        "hidden_states": draw(batch, 24, tokens, 3),
        "encoder_hidden_states": text,
        "return_dict": False,
    }


def picture_alone(draw: Draw, batch: int, tokens: int) -> Call:
    return picture(draw, batch, tokens) | {"encoder_hidden_states": None}


def picture_masked(draw: Draw, batch: int, tokens: int) -> Call:
    """As a UNet masks its text: a bias, made before."""
    call = channels_last(picture)(draw, batch, tokens)
    return call | {"encoder_attention_mask": bias(batch, 6).to(call["hidden_states"].dtype)}


def picture_two_dimensional_mask(draw: Draw, batch: int, tokens: int) -> Call:
    mask = torch.ones(batch, 6)
    mask[:, 4:] = 0
    return picture(draw, batch, tokens) | {"encoder_attention_mask": mask}


PIXART = {
    "cross_attention_dim": 48,
    "norm_type": "ada_norm_single",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
}
WAN_FP32 = ("scale_shift_table", "norm2.weight", "norm2.bias")

ROWS: Mapping[str, Row] = {
    "wan": Row(
        wan(cross_attn_norm=True),
        {
            "per sample": wan_call,
            "per token": lambda d, b, t: wan_call(d, b, t, modulations=(t,)),
            "tables in the model's dtype": wan_bf16_tables,
        },
        WAN_FP32,
        ("norm1", "norm2", "attn1", "attn2.norm_k"),
    ),
    "wan all in one dtype": Row(wan(cross_attn_norm=True), {"per sample": wan_call}),
    "wan without a norm before the cross-attention": Row(wan(), {"per sample": wan_call}),
    "wan image to video": Row(
        wan(cross_attn_norm=True, added_kv_proj_dim=96),
        {"image and text": lambda d, b, t: wan_call(d, b, t, text=512 + 5)},
        WAN_FP32,
        ("norm1", "attn2.norm_added_k"),
        "attn2.add_k_proj",
    ),
    "unet": Row(
        basic(cross_attention_dim=48),
        {"text": basic_call, "masks": basic_masked},
        aside=("norm1", "norm2", "norm3", "attn2"),
        linear="attn2.to_k",
    ),
    "unet self-attention twice": Row(basic(double_self_attention=True), {"alone": alone}),
    "unet cross-attention alone": Row(
        basic(cross_attention_dim=48, only_cross_attention=True), {"text": basic_call}
    ),
    "transformer without cross-attention": Row(basic(), {"alone": alone}),
    "pixart": Row(
        basic(**PIXART),
        {"text": timed(basic_call), "masks": timed(basic_masked)},
        aside=("norm2", "attn1"),
    ),
    "resnet": Row(
        resnet(),
        {"image": image, "channels last": channels_last(image), "strided": strided(image)},
        aside=("norm1", "norm2"),
        linear="time_emb_proj",
        inside="norm1",
    ),
    "resnet with a shortcut": Row(
        resnet(out_channels=32, output_scale_factor=1.5, skip_time_act=True),
        {"image": image, "channels last": channels_last(image)},
        aside=("norm1",),
        linear="time_emb_proj",
        inside="norm1",
    ),
    "resnet of a VAE": Row(
        resnet(temb_channels=None, eps=1e-6),
        {"image": image_alone},
        aside=("norm1",),
        linear="",
        inside="norm1",
        handed_back={"an embedding to add": image_to_add},
    ),
    "transformer of a UNet": Row(
        transformer_2d(use_linear_projection=True, num_layers=2),
        {
            # first: PyTorch 2.13 crashes in a group norm's gradient in channels-last memory
            "image": picture,
            "channels last": channels_last(picture),
            "strided": strided(picture),
            "masks": picture_masked,
        },
        aside=("norm",),
        linear="proj_in",
        inside="norm",
        handed_back={"a mask of two dimensions": picture_two_dimensional_mask},
    ),
    "transformer of a UNet, projections by convolution": Row(
        transformer_2d(cross_attention_dim=None, activation_fn="gelu"),
        {"image": picture_alone, "channels last": channels_last(picture_alone)},
        aside=("norm",),
        linear="",
        inside="norm",
    ),
    **blocks_families.ROWS,
    **blocks_vae.ROWS,
}
