"""CUDA graphs of a denoiser's forward: one launch for a whole step, the same kernels and numbers.

A model that is called with the same shapes step after step (a diffusion transformer, a UNet) spends
a part of each step launching kernels. `hfpatch.apply(model, cuda_graphs=True)` records the second
call of every kind and replays it from the third on.

What a graph bakes in of the model is compared at every call (graph_keys.py). If it changed, the
graphs are dropped and recorded anew. What a graph cannot do is left to the model's own forward, and
the reason is in `hfpatch.status(model)`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves, tree_map

from hfpatch import swap
from hfpatch.announce import announce_in_call
from hfpatch.blocks.memo import Capture, read_by, rehearsal
from hfpatch.collector import without_collection
from hfpatch.direct_calls import has_own_call
from hfpatch.graphs import caches as graph_caches
from hfpatch.graphs.captures import Pool, masks_as_outside
from hfpatch.graphs.host_reads import Answers, Rehearsal, Replayed
from hfpatch.graphs.kept import DEFAULT_LIMIT, GRAPH, PLAIN_CALL
from hfpatch.graphs.kept import graphs as _graphs
from hfpatch.graphs.keys import (
    ADDRESSES,
    PLAIN,
    NotCapturable,
    Watch,
    caches_in,
    call_key,
    global_state,
    rebuild_call,
)
from hfpatch.per_object import PerObject
from hfpatch.planning import gain
from hfpatch.planning.plan import Swap
from hfpatch.planning.race import Race
from hfpatch.proof.proofs import Prepared
from hfpatch.proof.subject import Forward, Tensor, forward_of_class, watched

#: Recordings of one kind of call that differ by what the forward reads of its arguments.
_MOST_ANSWERS = 4
#: Components of a diffusers pipeline that run once per step.
DENOISERS = ("transformer", "transformer_2", "unet", "prior")


@dataclass
class _Recorded:
    """One graph with the buffers that it reads and writes."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any
    kept: list[Any]
    stream: Any  # on which the inputs were made, and whose next tensors get their memory
    pool: Pool  # after the graph, which goes first
    answers: Answers = field(default_factory=Answers)  # by which its forward went its way
    caches: list[Any] = field(default_factory=list)  # that were given to it empty, and are full now
    _results: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = {id(t): t for t in _tensors_in(self.output)}
        found |= {id(t): t for cache in self.caches for t in graph_caches.tensors_of(cache)}
        self._results = list(found.values())

    def replay(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of what the graph writes: the next replay writes to the same memory."""
        for ours, theirs in zip(self.inputs, tensors, strict=True):
            ours.copy_(theirs, non_blocking=True)
        self.graph.replay()
        return _copies(self._results)

    def result(self, copies: list[Tensor], caches: Sequence[Any] = ()) -> Any:
        """The output made of these copies; the caller's caches are filled with theirs."""
        made = dict(zip(map(id, self._results), copies, strict=True))

        def change(t: Tensor) -> Tensor:
            return made[id(t)]

        given: dict[int, Any] = {}
        for ours, theirs in zip(self.caches, caches, strict=True):
            graph_caches.fill(theirs, ours, change)
            given[id(ours)] = theirs

        def own(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return change(leaf)
            if not graph_caches.is_cache(leaf):
                return leaf
            theirs = given.get(id(leaf))
            return graph_caches.copied(leaf, change) if theirs is None else theirs

        return tree_map(own, self.output, is_leaf=graph_caches.is_cache)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output, is_leaf=graph_caches.is_cache):
        if isinstance(leaf, Tensor):
            yield leaf
        elif graph_caches.is_cache(leaf):
            yield from graph_caches.tensors_of(leaf)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """In one launch or few: a cache has two tensors a layer."""
    made = [torch.empty_like(t) for t in tensors]
    if len(made) > 1:
        torch._foreach_copy_(made, tensors)
    elif made:
        made[0].copy_(tensors[0])
    return made


def _check_output(value: Any) -> None:
    for leaf in tree_leaves(value, is_leaf=graph_caches.is_cache):
        if graph_caches.is_cache(leaf) and (what := graph_caches.unknown(leaf)) is not None:
            raise NotCapturable(f"its forward returns {what}")
        if not isinstance(leaf, (Tensor, *PLAIN)) and not graph_caches.is_cache(leaf):
            raise NotCapturable(f"its forward returns a {type(leaf).__name__}")


def _rehearse(
    model: nn.Module,
    original: Forward,
    args: Any,
    kwargs: Any,
    inputs: list[Tensor],
    counted: bool,
) -> Answers:
    """Run once as the recording will, to warm up, and to see what it is decided by.

    Args:
        inputs: copies of the call's tensors.
        counted: whether the call's own count how often they are written to.

    Raises:
        NotCapturable: it does something that a replay would not do.
    """
    static_args, static_kwargs = rebuild_call(args, kwargs, inputs)
    before, versions = _attributes(model), [t._version for t in inputs]
    seen = Rehearsal(inputs, model.buffers(), counted)
    with rehearsal(), nullcontext() if _compiled(model) else _reading(seen):
        _check_output(original(model, *static_args, **static_kwargs))
    if [t._version for t in inputs] != versions:
        raise NotCapturable("its forward writes to a tensor that it is given")
    after = _attributes(model)
    for place, value in after.items():
        if place not in before or not _same(before[place], value):
            path, name = place
            raise NotCapturable(
                f"its forward sets `{path + '.' if path else ''}{name}`, which a replay would not"
            )
    return seen.answers


@contextmanager
def _reading(mode: Rehearsal | Replayed) -> Iterator[None]:
    """What the host reads is noted, or answered, by `mode`."""
    with masks_as_outside(), mode, read_by(mode):
        yield


def _compiled(model: nn.Module) -> bool:
    """Whether torch.compile is in the model: it runs nothing of its own under a mode."""
    return any(
        has_own_call(m.__dict__) or type(m).__name__ == "OptimizedModule" for m in model.modules()
    )


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What stands on the modules, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for held in (module.__dict__, module._buffers, module._parameters)
        for name, value in held.items()
        if name[:1] != "_"
    }


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    plain = all(isinstance(v, PLAIN) for v in (now if type(now) is tuple else (now,)))
    return type(before) is type(now) and plain and bool(before == now)


