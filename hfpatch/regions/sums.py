"""Rows of the table of rewrites: residual sums, norms, and what modulates them (AdaLN, gates).

Each looks for one pattern and gives what it found, or None. What is computed in fp32 of half
tensors and rounded back, as models with fp32 modulations write it, is one op on the half tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Node

from hfpatch.proof.subject import Formula
from hfpatch.regions.nodes import (
    Filled,
    Fused,
    Leaf,
    Param,
    fixed,
    is_cast,
    is_tensor,
    replace,
    replace_by,
    same_shape,
    same_size,
    same_sizes,
    value,
)

aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Norm(NamedTuple):
    """A norm over the last dimension, called as a leaf or as PyTorch's function.

    `params()` makes nodes of its weight and bias.
    """

    op: str
    settings: dict[str, Any]
    x: Node
    params: Callable[[], tuple[Any, Any]]


def norm_of(node: Node) -> Norm | None:
    """The norm that a node is."""
    target, graph = node.target, node.graph
    if isinstance(target, Leaf) and target.formula.op in ("rms_norm", "layer_norm"):
        path, names = target.path, target.params

        def params() -> tuple[Any, Any]:
            weight, bias = (
                None if n is None else graph.call_function(Param(path, n)) for n in names
            )
            return weight, bias

        x: Any = node.args[0]
        return Norm(target.formula.op, dict(target.formula.params), x, params)
    if target is aten.layer_norm.default:
        x, shape, weight, bias, eps = (*node.args, *(None,) * 5)[:5]
        if len(shape) != 1:  # type: ignore[arg-type]
            return None
        if not all(
            w is None or isinstance(getattr(w, "target", None), Param) for w in (weight, bias)
        ):
            return None

        def given() -> tuple[Any, Any]:
            return tuple(  # type: ignore[return-value]
                None if w is None else graph.call_function(w.target) for w in (weight, bias)
            )

        return Norm("layer_norm", {"eps": 1e-5 if eps is None else eps}, x, given)
    return None


def _modulated_as(norm: Norm) -> dict[str, Any] | None:
    """The settings of `norm_modulate` for a norm, but where it rounds."""
    if norm.settings.get("weight_offset"):
        return None
    return {"eps": norm.settings["eps"], "norm": "rms" if norm.op == "rms_norm" else "layer"}


class Rounded(NamedTuple):
    """A result in fp32 that is rounded at once: `place` is the cast, `of` what was widened."""

    place: Node
    of: list[Node]


def _rounded(node: Node, *wide: Any) -> Rounded | None:
    """What a node of fp32 is rounded to, where nobody else reads it and `wide` are half tensors of
    that dtype, widened."""
    if len(node.users) != 1 or value(node).dtype != torch.float32:
        return None
    (place,) = node.users
    if not is_cast(place) or value(place).dtype not in _HALF:
        return None
    found = [_unwidened(w, value(place).dtype) for w in wide]
    return None if None in found else Rounded(place, found)  # type: ignore[arg-type]


def _unwidened(node: Any, dtype: torch.dtype) -> Node | None:
    """A tensor of this dtype that a node is, in fp32."""
    if not is_cast(node) or value(node).dtype != torch.float32:
        return None
    source: Any = node.args[0]
    return source if is_tensor(source) and value(source).dtype == dtype else None


def _product_and_term(node: Node) -> Iterator[tuple[Node, Node]]:
    """The ways to read a node as `product + term`, whose product nobody else reads."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return
    for product, term in (node.args, node.args[::-1]):
        if not (is_tensor(product) and is_tensor(term)):
            continue
        if product.target is aten.mul.Tensor and len(product.users) == 1:  # type: ignore[union-attr]
            yield product, term  # type: ignore[misc]


def is_modulation(node: Any, like: Node) -> bool:
    """Whether a tensor has one value per column, or per sample and column, of a [B, ..., D] one."""
    m, x = value(node), value(like)
    if not is_tensor(node) or x.dim() < 2 or not 1 <= m.dim() <= x.dim() or m.dtype != x.dtype:
        return False
    if not same_size(m.shape[-1], x.shape[-1]):
        return False
    if m.dim() == 1:
        return True
    lead = (1,) * (x.dim() - m.dim()) + tuple(m.shape[:-1])
    return all(fixed(s) == 1 for s in lead[1:]) and (
        same_size(lead[0], x.shape[0]) or fixed(lead[0]) == 1
    )


