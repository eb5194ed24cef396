"""What the blocks of a step share: values made of a call's arguments alone, computed once a step.

Blocks of a list are handed the same tables, masks and embeddings, and each of them rounds, repeats
or activates these anew. A fused call keeps such a value for as long as the very same tensors come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from hfpatch.blocks.memo import StepMemo
from hfpatch.proof.subject import Tensor
from hfpatch.regions.nodes import (
    CacheUpdate,
    Constant,
    Target,
    is_tensor,
    same_size,
    same_sizes,
    value,
)
from hfpatch.regions.rules import is_work

aten: Any = torch.ops.aten

#: Times that a value was of no use to another call, in a row, before it is computed each time: a
#: model may have one block alone, or give each of them tensors of its own.
_MOST_MISSES = 64
#: Bytes that are kept whatever they are made of; of more, twice as many as their tensors have.
_SMALL = 1 << 20
#: Of these no kernel is launched.
_ALIASES = (
    *(aten.view_as_real.default, aten.view_as_complex.default, aten.resolve_conj.default),
    aten.resolve_neg.default,
)


class Shared(StepMemo[Tensor]):
    """A `StepMemo` that gives up, and keeps nothing that is much larger than what it is made of."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The value."""
        if self.missed >= _MOST_MISSES:
            return self._make(*tensors)
        return super().__call__(*tensors)

    def keeps(self, made: Tensor, tensors: tuple[Tensor, ...]) -> bool:
        if made.is_inference():  # whose writes are not counted
            return False
        return made.nbytes <= max(_SMALL, 2 * sum(t.nbytes for t in tensors))


def shared_values(graph: Graph) -> dict[Node, list[Node]]:
    """The nodes whose values blocks may share, each with the nodes that it is made by, placeholders
    and itself included, in the graph's order."""
    of_arguments = made_of_arguments(graph)
    found = {}
    for node in graph.nodes:
        if node in of_arguments and _launches(node) and not of_arguments.issuperset(_readers(node)):
            nodes = made_by(graph, node)
            if any(n.op == "placeholder" for n in nodes):
                found[node] = nodes
    return found


def made_of_arguments(graph: Graph) -> set[Node]:
    """What is made of a call's arguments alone, and these.

    Not of what a block gives back, whose arguments are another block's results, nor of a cache's
    entries. Nor what the block writes to or returns: it is another's too.
    """
    given, results = _handed_alike(graph)
    barred = set()  # lies in memory that the caller gets, or that is written to
    written = [n.args[0] for n in graph.nodes if n.meta.get("in_place")]
    for node in (*results, *written):
        while isinstance(node, Node):
            barred.add(node)
            node = node.args[0] if node.args else None
    of_arguments: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        computed = inputs and of_arguments.issuperset(inputs) and _is_plain(node)
        if node in given or isinstance(node.target, Constant) or (computed and node not in barred):
            of_arguments.add(node)
    return of_arguments


def _handed_alike(graph: Graph) -> tuple[set[Node], list[Node]]:
    """The arguments that blocks of a step may have in common, and the tensors that one gives."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    own = {n for of in (output.args, *_entries(graph)) for n in pytree.tree_leaves(of)}
    results = [n for n in pytree.tree_leaves(output.args) if is_tensor(n)]
    given = {
        n
        for n in graph.nodes
        if n.op == "placeholder"
        and n not in own
        and not any(same_sizes(n, result) for result in results)
    }
    return given, results


def take_sizes_from_arguments(graph: Graph) -> None:
    """Read sizes off arguments that blocks have in common, where code reads the same ones off a
    block's input: a mask of as many samples is made of its own sizes then."""
    given, _ = _handed_alike(graph)
    sizes = [(n, i, size) for n in given for i, size in enumerate(value(n).shape)]
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or node.args[0] in given:
            continue
        if node.args[0].op != "placeholder" or isinstance(value(node), int):  # type: ignore[union-attr]
            continue
        same = [(n, i) for n, i, size in sizes if same_size(size, value(node))]
        if same:
            node.args = min(same, key=lambda found: (found[0].name, found[1]))


def _entries(graph: Graph) -> Iterator[Any]:
    for node in graph.nodes:
        if isinstance(node.target, CacheUpdate):
            yield node.args[2:]


def _is_plain(node: Node) -> bool:
    """Whether it is an operator without effects, or computes with sizes."""
    return (
        node.op == "call_function"
        and not isinstance(node.target, Target)
        and not node.meta.get("in_place")
    )


def _launches(node: Node) -> bool:
    return is_tensor(node) and is_work(node) and node.target not in _ALIASES


def _readers(node: Node) -> set[Node]:
    """Who reads a value, or a view of it."""
    found: set[Node] = set()
    for user in node.users:
        is_view = _is_plain(user) and not _launches(user)
        found |= _readers(user) if is_view else {user}
    return found


def made_by(graph: Graph, node: Node) -> list[Node]:
    """The nodes that a node is made by, placeholders and itself included, in the graph's order."""
    found: set[Node] = set()
    left = [node]
    while left:
        n = left.pop()
        if n not in found:
            found.add(n)
            left += n.all_input_nodes
    return [n for n in graph.nodes if n in found]
