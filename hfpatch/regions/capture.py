"""One call of a block, captured as a graph of operators on tensors without data.

The block's own code runs once, on a stand-in: modules that share nothing with the model but what
they refer to, with tensors that have a shape and no values (PyTorch's FakeTensor), whose sizes are
symbols. What it decides by sizes comes out as guards; where these are very many, sizes are numbers,
and the graph is right for calls of these sizes. What it decides by values, what it writes, or
what it draws at random, cannot be captured, and the block is left to its parts.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
import traceback
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    enable_python_dispatcher,  # type: ignore[attr-defined]
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.overrides import TorchFunctionMode

from hfpatch.proof.keys import OWNED_BY_WRAPPERS, dict_of
from hfpatch.proof.library import is_own, odd_class
from hfpatch.proof.subject import Formula, class_of, is_dense
from hfpatch.proof.unchanged import is_bound, is_hooked, is_replaced
from hfpatch.regions.caches import Noted, stand_in, with_past
from hfpatch.regions.functional import in_known_forms, without_writes
from hfpatch.regions.interrupts import held_back
from hfpatch.regions.listening import is_idle
from hfpatch.regions.modes import without_modes
from hfpatch.regions.nodes import (
    CacheUpdate,
    Call,
    Constant,
    Leaf,
    Param,
    Target,
    value,
    without_dead,
)
from hfpatch.regions.shapes import Shapes, shapes_of
from hfpatch.regions.structure import Structure, Unstructured, build, take_result

Tensor = torch.Tensor


class Uncapturable(Exception):
    """Why a block's call is not captured; the text is for the report."""


class _Loops(Exception):
    """Code would take very long to capture: the module that it is in is called as it is."""


@dataclass(frozen=True)
class KnownLeaf:
    """A child whose formula is proven: the op, and the names of its weight and bias."""

    formula: Formula
    weight: str | None
    bias: str | None


@dataclass(frozen=True)
class Captured:
    """A graph of what a call computes.

    Its placeholders are the call's tensors in the order of `Structure`; its output is the list of
    the result's tensors, which `result` puts together.
    """

    graph: Graph
    result: Structure
    shapes: Shapes
    #: Paths of modules that the graph stands in for, and of those that it calls.
    read: tuple[str, ...]
    called: tuple[str, ...]
    #: Why a module that is no layer is called as it is, by its path.
    walls: Mapping[str, str]


#: Layers that are called as modules wherever they stand.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.Bilinear)
#: Attributes that number a block: which one it is in its list.
NUMBERS = re.compile(r"^(layer|block)_?(idx|id|index|number|num)$|^(idx|index)$")
_MOST_WALLS = 6
#: Calls of PyTorch in a block, attributes of tensors counted: the largest of our tests has 700. A
#: loop over rows would hold up the first call of a model for minutes.
_MOST_CALLS = 5000
#: Tensors of sizes that take so many operations to tell: a length filled up to whole chunks. Each
#: takes sympy some 50 ms. LongT5's local attention has 23, a loop over chunks hundreds.
_MOST_COMPUTED, _COMPUTED = 32, 8
#: Decisions by an image's sizes, where these are symbols: most blocks have three at most. Code that
#: fills images up to whole windows makes hundreds, of ever longer formulas, in many seconds.
_MOST_DECISIONS = 32
#: Classes of children that loop, and what was said of them.
looping: WeakKeyDictionary[type, str] = WeakKeyDictionary()
#: Numbers that code may write out in its text.
_MOST_NUMBERS = 64


class _Number(int):
    """A block's number: code that does anything with it but hand it to the cache is not shared by
    the blocks of a list, which have a number each."""

    place: tuple[str, str]

    def _used(self, *_: Any) -> Any:
        raise Uncapturable("its code depends on which one it is in its list")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _used
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __and__ = __or__ = __neg__ = _used
    __hash__ = __bool__ = __index__ = __float__ = __str__ = __repr__ = __format__ = _used


#: What stands for it in a capture: PyTorch takes a number out of an argument without asking, and
#: in the graph it is found by this.
_NUMBER = 1_000_003


