"""LTX-Video's VAE as a whole, and which of its residual blocks are left to their parts.

The numbers of one block on every call are in test_blocks_single.py, with the rows of blocks_vae.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from blocks_vae import resnet
from diffusers import AutoencoderKLLTXVideo
from diffusers.models.normalization import RMSNorm
from expect import relative_error
from support import nearness
from support.nearness import Draw
from torch import Tensor, nn

import hfpatch
from hfpatch.blocks import ltx_vae

NAME = "LTXVideoResnetBlock3d"


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def vae(decoder: tuple[int, ...] = (32, 32, 32, 32), **settings: Any) -> Any:
    """`decoder`: channels of its stages. With noise or timesteps diffusers has them all alike."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(16, 32, 32, 32),
            decoder_block_out_channels=decoder,
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            **settings,
        )
        return zoo.randomize_(model).eval().requires_grad_(False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(
    model: Any, seed: int = 0, layout: torch.memory_format = torch.contiguous_format
) -> tuple[Tensor, Tensor]:
    """Of an encoding and a decoding of two videos."""
    dtype = model.dtype
    time = torch.tensor([0.05, 0.1]).to(dtype) if model.config.timestep_conditioning else None
    video, latents = draw(2, 3, 9, 32, 32, seed=seed), draw(2, 8, 2, 2, 3, seed=seed)
    encoded = model.encode(video.to(dtype, memory_format=layout)).latent_dist.mode()
    torch.manual_seed(seed)  # where the decoder draws noise: in fp64 the same numbers
    with mock.patch.object(torch, "randn", drawn_in_fp32):
        return encoded, model.decode(latents.to(dtype, memory_format=layout), time).sample


def drawn_in_fp32(*size: Any, dtype: torch.dtype | None = None, **settings: Any) -> Tensor:
    return RANDN(*size, dtype=torch.float32, **settings).to(dtype or torch.float32)


RANDN = torch.randn
#: Inputs that decide about one VAE; each of its two videos is a draw.
INPUTS = 4
Errors = tuple[tuple[Tensor, ...], list[list[float]]]


def by_video(found: Tensor, truth: Tensor) -> list[float]:
    return [relative_error(*pair) for pair in zip(found, truth, strict=True)]


def errors_of(model: Any) -> list[Errors]:
    """For each of several inputs the results in fp64, and how far off fp32 is: in the worse of two
    layouts, in each of which a convolution adds up in another order, by the number of threads."""
    last = torch.channels_last_3d
    wide = zoo.norms_in_fp64_(copy.deepcopy(model).double())
    other = copy.deepcopy(model).to(memory_format=last)
    found: list[Errors] = []
    for seed in range(INPUTS):
        truths = results(wide, seed)
        eager = [results(model, seed), results(other, seed, last)]
        off = [[by_video(theirs[i], truth) for theirs in eager] for i, truth in enumerate(truths)]
        found.append((truths, [list(map(max, *layouts)) for layouts in off]))
    return found


def assert_as_near(model: Any, limits: list[Errors]) -> None:
    """Encodings and decodings, each for itself."""
    draws: list[list[Draw]] = [[], []]
    for seed, (truths, errors) in enumerate(limits):
        for i, got in enumerate(results(model, seed)):
            draws[i] += map(Draw, by_video(got, truths[i]), errors[i])
    for what, some in zip(("encoding", "decoding"), draws, strict=True):
        nearness.assert_as_near(some, torch.float32, what)


@pytest.mark.parametrize("timesteps", [False, True], ids=["plain", "timesteps"])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_encodes_and_decodes_as_before(causal: bool, timesteps: bool) -> None:
    channels = (32, 32, 32, 32) if timesteps else (16, 32, 32, 32)
    model = vae(channels, timestep_conditioning=timesteps, decoder_causal=causal)
    expected, limits = results(model), errors_of(model)
    report = hfpatch.apply(model)
    for name in (NAME, "LTXVideoUpsampler3d"):
        parts = {path for path, m in model.named_modules() if type(m).__name__ == name}
        assert parts == {s.path for s in report.swaps if s.class_name == name} != set()
    outer = {"encoder.conv_in", "encoder.conv_out", "decoder.conv_in", "decoder.conv_out"}
    assert outer <= {s.path for s in report.swaps if s.class_name == "LTXVideoCausalConv3d"}
    assert_as_near(model, limits)
    hfpatch.restore(model)
    assert all(map(torch.equal, results(model), expected))  # the original's code, once more


def test_a_decoder_with_noise_is_left_to_its_norms() -> None:
    """Its weightless norms are called with the channels apart, which the originals do faster."""
    model = vae(decoder_inject_noise=(True,) * 5)
    limits = errors_of(model)
    report = hfpatch.apply(model)
    skipped = {s.path: s.reason for s in report.skips if s.class_name == NAME}
    assert skipped
    assert all(p.startswith("decoder.") and r == "it injects noise" for p, r in skipped.items())
    assert {f"{path}.norm1" for path in skipped} <= {s.path for s in report.swaps}
    assert_as_near(model, limits)


class Lookalike(nn.Module):
    pass


def with_weights() -> nn.Module:
    return RMSNorm(24, eps=1e-8)


@pytest.mark.parametrize(
    ("settings", "parts", "reason"),
    [
        ({"inject_noise": True}, {}, "it injects noise"),
        ({"non_linearity": "gelu"}, {}, "its activation is `GELU`"),
        ({"dropout": 0.1}, {}, "it has a dropout"),
        ({"elementwise_affine": True}, {}, "its norms are no `RMSNorm`s without weights"),
        ({}, {"norm1": with_weights}, "its norms are no `RMSNorm`s without weights"),
        (
            {},
            {"norm2": lambda: RMSNorm(24, eps=1e-5, elementwise_affine=False)},
            "its norms differ in eps",
        ),
        ({}, {"conv2": Lookalike}, "its convolutions are no `LTXVideoCausalConv3d`s of stride 1"),
    ],
)
def test_odd_blocks_are_left_to_their_parts(
    settings: dict[str, Any], parts: dict[str, Callable[[], nn.Module]], reason: str
) -> None:
    model = nn.Sequential(resnet(**settings)())
    for name, make in parts.items():
        setattr(model[0], name, make())
    report = hfpatch.apply(model)
    assert [(s.kind, s.reason) for s in report.skips if s.path == "0"] == [("unsupported", reason)]


def test_training_is_left_to_the_norms() -> None:
    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        model(draw(2, 24, 3, 4, 5)).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with torch.no_grad():
        model = nn.Sequential(zoo.randomize_(resnet(out_channels=32)()))
    expected = gradients(model)
    report = hfpatch.apply(model, mode="training")
    assert [(s.path, s.reason) for s in report.skips if s.path == "0"] == [
        ("0", "the fused block has no backward")
    ]
    assert {s.path for s in report.swaps} >= {"0.norm1", "0.norm2"}
    found = gradients(model)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=name)


