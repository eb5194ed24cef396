"""A rewritten graph as straight-line Python over bound kernels and live modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from hfpatch.attention import attention
from hfpatch.blocks import side_by_side as joining
from hfpatch.blocks.parts import Constant as Vector
from hfpatch.blocks.projections import gelu_product, is_plain, project
from hfpatch.regions.caches import update, update_cross, update_self
from hfpatch.regions.functional import LAST
from hfpatch.regions.kept_keys import Keys, attend_to, masks_of_keys
from hfpatch.regions.nodes import (
    Attend,
    CacheUpdate,
    Call,
    Constant,
    Filled,
    Fused,
    JoinedHeads,
    JoinedRows,
    Leaf,
    Param,
    Project,
    ProjectGelu,
    ProjectParts,
    Table,
    is_tensor,
    value,
)
from hfpatch.regions.shared import Shared, shared_values, take_sizes_from_arguments
from hfpatch.regions.structure import CACHE, TENSOR, Structure

aten: Any = torch.ops.aten
#: Called as `run(block, tensors, cache)`.
Run = Callable[[nn.Module, list[torch.Tensor], Any], Any]
#: Called as `bind(op, params)`, or with the number of tensors that the callable is to write to.
Bind = Callable[..., Callable[..., Any]]

#: Operators that are quicker as a method or an operator of Python's than through their overload.
_METHODS = {
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.permute.default: "permute",
    aten.flatten.using_ints: "flatten",
    aten.unflatten.int: "unflatten",
    aten.chunk.default: "chunk",
    aten.unbind.int: "unbind",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.to.dtype: "to",
}
#: The same of functions.
_FUNCTIONS = {
    aten.cat.default: torch.cat,
    aten.silu.default: F.silu,
    aten.tanh.default: torch.tanh,
}
#: Operators that give a list of tensors, of which each part is taken once.
_LISTS = (aten.chunk.default, aten.unbind.int, aten.split_with_sizes.default)
_INFIX = {aten.add.Tensor: "+", aten.mul.Tensor: "*", aten.sub.Tensor: "-"}


def emit(graph: Graph, block: nn.Module, result: Structure, bind: Bind) -> tuple[Run, str]:
    """The function that a block's forward becomes, and its source.

    Args:
        graph: rewritten.
        block: a block of the kind, for where its parameters are; it is not held.
        result: what the function returns.
        bind: a callable of an op's tensors.
    """
    take_sizes_from_arguments(graph)
    return _Writer(graph, block, result, bind).write()


class _Writer:
    def __init__(self, graph: Graph, block: nn.Module, result: Structure, bind: Bind) -> None:
        self._graph, self._result, self._bind = graph, result, bind
        self._modules = dict(block.named_modules())
        self._names: dict[Node, str] = {}
        self._globals: dict[str, Any] = {
            "attention": attention,
            "attend_to": attend_to,
            "project": project,
            "linear": linear,
            "linear_gelu": linear_gelu,
            "into": into,
            "joined": joining.joined,
            "product_of_two": joining.product_of_two,
            "update": update,
            "update_self": update_self,
            "update_cross": update_cross,
        }
        self._bound: dict[Any, str] = {}
        self._shared = shared_values(graph)
        # on transformers' masks, which are made anew for each call, the host would wait
        of_diffusers = type(block).__module__.startswith("diffusers.")
        self._masks = masks_of_keys(graph) if of_diffusers else {}
        self._last: dict[Node, Node] = {}  # who uses each last
        self._places: dict[str, str] = {"": "block"}
        self._functions: list[str] = []  # of values that blocks share
        self._head: list[str] = []
        self._body: list[str] = []

    def write(self) -> tuple[Run, str]:
        last, wanted = self._last, self._wanted()
        for node in wanted:
            for used in self._inputs(node):
                last[used] = node
        for node in wanted:
            if node.op == "placeholder":
                self._names[node] = self._new("a")
            elif node.op == "output":
                self._body.append(f"return {self._returned(node)}")
            elif node in self._shared:
                self._share(node)
            else:
                self._statement(node)
                self._forget(node, last)
        inputs = ", ".join(
            self._names[n] if n in last else "_" for n in wanted if n.op == "placeholder"
        )
        lines = [f"({inputs},) = tensors" if inputs else "", *self._head, *self._body]
        text = "def run(block, tensors, cache):\n" + "".join(f"    {s}\n" for s in lines if s)
        return self._compiled("run", text), "\n".join([*self._functions, text])

    def _compiled(self, name: str, text: str) -> Any:
        scope = dict(self._globals)
        exec(compile(text, "<hfpatch block>", "exec"), scope)
        return scope[name]

    def _inputs(self, node: Node) -> list[Node]:
        """What a node's statement reads."""
        if node in self._shared:
            return [n for n in self._shared[node] if n.op == "placeholder"]
        return node.all_input_nodes

    def _wanted(self) -> list[Node]:
        """The nodes that statements of their own are made of, and all placeholders."""
        left = [n for n in self._graph.nodes if n.op in ("placeholder", "output")]
        found = set(left)
        while left:
            new = [n for n in self._inputs(left.pop()) if n not in found]
            found.update(new)
            left += new
        return [n for n in self._graph.nodes if n in found]

    def _share(self, node: Node) -> None:
        """The statement of a value that other blocks may have computed."""
        call = self._function("shared", self._shared[node], Shared)
        self._names[node] = self._new("v")
        self._body.append(f"{self._names[node]} = {call}")

    def _function(self, name: str, made: list[Node], kind: Callable[..., Any]) -> str:
        """A call of what `kind` makes of a function of some arguments, whose last node of `made` is
        its result."""
        given = [n for n in made if n.op == "placeholder"]
        names, body = self._names, self._body
        self._names, self._body = {n: f"a{i}" for i, n in enumerate(given)}, []
        for node in made:
            if node.op != "placeholder":
                self._statement(node)
        arguments, lines = ", ".join(self._names[n] for n in given), self._body
        lines.append(f"return {self._names[made[-1]]}")
        self._names, self._body = names, body
        name = f"{name}_{len(self._functions)}"
        text = f"def {name}({arguments}):\n" + "".join(f"    {s}\n" for s in lines)
        self._functions.append(text)
        self._globals[name] = kind(self._compiled(name, text))
        return f"{name}({', '.join(names[n] for n in given)})"

    def _new(self, letter: str) -> str:
        return f"{letter}{len(self._names)}"

    def _forget(self, node: Node, last: Mapping[Node, Node]) -> None:
        """Names that are not used again are dropped, so that their memory is free."""
        gone = [
            self._names[n]
            for n in node.all_input_nodes
            if last[n] is node and n.op != "placeholder" and n in self._names
            and not isinstance(n.target, Constant)
            and self._names[n].isidentifier() and self._names[n] not in self._places.values()
        ]  # fmt: skip
        if gone:
            self._body.append(f"del {', '.join(dict.fromkeys(gone))}")

    def _module(self, path: str) -> str:
        """The variable that holds the module at `path`."""
        if path not in self._places:
            above, _, name = path.rpartition(".")
            holder = self._module(above)
            found = self._places[path] = f"m{len(self._places)}"
            self._head.append(f"{found} = {holder}._modules[{name!r}]")
        return self._places[path]

    def _bound_name(self, thing: Any, letter: str) -> str:
        by_value = isinstance(thing, (Fused, Filled, torch.dtype))
        key = (letter, thing if by_value else id(thing))
        if key not in self._bound:
            name = self._bound[key] = f"{letter}_{len(self._bound)}"
            self._globals[name] = self._made(thing)
        return self._bound[key]

    def _made(self, thing: Any) -> Any:
        """What the name of a thing stands for."""
        if isinstance(thing, Fused):
            return self._bind(thing.op, thing.formula.params)
        if isinstance(thing, JoinedHeads):
            norm_rope = self._bind("qk_norm_rope", thing.norm_rope.formula.params, 2)
            return joining.JoinedHeads(norm_rope, thing.heads, thing.order)
        if isinstance(thing, Table):
            return Shared(partial(made_table, thing.of))
        return Vector(thing.number, thing.dtype) if isinstance(thing, Filled) else thing

    def _argument(self, held: Any) -> str:
        if isinstance(held, Node):
            return self._names[held]
        if isinstance(held, (list, torch.fx.immutable_collections.immutable_list)):
            return f"[{', '.join(map(self._argument, held))}]"
        if isinstance(held, tuple):
            return f"({''.join(self._argument(h) + ', ' for h in held)})"
        if held is None or type(held) in (bool, int, str):
            return repr(held)
        if type(held) is float and held == held and abs(held) != float("inf"):
            return repr(held)
        return self._bound_name(held, "c")

    def _statement(self, node: Node) -> None:
        target: Any = node.target
        given = [self._argument(a) for a in node.args]
        named = [f"{k}={self._argument(a)}" for k, a in node.kwargs.items()]
        if target is operator.getitem and self._is_unpacked(node.args[0]):
            return  # named where it was made
        if isinstance(target, Param):
            module = self._modules[target.path]
            kind = "_parameters" if target.name in module._parameters else "_buffers"
            self._names[node] = f"{self._module(target.path)}.{kind}[{target.name!r}]"
            return
        if isinstance(target, Constant):
            self._names[node] = self._bound_name(target.tensor, "t")
            return
        if isinstance(target, CacheUpdate):
            path, attribute = target.place
            number = f"{self._module(path)}.__dict__[{attribute!r}]"
            name = f"update_{target.which}" if target.which else "update"
            call = f"{name}(cache, {', '.join(given[:2])}, {number})"
        elif isinstance(target, (Call, Leaf)):
            call = f"{self._module(target.path)}({', '.join([*given, *named])})"
        elif isinstance(target, Project):
            if len(target.paths) == 1 and (part := self._parts(node)) is not None and part[0]:
                name = self._names[part[0]] = self._new("v")
                self._names[node] = "()"
                module = self._module(target.paths[0])
                self._body.append(f"{name} = linear({module}, {given[0]})")
                return
            else:
                modules = "".join(f"{self._module(p)}, " for p in target.paths)
                call = f"project({given[0]}, ({modules}))"
        elif isinstance(target, ProjectParts):
            call = f"product_of_two({self._module(target.path)}, {', '.join(given)})"
        elif isinstance(target, JoinedRows):
            call = f"joined({', '.join(given)})"
        elif isinstance(target, JoinedHeads):
            groups = "".join(
                f"({''.join(f'{self._module(p)}, ' for p in group)}), " for group in target.groups
            )
            call = f"{self._bound_name(target, 'j')}(({groups}), {', '.join(given)})"
        elif isinstance(target, ProjectGelu):
            act = self._bound_name(Fused("gelu", {"approximate": target.approximate}), "k")
            call = (
                f"linear_gelu({self._module(target.path)}, {given[0]}, "
                f"{target.approximate!r}, {act})"
            )
        elif isinstance(target, Attend):
            q, k, v, mask = given
            how = {"mask": mask, "causal": target.causal, "scale": target.scale}
            how["softcap"] = target.softcap
            wanted = [f"{n}={h}" for n, h in how.items() if h not in (None, "None", False)]
            call = f"attention({', '.join([q, k, v, *wanted])})"
            if (made := self._masks.get(node.args[3])) is not None:  # type: ignore[call-overload]
                keys = self._function("keys", made, Keys)
                call = f"attend_to({keys}, {', '.join([q, k, v, mask])}, {target.scale!r})"
        elif isinstance(target, (Fused, Filled, Table)):
            call = f"{self._bound_name(target, 'k')}({', '.join(given)})"
        else:
            call = self._operator(node, given, named)
        parts = self._parts(node)
        if parts is None:
            name = self._names[node] = self._new("v")
            self._body.append(f"{name} = {call}")
            return
        names = []
        for user in parts:
            name = "_" if user is None else self._new("v")
            if user is not None:
                self._names[user] = name
            names.append(name)
        self._names[node] = "()"  # it is its parts
        self._body.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")

    def _operator(self, node: Node, given: list[str], named: list[str]) -> str:
        target: Any = node.target
        if node.meta.get("in_place") and self._last.get(node.args[0]) is node:  # type: ignore[call-overload]
            return f"into({', '.join([*given, *named])})"
        if target is operator.getitem:
            return f"{given[0]}[{given[1]}]"
        if target is aten.sym_size.int:
            return f"{given[0]}.shape[{given[1]}]"
        if target is aten.slice.Tensor and not named and is_tensor(node):
            return given[0] + self._columns_of(node, given[1:])
        if target in _METHODS and not named:
            return f"{given[0]}.{_METHODS[target]}({', '.join(given[1:])})"
        if target in _INFIX and not named:
            return f"{given[0]} {_INFIX[target]} {given[1]}"
        function = _FUNCTIONS.get(target, target)
        return f"{self._bound_name(function, 'op')}({', '.join([*given, *named])})"

    def _columns_of(self, node: Node, given: list[str]) -> str:
        """`[:, start:end:step]` of a slice's arguments behind the tensor."""
        dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        texts = dict(zip(("dim", "start", "end", "step"), given, strict=False))
        place = int(dim) % value(node).dim()  # type: ignore[arg-type]
        first = "" if start in (None, 0) else texts["start"]
        last = "" if end in (None, LAST) else texts["end"]
        by = "" if step in (None, 1) else f":{texts['step']}"
        return f"[{':, ' * place}{first}:{last}{by}]"

    def _is_unpacked(self, node: Any) -> bool:
        return self._names.get(node) == "()"

    def _parts(self, node: Node) -> list[Node | None] | None:
        """By place, the one `getitem` that takes each part of a node's results; None if the node is
        not taken apart so."""
        users = list(node.users)
        if not users or any(u.target is not operator.getitem for u in users):
            return None
        places = [u.args[1] for u in users]
        target = node.target
        if isinstance(target, Project):
            count = len(target.paths)
        elif isinstance(target, JoinedHeads):
            count = 3
        elif target in _LISTS:
            count = len(value(node))
        elif isinstance(target, (Fused, CacheUpdate)):
            count = 2
        else:
            return None
        if any(type(p) is not int or not 0 <= p < count for p in places):
            return None
        if len(set(places)) != len(places):
            return None
        found: list[Node | None] = [None] * count
        for user, place in zip(users, places, strict=True):
            found[place] = user  # type: ignore[index]
        return found

    def _returned(self, node: Node) -> str:
        left = iter(node.args[0])  # type: ignore[arg-type]

        def put(shape: Any) -> str:
            if shape is TENSOR:
                return self._argument(next(left))
            if shape is CACHE:
                return "cache"
            cls, held = shape
            if cls is tuple:
                return f"({''.join(put(s) + ', ' for s in held)})"
            if cls is list:
                return f"[{', '.join(map(put, held))}]"
            if cls is dict:
                return f"{{{', '.join(f'{k!r}: {put(s)}' for k, s in held)}}}"
            return self._argument(held)

        return put(self._result.shape)


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A call of a layer."""
    if is_plain(module, x):
        held = module.__dict__["_parameters"]
        # of rows that lie apart PyTorch makes a copy, and adds the bias in a kernel of its own
        return F.linear(x.contiguous(), held["weight"], held["bias"])
    return module(x)  # type: ignore[no-any-return]


def linear_gelu(module: Any, x: torch.Tensor, approximate: str, act: Any) -> torch.Tensor:
    """GELU of a layer's result, in the product's epilogue where cuBLASLt has it."""
    found = gelu_product(module, x, approximate) if approximate == "tanh" else None
    return act(linear(module, x)) if found is None else found  # type: ignore[no-any-return]


def made_table(of: Callable[[torch.Tensor], torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """`of` a table, as kernels read it; of one that all samples share, once for all."""
    part = of(table[:1] if table.dim() > 2 and table.stride(0) == 0 else table)
    return (part.float() if part.dtype == torch.float64 else part).contiguous()


def into(x: torch.Tensor, y: torch.Tensor, dim: int = 0, *which: Any) -> torch.Tensor:
    """`x` with `y` in the place of a slice of it, in the memory of `x`."""
    aten.slice.Tensor(x, dim, *which).copy_(y)
    return x
