"""Sana's transformer block: linear attention, cross-attention, and an FFN of convolutions.

    h = h + gate1 * attn1(modulate(norm1(h)));  h = h + attn2(h, text)
    h = h + gate2 * ff(modulate(norm2(h)))

(diffusers, `SanaTransformerBlock`.) attn1 is linear: `relu(q) (relu(k)^T v)` over the sum of the
weights, in fp32. The FFN's image stays in channels-last memory, as the tokens lie, so its gate is
one kernel of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack, odd_processors
from hfpatch.blocks.joint import within_range
from hfpatch.blocks.parts import (
    Constant,
    bias_of_heads,
    drawing,
    heads_of,
    odd_dtypes,
    undispatched,
)
from hfpatch.blocks.projections import output_projection, project
from hfpatch.proof.subject import Forward, Tensor

_LINEAR, _CROSS = "SanaLinearAttnProcessor2_0", "SanaAttnProcessor2_0"


class SanaSubject(BlockSubject):
    ops = ("norm_modulate", "gate_residual", "gate_residual_norm_modulate", "gated_packed")
    title = "fused block: AdaLN, gates, the FFN's gate"
    processor = (_LINEAR, _CROSS)

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        own = [block.norm1, block.norm2, block.attn1, block.attn2]
        return [*own, block.ff, block.ff.nonlinearity]

    def packs(self) -> list[list[nn.Module]]:
        m: Any = self.module
        a1, a2 = m.attn1, m.attn2
        return [[a1.to_q, a1.to_k, a1.to_v], [a2.to_k, a2.to_v]]

    @classmethod
    def ready(cls, block: Any) -> bool:
        return _odd_attentions(block) is None

    @staticmethod
    def odd(block: Any) -> str | None:
        ff, norms = block.ff, (block.norm1, block.norm2)
        if any(type(n) is not nn.LayerNorm for n in norms):
            return "its norms are no `LayerNorm`s"
        if ff.norm is not None or ff.residual_connection or type(ff.nonlinearity) is not nn.SiLU:
            return "its FFN is no gated convolution with SiLU alone"
        if any(a.rescale_output_factor != 1 or len(a.to_out) != 2 for a in (block.attn2,)):
            return "its cross-attention rescales its output"
        if any(a.inner_kv_dim != a.inner_dim for a in (block.attn1, block.attn2)):
            return "its attention has fewer heads for keys than for queries"
        return _odd_attentions(block) or odd_dtypes([block, *norms], block.attn1.to_out[0])

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=32,
            cross_attention_dim=64,
            attention_bias=m.attn1.to_q.bias is not None,
            norm_elementwise_affine=m.norm2.elementwise_affine,
            norm_eps=m.norm1.eps,
            attention_out_bias=m.attn2.to_out[0].bias is not None,
            qk_norm=None if m.attn1.norm_q is None else "rms_norm_across_heads",
        )

    def settle(self, block: Any, m: Any) -> None:
        block.norm2.eps = m.norm2.eps

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        mask = torch.zeros(2, 1, 6)
        mask[1, :, 4:] = -10000.0
        return {
            "hidden_states": draw(2, 12, 64),
            "encoder_hidden_states": draw(2, 6, 64),
            "encoder_attention_mask": mask,
            "timestep": draw(2, 6 * 64),
            "height": 3,
            "width": 4,
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        modulate = bind("norm_modulate", eps=m.norm1.eps, norm="layer", cast="input")
        gated_sum = bind("gate_residual", cast="input")
        add_modulate = bind(
            "gate_residual_norm_modulate", eps=m.norm2.eps, norm="layer", cast="input"
        )
        gated = bind("gated_packed", activation="silu", gate_first=False)
        ones = Constant(1.0)

        def feed_forward(ff: Any, x: Tensor, height: int, width: int) -> Tensor:
            image = x.unflatten(1, (height, width)).permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
            y = ff.conv_depth(F.silu(ff.conv_inverted(image)))
            rows = y.permute(0, 2, 3, 1)
            if rows.is_contiguous():
                y = gated(rows).permute(0, 3, 1, 2)
            else:
                up, gate = y.chunk(2, 1)
                y = up * F.silu(gate)
            # channels last: a view; else the copy that the kernel behind it needs
            return ff.conv_point(y).flatten(2, 3).transpose(1, 2).contiguous()  # type: ignore[no-any-return]

        def fused(
            block: Any,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            encoder_hidden_states: Tensor | None = None,
            encoder_attention_mask: Tensor | None = None,
            timestep: Any = None,
            height: Any = None,
            width: Any = None,
        ) -> Any:
            h, text, mask = hidden_states, encoder_hidden_states, encoder_attention_mask
            if text is None or not h.dtype == text.dtype == timestep.dtype:
                raise HandedBack
            ada = block.scale_shift_table[None] + timestep.reshape(h.shape[0], 6, -1)
            shift1, scale1, gate1, shift2, scale2, gate2 = ada.chunk(6, 1)
            x = modulate(h, scale1, shift1, None, None)
            h = gated_sum(h, gate1, linear_attention(block.attn1, x))
            x = cross_attention(block.attn2, h, text, mask)
            n = block.norm2
            h, x = add_modulate(h, ones(h), x, scale2, shift2, n.weight, n.bias)
            return gated_sum(h, gate2, feed_forward(block.ff, x, height, width))

        return fused


def linear_attention(attn: Any, x: Tensor) -> Tensor:
    """As `SanaLinearAttnProcessor2_0`, with the tokens of a head side by side for the products."""
    q, k, v = project(x, (attn.to_q, attn.to_k, attn.to_v))
    q, k = _normed(attn, q, k)

    def wide(t: Tensor) -> Tensor:
        to: dict[str, Any] = {"memory_format": torch.contiguous_format}
        return t.transpose(1, 2).to(torch.float32, **to)  # [B, H, S, D]

    q, k, v = (wide(t) for t in heads_of(attn, q, k, v))
    q, k = q.relu(), k.relu()
    sums = q @ k.sum(2).unsqueeze(-1)
    out = (q @ (k.transpose(2, 3) @ v)) / (sums + 1e-15)
    out = out.transpose(1, 2).to(x.dtype).flatten(2)
    return within_range(output_projection(attn, out))


def cross_attention(attn: Any, x: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
    q = attn.to_q(x)
    k, v = project(text, (attn.to_k, attn.to_v))
    q, k = _normed(attn, q, k)
    if mask is not None:
        mask = bias_of_heads(attn, mask, text.shape[1], text.shape[0])
    q, k, v = heads_of(attn, q, k, v)
    return output_projection(attn, undispatched(q, k, v, mask).flatten(2, 3))


def _normed(attn: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of q and k, called as modules."""
    q = q if attn.norm_q is None else attn.norm_q(q)
    return q, k if attn.norm_k is None else attn.norm_k(k)


def _odd_attentions(block: Any) -> str | None:
    return odd_processors(_LINEAR, (block.attn1,)) or odd_processors(_CROSS, (block.attn2,))
