"""What brings a gradient into a block although no parameter and no argument has one: a vector that
somebody's hook on a layer adds, a weight that is a tensor of another network's making. Its gradient
is the unpatched twin's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import hfpatch

#: A model of the zoo, and layers of its first block that a fused forward calls or reads the
#: weights of.
LAYERS = {
    "llama": ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"),
    "bert": ("encoder.layer.0.attention.self.value", "encoder.layer.0.output.dense"),
    "vit": ("layers.0.attention.v_proj", "layers.0.mlp.fc1"),
    "wan": ("blocks.0.attn1.to_q", "blocks.0.ffn.net.2"),
    "flux": ("transformer_blocks.0.norm1.linear", "single_transformer_blocks.0.proj_mlp"),
}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    setattr(model.get_submodule(above), name, layer)


def hook(model: nn.Module, path: str, v: Tensor) -> None:
    model.get_submodule(path).register_forward_hook(lambda m, args, y: y + v)


def pre_hook(model: nn.Module, path: str, v: Tensor) -> None:
    model.get_submodule(path).register_forward_pre_hook(lambda m, args: (args[0] * v[0],))


def forward(model: nn.Module, path: str, v: Tensor) -> None:
    layer: Any = model.get_submodule(path)
    own = layer.forward
    layer.forward = lambda x: own(x) + v


def weight(model: nn.Module, path: str, v: Tensor) -> None:
    layer: Any = model.get_submodule(path)
    made = layer.weight.detach() * v[:, None]
    del layer.weight
    layer.weight = made


def buffer(model: nn.Module, path: str, v: Tensor) -> None:
    layer: Any = model.get_submodule(path)
    made = layer.weight.detach() * v[:, None]
    del layer.weight
    layer.register_buffer("weight", made)


class Steered(nn.Module):
    """It holds its vector where PyTorch does not look for parameters."""

    def __init__(self, layer: Any, v: Tensor) -> None:
        super().__init__()
        self.layer, self.of = layer, {"all": v}
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.of["all"]
        return y


def module(model: nn.Module, path: str, v: Tensor) -> None:
    _put(model, path, Steered(model.get_submodule(path), v))


WAYS: tuple[Callable[..., None], ...] = (hook, pre_hook, forward, weight, buffer, module)


def _answer(entry: zoo.Entry, model: Any, path: str, way: Callable[..., None]) -> list[Tensor]:
    features: Any = model.get_submodule(path).out_features
    v = torch.linspace(0.5, 1.5, features).requires_grad_()
    way(model, path, v)
    y = entry.output(model(**entry.inputs(model)))
    (found,) = torch.autograd.grad(y.pow(2).mean(), v)
    with torch.no_grad():
        after = entry.output(model(**entry.inputs(model)))
    return [y.detach(), found, after]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_from_inside(name: str, way: Callable[..., None]) -> None:
    entry = zoo.ENTRIES[name]
    twin = entry.build().requires_grad_(False)
    model = copy.deepcopy(twin)
    hfpatch.apply(model, blocks=True)
    for _ in range(2):  # with gradients enabled: nothing in it has one
        entry.output(model(**entry.inputs(model)))
    for path in LAYERS[name]:
        got, expected = (_answer(entry, copy.deepcopy(m), path, way) for m in (model, twin))
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max())
