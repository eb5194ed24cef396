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
from hfpatch.blocks.memo import StepMemo, for_a_graph
from hfpatch.blocks.parts import check_pairs
from hfpatch.blocks.projections import (
    feed_forward,
    gelu_product,
    is_packed,
    is_plain,
    output_projection,
    project,
    project_into,
)
from hfpatch.proof.subject import Combo, Tensor

Tables = tuple[Tensor, Tensor]
#: Per stream or block, as AdaLN-Zero chunks them: shift, scale, gate, then the FFN's three.
Modulation = Sequence[Tensor]
#: Where a norm of q and k rounds, by the class's own rule: see HFP_CAST_* in `hfpatch.h`.
_CASTS = {
    (nn.RMSNorm.__module__, "RMSNorm"): "none",
    ("diffusers.models.normalization", "RMSNorm"): "weight",
    ("diffusers.models.normalization", "MochiRMSNorm"): "none",
}


class Tokens(NamedTuple):
    """A run of tokens whose q and k are normed and rotated alike."""

    length: int
    q_weight: Tensor | None
    k_weight: Tensor | None
    tables: Tables | None


class Part(NamedTuple):
    """A sequence that goes through one set of projections, and the runs of tokens in it."""

    x: Tensor  # [B, S, C]
    linears: Sequence[Any]  # to q, k and v
    tokens: Sequence[Tokens]


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
        self._norm_rope_into: Callable[..., None] | None = None
        if qk is not None:
            self._norm_rope_into = bind(
                "qk_norm_rope", into=2, eps=qk.eps, cast=cast_of(qk), interleaved=True
            )

    def qkv(
        self, parts: Sequence[Part], heads: int, order: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all parts, one after the other: views of [B, S, H, D].

        Where the projections are one product each, they are written side by side into one buffer
        and normed there; text and image are never copied together. Else the layers are called in
        the `order` of the original, by default that of the parts.
        """
        first = parts[0].x
        batch = first.shape[0]
        ours = (len(parts) == 1 or batch == 1) and all(is_packed(p.linears, p.x) for p in parts)
        if ours:
            width = sum(linear.out_features for linear in parts[0].linears)
            made = first.new_empty(sum(p.x.shape[1] for p in parts) * batch, width)
            start = 0
            for p in parts:
                rows = p.x.flatten(0, 1)
                project_into(made[start : start + rows.shape[0]], rows, p.linears)
                start += rows.shape[0]
            q, k, v = (_heads(t, heads) for t in made.view(batch, -1, width).chunk(3, -1))
            self._norm_rope((q, k), [(q, k)], [[t for p in parts for t in p.tokens]])
            return q, k, v
        made_of = {i: project(parts[i].x, parts[i].linears) for i in order or range(len(parts))}
        split = [[_heads(t, heads) for t in made_of[i]] for i in range(len(parts))]
        v = split[0][2] if len(parts) == 1 else torch.cat([s[2] for s in split], 1)
        sources = [(s[0], s[1]) for s in split]
        if self._norm_rope_into is None:
            return torch.cat([s[0] for s in split], 1), torch.cat([s[1] for s in split], 1), v
        q, k = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape)
        self._norm_rope((q, k), sources, [p.tokens for p in parts])
        return q, k, v

    def qkv_and_rest(
        self, linear: Any, x: Tensor, inner: int, tokens: Tokens, heads: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v as of `qkv`, from a layer that gives more than those; and what is left."""
        made = linear(x)
        q, k, v = (_heads(made[..., i * inner : (i + 1) * inner], heads) for i in range(3))
        # a plain layer's result is nobody else's: a hook or an adapter may keep what it gives
        into = (q, k) if is_plain(linear, x) else (torch.empty_like(q), torch.empty_like(k))
        self._norm_rope(into, [(q, k)], [(tokens,)])
        return *into, v, made[..., 3 * inner :]

    def _norm_rope(
        self,
        into: tuple[Tensor, Tensor],
        sources: Sequence[tuple[Tensor, Tensor]],
        tokens: Sequence[Sequence[Tokens]],
    ) -> None:
        """Norm and RoPE of each source's runs of tokens, to their places in `into`."""
        run = self._norm_rope_into
        if run is None:  # the buffer holds q and k already
            return
        to = 0
        for (q, k), runs in zip(sources, tokens, strict=True):
            at = 0
            for t in runs:
                there, here = slice(to, to + t.length), slice(at, at + t.length)
                cos, sin = t.tables or (None, None)
                run(
                    into[0][:, there],
                    into[1][:, there],
                    q[:, here],
                    k[:, here],
                    t.q_weight,
                    t.k_weight,
                    cos,
                    sin,
                )
                to, at = to + t.length, at + t.length

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


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


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


def joined(first: Tensor, second: Tensor) -> Tensor:
    """`torch.cat((first, second), 1)`, without a copy where the two stand so in memory already:
    the halves of what the block before returned."""
    batch, one, width = first.shape
    both = one + second.shape[1]
    strides = (both * width, width, 1)
    if (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.dtype == second.dtype
        and second.shape[0] == batch
        and second.shape[2] == width
        and second.storage_offset() == first.storage_offset() + one * width
        and (batch == 1 or first.stride(0) == second.stride(0) == strides[0])
        and first.stride()[1:] == second.stride()[1:] == strides[1:]
    ):
        return first.as_strided((batch, both, width), strides)
    return torch.cat((first, second), 1)


def product_of_two(linear: Any, a: Tensor, b: Tensor) -> Tensor:
    """`linear(torch.cat((a, b), -1))` without the copy: two products, summed.

    The sum of the first is rounded to the dtype on the way, which fp16's range could not hold:
    there, and where the layer is not plain, the module itself is called.
    """
    if a.dtype == torch.float16 or not is_plain(linear, a):
        return linear(torch.cat((a, b), -1))  # type: ignore[no-any-return]
    weight, split = linear.weight, a.shape[-1]
    y = F.linear(a, weight[:, :split], linear.bias)
    y.view(-1, y.shape[-1]).addmm_(b.flatten(0, 1), weight[:, split:].t())
    return y


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
        self._kept = StepMemo(_kept)
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
            # neither may wait for the GPU here, nor once per block
            and not mask.is_inference()
            and not (mask.is_cuda and (for_a_graph() or torch.cuda.is_current_stream_capturing()))
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


#: Samples that may attend one by one: one launch each, and a copy.
_MAX_ALONE = 4


def _kept(mask: Tensor) -> list[slice | Tensor]:
    """The keys that all samples attend to; of each sample, if they differ; [] to use the mask."""
    rows = mask.flatten(1)
    if rows.shape[0] > 1 and bool((rows == rows[:1]).all()):
        rows = rows[:1]
    if rows.shape[0] > _MAX_ALONE:
        return []
    kept: list[slice | Tensor] = []
    for row in rows:
        index = row.nonzero().flatten()
        count = index.shape[0]
        if count == 0:  # attention to nothing is what the mask's kernel makes of it
            return []
        # padding at the end is the common case, and needs no copy of the rest
        kept.append(slice(count) if int(index[-1]) == count - 1 else index)
    return kept


def compact(cos: Tensor, sin: Tensor) -> Tables:
    """The RoPE tables as the kernel reads them best: each value, which stands twice, once."""
    check_pairs(cos, sin)
    return cos[..., ::2].contiguous(), sin[..., ::2].contiguous()


def tight(x: Tensor) -> Tensor:
    """A stream's part [B, S, C] of the joint result as a linear layer takes it in one product with
    its bias: of a single sample a view will do."""
    return x[0].unsqueeze(0) if x.shape[0] == 1 else x.contiguous()


def rows(tables: Tables | None, start: int, end: int) -> Tables | None:
    """The part of [S, D] tables for some of the tokens."""
    return None if tables is None else (tables[0][start:end], tables[1][start:end])


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
