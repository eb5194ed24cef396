"""What stands in a captured graph beside PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from hfpatch.proof.subject import Formula

Tensor = torch.Tensor
aten: Any = torch.ops.aten


class Target:
    """The target of a node that is no operator of PyTorch's. Equal by what it is made of."""

    __name__: ClassVar[str] = "target"

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._parts == other._parts  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._parts))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a captured graph is interpreted or emitted, never called")


class Param(Target):
    """A parameter or buffer, read off the live module: no arguments."""

    __name__ = "param"

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        self.path, self.name = path, name


class Constant(Target):
    """A small tensor that the code makes of numbers: no arguments."""

    __name__ = "constant"

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(id(tensor))
        self.tensor = tensor


class Filled(Target):
    """`[D]` of one number, for an argument `[..., D]`: a gate of ones, a shift of zeros."""

    __name__ = "filled"

    def __init__(self, number: float, dtype: torch.dtype) -> None:
        super().__init__(number, dtype)
        self.number, self.dtype = number, dtype


class Table(Target):
    """`t[..., start::step]` of a table of RoPE, made once for all blocks of a step.

    `part`: of complex numbers, "real" or "imag"; else "". `doubled`: all that is left out stands
    there too, which the caller asks of each table.
    """

    __name__ = "table"

    def __init__(
        self, start: int = 0, step: int = 1, doubled: bool = False, part: str = ""
    ) -> None:
        super().__init__(start, step, doubled, part)
        self.start, self.step, self.doubled, self.part = start, step, doubled, part

    def of(self, table: Tensor) -> Tensor:
        """The table's part, as a view."""
        return (getattr(table, self.part) if self.part else table)[..., self.start :: self.step]


class Call(Target):
    """A call of a live child module, whatever it is: a wall between regions.

    `fresh`: what it returns is a tensor of its own, as a layer's product is.
    """

    __name__ = "call"

    def __init__(self, path: str, fresh: bool = False) -> None:
        super().__init__(path)
        self.path, self.fresh = path, fresh


class Leaf(Target):
    """A call of a child whose formula is proven: `leaf(x)`."""

    __name__ = "leaf"

    def __init__(self, path: str, formula: Formula, params: tuple[str | None, str | None]) -> None:
        super().__init__(path, formula, params)
        self.path, self.formula, self.params = path, formula, params


class CacheUpdate(Target):
    """`cache.update(keys, values, number)`: the cache's layer gets entries.

    `place` is where the block has its number: path of the module, name of the attribute. `which` is
    "", or "self" or "cross" of a cache that is a pair. What the layer held are two arguments more.
    """

    __name__ = "cache_update"

    def __init__(self, place: tuple[str, str], which: str = "") -> None:
        super().__init__(place, which)
        self.place, self.which = place, which


class Fused(Target):
    """One op of `hfpatch.ops`, called with the tensors of its reference."""

    __name__ = "fused"

    def __init__(self, op: str, params: Mapping[str, Any]) -> None:
        self.formula = Formula(op, params)
        super().__init__(self.formula)

    @property
    def op(self) -> str:
        """The op's name."""
        return self.formula.op


class Project(Target):
    """`tuple(linear(x) for linear in paths)`, by one product where their weights are packed."""

    __name__ = "project"

    def __init__(self, *paths: str) -> None:
        super().__init__(*paths)
        self.paths = paths


class ProjectGelu(Target):
    """`gelu(linear(x))`: in the product's epilogue where there is one."""

    __name__ = "project_gelu"

    def __init__(self, path: str, approximate: str) -> None:
        super().__init__(path, approximate)
        self.path, self.approximate = path, approximate


class ProjectParts(Target):
    """`linear(torch.cat(parts, -1))` of two parts, without the copy."""

    __name__ = "project_parts"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class JoinedRows(Target):
    """`torch.cat((a, b), 1)`, without a copy where they lie so."""

    __name__ = "joined_rows"


class JoinedHeads(Target):
    """q, k and v [B, S, H, D] of parts of a sequence, one after the other, normed and turned.

    Called as `joined(((x, q weight, k weight, cos, sin), …), (cos, sin))`: a part's tables are its
    own, the last ones those of all tokens; either may be None.

    Args:
        groups: of each part the paths of its layers to q, k and v.
        order: the parts as the original calls their layers.
        heads, width: H and D.
        params: of `qk_norm_rope`.
    """

    __name__ = "joined_heads"

    def __init__(
        self,
        groups: tuple[tuple[str, ...], ...],
        order: tuple[int, ...],
        heads: int,
        width: int,
        params: Mapping[str, Any],
    ) -> None:
        self.groups, self.order, self.heads, self.width = groups, order, heads, width
        self.norm_rope = Fused("qk_norm_rope", params)
        super().__init__(groups, order, heads, width, self.norm_rope)


class Attend(Target):
    """`hfpatch.attention.attention` of q, k, v [B, H, S, D] and a mask."""

    __name__ = "attend"

    def __init__(self, causal: bool, scale: float | None, softcap: float | None = None) -> None:
        super().__init__(causal, scale, softcap)
        self.causal, self.scale, self.softcap = causal, scale, softcap


def groups_of(target: Any) -> tuple[tuple[str, ...], ...]:
    """The paths of layers that one product serves where their weights are packed."""
    if isinstance(target, JoinedHeads):
        return target.groups
    return (target.paths,) if isinstance(target, Project) else ()


def without_dead(graph: Graph) -> None:
    """Drop what nothing reads, except what is done to a cache."""
    graph.eliminate_dead_code(lambda n: n.is_impure() or isinstance(n.target, CacheUpdate))


def value(node: Any) -> Any:
    """The fake tensor that a node stands for; a constant is itself."""
    return node.meta.get("val") if isinstance(node, Node) else node


def fixed(size: Any) -> int | None:
    """A size as a number, if it is one for all calls."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else None


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are one, by what they are and not by what they happen to be."""
    x, y = fixed(a), fixed(b)
    if x is not None or y is not None:
        return x == y
    return bool(a.node.expr == b.node.expr)


def same_sizes(a: Any, b: Any) -> bool:
    """The same of the shapes of two nodes that are tensors."""
    x, y = value(a).shape, value(b).shape
    return len(x) == len(y) and all(map(same_size, x, y))


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def same_shape(a: Node, b: Node) -> bool:
    """Whether two nodes are tensors of one shape and dtype, for all sizes."""
    return is_tensor(a) and is_tensor(b) and value(a).dtype == value(b).dtype and same_sizes(a, b)


def is_cast(node: Any) -> bool:
    """Whether a node is a tensor in another dtype, and nothing else."""
    return (
        is_tensor(node)
        and node.target in (aten.to.dtype, aten._to_copy.default)
        and is_tensor(node.args[0])
        and value(node).device == value(node.args[0]).device
    )


def replace(old: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """Put a call of `target` in the place of a node, whose value it has."""
    with old.graph.inserting_before(old):
        new = old.graph.call_function(target, args, kwargs)
    replace_by(old, new)
    return new


def replace_by(old: Node, new: Node) -> None:
    """Put a node that is there, and has the value of another one, in its place."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
