"""Attention under a mask of keys: what it hides is left out, since a mask costs a slower kernel.

The mask is looked at once a step, as by the blocks that have a file (`hfpatch.blocks.masks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from hfpatch.attention import attention
from hfpatch.blocks.masks import kept_keys, may_look
from hfpatch.blocks.memo import StepMemo
from hfpatch.proof.subject import Tensor
from hfpatch.regions.nodes import Attend, fixed, is_tensor, value
from hfpatch.regions.shared import made_by, made_of_arguments


class Keys:
    """`keys(*given)`: what `kept_keys` says of the mask that `mask_of` makes of these tensors."""

    def __init__(self, mask_of: Callable[..., Tensor]) -> None:
        self._known = StepMemo(lambda *given: kept_keys(mask_of(*given)))

    def __call__(self, *given: Tensor) -> list[slice | Tensor]:
        return self._known(*given) if all(map(may_look, given)) else []


def masks_of_keys(graph: Graph) -> dict[Node, list[Node]]:
    """The masks of attentions, [B, 1, 1, S] of bool, that are made of a call's arguments alone,
    with the nodes that each is made by."""
    found = {}
    of_arguments = made_of_arguments(graph)
    for node in graph.nodes:
        target: Any = node.target
        if not isinstance(target, Attend) or target.causal or target.softcap is not None:
            continue
        mask: Any = node.args[3]
        if not is_tensor(mask) or mask not in of_arguments or value(mask).dtype != torch.bool:
            continue
        shape = value(mask).shape
        if len(shape) == 4 and fixed(shape[1]) == fixed(shape[2]) == 1:
            found[mask] = made_by(graph, mask)
    return found


def attend_to(
    keys: list[slice | Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
) -> Tensor:
    """`hfpatch.attention.attention` of q, k, v [B, H, S, D] to the keys that all samples attend to,
    or of each sample to its own; by the mask where `keys` is empty."""
    if not keys:
        return attention(q, k, v, mask=mask, scale=scale)
    if len(keys) == 1:
        return attention(q, k[:, :, keys[0]], v[:, :, keys[0]], scale=scale)
    samples = zip(q.split(1), k.split(1), v.split(1), keys, strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([attention(a, b[:, :, n], c[:, :, n], scale=scale) for a, b, c, n in samples])
