"""Fused blocks under the attention backends of diffusers that a CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
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

import hfpatch
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.inputs import sample_inputs


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
        report = hfpatch.apply(model)
        if when == "after":
            model.set_attention_backend(backend)
        got = model(**inputs)[0]
    fused = [s for s in report.swaps if s.class_name == "LTXVideoTransformerBlock"]
    assert len(fused) == 2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


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
        report = hfpatch.apply(model)
        got = model(**inputs)[0]
    assert any("fused block" in s.formula for s in report.swaps)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
