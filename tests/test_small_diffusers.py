"""Small models of diffusers' classes, inputs of theirs, and which classes of blocks run fused."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.coverage import page
from hfpatch.coverage.blocks import block_paths
from hfpatch.coverage.count import row_of
from hfpatch.coverage.small_diffusers import diffusers_model
from hfpatch.coverage.small_transformers import MOST
from hfpatch.inputs import Sizes, sample_inputs

#: By what was missing: sizes that go together, a list of models, a layout, an argument.
CLASSES = (
    *("ChromaTransformer2DModel", "ZImageTransformer2DModel", "Kandinsky5Transformer3DModel"),
    *("HunyuanDiT2DModel", "FluxMultiControlNetModel", "ZImageControlNetModel", "MultiAdapter"),
    *("CogVideoXTransformer3DModel", "AnyFlowTransformer3DModel", "UNetMotionModel"),
    *("PriorTransformer", "OmniGenTransformer2DModel", "StableAudio3DiTModel", "UVit2DModel"),
    *("Ideogram4Transformer2DModel", "QwenImage21Transformer2DModel", "SD3ControlNetModel"),
    *("WanAnimateTransformer3DModel", "LuminaNextDiT2DModel", "AceStepTransformer1DModel"),
)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: what is fused depends on them."""


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return [t for o in outputs for t in _tensors(o)] if isinstance(outputs, (list, tuple)) else []


def _small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return diffusers_model(getattr(diffusers, name)).eval().requires_grad_(False)


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_it_is_built_called_and_stays_the_same(name: str) -> None:
    model = _small(name)
    assert sum(p.numel() for p in model.parameters()) <= MOST
    given = [sample_inputs(model, batch=batch, seed=batch) for batch in (2, 3)]
    before = [_tensors(model(**inputs)) for inputs in given]
    assert all(before)
    hfpatch.apply(model, blocks=True, decoding=False)
    for _ in range(2):
        for inputs, wanted in zip(given, before, strict=True):
            for found, original in zip(_tensors(model(**inputs)), wanted, strict=True):
                torch.testing.assert_close(found, original, rtol=1e-3, atol=1e-4)
    hfpatch.restore(model)
    for inputs, wanted in zip(given, before, strict=True):
        assert all(map(torch.equal, _tensors(model(**inputs)), wanted))


def test_sizes_that_are_asked_for_are_those_of_a_class_of_its_own() -> None:
    model = _small("Kandinsky5Transformer3DModel")
    sizes = Sizes({"height": 8, "width": 4, "frames": 2})
    inputs = sample_inputs(model, batch=1, sizes=sizes)
    assert inputs["hidden_states"].shape[:4] == (1, 2, 8, 4)
    assert sizes.unused() == []


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class InnerBlock(Mix):
    pass


class OuterBlock(Mix):
    """A part of it is called a block too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InnerBlock()


class StageBlock(Mix):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OuterBlock()])


class WrapperBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = InnerBlock()


class FinalLayer(nn.Module):
    """No attention, and no MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.scale = nn.Sequential(nn.SiLU(), nn.Linear(4, 4))


def test_what_counts_as_a_block() -> None:
    model = nn.ModuleDict(
        {"stage": StageBlock(), "wrapper": WrapperBlock(), "final": FinalLayer(), "other": Mix()}
    )
    assert block_paths(model) == {"stage.blocks.0": "OuterBlock", "wrapper.block": "InnerBlock"}


def test_a_row_names_the_classes_of_its_blocks() -> None:
    row = row_of(lambda: diffusers_model(diffusers.FluxTransformer2DModel))
    assert row["classes"] == {"FluxSingleTransformerBlock": None, "FluxTransformerBlock": None}
    left = row_of(lambda: diffusers_model(diffusers.AnyFlowFARTransformer3DModel))
    assert "BlockMask" in left["classes"]["AnyFlowTransformerBlock"]


def test_a_tensor_that_is_made_of_numbers_does_not_end_a_proof() -> None:
    """T5Film's mask is `where(mask > 0, 0, -1e10)`, in the default dtype, not in the proof's."""
    row = row_of(lambda: diffusers_model(diffusers.T5FilmDecoder))
    assert row["classes"] == {"DecoderLayer": None} and row["blocks"] == [2, 2]


def test_the_page_counts_classes_and_reads_rows_that_have_none() -> None:
    old = {"category": "nothing", "norms": [0, 0], "mlps": [0, 0], "blocks": [1, 1]}
    rows = {
        "diffusers A": {**old, "classes": {"OneBlock": None, "TwoBlock": "why not"}},
        "diffusers B": {**old, "classes": {"OneBlock": "elsewhere"}},
        "diffusers C": old,
    }
    counts = page.counts_of(rows)
    assert counts["diffusers"][page.CLASSES] == [1, 2]
    text = page.page({"models": rows, "counts": counts, "versions": dict.fromkeys(page.LIBRARIES)})
    assert "| block classes fused | 0 of 0 | 1 of 2 |" in text
    assert "| TwoBlock | 1 | why not |" in text and "| OneBlock |" not in text
