"""Inputs of those of diffusers' models whose forwards take what no other's does, by their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfpatch.inputs.proposal import Inputs, Proposal

#: Tokens of a prompt, frames, rows and columns of latents after patches, tokens of sound.
_TEXT, _FRAMES, _ROWS, _COLUMNS, _SOUND = 7, 3, 4, 6, 24


def _times(p: Proposal, *values: float) -> Tensor:
    """One for each of the batch; exact in bf16."""
    cycle = [values[i % len(values)] for i in range(p.batch)]
    return torch.tensor(cycle, device=p.device, dtype=p.dtype)


def _video(p: Proposal, patch: int = 1) -> tuple[int, int, int]:
    """Frames, and rows and columns of latents, which are multiples of `patch`."""
    rows, columns = p.sizes.get("height", _ROWS * patch), p.sizes.get("width", _COLUMNS * patch)
    return p.sizes.get("frames", _FRAMES), rows, columns


def _picture(p: Proposal, patch: int = 1) -> tuple[int, int]:
    return p.sizes.get("height", _ROWS * patch), p.sizes.get("width", _COLUMNS * patch)


def _grid(p: Proposal, *sizes: int) -> Tensor:
    """`[product, axes]`: the place of each token of a grid."""
    axes = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2).to(p.device)


def _anima_text_conditioner(p: Proposal) -> Inputs:
    c, length = p.config, p.sizes.get("length", _TEXT)
    return {
        "source_hidden_states": p.floats(p.batch, length, c["source_dim"]),
        "target_input_ids": p.integers(c["target_vocab_size"], p.batch, length + 2),
        "target_attention_mask": p.mask(length + 2),
        "source_attention_mask": p.mask(length),
    }


def _ace_step(p: Proposal) -> Inputs:
    c, length = p.config, p.sizes.get("width", _SOUND)
    own = c["audio_acoustic_hidden_dim"]
    times = _times(p, 0.25, 0.125)
    return {
        "hidden_states": p.floats(p.batch, length, own),
        "timestep": times,
        "timestep_r": times,
        "encoder_hidden_states": p.floats(
            p.batch, _TEXT, c["encoder_hidden_size"] or c["hidden_size"]
        ),
        "context_latents": p.floats(p.batch, length, c["in_channels"] - own),
    }


def _any_flow(p: Proposal) -> Inputs:
    """A time of each frame; frames in chunks, where it takes them so."""
    c = p.config
    chunks = (1, 2)
    _, rows, columns = _video(p, max(c.get("compressed_patch_size", c["patch_size"])))
    times = _times(p, 900, 300)[:, None].expand(-1, sum(chunks)).contiguous()
    made: Inputs = {
        "hidden_states": p.floats(p.batch, sum(chunks), c["in_channels"], rows, columns),
        "timestep": times,
        "r_timestep": times / 2,
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_dim"]),
    }
    return made | ({"chunk_partition": chunks} if p.has("chunk_partition") else {})


def _bria_fibo(p: Proposal) -> Inputs:
    c = p.config
    rows, columns = _picture(p)
    ids = torch.zeros(rows * columns, 3, device=p.device, dtype=p.dtype)
    ids[:, 1:] = _grid(p, rows, columns)
    layers = c["num_layers"] + c["num_single_layers"]
    return {
        "hidden_states": p.floats(p.batch, rows * columns, c["in_channels"]),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["joint_attention_dim"]),
        "text_encoder_layers": [
            p.floats(p.batch, _TEXT, c["text_encoder_dim"]) for _ in range(layers)
        ],
        "timestep": _times(p, 900, 300),
        "img_ids": ids,
        "txt_ids": torch.zeros(_TEXT, 3, device=p.device, dtype=p.dtype),
    }


def _bria_fibo2(p: Proposal) -> Inputs:
    c = p.config
    rows, columns = _picture(p, c["patch_size"])
    bundles = 1 + len(c["injection_layer_ids"])
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep": _times(p, 0.25, 0.125),
        "encoder_hidden_states": p.floats(p.batch, bundles, _TEXT, c["cap_feat_dim"]),
        "encoder_attention_mask": p.mask(_TEXT).bool(),
    }


def _consis_id(p: Proposal) -> Inputs:
    c = p.config
    rows, columns = _picture(p, c["patch_size"])
    rows, columns = max(rows, c["sample_height"]), max(columns, c["sample_width"])
    frames = (c["sample_frames"] - 1) // c["temporal_compression_ratio"] + 1
    made: Inputs = {
        "hidden_states": p.floats(p.batch, frames, c["in_channels"], rows, columns),
        "encoder_hidden_states": p.floats(p.batch, c["max_text_seq_length"], c["text_embed_dim"]),
        "timestep": _times(p, 900, 300).long(),
    }
    if c["is_train_face"]:
        made["id_cond"] = p.floats(p.batch, c["LFE_id_dim"])
        made["id_vit_hidden"] = [
            p.floats(p.batch, _TEXT, c["LFE_vit_dim"]) for _ in range(c["LFE_num_scale"])
        ]
    return made


def _controlnet_union(p: Proposal) -> Inputs:
    c = p.config
    side = 8 * 2 ** max(len(c["block_out_channels"]) - 3, 0)
    factor = 2 ** (len(c["conditioning_embedding_out_channels"]) - 1)
    rows, columns = p.sizes.get("height", side), p.sizes.get("width", side)
    made: Inputs = {
        "sample": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep": _times(p, 900, 300).long(),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["cross_attention_dim"]),
        "controlnet_cond": [
            p.floats(p.batch, c["conditioning_channels"], factor * rows, factor * columns)
        ],
        "control_type_idx": [1],
    }
    kinds = torch.zeros(p.batch, c["num_control_type"], device=p.device, dtype=p.dtype)
    kinds[:, 1] = 1
    made["control_type"] = kinds
    if c["addition_embed_type"] == "text_time":
        control = c["projection_class_embeddings_input_dim"]
        each = 6 * c["addition_time_embed_dim"]
        times = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * p.batch, device=p.device)
        text = p.floats(p.batch, control - each)
        made["added_cond_kwargs"] = {"text_embeds": text, "time_ids": times.to(p.dtype)}
    return made


def _cosmos3_omni(p: Proposal) -> Inputs:
    """One prompt and the latents of one video in a row: its forward knows no batch."""
    c, patch = p.config, p.config["latent_patch_size"]
    frames, rows, columns = _video(p, patch)
    rows, columns = -(-rows // patch), -(-columns // patch)
    text, seen = _TEXT, frames * rows * columns
    places = torch.cat(
        [torch.arange(text)[:, None].expand(-1, 3).to(p.device), _grid(p, frames, rows, columns)]
    )
    noisy = torch.arange(frames, device=p.device)
    indexes = torch.arange(text, text + seen, device=p.device)
    return {
        "input_ids": p.integers(c["vocab_size"], text),
        "text_indexes": torch.arange(text, device=p.device),
        "position_ids": places.T.contiguous(),
        "und_len": text,
        "sequence_length": text + seen,
        "vision_tokens": [p.floats(1, c["latent_channel"], frames, rows * patch, columns * patch)],
        "vision_token_shapes": [(frames, rows, columns)],
        "vision_sequence_indexes": indexes,
        "vision_mse_loss_indexes": indexes,
        "vision_timesteps": torch.full((seen,), 900.0, device=p.device),
        "vision_noisy_frame_indexes": [noisy],
    }


def _ernie_image(p: Proposal) -> Inputs:
    c = p.config
    rows, columns = _picture(p, c["patch_size"])
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep": _times(p, 900, 300),
        "text_bth": p.floats(p.batch, _TEXT, c["text_in_dim"]),
        "text_lens": torch.tensor([_TEXT - i % 3 for i in range(p.batch)], device=p.device),
    }


def _glm_image(p: Proposal) -> Inputs:
    c, patch = p.config, p.config["patch_size"]
    rows, columns = _picture(p, patch)
    tokens = (rows // patch) * (columns // patch)
    pair = torch.full((p.batch, 2), 64.0, device=p.device, dtype=p.dtype)
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_embed_dim"]),
        "prior_token_id": p.integers(c["prior_vq_quantizer_codebook_size"], p.batch, tokens),
        "prior_token_drop": torch.zeros(p.batch, tokens, dtype=torch.bool, device=p.device),
        "timestep": _times(p, 900, 300).long(),
        "target_size": pair,
        "crop_coords": pair * 0,
    }


def _hi_dream(p: Proposal) -> Inputs:
    c, patch = p.config, p.config["patch_size"]
    rows, columns = p.sizes.get("height", _ROWS * patch), p.sizes.get("width", _ROWS * patch)
    t5, llama = c["caption_channels"]
    layers = 1 + max(c["llama_layers"])
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "timesteps": _times(p, 900, 300),
        "encoder_hidden_states_t5": p.floats(p.batch, _TEXT, t5),
        "encoder_hidden_states_llama3": p.floats(layers, p.batch, _TEXT, llama),
        "pooled_embeds": p.floats(p.batch, c["text_emb_dim"]),
    }


def _hunyuan_video15_vae(p: Proposal) -> Inputs:
    """Of one video: its attention's mask goes with no batch."""
    c = p.config
    side = 4 * c["spatial_compression_ratio"]
    rows, columns = p.sizes.get("height", side), p.sizes.get("width", side)
    frames = p.sizes.get("frames", 1 + 2 * c["temporal_compression_ratio"])
    return {"sample": p.floats(1, c["in_channels"], frames, rows, columns)}