@held_back()  # also while it is prepared: sizes that are symbols are Python's objects
def capture(
    block: nn.Module,
    structure: Structure,
    tensors: Sequence[Tensor],
    leaves: Mapping[str, KnownLeaf],
    numbers: Sequence[tuple[str, str]],
) -> Captured:
    """The graph of one call of `block`; nothing is written to it or to what it holds.

    Args:
        block: the live block; its class's forward is what runs.
        structure, tensors: the call's arguments, taken apart.
        leaves: by path, the children whose formula is proven.
        numbers: where the block has its number in its list: (path, attribute).

    Raises:
        Uncapturable: the text says where in the code, and why.
    """
    walls = dict(_known_loops(block))
    loops = frozenset(walls)
    varying = True
    while True:
        attempt = _Attempt(block, leaves, numbers, walls, loops, varying)
        try:
            return attempt.run(structure, tensors)
        except _Entangled:
            varying = False
        except Uncapturable:
            raise
        except Unstructured as e:
            raise Uncapturable(f"of what it returns, {e}") from e
        except Exception as e:  # any operator's own
            inner = attempt.inside[-1] if attempt.inside else ""
            while inner in walls:
                inner = inner.rpartition(".")[0]
            if not inner or len(walls) >= _MOST_WALLS:
                raise Uncapturable(_where(e)) from e
            walls[inner] = _where(e)  # what cannot be captured is called as it is
            if isinstance(e, _Loops):
                loops |= {inner}
                looping[type(block.get_submodule(inner))] = walls[inner]


def children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules right inside of the one at `path`, by their paths."""
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}".lstrip("."), child


def _known_loops(module: nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and reason of children whose classes were found to loop, which takes seconds."""
    for below, child in children(module, path):
        why = looping.get(type(child))
        if why is not None:
            yield below, why
        else:
            yield from _known_loops(child, below)


class _Entangled(Exception):
    """Code computes with an image's sizes, or decides by them, too often for symbols."""


class _Counted(TorchFunctionMode):
    """Stops code that calls PyTorch very often or computes many sizes, as loops over rows or chunks
    do; of images code that decides very often by sizes, or computes many.

    Args:
        decided: what was decided by sizes, of an image; None of a text.
    """

    def __init__(self, decided: Sequence[Any] | None) -> None:
        super().__init__()
        self.calls = self.computed = 0
        self._decided = decided

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise _Loops(f"it calls PyTorch more than {_MOST_CALLS} times")
        if self._decided is not None and len(self._decided) > _MOST_DECISIONS:
            raise _Entangled
        out = func(*args, **(kwargs or {}))
        self.computed += isinstance(out, Tensor) and _is_computed(out.shape)
        if self.computed > _MOST_COMPUTED:
            if self._decided is not None:
                raise _Entangled
            raise _Loops(
                f"it computes sizes of more than {_MOST_COMPUTED} tensors, as loops over chunks do"
            )
        return out


def _is_computed(shape: Sequence[Any]) -> bool:
    """Whether one of the sizes takes several operations to tell."""
    return any(
        isinstance(size, torch.SymInt) and size.node.expr.count_ops() >= _COMPUTED for size in shape
    )


def _what_varies(
    tensor: Tensor, tensors: Sequence[Tensor]
) -> StatelessSymbolicContext[Any, Any] | None:
    """Sizes that may differ between calls: all, except for the columns of a table, as of RoPE's
    angles. Code reads how many there are, to rotate as many columns of a head."""
    if not tensor.is_floating_point() or not 2 <= tensor.dim() <= 4:
        return None
    of_heads = False
    if tensor.dim() == 4:  # [1, S, 1, W], of all heads, or [B, H, S, W]; else a mask, or an image
        tokens = {t.shape[1] for t in tensors if t.dim() == 3 and t.shape[1] > 1}
        of_heads = tensor.shape[2] in tokens
        if not of_heads and (tensor.shape[2] != 1 or tensor.shape[1] not in tokens):
            return None
    held = {t.shape[-2] for t in tensors if t.dim() == 4} | {0}  # tokens of a cache
    if any(tensor.shape[-1] - n in t.shape[:-1] for t in tensors for n in held):
        return None  # a mask, whose columns are keys
    last = tensor.dim() - 1
    sizes = [DimDynamic.DUCK] * last + [DimDynamic.STATIC]
    if of_heads:  # code divides the columns of its input by it
        sizes[1] = DimDynamic.STATIC
    return StatelessSymbolicContext(dynamic_sizes=sizes)


