"""Inputs of transformers' models: text, images, video, sound, numbers over time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.beside import LAYOUTS, add_known, add_required
from hfpatch.inputs.proposal import LENGTH, Inputs, NoInputs, Proposal
from hfpatch.inputs.tensors import (
    IMAGE_TOKENS,
    MAIN,
    SOUND_TOKENS,
    bins_of,
    number,
    pictures,
    text_ids,
)

#: Tiles of one image that are tried.
_TILES = 5


def proposals(p: Proposal) -> Iterator[Inputs]:
    """The likeliest first: what must be given, then all that is known by its name."""
    for inputs in _around_the_main(p):
        add_required(p, inputs)
        yield inputs
    for layout in range(LAYOUTS):
        for inputs in _main(p):
            if layout % 2:
                inputs.pop("bbox", None)  # corners as parts of the page
            add_known(p, inputs, layout)
            yield inputs
    if p.batch > 1:  # some take no more than one
        p.batch = 1
        yield from proposals(p)


def _main_name(p: Proposal) -> str:
    name = getattr(p.model, "main_input_name", "input_ids")
    name = name[0] if isinstance(name, (list, tuple)) and name else name  # OneFormer has several
    main = name if isinstance(name, str) and p.has(name) else next(iter(p.parameters), "none")
    if (
        main == "pixel_values"
        and p.has("input_ids")
        and number(p.config, *IMAGE_TOKENS) is not None
    ):
        main = "input_ids"  # an image goes in at the places of its tokens
    return main


def _around_the_main(p: Proposal) -> Iterator[Inputs]:
    main = _main_name(p)
    if main == "input_ids" and not _pairs(p):
        yield from _text_around(p)
    for grid in ("grid_thw", "image_grid_thw"):  # a tower of patches in a row
        if p.has(grid) and main in ("hidden_states", "pixel_values"):
            for given in _patches(p):
                yield {main: given["pixel_values"], grid: given["image_grid_thw"]}
    if main == "pixel_values" and p.has("target_sizes"):
        patch = number(p.config, "patch_size") or 1
        sizes = torch.tensor([[4, 4]] * p.batch, device=p.device)
        channels = number(p.config, "num_channels") or 3
        yield {main: p.floats(1, channels, patch, 16 * p.batch * patch), "target_sizes": sizes}
    yield from _main(p)


def _main(p: Proposal) -> Iterator[Inputs]:
    main = _main_name(p)
    if main not in MAIN:
        raise NoInputs(f"`{type(p.model).__name__}`: its input `{main}` is of no known kind")
    for value in MAIN[main](p):
        inputs: Inputs = {main: value}
        if p.has("input_ids") and main != "input_ids" and _pairs(p):
            inputs["input_ids"] = text_ids(p)
        if p.has("pixel_values") and main == "input_ids" and _pairs(p):
            inputs["pixel_values"] = next(pictures(p))
        _complete(p, inputs)
        yield inputs


def _pairs(p: Proposal) -> bool:
    """A model of a text and an image beside each other, such as CLIP."""
    own = type(p.model).__name__
    both = hasattr(p.config, "text_config") and hasattr(p.config, "vision_config")
    text_in_image = number(p.config, *IMAGE_TOKENS) is not None
    return both and not text_in_image and "Text" not in own and "Vision" not in own


def _complete(p: Proposal, inputs: Inputs) -> None:
    """What goes with the main input."""
    decoder = p.has("decoder_input_ids") and getattr(p.config, "is_encoder_decoder", False)
    if "input_ids" in inputs and p.has("attention_mask") and not _causal(p):
        inputs["attention_mask"] = p.mask(inputs["input_ids"].shape[1])
    if decoder:
        inputs["decoder_input_ids"] = text_ids(p, answer=True)
        books = number(getattr(p.config, "decoder_config", None), "num_channels")
        if books:  # codes of a sound, a column for each codebook
            shape = (*inputs["decoder_input_ids"].shape, books)
            words = number(p.config.decoder_config, "vocab_size") or 2
            inputs["decoder_input_ids"] = p.integers(words, *shape)
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
        "CausalLM" in type(p.model).__name__ or number(p.config, *IMAGE_TOKENS) is not None
    )


def _text_around(p: Proposal) -> Iterator[Inputs]:
    """A text with as many tokens for an image, or for a sound, as the model makes of it; none where
    it does not say how many that are."""
    yield from _with_tokens(p, IMAGE_TOKENS, "get_image_features", _images)
    yield from _with_tokens(p, SOUND_TOKENS, "get_audio_features", _sounds)


def _with_tokens(
    p: Proposal,
    tokens: Sequence[str],
    method: str,
    kinds: Callable[[Proposal], Iterator[Inputs]],
) -> Iterator[Inputs]:
    token = number(p.config, *tokens)
    if token is None:
        return
    for given in kinds(p):
        for count in _counts(p, method, given):
            ids = text_ids(p)
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
            time = sound.shape[1 if sound.shape[-1] == bins_of(p) else -1]
            yield from (time // by for by in (4, 2, 8, 1) if time // by)
        return
    inner = getattr(getattr(p.model, "model", None), method, features)  # behind a wrapper's `*args`
    taken = {**inspect.signature(features).parameters, **inspect.signature(inner).parameters}
    try:
        with torch.no_grad():
            found = _rows(features(**{k: v for k, v in given.items() if k in taken}))
    except Exception:  # it comes in another form, or as nothing that is known here
        return
    queries = (number(p.config, "num_query_tokens") or 0) * p.batch
    for count in dict.fromkeys((*found, queries)):
        if count and count % p.batch == 0:
            yield count // p.batch


def _rows(features: Any) -> list[int]:
    """How many rows a tower gave: a tensor, a list of them, or an output that has either."""
    names = ("pooler_output", "last_hidden_state")
    found = [given for name in names if (given := getattr(features, name, None)) is not None]
    return [_count(given) for given in found or [features]]


def _count(found: Any) -> int:
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(t, Tensor) for t in tensors):
        return 0
    return sum(t.numel() // t.shape[-1] for t in tensors)


def _patches(p: Proposal) -> Iterator[Inputs]:
    """Patches in a row, of pictures of two by two groups that are merged, with their grid."""
    vision = getattr(p.config, "vision_config", None) or p.config
    patch = number(vision, "patch_size", "spatial_patch_size")
    if not patch:
        return
    merge = number(vision, "spatial_merge_size", "merge_size", "merge_kernel_size") or 2
    channels = number(vision, "in_channels", "in_chans", "num_channels") or 3
    frames = number(vision, "temporal_patch_size", "patch_temporal") or 1
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * p.batch, device=p.device)
    rows = p.batch * 4 * merge * merge
    for depth in dict.fromkeys((frames, 1)):
        patches = p.floats(rows, channels * depth * patch * patch)
        yield {"pixel_values": patches, "image_grid_thw": grid}
    yield {"pixel_values": p.floats(rows, channels, patch, patch), "image_grid_thw": grid}
    groups = (4 * p.batch, merge * patch, merge * patch, channels)
    merged = torch.tensor([[1, 2, 2]] * p.batch, device=p.device)
    yield {"pixel_values": p.floats(*groups), "image_grid_thw": merged}


def _images(p: Proposal) -> Iterator[Inputs]:
    """One image for each text: patches in a row with their grid, a picture, one of several, tiles
    of one."""
    if p.has("image_grid_thw"):
        yield from _patches(p)
    pixels = next(pictures(p))
    sizes: list[Inputs] = [{}]
    if p.has("image_sizes"):
        size = torch.tensor([list(pixels.shape[-2:])] * p.batch, device=p.device)
        sizes.append({"image_sizes": size})
    yield from ({"pixel_values": pixels, **size} for size in sizes)
    for tiles in range(1, _TILES + 1 if pixels.ndim == 4 else 1):
        several = p.floats(p.batch, tiles, *pixels.shape[1:])
        if p.has("pixel_attention_mask"):  # a picture for each tile, all of which counts
            seen = torch.ones(p.batch, tiles, *pixels.shape[-2:], dtype=torch.bool)
            yield {"pixel_values": several, "pixel_attention_mask": seen.to(p.device)}
        yield from ({"pixel_values": several, **size} for size in sizes)


def _sounds(p: Proposal) -> Iterator[Inputs]:
    """One sound for each text: its spectrogram, all of which counts, or its wave."""
    name = next((n for n in ("input_features", "input_values") if p.has(n)), None)
    if name is None:
        return
    for sound in MAIN[name](p) if name != "input_features" or bins_of(p) else ():
        given: Inputs = {name: sound}
        bins = bins_of(p)
        time = sound.shape[1 if sound.shape[-1] == bins else -1]
        for mask in ("input_features_mask", "feature_attention_mask", "padding_mask"):
            if p.has(mask):
                given[mask] = torch.ones(p.batch, time, dtype=torch.int64, device=p.device)
        yield given
        if len(given) > 1:
            yield {name: sound, **{k: v.bool() for k, v in given.items() if k != name}}
