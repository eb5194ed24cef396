"""benchmarks/models.py and written.py without a GPU: every way of running a model gets as many
turns, and every block with a file of its own is measured beside its capture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import zoo
from support.captured import paths
from torch._dynamo.testing import CompileCounter

import hfpatch
from hfpatch.direct_calls import has_own_call
from hfpatch.planning.families import BLOCKS, NEVER_CAPTURED

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def models() -> Iterator[ModuleType]:
    """benchmarks/models.py"""
    yield from _imported("models")


@pytest.fixture
def written() -> Iterator[ModuleType]:
    """benchmarks/written.py"""
    yield from _imported("written")


def _imported(name: str) -> Iterator[ModuleType]:
    names = ("models", "written", "families", "joint", "single_stream")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("step_ms", "rounds"), [(10, 5), (75, 5), (149, 3), (245, 2), (320, 1), (5000, 1)]
)
def test_fast_models_get_more_rounds(models: ModuleType, step_ms: float, rounds: int) -> None:
    assert models.rounds(step_ms) == rounds


@pytest.mark.filterwarnings("ignore:hfpatch. .*CUDA graphs:RuntimeWarning")  # none on a CPU
def test_every_way_gets_its_turns(
    models: ModuleType, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = zoo.ENTRIES["ltx"]
    model = entry.build()
    inputs = entry.inputs(model) | {"return_dict": False}
    counter, compiler = CompileCounter(), torch.compile
    turns: list[tuple[set[str], bool]] = []
    compiled: list[int] = []

    def milliseconds(call: Callable[[], Any], warmup: int, steps: int) -> float:
        call()
        if warmup == models.WARM_UP:  # else it asks how fast the model is
            swaps = {s.op for s in hfpatch.status(model).swaps}
            swaps |= {"block"} if paths(model) else set()
            blocks = any(has_own_call(m.__dict__) for m in model.modules())
            turns.append((swaps, blocks))
            compiled.append(counter.frame_count)
        return 100.0 - len(turns)

    monkeypatch.setitem(models.CASES, "tiny", lambda: (model, lambda m: m(**inputs)))
    monkeypatch.setattr(models, "step_milliseconds", milliseconds)
    monkeypatch.setattr(models, "queued_milliseconds", lambda call, warmup, steps: 1.0)
    monkeypatch.setattr(models, "peak_gib", lambda call: 1.0)
    monkeypatch.setattr(models, "launches", lambda call: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiler(f, backend=counter, **kw))
    row = models.measure("tiny", "whole")

    patched = turns[1][0]
    ways = {
        "eager": (set(), False),
        "patched": (patched, False),
        "graphs": (patched | ({"cuda_graphs"} if torch.cuda.is_available() else set()), False),
        "apply_and_compiled": (patched, False),
        "compiled": (set(), False),
        "compiled_blocks": (set(), True),
    }
    assert "block" in patched
    assert row["rounds"] == 4
    assert turns == 4 * list(ways.values())
    assert compiled == [3] * len(turns), "nothing is compiled again between turns"
    # later turns were shorter here, and the least counts
    assert [row[f"{name}_ms"] for name in ways] == [81.0, 80.0, 79.0, 78.0, 77.0, 76.0]
    assert all(row[f"{name}_queued_ms"] == 1.0 for name in ways)
    assert hfpatch.restore(model) == row["swaps"]


def test_every_class_with_a_file_is_measured(
    written: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models", "families", "joint", "single_stream"):
        monkeypatch.setattr(sys.modules[name], "DEVICE", "meta")
    found = set()
    for make in written.CASES.values():
        found |= {type(m).__name__ for m in make()[0].modules()}
    assert found >= BLOCKS.keys() - NEVER_CAPTURED


@pytest.mark.parametrize("entry", ["sana", "flux2"])
def test_blocks_with_a_file_beside_their_capture(
    entry: str, written: ModuleType, kernels_module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.ENTRIES[entry].build()
    inputs = zoo.ENTRIES[entry].inputs(model) | {"return_dict": False}
    times = iter(range(100, 0, -1))
    monkeypatch.setitem(written.CASES, "tiny", lambda: (model, lambda m: m(**inputs)))
    monkeypatch.setattr(written, "step_milliseconds", lambda call, warmup, steps: next(times))
    monkeypatch.setattr(written, "queued_milliseconds", lambda call, warmup, steps: next(times))
    before = dict(BLOCKS)
    row = written.measured("tiny", 2)
    assert before == BLOCKS
    count = sum(type(m).__name__ in BLOCKS for m in model.modules())
    assert (row["eager_blocks"], row["written_blocks"], row["captured_blocks"]) == (0, count, count)
    assert row["why"] and all(w.endswith(": fused ") for w in row["why"])
    assert row["written_off"] < 1e-5 and row["captured_off"] < 1e-5
    # of two turns the least, and later ones were shorter here
    assert [row[f"{w}_ms"] for w in ("eager", "written", "captured")] == [94, 92, 90]
    assert not hfpatch.status(model).swaps
