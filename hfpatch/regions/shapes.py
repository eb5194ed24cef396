"""For which sizes of its arguments a captured graph holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shapes:
    """The sizes that were numbers or symbols in a capture, and what it found out about these.

    A size that was 0 or 1 in the call is that number: code asks for it.
    """

    dims: tuple[tuple[Any, ...], ...]
    guards: tuple[Any, ...]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph is right for tensors of these sizes."""
        compiled = self._compiled
        return self._by_sympy(tensors) if compiled is None else compiled(tensors)

    @cached_property
    def _compiled(self) -> Callable[[Sequence[Tensor]], bool] | None:
        """The same as Python: a cache that grows has another size at each call."""
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        names: dict[Any, str] = {}
        lines: list[str] = []
        later: list[str] = []
        printer = PythonPrinter()
        for i, dims in enumerate(self.dims):
            lines += [f"s = t[{i}].shape", f"if len(s) != {len(dims)}: return False"]
            for j, known in enumerate(dims):
                if isinstance(known, int):
                    lines.append(f"if s[{j}] != {known}: return False")
                elif isinstance(known, sympy.Symbol) and known not in names:
                    names[known] = str(known)
                    lines += [f"{known} = s[{j}]", f"if {known} < 2: return False"]
                elif isinstance(known, sympy.Symbol):
                    lines.append(f"if s[{j}] != {known}: return False")
                else:
                    later.append(f"if t[{i}].shape[{j}] != {printer.doprint(known)}: return False")
        used = set().union(*(g.free_symbols for g in self.guards), set())
        if not used <= names.keys() or not all(n.isidentifier() for n in names.values()):
            return None
        later += [f"if not ({printer.doprint(g)}): return False" for g in self.guards]
        text = "def hold(t):\n" + "".join(f"    {x}\n" for x in (*lines, *later))
        scope: dict[str, Any] = {"math": math}
        try:
            exec(compile(text + "    return True\n", "<hfpatch sizes>", "exec"), scope)
        except SyntaxError:  # a function that Python has no name for
            return None
        hold = scope["hold"]

        def checked(tensors: Sequence[Tensor]) -> bool:
            try:
                return bool(hold(tensors))
            except (NameError, ZeroDivisionError):
                return self._by_sympy(tensors)

        return checked

    def _by_sympy(self, tensors: Sequence[Tensor]) -> bool:
        import sympy

        bound: dict[Any, int] = {}
        later: list[tuple[Any, int]] = []
        for dims, tensor in zip(self.dims, tensors, strict=True):
            if len(dims) != tensor.dim():
                return False
            for known, size in zip(dims, tensor.shape, strict=True):
                if isinstance(known, int):
                    if known != size:
                        return False
                elif isinstance(known, sympy.Symbol):
                    if size < 2 or bound.setdefault(known, size) != size:
                        return False
                else:
                    later.append((known, size))
        for expression, size in later:
            if expression.xreplace(bound) != size:
                return False
        for guard in self.guards:
            found = guard.xreplace(bound)
            if found is not True and found != sympy.true:
                return False
        return True


def shapes_of(env: ShapeEnv, fakes: Sequence[Tensor]) -> Shapes:
    """What a capture of these arguments decided."""
    dims = tuple(
        tuple(s if isinstance(s, int) else _expression(env, s) for s in fake.shape)
        for fake in fakes
    )
    numbers = {k: v for k, v in env.replacements.items() if v.is_number}
    fixed = tuple(tuple(int(numbers[d]) if d in numbers else d for d in tensor) for tensor in dims)
    guards = tuple(
        g.expr.xreplace(numbers)
        for g in env.guards
        if g.expr.xreplace(numbers) != True  # noqa: E712
    )
    return Shapes(fixed, guards)


def _expression(env: ShapeEnv, size: Any) -> Any:
    return size.node._expr if hasattr(size.node, "_expr") else size.node.expr
