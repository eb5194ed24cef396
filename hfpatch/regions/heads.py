"""What stands between projections and attention: norms of q and k, and RoPE.

RoPE is written in dozens of ways. Here no way is looked for: the piece of the graph between a head
and the attention that reads it is computed in fp64 on random numbers, and so are the forms of
`hfpatch.ops.rope`; the form that gives the same is what the piece computes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from hfpatch.ops.rope import rope
from hfpatch.regions.interpret import Sizes, evaluate
from hfpatch.regions.nodes import (
    Attend,
    CacheUpdate,
    Call,
    Fused,
    Leaf,
    Param,
    Table,
    fixed,
    is_tensor,
    same_size,
    value,
)

Tensor = torch.Tensor
aten: Any = torch.ops.aten


class Rope(NamedTuple):
    """What a piece of a graph computes: `rope(base, cos, sin, …)`.

    `sin`: None where `cos` is one complex table. `halves`: of the tables the first half of the
    columns, which hold each angle once. `turned`: tables of 4 dimensions have heads and tokens the
    other way around than what the op is given.
    """

    base: Node
    cos: Node
    sin: Node | None
    interleaved: bool
    rotary_dim: int
    rounds: bool
    halves: bool = False
    turned: bool = False


@dataclass(frozen=True)
class _Head:
    """From a projection to attention: `out` is [B, H, S, D]; `x` is what the op is given.

    `across`: the norm is one of all heads. `flat`: so is the rotation, whose tables have columns of
    their own for each head: `out` and `x` are [B, S, H D].
    """

    out: Node
    x: Node
    seq_dim: int
    rope: Rope | None
    norm: Leaf | None
    across: bool
    flat: bool = False


def fuse_heads(graph: Graph) -> Iterator[str]:
    """Put `qk_norm_rope`, `rope_qk` or `rope` in the place of what heads pass through."""
    for node in list(graph.nodes):
        if not isinstance(node.target, Attend):
            continue
        q, k = (_before_cache(a) for a in node.args[:2])
        if q is None or k is None or q is k:
            continue
        first, second = _head(q), _head(k)
        if first is None or second is None:
            for one in (first, second):
                if one is not None and one.rope is not None:
                    yield _fuse_one(graph, one)
            continue
        if _alike(first, second):
            yield _fuse_both(graph, first, second)
        else:
            for one in (first, second):
                if one.rope is not None:
                    yield _fuse_one(graph, one)


def _before_cache(node: Any) -> Node | None:
    if not isinstance(node, Node):
        return None
    if node.target is operator.getitem:
        update: Any = node.args[0]
        if isinstance(update.target, CacheUpdate):
            return update.args[node.args[1]]  # type: ignore[no-any-return]
    return node


def _is_swap(node: Node) -> bool:
    """Whether it exchanges heads and tokens of a 4-D tensor."""
    if not is_tensor(node) or value(node).dim() != 4:
        return False
    if node.target is aten.transpose.int:
        return sorted(d % 4 for d in node.args[1:3]) == [1, 2]  # type: ignore[operator]
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1, 3]  # type: ignore[arg-type]


def strip(node: Node) -> tuple[Node, int]:
    """The node behind exchanges of heads and tokens, and how many there were."""
    count = 0
    while True:
        if _is_swap(node):
            node, count = node.args[0], count + 1  # type: ignore[assignment]
        elif node.target is aten.contiguous.default:
            node = node.args[0]  # type: ignore[assignment]
        else:
            return node, count


def _head(out: Node) -> _Head | None:
    if not is_tensor(out) or value(out).dim() != 4:
        return None
    node, turns = strip(out)
    found = rope_of(node)
    if found is None and isinstance(node.target, Leaf):  # a norm behind the rotation
        inner = rope_of(node.args[0])  # type: ignore[arg-type]
        if inner is not None:
            base, more = strip(inner.base)
            return _Head(node.args[0], base, 2 - (turns + more) % 2, inner, None, False)  # type: ignore[arg-type]
    if found is not None:
        node, more = strip(found.base)
        turns += more
        if turns % 2 == 0:  # lies as [B, H, S, D]: the op walks it so
            node = found.base if more % 2 else node
        else:
            found = behind_exchanges(found, more)
    norm, across = None, False
    if is_rms_norm(node):
        norm, x = node.target, node.args[0]
    else:
        x = node
        under = under_view(node)
        if under is not None and is_rms_norm(under):
            norm, across = under.target, True
        elif under is not None and found is None:
            return _flat_head(under)
    if found is None and norm is None:
        return None
    seq_dim = 1 if turns % 2 else 2
    return _Head(out, x, seq_dim, found, norm, across)  # type: ignore[arg-type]


def behind_exchanges(rope: Rope, count: int) -> Rope:
    """A rotation whose base is that of an op behind `count` exchanges of heads and tokens."""
    return rope._replace(turned=count % 2 == 1 and value(rope.cos).dim() == 4)


def _flat_head(node: Node) -> _Head | None:
    """A rotation of all heads at once, and the norm in front of it."""
    found = rope_of(node)
    if found is None:
        return None
    if is_rms_norm(found.base):
        norm: Any = found.base
        return _Head(node, norm.args[0], 1, found, norm.target, True, True)
    return _Head(node, found.base, 1, found, None, False, True)


def is_rms_norm(node: Node) -> bool:
    return isinstance(node.target, Leaf) and node.target.formula.op == "rms_norm"


def under_view(node: Node) -> Node | None:
    """What a [B, S, H, D] view is of, if that is [B, S, H D]."""
    if node.target not in (aten.view.default, aten.reshape.default, aten.unflatten.int):
        return None
    source: Any = node.args[0]
    return source if value(source).dim() == 3 and value(node).dim() == 4 else None


def _alike(q: _Head, k: _Head) -> bool:
    """Whether one op takes both."""
    if (q.seq_dim, q.across, q.flat) != (k.seq_dim, k.across, k.flat):
        return False
    if not same_size(value(q.x).shape[q.seq_dim], value(k.x).shape[k.seq_dim]):
        return False  # keys of another text
    if (q.norm is None) != (k.norm is None) or (q.rope is None) != (k.rope is None):
        return False
    if q.norm is not None and k.norm is not None:
        if q.norm.formula != k.norm.formula or q.norm.params[1] or k.norm.params[1]:
            return False
        if (q.norm.params[0] is None) != (k.norm.params[0] is None):
            return False
    a, b = q.rope, k.rope
    if a is not None and b is not None:
        return a._replace(base=b.base) == b
    return True


def _fuse_both(graph: Graph, q: _Head, k: _Head) -> str:
    given = (n for h in (q, k) if h.rope for n in (h.rope.cos, h.rope.sin) if n is not None)
    with behind(graph, q.x, k.x, *given):
        xs = [_plain_input(graph, h) for h in (q, k)]
        rot = rope_params(q.rope) if q.rope is not None else {}
        tables = tables_of(graph, q.rope) if q.rope is not None else (None, None)
        if q.norm is not None and k.norm is not None:
            weights = [
                None if h.norm.params[0] is None  # type: ignore[union-attr]
                else graph.call_function(Param(h.norm.path, h.norm.params[0]))  # type: ignore[union-attr]
                for h in (q, k)
            ]  # fmt: skip
            params = dict(q.norm.formula.params) | {
                "norm_across_heads": q.across, "seq_dim": q.seq_dim, **rot,
            }  # fmt: skip
            op, args = "qk_norm_rope", (*xs, *weights, *tables)
        else:
            params = {"seq_dim": q.seq_dim, **rot}
            op, args = "rope_qk", (*xs, *tables)
        both = graph.call_function(Fused(op, params), args)
        results = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        for head, result in zip((q, k), results, strict=True):
            _put(graph, head, result)
    return op


def _fuse_one(graph: Graph, head: _Head) -> str:
    """RoPE of q or k alone; a norm in front of it stays."""
    assert head.rope is not None
    base, _ = strip(head.rope.base)
    seq_dim = head.seq_dim
    source = head.x if head.norm is None else base
    with behind(graph, source, *(t for t in (head.rope.cos, head.rope.sin) if t is not None)):
        params = {"seq_dim": seq_dim, **rope_params(head.rope)}
        one = graph.call_function(Fused("rope", params), (source, *tables_of(graph, head.rope)))
        _put(graph, head, one)
    return "rope"


def tables_of(graph: Graph, found: Rope) -> tuple[Node, Node]:
    """What the op is given as tables."""
    made = _tables(graph, found)
    if not found.turned:
        return made
    cos, sin = (graph.call_function(aten.transpose.int, (t, 1, 2)) for t in made)
    for turned, table in ((cos, made[0]), (sin, made[1])):
        if is_tensor(table):
            turned.meta = {"val": value(table).transpose(1, 2)}
    return cos, sin


def _tables(graph: Graph, found: Rope) -> tuple[Node, Node]:
    if found.sin is None:
        made = [graph.call_function(Table(part=p), (found.cos,)) for p in ("real", "imag")]
        return made[0], made[1]
    base, cos = value(found.base), value(found.cos)
    if base.dim() == 3 and found.interleaved and same_size(base.shape[-1], cos.shape[-1]):
        # as large as q itself; each angle stands there twice
        made = [graph.call_function(Table(0, 2, True), (t,)) for t in (found.cos, found.sin)]
        return made[0], made[1]
    if not found.halves:
        return _whole_rows(graph, found.cos), _whole_rows(graph, found.sin)
    cut: list[Node] = []
    for table in (found.cos, found.sin):
        last, half = value(table).dim() - 1, value(table).shape[-1] // 2
        cut.append(graph.call_function(aten.slice.Tensor, (table, last, 0, half)))
        cut[-1].meta = {"val": value(table)[..., :half]}
    return cut[0], cut[1]


def _whole_rows(graph: Graph, table: Node) -> Node:
    """A table; where it is every second column of another one, made once a step."""
    if table.target is not aten.slice.Tensor or len(table.args) < 5:
        return table
    source, dim, start, _, step = table.args
    last = value(table).dim() - 1
    whole = fixed(value(source).shape[-1])
    columns = fixed(value(table).shape[-1])
    if dim not in (-1, last) or step != 2 or start not in (0, 1) or whole is None:
        return table
    if columns != len(range(start, whole, step)):  # type: ignore[call-overload]
        return table
    made = graph.call_function(Table(start, step, False), (source,))
    made.meta = dict(table.meta)
    return made


def rope_params(found: Rope) -> dict[str, Any]:
    return {
        "interleaved": found.interleaved,
        "rotary_dim": found.rotary_dim,
        "round_products": found.rounds,
    }


def _plain_input(graph: Graph, head: _Head) -> Node:
    """What the op is given: with a norm over all heads, a view of what the norm was of."""
    if not head.across or head.flat:
        return head.x
    norm: Any = head.x.args[0]
    made = graph.call_function(head.x.target, (norm.args[0], *head.x.args[1:]), head.x.kwargs)  # type: ignore[arg-type]
    made.meta = dict(head.x.meta)
    return made


def _put(graph: Graph, head: _Head, result: Node) -> None:
    """Use the op's result, [B, S, H, D] or [B, H, S, D], for what attention is given."""
    result.meta = dict(head.x.meta)
    if value(head.x).dtype != value(head.out).dtype:  # the rotation was followed by a cast
        result = graph.call_function(aten.to.dtype, (result, value(head.out).dtype))
        result.meta = dict(head.x.meta)
    if head.seq_dim == 1 and not head.flat:
        result = graph.call_function(aten.transpose.int, (result, 1, 2))
    result.meta = dict(head.out.meta)
    head.out.replace_all_uses_with(result)


