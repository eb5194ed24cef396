"""The operations that a leaf may be made of, and how each must be called.

All of them work on elements or along the last dimension, and know no other state. What is made of
them is identified by samples, for it cannot be one function where they lie and another one
elsewhere: those that could make a step, a bend or a bump between samples are counted, and a leaf
has as many as its formula needs. What is left are polynomials, of a degree that leaves them no room
for a bump of their own. Anything else is unexplained.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.reading.values import (
    FIXED,
    Clamp,
    Fact,
    Halves,
    Memory,
    Tensor,
    Traced,
    Unexplained,
    fact,
    kinds_of,
    plain_of,
)

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LAST = (-1, (-1,), [-1])
_POWERS = (2, 3, 0.5, -0.5, -1, 1)

Arguments = Sequence[Any]
Keywords = Mapping[str, Any]
#: Called with the width of the leaf's input (None: it may not be used), the arguments and keywords.
Operation = Callable[[int | None, Arguments, Keywords], Any]


#: By name, what could make a bump: "special" a step or a bend, "over" divides by a tensor, "root".
_COUNTED = {
    **dict.fromkeys(("exp", "tanh", "sigmoid", "erf", "relu", "silu", "gelu"), ("special",)),
    "exp": ("special", "exp"),
    "rsqrt": ("root", "over"),
    "sqrt": ("root",),
    "reciprocal": ("over",),
}
_DIVISIONS = ("div", "divide", "true_divide")
_OF_POWERS = {0.5: ("root",), -0.5: ("root", "over"), -1: ("over",)}
_tallies = threading.local()


class Tally(Counter[str]):
    """How often a code has what could make a bump, and its clamps, in their order: how many there
    are says nothing of where they stand.

    steps: what it computes, in order: of each step its name and what it is of, a number, or another
        step by its place. Casts and copies are none: codes that differ by these have one formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clamps: list[Clamp] = []
        self.steps: list[tuple[Any, ...]] = []


@contextmanager
def tally() -> Iterator[Tally]:
    """Counts, in this thread, what could make a bump."""
    before = getattr(_tallies, "now", None)
    counts = Tally()
    if before is not None:  # steps inside may be of what was made outside
        counts.steps += before.steps
    _tallies.now = counts
    try:
        yield counts
    finally:
        _tallies.now = before


def _count(*kinds: str) -> None:
    counts: Tally | None = getattr(_tallies, "now", None)
    if counts is not None:
        counts.update(kinds)


def _note_clamp(clamp: Clamp) -> None:
    counts: Tally | None = getattr(_tallies, "now", None)
    if counts is not None:
        counts.clamps.append(clamp)


#: How often a code may multiply what it is given with itself. A norm's gradient does it ten times;
#: the square of a square, taken twenty times, of what lies between 0 and 1 is a bump.
_DEGREE = 12
#: What adds its operands; all other operations of two multiply or divide them.
_SUMS = ("add", "sub", "subtract")


def step(*what: Any) -> int:
    """Note a step of the code; its place among them."""
    counts: Tally | None = getattr(_tallies, "now", None)
    if counts is None:
        return -1
    counts.steps.append(tuple(map(_named, what)))
    return len(counts.steps) - 1


def _named(value: Any) -> Any:
    """What a step is of, so that it can be compared: 0.0 is not -0.0."""
    if isinstance(value, Traced):
        return (value.step, *value.memory.writes)
    return repr(plain_of(value))


def traced(tensor: Tensor, *what: Any, role: str = "", degree: int = 1) -> Traced:
    """The result of a step, a polynomial of that degree, in memory of its own."""
    if degree > _DEGREE:
        raise Unexplained(f"it multiplies what it is given {degree} times, which no formula does")
    return Traced(tensor, Memory(owned=True, degree=degree), role, step(*what))


def view(tensor: Tensor, of: Traced, *what: Any, role: str = "") -> Traced:
    """A view of `of`, by a step if there is one."""
    return Traced(tensor, of.memory, role, step(*what, of) if what else of.step)


def degree_of(value: Any) -> int:
    """0 of a number."""
    return value.memory.degree if isinstance(value, Traced) else 0


def write_to(target: Traced, result: Traced) -> None:
    """Give memory of the code's own the values of a result."""
    target.tensor.copy_(result.tensor)
    target.memory.degree = max(target.memory.degree, result.memory.degree)
    target.memory.writes += (step("write", target, result),)


