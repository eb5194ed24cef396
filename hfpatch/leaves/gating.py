"""Gated MLPs whose children have names that no layout lists: what each is, from the code.

Nothing here decides that a module is swapped: that is for the probe, as with names.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hfpatch.proof.subject import class_of

_LINEAR = re.compile(r"Linear|Conv1D")
_ACTIVATION = re.compile(r"act|[^a-z]gate_fn|silu|swish|[gr]elu|glu|sigmoid|tanh|mish", re.I)
#: Methods of an activation's result that leave it what it is, or nearly so.
_SAME_SHAPE = frozenset({"to", "float", "type_as", "detach", "contiguous", "clone", "clamp"})
_HOPS = 8  # from a name to the expression that it was assigned


def linears_of(module: nn.Module) -> list[str]:
    """Names of its children that are linear layers, wrapped or not."""
    return [
        n
        for n, c in module._modules.items()
        if c is not None
        and (_LINEAR.search(type(c).__name__) or _is_wide(c))
        and not isinstance(c, (nn.Dropout, nn.Identity))
    ]


def _is_wide(child: nn.Module) -> bool:
    sizes = (getattr(child, n, None) for n in ("in_features", "out_features"))
    return all(isinstance(s, int) for s in sizes)


def dropouts_of(module: nn.Module) -> list[str]:
    """Names of its children that are dropouts, or stand for none."""
    kinds = (nn.Dropout, nn.Identity)
    return [n for n, c in module._modules.items() if isinstance(c, kinds)]


def others_of(module: nn.Module) -> list[str]:
    """Names of its children that are neither: an activation, if it is a gated MLP."""
    known = {*linears_of(module), *dropouts_of(module)}
    return [n for n, c in module._modules.items() if c is not None and n not in known]


def looks_gated(module: nn.Module) -> bool:
    """Whether it may be a gated MLP: one to three linear layers, at most an activation and
    dropouts beside, and a forward of one tensor that multiplies an activation's result. Its code
    is looked at, and none of it is run."""
    if module._parameters or not 1 <= len(linears_of(module)) <= 3:
        return False
    others = others_of(module)
    holds = [n for n in others if next(module._modules[n].parameters(), None) is not None]  # type: ignore[union-attr]
    if any(isinstance(module._modules[n], nn.Softmax) for n in others):
        return False  # its gate is of the whole row: attention's
    return (
        len(others) <= 1
        and not holds
        and _multiplies_activation(class_of(module).forward, others[0] if others else "")
    )


def _multiplies_activation(forward: Callable[..., Any], child: str) -> bool:
    """`child`: name of the one that is no linear layer, whatever it is called."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return isinstance(code, types.CodeType) and _code_multiplies(code, child)


@functools.lru_cache(maxsize=4096)
def _code_multiplies(code: types.CodeType, child: str) -> bool:
    """The same of code: a function would keep its class, and what its closure has, alive."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)), None)
    if function is None or len(function.args.args) - len(function.args.defaults) != 2:
        return False
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        assigned.setdefault(name.id, []).append(node.value)

    def activates(value: ast.expr, hops: int = _HOPS) -> bool:
        """Whether it is what an activation gave, or a method of that."""
        if isinstance(value, ast.Name) and hops:
            return any(activates(v, hops - 1) for v in assigned.get(value.id, ()))
        if not isinstance(value, ast.Call):
            return False
        function = value.func
        name = _last_name(function)
        if name == child or _ACTIVATION.search(name):
            return True
        # `act(x).to(dtype)`
        return (
            isinstance(function, ast.Attribute)
            and name in _SAME_SHAPE
            and activates(function.value, hops)
        )

    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (activates(node.left) or activates(node.right))
        for node in ast.walk(function)
    )


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def orders(module: nn.Module) -> Iterator[tuple[str, str | None, str | None]]:
    """What its linear layers may be: (gate or packed, up, down), each way once."""
    names = linears_of(module)
    if len(names) == 1:
        yield names[0], None, None
    elif len(names) == 2:
        for one, two in itertools.permutations(names):
            yield one, None, two
        for one, two in itertools.permutations(names):
            yield one, two, None
    else:
        yield from itertools.permutations(names)