@contextmanager
def behind(graph: Graph, *nodes: Node) -> Iterator[None]:
    """What is inserted stands behind the last of these nodes, in its order."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_after(max(nodes, key=order.__getitem__)):
        anchor = graph.call_function(operator.getitem, ((None,), 0))  # a place to write before
    with graph.inserting_before(anchor):
        yield
    graph.erase_node(anchor)


def rope_of(node: Any) -> Rope | None:
    """The form of RoPE that a node is the result of, if it is one."""
    if not is_tensor(node) or value(node).dim() not in (3, 4):
        return None
    piece = _piece(node)
    if piece is None:
        return None
    base, tables, inside = piece
    if not tables or not 0 < len(inside) <= 64:
        return None
    width = fixed(value(base).shape[-1])
    rotary = fixed(value(tables[0]).shape[-1])
    if width is None or rotary is None:
        return None
    rounds = any(
        n.target is aten.mul.Tensor and value(n).dtype == value(base).dtype != torch.float32
        for n in inside
    )
    if len(tables) == 1 and value(tables[0]).is_complex():
        found = Rope(base, tables[0], None, True, 0 if 2 * rotary == width else 2 * rotary, rounds)
        return found if 2 * rotary <= width and _gives(node, found, 1) else None
    if len(tables) != 2:
        return None
    halves = any(_half_of(a) is not None for n in inside for a in n.all_input_nodes)
    # whether pairs are turned, which table is of cosines, whether each angle is there twice
    for interleaved, swapped, share in itertools.product((False, True), (False, True), (1, 2)):
        dims = rotary * share
        if dims > width or dims % 2 or (halves and share == 2):
            continue
        cos, sin = tables[::-1] if swapped else tables
        whole = 0 if dims == width else dims
        found = Rope(base, cos, sin, interleaved, whole, rounds, halves)
        if _gives(node, found, share):
            return found
    return None


def _piece(node: Node) -> tuple[Node, list[Node], list[Node]] | None:
    """From the one tensor of as many dimensions that a result depends on and the tables it is made
    with: (that tensor, tables, the nodes between)."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    known: dict[Node, bool] = {}

    def on_heads(n: Node) -> bool:
        """Whether a node depends on a projection."""
        if n not in known:
            known[n] = isinstance(n.target, (Call, Leaf, Fused)) or any(
                on_heads(a)
                for a in n.all_input_nodes
                if is_tensor(a) or isinstance(value(a), (tuple, list))  # as of `unbind`
            )
        return known[n]

    inside: set[Node] = set()
    tables: dict[Node, None] = {}
    frontier: dict[Node, None] = {}
    left = [node]
    while left:
        n = left.pop()
        if n in inside or n in frontier:
            continue
        made_of = [a for a in n.all_input_nodes if is_tensor(a) or a.target is operator.getitem]
        tensors = list(n.all_input_nodes)
        heads = [a for a in made_of if on_heads(a)]
        others = [a for a in tensors if is_tensor(a) and not on_heads(a)]
        if isinstance(n.target, (Call, Leaf, Fused, Attend, CacheUpdate)) or not heads:
            frontier[n] = None
            continue
        if not _passes_table(n, on_heads):
            frontier[n] = None
            continue
        inside.add(n)
        for other in others:
            tables[_table(other)] = None
        left += heads
    base = _base(list(frontier), value(node).dim())
    if base is None or node in frontier:
        return None
    # what lies between the base and the frontier are views of it
    members = {n for n in order if n in inside} | _between(base, frontier)
    return base, list(tables), sorted(members, key=order.__getitem__)