def _framepack(p: Proposal) -> Inputs:
    """A section of a video, after frames before it at a whole, a half and a quarter of the size."""
    c, patch = p.config, p.config["patch_size"]
    frames, rows, columns = _video(p, patch)

    def latents(count: int) -> Tensor:
        return p.floats(p.batch, c["in_channels"], count, rows, columns)

    made: Inputs = {
        "hidden_states": latents(frames),
        "timestep": _times(p, 900, 300).long(),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_embed_dim"]),
        "encoder_attention_mask": p.mask(_TEXT),
        "pooled_projections": p.floats(p.batch, c["pooled_projection_dim"]),
        "image_embeds": p.floats(p.batch, _TEXT, c["image_proj_dim"]),
        "indices_latents": torch.arange(7, 7 + frames),
    }
    if c["guidance_embeds"]:
        made["guidance"] = _times(p, 4000, 2000)
    if c["has_clean_x_embedder"]:
        made |= {"latents_clean": latents(1), "indices_latents_clean": torch.arange(1)}
        made |= {"latents_history_2x": latents(2), "indices_latents_history_2x": torch.arange(1, 3)}
        made |= {"latents_history_4x": latents(4), "indices_latents_history_4x": torch.arange(3, 7)}
    return made


def _ideogram4(p: Proposal) -> Inputs:
    """Text and image in one row: which each token is, an `indicator` says."""
    c = p.config
    rows, columns = _picture(p)
    seen = rows * columns
    places = torch.zeros(_TEXT + seen, 3, dtype=torch.int64, device=p.device)
    places[:_TEXT] = torch.arange(_TEXT, device=p.device)[:, None]
    places[_TEXT:, 1:] = _grid(p, rows, columns)
    places[_TEXT:] += 65536  # where it has the places of images
    kinds = torch.tensor([3] * _TEXT + [2] * seen, device=p.device)
    segments = torch.ones(p.batch, _TEXT + seen, dtype=torch.int64, device=p.device)
    segments[-1, :2] = -1  # padding before a shorter text
    return {
        "hidden_states": p.floats(p.batch, _TEXT + seen, c["in_channels"]),
        "timestep": _times(p, 0.25, 0.125),
        "encoder_hidden_states": p.floats(p.batch, _TEXT + seen, c["llm_features_dim"]),
        "position_ids": places.expand(p.batch, -1, -1),
        "segment_ids": segments,
        "indicator": kinds.expand(p.batch, -1),
    }


