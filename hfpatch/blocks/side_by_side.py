"""q, k and v of several runs of tokens, side by side without copies; and products of parts.

Text and image tokens that attend to each other have projections of their own. Where these are one
product each, they are written into one buffer and normed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hfpatch.blocks.projections import is_packed, is_plain, project, project_into
from hfpatch.proof.subject import Tensor

Tables = tuple[Tensor, Tensor]


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


class SideBySide:
    """q, k and v of the parts of a sequence.

    Args:
        norm_rope: `qk_norm_rope` that writes to its first two tensors; None: q and k are taken as
            the projections give them.
    """

    def __init__(self, norm_rope: Callable[..., None] | None) -> None:
        self._into = norm_rope

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
            q, k, v = (by_head(t, heads) for t in made.view(batch, -1, width).chunk(3, -1))
            self.norm_rope((q, k), [(q, k)], [[t for p in parts for t in p.tokens]])
            return q, k, v
        made_of = {i: project(parts[i].x, parts[i].linears) for i in order or range(len(parts))}
        split = [[by_head(t, heads) for t in made_of[i]] for i in range(len(parts))]
        v = split[0][2] if len(parts) == 1 else torch.cat([s[2] for s in split], 1)
        sources = [(s[0], s[1]) for s in split]
        if self._into is None:
            return torch.cat([s[0] for s in split], 1), torch.cat([s[1] for s in split], 1), v
        q, k = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape)
        self.norm_rope((q, k), sources, [p.tokens for p in parts])
        return q, k, v

    def norm_rope(
        self,
        into: tuple[Tensor, Tensor],
        sources: Sequence[tuple[Tensor, Tensor]],
        tokens: Sequence[Sequence[Tokens]],
    ) -> None:
        """Norm and RoPE of each source's runs of tokens, to their places in `into`."""
        run = self._into
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


def by_head(x: Tensor, heads: int) -> Tensor:
    """[..., H D] as [..., H, D]."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


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


def rows(tables: Any, start: int, end: int) -> Any:
    """The part of [S, D] or [1 or B, S, D] tables, one or two, for some of the tokens; None as it
    is."""
    if tables is None or tables[0] is None:
        return tables
    first, second = tables
    one = slice(start, end) if first.dim() == 2 else (slice(None), slice(start, end))
    return first[one], None if second is None else second[one]


class JoinedHeads:
    """`SideBySide` of parts as a captured block has them.

    Args:
        norm_rope: as there.
        heads: H.
        order: the parts as the original calls their layers.
    """

    def __init__(self, norm_rope: Callable[..., None], heads: int, order: Sequence[int]) -> None:
        self._qkv = SideBySide(norm_rope).qkv
        self._heads, self._order = heads, order

    def __call__(
        self, linears: Sequence[Sequence[Any]], parts: Sequence[Any], tables: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, S, H, D].

        Args:
            linears: of each part its layers to q, k and v.
            parts: of each part (x [B, S, C], weights of its norms [D] or None, its tables or None).
            tables: those of all tokens, or None.
        """
        made, at = [], 0
        for (x, q_weight, k_weight, *own), layers in zip(parts, linears, strict=True):
            end = at + x.shape[1]
            found = rows(tables, at, end) if own[0] is None else own
            made.append(Part(x, layers, (Tokens(end - at, q_weight, k_weight, found),)))
            at = end
        return self._qkv(made, self._heads, self._order)
