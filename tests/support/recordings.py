"""Small transformers models and the kinds of calls that they are recorded for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tr
from torch import nn

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITH_DIM = _DECODER | {"head_dim": 16}
_ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


def _decoder(name: str, sizes: dict[str, Any] = _WITH_DIM, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = tr.AutoConfig.for_model(name, **sizes, **more)
        return tr.AutoModelForCausalLM.from_config(config)

    return make


def _model(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return tr.AutoModel.from_config(tr.AutoConfig.for_model(name, **sizes))

    return make


#: Windows longer and shorter than the text, no window, heads grouped and not, both at once.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mistral": _decoder("mistral", sliding_window=64),
    "mistral, window": _decoder("mistral", sliding_window=5),
    "qwen3": _decoder("qwen3"),
    "phi3": _decoder("phi3", _DECODER),
    "gpt2": _decoder("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "gemma3": _decoder(
        "gemma3_text", sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "bert": _model("bert", **_ENCODER),
    "modernbert": _model(
        "modernbert", **_ENCODER, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=4,
    ),
    "t5": _model(
        "t5", d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=99,
        decoder_start_token_id=0,
    ),
    "vit": _model(
        "vit", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    ),
}  # fmt: skip


def ids(seed: int, device: str, length: int = 17) -> torch.Tensor:
    """[2, length] token ids."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 99, (2, length), generator=g).to(device)


def _mask(given: torch.Tensor, left: int) -> torch.Tensor:
    mask = torch.ones_like(given)
    mask[0, :left] = 0
    return mask


def calls_of(
    name: str, model: nn.Module, device: str
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Kinds of calls of a model of `MODELS`, each by a seed."""
    if name == "vit":
        dtype = next(model.parameters()).dtype

        def image(seed: int) -> dict[str, Any]:
            g = torch.Generator().manual_seed(seed)
            return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g).to(device, dtype)}

        return {"images": image}
    more = {} if name != "t5" else {"decoder_input_ids": ids(9, device, 6)}

    def call(seed: int, left: int | None = None, **other: Any) -> dict[str, Any]:
        given = ids(seed, device)
        mask = {} if left is None else {"attention_mask": _mask(given, left)}
        return {"input_ids": given} | mask | more | other

    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "bare": call,
        "mask of ones": lambda seed: call(seed, 0),
        "padded": lambda seed: call(seed, seed),
    }
    if name not in ("bert", "modernbert"):
        kinds["no cache"] = lambda seed: call(seed, use_cache=False)
    if name not in ("bert", "modernbert", "t5"):
        config: Any = model.config
        kinds["cache given"] = lambda seed: call(
            seed, past_key_values=tr.DynamicCache(config=config)
        )
        kinds["bare cache given"] = lambda seed: call(seed, 0, past_key_values=tr.DynamicCache())
    return kinds


def tensors(output: Any) -> list[torch.Tensor]:
    """Of an output: its tensors, and those of its cache."""
    found = [t for t in torch.utils._pytree.tree_leaves(dict(output)) if torch.is_tensor(t)]
    return [*found, *of_cache(getattr(output, "past_key_values", None))]


def of_cache(cache: Any) -> list[torch.Tensor]:
    """Keys and values of a cache."""
    if hasattr(cache, "self_attention_cache"):
        return [*of_cache(cache.self_attention_cache), *of_cache(cache.cross_attention_cache)]
    layers = cache.layers if cache is not None else ()
    return [t for layer in layers for t in (layer.keys, layer.values)]