def view_or_copy(tensor: Tensor, of: Traced, *what: Any, role: str = "") -> Traced:
    """A view or a copy of `of`, by how that lies in memory, which calls vary: from here on a write
    to either would be seen in the other one or not."""
    of.memory.owned = False
    return view(tensor, of, *what, role=role)


def _numeric(name: str, values: Sequence[Any], width: int | None) -> list[Any]:
    """Operands of an elementwise operation: tensors and numbers that no call varies."""
    allowed = FIXED | {"width"} if width is not None else FIXED
    found = []
    for value in values:
        if kinds := kinds_of(value) - allowed:
            raise Unexplained(f"`{name}` takes the {', '.join(sorted(kinds))} of its input")
        bare = plain_of(value)
        if type(bare) not in (int, float, bool) and not isinstance(value, Traced):
            raise Unexplained(f"`{name}` takes a {type(bare).__name__}")
        found.append(bare)
    return found


def _only(name: str, keywords: Keywords, *names: str) -> None:
    for key in keywords:
        if key not in names:
            raise Unexplained(f"`{name}` is called with `{key}=`")


def elementwise(function: Callable[..., Tensor], *keywords: str, operands: int = 1) -> Operation:
    """Of one value after the other, of as many `operands`: what more is given by position may be
    `inplace`. `keywords` are plain settings that it may be given."""
    name = getattr(function, "__name__", str(function))

    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        _only(name, given, *keywords, "inplace", "input")
        of = list(args) + ([given["input"]] if "input" in given else [])
        if len(of) != operands:
            raise Unexplained(f"`{name}` is called with {len(of)} arguments")
        settings = {k: plain_of(v) for k, v in given.items() if k in keywords}
        if kinds := kinds_of(*(given[k] for k in settings)) - FIXED:
            raise Unexplained(f"`{name}` is set by the {', '.join(sorted(kinds))} of its input")
        values = _numeric(name, of, width)
        if kinds_of(given.get("inplace", False)):
            raise Unexplained(f"`{name}` writes in place or not by what its input is")
        if plain_of(given.get("inplace", False)):
            written(name, of[0])
        _count(*_COUNTED.get(name, ()))
        if name in _DIVISIONS and isinstance(values[1], Tensor):
            _count("over")
        degrees = [degree_of(v) for v in of]
        if name in _COUNTED and "special" in _COUNTED[name]:
            degree = 1  # what it is of was looked at when that was made
        elif name == "square":
            degree = 2 * degrees[0]
        else:
            degree = max(degrees) if name in _SUMS else sum(degrees)
        return traced(function(*values, **settings), name, *of, settings, degree=degree)

    return call


def written(name: str, target: Any) -> None:
    """Raise unless `target` is memory that only this call knows."""
    if not isinstance(target, Traced) or not target.memory.owned:
        raise Unexplained(f"`{name}` writes to memory that others see")


def _in_place(function: Callable[..., Tensor]) -> Operation:
    name = f"{function.__name__}_"
    inner = elementwise(function, operands=2)

    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        written(name, args[0])
        result = inner(width, args, given)
        if result.tensor.shape != args[0].tensor.shape:
            raise Unexplained(f"`{name}` is called with another shape")
        write_to(args[0], result)
        return args[0]

    return call


def _power(width: int | None, args: Arguments, given: Keywords) -> Any:
    _only("pow", given, "exponent")
    base, exponent = (*args, given["exponent"]) if "exponent" in given else args
    if type(exponent) not in (int, float) or exponent not in _POWERS:
        raise Unexplained(f"`pow` has the exponent {plain_of(exponent)!r}")
    _count(*_OF_POWERS.get(exponent, ()))
    degree = degree_of(base) * (int(exponent) if exponent > 1 else 1)
    values = _numeric("pow", (base, exponent), width)
    return traced(torch.pow(*values), "pow", base, exponent, degree=degree)