class _Attempt:
    def __init__(
        self,
        block: nn.Module,
        leaves: Mapping[str, KnownLeaf],
        numbers: Sequence[tuple[str, str]],
        walls: Mapping[str, str],
        loops: frozenset[str],
        varying: bool,
    ) -> None:
        self._varying = varying  # whether sizes are symbols
        self.inside: list[str] = []  # paths of the modules that were running when it failed
        self._leaves, self._numbers = leaves, numbers
        self._walls, self._loops = walls, loops  # loops: walls that are too slow to run
        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        self._param_of: dict[int, tuple[str, str]] = {}
        self._fakes: list[Tensor] = []  # held: `_param_of` knows them by identity
        self._read: list[str] = []
        self._called: list[str] = []
        self._block = self._stand_in(block, "")

    def run(self, structure: Structure, tensors: Sequence[Tensor]) -> Captured:
        fakes = [
            self._mode.from_tensor(
                t.detach(),
                source=ConstantSource(f"t{i}"),
                symbolic_context=_what_varies(t, tensors),
            )
            if self._varying
            else self._mode.from_tensor(t.detach(), static_shapes=True)
            for i, t in enumerate(tensors)
        ]
        noted = Noted(_Number, Uncapturable, self._update)
        result: list[Structure] = []

        def call(*given: Tensor) -> list[Tensor]:
            state = structure.cache
            count = 0 if state is None else 2 * (state.past + state.kept)
            own = given[: len(given) - count]
            cache = None if state is None else stand_in(state, given[len(own) :], noted)
            handed: list[Any] = []
            args, kwargs = build(structure, own, cache, handed)
            # texts have other lengths at each call, images are often of one size
            is_image = bool(own) and own[0].dim() == 4
            with _Counted(self._env.guards if is_image else None):
                out = type(self._block).forward(self._block, *args, **kwargs)
            if any(vars(empty) for empty in handed):
                raise Uncapturable("its code writes to a container that layers share")
            again = state is not None and state.updated is True  # noted already
            if noted.marked is not ("cross" in noted.updated) and not (noted.marked and again):
                raise Uncapturable("its code notes an update of its cache that it does not make")
            found, made = take_result(out, cache)
            result.append(found)
            return made

        with torch.no_grad(), _silenced(), self._mode, enable_python_dispatcher():
            traced = make_fx(call, tracing_mode="real", pre_dispatch=True)(*fakes)
        graph = self._cleaned(traced)
        return Captured(
            graph,
            result[0],
            shapes_of(self._env, fakes),
            tuple(self._read),
            tuple(self._called),
            dict(self._walls),
        )

    def _stand_in(self, module: nn.Module, path: str) -> nn.Module:
        """A module like this one whose children and tensors are stand-ins."""
        wall = path in self._walls or (path != "" and is_wall(module))
        leaf = self._leaves.get(path)
        made: Any = object.__new__(type(module))
        own = {k: v for k, v in module.__dict__.items() if k not in OWNED_BY_WRAPPERS}
        for hooks in [k for k in own if k.endswith("_hooks") and isinstance(own[k], dict)]:
            own[hooks] = OrderedDict()
        made.__dict__.update(own)
        for where, name in self._numbers:
            if where == path:
                number = made.__dict__[name] = _Number(_NUMBER)
                number.place = (where, name)
        held = {}
        for kind in ("_parameters", "_buffers"):
            held[kind] = {k: self._fake(t, path, k) for k, t in own[kind].items()}
        made.__dict__.update(held)
        if wall:
            self._called.append(path)
            made.__dict__["_modules"] = {
                n: self._fake_module(c) for n, c in own["_modules"].items()
            }
            made.__dict__["forward"] = self._calls(
                Call(path, isinstance(module, _LAYERS)), made, module
            )
            return made  # type: ignore[no-any-return]
        self._read.append(path)
        if (why := _odd_tensor(module)) is not None:
            raise Uncapturable(f"{f'`{path}`' if path else 'it'} {why}")
        if leaf is not None:
            names = [n if module._parameters.get(n or "") is not None else None
                     for n in (leaf.weight, leaf.bias)]  # fmt: skip
            target = Leaf(path, leaf.formula, (names[0], names[1]))
            made.__dict__["forward"] = self._calls(target, made, module)
            return made  # type: ignore[no-any-return]
        if (why := _odd_holdings(module)) is not None:
            raise Uncapturable(f"{f'`{path}`' if path else 'it'} {why}")
        if path:
            made.__dict__["forward"] = self._passes(made, path)
        made.__dict__["_modules"] = {
            name: None if child is None else self._stand_in(child, f"{path}.{name}".lstrip("."))
            for name, child in own["_modules"].items()
        }
        return made  # type: ignore[no-any-return]

    def _fake_module(self, module: nn.Module | None) -> nn.Module | None:
        """The same inside of a module that is called: it runs for the shape of its result alone."""
        if module is None:
            return None
        made: Any = object.__new__(type(module))
        made.__dict__.update(
            {k: v for k, v in module.__dict__.items() if k not in OWNED_BY_WRAPPERS}
        )
        for kind in ("_parameters", "_buffers"):
            held = module.__dict__[kind].items()
            made.__dict__[kind] = {k: self._fake(t, "", k) for k, t in held}
        children = module.__dict__["_modules"].items()
        made.__dict__["_modules"] = {n: self._fake_module(c) for n, c in children}
        return made  # type: ignore[no-any-return]

    def _fake(self, tensor: Tensor | None, path: str, name: str) -> Tensor | None:
        if tensor is None:
            return None
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor  # of a quantized layer: it is called, and not read
        fake = self._mode.from_tensor(tensor.detach(), static_shapes=True)
        self._param_of[id(fake)] = (path, name)
        self._fakes.append(fake)
        return fake

    def _passes(self, module: Any, path: str) -> Any:
        """The class's forward, noting that it runs."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(path)
            out = type(module).forward(module, *args, **kwargs)
            self.inside.pop()
            return out

        return forward

    def _calls(self, target: Call | Leaf, stand_in: Any, module: nn.Module) -> Any:
        """What records a call of a child as one node."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with disable_proxy_modes_tracing():
                out = self._result_of(target.path, stand_in, module, args, kwargs)
            return self.record(target, args, kwargs, out)

        return forward

    def _result_of(self, path: str, stand_in: Any, module: Any, args: Any, kwargs: Any) -> Any:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        features = getattr(module, "out_features", None)
        if isinstance(features, int) and x is not None and x.shape[-1] == module.in_features:
            return x.new_empty(*x.shape[:-1], features)  # also a quantized layer, or an adapter's
        if path in self._loops and x is not None:
            return _guess(type(module), x)
        try:
            with self._env.ignore_fresh_unbacked_symbols():
                out = type(stand_in).forward(stand_in, *args, **kwargs)
        except Exception:
            if x is None:
                raise
            return _guess(type(module), x)
        if x is None:
            return out
        # where values decide on a size, the same guess
        return pytree.tree_map_only(
            Tensor, lambda t: torch.empty_like(x) if free_unbacked_symbols(t) else t, out
        )

    def _update(self, which: str, place: Any, keys: Any, values: Any, past: Any) -> Any:
        """What records an update of the cache."""
        with disable_proxy_modes_tracing():
            out = with_past(keys.contiguous().clone(), values.contiguous().clone(), *(past or ()))
        given = (keys, values, *(past or ()))
        return tuple(self.record(CacheUpdate(place, which), given, {}, out))

    def record(self, target: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Make `out` the result of a node of `target`."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, (Tensor, int, float, bool, str, type(None), torch.dtype)):
                raise Uncapturable(f"`{target.path}` is called with a `{type(leaf).__name__}`")
        mode: Any = get_proxy_mode()
        given = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
        proxy = mode.tracer.create_proxy("call_function", target, *given)
        return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)

    def _cleaned(self, traced: Any) -> Graph:
        """The graph with live parameters in it; refused where it does more than compute."""
        graph: Graph = traced.graph
        for node in list(graph.nodes):
            if node.op == "get_attr":
                held = getattr(traced, node.target)
                place = self._param_of.get(id(held))
                number = _number_of(held, node)
                if place is None and number is None:
                    raise Uncapturable(
                        "its code reads or makes a tensor that is no parameter, buffer or argument"
                    )
                target: Any = Param(*place) if place is not None else Constant(number.clone())
                with graph.inserting_before(node):
                    param = graph.call_function(target)
                param.meta = dict(node.meta, val=held)
                node.replace_all_uses_with(param)
                graph.erase_node(node)
        without_writes(graph)
        without_dead(graph)
        without_modes(graph)
        in_known_forms(graph)
        for node in list(graph.nodes):
            _check_number(node)
            if isinstance(node.target, torch._ops.OpOverload):
                _check_operator(node)
            elif node.op == "call_function":
                _check_function(node)
        without_dead(graph)
        return graph


