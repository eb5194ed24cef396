"""A deleted model is gone after one pass of Python's collector, as a person expects of
`del model; gc.collect(); torch.cuda.empty_cache()`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from support.cpu_graphs import CpuGraphs
from torch import nn
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3ForCausalLM

import hfpatch

_IDS = torch.arange(3, 40).view(1, -1)
_GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}


def qwen() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def bert() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    return BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))


def ltx() -> nn.Module:
    heads = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32}
    widths = {"cross_attention_dim": 64, "caption_channels": 64}
    return LTXVideoTransformer3DModel(in_channels=16, out_channels=16, **heads, **widths)


def parametrized() -> nn.Module:
    """PyTorch gives each such layer a class of its own, whose closures hold the layer."""
    model: Any = qwen()
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
    return model  # type: ignore[no-any-return]


def text(model: Any) -> None:
    model.generate(_IDS, **_GREEDY)
    model.generate(_IDS.repeat(2, 1), **_GREEDY)


def forward(model: nn.Module) -> None:
    model(_IDS)


def video(model: nn.Module) -> None:
    model(
        hidden_states=torch.randn(1, 24, 16),
        encoder_hidden_states=torch.randn(1, 8, 64),
        encoder_attention_mask=torch.ones(1, 8),
        timestep=torch.tensor([500.0]),
        num_frames=2,
        height=3,
        width=4,
    )


def training(model: Any) -> None:
    with torch.enable_grad():
        model(_IDS, labels=_IDS).loss.backward()


@pytest.mark.parametrize(
    ("make", "call", "settings"),
    [
        pytest.param(qwen, text, {}, id="text"),
        pytest.param(qwen, text, {"blocks": True}, id="text and blocks"),
        pytest.param(qwen, text, {"decoding": "int8"}, id="8 bits"),
        pytest.param(qwen, forward, {"decoding": False}, id="prefill"),
        pytest.param(qwen, training, {"mode": "training"}, id="training"),
        pytest.param(parametrized, text, {}, id="parametrized"),
        pytest.param(parametrized, text, {"blocks": True}, id="parametrized and blocks"),
        pytest.param(parametrized, training, {"mode": "training"}, id="parametrized training"),
        pytest.param(bert, forward, {"blocks": True}, id="encoder"),
        pytest.param(ltx, video, {}, id="diffusion"),
    ],
)
def test_a_deleted_model_is_freed_in_one_pass(
    make: Callable[[], nn.Module],
    call: Callable[[Any], None],
    settings: dict[str, Any],
    kernels_dir: object,
) -> None:
    model = make().eval()
    hfpatch.apply(model, **settings)
    with torch.no_grad():
        for _ in range(3):
            call(model)
    parts = [(name, weakref.ref(part)) for name, part in model.named_modules()]
    weights = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
    del model
    gc.collect()
    assert [name for name, part in parts + weights if part() is not None] == []


def test_a_copy_is_freed_without_its_original_and_the_other_way_round(
    kernels_dir: object,
) -> None:
    for first in (0, 1):
        models: list[Any] = [qwen().eval()]
        hfpatch.apply(models[0])
        text(models[0])
        models.append(copy.deepcopy(models[0]))
        text(models[1])
        parts = [weakref.ref(part) for part in models[first].modules()]
        want = models[1 - first].generate(_IDS, **_GREEDY)
        del models[first]
        gc.collect()
        gc.collect()  # a copy shares what its original's forward owns: the second pass frees that
        assert not any(part() is not None for part in parts)
        assert torch.equal(models[0].generate(_IDS, **_GREEDY), want)


@pytest.mark.parametrize(
    ("make", "call", "settings"),
    [
        pytest.param(qwen, forward, {"decoding": False}, id="text"),
        pytest.param(bert, forward, {"blocks": True}, id="encoder"),
        pytest.param(ltx, video, {"gain": "time"}, id="diffusion"),
    ],
)
def test_a_deleted_model_with_recordings_is_freed_in_one_pass(
    make: Callable[[], nn.Module],
    call: Callable[[Any], None],
    settings: dict[str, Any],
    kernels_dir: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = CpuGraphs(monkeypatch)
    model = make().eval()
    hfpatch.apply(model, cuda_graphs=True, **settings)
    with torch.no_grad():
        for _ in range(24):
            call(model)
    assert gpu.made and not any(graph.freed for graph in gpu.made)
    graphs = [weakref.ref(graph) for graph in gpu.made]
    gpu.made.clear()
    parts = [(name, weakref.ref(part)) for name, part in model.named_modules()]
    weights = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
    del model
    gc.collect()
    assert [name for name, part in parts + weights if part() is not None] == []
    assert not any(graph() is not None for graph in graphs)
