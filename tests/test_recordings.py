"""Recordings of transformers models on the CPU: masks, caches and attention as outside of one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
import zoo
from support.cpu_graphs import CpuGraphs
from support.recordings import MODELS, calls_of, ids, of_cache, tensors
from torch import Tensor, nn
from transformers import masking_utils
from transformers.utils import import_utils

import hfpatch
from hfpatch import attention
from hfpatch.graphs import caches as graph_caches
from hfpatch.graphs import recording as graphs
from hfpatch.graphs.captures import masks_as_outside


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, kernels_module: object) -> CpuGraphs:
    return CpuGraphs(monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What PyTorch's attention was asked for: no mask, causal, grouped; and whether recorded."""
    found: list[tuple[Any, ...]] = []
    own = F.scaled_dot_product_attention

    def spy(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        how = (is_causal, k.shape[1] != q.shape[1])
        found.append((attn_mask is None, *how, torch.cuda.is_current_stream_capturing()))
        return own(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "_PYTORCHS", spy)  # what fused blocks call
    return found


def close(found: Any, expected: Any) -> None:
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def held_of(model: nn.Module) -> graphs.ModelGraphs:
    return graphs._graphs[model]


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_every_kind(name: str, gpu: CpuGraphs, asked: list[tuple[Any, ...]]) -> None:
    model = MODELS[name]().eval().requires_grad_(False)
    for kind, make in calls_of(name, model, "cpu").items():
        with torch.no_grad():
            expected = [model(**make(seed)) for seed in (1, 2)]
            hfpatch.apply(model, decoding=False)
            for _ in range(6):  # at the first ones, blocks are captured
                asked.clear()
                model(**make(1))
            outside = [a[:3] for a in asked]
            hfpatch.apply(model, cuda_graphs=True, decoding=False)
            results = []
            for turn, seed in enumerate((1, 1, 2, 1, 2)):
                asked.clear()
                results.append(model(**make(seed)))
                if turn == 1:
                    assert [a[:3] for a in asked if a[3]] == outside, kind
                elif turn:
                    assert not asked, "the graph is replayed"
        for result, seed in zip(results, (1, 1, 2, 1, 2), strict=True):
            close(result, expected[seed - 1])  # also those of calls before the last
        held = held_of(model)
        assert len(held.recorded) == 1 and not held.reasons, (kind, held.reasons)
        assert gpu.made[-1].replays == 4
        hfpatch.restore(model)


def test_a_mask_that_is_padded_later_is_another_recording(gpu: CpuGraphs) -> None:
    model = MODELS["mistral"]().eval().requires_grad_(False)
    given = ids(1, "cpu")
    ones, padded = torch.ones_like(given), torch.ones_like(given)
    padded[0, :3] = 0
    other = padded.clone()
    other[1, :5] = 0
    masks = (ones, ones, padded, ones, padded, other, ones, other, padded)
    with torch.no_grad():
        expected = {id(m): model(given, attention_mask=m).logits for m in (ones, padded, other)}
        hfpatch.apply(model, cuda_graphs=True, decoding=False)
        for mask in masks:
            for copied in (mask, mask.clone()):
                logits = model(given, attention_mask=copied).logits
                torch.testing.assert_close(logits, expected[id(mask)], rtol=1e-4, atol=1e-5)
        assert len(held_of(model).recorded) == 2  # what is masked is data, that something is is not
        replays = sum(g.replays for g in gpu.made)
        ones[0, :3] = 0  # in place, behind a look at it
        logits = model(given, attention_mask=ones).logits
        torch.testing.assert_close(logits, expected[id(padded)], rtol=1e-4, atol=1e-5)
        assert sum(g.replays for g in gpu.made) == replays + 1


def test_a_mask_is_looked_at_once(gpu: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["qwen3"]().eval().requires_grad_(False)
    given = ids(1, "cpu")
    mask = torch.ones_like(given)
    looks: list[int] = []
    own = graphs.Answers._ask

    def ask(self: Any, tensors: Any) -> bool:
        looks.append(1)
        return own(self, tensors)

    monkeypatch.setattr(graphs.Answers, "_ask", ask)
    with torch.no_grad():
        hfpatch.apply(model, cuda_graphs=True, decoding=False)
        for _ in range(6):
            model(given, attention_mask=mask)
        assert len(looks) == 1
        model(given, attention_mask=mask.clone())
        assert len(looks) == 2
    with torch.inference_mode():  # whose tensors do not count what is written to them
        mask = torch.ones_like(given)
        for _ in range(3):
            model(given, attention_mask=mask)
        assert len(looks) == 5


def test_results_are_the_callers_own(gpu: CpuGraphs) -> None:
    """A cache that comes back goes on: the next tokens are those of the model without graphs."""
    model = MODELS["mistral, window"]().eval().requires_grad_(False)
    first, second, step = ids(1, "cpu"), ids(2, "cpu"), ids(3, "cpu", 1)
    with torch.no_grad():
        expected = []
        for prompt in (first, second):
            out = model(prompt)
            expected.append(model(step, past_key_values=out.past_key_values).logits)
        hfpatch.apply(model, cuda_graphs=True, decoding=False)
        for _ in range(3):
            model(first)
        outs = [model(prompt) for prompt in (first, second)]
        storages = {t.untyped_storage()._cdata for out in outs for t in tensors(out)}
        assert len(storages) == sum(len(tensors(out)) for out in outs), "no two share memory"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cache that is not empty is not recorded
            for out, logits in zip(outs, expected, strict=True):
                got = model(step, past_key_values=out.past_key_values).logits
                torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-5)
    assert any("not empty: it grows" in why for why in held_of(model).reasons)


@pytest.mark.parametrize("with_config", [True, False])
def test_a_given_cache_is_filled_and_comes_back(gpu: CpuGraphs, with_config: bool) -> None:
    model = MODELS["gemma3"]().eval().requires_grad_(False)
    config: Any = model.config

    def empty() -> Any:
        return tr.DynamicCache(config=config) if with_config else tr.DynamicCache()

    given, step = ids(1, "cpu"), ids(3, "cpu", 1)
    with torch.no_grad():
        theirs = empty()
        model(given, past_key_values=theirs)
        expected = model(step, past_key_values=theirs).logits
        hfpatch.apply(model, cuda_graphs=True, decoding=False)
        for _ in range(4):
            ours = empty()
            layers = list(ours.layers)
            out = model(given, past_key_values=ours)
            assert out.past_key_values is ours
            assert ours.layers[: len(layers)] == layers, "whoever holds a layer sees it filled"
            assert ours.get_seq_length() == given.shape[1]
        with pytest.warns(RuntimeWarning, match="not empty"):
            got = model(step, past_key_values=ours).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    fresh = [t for t in of_cache(empty()) if t is not None]
    assert not fresh, "the recording filled a cache of its own"


def test_hidden_states_that_a_call_asks_for(gpu: CpuGraphs) -> None:
    """transformers takes them by hooks, which stay."""
    model = MODELS["mistral"]().eval().requires_grad_(False)
    given = [ids(seed, "cpu") for seed in (1, 2)]
    with torch.no_grad():
        expected = [model(g, output_hidden_states=True) for g in given]
        hfpatch.apply(model, cuda_graphs=True, decoding=False)
        for i in (0, 0, 1, 0, 1):
            got = model(given[i], output_hidden_states=True)
            assert len(got.hidden_states) == 3
            close(got, expected[i])
        for i in (0, 0, 1, 0):
            got = model(given[i])
            assert got.hidden_states is None
            torch.testing.assert_close(got.logits, expected[i].logits, rtol=1e-4, atol=1e-5)
    held = held_of(model)
    assert len(held.recorded) == 2 and not held.reasons, held.reasons


def test_other_caches_are_left_alone(gpu: CpuGraphs) -> None:
    model = MODELS["qwen3"]().eval().requires_grad_(False)
    config: Any = model.config
    hfpatch.apply(model, cuda_graphs=True, decoding=False)
    static = tr.StaticCache(config=config, max_cache_len=32)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="is a StaticCache"):
        model(ids(1, "cpu"), past_key_values=static)
    assert not held_of(model).recorded
    offloaded = tr.DynamicCache(config=config)
    assert graph_caches.unfit(offloaded) is None
    offloaded.offloading = True
    assert graph_caches.unfit(offloaded) == "a cache that is offloaded to the CPU"
    odd = tr.DynamicCache(config=config)
    odd.layers[0].__class__ = type("Odd", (type(odd.layers[0]),), {})
    assert "a cache with a Odd" in (graph_caches.unfit(odd) or "")


