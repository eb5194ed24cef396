"""Fused blocks as one operator of a compiled graph: `torch.compile` calls it and looks no further.

What inductor makes of the original block's pieces is slower than the fused block, whose host code
(sums that blocks share, packed projections, the choice of an attention kernel) cannot be traced. So
a compiled model calls `hfpatch::blocks`, which calls the blocks' own patched forwards: they decide
at the call what they decide in eager mode, also to run the original.

Blocks that follow each other in a model that is traced as a whole are one operator together, so
that they share what they share in eager mode. Which do is only known at the last one: each block is
written as an operator of all blocks up to it, from the first one's inputs, as long as nothing else
uses the results of the one before, which is dropped from the graph with the rest of its dead code.

A captured block is proven at its first call. A compiled model that was never called is traced
before: there the capture is made while tracing, of tensors that hold nothing, and says whether the
block is worth an operator and what shapes its results have. The operator's first call proves it.
"""

from __future__ import annotations

import ast
import functools
import gc
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hfpatch import forks
from hfpatch.blocks.masks import masks_nothing
from hfpatch.blocks.memo import Operator
from hfpatch.per_object import PerObject
from hfpatch.proof.subject import Forward, Tensor

#: Where compiled models call fused blocks. On the CPU inductor's own code is as fast.
DEVICES = ["cuda"]

#: The least work of a block, in floating-point operations of its matrix products. Below, the host
#: takes longer to launch a fused block (0.6 to 1 ms) than an H100 takes to compute it, and what
#: inductor makes of the original takes the host less.
LEAST_WORK = 4e11


# ---------------------------------------------------------------------------------------------
# In the graph


_NO_MASKS: Mapping[str, Tensor] = {}
#: Stands for the name of arguments that have none.
_MORE = "*"


class _Run:
    """Blocks that follow each other, in a graph that is being traced."""

    def __init__(
        self, anchors: list[Tensor], tensors: list[Tensor], call: str, results: list[Tensor]
    ) -> None:
        self.anchors, self.tensors, self.call, self.results = anchors, tensors, call, results

    def goes_on(self, tensors: list[Tensor], call: str) -> bool:
        """Whether the next block is called with the results, and else as the first one was."""
        if call != self.call or len(tensors) != len(self.tensors):
            return False
        count = len(self.results)
        for mine, theirs in zip(self.results, tensors[:count], strict=True):
            if mine is not theirs:
                return False
        for mine, theirs in zip(self.tensors[count:], tensors[count:], strict=True):
            if mine is not theirs:
                return False
        return True


class _Trace:
    """Of the model that dynamo traces now; dynamo traces in one thread at a time."""

    whole = False
    run: _Run | None = None
    #: The model's own mask by the name of the blocks' argument that is made from it.
    masks: Mapping[str, Tensor] = _NO_MASKS


_trace = _Trace()


def _is_operator(node: Any) -> bool:
    return node.target in (torch.ops.hfpatch.blocks, torch.ops.hfpatch.blocks.default)


def _is_question(node: Any) -> bool:
    return node.target in (torch.ops.hfpatch.foreseen, torch.ops.hfpatch.foreseen.default)