def _passes_table(n: Node, on_heads: Any) -> bool:
    """Whether a node, or one that it is made of, is made with a table too."""
    seen: set[Node] = set()
    left = [n]
    while left:
        m = left.pop()
        if m in seen or isinstance(m.target, (Call, Leaf, Fused)):
            continue
        seen.add(m)
        heads = [a for a in m.all_input_nodes if on_heads(a)]
        if heads and any(is_tensor(a) and not on_heads(a) for a in m.all_input_nodes):
            return True
        left += heads
    return False


_TABLE_VIEWS = (
    *(aten.unsqueeze.default, aten.to.dtype, aten._to_copy.default),
    *(aten.expand.default, aten.alias.default, aten.to.device),
)


def _table(node: Node) -> Node:
    """A table as the block was given it, [B, S, W] or [S, W], behind unsqueezes; also that of which
    the first half of the columns is repeated."""
    half = _half_of(node)
    if half is not None:
        node = half
    while node.target in _TABLE_VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _half_of(node: Node) -> Node | None:
    """The table of which a node is `table[..., : width // 2].repeat_interleave(2, -1)`."""
    if node.target is not aten.repeat_interleave.self_int:
        return None
    cut, times, dim = (*node.args, None)[:3]
    if not isinstance(cut, Node) or cut.target is not aten.slice.Tensor or times != 2:
        return None
    table, last = cut.args[0], value(cut).dim() - 1
    if not isinstance(table, Node) or dim not in (-1, last) or cut.args[1] not in (-1, last):
        return None
    width, kept = fixed(value(table).shape[-1]), fixed(value(cut).shape[-1])
    starts = len(cut.args) < 3 or cut.args[2] in (None, 0)
    return table if width is not None and kept == width // 2 and starts else None


