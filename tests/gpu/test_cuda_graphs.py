"""`hfpatch.apply(model, cuda_graphs=True)`: the same numbers, and what makes it record anew."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import zoo
from expect import assert_same_dicts, snapshot

import hfpatch
from hfpatch.graphs import captures
from hfpatch.graphs import recording as graphs

pytestmark = pytest.mark.gpu
NAMES = ["ltx", "wan", "sd15-unet", "flux", "sd3"]


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    """The compiled kernels must be there: these tests are about them."""


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any, dict[str, Any]]:
    entry = zoo.ENTRIES[name]
    model = entry.build(dtype)
    inputs = entry.inputs(model, dtype)
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return entry, model.cuda().requires_grad_(False), moved


def recorded(model: torch.nn.Module) -> int:
    held = graphs._graphs.get(model)
    return 0 if held is None else len(held.recorded)


@pytest.mark.parametrize("inference_mode", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers(name: str, inference_mode: bool) -> None:
    entry, model, inputs = build(name)
    before = snapshot(model)
    hfpatch.apply(model)
    other = {k: v * 0.5 if k.endswith(("states", "sample")) else v for k, v in inputs.items()}
    expected = [entry.run(model, i) for i in (inputs, other)]
    hfpatch.apply(model, cuda_graphs=True)
    with torch.inference_mode(inference_mode):
        results = [entry.run(model, i) for i in (inputs, inputs, other, inputs, other)]
    assert recorded(model) == 1, hfpatch.status(model)
    for result, i in zip(results, (0, 0, 1, 0, 1), strict=True):
        # the kernels are the same; cuBLAS may pick another algorithm for another workspace
        torch.testing.assert_close(result, expected[i], rtol=2e-2, atol=2e-2)
    assert torch.equal(results[1], results[3]) and torch.equal(results[2], results[4])
    assert not torch.equal(results[1], results[2])
    hfpatch.restore(model)
    assert_same_dicts(before, model)
    assert recorded(model) == 0


class Wrapper(torch.nn.Module):
    """A model of a user's own around a transformer: the graph is of the whole."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, **inputs: Any) -> Any:
        return self.transformer(**inputs, return_dict=False)[0]


def test_a_mask_inside_of_the_graph_may_change() -> None:
    """It is full while the graph is recorded, and is not at a replay."""
    _, model, inputs = build("ltx")
    name = "encoder_attention_mask"
    padded = torch.ones_like(inputs[name])
    padded[:, padded.shape[1] // 2 :] = 0
    full = inputs | {name: torch.ones_like(padded)}
    wrapper = Wrapper(model).eval()
    with torch.no_grad():
        expected = wrapper(**inputs | {name: padded})
        hfpatch.apply(wrapper, cuda_graphs=True)
        for _ in range(3):
            unmasked = wrapper(**full)
        got = wrapper(**inputs | {name: padded})
    assert recorded(wrapper) == 1, hfpatch.status(wrapper)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
    assert not torch.allclose(unmasked, got, rtol=3e-2, atol=3e-2)


def test_one_launch_per_step() -> None:
    entry, model, inputs = build("wan")
    hfpatch.apply(model, cuda_graphs=True)
    for _ in range(2):
        entry.run(model, inputs)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        entry.run(model, inputs)
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages()]
    assert "cudaGraphLaunch" in names, names