def _joy_edit_plus(p: Proposal) -> Inputs:
    c = p.config
    _, rows, columns = _video(p)
    patches = rows * columns
    return {
        "hidden_states": p.floats(p.batch, patches, c["in_channels"], *c["patch_size"]),
        "timestep": _times(p, 900, 300),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_dim"]),
        "encoder_hidden_states_mask": p.mask(_TEXT),
        "shape_list": [[(1, rows, columns)]] * p.batch,
    }


def _kandinsky5(p: Proposal) -> Inputs:
    c = p.config
    deep, high, wide = c["patch_size"]
    frames, rows, columns = _video(p, high)
    channels = 2 * c["in_visual_dim"] + 1 if c["visual_cond"] else c["in_visual_dim"]
    sizes = (frames // deep, rows // high, columns // wide)
    return {
        "hidden_states": p.floats(p.batch, frames, rows, columns, channels),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["in_text_dim"]),
        "timestep": _times(p, 900, 300),
        "pooled_projections": p.floats(p.batch, c["in_text_dim2"]),
        "visual_rope_pos": [torch.arange(n, device=p.device) for n in sizes],
        "text_rope_pos": torch.arange(_TEXT, device=p.device),
    }


def _kandinsky6(p: Proposal) -> Inputs:
    c = p.config
    frames, rows, columns = _video(p, c["patch_size"][1])
    channels = 2 * c["in_visual_dim"] + 1 if c["visual_cond"] else c["in_visual_dim"]
    return {
        "hidden_states": p.floats(p.batch, frames, rows, columns, channels),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["in_text_dim"]),
        "pooled_projections": p.floats(p.batch, c["in_text_dim2"]),
        "timestep": _times(p, 900, 300),
        "audio_hidden_states": p.floats(p.batch, _SOUND, c["in_audio_dim"]),
    }


