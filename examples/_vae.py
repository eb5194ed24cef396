"""Decoding a video with LTX-Video's VAE, before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _common import now

import hfpatch

TURNS = 7
#: LTX-Video's own classes, of a size that a CPU decodes in about a third of a second.
SIZE = {
    "block_out_channels": (32, 64, 64, 64),
    "decoder_block_out_channels": (64, 128, 128, 128),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}


@dataclass
class Decoded:
    """Seconds of each decoding, in turns, and how far the two videos are apart.

    Attributes:
        difference: the largest of a pixel's value, which is from -1 to 1.
    """

    before: list[float]
    after: list[float]
    difference: float
    report: hfpatch.Report


def decode(
    device: torch.device, dtype: torch.dtype, turns: int = TURNS, frames: int = 9
) -> Decoded:
    """Decode random latents of `frames` frames of 256 x 384 pixels, with random weights."""
    from diffusers import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(**SIZE).eval()
    torch.nn.Module.to(vae, device, dtype)  # diffusers' own `to` warns at every cast
    latents = torch.randn(1, 128, (frames + 7) // 8, 8, 12).to(device, dtype)

    def once() -> tuple[float, torch.Tensor]:
        started = now(device)
        with torch.no_grad():
            video = vae.decode(latents).sample
        return now(device) - started, video.float()

    def patch() -> hfpatch.Report:
        return hfpatch.apply(vae)

    def unpatch() -> int:
        return hfpatch.restore(vae)

    times: dict[Callable[[], object], list[float]] = {unpatch: [], patch: []}
    videos = {}
    for turn in range(turns):
        for change, timed in times.items():
            change()
            if turn == 0:
                videos[change] = once()[1]  # to warm up
            timed.append(once()[0])
    difference = (videos[unpatch] - videos[patch]).abs().max().item()
    return Decoded(times[unpatch], times[patch], difference, patch())
