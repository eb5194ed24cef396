"""Small models of every class that diffusers has, with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from hfpatch.coverage.small_transformers import MOST
from hfpatch.inputs import NoInputs, sample_inputs


def of_diffusers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    import diffusers
    from diffusers import ModelMixin

    for name in sorted(diffusers._import_structure.get("models", ())):
        try:
            cls = getattr(diffusers, name)
        except Exception:  # needs a package that is not here
            continue
        if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls is not ModelMixin:
            yield f"diffusers {name}", partial(diffusers_model, cls)


#: Of diffusers' constructors.
_SMALL = {
    **dict.fromkeys(("num_layers", "n_layers", "num_single_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_hidden_layers", "nlayers", "mmdit_layers", "transformer_num_layers"), 2),
    **dict.fromkeys(("num_visual_blocks", "decoder_num_layers", "dit_depth"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_kv_heads", "num_heads"), 4),
    **dict.fromkeys(("nheads", "dit_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers", "num_double_layers"), 1),
    **dict.fromkeys(("num_text_blocks", "approximator_layers"), 1),
    **dict.fromkeys(("joint_attention_dim", "cross_attention_dim", "caption_channels"), 48),
    **dict.fromkeys(("cap_feat_dim", "text_embed_dim", "text_dim", "encoder_hid_dim"), 48),
    **dict.fromkeys(("pooled_projection_dim", "caption_projection_dim"), 64),
    **dict.fromkeys(("base_dim", "decoder_base_dim", "inner_dim", "dim", "in_visual_dim"), 32),
    **dict.fromkeys(("hidden_size", "model_dim", "embed_dim", "dit_dim", "token_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ff_dim", "approximator_hidden_dim"), 96),
    **dict.fromkeys(("vocab_size", "target_vocab_size"), 199),
    "attention_head_dim": 16,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vace_layers": [0, 1],
    "inject_layers": [0],
    "sample_size": 16,
    "max_text_seq_length": 12,
    "num_embeds_ada_norm": 100,
}

#: Sizes that go together as no rule above says, by the class that has them.
_OWN: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {"audio_acoustic_hidden_dim": 16, "in_channels": 48},
    "AnimaTextConditioner": {
        **{"source_dim": 48, "target_dim": 48, "model_dim": 64, "min_sequence_length": 16},
    },
    "AutoencoderKLHunyuanImage": {
        **{"in_channels": 3, "out_channels": 3, "latent_channels": 8, "layers_per_block": 1},
        **{"block_out_channels": (32, 32, 64), "spatial_compression_ratio": 4},
        "sample_size": 32,
    },
    "AutoencoderKLHunyuanImageRefiner": {"latent_channels": 8},
    "AutoencoderKLHunyuanVideo15": {"latent_channels": 8},
    "AutoencoderKLKVAE": {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1},
    "AutoencoderKLKVAEAudio": {
        **{"encoder_dim": 8, "latent_dim": 64, "codebook_dim": 16, "decoder_dim": 64},
    },
    "AutoencoderKLKVAEVideo": {"ch": 32, "num_res_blocks": 1},
    "AutoencoderKLLTX2Video": {
        **{"latent_channels": 16, "block_out_channels": (16, 32, 64, 128)},
        **{"decoder_block_out_channels": (16, 32, 64), "layers_per_block": (1,) * 5},
        "decoder_layers_per_block": (1,) * 4,
    },
    "AutoencoderKLMiniMaxH3": {
        **{"decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16},
        **{"clip_length": 5, "token_drop": 1},
    },
    "AutoencoderKLMiniMaxH3Audio": {"encoder_dim": 8, "latent_dim": 64, "decoder_dim": 256},
    "AutoencoderOobleck": {
        **{"encoder_hidden_size": 8, "decoder_channels": 8, "decoder_input_channels": 4},
    },
    "AutoencoderRAE": {
        **{"encoder_hidden_size": 48, "decoder_hidden_size": 64, "decoder_intermediate_size": 96},
        **{"encoder_input_size": 28, "patch_size": 14, "image_size": 28},
    },
    "AutoencoderSAME": {
        **{"patch_size": 16, "encoder_channels": 16, "encoder_c_mults": (2,), "latent_dim": 16},
        **{"encoder_strides": (4,), "encoder_transformer_depths": (2,), "dim_heads": 16},
    },
    "AutoencoderVidTok": {"ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1},
    "BriaFibo2Transformer2DModel": {"dim": 64, "injection_layer_ids": (0,)},
    "ControlNetUnionModel": {
        **{"addition_embed_type": "text_time", "addition_time_embed_dim": 8},
        **{"projection_class_embeddings_input_dim": 96, "num_trans_channel": 32},
        **{"num_trans_head": 4, "num_proj_channel": 32},
    },
    "ConsisIDTransformer3DModel": {
        **{"is_train_face": True, "sample_height": 16, "sample_width": 16, "sample_frames": 9},
        **{"LFE_id_dim": 24, "LFE_vit_dim": 32, "LFE_depth": 5, "LFE_dim_head": 8},
        **{"LFE_num_heads": 2, "LFE_num_querie": 4, "LFE_output_dim": 32, "LFE_ff_mult": 2},
        **{"cross_attn_dim_head": 8, "cross_attn_num_heads": 2},
    },
    "Cosmos3AVAEAudioTokenizer": {
        **{"dec_dim": 8, "enc_dim": 16, "enc_intermediate_dim": 32, "enc_num_layers": 2},
        **{"enc_latent_dim": 128, "enc_c_mults": (1, 2, 2)},
    },
    "Cosmos3OmniTransformer": {"latent_channel": 8, "patch_latent_dim": 32},
    "CosmosTransformer3DModel": {"concat_padding_mask": False},  # which needs torchvision
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "EasyAnimateTransformer3DModel": {
        **{"in_channels": 4, "out_channels": 4, "patch_size": 2, "time_embed_dim": 32},
        "text_embed_dim_t5": 40,
    },
    "HiDreamImageTransformer2DModel": {
        **{"patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1},
        **{"axes_dims_rope": (4, 6, 6), "caption_channels": [48, 40], "text_emb_dim": 64},
        **{"llama_layers": [0, 1], "max_resolution": (16, 16), "force_inference_output": True},
    },
    "HunyuanDiT2DControlNetModel": {
        **{"in_channels": 4, "patch_size": 2, "cross_attention_dim_t5": 40, "text_len": 7},
        **{"text_len_t5": 7, "transformer_num_layers": 4},
    },
    "HunyuanDiT2DModel": {
        **{"in_channels": 4, "patch_size": 2, "cross_attention_dim_t5": 40, "text_len": 7},
        "text_len_t5": 7,
    },
    "ErnieImageTransformer2DModel": {"ffn_hidden_size": 96, "text_in_dim": 48, "in_channels": 16},
    "GlmImageTransformer2DModel": {"condition_dim": 32, "prior_vq_quantizer_codebook_size": 199},
    "Ideogram4Transformer2DModel": {
        **{"mrope_section": (4, 2, 2), "adaln_dim": 32, "llm_features_dim": 48},
        "in_channels": 16,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        **{"has_image_proj": True, "image_proj_dim": 48, "has_clean_x_embedder": True},
    },
    "JoyImageEditPlusTransformer3DModel": {"rope_dim_list": [4, 6, 6]},
    "JoyImageEditTransformer3DModel": {"rope_dim_list": [4, 6, 6]},
    "Kandinsky3UNet": {"time_embedding_dim": 64, "block_out_channels": (64, 64, 64, 64)},
    "Kandinsky5Transformer3DModel": {
        **{"in_visual_dim": 4, "in_text_dim": 48, "in_text_dim2": 40, "time_dim": 32},
        "axes_dims": (4, 6, 6),
    },
    "Kandinsky6SRLatentUpscalerBank": {
        **{"in_channels": 8, "stage_channels": (64, 32, 32), "num_pre_blocks": 1},
        **{"num_mid_blocks": 1, "num_post_blocks": 1, "num_x2_adapter_blocks": 1},
    },
    "Kandinsky6SRTransformer3DModel": {
        **{"in_visual_dim": 64, "out_visual_dim": 64, "time_dim": 32, "axes_dims": (4, 6, 6)},
    },
    "Kandinsky6Transformer3DModel": {
        **{"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 48, "in_text_dim2": 40},
        **{"time_dim": 32, "axes_dims": (4, 6, 6), "visual_cond": False, "model_dim_a": 32},
        **{"time_dim_a": 32, "ff_dim_a": 48, "axes_dims_a": (16,)},
    },
    "Krea2Transformer2DModel": {
        **{"text_num_attention_heads": 4, "text_num_key_value_heads": 4, "text_hidden_dim": 48},
        **{"text_intermediate_size": 64, "num_text_layers": 3, "num_layerwise_text_blocks": 1},
        **{"num_refiner_text_blocks": 1, "timestep_embed_dim": 32, "in_channels": 16},
    },
    "LTX2VideoDiffusionDecoderModel": {
        **{"latent_channels": 16, "decoder_head_dim": 16, "decoder_t_emb_dim": 32},
        **{"decoder_stage_channels": (128, 64, 32, 32, 16)},
        "decoder_stage_depths": (1, 1, 1, 1, 1),
        "decoder_stage_kernels": ((3, 3, 3),) * 4,
        "decoder_stage5_kernel": (3, 3, 3),
    },
    "LTX2VideoTransformer3DModel": {
        **{"in_channels": 16, "out_channels": 16, "audio_in_channels": 16},
        **{"audio_out_channels": 16, "audio_num_attention_heads": 4, "cross_attention_dim": 64},
        **{"audio_attention_head_dim": 8, "audio_cross_attention_dim": 32},
    },
    "LatteTransformer3DModel": {
        **{"in_channels": 4, "out_channels": 4, "patch_size": 2, "norm_type": "ada_norm_single"},
        **{"video_length": 3, "cross_attention_dim": 64, "activation_fn": "gelu-approximate"},
        "norm_elementwise_affine": False,
    },
    "LongCatAudioDiTTransformer": {"dit_text_dim": 48, "latent_dim": 16},
    "LongCatAudioDiTVae": {
        **{"channels": 8, "c_mults": [1, 2, 4], "strides": [2, 4], "latent_dim": 8},
        **{"encoder_latent_dim": 16, "downsampling_ratio": 8},
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 2, "multiple_of": 32, "cross_attention_dim": 48},
    "MMAudioVAE": {"mel_bins": 16, "latent_channels": 8, "hidden_channels": 32},
    "MMAudioVocoder": {"num_mels": 16, "upsample_initial_channel": 128},
    "MiniMaxH3Transformer3DModel": {
        **{"ffn_dim": 96, "freq_dim": 32, "time_embed_hidden_dim": 64, "time_embed_dim": 32},
        "rope_freq_dim": 2,
    },
    "MiniMaxMusic3ConditionEncoder": {"condition_hidden_dim": 48, "out_dim": 32},
    "MiniMaxMusic3Transformer1DModel": {
        **{"in_channels": 16, "condition_dim": 48, "ff_inner_dim": 96, "rotary_dim": 8},
    },
    "MiniMaxMusic3Vocoder": {
        **{"latent_channels": 16, "decoder_input_dim": 32, "decoder_hidden_dim": 64},
    },
    "OmniGenTransformer2DModel": {
        **{"num_key_value_heads": 4, "pad_token_id": 0, "pos_embed_max_size": 16},
        **{"max_position_embeddings": 128, "original_max_position_embeddings": 128},
        "rope_scaling": {
            "type": "su",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
        },
    },
    "PRXTransformer2DModel": {"context_in_dim": 48, "axes_dim": [8, 8]},
    "RFD4ProteinaAutoencoder": {
        **{"dim_cond": 32, "pair_repr_dim": 32, "token_type_emb_dim": 8, "latent_dim": 8},
    },
    "RFD4ProteinaTransformer": {
        **{"dim_cond": 32, "pair_repr_dim": 32, "token_type_emb_dim": 8, "latent_dim": 8},
        **{"cath_emb_dim": 8, "t_emb_dim": 32, "seq_sep_dim": 16, "tri_mult_c": 16},
    },
    "SanaWMTransformer3DModel": {
        **{"in_channels": 16, "linear_head_dim": 16, "softmax_every_n": 2},
        **{"chunk_plucker_channels": 12, "chunk_plucker_post_attn_blocks": 2},
    },
    "StableCascadeUNet": {
        **{"block_out_channels": (64, 64), "num_attention_heads": (4, 4), "conditioning_dim": 32},
        **{"down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1)},
        "clip_text_pooled_in_channels": 48,
    },
    "StableAudio3DiTModel": {
        **{"io_channels": 16, "cond_token_dim": 48, "global_cond_dim": 48},
        **{"local_add_cond_dim": 17, "timestep_features_dim": 32, "num_memory_tokens": 8},
    },
    "T2IAdapter": {"channels": [32, 32, 64, 64]},
    "Transformer2DModel": {"in_channels": 32, "sample_size": None, "num_embeds_ada_norm": None},
    "TransformerTemporalModel": {"in_channels": 32},
    "T5FilmDecoder": {"d_model": 64, "d_kv": 16, "d_ff": 96, "targets_length": 16},
    "UNet1DModel": {"extra_in_channels": 64},
    "UVit2DModel": {
        **{"cond_embed_dim": 48, "micro_cond_encode_dim": 16, "micro_cond_embed_dim": 80},
        **{"encoder_hidden_size": 48, "codebook_size": 192, "in_channels": 32},
        **{"block_out_channels": 32, "block_num_heads": 4, "num_res_blocks": 1},
    },
    "WanAnimate2Transformer3DModel": {"dim": 64, "ffn_dim": 96, "in_dim": 12, "out_dim": 4},
    "WanAnimateTransformer3DModel": {
        **{"inject_face_latents_blocks": 1, "motion_encoder_size": 16, "motion_style_dim": 32},
        **{"motion_dim": 4, "motion_encoder_dim": 32, "face_encoder_hidden_dim": 32},
        **{"face_encoder_num_heads": 2, "image_dim": 48, "ffn_dim": 96, "freq_dim": 32},
    },
    "ZImageControlNetModel": {
        **{"dim": 64, "control_layers_places": [0, 1], "control_refiner_layers_places": [0]},
        **{"control_in_dim": 16, "add_control_noise_refiner": "control_noise_refiner"},
    },
    "ZImageTransformer2DModel": {"dim": 64, "axes_lens": [128, 32, 32], "in_channels": 4},
}
_OWN["SanaWMLTX2RefinerTransformer3DModel"] = _OWN["LTX2VideoTransformer3DModel"]

#: Arguments that are a list of models, and of which class where the own name does not say.
_OTHERS: dict[str, dict[str, str]] = {"controlnets": {}, "adapters": {"MultiAdapter": "T2IAdapter"}}
#: Of those, the classes that take no more than one.
_ALONE = ("QwenImageMultiControlNetModel",)


def _several(cls: Any, names: dict[str, str]) -> nn.Module:
    """One that holds several models of another class."""
    import diffusers

    part = getattr(diffusers, names.get(cls.__name__, cls.__name__.replace("Multi", "")))
    count = 1 if cls.__name__ in _ALONE else 2
    together: nn.Module = cls([diffusers_model(part) for _ in range(count)])
    return together


def _whole(model: Any) -> nn.Module:
    """A ControlNet with what it shares with the denoiser that it steers, where it shares it."""
    cls = type(model)
    share = getattr(cls, "from_transformer", None)
    if share is not None and next(iter(inspect.signature(share).parameters)) == "controlnet":
        import diffusers

        denoiser = cls.__name__.replace("ControlNetModel", "Transformer2DModel")
        model = share(model, diffusers_model(getattr(diffusers, denoiser)))
    whole: nn.Module = model
    return whole


def diffusers_model(cls: Any) -> nn.Module:
    """As the class's defaults say, with small numbers; channels of VAEs and UNets too."""
    parameters = inspect.signature(cls.__init__).parameters
    if (of_others := next((n for n in _OTHERS if n in parameters), None)) is not None:
        return _several(cls, _OTHERS[of_others])
    small: dict[str, Any] = {k: v for k, v in _SMALL.items() if k in parameters}
    for key, parameter in parameters.items():
        default = parameter.default
        if "block_out_channels" in key and isinstance(default, (tuple, list)):
            small[key] = type(default)([32] * len(default))
        elif key.startswith("layers_per_block") and isinstance(default, int):
            small[key] = 1
        elif key.startswith(("axes_dim", "rope_axes_dim")) and isinstance(default, (tuple, list)):
            small[key] = type(default)([8, 8] if len(default) == 2 else [4, 6, 6][: len(default)])
    small |= _OWN.get(cls.__name__, {})
    wide = {k: 64 for k in small if _SMALL.get(k) == 48}
    attempts = [
        small,
        small | wide,
        *({k: v for k, v in small.items() if k != left_out} for left_out in small),
    ]
    attempts += [{k: v for k, v in small.items() if "num" in k or k.startswith("n_")}, {}]
    first: Exception | None = None
    built: nn.Module | None = None
    for attempt in attempts:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(**attempt).parameters())
            if size > MOST:
                raise ValueError(f"has {size / 1e6:.0f} million parameters at its smallest")
            model = _whole(cls(**attempt))
        except Exception as e:  # the constructor's own demands
            first = first or e
            continue
        built = built if built is not None else model
        try:
            if not next(model.parameters(), torch.empty(0)).is_meta:  # whose inputs could not be
                sample_inputs(model.eval())
            return model
        except NoInputs:  # its sizes may not fit each other
            continue
    if built is None:
        raise first or ValueError("no configuration is known for it")
    return built
