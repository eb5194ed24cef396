"""Layers for `kernels.LayerRepository`: a `forward` and nothing else, no constructor, no state."""

import torch
from torch import nn

from ._ops import ops

__all__ = ["ReLUSquared"]


class ReLUSquared(nn.Module):
    """`transformers.activations.ReLUSquaredActivation`: ``hidden_act="relu2"``."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.relu_squared(input)