def _record(model: nn.Module, original: Forward, args: Any, kwargs: Any, pool: Pool) -> _Recorded:
    """Run once to warm up, then record. The static inputs hold the values of this call."""
    _, tensors = call_key(args, kwargs)
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(tensors[0].device):
        pool.open()
        inputs = [torch.empty_like(t).copy_(t) for t in tensors]
        # Not on the pool's stream: cuBLAS would get a workspace outside of the pool.
        counted = not any(t.is_inference() for t in tensors)
        answers = _rehearse(model, original, args, kwargs, inputs, counted)
        static_args, static_kwargs = rebuild_call(args, kwargs, inputs)
        stream = torch.cuda.current_stream()
        stream.synchronize()  # the graph may read what this call has left
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        record = torch.cuda.graph(graph, pool.handle, pool.stream, capture_error_mode=mode)
        try:
            replayed = Replayed(answers)
            reading = nullcontext() if _compiled(model) else _reading(replayed)
            with Capture() as capture, without_collection(), record, reading:
                output = original(model, *static_args, **static_kwargs)
                replayed.finish()
        except BaseException:
            pool.abandon(graph)
            # where the capture's end failed too, `torch.cuda.graph` leaves its stream current
            torch.cuda.set_stream(stream)
            raise
    kept = [*capture.kept, *(copy for _, copy in answers.constants)]
    caches = caches_in(static_args, static_kwargs)
    return _Recorded(graph, inputs, output, kept, stream, pool, answers, caches)


@dataclass
class _Call:
    """One call of a model."""

    model: nn.Module
    original: Forward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def plainly(self) -> Any:
        return self.original(self.model, *self.args, **self.kwargs)


