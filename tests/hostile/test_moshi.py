"""A packed projection whose halves are taken by a view, as Moshi's and Kyutai's MLPs do."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Root, check
from leaves import drawn
from torch import Tensor, nn

import hfpatch

WIDTH, INNER = 48, 40


class ViewedMLP(nn.Module):
    """transformers' `MoshiGatingMLP`."""

    first, second = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.fc2 = nn.Linear(INNER, WIDTH, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, x: Tensor, layer_idx: int | None = None) -> Tensor:
        x = self.fc1(x) if layer_idx is None else self.fc1(x, layer_idx)
        batch, length, _ = x.shape
        x = x.view(batch, length, 2, -1)
        x = self.activation_fn(x[..., 0, :]) * x[..., 1, :]
        return self.fc2(x) if layer_idx is None else self.fc2(x, layer_idx)


class SwappedSizesMLP(ViewedMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        batch, length, _ = x.shape
        x = x.view(length, batch, 2, -1)
        y = self.activation_fn(x[..., 0, :]) * x[..., 1, :]
        return self.fc2(y.view(batch, length, -1))


class InterleavedMLP(ViewedMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        batch, length, _ = x.shape
        x = x.view(batch, length, -1, 2)
        return self.fc2(self.activation_fn(x[..., 0]) * x[..., 1])


class OneHalfMLP(ViewedMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        batch, length, _ = x.shape
        x = x.view(batch, length, 2, -1)
        return self.fc2(self.activation_fn(x[..., 0, :]) * x[..., 0, :])


class WholeMLP(ViewedMLP):
    """It scales what it has seen as halves."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        batch, length, _ = x.shape
        x = x.view(batch, length, 2, -1) * 1.0
        return self.fc2(self.activation_fn(x[..., 0, :]) * x[..., 1, :])


class ByLengthMLP(ViewedMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        batch, length, _ = x.shape
        x = x.view(batch, length, 2, -1)
        return self.fc2(self.activation_fn(x[..., 0, :]) * x[..., 1, :] * (1 if length < 9 else 2))


def randn(*shape: int) -> object:
    return lambda g: (torch.randn(shape, generator=g),)


CALLS = (randn(2, 5, WIDTH), randn(1, 1, WIDTH), randn(2, 11, WIDTH), randn(5, 2, WIDTH),
         randn(4, WIDTH), randn(WIDTH), randn(2, 2, 3, WIDTH), randn(0, 4, WIDTH))  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there."""


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("grads", [False, True])
def test_the_halves_of_a_view_are_served(mode: str, grads: bool) -> None:
    check(Case(lambda: drawn(ViewedMLP()), CALLS, mode=mode, grads=grads, swapped=True))


@pytest.mark.parametrize(
    "cls", [SwappedSizesMLP, InterleavedMLP, OneHalfMLP, WholeMLP, ByLengthMLP]
)
def test_other_views_are_not(cls: type[nn.Module]) -> None:
    check(Case(lambda: drawn(cls()), CALLS, swapped=False))


def test_the_class_of_transformers() -> None:
    from types import SimpleNamespace

    from transformers.models.moshi.modeling_moshi import MoshiGatingMLP

    config = SimpleNamespace(hidden_act="silu", ffn_dim=96, hidden_size=WIDTH, num_codebooks=3)
    for flexible in (False, True):
        model = Root(drawn(MoshiGatingMLP(config, flexible))).requires_grad_(False)
        x = torch.randn(2, 3, WIDTH)
        more = (torch.arange(3),) if flexible else ()
        expected = model(x, *more)
        assert [s.op for s in hfpatch.apply(model).swaps] == ["gated_packed"]
        torch.testing.assert_close(model(x, *more), expected)
        hfpatch.restore(model)
