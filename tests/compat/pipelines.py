"""Pipelines around the small models: what `pipe.enable_…` needs, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn


class OneModelPipeline(DiffusionPipeline):
    """A pipeline with one model, as `transformer`, that calls it twice."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        self.transformer(**inputs)
        result = self.transformer(**inputs)
        self.maybe_free_model_hooks()
        return result
