"""The table of rewrites: what of a captured graph one op, or one product, computes.

Each row looks for one pattern and puts a node of `hfpatch.regions.nodes` in its place. Rows are not
trusted: what they made is compared with the graph as it was captured, in a wider dtype, before it
is used (`hfpatch.regions.proof`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from hfpatch import packing
from hfpatch.regions.functional import is_whole_slice
from hfpatch.regions.heads import fuse_heads
from hfpatch.regions.joined import join_heads, joined_rows, product_of_parts
from hfpatch.regions.nodes import (
    Attend,
    Call,
    Filled,
    Fused,
    Leaf,
    Param,
    Project,
    ProjectGelu,
    Table,
    fixed,
    is_tensor,
    replace,
    replace_by,
    same_shape,
    same_size,
    same_sizes,
    value,
    without_dead,
)
from hfpatch.regions.scores import unrepeated, written_out
from hfpatch.regions.sums import (
    formula_of,
    is_modulation,
    modulated_norm,
    modulation,
    normed_sum,
    norms,
    residual_norm,
    scaled_norm,
    scaled_residual,
    summed_norm,
)

aten: Any = torch.ops.aten


def rewrite(graph: Graph, linears: frozenset[str]) -> list[str]:
    """Apply every row, in order; returns what was found, for the report.

    Args:
        graph: of `hfpatch.regions.capture`; it is changed.
        linears: paths of the calls that are `nn.Linear`s.
    """
    found: list[str] = []
    for row in ROWS:
        found += row(graph, linears)
        without_dead(graph)
    graph.lint()
    return found


def idle(node: Node) -> None:
    """Operators that give back what they are given."""
    target, x = node.target, node.args[0] if node.args else None
    if not isinstance(x, Node) or not is_tensor(x):
        return
    same = value(x).dtype == value(node).dtype if is_tensor(node) else False
    if (
        (target is aten.dropout.default and node.args[2] is False)
        or (target in (aten.detach.default, aten.alias.default))
        or (target in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default) and same
            and value(x).device == value(node).device and not node.kwargs.get("copy"))
        or (target is aten.to.other and same)
        or (target in (aten.expand.default, aten.view.default, aten.reshape.default)
            and same_sizes(x, node))
        or (target is aten.slice.Tensor and is_whole_slice(node))
    ):  # fmt: skip
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)


def sizes(graph: Graph, _: frozenset[str]) -> Iterator[str]:
    """Sizes are read off the block's inputs, where one has them: else what a size is read off is
    computed for it alone."""
    given = [n for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    known = {
        size.node.expr: (node, dim)
        for node in reversed(given)
        for dim, size in reversed(list(enumerate(value(node).shape)))
        if fixed(size) is None
    }
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        size = value(node) if node.op == "call_function" else None
        if not isinstance(size, torch.SymInt) or size.node.expr not in known or first is None:
            continue
        source, dim = known[size.node.expr]
        if node.target is aten.sym_size.int and node.args == (source, dim):
            continue
        with graph.inserting_before(first):
            read = graph.call_function(aten.sym_size.int, (source, dim))
        replace_by(node, read)
        first = read if node is first else first
    yield from ()


def attention(node: Node) -> str | None:
    """`scaled_dot_product_attention`, with keys and values of grouped heads as they are."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q, k, v, mask = (given.get(n) for n in names[:4])
    causal = bool(given.get("is_causal", False))
    if given.get("dropout_p", 0.0) or value(q).dim() != 4 or not _is_aligned(q, k, causal):
        return None
    k2, v2 = unrepeated(k), unrepeated(v)
    if k2 is not None and v2 is not None and not given.get("enable_gqa", False):
        k, v = k2, v2
    replace(node, Attend(causal, given.get("scale")), (q, k, v, mask))
    return "attention"


def _is_aligned(q: Any, k: Any, causal: bool) -> bool:
    """Whether both that PyTorch and that hfpatch call causal are one: PyTorch's queries are the
    first positions, ours the last."""
    return not causal or same_size(value(q).shape[2], value(k).shape[2])


#: Activations of one operator, by their name in `gated`.
def activation_of(node: Any) -> tuple[str, Node] | None:
    """The name of the activation that a node is, and what it is of."""
    if not isinstance(node, Node):
        return None
    target = node.target
    if target is aten.silu.default:
        return "silu", node.args[0]  # type: ignore[return-value]
    if target is aten.relu.default:
        return "relu", node.args[0]  # type: ignore[return-value]
    if target is aten.gelu.default:
        tanh = node.kwargs.get("approximate", "none") == "tanh"
        return "gelu_tanh" if tanh else "gelu", node.args[0]  # type: ignore[return-value]
    if isinstance(target, Leaf) and target.formula.op in ("gelu", "silu"):
        name = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}
        kind = target.formula.params.get("approximate", "none")
        return "silu" if target.formula.op == "silu" else name[kind], node.args[0]  # type: ignore[return-value]
    return None


