"""Rows of blocks_single.py for the parts of LTX-Video's VAE, tested alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from blocks_row import Call, Draw, MakeCall, Row
from torch import nn


def resnet(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoResnetBlock3d

        return LTXVideoResnetBlock3d(**({"in_channels": 24} | settings))

    return make


def convolution(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d

        return LTXVideoCausalConv3d(**({"in_channels": 24, "out_channels": 16} | settings))

    return make


def upsampler(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoUpsampler3d

        return LTXVideoUpsampler3d(**({"in_channels": 24, "stride": (2, 2, 2)} | settings))

    return make


def moved(call: MakeCall) -> MakeCall:
    """The same call of a module whose argument has another name."""
    return lambda *args: {"hidden_states": call(*args)["inputs"]}


def video(draw: Draw, batch: int, tokens: int) -> Call:
    return {"inputs": draw(batch, 24, 3, tokens, 2)}


def frame(draw: Draw, batch: int, tokens: int) -> Call:
    return {"inputs": draw(batch, 24, 1, tokens, 2)}


def channels_last(draw: Draw, batch: int, tokens: int) -> Call:
    x = video(draw, batch, tokens)["inputs"]
    return {"inputs": x.to(memory_format=torch.channels_last_3d)}


def strided(draw: Draw, batch: int, tokens: int) -> Call:
    return {"inputs": draw(batch, 24, 3, tokens, 4)[..., ::2]}


def timed(draw: Draw, batch: int, tokens: int) -> Call:
    return video(draw, batch, tokens) | {"temb": draw(batch, 4 * 24, 1, 1, 1)}


def timed_frame(draw: Draw, batch: int, tokens: int) -> Call:
    return frame(draw, batch, tokens) | {"temb": draw(batch, 4 * 24, 1, 1, 1)}


def timed_channels_last(draw: Draw, batch: int, tokens: int) -> Call:
    return channels_last(draw, batch, tokens) | {
        "temb": draw(1, 4 * 24, 1, 1, 1).expand(batch, *[-1] * 4)
    }


def timed_alike(draw: Draw, batch: int, tokens: int) -> Call:
    return video(draw, batch, tokens) | {"temb": draw(1, 4 * 24, 1, 1, 1)}


def timed_by_pixel(draw: Draw, batch: int, tokens: int) -> Call:
    return video(draw, batch, tokens) | {"temb": draw(batch, 4 * 24, 3, tokens, 2)}


CALLS: dict[str, MakeCall] = {
    "video": video,
    "one frame": frame,
    "channels last": channels_last,
    "strided": strided,
}
TIMED: dict[str, MakeCall] = {
    "video": timed,
    "one frame": timed_frame,
    "channels last, one time": timed_channels_last,
}
#: Of convolutions by themselves.
OUTSIDE: dict[str, Any] = {"aside": ("conv",), "linear": "", "inside": "conv"}
SHARED: dict[str, Any] = {"aside": ("norm1", "conv2"), "linear": "", "inside": "norm1"}

ROWS: dict[str, Row] = {
    "ltx vae": Row(resnet(is_causal=False), CALLS, **SHARED),
    "ltx vae, causal": Row(resnet(is_causal=True), CALLS, **SHARED),
    "ltx vae with a shortcut": Row(resnet(out_channels=32), CALLS, **SHARED),
    "ltx vae with a shortcut, not causal": Row(
        resnet(out_channels=16, is_causal=False), CALLS, **SHARED
    ),
    "ltx vae with timesteps": Row(
        resnet(is_causal=False, timestep_conditioning=True),
        TIMED,
        handed_back={"by pixel": timed_by_pixel, "one for all samples": timed_alike},
        **SHARED,
    ),
    "ltx vae with timesteps, causal": Row(
        resnet(is_causal=True, timestep_conditioning=True), TIMED, **SHARED
    ),
    "ltx vae convolution": Row(
        convolution(),
        {"channels last": moved(channels_last)},
        handed_back={"video": moved(video), "strided": moved(strided)},
        **OUTSIDE,
    ),
    "ltx vae convolution, not causal, with a stride": Row(
        convolution(is_causal=False, stride=(1, 2, 2)),
        {"channels last": moved(channels_last)},
        **OUTSIDE,
    ),
    "ltx vae upsampler": Row(
        upsampler(), {name: moved(call) for name, call in CALLS.items()}, **OUTSIDE
    ),
    "ltx vae upsampler, not causal, fewer channels": Row(
        upsampler(is_causal=False, upscale_factor=2, stride=(1, 2, 2)),
        {"channels last": moved(channels_last), "video": moved(video)},
        **OUTSIDE,
    ),
}
