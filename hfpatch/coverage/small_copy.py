"""A small model as one that is given, of either library."""

from __future__ import annotations

from typing import Any

from torch import nn

from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.coverage.small_transformers import own_shrunk


def small_copy(model: nn.Module) -> nn.Module:
    """A model as this one, of two layers and small sizes, with random weights.

    Of transformers with all other settings of its configuration; of diffusers as its class's
    defaults say.

    Raises:
        ValueError: it cannot be made.
    """
    cls: Any = type(model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):  # a PretrainedConfig
        made: nn.Module = cls(own_shrunk(config))
        return made
    if config is None:
        raise ValueError(f"`{cls.__name__}` has no `config` to make a small copy by")
    return diffusers_model(cls)
