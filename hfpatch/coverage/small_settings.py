"""Small settings by model type, for configurations whose sizes no rule brings together.

A type's settings hold wherever its configuration is, as a model's own or as a part of another's.
Settings that are a dict belong to the part of that name, for one parent alone.
"""

from __future__ import annotations

from typing import Any

#: A backbone that needs no package beside transformers; four stages, of 1/4 to 1/32 of the image.
_RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _detector(stages: int) -> dict[str, Any]:
    """Of the DETR family, with the last `stages` of a ResNet."""
    backbone = {**_RESNET, "out_features": _STAGES[-stages:]}
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary angles of time, height and width, half a head (16) wide together."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


_SERIES = {"prediction_length": 4, "context_length": 8}
#: Sound in few channels; the ratios say how much shorter codes are than the wave.
_CODEC = {"num_filters": 8, "codebook_size": 32, "codebook_dim": 16, "num_quantizers": 4}
_MIMI = {**_CODEC, "upsample_groups": 64, "vector_quantization_hidden_dimension": 16}
_DAC = {
    "encoder_hidden_size": 8,
    "decoder_hidden_size": 64,
    "codebook_size": 32,
    "n_codebooks": 4,
}
_VQ = {"base_channels": 32, "embed_dim": 16, "latent_channels": 16, "num_embeddings": 64}
_HIERA = {
    "hidden_size": 16,
    "image_size": [64, 64],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [4, 2, 4, 2],
    "global_attention_blocks": [3],
}
_SAM2_VISION = {
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 64,
}
_PROMPTS = {"hidden_size": 64, "image_size": 64, "patch_size": 16}
_MASKS = {"hidden_size": 64, "mlp_dim": 96, "iou_head_hidden_dim": 64}
_SAM_VISION = {
    "hidden_size": 64,
    "image_size": 64,
    "patch_size": 8,
    "output_channels": 64,
    "num_pos_feats": 32,
    "window_size": 4,
    "global_attn_indexes": [1],
    "mlp_dim": 96,
}
_SAM_PROMPTS = {**_PROMPTS, "patch_size": 8, "image_embedding_size": 8}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INSTRUCTED = {"num_query_tokens": 4}
_OCTAVES = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1]}
_SPEECH_MODEL = {
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 96,
    "t2u_vocab_size": 99,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "t2u_encoder_attention_heads": 4,
    "t2u_decoder_attention_heads": 4,
    "t2u_encoder_ffn_dim": 96,
    "t2u_decoder_ffn_dim": 96,
    "upsample_initial_channel": 32,
    "unit_hifi_gan_vocab_size": 99,
    "unit_embed_dim": 16,
    "lang_embed_dim": 8,
    "spkr_embed_dim": 8,
    "vocoder_num_langs": 3,
    "vocoder_num_spkrs": 3,
}
_DINO_WINDOWS = {
    "num_hidden_layers": 4,
    "image_size": 64,
    "patch_size": 8,
    "num_windows": 4,
    "out_features": ["stage2", "stage4"],
}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
_SWIN = {"image_size": 128, "window_size": 4, "embed_dim": 32, "num_heads": [2, 2, 4, 4]}
_LCNET = {
    "model_type": "pp_lcnet_v4",
    "out_features": _STAGES,
    "block_configs": [  # of each stage: kernel, channels before and after, stride, attention
        [[3, 96, 96, 1, True]],
        [[3, 96, 96, 2, False]],
        [[3, 96, 192, 2, False], [3, 192, 192, 1, True]],
        [[3, 192, 384, 2, False]],
    ],
}
_QUANTIZED = {"quantization_dim": 128, "encoder_hidden_size": 8, "downsampling_ratios": [5, 10]}
_SAM3_VISION = {"fpn_hidden_size": 64, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
_MEMORY = {
    "image_size": 64,
    "memory_attention_hidden_size": 64,
    "memory_attention_num_layers": 1,
    "memory_attention_feed_forward_hidden_size": 96,
    "memory_attention_mlp_hidden_size": 96,
    "memory_encoder_hidden_size": 64,
    "memory_encoder_output_channels": 16,
    "mask_downsampler_embed_dim": 64,
    "memory_fuser_embed_dim": 64,
    "memory_fuser_intermediate_dim": 96,
}
_DIARIZATION = {"hidden_size": 32, "audio_hidden_size": 64}
_CONVOLUTIONS = (  # of the block of PP-OCR: kernel, stride, padding
    {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    | {
        f"vertical_long_to_small_conv_{name}ratio": [[n, 1], [1, 1], [n // 2, 0]]
        for name, n in (("long", 7), ("mid", 5), ("short", 3))
    }
    | {
        f"horizontal_small_to_long_conv_{name}ratio": [[1, n], [1, 1], [0, n // 2]]
        for name, n in (("long", 7), ("mid", 5), ("short", 3))
    }
    | {
        f"symmetric_conv_long_{name}ratio": [[n, n], [1, 1], [n // 2, n // 2]]
        for name, n in (("long", 7), ("mid", 5), ("short", 3))
    }
)

SETTINGS: dict[str, dict[str, Any]] = {
    # Detectors, segmenters
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), _detector(1)),
    "deformable_detr": {**_detector(3), "two_stage_num_proposals": 16},
    "lw_detr_vit": {**_DINO_WINDOWS, "num_windows": 4, "window_block_indices": [0, 2]},
    "rf_detr_dinov2": {**_DINO_WINDOWS, "window_block_indexes": [0, 2]},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "edgetam_video_prompt_encoder": _PROMPTS,
    "edgetam_video_mask_decoder": _MASKS,
    "edgetam_video": {**_MEMORY, "memory_attention_rope_feat_sizes": [4, 4]},
    "sam_vision_model": _SAM_VISION,
    "sam_hq_vision_model": _SAM_VISION,
    "sam_prompt_encoder": _SAM_PROMPTS,
    "sam_hq_prompt_encoder": _SAM_PROMPTS,
    "sam_mask_decoder": _MASKS,
    "sam_hq_mask_decoder": {**_MASKS, "vit_dim": 64},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _SAM2_VISION,
    "sam2_prompt_encoder": _PROMPTS,
    "sam2_mask_decoder": _MASKS,
    "sam2_video_prompt_encoder": _PROMPTS,
    "sam2_video_mask_decoder": _MASKS,
    "sam2_video": {**_MEMORY, "memory_attention_rope_feat_sizes": [4, 4]},
    "sam3_vit_model": {
        "image_size": 64,
        "pretrain_image_size": 32,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": [1],
    },
    "sam3_vision_model": _SAM3_VISION,
    "sam3_tracker_prompt_encoder": _SAM_PROMPTS,
    "sam3_tracker_mask_decoder": _MASKS,
    "sam3_tracker_video_prompt_encoder": _SAM_PROMPTS,
    "sam3_tracker_video_mask_decoder": _MASKS,
    "sam3_tracker_video": {**_MEMORY, "memory_attention_rope_feat_sizes": [8, 8]},
    "sam3_video": {"low_res_mask_size": 32},
    "mask2former": {"feature_size": 64, "mask_feature_size": 64, "encoder_feedforward_dim": 96},
    "oneformer": {"conv_dim": 64, "mask_dim": 64, "text_encoder_width": 64},
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [64, 64, 32],
        "fusion_hidden_size": 32,
    },
    "seggpt": {
        "image_size": [64, 32],
        "pretrain_image_size": 32,
        "patch_size": 8,
        "mlp_dim": 96,
        "num_hidden_layers": 4,
        "merge_index": 1,
        "intermediate_hidden_state_indices": [0, 1, 2, 3],
    },
    "efficientnet": _EFFICIENT,
    "align_vision_model": _EFFICIENT,
    "align": {"projection_dim": 80},
    "swin": _SWIN,
    "donut-swin": _SWIN,
    "pp_ocrv6_medium_det": {
        "backbone_config": _LCNET,
        "intraclass_block_config": _CONVOLUTIONS,
        "neck_out_channels": 64,
        "scale_factor_list": [1, 2, 4, 8],
        "kernel_list": [3, 2, 2],
    },
    "pp_ocrv6_small_det": {
        "backbone_config": _LCNET,
        "layer_list_out_channels": [96, 96, 192, 384],
    },
    "uvdoc": {
        "backbone_config": {
            "model_type": "uvdoc_backbone",
            "out_features": [*_STAGES, "stage5", "stage6"],
        }
    },
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 4},
    # Numbers over time
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    "timesfm": {"context_length": 64, "patch_length": 8, "horizon_length": 8},
    # Texts
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "blt_local_encoder": {"hidden_size_global": 64, "intermediate_size": 96},
    "blt_local_decoder": {"hidden_size_global": 64, "intermediate_size": 96},
    "dbrx": {
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    },
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "mlp_layer_types": ["dense", "sparse"],
        "per_layer_config": {"1": {"num_local_experts": 4}},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        "laurel_rank": 8,
    },
    "kimi_linear": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 72, "num_attention_heads": 3},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "n_routed_experts": 4,
        "moe_topk": 2,
    },
    "luke": {"entity_vocab_size": 99, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 16},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {
        "num_latents": 16,
        "d_latents": 64,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "max_position_embeddings": 64,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "chunk_size": 8,
        "adapter_rank": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    # Images, video and sound around a text
    **dict.fromkeys(
        (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "paddleocr_vl_text",
            "glm4v_text",
            "glm_ocr_text",
            "glm_image_text",
        ),
        _mrope(2, 3, 3),
    ),
    "glm4v_moe_text": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    "ernie4_5_vl_moe_text": {
        **_mrope(3, 3, 2),
        "moe_intermediate_size": [48, 32],
        "moe_num_experts": 4,
        "moe_k": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
            "sliding_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
        },
    },
    "blip_2_qformer": {"cross_attention_frequency": 1},
    "blip-2": {**_INSTRUCTED, "image_token_index": 7},
    "instructblip": {**_INSTRUCTED, "image_token_index": 7},
    "instructblipvideo": {**_INSTRUCTED, "video_token_index": 7},
    "chameleon_vqgan": {**_VQ, "resolution": 32},
    "chameleon": {
        "vocabulary_map": {
            "<image>": 7,
            **{
                f"IMGIMG{''.join(chr(65 + int(digit)) for digit in str(n))}Z": 20 + n
                for n in range(64)
            },
        },
        "image_token_id": 7,
    },
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64, "hidden_size": 128},
    "emu3": {
        "vocabulary_map": {
            "<image>": 7,
            "<|extra_200|>": 8,
            **{f"<|visual token {n:06d}|>": 20 + n for n in range(64)},
        },
        "image_token_id": 7,
    },
    "janus_vqgan": {**_VQ, "projection_dim": 64, "image_token_embed_dim": 64},
    "janus_vision_model": {"projection_dim": 64, "num_image_tokens": 16},
    "glm_image_vqmodel": {"embed_dim": 32, "latent_channels": 64, "num_embeddings": 64},
    "florence_vision": {
        "embed_dim": [16, 32, 48, 64],
        "num_heads": [2, 2, 4, 4],
        "num_groups": [2, 2, 4, 4],
        "depths": [1, 1, 1, 1],
        "window_size": 4,
        "projection_dim": 64,
    },
    "deepseek_ocr2_sam_vision_model": {**_SAM_VISION, "downsample_channels": [48, 64]},
    "deepseek_ocr2_text": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 32}},
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0]],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[32, 32], [64, 64]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [1, 1, 1, 1],
    },
    "granite_docling_text": {"vocab_size": 199},
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "scale_factor": 2},
    "step3p5": {"sliding_window": 8, "num_sliding_attention_heads": 4},
    "udop": {"num_heads": 4},
    "clap_audio_model": {
        "patch_embeds_hidden_size": 16,
        "hidden_size": 128,
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 2, 4, 4],
    },
    "xclip_vision_model": {
        "mit_hidden_size": 64,
        "mit_intermediate_size": 96,
        "mit_num_attention_heads": 4,
        "num_frames": 4,
    },
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
    "molmo2_text": {"additional_vocab_size": 8, "rope_scaling_layers": None},
    "muse_spark_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "layer_rope_theta": [500000.0, 0],
        "moe_hidden_size": 64,
    },
    "muse_spark_vision": {"layer_types": ["window_attention", "full_attention"]},
    "muse_glimmer_vision": {"layer_types": ["window_attention", "full_attention"]},
    "muse_spark": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "muse_spark_audio": {
        "num_hidden_layers": 4,
        "patch_sizes": [4, 4, 2, 2],
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "pi0": {"chunk_size": 4},
    "clvp_encoder": {"num_attention_heads": 2},
    "clvp_decoder": {"num_attention_heads": 2},
    # Sound
    "mimi": _MIMI,
    "mimi_decoder": _MIMI,
    "pocket_tts_audio_tokenizer": {"num_filters": 8, "upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"num_filters": 8, "upsample_groups": 64},
    "dac": _DAC,
    "neucodec": _QUANTIZED,
    "xcodec2": _QUANTIZED,
    "vibevoice_acoustic_tokenizer": _OCTAVES,
    "vibevoice_acoustic_tokenizer_decoder": _OCTAVES,
    "vibevoice_acoustic_tokenizer_encoder": _OCTAVES,
    "seamless_m4t": _SPEECH_MODEL,
    "seamless_m4t_v2": {**_SPEECH_MODEL, "char_vocab_size": 99},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "nemotron3_diarization": {"head_config": _DIARIZATION},
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 1},
    "gemma3n_audio": {
        "conf_num_hidden_layers": 1,
        "conf_num_attention_heads": 4,
        "sscp_conv_channel_size": [16, 8],
    },
    "gemma4_audio": {"subsampling_conv_channels": [16, 8], "output_proj_dims": 64},
    "dia_decoder": {"num_channels": 3, "cross_hidden_size": 64},
    "dia": {"delay_pattern": [0, 1, 2]},
}
