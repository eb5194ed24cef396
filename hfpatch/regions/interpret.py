"""A graph, or a piece of one, computed without kernels: in any dtype, on any sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from hfpatch.blocks.side_by_side import by_head, rows
from hfpatch.ops import OPS
from hfpatch.regions.caches import with_past
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

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16, torch.float32)


class Sizes:
    """Small numbers for the symbols that stand for sizes."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, size: Any) -> int:
        """The number for a size, which may be one already."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            self._known.setdefault(symbol, 5 + 2 * len(self._known))
        return int(expression.xreplace(self._known))

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """The shape of a fake tensor, in numbers."""
        return tuple(self.of(s) for s in tensor.shape)


def evaluate(node: Node, given: Mapping[Node, Tensor], sizes: Sizes) -> Tensor:
    """What a node is, in fp64, where these nodes have these values; sizes come from `sizes`."""
    known: dict[Node, Any] = dict(given)

    def of(n: Node) -> Any:
        if n in known:
            return known[n]
        symbol = value(n)
        if isinstance(symbol, (torch.SymInt, int)):
            known[n] = sizes.of(symbol)
        else:
            if n.op != "call_function":
                raise ValueError(f"{n} has no value here")
            known[n] = operate(n, of, torch.float64)
        return known[n]

    result = of(node)
    assert isinstance(result, Tensor)
    return result


def operate(node: Node, of: Callable[[Node], Any], wide: torch.dtype | None) -> Any:
    """One operator, on what `of` says of its arguments; `wide`: in the place of narrower dtypes."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, dict(node.kwargs)), of)  # type: ignore[misc]
    if wide is not None:
        args = tuple(_widened(a, wide) for a in args)
        kwargs = {k: _widened(a, wide) for k, a in kwargs.items()}
    if isinstance(target, Fused):
        return OPS[target.op].reference(*args, **target.formula.params)
    if isinstance(target, Attend):
        return attend_reference(target, *args)
    if isinstance(target, JoinedRows):
        return torch.cat(args, 1)
    if isinstance(target, Table):
        return target.of(args[0])
    if isinstance(target, Filled):
        like: Tensor = args[0]
        dtype = wide or target.dtype
        return torch.full(like.shape[-1:], target.number, dtype=dtype, device=like.device)
    if target is operator.getitem:
        return args[0][args[1]]
    result = target(*args, **kwargs)
    if wide is not None and isinstance(result, Tensor) and result.dtype in _HALF:
        return result.to(wide)  # made of numbers alone, as `where(mask, 0, -inf)` is
    return result


def _widened(held: Any, wide: torch.dtype) -> Any:
    return wide if isinstance(held, torch.dtype) and held in _HALF else held


def attend_reference(target: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """PyTorch's own attention; capped scores by their formula."""
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    if target.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, target.causal, scale=target.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if target.scale is None else target.scale)
    scores = target.softcap * torch.tanh(scores / target.softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v


class Interpreter:
    """A whole graph on a live block, in one dtype.

    In `wide` every tensor is of that dtype, what the code casts down included, and layers and
    leaves are computed by their formulas; without it the model's own modules are called.
    """

    def __init__(self, block: nn.Module, wide: torch.dtype | None) -> None:
        self._modules = dict(block.named_modules())
        self._wide = wide
        self._given: torch.dtype | None = None  # what the node that is computed was given

    def run(self, graph: Any, tensors: list[Tensor]) -> list[Tensor]:
        """The graph's results for a call's tensors."""
        values: dict[Node, Any] = {}
        uses = {n: len(n.users) for n in graph.nodes}
        given = iter(tensors)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = self._cast(next(given))
            elif node.op == "output":
                return list(map_arg(node.args[0], values.__getitem__))  # type: ignore[arg-type]
            else:
                values[node] = self._node(node, values)
            for used in node.all_input_nodes:
                uses[used] -= 1
                if not uses[used]:
                    values[used] = None
        raise AssertionError("a graph ends with its output")

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._wide is not None and tensor.dtype in _HALF:
            return tensor.to(self._wide)
        return tensor

    def _node(self, node: Node, values: dict[Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)  # type: ignore[misc]
        fakes = (value(n) for n in node.all_input_nodes if is_tensor(n))
        self._given = next((t.dtype for t in fakes if t.is_floating_point()), None)
        if isinstance(target, Param):
            return self._param(target.path, target.name)
        if isinstance(target, Constant):
            return self._cast(target.tensor)
        if isinstance(target, Call):
            return self._call(target.path, args, kwargs)
        if isinstance(target, Project):
            return tuple(self._call(p, args, {}) for p in target.paths)
        if isinstance(target, ProjectParts):
            return self._call(target.path, (torch.cat(args, -1),), {})
        if isinstance(target, JoinedHeads):
            return self._joined(target, *args)
        if isinstance(target, ProjectGelu):
            return F.gelu(self._call(target.path, args, {}), approximate=target.approximate)
        if isinstance(target, Leaf):
            return self._leaf(target, args, kwargs)
        if isinstance(target, CacheUpdate):
            return with_past(*args)
        return operate(node, values.__getitem__, self._wide)

    def _joined(self, target: JoinedHeads, parts: Any, tables: Any) -> tuple[Tensor, ...]:
        made, at = [], 0
        for (x, q_weight, k_weight, *own), paths in zip(parts, target.groups, strict=True):
            q, k, v = (by_head(self._call(p, (x,), {}), target.heads) for p in paths)
            found = rows(tables, at, at := at + x.shape[1]) if own[0] is None else own
            turned = OPS["qk_norm_rope"].reference(
                q, k, q_weight, k_weight, *found, **target.norm_rope.formula.params
            )
            made.append((*turned, v))
        return tuple(torch.cat(side, 1) for side in zip(*made, strict=True))

    def _param(self, path: str, name: str) -> Tensor:
        module = self._modules[path]
        held = module._parameters.get(name)
        tensor = module._buffers[name] if held is None else held
        assert tensor is not None
        return self._cast(tensor.detach())

    def _leaf(self, target: Leaf, args: Any, kwargs: Any) -> Any:
        module = self._modules[target.path]
        if self._wide is None:
            return module(*args, **kwargs)
        params = [None if n is None or module._parameters.get(n) is None
                  else self._param(target.path, n) for n in target.params]  # fmt: skip
        op = OPS[target.formula.op]
        norm = target.formula.op in ("rms_norm", "layer_norm")
        (x,) = (*args, *kwargs.values())
        return op.reference(x, *(params if norm else ()), **target.formula.params)

    def _call(self, path: str, args: Any, kwargs: Any) -> Any:
        module = self._modules[path]
        if self._wide is None:
            return module(*args, **kwargs)
        if (
            type(module) is nn.Linear
            and len(args) == 1
            and not kwargs
            and "forward" not in module.__dict__
        ):
            bias = None if module.bias is None else self._cast(module.bias.detach())
            return F.linear(args[0], self._cast(module.weight.detach()), bias)
        # of a layer of another kind the module itself is the truth, in the dtype that it was given:
        # its weights may be stored in another one, and cast by a hook
        own = self._given

        def narrow(held: Any) -> Any:
            is_wide = isinstance(held, Tensor) and held.is_floating_point() and own is not None
            return held.to(own) if is_wide else held

        out = module(*map(narrow, args), **{k: narrow(a) for k, a in kwargs.items()})
        if isinstance(out, tuple):
            return tuple(self._cast(o) if isinstance(o, Tensor) else o for o in out)
        return self._cast(out)
