"""Ctrl-C comes between any two lines of the decoding loop: the model and the cache that it was
given are good for the next text."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decoding.families import device, prompts
from decoding.loop_cases import an_end, pair_of
from transformers import DynamicCache

import hfpatch.decoding
from hfpatch.decoding import graph, kept, loop, step


def _of(name: str) -> str:
    return str(Path(hfpatch.decoding.__path__[0]) / f"{name}.py")


_FILES = frozenset(map(_of, ("loop", "step", "greedy", "engine", "graph", "cache", "watch")))
_NEW = 9
#: What a text is drawn with.
_SAMPLED = {"do_sample": True, "top_k": 40}


@pytest.fixture(autouse=True)
def _kernels(kernels_module: ModuleType) -> None:
    """The compiled kernels must be there: these tests are about them."""


@pytest.fixture(params=["in turn", "ahead", "graphs"])
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """As on a CPU; with answers that are read while the next step runs, as a GPU has it; and with
    a GPU's buffers around the step, which tell the next one where it goes on."""
    way: str = request.param
    ahead = frozenset() if way == "in turn" else frozenset({device()})
    monkeypatch.setattr(loop, "AHEAD", ahead)
    if way == "graphs" and device() == "cpu":
        cuda = SimpleNamespace(
            device=lambda _: contextlib.nullcontext(),
            is_current_stream_capturing=lambda: False,
            get_device_properties=lambda _: SimpleNamespace(multi_processor_count=0),
        )
        monkeypatch.setattr(graph, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
        monkeypatch.setattr(graph, "recorded", lambda work: SimpleNamespace(replay=work))
        make_engine = step.make_engine

        def with_graphs(model: Any, rows: int, tokens: int) -> Any:
            engine = make_engine(model, rows, tokens)
            engine.graphs = graph.StepGraphs(engine._call, engine._table)
            return engine

        monkeypatch.setattr(step, "make_engine", with_graphs)
    return way


@functools.cache
def _pair(family: str, _way: str, on: str) -> tuple[Any, Any]:
    return pair_of(family, on)


def models(family: str, way: str) -> tuple[Any, Any]:
    """Of each way two, as engines are kept."""
    return _pair(family, way, device())


def lines_of(call: Callable[[], object], stop_at: int = 0, files: frozenset[str] = _FILES) -> int:
    """How many lines of the loop a call comes to; before the one of this number it gets a Ctrl-C,
    and raises that, unless Python was where it shows and does not raise errors."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if event == "line" and lines == stop_at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def write(model: Any, ids: torch.Tensor, new: int = _NEW, **more: Any) -> torch.Tensor:
    torch.manual_seed(3)
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    settings = {"max_new_tokens": new, "eos_token_id": None}
    out: torch.Tensor = model.generate(ids, **{**given, **settings, **more})
    return out


def check(
    plain: Any, patched: Any, cache: DynamicCache, wanted: torch.Tensor, read: bool = True
) -> None:
    """The cache holds the first tokens of this text, as many as it says, and a text goes on in it;
    not `read`: what it holds is seen by that alone."""
    there = cache.get_seq_length()
    if device() != "cpu" and len({layer.get_seq_length() for layer in cache.layers}) > 1:
        return  # a GPU's prompt puts in one layer after the other, as the original does
    tokens = torch.cat([wanted, wanted[:, :1]], dim=1)  # the last of the text may be in it
    if there and read:
        other = DynamicCache(config=plain.config)
        with torch.no_grad():
            plain(tokens[:, :there], past_key_values=other)
        for ours, theirs in zip(cache.layers, other.layers, strict=True):
            assert ours.get_seq_length() == there
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(ours.values, theirs.values, rtol=2e-3, atol=2e-3)
    begun = tokens[:, : there + 1] if there else wanted[:, :3]
    again = write(patched, begun, 4, past_key_values=cache)
    assert torch.equal(again, write(plain, begun, 4))


def _as_it_is(model: Any) -> None:
    """Its steps are proven."""


def _unproven(model: Any) -> None:
    """Its first step will run beside the original."""
    decoder = kept.decoders[model]
    decoder.trusted.clear()
    decoder.engines.clear()


def _with_other_weights(model: Any) -> None:
    """It will be described anew."""
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.exhaustive)], ids=len
)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_an_interrupt_at_any_line_leaves_model_and_cache_usable(
    sampled: bool, way: str, seeds: range
) -> None:
    raised = 0
    for seed in seeds:
        numbers = random.Random(f"{seed} {sampled} {way}")
        plain, patched = models(numbers.choice(("llama", "mistral")), way)
        rows = numbers.choice((1, 2))
        ids = prompts(rows, padding=0)["input_ids"]
        more: dict[str, Any] = dict(_SAMPLED) if sampled else {}
        if rows == 1 and numbers.random() < 0.5:  # behind an end a step may be taken back
            more["eos_token_id"] = an_end(plain, device(), 1, **more)
        wanted = write(plain, ids, **more)
        assert torch.equal(write(patched, ids, **more), wanted)  # what it comes to is known now
        decoder = kept.decoders[patched]
        begin = numbers.choice((_as_it_is, _as_it_is, _unproven, _with_other_weights))
        begin(patched)
        lines = lines_of(functools.partial(write, patched, ids, **more))
        cache = DynamicCache(config=patched.config)
        begin(patched)
        at = numbers.randint(1, lines)
        try:
            lines_of(functools.partial(write, patched, ids, past_key_values=cache, **more), at)
        except KeyboardInterrupt:
            raised += 1
        steps = decoder.steps
        goes_on = functools.partial(check, plain, patched, cache, wanted)
        if first := numbers.random() < 0.5:
            goes_on(read=numbers.random() < 0.5)
        assert torch.equal(write(patched, ids, **more), wanted), (seed, at)
        assert decoder.steps > steps and decoder.refused is None, (seed, at)
        if not first:
            goes_on()
    assert raised >= 0.9 * len(seeds)


@pytest.mark.parametrize("way", ["graphs"], indirect=True)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("file", ["graph", "engine"])
def test_an_interrupt_at_each_line_around_a_gpus_buffers(way: str, file: str, rows: int) -> None:
    """What they hold of the step before is known, or not relied on."""
    plain, patched = models("llama", way)
    ids, files = prompts(rows, padding=0)["input_ids"], frozenset({_of(file)})
    for _ in range(2):
        wanted = write(patched, ids, 2)
    assert torch.equal(wanted, write(plain, ids, 2))
    lines = lines_of(lambda: write(patched, ids, 2), files=files)
    assert lines > 20
    raised = 0
    for at in range(1, lines + 1):
        cache = DynamicCache(config=patched.config)
        text = functools.partial(write, patched, ids, 2, past_key_values=cache)
        try:
            lines_of(text, at, files)
        except KeyboardInterrupt:
            raised += 1
        check(plain, patched, cache, wanted, read=False)
    assert raised >= 0.9 * lines  # a cache may lie where the one before it did, which takes more
