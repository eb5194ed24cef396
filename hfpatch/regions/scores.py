"""Attention that code writes out: products, a cap, biases, softmax.

`softmax(cap · tanh(scale · q kᵀ / cap) + bias + mask) v` in any order of its scalings becomes one
`Attend`. What is found is compared in a wider dtype with what was there, as all rewrites are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from hfpatch.regions.nodes import Attend, Constant, fixed, is_tensor, same_size, same_sizes, value

aten: Any = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)
_SOFTMAX = (aten.softmax.int, aten.special_softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
#: In the `meta` of an attention that stands for a softmax: what was added to its scores.
TERMS = "hfpatch_terms"


@dataclass(frozen=True)
class _Scores:
    """`cap · tanh(scale · q kt / cap) + Σ weight · term`; `open`: a tanh that no cap scales yet."""

    q: Node
    kt: Node
    scale: float = 1.0
    cap: float | None = None
    terms: tuple[tuple[Node, float], ...] = ()
    open: bool = False


def written_out(graph: Graph) -> Iterator[str]:
    """Put an `Attend` in the place of attention in products and a softmax."""
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS:
            continue
        weights, v = node.args[:2]
        softmax = _uncast(weights)
        if softmax is None or softmax.target not in _SOFTMAX or not is_tensor(v):
            continue
        if softmax.args[1] not in (-1, value(softmax).dim() - 1):
            continue
        scores = _scores(softmax.args[0])
        if scores is None or scores.open or not _fits(scores, v, node):
            continue
        with graph.inserting_before(node):
            k = _transposed(graph, scores.kt)
            fewer = unrepeated(k), unrepeated(v)
            if None not in fewer:
                k, v = fewer  # type: ignore[assignment]
            mask = _sum(graph, scores.terms)
            target = Attend(False, scores.scale, scores.cap)
            new = graph.call_function(target, (scores.q, k, v, mask))
        new.meta = {**node.meta, TERMS: [t for t, _ in scores.terms]}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        _reshape_behind(new)
        yield "attention" if scores.cap is None else "attention with capped scores"


def _uncast(node: Any) -> Node | None:
    """What is cast, of tensors that nothing else reads."""
    while isinstance(node, Node) and len(node.users) == 1 and node.target in _CASTS:
        node = node.args[0]
    return node if isinstance(node, Node) and len(node.users) == 1 else None


def _scores(node: Any) -> _Scores | None:
    """What a tensor of scores is, if it is read by one node alone, as all on its way is."""
    node = _uncast(node)
    if node is None or not is_tensor(node) or not value(node).is_floating_point():
        return None
    if node.target in _PRODUCTS:
        q, kt = node.args[:2]
        return _Scores(q, kt) if is_tensor(q) and is_tensor(kt) else None  # type: ignore[arg-type]
    if node.target is aten.tanh.default:
        found = _scores(node.args[0])
        if found is None or found.open or found.cap is not None or found.terms:
            return None
        return replace(found, open=True)
    if node.kwargs or len(node.args) != 2:
        return None
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        by = number_of(node.args[1])
        found = None if not by else _scores(node.args[0])
        if found is None or not by:
            return None
        return _scaled(found, by if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / by)
    if node.target is aten.add.Tensor:
        for scores, term in (node.args, node.args[::-1]):
            if not is_tensor(term) or not is_tensor(scores):
                continue
            if not same_sizes(scores, node) or (found := _scores(scores)) is None or found.open:
                continue
            return replace(found, terms=(*found.terms, (term, 1.0)))  # type: ignore[arg-type]
    return None


def _scaled(found: _Scores, by: float) -> _Scores | None:
    if found.open:
        return replace(found, scale=found.scale * by, cap=by, open=False) if by > 0 else None
    if found.cap is not None:
        return None  # a cap of another size is no cap of these scores
    terms = tuple((t, w * by) for t, w in found.terms)
    return replace(found, scale=found.scale * by, terms=terms)


def number_of(held: Any) -> float | None:
    """A number, or the tensor of one element that code made of one."""
    if isinstance(held, Node):
        if held.target in (aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype):
            return number_of(held.args[0])
        if not isinstance(held.target, Constant) or held.target.tensor.numel() != 1:
            return None
        held = held.target.tensor.item()
    if type(held) not in (int, float) or not math.isfinite(held):
        return None
    return float(held)


def _fits(scores: _Scores, v: Any, out: Node) -> bool:
    """Whether shapes and dtypes are those of attention: [B, H, S, D] with as many keys as values,
    or one head of keys and values for all queries."""
    q, kt, values = value(scores.q), value(scores.kt), value(v)
    if not q.dim() == kt.dim() == values.dim() == value(out).dim() == 4:
        return False
    if not q.dtype == kt.dtype == values.dtype == value(out).dtype:
        return False
    if not (same_size(q.shape[0], kt.shape[0]) and same_size(q.shape[0], values.shape[0])):
        return False
    heads, of_keys = q.shape[1], kt.shape[1]
    if not same_size(of_keys, values.shape[1]):
        return False
    if not same_size(heads, of_keys) and fixed(of_keys) != 1:
        return False
    return all(2 <= value(t).dim() <= 4 and value(t).dtype == q.dtype for t, _ in scores.terms)


def _transposed(graph: Graph, kt: Node) -> Node:
    """Keys [B, H, S, D] of [B, H, D, S]."""
    if kt.target is aten.transpose.int:
        dims = sorted(d % 4 for d in kt.args[1:3])  # type: ignore[operator]
        if dims == [2, 3]:
            return kt.args[0]  # type: ignore[return-value]
    if kt.target is aten.permute.default and list(kt.args[1]) == [0, 1, 3, 2]:  # type: ignore[arg-type]
        return kt.args[0]  # type: ignore[return-value]
    if kt.target is aten.permute.default and list(kt.args[1]) == [0, 2, 3, 1]:  # type: ignore[arg-type]
        made = graph.call_function(aten.transpose.int, (kt.args[0], 1, 2))
    else:
        made = graph.call_function(aten.transpose.int, (kt, 2, 3))
    made.meta["val"] = value(kt).transpose(2, 3)
    return made


def _sum(graph: Graph, terms: tuple[tuple[Node, float], ...]) -> Node | None:
    total: Node | None = None
    for term, weight in terms:
        if weight != 1.0:
            scaled = graph.call_function(aten.mul.Tensor, (term, weight))
            scaled.meta["val"] = value(term)
            term = scaled
        if total is None:
            total = term
            continue
        both = graph.call_function(aten.add.Tensor, (total, term))
        both.meta["val"] = value(total) + value(term)
        total = both
    return total


def _reshape_behind(attention: Node) -> None:
    """Views of the result: attention's kernels lay it out otherwise than a product does."""
    left = [attention]
    while left:
        for user in left.pop().users:
            if user.target is aten.view.default:
                user.target = aten.reshape.default
            elif user.target in (aten.transpose.int, aten.permute.default):
                left.append(user)


