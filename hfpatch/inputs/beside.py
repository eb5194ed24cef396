"""What goes with the main input of a model of transformers, by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.proposal import ANSWER, LENGTH, Inputs, Proposal
from hfpatch.inputs.tensors import (
    bins_of,
    number,
    pictures,
    series_length,
    spectra,
    text_ids,
    width_of,
)

#: Layouts of one argument that are tried.
LAYOUTS = 6
#: Rows of what a decoder attends to, of a state over time, of a robot's actions.
_ROWS = 5

_Maker = Callable[[Proposal, Inputs, int], Any]


def add_required(p: Proposal, inputs: Inputs) -> None:
    """Add the arguments without a default that are known."""
    _add(p, inputs, p.required(), 0)


def add_known(p: Proposal, inputs: Inputs, layout: int) -> None:
    """Add every argument that is known, in its `layout`-th layout or its last."""
    _add(p, inputs, p.parameters, layout)


def _add(p: Proposal, inputs: Inputs, names: Any, layout: int) -> None:
    for name in names:
        maker = _MAKERS.get(name)
        if name not in inputs and maker is not None:
            value = maker(p, inputs, layout)
            if value is not None:
                inputs[name] = value


def _nth(found: Iterator[Tensor], layout: int) -> Tensor | None:
    made = list(islice(found, layout + 1))
    return made[-1] if made else None


def _rows(p: Proposal, inputs: Inputs, name: str, count: int = _ROWS) -> int:
    """The length of what is there under `name` already."""
    value = inputs.get(name)
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else count


def _ones(p: Proposal, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64, device=p.device)


# Text -------------------------------------------------------------------------------------------


def _text(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return text_ids(p)


def _question(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    """The text that a Q-Former reads."""
    former = getattr(p.config, "qformer_config", p.config)
    words = number(former, "vocab_size") or number(p.config, "vocab_size") or 100
    return p.integers(words, p.batch, p.sizes.get("length", LENGTH), low=3)


def _task(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    words = number(p.config, "text_encoder_vocab_size") or 100
    return p.integers(words, p.batch, number(p.config, "task_seq_len") or LENGTH)


def _text_mask(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    return p.mask(inputs["input_ids"].shape[1]) if "input_ids" in inputs else None


def _encoded(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """What another model's encoder gave."""
    width = number(p.config, "encoder_hidden_size", "cross_attention_hidden_size")
    return p.floats(p.batch, _ROWS, width or width_of(p.config))