def test_a_table_that_is_taken_away_is_the_originals() -> None:
    """Which kernel a block needs was decided by whether it has one."""
    model = nn.Sequential(resnet(timestep_conditioning=True)()).requires_grad_(False)
    hfpatch.apply(model)
    model[0].scale_shift_table = None
    plain = copy.deepcopy(model)
    hfpatch.restore(plain)
    x = draw(2, 24, 3, 4, 5)
    assert torch.equal(model(x), plain(x))


def test_a_small_video_on_a_cpu_keeps_its_layout() -> None:
    """PyTorch convolves one in planes: fused, it would be put into rows and back for each. Larger
    ones, and several, are convolved in rows."""
    block = zoo.randomize_(resnet(in_channels=32)()).eval().requires_grad_(False)
    original = copy.deepcopy(block)
    hfpatch.apply(block)
    with mock.patch.object(ltx_vae, "_with_room", side_effect=ltx_vae._with_room) as fused:
        small = draw(1, 32, 2, 4, 6)
        assert torch.equal(block(small), original(small)) and not fused.called
        several = draw(2, 32, 2, 4, 6)
        assert relative_error(block(several), original(several)) < 1e-5 and fused.call_count == 2
        large = draw(1, 32, 9, 80, 6)
        assert relative_error(block(large), original(large)) < 1e-5 and fused.call_count == 4
        torch.compile(block, backend="eager")(large)
