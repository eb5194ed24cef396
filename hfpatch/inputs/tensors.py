"""Tensors that models of transformers take: ids, images, sound, numbers over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.proposal import ANSWER, LENGTH, NoInputs, Proposal

#: Where configurations keep what an image token stands for in a text.
IMAGE_TOKENS = ("image_token_id", "image_token_index")
SOUND_TOKENS = ("audio_token_id", "audio_token_index")
#: Ids below are special tokens in most vocabularies.
_SPECIAL = 3

# Text -------------------------------------------------------------------------------------------


def text_ids(p: Proposal, answer: bool = False) -> Tensor:
    length = ANSWER if answer else p.sizes.get("length", LENGTH)
    text = getattr(p.config, "text_config", None)
    if text is None:
        text = p.config.get_text_config(decoder=answer)
    vocabulary = number(text, "vocab_size") or number(p.config, "vocab_size", "num_tokens")
    if vocabulary is None:  # a class of the user's may call it as it likes
        tables = (m for m in p.model.modules() if isinstance(m, torch.nn.Embedding))
        vocabulary = next((table.num_embeddings for table in tables), None)
    if vocabulary is None:
        raise NoInputs(
            f"`{type(p.model).__name__}`: its config has no `vocab_size`, and it has no embedding"
        )
    ids = p.integers(vocabulary, p.batch, length, low=_SPECIAL)
    images = [number(p.config, n) for n in (*IMAGE_TOKENS, *SOUND_TOKENS, "video_token_id")]
    for image in images:
        if image is not None:
            ids[ids == image] = _SPECIAL  # no image is given
    end = number(text, "eos_token_id")
    if "CLIP" in type(p.model).__name__ and end is not None and end < vocabulary:
        ids[:, -1] = end  # the token that a text is pooled at
    return ids


def texts(p: Proposal) -> Iterator[Tensor]:
    """`[batch, length]`; tokens of sound with its codebooks below each other, or last."""
    ids = text_ids(p)
    yield ids
    books = number(p.config, "num_codebooks")
    if books:
        words = number(p.config, "vocab_size") or 2
        yield p.integers(words, p.batch * books, ids.shape[1])
        for count in (books, books + 1):  # a text's tokens beside
            yield p.integers(words, p.batch, ids.shape[1], count)


# Images and video -------------------------------------------------------------------------------


def pictures(p: Proposal) -> Iterator[Tensor]:
    """`[batch, channels, height, width]`, with frames before or behind the channels for video, and
    patches in a row."""
    seeing = getattr(p.config, "vlm_config", p.config)  # a robot's, around a model that sees
    vision = getattr(seeing, "vision_config", None) or seeing
    backbone = getattr(p.config, "backbone_config", None)
    channels = number(vision, "num_channels", "in_channels", "in_chans") or 3
    own = side_of(vision) or side_of(backbone) or (64, 64)
    if p.has("prompt_pixel_values"):  # which stands above it
        own = own[0] // 2, own[1]
    sides = p.sizes.get("height", own[0]), p.sizes.get("width", own[1])
    frames = number(vision, "num_frames", "frames_per_clip", "video_length")
    frames = frames and p.sizes.get("frames", frames)
    patch = number(vision, "patch_size")
    if p.has("spatial_shapes") and patch:
        yield p.floats(p.batch, 16, channels * patch * patch)
    if frames:
        yield p.floats(p.batch, frames, channels, *sides)
        yield p.floats(p.batch, channels, frames, *sides)
    yield p.floats(p.batch, channels, *sides)
    if sides == own and own != (64, 64):
        yield p.floats(p.batch, channels, 64, 64)
    if p.has("pixel_position_ids") and patch:
        yield p.floats(p.batch, 36, channels * patch * patch)
    if not frames:
        yield p.floats(p.batch, 1, channels, *sides)  # one of several
        yield p.floats(p.batch, 2, channels, *sides)  # a pair of pictures
    if sides == own:
        yield p.floats(p.batch, channels, 128, 128)


def side_of(config: Any) -> tuple[int, int] | None:
    for name in ("image_size", "crop_size", "img_size", "max_img_size"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found, found
        if isinstance(found, (list, tuple)) and len(found) >= 2:
            return int(found[-2]), int(found[-1])
        if isinstance(found, dict) and {"height", "width"} <= set(found):
            return int(found["height"]), int(found["width"])
    return None


# Sound ------------------------------------------------------------------------------------------


def audio_of(p: Proposal) -> Any:
    for name in ("audio_config", "encoder_config", "asr_config", "semantic_model_config"):
        if (found := getattr(p.config, name, None)) is not None:
            return found
    return p.config


def bins_of(p: Proposal) -> int | None:
    """Bins of a spectrogram."""
    found = number(
        audio_of(p),
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "n_mels",
        "input_feat_size",
        "input_dim",
        "feature_size",
        "subsampling_conv_channels",  # Gemma 4's first convolution has as many channels as bins
    )
    return found or number(getattr(p.config, "decoder_config", None), "feature_size")


def spectra(p: Proposal) -> Iterator[Tensor]:
    """Spectrograms: `[batch, bins, time]` or `[batch, time, bins]`."""
    audio = audio_of(p)
    bins = bins_of(p)
    if bins is None:
        raise NoInputs(f"`{type(p.model).__name__}`: its config has no number of spectrogram bins")
    positions = number(audio, "max_source_positions")
    if positions and number(audio, "num_mel_bins"):
        yield p.floats(p.batch, bins, 2 * positions)
    yield p.floats(p.batch, 64, bins)
    yield p.floats(p.batch, bins, 64)
    for stacked in (4, number(audio, "num_stacked_frames") or 2):
        yield p.floats(p.batch, 64, stacked * bins)
    window = number(audio, "n_window")
    if window:
        yield p.floats(p.batch, bins, 4 * window)
    size = number(audio, "spec_size")
    if size:
        yield p.floats(p.batch, 1, size * 4, bins)


def waves(p: Proposal) -> Iterator[Tensor]:
    """Raw sound `[batch, samples]` or `[batch, channels, samples]`; a spectrogram where the model
    has a fixed number of its frames."""
    bins, frames = number(p.config, "num_mel_bins"), number(p.config, "max_length")
    if bins and frames:
        yield p.floats(p.batch, frames, bins)
    channels = number(p.config, "audio_channels")
    if channels:
        yield p.floats(p.batch, channels, 3200)
    yield p.floats(p.batch, 3200)
    yield p.floats(p.batch, 1, 3200)
    if p.has("decoder_input_values"):  # a model without what makes rows of sound
        yield p.floats(p.batch, p.sizes.get("length", LENGTH), width_of(p.config))


# Numbers ----------------------------------------------------------------------------------------


def series_length(p: Proposal) -> int | None:
    """Steps of the past, those of the lags too."""
    time = number(p.config, "context_length", "prediction_length")
    lags = getattr(p.config, "lags_sequence", None)
    return time if time is None or not lags else time + max(lags)


def series(p: Proposal) -> Iterator[Tensor]:
    """`[batch, time, channels]`."""
    time = series_length(p)
    channels = number(p.config, "num_input_channels", "input_size") or 1
    if time is None:
        raise NoInputs(f"`{type(p.model).__name__}`: its config has no `context_length`")
    yield p.floats(p.batch, time, channels)
    yield p.floats(p.batch, time)


def _states(p: Proposal) -> Iterator[Tensor]:
    yield p.floats(p.batch, 5, number(p.config, "state_dim") or width_of(p.config))


def _rows(p: Proposal) -> Iterator[Tensor]:
    """Rows as wide as the model, in place of what it would make of a text, a sound, queries."""
    for width in dict.fromkeys((width_of(p.config), *widths_of(p.config))):
        yield p.floats(p.batch, 8, width)
    for width in dict.fromkeys((*widths_of(p.config), number(p.config, "channels") or 1)):
        yield p.floats(p.batch, width, 64)


def width_of(config: Any) -> int:
    """How wide the hidden states of a model are."""
    return next(iter(widths_of(config)), 64)


def widths_of(config: Any) -> list[int]:
    """All that may be that width: its own, of its parts."""
    names = ("hidden_size", "d_model", "latent_dim", "n_embd", "dim", "embed_dim")
    own = [found for name in names if (found := number(config, name))]
    parts = (getattr(config, key, None) for key in getattr(type(config), "sub_configs", {}))
    return [*own, *(w for part in parts if part is not None for w in widths_of(part))]


MAIN: dict[str, Callable[[Proposal], Iterator[Tensor]]] = {
    "input_ids": texts,
    "pixel_values": pictures,
    "pixel_values_videos": pictures,
    "input_features": spectra,
    "input_values": waves,
    "past_values": series,
    "audio_mel": spectra,
    "states": _states,
    **dict.fromkeys(("hidden_states", "inputs_embeds", "query_embeds", "noise_embeds"), _rows),
    **dict.fromkeys(("latents", "inputs", "action_embeds"), _rows),
}


def number(config: Any, *names: str) -> int | None:
    """The first of these that the configuration has a number for."""
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None
