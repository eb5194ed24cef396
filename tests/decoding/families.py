"""Small random models of the families that decode through the engine, and of some that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import transformers

_T = TypeVar("_T", torch.Tensor, torch.nn.Module)
_devices = ["cpu"]

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: By family: the class before `ForCausalLM`, and its configuration beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "cwm": ("Cwm", {}),  # its config's tokens are numbers, None is refused
    "llama-one-key-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "ministral": ("Ministral", {"head_dim": 32, "sliding_window": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 48}),
    "smollm3": ("SmolLM3", {}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 12, "num_hidden_layers": 7}),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 12}),
    "phi3": ("Phi3", {}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    # positions of the tests stay before those from which on the frequencies are others
    "llama-dynamic-rope": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 64,
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [2.0 + 0.5 * i for i in range(12)],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0156,
        },
    ),
    "ernie": ("Ernie4_5", {"head_dim": 32}),
    "helium": ("Helium", {"head_dim": 32}),
    "cohere": ("Cohere", {}),
    "cohere-head-norms": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 12}),
    "stablelm": ("StableLm", {}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True}),
    "stablelm-head-norms": (
        "StableLm",
        # 8 heads: a list of norms longer than that of the replica; one key head: a shorter one
        {"qk_layernorm": True, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "stablelm-parallel-head-norms": (
        "StableLm",
        {"qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "nemotron": ("Nemotron", {}),
    "exaone4": ("Exaone4", {"sliding_window": 12}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
}

#: Families of which the engine runs the layers' attention halves, and modules the rest.
HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "head_dim": 32,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 32, "sliding_window": 12}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
        },
    ),
}

#: Families that no description explains: the class, its configuration, and what names the stage.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon-alibi": ("Falcon", {"alibi": True}, "attention|examined"),
    "gpt-neox": ("GPTNeoX", {}, "attention"),
    "mamba": ("Mamba", {}, "attention"),
}


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Models and prompts are made there meanwhile."""
    _devices.append(name)
    try:
        yield
    finally:
        _devices.pop()


def device() -> str:
    """Where models and prompts are made."""
    return _devices[-1]


def here(made: _T) -> _T:
    """The same there."""
    return made.to(device())


def make(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A random model of a family, whose norms' weights and biases are not ones and zeros."""
    cls, own = (FAMILIES.get(name) or HALVES.get(name) or REFUSED[name])[:2]
    torch.manual_seed(0)
    config = getattr(transformers, f"{cls}TextConfig" if cls == "Gemma3" else f"{cls}Config")(
        **{**_SIZES, **own, **more}
    )
    model = getattr(transformers, f"{cls}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
        else:
            parameter.data.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    if getattr(config, "tie_word_embeddings", False):
        model.tie_weights()
    return here(model.to(dtype)).eval()


def prompts(rows: int = 2, length: int = 9, padding: int = 3) -> dict[str, torch.Tensor]:
    """Random ids, the first row padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :padding] = 0
        ids[0, :padding] = 0
    return {"input_ids": here(ids), "attention_mask": here(mask)}