def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The tensors of a call, for people: "8×512 int64, `attention_mask` 8×512 int64"."""
    named = [("", a) for a in args] + [(f"`{k}` ", v) for k, v in kwargs.items()]
    shapes = [
        f"{name}{'×'.join(map(str, v.shape)) or 'scalar'} {str(v.dtype).removeprefix('torch.')}"
        for name, v in named
        if isinstance(v, Tensor)
    ]
    return ", ".join(shapes) or "no tensor of its own"


class Watches(PerObject[nn.Module, Watch]):
    """What looks at the modules of models.

    A watch holds these modules. It belongs to the model's patched forward: so Python's collector
    finds all of a deleted model at once. Held beside the graphs, the layers would stay until it
    looks again. The graphs are held elsewhere, by the model alone: they end before their memory
    and their stream are another's, which the collector would free in any order.
    """


@dataclass
class ModelGraphs:
    """The graphs of one model."""

    limit: int = DEFAULT_LIMIT
    #: Whether graph and plain call are timed, and the slower one is given up.
    auto: bool = False
    recorded: OrderedDict[Any, _Recorded] = field(default_factory=OrderedDict)
    #: Kinds of calls that cannot be recorded, and why.
    failed: dict[Any, str] = field(default_factory=dict)
    #: Kinds of calls whose plain call is faster, or is never like the one before.
    slower: set[Any] = field(default_factory=set)
    #: Why calls went to the model's own forward.
    reasons: dict[str, None] = field(default_factory=dict)
    #: Of each kind of call that was timed: what it is, for people, and its times.
    times: dict[Any, tuple[str, Race]] = field(default_factory=dict)
    _seen: set[Any] = field(default_factory=set)
    #: Of kinds that could not be recorded: the calls that are not looked at, and how many were.
    _resting: dict[Any, list[int]] = field(default_factory=dict)
    _signature: list[Any] | None = None
    _trusted: bool = False  # the last `look` found nothing that forbids graphs
    #: Gives the watches, while they are there.
    _watches: Callable[[], Watches | None] = field(default_factory=lambda: _for_good(Watches()))
    _pool: Any = None
    _last: Any = None  # (stream, event) of the last replay
    _lock: Any = field(default_factory=threading.RLock)

    def clear(self) -> None:
        """Free every graph and its memory."""
        if self._last is not None:
            self._last[1].synchronize()  # none is destroyed at work
        for entry in self.recorded.values():
            self._drop(entry)
        self.recorded.clear()
        self.failed.clear()
        self.slower.clear()
        self.times.clear()
        self._seen.clear()
        self._pool = self._last = None

    def kind(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """The key and the tensors of a call, by what is known without a look at the modules inside.

        Raises:
            NotCapturable: the model's own forward must run.
        """
        if model.training:
            raise NotCapturable("it is in training mode; call .eval()")
        key, tensors = call_key(args, kwargs)
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            raise NotCapturable("autograd records; call it under torch.no_grad()")
        if watched():
            raise NotCapturable("forward-mode differentiation, torch.func or torch.jit.trace is on")
        if torch.is_autocast_enabled("cuda"):
            raise NotCapturable("autocast is on")
        if torch.cuda.is_current_stream_capturing():
            raise NotCapturable("another graph is being captured")
        return (key, global_state()), tensors

    def _rest(self, key: Any) -> None:
        if self.auto:
            length = min(2 * self._resting.get(key, [0, 1])[1], 64)
            self._resting[key] = [length, length]

    def look(self, model: nn.Module, key: Any) -> bool:
        """Whether the model is what its graphs have recorded; if not, there are none from now on.

        Raises:
            NotCapturable: the model as it is, or a call of this kind, cannot be recorded.
        """
        self._trusted = False
        watch = self._watch_of(model)
        if watch is None or not watch.is_current(model):
            watch, self._signature = Watch(model), None
            if (watches := self._watches()) is not None:
                watches[model] = watch
        signature = watch.signature(model)
        same = signature == self._signature
        if not same:
            seen = set(self._seen)  # blocks pack weights at their first calls: a call stays seen
            self.clear()
            self._seen, self._signature = seen, signature
        self._trusted = True
        if key in self.failed:
            raise NotCapturable(self.failed[key])
        return same

    def run(self, model: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        """The model's result, from a graph where one may serve."""
        with self._lock:
            call = _Call(model, original, args, kwargs)
            try:
                key, call.tensors = self.kind(model, args, kwargs)
                if key not in self.slower and not self._rests(key):
                    done, result = self._by_graph(key, call)
                    if done:
                        return result
            except NotCapturable as e:
                self._say(type(model).__name__, str(e))
        return original(model, *args, **kwargs)

    def _rests(self, key: Any) -> bool:
        """Whether a kind of call that could not be recorded runs as it is without a look at the
        model, which takes the host milliseconds: in "auto", up to 64 calls at a time."""
        left = self._resting.get(key)
        if left is None or left[0] == 0:
            return False
        left[0] -= 1
        return True

    def _by_graph(self, key: Any, call: _Call) -> tuple[bool, Any]:
        """(whether the call was made, its result).

        Raises:
            NotCapturable: the model's own forward must run.
        """
        try:
            return self._looked_at(key, call)
        except NotCapturable:
            self._rest(key)
            raise

    def _looked_at(self, key: Any, call: _Call) -> tuple[bool, Any]:
        full = self._by_answers(key, call.tensors)
        timed = self.times.get(full)
        races = timed is not None and timed[1].winner is None
        entry = None if races else self._in_place(full, call.model)
        if entry is not None:
            same, result = self._replay_then_look(entry, call, full)
            if same:
                self.recorded.move_to_end(full)
                return True, result
        else:
            self.look(call.model, full)
        entry = self._entry(self._by_answers(key, call.tensors), call)
        if entry is None:
            return False, None
        timed = self.times.get((key, entry.answers.values))
        if timed is not None and timed[1].winner is None:
            return True, self._raced(key, entry, call, timed[1])
        return True, self._result(entry, call, self._replay(entry, call))

    def _by_answers(self, key: Any, tensors: list[Tensor]) -> Any:
        """The kind of a call, with what its forward would read of its tensors: of no recording
        where it reads something else than all of them."""
        for held, entry in self.recorded.items():
            if held[0] == key and entry.answers.hold_for(tensors):
                return held
        return (key, None)

    def _raced(self, key: Any, entry: _Recorded, call: _Call, race: Race) -> Any:
        """Make the call by the way whose turn it is, and drop the graph if it has lost."""
        if race.turn() == GRAPH:
            result = race.run(
                lambda: self._result(entry, call, self._replay(entry, call)), call.device
            )
        else:
            result = race.run(call.plainly, call.device)
        if race.winner == PLAIN_CALL:
            self.slower.add(key)
            self.recorded.pop((key, entry.answers.values), None)
            self._drop(entry)
        return result

    def _watch_of(self, model: nn.Module) -> Watch | None:
        """What the last look at `model` looked through."""
        watches = self._watches()
        return None if watches is None else watches.get(model)

    def _in_place(self, key: Any, model: nn.Module) -> _Recorded | None:
        """The graph of this kind of call if it may be replayed before `look`: what it reads is
        where it was, and the last look found nothing in the way."""
        entry = self.recorded.get(key)
        if entry is None or not self._trusted or self._signature is None:
            return None
        watch = self._watch_of(model)
        if watch is None or watch.addresses() != self._signature[ADDRESSES]:
            return None
        return entry

    def _replay_then_look(self, entry: _Recorded, call: _Call, key: Any) -> tuple[bool, Any]:
        """Replay, and look whether the model changed while the GPU works: that takes the host
        milliseconds.

        A graph writes to memory of its own alone, so a result that turns out to be that of the
        model as it was is forgotten, and nothing else has happened: a cache is filled behind it.

        Returns:
            (whether the model is the same, the result if it is)

        Raises:
            NotCapturable: the model's own forward must run.
        """
        generator = _generator(call.device)
        offset = generator.get_offset()  # random numbers that the graph draws
        copies = self._replay(entry, call)
        same = False
        try:
            same = self.look(call.model, key)
        finally:
            if not same:
                generator.set_offset(offset)
        return same, self._result(entry, call, copies) if same else None

    def _entry(self, key: Any, call: _Call) -> _Recorded | None:
        """The graph of this kind of call; None for the first such call, which runs as it is."""
        entry = self.recorded.get(key)
        if entry is not None:
            self.recorded.move_to_end(key)
            return entry
        if key not in self._seen or gain.pending(call.model):
            if len(self._seen) > 64 * self.limit:
                self._seen.clear()
            self._seen.add(key)
            return None
        alike = [held for held in self.recorded if held[0] == key[0]]
        if len(alike) >= _MOST_ANSWERS:
            for held in alike:
                self._drop(self.recorded.pop(held))
            self.slower.add(key[0])
            raise NotCapturable("what its forward reads of its arguments differs from call to call")
        self.make_room()
        if self._pool is None:
            self._pool = Pool()
        try:
            entry = _record(call.model, call.original, call.args, call.kwargs, self._pool)
        except NotCapturable as e:
            self.failed[key] = str(e)
            raise
        except (RuntimeError, ValueError) as e:  # what CUDA or the model says of a capture
            self.failed[key] = f"recording failed: {type(e).__name__}: {_first_line(e)}"
            self._pool = None  # the next graph gets a pool of its own
            raise NotCapturable(self.failed[key]) from e
        self._settle(entry, call.model)
        self._seen.discard(key)  # which is that of calls that read something else from now on
        full = (key[0], entry.answers.values)
        self.recorded[full] = entry
        if self.auto:
            self.times[full] = (described(call.args, call.kwargs), Race(warm=(True, False)))
        return entry

    def _settle(self, entry: _Recorded, model: nn.Module) -> None:
        """Its rehearsal may have moved weights, as packing does at a block's first fused call: the
        other graphs read where they were."""
        watch = self._watch_of(model)
        if watch is None or (now := watch.signature(model)) == self._signature:
            return
        while self.recorded:
            self._drop(self.recorded.popitem()[1])
        self._signature = now

    def make_room(self) -> None:
        """Drop the graphs that were not used for longest, so that one more fits."""
        while len(self.recorded) >= self.limit:
            _, oldest = self.recorded.popitem(last=False)
            self._drop(oldest)
        if not self.recorded:
            self._pool = None  # PyTorch takes no new graph into a pool that its last one has left

    def _drop(self, entry: _Recorded) -> None:
        if self._last is not None and self._last[0] != entry.stream:
            entry.stream.wait_event(self._last[1])  # another stream may be replaying it still
        entry.graph.reset()

    def _result(self, entry: _Recorded, call: _Call, copies: list[Tensor]) -> Any:
        caches = caches_in(call.args, call.kwargs) if entry.caches else ()
        return entry.result(copies, caches)

    def _replay(self, entry: _Recorded, call: _Call) -> list[Tensor]:
        with torch.cuda.device(call.device), torch.no_grad():
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last[0] != stream:
                stream.wait_event(self._last[1])  # graphs of a model share their memory
            copies = entry.replay(call.tensors)
            event = self._last[1] if self._last is not None else _event()
            event.record(stream)
            self._last = (stream, event)
        return copies

    def _say(self, name: str, why: str) -> None:
        if why not in self.reasons:
            self.reasons[why] = None
            if self.auto:  # nobody asked for graphs where there are none
                return
            announce_in_call(
                f"`{name}` was called where its CUDA graphs cannot be used; such calls "
                f"run as they are: {why}",
                stacklevel=5,
            )