def _kandinsky6_upscaler(p: Proposal) -> Inputs:
    frames, rows, columns = _video(p)
    latents = p.floats(p.batch, p.config["in_channels"], frames, rows, columns)
    return {"latents": latents, "scale": p.config["scales"][0]}


def _kandinsky6_sr(p: Proposal) -> Inputs:
    side = 8  # of its blocks of tokens
    rows, columns = p.sizes.get("height", 2 * side), p.sizes.get("width", side)
    channels = 2 * p.config["in_visual_dim"] + 1
    return {
        "hidden_states": p.floats(p.batch, p.sizes.get("frames", 2), rows, columns, channels),
        "timestep": _times(p, 900, 300),
    }


def _krea2(p: Proposal) -> Inputs:
    c = p.config
    rows, columns = _picture(p)
    places = torch.zeros(_TEXT + rows * columns, 3, device=p.device)
    places[_TEXT:, 1:] = _grid(p, rows, columns)
    return {
        "hidden_states": p.floats(p.batch, rows * columns, c["in_channels"]),
        "encoder_hidden_states": p.floats(
            p.batch, _TEXT, c["num_text_layers"], c["text_hidden_dim"]
        ),
        "timestep": _times(p, 0.25, 0.125),
        "position_ids": places,
        "encoder_attention_mask": p.mask(_TEXT).bool(),
    }


def _latents_alone(name: str, *channels: str) -> Callable[[Proposal], Inputs]:
    """Sound: `[batch, channels, time]`."""

    def make(p: Proposal) -> Inputs:
        width = next(p.config[c] for c in channels if c in p.config)
        return {name: p.floats(p.batch, width, p.sizes.get("width", _SOUND))}

    return make


def _ltx2_decoder(p: Proposal) -> Inputs:
    least = p.config["decoder_stage_kernels"][0]  # neighbours that its attention sees
    sizes = [
        p.sizes.get(n, max(2, k)) for n, k in zip(("frames", "height", "width"), least, strict=True)
    ]
    return {"z": p.floats(1, p.config["latent_channels"], *sizes)}


def _long_cat_audio(p: Proposal) -> Inputs:
    c, length = p.config, p.sizes.get("width", _SOUND)
    made: Inputs = {
        "hidden_states": p.floats(p.batch, length, c["latent_dim"]),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["dit_text_dim"]),
        "encoder_attention_mask": p.mask(_TEXT),
        "timestep": _times(p, 0.25, 0.125),
        "attention_mask": p.mask(length).bool(),
    }
    if c["use_latent_condition"]:
        made["latent_cond"] = p.floats(p.batch, length, c["latent_dim"])
    return made


