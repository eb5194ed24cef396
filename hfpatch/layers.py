"""Norms and gated MLPs on the kernels, for models of one's own.

Parameters have the names that transformers' modules have, so a `state_dict` goes either way. They
compute what `hfpatch.functional` does, with its fallback.
"""

from __future__ import annotations

import difflib

import torch
from torch import Tensor, nn

from hfpatch import functional
from hfpatch.ops.activation import ACTIVATIONS
from hfpatch.ops.rms_norm import CASTS

__all__ = ["GatedMLP", "LayerNorm", "PackedGatedMLP", "RMSNorm"]

#: transformers' names of activations.
_OTHER_NAMES = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
}


def _size(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
    return value


def _activation(name: str) -> str:
    found = _OTHER_NAMES.get(name, name)
    if found not in ACTIVATIONS:
        known = sorted({*ACTIVATIONS, *_OTHER_NAMES})
        close = difflib.get_close_matches(str(name), known, 1)
        meant = f" Did you mean `{close[0]}`?" if close else ""
        raise ValueError(f"`activation` must be one of {', '.join(known)}; got {name!r}.{meant}")
    return found


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, as `LlamaRMSNorm` by default.

    Args:
        hidden_size: D of the input `[..., D]`.
        eps: added to the mean square.
        weight_offset: added to the weight: 1.0 for Gemma's, with `cast="none"`.
        cast: where the normalized value is rounded: "input" (Llama), "weight" (T5) or "none".

    Raises:
        TypeError, ValueError: a size or a cast that cannot be.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input"
    ) -> None:
        super().__init__()
        if cast not in CASTS:
            raise ValueError(f"`cast` must be one of {', '.join(CASTS)}; got {cast!r}")
        if weight_offset and cast != "none":
            raise ValueError(f"`weight_offset` {weight_offset} needs `cast='none'`, got {cast!r}")
        fill = 1.0 - weight_offset
        self.weight = nn.Parameter(torch.full((_size("hidden_size", hidden_size),), fill))
        self.eps, self.weight_offset, self.cast = eps, weight_offset, cast

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., D]` to the same; dtype as of `hfpatch.ops.rms_norm`."""
        y: Tensor = functional.rms_norm(
            hidden_states, self.weight, None, self.eps, self.weight_offset, self.cast
        )
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, cast={self.cast!r}"


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, as `torch.nn.LayerNorm`.

    Args:
        hidden_size: D of the input `[..., D]`.
        eps: added to the variance.
        bias: whether there is one.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_size("hidden_size", hidden_size)))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., D]` to the same, in the dtype of the input."""
        y: Tensor = functional.layer_norm(hidden_states, self.weight, self.bias, self.eps)
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class GatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, as `LlamaMLP`.

    Args:
        hidden_size: width outside.
        intermediate_size: width inside.
        activation: "silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", or transformers' name.
        bias: whether the projections have one.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        _size("hidden_size", hidden_size)
        _size("intermediate_size", intermediate_size)
        self.activation = _activation(activation)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]` to the same."""
        gated = functional.gated(self.gate_proj(x), self.up_proj(x), self.activation)
        y: Tensor = self.down_proj(gated)
        return y


class PackedGatedMLP(nn.Module):
    """The same with gate and up in one product, as `Phi3MLP`; arguments of `GatedMLP`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        _size("hidden_size", hidden_size)
        _size("intermediate_size", intermediate_size)
        self.activation = _activation(activation)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden_size]` to the same."""
        gated = functional.gated_packed(self.gate_up_proj(hidden_states), self.activation)
        y: Tensor = self.down_proj(gated)
        return y