def test_records_anew_when_the_model_changes() -> None:
    entry, model, inputs = build("wan", torch.float32)
    hfpatch.apply(model, cuda_graphs=True)
    first = [entry.run(model, inputs) for _ in range(3)][-1]
    with torch.no_grad():
        model.proj_out.weight.mul_(2)  # in place: the graph sees it
    doubled = entry.run(model, inputs)
    assert not torch.allclose(doubled, first)
    model.proj_out.weight.data = model.proj_out.weight.data / 2
    for _ in range(3):
        torch.testing.assert_close(entry.run(model, inputs), first, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(model)
    twin.proj_out.weight.data.zero_()
    twin.proj_out.bias.data.zero_()
    for _ in range(3):
        assert not entry.run(twin, inputs).any()
    torch.testing.assert_close(entry.run(model, inputs), first, rtol=1e-4, atol=1e-5)


def test_shapes_are_bounded_and_memory_is_freed() -> None:
    entry, model, inputs = build("sd15-unet")

    def memory() -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    def apply_run_restore() -> tuple[int, int]:
        hfpatch.apply(model, cuda_graphs=2)
        for batch in (1, 2, 1, 2, 1, 2):
            part = {k: v[:batch] for k, v in inputs.items()}
            for _ in range(2):
                entry.run(model, part)
        assert recorded(model) == 2
        for size in (8, 16, 24):
            larger = inputs | {"sample": torch.randn(2, 4, size, size, device="cuda").bfloat16()}
            for _ in range(3):
                entry.run(model, larger)
        assert recorded(model) == 2
        hfpatch.restore(model)
        return memory()

    entry.run(model, inputs)
    before, _ = memory()
    reserved, allocated = apply_run_restore()
    # cuBLAS may keep a workspace, 32 MiB on Hopper, for the one stream that recorded,
    assert reserved <= before + (64 << 20)
    for _ in range(3):  # and uses it again
        reserved, again = apply_run_restore()
        assert reserved <= before + (64 << 20) and again <= allocated


def test_dropped_graphs_leave_the_others_alone() -> None:
    """Neither a graph of the same model nor another model's takes memory that they work with."""
    entry, model, inputs = build("wan")
    other = copy.deepcopy(model)
    expected = []
    for m in (model, other):
        hfpatch.apply(m, cuda_graphs=2)
        expected.append([entry.run(m, inputs) for _ in range(3)][-1])
    streams = [graphs._graphs[m]._pool.stream.cuda_stream for m in (model, other)]
    assert streams[0] != streams[1]
    part = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for _ in range(3):
        entry.run(model, part)
    assert recorded(model) == 2
    graphs._graphs[model].recorded.popitem()[1].graph.reset()
    hfpatch.restore(other)
    gc.collect()
    torch.cuda.empty_cache()
    given_back = {s.cuda_stream for s in graphs.Pool._idle[torch.cuda.current_device()]}
    assert streams[1] in given_back and streams[0] not in given_back
    taken = torch.full((64, 1 << 20), torch.nan, device="cuda")
    pieces = [torch.full((1 << 16,), torch.nan, device="cuda") for _ in range(64)]
    for _ in range(3):
        assert torch.equal(entry.run(model, inputs), expected[0])
    assert taken.isnan().all() and all(p.isnan().all() for p in pieces)
    hfpatch.apply(other, cuda_graphs=2)
    again = [entry.run(other, inputs) for _ in range(3)][-1]
    torch.testing.assert_close(again, expected[1], rtol=2e-2, atol=2e-2)
    assert graphs._graphs[other]._pool.stream.cuda_stream in given_back


def test_hooks_gradients_and_autocast_run_the_model() -> None:
    entry, model, inputs = build("wan", torch.float32)
    hfpatch.apply(model, cuda_graphs=True)
    expected = [entry.run(model, inputs) for _ in range(3)][-1]
    seen: list[int] = []
    handle = model.blocks[0].register_forward_hook(lambda *a: seen.append(1))
    with pytest.warns(RuntimeWarning, match="inside has hooks"):
        torch.testing.assert_close(entry.run(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert seen == [1]
    handle.remove()
    model.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="autograd records"):
        model(**inputs).sample.sum().backward()
    assert model.proj_out.weight.grad is not None
    with torch.autocast("cuda", torch.bfloat16), pytest.warns(RuntimeWarning, match="autocast"):
        entry.run(model, inputs)
    assert any("autocast is on" in note for note in hfpatch.status(model).plan.notes)


def test_a_model_that_synchronizes_is_left_alone() -> None:
    class Syncs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x[x > 0].sum()

    model, x = Syncs().eval(), torch.ones(3, device="cuda")
    hfpatch.apply(model, cuda_graphs=True)
    stream = torch.cuda.current_stream()
    assert model(x).tolist() == [3.0] * 3
    with pytest.warns(RuntimeWarning, match="recording failed"):
        assert model(x).tolist() == [3.0] * 3
    assert model(2 * x).tolist() == [12.0] * 3
    # what PyTorch leaves of a failed capture was put right
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device="cuda").isfinite().all()
    reserved = torch.cuda.memory_reserved()
    large = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_one_graph_at_a_time() -> None:
    """The only graph of a model goes before the next is recorded, and its memory with it."""
    entry, model, inputs = build("wan")
    hfpatch.apply(model, cuda_graphs=1)
    part = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    expected = [entry.run(model, i) for i in (inputs, part)]
    for _ in range(3):
        for i, e in zip((inputs, part), expected, strict=True):
            torch.testing.assert_close(entry.run(model, i), e, rtol=2e-2, atol=2e-2)
    assert recorded(model) == 1
    assert not any("recording failed" in n for n in hfpatch.status(model).plan.notes)


def test_two_streams_take_turns() -> None:
    entry, model, inputs = build("sd15-unet")
    hfpatch.apply(model, cuda_graphs=True)
    expected = [entry.run(model, inputs) for _ in range(3)][-1]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(6):
        with torch.cuda.stream(streams[i % 2]):
            results.append(entry.run(model, inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(r, expected) for r in results)


class _Cycle:
    """Garbage that only Python's collector finds, with a graph and its memory."""

    def __init__(self) -> None:
        self.itself = self
        held: list[torch.Tensor] = []
        self.graph = captures.recorded(lambda: held.append(torch.ones(1 << 20, device="cuda") * 2))
        self.held = held


def test_garbage_with_graphs_does_not_end_a_capture() -> None:
    before = gc.get_threshold()
    try:
        for _ in range(3):
            gc.disable()
            for _ in range(4):
                _Cycle()
            gc.enable()
            gc.set_threshold(1)
            kept: list[object] = []

            def work(kept: list[object] = kept) -> None:
                x = torch.ones(8, device="cuda")
                for _ in range(50):
                    kept.append([x + 1])

            captures.recorded(work).replay()
            torch.cuda.synchronize()
    finally:
        gc.set_threshold(*before)
        gc.enable()