def _lumina_next(p: Proposal) -> Inputs:
    """Its RoPE is a table of complex numbers, `[side, side, half a head]`."""
    c, patch = p.config, p.config["patch_size"]
    rows, columns = _picture(p, patch)
    head = c["hidden_size"] // c["num_attention_heads"]
    rates = 10000.0 ** -(torch.arange(0, head // 2, 2)[: head // 4].float() / (head // 2))
    sides = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    angles = torch.stack([side[..., None] * rates for side in sides], -1).flatten(-2)
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep": _times(p, 0.25, 0.125),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["cross_attention_dim"]),
        "encoder_mask": p.mask(_TEXT),
        "image_rotary_emb": torch.polar(torch.ones_like(angles), angles).to(p.device),
        "cross_attention_kwargs": {},  # its layers hand them on with two stars
    }


def _mini_max_h3_vae(p: Proposal) -> Inputs:
    """Two clips: the end of each is dropped, so that one alone leaves nothing to decode."""
    c = p.config
    rows, columns = p.sizes.get("height", 32), p.sizes.get("width", 32)
    frames = p.sizes.get("frames", 2 * c["clip_length"])
    return {"sample": p.floats(p.batch, c["in_channels"], frames, rows, columns)}


def _mini_max_h3(p: Proposal) -> Inputs:
    """Text, video and sound in one row; the batch repeats the same row."""
    c = p.config
    frames, rows, columns = _video(p)
    seen, heard = frames * rows * columns, 6
    length = _TEXT + seen + heard
    places = torch.zeros(length, 3, device=p.device)
    places[:_TEXT] = torch.arange(_TEXT, device=p.device)[:, None].float()
    places[_TEXT : _TEXT + seen] = _grid(p, frames, rows, columns).float()
    places[_TEXT + seen :, 0] = torch.arange(heard, device=p.device).float()
    tags = torch.tensor([0] * _TEXT + [1] * seen + [2] * heard, device=p.device)
    row = torch.arange(length, device=p.device)
    width = c["in_channels"] * c["patch_size"][0] * c["patch_size"][1] * c["patch_size"][2]
    return {
        "hidden_states": p.floats(p.batch, seen, width),
        "audio_hidden_states": p.floats(p.batch, heard, c["audio_in_channels"]),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_dim"]),
        "timestep": torch.tensor([900.0, 300.0], device=p.device),
        "timestep_indices": (tags > 0).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": row[_TEXT : _TEXT + seen],
        "audio_indices": row[_TEXT + seen :],
        "text_indices": row[:_TEXT],
    }


def _waves(p: Proposal) -> Inputs:
    return {"sample": p.floats(p.batch, p.sizes.get("width", 16384))}


def _music3_condition(p: Proposal) -> Inputs:
    width = p.config["condition_hidden_dim"] * p.config["num_condition_layers"]
    return {"hidden_states": p.floats(p.batch, p.sizes.get("length", _TEXT), width)}


def _music3_depth(p: Proposal) -> Inputs:
    length = p.sizes.get("length", p.config["num_codebooks"])
    return {"inputs_embeds": p.floats(p.batch, length, p.config["hidden_size"])}


def _music3(p: Proposal) -> Inputs:
    c, length = p.config, p.sizes.get("width", _SOUND)
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], length),
        "timestep": _times(p, 0.25, 0.125),
        "encoder_hidden_states": p.floats(p.batch, length, c["condition_dim"]),
    }


def _omni_gen(p: Proposal) -> Inputs:
    c, patch = p.config, p.config["patch_size"]
    rows, columns = _picture(p, patch)
    total = _TEXT + 1 + (rows // patch) * (columns // patch)
    mask = torch.ones(p.batch, total, total, device=p.device, dtype=p.dtype)
    mask[:, :_TEXT] = torch.ones(_TEXT, total, device=p.device, dtype=p.dtype).tril()
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep": _times(p, 0.25, 0.125),
        "input_ids": p.integers(c["vocab_size"], p.batch, _TEXT),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask,
        "position_ids": torch.arange(total, device=p.device).expand(p.batch, -1),
    }


