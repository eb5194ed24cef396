"""A cache in an arena is to everybody what a plain one is, whatever is done to it."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoding.cache_moves import MOVES, moved
from decoding.families import device, here, make, prompts
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hfpatch
from hfpatch.decoding import cache as caches
from hfpatch.decoding import kept
from hfpatch.decoding.prompt import Kept

LAYERS, HEADS, DIM, WINDOW = 3, 2, 4, 6

_OPERATIONS = (
    *("step", "step", "step", "update", "crop", "reorder", "repeat", "select", "deepcopy"),
    *("copy", "pickle", "save", "reset", "assign", "one layer", "record", "crop"),
)


def _plain(window: bool) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [
        DynamicSlidingWindowLayer(WINDOW) if window and i % 2 else DynamicLayer()
        for i in range(LAYERS)
    ]
    return cache


def _new(rows: int, tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(rows, HEADS, tokens, DIM, generator=generator) for _ in range(2))
        for _ in range(LAYERS)
    ]  # type: ignore[misc]


def _extend(cache: DynamicCache, new: Any) -> None:
    """What a decoding step does to a cache."""
    tokens = new[0][0].shape[2]
    arena = caches.take(cache, tokens)
    now = slice(arena.length, arena.length + tokens)
    for index, (keys, values) in enumerate(new):
        arena.table.keys[index][:, :, now] = keys
        arena.table.values[index][:, :, now] = values
    arena.table.length += tokens


def _update(cache: DynamicCache, new: Any) -> None:
    for index, (keys, values) in enumerate(new):
        cache.update(keys, values, index)


def _check_same(plain: DynamicCache, ours: DynamicCache) -> None:
    assert plain.get_seq_length() == ours.get_seq_length()
    for a, b in zip(plain.layers, ours.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        assert a.get_mask_sizes(2) == b.get_mask_sizes(2)
        assert a.is_initialized == b.is_initialized and a.is_sliding == b.is_sliding
        if a.is_initialized:
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
            assert getattr(a, "cumulative_length", 0) == getattr(b, "cumulative_length", 0)


@settings(max_examples=150, deadline=None)
@given(
    window=st.booleans(),
    begun=st.booleans(),
    prompt=st.integers(1, 9),
    rows=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(_OPERATIONS), st.integers(0, 1000)), max_size=12),
)
@example(
    window=True,
    begun=False,
    prompt=6,
    rows=1,
    moves=[("record", 0), ("crop", 1), ("crop", 0), ("step", 0)],
)
def test_any_sequence_of_operations_gives_what_it_gives_a_plain_cache(
    window: bool, begun: bool, prompt: int, rows: int, moves: list[tuple[str, int]]
) -> None:
    plain, ours = _plain(window), _plain(window)
    first = _new(rows, prompt, 0)
    _update(plain, first)
    if begun:  # by a prompt's graph
        parts = (*(k for k, _ in first), *(v for _, v in first))
        # one tensor of a longer bucket, or one of each
        whole = torch.stack([torch.cat((t, t), 2).transpose(1, 2) for t in parts])
        caches.begin(ours, Kept(whole, (), prompt) if rows % 2 else Kept(None, parts, prompt))
        _check_same(plain, ours)
    else:
        _update(ours, first)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # views that somebody holds, and copies
    others: list[tuple[DynamicCache, DynamicCache]] = []
    for move, seed in moves:
        if len({layer.get_seq_length() for layer in plain.layers}) > 1:
            break  # cropped to where a window had left keys behind: no step is made (`unfit`)
        length = plain.get_seq_length()
        rows = plain.layers[0].keys.shape[0] if length else rows
        if move in ("step", "update") or not length:
            new = _new(rows, 1 + seed % 2, seed)
            _update(plain, new)
            if move == "step" and length:
                _extend(ours, new)
            else:
                _update(ours, new)
        elif move == "crop":
            outcomes = []
            left = min(layer.keys.shape[2] for layer in plain.layers)
            for cache in (plain, ours):
                try:
                    cache.crop(-min(seed % 3, left - 1))
                    outcomes.append("")
                except RuntimeError as e:  # a window that has left keys behind
                    outcomes.append(str(e))
            assert outcomes[0] == outcomes[1]
            if outcomes[0]:
                break  # layers of several lengths: of no use to anybody
        elif move == "record":  # as assisted decoding does
            for cache in (plain, ours):
                for layer in cache.layers:
                    if layer.is_sliding:
                        layer.activate_past_recording()
        elif move == "reorder":
            order = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(seed))
            plain.reorder_cache(order)
            ours.reorder_cache(order)
        elif move == "repeat" and rows < 5:
            plain.batch_repeat_interleave(2)
            ours.batch_repeat_interleave(2)
        elif move == "select":
            indices = torch.tensor([seed % rows])
            plain.batch_select_indices(indices)
            ours.batch_select_indices(indices)
        elif move == "deepcopy":
            others.append((copy.deepcopy(plain), ours))
            ours = copy.deepcopy(ours)
        elif move == "copy":
            ours.layers = [copy.copy(layer) for layer in ours.layers]
        elif move == "pickle":
            text = pickle.dumps(ours)
            assert b"hfpatch" not in text  # loads where it is not installed
            ours = pickle.loads(text)
        elif move == "save":
            buffer = io.BytesIO()
            torch.save(ours, buffer)
            buffer.seek(0)
            ours = torch.load(buffer, weights_only=False)
        elif move == "reset":
            plain.reset()
            ours.reset()
        elif move == "assign":
            for cache in (plain, ours):
                cache.layers[0].keys = cache.layers[0].keys * 2
        elif move == "one layer":  # an update that ended in an error after the first layer
            others.append((copy.deepcopy(plain), copy.deepcopy(ours)))
        _check_same(plain, ours)
        for a, b in others:
            _check_same(a, b)
        if ours.get_seq_length():
            kept += [(t, t.clone()) for layer in ours.layers for t in (layer.keys, layer.values)]
        assert all(torch.equal(view, was) for view, was in kept)


_MOVES = (
    *("step", "step", "step", "two tokens", "crop", "reorder", "repeat", "select", "deepcopy"),
    *("pickle", "unpatched", "written", "text", "other", "anew"),
)


@functools.cache
def _pair(family: str, _on: str) -> tuple[Any, Any]:
    plain = make(family)
    patched = copy.deepcopy(plain)
    assert hfpatch.apply(patched).swaps[0].op == "decoding"
    return plain, patched


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "gpt-oss"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.integers(2, 9),
    rows=st.integers(1, 3),
    moves=st.lists(
        st.tuples(st.sampled_from(_MOVES), st.integers(0, 1000)), min_size=4, max_size=14
    ),
)
@torch.no_grad()
def test_steps_between_any_operations_give_what_they_give_unpatched(
    family: str, prompt: int, rows: int, moves: list[tuple[str, int]]
) -> None:
    """Each cache is used with one model; the patched one's also with the unpatched one."""
    plain, patched = _pair(family, device())
    steps = kept.decoders[patched].steps
    pairs = [(DynamicCache(config=plain.config), DynamicCache(config=plain.config))]

    def call(ids: torch.Tensor, ours: Any = patched) -> None:
        theirs, mine = pairs[0]
        wanted = plain(ids, past_key_values=theirs).logits
        got = ours(ids, past_key_values=mine).logits
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)

    def ids_of(seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        held = pairs[0][0].layers
        number = held[0].keys.shape[0] if held and held[0].is_initialized else rows
        return here(torch.randint(3, 300, (number, count), generator=generator))

    call(ids_of(0, prompt))
    for move, seed in moves:
        both = pairs[0]
        count = both[0].layers[0].keys.shape[0]
        if move == "step":
            call(ids_of(seed, 1))
        elif move == "two tokens":
            call(ids_of(seed, 2))
        elif move == "unpatched":
            call(ids_of(seed, 1), plain)
        elif move in MOVES:
            held = here(torch.ones(count, both[0].get_seq_length()))
            if moved(move, seed, both, held) is None:
                break
        elif move == "deepcopy":  # the others go on later
            pairs.insert(0, (copy.deepcopy(both[0]), copy.deepcopy(both[1])))
        elif move == "other":
            pairs.append(pairs.pop(0))
        elif move == "pickle":
            pairs[0] = (both[0], pickle.loads(pickle.dumps(both[1])))
        elif move == "text":
            texts = []
            length = both[0].get_seq_length()
            ids = ids_of(seed, length + 1)  # of which the cache has all but the last
            for model, cache in zip((plain, patched), both, strict=True):
                more = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
                mask = torch.ones_like(ids)
                texts.append(
                    model.generate(ids, attention_mask=mask, past_key_values=cache, **more)
                )
            assert torch.equal(*texts)
        elif move == "anew":
            pairs[0] = (DynamicCache(config=plain.config), DynamicCache(config=plain.config))
            call(ids_of(seed, prompt))
        theirs, mine = pairs[0]
        assert theirs.get_seq_length() == mine.get_seq_length()
        for index, (a, b) in enumerate(zip(theirs.layers, mine.layers, strict=True)):
            if seed % 3 == 0 or index == seed % 4:  # who reads takes a layer out of its arena
                torch.testing.assert_close(b.keys, a.keys, rtol=2e-3, atol=2e-3)
                torch.testing.assert_close(b.values, a.values, rtol=2e-3, atol=2e-3)
    event(f"{kept.decoders[patched].steps - steps} steps of the engine")


def test_a_cache_goes_from_the_patched_model_to_the_unpatched_one_and_back() -> None:
    model = make("gemma3")
    ids = prompts(1, 8)["input_ids"]
    other = copy.deepcopy(model)
    hfpatch.apply(model, include=type(model).__name__)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        mixed, plain = (DynamicCache(config=model.config) for _ in range(2))
        model(ids, past_key_values=mixed)
        other(ids, past_key_values=plain)
        for i in range(24):
            token = here(torch.randint(3, 300, (1, 1), generator=generator))
            which = model if i // 4 % 2 == 0 else other
            ours = which(token, past_key_values=mixed).logits
            theirs = other(token, past_key_values=plain).logits
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            assert mixed.get_seq_length() == plain.get_seq_length()
        for a, b in zip(mixed.layers, plain.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-4)
    assert kept.decoders[model].steps > 8


def test_a_prompts_cache_serves_several_continuations() -> None:
    model = make("llama")
    ids = prompts(1, 8)["input_ids"]
    more = {"max_new_tokens": 6, "do_sample": False}
    before = [
        model.generate(torch.cat((ids, here(torch.tensor([[t]]))), 1), **more) for t in (7, 8, 9)
    ]
    hfpatch.apply(model)
    with torch.no_grad():
        cache = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
        cache = model(here(torch.tensor([[7]])), past_key_values=cache).past_key_values
    cache.crop(-1)
    for token, text in zip((7, 8, 9), before, strict=True):
        whole = torch.cat((ids, here(torch.tensor([[token]]))), 1)
        own = copy.deepcopy(cache)
        assert torch.equal(model.generate(whole, past_key_values=own, **more), text)
    assert cache.get_seq_length() == 8


def test_an_arena_grows_and_dies_with_its_cache() -> None:
    model = make("llama")
    hfpatch.apply(model)
    ids = prompts(1, 8)["input_ids"]
    with torch.no_grad():
        cache = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
        for _ in range(caches.capacity_for(9) + 5):
            model(here(torch.tensor([[7]])), past_key_values=cache)
    arena = caches.held_arena(cache)
    assert arena is not None and arena.capacity > caches.capacity_for(9)
    held = weakref.ref(arena.table.keys[0])
    del arena, cache
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("length", [9, 3000])
def test_a_caches_room_is_a_small_share_of_the_weights(length: int) -> None:
    """Or 32 tokens, where that is more: of each row."""
    model = make("llama", vocab_size=4000, max_position_embeddings=8192)
    weights = sum(p.numel() for p in model.parameters())
    hfpatch.apply(model, include=type(model).__name__)
    for rows in (1, 4):
        with torch.no_grad():
            ids = prompts(rows, length)["input_ids"]
            cache = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
            for _ in range(70):
                model(ids[:, :1], past_key_values=cache)
                arena = caches.held_arena(cache)
                if arena is not None:
                    room = arena.capacity - arena.length
                    numbers = sum(t[:, :, :room].numel() for t in arena.table.keys) * 2
                    assert numbers <= 0.05 * weights or room <= caches._LEAST_ROOM
        assert arena is not None and arena.length == length + 70


@pytest.mark.parametrize("kind", ["static", "dtype", "layers", "rows", "window", "below"])
def test_a_cache_that_is_none_of_its_own_goes_to_the_original(kind: str) -> None:
    model = make("mistral" if kind == "window" else "llama")
    other = copy.deepcopy(model)
    hfpatch.apply(model, include=type(model).__name__)

    def attempt(which: Any) -> Any:
        ids, token = prompts(1, 8)["input_ids"], here(torch.tensor([[7]]))
        cache: Any = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=32)
        if kind == "window":
            cache = DynamicCache()
            cache.layers = [DynamicSlidingWindowLayer(5) for _ in range(4)]
        with torch.no_grad():
            which(ids, past_key_values=cache)
            if kind == "dtype":
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys.double(), layer.values.double()
            elif kind == "layers":
                cache.layers = cache.layers[:2]
            elif kind == "rows":
                cache.batch_repeat_interleave(3)
            elif kind == "below":
                cache.crop(-9)
            try:
                logits = which(token, past_key_values=cache).logits
            except Exception as e:  # the original's own
                return type(e)
            return logits, cache.get_seq_length()

    wanted, got = attempt(other), attempt(model)
    if isinstance(wanted, type):
        assert got is wanted
    else:
        assert torch.allclose(got[0], wanted[0], rtol=1e-3, atol=1e-4) and got[1] == wanted[1]
    assert kept.decoders[model].steps == 0