def of_samples(modulation: Node, like: Node) -> Node:
    """A modulation as ops take it: [B, D] where a dimension was put between for the sum."""
    if modulation.target is not aten.unsqueeze.default or value(like).dim() != 3:
        return modulation
    source: Any = modulation.args[0]
    return source if value(source).dim() == 2 and modulation.args[1] in (1, -2) else modulation


def _factor_and_scaled(
    product: Node, like: Node, half: torch.dtype | None = None
) -> tuple[Node, Node] | None:
    """`factor` and `y` of `factor * y`: values per column, and a tensor of this shape; with `half`
    a tensor of that dtype, also where it is widened before the product."""
    for y, factor in (product.args, product.args[::-1]):
        if not is_modulation(factor, like) or not is_tensor(y) or not same_sizes(y, like):
            continue
        factor = of_samples(factor, like)  # type: ignore[arg-type]
        if half is None and value(y).dtype == value(like).dtype:
            return factor, y  # type: ignore[return-value]
        if half is not None:
            narrow = y if value(y).dtype == half else _unwidened(y, half)
            if narrow is not None:
                return factor, narrow  # type: ignore[return-value]
    return None


def _less_one(node: Any) -> Node | None:
    """`scale` of `1 + scale`, also where that was given a dimension behind."""
    if not isinstance(node, Node) or node.kwargs:
        return None
    if node.target is aten.unsqueeze.default and len(node.args[0].users) == 1:  # type: ignore[union-attr]
        scale = _less_one(node.args[0])
        if scale is None:
            return None
        with node.graph.inserting_before(node):
            seen = node.graph.call_function(node.target, (scale, *node.args[1:]))
        seen.meta = dict(node.meta)
        return seen
    if node.target is not aten.add.Tensor:
        return None
    for scale, one in (node.args, node.args[::-1]):
        if isinstance(scale, Node) and is_tensor(scale) and type(one) in (int, float) and one == 1:
            return scale
    return None


def modulated_norm(node: Node) -> str | None:
    """`norm(x) * (1 + scale) + shift` (AdaLN)."""
    for product, shift in _product_and_term(node):
        if not is_modulation(shift, node):
            continue
        found = _scaled(product, node)
        if found is None:
            continue
        norm, settings, scale = found
        half = _rounded(node, norm.x)
        place, x = (node, norm.x) if half is None else (half.place, half.of[0])
        settings["cast"] = "input" if half is None else "none"
        with node.graph.inserting_before(place):
            weight, bias = norm.params()
        given = x, scale, of_samples(shift, node), weight, bias
        replace(place, Fused("norm_modulate", settings), given)
        return "norm_modulate"
    return None


def scaled_norm(node: Node) -> str | None:
    """`norm(x) * (1 + scale)`: the modulation of a norm that nothing is added to."""
    if node.target is not aten.mul.Tensor:
        return None
    found = _scaled(node, node)
    if found is None:
        return None
    norm, settings, scale = found
    with node.graph.inserting_before(node):
        weight, bias = norm.params()
        none = node.graph.call_function(Filled(0.0, value(scale).dtype), (norm.x,))
    settings["cast"] = "input"
    replace(node, Fused("norm_modulate", settings), (norm.x, scale, none, weight, bias))
    return "norm_modulate"


def _scaled(product: Node, like: Node) -> tuple[Norm, dict[str, Any], Node] | None:
    """Of `norm * (1 + scale)`, of this shape: the norm, its settings as `norm_modulate`'s, and the
    scale."""
    for normed, one in (product.args, product.args[::-1]):
        norm = norm_of(normed) if _is_modulated(normed) else None
        settings = None if norm is None else _modulated_as(norm)
        if norm is None or settings is None or not same_shape(normed, like):  # type: ignore[arg-type]
            continue
        scale = _less_one(one)
        if scale is not None and is_modulation(scale, like):
            return norm, settings, of_samples(scale, like)
    return None


