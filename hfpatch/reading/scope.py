"""One function of a leaf, statement by statement."""

from __future__ import annotations

import ast
import builtins
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.reading import surroundings
from hfpatch.reading.operations import OPERATORS, index, write_to, written
from hfpatch.reading.values import (
    FIXED,
    Fact,
    Halves,
    Super,
    Traced,
    Unexplained,
    fact,
    is_certain,
    is_plain,
    kinds_of,
    plain_of,
)

if TYPE_CHECKING:
    from hfpatch.reading.interpreter import Interpreter

_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
#: What Python calls for an operator between tensors and numbers.
_METHODS_OF = {
    "Add": ("__add__", "__radd__"),
    "Sub": ("__sub__", "__rsub__"),
    "Mult": ("__mul__", "__rmul__"),
    "Div": ("__truediv__", "__rtruediv__"),
    "Pow": ("__pow__", "__rpow__"),
    "USub": ("__neg__",),
}


class Returned(Exception):
    """A `return` of the code that is read."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Scope:
    """The names of one function."""

    def __init__(self, reader: Interpreter, function: types.FunctionType, names: dict[str, Any]):
        self.reader, self.function_of, self.names = reader, function, names
        self._locals = frozenset(function.__code__.co_varnames)

    # -- statements ----------------------------------------------------------------------------

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._run(statement)
            except Unexplained as e:
                if not hasattr(e, "line"):
                    e.line = self._line(statement)  # type: ignore[attr-defined]
                raise

    def _line(self, node: ast.stmt) -> str:
        text = ast.unparse(node).splitlines()[0]
        where = self.function_of.__qualname__.removesuffix(".<locals>")
        return f"{where}: `{text}`"

    def _run(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Return):
            raise Returned(None if node.value is None else self.value(node.value))
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            self._augmented(node)
        elif isinstance(node, ast.If):
            raises = [_only_raises(node.body), _only_raises(node.orelse)]
            taken = self._decide(self.value(node.test), raises)
            self.run(node.body if taken else node.orelse)
        elif isinstance(node, ast.Assert):
            if not self._decide(self.value(node.test), [False, True]):
                raise Unexplained("the assertion fails")
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                self.value(node.value)
        elif isinstance(node, ast.With):
            self._with(node)
        elif isinstance(node, ast.Pass):
            pass
        else:
            raise Unexplained(f"a `{type(node).__name__.lower()}` statement is in it")

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[_as_written(target.id)] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part, item in zip(target.elts, self._parts(target.elts, value), strict=True):
                self._assign(part.value if isinstance(part, ast.Starred) else part, item)
        else:
            raise Unexplained(f"it writes to `{ast.unparse(target)}`")

    def _parts(self, targets: list[ast.expr], value: Any) -> list[Any]:
        starred = [isinstance(t, ast.Starred) for t in targets]
        if isinstance(value, Fact) and isinstance(value.value, tuple):
            if starred == [True, False]:
                return [index(value, slice(None, -1)), index(value, -1)]
            if any(starred) or not {"lead", "width"} <= value.kinds:
                raise Unexplained("it takes a shape apart by its rank")
            if len(targets) != len(value.value):
                raise Unexplained("it takes inputs of another number of dimensions")
            self.reader.by_rank = True
            return _sizes(value)
        if not isinstance(value, (tuple, list)) or any(starred) or len(value) != len(targets):
            raise Unexplained("it takes apart what is no tuple of that length")
        return list(value)

    def _augmented(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise Unexplained(f"it writes to `{ast.unparse(node.target)}`")
        before = self._name(_as_written(node.target.id))
        after = self._operate(type(node.op).__name__, [before, self.value(node.value)])
        if isinstance(before, Traced):
            written(type(node.op).__name__.lower(), before)
            if after.tensor.shape != before.tensor.shape:
                raise Unexplained("it adds in place to another shape")
            write_to(before, after)
            after = before
        self.names[node.target.id] = after

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None or not isinstance(item.context_expr, ast.Call):
                raise Unexplained("a `with` statement is in it")
            call = item.context_expr
            args, kwargs = self._arguments(call)
            surroundings.check_autocast_off(self.value(call.func), args, kwargs)
        device = self.reader_device()
        with torch.autocast(device, enabled=False):
            self.run(node.body)

    def reader_device(self) -> str:
        for value in self.names.values():
            if isinstance(value, Traced):
                return value.tensor.device.type
        return "cpu"

    # -- branches ------------------------------------------------------------------------------

    def _decide(self, value: Any, raises: list[bool]) -> bool:
        """Which way a branch goes; `raises`: whether all that either way does is to raise."""
        if isinstance(value, Traced):
            raise Unexplained("it branches on the values of a tensor")
        free = kinds_of(value) - FIXED
        others = {kind for kind in free if kind.startswith("autocast on ")}
        self.reader.autocasts |= {kind.removeprefix("autocast on ") for kind in others}
        free -= others
        if free == {"rank"}:
            self.reader.by_rank, free = True, frozenset()
        taken = _truth(value) if not free or free == {"width"} else False
        # of another width the original says so, and so does the kernel where there can be one alone
        fixed = self.reader.width is not None or bool(self.reader.live)
        if free and not (free == {"width"} and fixed and raises[1 if taken else 0]):
            raise Unexplained(f"it branches on {_described(free)}")
        return taken

    # -- expressions ---------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        method = getattr(self, f"_{type(node).__name__.lower()}_value", None)
        if method is None:
            raise Unexplained(f"`{ast.unparse(node)}` is in it")
        return method(node)

    def _constant_value(self, node: ast.Constant) -> Any:
        return node.value

    def _name_value(self, node: ast.Name) -> Any:
        return self._name(_as_written(node.id))

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        function, found = self.function_of, self.reader.found
        if name in self._locals:
            raise Unexplained(f"`{name}` has no value")
        code = function.__code__
        if name in code.co_freevars:
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            value = cell.cell_contents
            found.append((cell, None, value))
            return surroundings.usable(value, name)
        if name in function.__globals__:
            value = function.__globals__[name]
            found.append((function.__globals__, name, value))
            return surroundings.usable(value, name)
        if hasattr(builtins, name):
            value = getattr(builtins, name)
            found.append((vars(builtins), name, value))
            return value
        raise Unexplained(f"`{name}` has no value")

    def _attribute_value(self, node: ast.Attribute) -> Any:
        return self.reader.attribute(self.value(node.value), node.attr)

    def _tuple_value(self, node: ast.Tuple) -> Any:
        return tuple(self._items(node.elts))

    def _list_value(self, node: ast.List) -> Any:
        return self._items(node.elts)

    def _items(self, nodes: list[ast.expr]) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.value(node.value)
                if isinstance(value, Fact) and isinstance(value.value, tuple):
                    self.reader.by_rank = True  # how many there are says the rank
                    items += _sizes(value)
                elif isinstance(value, (tuple, list)):
                    items += value
                else:
                    raise Unexplained(f"`*{ast.unparse(node.value)}` is in it")
            else:
                items.append(self.value(node))
        return items

    def _binop_value(self, node: ast.BinOp) -> Any:
        name = type(node.op).__name__
        return self._operate(name, [self.value(node.left), self.value(node.right)])

    def _unaryop_value(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Traced):
                raise Unexplained("it branches on the values of a tensor")
            return fact(not _truth(value), kinds_of(value))
        return self._operate(type(node.op).__name__, [value])

    def _operate(self, name: str, values: list[Any]) -> Any:
        if name not in OPERATORS:
            raise Unexplained(f"the operator `{name}` is in it")
        on_numbers, on_tensors = OPERATORS[name]
        if any(isinstance(v, Traced) for v in values):
            if on_tensors is None:
                raise Unexplained(f"the operator `{name}` is applied to a tensor")
            for method in _METHODS_OF.get(name, ()):
                self.reader.uses(method)
            return on_tensors(self.reader.width, values, {})
        bare = [plain_of(v) for v in values]
        unknown = any(isinstance(v, Fact) and v.value is None for v in values)
        if unknown or not all(map(is_plain, bare)) or any(isinstance(v, str) for v in bare):
            raise Unexplained(f"the operator `{name}` is applied to other things than numbers")
        return fact(on_numbers(*bare), kinds_of(*values))

    def _compare_value(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        kinds: frozenset[str] = frozenset()
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            if isinstance(op, (ast.Is, ast.IsNot)) and (left is None or right is None):
                held = left is right
                outcome = held if isinstance(op, ast.Is) else not held
            elif isinstance(op, (ast.Is, ast.IsNot)) and any(
                type(plain_of(v)) in (int, float, bool, str, tuple) for v in (left, right)
            ):  # a call looks whether settings are equal
                raise Unexplained("it asks whether two values are one object")
            else:
                if any(isinstance(v, Traced) for v in (left, right)):
                    raise Unexplained("it compares the values of a tensor")
                if not isinstance(op, (ast.Is, ast.IsNot)) and not is_certain([left, right]):
                    raise Unexplained("it compares objects, which say themselves what is equal")
                kinds |= kinds_of(left, right)
                try:
                    outcome = bool(_COMPARES[type(op)](plain_of(left), plain_of(right)))
                except TypeError as e:  # of what only a call can say there is no value here
                    raise Unexplained(f"it compares {_described(kinds) or 'other things'}") from e
            if not outcome:
                return fact(False, kinds)
            left = right
        return fact(True, kinds)

    def _boolop_value(self, node: ast.BoolOp) -> Any:
        """`and`, `or`: what follows is looked at only where that is needed."""
        stop = isinstance(node.op, ast.Or)
        kinds: frozenset[str] = frozenset()
        value: Any = None
        for part in node.values:
            value = self.value(part)
            if isinstance(value, Traced):
                raise Unexplained("it branches on the values of a tensor")
            kinds |= kinds_of(value)
            if kinds - FIXED - {"width", "rank"}:
                return fact(plain_of(value), kinds)
            if _truth(value) is stop:
                break
        return fact(plain_of(value), kinds)

    def _ifexp_value(self, node: ast.IfExp) -> Any:
        taken = self._decide(self.value(node.test), [False, False])
        return self.value(node.body if taken else node.orelse)

    def _subscript_value(self, node: ast.Subscript) -> Any:
        of = self.value(node.value)
        if isinstance(of, Halves):
            return self._half(of, node.slice)
        at = self._index(node.slice)
        if isinstance(of, Fact) and isinstance(of.value, tuple):
            return index(of, at)
        if isinstance(of, (tuple, list)) and isinstance(at, (int, slice)):
            return of[at]
        if (made := surroundings.looked_up(of, at, self.reader.found)) is not NotImplemented:
            return made
        raise Unexplained(f"`{ast.unparse(node)}` is in it")

    def _half(self, of: Halves, at: ast.expr) -> Any:
        """`of[..., 0, :]` or `of[..., 1, :]`."""
        if isinstance(at, ast.Tuple) and len(at.elts) == 3:
            rest, which, whole = at.elts
            if (
                isinstance(rest, ast.Constant)
                and rest.value is ...
                and isinstance(which, ast.Constant)
                and type(which.value) is int
                and which.value in (0, 1)
                and isinstance(whole, ast.Slice)
                and (whole.lower, whole.upper, whole.step) == (None, None, None)
            ):
                return of.halves[which.value]
        raise Unexplained(f"`[{ast.unparse(at)}]` is in it")

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.value(p) for p in (node.lower, node.upper)]
            if node.step is not None:
                raise Unexplained("a slice with a step is in it")
            return slice(*parts)
        return self.value(node)

    def _call_value(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return self._super()
        function = self.value(node.func)
        args, kwargs = self._arguments(node)
        if function is getattr and not all(isinstance(a, ast.Constant) for a in node.args[1:2]):
            raise Unexplained("`getattr` takes a name that the code does not write out")
        if (said := self._builtin(function, args, kwargs)) is not NotImplemented:
            return said
        return self.reader.call(function, args, kwargs)

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        args = self._items(node.args)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                kwargs[_as_written(keyword.arg)] = value
            elif type(value) is dict:
                kwargs |= value
            else:
                raise Unexplained(f"`**{ast.unparse(keyword.value)}` is in it")
        return args, kwargs

    def _builtin(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if function is len and len(args) == 1:
            bare = plain_of(args[0])
            if isinstance(args[0], Fact):
                return Fact(len(bare), frozenset({"rank"}))
            if isinstance(bare, (tuple, list, dict, str)):
                return len(bare)
        if function is isinstance and len(args) == 2:
            return self._isinstance(*args)
        if function is getattr and len(args) in (2, 3) and isinstance(args[1], str):
            return self.reader.attribute(args[0], args[1])
        if function is tuple and len(args) == 1 and isinstance(plain_of(args[0]), (tuple, list)):
            return args[0] if isinstance(args[0], Fact) else tuple(args[0])
        if function is torch.finfo and len(args) == 1:
            return fact(torch.finfo(plain_of(args[0])), kinds_of(*args))
        return NotImplemented

    def _isinstance(self, value: Any, classes: Any) -> Any:
        wanted = classes if isinstance(classes, tuple) else (classes,)
        known = (torch.Tensor, nn.Parameter, int, float, str, tuple, list)
        if not all(any(c is k for k in known) for c in wanted):  # not `in`: see `is_certain`
            raise Unexplained("it asks for the class of something")
        if nn.Parameter in wanted and isinstance(value, Traced):
            raise Unexplained("it asks whether a tensor is a parameter, which may change")
        number = type(plain_of(value)) in (int, float, bool)
        if number and (int in wanted or float in wanted):  # calls take 1 and 1.0 for one setting
            raise Unexplained("it asks for the class of a number")
        return isinstance(plain_of(value), wanted)

    def _super(self) -> Super:
        code = self.function_of.__code__
        if "__class__" not in code.co_freevars or not code.co_varnames:
            raise Unexplained("`super()` is outside of a class")
        cell = (self.function_of.__closure__ or ())[code.co_freevars.index("__class__")]
        module = self.names.get(code.co_varnames[0])
        if not isinstance(module, nn.Module):
            raise Unexplained("`super()` is outside of a module")
        return Super(cell.cell_contents, module)


def _truth(value: Any) -> bool:
    """Whether a value is true, where no code of its class's own says so."""
    bare = value.value if isinstance(value, Fact) else value
    if type(bare) not in (tuple, list, dict) and not is_certain(bare):
        raise Unexplained(f"it branches on a {type(bare).__name__}, which says itself what is true")
    return bool(bare)


def _sizes(shape: Fact) -> list[Fact]:
    """A shape's sizes: the last one is the width where it holds all of them."""
    whole, last = {"lead", "width"} <= shape.kinds, len(shape.value) - 1
    return [
        Fact(v, frozenset({"width" if i == last else "lead"}) if whole else shape.kinds)
        for i, v in enumerate(shape.value)
    ]


def _as_written(name: str) -> str:
    """A name, unless the compiler makes another one of it inside a class."""
    if name.startswith("__") and not name.endswith("__"):
        raise Unexplained(f"`{name}` is in it, which a class may write otherwise")
    return name


def _only_raises(statements: list[ast.stmt]) -> bool:
    return bool(statements) and all(isinstance(s, ast.Raise) for s in statements)


def _described(kinds: frozenset[str]) -> str:
    words = {
        "training": "`self.training`",
        "rank": "the number of dimensions",
        "lead": "the sizes of its input",
        "width": "the width of its input",
        "grad": "whether autograd records",
        "layout": "how its input lies in memory",
        "size": "the size of its input",
    }
    return " and ".join(sorted(words.get(k, k) for k in kinds))
