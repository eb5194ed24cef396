"""Inputs of transformers' models: text, images, video, sound, numbers over time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.proposal import ANSWER, LENGTH, Inputs, NoInputs, Proposal

#: Where configurations keep what an image token stands for in a text.
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_SOUND_TOKENS = ("audio_token_id", "audio_token_index")
#: Tiles of one image that are tried.
_TILES = 5
#: Ids below are special tokens in most vocabularies.
_SPECIAL = 3


def proposals(p: Proposal) -> Iterator[Inputs]:
    """The likeliest first."""
    name = getattr(p.model, "main_input_name", "input_ids")
    name = name[0] if isinstance(name, (list, tuple)) and name else name  # OneFormer has several
    main = name if isinstance(name, str) and p.has(name) else next(iter(p.parameters), "none")
    if main == "pixel_values" and _number(p.config, *_IMAGE_TOKENS) is not None:
        main = "input_ids"  # an image goes in at the places of its tokens
    if main not in _MAIN and not (main == "hidden_states" and p.has("grid_thw")):
        raise NoInputs(f"`{type(p.model).__name__}`: its input `{main}` is of no known kind")
    if main == "input_ids" and not _pairs(p):
        yield from _text_around(p)
    for grid in ("grid_thw", "image_grid_thw"):  # a tower of patches in a row
        if p.has(grid) and main in ("hidden_states", "pixel_values"):
            for given in _patches(p):
                yield {main: given["pixel_values"], grid: given["image_grid_thw"]}
    if main == "hidden_states":
        raise NoInputs(f"`{type(p.model).__name__}`: its input `{main}` is of no known kind")
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
    if vocabulary is None:  # a class of the user's may call it as it likes
        tables = (m for m in p.model.modules() if isinstance(m, torch.nn.Embedding))
        vocabulary = next((table.num_embeddings for table in tables), None)
    if vocabulary is None:
        raise NoInputs(
            f"`{type(p.model).__name__}`: its config has no `vocab_size`, and it has no embedding"
        )
    ids = p.integers(vocabulary, p.batch, length, low=_SPECIAL)
    images = [_number(p.config, n) for n in (*_IMAGE_TOKENS, *_SOUND_TOKENS, "video_token_id")]
    for image in images:
        if image is not None:
            ids[ids == image] = _SPECIAL  # no image is given
    end = _number(text, "eos_token_id")
    if "CLIP" in type(p.model).__name__ and end is not None and end < vocabulary:
        ids[:, -1] = end  # the token that a text is pooled at
    return ids


def _texts(p: Proposal) -> Iterator[Tensor]:
    yield _ids(p)


def _text_around(p: Proposal) -> Iterator[Inputs]:
    """A text with as many tokens for an image, or for a sound, as the model makes of it; none where
    it does not say how many that are."""
    yield from _with_tokens(p, _IMAGE_TOKENS, "get_image_features", _images)
    yield from _with_tokens(p, _SOUND_TOKENS, "get_audio_features", _sounds)


def _with_tokens(
    p: Proposal,
    tokens: Sequence[str],
    method: str,
    kinds: Callable[[Proposal], Iterator[Inputs]],
) -> Iterator[Inputs]:
    token = _number(p.config, *tokens)
    if token is None:
        return
    for given in kinds(p):
        for count in _counts(p, method, given):
            ids = _ids(p)
            places = torch.full((p.batch, count), token, device=ids.device)
            inputs: Inputs = {"input_ids": torch.cat((ids[:, :2], places, ids[:, 2:]), 1), **given}
            if p.has("mm_token_type_ids"):
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
            _complete(p, inputs)
            yield inputs
            if "input_features_mask" in given:  # some have one of what the tower gives
                kept = torch.ones(p.batch, count, dtype=torch.bool, device=p.device)
                yield {**inputs, "input_features_mask": kept}


def _counts(p: Proposal, method: str, given: Inputs) -> Iterator[int]:
    """How many tokens stand for what is given: as the model's own method says, or, for a sound
    without such a method, by what towers divide time by."""
    features = getattr(p.model, method, None)
    if features is None:
        sound = given.get("input_features")
        if sound is not None:
            time = sound.shape[1 if sound.shape[-1] == _bins(p) else -1]
            yield from (time // by for by in (4, 2, 8, 1) if time // by)
        return
    inner = getattr(getattr(p.model, "model", None), method, features)  # behind a wrapper's `*args`
    taken = {**inspect.signature(features).parameters, **inspect.signature(inner).parameters}
    try:
        with torch.no_grad():
            found = _count(features(**{k: v for k, v in given.items() if k in taken}))
    except Exception:  # it comes in another form, or as nothing that is known here
        return
    if found and found % p.batch == 0:
        yield found // p.batch


def _count(features: Any) -> int:
    """Rows of what a tower gave: a tensor, a list of them, or an output that has either."""
    found = getattr(features, "pooler_output", None)
    if found is None:
        found = getattr(features, "last_hidden_state", features)
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(t, Tensor) for t in tensors):
        return 0
    return sum(t.numel() // t.shape[-1] for t in tensors)


def _patches(p: Proposal) -> Iterator[Inputs]:
    """Patches in a row, of pictures of two by two groups that are merged, with their grid."""
    vision = getattr(p.config, "vision_config", None) or p.config
    patch = _number(vision, "patch_size", "spatial_patch_size")
    if not patch:
        return
    merge = _number(vision, "spatial_merge_size", "merge_size") or 2
    channels = _number(vision, "in_channels", "in_chans", "num_channels") or 3
    frames = _number(vision, "temporal_patch_size") or 1
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * p.batch, device=p.device)
    rows = p.batch * 4 * merge * merge
    for depth in dict.fromkeys((frames, 1)):
        patches = p.floats(rows, channels * depth * patch * patch)
        yield {"pixel_values": patches, "image_grid_thw": grid}


def _images(p: Proposal) -> Iterator[Inputs]:
    """One image for each text: patches in a row with their grid, a picture, one of several, tiles
    of one."""
    if p.has("image_grid_thw"):
        yield from _patches(p)
    pixels = next(_pixels(p))
    sizes: list[Inputs] = [{}]
    if p.has("image_sizes"):
        size = torch.tensor([list(pixels.shape[-2:])] * p.batch, device=p.device)
        sizes.append({"image_sizes": size})
    yield from ({"pixel_values": pixels, **size} for size in sizes)
    for tiles in range(1, _TILES + 1 if pixels.ndim == 4 else 1):
        several = p.floats(p.batch, tiles, *pixels.shape[1:])
        yield from ({"pixel_values": several, **size} for size in sizes)


def _sounds(p: Proposal) -> Iterator[Inputs]:
    """One sound for each text: its spectrogram, all of which counts, or its wave."""
    name = next((n for n in ("input_features", "input_values") if p.has(n)), None)
    if name is None:
        return
    for sound in _MAIN[name](p) if name != "input_features" or _bins(p) else ():
        given: Inputs = {name: sound}
        bins = _bins(p)
        time = sound.shape[1 if sound.shape[-1] == bins else -1]
        for mask in ("input_features_mask", "feature_attention_mask", "padding_mask"):
            if p.has(mask):
                given[mask] = torch.ones(p.batch, time, dtype=torch.int64, device=p.device)
        yield given
        if len(given) > 1:
            yield {name: sound, **{k: v.bool() for k, v in given.items() if k != name}}


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


def _audio(p: Proposal) -> Any:
    for name in ("audio_config", "encoder_config"):
        if (found := getattr(p.config, name, None)) is not None:
            return found
    return p.config


def _bins(p: Proposal) -> int | None:
    """Bins of a spectrogram."""
    return _number(
        _audio(p),
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "n_mels",
        "input_feat_size",
        "input_dim",
    )


def _features(p: Proposal) -> Iterator[Tensor]:
    """Spectrograms: `[batch, bins, time]` or `[batch, time, bins]`."""
    audio = _audio(p)
    bins = _bins(p)
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
