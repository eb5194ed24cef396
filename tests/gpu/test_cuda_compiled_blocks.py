"""Fused blocks in compiled models on a GPU: through inductor, and in its CUDA graphs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import zoo

import hfpatch
from hfpatch.blocks import opaque

pytestmark = pytest.mark.gpu


def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0].clone()  # type: ignore[no-any-return]


def moved(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(moved(v) for v in value)
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["ltx", "wan", "flux", "vit", "qwen-image"])
@pytest.mark.parametrize("called", [False, True])
def test_compiled_and_patched(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, mode: str, called: bool
) -> None:
    """As near to eager as the patched model is, in one graph that calls every block."""
    torch._dynamo.reset()
    found: list[Any] = []
    find = opaque._block_of

    def counted(anchor: torch.Tensor) -> Any:
        found.append(find(anchor))
        return found[-1]

    monkeypatch.setattr(opaque, "_block_of", counted)
    monkeypatch.setattr(opaque, "LEAST_WORK", 0)
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.bfloat16)
    inputs = {k: moved(v) for k, v in entry.inputs(model, torch.bfloat16).items()}
    model, inputs = model.cuda(), inputs | {"return_dict": False}
    expected = run(model, inputs)
    report = hfpatch.apply(model)
    blocks = {c.path for c in report.plan.candidates}
    if called:  # else the operators' first calls decide
        run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    results = [run(compiled, inputs) for _ in range(4)]
    scale = expected.float().abs().max()
    limit = 2 * (run(model, inputs).float() - expected.float()).abs().max() / scale + 0.02
    for got in results:
        assert (got.float() - expected.float()).abs().max() / scale <= limit
    assert {c.state for c in hfpatch.status(model).plan.candidates} == {"fused"}
    paths = {module: path for path, module in model.named_modules()}
    assert {paths[block] for block in found} == blocks != set()
    hfpatch.restore(model)
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_mask_that_is_written_to(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Left out of the compiled blocks while it masks nothing, also where they are recorded."""
    torch._dynamo.reset()
    monkeypatch.setattr(opaque, "LEAST_WORK", 0)
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    inputs = {k: moved(v) for k, v in entry.inputs(model, torch.float32).items()}
    mask = torch.ones_like(inputs["encoder_attention_mask"])
    model, inputs = model.cuda(), inputs | {"return_dict": False, "encoder_attention_mask": mask}
    hfpatch.apply(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    results = []
    for last in (1, 0, 1):
        mask[:, -1] = last
        results.append(run(model, inputs))
        for _ in range(4):
            torch.testing.assert_close(run(compiled, inputs), results[-1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-3)