@contextmanager
def _silenced() -> Iterator[None]:
    """PyTorch logs each operator that has no result without data, as an error; it is none here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _number_of(held: Any, node: Node) -> Tensor | None:
    """The tensor that code makes of numbers (`torch.tensor(0.5)`, `x[..., [-2]]`), if this is one:
    PyTorch copies such a tensor before it lets code have it. On a GPU an index is made there."""
    lifted = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
    if type(held) is Tensor and held.numel() <= _MOST_NUMBERS:
        return held if all(u.target in lifted for u in node.users) else None
    return None


def _check_number(node: Node) -> None:
    """Whether a block's number came into an argument."""
    held = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    if isinstance(node.target, Constant):
        held += node.target.tensor.flatten().tolist()
    if any(type(h) in (int, float) and h == _NUMBER for h in held):
        _Number(0)._used()


def _check_operator(node: Node) -> None:
    op: Any = node.target
    if op is torch.ops.aten.dropout.default and node.args[2] is False:
        return
    if op._schema.is_mutable:
        raise Uncapturable(f"its code writes to a tensor (`{op}`)")
    if torch.Tag.nondeterministic_seeded in op.tags and op not in _SEEDED_BUT_NOT:
        raise Uncapturable(f"its code draws random numbers (`{op}`)")