def unrepeated(node: Any) -> Node | None:
    """What [B, H, S, D] keys are before each head is written several times in a row."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.transpose.int:  # [B, S, H, D] were repeated
        return _unrepeated_rows(node)
    if node.target not in (aten.reshape.default, aten.view.default):
        return None
    source: Any = node.args[0]
    if source.target is aten.clone.default:
        source = source.args[0]
    if source.target is not aten.expand.default or value(source).dim() != 5:
        return None
    one = source.args[0]
    if one.target is not aten.unsqueeze.default or one.args[1] not in (2, -3):
        return None
    base = one.args[0]
    return base if _repeats(base, node, 1) else None


def _unrepeated_rows(node: Node) -> Node | None:
    """The same of `x.unsqueeze(3).repeat(1, 1, 1, n, 1).flatten(2, 3).transpose(1, 2)`."""
    flat: Any = node.args[0]
    if sorted(d % 4 for d in node.args[1:3]) != [1, 2] or value(node).dim() != 4:  # type: ignore
        return None
    if flat.target is not aten.flatten.using_ints or list(flat.args[1:]) != [2, 3]:
        return None
    source = flat.args[0]
    one: Any = source.args[0] if source.target is aten.repeat.default else None
    if one is None or one.target is not aten.unsqueeze.default or one.args[1] not in (3, -2):
        return None
    base = one.args[0]
    times = list(source.args[1])
    if [t for i, t in enumerate(times) if i != 3] != [1] * 4 or not _repeats(base, flat, 2):
        return None
    with node.graph.inserting_before(node):
        seen = node.graph.call_function(aten.transpose.int, (base, 1, 2))
    seen.meta = {**node.meta, "val": value(base).transpose(1, 2)}
    return seen


def _repeats(base: Node, node: Node, dim: int) -> bool:
    """Whether a 4-D tensor has a whole number of another one's heads, which stand at `dim`."""
    wide, narrow = value(node).shape, value(base).shape
    if value(base).dim() != 4 or len(wide) != 4:
        return False
    many, few = fixed(wide[dim]), fixed(narrow[dim])
    return many is not None and bool(few) and many % few == 0  # type: ignore[operator]
