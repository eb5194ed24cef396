"""CUDA graphs without a GPU: which calls are alike, what may be recorded, what is kept."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from expect import assert_same_dicts, expected_swaps, snapshot
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfpatch
from hfpatch.attention import worth_cudnn
from hfpatch.blocks.memo import Capture, for_a_graph, rehearsal
from hfpatch.blocks.parts import Constant
from hfpatch.collector import without_collection
from hfpatch.graphs import recording as graphs
from hfpatch.graphs.host_reads import Answers
from hfpatch.graphs.kept import check_limit
from hfpatch.graphs.keys import NotCapturable, call_key, model_signature, rebuild_call
from hfpatch.graphs.recording import ModelGraphs


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors say that they are on a GPU: the keys and decisions look at nothing else."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda t: not t.is_meta))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("as_cuda")
class TestKeys:
    def key(self, *args: Any, **kwargs: Any) -> Any:
        return call_key(args, kwargs)[0]

    def test_alike(self) -> None:
        x = torch.ones(2, 3)
        assert self.key(x, scale=1.0, more={"a": [x, (x,)]}) == self.key(
            x + 1, more={"a": [x * 2, (x,)]}, scale=1.0
        )
        assert hash(self.key(x, kind=torch.float16)) == hash(self.key(x, kind=torch.float16))

    @pytest.mark.parametrize(
        "other",
        [
            (torch.ones(3, 2), {}),
            (torch.ones(2, 3, dtype=torch.float64), {}),
            (torch.ones(3, 2).t(), {}),
            (torch.ones(2, 3), {"scale": 2.0}),
            (torch.ones(2, 3), {"scale": 1}),
            (torch.ones(2, 3), {"scale": True}),
            (torch.ones(2, 3), {"scale": torch.ones(())}),
            (torch.ones(2, 3), {"scale": [1.0]}),
            (torch.ones(2, 3), {"scale": (1.0,)}),
            (torch.ones(2, 3), {"scale": {"a": 1.0}}),
            (torch.ones(2, 3), {"other": 1.0}),
            (torch.ones(2, 3), {}),
        ],
        ids=str,
    )
    def test_not_alike(self, other: tuple[Tensor, dict[str, Any]]) -> None:
        assert self.key(torch.ones(2, 3), scale=1.0) != self.key(other[0], **other[1])

    def test_tensors_go_back_where_they_were(self) -> None:
        a, b, c, d = (torch.full((), float(i)) for i in range(4))
        args, kwargs = (a, 5), {"z": {"q": b, "p": [c]}, "y": d}
        _, tensors = call_key(args, kwargs)
        again = rebuild_call(args, kwargs, [t + 10 for t in tensors])
        assert again == ((a + 10, 5), {"z": {"q": b + 10, "p": [c + 10]}, "y": d + 10})
        assert list(again[1]) == ["z", "y"] and list(again[1]["z"]) == ["q", "p"]

    def test_refused(self) -> None:
        class Cache:
            pass

        class Special(Tensor):
            pass

        x = torch.ones(2)
        for value, message in (
            (Cache(), "`v` is a Cache"),
            (lambda: 0, "`v` is a function"),
            ({"a": {1, 2}}, r"`v`\['a'\] is a set"),
            (x.as_subclass(Special), "`v` is a Special"),
            (torch.ones(2, device="meta"), "`v` is on meta, not on a GPU"),
            (torch.ones(2, requires_grad=True), "`v` requires a gradient"),
        ):
            with pytest.raises(NotCapturable, match=message):
                call_key((x,), {"v": value})
        with pytest.raises(NotCapturable, match="no tensor argument"):
            call_key((1,), {})


@pytest.mark.usefixtures("as_cuda")
class TestDecisions:
    def model(self) -> nn.Module:
        entry = zoo.ENTRIES["wan"]
        return entry.build().requires_grad_(False)

    def test_signature_sees_what_a_graph_bakes_in(self) -> None:
        model: Any = self.model()
        before = model_signature(model)
        assert model_signature(model) == before
        assert model_signature(copy.deepcopy(model)) != before

        def changed() -> bool:
            nonlocal before
            now = model_signature(model)
            different, before = now != before, now
            return different

        linear = model.blocks[0].attn1.to_q
        with torch.no_grad():
            linear.weight.add_(1)
        assert not changed()  # the graph reads the new values
        linear.weight.data = linear.weight.data.clone()
        assert changed()
        linear.weight = nn.Parameter(linear.weight.data.clone(), requires_grad=False)
        assert changed()
        model.blocks[0].attn1.set_processor(type(model.blocks[0].attn1.processor)())
        assert changed()
        linear.scaling = {"default": 1.0}
        assert changed()
        linear.scaling["default"] = 0.5
        assert changed()
        model.blocks[1].train()
        assert changed()
        model.blocks[0].norm1.eps = 0.5
        assert changed()
        model.blocks[0].norm1.__class__ = type("Other", (type(model.blocks[0].norm1),), {})
        assert changed()
        model.blocks[0].forward = MethodType(lambda self, x, *rest: x, model.blocks[0])  # as a swap
        assert changed()
        del model.blocks[0].forward
        assert changed()

    def decide(self, held: ModelGraphs, model: nn.Module, *args: Tensor) -> Any:
        key, tensors = held.kind(model, args, {})
        held.look(model, key)
        return key, tensors

    def test_decides(self) -> None:
        model, x = self.model(), torch.ones(2)
        held = ModelGraphs()
        key, tensors = self.decide(held, model, x)
        assert tensors == [x] and self.decide(held, model, x + 1)[0] == key
        with sdpa_kernel(SDPBackend.MATH):
            assert self.decide(held, model, x)[0] != key
        held.failed[key] = "no"
        with pytest.raises(NotCapturable, match=r"^no$"):
            self.decide(held, model, x)
        model.requires_grad_(True)
        with pytest.raises(NotCapturable, match="autograd records"):
            self.decide(held, model, x)
        with torch.no_grad():
            self.decide(held, model, x, x)
        model.requires_grad_(False).train()
        with pytest.raises(NotCapturable, match="training mode"):
            self.decide(held, model, x)
        model.eval()
        outer = model.register_forward_hook(lambda *a: None)
        self.decide(held, model, x, x)  # runs outside of the graph
        outer.remove()
        model.blocks[0].register_forward_hook(lambda *a: None)
        with pytest.raises(NotCapturable, match="`WanTransformerBlock` inside has hooks"):
            self.decide(held, model, x)

    def test_weights_without_an_address(self) -> None:
        """What `fully_shard` makes of them after graphs were recorded."""

        class Sharded(Tensor):
            def data_ptr(self) -> int:
                raise RuntimeError("Cannot access data pointer of Tensor")

        model, x, held = self.model(), torch.ones(2), ModelGraphs()
        key, _ = self.decide(held, model, x)
        held.recorded[key] = Recorded()  # type: ignore[assignment]
        linear: Any = model.get_submodule("blocks.0.attn1.to_q")
        weight = linear.weight.data.as_subclass(Sharded)
        linear._parameters["weight"] = weight
        with pytest.warns(RuntimeWarning, match="not plain tensors"):
            assert held.run(model, lambda model, x: "original", (x,), {}) == "original"

    def test_a_change_of_the_model_drops_the_graphs(self) -> None:
        model: Any = self.model()
        x = torch.ones(2)
        held = ModelGraphs()
        self.decide(held, model, x)
        entry = Recorded()
        held.recorded["a"] = entry  # type: ignore[assignment]
        self.decide(held, model, x)
        assert held.recorded
        model.proj_out.weight.data = model.proj_out.weight.data.clone()
        self.decide(held, model, x)
        assert not held.recorded and entry.graph.freed


class Recorded:
    def __init__(self) -> None:
        self.graph = Graph()
        self.answers = Answers()
        self.caches: list[Any] = []

    def result(self, copies: Any, caches: Any) -> Any:
        return copies


class Graph:
    freed = False

    def reset(self) -> None:
        self.freed = True


class Offset:
    """A generator that counts what was drawn."""

    value = 0

    def get_offset(self) -> int:
        return self.value

    def set_offset(self, value: int) -> None:
        self.value = value


@pytest.mark.usefixtures("as_cuda")
def test_recorded_at_the_second_call_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def record(*args: Any) -> Any:
        made.append(Recorded())
        return made[-1]

    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(graphs, "_generator", lambda device: Offset())
    monkeypatch.setattr(ModelGraphs, "_replay", lambda self, entry, tensors: entry)
    held, model = ModelGraphs(limit=2), nn.Linear(3, 3).eval().requires_grad_(False)

    def original(model: nn.Module, x: Tensor) -> str:
        return "original"

    def call(size: int) -> Any:
        return held.run(model, original, (torch.ones(size),), {})

    assert call(1) == "original"
    assert call(1) is made[0] and call(1) is made[0]
    assert call(2) == "original" and call(2) is made[1]
    assert call(1) is made[0]  # used later than 2
    assert call(3) == "original" and call(3) is made[2]
    assert made[1].graph.freed and not made[0].graph.freed
    assert call(1) is made[0] and len(held.recorded) == 2
    held.clear()
    assert all(entry.graph.freed for entry in made)


@pytest.mark.usefixtures("as_cuda")
def test_a_replay_that_came_too_early_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules are looked at while the GPU works; weights that moved are seen before."""
    generator, replayed = Offset(), []

    def replay(self: ModelGraphs, entry: Any, tensors: list[Tensor]) -> Any:
        replayed.append(entry)
        generator.value += 4
        return entry

    monkeypatch.setattr(graphs, "_record", lambda *args: Recorded())
    monkeypatch.setattr(graphs, "_generator", lambda device: generator)
    monkeypatch.setattr(ModelGraphs, "_replay", replay)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).eval().requires_grad_(False)
    held = ModelGraphs()

    def call() -> Any:
        return held.run(model, lambda model, x: "original", (torch.ones(3),), {})

    def settled() -> Any:
        call()
        entry = call()
        assert call() is entry != "original"
        replayed.clear()
        generator.value = 0
        return entry

    for early, change in (
        (1, lambda: setattr(model[1], "eps", model[1].eps / 2)),
        (1, lambda: setattr(model, "1", copy.deepcopy(model[1]))),
        (1, lambda: model.append(nn.Linear(3, 3).requires_grad_(False))),
        (0, lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(3), requires_grad=False))),
        (0, lambda: setattr(model[0].weight, "data", model[0].weight.data.clone())),
    ):
        entry = settled()
        change()
        assert call() == "original"
        assert len(replayed) == early and entry.graph.freed and generator.value == 0
    entry = settled()
    hook = model[0].register_forward_hook(lambda *a: None)
    with pytest.warns(RuntimeWarning, match="`Linear` inside has hooks"):
        call()
    assert call() == "original"
    assert replayed == [entry] and generator.value == 0, "not replayed for nothing at each call"
    hook.remove()
    assert call() is entry and call() is entry and replayed == [entry] * 3