def _reduction(function: Callable[..., Tensor], *keywords: str) -> Operation:
    """Along the last dimension, which stays, as one element."""
    name = function.__name__

    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        _only(name, given, "dim", "axis", "keepdim", *keywords)
        positional = dict(zip(("input", "dim", "keepdim"), args, strict=False))
        settings = {"dim" if k == "axis" else k: v for k, v in given.items()}
        if len(args) > 3 or (positional.keys() & settings.keys()):
            raise Unexplained(f"`{name}` is called with {len(args)} arguments")
        settings = {**positional, **settings}
        x = settings.pop("input")
        if kinds_of(*settings.values()) - FIXED:
            raise Unexplained(f"`{name}` is set by a property of its input")
        settings = {k: plain_of(v) for k, v in settings.items()}
        if settings.get("dim") not in _LAST or settings.get("keepdim") is not True:
            raise Unexplained(f"`{name}` is not along the last dimension with `keepdim=True`")
        if not isinstance(x, Traced):
            raise Unexplained(f"`{name}` of a {type(x).__name__}")
        degree = degree_of(x) * (2 if name == "var" else 1)
        if settings.get("dtype") is torch.float16:
            _count("narrowing")
        y, of = function(x.tensor, **settings), {k: settings[k] for k in settings if k != "dtype"}
        return traced(y, name, x, sorted(of.items()), degree=degree)

    return call


def _cast(width: int | None, args: Arguments, given: Keywords) -> Any:
    """`x.to(...)`, to a floating dtype or the device of something."""
    _only("to", given, "dtype", "device", "non_blocking")
    _count("cast")
    x, *targets = args
    targets += [given[k] for k in ("dtype", "device") if k in given]
    y = x.tensor
    for target in targets:
        if kinds_of(target) - FIXED:
            raise Unexplained("`to` is set by a property of its input that calls vary")
        to = plain_of(target)
        to = to.dtype if isinstance(target, Traced) else to
        if isinstance(to, torch.dtype) and to in _FLOATING:
            if to is torch.float16 and y.dtype is not to:
                _count("narrowing")
            y = y.to(to)
        elif not (isinstance(to, torch.device) and to == y.device):
            raise Unexplained(f"`to` is called with {to!r}")
    return view(y, x, role=x.role)


def _cast_to(dtype: torch.dtype) -> Operation:
    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        _only("to", given)
        return _cast(width, (*args, dtype), {})

    return call


def _same(width: int | None, args: Arguments, given: Keywords) -> Any:
    _only("contiguous", given)
    (x,) = args
    return view_or_copy(x.tensor.contiguous(), x, role=x.role)


def _clone(width: int | None, args: Arguments, given: Keywords) -> Any:
    _only("clone", given)
    (x,) = args
    memory = Memory(owned=True, degree=degree_of(x))
    memory.writes = x.memory.writes
    return Traced(x.tensor.clone(), memory, step=x.step)


def _clamp(*names: str) -> Operation:
    """`names`: of the bounds, in the order in which they are given by position. They are numbers
    that no call varies: a tensor's values are nobody's setting."""

    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        _only("clamp", given, "input", *names)
        if len(args) > 1 + len(names):
            raise Unexplained(f"`clamp` is called with {len(args)} arguments")
        settings = dict(zip(("input", *names), args, strict=False)) | dict(given)
        x = settings.pop("input")
        bounds = {n: b for n, b in settings.items() if b is not None}
        if not isinstance(x, Traced) or not bounds:
            raise Unexplained("`clamp` has no bounds, or is of no tensor")
        for bound in bounds.values():
            if type(bound) not in (int, float) or math.isnan(bound):
                raise Unexplained("`clamp` has a bound that is no plain number")
        low, high = float(bounds.get("min", -math.inf)), float(bounds.get("max", math.inf))
        if (low, high) != (-math.inf, math.inf):  # else it gives back what it is given
            _note_clamp(Clamp(x.role, low, high))
        y = torch.clamp(x.tensor, **bounds)
        return traced(y, "clamp", x, low, high, degree=degree_of(x))

    return call


def _halves(width: int | None, args: Arguments, given: Keywords) -> Any:
    """`chunk(2, dim=-1)`."""
    _only("chunk", given, "chunks", "dim")
    settings = dict(zip(("input", "chunks", "dim"), args, strict=False)) | dict(given)
    x, parts, dim = (settings.get(k) for k in ("input", "chunks", "dim"))
    if parts != 2 or dim != -1 or not isinstance(x, Traced):
        raise Unexplained("`chunk` does not halve the last dimension")
    return _two_halves(x)


def _two_halves(x: Traced) -> tuple[Traced, Traced]:
    first, second = (
        view(t, x, "half", i, role=f"{x.role}[{i}]" if x.role else "")
        for i, t in enumerate(x.tensor.chunk(2, dim=-1))
    )
    return first, second


