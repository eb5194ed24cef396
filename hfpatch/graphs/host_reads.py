"""What a forward reads from the GPU to decide on: found in the rehearsal of a recording, the same
in the recording, and asked again before each replay.

A forward that computes `if mask.all():` waits for the GPU and goes one of two ways. A CUDA graph
holds the way that was gone. Here the rehearsal notes what was read, and by which operators it came
about from the tensors of the call; a graph is replayed where these operators give the same answers
for the new tensors. What was computed from weights and activations is not followed that far: such
a forward cannot be recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hfpatch.graphs.keys import NotCapturable
from hfpatch.proof.subject import Tensor, version

_aten = torch.ops.aten
#: Operators that wait for the GPU and give the host a value.
_SCALARS = (_aten._local_scalar_dense.default, _aten.equal.default)
_COPY = _aten._to_copy.default
_INDEX = _aten.index.Tensor
#: Larger tensors are not kept for what might be read of them: masks and positions are smaller.
_MOST = 1 << 22


@dataclass(eq=False)
class Node:
    """How a tensor came about: an operator on others, a tensor of the call, or one that stays."""

    function: Any = None
    leaves: tuple[Any, ...] = ()
    spec: Any = None
    output: int | None = None  # of an operator with several
    place: int | None = None  # among the tensors of the call
    held: Tensor | None = None
    fixed: bool = False  # what is held was copied from the host, and is nobody else's

    def value(self, tensors: Sequence[Tensor], done: dict[Node, Any]) -> Any:
        """What it is for these tensors of a call."""
        if self not in done:
            if self.place is not None:
                made: Any = tensors[self.place]
            elif self.held is not None:
                made = self.held
            else:
                leaves = [v.value(tensors, done) if isinstance(v, Node) else v for v in self.leaves]
                args, kwargs = tree_unflatten(leaves, self.spec)
                made = self.function(*args, **kwargs)
                if self.output is not None:
                    made = made[self.output]
            done[self] = made
        return done[self]

    def sources(self) -> list[Node]:
        """The tensors that it depends on and that may hold something else at another call."""
        found: dict[Node, bool] = {}
        left = [self]
        while left:
            node = left.pop()
            if node not in found:
                given = node.place is not None or node.held is not None
                found[node] = given and not node.fixed
                left.extend(v for v in node.leaves if isinstance(v, Node))
        return [node for node, varies in found.items() if varies]


@dataclass(frozen=True)
class Read:
    """A value that the host was given: `node`'s, by `function`."""

    function: Any
    node: Node
    value: Any


