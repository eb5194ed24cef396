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


def tokenizer() -> Any:
    """Words to numbers; padded on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    names = ["<pad>", "<s>", "</s>", "<unk>", *words]
    names += [f"w{i}" for i in range(199 - len(names))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


def text_pipeline(model: nn.Module, kind: str) -> Any:
    """transformers' `pipeline(...)` for a model of this kind."""
    from transformers import pipeline

    task = {"causal": "text-generation", "encoder": "feature-extraction"}.get(kind)
    if task is None:
        task = "text-generation"
    return pipeline(task, model=model, tokenizer=tokenizer(), device="cpu")