def _prior(p: Proposal) -> Inputs:
    c = p.config
    width = c["embedding_dim"]
    made: Inputs = {
        "hidden_states": p.floats(p.batch, width),
        "timestep": _times(p, 900, 300).long(),
        "proj_embedding": p.floats(p.batch, c["embedding_proj_dim"] or width),
    }
    if c["encoder_hid_proj_type"]:
        made["encoder_hidden_states"] = p.floats(p.batch, c["num_embeddings"], width)
        made["attention_mask"] = p.mask(c["num_embeddings"]).bool()
    return made


def _qwen_image21(p: Proposal) -> Inputs:
    """A place of the prompt stands for four tokens of the image."""
    c = p.config
    rows, columns = p.sizes.get("height", _ROWS), p.sizes.get("width", _COLUMNS)
    seen = rows * columns
    mask = torch.tensor([False] * _TEXT + [True] * (seen // 4), device=p.device)
    return {
        "hidden_states": p.floats(p.batch, seen, c["in_channels"]),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["context_in_dim"]),
        "timestep": _times(p, 0.25, 0.125)[:1].expand(p.batch),
        "img_shapes": [[(1, rows, columns)]] * p.batch,
        "img_mask": mask.expand(p.batch, -1),
        "encoder_hidden_states_mask": p.mask(_TEXT),
    }


def _sana_wm(p: Proposal) -> Inputs:
    c = p.config
    frames, rows, columns = _video(p)
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], frames, rows, columns),
        "timestep": _times(p, 900, 300)[:, None, None].expand(-1, 1, frames).contiguous(),
        "encoder_hidden_states": p.floats(p.batch, 1, _TEXT, c["caption_channels"]),
        "encoder_attention_mask": p.mask(_TEXT)[:, None, None],
        "chunk_plucker": p.floats(p.batch, c["chunk_plucker_channels"], frames, rows, columns),
    }


def _sana_wm_refiner(p: Proposal) -> Inputs:
    c = p.config
    frames, rows, columns = _video(p)
    tokens, inner = frames * rows * columns, c["num_attention_heads"] * c["attention_head_dim"]
    angles = p.floats(p.batch, tokens, inner // 2).float().repeat_interleave(2, -1)
    if c["rope_type"] == "split":
        heads = c["num_attention_heads"]
        angles = p.floats(p.batch, heads, tokens, c["attention_head_dim"] // 2).float()
    return {
        "hidden_states": p.floats(p.batch, tokens, c["in_channels"]),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["caption_channels"]),
        "timestep": _times(p, 900, 300),
        "video_rotary_emb": (angles.cos().to(p.dtype), angles.sin().to(p.dtype)),
        "encoder_attention_mask": p.mask(_TEXT),
    }


def _stable_audio3(p: Proposal) -> Inputs:
    c, length = p.config, p.sizes.get("width", _SOUND)
    made: Inputs = {
        "hidden_states": p.floats(p.batch, c["io_channels"], length),
        "timestep": _times(p, 0.25, 0.125),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["cond_token_dim"]),
        "global_hidden_states": p.floats(p.batch, c["global_cond_dim"]),
        "encoder_attention_mask": p.mask(_TEXT),
    }
    if c["local_add_cond_dim"] and c["patch_size"] == 1:
        made["local_add_cond"] = p.floats(p.batch, c["local_add_cond_dim"], length)
    return made


def _stable_cascade(p: Proposal) -> Inputs:
    c = p.config
    side = 2 ** len(c["block_out_channels"]) * c["patch_size"]
    rows, columns = _picture(p, side)
    made: Inputs = {
        "sample": p.floats(p.batch, c["in_channels"], rows, columns),
        "timestep_ratio": _times(p, 0.25, 0.125),
        "clip_text_pooled": p.floats(p.batch, 1, c["clip_text_pooled_in_channels"]),
    }
    if c["clip_text_in_channels"]:
        made["clip_text"] = p.floats(p.batch, _TEXT, c["clip_text_in_channels"])
    if c["clip_image_in_channels"]:
        made["clip_img"] = p.floats(p.batch, 1, c["clip_image_in_channels"])
    if c["effnet_in_channels"]:
        made["effnet"] = p.floats(p.batch, c["effnet_in_channels"], rows, columns)
    return made


