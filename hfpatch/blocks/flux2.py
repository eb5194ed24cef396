"""FLUX.2's transformer blocks: double-stream, then single-stream with one product in and one out
(diffusers, `Flux2TransformerBlock`, `Flux2SingleTransformerBlock`). Modulations come from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.attention import attention
from hfpatch.blocks.base import HandedBack
from hfpatch.blocks.joint import (
    JointSubject,
    compact,
    image_stream,
    text_stream,
    weights_of,
    within_range,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.side_by_side import Tables, Tokens, joined, product_of_two, rows
from hfpatch.proof.subject import Forward, Tensor
from hfpatch.proof.unchanged import is_replaced


class Flux2Subject(JointSubject):
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gates, SwiGLU"
    ops = (*JointSubject.ops, "gated_packed")
    processor = "Flux2AttnProcessor"

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm1, block.norm1_context, block.norm2, block.norm2_context]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        return [m for ff in (block.ff, block.ff_context) for m in (ff.act_fn, ff.act_fn.gate_fn)]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        return _unfit_activation(block.ff.act_fn) or _unfit_activation(block.ff_context.act_fn)

    def build(self, m: Any) -> Any:
        return type(m)(64, 4, 16, bias=m.attn.use_bias)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(2, 10, 64, generator=generator),
            "encoder_hidden_states": torch.randn(2, 6, 64, generator=generator),
            "temb_mod_img": torch.randn(2, 6 * 64, generator=generator),
            "temb_mod_txt": torch.randn(2, 6 * 64, generator=generator),
            "image_rotary_emb": _sample_tables(generator),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of = self.kernels(bind), StepMemo(compact)
        swiglu = bind("gated_packed", activation="silu", gate_first=True)

        def swiglu_forward(ff: Any, x: Tensor) -> Tensor:
            if is_replaced(ff):
                return ff(x)  # type: ignore[no-any-return]
            return ff.linear_out(swiglu(ff.linear_in(x)))  # type: ignore[no-any-return]

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb_mod_img: Tensor,
            temb_mod_txt: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            joint_attention_kwargs: dict[str, Any] | None = None,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            if joint_attention_kwargs or not (
                h.dtype == text.dtype == temb_mod_img.dtype == temb_mod_txt.dtype
            ):
                raise HandedBack
            a, split = block.attn, text.shape[1]
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            streams = (
                text_stream(
                    a,
                    text,
                    temb_mod_txt.chunk(6, -1),
                    rows(tables, 0, split),
                    block.ff_context,
                    swiglu_forward,
                ),
                image_stream(
                    a,
                    h,
                    temb_mod_img.chunk(6, -1),
                    rows(tables, split, split + h.shape[1]),
                    block.ff,
                    swiglu_forward,
                ),
            )
            backend = a.processor._attention_backend
            text, h = kernels.double(streams, a.heads, None, backend, order=(1, 0), outs=(0, 1))
            return within_range(text), h

        return fused


class Flux2SingleSubject(JointSubject):
    title = "fused block: AdaLN, attention and SwiGLU in parallel, qk norm + RoPE, gate"
    ops = (*JointSubject.ops, "gated_packed")
    processor = "Flux2ParallelSelfAttnProcessor"

    @classmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        return [block.norm]

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        return [block.attn.mlp_act_fn, block.attn.mlp_act_fn.gate_fn]

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        if not isinstance(block.attn.to_out, nn.Module) or block.attn.mlp_mult_factor != 2:
            return "its MLP is not gated"
        return _unfit_activation(block.attn.mlp_act_fn)

    def build(self, m: Any) -> Any:
        return type(m)(64, 4, 16, bias=m.attn.use_bias)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(2, 16, 64, generator=generator),
            "encoder_hidden_states": None,
            "temb_mod": torch.randn(2, 3 * 64, generator=generator),
            "image_rotary_emb": _sample_tables(generator),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        kernels, tables_of = self.kernels(bind), StepMemo(compact)
        swiglu = bind("gated_packed", activation="silu", gate_first=True)

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor | None,
            temb_mod: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
            joint_attention_kwargs: dict[str, Any] | None = None,
            split_hidden_states: bool = False,
            text_seq_len: int | None = None,
        ) -> Any:
            h, text = hidden_states, encoder_hidden_states
            same = h.dtype == temb_mod.dtype and (text is None or text.dtype == h.dtype)
            if joint_attention_kwargs or not same:
                raise HandedBack
            if text is not None:
                text_seq_len, h = text.shape[1], joined(text, h)
            a = block.attn
            shift, scale, gate = temb_mod.chunk(3, -1)
            x = kernels.modulate(h, scale, shift, None, None)
            tables = None if image_rotary_emb is None else tables_of(*image_rotary_emb)
            tokens = Tokens(h.shape[1], *weights_of((a.norm_q, a.norm_k)), tables)
            q, k, v, rest = kernels.qkv_and_rest(a.to_qkv_mlp_proj, x, a.inner_dim, tokens, a.heads)
            seen = attention(q, k, v, backend=a.processor._attention_backend).flatten(2)
            h = kernels.gate(h, gate, product_of_two(a.to_out, seen, swiglu(rest)))
            h = within_range(h)
            if split_hidden_states:
                return h[:, :text_seq_len], h[:, text_seq_len:]
            return h

        return fused


def _unfit_activation(module: nn.Module) -> str | None:
    plain = type(module).__name__ == "Flux2SwiGLU" and type(module.gate_fn) is nn.SiLU
    return None if plain else f"its MLP has `{type(module).__name__}`"


def _sample_tables(generator: torch.Generator) -> Tables:
    angles = torch.randn(16, 8, generator=generator).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()