class _Slotted:
    """A user's own cache, which nothing can refer to weakly."""

    __slots__ = ("held",)

    def __init__(self, config: Any) -> None:
        self.held = DynamicCache(config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("blocks", [False, True])
def test_a_cache_that_is_referred_to_by_nobody_weakly(blocks: bool) -> None:
    model = make("llama")
    other = copy.deepcopy(model)
    hfpatch.apply(model, blocks=blocks)
    ids, token = prompts(1, 8)["input_ids"], here(torch.tensor([[7]]))

    def attempt(which: Any, cache: Any) -> Any:
        try:
            with torch.no_grad():
                first = which(ids, past_key_values=cache).logits
                return torch.cat([first, which(token, past_key_values=cache).logits], dim=1)
        except Exception as e:  # the original's own
            return f"{type(e).__name__}: {e}"

    for _ in range(3):
        wanted, got = (attempt(m, _Slotted(m.config)) for m in (other, model))
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
        for odd in ((), object()):
            assert attempt(model, odd) == attempt(other, odd)


def test_a_copied_layer_is_nobody_elses() -> None:
    ours = _plain(False)
    _update(ours, _new(1, 5, 0))
    caches.take(ours, 1)
    held = [copy.copy(layer) for layer in ours.layers]
    before = [layer.keys.clone() for layer in held]
    for layer in held:
        layer.keys.zero_()
    again = [layer.keys for layer in ours.layers]
    assert all(map(torch.equal, again, before))


def test_a_layer_is_shown_as_a_plain_one() -> None:
    plain, ours = _plain(True), _plain(True)
    for cache in (plain, ours):
        _update(cache, _new(1, 5, 0))
    caches.take(ours, 1)
    assert repr(ours) == repr(plain)
    assert caches.held_arena(ours) is not None, "nobody has read a tensor"
    for a, b in zip(plain.layers, ours.layers, strict=True):
        mine, theirs = type(b), type(a)
        assert mine is not theirs and issubclass(mine, theirs) and isinstance(b, theirs)
        assert (repr(b), repr(mine), str(mine)) == (repr(a), repr(theirs), str(theirs))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(mine, name) == getattr(theirs, name)
        for again in (copy.deepcopy(b), copy.copy(b), pickle.loads(pickle.dumps(b))):
            assert type(again) is theirs and torch.equal(again.keys, a.keys)
    arena = caches.held_arena(ours)
    assert arena is not None, "copies are made of it as it is"
    for cls in (type(b) for b in ours.layers):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(cls, protocol)) is cls._plain
        assert copy.copy(cls) is cls and copy.deepcopy(cls) is cls


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_cache_of_a_model_with_a_shorter_window_goes_on_in_another() -> None:
    """What the first window has left is gone, though the arena still holds it."""
    plain = [make("mistral", sliding_window=window) for window in (5, 12)]
    patched = copy.deepcopy(plain)
    ids = prompts(1, 20, padding=0)["input_ids"]
    for model in patched:
        hfpatch.apply(model)
    found = []
    for first, then in (patched, plain, patched):  # steps of the first turn are proven
        cache = DynamicCache(config=first.config)
        first(ids, past_key_values=cache)
        for column in range(3):
            first(ids[:, column : column + 1], past_key_values=cache)
        own = DynamicCache(config=then.config)
        then(ids, past_key_values=own)
        then(ids[:, :1], past_key_values=own)
        found.append(then(ids[:, :1], past_key_values=cache).logits)
    assert all(kept.decoders[model].steps for model in patched)
    torch.testing.assert_close(found[2], found[1], rtol=1e-3, atol=1e-3)


