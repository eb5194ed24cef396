"""LTX-Video's transformer block: AdaLN, q/k norm and RoPE, gates and the FFN's GELU fused.

One block is `h + gate·attn(modulate(norm(h)))`, `+ cross_attn`, `+ gate·ffn(modulate(norm(h)))`
(diffusers, `LTXVideoTransformerBlock`). Its projections, and whatever stands in their place (LoRA,
quantized linears, offload hooks), are called as modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.attention import attention
from hfpatch.blocks.base import BlockSubject, compute_dtype
from hfpatch.blocks.chain import Chain, Place
from hfpatch.blocks.memo import StepMemo, companion, stream_of
from hfpatch.blocks.parts import Constant, bias_of_heads, check_pairs, drawing, gelu_of
from hfpatch.blocks.projections import (
    feed_forward,
    is_plain,
    output_projection,
    packed_product,
    project,
)
from hfpatch.proof.subject import Forward, Tensor


class LtxSubject(BlockSubject):
    ops = (
        "norm_modulate",
        "qk_norm_rope",
        "gate_residual",
        "gate_residual_norm_modulate",
        "rms_norm",
    )
    title = "fused block: AdaLN, qk norm + RoPE, gates"
    processor = "LTXVideoAttnProcessor"
    chained = True
    like = ("hidden_states",)
    anchor = ("scale_shift_table",)

    def packs(self) -> list[list[nn.Module]]:
        a1, a2 = self.module.attn1, self.module.attn2
        return [[a1.to_q, a1.to_k, a1.to_v], [a2.to_k, a2.to_v]]  # type: ignore[union-attr,list-item]

    def chain_packs(self) -> list[list[nn.Module]]:
        a2: Any = self.module.attn2
        return [[a2.to_k, a2.to_v]]

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        found: list[nn.Module] = [block.norm1, block.norm2]
        for attn in (block.attn1, block.attn2):
            found += [attn, attn.norm_q, attn.norm_k]
        return found

    @staticmethod
    def odd(block: Any) -> str | None:
        approximate = block.ff.net[0].approximate
        if approximate not in ("tanh", "none"):
            return f"its FFN uses gelu(approximate={approximate!r})"
        idle, projection = LtxSubject.unused(block), compute_dtype([block], block.attn1.to_out[0])
        dtypes = {p.dtype for part in idle for p in part._parameters.values() if p is not None}
        if dtypes - {projection}:
            return f"its norms are {', '.join(map(str, dtypes))}, its projections {projection}"
        return None

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            cross_attention_dim=48,
            activation_fn=gelu_of(m.ff),
            attention_bias=m.attn1.to_q.bias is not None,
            attention_out_bias=m.attn1.to_out[0].bias is not None,
            eps=m.norm1.eps,
            elementwise_affine=m.norm1.weight is not None,
        )

    def settle(self, block: Any, m: Any) -> None:
        for ours, theirs in zip(self.attentions(block), self.attentions(m), strict=True):
            ours.norm_q.eps, ours.norm_k.eps = theirs.norm_q.eps, theirs.norm_k.eps

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        angles = draw(2, 10, 32).repeat_interleave(2, -1)
        mask = torch.zeros(2, 1, 6)
        mask[1, :, 4:] = -10000.0
        return {
            "hidden_states": draw(2, 10, 64),
            "encoder_hidden_states": draw(2, 6, 48),
            "temb": draw(2, 1, 6 * 64),
            "image_rotary_emb": (angles.cos(), angles.sin()),
            "encoder_attention_mask": mask,
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        modulate = bind("norm_modulate", eps=m.norm1.eps, norm="rms", cast="input")
        gate = bind("gate_residual", cast="input")
        gate_modulate = bind(
            "gate_residual_norm_modulate", eps=m.norm2.eps, norm="rms", cast="input"
        )
        self_norm_rope = bind(
            "qk_norm_rope", eps=m.attn1.norm_q.eps, norm_across_heads=True, interleaved=True
        )
        cross_norm = bind("rms_norm", eps=m.attn2.norm_q.eps, cast="none")
        compact = StepMemo(_compact)
        ones = Constant(1.0)  # the sum after cross-attention has no gate

        def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            batch, length, width = q.shape
            heads = attn.heads
            by_head = (batch, -1, heads, width // heads)
            q, k, v = q.view(by_head), k.view(by_head), v.view(by_head)
            out = attention(q, k, v, mask, backend=attn.processor._attention_backend)
            return output_projection(attn, out.view(batch, length, width))

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            encoder_attention_mask: Tensor | None = None,
            chain: Chain | None = None,
        ) -> Tensor:
            h, text = hidden_states, encoder_hidden_states
            here = None if chain is None else chain.at(block, temb)
            ada = _add_table(block, temb) if here is None else here.sums
            shift1, scale1, gate1, shift2, scale2, gate2 = ada
            x = None if here is None else here.take(h)
            if x is None:
                x = modulate(h, scale1, shift1, block.norm1.weight, None)

            a1, a2 = block.attn1, block.attn2
            cos, sin = (None, None) if image_rotary_emb is None else compact(*image_rotary_emb)
            q, k, v = project(x, (a1.to_q, a1.to_k, a1.to_v))
            q, k = self_norm_rope(q, k, a1.norm_q.weight, a1.norm_k.weight, cos, sin)
            h = gate(h, gate1, attend(a1, q, k, v, None))

            q = cross_norm(a2.to_q(h), a2.norm_q.weight, None)
            k, v = _text_keys_values(a2, text, here)
            k = cross_norm(k, a2.norm_k.weight, None)
            crossed = attend(a2, q, k, v, _mask(a2, encoder_attention_mask, text))
            h, x = gate_modulate(h, ones(h), crossed, scale2, shift2, block.norm2.weight, None)
            out = feed_forward(block.ff, x)

            after = None if here is None else here.after()
            if here is None or after is None or after[0].norm1.eps != block.norm2.eps:
                return gate(h, gate2, out)  # type: ignore[no-any-return]
            following, ada = after
            h, x = gate_modulate(h, gate2, out, ada[1], ada[0], following.norm1.weight, None)
            here.hand_over(h, x)
            return h  # type: ignore[no-any-return]

        return fused


def _add_table(block: Any, temb: Tensor) -> tuple[Tensor, ...]:
    """The six modulation vectors of a block, [B, T, D]."""
    table: Tensor = block.scale_shift_table
    return (table + temb.reshape(*temb.shape[:2], *table.shape)).unbind(2)


def _text_keys_values(attn: Any, text: Tensor, here: Place | None) -> tuple[Tensor, Tensor]:
    """k and v of the cross-attention: one product for all blocks of a step, where it may be."""
    linears = (attn.to_k, attn.to_v)
    if here is not None:
        held = here.share(_all_keys_values, text)
        if held is not None and all(is_plain(m, text) for m in linears) and _stamp(attn) == held[2]:
            return held[0], held[1]
    k, v = project(text, linears)
    return k, v


def _all_keys_values(blocks: list[Any], text: Tensor) -> _KeysValues | None:
    linears = [m for b in blocks for m in (b.attn2.to_k, b.attn2.to_v)]
    product = packed_product(text, linears)
    return None if product is None else _KeysValues(product, linears, blocks)


class _KeysValues(Sequence[Any]):
    """(k, v, stamp) for each block; k and v are taken out of the product when the block asks."""

    def __init__(self, product: Tensor, linears: list[Any], blocks: list[Any]) -> None:
        self._product = product
        self._ends = list(accumulate((m.out_features for m in linears), initial=0))
        self._stamps = [_stamp(b.attn2) for b in blocks]

    def __len__(self) -> int:
        return len(self._stamps)

    def __getitem__(self, i: Any) -> tuple[Tensor, Tensor, Any]:
        start, middle, end = self._ends[2 * i : 2 * i + 3]
        product = self._product
        return product[..., start:middle], product[..., middle:end], self._stamps[i]


def _stamp(attn: Any) -> tuple[Any, ...]:
    """What tells whether k and v would come out the same: no weight was exchanged or written to."""
    k, v = attn.to_k, attn.to_v
    found = (id(k.weight), k.weight._version, id(v.weight), v.weight._version)
    return found if k.bias is None else (*found, k.bias._version, v.bias._version)


def _mask(attn: Any, mask: Tensor | None, text: Tensor) -> Tensor | None:
    """The bias [B, 1, S] for each head, as the processor prepares it."""
    if mask is None:
        return None
    batch, length = text.shape[:2]
    if mask.ndim == 3 and mask.shape[0] == batch and mask.shape[-1] == length:
        return mask[:, None].expand(batch, attn.heads, mask.shape[1], length)  # as a view
    return bias_of_heads(attn, mask, length, batch)


def _compact(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The RoPE tables as the kernel reads them best: each value, which stands twice, once."""
    check_pairs(cos, sin)
    if stream_of(cos) is None:  # for one block alone that is not worth two copies
        return cos, sin
    return _halved(cos), _halved(sin)


def _halved(table: Tensor) -> Tensor:
    kept = companion(table)
    if kept is not None:
        return kept  # type: ignore[no-any-return]
    one = table[:1] if table.stride(0) == 0 else table  # of all samples, expanded
    return one[..., ::2].contiguous()
