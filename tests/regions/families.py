"""Small models of many families, for captured blocks: no file of hfpatch names any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Callable[[int, int], dict[str, Any]]]
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def _ids(batch: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    return {"input_ids": torch.randint(0, 199, (batch, tokens), generator=generator)}


def _pixels(batch: int, _: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}


def _text(name: str, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{name}Config")
        accepted = config().to_dict()
        config = config(**{k: v for k, v in _TEXT.items() if k in accepted} | more)
        return getattr(transformers, f"{name}Model")(config), _ids

    return make


def _vision(name: str, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{name}Config")(**_VISION | more)
        return getattr(transformers, f"{name}Model")(config), _pixels

    return make


def _whisper() -> Made:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8,
        max_source_positions=20, vocab_size=199, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip

    def inputs(batch: int, _: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(batch)
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}

    model: Any = WhisperModel(config)
    return model.encoder, inputs


def _t5(**more: Any) -> Made:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, vocab_size=199,
        feed_forward_proj="gated-gelu", **more,
    )  # fmt: skip
    return T5EncoderModel(config), _ids


def _swin(**more: Any) -> Made:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        **more,
    )  # fmt: skip
    return SwinModel(config), _pixels


def _mobilebert() -> Made:
    from transformers import MobileBertConfig, MobileBertModel

    config = MobileBertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=199, embedding_size=32, intra_bottleneck_size=32,
    )  # fmt: skip
    return MobileBertModel(config), _ids


def _convnext() -> Made:
    from transformers import ConvNextV2Config, ConvNextV2Model

    config = ConvNextV2Config(hidden_sizes=[16, 24], depths=[2, 2], num_stages=2, image_size=32)
    return ConvNextV2Model(config), _pixels


def _after_encoder(name: str) -> Callable[[], Made]:
    """A model whose decoder layers have a pair of caches."""

    def make() -> Made:
        import transformers

        small = {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
            "num_mel_bins": 8, "max_source_positions": 20, "vocab_size": 199, "pad_token_id": 0,
            "decoder_start_token_id": 1, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
        }  # fmt: skip
        config = getattr(transformers, f"{name}Config")
        accepted = config().to_dict()
        config = config(**{k: v for k, v in small.items() if k in accepted})

        def inputs(batch: int, tokens: int) -> dict[str, Any]:
            call = _ids(batch, tokens)
            given = {"decoder_input_ids": call["input_ids"][:, : tokens // 2 + 1]}
            if "num_mel_bins" in accepted:
                generator = torch.Generator().manual_seed(batch)
                call = {"input_features": torch.randn(batch, 8, 40, generator=generator)}
            return call | given

        return getattr(transformers, f"{name}Model")(config), inputs

    return make


#: Families whose blocks must all be fused.
FAMILIES: dict[str, Callable[[], Made]] = {
    "llama": _text("Llama"),
    "mistral": _text("Mistral"),
    "qwen2": _text("Qwen2"),
    "qwen3": _text("Qwen3"),
    "phi3": _text("Phi3", pad_token_id=0),
    "gemma": _text("Gemma"),
    "gemma2": _text("Gemma2", sliding_window=6, attn_logit_softcapping=2.0),
    "gemma3": _text("Gemma3Text", sliding_window=6),
    "olmo2": _text("Olmo2"),
    "granite": _text("Granite", residual_multiplier=0.3),
    "cohere": _text("Cohere"),
    "starcoder2": _text("Starcoder2"),
    "stablelm": _text("StableLm"),
    "glm4": _text("Glm4", pad_token_id=0),
    "ernie": _text("Ernie4_5"),
    "helium": _text("Helium", pad_token_id=0),
    "falcon": _text("Falcon"),  # keys are picked by a list of one number
    "gpt-neox": _text("GPTNeoX"),  # rotates a quarter of packed heads
    "smollm3": _text("SmolLM3", pad_token_id=0),
    "mixtral": _text("Mixtral", num_local_experts=4),
    "gpt2": _text("GPT2", n_embd=64, n_layer=3, n_head=4),
    "opt": _text("OPT", ffn_dim=96, word_embed_proj_dim=64),
    "bert": _text("Bert"),
    "bert, eager": _text("Bert", attn_implementation="eager"),
    "roberta": _text("Roberta"),
    "electra": _text("Electra"),
    "mobilebert": _mobilebert,  # no norms: a factor and a term a column
    "modernbert": _text("ModernBert", pad_token_id=0),
    "t5": _t5,
    "t5, eager": lambda: _t5(attn_implementation="eager"),
    "swin": _swin,
    "swin, eager": lambda: _swin(attn_implementation="eager"),
    "vit": _vision("ViT"),
    "convnextv2": _convnext,
    "deit": _vision("DeiT"),
    "dinov2": _vision("Dinov2"),
    "siglip": _vision("SiglipVision"),
    "clip": _vision("CLIPVision"),
    "whisper": _whisper,
    "whisper, both halves": _after_encoder("Whisper"),
    "bart": _after_encoder("Bart"),
    "t5, both halves": _after_encoder("T5"),
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    """The model in evaluation mode, every parameter random, and what makes inputs of (batch,
    tokens)."""
    torch.manual_seed(seed)
    model, inputs = FAMILIES[name]()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(0.1 * torch.randn_like(p))
    model = model.eval().requires_grad_(False).to(dtype)

    def cast(batch: int, tokens: int) -> dict[str, Any]:
        return {
            k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(batch, tokens).items()
        }

    return model, cast
