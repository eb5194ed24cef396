"""diffusers' `BasicTransformerBlock`: the block of UNets (Stable Diffusion) and of PixArt.

With `norm_type="layer_norm"` (UNets) each residual sum and the norm behind it are one kernel:

    h = h + attn1(norm1(h));  h = h + attn2(norm2(h), text);  h = h + ff(norm3(h))

With `norm_type="ada_norm_single"` (PixArt) norms are modulated and sums gated; the cross-attention
takes h as it is:

    h = h + gate1 * attn1(modulate(norm1(h)));  h = h + attn2(h, text)
    h = h + gate2 * ff(modulate(norm2(h)))

Other norm types are left to their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack, compute_dtype
from hfpatch.blocks.parts import (
    Constant,
    bias_of_heads,
    drawing,
    gelu_of,
    odd_feed_forward,
    plain_attention,
)
from hfpatch.blocks.projections import feed_forward, output_projection, project
from hfpatch.proof.subject import Forward, Tensor


class BasicSubject(BlockSubject):
    processor = "AttnProcessor2_0"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        if _modulated(module):
            self.ops = ("norm_modulate", "gate_residual", "gate_residual_norm_modulate")
            self.title = "fused block: AdaLN, gates"
        else:
            self.ops = ("layer_norm", "add_layer_norm")
            self.title = "fused block: residual sums with their norms"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        norms = (block.norm1, block.norm2, getattr(block, "norm3", None))
        return [
            *(n for n in norms if n is not None),
            *(a for a in (block.attn1, block.attn2) if a is not None),
        ]

    def packs(self) -> list[list[nn.Module]]:
        return [
            [a.to_k, a.to_v] if a.is_cross_attention else [a.to_q, a.to_k, a.to_v]
            for a in self.attentions(self.module)
        ]

    @staticmethod
    def odd(block: Any) -> str | None:
        if block.norm_type not in ("layer_norm", "ada_norm_single"):
            return f"its norms are of type {block.norm_type!r}"
        if block.pos_embed is not None:
            return "it adds position embeddings"
        if hasattr(block, "fuser"):
            return "it has a GLIGEN layer"
        if block._chunk_size is not None:
            return "its FFN runs in chunks (`enable_forward_chunking`)"
        if block.attn2 is None and block.norm_type == "ada_norm_single":
            return "it has no cross-attention"
        norms = [block.norm1, block.norm2]
        if block.norm_type == "layer_norm":
            norms.append(block.norm3)
        if not all(n is None or type(n) is nn.LayerNorm for n in norms):
            return "its norms are no `LayerNorm`s"
        for attn in BasicSubject.attentions(block):
            why = _odd_attention(attn)
            if why is not None:
                return why
        dtype = compute_dtype([block], block.attn1.to_out[0])
        others = {p.dtype for n in norms if n is not None for p in n.parameters()} - {dtype}
        if others:
            return f"its norms are {', '.join(map(str, others))}, its projections {dtype}"
        return odd_feed_forward(block.ff)

    @classmethod
    def ready(cls, block: Any) -> bool:
        return block._chunk_size is None and super().ready(block)

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            cross_attention_dim=None if m.cross_attention_dim is None else 48,
            activation_fn=gelu_of(m.ff),
            attention_bias=m.attn1.to_q.bias is not None,
            only_cross_attention=m.only_cross_attention,
            double_self_attention=m.attn2 is not None and not _takes_context(m),
            norm_elementwise_affine=m.norm1.elementwise_affine,
            norm_type=m.norm_type,
            num_embeds_ada_norm=m.num_embeds_ada_norm,
            norm_eps=m.norm1.eps,
            ff_bias=m.ff.net[0].proj.bias is not None,
            attention_out_bias=m.attn1.to_out[0].bias is not None,
        )

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        m: Any = block
        given: dict[str, Any] = {"hidden_states": draw(2, 10, 64)}
        if _takes_context(m):
            mask = torch.zeros(2, 1, 6)
            mask[1, :, 4:] = -10000.0
            given |= {"encoder_hidden_states": draw(2, 6, 48), "encoder_attention_mask": mask}
        if _modulated(m):
            given["timestep"] = draw(2, 6 * 64)
        return given

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        return _fuse_modulated(m, bind) if _modulated(m) else _fuse_plain(m, bind)


def _fuse_plain(m: Any, bind: Callable[..., Callable[..., Any]]) -> Forward:
    norm = bind("layer_norm", eps=m.norm1.eps)
    add_norm2 = bind("add_layer_norm", eps=m.norm2.eps) if m.attn2 is not None else None
    add_norm3 = bind("add_layer_norm", eps=m.norm3.eps)

    def fused(
        block: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Any = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Any = None,
        added_cond_kwargs: Any = None,
    ) -> Tensor:
        if cross_attention_kwargs or hidden_states.ndim != 3:
            raise HandedBack
        h = hidden_states
        x = norm(h, block.norm1.weight, block.norm1.bias)
        context = encoder_hidden_states if block.only_cross_attention else None
        x = _attend(block.attn1, x, context, attention_mask)
        if add_norm2 is not None:
            x, h = add_norm2(x, h, block.norm2.weight, block.norm2.bias)
            x = _attend(block.attn2, x, encoder_hidden_states, encoder_attention_mask)
        x, h = add_norm3(x, h, block.norm3.weight, block.norm3.bias)
        return feed_forward(block.ff, x) + h  # type: ignore[no-any-return]

    return fused


def _fuse_modulated(m: Any, bind: Callable[..., Callable[..., Any]]) -> Forward:
    modulate = bind("norm_modulate", eps=m.norm1.eps, norm="layer", cast="input")
    gate = bind("gate_residual", cast="input")
    add_modulate = bind("gate_residual_norm_modulate", eps=m.norm2.eps, norm="layer", cast="input")
    ones = Constant(1.0)

    def fused(
        block: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Any = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Any = None,
        added_cond_kwargs: Any = None,
    ) -> Tensor:
        h = hidden_states
        if cross_attention_kwargs or h.ndim != 3 or timestep.dtype != h.dtype:
            raise HandedBack
        ada = block.scale_shift_table[None] + timestep.reshape(h.shape[0], 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = ada.chunk(6, 1)
        x = modulate(h, scale1, shift1, block.norm1.weight, block.norm1.bias)
        context = encoder_hidden_states if block.only_cross_attention else None
        h = gate(h, gate1, _attend(block.attn1, x, context, attention_mask))
        x = _attend(block.attn2, h, encoder_hidden_states, encoder_attention_mask)
        n = block.norm2
        h, x = add_modulate(h, ones(h), x, scale2, shift2, n.weight, n.bias)
        return gate(h, gate2, feed_forward(block.ff, x))  # type: ignore[no-any-return]

    return fused


def _attend(attn: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    if context is None:
        q, k, v = project(x, (attn.to_q, attn.to_k, attn.to_v))
    else:
        q = attn.to_q(x)
        k, v = project(context, (attn.to_k, attn.to_v))
    if mask is not None:
        mask = bias_of_heads(attn, mask, k.shape[1], x.shape[0])
    return output_projection(attn, plain_attention(attn, q, k, v, mask))


def _odd_attention(attn: Any) -> str | None:
    """Why an `Attention` does more than projections and attention."""
    for name in ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj"):
        if getattr(attn, name) is not None:
            return f"its attention has `{name}`"
    if attn.residual_connection or attn.rescale_output_factor != 1:
        return "its attention adds or rescales its output itself"
    if attn.inner_kv_dim != attn.inner_dim:
        return "its attention has fewer heads for keys than for queries"
    return None


def _takes_context(block: Any) -> bool:
    attn = block.attn2 if block.attn2 is not None else block.attn1
    return bool(attn.is_cross_attention)


def _modulated(block: Any) -> bool:
    return bool(block.norm_type == "ada_norm_single")
