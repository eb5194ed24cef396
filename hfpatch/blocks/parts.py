"""What the files of single-stream blocks share: their family, small replicas, attention, constants.

"Single stream" as opposed to blocks that join an image's and a text's tokens in one attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.blocks.attention import attention, fastest
from hfpatch.blocks.base import BlockSubject, NotCovered, compute_dtype, odd_processors, unhooked
from hfpatch.blocks.memo import current_operator, keep_for_capture
from hfpatch.leaves.tables import hold_twice
from hfpatch.proof.subject import Family, Subject, Tensor


class BlockFamily(Family):
    """A row of the registry: a class name and its `BlockSubject`."""

    name = "block"
    rank = 5

    def __init__(self, name: str, subject: type[BlockSubject]) -> None:
        self.pattern = re.compile(f"^{re.escape(name)}$")
        self._subject = subject

    def examine(self, module: nn.Module) -> Subject | str | None:
        kind = self._subject
        if kind.is_another(module):
            return None
        try:
            why = odd_processors(kind.processor, kind.attentions(module)) or kind.odd(module)
            if why is not None:
                return why
            idle = kind.unused(module)
            projection = kind.projection(module)
            if projection is not None and projection.weight.dtype is None:
                return "its projection has no weight"
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            return f"not the block it is named after: {e}"
        if not unhooked(*idle):
            return "a module inside has hooks, which the fused forward would not run"
        return kind(module)


def odd_dtypes(modules: Sequence[nn.Module], projection: Any) -> str | None:
    """Why modules whose parameters a kernel reads are not of the dtype that the block works in."""
    dtype = compute_dtype(modules, projection)
    found = {p.dtype for m in modules for p in m._parameters.values() if p is not None}
    others = ", ".join(sorted(map(str, found - {dtype})))
    return f"its norms are {others}, its projections {dtype}" if others else None


def odd_group_norms(block: nn.Module, norms: Sequence[Any], projection: Any) -> str | None:
    """Why norms of a block are not `GroupNorm`s with weights, all alike and in its dtype."""
    if any(type(norm) is not nn.GroupNorm or not norm.affine for norm in norms):
        return "its norms are no `GroupNorm`s with weights"
    if len({(norm.num_groups, norm.eps) for norm in norms}) > 1:
        return "its norms differ in groups or eps"
    return odd_dtypes([block, *norms], projection)


def gelu_of(ff: Any) -> str:
    """diffusers' `activation_fn` of a `FeedForward` with a GELU or GEGLU."""
    first = ff.net[0]
    if type(first).__name__ == "GEGLU":
        return "geglu"
    return "gelu-approximate" if first.approximate == "tanh" else "gelu"


def odd_feed_forward(ff: Any) -> str | None:
    """Why a `FeedForward` has an activation that `gelu_of` does not know."""
    first = ff.net[0]
    if type(first).__name__ in ("GEGLU", "GELU"):
        return None
    return f"its FFN uses `{type(first).__name__}`"


def drawing(generator: torch.Generator) -> Callable[..., Tensor]:
    """`draw(*shape)`: random numbers of a block's sample."""
    return lambda *shape: torch.randn(*shape, generator=generator)


def check_pairs(*tables: Tensor) -> None:
    """Raises NotCovered where RoPE tables do not hold each value twice, side by side."""
    if not hold_twice(tables, interleaved=True):
        raise NotCovered("its RoPE tables hold two values for the columns of a pair")


def heads_of(attn: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, S, H D] as [B, S, H, D] views."""
    heads = attn.heads
    return tuple(t.view(*t.shape[:-1], heads, t.shape[-1] // heads) for t in tensors)


def bias_of_heads(attn: Any, mask: Tensor, keys: int, batch: int) -> Tensor:
    """A mask of a call as diffusers' processors give it to attention: [B, heads, 1 or S, keys]."""
    mask = attn.prepare_attention_mask(mask, keys, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


def dispatched(attn: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of [B, S, H D] tensors as a processor with a backend does it; [B, S, H D]."""
    q, k, v = heads_of(attn, q, k, v)
    return attention(q, k, v, mask, backend=attn.processor._attention_backend).flatten(2, 3)


def undispatched(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, backend: Any = None
) -> Tensor:
    """Attention of [B, S, H, D] tensors, past diffusers' dispatcher: no backend applies."""
    if q.is_cuda:
        return fastest(q, k, v, mask)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.transpose(1, 2)


class Constant:
    """A vector of one value per width, device and dtype: a gate of ones, a shift of zeros.

    1 * x and x + 0 are exact, so one kernel serves blocks with and without a modulation.
    """

    def __init__(self, value: float, dtype: torch.dtype | None = None) -> None:
        self._value = value
        self._dtype = dtype
        self._held: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """[D] for a `like` of [..., D], of its dtype unless another was given."""
        dtype = self._dtype or like.dtype
        key = (like.shape[-1], like.device, dtype)
        held = self._held.get(key)
        if held is None:
            held = torch.full((key[0],), self._value, dtype=dtype, device=like.device)
            # made for a CUDA graph it would be the graph's own memory
            if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._held[key] = held
                if (operator := current_operator()) is not None:
                    operator.at_end(lambda: self._held.pop(key, None))
        else:
            keep_for_capture(held)
        return held