def _last(wanted: Callable[[Any], bool]) -> Any:
    """The last such node in the graph that dynamo traces now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    nodes = InstructionTranslator.current_tx().output.graph.nodes
    return next(node for node in reversed(nodes) if wanted(node))


def _results_are_unread() -> bool:
    """Whether nothing in the graph uses the results of its last operator: writing to them, which
    leaves them the same tensors, or reading them, for which they would be computed twice."""
    try:
        results = list(_last(_is_operator).users)
        read = any(not _is_question(user) for n in results for user in n.users)
        return not read and all(n.target is operator.getitem for n in results)
    except Exception:  # dynamo's inside is another one: each block by itself
        return False


def _biases_are_of_masks() -> bool:
    """Whether each bias of the last operator is 0 where its mask is 1: a product and views of
    1 - mask, which nothing but operators uses. A wrapper around a block may have put another one
    in its place, or written to it."""
    try:
        _, tensors, call = _last(_is_operator).args
        pairs = [node for node in _read(call).given.values() if _is_pair(node)]
        return all(_is_zero_at_one(tensors[bias], tensors[mask]) for bias, mask in pairs)
    except Exception:  # dynamo's inside is another one: the blocks get their biases
        return False


def _is_zero_at_one(bias: Any, mask: Any) -> bool:
    """Of nodes of dynamo's graph, from the bias up to the mask."""
    node, subtracted, above = bias, False, None
    while node is not mask:
        users = (user for user in node.users if not _is_question(user))
        if any(user is not above and not _is_operator(user) for user in users):
            return False
        (inside,) = node.all_input_nodes
        if node.target in (operator.sub, torch.sub, torch.rsub):
            one = node.args[1] if node.target is torch.rsub else node.args[0]
            if subtracted or type(one) not in (int, float) or one != 1:
                return False
            subtracted = True
        elif node.target in (operator.mul, torch.mul):
            if subtracted:  # a product of the mask itself
                return False
        elif node.target not in ("to", "unsqueeze"):
            return False
        node, above = inside, node
    return subtracted


class Foresight(Protocol):
    """Who knows of blocks of one kind what a call that none of them had will be."""

    def foresee(self, given: Callable[[], Given]) -> str:
        """ "tensor" or "tuple", and the names of the arguments whose shapes and dtypes the results
        have, "-" for None; "" where the original should be traced.

        It is called while dynamo traces; `given()` makes the arguments, of tensors that hold
        nothing.
        """


_foresights: weakref.WeakValueDictionary[str, Foresight] = weakref.WeakValueDictionary()


def _foreseen(kind: str) -> str:
    """What `Foresight` says of the call in the last question in the graph."""
    try:
        tensors, call = _last(_is_question).args
        fakes = [node.meta["example_value"] for node in tensors]
        foresight = _foresights[kind]
        return foresight.foresee(lambda: _given(_read(call), [_like(fake) for fake in fakes]))
    except Exception:  # dynamo's inside is another one, its tensors are odd, there is no memory
        return ""


