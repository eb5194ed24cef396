"""Blocks with a norm before and one after attention and FFN: Z-Image's and Lumina 2's.

    h = h + tanh(gate1) * norm2(attn(norm1(h) * (1 + scale1)))
    h = h + tanh(gate2) * ffn_norm2(ffn(ffn_norm1(h) * (1 + scale2)))

(diffusers, `ZImageTransformerBlock`, `Lumina2TransformerBlock`.) Blocks that refine the text have
neither scales nor gates. q and k are normed per head and turned; the FFN is SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from hfpatch.blocks.base import BlockSubject, HandedBack, NotCovered
from hfpatch.blocks.joint import MaskedAttention, cast_of
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import Constant, odd_dtypes, undispatched
from hfpatch.blocks.projections import project
from hfpatch.proof.subject import Forward, Tensor

OPS = ("norm_modulate", "qk_norm_rope", "gated")


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


class Names(NamedTuple):
    """What a class calls its children."""

    attention: str
    #: Before and after the attention, before and after the FFN.
    norms: tuple[str, str, str, str]
    #: In the FFN: the layer behind the SiLU, the one it is multiplied with, the last.
    ffn: tuple[str, str, str]


class SandwichSubject(BlockSubject):
    ops = OPS
    title = "fused block: AdaLN, qk norm + RoPE, SwiGLU, gated sums of norms"
    names: ClassVar[Names]
    #: Attention of [B, S, H, D] tensors, as the class's processor does it.
    attend: ClassVar[Callable[..., Tensor] | None] = None

    @classmethod
    def norms_of(cls, block: Any) -> list[Any]:
        found = [getattr(block, name) for name in cls.names.norms]
        if block.modulation and cls.names.norms[0] == "norm1":
            found[0] = found[0].norm  # it stands in an AdaLN there
        return found

    @classmethod
    def ffn_of(cls, block: Any) -> list[Any]:
        return [getattr(block.feed_forward, name) for name in cls.names.ffn]

    @classmethod
    def attention_of(cls, block: Any) -> Any:
        return getattr(block, cls.names.attention)

    # `BlockSubject` has these as static methods; a class method is called alike
    @classmethod
    def attentions(cls, block: Any) -> tuple[Any, ...]:
        return (cls.attention_of(block),)

    @classmethod
    def unused(cls, block: Any) -> list[nn.Module]:
        attn = cls.attention_of(block)
        ffn = block.feed_forward
        # whatever holds a norm or the FFN's layers is not called either
        holders = [block.norm1] if block.modulation and hasattr(block, "norm1") else []
        activation = [m for n, m in ffn.named_children() if n not in cls.names.ffn]
        silu = [h.silu for h in holders]
        norms = [attn.norm_q, attn.norm_k, *cls.norms_of(block)]
        return [attn, *norms, ffn, *activation, *holders, *silu]

    def packs(self) -> list[list[nn.Module]]:
        attn = self.attention_of(self.module)
        gate, up, _ = self.ffn_of(self.module)
        return [[attn.to_q, attn.to_k, attn.to_v], [gate, up]]

    @classmethod
    def odd(cls, block: Any) -> str | None:
        attn = cls.attention_of(block)
        qk, norms = [attn.norm_q, attn.norm_k], cls.norms_of(block)
        if any(n is None for n in qk):
            return "its q and k have no norm"
        if any(cast_of(n) != "weight" or n.weight is None or n.bias is not None for n in qk):
            return f"its q and k are normed by `{type(qk[0]).__name__}`"
        if any(cast_of(n) != "weight" or n.weight is None or n.bias is not None for n in norms):
            return f"one of its norms is `{type(norms[0]).__name__}`, or has a bias or no weight"
        if qk[0].eps != qk[1].eps or len({n.eps for n in norms}) > 1:
            return "its norms differ in eps"
        if len(attn.to_out) != 2:
            return "its attention's output is no linear layer and a dropout"
        if abs(attn.scale * (attn.inner_dim // attn.heads) ** 0.5 - 1) > 1e-6:
            return "its attention has a scale of its own"
        if {type(m) for m in cls.activations(block)} - {nn.SiLU} and any(
            type(m).__name__ != "FP32SiLU" for m in cls.activations(block)
        ):
            return "its FFN's activation is no SiLU"
        return odd_dtypes(cls.unused(block), cls.projection(block))

    @classmethod
    def activations(cls, block: Any) -> list[nn.Module]:
        children = block.feed_forward.named_children()
        return [m for n, m in children if n not in cls.names.ffn]

    def settle(self, block: Any, m: Any) -> None:
        for ours, theirs in zip(self.norms_of(block), self.norms_of(m), strict=True):
            ours.eps = theirs.eps
        ours, theirs = self.attention_of(block), self.attention_of(m)
        ours.norm_q.eps = ours.norm_k.eps = theirs.norm_q.eps

    def drawn(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """h, the mask and the complex RoPE tables of a sample."""
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[1, 7:] = False
        angles = torch.randn(2, 10, 8, generator=generator)
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.randn(2, 10, 64, generator=generator), mask, turns

    def parts(self, bind: Callable[..., Callable[..., Any]]) -> Callable[..., Tensor]:
        """`run(block, h, mask, turns, scales, gates)`: the block with its modulation made."""
        m: Any = self.module
        eps = self.norms_of(m)[0].eps
        modulate = bind("norm_modulate", eps=eps, norm="rms", cast="input")
        normed_sum = NormedSum(bind, eps)
        qk_norm_rope = bind(
            "qk_norm_rope", eps=self.attention_of(m).norm_q.eps, cast="weight", interleaved=True
        )
        swiglu = bind("gated", activation="silu")
        attend = MaskedAttention(type(self).attend)
        tables_of, keys_of = StepMemo(real_tables), StepMemo(_keys)
        zeros, kind = Constant(0.0), type(self)

        def attended(attn: Any, x: Tensor, mask: Tensor | None, turns: Tensor | None) -> Tensor:
            q, k, v = project(x, (attn.to_q, attn.to_k, attn.to_v))
            head_dim = q.shape[-1] // attn.heads
            q, k, v = (t.view(*t.shape[:2], -1, head_dim) for t in (q, k, v))
            cos, sin = (None, None) if turns is None else tables_of(turns)
            q, k = qk_norm_rope(q, k, attn.norm_q.weight, attn.norm_k.weight, cos, sin)
            if k.shape[2] != q.shape[2]:  # fewer heads for keys: the fast kernels want as many
                times = q.shape[2] // k.shape[2]
                k, v = (t.repeat_interleave(times, 2) for t in (k, v))
            keys = None if mask is None else keys_of(mask)
            backend = getattr(attn.processor, "_attention_backend", None)
            out = attend(q, k, v, keys, backend=backend).flatten(2)
            return attn.to_out[1](attn.to_out[0](out))  # type: ignore[no-any-return]

        def run(
            block: Any,
            h: Tensor,
            mask: Tensor | None,
            turns: Tensor | None,
            scales: Sequence[Tensor] | None,
            gates: Sequence[Tensor | None],
        ) -> Tensor:
            before1, after1, before2, after2 = (n.weight for n in kind.norms_of(block))
            none = zeros(h)
            scale1, scale2 = (none, none) if scales is None else scales
            gate, up, last = kind.ffn_of(block)
            x = modulate(h, scale1, none, before1, None)
            x = attended(kind.attention_of(block), x, mask, turns)
            h = normed_sum(h, x, after1, gates[0])
            x = modulate(h, scale2, none, before2, None)
            x = last(swiglu(*project(x, (gate, up))))
            return normed_sum(h, x, after2, gates[1])

        return run


def real_tables(turns: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32, of complex tables."""
    return turns.real.float().contiguous(), turns.imag.float().contiguous()