def _decoded(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    if not getattr(p.config, "is_encoder_decoder", False):
        return None
    return p.floats(p.batch, ANSWER, width_of(p.config))


# Images and video -------------------------------------------------------------------------------


def _pictures(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    return _nth(pictures(p), layout)


def _pictures_mask(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """Which of several pictures count: all."""
    value = inputs.get("pixel_values")
    several = isinstance(value, Tensor) and value.ndim == 5
    return _ones(p, *value.shape[:2]).bool() if several and value is not None else None


def _like_pictures(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    value = inputs.get("pixel_values")
    return p.floats(*value.shape) if isinstance(value, Tensor) else None


def _attended_pictures(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    value = inputs.get("pixel_values")
    if not isinstance(value, Tensor) or value.ndim != 5 or "input_ids" not in inputs:
        return None
    return _ones(p, p.batch, inputs["input_ids"].shape[1], value.shape[1])


def _places_of_an_image(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """One where a text has an image: for as many tokens as there are queries, from the second."""
    queries = number(p.config, "latent_query_num")
    if queries is None or "input_ids" not in inputs:
        return None
    length = max(inputs["input_ids"].shape[1], queries + 2)
    if length > inputs["input_ids"].shape[1]:
        extra = p.integers(100, p.batch, length - inputs["input_ids"].shape[1], low=3)
        inputs["input_ids"] = torch.cat((inputs["input_ids"], extra), 1)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = p.mask(length)
    places = torch.zeros(p.batch, length, dtype=torch.int64, device=p.device)
    places[:, 1 : 1 + queries] = 1
    return places


def _patch_places(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """Column and row of each patch of a square."""
    value = inputs.get("pixel_values")
    if not isinstance(value, Tensor) or value.ndim != 3:
        return None
    side = int(value.shape[1] ** 0.5)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack((columns.flatten(), rows.flatten()), -1)
    return places.expand(p.batch, -1, -1).contiguous().to(p.device)


def _merged(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return _ones(p, p.batch) * (1 if layout % 2 else 2)


def _seen(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return p.floats(p.batch, _ROWS, number(p.config, "visual_feat_dim") or width_of(p.config))


def _seen_at(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return p.floats(p.batch, _ROWS, number(p.config, "visual_pos_dim") or 4).sigmoid()


def _corners(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """Boxes as parts of the page."""
    if "input_ids" not in inputs:
        return None
    first = p.floats(p.batch, inputs["input_ids"].shape[1], 2).sigmoid() / 2
    return torch.cat((first, first + 0.25), -1)


# Sound ------------------------------------------------------------------------------------------


def _spectra(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    frames, bins = number(p.config, "audio_length_per_tok"), bins_of(p)
    if frames and bins and "input_ids" in inputs:  # a sound beneath the text
        return p.floats(p.batch, bins, frames * inputs["input_ids"].shape[1])
    return _nth(spectra(p), layout) if bins_of(p) else None


def _waves(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return p.floats(p.batch, 1, 3200)


def _heard(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    """Which frames of a spectrogram count: all."""
    value = inputs.get("input_features")
    if not isinstance(value, Tensor) or value.ndim != 3:
        return None
    time = value.shape[-1 if value.shape[-1] % (bins_of(p) or 1) else 1]
    ones = _ones(p, p.batch, time)
    return ones.bool() if layout % 2 else ones


def _unheard(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    """Which frames are padding: none."""
    rows = _rows(p, inputs, "audio_mel")
    return torch.zeros(p.batch, rows, dtype=torch.bool, device=p.device)


def _longer(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return torch.zeros(p.batch, 1, dtype=torch.bool, device=p.device)


# Numbers ----------------------------------------------------------------------------------------


def _observed(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    value = inputs.get("past_values")
    return torch.ones_like(value) if isinstance(value, Tensor) else None


def _unpadded(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    value = inputs.get("past_values")
    return torch.zeros_like(value) if isinstance(value, Tensor) else None


def _times(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    length = series_length(p)
    return None if length is None else _time_features(p, length)


def _times_to_come(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    length = number(p.config, "prediction_length")
    return None if length is None else _time_features(p, length)


def _time_features(p: Proposal, length: int) -> Tensor:
    names = ("num_time_features", "num_dynamic_real_features")
    return p.floats(p.batch, length, sum(number(p.config, name) or 0 for name in names))


def _to_come(p: Proposal, inputs: Inputs, layout: int) -> Tensor | None:
    length = number(p.config, "prediction_length")
    return None if length is None else p.floats(p.batch, length)


def _often(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return torch.zeros(p.batch, 1, dtype=torch.int64, device=p.device)


def _over_time(*names: str) -> _Maker:
    """A row for each time step, as wide as the configuration says; one number without names."""

    def made(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
        return p.floats(p.batch, _ROWS, number(p.config, *names) or 1 if names else 1)

    return made


def _steps(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return torch.arange(_ROWS, device=p.device).expand(p.batch, -1).contiguous()


def _contexts(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    layers = getattr(p.config, "target_layer_ids", None) or (0,)
    return p.floats(p.batch, _ROWS, width_of(p.config) * len(layers))


def _condition(p: Proposal, inputs: Inputs, layout: int) -> Tensor:
    return p.floats(1, 1, width_of(p.config))


_MAKERS: dict[str, _Maker] = {
    "input_ids": _text,
    "qformer_input_ids": _question,
    "task_inputs": _task,
    "attention_mask": _text_mask,
    "encoder_hidden_states": _encoded,
    "decoder_input_values": _decoded,
    "pixel_values": _pictures,
    "pixel_attention_mask": _pictures_mask,
    "prompt_pixel_values": _like_pictures,
    "prompt_masks": _like_pictures,
    "image_attention_mask": _attended_pictures,
    "image_embeds_position_mask": _places_of_an_image,
    "pixel_position_ids": _patch_places,
    "merge_sizes": _merged,
    "visual_feats": _seen,
    "visual_pos": _seen_at,
    "bbox": _corners,
    "input_features": _spectra,
    "input_values": _waves,
    "input_features_mask": _heard,
    "feature_attention_mask": _heard,
    "audio_mel_mask": _unheard,
    "is_longer": _longer,
    "past_observed_mask": _observed,
    "past_values_padding": _unpadded,
    "past_time_features": _times,
    "future_time_features": _times_to_come,
    "future_values": _to_come,
    "freq": _often,
    "actions": _over_time("act_dim"),
    "rewards": _over_time(),
    "returns_to_go": _over_time(),
    "timesteps": _steps,
    "t_cond": _condition,
    "context_hidden_states": _contexts,
}