def _is_modulated(normed: Any) -> TypeGuard[Node]:
    """Whether a node is only read by products: by several where a block modulates one norm twice,
    which costs less than to write the norm and read it twice."""
    return isinstance(normed, Node) and all(u.target is aten.mul.Tensor for u in normed.users)


def scaled_residual(node: Node) -> str | None:
    """`x + gate * y`: gates of AdaLN, LayerScale."""
    for product, x in _product_and_term(node):
        if not same_shape(x, node):
            continue
        half = _rounded(node, x)
        pair = None if half is None else _factor_and_scaled(product, node, value(half.place).dtype)
        if half is not None and pair is not None:
            replace(half.place, Fused("gate_residual", {"cast": "none"}), (half.of[0], *pair))
            return "gate_residual"
        pair = _factor_and_scaled(product, node)
        if pair is not None:
            replace(node, Fused("gate_residual", {"cast": "input"}), (x, *pair))
            return "gate_residual"
    return None


def normed_sum(node: Node) -> str | None:
    """`x + norm(y)`, and `x + gate * norm(y)` of one sample: norms behind attention and MLP. It is
    the modulation of a norm with the residual in the place of the shift."""
    gate: Any = None
    if node.target is aten.add.Tensor and not node.kwargs:
        ways: tuple[Any, ...] = (node.args, node.args[::-1])
    elif _is_fused(node, "gate_residual") and node.target.formula.params["cast"] == "input":  # type: ignore[union-attr]
        x, gate, y = node.args
        ways = ((x, y),)
        if any(fixed(n) != 1 for n in value(gate).shape[:-1]):
            return None
    else:
        return None
    for x, normed in ways:
        norm = norm_of(normed) if isinstance(normed, Node) and len(normed.users) == 1 else None
        settings = None if norm is None else _modulated_as(norm)
        if norm is None or settings is None or not is_tensor(x) or value(node).dim() < 2:
            continue
        if not all(same_shape(t, node) for t in (x, normed, norm.x)):
            continue
        graph = node.graph
        with graph.inserting_before(node):
            weight, bias = norm.params()
            if gate is not None:
                if bias is not None:
                    return None
                one = graph.call_function(aten.reshape.default, (gate, [-1]))
                weight = (
                    one if weight is None else graph.call_function(aten.mul.Tensor, (one, weight))
                )
            none = graph.call_function(Filled(0.0, value(x).dtype), (x,))
        settings["cast"] = "none"
        replace(node, Fused("norm_modulate", settings), (norm.x, none, x, weight, bias))
        return "norm + sum"
    return None


def summed_norm(node: Node) -> str | None:
    """A residual sum and the norm of it, where one of them is modulated: `x + gate * y` and the
    norm of that, as blocks of diffusion transformers have them between attention and MLP."""
    found = _norm_of_sum(node)
    if found is None:
        return None
    total, place, settings, modulation, way = found
    if _is_fused(total, "gate_residual"):
        x, gate, y = total.args
        settings["cast"] = _loosest(settings.get("cast"), total.target.formula.params["cast"])  # type: ignore[union-attr]
        wide = value(gate).dtype
    elif modulation and total.target is aten.add.Tensor and not total.kwargs:
        (x, y), gate = total.args, None
        if not all(is_tensor(a) and same_shape(a, total) for a in (x, y)):
            return None
        wide = value(modulation[0]).dtype
    else:
        return None
    given = [n for n in (x, gate, y, *modulation) if n is not None]
    before = _place_of_both(total, place, given, way)
    if before is None:
        return None
    graph = node.graph
    with graph.inserting_before(before):
        if gate is None:  # 1 * y is exact, and so are x * (1 + 0) and x + 0
            gate = graph.call_function(Filled(1.0, wide), (x,))
        if not modulation:
            none = graph.call_function(Filled(0.0, wide), (x,))
            modulation = [none, none, *norm_of(node).params()]  # type: ignore[union-attr]
        op = "gate_residual_norm_modulate"
        both = graph.call_function(Fused(op, settings), (x, gate, y, *modulation))
        summed = graph.call_function(operator.getitem, (both, 0))
        normed = graph.call_function(operator.getitem, (both, 1))
    replace_by(total, summed)
    replace_by(place, normed)
    return op