def _t2i_adapter(p: Proposal) -> Inputs:
    c = p.config
    side = 8 * c["downscale_factor"]
    rows, columns = p.sizes.get("height", side), p.sizes.get("width", side)
    return {"x": p.floats(p.batch, c["in_channels"], rows, columns)}


def _multi_adapter(p: Proposal) -> Inputs:
    count = len(next(iter(p.model.children())))  # type: ignore[arg-type]
    return {"xs": [_t2i_adapter(p)["x"] for _ in range(count)]}


def _t5_film(p: Proposal) -> Inputs:
    c = p.config
    encoded = p.floats(p.batch, _TEXT, c["d_model"])
    return {
        "encodings_and_masks": [(encoded, p.mask(_TEXT).to(p.dtype))],
        "decoder_input_tokens": p.floats(p.batch, c["targets_length"], c["input_dims"]),
        "decoder_noise_time": _times(p, 0.25, 0.125),
    }


def _temporal(p: Proposal) -> Inputs:
    """Frames beside the batch in one dimension."""
    frames, rows, columns = _video(p)
    made: Inputs = {
        "hidden_states": p.floats(p.batch * frames, p.config["in_channels"], rows, columns),
        "num_frames": frames,
    }
    if p.config["cross_attention_dim"]:
        made["encoder_hidden_states"] = p.floats(
            p.batch * rows * columns, _TEXT, p.config["cross_attention_dim"]
        )
    return made


def _u_vit(p: Proposal) -> Inputs:
    c = p.config
    side = 16 if c["downsample"] else 8
    rows, columns = p.sizes.get("height", side), p.sizes.get("width", side)
    kinds = (c["micro_cond_embed_dim"]) // c["micro_cond_encode_dim"]
    return {
        "input_ids": p.integers(c["codebook_size"], p.batch, rows, columns),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["encoder_hidden_size"]),
        "pooled_text_emb": p.floats(p.batch, c["cond_embed_dim"]),
        "micro_conds": p.integers(64, p.batch, kinds).to(p.dtype),
    }


def _wan_animate(p: Proposal) -> Inputs:
    c = p.config
    _, high, _ = c["patch_size"]
    frames, rows, columns = _video(p, high)
    side, moves = c["motion_encoder_size"], 4 * (frames - 1)
    return {
        "hidden_states": p.floats(p.batch, c["in_channels"], frames, rows, columns),
        "timestep": _times(p, 900, 300).long(),
        "encoder_hidden_states": p.floats(p.batch, _TEXT, c["text_dim"]),
        "encoder_hidden_states_image": p.floats(p.batch, _TEXT, c["image_dim"]),
        "pose_hidden_states": p.floats(p.batch, c["latent_channels"], frames - 1, rows, columns),
        "face_pixel_values": p.floats(p.batch, 3, moves, side, side),
    }


