"""What a row of docs/compatibility.md is: something a user does to a model, and how to look at it.

`do` changes the model (or wraps or copies it) and `run` calls it; most rows need only one of the
two. Both get the `Case`, which knows the column and has a folder for files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from columns import Column
from torch import nn

#: How far outputs may be from the unpatched model's, relative, in the Frobenius norm.
NOISE = {
    # reductions in another order, through two layers and their residual sums
    torch.float32: 1e-5,
    # a rounding is 2^-11; fused parts round less often, and two layers add up a dozen places
    torch.float16: 4e-3,
    # the same with roundings of 2^-8
    torch.bfloat16: 3e-2,
    # no kernel takes it, but modules that compute in fp32 inside a model in fp64 have one
    torch.float64: 1e-5,
}


@dataclass(frozen=True)
class Sum:
    """A sum that may come out near 0: measured against the size of what is summed."""

    value: torch.Tensor
    size: float


@dataclass
class Case:
    """One run of a row on a column."""

    column: Column
    dtype: torch.dtype
    folder: Path
    thin: bool = False  # one layer of each kind: where compiling takes the time
    notes: dict[str, Any] = field(default_factory=dict)  # what `do` leaves for `run`
    _files: int = 0

    def inputs(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Keyword arguments of one call; equal values each time."""
        return dict(self.column.entry.inputs(None, dtype or self.dtype))

    def build(self, seed: int = 0) -> Any:
        """Another model of the column."""
        model = self.column.entry.build(torch.float32, seed)
        return thinned(model) if self.thin else model

    def output(self, result: Any) -> torch.Tensor:
        return self.column.entry.output(result)

    def path(self, name: str) -> Path:
        """A new path in the case's folder."""
        self._files += 1
        return self.folder / f"{self._files}-{name}"


def thinned(model: nn.Module) -> nn.Module:
    """Cut lists of equal layers to their first one; hybrids keep a layer of each kind."""
    if type(model).__name__.startswith("UNet"):
        return model  # its second half takes what each layer of the first half returned
    if getattr(model.config, "layer_types", None) and len(set(model.config.layer_types)) > 1:
        return model
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, nn.ModuleList) and len({type(m) for m in child}) == 1:
                module._modules[name] = child[:1]
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(model.config, name):
            with contextlib.suppress(AttributeError, TypeError):  # diffusers' are frozen
                setattr(model.config, name, 1)
    return model


def same(case: Case, model: Any) -> Any:
    """Nothing done."""
    return model


def forward(case: Case, model: Any) -> Any:
    """One call under `no_grad`."""
    with torch.no_grad():
        return case.output(model(**case.inputs()))


def always(column: Column) -> str | None:
    return None


@dataclass(frozen=True)
class Row:
    """Something a user does.

    `unless` says for which columns there is no such thing, and why. `why` gives the reason for
    every state other than "patched": by state, or by "column:state" where one family differs.
    `mode` is `apply`'s. `forwards` is how often `run` calls the model, where that is one known
    number, so that a single kernel that does not run is noticed; else only fused blocks are
    compared. `lasting` is false where the deed puts new tensors into the modules at every call, as
    offloading does. `generated` rows run what inductor writes, which need not add up in the same
    order when it is written anew: they are never compared bit for bit. `thin` rows compile: on
    models cut to one layer of each kind. They, and `slow` ones, have pytest's marker.
    """

    group: str
    title: str
    do: Callable[[Case, Any], Any] = same
    run: Callable[[Case, Any], Any] = forward
    unless: Callable[[Column], str | None] = always
    why: Mapping[str, str] = field(default_factory=dict)
    mode: str = "inference"
    dtype: torch.dtype = torch.float32
    noise: float | None = None
    forwards: int = 0
    lasting: bool = True
    generated: bool = False
    thin: bool = False
    slow: bool = False
    afterwards: Callable[[Case, Any], None] | None = None

    @property
    def calls(self) -> int:
        return 1 if self.run is forward else self.forwards

    @property
    def tolerance(self) -> float:
        return NOISE[self.dtype] if self.noise is None else self.noise

    def reason(self, column: Column, state: str) -> str | None:
        return self.why.get(f"{column.name}:{state}", self.why.get(state))


def only(kinds: str, reason: str) -> Callable[[Column], str | None]:
    """For the columns of these kinds (words) or names alone."""
    words = kinds.split()

    def unless(column: Column) -> str | None:
        return None if column.kind in words or column.name in words else reason

    return unless


def both(*conditions: Callable[[Column], str | None]) -> Callable[[Column], str | None]:
    """The first reason of several."""

    def unless(column: Column) -> str | None:
        return next((r for c in conditions if (r := c(column)) is not None), None)

    return unless
