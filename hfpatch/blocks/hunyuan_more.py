"""The transformer blocks of HunyuanVideo 1.5 and HunyuanImage 2.1: HunyuanVideo's with another name
or another mask (diffusers, `HunyuanVideo15TransformerBlock`, `HunyuanImageTransformerBlock`,
`HunyuanImageSingleTransformerBlock`).

HunyuanVideo 1.5's blocks get a mask of the text, [B, S], and make one of all tokens by all tokens
from it, at every block: padding is no key, and as a query it gets nothing. Here no mask is made:
padding is left out of the keys, and its results are set to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.hunyuan_video import HunyuanVideoSingleSubject, HunyuanVideoSubject, Masking
from hfpatch.blocks.memo import StepMemo
from hfpatch.proof.subject import Forward, Tensor


class HunyuanVideo15Subject(HunyuanVideoSubject):
    processor = "HunyuanVideo15AttnProcessor2_0"

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        return super().sample(block, generator) | {"attention_mask": mask}

    @staticmethod
    def masking() -> Masking:
        masks_of = StepMemo(_masks)

        def masks(
            mask: Tensor | None, tables: tuple[Tensor, Tensor] | None
        ) -> tuple[Tensor | None, Tensor | None]:
            if tables is None or mask is None or mask.ndim != 2:
                raise HandedBack
            return masks_of(mask, tables[0])

        return masks


def _masks(text_mask: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of all tokens, [B, 1, 1, image + text], and which text tokens are none, [B, S, 1].

    Args:
        text_mask: [B, S], of any dtype.
        table: [image tokens, D].
    """
    mask = text_mask.bool()
    return F.pad(mask, (table.shape[0], 0), value=True)[:, None, None], ~mask[:, :, None]


class HunyuanImageSubject(HunyuanVideoSubject):
    processor = "HunyuanImageAttnProcessor"

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        call = super().sample(block, generator)
        call["image_rotary_emb"] = call.pop("freqs_cis")
        return call

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        run = super().fuse(bind)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            attention_mask: Tensor | None = None,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            streams = (hidden_states, encoder_hidden_states)
            return run(block, *streams, temb, attention_mask, image_rotary_emb, *args, **kwargs)

        return fused


class HunyuanImageSingleSubject(HunyuanVideoSingleSubject):
    processor = "HunyuanImageAttnProcessor"
