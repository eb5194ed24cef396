"""What an adapter is: how one package's functions and layers serve our ops.

A row names what it needs, as the package's source spells it ("silu(out, x)"), and makes a function
with the signature of the op's reference. The names of the parameters are compared with those of
the loaded function before it is used, so a package that has changed is refused, not miscalled. What
the function computes is for the probe to say.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from hfpatch.ops import OPS

#: Makes the op's function of the package's.
Make = Callable[[ModuleType], Callable[..., Any]]
#: Why a kernel cannot take these parameters of the op, or None.
Accepts = Callable[[Mapping[str, Any]], "str | None"]

_NEED = re.compile(r"^(?P<name>[\w.]+)\((?P<params>[^)]*)\)$")


@dataclass(frozen=True)
class Need:
    """A function, or the forward of a layer, that a row calls: its dotted name and parameters."""

    name: str
    params: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Need:
        """From "silu(out, x)"."""
        match = _NEED.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form 'name(parameter, …)'")
        params = (p.strip() for p in match["params"].split(","))
        return cls(match["name"], tuple(p for p in params if p))

    def unmet(self, found: tuple[str, ...] | None) -> str | None:
        """Why parameters `found` (None: no such function) are not these, or None.

        Further ones may follow, as long as these come first.
        """
        if found is None:
            return f"has no `{self.name}`"
        if found[: len(self.params)] == self.params:
            return None
        return f"has `{self.name}({', '.join(found)})`, expected `{self}`"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.params)})"


@dataclass(frozen=True)
class Row:
    """One op that a package serves.

    Attributes:
        op: the name of the op.
        needs: what the package must have; see `Need`.
        make: makes the function with the signature of `OPS[op].reference`.
        accepts: why given parameters of the op are not taken, or None.
        differentiable: whether autograd works through it.
        min_capability: the lowest CUDA compute capability.
    """

    op: str
    needs: tuple[str, ...]
    make: Make
    accepts: Accepts = lambda params: None
    differentiable: bool = False
    min_capability: tuple[int, int] | None = None

    def unmet(self, params_of: Callable[[str], tuple[str, ...] | None]) -> str | None:
        """What the package lacks for this row, or None; `params_of` gives a function's names."""
        for text in self.needs:
            need = Need.parse(text)
            why = need.unmet(params_of(need.name))
            if why is not None:
                return why
        return None


@dataclass(frozen=True)
class Adapter:
    """A well-known package.

    Attributes:
        repo: where it is published.
        version: the version that the rows were written for.
        package: its name in the metadata, by which forks are known too.
        rows: the ops that it serves.
        route: for a package that serves none of our ops: how a model uses it.
        route_needs: what the package must have for that.
    """

    repo: str
    version: int
    package: str
    rows: tuple[Row, ...] = ()
    route: str = ""
    route_needs: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        """The pinned repository."""
        return f"{self.repo}@v{self.version}"


def params_of(module: ModuleType, name: str) -> tuple[str, ...] | None:
    """Parameter names of a function of a package, or of a layer's forward; None: there is none."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if inspect.isclass(found):
        found = getattr(found, "forward", None)
        names = _names(found)
        return None if names is None else names[1:]  # without `self`
    return _names(found)


def _names(function: Any) -> tuple[str, ...] | None:
    if not callable(function):
        return None
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def same_signature(op: str, names: tuple[str, ...] | None) -> bool:
    """Whether a function of these parameters can be called as the op's reference is."""
    return names == tuple(inspect.signature(OPS[op].reference).parameters)


def borrow(layer: type, **attributes: Any) -> Callable[..., Any]:
    """The forward of a pure layer as a function: `attributes` stand for the adopting module's."""
    forward: Callable[..., Any] = layer.forward  # type: ignore[attr-defined]
    adopter = SimpleNamespace(**attributes)
    return lambda *inputs: forward(adopter, *inputs)


def only(**allowed: tuple[Any, ...]) -> Accepts:
    """Accepts parameters whose values are among those listed; others not named are not checked."""

    def accepts(params: Mapping[str, Any]) -> str | None:
        for name, values in allowed.items():
            if name in params and params[name] not in values:
                shown = ", ".join(map(repr, values))
                return f"takes `{name}` {shown} only, this is {params[name]!r}"
        return None

    return accepts
