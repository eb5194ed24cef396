"""A block and a call of it with other numbers, in which nothing is hidden by the numbers there are.

A gate of zeros hides all that is behind it, a bias of zeros that it was left out, a weight of ones
that it was forgotten, a mask of zeros that nobody reads it. Fresh models and adapters are full of
those. A rewrite must be right for all numbers, so its proof is made of these too.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.direct_calls import DIRECT

Tensor = torch.Tensor
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: Elements up to which a parameter of several dimensions is a table of numbers, and no matrix.
_TABLE = 4096
#: Numbers of a vector that are smaller than this let nothing through.
_CLOSED = 0.01
#: The same of a matrix's rows, against those of one that gives what it is given.
_CLOSED_ROW = 1e-3


class Disturbed:
    """Makes them. Each tensor gets the same numbers each time, wherever it is held."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(7)
        self._device = device
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def block(self, module: nn.Module) -> nn.Module:
        """A module of the same code. Large matrices are the model's own where they let through what
        comes; what somebody's wrapper holds by itself is as it was."""
        if not _can_stand_in(module):
            return module
        made: Any = object.__new__(type(module))
        made.__dict__.update({k: v for k, v in module.__dict__.items() if k != DIRECT})
        if "forward" in made.__dict__:
            function = made.__dict__["forward"].__func__
            made.__dict__["forward"] = types.MethodType(function, made)
        for kind in ("_parameters", "_buffers"):
            held = module.__dict__[kind].items()
            made.__dict__[kind] = {n: None if t is None else self._tensor(t) for n, t in held}
        made.__dict__["_modules"] = {
            n: None if c is None else self.block(c) for n, c in module._modules.items()
        }
        return made  # type: ignore[no-any-return]

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A call's tensors, with others in the place of those whose numbers are all one. RoPE's
        tables hold each of theirs twice, as they did."""
        return [self._input(t) for t in tensors]

    def _noise(self, like: Tensor, *shape: int) -> Tensor:
        """Between -1 and 1."""
        drawn = torch.rand(
            shape or like.shape, generator=self._generator, device=self._device, dtype=torch.float32
        )
        return drawn * 2 - 1

    def _tensor(self, t: Tensor) -> Tensor:
        plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _FLOATS
        if not plain or not t.numel() or t.device != self._device or t.layout != torch.strided:
            return t
        if id(t) not in self._known:
            self._known[id(t)] = t, self._other(t)
        return self._known[id(t)][1]

    def _other(self, t: Tensor) -> Tensor:
        held = t.detach()
        if t.dim() < 2 or t.numel() <= _TABLE:
            low, high = (float(v) for v in held.aminmax())
            noise = self._noise(held)
            if max(abs(low), abs(high)) < _CLOSED:
                values = 0.3 + 0.2 * noise
            elif low > 0:  # a variance stays one
                values = held.float() * (1 + 0.25 * noise)
            else:
                values = held.float() + 0.25 * max(abs(low), abs(high)) * noise
        else:
            rows = held.flatten(1)
            usual = rows.shape[1] ** -0.5
            closed = rows.abs().amax(1) < _CLOSED_ROW * usual
            if not closed.any():
                return t
            noise = self._noise(rows) * (3**0.5 * usual)
            values = torch.where(closed[:, None], noise, rows.float()).view(held.shape)
        made = values.to(t.dtype)
        return nn.Parameter(made, requires_grad=False) if isinstance(t, nn.Parameter) else made

    def _input(self, t: Tensor) -> Tensor:
        if not t.numel() or t.device != self._device or t.dim() == 0:
            return t
        if t.dtype == torch.bool:
            if t.any() != t.all():
                return t
            other = self._noise(t) < 0.4
            other[..., 0] = True  # no row that sees nothing
            return other if t.all() else ~other
        if t.dtype not in _FLOATS:
            return t
        low, high = (float(v) for v in t.aminmax())
        if low != high or not abs(low) < 1e4:
            return t
        *lead, last = t.shape
        if last % 4:
            return self._noise(t).to(t.dtype)
        noise = self._noise(t, *lead, last // 4).repeat_interleave(2, -1)
        return torch.cat((noise, noise), -1).to(t.dtype)  # by halves and by pairs each number twice


def _can_stand_in(module: nn.Module) -> bool:
    """Whether a module whose attributes are this one's runs on tensors of its own."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    held = module.__dict__
    if "_old_forward" in held or getattr(held.get("_diffusers_hook"), "_fn_refs", ()):
        return False
    forward = held.get("forward")
    return forward is None or (isinstance(forward, types.MethodType) and forward.__self__ is module)