def test_empty_caches_that_differ_are_told_apart() -> None:
    """A graph has baked in how long the window is."""

    def key(window: int, layers: int = 2) -> Any:
        config = tr.MistralConfig(sliding_window=window, num_hidden_layers=layers)
        return graph_caches.key_of(tr.DynamicCache(config=config))

    assert key(8) == key(8) and hash(key(8)) == hash(key(8))
    assert key(8) != key(16) and key(8) != key(8, 3)


class Reads(nn.Module):
    def __init__(self, read: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("gate", torch.ones(2))
        self.read = read

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        return self.read(self, x, flags)


def recorded(read: Callable[[Any, Tensor, Tensor], Tensor], *flags: Tensor) -> Any:
    """A model that reads, called with each of these in turns: its results are checked."""
    model = Reads(read).eval().requires_grad_(False)
    x = torch.arange(8.0).view(2, 4)
    with torch.no_grad():
        expected = [model(x, f).clone() for f in flags]
        hfpatch.apply(model, cuda_graphs=True)
        for _ in range(4):
            for f, e in zip(flags, expected, strict=True):
                assert torch.equal(model(x, f.clone()), e)
    return model


FULL, PART = torch.ones(3), torch.tensor([1.0, 0, 1])


def test_what_is_read_of_arguments(gpu: CpuGraphs) -> None:
    for read in (
        lambda m, x, f: m.linear(x) if f.all() else x,
        lambda m, x, f: x * f.sum().item(),
        lambda m, x, f: x * int(f[1]) + float(f[-1]),
        lambda m, x, f: x if torch.equal(f, torch.ones_like(f)) else -x,
        lambda m, x, f: x if f.cumsum(0)[-1] > 2.5 else -x,
        lambda m, x, f: x if torch.split(f, 1)[1].bool() else -x,
        lambda m, x, f: x[:, [0, 2]] * (2 if f.min() > 0 else 3),
    ):
        model = recorded(read, FULL, PART)
        held = held_of(model)
        assert len(held.recorded) == 2 and not held.reasons
        hfpatch.restore(model)


def test_what_is_read_of_buffers_is_asked_again(gpu: CpuGraphs) -> None:
    model = recorded(lambda m, x, f: x if m.gate.all() else -x, FULL)
    x = torch.ones(2, 4)
    with torch.no_grad():
        assert torch.equal(model(x, FULL), x)
        model.gate[0] = 0
        for _ in range(3):
            assert torch.equal(model(x, FULL), -x)
    assert len(held_of(model).recorded) == 2


def test_constants_are_asked_once(gpu: CpuGraphs) -> None:
    def read(m: Any, x: Tensor, f: Tensor) -> Tensor:
        return x if (torch.arange(3, device=x.device).diff() == 1).all() else -x

    held = held_of(recorded(read, FULL, PART))
    (entry,) = held.recorded.values()
    assert entry.answers.reads and not entry.answers.values


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m, x, f: x * m.linear(x).sum().item(), "waits for a value that it computed"),
        (lambda m, x, f: x * torch.rand_like(f).sum().item(), "waits for a value"),
        (lambda m, x, f: x * f.clone().add_(1).sum().item(), "waits for a value"),
        (lambda m, x, f: (setattr(m, "last", x), x)[1], "sets `last`, which a replay would not"),
        (lambda m, x, f: (x.add_(0), x)[1], "writes to a tensor that it is given"),
    ],
    ids=["activations", "random", "written", "side effect", "argument"],
)
def test_what_cannot_be_recorded(gpu: CpuGraphs, read: Any, message: str) -> None:
    model = Reads(read).eval().requires_grad_(False)
    hfpatch.apply(model, cuda_graphs=True)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x, FULL)
        with pytest.warns(RuntimeWarning, match=message):
            model(x, FULL)
        model(x, FULL)
    assert not held_of(model).recorded


