"""Layers for `kernels.LayerRepository`: a forward and nothing else.

Each one reads the attributes of the module that adopts it; the annotations say which.
"""

import torch
from torch import nn

from . import _functions


class LlamaRMSNorm(nn.Module):
    """``weight * xhat.to(x.dtype)``: Llama, Mistral, Qwen and most others."""

    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _functions.rms_norm(
            hidden_states, self.weight, None, self.variance_epsilon, 0.0, "input"
        )


class GemmaRMSNorm(nn.Module):
    """``(1 + weight) * xhat``, rounded once: Gemma 1 to 3."""

    can_torch_compile = True

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _functions.rms_norm(x, self.weight, None, self.eps, 1.0, "none")


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` over one dimension."""

    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _functions.layer_norm(input, self.weight, self.bias, self.eps)


class GELU(nn.Module):
    """`torch.nn.GELU`."""

    can_torch_compile = True

    approximate: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _functions.gelu(input, self.approximate)


class QuickGELU(nn.Module):
    """``x * sigmoid(1.702 * x)``: CLIP."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _functions.gelu(input, "sigmoid")


class SiLU(nn.Module):
    """`torch.nn.SiLU`."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _functions.silu(input)


class SiluAndMul(nn.Module):
    """``silu(first half) * second half``."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _functions.gated_packed(x, "silu")


class GeluAndMul(nn.Module):
    """``gelu(first half) * second half``."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _functions.gated_packed(x, "gelu")


class GeluTanhAndMul(nn.Module):
    """``gelu_tanh(first half) * second half``."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _functions.gated_packed(x, "gelu_tanh")


__all__ = [
    "GELU",
    "GeluAndMul",
    "GeluTanhAndMul",
    "GemmaRMSNorm",
    "LayerNorm",
    "LlamaRMSNorm",
    "QuickGELU",
    "SiLU",
    "SiluAndMul",
]