def _wan_animate2(p: Proposal) -> Inputs:
    """The pass over a reference, which writes the cache that the steps read."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    c = p.config
    _, high, wide = c["patch_size"]
    rows, columns = _picture(p, high)
    given = c["in_dim"] - c["out_dim"]
    made: Inputs = {
        "hidden_states": [p.floats(c["out_dim"], 1, rows, columns) for _ in range(p.batch)],
        "timestep": _times(p, 900, 300),
        "encoder_hidden_states": [p.floats(_TEXT, c["text_dim"]) for _ in range(p.batch)],
        "condition_latents": [p.floats(given, 1, rows, columns) for _ in range(p.batch)],
        "kv_cache": WanAnimate2KVCache(c["num_layers"]),
        "kv_cache_mode": "extract",
        "seq_len": (rows // high) * (columns // wide),
        "offset_grid_sizes": torch.tensor([[1, rows // high, columns // wide]]),
    }
    if c["use_img_emb"]:
        made["encoder_hidden_states_image"] = p.floats(p.batch, _TEXT, 1280)
    return made


def _z_image_controlnet(p: Proposal) -> Inputs:
    patch = p.config["all_patch_size"][0]
    rows, columns = _picture(p, patch)
    model: Any = p.model
    embedder = next(iter(model.all_x_embedder.values()))
    channels = embedder.in_features // (patch * patch)
    width = next(m for m in model.cap_embedder.modules() if hasattr(m, "weight")).weight.shape[0]
    control = p.config["control_in_dim"]
    return {
        "x": [p.floats(channels, 1, rows, columns) for _ in range(p.batch)],
        "t": _times(p, 0.25, 0.125),
        "cap_feats": [p.floats(_TEXT + 33 * (i % 2), width) for i in range(p.batch)],
        "control_context": [p.floats(control, 1, rows, columns) for _ in range(p.batch)],
    }


OWN: dict[str, Callable[[Proposal], Inputs]] = {
    "AnimaTextConditioner": _anima_text_conditioner,
    "AceStepTransformer1DModel": _ace_step,
    "AnyFlowFARTransformer3DModel": _any_flow,
    "AnyFlowTransformer3DModel": _any_flow,
    "AutoencoderKLHunyuanVideo15": _hunyuan_video15_vae,
    "AutoencoderKLMiniMaxH3": _mini_max_h3_vae,
    "BriaFibo2Transformer2DModel": _bria_fibo2,
    "BriaFiboTransformer2DModel": _bria_fibo,
    "ConsisIDTransformer3DModel": _consis_id,
    "ControlNetUnionModel": _controlnet_union,
    "Cosmos3OmniTransformer": _cosmos3_omni,
    "ErnieImageTransformer2DModel": _ernie_image,
    "GlmImageTransformer2DModel": _glm_image,
    "HiDreamImageTransformer2DModel": _hi_dream,
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "Ideogram4Transformer2DModel": _ideogram4,
    "JoyImageEditPlusTransformer3DModel": _joy_edit_plus,
    "Kandinsky5Transformer3DModel": _kandinsky5,
    "Kandinsky6SRLatentUpscalerBank": _kandinsky6_upscaler,
    "Kandinsky6SRTransformer3DModel": _kandinsky6_sr,
    "Kandinsky6Transformer3DModel": _kandinsky6,
    "Krea2Transformer2DModel": _krea2,
    "LTX2VideoDiffusionDecoderModel": _ltx2_decoder,
    "LongCatAudioDiTTransformer": _long_cat_audio,
    "LuminaNextDiT2DModel": _lumina_next,
    "MMAudioVAE": _waves,
    "MMAudioVocoder": _latents_alone("mel", "num_mels"),
    "MiniMaxH3Transformer3DModel": _mini_max_h3,
    "MiniMaxMusic3ConditionEncoder": _music3_condition,
    "MiniMaxMusic3RVQDepthDecoder": _music3_depth,
    "MiniMaxMusic3Transformer1DModel": _music3,
    "MiniMaxMusic3Vocoder": _latents_alone("latents", "latent_channels"),
    "MultiAdapter": _multi_adapter,
    "OmniGenTransformer2DModel": _omni_gen,
    "PriorTransformer": _prior,
    "QwenImage21Transformer2DModel": _qwen_image21,
    "SanaWMLTX2RefinerTransformer3DModel": _sana_wm_refiner,
    "SanaWMTransformer3DModel": _sana_wm,
    "StableAudio3DiTModel": _stable_audio3,
    "StableCascadeUNet": _stable_cascade,
    "T2IAdapter": _t2i_adapter,
    "T5FilmDecoder": _t5_film,
    "TransformerTemporalModel": _temporal,
    "UVit2DModel": _u_vit,
    "WanAnimate2Transformer3DModel": _wan_animate2,
    "WanAnimateTransformer3DModel": _wan_animate,
    "ZImageControlNetModel": _z_image_controlnet,
}
