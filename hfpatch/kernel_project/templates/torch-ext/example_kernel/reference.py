"""What the operators compute, in PyTorch: the tests and the benchmark compare with it."""

import torch


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(torch.relu(x))
