"""`status` after what users do between `apply` and it, and modules that are reached twice."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch.graphs import recording as graphs


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ln, self.act = LlamaRMSNorm(64), nn.LayerNorm(64), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.ln(self.norm(x)))


def layers() -> nn.Sequential:
    return nn.Sequential(Layer(), Layer()).requires_grad_(False)


def pipeline(**components: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(components=components)


def kinds(model: object) -> dict[str, str]:
    return {s.path: s.kind for s in hfpatch.status(model).skips}


def test_the_mode_is_read_off_the_swaps() -> None:
    model = layers()
    hfpatch.apply(model, mode="training")
    for part in (model, model[0], copy.deepcopy(model)):
        found = hfpatch.status(part)
        assert found.plan.mode == "training" and found.swaps
        assert {s.mode for s in found.swaps} == {"training"}
    hfpatch.apply(model[0], mode="inference")
    found = hfpatch.status(model)
    assert found.plan.mode == "mixed" and "(mode=mixed)" in str(found)
    assert {s.path: s.mode for s in found.swaps} == {
        "0.norm": "inference", "0.ln": "inference", "1.norm": "training", "1.ln": "training",
    }  # fmt: skip
    assert hfpatch.status(model[1]).plan.mode == "training"


def test_skips_are_those_of_the_last_apply_of_each_module() -> None:
    model = layers()
    report = hfpatch.apply(model, exclude="LlamaRMSNorm")
    assert hfpatch.status(model).skips == report.skips
    assert kinds(model[1]) == {"norm": "excluded", "act": "no gain"}
    hfpatch.apply(model[0], exclude="LayerNorm")
    found = hfpatch.status(model)
    assert [s.path for s in found.swaps] == ["0.norm", "1.ln"]
    assert kinds(model) == {
        "0.ln": "excluded", "0.act": "no gain", "1.norm": "excluded", "1.act": "no gain",
    }  # fmt: skip
    hfpatch.restore(model[0])
    assert kinds(model) == {"1.norm": "excluded", "1.act": "no gain"}
    hfpatch.restore(model)
    assert not hfpatch.status(model).skips


def test_an_attention_promises_nothing_of_the_norms_inside() -> None:
    from diffusers.models.attention_processor import Attention

    model = nn.Sequential(Attention(32, heads=2, norm_num_groups=8, residual_connection=True))
    with pytest.warns(RuntimeWarning, match="nothing was swapped"):
        report = hfpatch.apply(model)
    assert not report.swaps, "its group norm has no kernel of its own"
    (why,) = (s.reason for s in report.skips if s.path == "0")
    assert "AttnProcessor2_0" in why and "patched" not in why


def test_a_part_that_was_written_over_is_said() -> None:
    model = layers()
    hfpatch.apply(model)
    model[0].norm.forward = lambda x: x
    assert kinds(model) == {"0.norm": "foreign", "0.act": "no gain", "1.act": "no gain"}
    assert kinds(model[0]) == {"norm": "foreign", "act": "no gain"}


def test_a_component_that_is_skipped_itself() -> None:
    pipe = pipeline(norm=LlamaRMSNorm(64).requires_grad_(False), rest=layers())
    report = hfpatch.apply(pipe, exclude="LlamaRMSNorm")
    assert ("norm", "excluded") in {(s.path, s.kind) for s in report.skips}
    assert hfpatch.status(pipe).skips == report.skips
    assert kinds(pipe.components["norm"]) == {"": "excluded"}


def test_a_module_that_is_reached_twice_counts_once() -> None:
    shared = layers()
    pipe = pipeline(transformer=shared, transformer_2=shared, extra=shared[1])
    report = hfpatch.apply(pipe)
    assert [s.path for s in report.swaps] == [
        "transformer.0.norm", "transformer.0.ln", "transformer.1.norm", "transformer.1.ln",
    ]  # fmt: skip
    assert hfpatch.plan(pipe).swaps == report.swaps
    found = hfpatch.status(pipe)
    assert (found.swaps, found.skips) == (report.swaps, report.skips)
    assert hfpatch.restore(pipe) == len(report.swaps)
    with pytest.raises(
        ValueError, match=r"`transformer_2.0.norm` is `transformer.0.norm` once more; write that"
    ):
        hfpatch.apply(pipe, exclude="transformer_2.*.norm")


def test_a_shared_denoiser_gets_one_set_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "unavailable", lambda: None)  # as with a GPU
    shared = layers()
    pipe = pipeline(transformer=shared, transformer_2=shared)
    report = hfpatch.apply(pipe, cuda_graphs=True)
    assert [s.path for s in report.swaps if s.op == "cuda_graphs"] == ["transformer"]
    assert hfpatch.restore(pipe) == len(report.swaps) == 5


def test_a_copy_computes_what_its_status_says() -> None:
    model = layers()
    hfpatch.apply(model)
    twin = copy.deepcopy(model)
    hfpatch.restore(model)
    assert hfpatch.status(twin).plan.mode == "inference" and not hfpatch.status(model).swaps
    x = torch.randn(2, 64)
    torch.testing.assert_close(twin(x), model(x))
    assert hfpatch.restore(twin) == 4
