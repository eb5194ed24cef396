"""CogVideoX's transformer block: text and video share projections and norms, not modulations.

    h = h + gate * attn(modulate(norm1(h)));  h = h + gate * ff(modulate(norm2(h)))

(diffusers, `CogVideoXBlock`.) Both streams stand in one buffer for attention and FFN, each written
there by its norm's kernel. q and k have layer norms per head; only the video's tokens turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack
from hfpatch.blocks.joint import compact
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import (
    drawing,
    gelu_of,
    heads_of,
    odd_dtypes,
    odd_feed_forward,
    undispatched,
)
from hfpatch.blocks.projections import feed_forward, output_projection, project
from hfpatch.proof.subject import Forward, Tensor


class CogVideoXSubject(BlockSubject):
    ops = (
        "norm_modulate",
        "layer_norm",
        "rope_qk",
        "gate_residual",
        "gate_residual_norm_modulate",
    )
    title = "fused block: AdaLN of both streams, qk norm, RoPE, gates"
    processor = "CogVideoXAttnProcessor2_0"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        attn = block.attn1
        found = [attn, *(n for n in (attn.norm_q, attn.norm_k) if n is not None)]
        for norm in (block.norm1, block.norm2):
            found += [norm, norm.norm, norm.silu]
        return found

    def packs(self) -> list[list[nn.Module]]:
        a: Any = self.module.attn1
        return [[a.to_q, a.to_k, a.to_v]]

    @staticmethod
    def odd(block: Any) -> str | None:
        attn = block.attn1
        norms, qk = (block.norm1.norm, block.norm2.norm), (attn.norm_q, attn.norm_k)
        if (qk[0] is None) != (qk[1] is None):
            return "one of its q and k is normed"
        if any(type(n) is not nn.LayerNorm for n in (*norms, *(n for n in qk if n is not None))):
            return "its norms are no `LayerNorm`s"
        if norms[0].eps != norms[1].eps or (qk[0] is not None and qk[0].eps != qk[1].eps):
            return "its norms differ in eps"
        if attn.is_cross_attention or len(attn.to_out) != 2:
            return "its attention is no self-attention with a linear layer and a dropout"
        if abs(attn.scale * (attn.inner_dim // attn.heads) ** 0.5 - 1) > 1e-6:
            return "its attention has a scale of its own"
        unused = CogVideoXSubject.unused(block)
        return odd_feed_forward(block.ff) or odd_dtypes(unused, attn.to_out[0])

    def build(self, m: Any) -> Any:
        attn = m.attn1
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            time_embed_dim=48,
            activation_fn=gelu_of(m.ff),
            attention_bias=attn.to_q.bias is not None,
            qk_norm=attn.norm_q is not None,
            norm_elementwise_affine=m.norm1.norm.elementwise_affine,
            norm_eps=m.norm1.norm.eps,
            ff_bias=m.ff.net[0].proj.bias is not None,
            attention_out_bias=attn.to_out[0].bias is not None,
        )

    def settle(self, block: Any, m: Any) -> None:
        attn = m.attn1
        if attn.norm_q is not None:
            block.attn1.norm_q.eps = block.attn1.norm_k.eps = attn.norm_q.eps

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        angles = draw(10, 8).repeat_interleave(2, -1)
        return {
            "hidden_states": draw(2, 10, 64),
            "encoder_hidden_states": draw(2, 6, 64),
            "temb": draw(2, 48),
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        norm = {"eps": m.norm1.norm.eps, "norm": "layer", "cast": "input"}
        modulate = bind("norm_modulate", into=1, **norm)
        gate_modulate = bind("gate_residual_norm_modulate", into=2, **norm)
        gated_sum = bind("gate_residual", cast="input")
        qk = m.attn1.norm_q
        layer_norm = None if qk is None else bind("layer_norm", eps=qk.eps)
        turn = bind("rope_qk", into=2, interleaved=True)
        silu, tables_of = StepMemo(F.silu), StepMemo(compact)

        def attend(attn: Any, x: Tensor, text: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
            q, k, v = heads_of(attn, *project(x, (attn.to_q, attn.to_k, attn.to_v)))
            if layer_norm is not None:
                q = layer_norm(q, attn.norm_q.weight, attn.norm_q.bias)
                k = layer_norm(k, attn.norm_k.weight, attn.norm_k.bias)
            elif rotary is not None:
                q, k = q.clone(), k.clone()  # a hook or an adapter may keep what it gave
            if rotary is not None:
                turned = (q[:, text:], k[:, text:])
                turn(*turned, *turned, *tables_of(*rotary))
            return output_projection(attn, undispatched(q, k, v).flatten(2, 3))

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            attention_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            streams = (encoder_hidden_states, hidden_states)
            h, text = hidden_states, encoder_hidden_states.shape[1]
            if attention_kwargs or not streams[0].dtype == h.dtype == temb.dtype:
                raise HandedBack
            batch, tokens, width = h.shape
            places = (slice(0, text), slice(text, text + tokens))
            # shift, scale and gate: of the video, then of the text
            first = block.norm1.linear(silu(temb)).unflatten(1, (6, width))

            x = h.new_empty(batch, text + tokens, width)
            n = block.norm1.norm
            for stream, place, at in zip(streams, places, (3, 0), strict=True):
                for i in range(batch):
                    one = slice(i, i + 1)
                    shift, scale = first[one, at], first[one, at + 1]
                    modulate(x[one, place], stream[one], scale, shift, n.weight, n.bias)
            x = attend(block.attn1, x, text, image_rotary_emb)
            second = block.norm2.linear(silu(temb)).unflatten(1, (6, width))

            sums = [torch.empty_like(s, memory_format=torch.contiguous_format) for s in streams]
            y, n = torch.empty_like(x), block.norm2.norm
            for stream, total, place, at in zip(streams, sums, places, (3, 0), strict=True):
                for i in range(batch):
                    one = slice(i, i + 1)
                    gate_modulate(
                        total[one],
                        y[one, place],
                        stream[one],
                        first[one, at + 2],
                        x[one, place],
                        second[one, at + 1],
                        second[one, at],
                        n.weight,
                        n.bias,
                    )
            y = feed_forward(block.ff, y)
            made = [
                gated_sum(total, second[:, at + 2], y[:, place])
                for total, place, at in zip(sums, places, (3, 0), strict=True)
            ]
            return made[1], made[0]

        return fused
