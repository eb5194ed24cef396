"""Inputs of diffusers' models: latents, images, timesteps, embeddings of prompts, RoPE tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.inputs.diffusers_own import OWN
from hfpatch.inputs.proposal import Inputs, NoInputs, Proposal, parts_of

#: Tokens of a prompt.
_TEXT = 7
#: The parts of a video in latents: frames, rows, columns.
_FRAMES, _ROWS, _COLUMNS = 3, 4, 6
#: Of a configuration's `sample_size`, what is taken as a side: sound has tens of thousands.
_LARGEST_SIDE = 512
#: Configurations' names for the width of a prompt's embedding, the most particular first.
_WIDTHS = (
    "caption_channels", "cap_feat_dim", "encoder_hid_dim", "joint_attention_dim", "text_dim",
    "text_embed_dim", "text_states_dim", "text_embed_channels", "caption_feature_dim",
    "encoder_hidden_states_channels", "text_hidden_dim", "cross_attention_input_dim",
    "cross_attention_dim", "context_dim", "condition_dim", "context_in_dim", "dit_text_dim",
    "cond_token_dim", "in_text_dim", "encoder_hidden_size",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What one proposal is made of.

    Attributes:
        latents: the shape of the main input without the batch.
        grid: frames, rows and columns; tokens are their product.
        width: of the prompt's embedding; None if there is none.
        boolean: whether masks are.
        floating: whether timesteps are, where those of most models are whole numbers.
    """

    latents: tuple[int, ...]
    grid: tuple[int, int, int]
    width: int | None
    boolean: bool = False
    floating: bool = False


def proposals(p: Proposal) -> Iterator[Inputs]:
    """The likeliest first."""
    if own := OWN.get(type(p.model).__name__):
        yield own(p)
        return
    parts = parts_of(p.model)
    main = next((n for n in ("hidden_states", "sample", "x") if p.has(n)), None)
    if main is None:
        raise NoInputs(f"`{type(p.model).__name__}`: no argument of its forward holds latents")
    for layout in _layouts(p):
        inputs: Inputs = {main: p.floats(p.batch, *layout.latents)}
        if main == "x":  # a list, an image each
            inputs = {"x": list(inputs["x"].unbind(0))}
        for name in p.parameters:
            make = _ARGUMENTS.get(name)
            value = None if make is None or name == main else make(p, layout)
            if value is not None:
                inputs[name] = value
        missing = [n for n in p.required() if n not in inputs and not (parts and n in _LISTS)]
        if missing:
            raise NoInputs(
                f"`{type(p.model).__name__}`: nothing is known of its argument `{missing[0]}`"
            )
        for name, default in _LISTS.items() if parts else ():
            if p.has(name):  # one for each of the models
                inputs[name] = [inputs.get(name, default(p))] * len(parts)
        if parts and p.has("return_dict"):  # some take the outputs of their parts as tuples
            inputs["return_dict"] = False
        yield inputs


def _layouts(p: Proposal) -> Iterator[Layout]:
    widths: list[int | None] = []
    if _takes_text(p):
        widths = [w for w in (_get(p, n) for n in _WIDTHS) if isinstance(w, int)]
        inner = (_get(p, "num_attention_heads") or 0) * (_get(p, "attention_head_dim") or 0)
        widths += [inner] if isinstance(inner, int) and inner else []
    shapes = list(_shapes(p))
    for floating in (False,) if _flow(p) else (False, True):
        for shape, grid in shapes:
            for width in dict.fromkeys(widths or [None]):
                for boolean in (False, True) if _masks(p) else (False,):
                    yield Layout(shape, grid, width, boolean, floating)


def _takes_text(p: Proposal) -> bool:
    return any(p.has(n) for n in ("encoder_hidden_states", "cap_feats"))


def _masks(p: Proposal) -> bool:
    return any(p.has(n) for n in ("encoder_attention_mask", "encoder_hidden_states_mask"))