def _split(width: int | None, args: Arguments, given: Keywords) -> Any:
    """`split(x.shape[-1] // 2, dim=-1)`."""
    _only("split", given, "split_size", "split_size_or_sections", "dim")
    settings = {k.removesuffix("_or_sections"): v for k, v in given.items()}
    settings |= dict(zip(("input", "split_size", "dim"), args, strict=False))
    x, size, dim = (settings.get(k) for k in ("input", "split_size", "dim"))
    half = isinstance(size, Fact) and size.kinds == {"width"}
    if not half or dim != -1 or not isinstance(x, Traced):
        raise Unexplained("`split` does not halve the last dimension")
    if 2 * size.value != x.tensor.shape[-1]:  # type: ignore[union-attr]
        raise Unexplained("`split` does not halve the last dimension")
    return _two_halves(x)


def _reshape(width: int | None, args: Arguments, given: Keywords, views: bool = False) -> Any:
    """To groups of the last dimension and back; dimensions before it stay, or become one."""
    _only("view", given)
    x, *sizes = args
    flat: list[Any] = []
    for size in sizes:
        if isinstance(size, Fact) and isinstance(size.value, tuple):
            last = size.kinds >= {"lead", "width"}
            flat += [
                Fact(v, frozenset({"width"} if last and i == len(size.value) - 1 else {"lead"}))
                for i, v in enumerate(size.value)
            ]
        else:
            flat += list(size) if isinstance(size, (tuple, list)) else [size]
    if width is None:
        return _as_halves(x, flat)
    lead = [v for v in flat if isinstance(v, Fact) and "lead" in v.kinds]
    tail = flat[len(lead) :]
    if lead:
        ordered = flat[: len(lead)] == lead and x.tensor.dim() > len(lead)
        ordered = ordered and tuple(map(plain_of, lead)) == tuple(x.tensor.shape[: len(lead)])
    elif flat and flat[0] == -1:
        ordered, tail = True, flat[1:]
    else:
        ordered = x.tensor.dim() == 1  # a parameter
    if kinds_of(*tail) - (FIXED | {"width"}):
        ordered = False
    sizes_of_tail = [plain_of(v) for v in tail]
    if not ordered or not all(isinstance(v, int) for v in sizes_of_tail):
        raise Unexplained("`view` takes other dimensions apart than the last one")
    if -1 in sizes_of_tail:
        others = math.prod(v for v in sizes_of_tail if v != -1)
        sizes_of_tail[sizes_of_tail.index(-1)] = width // max(others, 1)
    if math.prod(sizes_of_tail) != width:
        raise Unexplained("`view` takes other dimensions apart than the last one")
    shape = [plain_of(v) for v in flat]
    sort = view if views else view_or_copy
    return sort(x.tensor.reshape(shape), x, "reshape", len(lead), sizes_of_tail)


def _view(width: int | None, args: Arguments, given: Keywords) -> Any:
    """The original's is an error where it would be a copy."""
    return _reshape(width, args, given, views=True)


#: An image's channels put last, and back.
_CHANNELS = ((0, 2, 3, 1), (0, 3, 1, 2))


def _permute(width: int | None, args: Arguments, given: Keywords) -> Any:
    """Of images alone: rows are what is last, and these are the two orders that keep them whole."""
    _only("permute", given, "dims")
    x, *dims = (*args, given["dims"]) if "dims" in given else args
    order = dims[0] if len(dims) == 1 else dims
    if not isinstance(x, Traced) or not isinstance(order, (tuple, list)):
        raise Unexplained("`permute` is not of a tensor and its dimensions")
    if any(type(d) is not int for d in order) or tuple(order) not in _CHANNELS:
        raise Unexplained("`permute` moves other dimensions than an image's channels")
    if x.tensor.dim() != 4:
        raise Unexplained("`permute` takes images alone, and not as a norm of channels does")
    return view(x.tensor.permute(*order), x, "permute", tuple(order))


def _as_halves(x: Any, sizes: list[Any]) -> Halves:
    """`x.view(batch, length, 2, -1)` of a packed projection, each of whose halves is taken."""
    lead, tail = sizes[:-2], sizes[-2:]
    if (
        not isinstance(x, Traced)
        or [type(v) for v in tail] != [int, int]
        or tail != [2, -1]
        or not all(isinstance(v, Fact) and v.kinds == {"lead"} for v in lead)
        or tuple(map(plain_of, lead)) != tuple(x.tensor.shape[:-1])
        or not x.tensor.is_contiguous()
    ):
        raise Unexplained("`view` changes the shape")
    return Halves(_two_halves(x))


