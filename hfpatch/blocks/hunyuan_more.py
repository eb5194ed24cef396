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

from hfpatch.blocks.hunyuan_video import HunyuanVideoSingleSubject, HunyuanVideoSubject
from hfpatch.blocks.joint import (
    JointFamily,
    Stream,
    added_qkv_of,
    compact,
    qkv_of,
    to_out,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.projections import feed_forward
from hfpatch.proof.subject import Forward, Tensor


class HunyuanVideo15Subject(HunyuanVideoSubject):
    processor = "HunyuanVideo15AttnProcessor2_0"

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        return super().sample(block, generator) | {"attention_mask": mask}

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of, original = self.kernels(bind), StepMemo(compact), self.handed_back()
        masks_of = StepMemo(_masks)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            attention_mask: Tensor | None = None,
            freqs_cis: tuple[Tensor, Tensor] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            h, text, mask = hidden_states, encoder_hidden_states, attention_mask
            if (
                freqs_cis is None
                or mask is None
                or mask.ndim != 2
                or not h.dtype == text.dtype == temb.dtype
            ):
                return original(block, h, text, temb, mask, freqs_cis, *args, **kwargs)
            a = block.attn
            streams = (
                Stream(
                    h,
                    block.norm1.linear(kernels.silu(temb)).chunk(6, 1),
                    qkv_of(a),
                    (a.norm_q, a.norm_k),
                    tables_of(*freqs_cis),
                    to_out(a),
                    lambda x: feed_forward(block.ff, x),
                ),
                Stream(
                    text,
                    block.norm1_context.linear(kernels.silu(temb)).chunk(6, 1),
                    added_qkv_of(a),
                    (a.norm_added_q, a.norm_added_k),
                    None,
                    a.to_add_out,
                    lambda x: feed_forward(block.ff_context, x),
                ),
            )
            kept, dropped = masks_of(mask, freqs_cis[0])
            backend = a.processor._attention_backend
            return tuple(kernels.double(streams, a.heads, kept, backend, dropped))

        return fused


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


HUNYUAN_VIDEO15 = JointFamily("^HunyuanVideo15TransformerBlock$", HunyuanVideo15Subject)
HUNYUAN_IMAGE = JointFamily("^HunyuanImageTransformerBlock$", HunyuanImageSubject)
HUNYUAN_IMAGE_SINGLE = JointFamily(
    "^HunyuanImageSingleTransformerBlock$", HunyuanImageSingleSubject
)
