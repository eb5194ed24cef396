"""Configurations for `hfpatch apply-check --random-weights`: small ones of real model types.

`CASES` has the architecture and what differs from the class's defaults; the zoo's models come on
top, by their own configurations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_pipelines
import zoo

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
TEXT: dict[str, Any] = WIDE | {"vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 0}
IMAGE: dict[str, Any] = WIDE | {"image_size": 32, "patch_size": 8}
GROUPED: dict[str, Any] = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
SECTIONS: dict[str, Any] = GROUPED | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                        "partial_rotary_factor": 1.0},
}  # fmt: skip
PATCHES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "patch_size": 8,
}
SOUND: dict[str, Any] = WIDE | {
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "vocab_size": 32,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 120,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
TOWERS: dict[str, Any] = {
    "text_config": TEXT | {"eos_token_id": 2, "bos_token_id": 1, "projection_dim": 48},
    "vision_config": IMAGE | {"projection_dim": 48},
    "projection_dim": 48,
}
UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
CROSS: dict[str, Any] = UNET | {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 48,
    "attention_head_dim": 8,
}
DIT: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
}

#: Name to (library's class, configuration).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # text
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", TEXT),
    "opt": (
        "OPTForCausalLM",
        TEXT | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        TEXT | {"num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "gemma": ("GemmaForCausalLM", TEXT | {"num_key_value_heads": 2, "head_dim": 16}),
    "roberta": ("RobertaModel", TEXT | {"pad_token_id": 1}),
    "electra": ("ElectraModel", TEXT | {"embedding_size": 64}),
    "albert": ("AlbertModel", TEXT | {"embedding_size": 32}),
    "distilbert": (
        "DistilBertModel",
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": 120},
    ),
    "bert-classifier": ("BertForSequenceClassification", TEXT),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ | {"pad_token_id": 0}),
    "layoutlm": ("LayoutLMModel", TEXT | {"max_2d_position_embeddings": 256}),
    # images
    "dinov2": ("Dinov2Model", IMAGE),
    "deit": ("DeiTModel", IMAGE),
    "beit": ("BeitModel", IMAGE),
    "swin": (
        "SwinModel",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1],
         "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": ("ConvNextModel", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    "resnet": (
        "ResNetModel",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    "segformer": (
        "SegformerModel",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2,
         "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3],
         "strides": [4, 2], "mlp_ratios": [2, 2]},
    ),
    "siglip-vision": ("SiglipVisionModel", IMAGE),
    "siglip2": (
        "Siglip2VisionModel",
        WIDE | {"patch_size": 8, "num_patches": 16},
    ),
    "clip": ("CLIPModel", TOWERS),
    "siglip": ("SiglipModel", TOWERS),
    # images in a text
    "llava": (
        "LlavaForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "llama", "num_key_value_heads": 2},
         "vision_config": IMAGE | {"model_type": "clip_vision_model", "projection_dim": 48},
         "image_token_index": 119, "vision_feature_layer": -1},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 16},
         "vision_config": IMAGE | {"model_type": "siglip_vision_model", "projection_dim": 64,
                                   "vision_use_head": False},
         "image_token_index": 119, "projection_dim": 64, "hidden_size": 64},
    ),
    "idefics3": (  # several images for a text
        "Idefics3ForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "llama"}, "vision_config": IMAGE,
         "image_token_id": 119},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "llama"}, "vision_config": IMAGE,
         "image_token_id": 119},
    ),
    "llava-next": (  # tiles of an image
        "LlavaNextForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "llama"},
         "vision_config": IMAGE | {"model_type": "clip_vision_model", "projection_dim": 48},
         "image_token_index": 119, "vision_feature_layer": -1,
         "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "mistral"},
         "vision_config": IMAGE | {"model_type": "pixtral", "head_dim": 16},
         "image_token_index": 119, "vision_feature_layer": -1},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "qwen2"},
         "vision_config": WIDE | {"image_size": [32, 32], "patch_size": [8, 8]},
         "image_token_id": 119},
    ),
    "qwen2.5-vl": (  # patches in a row, and their grid
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": SECTIONS,
         "vision_config": PATCHES | {"window_size": 32, "fullatt_block_indexes": [1]},
         "image_token_id": 119, "video_token_id": 118},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": SECTIONS,
         "vision_config": PATCHES
         | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
         "image_token_id": 119, "video_token_id": 118},
    ),
    "glm-4v": (
        "Glm4vForConditionalGeneration",
        {"text_config": SECTIONS, "vision_config": PATCHES | {"image_size": 32},
         "image_token_id": 119, "video_token_id": 118},
    ),
    # sound in a text
    "qwen2-audio": (
        "Qwen2AudioForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "qwen2"},
         "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2,
                          "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 16,
                          "max_source_positions": 40},
         "audio_token_index": 119},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "llama"},
         "audio_config": WIDE | {"intermediate_size": 256, "num_mel_bins": 16, "head_dim": 16,
                                 "max_source_positions": 40, "num_key_value_heads": 4},
         "audio_token_id": 119},
    ),
    "granite-speech": (
        "GraniteSpeechForConditionalGeneration",
        {"text_config": GROUPED | {"model_type": "granite"},
         "encoder_config": {"input_dim": 16, "num_layers": 2, "hidden_dim": 64, "num_heads": 4,
                            "dim_head": 16, "output_dim": 20, "context_size": 20},
         "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 64,
                              "num_hidden_layers": 1, "num_attention_heads": 4,
                              "intermediate_size": 96, "encoder_hidden_size": 64},
         "audio_token_index": 119, "has_lora_adapter": False, "downsample_rate": 5,
         "window_size": 15},
    ),
    # video
    "videomae": ("VideoMAEModel", IMAGE | {"num_frames": 4}),
    "vivit": ("VivitModel", IMAGE | {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "timesformer": ("TimesformerModel", IMAGE | {"num_frames": 2}),
    # sound
    "whisper": (
        "WhisperForConditionalGeneration",
        SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 16},
    ),
    "wav2vec2": ("Wav2Vec2Model", SOUND),
    "hubert": ("HubertForCTC", SOUND),
    "wavlm": ("WavLMModel", SOUND),
    "ast": (
        "ASTModel",
        WIDE | {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8,
                "time_stride": 8},
    ),
    # numbers over time
    "patchtst": (
        "PatchTSTModel",
        {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2,
         "d_model": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 96},
    ),
    # diffusion
    "unet2d": (
        "UNet2DModel",
        UNET | {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
                "up_block_types": ["AttnUpBlock2D", "UpBlock2D"], "attention_head_dim": 8},
    ),
    "sdxl-unet": (
        "UNet2DConditionModel",
        CROSS | {"addition_embed_type": "text_time", "addition_time_embed_dim": 8,
                 "projection_class_embeddings_input_dim": 80},
    ),
    "controlnet": (
        "ControlNetModel",
        {k: v for k, v in CROSS.items() if k not in ("sample_size", "up_block_types")}
        | {"conditioning_embedding_out_channels": [16, 32]},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        DIT | {"out_channels": 8, "cross_attention_dim": 64, "caption_channels": 40},
    ),
    "dit": ("DiTTransformer2DModel", DIT | {"out_channels": 8, "num_embeds_ada_norm": 10}),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 40,
         "caption_projection_dim": 64, "out_channels": 4, "pos_embed_max_size": 64},
    ),
    "stable-audio": (
        "StableAudioDiTModel",
        {"sample_size": 64, "in_channels": 8, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "num_key_value_attention_heads": 2, "out_channels": 8,
         "cross_attention_dim": 48, "time_proj_dim": 32, "global_states_input_dim": 48,
         "cross_attention_input_dim": 48},
    ),
    # autoencoders
    "vae": (
        "AutoencoderKL",
        {"block_out_channels": [32, 32], "down_block_types": ["DownEncoderBlock2D"] * 2,
         "up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 8},
    ),
    "vae-tiny": (
        "AutoencoderTiny",
        {"encoder_block_out_channels": [16, 16], "decoder_block_out_channels": [16, 16],
         "num_encoder_blocks": [1, 1], "num_decoder_blocks": [1, 1]},
    ),
    "vq": ("VQModel", {"block_out_channels": [32], "norm_num_groups": 8, "num_vq_embeddings": 16}),
    "wan-vae": ("AutoencoderKLWan", {"base_dim": 16, "z_dim": 4, "num_res_blocks": 1}),
}  # fmt: skip

#: Of each modality one; the rest is for `make test-all`.
FEW = ("gpt2", "bart", "dinov2", "clip", "siglip2", "videomae", "whisper", "wav2vec2", "ast",
       "sdxl-unet", "vae", "zoo-flux", "qwen2.5-vl", "qwen2-audio")  # fmt: skip
PIPELINES: dict[str, Callable[[], Any]] = {
    "zoo-ltx-pipeline": zoo.PIPELINES["ltx-pipeline"].make,
    "sd-pipeline": small_pipelines.sd,
    "sdxl-pipeline": small_pipelines.sdxl,
    "flux-pipeline": small_pipelines.flux,
    "wan-pipeline": small_pipelines.wan,
}
NAMES = (*CASES, *(f"zoo-{name}" for name in zoo.ENTRIES), *PIPELINES)


def write(name: str, folder: Path) -> Path:
    """The configuration as a folder of the Hub has it; its path."""
    folder = folder / name
    if name in PIPELINES:
        PIPELINES[name]().save_pretrained(folder)
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
        return folder
    folder.mkdir()
    if name.startswith("zoo-"):
        model = zoo.ENTRIES[name.removeprefix("zoo-")].make()
        if hasattr(model.config, "architectures"):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
        else:
            model.save_config(folder)
        return folder
    class_name, config = CASES[name]
    diffusion = "UNet" in class_name or class_name.startswith(("Auto", "VQ", "Control"))
    diffusion |= class_name.endswith(("Transformer2DModel", "DiTModel"))
    key = {"_class_name": class_name} if diffusion else {"architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps(key | config))
    return folder
