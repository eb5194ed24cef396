"""What proposals of inputs are made with: a model's signature, its numbers, and a generator."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
#: Tokens of a text, and of what a decoder has said so far.
LENGTH, ANSWER = 12, 7


class NoInputs(ValueError):
    """No inputs could be made for a model."""


class Sizes:
    """Sizes that somebody asked for, and which of them inputs were made with.

    Names: "length" (tokens of a text), "height" and "width" (of a denoiser alone in latents, else
    in pixels), "frames".
    """

    def __init__(self, given: Mapping[str, int] | None = None) -> None:
        self._given = dict(given or {})
        self.used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._given:
            return default
        self.used.add(name)
        return self._given[name]

    def unused(self) -> list[str]:
        return [name for name in self._given if name not in self.used]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The models that one holds which has no configuration of its own, such as ControlNets."""
    if getattr(model, "config", None) is not None:
        return []
    held = (c for c in model.children() if isinstance(c, nn.ModuleList))
    return [part for part in next(held, ()) if getattr(part, "config", None) is not None]


def config_of(model: nn.Module) -> Any:
    """Its own, or that of the first of its parts; None if neither has one."""
    parts = parts_of(model)
    return parts[0].config if parts else getattr(model, "config", None)


class Proposal:
    """One model's, from the same random numbers each time."""

    def __init__(self, model: nn.Module, batch: int, seed: int, sizes: Sizes | None = None) -> None:
        self.model, self.batch = model, batch
        self.sizes = sizes or Sizes()
        self.config: Any = config_of(model)
        found = inspect.signature(model.forward).parameters
        self.parameters = {
            name: p
            for name, p in found.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        weight = next((p for p in model.parameters() if p.is_floating_point()), None)
        own = None if weight is None else getattr(model, "dtype", None)
        self.dtype = own or (torch.float32 if weight is None else weight.dtype)
        self.device = torch.device("cpu") if weight is None else weight.device
        self._generator = torch.Generator().manual_seed(seed + 1)

    def has(self, name: str) -> bool:
        return name in self.parameters

    def required(self) -> list[str]:
        return [n for n, p in self.parameters.items() if p.default is p.empty]

    def floats(self, *shape: int) -> Tensor:
        """N(0, 1), drawn in fp32."""
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self.device, self.dtype)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """At least `low` and below `high`."""
        drawn = torch.randint(min(low, high - 1), high, shape, generator=self._generator)
        return drawn.to(self.device)

    def mask(self, length: int) -> Tensor:
        """`[batch, length]` int64: ones; the last row ends in a quarter of zeros."""
        mask = torch.ones(self.batch, length, dtype=torch.int64)
        mask[-1, length - length // 4 :] = 0
        return mask.to(self.device)
