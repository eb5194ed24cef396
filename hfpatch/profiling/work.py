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
            row["flops"] += float(count(*args, **kwargs, out_val=result))
        return result


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
