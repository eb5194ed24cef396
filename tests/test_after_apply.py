"""What happens around a patched model later: other threads and processes, other models, files.

(What users do to one model, in both orders: tests/compat.)
"""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from accelerate.hooks import remove_hook_from_module
from expect import assert_same_dicts, expected_swaps, relative_error, snapshot
from torch import nn

import hfpatch
from hfpatch.proofs import forget_proofs

#: fp32 through two layers, with reductions in another order.
NOISE = 1e-5


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def build(name: str) -> tuple[zoo.Entry, Any, dict[str, Any]]:
    entry = zoo.ENTRIES[name]
    model = entry.build()
    return entry, model, entry.inputs(model)


# Threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "flux", "llama"])
def test_threads_call_while_it_is_patched_and_restored(name: str) -> None:
    entry, model, inputs = build(name)
    before, expected = snapshot(model), entry.run(model, inputs)
    done = threading.Event()

    def call() -> float:
        worst, calls = 0.0, 0
        while not done.is_set() or not calls:
            worst = max(worst, relative_error(entry.run(model, inputs), expected))
            calls += 1
        return worst

    with ThreadPoolExecutor(2) as executor:
        callers = [executor.submit(call) for _ in range(2)]
        try:
            for _ in range(5):
                hfpatch.apply(model)
                hfpatch.restore(model)
        finally:
            done.set()
        assert all(caller.result() <= NOISE for caller in callers)
    assert_same_dicts(before, model)
    assert torch.equal(entry.run(model, inputs), expected)


# Other models -------------------------------------------------------------------------------------


def test_models_that_share_modules() -> None:
    """A shared module is patched once, whoever asks, and restored by whoever asks first."""
    entry, one, inputs = build("llama")
    two = entry.build(seed=3)
    two.model.layers[0].mlp, two.model.norm = one.model.layers[0].mlp, one.model.norm
    both = nn.ModuleList([one, two])
    before = snapshot(both)
    of_one, of_two = entry.run(one, inputs), entry.run(two, inputs)
    hfpatch.apply(one)
    assert relative_error(entry.run(two, inputs), of_two) <= NOISE
    hfpatch.apply(two)
    hfpatch.restore(one)
    assert torch.equal(entry.run(one, inputs), of_one)
    assert relative_error(entry.run(two, inputs), of_two) <= NOISE
    hfpatch.restore(two)
    assert_same_dicts(before, both)
    hfpatch.apply(both)
    assert len(hfpatch.status(both).swaps) == len(expected_swaps(both))
    hfpatch.restore(two)
    hfpatch.restore(both)
    assert_same_dicts(before, both)
    assert torch.equal(entry.run(two, inputs), of_two)


def test_a_pipeline_with_one_model_under_two_names() -> None:
    from diffusers import DiffusionPipeline

    class Twice(DiffusionPipeline):
        def __init__(self, transformer: nn.Module, transformer_2: nn.Module) -> None:
            super().__init__()
            self.register_modules(transformer=transformer, transformer_2=transformer_2)

    entry, model, inputs = build("wan")
    before, expected = snapshot(model), entry.run(model, inputs)
    pipe = Twice(model, model)
    hfpatch.apply(pipe)
    hfpatch.apply(pipe)
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert hfpatch.restore(pipe) == len(expected_swaps(model))
    assert_same_dicts(before, model)
    assert torch.equal(entry.run(model, inputs), expected)


def test_a_forward_that_was_written_over_leaves_nothing_of_ours() -> None:
    entry, model, inputs = build("llama")
    hfpatch.apply(model)
    norm = model.model.norm
    norm.forward = lambda x: x * 0.5
    expected = entry.run(model, inputs)
    hfpatch.restore(model)
    assert set(norm.__dict__) - set(nn.Module().__dict__) == {"variance_epsilon", "forward"} | {
        name for name in norm.__dict__ if name.startswith("_is_hf")
    }
    assert relative_error(entry.run(model, inputs), expected) <= NOISE


# Hooks that come and go ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "t5-v1.1"])
def test_offloading_that_comes_and_goes(name: str) -> None:
    from accelerate import cpu_offload

    entry, model, inputs = build(name)
    expected = entry.run(model, inputs)
    hfpatch.apply(model)
    count = len(hfpatch.status(model).swaps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a block hands over to its parts
        cpu_offload(model, "cpu")
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    remove_hook_from_module(model, recurse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the kernels run again
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert len(hfpatch.status(model).swaps) == count == hfpatch.restore(model)
    assert torch.equal(entry.run(model, inputs), expected)


def test_what_was_changed_is_said_once() -> None:
    forget_proofs()  # what was said is remembered with the proof
    entry, model, inputs = build("ltx")
    hfpatch.apply(model)
    model.transformer_blocks[0].norm1.eps = 0.5
    with pytest.warns(RuntimeWarning, match="got other settings, or hooks"):
        entry.run(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry.run(model, inputs)
    report = hfpatch.apply(model)
    # a whole block again with the norm as it is now, or its parts, with a reason
    known = {s.path for s in report.swaps} | {s.path for s in report.skips}
    assert "transformer_blocks.0" in known


class NormWithTables(nn.LayerNorm):
    """With attributes that are no settings: a copy's tensors have no one answer to ==."""

    def __init__(self) -> None:
        super().__init__(64)
        self.tables = (torch.ones(2), torch.ones(2))
        self.history: list[int] = []


def test_a_copy_of_a_module_that_holds_tensors_in_a_tuple() -> None:
    model = nn.Sequential(NormWithTables()).eval().requires_grad_(False)
    x = torch.randn(3, 64)
    hfpatch.apply(model)
    patched = model(x)
    copied = copy.deepcopy(model)
    copied[0].history.append(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copied(x), patched)


# Files --------------------------------------------------------------------------------------------

LOADER = """
    import sys, torch

    class Nowhere:
        def find_spec(self, name, *rest):
            if name.partition(".")[0].startswith("hfpatch"):
                raise ImportError(f"{name} is not installed here")

    sys.meta_path.insert(0, Nowhere())
    model, x, expected = torch.load(sys.argv[1], weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert not any(name.startswith(("hfpatch", "_hfpatch")) for name in sys.modules)
"""


def test_a_saved_model_loads_where_hfpatch_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16), nn.RMSNorm(16))
    model.eval().requires_grad_(False)
    x = torch.randn(3, 16)
    expected = model(x)
    hfpatch.apply(model)
    assert hfpatch.status(model).swaps
    model(x)
    torch.save((model, x, expected), tmp_path / "model.pt")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADER), str(tmp_path / "model.pt")],
        check=True,
        timeout=300,
    )


# Inference mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx", "llama"])
def test_applied_in_inference_mode_and_trained_outside(name: str) -> None:
    entry, model, inputs = build(name)
    expected = entry.run(model, inputs)
    with torch.inference_mode():
        hfpatch.apply(model)
        assert relative_error(entry.run(model, inputs), expected) <= NOISE
    assert relative_error(entry.run(model, inputs), expected) <= NOISE
    twin = entry.build().requires_grad_(True)
    model.requires_grad_(True)
    for each in (model, twin):
        entry.output(each(**inputs)).square().mean().backward()
    for (path, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), path
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
