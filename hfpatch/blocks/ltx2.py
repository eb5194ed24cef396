"""LTX-2's transformer block: a video and an audio stream that also attend to each other.

Each stream, with modulations made from a table of the block's and the timestep's embedding:

    h = h + gate * attn1(modulate(norm1(h)))
    h = h + attn2(norm2(h), text)                   (LTX-2.3: modulated and gated, the text too)
    h = h + gate * cross(modulate(norm(h)), modulate(norm(other h)))
    h = h + gate * ff(modulate(norm3(h)))

(diffusers, `LTX2VideoTransformerBlock`.) Each sum and the norm behind it are one kernel. q and k
are normed over all heads, and turned by pairs or by halves, these with tables per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hfpatch.blocks.attention import attention
from hfpatch.blocks.base import BlockSubject, HandedBack
from hfpatch.blocks.joint import cast_of
from hfpatch.blocks.memo import accompany, companion
from hfpatch.blocks.parts import (
    Constant,
    bias_of_heads,
    check_pairs,
    drawing,
    gelu_of,
    heads_of,
    odd_dtypes,
    odd_feed_forward,
)
from hfpatch.blocks.projections import feed_forward, is_plain, output_projection, project
from hfpatch.proof.subject import Forward, Tensor

Rotary = tuple[Tensor, Tensor]


class Side(NamedTuple):
    """What the block calls the parts of one of its streams."""

    norm1: str
    norm2: str
    cross_norm: str
    norm3: str
    attn1: str
    attn2: str
    cross: str
    ff: str
    table: str
    prompt_table: str
    cross_table: str
    adaln: str


def _side(own: str, other: str, prefix: str) -> Side:
    return Side(
        norm1=f"{prefix}norm1",
        norm2=f"{prefix}norm2",
        cross_norm=f"{other}_to_{own}_norm",
        norm3=f"{prefix}norm3",
        attn1=f"{prefix}attn1",
        attn2=f"{prefix}attn2",
        cross=f"{other}_to_{own}_attn",
        ff=f"{prefix}ff",
        table=f"{prefix}scale_shift_table",
        prompt_table=f"{prefix}prompt_scale_shift_table",
        cross_table=f"{own}_a2v_cross_attn_scale_shift_table",
        adaln=f"{own}_cross_attn_adaln",
    )


VIDEO, AUDIO = _side("video", "audio", ""), _side("audio", "video", "audio_")
#: Where the modulations of each direction begin in the cross-attention's tables: scale, shift.
_TO_VIDEO, _TO_AUDIO = 0, 2


class _Stream:
    """One stream during one call."""

    def __init__(self, block: Any, side: Side, h: Tensor, temb: Tensor) -> None:
        self.side, self.h = side, h
        self.ada = _sums(getattr(block, side.table), temb)
        #: What comes next in the sum, and its gate.
        self.x, self.gate = h, h
        #: The modulated norms for the attention between the streams, by direction.
        self.seen: dict[int, Tensor] = {}


class Ltx2Subject(BlockSubject):
    ops = (
        "norm_modulate",
        "qk_norm_rope",
        "rms_norm",
        "rope",
        "gate_residual",
        "gate_residual_norm_modulate",
    )
    title = "fused block: AdaLN, qk norm + RoPE, gates, of video and audio"
    processor = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")

    @staticmethod
    def attentions(block: Any) -> tuple[Any, ...]:
        return tuple(getattr(block, n) for s in (VIDEO, AUDIO) for n in (s.attn1, s.attn2, s.cross))

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        found: list[nn.Module] = list(_norms(block))
        for attn in Ltx2Subject.attentions(block):
            found += [attn, attn.norm_q, attn.norm_k]
        return found

    def packs(self) -> list[list[nn.Module]]:
        m: Any = self.module
        groups: list[list[nn.Module]] = []
        for side in (VIDEO, AUDIO):
            a1, a2 = getattr(m, side.attn1), getattr(m, side.attn2)
            cross = getattr(m, side.cross)
            groups.append([a1.to_q, a1.to_k, a1.to_v])
            groups += [[a.to_k, a.to_v] for a in (a2, cross)]
        return groups

    @staticmethod
    def odd(block: Any) -> str | None:
        norms, attentions = _norms(block), Ltx2Subject.attentions(block)
        qk = [n for a in attentions for n in (a.norm_q, a.norm_k)]
        if any(cast_of(n) != "weight" or n._parameters.get("bias") is not None for n in norms):
            return "its norms are no `RMSNorm`s of diffusers, or have a bias"
        if any(type(n) is not nn.RMSNorm or n.eps is None for n in qk):
            return f"its q and k are normed by `{type(qk[0]).__name__}`"
        if len({n.eps for n in norms}) > 1 or len({n.eps for n in qk}) > 1:
            return "its norms differ in eps"
        if len({(a.rope_type, len(a.to_out)) for a in attentions}) > 1:
            return "its attentions differ in RoPE or output"
        if any(a.inner_dim != a.inner_kv_dim for a in attentions):
            return "its attention has fewer heads for keys than for queries"
        why = odd_feed_forward(block.ff) or odd_feed_forward(block.audio_ff)
        return why or odd_dtypes([block, *Ltx2Subject.unused(block)], block.attn1.to_out[0])

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            cross_attention_dim=64,  # a modulated text is as wide as the stream
            audio_dim=32,
            audio_num_attention_heads=4,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=32,
            video_gated_attn=m.attn1.to_gate_logits is not None,
            audio_gated_attn=m.audio_attn1.to_gate_logits is not None,
            video_cross_attn_adaln=m.video_cross_attn_adaln,
            audio_cross_attn_adaln=m.audio_cross_attn_adaln,
            activation_fn=gelu_of(m.ff),
            attention_bias=m.attn1.to_q.bias is not None,
            attention_out_bias=m.attn1.to_out[0].bias is not None,
            eps=m.norm1.eps,
            elementwise_affine=m.norm1.weight is not None,
            rope_type=m.attn1.rope_type,
            perturbed_attn=m.perturbed_attn,
            ff_bias=m.ff.net[0].proj.bias is not None,
            audio_ff_bias=m.audio_ff.net[0].proj.bias is not None,
        )

    def settle(self, block: Any, m: Any) -> None:
        for ours, theirs in zip(self.attentions(block), self.attentions(m), strict=True):
            ours.norm_q.eps = ours.norm_k.eps = theirs.norm_q.eps

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        m: Any = block

        def tables(tokens: int, width: int) -> Rotary:
            if m.attn1.rope_type == "split":
                angles = draw(2, 4, tokens, width // 8)
            else:
                angles = draw(2, tokens, width // 2).repeat_interleave(2, -1)
            return angles.cos(), angles.sin()

        mask = torch.zeros(2, 1, 6)
        mask[1, :, 4:] = -10000.0
        n_video, n_audio = (9 if getattr(m, s.adaln) else 6 for s in (VIDEO, AUDIO))
        return {
            "hidden_states": draw(2, 10, 64),
            "audio_hidden_states": draw(2, 7, 32),
            "encoder_hidden_states": draw(2, 6, 64),
            "audio_encoder_hidden_states": draw(2, 6, 32),
            "temb": draw(2, 1, n_video * 64),
            "temb_audio": draw(2, 1, n_audio * 32),
            "temb_ca_scale_shift": draw(2, 1, 4 * 64),
            "temb_ca_audio_scale_shift": draw(2, 1, 4 * 32),
            "temb_ca_gate": draw(2, 1, 64),
            "temb_ca_audio_gate": draw(2, 1, 32),
            "temb_prompt": draw(2, 1, 2 * 64) if m.cross_attn_adaln else None,
            "temb_prompt_audio": draw(2, 1, 2 * 32) if m.cross_attn_adaln else None,
            "video_rotary_emb": tables(10, 64),
            "audio_rotary_emb": tables(7, 32),
            "ca_video_rotary_emb": tables(10, 32),
            "ca_audio_rotary_emb": tables(7, 32),
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": mask,
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        norm = {"eps": m.norm1.eps, "norm": "rms", "cast": "input"}
        modulate = bind("norm_modulate", **norm)
        gate_modulate = bind("gate_residual_norm_modulate", **norm)
        gated_sum = bind("gate_residual", cast="input")
        ones, zeros, attend = Constant(1.0), Constant(0.0), Attend(m, bind)

        def start(
            block: Any,
            s: _Stream,
            rotary: Rotary | None,
            mask: Tensor | None,
        ) -> Tensor:
            """Self-attention; what the attention to the text is given."""
            side, ada = s.side, s.ada
            x = modulate(s.h, ada[1], ada[0], getattr(block, side.norm1).weight, None)
            x = attend(getattr(block, side.attn1), x, None, rotary, rotary, mask)
            with_q = getattr(block, side.adaln)
            scale, shift = (ada[7], ada[6]) if with_q else (zeros(s.h), zeros(s.h))
            weight = getattr(block, side.norm2).weight
            s.gate = ada[8] if with_q else ones(s.h)
            s.h, x = gate_modulate(s.h, ada[2], x, scale, shift, weight, None)
            return x  # type: ignore[no-any-return]

        def read(
            block: Any,
            s: _Stream,
            x: Tensor,
            text: Tensor,
            prompt: Tensor | None,
            mask: Tensor | None,
        ) -> None:
            """The attention to the text, which is not added yet."""
            side = s.side
            if block.cross_attn_adaln:
                text = _modulated(text, getattr(block, side.prompt_table), prompt)
            s.x = attend(getattr(block, side.attn2), x, text, None, None, mask)

        def add(block: Any, s: _Stream, scale: Tensor, shift: Tensor, norm: str) -> Tensor:
            """Add what is due; the modulated norm of the sum."""
            weight = getattr(block, norm).weight
            s.h, x = gate_modulate(s.h, s.gate, s.x, scale, shift, weight, None)
            return x  # type: ignore[no-any-return]

        def fused(
            block: Any,
            hidden_states: Tensor,
            audio_hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            audio_encoder_hidden_states: Tensor,
            temb: Tensor,
            temb_audio: Tensor,
            temb_ca_scale_shift: Tensor,
            temb_ca_audio_scale_shift: Tensor,
            temb_ca_gate: Tensor,
            temb_ca_audio_gate: Tensor,
            temb_prompt: Tensor | None = None,
            temb_prompt_audio: Tensor | None = None,
            video_rotary_emb: Rotary | None = None,
            audio_rotary_emb: Rotary | None = None,
            ca_video_rotary_emb: Rotary | None = None,
            ca_audio_rotary_emb: Rotary | None = None,
            encoder_attention_mask: Tensor | None = None,
            audio_encoder_attention_mask: Tensor | None = None,
            self_attention_mask: Tensor | None = None,
            audio_self_attention_mask: Tensor | None = None,
            a2v_cross_attention_mask: Tensor | None = None,
            v2a_cross_attention_mask: Tensor | None = None,
            use_a2v_cross_attention: bool = True,
            use_v2a_cross_attention: bool = True,
            perturbation_mask: Tensor | None = None,
            all_perturbed: bool | None = None,
        ) -> Any:
            embeddings = (temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift)
            gates = (temb_ca_gate, temb_ca_audio_gate)
            texts = (encoder_hidden_states, audio_encoder_hidden_states)
            prompts = (temb_prompt, temb_prompt_audio)
            given = (audio_hidden_states, *texts, *embeddings, *gates, *prompts)
            rotaries = (
                video_rotary_emb,
                audio_rotary_emb,
                ca_video_rotary_emb,
                ca_audio_rotary_emb,
            )
            masks = (
                encoder_attention_mask,
                audio_encoder_attention_mask,
                self_attention_mask,
                audio_self_attention_mask,
                a2v_cross_attention_mask,
                v2a_cross_attention_mask,
            )
            crossing = (use_a2v_cross_attention, use_v2a_cross_attention)
            # guidance that leaves out an attention, and mixed dtypes
            if (
                perturbation_mask is not None
                or all_perturbed
                or any(t is not None and t.dtype != hidden_states.dtype for t in given)
            ):
                raise HandedBack

            video = _Stream(block, VIDEO, hidden_states, temb)
            audio = _Stream(block, AUDIO, audio_hidden_states, temb_audio)
            # in the original's order: layers of somebody's own may draw random numbers
            x = start(block, video, rotaries[0], masks[2])
            y = start(block, audio, rotaries[1], masks[3])
            read(block, video, x, texts[0], prompts[0], masks[0])
            read(block, audio, y, texts[1], prompts[1], masks[1])
            wanted = [at for at, use in zip((_TO_VIDEO, _TO_AUDIO), crossing, strict=True) if use]
            if wanted:
                for s, cross_temb in ((video, embeddings[2]), (audio, embeddings[3])):
                    table, norm_name = getattr(block, s.side.cross_table), s.side.cross_norm
                    ca = _sums(table[:4], cross_temb)
                    at = wanted[0]
                    s.seen = {at: add(block, s, ca[at], ca[at + 1], norm_name)}
                    for at in wanted[1:]:
                        weight = getattr(block, norm_name).weight
                        s.seen[at] = modulate(s.h, ca[at], ca[at + 1], weight, None)
            ways = (
                (video, audio, _TO_VIDEO, gates[0], rotaries[2], rotaries[3], masks[4]),
                (audio, video, _TO_AUDIO, gates[1], rotaries[3], rotaries[2], masks[5]),
            )
            normed = []
            for s, other, at, gate, q_rotary, k_rotary, mask in ways:
                scale, shift, norm3 = s.ada[4], s.ada[3], s.side.norm3
                if at in wanted:
                    attn = getattr(block, s.side.cross)
                    s.x = attend(attn, s.seen[at], other.seen[at], q_rotary, k_rotary, mask)
                    (s.gate,) = _sums(getattr(block, s.side.cross_table)[4:], gate)
                if at in wanted or not wanted:
                    normed.append(add(block, s, scale, shift, norm3))
                else:
                    weight = getattr(block, norm3).weight
                    normed.append(modulate(s.h, scale, shift, weight, None))
            outs = (
                (s, feed_forward(getattr(block, s.side.ff), x))
                for s, x in zip((video, audio), normed, strict=True)
            )
            return tuple(gated_sum(s.h, s.ada[5], out) for s, out in outs)

        return fused


class Attend:
    """The attentions of a block: norms of q and k over all heads, RoPE, gates per head."""

    def __init__(self, block: Any, bind: Callable[..., Callable[..., Any]]) -> None:
        eps = block.attn1.norm_q.eps
        self._split = block.attn1.rope_type == "split"
        self._values_first = block.perturbed_attn  # its processor calls `to_v` first
        turn = {"interleaved": not self._split}
        self._norm = bind("rms_norm", eps=eps, cast="none")
        self._rope = bind("rope", **turn)
        self._norm_rope = bind("qk_norm_rope", eps=eps, norm_across_heads=True, **turn)

    def __call__(
        self,
        attn: Any,
        x: Tensor,
        context: Tensor | None,
        q_rotary: Rotary | None,
        k_rotary: Rotary | None,
        mask: Tensor | None,
    ) -> Tensor:
        """
        Args:
            context: [B, T, C] for keys and values; None: `x` itself.
        """
        logits = None if attn.to_gate_logits is None else attn.to_gate_logits(x)
        layers = (attn.to_q, attn.to_k, attn.to_v)
        if self._values_first and not all(is_plain(m, x) for m in layers):
            source = x if context is None else context  # a layer may write to it
            v, q, k = attn.to_v(source), attn.to_q(x), attn.to_k(source)
        elif context is None:
            q, k, v = project(x, layers)
        else:
            q = attn.to_q(x)
            k, v = project(context, layers[1:])
        length = k.shape[1]
        weights = (attn.norm_q.weight, attn.norm_k.weight)
        if q_rotary is None:
            q, k = self._norm(q, weights[0], None), self._norm(k, weights[1], None)
        elif context is None:
            cos, sin = self._compact(*q_rotary)
            q, k = self._norm_rope(self._turned(q, cos), self._turned(k, cos), *weights, cos, sin)
        else:
            q = self._normed_rope(q, weights[0], q_rotary)
            k = self._normed_rope(k, weights[1], k_rotary or q_rotary)
        q, k, v = heads_of(attn, *(t.flatten(2) for t in (q, k, v)))
        if mask is not None:
            mask = bias_of_heads(attn, mask, length, x.shape[0])
        out = attention(q, k, v, mask, backend=attn.processor._attention_backend)
        if logits is not None:
            out = out * (2.0 * torch.sigmoid(logits)).unsqueeze(-1)
        return output_projection(attn, out.flatten(2, 3))

    def _normed_rope(self, x: Tensor, weight: Tensor, rotary: Rotary) -> Tensor:
        cos, sin = self._compact(*rotary)
        return self._rope(self._turned(self._norm(x, weight, None), cos), cos, sin)  # type: ignore[no-any-return]

    def _turned(self, x: Tensor, cos: Tensor) -> Tensor:
        """`x` with the heads of the tables, which are per head where halves are turned."""
        return x.view(*x.shape[:2], cos.shape[2], -1) if self._split else x

    def _compact(self, cos: Tensor, sin: Tensor) -> Rotary:
        """The tables as the kernel reads them: [B, S, H, D / 2], or each value once."""
        if self._split:
            return cos.transpose(1, 2), sin.transpose(1, 2)
        return _once(cos), _once(sin)


def _once(table: Tensor) -> Tensor:
    """Each value of a table once; made once per step, and kept with the table."""
    kept: Tensor | None = companion(table)
    if kept is None:
        check_pairs(table)
        kept = table[..., ::2].contiguous()
        accompany(table, kept)
    return kept


def _sums(table: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    """A table's N vectors plus [B, T, N D], as N tensors [B, T, D]."""
    batch, steps, _ = temb.shape
    return (table + temb.reshape(batch, steps, *table.shape)).unbind(2)


def _modulated(text: Tensor, table: Tensor, prompt: Tensor | None) -> Tensor:
    """The text with its own shift and scale (LTX-2.3); they depend on the timestep or not."""
    shift, scale = table[None, None].unbind(2) if prompt is None else _sums(table, prompt)
    return text * (1 + scale) + shift


def _norms(block: Any) -> list[Any]:
    names = [n for s in (VIDEO, AUDIO) for n in (s.norm1, s.norm2, s.cross_norm, s.norm3)]
    return [getattr(block, n) for n in names]
