"""Which models generate text: what is asked of every model, before anything is imported for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hfpatch.decoding.replica import text_config


def is_candidate(model: nn.Module) -> bool:
    """Whether a model generates text from a cache: what decoding steps are of."""
    config = getattr(model, "config", None)
    return (
        callable(getattr(model, "generate", None))
        and callable(getattr(model, "get_output_embeddings", None))
        and isinstance(getattr(text_config(config), "vocab_size", None), int)
        and not getattr(config, "is_encoder_decoder", False)
        and _has_head(model)
    )


def _has_head(model: Any) -> bool:
    try:
        return isinstance(model.get_output_embeddings(), nn.Module)
    except (AttributeError, NotImplementedError):
        return False