def _keys(mask: Tensor) -> Tensor:
    """A mask [B, S] of any dtype as attention takes it: [B, 1, 1, S], bool."""
    return mask.bool()[:, None, None]


class ZImageSubject(SandwichSubject):
    processor = "ZSingleStreamAttnProcessor"
    argument = "x"
    unread = ("layer_id",)
    names = Names(
        "attention",
        ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"),
        ("w1", "w3", "w2"),
    )

    def build(self, m: Any) -> Any:
        return type(m)(0, 64, 4, 4, 1e-5, True, m.modulation)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        h, mask, turns = self.drawn(generator)
        return {
            "x": h,
            "attn_mask": mask,
            "freqs_cis": turns,
            "adaln_input": torch.randn(2, 64, generator=generator) if block.modulation else None,
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        run = self.parts(bind)

        def fused(
            block: Any,
            x: Tensor,
            attn_mask: Tensor | None,
            freqs_cis: Tensor | None,
            adaln_input: Tensor | None = None,
            noise_mask: Tensor | None = None,
            adaln_noisy: Tensor | None = None,
            adaln_clean: Tensor | None = None,
        ) -> Any:
            other_mask = attn_mask is not None and (
                attn_mask.ndim != 2 or attn_mask.dtype != torch.bool
            )
            mixed = block.modulation and (adaln_input is None or adaln_input.dtype != x.dtype)
            if noise_mask is not None or other_mask or mixed:
                raise HandedBack
            if not block.modulation:
                return run(block, x, attn_mask, freqs_cis, None, (None, None))
            made = block.adaLN_modulation(adaln_input).unflatten(-1, (4, -1))  # scale, gate, twice
            gates = made[:, 1::2].float().tanh()
            scales = made[:, 0::2].unbind(1)
            return run(block, x, attn_mask, freqs_cis, scales, gates.unbind(1))

        return fused


class Lumina2Subject(SandwichSubject):
    processor = "Lumina2AttnProcessor2_0"
    names = Names(
        "attn",
        ("norm1", "norm2", "ffn_norm1", "ffn_norm2"),
        ("linear_1", "linear_3", "linear_2"),
    )
    attend = staticmethod(undispatched)

    def build(self, m: Any) -> Any:
        groups = m.attn.heads // (m.attn.inner_kv_dim // m.head_dim)
        kv_heads = {1: 4, 2: 2}.get(groups, 1)
        return type(m)(64, 4, kv_heads, 32, 1.0, 1e-5, m.modulation)

    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        h, mask, turns = self.drawn(generator)
        return {
            "hidden_states": h,
            "attention_mask": mask,
            "image_rotary_emb": turns,
            "temb": torch.randn(2, 64, generator=generator) if block.modulation else None,
        }

    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        run = self.parts(bind)
        silu = StepMemo(torch.nn.functional.silu)

        def fused(
            block: Any,
            hidden_states: Tensor,
            attention_mask: Tensor | None,
            image_rotary_emb: Tensor | None,
            temb: Tensor | None = None,
        ) -> Any:
            h, mask, turns = hidden_states, attention_mask, image_rotary_emb
            other = turns is not None and 2 * turns.shape[-1] != block.attn.norm_q.weight.numel()
            if other or (mask is not None and mask.ndim != 2):  # tables of another width: broadcast
                raise HandedBack
            if not block.modulation:
                return run(block, h, mask, turns, None, (None, None))
            if temb is None or temb.dtype != h.dtype:
                raise HandedBack
            made = block.norm1.linear(silu(temb)).unflatten(-1, (4, -1))  # scale, gate, twice
            gates = made[:, 1::2].float().tanh()
            return run(block, h, mask, turns, made[:, 0::2].unbind(1), gates.unbind(1))

        return fused
