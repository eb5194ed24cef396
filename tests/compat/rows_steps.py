"""What runs a model many times: pipelines with callbacks, caches of steps, continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from columns import Column
from row import Case, Row, forward, only
from rows_adapters import diffusers_pipeline
from rows_serving import GROUP, INSIDE, NO_TEXT
from torch import nn

DENOISES = only("denoiser", "It is no denoiser.")

# Pipelines ----------------------------------------------------------------------------------------


def prompts(case: Case) -> dict[str, Any]:
    """What the family's pipeline takes instead of texts, and the size of its image or video."""
    given = case.inputs()
    text, none = given["encoder_hidden_states"][:1], given["encoder_hidden_states"][1:]
    guided = {"prompt_embeds": text, "negative_prompt_embeds": none, "guidance_scale": 2.0}
    if case.column.name == "flux":
        return {
            "prompt_embeds": text,
            "pooled_prompt_embeds": given["pooled_projections"][:1],
            "height": 32,
            "width": 32,
        }
    if case.column.name == "ltx":
        mask = torch.ones(text.shape[:2], dtype=torch.long)
        masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
        return guided | masks | {"height": 64, "width": 96, "num_frames": 9}
    if case.column.name == "wan":
        return guided | {"height": 32, "width": 32, "num_frames": 5}
    return guided | {"height": 64, "width": 64}


def called_back(case: Case, pipe: Any) -> Any:
    """Steps with a callback that changes the latents, and ends the run early."""
    seen: list[Any] = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append((step, float(timestep), sorted(values)))
        if step == 2:
            pipe._interrupt = True
        return {"latents": values["latents"] * 1.1}

    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        result = pipe(
            **prompts(case),
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=["latents"],
            return_dict=False,
        )
    pipe._interrupt = False
    assert len(seen) >= 3
    return result[0], seen


# Caches of steps ----------------------------------------------------------------------------------


def cached(make: Callable[[Any], Any]) -> Callable[[Case, Any], Any]:
    def do(case: Case, model: Any) -> Any:
        import diffusers

        model.enable_cache(make(diffusers))
        return model

    return do


def several_steps(case: Case, model: Any) -> Any:
    """Four steps in the one context, as a pipeline runs them."""
    outputs = []
    model._reset_stateful_cache()
    for step in range(4):
        inputs = case.inputs()
        inputs["hidden_states"] = inputs["hidden_states"] * (1 - 0.01 * step)
        with torch.no_grad(), model.cache_context("cond"):
            outputs.append(case.output(model(**inputs)))
    return outputs


def first_block(diffusers: Any) -> Any:
    return diffusers.FirstBlockCacheConfig(threshold=0.05)


def pyramid(diffusers: Any) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: 500,
        spatial_attention_block_identifiers=("blocks", "transformer_blocks"),
        temporal_attention_block_identifiers=(),
        cross_attention_block_identifiers=(),
    )


def taylor(diffusers: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)


def magnitudes(diffusers: Any) -> Any:
    return diffusers.MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4)


def disabled(case: Case, model: Any) -> Any:
    """Enabled, used and disabled again."""
    cached(pyramid)(case, model)
    several_steps(case, model)
    model.disable_cache()
    return model


def layer_skip(case: Case, model: nn.Module) -> nn.Module:
    """The second block left out, as skip-layer guidance does."""
    from diffusers import LayerSkipConfig
    from diffusers.hooks import apply_layer_skip

    name = "transformer_blocks" if hasattr(model, "transformer_blocks") else "blocks"
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn=name))
    return model


# Continuous batching ------------------------------------------------------------------------------


def continuous_batching(case: Case, model: Any) -> Any:
    """More requests than a batch holds; the attention is put back, which the manager replaces."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    before = model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # a cache of a few pages: by default it takes more than half of the machine's memory
    limits = ContinuousBatchingConfig(num_blocks=16, page_size=32, max_batch_tokens=16)
    prompts = [[5, 17, 33, 8], [9, 4, 3], [11, 12, 13, 14, 15], [7] * 9]
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=limits, progress_bar=False
    )
    model.set_attn_implementation(before)
    ordered = [results[key] for key in sorted(results)]
    assert len(ordered) == len(prompts) and all(r.error is None for r in ordered)
    return [list(r.generated_tokens) for r in ordered]


def _batches(column: Column) -> str | None:
    if not column.generates:
        return NO_TEXT
    if column.kind == "seq2seq" or column.name in ("bamba", "qwen3-next"):
        return "transformers batches decoders with plain attention alone."
    return None


def _cache(title: str, make: Callable[[Any], Any]) -> Row:
    return Row(
        GROUP,
        title,
        cached(make),
        several_steps,
        unless=only("ltx flux wan", "Its class has no caches of steps (they are diffusers')."),
        lasting=False,
        why={"partly": INSIDE, "original": INSIDE},
    )


ROWS = (
    Row(
        GROUP,
        "a pipeline's `callback_on_step_end`",
        diffusers_pipeline,
        called_back,
        unless=DENOISES,
        lasting=False,
    ),
    _cache("`enable_cache`, first-block cache", first_block),
    _cache("`enable_cache`, pyramid attention broadcast", pyramid),
    _cache("`enable_cache`, TaylorSeer", taylor),
    _cache("`enable_cache`, MagCache", magnitudes),
    Row(
        GROUP,
        "`enable_cache` and `disable_cache`",
        disabled,
        forward,
        unless=only("ltx flux wan", "Its class has no caches of steps (they are diffusers')."),
        lasting=False,
    ),
    Row(
        GROUP,
        "`apply_layer_skip`",
        layer_skip,
        unless=only("ltx flux wan", "It is for diffusers' transformers."),
        lasting=False,
        why={"partly": "The skipped block's kernels do not run."},
    ),
    Row(
        GROUP,
        "continuous batching (`generate_batch`)",
        run=continuous_batching,
        unless=_batches,
        lasting=False,
    ),
)
