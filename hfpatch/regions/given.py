"""What a rewritten block takes for granted of the numbers in its inputs, and must look at.

A kernel reads one half of RoPE tables that hold each value twice. Attention's kernels give 0 where
a softmax over nothing but -inf gives NaN. What the graph itself makes so needs no look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from hfpatch.leaves.tables import hold_twice, rows_are_open, without_inf
from hfpatch.regions.capture import Uncapturable
from hfpatch.regions.nodes import (
    Attend,
    Constant,
    Fused,
    JoinedHeads,
    Table,
    fixed,
    is_tensor,
    value,
)
from hfpatch.regions.scores import TERMS

Tensor = torch.Tensor
aten: Any = torch.ops.aten

_ROPES = ("rope", "rope_qk", "qk_norm_rope")
#: What leaves each row's columns as they are, or does the same to each of them.
_BY_ELEMENT = frozenset(
    {
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default, aten.clone.default),
        *(aten.to.dtype, aten._to_copy.default, aten.to.device, aten.contiguous.default),
        *(aten.cos.default, aten.sin.default, aten.neg.default, aten.detach.default),
    }
)
_BY_NUMBER = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar})


#: Of a call's tensors: whether they are such.
Look = Callable[[list[Tensor]], bool]


def looks(graph: Graph) -> tuple[Look, Look]:
    """Functions of a call's tensors: whether all are such, and whether its tables of RoPE are.

    Raises:
        Uncapturable: of tables that are made in the block it cannot be told.
    """
    inputs = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    twice: dict[bool, set[int]] = {False: set(), True: set()}  # by whether pairs are interleaved
    rows: set[int] = set()
    never: set[int] = set()
    for node in graph.nodes:
        turns = _turns_of(node.target)
        if turns is not None:
            interleaved = bool(turns.get("interleaved"))
            for table in _doubled(node):
                source = _source_of_table(table)
                if source in inputs:
                    twice[interleaved].add(inputs[source])
                elif source is not None:
                    raise Uncapturable(f"it makes its RoPE tables by `{source.target}`")
        for term in node.meta.get(TERMS, ()) if isinstance(node.target, Attend) else ():
            for source, whole in _sources_of_term(term):
                if source in inputs:
                    (rows if whole else never).add(inputs[source])
    by_halves, by_pairs = (partial(hold_twice, interleaved=pairs) for pairs in (False, True))
    tables: list[tuple[Look, set[int]]] = [(by_halves, twice[False]), (by_pairs, twice[True])]
    return _all([*tables, (rows_are_open, rows), (without_inf, never)]), _all(tables)


def _all(asked: Iterable[tuple[Look, set[int]]]) -> Look:
    questions = [(ask, tuple(of)) for ask, of in asked if of]
    return lambda tensors: all(ask([tensors[i] for i in of]) for ask, of in questions)


def _turns_of(target: Any) -> Mapping[str, Any] | None:
    """The parameters of an op that turns heads."""
    if isinstance(target, JoinedHeads):
        return target.norm_rope.formula.params
    return target.formula.params if isinstance(target, Fused) and target.op in _ROPES else None


def _doubled(node: Node) -> Iterator[Node]:
    """The tables of a rotation that are as wide as the columns it turns."""
    target, args = node.target, node.args
    turns: Any = _turns_of(target)
    if isinstance(target, JoinedHeads):
        parts, last = args
        tables = [t for pair in (*(p[3:] for p in parts), last) for t in pair]  # type: ignore
        width = turns.get("rotary_dim") or target.width
    else:
        tables = list(args[-2:])
        width = turns.get("rotary_dim") or fixed(value(args[0]).shape[-1])
    for table in tables:
        if isinstance(getattr(table, "target", None), Table):
            if table.target.doubled:
                yield table.args[0]
        elif is_tensor(table) and fixed(value(table).shape[-1]) == width:
            yield table


def _source_of_table(node: Node) -> Node | None:
    """The node whose columns a table's are in turn; None where it is made of twice the same."""
    while True:
        target, args = node.target, node.args
        if target is aten.repeat_interleave.self_int:
            return None
        if target is aten.cat.default and len(set(args[0])) == 1:  # type: ignore[arg-type]
            return None
        by_number = target in _BY_NUMBER and not _is_wide(args[1])
        if (
            target is aten.transpose.int
            and value(node).dim() - 1 not in args[1:]
            and -1 not in args
        ):
            node = args[0]  # type: ignore[assignment]
            continue
        if not (by_number or target in _BY_ELEMENT or target is aten.expand.default):
            return node
        node = args[0]  # type: ignore[assignment]


def _is_wide(held: Any) -> bool:
    return isinstance(held, Node) and is_tensor(held) and value(held).numel() != 1


def _sources_of_term(node: Any) -> Iterator[tuple[Node, bool]]:
    """(input, whether its rows are the term's rows) of what is added to scores."""
    whole, left = True, [node]
    seen: set[Node] = set()
    while left:
        n = left.pop()
        if n in seen or not isinstance(n, Node) or isinstance(n.target, Constant):
            continue
        seen.add(n)
        if n.op == "placeholder":
            if is_tensor(n) and value(n).is_floating_point():
                yield n, whole
            continue
        if n.target is aten.slice.Tensor:
            last = value(n).dim() - 1
            dim = n.args[1] if len(n.args) > 1 else 0
            whole = whole and dim not in (-1, last)
        elif n.target not in _BY_ELEMENT and n.target is not aten.expand.default:
            whole = False
        left += n.all_input_nodes
