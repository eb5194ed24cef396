"""Inputs of transformers' models: text, images, video, sound, numbers over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.proposal import ANSWER, LENGTH, Inputs, NoInputs, Proposal

#: Where configurations keep what an image token stands for in a text.
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
#: Ids below are special tokens in most vocabularies.
_SPECIAL = 3


def proposals(p: Proposal) -> Iterator[Inputs]:
    """The likeliest first."""
    name = getattr(p.model, "main_input_name", "input_ids")
    name = name[0] if isinstance(name, (list, tuple)) and name else name  # OneFormer has several
    main = name if isinstance(name, str) and p.has(name) else next(iter(p.parameters), "none")
    if main == "pixel_values" and _number(p.config, *_IMAGE_TOKENS) is not None:
        main = "input_ids"  # an image goes in at the places of its tokens
    if main not in _MAIN:
        raise NoInputs(f"`{type(p.model).__name__}`: its input `{main}` is of no known kind")
    if main == "input_ids" and p.has("pixel_values") and not _pairs(p):
        yield from _text_around_images(p)
    for value in _MAIN[main](p):
        inputs: Inputs = {main: value}
        if p.has("input_ids") and main != "input_ids" and _pairs(p):
            inputs["input_ids"] = _ids(p)
        if p.has("pixel_values") and main == "input_ids" and _pairs(p):
            inputs["pixel_values"] = next(_pixels(p))
        _complete(p, inputs)
        yield inputs


def _pairs(p: Proposal) -> bool:
    """A model of a text and an image beside each other, such as CLIP."""
    own = type(p.model).__name__
    both = hasattr(p.config, "text_config") and hasattr(p.config, "vision_config")
    text_in_image = _number(p.config, *_IMAGE_TOKENS) is not None
    return both and not text_in_image and "Text" not in own and "Vision" not in own


def _complete(p: Proposal, inputs: Inputs) -> None:
    """What goes with the main input."""
    decoder = p.has("decoder_input_ids") and getattr(p.config, "is_encoder_decoder", False)
    if "input_ids" in inputs and p.has("attention_mask") and not _causal(p):
        inputs["attention_mask"] = p.mask(inputs["input_ids"].shape[1])
    if decoder:
        inputs["decoder_input_ids"] = _ids(p, answer=True)
    if p.has("bbox"):
        corners = p.integers(100, p.batch, p.sizes.get("length", LENGTH), 4)
        corners[..., 2:] += 100  # right of and below the others
        inputs["bbox"] = corners
    if p.has("spatial_shapes") and "pixel_values" in inputs:
        patches = inputs["pixel_values"].shape[1]
        rows = int(patches**0.5)
        sizes = p.integers(1, p.batch, 2) + rows
        inputs["spatial_shapes"] = sizes
        inputs["pixel_attention_mask"] = p.integers(1, p.batch, patches) + 1
    if p.has("bool_masked_pos") and "bool_masked_pos" in p.required():
        raise NoInputs(f"`{type(p.model).__name__}`: `bool_masked_pos` is made while it is trained")
    if p.has("use_cache"):
        inputs["use_cache"] = False


def _causal(p: Proposal) -> bool:
    return not getattr(p.config, "is_encoder_decoder", False) and (
        "CausalLM" in type(p.model).__name__ or _number(p.config, *_IMAGE_TOKENS) is not None
    )


# Text -------------------------------------------------------------------------------------------


def _ids(p: Proposal, answer: bool = False) -> Tensor:
    length = ANSWER if answer else p.sizes.get("length", LENGTH)
    text = getattr(p.config, "text_config", None)
    if text is None:
        text = p.config.get_text_config(decoder=answer)
    vocabulary = _number(text, "vocab_size") or _number(p.config, "vocab_size", "num_tokens")
    if vocabulary is None:
        raise NoInputs(f"`{type(p.model).__name__}`: its config has no `vocab_size`")
    ids = p.integers(vocabulary, p.batch, length, low=_SPECIAL)
    images = [_number(p.config, n) for n in (*_IMAGE_TOKENS, "video_token_id", "audio_token_id")]
    for image in images:
        if image is not None:
            ids[ids == image] = _SPECIAL  # no image is given
    end = _number(text, "eos_token_id")
    if "CLIP" in type(p.model).__name__ and end is not None and end < vocabulary:
        ids[:, -1] = end  # the token that a text is pooled at
    return ids


def _texts(p: Proposal) -> Iterator[Tensor]:
    yield _ids(p)


def _text_around_images(p: Proposal) -> Iterator[Inputs]:
    """A text with as many image tokens as the model makes of an image; none where it does not say
    how many that are."""
    token = _number(p.config, *_IMAGE_TOKENS)
    features = getattr(p.model, "get_image_features", None)
    if token is None or features is None:
        return
    pixels = next(_pixels(p))
    try:
        with torch.no_grad():
            found = features(pixel_values=pixels)
    except Exception:  # its images come in another form: then as a text alone
        return
    found = getattr(found, "pooler_output", found)
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(t, Tensor) for t in tensors):
        return
    count = sum(t.numel() // t.shape[-1] for t in tensors) // p.batch
    ids = _ids(p)
    images = torch.full((p.batch, count), token, device=ids.device)
    inputs: Inputs = {"input_ids": torch.cat((ids[:, :2], images, ids[:, 2:]), 1)}
    inputs["pixel_values"] = pixels
    _complete(p, inputs)
    yield inputs


# Images and video -------------------------------------------------------------------------------


def _pixels(p: Proposal) -> Iterator[Tensor]:
    """`[batch, channels, height, width]`, with frames before or behind the channels for video, and
    patches in a row."""
    vision = getattr(p.config, "vision_config", None) or p.config
    backbone = getattr(p.config, "backbone_config", None)
    channels = _number(vision, "num_channels", "in_channels", "in_chans") or 3
    own = _side(vision) or _side(backbone) or (64, 64)
    sides = p.sizes.get("height", own[0]), p.sizes.get("width", own[1])
    frames = _number(vision, "num_frames", "frames_per_clip", "video_length")
    frames = frames and p.sizes.get("frames", frames)
    patch = _number(vision, "patch_size")
    if p.has("spatial_shapes") and patch:
        yield p.floats(p.batch, 16, channels * patch * patch)
    if frames:
        yield p.floats(p.batch, frames, channels, *sides)
        yield p.floats(p.batch, channels, frames, *sides)
    yield p.floats(p.batch, channels, *sides)
    if sides == own and own != (64, 64):
        yield p.floats(p.batch, channels, 64, 64)


def _side(config: Any) -> tuple[int, int] | None:
    for name in ("image_size", "crop_size", "img_size"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found, found
        if isinstance(found, (list, tuple)) and len(found) >= 2:
            return int(found[-2]), int(found[-1])
        if isinstance(found, dict) and {"height", "width"} <= set(found):
            return int(found["height"]), int(found["width"])
    return None


# Sound ------------------------------------------------------------------------------------------


def _features(p: Proposal) -> Iterator[Tensor]:
    """Spectrograms: `[batch, bins, time]` or `[batch, time, bins]`."""
    audio = getattr(p.config, "audio_config", None) or p.config
    bins = _number(
        audio, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels"
    )
    if bins is None:
        raise NoInputs(f"`{type(p.model).__name__}`: its config has no number of spectrogram bins")
    positions = _number(audio, "max_source_positions")
    if positions and _number(audio, "num_mel_bins"):
        yield p.floats(p.batch, bins, 2 * positions)
    yield p.floats(p.batch, 64, bins)
    yield p.floats(p.batch, bins, 64)
    size = _number(audio, "spec_size")
    if size:
        yield p.floats(p.batch, 1, size * 4, bins)


def _waves(p: Proposal) -> Iterator[Tensor]:
    """Raw sound `[batch, samples]` or `[batch, channels, samples]`; a spectrogram where the model
    has a fixed number of its frames."""
    bins, frames = _number(p.config, "num_mel_bins"), _number(p.config, "max_length")
    if bins and frames:
        yield p.floats(p.batch, frames, bins)
    channels = _number(p.config, "audio_channels")
    if channels:
        yield p.floats(p.batch, channels, 3200)
    yield p.floats(p.batch, 3200)
    yield p.floats(p.batch, 1, 3200)


# Numbers ----------------------------------------------------------------------------------------


def _series(p: Proposal) -> Iterator[Tensor]:
    """`[batch, time, channels]`."""
    time = _number(p.config, "context_length", "prediction_length")
    channels = _number(p.config, "num_input_channels", "input_size") or 1
    if time is None:
        raise NoInputs(f"`{type(p.model).__name__}`: its config has no `context_length`")
    yield p.floats(p.batch, time, channels)
    yield p.floats(p.batch, time)


_MAIN: dict[str, Callable[[Proposal], Iterator[Tensor]]] = {
    "input_ids": _texts,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _features,
    "input_values": _waves,
    "past_values": _series,
}


def _number(config: Any, *names: str) -> int | None:
    """The first of these that the configuration has a number for."""
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None
