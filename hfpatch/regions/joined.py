"""Text and image tokens that attend to each other: parts with projections of their own, put
together for attention; and layers of what was put together column by column.

q, k and v of the parts, their norms and rotations become one node, which writes them side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from hfpatch.regions.heads import (
    Rope,
    behind,
    behind_exchanges,
    is_rms_norm,
    rope_of,
    rope_params,
    strip,
    tables_of,
    under_view,
)
from hfpatch.regions.nodes import (
    Attend,
    Call,
    Fused,
    JoinedHeads,
    JoinedRows,
    Leaf,
    Param,
    Project,
    ProjectParts,
    fixed,
    is_tensor,
    replace,
    same_size,
    value,
)

aten: Any = torch.ops.aten


class _Part(NamedTuple):
    """q, k or v of one part: `view` is [B, S, H, D] of what the layer at `path` makes of `x`, which
    an odd number of exchanges of heads and tokens turns into what attention is given."""

    x: Node
    path: str
    layer: Node
    view: Node
    norm: Leaf | None
    rope: Rope | None


class _Side(NamedTuple):
    """q, k or v of all parts, and the rotation of them as one."""

    parts: list[_Part]
    rope: Rope | None


def join_heads(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    """Put `JoinedHeads` in the place of all that stands between the parts and an attention."""
    for node in list(graph.nodes):
        if not isinstance(node.target, Attend):
            continue
        q, k, v = (_side(a, linears) for a in node.args[:3])
        if q is None or k is None or v is None or not _fit(q, k, v):
            continue
        _join(graph, node, q, k, v)
        yield "text and image side by side"


def _side(node: Any, linears: frozenset[str]) -> _Side | None:
    if not is_tensor(node) or value(node).dim() != 4:
        return None
    node, turns = strip(node)
    rope = rope_of(node)
    if rope is not None:
        node, more = strip(rope.base)
        rope = behind_exchanges(rope, turns + 1)
        turns += more
    if node.target is not aten.cat.default or len(node.args[0]) < 2:  # type: ignore[arg-type]
        return None
    # where the sequence is in the tensors that are put together
    dim = 1 if turns % 2 else 2
    given = node.args[1] if len(node.args) > 1 else 0
    if given not in (dim, dim - 4):
        return None
    parts = [_part(a, turns, linears) for a in node.args[0]]  # type: ignore[union-attr]
    return None if None in parts else _Side(parts, rope)  # type: ignore[arg-type]


def _part(node: Node, turns: int, linears: frozenset[str]) -> _Part | None:
    node, more = strip(node)
    turns += more
    rope = rope_of(node)
    if rope is not None:
        node, more = strip(rope.base)
        rope = behind_exchanges(rope, turns + 1)
        turns += more
    norm = None
    if is_rms_norm(node):
        norm = node.target
        node, more = strip(node.args[0])  # type: ignore[arg-type]
        turns += more
    made = under_view(node)
    if made is None or not isinstance(made.target, Call) or made.target.path not in linears:
        return None
    x: Any = made.args[0] if len(made.args) == 1 and not made.kwargs else None
    if turns % 2 == 0 or not is_tensor(x) or value(x).dim() != 3:
        return None
    return _Part(x, made.target.path, made, node, norm, rope)  # type: ignore[arg-type]


def _fit(q: _Side, k: _Side, v: _Side) -> bool:
    """Whether one op norms and turns q and k of all parts alike, and v is as they are."""
    if not len(q.parts) == len(k.parts) == len(v.parts) or v.rope is not None:
        return False
    first = q.parts[0]
    if first.norm is None or not _same_turns(q.rope, k.rope):
        return False
    for a, b, c in zip(q.parts, k.parts, v.parts, strict=True):
        if not a.x is b.x is c.x or c.norm is not None or c.rope is not None:
            return False
        if not _same_turns(a.rope, b.rope) or (a.rope is not None and q.rope is not None):
            return False
        views = [value(p.view).shape[2:] for p in (first, a, b, c)]
        if any(not all(map(same_size, views[0], other)) for other in views):
            return False
        for p in (a, b):
            if p.norm is None or p.norm.formula != first.norm.formula or p.norm.params[1]:
                return False
            if (p.norm.params[0] is None) != (first.norm.params[0] is None):
                return False
        if any(len(p.layer.users) != 1 for p in (a, b, c)) or None in map(fixed, views[0]):
            return False
    turned = [p.rope for p in q.parts if p.rope is not None]
    return all(rope_params(r) == rope_params(turned[0]) and not r.halves for r in turned)


def _same_turns(a: Rope | None, b: Rope | None) -> bool:
    if a is None or b is None:
        return a is b
    return not a.halves and a._replace(base=b.base) == b


def _join(graph: Graph, attend: Node, q: _Side, k: _Side, v: _Side) -> None:
    norm: Any = q.parts[0].norm
    turned = [r for r in (q.rope, *(p.rope for p in q.parts)) if r is not None]
    params = dict(norm.formula.params) | (rope_params(turned[0]) if turned else {})
    columns = list(zip(q.parts, k.parts, v.parts, strict=True))
    order = {n: i for i, n in enumerate(graph.nodes)}
    # the layers are called as the original calls them
    called = sorted(range(len(columns)), key=lambda i: order[columns[i][0].layer])
    heads, width = (fixed(n) or 0 for n in value(q.parts[0].view).shape[2:])
    target = JoinedHeads(
        tuple(tuple(p.path for p in part) for part in columns), tuple(called), heads, width, params
    )
    tables = [t for r in turned for t in (r.cos, r.sin) if t is not None]
    with behind(graph, *(p.x for p in q.parts), *tables):
        given = tuple(
            (a.x, _weight(graph, a), _weight(graph, b), *_tables(graph, a.rope))
            for a, b, _ in columns
        )
        made = graph.call_function(target, (given, _tables(graph, q.rope)))
        for i, side in enumerate(attend.args[:3]):
            one = graph.call_function(operator.getitem, (made, i))
            seen = graph.call_function(aten.transpose.int, (one, 1, 2))
            seen.meta = dict(side.meta)  # type: ignore[union-attr]
            side.replace_all_uses_with(seen)  # type: ignore[union-attr]


def _weight(graph: Graph, part: _Part) -> Node | None:
    norm = part.norm
    if norm is None or norm.params[0] is None:
        return None
    return graph.call_function(Param(norm.path, norm.params[0]))


def _tables(graph: Graph, rope: Rope | None) -> tuple[Any, Any]:
    return (None, None) if rope is None else tables_of(graph, rope)


def product_of_parts(node: Node) -> str | None:
    """A layer of [B, S, …] tensors that were put together column by column, without the copy."""
    if not isinstance(node.target, Project) or len(node.target.paths) != 1:
        return None
    whole: Any = node.args[0]
    if whole.target is not aten.cat.default or len(whole.users) != 1 or not is_tensor(whole):
        return None
    parts: Sequence[Node] = whole.args[0]
    last = value(whole).dim() - 1
    dim = whole.args[1] if len(whole.args) > 1 else 0
    if dim not in (-1, last) or last != 2 or len(parts) != 2:
        return None
    if any(value(p).dtype != value(whole).dtype for p in parts):
        return None
    users = list(node.users)
    if len(users) != 1 or users[0].target is not operator.getitem:
        return None
    replace(users[0], ProjectParts(node.target.paths[0]), tuple(parts))
    return "product of two parts"


def joined_rows(node: Node) -> str | None:
    """Two inputs put together row by row, which a block before this one may have taken apart: no
    copy where they lie so. What is made may be the inputs' own memory, so only ops may read it."""
    if node.target is not aten.cat.default or value(node).dim() != 3:
        return None
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or dim not in (1, -2) or any(p.op != "placeholder" for p in parts):
        return None
    if parts[0] is parts[1] or not all(isinstance(u.target, Fused) for u in node.users):
        return None
    replace(node, JoinedRows(), tuple(parts))
    return None