def _interrupted(
    begun: Callable[[], DynamicCache], act: Callable[[DynamicCache], object]
) -> Iterator[DynamicCache]:
    """A cache for each line of cache.py that `act` comes to, with a Ctrl-C before that line."""
    left = stopped = 0
    while left == stopped:  # the last round comes to no interrupt
        left += 1
        ours, lines = begun(), 0

        def trace(frame: Any, event: str, _: Any, at: int = left) -> Any:
            nonlocal lines, stopped
            if not frame.f_code.co_filename.endswith("decoding/cache.py"):
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                stopped += 1
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act(ours)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        yield ours
    assert stopped > 10


@pytest.mark.parametrize("phase", ["taken", "taken anew", "read", "updated"])
@pytest.mark.parametrize("window", [False, True])
def test_an_interrupt_at_any_line_leaves_a_cache_that_is_whole(window: bool, phase: str) -> None:
    """Ctrl-C comes between any two lines."""
    new, another = _new(2, 9, 0), _new(2, 1, 1)

    def begun() -> DynamicCache:
        cache = _plain(window)
        _update(cache, new)
        if phase != "taken":
            caches.take(cache, 1)
        return cache

    def act(cache: DynamicCache) -> None:
        if phase == "taken":
            caches.take(cache, 1)
        elif phase == "taken anew":
            caches.take(cache, caches.capacity_for(9))
        elif phase == "read":
            assert all(layer.keys.shape[2] for layer in cache.layers)
        else:
            _update(cache, another)

    plain = _plain(window)
    _update(plain, new)
    for ours in _interrupted(begun, act):
        if phase != "updated":
            _check_same(plain, ours)
        else:
            for layer in ours.layers:
                assert layer.keys.shape == layer.values.shape and layer.get_seq_length() in (9, 10)


@pytest.mark.parametrize("window", [False, True])
def test_an_interrupt_at_any_line_of_a_prompts_end_leaves_layers_that_are_whole(
    window: bool,
) -> None:
    """Some may have the prompt already, as in the original; each goes on from what it has."""
    new, another = _new(2, 9, 0), _new(2, 1, 1)
    parts = (*(k for k, _ in new), *(v for _, v in new))
    kept = Kept(None, parts, 9)
    for ours in _interrupted(lambda: _plain(window), lambda cache: caches.begin(cache, kept)):
        for layer, first, second in zip(ours.layers, new, another, strict=True):
            there = layer.get_seq_length()
            assert there in (0, 9)
            keys, values = layer.update(*second)
            for got, one, two in zip((keys, values), first, second, strict=True):
                wanted = torch.cat((one, two), 2) if there else two
                assert torch.equal(got, wanted[:, :, -got.shape[2] :])
                assert got.shape[2] == wanted.shape[2] or layer.is_sliding
