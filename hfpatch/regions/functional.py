"""Writes to tensors that the code made itself, as operators that make a new one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from hfpatch.regions.nodes import Call, Target


def without_writes(graph: Graph) -> None:
    """Replace `x.add_(y)` by `x + y`, and `x` by it from there on.

    That is right where `x` is a tensor of its own, made by an operator of the graph, and where no
    view of it that was made before is used after. Any other write stays, and is refused.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        pure = _pure(node)
        if pure is None:
            continue
        x = node.args[0]
        if not isinstance(x, Node) or not _is_own(x) or _aliased(x, node, order):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(pure, node.args, node.kwargs)
        new.meta = dict(node.meta)
        at = order[node]
        order[new] = at
        node.replace_all_uses_with(new)
        for user in list(x.users):
            if order.get(user, -1) > at:
                user.replace_input_with(x, new)
        graph.erase_node(node)


def _pure(node: Node) -> Any:
    """The operator that computes what this one writes to its first argument; None if none does."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return None
    name = op._schema.name.partition("::")[2]
    if not name.endswith("_") or op._schema.name.partition("::")[0] != "aten":
        return None
    written = [
        a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    if len(written) != 1 or written[0].name != op._schema.arguments[0].name:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    pure = getattr(packet, op._overloadname, None) if packet is not None else None
    if pure is None or pure._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in pure.tags:
        return None
    x, out = node.args[0], node.meta.get("val")
    if isinstance(x, Node) and isinstance(out, torch.Tensor):
        held = x.meta.get("val")
        # what is written is of the dtype of `x`: the other operator may promote
        if not isinstance(held, torch.Tensor) or any(
            isinstance(a, Node)
            and isinstance(a.meta.get("val"), torch.Tensor)
            and torch.result_type(held, a.meta["val"]) != held.dtype
            for a in node.args[1:]
        ):
            return None
    return pure


def _is_view(node: Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    op = node.target
    if isinstance(op, torch._ops.OpOverload):
        return any(r.alias_info is not None for r in op._schema.returns) or op in _MAY_ALIAS
    return not isinstance(op, Target)


#: Operators that give their argument itself where nothing is to do.
_MAY_ALIAS = frozenset(
    {
        *(torch.ops.aten.to.dtype, torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout),
        *(torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default),
        *(torch.ops.aten.flatten.using_ints, torch.ops.aten.dropout.default),
        *(torch.ops.aten.chunk.default, torch.ops.aten.to.other),
    }
)


def _is_own(x: Node) -> bool:
    """Whether a node's result is a tensor of its own."""
    if x.op != "call_function":
        return False
    if isinstance(x.target, Call):
        return x.target.fresh
    if x.target is operator.getitem:  # one of several results: of `topk`, not of `split`
        made: Any = x.args[0]
        return isinstance(made.target, torch._ops.OpOverload) and not _is_view(made)
    return isinstance(x.target, torch._ops.OpOverload) and not _is_view(x)


def _aliased(x: Node, write: Node, order: dict[Node, int]) -> bool:
    """Whether a view of `x` that was made before the write is used after it."""
    at = order[write]
    left, seen = [x], {x}
    while left:
        for user in left.pop().users:
            if user is write or user in seen:
                continue
            if order.get(user, at) < at and _is_view(user):
                seen.add(user)
                left.append(user)
                if any(order.get(u, at + 1) > at for u in user.users):
                    return True
    return False
