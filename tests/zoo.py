"""Small models of the real transformers and diffusers classes, with random weights.

Every entry builds in milliseconds, runs on a CPU in a fraction of a second and is deterministic:

    entry = zoo.ENTRIES["llama"]
    model = entry.build(torch.bfloat16)
    inputs = entry.inputs(model, torch.bfloat16)
    y = entry.run(model, inputs)              # the tensor to compare

All parameters are random, norm weights and biases too: a norm that multiplies by `w` and one that
multiplies by `1 + w` differ, and so do a bias that is added and one that is dropped.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
SEED = 0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB = 199


@dataclass(frozen=True)
class Entry:
    """One model (or pipeline) of the zoo.

    `make()` constructs it, `sample(model, generator)` gives the keyword arguments of one forward in
    fp32, `output(result)` picks the tensor to compare.
    """

    name: str
    make: Callable[[], Any]
    sample: Callable[[Any, torch.Generator], Inputs]
    output: Callable[[Any], torch.Tensor]
    is_pipeline: bool = False

    def build(self, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Any:
        """The model on the CPU in eval mode, in `dtype` (fp32 where the library keeps it so)."""
        with torch.random.fork_rng(devices=[]):  # the constructors draw from the global generator
            torch.manual_seed(seed)
            model = self.make()
        for module in modules_of(model):
            randomize_(module, seed)
            cast_(module, dtype)
            module.eval()
        return model

    def inputs(
        self,
        model: Any,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> Inputs:
        """Keyword arguments of one call, on the CPU, floating tensors in `dtype`.

        Without a `generator` the values are always the same. Drawn in fp32 and cast, so that every
        dtype sees the same numbers. Reusable: nothing in them is consumed by a call.
        """
        generator = generator or torch.Generator().manual_seed(SEED + 1)
        return cast_inputs(self.sample(model, generator), dtype)

    @torch.no_grad()
    def run(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The model's output tensor for `inputs`."""
        return self.output(model(**inputs))

    def reference(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The output in fp64 of an fp64 copy of `model`: the same parameter and input values."""
        twin = copy.deepcopy(model)
        for module in modules_of(twin):
            cast_(module, torch.float64)
        return self.run(twin, cast_inputs(inputs, torch.float64))


def modules_of(model: Any) -> list[nn.Module]:
    """[model], or the modules of a diffusers pipeline."""
    if isinstance(model, nn.Module):
        return [model]
    return [part for part in model.components.values() if isinstance(part, nn.Module)]


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """`inputs` with floating tensors in `dtype`, everything else as it is."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: cast(value) for name, value in inputs.items()}


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = SEED) -> nn.Module:
    """Gives every parameter random values that depend on `seed` and the parameter's name alone.

    Matrices and convolutions: N(0, 1 / fan_in), which keeps activations near unit scale however
    small the model is. Embeddings: N(0, 1). One-dimensional weights (norms): U(0.5, 1.5).
    Other vectors (biases): N(0, 0.1^2).
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        g = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if p.ndim >= 2:
            std = 1.0 if id(p) in embeddings else (p[0].numel()) ** -0.5
            p.copy_(torch.randn(p.shape, generator=g) * std)
        elif name.endswith("weight"):
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
        else:
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return model


def cast_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts as `from_pretrained(dtype=...)` does: what is in the state dict, but not the modules
    that the library keeps in fp32, and no non-persistent buffer (RoPE tables).

    Not in fp64: a reference is in fp64 throughout.
    """
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    # transformers keeps these in fp32 for fp16 alone, diffusers for every half type
    if dtype == torch.float16 or type(model).__module__.startswith("diffusers"):
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    half = dtype in (torch.float16, torch.bfloat16)
    # keep_vars: the parameters and buffers themselves, not detached copies
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            fp32 = half and any(part in keep for part in name.split("."))
            tensor.data = tensor.data.to(torch.float32 if fp32 else dtype)
    return model


# Samples ---------------------------------------------------------------------------------------


def _tokens(g: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=g)