def gated(node: Node) -> str | None:
    """`act(gate) * up`."""
    if node.target is not aten.mul.Tensor:
        return None
    for first, second in (node.args, node.args[::-1]):
        act = activation_of(first)
        if act is None or not is_tensor(second) or len(first.users) > 1:  # type: ignore[union-attr]
            continue
        name, gate = act
        if gate is second or not same_shape(gate, second) or not same_shape(gate, node):  # type: ignore[arg-type]
            continue
        replace(node, Fused("gated", {"activation": name}), (gate, second))
        return f"gated {name}"
    return None


def _clamp_of(node: Node) -> tuple[Node, float | None, float | None] | None:
    """What a node clamps, and its bounds, which are numbers."""
    names = {
        aten.clamp.default: ("min", "max"),
        aten.clamp_min.default: ("min",),
        aten.clamp_max.default: ("max",),
    }.get(node.target)
    if names is None:
        return None
    given = dict(zip(("self", *names), node.args, strict=False)) | dict(node.kwargs)
    bounds = [given.get(n) for n in ("min", "max")]
    if not is_tensor(given["self"]) or any(type(b) not in (int, float, type(None)) for b in bounds):
        return None
    return given["self"], *(None if b is None else float(b) for b in bounds)  # type: ignore


def _unclamped(node: Node, users: set[Node], name: str) -> tuple[Node, dict[str, float]]:
    """What a node is before its clamp, where nobody but `users` reads it, and that clamp's bounds
    as parameters."""
    found = _clamp_of(node) if users.issuperset(node.users) else None
    if found is None:
        return node, {}
    x, low, high = found
    bounds = {f"{name}_min": low, f"{name}_max": high}
    return x, {n: b for n, b in bounds.items() if b is not None}


def _scaled_silu(node: Node) -> tuple[float, Node, set[Node]] | None:
    """`x * sigmoid(alpha * x)`: alpha, x, and the nodes in between that read x."""
    if node.target is not aten.mul.Tensor:
        return None
    for x, s in (node.args, node.args[::-1]):
        if not is_tensor(x) or not is_tensor(s) or s.target is not aten.sigmoid.default:  # type: ignore[union-attr]
            continue
        inner: Any = s.args[0]  # type: ignore[union-attr]
        if inner is x:
            return 1.0, x, {node, s}  # type: ignore[return-value, arg-type]
        if inner.target is aten.mul.Tensor and x in inner.args:
            (alpha,) = [a for a in inner.args if a is not x] or [None]
            if type(alpha) in (int, float):
                return float(alpha), x, {node, inner}  # type: ignore[return-value]
    return None


def gated_clamped(node: Node) -> str | None:
    """`act(gate.clamp(max=limit)) * up.clamp(-limit, limit)`, also with the clamp behind the
    activation, and with `up + 1`."""
    if node.target is not aten.mul.Tensor or not all(map(is_tensor, node.args)):
        return None
    for first, second in (node.args, node.args[::-1]):
        activated, bounds = _unclamped(first, {node}, "gate")
        params: dict[str, Any] = {"clamp_activated": bool(bounds), **bounds}
        act, scaled = activation_of(activated), _scaled_silu(activated)
        if act is not None:
            params["activation"], gate = act
            users = {activated}
        elif scaled is not None:
            params["activation"] = "silu"
            params["alpha"], gate, users = scaled
        else:
            continue
        if not bounds:
            gate, bounds = _unclamped(gate, users, "gate")
            params |= bounds
        if len(activated.users) > 1:
            continue
        up, reader = second, node
        if up.target is aten.add.Tensor and len(up.users) == 1 and not up.kwargs:
            terms = [t for t in up.args if is_tensor(t)]
            offsets = [t for t in up.args if type(t) in (int, float)]
            if len(terms) == len(offsets) == 1:
                reader, up, params["up_offset"] = up, terms[0], float(offsets[0])
        up, of_up = _unclamped(up, {reader}, "up")
        params |= of_up
        if not (bounds or of_up or params.get("up_offset")):
            continue  # `gated` is that
        if gate is up or not (same_shape(gate, up) and same_shape(gate, node)):
            continue
        replace(node, Fused("gated_clamped", params), (gate, up))
        return f"gated_clamped {params['activation']}"
    return None


def biased_activation(node: Node) -> str | None:
    """GELU or SiLU of `x + bias`, where no product's epilogue adds the bias."""
    act = activation_of(node)
    if act is None or act[0] not in _BIASED:
        return None
    total = act[1]
    if total.target is not aten.add.Tensor or total.kwargs or len(total.users) > 1:
        return None
    pairs = (total.args, total.args[::-1])
    pair = next(((x, b) for x, b in pairs if is_tensor(x) and same_shape(x, total)  # type: ignore[arg-type]
                 and is_modulation(b, total) and value(b).dim() == 1), None)  # fmt: skip
    if pair is None:
        return None
    op, params = _BIASED[act[0]]
    replace(node, Fused(op, params), pair)
    return op


_BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("add_gelu", {"approximate": "none"}),
    "gelu_tanh": ("add_gelu", {"approximate": "tanh"}),
    "gelu_sigmoid": ("add_gelu", {"approximate": "sigmoid"}),
    "silu": ("add_silu", {}),
}


def projections(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    """Linear layers of one input, as one product where their weights can be packed."""
    of_input: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        is_layer = isinstance(node.target, Call) and node.target.path in linears
        if is_layer and len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], Node):
            of_input.setdefault(node.args[0], []).append(node)
    for group in _side_by_side(of_input.values()):
        first = group[0]
        x = first.args[0]  # a layer's product may have been replaced by now
        with graph.inserting_before(first):
            paths = [n.target.path for n in group]  # type: ignore[union-attr]
            both = graph.call_function(Project(*paths), (x,))
            parts = [graph.call_function(operator.getitem, (both, i)) for i in range(len(group))]
        for node, part in zip(group, parts, strict=True):
            replace_by(node, part)
        if len(group) > 1:
            yield f"{len(group)} products as one"


def _side_by_side(groups: Iterable[list[Node]]) -> Iterator[list[Node]]:
    """Of layers of one input, those that one product may serve; others alone.

    A row of the product has them side by side, and cuBLAS has no fast product of rows that begin
    at odd addresses: a gate of one number behind an expert's two layers made it 15 times as long.
    """
    for group in groups:
        whole: list[Node] = []
        for node in group:
            if len(group) > 1 and _has_gelu_epilogue(node):
                yield [node]
            elif packing.ends_aligned(value(node), value(node).shape[-1]):
                whole.append(node)
            else:
                yield [node]
        if whole:
            yield whole


def _has_gelu_epilogue(node: Node) -> bool:
    """Whether a product's only reader is the GELU that its epilogue computes. Packed with others
    it would be written, and read and written once more."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    act = activation_of(reader)
    return act is not None and act[0] == "gelu_tanh" and value(node).dtype != torch.float32


def gelu_epilogue(node: Node) -> str | None:
    """GELU behind a linear layer."""
    act = activation_of(node)
    if act is None or act[0] not in ("gelu", "gelu_tanh"):
        return None
    part = act[1]
    if part.target is not operator.getitem or len(part.users) > 1:
        return None
    project: Any = part.args[0]
    if not isinstance(project.target, Project) or len(project.target.paths) != 1:
        return None
    kind = "tanh" if act[0] == "gelu_tanh" else "none"
    replace(node, ProjectGelu(project.target.paths[0], kind), (project.args[0],))
    return f"product + {act[0]}"


def activations(node: Node) -> str | None:
    """Activations that are left: leaves, whose modules need not be called."""
    formula = formula_of(node)
    if formula is None or formula.op not in ("gelu", "silu"):
        return None
    replace(node, Fused(formula.op, formula.params), node.args)
    return formula.op


Row = Callable[[Graph, frozenset[str]], Iterable[str]]


def _each(rule: Callable[[Node], str | None]) -> Row:
    """A rule of one node, for all that a graph has now."""
    return lambda graph, _: [said for node in list(graph.nodes) if (said := rule(node))]


def _attentions(graph: Graph, linears: frozenset[str]) -> Iterator[str]:
    yield from _each(attention)(graph, linears)
    yield from written_out(graph)


#: In the order in which they are tried.
ROWS: Sequence[Row] = (
    sizes,
    _each(idle),
    _attentions,
    *map(_each, (gated_clamped, gated)),
    join_heads,
    lambda graph, _: fuse_heads(graph),  # norms of q and k, and RoPE
    *map(_each, (modulated_norm, scaled_norm, scaled_residual, normed_sum)),
    *map(_each, (summed_norm, residual_norm, modulation)),
    projections,
    *map(_each, (gelu_epilogue, product_of_parts, biased_activation, activations, norms)),
    _each(joined_rows),
)


def launches(graph: Graph) -> int:
    """How many nodes of a graph do work on a GPU: views and sizes are none."""
    return sum(is_work(node) for node in graph.nodes)


_VIEWS = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.transpose.int, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int),
        *(aten.permute.default, aten.chunk.default, aten.split.Tensor, aten.unbind.int),
        *(aten.split_with_sizes.default, aten.alias.default, aten.detach.default, aten.t.default),
        *(aten.flatten.using_ints, aten.unflatten.int, aten.split.sizes, aten.squeeze.default),
        operator.getitem,
    }
)


def is_work(node: Node) -> bool:
    """Whether a node does work on a GPU."""
    if node.op != "call_function" or node.target in _VIEWS:
        return False
    if isinstance(node.target, (Param, Filled, Table)):
        return False
    if isinstance(node.target, Project):
        return True
    return is_tensor(node) or isinstance(value(node), (tuple, list)) or "val" not in node.meta
