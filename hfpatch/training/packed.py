"""Attention of batches without padding, whose rows hold several sequences one behind the other.

transformers tells them by `position_ids` that begin anew, and masks what is not of a token's
own sequence: for PyTorch's attention that mask is [B, 1, S, S], and kernels with one do the work of
all S x S scores. Here each sequence is attended to by itself. That a mask says nothing but this is
looked at once a forward, on the mask itself.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Sequences up to which they are computed one after the other, where there is no kernel for all.
_MOST_IN_TURN = 64
#: Elements of a mask that are compared at a time.
_COMPARED = 1 << 25


class Sequences(NamedTuple):
    """ends: int32 [count + 1], where sequences of all rows begin, and the end. lengths: of each.
    window: keys that a token sees, itself among them, or None."""

    ends: Tensor
    lengths: list[int]
    window: int | None


# Of the last masks, what they are: one forward's layers share one, or two.
_seen: dict[int, tuple[weakref.ref[Tensor], Any, Sequences | None]] = {}


def sequences_of(mask: Any, positions: Any, window: Any, rows: int) -> Sequences | None:
    """The sequences that a mask keeps apart; None where it says anything else.

    Args:
        mask: bool [B, 1, S, S].
        positions: int64 [B, S]. Those that models make themselves have one row for all, of one
            sequence each, and are not looked at: to look is to wait for the GPU.
        window: what the attention function is given as `sliding_window`.
        rows: B.
    """
    if type(mask) is not Tensor or type(positions) is not Tensor or mask.dtype != torch.bool:
        return None
    if mask.dim() != 4 or positions.dim() != 2 or positions.shape[0] != rows:
        return None
    if mask.shape != (rows, 1, positions.shape[1], positions.shape[1]):
        return None
    if window is not None and type(window) is not int:
        return None
    if mask.is_inference():  # whose writes are not counted: nothing is remembered of it
        return _sequences(mask, positions, window)
    known = _seen.get(id(mask))
    if known is not None and known[0]() is mask and known[1] == (mask._version, window):
        return known[2]
    while len(_seen) >= 8:
        del _seen[next(iter(_seen))]
    found = _sequences(mask, positions, window)
    _seen[id(mask)] = weakref.ref(mask), (mask._version, window), found
    return found


@torch.no_grad()
def _sequences(mask: Tensor, positions: Tensor, window: int | None) -> Sequences | None:
    begins = beginnings(positions)
    number = begins.cumsum(1)
    rows, length = positions.shape
    same = torch.ones((), dtype=torch.bool, device=mask.device)
    some = max(1, _COMPARED // (rows * length))
    for start in range(0, length, some):  # a part: the mask itself is the largest tensor there is
        part = slice(start, start + some)
        seen = (number[:, part, None] == number[:, None, :]).tril_(start)
        if window is not None:
            seen.triu_(start + 1 - window)
        same &= (seen == mask[:, 0, part]).all()
    return sequences_from(begins, window) if same.item() else None


@torch.no_grad()
def beginnings(positions: Tensor) -> Tensor:
    """bool [B, S]: at which tokens a sequence begins; of positions int64 [B, S]."""
    first = torch.ones_like(positions[:, :1], dtype=torch.bool)
    return torch.cat((first, positions[:, 1:] != positions[:, :-1] + 1), 1)


@torch.no_grad()
def sequences_from(begins: Tensor, window: int | None) -> Sequences:
    """The sequences that begin there. This waits for the GPU."""
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat((starts, starts.new_tensor([begins.numel()]))).to(torch.int32)
    return Sequences(ends, ends.diff().tolist(), window)


def attended(q: Tensor, k: Tensor, v: Tensor, of: Sequences, scale: float | None) -> Tensor | None:
    """Causal attention inside each sequence, [B, S, heads, head_dim]; None where nothing serves.

    Args:
        q: [B, heads, S, head_dim]. k, v: [B, key_heads, S, head_dim].
    """
    shape = q.shape[0], q.shape[2], q.shape[1], q.shape[3]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    flash = (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device)[0] >= 8
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    )
    if flash:
        longest = max(of.lengths)
        left, right = (None, None) if of.window is None else (of.window - 1, 0)
        found = torch.ops.aten._flash_attention_forward.default(
            q, k, v, of.ends, of.ends, longest, longest, 0.0, True, False, scale=scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        out: Tensor = found[0]
        return out.view(shape)
    if len(of.lengths) > _MOST_IN_TURN:
        return None
    pieces = []
    cut: Any = torch.split
    for one in zip(*(cut(t, of.lengths) for t in (q, k, v)), strict=True):
        q_of, k_of, v_of = (t.transpose(0, 1)[None] for t in one)
        pieces.append(_one(q_of, k_of, v_of, of.window, scale))
    return torch.cat(pieces).view(shape)


def _one(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Of one sequence: [1, heads, S, head_dim] -> [S, heads, head_dim]."""
    length, mask = q.shape[2], None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
        mask.triu_(1 - window)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[0].transpose(0, 1)
