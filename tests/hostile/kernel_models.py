"""Small models for each op that a user's kernel can be given for, and calls of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.ops import OPS


class SomeRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class SomeSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)


class SomeGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x, approximate="tanh")


class Passed(nn.Module):
    """A projection that gives what it gets: the width of the MLP is the input's."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class SomeMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, width, bias=False)
        self.act_fn = nn.SiLU()
        for layer in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(layer.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


#: What makes the model for each op.
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "rms_norm": SomeRMSNorm,
    "layer_norm": nn.LayerNorm,
    "silu": lambda width: SomeSiLU(),
    "gelu": lambda width: SomeGELU(),
    "gated": SomeMLP,
}


class Model(nn.Module):
    """Two modules of one op, whose weights differ."""

    def __init__(self, op: str, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MODULES[op](width) for _ in range(2))
        with torch.no_grad():
            for p in self.layers[1].parameters():
                p.mul_(1.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def right_kernel(op: str) -> Callable[..., Any]:
    """The op's formula in PyTorch, as a user would write it."""
    reference = OPS[op].reference

    def kernel(*tensors: Any, **params: Any) -> Any:
        return reference(*tensors, **params)

    return kernel


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str = "dense", seed: int = 0
) -> Tensor:
    """An input of `shape`, in one of several layouts."""
    generator = torch.Generator().manual_seed(seed)
    *rest, width = shape
    if layout == "misaligned":
        flat = torch.randn(x_numel(shape) + 1, generator=generator).to(dtype)
        return flat[1:].view(shape)
    if layout == "transposed":
        return torch.randn(*reversed(rest), width, generator=generator).to(dtype).transpose(0, -2)
    if layout == "sliced":
        return torch.randn(*rest, width + 8, generator=generator).to(dtype)[..., :width]
    if layout == "columns":
        return torch.randn(*rest, 2 * width, generator=generator).to(dtype)[..., ::2]
    return torch.randn(shape, generator=generator).to(dtype)


def x_numel(shape: tuple[int, ...]) -> int:
    """How many elements a tensor of `shape` has."""
    count = 1
    for n in shape:
        count *= n
    return count
