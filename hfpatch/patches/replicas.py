"""Copies of a module that a proof runs in its place, with random weights of their own."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.patches.base import Tensor
from hfpatch.patches.keys import OWNED_BY_WRAPPERS


def replicate(module: nn.Module, children: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy that shares no tensor, hook or instance forward with `module`.

    Parameters and buffers are left out for the caller to fill; `children` replaces child modules,
    others are copied too, with the tensors that they have (most activations have none).
    """
    copy = object.__new__(type(module))
    blank = nn.Module().__dict__
    state = {
        k: _bound_to(copy, v, module)
        for k, v in module.__dict__.items()
        if k not in blank and k not in OWNED_BY_WRAPPERS
    }
    given = children or {}
    others = {n: _twin(c) for n, c in module._modules.items() if n not in given}
    copy.__dict__.update(blank)
    copy.__dict__.update(state)
    copy.__dict__["training"] = False
    copy.__dict__["_modules"] = {**dict.fromkeys(module._modules), **others, **given}
    return copy


def _bound_to(copy: nn.Module, value: Any, module: nn.Module) -> Any:
    """A method of `module` that it holds, as the copy's: it would compute with the first one's."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, copy)
    return value


def _twin(module: nn.Module | None) -> nn.Module | None:
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return module
    copy = replicate(module)
    # dicts of its own: the probe puts fp64 tensors into them
    copy.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
    return copy


def random_like(
    t: Tensor, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A random stand-in for a norm's parameter, far enough from 0 and 1 to tell `w` from `1+w`."""
    values = 1.0 + 0.5 * torch.randn(t.shape, generator=generator)
    return values.to(device, dtype)


def random_linear(
    n_in: int,
    n_out: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> nn.Linear:
    """A linear layer for a replica."""
    # skip_init: the constructor's own draws would advance the user's random state
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, n_in, n_out, bias=bias, device="cpu"
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * n_in**-0.5)
    return layer.to(device, dtype).requires_grad_(False)
