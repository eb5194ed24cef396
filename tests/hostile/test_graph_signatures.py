"""What a recorded CUDA graph has baked in of a model is another signature, wherever it is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

import hfpatch
from hfpatch.graphs import keys as graph_keys


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_keys, "_IS_CUDA", lambda t: True)


class Scale:
    def __init__(self) -> None:
        self.scale, self.scales = 1.0, [1.0, 2.0]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale * self.scales[0]


class Config:
    def __init__(self) -> None:
        self.softcap, self.window = 2.0, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.gain, self.flag, self.kind, self.steps, self._hidden = 1.0, False, "one", 3, True
        self.scales, self.pair, self.processor = [1.0, 0.5], (1, 2), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.chunk = Layer(), Config(), None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _set(of: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(of(model), name, value)


def layer(model: Any) -> Any:
    return model.layer


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": _set(layer, "gain", 2.0),
    "a switch": _set(layer, "flag", True),
    "a text": _set(layer, "kind", "two"),
    "a whole number": _set(layer, "steps", 4),
    "a private switch": _set(layer, "_hidden", False),
    "None": _set(layer, "flag", None),
    "a deleted one": lambda m: delattr(m.layer, "gain"),
    "a new one": _set(layer, "s1", 0.9),
    "a list in place": lambda m: m.layer.scales.__setitem__(0, 3.0),
    "a list": _set(layer, "scales", [2.0]),
    "a tuple": _set(layer, "pair", (1, 3)),
    "an epsilon of a layer of PyTorch's": lambda m: setattr(m.layer.norm, "eps", 0.5),
    "a number of a processor": lambda m: setattr(m.layer.processor, "scale", 0.5),
    "a list of a processor": lambda m: m.layer.processor.scales.__setitem__(1, 0.5),
    "a new one of a processor": lambda m: setattr(m.layer.processor, "mask", True),
    "another processor": lambda m: setattr(m.layer, "processor", Scale()),
    "a setting of the model": lambda m: setattr(m, "chunk", 3),
    "a new setting of the model": lambda m: setattr(m, "slice", 3),
    "a value of the configuration": lambda m: setattr(m.config, "softcap", 5.0),
    "a configuration": lambda m: setattr(m.config, "window", 4),
    "a forward": lambda m: setattr(m.layer, "forward", lambda x: x),
    "a class": lambda m: setattr(m.layer, "__class__", type("Layer", (Layer,), {})),
    "a class of the model": lambda m: setattr(m, "__class__", type("Model", (Model,), {})),
    "a call": lambda m: setattr(m.layer, "_compiled_call_impl", lambda x: x),
    "a weight's data, transposed": lambda m: setattr(
        m.layer.linear.weight, "data", m.layer.linear.weight.data.T
    ),
    "a weight's data, narrower": lambda m: setattr(
        m.layer.linear.weight, "data", m.layer.linear.weight.data[:2]
    ),
    "training": lambda m: m.layer.train(),
    "a weight": lambda m: setattr(m.layer.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "a dtype": lambda m: m.double(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_another_signature(what: str) -> None:
    model = Model().eval()
    watch = graph_keys.Watch(model)
    before = watch.signature(model)
    assert watch.signature(model) == before
    CHANGES[what](model)
    assert watch.signature(model) != before


def test_another_call_of_a_patched_norm() -> None:
    """It has one of ours already: no more attributes than before."""
    model = Model().eval()
    hfpatch.apply(model)
    watch = graph_keys.Watch(model)
    before = watch.signature(model)
    model.layer.norm._compiled_call_impl = lambda x: x
    assert watch.signature(model) != before


def test_a_forward_of_the_models_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model().eval()
    watch = graph_keys.Watch(model)
    before = watch.signature(model)
    monkeypatch.setattr(Model, "forward", lambda self, x: x)
    assert watch.signature(model) != before


def test_what_a_pipeline_switches_on() -> None:
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
        layers_per_block=1,
    ).eval()
    for switch in (
        lambda: model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        lambda: model.enable_freeu(s1=0.8, s2=0.2, b1=1.2, b2=1.4),
        model.disable_freeu,
        lambda: model.set_attention_slice(1),
    ):
        watch = graph_keys.Watch(model)
        before = watch.signature(model)
        switch()
        assert watch.signature(model) != before


def test_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_keys.global_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert graph_keys.global_state() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert graph_keys.global_state() == before
