"""kernels-community/activation: elementwise and gated activations that write to `out`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hfpatch.hub.adapters.base import Adapter, Row, only

Tensor = torch.Tensor

_GELUS = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}
#: (activation, gate_first) to the function.
_GATED = {
    ("silu", True): "silu_and_mul",
    ("silu", False): "mul_and_silu",
    ("gelu", True): "gelu_and_mul",
    ("gelu_tanh", True): "gelu_tanh_and_mul",
}


def _silu(module: ModuleType) -> Any:
    def silu(x: Tensor) -> Any:
        x = x.contiguous()
        return module.silu(torch.empty_like(x), x)

    return silu


def _gelu(module: ModuleType) -> Any:
    def gelu(x: Tensor, approximate: str = "none") -> Any:
        x = x.contiguous()
        return getattr(module, _GELUS[approximate])(torch.empty_like(x), x)

    return gelu


def _gated_packed(module: ModuleType) -> Any:
    def gated_packed(x: Tensor, activation: str = "silu", gate_first: bool = True) -> Any:
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        return getattr(module, _GATED[activation, gate_first])(out, x)

    return gated_packed


def _accepts_gated(params: Any) -> str | None:
    key = (params.get("activation", "silu"), params.get("gate_first", True))
    return None if key in _GATED else f"has no {key[0]} with gate_first={key[1]}"


ADAPTER = Adapter(
    "kernels-community/activation",
    1,
    "activation",
    (
        Row("silu", ("silu(out, x)",), _silu),
        Row(
            "gelu",
            tuple(f"{name}(out, x)" for name in _GELUS.values()),
            _gelu,
            only(approximate=tuple(_GELUS)),
        ),
        Row(
            "gated_packed",
            tuple(f"{name}(out, x)" for name in _GATED.values()),
            _gated_packed,
            _accepts_gated,
        ),
    ),
)