def _for_good(watches: Watches) -> Callable[[], Watches]:
    """As a reference to them, which keeps them."""
    return lambda: watches


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[device.index]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def adapter(original: Forward, limit: int, auto: bool = False) -> Forward:
    """The forward that replaces a model's own."""
    watches = Watches()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        held = _graphs.get(self)  # per instance: a copied model has the same adapter
        if held is None:
            held = _graphs[self] = ModelGraphs(limit, auto, _watches=weakref.ref(watches))
        return held.run(self, original, args, kwargs)

    return forward


def prepare(
    roots: Sequence[tuple[str, nn.Module]],
    prepared: Sequence[Prepared],
    limit: int,
    elsewhere: bool = False,
    auto: bool = False,
) -> tuple[list[Prepared], list[str]]:
    """The adapters for the models that run once per step, and notes on those that get none.

    Args:
        roots: (name of the component or "", module) pairs.
        prepared: the other swaps. A forward that a kernel takes over gets no graph; one that only
            looks at its arguments first (`Prepared.over`) gets it below.
        limit: the most graphs of each model.
        elsewhere: they are planned for another machine, which has CUDA.
        auto: time graph and plain call, and keep the faster.
    """
    if not elsewhere and (why := unavailable()) is not None:
        return [], [f"CUDA graphs: not made: {why}"]
    found: list[Prepared] = []
    notes: list[str] = []
    taken = {id(p.module): p for p in prepared}
    denoisers = [(name, root) for name, root in roots if name in ("", *DENOISERS)]
    if not denoisers:
        notes.append(f"CUDA graphs: the pipeline has none of {', '.join(DENOISERS)}")
    for name, root in denoisers:
        class_name = type(root).__name__
        foreign = swap.foreign_forward(root)
        other = taken.get(id(root))
        if foreign is not None or (other is not None and other.over is None):
            notes.append(
                f"CUDA graphs: not for `{class_name}`: {foreign or 'it is a fused block itself'}"
            )
            continue
        make = partial(adapter, forward_of_class, limit, auto)
        title = "a CUDA graph per kind of call"
        if auto:
            title += ", where it is faster"
        if other is not None and other.over is not None:
            make = partial(_over, other.over, make)
            title += f"; {other.swap.formula}"
        entry = Swap(
            name,
            class_name,
            "cuda_graphs",
            title,
            "torch",
            torch.__version__,
            ("cuda",),
            0.0,
            0.0,
        )
        brings = {} if other is None else other.brings
        found.append(Prepared(root, make, entry, brings=brings))
    return found, notes


def _over(over: Callable[[Forward], Forward], make: Callable[[], Forward]) -> Forward:
    return over(make())


def unavailable() -> str | None:
    """Why nothing can be recorded on this machine, or None."""
    if torch.version.hip is not None:
        return "this torch is for ROCm, where recordings were never tried"
    if not torch.cuda.is_available():
        return "this torch sees no CUDA device; without `cuda_graphs` everything else is the same"
    return None
