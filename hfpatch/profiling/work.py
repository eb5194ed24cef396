"""What each operator moves and computes, counted as it runs: the shares of a device's speed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on: calls, bytes and operations by operator.

    Bytes are those of each tensor that goes in or comes out, once; what only looks at a tensor in
    another way (`view`, `transpose`) has none. Operations are those of products, convolutions and
    attention, which PyTorch knows to count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, dict[str, float]] = defaultdict(
            lambda: {"calls": 0.0, "bytes": 0.0, "flops": 0.0}
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        row = self.found[func._schema.name]
        row["calls"] += 1
        if not _views(func):
            tensors = {
                id(t): t
                for t in pytree.tree_leaves((args, kwargs, result))
                if isinstance(t, torch.Tensor)
            }
            row["bytes"] += sum(t.numel() * t.element_size() for t in tensors.values())
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            given = _ungrouped(args) if "scaled_dot_product" in func._schema.name else args
            row["flops"] += float(count(*given, **kwargs, out_val=result))
        return result


def _ungrouped(args: Any) -> tuple[Any, ...]:
    """Of attention: PyTorch's formula wants as many heads of keys as of queries."""

    def is_heads(held: Any) -> bool:
        return isinstance(held, torch.Tensor) and held.dim() == 4

    most = max((t.shape[1] for t in args[:4] if is_heads(t)), default=0)
    return tuple(
        torch.empty((a.shape[0], most, *a.shape[2:]), dtype=a.dtype, device="meta")
        if i < 4 and is_heads(a) and a.shape[1] and most % a.shape[1] == 0
        else a
        for i, a in enumerate(args)
    )


def _views(func: Any) -> bool:
    """Whether its results are its inputs' memory, and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def shares(
    work: dict[str, dict[str, float]],
    times: dict[str, float],
    speed: tuple[float, float],
) -> list[dict[str, Any]]:
    """Rows of the operators that take time, the longest first.

    Args:
        work: as `Work.found`.
        times: microseconds by operator: of their kernels on a GPU, else their own.
        speed: bytes a second of a copy, operations a second of a product.
    """
    rows = []
    for name, us in sorted(times.items(), key=lambda item: -item[1]):
        row = work.get(name)
        if row is None or us <= 0 or not row["bytes"]:
            continue
        rows.append(
            {
                "name": name,
                "calls": int(row["calls"]),
                "us": us,
                "bytes": row["bytes"],
                "flops": row["flops"],
                "of copy": row["bytes"] / (us * 1e-6) / speed[0],
                "of arithmetic": row["flops"] / (us * 1e-6) / speed[1],
            }
        )
    return rows