def _check_function(node: Node) -> None:
    """Functions that are no operators: of sizes, and of results in a row. Others set modes of the
    process, such as autocast's."""
    target: Any = node.target
    if isinstance(target, Target) or target is operator.getitem:
        return
    if not isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Uncapturable(f"its code calls `{getattr(target, '__name__', target)}`")


#: Random where `dropout_p` is not 0, which `rules` looks at.
_SEEDED_BUT_NOT = frozenset({torch.ops.aten.scaled_dot_product_attention.default})


def _guess(cls: Any, x: Tensor) -> Any:
    """What a module gives whose code does not run without values: a tensor as its input, in a tuple
    where its forward says so, with None for all else. The proof has the last word on it."""
    try:
        said = get_type_hints(cls.forward).get("return")
    except Exception:  # a hint that names what is not there
        said = None
    parts = get_args(said) if get_origin(said) is tuple else ()
    if not parts or Ellipsis in parts:
        return torch.empty_like(x)
    return tuple(torch.empty_like(x) if part is Tensor else None for part in parts)


def is_wall(module: nn.Module) -> bool:
    """Whether a child is called as it stands, whatever it is: a layer, somebody's own class, or one
    that something was put around."""
    cls = class_of(module)
    if isinstance(module, _LAYERS) or cls.__name__ == "Conv1D":
        return True
    return type(module) is not cls or odd_class(cls) is not None or _is_wrapped(module)


def _is_wrapped(module: nn.Module) -> bool:
    if not is_hooked(module):
        return is_replaced(module)
    forward = module.__dict__.get("forward")
    return not is_idle(module) or (forward is not None and not is_bound(module, forward))


def _odd_tensor(module: nn.Module) -> str | None:
    """What a module holds that is no plain tensor: a kernel reads memory."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            return f"holds a `{type(tensor).__name__}`"
        if tensor is not None and not is_dense(tensor):
            return "holds a tensor whose memory does not hold its values as they are"
    return None


def _odd_holdings(module: nn.Module) -> str | None:
    """What a module that is read through holds that is not its library's."""
    for name, held in module.__dict__.items():
        if name in OWNED_BY_WRAPPERS:
            continue
        partial = isinstance(held, functools.partial)
        function = held.func if partial else (dict_of(held) or {}).get("func", held)
        if isinstance(function, types.FunctionType) and not is_own(function):
            return f"has a function `{name}` that is not the library's"
        if name == "processor" and (why := odd_class(type(held))) is not None:
            return f"has a `processor` of which {why}"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "has parametrized parameters"
    return None


def _where(e: BaseException) -> str:
    """The last line of a library's own code before an error, and the error in short."""
    text = str(e) if isinstance(e, _Loops) else f"{type(e).__name__}: {e}".split("\n")[0][:160]
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        parts = frame.filename.replace("\\", "/").split("/")
        if "site-packages" in parts:
            parts = parts[parts.index("site-packages") + 1 :]
        if parts[0] in ("transformers", "diffusers"):
            return f"`{frame.name}` in {parts[-1]}, line {frame.lineno}: {text}"
    return text


def numbers_of(block: nn.Module) -> tuple[tuple[str, str], ...]:
    """Where a block has its number in its list: (path, attribute)."""
    return tuple(
        (path, name)
        for path, module in block.named_modules()
        for name, held in module.__dict__.items()
        if type(held) is int and NUMBERS.match(name)
    )
