"""What the joint-attention blocks share: text and image tokens that attend to each other (MMDiT;
Esser et al., arXiv:2403.03206), each stream with weights of its own.

A double-stream block is, per stream, `h + gate·out(attention)`, `+ gate·ff(modulate(norm(h)))`,
where the attention sees both streams' `modulate(norm(h))`. A single-stream block computes attention
and MLP from one `modulate(norm(h))` of the joint sequence. A family says which modules those are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.attention import attention
from hfpatch.blocks.base import BlockSubject
from hfpatch.blocks.masks import kept_keys, may_look
from hfpatch.blocks.memo import StepMemo
from hfpatch.blocks.parts import check_pairs
from hfpatch.blocks.projections import (
    feed_forward,
    gelu_product,
    is_plain,
    output_projection,
)
from hfpatch.blocks.side_by_side import (
    Part,
    SideBySide,
    Tables,
    Tokens,
    by_head,
    product_of_two,
)
from hfpatch.proof.subject import Combo, Tensor

#: Per stream or block, as AdaLN-Zero chunks them: shift, scale, gate, then the FFN's three.
Modulation = Sequence[Tensor]
#: Where a norm of q and k rounds, by the class's own rule: see HFP_CAST_* in `hfpatch.h`.
_CASTS = {
    (nn.RMSNorm.__module__, "RMSNorm"): "none",
    ("diffusers.models.normalization", "RMSNorm"): "weight",
    ("diffusers.models.normalization", "MochiRMSNorm"): "none",
}


class Stream(NamedTuple):
    """One stream of a double-stream block."""

    h: Tensor  # [B, S, C], the residual
    modulation: Modulation  # 6 of [B, C] or [B, 1, C]
    linears: Sequence[Any]
    norms: tuple[Any, Any]  # of q and k; None: there is none
    tables: Tables | None
    out: Callable[[Tensor], Tensor]
    ff: Callable[[Tensor], Tensor]


def image_stream(
    attn: Any,
    h: Tensor,
    modulation: Modulation,
    tables: Tables | None,
    ff: Any,
    run: Callable[[Any, Tensor], Tensor] = feed_forward,
) -> Stream:
    """The stream that an attention has its own projections for; `run(ff, x)` is its FFN."""
    norms, out = (attn.norm_q, attn.norm_k), to_out(attn)
    return Stream(h, modulation, qkv_of(attn), norms, tables, out, partial(run, ff))


def text_stream(
    attn: Any,
    h: Tensor,
    modulation: Modulation,
    tables: Tables | None,
    ff: Any,
    run: Callable[[Any, Tensor], Tensor] = feed_forward,
) -> Stream:
    """The stream that it has added projections for."""
    norms, out = (attn.norm_added_q, attn.norm_added_k), attn.to_add_out
    return Stream(h, modulation, added_qkv_of(attn), norms, tables, out, partial(run, ff))


class JointKernels:
    """The kernels of a joint block, bound to its settings, and the steps they make."""

    def __init__(self, bind: Callable[..., Callable[..., Any]], eps: float, qk: Any) -> None:
        self.modulate = bind("norm_modulate", eps=eps, norm="layer", cast="input")
        self.gate = bind("gate_residual", cast="input")
        self.gate_modulate = bind(
            "gate_residual_norm_modulate", eps=eps, norm="layer", cast="input"
        )
        self.silu = StepMemo(F.silu)
        self.attention = MaskedAttention()
        norm_rope = None
        if qk is not None:
            norm_rope = bind("qk_norm_rope", into=2, eps=qk.eps, cast=cast_of(qk), interleaved=True)
        self._side_by_side = SideBySide(norm_rope)
        self.qkv = self._side_by_side.qkv

    def qkv_and_rest(
        self, linear: Any, x: Tensor, inner: int, tokens: Tokens, heads: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v as of `qkv`, from a layer that gives more than those; and what is left."""
        made = linear(x)
        q, k, v = (by_head(made[..., i * inner : (i + 1) * inner], heads) for i in range(3))
        # a plain layer's result is nobody else's: a hook or an adapter may keep what it gives
        into = (q, k) if is_plain(linear, x) else (torch.empty_like(q), torch.empty_like(k))
        self._side_by_side.norm_rope(into, [(q, k)], [(tokens,)])
        return *into, v, made[..., 3 * inner :]

    def double(
        self,
        streams: Sequence[Stream],
        heads: int,
        mask: Tensor | None,
        backend: Any,
        dropped: Tensor | None = None,
        order: Sequence[int] = (0, 1),
        outs: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """A double-stream block: the streams' new residuals, in the order of the joint sequence.

        Args:
            mask: as of `MaskedAttention`.
            dropped: [B, S, 1], True for tokens of the last stream whose attention gives nothing.
            order: the streams as the original calls their layers. Layers of somebody's own may draw
                random numbers, as the dropouts of adapters do.
            outs: the same for the layers behind the attention, if it is another.
        """
        parts = []
        for s in streams:
            x = self.modulate(s.h, s.modulation[1], s.modulation[0], None, None)
            tokens = Tokens(x.shape[1], *weights_of(s.norms), s.tables)
            parts.append(Part(x, s.linears, (tokens,)))
        q, k, v = self.qkv(parts, heads, order)
        lengths = [s.h.shape[1] for s in streams]
        attended = self.attention(q, k, v, mask, backend=backend).flatten(2)
        pieces = list(attended.split(lengths, 1))  # type: ignore[no-untyped-call]
        if dropped is not None:
            pieces[-1] = pieces[-1].masked_fill(dropped, 0.0)
        made = {i: streams[i].out(tight(pieces[i])) for i in outs or order}
        done = {
            i: self.after(streams[i].h, streams[i].modulation, made.pop(i), streams[i].ff)
            for i in order
        }
        return [done[i] for i in range(len(streams))]

    def single(
        self,
        block: Any,
        h: Tensor,
        temb: Tensor,
        tokens: Sequence[Tokens],
        mask: Tensor | None = None,
    ) -> Tensor:
        """A single-stream block: the new residual of the joint sequence `h`.

        Args:
            tokens: the runs of it; mask: as of `MaskedAttention`.
        """
        attn = block.attn
        shift, scale, gate = block.norm.linear(self.silu(temb)).chunk(3, 1)
        x = self.modulate(h, scale, shift, None, None)
        made = mlp_first(block, x)
        q, k, v = self.qkv((Part(x, qkv_of(attn), tokens),), attn.heads)
        backend = attn.processor._attention_backend
        attended = self.attention(q, k, v, mask, backend=backend).flatten(2)
        made = mlp(block, x) if made is None else made
        return self.gate(h, gate, product_of_two(block.proj_out, attended, made))  # type: ignore[no-any-return]

    def after(
        self,
        h: Tensor,
        modulation: Modulation,
        attended: Tensor,
        ff: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """What follows the attention's output in one stream: two gated sums and the FFN."""
        _, _, gate1, shift2, scale2, gate2 = modulation
        h, x = self.gate_modulate(h, gate1, attended, scale2, shift2, None, None)
        return self.gate(h, gate2, ff(x))  # type: ignore[no-any-return]


def weights_of(norms: tuple[Any, Any]) -> tuple[Tensor | None, Tensor | None]:
    return tuple(None if n is None else n.weight for n in norms)  # type: ignore[return-value]


def cast_of(norm: nn.Module) -> str | None:
    """How the class of a q or k norm rounds; None: it is no RMS norm that the kernel knows."""
    return _CASTS.get((type(norm).__module__, type(norm).__name__))


def qkv_of(attn: Any) -> tuple[Any, Any, Any]:
    return attn.to_q, attn.to_k, attn.to_v


def added_qkv_of(attn: Any) -> tuple[Any, Any, Any]:
    return attn.add_q_proj, attn.add_k_proj, attn.add_v_proj


def to_out(attn: Any) -> Callable[[Tensor], Tensor]:
    """The output projection and its dropout."""
    return lambda x: output_projection(attn, x)


def mlp(block: Any, x: Tensor) -> Tensor:
    """The first half of a single-stream block's MLP: linear and GELU."""
    h = gelu_product(block.proj_mlp, x, block.act_mlp.approximate)
    return block.act_mlp(block.proj_mlp(x)) if h is None else h


def mlp_first(block: Any, x: Tensor) -> Tensor | None:
    """What `mlp` gives, where one of the layers that are given `x` is not plain: the original calls
    `proj_mlp` before the attention, and a layer of somebody's may write to `x`, draw numbers or
    fire a hook. None where all are plain: then it need not lie there while the attention runs."""
    if all(is_plain(m, x) for m in (block.proj_mlp, *qkv_of(block.attn))):
        return None
    return mlp(block, x)


def within_range(x: Tensor) -> Tensor:
    """fp16's infinities to its largest numbers, as the originals do."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


class MaskedAttention:
    """Attention under a mask of keys, which costs a slower kernel: masked keys are left out.

    Samples that leave out different keys (guidance with two prompts) attend one by one. The mask is
    looked at once per step.
    """

    def __init__(self, attend: Callable[..., Tensor] | None = None) -> None:
        self._kept = StepMemo(kept_keys)
        self._attend = attend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, backend: Any = None
    ) -> Tensor:
        """`attention`; `mask` is [B, 1, 1, S], True where a key is attended to."""
        attend = self._attend or attention
        if (
            mask is not None
            and mask.dtype == torch.bool
            and mask.shape[1:3] == (1, 1)
            and may_look(mask)
        ):
            kept = self._kept(mask)
            if len(kept) == 1:
                k, v, mask = k[:, kept[0]], v[:, kept[0]], None
            elif kept:
                samples = zip(q.split(1), k.split(1), v.split(1), kept, strict=True)  # type: ignore[no-untyped-call]
                return torch.cat(
                    [attend(a, b[:, n], c[:, n], None, backend=backend) for a, b, c, n in samples]
                )
        return attend(q, k, v, mask, backend=backend)


def compact(cos: Tensor, sin: Tensor) -> Tables:
    """The RoPE tables as the kernel reads them best: each value, which stands twice, once."""
    check_pairs(cos, sin)
    return cos[..., ::2].contiguous(), sin[..., ::2].contiguous()


def tight(x: Tensor) -> Tensor:
    """A stream's part [B, S, C] of the joint result as a linear layer takes it in one product with
    its bias: of a single sample a view will do."""
    return x[0].unsqueeze(0) if x.shape[0] == 1 else x.contiguous()


# ------------------------------------------------------------------------------ subject and family


class JointSubject(BlockSubject):
    """A joint block. The class methods look at any block of the class: they hold no module."""

    ops: tuple[str, ...] = (
        "norm_modulate",
        "qk_norm_rope",
        "gate_residual",
        "gate_residual_norm_modulate",
    )

    @classmethod
    @abstractmethod
    def layer_norms(cls, block: Any) -> list[Any]:
        """The layer norms whose modulated result is a kernel's, not their own."""

    @classmethod
    def others(cls, block: Any) -> list[nn.Module]:
        """Further modules that are not called."""
        return []

    def build(self, m: Any) -> Any:
        return type(m)(dim=64, num_attention_heads=4, attention_head_dim=16)

    @classmethod
    def unfit(cls, block: Any) -> str | None:
        """What else rules a block out."""
        return None

    @classmethod
    def qk_norms(cls, block: Any) -> list[Any]:
        names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
        found = (getattr(attn, n, None) for attn in cls.attentions(block) for n in names)
        return [norm for norm in found if norm is not None]

    @classmethod
    def unused(cls, block: Any) -> list[nn.Module]:
        parts = (cls.attentions, cls.qk_norms, cls.layer_norms, cls.others)
        return [module for part in parts for module in part(block)]

    @classmethod
    def odd(cls, block: Any) -> str | None:
        return cls.unfit(block) or _mismatch(cls, block)

    @classmethod
    def projection(cls, block: Any) -> Any:
        return None

    def packs(self) -> list[list[nn.Module]]:
        """Linear layers that are worth one product each: q, k and v of each stream."""
        groups: list[list[nn.Module]] = []
        for attn in self.attentions(self.module):
            if getattr(attn, "to_q", None) is not None:
                groups.append(list(qkv_of(attn)))
            if getattr(attn, "add_q_proj", None) is not None:
                groups.append(list(added_qkv_of(attn)))
        return groups

    def main_combo(self) -> Combo:
        # a quantized projection's weight is no dtype to compute in; a norm's is
        parameters = [p for m in self.idle() for p in m._parameters.values() if p is not None]
        parameters += [p for p in self.module.parameters() if p.is_floating_point()]
        return Combo(parameters[0].dtype, None)

    def settle(self, block: Any, m: Any) -> None:
        for part in (self.qk_norms, self.layer_norms):
            for ours, theirs in zip(part(block), part(m), strict=True):
                ours.eps = theirs.eps

    def kernels(self, bind: Callable[..., Callable[..., Any]]) -> JointKernels:
        norms = self.qk_norms(self.module)
        eps = self.layer_norms(self.module)[0].eps
        return JointKernels(bind, eps, norms[0] if norms else None)


def _mismatch(subject: type[JointSubject], block: Any) -> str | None:
    """Why a block cannot be fused as it is, or None."""
    attentions = subject.attentions(block)
    if not attentions:
        return "it has no attention"
    outs = [getattr(a, "to_out", None) for a in attentions]
    if any(isinstance(out, nn.ModuleList) and len(out) != 2 for out in outs):
        return "its attention's output is no linear layer and a dropout"
    norms = subject.layer_norms(block)
    for norm in norms:
        if not isinstance(norm, nn.LayerNorm):
            return f"one of its norms is `{type(norm).__name__}`"
        if any(p is not None for p in norm._parameters.values()):
            return "one of its layer norms has a weight"
    if len({norm.eps for norm in norms}) > 1:
        return "its layer norms differ in eps"
    qk = subject.qk_norms(block)
    expected = sum(2 if getattr(a, "add_q_proj", None) is None else 4 for a in attentions)
    if len(qk) not in (0, expected):
        return "some of its q and k are normed and some are not"
    if len({(cast_of(n), n.eps, n.weight is None) for n in qk}) > 1:
        return "its norms of q and k differ in class or eps"
    if any(cast_of(n) is None or n.eps is None or getattr(n, "bias", None) is not None for n in qk):
        return f"its q and k are normed by `{type(qk[0]).__name__}`"
    idle = subject.unused(block)
    dtypes = {p.dtype for m in idle for p in m._parameters.values() if p is not None}
    if len(dtypes) > 1:
        return f"its norms are {', '.join(sorted(map(str, dtypes)))}"
    return None