def _squeeze(width: int | None, args: Arguments, given: Keywords) -> Any:
    """Of a dimension that the code made: those of the samples have more than one element."""
    _only("squeeze", given)
    x, dim = args if len(args) == 2 else (args[0], None)
    if not isinstance(dim, int) or x.tensor.dim() <= dim + 1 or x.tensor.shape[dim] != 1:
        raise Unexplained("`squeeze` takes away a dimension that may have one element")
    return view(x.tensor.squeeze(dim), x, "squeeze", dim)


def _shape_is_last(name: str, shape: Any) -> Any:
    bare = plain_of(shape)
    if kinds_of(shape) - (FIXED | {"width"}) or not isinstance(bare, (tuple, list, int)):
        raise Unexplained(f"`{name}` has a shape that calls vary")
    bare = (bare,) if isinstance(bare, int) else tuple(bare)
    if len(bare) != 1:
        raise Unexplained(f"`{name}` covers {len(bare)} dimensions")
    return bare


def _fused_norm(function: Callable[..., Tensor], names: tuple[str, ...]) -> Operation:
    name = function.__name__

    def call(width: int | None, args: Arguments, given: Keywords) -> Any:
        _only(name, given, *names)
        settings = dict(zip(names, args, strict=False)) | dict(given)
        settings["normalized_shape"] = _shape_is_last(name, settings.get("normalized_shape"))
        if kinds_of(*settings.values()) - FIXED:
            raise Unexplained(f"`{name}` is set by a property of its input")
        if any(isinstance(v, Tensor) for v in settings.values()):
            raise Unexplained(f"`{name}` takes a tensor that is held elsewhere")
        _count("root", "over")
        degree = 3 * degree_of(settings.get("input")) + 1  # itself by the root of its square
        y = function(**{k: plain_of(v) for k, v in settings.items()})
        return traced(y, name, *map(settings.get, names), degree=degree)

    return call


def _dropout(width: int | None, args: Arguments, given: Keywords) -> Any:
    _only("dropout", given, "input", "p", "training", "inplace")
    settings = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(given)
    if settings.get("p", 0.5) != 0.0 or isinstance(settings.get("p"), bool):
        raise Unexplained("`dropout` draws random numbers in `train()`")
    return settings["input"]


#: Python's operators, of numbers and of tensors.
OPERATORS: dict[str, tuple[Callable[..., Any], Operation | None]] = {
    "Add": (operator.add, elementwise(torch.add, operands=2)),
    "Sub": (operator.sub, elementwise(torch.sub, operands=2)),
    "Mult": (operator.mul, elementwise(torch.mul, operands=2)),
    "Div": (operator.truediv, elementwise(torch.true_divide, operands=2)),
    "Pow": (operator.pow, _power),
    "FloorDiv": (operator.floordiv, None),
    "Mod": (operator.mod, None),
    "USub": (operator.neg, elementwise(torch.neg)),
    "UAdd": (operator.pos, None),
}

_OF_TWO = ("add", "sub", "mul", "div", "multiply", "subtract", "divide", "true_divide")
_OF_ONE = (
    *("neg", "negative", "square", "sqrt", "rsqrt", "reciprocal"),
    *("exp", "tanh", "sigmoid", "erf", "relu"),
)

_NAMED: dict[str, Operation] = {
    **{name: elementwise(getattr(torch, name), operands=2) for name in _OF_TWO},
    **{name: elementwise(getattr(torch, name)) for name in _OF_ONE},
    "pow": _power,
    "mean": _reduction(torch.mean, "dtype"),
    "sum": _reduction(torch.sum, "dtype"),
    "var": _reduction(torch.var, "unbiased", "correction"),
    **dict.fromkeys(("clamp", "clip"), _clamp("min", "max")),
    "clamp_min": _clamp("min"),
    "clamp_max": _clamp("max"),
    "chunk": _halves,
    "clone": _clone,
    "split": _split,
    "reshape": _reshape,
    "permute": _permute,
}

#: Methods of tensors, by name: a tensor here is always a plain one.
METHODS: dict[str, Operation] = {
    **_NAMED,
    **{f"{n}_": _in_place(getattr(torch, n)) for n in ("add", "sub", "mul", "div")},
    "view": _view,
    "squeeze": _squeeze,
    "to": _cast,
    "type": _cast,
    "type_as": _cast,
    "float": _cast_to(torch.float32),
    "double": _cast_to(torch.float64),
    "half": _cast_to(torch.float16),
    "bfloat16": _cast_to(torch.bfloat16),
    "contiguous": _same,
}