_PIECE_VIEWS = frozenset(
    {
        *(aten.slice.Tensor, aten.chunk.default, aten.split.Tensor, operator.getitem),
        *(aten.split_with_sizes.default, aten.to.dtype, aten._to_copy.default, aten.neg.default),
        *(aten.unbind.int, aten.select.int, aten.cat.default, aten.stack.default),
        *(aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.clone.default),
        *(aten.split.sizes, aten.contiguous.default),
        *(aten.view_as_complex.default, aten.view_as_real.default),
    }
)


#: Of these the rotation is, as far as its kernel goes, that of what they are made of.
_SAME_VALUES = (
    *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default),
)


def _base(frontier: list[Node], dims: int) -> Node | None:
    """The whole heads that pieces were cut from: the last tensor of `dims` dimensions of which all
    are views."""
    chains = [_made_of(f) for f in frontier]
    shared = set(chains[0]).intersection(*chains[1:]) if chains else set()
    for node in chains[0] if chains else ():
        if node not in shared or node.target in _SAME_VALUES:
            continue
        if is_tensor(node) and value(node).dim() == dims and not value(node).is_complex():
            return node
    return None


def _made_of(node: Node) -> list[Node]:
    """A node and those that it is a view or a copy of, one after the other."""
    chain = [node]
    while node.target in _PIECE_VIEWS:
        source = node.args[0]
        if isinstance(source, (list, tuple)):
            source = source[0]
        if not isinstance(source, Node):
            break
        node = source
        chain.append(node)
    return chain


