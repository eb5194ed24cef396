"""The columns of docs/compatibility.md: one small model per family, all of them from the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zoo


@dataclass(frozen=True)
class Column:
    """A model family.

    `kind`: "denoiser" (diffusers), "causal", "seq2seq" or "encoder" (transformers).
    """

    title: str
    entry: zoo.Entry
    kind: str

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_denoiser(self) -> bool:
        return self.kind == "denoiser"

    @property
    def generates(self) -> bool:
        return self.kind in ("causal", "seq2seq")


def _columns(*rows: tuple[str, str, str]) -> Mapping[str, Column]:
    return {name: Column(title, zoo.ENTRIES[name], kind) for name, title, kind in rows}


COLUMNS: Mapping[str, Column] = _columns(
    ("ltx", "LTX-Video", "denoiser"),
    ("flux", "FLUX.1", "denoiser"),
    ("wan", "Wan", "denoiser"),
    ("sd15-unet", "UNet", "denoiser"),
    ("llama", "Llama", "causal"),
    ("qwen3", "Qwen3", "causal"),
    ("gemma3", "Gemma 3", "causal"),
    ("bamba", "Bamba (Mamba-2)", "causal"),
    ("qwen3-next", "Qwen3-Next (hybrid)", "causal"),
    ("t5-v1.1", "T5", "seq2seq"),
    ("bert", "BERT", "encoder"),
)