#: What these were when hfpatch was imported, operators too: somebody may replace one.
TENSOR_METHODS = {
    name: getattr(Tensor, name)
    for name in (
        *METHODS,
        *(f"__{n}__" for n in ("add", "sub", "mul", "truediv", "pow", "neg")),
        *(f"__{n}__" for n in ("radd", "rsub", "rmul", "rtruediv", "rpow")),
    )
}

#: Functions, by identity: one that was exchanged is another one.
FUNCTIONS: dict[Any, Operation] = {
    **{getattr(torch, name): call for name, call in _NAMED.items()},
    torch.special.expit: elementwise(torch.sigmoid),
    F.silu: elementwise(F.silu),
    F.gelu: elementwise(F.gelu, "approximate"),
    F.relu: elementwise(F.relu),
    F.sigmoid: elementwise(torch.sigmoid),
    F.tanh: elementwise(torch.tanh),
    F.dropout: _dropout,
    F.layer_norm: _fused_norm(F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps")),
    F.rms_norm: _fused_norm(F.rms_norm, ("input", "normalized_shape", "weight", "eps")),
    torch.layer_norm: _fused_norm(
        torch.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps")
    ),
}

#: Functions of numbers.
NUMERIC = (
    *(math.sqrt, math.pow, math.exp, math.log, math.tanh, math.erf, math.floor, math.ceil),
    *(int, float, min, max, abs, round),
)


def numeric(function: Callable[..., Any], args: Arguments, given: Keywords) -> Any:
    """A function of numbers that no call varies, or of what it was read off."""
    values = [plain_of(a) for a in args]
    if given or not all(isinstance(v, (int, float)) for v in values):
        raise Unexplained(f"`{function.__name__}` is called with other things than numbers")
    return fact(function(*values), kinds_of(*args))


def read_off(tensor: Traced, name: str) -> Any:
    """An attribute of a tensor that is no method."""
    t = tensor.tensor
    if name == "shape":
        return _shape_of(t)
    kinds = {
        "dtype": "dtype",
        "device": "device",
        "is_cuda": "device",
        "ndim": "rank",
        "requires_grad": "grad",
        "is_leaf": "grad",
    }
    if name not in kinds:
        verb = "called, which no formula has" if callable(getattr(t, name, None)) else "read"
        raise Unexplained(f"`{name}` of a tensor is {verb}")
    if name == "dtype":
        _count("cast")  # it may decide about one
    return Fact(getattr(t, name), frozenset({kinds[name]}))


def _shape_of(t: Tensor) -> Fact:
    """Its sizes. A norm's own weight or bias has one, the width of the rows that it takes."""
    own = t.dim() == 1 and isinstance(t, nn.Parameter)
    return Fact(tuple(t.shape), frozenset({"width"} if own else {"lead", "width"}))


#: Methods of tensors that say something of them.
ASKED = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "is_contiguous", "stride"),
        *("storage_offset", "is_floating_point", "is_complex"),
    }
)


def ask(tensor: Traced, name: str, args: Arguments) -> Any:
    """What a method of `ASKED` says."""
    t = tensor.tensor
    if name == "size":
        return index(_shape_of(t), args[0]) if args else _shape_of(t)
    if name in ("dim", "ndimension"):
        return Fact(t.dim(), frozenset({"rank"}))
    if name in ("is_floating_point", "is_complex"):
        return Fact(getattr(t, name)(), frozenset({"dtype"}))
    return Fact(None, frozenset({"size" if name in ("numel", "nelement") else "layout"}))


def index(shape: Fact, at: Any) -> Fact:
    """`shape[at]`: only the last size is the same from either side of any number of dimensions."""
    if isinstance(at, slice) and kinds_of(at.start, at.stop):
        raise Unexplained("it takes sizes of its input by what another property of it says")
    if isinstance(at, Fact):
        raise Unexplained("it takes a size of its input by what another property of it says")
    if shape.kinds < {"lead", "width"}:
        return Fact(shape.value[at], shape.kinds)
    if at == -1:
        kinds = {"width"}
    elif isinstance(at, slice) and (at.start, at.stop, at.step) == (None, -1, None):
        kinds = {"lead"}
    elif isinstance(at, slice) and (at.start, at.stop, at.step) == (-1, None, None):
        kinds = {"width"}
    else:  # which size it is hangs on the number of dimensions, and it may be any
        kinds = {"rank", "lead", "width"}
    return Fact(shape.value[at], frozenset(kinds))