def _get(p: Proposal, *names: str) -> Any:
    """The first of these numbers that the configuration has; of one per block, the last block's."""
    for name in names:
        found = p.config.get(name) if hasattr(p.config, "get") else getattr(p.config, name, None)
        if isinstance(found, (list, tuple)) and found:
            found = found[-1]
        if found is not None:
            return found
    return None


def _shapes(p: Proposal) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int]]]:
    """Shapes of the main input, with the grid that they stand for."""
    own = type(p.model).__name__
    channels = _get(p, "in_channels", "num_channels_in", "encoder_in_channels", "audio_channels")
    channels = channels or (4 if p.has("timestep") else 3)
    patch = _patch(p)
    rows = p.sizes.get("height", _ROWS * patch)
    columns = p.sizes.get("width", _COLUMNS * patch)
    chosen = bool(p.sizes.used & {"height", "width"})
    size = _get(p, "sample_size")
    side = size if isinstance(size, int) and size <= _LARGEST_SIDE and not chosen else None
    if "1D" in own:  # sound
        length = size if isinstance(size, int) and size <= _LARGEST_SIDE else 256
        yield (channels, p.sizes.get("width", length)), (1, 1, length)
        return
    high, wide, frame_count = rows // patch, columns // patch, _FRAMES
    tokens = p.has("img_ids") or p.has("img_shapes") or (p.has("num_frames") and p.has("width"))
    flat = (1, high, wide)
    if p.has("num_frames") or "Video" in own or "3D" in own:
        frame_count = p.sizes.get("frames", _FRAMES)
    video = (frame_count, high, wide)
    if tokens and p.has("num_frames"):
        yield (frame_count * high * wide, channels), video
        return
    if tokens:
        yield (high * wide, channels), flat
    if p.has("x") and not p.has("sample"):
        yield (channels, 1, rows, columns), flat
    depth = len(_list(p, "block_out_channels", "encoder_block_out_channels", "down_block_types"))
    if p.has("sample_posterior") or own.startswith(("Autoencoder", "VQ")):
        if _get(p, "sampling_rate", "sample_rate"):
            heard = (_get(p, "num_channels", "audio_channels", "in_channels"), 2, 1)
            for count in dict.fromkeys(c for c in heard if isinstance(c, int)):
                yield (count, p.sizes.get("width", 8192)), flat
        side = 16 * max(1, 2 ** (max(depth, 4) - 4)) * 2
        side = p.sizes.get("height", side)
        across = p.sizes.get("width", side)
        yield (channels, side, across), flat
        yield (channels, 1, side, across), flat
        for count in (9, 8) if "frames" not in p.sizes.unused() else (p.sizes.get("frames"),):
            yield (channels, count, side, across), (count, side, across)
        if "frames" not in p.sizes.unused() and not chosen:
            yield (channels, 9, 2 * side, 2 * across), (9, 2 * side, 2 * across)
        if (seen := _get(p, "out_channels")) and seen != channels:  # features are added inside
            yield (seen, 7, side, across), (7, side, across)
        return
    cube = (channels, frame_count, rows, columns)
    if "Video" in own or "3D" in own or p.has("num_frames"):
        yield cube, video
        yield (frame_count, channels, rows, columns), video
        frames = _get(p, "sample_frames", "num_frames")
        if side and isinstance(frames, int):
            yield (channels, frames, side, side), (frames, side // patch, side // patch)
    if side is None and depth and not chosen:
        side = 8 * 2 ** max(depth - 3, 0)
    if side:
        yield (channels, side, side), (1, side // patch, side // patch)
        yield (channels, side), flat
    yield (channels, rows, columns), flat
    yield cube, video
    yield (frame_count, channels, rows, columns), video
    yield (channels, 64), flat
    yield (24, channels), flat


def _patch(p: Proposal) -> int:
    found = _get(p, "patch_size")
    return found if isinstance(found, int) else 2


def _list(p: Proposal, *names: str) -> Any:
    for name in names:
        found = p.config.get(name)
        if isinstance(found, (list, tuple)):
            return found
    return ()


# What arguments are made of, by their names -------------------------------------------------------


def _prompt(p: Proposal, layout: Layout) -> Any:
    if layout.width is None:
        return None
    batch, length = p.batch, _TEXT
    if _get(p, "motion_max_seq_length"):  # one for each frame
        batch *= layout.latents[1]
    fixed = _get(p, "max_text_seq_length")
    if isinstance(fixed, int) and not _get(p, "use_rotary_positional_embeddings"):
        length = fixed  # their positions are added
    return p.floats(batch, length, layout.width)


def _prompt_mask(p: Proposal, layout: Layout) -> Any:
    if layout.width is None:
        return None
    mask = p.mask(_TEXT)
    return mask.bool() if layout.boolean else mask


def _flow(p: Proposal) -> bool:
    """Timesteps from 0 to 1, which the model multiplies by 1000: exact in bf16."""
    return p.has("img_ids") or p.has("img_shapes") or p.has("t")


def _timestep(p: Proposal, layout: Layout) -> Any:
    values = [0.25, 0.125] if _flow(p) else [900, 300]
    times = torch.tensor([values[i % 2] for i in range(p.batch)], device=p.device)
    return times.to(p.dtype) if times.is_floating_point() or layout.floating else times


def _guidance(p: Proposal, layout: Layout) -> Any:
    if not _get(p, "guidance_embeds") and "guidance" not in p.required():
        return None
    scale = 1.0 if _flow(p) else 1000.0
    values = torch.tensor([4.0 * scale, 2.0 * scale] * p.batch, device=p.device)[: p.batch]
    return values.to(p.dtype)


def _pooled(p: Proposal, layout: Layout) -> Any:
    width = _get(p, "pooled_projection_dim", "pooled_embed_dim")
    return p.floats(p.batch, width) if width else None


def _axes(p: Proposal) -> int:
    return len(_list(p, "axes_dims_rope", "axes_dim", "axes_dims", "rope_axes_dim")) or 3


def _image_ids(p: Proposal, layout: Layout) -> Any:
    _, rows, columns = layout.grid
    ids = torch.zeros(rows, columns, _axes(p))
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.flatten(0, 1).to(p.device, p.dtype)


def _text_ids(p: Proposal, layout: Layout) -> Any:
    return torch.zeros(_TEXT, _axes(p), device=p.device, dtype=p.dtype)


def _image_shapes(p: Proposal, layout: Layout) -> Any:
    return [[layout.grid]] * p.batch


def _rope(p: Proposal, layout: Layout) -> Any:
    """(cos, sin) `[tokens, head]` for models that take their tables."""
    if not _get(p, "use_rotary_positional_embeddings") and "image_rotary_emb" not in p.required():
        return None
    head = _get(p, "attention_head_dim")
    if not isinstance(head, int):
        return None
    frames, rows, columns = layout.grid
    if len(layout.latents) == 4 and "CogVideo" in type(p.model).__name__:
        rows, columns = (side // _patch(p) for side in layout.latents[-2:])
    angles = p.floats(frames * rows * columns, head // 2).float().repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def _sound_rope(p: Proposal, layout: Layout) -> Any:
    """(cos, sin) of half a head, for the sound's tokens and that of the whole."""
    head = _get(p, "attention_head_dim")
    angles = p.floats(layout.latents[-1] + 1, head // 4).float().repeat(1, 2)
    return angles.cos(), angles.sin()


def _whole(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, 1, _get(p, "global_states_input_dim"))


def _added(p: Proposal, layout: Layout) -> Any:
    """SDXL's sizes and pooled prompt; PixArt's resolution, where its model asks for it."""
    if _get(p, "addition_embed_type") == "text_time":
        each = _get(p, "addition_time_embed_dim")
        width = _get(p, "projection_class_embeddings_input_dim") - 6 * each
        times = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * p.batch, device=p.device)
        return {"text_embeds": p.floats(p.batch, width), "time_ids": times.to(p.dtype)}
    if "PixArt" in type(p.model).__name__:
        if _get(p, "use_additional_conditions"):
            sizes = torch.full((p.batch, 2), 64.0, device=p.device, dtype=p.dtype)
            return {"resolution": sizes, "aspect_ratio": sizes[:, :1] / 64}
        return {"resolution": None, "aspect_ratio": None}
    return None


def _time_ids(p: Proposal, layout: Layout) -> Any:
    """Stable Video Diffusion's frames per second, motion and noise."""
    each, width = (
        _get(p, n) for n in ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
    )
    if not each or not width:
        return None
    return p.integers(100, p.batch, width // each, low=1).to(p.dtype)


def _labels(p: Proposal, layout: Layout) -> Any:
    kind = _get(p, "class_embed_type")
    if kind == "projection":
        return p.floats(p.batch, _get(p, "projection_class_embeddings_input_dim"))
    count = _get(p, "num_class_embeds")
    if count is None and "DiT" in type(p.model).__name__:
        count = _get(p, "num_embeds_ada_norm")
    return p.integers(count, p.batch) if isinstance(count, int) else None


def _control(p: Proposal, layout: Layout) -> Any:
    """A picture in pixels, or more latents, for models that do not scale a picture themselves."""
    if not p.config.get("conditioning_embedding_out_channels") and not p.config.get(
        "ctrl_conditioning_embedding_out_channels"
    ):
        more = _get(p, "extra_conditioning_channels", "extra_condition_channels") or 0
        at = -1 if len(layout.latents) == 2 else 0
        shape = list(layout.latents)
        shape[at] += more
        return p.floats(p.batch, *shape)
    channels = _get(p, "conditioning_channels", "ctrl_conditioning_channels") or 3
    if len(layout.latents) == 4:  # of a video, and in latents
        return p.floats(p.batch, channels, *layout.latents[1:])
    stages = len(
        _list(p, "conditioning_embedding_out_channels", "ctrl_conditioning_embedding_out_channels")
    )
    factor = 2 ** (stages - 1)
    rows, columns = layout.latents[-2:]
    return p.floats(p.batch, channels, factor * rows, factor * columns)


def _sound(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, 6, _get(p, "audio_in_channels"))


def _sound_prompt(p: Proposal, layout: Layout) -> Any:
    return _prompt(p, layout)


def _captions(p: Proposal, layout: Layout) -> Any:
    """A list, one `[tokens, width]` of its own length each."""
    if layout.width is None:
        return None
    return [p.floats(_TEXT + 33 * (i % 2), layout.width) for i in range(p.batch)]


def _pair(p: Proposal, layout: Layout) -> Any:
    return torch.full((p.batch, 2), 64.0, device=p.device, dtype=p.dtype)


def _padding(p: Proposal, layout: Layout) -> Any:
    if "padding_mask" not in p.required() and not _get(p, "concat_padding_mask"):
        return None
    return torch.zeros(1, 1, *layout.latents[-2:], device=p.device, dtype=p.dtype)


def _projected(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, _get(p, "embedding_dim"))


def _second_prompt(p: Proposal, layout: Layout) -> Any:
    width = _get(p, "text_embed_2_dim", "cross_attention_dim_t5", "text_embed_dim_t5")
    return p.floats(p.batch, _TEXT, width) if width else None


def _second_mask(p: Proposal, layout: Layout) -> Any:
    return None if _second_prompt(p, layout) is None else _prompt_mask(p, layout)


def _earlier(p: Proposal, layout: Layout) -> Any:
    """The second time of a step, of models that learn averages over it."""
    needs = any(_get(p, n) for n in ("use_meanflow", "deltatime_type", "is_turbo"))
    if not needs and not {"timestep_r", "r_timestep"} & set(p.required()):
        return None
    times = _timestep(p, layout)
    return times / 2 if times.is_floating_point() else times // 2


def _image_prompt(p: Proposal, layout: Layout) -> Any:
    """What a picture's encoder says of one."""
    width = _get(p, "image_embed_dim", "image_proj_dim", "image_dim")
    return p.floats(p.batch, _TEXT, width) if width else None


def _image_vector(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, _get(p, "cross_attention_dim"))


def _frame_indices(p: Proposal, layout: Layout) -> Any:
    return torch.arange(layout.latents[1], device=p.device)


def _video_control(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, _get(p, "vace_in_channels"), *layout.latents[1:])


def _rates(p: Proposal, layout: Layout) -> Any:
    """Frames per second, where they are a number of each video."""
    return torch.full((p.batch,), 16, device=p.device) if "fps" in p.required() else None


def _more_latents(p: Proposal, layout: Layout) -> Any:
    return p.floats(p.batch, *layout.latents)


def _control_mask(p: Proposal, layout: Layout) -> Any:
    if not _get(p, "concat_conditioning_mask"):
        return None
    return torch.ones(p.batch, 1, *layout.latents[1:], device=p.device, dtype=p.dtype)


def _no_kwargs(p: Proposal, layout: Layout) -> Any:
    """Some hand them on with two stars, which None does not take."""
    return {} if "image_rotary_emb" in p.required() else None


def _styles(p: Proposal, layout: Layout) -> Any:
    return torch.zeros(p.batch, dtype=torch.int64, device=p.device)


def _image_sizes(p: Proposal, layout: Layout) -> Any:
    """The original's, the target's and where it was cut."""
    sizes = torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * p.batch, device=p.device)
    return sizes.to(p.dtype)


#: Arguments of which models that hold several others take a list.
_LISTS: dict[str, Callable[[Proposal], Any]] = {
    "controlnet_cond": lambda p: None,
    "conditioning_scale": lambda p: 1.0,
    "controlnet_mode": lambda p: torch.zeros(p.batch, dtype=torch.int64, device=p.device),
}

_ARGUMENTS: dict[str, Callable[[Proposal, Layout], Any]] = {
    "encoder_hidden_states": _prompt,
    "encoder_attention_mask": _prompt_mask,
    "encoder_hidden_states_mask": _prompt_mask,
    "timestep": _timestep,
    "timesteps": _timestep,
    "t": _timestep,
    "guidance": _guidance,
    "pooled_projections": _pooled,
    "img_ids": _image_ids,
    "txt_ids": _text_ids,
    "img_shapes": _image_shapes,
    "image_rotary_emb": _rope,
    "rotary_embedding": _sound_rope,
    "global_hidden_states": _whole,
    "added_cond_kwargs": _added,
    "added_time_ids": _time_ids,
    "class_labels": _labels,
    "controlnet_cond": _control,
    "num_frames": lambda p, layout: layout.grid[0],
    "height": lambda p, layout: layout.grid[1],
    "width": lambda p, layout: layout.grid[2],
    "rope_interpolation_scale": lambda p, layout: (8 / 25, 32, 32),
    "audio_hidden_states": _sound,
    "audio_encoder_hidden_states": _sound_prompt,
    "audio_encoder_attention_mask": _prompt_mask,
    "audio_num_frames": lambda p, layout: 6,
    "cap_feats": _captions,
    "original_size": _pair,
    "target_size": _pair,
    "crop_coords": _pair,
    "padding_mask": _padding,
    "proj_embedding": _projected,
    "encoder_hidden_states_2": _second_prompt,
    "encoder_attention_mask_2": _second_mask,
    "encoder_hidden_states_t5": _second_prompt,
    "text_embedding_mask": _prompt_mask,
    "text_embedding_mask_t5": _prompt_mask,
    "encoder_mask": _prompt_mask,
    "image_meta_size": _image_sizes,
    "style": _styles,
    "timestep_r": _earlier,
    "r_timestep": _earlier,
    "image_embeds": _image_prompt,
    "encoder_hidden_states_image": _image_prompt,
    "image_embeddings": _image_vector,
    "image_latents": _more_latents,
    "indices_latents": _frame_indices,
    "control_hidden_states": _video_control,
    "fps": _rates,
    "cross_attention_kwargs": _no_kwargs,
    "conditioning_mask": _control_mask,
}
