"""Wan's transformer block (2.1, 2.2): fp32 AdaLN, q/k norm over all heads, RoPE, fp32 gates.

    h = h + gate1 * attn1(norm1(h) * (1 + scale1) + shift1)
    h = h + attn2(norm2(h), text)             (and an image's tokens, with keys of their own)
    h = h + gate2 * ffn(norm3(h) * (1 + scale2) + shift2)

(diffusers, `WanTransformerBlock`.) Norms, modulation and gates are fp32 throughout and round once,
to the dtype of h: `cast="none"`. One modulation per sample, or per token (Wan 2.2 TI2V).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.base import BlockSubject, compute_dtype
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import Constant, dispatched, drawing, heads_of, odd_feed_forward
from hfpatch.blocks.projections import feed_forward, output_projection, project
from hfpatch.proof.subject import Forward, Tensor

#: Tokens of the text in a context that begins with an image's; a constant of diffusers' processor.
_TEXT_TOKENS = 512


class WanSubject(BlockSubject):
    ops = (
        "norm_modulate",
        "qk_norm_rope",
        "gate_residual",
        "gate_residual_norm_modulate",
        "rms_norm",
    )
    title = "fused block: fp32 AdaLN, qk norm + RoPE, fp32 gates"
    processor = "WanAttnProcessor"
    like = ("hidden_states",)
    anchor = ("scale_shift_table",)
    unread = ("fp32_parts",)  # of a small block: which parts a model keeps in fp32

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        found: list[nn.Module] = [block.norm1, block.norm2, block.norm3]
        for attn in (block.attn1, block.attn2):
            found += [attn, attn.norm_q, attn.norm_k]
        if block.attn2.add_k_proj is not None:
            found.append(block.attn2.norm_added_k)
        return found

    def packs(self) -> list[list[nn.Module]]:
        m: Any = self.module
        a1, a2 = m.attn1, m.attn2
        found = [[a1.to_q, a1.to_k, a1.to_v], [a2.to_k, a2.to_v]]
        if a2.add_k_proj is not None:
            found.append([a2.add_k_proj, a2.add_v_proj])
        return found

    @staticmethod
    def odd(block: Any) -> str | None:
        norms = (block.norm1, block.norm3)
        if not all(type(n).__name__ == "FP32LayerNorm" for n in norms):
            return "its norms are no `FP32LayerNorm`s"
        if not isinstance(block.norm2, (nn.Identity, type(block.norm1))):
            return f"its norm before the cross-attention is a `{type(block.norm2).__name__}`"
        if block.norm1.eps != block.norm3.eps:
            return "its norms have several eps"
        for attn in (block.attn1, block.attn2):
            if attn.norm_q.eps is None or attn.norm_q.eps != attn.norm_k.eps:
                return "its q and k norms have several eps, or none"
        if block.attn1.add_k_proj is not None:
            return "its self-attention has added keys"
        return odd_feed_forward(block.ffn)

    @property
    def key(self) -> tuple[Any, ...]:
        return (*super().key, _fp32_parts(self.module))

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            ffn_dim=160,
            num_heads=4,
            cross_attn_norm=not isinstance(m.norm2, nn.Identity),
            eps=m.norm1.eps,
            added_kv_proj_dim=None if m.attn2.add_k_proj is None else 64,
        )

    def settle(self, block: Any, m: Any) -> None:
        for ours, theirs in zip(self.attentions(block), self.attentions(m), strict=True):
            ours.norm_q.eps = ours.norm_k.eps = theirs.norm_q.eps
        if m.attn2.add_k_proj is not None:
            block.attn2.norm_added_k.eps = m.attn2.norm_added_k.eps
        block.ffn.net[0].approximate = m.ffn.net[0].approximate
        block.fp32_parts = _fp32_parts(m)

    def place(self, block: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        kept = {name: p.data for name, p in block.named_parameters() if name in _fp32_parts(block)}
        block = block.to(device, dtype)
        if dtype.itemsize < 4:
            for name, values in kept.items():
                block.get_parameter(name).data = values.to(device)
        return block

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        m: Any = block
        tokens = 6 if m.attn2.add_k_proj is None else _TEXT_TOKENS + 5
        angles = draw(1, 10, 1, 8).repeat_interleave(2, -1)
        return {
            "hidden_states": draw(2, 10, 64),
            "encoder_hidden_states": draw(2, tokens, 64),
            "temb": draw(2, 6, 64),
            "rotary_emb": (angles.cos(), angles.sin()),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        norm = {"norm": "layer", "cast": "none"}
        modulate = bind("norm_modulate", eps=m.norm1.eps, **norm)
        gate = bind("gate_residual", cast="none")
        gate_modulate = bind("gate_residual_norm_modulate", eps=m.norm3.eps, **norm)
        affine = not isinstance(m.norm2, nn.Identity)
        gate_norm2 = bind("gate_residual_norm_modulate", eps=m.norm2.eps if affine else 0.0, **norm)
        # fp32 tables: nothing to round. The products of bf16 ones round as in the original.
        self_norm_rope = bind(
            "qk_norm_rope",
            eps=m.attn1.norm_q.eps,
            norm_across_heads=True,
            interleaved=True,
            round_products=True,
        )
        cross_norm = bind("rms_norm", eps=m.attn2.norm_q.eps, cast="none")
        added_norm = (
            bind("rms_norm", eps=m.attn2.norm_added_k.eps, cast="none")
            if m.attn2.add_k_proj is not None
            else None
        )
        compact = StepMemo(_compact)
        as_fp32 = StepMemo(lambda t: t.float())
        ones, zeros = Constant(1.0, torch.float32), Constant(0.0, torch.float32)

        def self_attention(attn: Any, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
            cos, sin = (None, None) if rotary is None else compact(*rotary)
            q, k, v = project(x, (attn.to_q, attn.to_k, attn.to_v))
            if cos is not None:
                q4, k4 = heads_of(attn, q, k)
                q, k = self_norm_rope(q4, k4, attn.norm_q.weight, attn.norm_k.weight, cos, sin)
                q, k = q.flatten(2), k.flatten(2)
            else:
                q, k = self_norm_rope(q, k, attn.norm_q.weight, attn.norm_k.weight, None, None)
            return output_projection(attn, dispatched(attn, q, k, v))

        def cross_attention(attn: Any, x: Tensor, context: Tensor) -> Tensor:
            image = None
            if added_norm is not None:
                length = context.shape[1] - _TEXT_TOKENS
                image, context = context[:, :length], context[:, length:]
            q = cross_norm(attn.to_q(x), attn.norm_q.weight, None)
            k, v = project(context, (attn.to_k, attn.to_v))
            k = cross_norm(k, attn.norm_k.weight, None)
            out = dispatched(attn, q, k, v)
            if image is not None and added_norm is not None:
                k, v = project(image, (attn.add_k_proj, attn.add_v_proj))
                k = added_norm(k, attn.norm_added_k.weight, None)
                out = out + dispatched(attn, q, k, v)
            return output_projection(attn, out)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            rotary_emb: tuple[Tensor, Tensor] | None,
        ) -> Tensor:
            h = hidden_states
            if temb.ndim == 4:  # per token: large, so made per block and freed, as originally
                ada = block.scale_shift_table.unsqueeze(0) + temb.float()
            else:
                ada = (block.scale_shift_table + as_fp32(temb)).unsqueeze(1)
            shift1, scale1, gate1, shift2, scale2, gate2 = ada.unbind(2)
            x = modulate(h, scale1, shift1, None, None)
            x = self_attention(block.attn1, x, rotary_emb)
            if affine:
                n = block.norm2
                h, x = gate_norm2(h, gate1, x, zeros(h), zeros(h), n.weight, n.bias)
            else:
                h = x = gate(h, gate1, x)
            x = cross_attention(block.attn2, x, encoder_hidden_states)
            h, x = gate_modulate(h, ones(h), x, scale2, shift2, None, None)
            return gate(h, gate2, feed_forward(block.ffn, x))  # type: ignore[no-any-return]

        return fused


def _compact(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Each value, which stands twice, once; the processor takes the first and the second."""
    return cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()


def _fp32_parts(block: Any) -> tuple[str, ...]:
    """Parameters that are fp32 in a model of a half dtype, as `from_pretrained` leaves them."""
    known = block.__dict__.get("fp32_parts")
    if known is not None:
        return known  # type: ignore[no-any-return]
    if compute_dtype([block], block.attn1.to_out[0]).itemsize >= 4:
        return ()
    names = ("scale_shift_table", "norm2.weight", "norm2.bias")
    found = dict(block.named_parameters())
    return tuple(n for n in names if n in found and found[n].dtype == torch.float32)
