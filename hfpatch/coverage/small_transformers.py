"""Small models of every type that transformers has, with random weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from hfpatch.coverage.small_settings import SETTINGS

#: Parameters up to which a model counts as small.
MOST = 60_000_000

#: What makes a configuration of transformers small, where it has such a number.
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim"), 64),
    "emb_dim": 64,
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "encoder_hidden_size"), 64),
    **dict.fromkeys(("num_queries", "two_stage_num_proposals"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "feed_forward_size", "dim_feedforward"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 199),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "mm_tokens_per_image": 4,
    "hidden_size_per_layer_input": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    **dict.fromkeys(("image_size", "crop_size"), 32),
    "frames_per_clip": 4,
    "patch_size": 8,
    "projection_dim": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
#: Of numbers that mean a size of the input, tokens that must be in the vocabulary.
_TOKENS = re.compile(r"_token_id$|_token_index$")
#: A backbone's stages, one for each of its layers where nothing else says how many there are.
_STAGES = ("stage_names", "out_features", "out_indices")


def of_transformers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in sorted(CONFIG_MAPPING_NAMES):
        named = MODEL_MAPPING_NAMES.get(kind)
        for name in (named,) if isinstance(named, str) else named or ():
            yield f"transformers {name} ({kind})", partial(transformers_model, kind, name)


def transformers_model(kind: str, name: str) -> nn.Module:
    import transformers

    config = shrunk(transformers.CONFIG_MAPPING[kind]())
    cls = getattr(transformers, name, None)
    if cls is None:  # not among its package's names
        modeling = type(config).__module__.replace(".configuration_", ".modeling_")
        cls = getattr(importlib.import_module(modeling), name)
    model: nn.Module = cls(_its_part(cls, config))
    return model


def _its_part(cls: Any, config: Any) -> Any:
    """The configuration that a class takes: a model's may be of one part of what its type names."""
    wanted = getattr(cls, "config_class", None)
    if not inspect.isclass(wanted) or isinstance(config, wanted):
        return config
    parts = (getattr(config, key, None) for key in getattr(type(config), "sub_configs", {}))
    return next((part for part in parts if isinstance(part, wanted)), config)


def shrunk(config: Any) -> Any:
    """The same configuration with small numbers, its parts too."""
    cls = type(config)
    given = config.to_dict()
    small: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, _SMALL[key])
        elif key == "num_experts_per_tok" and value is None:  # which no router takes
            small[key] = _SMALL[key]
        elif _TOKENS.search(key) and isinstance(value, int) and value >= 199:
            small[key] = 7
    _fit(given, small)
    if "out_features" in given and "depths" in given:  # stages stay as many as they are
        small["out_features"] = given["out_features"]
    parts = {
        key: shrunk(part).to_dict()
        for key in getattr(cls, "sub_configs", {})
        if (part := getattr(config, key, None)) is not None and hasattr(part, "to_dict")
    }
    small |= parts
    known = SETTINGS.get(getattr(config, "model_type", ""), {})
    for key, value in known.items():
        of_part = isinstance(value, dict) and "model_type" not in value and key in parts
        small[key] = {**parts[key], **value} if of_part else value
    kept = {*parts, *known}
    for attempt in (small, {k: v for k, v in small.items() if k in kept or "num" in k}):
        try:
            return cls(**attempt)
        except Exception:  # this one's own rules: sizes that must fit
            continue
    for key, value in small.items():
        if key not in parts:
            setattr(config, key, value)
    return config


#: Numbers that are one, where a configuration has them equal.
_EQUAL = (
    ("num_attention_heads", "num_key_value_heads"),
    ("qk_rope_head_dim", "head_dim"),
    ("hidden_size", "embedding_size"),
)


def _fit(given: dict[str, Any], small: dict[str, Any]) -> None:
    """Make small numbers go together as the given ones do."""
    wide, heads = small.get("hidden_size"), small.get("num_attention_heads")
    if wide and heads and "head_dim" in given and given["head_dim"] is None:
        small["head_dim"] = wide // heads
    if heads and "num_key_value_heads" in given and given["num_key_value_heads"] is None:
        small["num_key_value_heads"] = heads
    if isinstance(given.get("num_heads"), list) and isinstance(given.get("embed_dim"), int):
        small["num_heads"] = [min(2 << n, 16) for n in range(len(given["num_heads"]))]
        small["depths"] = [min(depth, 2) for depth in given.get("depths", ())]
    for first, second in _EQUAL:
        if first in small and second in given and given[first] == given[second]:
            small[second] = small[first]
    for key, value in given.items():
        if not isinstance(value, dict) or not isinstance(value.get("mrope_section"), list):
            continue
        sections = value["mrope_section"]
        wide, narrow = given.get("head_dim"), small.get("head_dim")
        if not (wide and narrow):
            wide = given.get("hidden_size", 0) // given.get("num_attention_heads", 1)
            narrow = small.get("hidden_size", 0) // small.get("num_attention_heads", 1)
        if wide and narrow and sections:
            total = sum(sections) * narrow // wide
            scaled = [max(1, n * narrow // wide) for n in sections[1:]]
            small[key] = {**value, "mrope_section": [total - sum(scaled), *scaled]}


def own_shrunk(config: Any) -> Any:
    """A transformers configuration with all its own settings, but small numbers.

    Raises:
        ValueError: its class does not take them together.
    """
    small = shrunk(copy.deepcopy(config)).to_dict()
    given = config.to_dict()
    merged = {k: _own_small(k, v, small) for k, v in given.items()}
    layers, left = given.get("num_hidden_layers"), merged.get("num_hidden_layers")
    if isinstance(layers, int) and isinstance(left, int):
        merged = {k: _of_layers(v, layers, left) for k, v in merged.items()}
    for key in getattr(type(config), "sub_configs", {}):
        part = getattr(config, key, None)
        if part is not None and hasattr(part, "to_dict"):
            merged[key] = own_shrunk(part).to_dict()
    try:
        return type(config).from_dict(merged)
    except Exception as e:  # the class's own rules
        said = " ".join(str(e).split())
        raise ValueError(f"`{type(config).__name__}` does not go with small numbers: {said}") from e


def _own_small(key: str, value: Any, small: dict[str, Any]) -> Any:
    """A setting, or its small number; `small` has none of what the class has no field for, which a
    configuration keeps all the same."""
    if key not in _SMALL and key not in _STAGES and not _TOKENS.search(key):
        return value
    if key in small:
        return small[key]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return min(value, _SMALL[key]) if key in _SMALL else value if value < 199 else 7


def _of_layers(value: Any, layers: int, left: int) -> Any:
    """What a setting says of the first layers, where it is a list or a table of all of them."""
    if isinstance(value, list) and len(value) == layers:
        return value[:left]
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {key: of for key, of in value.items() if int(key) < left}
    return value