def _like(fake: Tensor) -> Tensor:
    """A tensor that holds nothing, of the sizes, strides, dtype and device of dynamo's."""
    sizes, strides = (
        [n if isinstance(n, int) else n.node.hint for n in of] for of in (fake.shape, fake.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)


# What `torch.compiler.assume_constant_result` does, which imports dynamo: over a second. Their
# results are of the place in the graph, so each call has its own.
_results_are_unread._dynamo_marked_constant = True  # type: ignore[attr-defined]
_biases_are_of_masks._dynamo_marked_constant = True  # type: ignore[attr-defined]
_foreseen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def trace_whole(
    original: Any, model: nn.Module, args: Any, kwargs: Any, masks: Mapping[str, Tensor]
) -> Any:
    """Call a model's forward, of which all is traced by dynamo: blocks may be one operator.

    Args:
        original, model, args, kwargs: the call.
        masks: of 1 and 0, from which the model makes the blocks' arguments of these names, and
            which the blocks need not be given if they are 1 everywhere: what they hold is unknown
            while tracing, and looked up at the call.
    """
    _trace.whole, _trace.run, _trace.masks = True, None, masks
    try:
        return original(model, *args, **kwargs)
    finally:
        _trace.whole, _trace.run, _trace.masks = False, None, _NO_MASKS


def call_compiled(
    block: nn.Module,
    anchor: Sequence[str],
    weights: int,
    names: Sequence[str],
    kind: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call a captured block as an operator, or as the last block of one. dynamo traces this.

    Args:
        anchor: path of a parameter of the block, by which it is found at the call. It is an input
            of the graph, so that blocks which differ in nothing else share one.
        weights: how many numbers its matrices have.
        names: of the arguments that its forward takes by their place, after self.
        kind: by which `foresee` knows who says what the results are like.
        args, kwargs: of the call.

    Returns:
        The result, or None if it cannot be called so: it is traced.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    plain = [t for t in given.values() if isinstance(t, Tensor) and t.dim() > 0]
    if not plain:
        return None
    found = _anchor_of(block, anchor, plain[0])
    # a result is like one of these: with too little work in any case nobody is asked
    if found is None or _work(max([_rows(t) for t in plain]), weights) < LEAST_WORK:
        return None
    if len(args) > len(names):
        given[_MORE] = tuple(args[len(names) :])
    tensors: list[Tensor] = []
    call = _written_call(given, len(args), (), tensors)
    if call is None:
        return None
    torch.ops.hfpatch.foreseen(tensors, call)  # dead code, whose node says what the tensors are
    told = _foreseen(kind)
    if not told:
        return None
    shape, *names_of_results = told.split(" ")
    like = [n for n in names_of_results if n != "-"]
    if _work(max([_rows(given[name]) for name in like]), weights) < LEAST_WORK:
        return None
    results = _add(block, found, given, len(args), like)
    if results is not None and _trace.masks and not _biases_are_of_masks():
        _trace.masks = _NO_MASKS  # the operator is dead code
        results = _add(block, found, given, len(args), like)
    if results is None:
        return None
    if shape == "tensor":
        return results[0]
    left = list(results)
    return tuple([None if n == "-" else left.pop(0) for n in names_of_results])


def _rows(t: Tensor) -> int:
    """Of [.., S, D]: how many tokens."""
    return math.prod(t.shape[:-1])


def _work(tokens: int, weights: int) -> int:
    """Floating-point operations of a block's products."""
    return 2 * tokens * weights


def _anchor_of(block: nn.Module, anchor: Sequence[str], first: Tensor) -> Tensor | None:
    """The parameter that a block is known by; None where its call cannot be an operator."""
    device = first.device.type
    if device not in DEVICES or torch.is_grad_enabled() or torch.is_autocast_enabled(device):
        return None
    # What was exported must load without hfpatch. The flag itself: dynamo of PyTorch before 2.13
    # takes `is_exporting()` for true in every compilation.
    if getattr(torch.compiler, "_is_exporting_flag", True):
        return None
    found: Any = block
    for name in anchor:
        found = getattr(found, name, None)
    return found if type(found) is nn.Parameter else None


def _add(
    block: nn.Module, anchor: Tensor, given: dict[str, Any], placed: int, like: Sequence[str]
) -> list[Tensor] | None:
    """Add an operator that ends with `block` to the graph; None if it cannot be called so."""
    tensors: list[Tensor] = []
    call = _written_call(given, placed, like, tensors, _trace.masks)
    if call is None:
        return None
    anchors = [anchor]
    hooked = len(block._forward_hooks) > 0 or len(block._forward_pre_hooks) > 0
    run = _trace.run
    if run is not None and not hooked and run.goes_on(tensors, call) and _results_are_unread():
        anchors, tensors = [*run.anchors, anchor], run.tensors
    results: list[Tensor] = torch.ops.hfpatch.blocks(anchors, tensors, call)
    if _trace.whole:
        _trace.run = None if hooked else _Run(anchors, tensors, call, results)
    return results


def _written_call(
    given: dict[str, Any],
    placed: int,
    like: Sequence[str],
    tensors: list[Tensor],
    masks: Mapping[str, Tensor] = _NO_MASKS,
) -> str | None:
    """A call as a literal, which `_read` reads; its tensors are added to `tensors`, first those
    that the results are like.

    Args:
        given: by the names of the arguments, in their order.
        placed: how many of them were given by their place.
        like: names of arguments that are tensors.
    """
    tensors += [given[name] for name in like]
    parts = []
    for name, value in given.items():
        text = str(like.index(name)) if name in like else _written(value, tensors)
        if text is None:
            return None
        if name in masks and isinstance(value, Tensor):
            text = f"[{text}, {_written(masks[name], tensors)}]"
        parts.append(f"{name!r}: {text}, ")
    names = "".join(f"{name!r}, " for name in like)
    return f"({placed}, ({names}), {{{''.join(parts)}}})"


def _written(value: Any, tensors: list[Tensor]) -> str | None:
    """`value` as a literal: a tensor, which is added to `tensors`, as its place there, a constant
    in brackets, tuples and dicts as such. A bias that has the name of a mask is written by
    `_written_call`: its place and the mask's in brackets."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return str(len(tensors) - 1)
    if isinstance(value, tuple):
        inner = [_written(v, tensors) for v in value]
        return None if None in inner else "(" + "".join(f"{v}, " for v in inner) + ")"
    if isinstance(value, dict):
        parts = []
        for key, inside in value.items():
            text = _written(inside, tensors)
            if text is None or type(key) is not str:
                return None
            parts.append(f"{key!r}: {text}, ")
        return "{" + "".join(parts) + "}"
    if value is None or type(value) in (bool, int, float, str):
        return f"[{value!r}]"
    return None


# ---------------------------------------------------------------------------------------------
# At the call


class _Call(NamedTuple):
    """A call as it is written in a graph: see `_written_call`."""

    placed: int
    like: tuple[str, ...]
    given: dict[str, Any]


class Given(NamedTuple):
    """The arguments of a call by their names, in their order, and how many were given by place.
    Those of `*args` are a tuple under "*"."""

    named: dict[str, Any]
    placed: int

    def apart(self, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs); `names`: of the arguments that may be given by place."""
        by_place = names[: self.placed]
        args = (*(self.named[n] for n in by_place), *self.named.get(_MORE, ()))
        held = {*by_place, _MORE}
        return args, {k: v for k, v in self.named.items() if k not in held}


@functools.lru_cache(maxsize=256)
def _read(call: str) -> _Call:
    return _Call(*ast.literal_eval(call))


def _given(call: _Call, tensors: Sequence[Tensor]) -> Given:
    return Given(_value(call.given, tensors), call.placed)


def _is_pair(node: Any) -> bool:
    """Whether it says where a bias and its mask are."""
    return isinstance(node, list) and len(node) == 2


def _value(node: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(node, int):
        return tensors[node]
    if _is_pair(node):
        bias, mask = (tensors[place] for place in node)
        return None if masks_nothing(mask) else bias
    if isinstance(node, list):
        return node[0]
    if isinstance(node, dict):
        return {key: _value(n, tensors) for key, n in node.items()}
    return tuple(_value(n, tensors) for n in node)


def _call(anchors: list[Tensor], tensors: list[Tensor], call: str) -> list[Tensor]:
    blocks = [_block_of(anchor) for anchor in anchors]
    read = _read(call)
    given = _given(read, tensors)
    expected = [(t.shape, t.dtype) for t in tensors[: len(read.like)]]
    found: list[Any] = []
    with Operator(len(blocks)):
        for block in blocks:
            _, forward, names = _blocks[block]
            args, kwargs = given.apart(names)
            made = forward(block, *args, **kwargs)
            found = [t for t in made if t is not None] if isinstance(made, tuple) else [made]
            got = [(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in found]
            if got != expected:
                raise RuntimeError(
                    f"`{type(block).__name__}` in a compiled graph: expected results {expected}, "
                    f"got {got}; compile the model again, or call `hfpatch.restore` first"
                )
            given.named.update(zip(read.like, found, strict=True))
    # An operator returns memory of its own; two results may be parts of one memory.
    inputs = {t.untyped_storage().data_ptr() for t in tensors}
    return [
        t.clone(memory_format=torch.contiguous_format)
        if t.untyped_storage().data_ptr() in inputs
        else t.contiguous()
        for t in found
    ]


def _shape(anchors: list[Tensor], tensors: list[Tensor], call: str) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in tensors[: len(_read(call).like)]]


_library: Any = torch.library.Library("hfpatch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("blocks(Tensor[] anchors, Tensor[] tensors, str call) -> Tensor[]")
_library.impl("blocks", _call, "CompositeExplicitAutograd")
torch.library.register_fake("hfpatch::blocks", _shape, lib=_library)
# A call that the graph is asked about while it is traced.
_library.define("foreseen(Tensor[] tensors, str call) -> Tensor[]")
_library.impl("foreseen", lambda tensors, call: [], "CompositeExplicitAutograd")
torch.library.register_fake("hfpatch::foreseen", lambda tensors, call: [], lib=_library)


# ---------------------------------------------------------------------------------------------
# Which block it is

_lock = forks.lock()
#: Blocks that may be called so: the paths of their anchors, and their patched forwards, without
#: what may stand around these by now: dynamo traced that. And the names of the arguments that each
#: takes by their place.
_blocks: PerObject[nn.Module, tuple[tuple[str, ...], Forward, tuple[str, ...]]] = PerObject()
_by_address: dict[int, weakref.ref[nn.Module]] = {}


def foresee(kind: str, foresight: Foresight) -> None:
    """Let `call_compiled` ask `foresight`, which it does not keep alive, about blocks of `kind`."""
    _foresights[kind] = foresight


def register(
    block: nn.Module, anchor: tuple[str, ...], forward: Forward, names: tuple[str, ...] = ()
) -> None:
    """Let `block` be found by its parameter at the path `anchor`, to call `forward` with it.

    Args:
        names: of the arguments that it takes by their place, after self.
    """
    with _lock:
        _blocks[block] = anchor, forward, names


def _address(block: nn.Module, path: tuple[str, ...]) -> int | None:
    found: Any = block
    for name in path:
        found = getattr(found, name, None)
    return found.data_ptr() if isinstance(found, Tensor) else None


def _weights(block: nn.Module) -> list[int]:
    return [p.data_ptr() for p in block.parameters()]


def _block_of(anchor: Tensor) -> nn.Module:
    """The block whose parameter `anchor` is; it may have moved since the graph was made."""
    address = anchor.data_ptr()
    ref = _by_address.get(address)
    block = ref() if ref is not None else None
    if block is not None and _address(block, _blocks[block][0]) == address:
        return block
    with _lock:
        _register_copies()
        found: dict[int, nn.Module] = {}
        shared: dict[int, tuple[str, ...]] = {}  # by blocks of other weights: belongs to none
        for each, (path, _, _) in list(_blocks.items()):
            at = _address(each, path)
            if at is None or "forward" not in each.__dict__:
                continue
            if at in found and _weights(found[at]) != _weights(each):
                shared[at] = path
            found[at] = each
        _by_address.clear()
        _by_address.update({at: weakref.ref(b) for at, b in found.items() if at not in shared})
    if address in shared:
        raise RuntimeError(
            f"`hfpatch::blocks`: two patched blocks, of other weights, share the parameter "
            f"`{'.'.join(shared[address])}` of shape {list(anchor.shape)}, by which a compiled "
            "graph knows its block; untie it, or call `hfpatch.restore` and compile again"
        )
    block = found.get(address)
    if block is None:
        raise RuntimeError(
            "`hfpatch::blocks`: expected a parameter of a patched block that is alive, got one of "
            f"shape {list(anchor.shape)} that belongs to none; compile the model again"
        )
    return block


def _register_copies() -> None:
    """Deep copies of blocks have their forwards, and were never registered."""
    known = {type(block): (path, names) for block, (path, _, names) in _blocks.items()}
    forwards = {forward for _, (_, forward, _) in _blocks.items()}
    for each in gc.get_objects():
        if type(each) in known and each not in _blocks:
            for name in ("forward", "_old_forward"):
                own = getattr(each.__dict__.get(name), "__func__", None)
                if own in forwards:
                    path, names = known[type(each)]
                    _blocks[each] = path, own, names