def test_a_value_that_is_another_at_each_call_is_given_up(gpu: CpuGraphs) -> None:
    model = Reads(lambda m, x, f: x * f.sum().item()).eval().requires_grad_(False)
    hfpatch.apply(model, cuda_graphs=True)
    x = torch.ones(2, 4)

    def call_with_others() -> None:
        for i in range(20):
            assert torch.equal(model(x, FULL * i), x * 3 * i)

    with torch.no_grad(), pytest.warns(RuntimeWarning, match="differs from call to call"):
        call_with_others()
    held = held_of(model)
    assert not held.recorded and all(g.freed for g in gpu.made)


def test_transformers_is_told_for_as_long_as_a_recording_lasts(gpu: CpuGraphs) -> None:
    own = import_utils.is_cuda_stream_capturing, masking_utils.is_tracing
    answers: list[Any] = []

    def other() -> None:
        answers.append((import_utils.is_cuda_stream_capturing(), masking_utils.is_tracing()))

    with masks_as_outside():
        with masks_as_outside():
            assert import_utils.is_cuda_stream_capturing() and import_utils.is_tracing()
            assert not masking_utils.is_tracing()
        assert import_utils.is_cuda_stream_capturing()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        gpu.capturing = True
        assert not masking_utils.is_tracing()
        other_thread = threading.Thread(target=other)
        other_thread.start()
        other_thread.join()
        gpu.capturing = False
    assert answers == [(False, False), (True, True)], "another thread is answered as ever"
    assert (import_utils.is_cuda_stream_capturing, masking_utils.is_tracing) == own


