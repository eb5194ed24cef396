"""Writes to tensors that the code made itself, as operators that make a new one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from hfpatch.regions.nodes import Call, Constant, Leaf, fixed, is_tensor, replace, same_sizes, value

aten: Any = torch.ops.aten


class _Places:
    """Where nodes stand in the graph as it was captured, and who shares memory: that is read off
    the tensors of the capture, since operators do not tell (`type_as`, `einsum` of one tensor)."""

    def __init__(self, graph: Graph) -> None:
        self.order: dict[Node, int] = {}
        self._sharing: dict[int, list[Node]] = {}
        for i, node in enumerate(graph.nodes):
            self.add(node, i)

    def add(self, node: Node, at: int) -> None:
        self.order[node] = at
        for storage in _memory(node):
            self._sharing.setdefault(storage, []).append(node)

    def may_write(self, x: Node, at: int) -> bool:
        """Whether a tensor that is written to at a place lies in memory of the graph's own, which
        is read by no other way behind it."""
        sharing = [self._sharing[storage] for storage in _memory(x)]
        before = [n for nodes in sharing for n in nodes if self.order[n] < at]
        return all(map(_makes_own, before)) and not any(
            self.is_behind(u, at) for n in before if n is not x for u in n.users
        )

    def is_behind(self, node: Node, at: int) -> bool:
        return self.order.get(node, -1) > at


def without_writes(graph: Graph) -> None:
    """Replace `x.add_(y)` by `x + y`, and `x` by it from there on.

    That is right where `x` is a tensor of its own, made by an operator of the graph, and where no
    view of it that was made before is used after. The same of `x[..., a:b] = y`. Any other write
    stays, and is refused.
    """
    places = _Places(graph)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and len(node.args) == 2 and not node.kwargs:
            _scatter(graph, node, places)
            continue
        pure = _pure(node)
        if pure is None:
            continue
        x, at = node.args[0], places.order[node]
        if not isinstance(x, Node) or not places.may_write(x, at):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(pure, node.args, node.kwargs)
            wide = _promoted(node)
            if wide is not None:  # it is computed so, and rounded as it is written
                new.meta = {"val": value(node).to(wide)}
                new = _as(graph, new, value(node).dtype)
        new.meta = dict(node.meta)
        places.add(new, at)
        node.replace_all_uses_with(new)
        for user in list(x.users):
            if places.is_behind(user, at):
                user.replace_input_with(x, new)
        graph.erase_node(node)


_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def _scatter(graph: Graph, write: Node, places: _Places) -> None:
    """Replace `x[...] = y` by the whole of `x` with `y` in its place, where that is right.

    Not where sizes are the same by arithmetic alone: loops over chunks write so (Kimi Linear), and
    their blocks gain nothing for a capture of half a minute."""
    at = places.order[write]
    views: list[Node] = []
    x: Any = write.args[0]
    while isinstance(x, Node) and x.target in _SCATTERS:
        if not is_whole_slice(x):
            views.append(x)
        x = x.args[0]
    source: Any = write.args[1]
    if not views or not isinstance(x, Node) or not isinstance(source, Node):
        return
    if not (is_tensor(views[0]) and is_tensor(source) and same_sizes(views[0], source)):
        return
    if not places.may_write(x, at):
        return
    with graph.inserting_before(write):
        made = _as(graph, source, value(x).dtype)
        write.replace_all_uses_with(made)
        for view in views:
            below: Any = view.args[0]
            target = _SCATTERS[view.target]  # type: ignore[index]
            made = graph.call_function(target, (below, made, *view.args[1:]))
            made.meta = dict(below.meta)
    # nobody reads what was there before: the fused code may write in place, as the original does
    made.meta["in_place"] = len(views) == 1 and views[0].target is aten.slice.Tensor
    places.add(made, at)
    for user in list(x.users):
        if places.is_behind(user, at):
            user.replace_input_with(x, made)
    graph.erase_node(write)


def is_whole_slice(node: Node) -> bool:
    """Whether it is `x[:]` of a dimension."""
    if node.target is not aten.slice.Tensor:
        return False
    start, end, step = (*node.args[2:], *(None,) * 3)[:3]
    return start in (None, 0) and (end is None or end == LAST) and step in (None, 1)


LAST = 9223372036854775807


def _as(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """A node in a dtype."""
    if value(node).dtype == dtype:
        return node
    made = graph.call_function(aten.to.dtype, (node, dtype))
    made.meta = {"val": value(node).to(dtype)}
    return made


def in_known_forms(graph: Graph) -> None:
    """Forms that the rules know: a cast by its dtype; one slice of a table for all that take it; a
    slice for an index that is a list of one number; a stack in place of a tensor whose even and odd
    columns are written."""
    slices: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.type_as.default and not node.kwargs:
            with graph.inserting_before(node):
                cast = _as(graph, node.args[0], value(node).dtype)  # type: ignore[arg-type]
            node.replace_all_uses_with(cast)
            graph.erase_node(node)
        elif node.target is aten.slice.Tensor and node.args[0].op == "placeholder":  # type: ignore[union-attr]
            first = slices.setdefault(tuple(node.args), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target is aten.slice_scatter.default:
            _as_stack(graph, node)
        elif node.target is aten.index.Tensor:
            _as_slice(graph, node)


def _as_slice(graph: Graph, node: Node) -> None:
    """`x[..., [-2], :]` as `x[..., -2:-1, :]`, which copies nothing."""
    x, where = node.args[:2]
    given = [(dim, index) for dim, index in enumerate(where) if index is not None]  # type: ignore[arg-type, var-annotated]
    if len(given) != 1 or not isinstance(x, Node):
        return
    dim, index = given[0]
    while index.target in _COPIES and isinstance(index.args[0], Node):
        index = index.args[0]
    if not isinstance(index.target, Constant) or index.target.tensor.shape != (1,):
        return
    if index.target.tensor.dtype not in (torch.int64, torch.int32):
        return
    at, size = int(index.target.tensor[0]), fixed(value(x).shape[dim])
    if size is None or not -size <= at < size:
        return
    if any(n.meta.get("in_place") for n in graph.nodes):
        return  # what was a tensor of its own may be written to
    replace(node, aten.slice.Tensor, (x, dim, at, at + 1 if at != -1 else LAST))


#: Of a constant, on its way to where it is used.
_COPIES = (
    *(aten.lift_fresh_copy.default, aten.lift_fresh.default, aten._to_copy.default),
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout),
)


def _as_stack(graph: Graph, node: Node) -> None:
    """`x[..., 0::2] = a; x[..., 1::2] = b` as `stack((a, b), -1).flatten(-2)`."""
    under: Any = node.args[0]
    if under.target is not aten.slice_scatter.default or set(under.users) != {node}:
        return
    last = value(node).dim() - 1
    width = fixed(value(node).shape[-1])
    parts: list[Node] = []
    for write, start in ((under, 0), (node, 1)):
        dim, begin, end, step = (*write.args[2:], *(None,) * 4)[:4]
        if dim not in (-1, last) or (begin or 0) != start or step != 2 or end not in (None, LAST):
            return
        parts.append(write.args[1])  # type: ignore[arg-type]
    if width is None or width % 2:
        return
    with graph.inserting_before(node):
        stack = graph.call_function(aten.stack.default, (parts, -1))
        stack.meta = {"val": torch.stack([value(p) for p in parts], -1)}
        flat = graph.call_function(aten.flatten.using_ints, (stack, last, last + 1))
        flat.meta = {"val": value(node)}
    node.replace_all_uses_with(flat)
    for gone in (node, under):
        graph.erase_node(gone)


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
    wide = _promoted(node)
    return None if wide is not None and name not in _ARITHMETIC else pure


#: What computes in the wider dtype of its arguments, and rounds as it writes.
_ARITHMETIC = ("add_", "sub_", "mul_", "div_")


def _promoted(node: Node) -> torch.dtype | None:
    """The dtype that the operator without a write gives, where it is not the written tensor's."""
    x = value(node.args[0])  # type: ignore[arg-type]
    for a in node.args[1:]:
        held = value(a) if isinstance(a, Node) else None
        if isinstance(held, torch.Tensor) and torch.result_type(x, held) != x.dtype:
            return torch.result_type(x, held)
    return None


def _memory(node: Node) -> set[int]:
    """The storages of a node's results."""
    held = pytree.tree_leaves(node.meta.get("val"))
    return {t.untyped_storage()._cdata for t in held if isinstance(t, torch.Tensor)}


def _makes_own(node: Node) -> bool:
    """Whether nobody else holds a node's result: it is an operator's, or a layer's product."""
    target: Any = node.target
    if isinstance(target, Call):
        return target.fresh
    if target is operator.getitem:
        return _makes_own(node.args[0])  # type: ignore[arg-type]
    return isinstance(target, (torch._ops.OpOverload, Leaf))