def _padded_mask(batch: int, length: int, padding: int) -> torch.Tensor:
    """[batch, length] of ones; the last row ends in `padding` zeros."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - padding :] = 0
    return mask


def _text(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(g, 2, 12)}


def _causal(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(g, 2, 12), "use_cache": False}


def _masked_text(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(g, 2, 12), "attention_mask": _padded_mask(2, 12, 3)}


def _seq2seq(model: nn.Module, g: torch.Generator) -> Inputs:
    return _masked_text(model, g) | {"decoder_input_ids": _tokens(g, 2, 7), "use_cache": False}


def _logits(result: Any) -> torch.Tensor:
    return result.logits


def _hidden(result: Any) -> torch.Tensor:
    return result.last_hidden_state


def _sample(result: Any) -> torch.Tensor:
    return result.sample


# transformers ----------------------------------------------------------------------------------

# Three query heads per key-value head and a width that is no power of two: the shapes that break
# kernels are not the round ones.
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(family: str, config: str | None = None, **settings: Any) -> Callable[[], nn.Module]:
    """`{family}ForCausalLM` with `_DECODER` and `settings`; `config` names another config class."""

    def make() -> nn.Module:
        import transformers

        config_class = getattr(transformers, config or f"{family}Config")
        return getattr(transformers, f"{family}ForCausalLM")(config_class(**(_DECODER | settings)))

    return make


def _falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _t5(class_name: str, projection: str) -> Callable[[], nn.Module]:
    """T5 1.0 has `relu`, 1.1 (and the text encoders of LTX, Flux, SD3) `gated-gelu`."""

    def make() -> nn.Module:
        import transformers

        config = transformers.T5Config(
            vocab_size=VOCAB,
            d_model=96,
            d_kv=16,
            d_ff=160,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=6,
            feed_forward_proj=projection,
            tie_word_embeddings=projection == "relu",
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
        return getattr(transformers, class_name)(config)

    return make


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            max_position_embeddings=64,
        )
    )


def _clip_text() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCAB,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            max_position_embeddings=64,
            hidden_act="quick_gelu",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=208,
            image_size=32,
            patch_size=8,
        )
    )


def _vit_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g)}


# diffusers -------------------------------------------------------------------------------------


def _ltx() -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=32,
        cross_attention_dim=128,
        num_layers=2,
        caption_channels=64,
    )


def _ltx_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    frames, height, width = 2, 3, 4
    return {
        "hidden_states": torch.randn(2, frames * height * width, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 8, 64, generator=g),
        "encoder_attention_mask": _padded_mask(2, 8, 3),
        "timestep": torch.tensor([900, 300]),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=48,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def _flux_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    rows, columns, text = 4, 6, 7
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return {
        "hidden_states": torch.randn(2, rows * columns, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, text, 64, generator=g),
        "pooled_projections": torch.randn(2, 48, generator=g),
        # Flux multiplies both by 1000 in the dtype of the model: these products are exact in bf16
        "timestep": torch.tensor([0.25, 0.125]),
        "guidance": torch.tensor([4.0, 2.0]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def _unet() -> nn.Module:
    """Stable Diffusion 1.5 in small: its block types, GEGLU feed-forwards, 8 attention heads."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=96,
        attention_head_dim=8,
    )


def _unet_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=g),
        "timestep": torch.tensor([900, 300]),
        "encoder_hidden_states": torch.randn(2, 7, 96, generator=g),
    }


def _sd3() -> nn.Module:
    """Stable Diffusion 3.5: RMS-normed queries and keys, one block with dual attention."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=128,
        pooled_projection_dim=48,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "pooled_projections": torch.randn(2, 48, generator=g),
        "timestep": torch.tensor([900, 300]),
    }


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=32,
        ffn_dim=256,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _wan_sample(model: nn.Module, g: torch.Generator) -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 2, 6, 8, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=g),
        "timestep": torch.tensor([900, 300]),
    }


def _ltx_vae() -> nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        latent_channels=16,
        block_out_channels=(16, 32, 32, 32),
        decoder_block_out_channels=(16, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def _ltx_pipeline() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    pipe = LTXPipeline(
        transformer=_ltx(),
        vae=_ltx_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        tokenizer=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _ltx_pipeline_sample(pipe: Any, g: torch.Generator) -> Inputs:
    """9 frames of 64 x 64 with guidance; latents, since a generator would be consumed."""
    return {
        "prompt_embeds": torch.randn(1, 8, 64, generator=g),
        "prompt_attention_mask": _padded_mask(1, 8, 3),
        "negative_prompt_embeds": torch.randn(1, 8, 64, generator=g),
        "negative_prompt_attention_mask": _padded_mask(1, 8, 5),
        "latents": torch.randn(1, 2 * 2 * 2, 16, generator=g),
        "num_frames": 9,
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "output_type": "pt",
    }


def _frames(result: Any) -> torch.Tensor:
    return result.frames


def _table(*entries: Entry) -> Mapping[str, Entry]:
    return {entry.name: entry for entry in entries}


ENTRIES: Mapping[str, Entry] = _table(
    Entry("ltx", _ltx, _ltx_sample, _sample),
    Entry("flux", _flux, _flux_sample, _sample),
    Entry("sd15-unet", _unet, _unet_sample, _sample),
    Entry("sd3", _sd3, _sd3_sample, _sample),
    Entry("wan", _wan, _wan_sample, _sample),
    Entry("llama", _decoder("Llama"), _causal, _logits),
    Entry("mistral", _decoder("Mistral", sliding_window=8), _causal, _logits),
    Entry("qwen2", _decoder("Qwen2"), _causal, _logits),
    Entry("qwen3", _decoder("Qwen3", head_dim=24), _causal, _logits),
    Entry("gemma2", _decoder("Gemma2", head_dim=24, sliding_window=8), _causal, _logits),
    Entry(
        "gemma3",
        _decoder("Gemma3", "Gemma3TextConfig", head_dim=24, sliding_window=8),
        _causal,
        _logits,
    ),
    Entry("olmo2", _decoder("Olmo2"), _causal, _logits),
    Entry("phi3", _decoder("Phi3"), _causal, _logits),
    Entry("falcon", _falcon, _causal, _logits),
    Entry("t5-encoder", _t5("T5EncoderModel", "relu"), _masked_text, _hidden),
    Entry("t5-v1.1-encoder", _t5("T5EncoderModel", "gated-gelu"), _masked_text, _hidden),
    Entry("t5", _t5("T5ForConditionalGeneration", "relu"), _seq2seq, _logits),
    Entry("t5-v1.1", _t5("T5ForConditionalGeneration", "gated-gelu"), _seq2seq, _logits),
    Entry("bert", _bert, _masked_text, _hidden),
    Entry("clip-text", _clip_text, _text, _hidden),
    Entry("vit", _vit, _vit_sample, _hidden),
)

PIPELINES: Mapping[str, Entry] = _table(
    Entry("ltx-pipeline", _ltx_pipeline, _ltx_pipeline_sample, _frames, is_pipeline=True),
)
