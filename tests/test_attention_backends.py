"""Fused blocks under the attention backends of diffusers that a CPU has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    CogVideoXTransformer3DModel,
    CosmosTransformer3DModel,
    LTXVideoTransformer3DModel,
    Lumina2Transformer2DModel,
    MochiTransformer3DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
)
from support.captured import paths

import hfpatch
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.inputs import sample_inputs
from hfpatch.regions.offer import forget

NATIVE, MATH = AttentionBackendName.NATIVE, AttentionBackendName._NATIVE_MATH


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    """`set_attention_backend` changes the default of every model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        native = AttentionBackendName.NATIVE
        monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", native)
        yield


@pytest.mark.parametrize("backend", ["native", "_native_math"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ltx_under_a_backend(backend: str, when: str) -> None:
    """PyTorch's unfused attention answers [B, H, S, D] in memory, which a block once could not
    take."""
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=2, caption_channels=24,
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 12, 16),
        "encoder_hidden_states": torch.randn(2, 5, 24),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "num_frames": 3,
        "height": 2,
        "width": 2,
        "return_dict": False,
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        if when == "before":
            model.set_attention_backend(backend)
        hfpatch.apply(model)
        if when == "after":
            model(**inputs)  # decided with the other one
            model.set_attention_backend(backend)
        for _ in range(2):
            got = model(**inputs)[0]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(paths(model)) == 2


@pytest.mark.parametrize(
    "cls",
    [
        *(SD3Transformer2DModel, CogVideoXTransformer3DModel, MochiTransformer3DModel),
        *(Lumina2Transformer2DModel, PixArtTransformer2DModel, SanaTransformer2DModel),
    ],
)
def test_a_backend_stays_out_of_attention_that_is_not_dispatched(
    cls: type, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another model's `set_attention_backend` left active, of a lower precision say, is none
    of a model whose processors call PyTorch's attention."""

    def none_of_yours(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("the original does not call it")

    torch.manual_seed(0)
    model = diffusers_model(cls).eval()
    inputs = sample_inputs(model, batch=2)
    backends = _AttentionBackendRegistry._backends
    monkeypatch.setitem(backends, AttentionBackendName._NATIVE_MATH, none_of_yours)
    with torch.no_grad(), attention_backend("_native_math"):
        expected = model(**inputs)[0]
        hfpatch.apply(model)
        for _ in range(2):
            got = model(**inputs)[0]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert paths(model)


def _captured(cls: type) -> tuple[Any, Any, dict[str, Any]]:
    """A model, the same with blocks that run fused, and inputs."""
    torch.manual_seed(0)
    model: Any = diffusers_model(cls).eval().requires_grad_(False)
    inputs = sample_inputs(model, batch=2)
    patched = copy.deepcopy(model)
    hfpatch.apply(patched, blocks=True, decoding=False)
    for _ in range(2):
        patched(**inputs)
    assert "fused" in {c.state for c in hfpatch.status(patched).plan.candidates}
    return model, patched, inputs


def _other_attention(monkeypatch: pytest.MonkeyPatch, name: Any, when: Callable[..., bool]) -> None:
    """A backend whose results are others, so that it is seen whether it was called."""
    own = _AttentionBackendRegistry._backends[name]

    def twice(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.pop("_parallel_config", None)
        out = own(query, key, value, *args, **kwargs)
        return 2 * out if when(config) else out

    monkeypatch.setitem(_AttentionBackendRegistry._backends, name, twice)


@pytest.mark.parametrize("cls", [ChromaTransformer2DModel, CosmosTransformer3DModel])
def test_a_captured_block_is_of_the_backend_that_was_active(
    cls: type, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers looks the backend up at each call; a capture held the first one's attention."""
    _other_attention(monkeypatch, MATH, lambda _: True)
    model, patched, inputs = _captured(cls)
    plain = model(**inputs)[0]
    with attention_backend("_native_math"):
        expected = model(**inputs)[0]
        assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3)
        for _ in range(2):
            torch.testing.assert_close(patched(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patched(**inputs)[0], plain, rtol=1e-4, atol=1e-4)


def test_a_captured_block_is_of_the_backend_that_its_processors_name(
    kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    _other_attention(monkeypatch, MATH, lambda _: True)
    model, patched, inputs = _captured(ChromaTransformer2DModel)
    plain = model(**inputs)[0]
    for each in (model, patched):
        each.set_attention_backend("_native_math")
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", NATIVE)
    expected = model(**inputs)[0]
    assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3)
    for _ in range(2):
        torch.testing.assert_close(patched(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
    patched.reset_attention_backend()
    torch.testing.assert_close(patched(**inputs)[0], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_captured_block_leaves_attention_that_is_split_over_processes(
    when: str, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `enable_parallelism` leaves a model: each process has a part of the tokens."""
    _other_attention(monkeypatch, NATIVE, lambda config: config is not None)
    model, patched, inputs = _captured(ChromaTransformer2DModel)
    if when == "before the first call":
        forget()
        hfpatch.restore(patched)
        hfpatch.apply(patched, blocks=True, decoding=False)
    other = copy.deepcopy(patched)
    for each in (model, patched):
        for m in each.modules():
            if hasattr(m, "processor"):
                monkeypatch.setattr(m.processor, "_parallel_config", "a mesh", raising=False)
    expected = model(**inputs)[0]
    for _ in range(2):
        torch.testing.assert_close(patched(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
    reasons = {c.reason for c in hfpatch.status(patched).plan.candidates}
    assert reasons == {"its attention is split over several GPUs"}
    assert {c.reason for c in hfpatch.status(other).plan.candidates} == {""}