def _between(base: Node, frontier: Any) -> set[Node]:
    found: set[Node] = set()
    left = [f for f in frontier if f is not base]
    while left:
        n = left.pop()
        if n is base or n in found:
            continue
        found.add(n)
        left += [a for a in n.all_input_nodes if is_tensor(a) or a.target is operator.getitem
                 or isinstance(value(a), (tuple, list))]  # fmt: skip
    return found


def _as_many(node: Node, base: Node) -> bool:
    """Whether two tensors of heads have the same sizes, tokens and heads exchanged or not."""
    a, b = value(node).shape, value(base).shape
    exchanged = (b[0], *b[2:0:-1], *b[3:])
    return len(a) == len(b) and any(all(map(same_size, a, s)) for s in (b, exchanged))


def _gives(node: Node, form: Rope, share: int) -> bool:
    """Whether the piece computes this form, in fp64 on random numbers; `share`: how many of the
    columns that are turned have one column of the tables."""
    if not _as_many(node, form.base):  # a part of the tokens, of which random ones may be all
        return False
    sizes = Sizes()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.shape(value(form.base)), generator=generator, dtype=torch.float64)
    dims, shape = form.rotary_dim or x.shape[-1], sizes.shape(value(form.cos))
    angles = torch.randn(*shape[:-1], dims // 2, generator=generator, dtype=torch.float64)
    if form.halves:  # what the others are must not matter
        angles = torch.cat((angles, torch.randn_like(angles)), -1)
    elif share == 1 and form.sin is not None:
        angles = (
            angles.repeat_interleave(2, -1) if form.interleaved else torch.cat((angles, angles), -1)
        )
    given = {form.base: x, form.cos: angles.cos()}
    if form.sin is None:
        given[form.cos] = torch.polar(torch.ones_like(angles), angles)
    else:
        given[form.sin] = angles.sin()
    try:
        theirs = evaluate(node, given, sizes)
    except Exception:  # an operator that the interpreter cannot run so: no such form
        return False
    columns = dims // 2 if form.halves else None
    c = given[form.cos][..., :columns]
    d = None if form.sin is None else given[form.sin][..., :columns]
    for seq_dim in (1, 2):  # sizes differ, so that one of them fits
        try:
            ours = rope(x, c, d, seq_dim, form.interleaved, form.rotary_dim)
        except Exception:  # the tables do not fit
            continue
        if ours.shape != theirs.shape:
            ours = ours.transpose(1, 2)
        if ours.shape == theirs.shape and bool((ours - theirs).abs().max() < 1e-9):
            return True
    return False