def test_auto_keeps_the_faster(gpu: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    model = Reads(lambda m, x, f: m.linear(x)).eval().requires_grad_(False)
    x = torch.ones(2, 4)
    expected = model(x, FULL)
    plain = {"seconds": 0.0}
    own = type(model).forward

    def slow(self: Any, *args: Any) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            time.sleep(plain["seconds"])
        return own(self, *args)

    monkeypatch.setattr(Reads, "forward", slow)
    replay = graphs.ModelGraphs._replay

    def slow_replay(self: Any, *args: Any) -> Any:
        time.sleep(0.02)
        return replay(self, *args)

    monkeypatch.setattr(graphs.ModelGraphs, "_replay", slow_replay)
    for seconds, kept in ((0.0, "original"), (0.06, "patched")):
        plain["seconds"] = seconds
        hfpatch.apply(model, cuda_graphs="auto")
        with torch.no_grad():
            for calls in range(9):
                assert torch.equal(model(x, FULL), expected)
                (times,) = hfpatch.status(model).plan.times or (None,)
                assert (times is not None) == (calls >= 1)
        assert times is not None and times.kept == kept and times.op == "cuda_graphs"
        assert (times.original_ms < times.patched_ms) == (kept == "original")
        held = held_of(model)
        assert len(held.recorded) == (kept == "patched")
        assert gpu.made[-1].freed == (kept == "original")
        replays = gpu.made[-1].replays
        model(x, FULL)
        text = str(hfpatch.status(model))
        assert "original ms" in text and kept in text
        assert gpu.made[-1].replays == replays + (kept == "patched")


def test_auto_does_not_look_at_each_call_of_a_model_with_hooks(gpu: CpuGraphs) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval().requires_grad_(False)
    hfpatch.apply(model, cuda_graphs="auto")
    seen: list[int] = []
    handle = model[0].register_forward_hook(lambda *a: seen.append(1))
    x = torch.ones(2, 4)
    expected = model[1](model[0](x))
    held, looks = graphs.ModelGraphs(8, True), 0
    graphs._graphs[model] = held
    own = held.look

    def look(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return own(*args)

    held.look = look  # type: ignore[method-assign]
    seen.clear()
    for _ in range(200):
        assert torch.equal(model(x), expected)
    assert len(seen) == 200 and 3 <= looks <= 10
    handle.remove()
    for _ in range(80):
        assert torch.equal(model(x), expected)
    assert held.recorded or held.slower


@pytest.mark.parametrize("decoding", [False, "auto"])
def test_generate_prefills_by_a_graph(gpu: CpuGraphs, decoding: Any) -> None:
    model = MODELS["qwen3"]().eval().requires_grad_(False)
    prompts = [ids(seed, "cpu") for seed in (1, 2, 3)]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(p, attention_mask=torch.ones_like(p), **how) for p in prompts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding steps have a cache that is not empty
        hfpatch.apply(model, cuda_graphs=True, decoding=decoding)
        for _ in range(2):
            for prompt, tokens in zip(prompts, expected, strict=True):
                got = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
                assert torch.equal(got, tokens)
    (entry,) = held_of(model).recorded.values()
    assert entry.graph.replays == 5 and entry.caches


def test_auto_is_silent_where_there_are_no_graphs(gpu: CpuGraphs) -> None:
    model = Reads(lambda m, x, f: x * m.linear(x).sum().item()).eval().requires_grad_(False)
    x = torch.ones(2, 4)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        hfpatch.apply(model, cuda_graphs="auto")
        for _ in range(3):
            model(x, FULL)
    assert any("waits for a value" in note for note in hfpatch.status(model).plan.notes)


@pytest.mark.parametrize("name", ["ltx", "wan", "flux", "sd15-unet"])
def test_denoisers(gpu: CpuGraphs, name: str) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build().requires_grad_(False)
    inputs = entry.inputs(model)
    other = {
        k: v * 0.5 if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
        if "mask" not in k
    }
    other = inputs | other
    expected = [entry.run(model, i) for i in (inputs, other)]
    hfpatch.apply(model, cuda_graphs=True)
    for i in (0, 0, 1, 0, 1):
        result = entry.run(model, (inputs, other)[i])
        torch.testing.assert_close(result, expected[i], rtol=1e-4, atol=1e-5)
    held = held_of(model)
    assert len(held.recorded) == 1 and not held.reasons, held.reasons
    assert gpu.made[-1].replays == 4


def test_a_denoisers_mask(gpu: CpuGraphs) -> None:
    """One that masks nothing is left out of the recording; one that does is asked about."""
    entry = zoo.ENTRIES["ltx"]
    model = entry.build().requires_grad_(False)
    inputs = entry.inputs(model)
    name = "encoder_attention_mask"
    full = inputs | {name: torch.ones_like(inputs[name])}
    half = torch.ones_like(inputs[name])
    half[:, half.shape[1] // 2 :] = 0
    padded = inputs | {name: half}
    expected = [entry.run(model, i) for i in (full, padded)]
    hfpatch.apply(model, cuda_graphs=True)
    for i in (0, 0, 0, 1, 0, 1, 1):
        result = entry.run(model, (full, padded)[i])
        torch.testing.assert_close(result, expected[i], rtol=1e-4, atol=1e-5)
    held = held_of(model)
    assert len(held.recorded) == 2 and not held.reasons, held.reasons