def test_a_failed_recording_is_said_once_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, as_cuda: None
) -> None:
    tried: list[int] = []

    def record(*args: Any) -> Any:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "_record", record)
    held, model = ModelGraphs(), nn.Linear(3, 3).eval().requires_grad_(False)
    call = (model, lambda model, x: "original", (torch.ones(1),), {})
    assert held.run(*call) == "original"
    with pytest.warns(
        RuntimeWarning, match="recording failed: RuntimeError: operation not"
    ) as seen:
        assert [held.run(*call) for _ in range(3)] == ["original"] * 3
    assert len(seen) == 1 and len(tried) == 1


class Stream:
    made = 0

    def __init__(self) -> None:
        Stream.made += 1
        self.cuda_stream = Stream.made % 32  # as PyTorch's come in turns


def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pools ask of CUDA, without it."""
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **kw: ones(*size, **kw))
    monkeypatch.setattr(graphs.Pool, "_taken", set())
    monkeypatch.setattr(graphs.Pool, "_idle", {})


def test_no_two_pools_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    no_device(monkeypatch)
    pools = [graphs.Pool() for _ in range(32)]
    for pool in pools:
        pool.open()
        pool.open()
    assert len({p.stream.cuda_stream for p in pools}) == 32
    one = graphs.Pool()
    with pytest.raises(NotCapturable, match="32 streams"):
        one.open()
    freed = pools.pop().stream
    del pool
    one.open()
    assert one.stream is freed


class Driver:
    """torch.cuda's captures, as PyTorch 2.11's fail: the end of one that failed raises, and its
    stream, the allocator's and the generator's states stay those of a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
        no_device(monkeypatch)
        self.stream: Any = SimpleNamespace(synchronize=lambda: None)
        self.broken, self.failed = broken, False
        self.underway: list[Any] = []
        self.refused_random_numbers = False
        own = torch._C
        monkeypatch.setattr(own, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(own, "_cuda_releasePool", self.release, raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda s: setattr(self, "stream", s))

    def end_allocate(self, device: int, handle: Any) -> None:
        if handle not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(handle)

    def release(self, device: int, handle: Any) -> None:
        assert handle not in self.underway

    @contextlib.contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.stream = self.stream, stream
        self.underway.append(pool)
        self.refused_random_numbers = True
        try:
            yield
        finally:
            if self.failed and (self.broken or pool is not None):
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            self.underway.remove(pool)
            self.refused_random_numbers = False
            self.stream = before


@pytest.mark.parametrize("broken", [False, True], ids=["recovers", "stays broken"])
@pytest.mark.usefixtures("as_cuda")
def test_a_failed_capture_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The calls go on, on the stream of the caller; its stream records again if it can."""
    driver = Driver(monkeypatch, broken)
    caller = driver.stream

    def original(model: nn.Module, x: Tensor) -> Tensor:
        seen.append((driver.stream is caller, for_a_graph()))
        if driver.stream is not caller:
            driver.failed = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return x + 1

    seen: list[tuple[bool, bool]] = []
    held, model = ModelGraphs(), nn.Linear(3, 3).eval().requires_grad_(False)
    held.run(model, original, (torch.zeros(2),), {})
    with pytest.warns(RuntimeWarning, match="recording failed: RuntimeError"):
        result = held.run(model, original, (torch.zeros(2),), {})
    assert result.tolist() == [1, 1] and driver.stream is caller
    # as it is; then rehearsed, captured, and again as it is
    assert seen == [(True, False), (True, True), (False, True), (True, False)]
    assert (0, 1) not in driver.underway
    assert driver.refused_random_numbers == broken
    gc.collect()
    assert len(graphs.Pool._idle[0]) == (0 if broken else 1)


@pytest.mark.usefixtures("as_cuda")
def test_a_stream_that_gets_a_graphs_memory_waits_for_its_last_replay() -> None:
    waited: list[Any] = []
    own: Any = SimpleNamespace(wait_event=waited.append)
    held = ModelGraphs()
    event = SimpleNamespace(synchronize=lambda: None)
    for last, expected in (((object(), event), [event]), ((own, event), []), (None, [])):
        entry: Any = Recorded()
        entry.stream = own
        held.recorded["a"], held._last = entry, last
        waited.clear()
        held.clear()
        assert waited == expected and entry.graph.freed


@pytest.mark.usefixtures("as_cuda")
def test_a_pool_that_its_last_graph_left_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch, False)
    pools: list[Any] = []

    def record(*args: Any) -> Any:
        pools.append(args[-1])
        return Recorded()

    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(ModelGraphs, "_replay", lambda self, entry, tensors: entry)
    for limit, same in ((1, False), (2, True)):
        held, model = ModelGraphs(limit), nn.Linear(3, 3).eval().requires_grad_(False)
        for size in (1, 2, 3):
            for _ in range(2):
                held.run(model, lambda model, x: x, (torch.zeros(size),), {})
        assert len(pools) == 3 and (pools[0] is pools[1] is pools[2]) == same
        pools.clear()


@pytest.mark.usefixtures("as_cuda")
def test_attention_in_a_graph_is_the_one_without() -> None:
    """The same bits; and cuDNN's plan, which cannot be made in a capture, is there by then."""
    for small, length in ((True, 64), (False, 16384)):
        q = torch.empty(1, 1, 8, length, 64, device="meta")[0]
        assert worth_cudnn(q, q) is not small
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert worth_cudnn(q, q) is not small
        for around in (rehearsal(), Capture()):
            with around:
                assert worth_cudnn(q, q) is not small


def test_a_graph_keeps_the_constants_that_it_reads() -> None:
    ones, like = Constant(1.0), torch.empty(2, 4)
    held = ones(like)
    with Capture() as capture:
        assert ones(like) is held
    assert len(capture.kept) == 1 and capture.kept[0] is held
    assert ones(like) is held and len(capture.kept) == 1


@pytest.fixture
def _as_with_a_gpu(kernels_module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with CUDA, whose model is on the CPU."""
    monkeypatch.setattr(graphs, "unavailable", lambda: None)


@pytest.mark.usefixtures("_as_with_a_gpu")
def test_apply_on_the_cpu_runs_the_model_and_says_why() -> None:
    entry = zoo.ENTRIES["wan"]
    model = entry.build()
    inputs, before = entry.inputs(model), snapshot(model)
    expected = entry.run(model, inputs)
    report = hfpatch.apply(model, cuda_graphs=True)
    assert {s.path: s.op for s in report.swaps} == {"": "cuda_graphs", **expected_swaps(model)}
    with pytest.warns(RuntimeWarning, match="is on cpu, not on a GPU"):
        result = entry.run(model, inputs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    notes = hfpatch.status(model).plan.notes
    assert notes[0] == "CUDA graphs: 0 recorded"
    assert notes[1].startswith("CUDA graphs not used: ")
    again = hfpatch.apply(model)
    assert "" not in {s.path for s in again.swaps} and not hfpatch.status(model).plan.notes
    hfpatch.apply(model, cuda_graphs=2)
    assert hfpatch.restore(model) == len(report.swaps)
    assert_same_dicts(before, model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_machine_without_a_gpu_is_warned_of_at_apply(kernels_module: object) -> None:
    entry = zoo.ENTRIES["wan"]
    model = entry.build()
    with pytest.warns(RuntimeWarning, match="CUDA graphs: not made: this torch sees no CUDA"):
        report = hfpatch.apply(model, cuda_graphs=True)
    assert {s.path: s.op for s in report.swaps} == expected_swaps(model)
    assert [n for n in report.notes if n.startswith("CUDA graphs: not made: ")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry.run(model, entry.inputs(model))
        assert hfpatch.plan(model, cuda_graphs=True).notes == report.notes


def test_rocm_gets_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "this torch is for ROCm" in (graphs.unavailable() or "")


@pytest.mark.usefixtures("_as_with_a_gpu")
def test_pipeline_gets_graphs_for_its_denoiser() -> None:
    pipe = zoo.PIPELINES["ltx-pipeline"].build()
    report = hfpatch.apply(pipe, cuda_graphs=True)
    assert [s.path for s in report.swaps if s.op == "cuda_graphs"] == ["transformer"]
    part = hfpatch.status(pipe.transformer)
    assert [s.path for s in part.swaps if s.op == "cuda_graphs"] == [""]
    assert not [s for s in hfpatch.status(pipe.vae).swaps if s.op == "cuda_graphs"]


def test_as_many_graphs_are_kept_as_is_documented() -> None:
    usage = Path(__file__).parent.parent / "docs" / "usage.md"
    limit, timed = check_limit(True)
    assert f"at most {limit} graphs are kept" in usage.read_text(encoding="utf-8") and not timed
    assert check_limit("auto") == (limit, True) and check_limit(3) == (3, False)


def test_bad_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match='must be "auto", a bool or the most graphs'):
        hfpatch.apply(model, cuda_graphs="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`cuda_graphs` must be at least 0, got -1"):
        hfpatch.apply(model, cuda_graphs=-1)
    with pytest.raises(ValueError, match="needs mode='inference'"):
        hfpatch.apply(model, cuda_graphs=True, mode="training")


def test_no_garbage_is_collected_in_a_capture() -> None:
    """It may hold memory of the GPU, whose release ends the capture."""
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            with contextlib.suppress(ValueError), without_collection():
                assert not gc.isenabled()
                raise ValueError
            assert gc.isenabled() == on
        finally:
            gc.enable()
