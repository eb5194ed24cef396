"""Layers for `kernels.LayerRepository`: a `forward` and nothing else, no constructor, no state."""

import torch
from torch import nn

from ._ops import ops

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """transformers' `LlamaRMSNorm` and its like, whose attributes are `weight` and
    `variance_epsilon`."""

    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)
