"""Inputs of diffusers' pipelines: embeddings of a prompt in place of its text, a few steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hfpatch.inputs.proposal import Inputs, NoInputs, Sizes

#: What pipelines call the model that takes a step.
_DENOISERS = ("transformer", "unet", "prior")


def denoiser_of(pipeline: Any) -> Any:
    """The model that takes a step, or None."""
    return next((getattr(pipeline, n, None) for n in _DENOISERS if hasattr(pipeline, n)), None)


def pipeline_inputs(
    pipeline: Any, seed: int = 0, batch: int = 1, sizes: Sizes | None = None
) -> Inputs:
    """Keyword arguments of a short call: two steps, the smallest picture or video, or of `sizes`.

    Raises:
        NoInputs: the pipeline's call or its denoiser is of no known kind.
    """
    from hfpatch.inputs import sample_inputs

    name = type(pipeline).__name__
    denoiser = denoiser_of(pipeline)
    if not isinstance(denoiser, nn.Module):
        raise NoInputs(f"`{name}` has none of {', '.join(f'`{n}`' for n in _DENOISERS)}")
    parameters = inspect.signature(type(pipeline).__call__).parameters
    factor = int(getattr(pipeline, "vae_scale_factor", 8) or 8)
    factor = int(getattr(pipeline, "vae_spatial_compression_ratio", factor) or factor)
    made: Inputs = {
        "height": 2 * factor if factor >= 32 else 8 * factor,
        "width": 2 * factor if factor >= 32 else 8 * factor,
        "num_frames": 9,
        "num_inference_steps": 2,
        "output_type": "pt",
        "return_dict": False,
    }
    if "prompt_embeds" in parameters:
        given = sample_inputs(denoiser, batch=batch, seed=seed)
        made |= _prompts(given, parameters)
        if "negative_prompt_embeds" in made and "negative_prompt" in parameters:
            made["negative_prompt"] = None  # some have "", which the embeddings exclude
    elif "class_labels" in parameters:
        made["class_labels"] = [1]
    elif "prompt" in parameters and getattr(pipeline, "tokenizer", None) is not None:
        made["prompt"] = "a lighthouse at dusk"
    sizes = sizes or Sizes()
    for size_name, size in (("height", "height"), ("width", "width"), ("num_frames", "frames")):
        if size_name in parameters:
            made[size_name] = sizes.get(size, made[size_name])
    images = [n for n in ("image", "video", "mask_image") if n in parameters]
    if any(parameters[n].default is inspect.Parameter.empty for n in images):
        raise NoInputs(f"`{name}` starts from `{images[0]}`, which is not made up")
    return {k: v for k, v in made.items() if k in parameters}


def _prompts(given: Inputs, parameters: Any) -> Inputs:
    """Those of the denoiser's own inputs that the pipeline takes, for both halves of guidance."""
    embeds = given.get("encoder_hidden_states")
    if not isinstance(embeds, torch.Tensor):
        raise NoInputs("its denoiser takes no embedding of a prompt")
    pooled = given.get("pooled_projections")
    if pooled is None:
        pooled = (given.get("added_cond_kwargs") or {}).get("text_embeds")
    found: Inputs = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    mask = given.get("encoder_attention_mask", given.get("encoder_hidden_states_mask"))
    for name in ("prompt_attention_mask", "prompt_embeds_mask"):
        found[name] = mask
    found = {k: v for k, v in found.items() if v is not None and k in parameters}
    negative = {f"negative_{k}": v.roll(1, 1) for k, v in found.items()}
    return found | {k: v for k, v in negative.items() if k in parameters}