def _norm_of_sum(node: Node) -> tuple[Node, Node, dict[str, Any], list[Any], Node] | None:
    """Of a norm: what it is of, the node whose value it is in the end, its settings as
    `norm_modulate`'s, scale, shift, weight and bias where it is modulated, and who reads the sum
    for it."""
    if _is_fused(node, "norm_modulate"):
        total, *modulation = node.args
        return total, node, dict(node.target.formula.params), modulation, node  # type: ignore
    norm = norm_of(node)
    settings = None if norm is None else _modulated_as(norm)
    if norm is None or settings is None or norm.settings.get("cast", "none") != "none":
        return None
    half = _rounded(node, norm.x)
    if half is not None:
        return half.of[0], half.place, settings | {"cast": "none"}, [], norm.x
    if value(node).dtype != value(norm.x).dtype:
        return None
    return norm.x, node, settings, [], node


def _loosest(of_norm: str | None, of_sum: str) -> str:
    """Where both round: once, if one of them does."""
    return "none" if "none" in (of_norm, of_sum) else "input"


def _place_of_both(total: Node, place: Node, given: list[Any], way: Node) -> Node | None:
    """Where one op can stand for a sum and its norm, which reads the sum by `way`: all that it is
    given is there before, all who read either come behind."""
    order = {n: i for i, n in enumerate(total.graph.nodes)}
    if all(order[n] < order[total] for n in given):
        return total
    others = [order[user] for user in total.users if user is not way]
    return place if all(at > order[place] for at in others) else None


def _is_fused(node: Any, op: str) -> TypeGuard[Node]:
    return isinstance(node, Node) and isinstance(node.target, Fused) and node.target.op == op


def residual_norm(node: Node) -> str | None:
    """A sum of two tensors of one shape, and the norm of it."""
    norm = norm_of(node)
    if norm is None:
        return None
    half = _rounded(node, norm.x) if norm.op == "layer_norm" else None
    total, place = (norm.x, node) if half is None else (half.of[0], half.place)
    if (
        not isinstance(total, Node)
        or total.target is not aten.add.Tensor
        or total.kwargs
        or not all(is_tensor(a) and same_shape(a, total) for a in total.args)
        or value(place).dtype != value(total).dtype
    ):
        return None
    op = f"add_{norm.op}"
    with node.graph.inserting_before(total):
        weight, bias = norm.params()
        both = node.graph.call_function(Fused(op, norm.settings), (*total.args, weight, bias))
        normed = node.graph.call_function(operator.getitem, (both, 0))
        summed = node.graph.call_function(operator.getitem, (both, 1))
    normed.meta, summed.meta = dict(place.meta), dict(total.meta)
    place.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)
    for gone in dict.fromkeys((place, node, total)):
        node.graph.erase_node(gone)
    return op


def modulation(node: Node) -> str | None:
    """`x * a + b` of values per column: what modulates something else than a norm."""
    for product, shift in _product_and_term(node):
        pair = _factor_and_scaled(product, node) if is_modulation(shift, node) else None
        if pair is None:
            continue
        factor, x = pair
        replace(node, Fused("mul_add", {"cast": "input"}), (x, factor, shift))
        return "mul_add"
    return None


def norms(node: Node) -> str | None:
    """Norms that are left."""
    norm = norm_of(node)
    if norm is None or not isinstance(node.target, Leaf):
        return None
    half = _rounded(node, norm.x) if norm.op == "layer_norm" else None
    place, x = (node, norm.x) if half is None else (half.place, half.of[0])
    with node.graph.inserting_before(place):
        weight, bias = norm.params()
    replace(place, Fused(norm.op, norm.settings), (x, weight, bias))
    return norm.op


def formula_of(node: Node) -> Formula | None:
    """The formula of a call of a leaf."""
    return node.target.formula if isinstance(node.target, Leaf) else None