@dataclass
class Answers:
    """What one recording was decided by.

    Attributes:
        reads: in the order in which they were made.
        constants: tensors of the host that were copied to the GPU, and the copies.
        masks: whether each that a block asked about is known to be all ones.
        beside: what was read to know that, which a recording does not read.
    """

    reads: list[Read] = field(default_factory=list)
    constants: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masks: list[bool] = field(default_factory=list)
    beside: list[Read] = field(default_factory=list)
    _asked: list[Node] = field(default_factory=list)
    _sources: list[Node] = field(default_factory=list)
    #: Of the answers those that may differ at another call.
    values: tuple[Any, ...] = ()
    #: The tensors that were looked at last, how often each had been written to, and the outcome.
    _last: tuple[list[tuple[weakref.ref[Tensor], int | None]], bool] | None = None

    def close(self) -> None:
        """The rehearsal is over: forget what is not needed to ask again."""
        found = {r.node: r.value for r in (*self.reads, *self.beside) if r.node.sources()}
        self._asked, self.values = list(found), tuple(found.values())
        self._sources = list(dict.fromkeys(s for n in self._asked for s in n.sources()))

    def hold_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the forward would read the same of these tensors of a call.

        That waits for the GPU, as the forward itself does; but not where these very tensors, not
        written to since, were looked at last.
        """
        if not self._asked:
            return True
        used: list[Tensor] = [s.value(tensors, {}) for s in self._sources]
        if self._last is not None:
            seen, same = self._last
            pairs = zip(seen, used, strict=True)
            if all(ref() is t and counted == version(t) for (ref, counted), t in pairs):
                return same
        same = self._ask(tensors)
        counted = [(weakref.ref(t), version(t)) for t in used]
        self._last = None if any(c is None for _, c in counted) else (counted, same)
        return same

    def _ask(self, tensors: Sequence[Tensor]) -> bool:
        done: dict[Node, Any] = {}
        with torch.no_grad():
            return all(
                _same(node.value(tensors, done), value)
                for node, value in zip(self._asked, self.values, strict=True)
            )


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        return found.shape == value.shape and torch.equal(found, value)
    return bool(found == value) or (found != found and value != value)


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the forward under it reads, and how that came about.

    Args:
        tensors: of the call, in the order of `call_key`.
        held: buffers of the model. What is read of them is asked again too.
        counted: whether the caller's tensors count how often they are written to.
    """

    def __init__(
        self, tensors: Sequence[Tensor], held: Iterable[Tensor] = (), counted: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted
        self.answers = Answers()
        self._known: dict[int, tuple[Tensor, Node]] = {}
        self._made: dict[Any, Node] = {}
        for t in held:
            if t.numel() <= _MOST:
                self._know(t, Node(held=t))
        for i, t in enumerate(tensors):
            if t.numel() <= _MOST:
                self._know(t, Node(place=i))

    def all_ones(self, mask: Tensor) -> bool:
        """See `memo.Reader`: of a tensor that is known, where looking again costs nothing."""
        found = False
        if self._counted and id(mask) in self._known:
            found = bool((mask == 1).all())
            self.answers.beside.append(self.answers.reads.pop())
        self.answers.masks.append(found)
        return found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._known.clear()
        self._made.clear()
        self.answers.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SCALARS and _on_gpu(args):
            return self._read(func, args, kwargs)
        if func is _COPY and _leaves_gpu(args[0], kwargs):
            return self._read(func, args, kwargs).clone()
        if func is _INDEX:
            args = _with_indices(args, self._constant)
        if func is _COPY and _reaches_gpu(args[0], kwargs):
            return self._constant(args[0], lambda t: func(t, **kwargs))
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(func, args, kwargs)
        else:
            self._follow(func, args, kwargs, out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = self._node(func, args, kwargs)
        if node is None:
            raise NotCapturable(
                f"{_where()} waits for a value that it computed on the GPU, and goes on by it"
            )
        value = func(*args, **kwargs)
        self.answers.reads.append(Read(func, node, value))
        return value

    def _constant(self, source: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        made = copy(source)
        kept = made.clone()
        self.answers.constants.append((source.clone(), kept))
        self._know(made, Node(held=kept, fixed=True))
        return made

    def _know(self, t: Tensor, node: Node) -> None:
        self._known[id(t)] = (t, node)  # which keeps it, and so its id, alive

    def _node(self, func: Any, args: Any, kwargs: Any) -> Node | None:
        """An operator's result, if all that goes into it is known."""
        leaves, spec = tree_flatten((args, kwargs))
        known = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                held = self._known.get(id(leaf))
                if held is None:
                    return None
                leaf = held[1]
            known.append(leaf)
        try:
            key = (func, repr(spec), tuple((type(v), v) for v in known))
            return self._made.setdefault(key, Node(func, tuple(known), spec))
        except TypeError:  # not hashable
            return Node(func, tuple(known), spec)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not _deterministic(func) or not all(
            isinstance(t, Tensor) and t.is_cuda and t.numel() <= _MOST for t in outs
        ):
            return
        node = self._node(func, args, kwargs)
        if node is None:
            return
        if isinstance(out, Tensor):
            self._know(out, node)
            return
        for i, t in enumerate(outs):
            part = self._made.setdefault((node, i), Node(func, node.leaves, node.spec, output=i))
            self._know(t, part)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """What shares memory with a tensor that was written to is not known any more."""
        written = set()
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for a in func._schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write and a.name in named:
                for t in tree_flatten(named[a.name])[0]:
                    if isinstance(t, Tensor):
                        written.add(t.untyped_storage()._cdata)
        gone = [i for i, (t, _) in self._known.items() if t.untyped_storage()._cdata in written]
        for i in gone:
            # The tensor stays: another that got its id would be taken for it.
            self._known[-1 - i] = self._known.pop(i)


class Replayed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The recording: what the rehearsal has read is answered without a look at the GPU.

    Raises:
        NotCapturable: the forward reads something else than in the rehearsal.
    """

    def __init__(self, answers: Answers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads, self._constants = iter(answers.reads), iter(answers.constants)
        self._masks = iter(answers.masks)

    def all_ones(self, mask: Tensor) -> bool:
        """See `memo.Reader`: as in the rehearsal, without a kernel that nobody needs."""
        found = next(self._masks, None)
        if found is None:
            raise NotCapturable(f"{_where()} asks about a mask that it did not ask about before")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SCALARS and _on_gpu(args):
            return self._answer(func)
        if func is _COPY and _leaves_gpu(args[0], kwargs):
            return self._answer(func).clone()
        if func is _INDEX:
            args = _with_indices(args, self._constant)
        if func is _COPY and _reaches_gpu(args[0], kwargs):
            return self._constant(args[0], None)
        return func(*args, **kwargs)

    def _answer(self, func: Any) -> Any:
        read = next(self._reads, None)
        if read is None or read.function is not func:
            raise NotCapturable(f"{_where()} reads a value that it did not read one call before")
        return read.value

    def _constant(self, source: Tensor, copy: object) -> Tensor:
        held, kept = next(self._constants, (None, None))
        if (
            held is None
            or kept is None
            or held.dtype != source.dtype
            or not torch.equal(held, source)
        ):
            raise NotCapturable(
                f"{_where()} copies a tensor to the GPU that was another one call before"
            )
        return kept.clone()  # what the forward writes to is made anew at each replay

    def finish(self) -> None:
        """The recording is over.

        Raises:
            NotCapturable: it did not read all that the rehearsal did.
        """
        left = (self._reads, self._constants, self._masks)
        if any(next(one, None) is not None for one in left):
            raise NotCapturable("its forward reads fewer values than it did one call before")


def _deterministic(func: Any) -> bool:
    """Whether the operator's result is that of its arguments alone, and it is one of PyTorch's."""
    name = func._schema.name
    return (
        name.startswith("aten::")
        and "empty" not in name
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _on_gpu(args: Any) -> bool:
    return any(isinstance(a, Tensor) and a.is_cuda for a in args)


def _leaves_gpu(source: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return bool(source.is_cuda) and device is not None and _is_host(torch.device(device))


def _reaches_gpu(source: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return not source.is_cuda and device is not None and not _is_host(torch.device(device))


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _with_indices(args: Any, constant: Callable[[Tensor, Any], Tensor]) -> Any:
    """The arguments of an indexing operator, whose lists of numbers are tensors of the host."""
    of, indices, *rest = args
    if not of.is_cuda or all(i is None or i.is_cuda for i in indices):
        return args

    def moved(index: Any) -> Any:
        if index is None or index.is_cuda:
            return index
        return constant(index, lambda t: t.to(of.device))

    return (of, [moved(i) for i in indices], *rest)


def _where() -> str:
    """The line of a model that is at work, for people."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] != "torch":
            return f"`{code.co_name}` ({module}, line {frame.f_lineno})"
        frame = frame.f_back
    return "its forward"
