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

    def may_renew(self, x: Node, views: list[Node], at: int) -> bool:
        """The same of a view, by `views`, of a tensor of which there are other views that can be
        made again, of what is there after the write."""
        if not views or not _makes_own(base := _under(views)):
            return False
        sharing = [n for storage in _memory(x) for n in self._sharing[storage]]
        read = [n for n in sharing if self.order[n] < at and self._is_read(n, at)]
        return all(_made_by_views(n, base) for n in read)

    def to_renew(self, base: Node, at: int) -> list[Node]:
        """What is read behind a write to a tensor: that tensor and views of it, in their order."""
        sharing = [n for storage in _memory(base) for n in self._sharing[storage]]
        return [n for n in dict.fromkeys(sharing) if self.order[n] < at and self._is_read(n, at)]

    def _is_read(self, node: Node, at: int) -> bool:
        return any(self.is_behind(u, at) for u in node.users)

    def is_behind(self, node: Node, at: int) -> bool:
        return self.order.get(node, -1) > at


def without_writes(graph: Graph) -> None:
    """Replace `x.add_(y)` by `x + y`, and `x` by it from there on.

    That is right where `x` is a tensor of its own, made by an operator of the graph, and where no
    view of it that was made before is used after. The same of `x[..., a:b] = y`. Where there are
    such views, by operators that are known, they are made again of what is there then: so writes
    through one of several views are replaced too. Any other write stays, and is refused.
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
        if not isinstance(x, Node):
            continue
        alone = places.may_write(x, at)
        views = [] if alone else _views_written(x)
        if not alone and not places.may_renew(x, views, at):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(pure, node.args, node.kwargs)
            wide = _promoted(node)
            if wide is not None:  # it is computed so, and rounded as it is written
                new.meta = {"val": value(node).to(wide)}
                new = _as(graph, new, value(node).dtype)
        new.meta = dict(node.meta)
        if not alone:
            new.meta["val"] = value(x).clone()  # what is written is memory of its own
            _renew(graph, node, views, new, places)
            graph.erase_node(node)
            continue
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
#: Of one tensor, which a view of another one is made by.
_VIEWS = frozenset(
    {
        *(*_SCATTERS, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim),
        *(aten.transpose.int, aten.t.default, aten.permute.default, aten.alias.default),
    }
)


def _views_written(x: Node) -> list[Node]:
    """The slices and selections that a view is made by, the last one first."""
    views: list[Node] = []
    node: Any = x
    while isinstance(node, Node) and node.target in _SCATTERS:
        if not is_whole_slice(node):
            views.append(node)
        node = node.args[0]
    return views


def _under(views: list[Node]) -> Node:
    """The tensor that these are views of."""
    node: Any = views[-1].args[0]
    while is_whole_slice(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _made_by_views(node: Any, base: Node) -> bool:
    while node is not base:
        if not isinstance(node, Node) or node.target not in _VIEWS:
            return False
        node = node.args[0]
    return True


def _is_one_slice(views: list[Node]) -> bool:
    return len(views) == 1 and views[0].target is aten.slice.Tensor


def _scattered(graph: Graph, views: list[Node], made: Node) -> Node:
    """The whole of a tensor with `made` in the place of a view of it."""
    for view in views:
        below: Any = view.args[0]
        target = _SCATTERS[view.target]  # type: ignore[index]
        made = graph.call_function(target, (below, made, *view.args[1:]))
        made.meta = dict(below.meta)
    return made


def _renew(graph: Graph, write: Node, views: list[Node], made: Node, places: _Places) -> None:
    """Replace a tensor by one with `made` in the place of a view of it, and views of it that are
    read behind the write, its own result among them, by views of that."""
    at, base = places.order[write], _under(views)
    renewed: dict[Any, Node] = {}

    def renew(node: Any) -> Node:
        if node not in renewed:
            new = graph.call_function(node.target, (renew(node.args[0]), *node.args[1:]))
            new.meta = dict(node.meta)
            places.add(new, at)
            renewed[node] = new
        return renewed[node]

    read = places.to_renew(base, at)
    with graph.inserting_before(write):
        renewed[base] = _scattered(graph, views, made)
        renewed[base].meta["in_place"] = _is_one_slice(views)
        places.add(renewed[base], at)
        for node in read:
            renew(node)
        if write.users:
            write.replace_all_uses_with(renew(write.args[0]))
    for node in read:
        for user in list(node.users):
            if places.is_behind(user, at):
                user.replace_input_with(node, renewed[node])


def _scatter(graph: Graph, write: Node, places: _Places) -> None:
    """Replace `x[...] = y` by the whole of `x` with `y` in its place, where that is right.

    Not where sizes are the same by arithmetic alone: loops over chunks write so (Kimi Linear), and
    their blocks gain nothing for a capture of half a minute."""
    at = places.order[write]
    views = _views_written(write.args[0])  # type: ignore[arg-type]
    source: Any = write.args[1]
    if not views or not isinstance(source, Node):
        return
    x = _under(views)
    if not isinstance(x, Node) or not is_tensor(source) or not same_sizes(views[0], source):
        return
    if not places.may_write(x, at):
        if not places.may_renew(x, views, at):
            return
        with graph.inserting_before(write):
            made = _as(graph, source, value(x).dtype)
        _renew(graph, write, views, made, places)
        graph.erase_node(write)
        return
    with graph.inserting_before(write):
        made = _as(graph, source, value(x).dtype)
        write.replace_all_uses_with(made)
        made = _scattered(graph, views, made)
    # nobody reads what was there before: the fused code may write in place, as the original does
    made.meta["in_place"] = _is_one_slice(views)
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
    """Forms that the rules know: a cast by its dtype; one name of `transpose`; no times 1; no
    `-y` in `addcmul`; one slice of a table for all that take it; a slice for an index that is a
    list of one number; a stack in place of a tensor whose even and odd columns are written."""
    slices: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.type_as.default and not node.kwargs:
            with graph.inserting_before(node):
                cast = _as(graph, node.args[0], value(node).dtype)  # type: ignore[arg-type]
            node.replace_all_uses_with(cast)
            graph.erase_node(node)
        elif _is_by_one(node) and not any(n.meta.get("in_place") for n in graph.nodes):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _EXCHANGES and not node.kwargs:
            node.target = aten.transpose.int
        elif node.target is aten.addcmul.default and not node.kwargs:
            _less_negated(node)
        elif node.target is aten.slice.Tensor and node.args[0].op == "placeholder":  # type: ignore[union-attr]
            first = slices.setdefault(tuple(node.args), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target is aten.slice_scatter.default:
            _as_stack(graph, node)
        elif node.target is aten.index.Tensor:
            _as_slice(graph, node)


def _is_by_one(node: Node) -> bool:
    """Whether it divides or multiplies a tensor of the graph's own by the number 1, as attention of
    diffusers does by its `rescale_output_factor`."""
    if node.target not in (aten.div.Tensor, aten.mul.Tensor) or node.kwargs:
        return False
    x, one = node.args
    own = isinstance(x, Node) and is_tensor(x) and x.op != "placeholder"
    return own and type(one) in (int, float) and one == 1 and value(x).dtype == value(node).dtype


def _less_negated(node: Node) -> None:
    """`addcmul(x, -y, z)` as `addcmul(x, y, z, value=-1)`: the same numbers."""
    x, *factors = node.args
    negated = [n for n in factors if isinstance(n, Node) and n.target is aten.neg.default]
    if len(negated) == 1:
        plain = [n.args[0] if n is negated[0] else n for n in factors]  # type: ignore[union-attr]
        node.args, node.kwargs = (x, *plain), {"value": -1}


#: Other names of `transpose`.
_EXCHANGES = (aten.swapaxes.default, aten.swapdims.default)


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
