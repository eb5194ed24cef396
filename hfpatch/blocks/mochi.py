"""Mochi's transformer block: text and video in one attention, a norm before and after each part.

Per stream, all norms RMS norms without weights, in fp32:

    h = h + norm2(out(attention)) * tanh(gate1)        (of norm1(h) * (1 + scale1) of both streams)
    h = h + norm4(ff(norm3(h) * (1 + scale2))) * tanh(gate2)

(diffusers, `MochiTransformerBlock`.) Padding of the text takes no part in the attention: samples of
different lengths attend one by one, as in the original. The last block's text ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack, NotCovered
from hfpatch.blocks.joint import (
    JointKernels,
    added_qkv_of,
    cast_of,
    qkv_of,
    tight,
    to_out,
    weights_of,
)
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import Constant, drawing, odd_dtypes, undispatched
from hfpatch.blocks.side_by_side import Part, Tokens
from hfpatch.proof.subject import Forward, Tensor

_QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class NormedSum:
    """`h + gate * norm(y)`, an RMS norm, in one pass and rounded once.

    It is `norm_modulate` with the gate in the norm's weight and h in the place of the shift. A gate
    per sample takes a launch per sample. The product of gate and weight is rounded to the dtype of
    h, for which the kernel is fastest; the original rounds the gate, the norm and two more times.
    """

    def __init__(self, bind: Callable[..., Callable[..., Any]], eps: float) -> None:
        self._into = bind("norm_modulate", into=1, eps=eps, norm="rms", cast="none")
        self._zeros = Constant(0.0)

    def __call__(self, h: Tensor, y: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
        """
        Args:
            h, y: [B, S, D].
            weight: [D], the norm's.
            gate: [B, D] or, the same for all samples, [1, D].
        """
        out = torch.empty_like(h, memory_format=torch.contiguous_format)
        none = self._zeros(h)
        if gate is None:
            self._into(out, y, none, h, weight, None)
            return out
        if weight is None:
            weights = gate.to(h.dtype)
        else:
            weights = torch.mul(gate, weight, out=h.new_empty(gate.shape))
        if len(weights) == 1:
            self._into(out, y, none, h, weights[0], None)
            return out
        if len(weights) != len(h):
            raise NotCovered(f"it has {len(weights)} gates for {len(h)} samples")
        for i, w in enumerate(weights):
            one = slice(i, i + 1)
            self._into(out[one], y[one], none, h[one], w, None)
        return out


class MochiSubject(BlockSubject):
    ops = ("norm_modulate", "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate")
    title = "fused block: AdaLN, joint attention, qk norm + RoPE, gated sums of norms"
    processor = "MochiAttnProcessor2_0"

    @staticmethod
    def unused(block: Any) -> list[nn.Module]:
        found = [block.attn1, *(getattr(block.attn1, n) for n in _QK_NORMS)]
        for norm in _norms(block):
            found += _with_parts(norm)
        return found

    def packs(self) -> list[list[nn.Module]]:
        attn: Any = self.module.attn1
        return [list(qkv_of(attn)), list(added_qkv_of(attn))]

    @staticmethod
    def odd(block: Any) -> str | None:
        attn = block.attn1
        qk = [getattr(attn, n) for n in _QK_NORMS]
        if any(cast_of(n) != "none" or n.weight is None for n in qk):
            return f"its q and k are normed by `{type(qk[0]).__name__}`"
        leaves = [_leaf(norm) for norm in _norms(block)]
        if any(
            cast_of(n) != "weight" or n.weight is not None or n.bias is not None for n in leaves
        ):
            return "its norms are no `RMSNorm`s without weights"
        if len({n.eps for n in qk}) > 1 or len({n.eps for n in leaves}) > 1:
            return "its norms differ in eps"
        if block.context_pre_only != (not hasattr(attn, "to_add_out")) or len(attn.to_out) != 2:
            return "its attention has other outputs than it"
        return odd_dtypes(MochiSubject.unused(block), attn.to_out[0])

    def build(self, m: Any) -> Any:
        return type(m)(
            dim=64,
            num_attention_heads=4,
            attention_head_dim=16,
            pooled_projection_dim=48,
            context_pre_only=m.context_pre_only,
            eps=_leaf(m.norm1).eps,
        )

    def settle(self, block: Any, m: Any) -> None:
        for name in _QK_NORMS:
            getattr(block.attn1, name).eps = getattr(m.attn1, name).eps

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        draw = drawing(generator)
        angles = draw(10, 4, 8)
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        return {
            "hidden_states": draw(2, 10, 64),
            "encoder_hidden_states": draw(2, 6, 48),
            "temb": draw(2, 64),
            "encoder_attention_mask": mask,
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        m: Any = self.module
        eps = _leaf(m.norm1).eps
        kernels = JointKernels(bind, eps, m.attn1.norm_q)  # of which the attention alone is alike
        modulate = bind("norm_modulate", eps=eps, norm="rms", cast="none")
        normed_sum, zeros = NormedSum(bind, eps), Constant(0.0)
        lengths = StepMemo(_lengths)

        def after(
            h: Tensor, attended: Tensor, modulation: Tensor, gates: Tensor, ff: Any
        ) -> Tensor:
            """What follows the attention in one stream."""
            h = normed_sum(h, attended, None, gates[:, 0])
            x = modulate(h, modulation[:, 2], zeros(h), None, None)
            return normed_sum(h, ff(x), None, gates[:, 1])

        def fused(
            block: Any,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            encoder_attention_mask: Tensor,
            image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ) -> Any:
            h, text, rotary = hidden_states, encoder_hidden_states, image_rotary_emb
            if not h.dtype == text.dtype == temb.dtype:
                raise HandedBack
            attn = block.attn1
            # scale and gate, for the attention and for the FFN
            modulation = block.norm1.linear(kernels.silu(temb)).unflatten(1, (4, -1))
            x = modulate(h, modulation[:, 0], zeros(h), None, None)
            if block.context_pre_only:
                text_scale = block.norm1_context.linear_1(kernels.silu(temb))
            else:
                text_modulation = block.norm1_context.linear(kernels.silu(temb)).unflatten(
                    1, (4, -1)
                )
                text_scale = text_modulation[:, 0]
            y = modulate(text, text_scale, zeros(text), None, None)

            image = h.shape[1]
            tables = None if rotary is None else (rotary[0][None], rotary[1][None])  # per head
            tokens = Tokens(image, *weights_of((attn.norm_q, attn.norm_k)), tables)
            added = weights_of((attn.norm_added_q, attn.norm_added_k))
            parts = (
                Part(x, qkv_of(attn), (tokens,)),
                Part(y, added_qkv_of(attn), (Tokens(text.shape[1], *added, None),)),
            )
            q, k, v = kernels.qkv(parts, attn.heads)
            x, y = _attend(q, k, v, image, lengths(encoder_attention_mask))
            x = to_out(attn)(x)
            y = y if block.context_pre_only else attn.to_add_out(y)  # both before an FFN
            h = after(h, x, modulation, _gates(modulation), block.ff)
            if block.context_pre_only:
                return h, text
            return h, after(text, y, text_modulation, _gates(text_modulation), block.ff_context)

        return fused


def _attend(
    q: Tensor, k: Tensor, v: Tensor, image: int, kept: list[int | Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention of all image tokens and the text tokens that are kept; [B, image, C], [B, text, C].

    The results of kept text tokens stand side by side, zeros after them, as the processor has it.
    """
    text = q.shape[1] - image
    if all(n == text for n in kept if isinstance(n, int)) and all(isinstance(n, int) for n in kept):
        out = undispatched(q, k, v).flatten(2)
        return tight(out[:, :image]), tight(out[:, image:])
    images, texts = [], []
    for i, keep in enumerate(kept):
        one = tuple(t[i : i + 1] for t in (q, k, v))
        if isinstance(keep, int):
            one = tuple(t[:, : image + keep] for t in one)
        else:
            one = tuple(torch.cat((t[:, :image], t[:, image:][:, keep]), 1) for t in one)
        out = undispatched(*one).flatten(2)
        images.append(out[:, :image])
        texts.append(F.pad(out[:, image:], (0, 0, 0, image + text - out.shape[1])))
    if len(kept) == 1:
        return tight(images[0]), texts[0]
    return torch.cat(images), torch.cat(texts)


def _lengths(mask: Tensor) -> list[int | Tensor]:
    """Of each sample how many tokens are kept, if those are the first ones; else which."""
    kept: list[int | Tensor] = []
    for row in mask:
        index = row.flatten().nonzero().flatten()
        count = index.shape[0]
        kept.append(count if count == 0 or int(index[-1]) == count - 1 else index)
    return kept


def _gates(modulation: Tensor) -> Tensor:
    return modulation[:, 1::2].tanh()


def _norms(block: Any) -> list[Any]:
    """The block's norms of the residuals, AdaLN's among them."""
    return [m for n, m in block.named_children() if n.startswith("norm")]


def _with_parts(norm: Any) -> Iterator[nn.Module]:
    yield norm
    for name in ("norm", "silu"):
        part = getattr(norm, name, None)
        if part is not None:
            yield from _with_parts(part)


def _leaf(norm: Any) -> Any:
    """The norm inside a modulated one."""
    while hasattr(norm, "norm"):
        norm = norm.norm
    return norm
