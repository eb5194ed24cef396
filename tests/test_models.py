"""`hfpatch.apply` on the real classes: what is swapped, how the numbers move, what comes back."""

from __future__ import annotations

import pytest
import torch
import zoo
from expect import FUSED_BLOCKS, assert_same_dicts, expected_swaps, relative_error, snapshot
from support.nearness import assert_as_near
from support.samples import SEEDS, Sample, draws_and_like

import hfpatch
from hfpatch import swap
from hfpatch.errors import PatchError

MODELS = list(zoo.ENTRIES)


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.mark.parametrize("name", MODELS)
def test_swaps_what_the_model_has(name: str) -> None:
    model = zoo.ENTRIES[name].build(torch.float32)
    report = hfpatch.apply(model)
    assert {s.path: s.op for s in report.swaps} == expected_swaps(model)
    assert {s.source for s in report.swaps if s.op != "recall"} == {"local"}
    assert not report.notes
    # everything else that was nominated has a reason
    kinds = ("no gain", "unsupported", "unexplained")  # the last of what decoding steps compute
    assert all(s.kind in kinds and s.reason for s in report.skips)
    assert all(s.reason.startswith("decoding: ") for s in report.skips if s.kind == kinds[2])


@pytest.mark.parametrize("dtype", zoo.DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_restore(name: str, dtype: torch.dtype) -> None:
    count, like = draws_and_like(name, dtype)
    draws = []
    for seed in range(SEEDS):
        sample = Sample(zoo.ENTRIES[name], dtype, seed, count // SEEDS)
        model = sample.model
        before = snapshot(model)
        state = {k: v.clone() for k, v in model.state_dict().items()}

        report = hfpatch.apply(model)
        assert len(report.swaps) == len(expected_swaps(model))
        draws += sample.draws()
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())

        assert hfpatch.restore(model) == len(report.swaps)
        assert_same_dicts(before, model)
        again = sample.entry.run(model, sample.inputs[0])
        assert torch.equal(again, sample.originals[0])  # the original's code, on the same tensors
    assert_as_near(draws, dtype, name, like)


@pytest.mark.parametrize("name", ["ltx", "llama", "sd15-unet", "t5-v1.1"])
def test_failure_in_the_middle_leaves_the_model_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build(torch.float32)
    inputs = entry.inputs(model, torch.float32)
    before, original = snapshot(model), entry.run(model, inputs)
    count = len(hfpatch.plan(model).swaps)
    for failing in (0, count // 2, count - 1):
        real, calls = swap._write, iter(range(count))

        def write(*args: object, _failing: int = failing, _calls=calls, _real=real) -> object:
            if next(_calls) == _failing:
                raise MemoryError("no memory for this one")
            return _real(*args)

        monkeypatch.setattr(swap, "_write", write)
        with pytest.raises(PatchError, match="every module was put back"):
            hfpatch.apply(model)
        monkeypatch.setattr(swap, "_write", real)
        assert_same_dicts(before, model)
        assert torch.equal(entry.run(model, inputs), original)


def test_failure_of_a_second_apply_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.ENTRIES["llama"].build(torch.float32)
    first = hfpatch.apply(model, include="LlamaRMSNorm")
    held = {p: m.__dict__.get("forward") for p, m in model.named_modules()}

    def write(*args: object) -> object:
        raise OSError("disk gone")

    monkeypatch.setattr(swap, "_write", write)
    with pytest.raises(PatchError):
        hfpatch.apply(model, include="LlamaMLP")
    assert {p: m.__dict__.get("forward") for p, m in model.named_modules()} == held
    assert len(hfpatch.status(model).swaps) == len(first.swaps)


def test_plan_changes_nothing_and_agrees_with_apply() -> None:
    model = zoo.ENTRIES["gemma3"].build(torch.bfloat16)
    before = snapshot(model)
    plan = hfpatch.plan(model)
    assert_same_dicts(before, model)
    report = hfpatch.apply(model)
    assert plan.swaps == report.swaps and plan.skips == report.skips


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("llama", "cast=input"),
        ("gemma2", "weight_offset=1"),
        ("olmo2", "cast=none"),
        ("t5", "cast=weight"),
        ("sd3", "cast=weight"),  # diffusers' own RMSNorm
        ("flux", "cast=none"),  # torch.nn.RMSNorm under the same name
    ],
)
def test_one_name_several_formulas(name: str, formula: str) -> None:
    model = zoo.ENTRIES[name].build(torch.bfloat16)
    blocks = sorted({type(m).__name__ for m in model.modules()} & FUSED_BLOCKS)
    plan = hfpatch.plan(model, exclude=blocks)  # in a fused block the norms are no swaps
    found = {s.formula for s in plan.swaps if s.op == "rms_norm"}
    assert len(found) == 1 and formula in found.pop()


def test_ltx_has_weightless_norms_without_a_tensor_of_ones() -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build(torch.float32)
    weightless = [
        p
        for p, m in model.named_modules()
        if "RMSNorm" in type(m).__name__ and getattr(m, "weight", None) is None
    ]
    assert weightless
    # alone, and as part of the fused block
    paths = {s.path for s in hfpatch.apply(model, exclude="LTXVideoTransformerBlock").swaps}
    assert paths.issuperset(weightless)
    paths = {s.path for s in hfpatch.apply(model).swaps}
    assert all(p in paths or p.rpartition(".")[0] in paths for p in weightless)
    assert all(model.get_submodule(p).weight is None for p in weightless)
    assert len(list(model.parameters())) == len(list(entry.build(torch.float32).parameters()))


def test_pipeline_argument_patches_each_module() -> None:
    entry = zoo.PIPELINES["ltx-pipeline"]
    pipe = entry.build(torch.float32)
    inputs = entry.inputs(pipe, torch.float32)
    before = entry.run(pipe, inputs)
    report = hfpatch.apply(pipe)
    parts = {k: m for k, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    expected = {f"{k}.{p}".rstrip(".") for k, m in parts.items() for p in expected_swaps(m)}
    assert {s.path for s in report.swaps} == expected
    assert {p.split(".")[0] for p in expected} >= {"transformer"}
    part = hfpatch.status(pipe.transformer)
    assert {s.path for s in part.swaps} == set(expected_swaps(pipe.transformer))
    assert all(not s.path.startswith(("transformer.", "vae")) for s in part.skips)
    after = entry.run(pipe, inputs)
    assert relative_error(after, before) < 1e-4
    assert hfpatch.restore(pipe) == len(expected)
    assert torch.equal(entry.run(pipe, inputs), before)
