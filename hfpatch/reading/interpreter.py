"""Runs a leaf's forward from its syntax tree, and refuses whatever it does not know.

Only operations of `operations.py` are computed, on tensors of the proof; no code of the module is
called but its live children (the projections of an MLP). So reading changes nothing, whatever the
code does, and what was read to the end is a straight line: a function of the inputs, the
parameters, and settings that the proof is by.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.reading import surroundings
from hfpatch.reading.operations import (
    ASKED,
    FUNCTIONS,
    METHODS,
    NUMERIC,
    TENSOR_METHODS,
    ask,
    degree_of,
    numeric,
    read_off,
    step,
    tally,
    traced,
)
from hfpatch.reading.scope import Returned, Scope
from hfpatch.reading.source import tree_of
from hfpatch.reading.values import (
    ChildWeight,
    Context,
    Fact,
    Handler,
    Method,
    Super,
    TensorMethod,
    Traced,
    Unexplained,
    fact,
    is_certain,
    is_plain,
)

#: How deep functions may call each other.
_DEPTH = 8
_CALLED = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_TABLES = frozenset(nn.Module().__dict__)  # of a module: parameters, hooks, children


class Interpreter:
    """One reading of one module.

    Args:
        module: the module, or a replica of it with the tensors of the proof.
        live: children that are called, not read.
        width: size of the last dimension of the input, where the formula may depend on it.
    """

    def __init__(
        self, module: nn.Module, live: Mapping[str, Callable[..., Any]], width: int | None
    ) -> None:
        self.module, self.live, self.width = module, live, width
        #: Whether the code is one thing or another by the number of dimensions.
        self.by_rank = False
        #: Devices, others than the inputs', for which the code asks whether autocast is on.
        self.autocasts: set[str] = set()
        #: Whether it has an `autograd.Function`.
        self.own_gradient = False
        #: Calls of live children, in order: name and argument.
        self.calls: list[tuple[str, Traced]] = []
        #: Live children whose weight's dtype the code asks for.
        self.asked: set[str] = set()
        #: What was found by a name that is not the module's: where, the name, what.
        self.found: list[tuple[Any, Any, Any]] = list(surroundings.OF_MODULES)
        #: Of what type the device of the inputs is.
        self.device = "cpu"
        self._depth = 0

    def uses(self, name: str) -> None:
        """A method or operator of tensors is used, which must be PyTorch's own."""
        now = getattr(torch.Tensor, name, None)
        if now is not TENSOR_METHODS.get(name):
            raise Unexplained(f"`torch.Tensor.{name}` was replaced")
        self.found.append((torch.Tensor, name, now))

    def forward(self, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What the class's forward of `module` returns."""
        surroundings.check_class(type(module))
        member = _member(type(module), "forward")
        if module is self.module or any(module is c for c in self.module._modules.values()):
            for name in ("forward", "_call_impl", "__call__"):
                if name in module.__dict__:
                    raise Unexplained(f"`{type(module).__name__}` has a `{name}` of its own")
        else:  # a global one, at which no call looks
            surroundings.check_uncalled(module)
            self.found += [(module, None, None), (type(module), "forward", member)]
        return self.function(member, [module, *args], kwargs)

    def function(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a Python function returns, read from its source."""
        if type(function) is not types.FunctionType:
            raise Unexplained(f"`{_called(function)}` is called, which no formula has")
        code = function.__code__
        if getattr(function, "__builtins__", None) is not vars(builtins):
            raise Unexplained(f"`{_called(function)}` has builtins of its own")
        if code.co_flags & (
            inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        ):
            raise Unexplained(f"`{_called(function)}` is a generator")
        if self._depth >= _DEPTH:
            raise Unexplained(f"`{_called(function)}` is called too deep inside")
        tree = tree_of(function)
        scope = Scope(self, function, _bound(function, args, kwargs))
        self._depth += 1
        try:
            if isinstance(tree, ast.Lambda):
                return scope.value(tree.body)
            scope.run(tree.body)
        except Returned as e:
            return e.value
        finally:
            self._depth -= 1
        return None

    # -- attributes ----------------------------------------------------------------------------

    def attribute(self, of: Any, name: str) -> Any:
        if name.startswith("__"):
            raise Unexplained(f"`{name}` is read")
        if isinstance(of, Traced):
            if name in METHODS:
                self.uses(name)
            if name in METHODS or name in ASKED:
                return TensorMethod(of, name)
            return read_off(of, name)
        if isinstance(of, nn.Module):
            return self._of_module(of, name)
        if isinstance(of, ChildWeight):
            return self._of_weight(of, name)
        if isinstance(of, Super):
            return self._of_super(of, name)
        if isinstance(of, types.ModuleType):
            return self._of_library(of, name)
        if isinstance(of, Fact) and isinstance(of.value, (torch.device, torch.finfo)):
            return fact(getattr(of.value, name), of.kinds)
        if isinstance(of, torch.finfo):
            return getattr(of, name)
        if type(of) is dict and name == "get":
            return Handler(lambda *args: of.get(*args))
        if isinstance(of, Context):
            return self._of_context(of, name)
        if isinstance(of, type):
            return self._of_class(of, name)
        raise Unexplained(f"`.{name}` of a {type(of).__name__} is read")

    def _of_module(self, module: nn.Module, name: str) -> Any:
        surroundings.check_class(type(module))
        held = module.__dict__
        for child_name, child in self.live.items():
            if module is child:
                weight = child._parameters.get(name) if isinstance(child, nn.Module) else None
                if name == "weight" and weight is not None:
                    return ChildWeight(child_name, weight)
                raise Unexplained(f"`{name}` of a `{type(module).__name__}` that is called is read")
        for base in type(module).__mro__:
            if name in base.__dict__:
                member = base.__dict__[name]
                if type(member) is property:
                    return self.function(member.fget, [module], {})
                if hasattr(type(member), "__set__") or hasattr(type(member), "__delete__"):
                    raise Unexplained(f"`{base.__name__}.{name}` is a descriptor")
                if name not in held:
                    return self._bind(member, module, base, name)
                break
        if name == "training":
            return Fact(held[name], frozenset({"training"}))
        if name in held:
            value = held[name]
            if name in _TABLES:
                raise Unexplained(f"`self.{name}` is read")
            near = (self.module, *self.module._modules.values())
            if all(module is not m for m in near):  # not `in`: its class may say what is equal
                self.found.append((held, name, value))  # a global one, such as `gelu`
            return self._setting(value, name, module)
        if name in held["_parameters"]:
            parameter = held["_parameters"][name]
            if parameter is None:
                return None
            if module is not self.module and all(module is not c for c in self.live.values()):
                raise Unexplained(f"the parameter `{name}` of a `{type(module).__name__}` is read")
            return Traced(parameter, step=f"parameter {name}")
        if name in held["_buffers"]:
            if held["_buffers"][name] is None:
                return None
            raise Unexplained(f"the buffer `{name}` is read, which may change")
        if name in held["_modules"]:
            return held["_modules"][name]
        raise Unexplained(f"`{name}` is no attribute of `{type(module).__name__}`")

    def _of_weight(self, weight: ChildWeight, name: str) -> Any:
        if name not in ("dtype", "device"):
            raise Unexplained(f"`{name}` of the weight of `{weight.name}` is read")
        if name == "dtype":
            self.asked.add(weight.name)
        return read_off(Traced(weight.tensor), name)

    def _setting(self, value: Any, name: str, module: nn.Module) -> Any:
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            if value.__self__ is module:
                return Method(value.__func__, module)
        elif is_plain(value):
            return tuple(value) if isinstance(value, tuple) else value
        elif isinstance(value, _CALLED):
            return value
        raise Unexplained(f"`self.{name}` is read, a {type(value).__name__}, which may change")

    def _bind(self, member: Any, module: nn.Module, base: type, name: str) -> Any:
        if base in (nn.Module, object):  # calls look at what the classes below have
            raise Unexplained(f"`{base.__name__}.{name}` is read")
        if isinstance(member, types.FunctionType):
            return Method(member, module)
        if isinstance(member, staticmethod):
            return member.__func__
        if is_plain(member):
            return member
        raise Unexplained(f"`{base.__name__}.{name}` is read, a {type(member).__name__}")

    def _of_super(self, of: Super, name: str) -> Any:
        mro = type(of.module).__mro__
        for base in mro[mro.index(of.after) + 1 :]:
            if name in base.__dict__:
                return self._bind(base.__dict__[name], of.module, base, name)
        raise Unexplained(f"`super().{name}` is read")

    def _of_library(self, library: types.ModuleType, name: str) -> Any:
        surroundings.check_library(library, name)
        known = vars(library)
        if name not in known:
            raise Unexplained(f"`{library.__name__}.{name}` is read")
        self.found.append((known, name, known[name]))
        return surroundings.usable(known[name], f"{library.__name__}.{name}")

    def _of_class(self, cls: type, name: str) -> Any:
        """`nn.LayerNorm.forward`, or `apply` of an `autograd.Function`."""
        if type(cls) not in (type, type(torch.autograd.Function)):
            raise Unexplained(f"`{cls.__name__}` has the metaclass `{type(cls).__name__}`")
        if issubclass(cls, nn.Module) and name == "forward":
            member = _member(cls, name)
            self.found.append((cls, name, member))
            return member
        function = torch.autograd.Function
        if issubclass(cls, function) and name == "apply" and _is_inherited(cls, name, function):
            return Handler(functools.partial(self._differentiated, cls))
        raise Unexplained(f"`{cls.__name__}.{name}` is read")

    def _differentiated(self, cls: type[torch.autograd.Function], *args: Any) -> Any:
        """A function with a gradient of its own, which is read too; proofs compare it."""
        self.own_gradient = True
        ctx = Context()
        forward, backward = (_member(cls, n) for n in ("forward", "backward"))
        if not all(isinstance(f, staticmethod) for f in (forward, backward)):
            raise Unexplained(f"`{cls.__name__}` has no static forward and backward")
        self.found += [(cls, n, getattr(cls, n)) for n in ("forward", "backward")]
        result = self.function(forward.__func__, [ctx, *args], {})
        if not isinstance(result, Traced):
            raise Unexplained(f"`{cls.__name__}` returns no tensor")
        self._backward(backward.__func__, ctx, result.tensor)
        return traced(result.tensor, "own gradient", result, degree=degree_of(result))

    def _backward(self, backward: Any, ctx: Context, result: torch.Tensor) -> None:
        """Read a function's gradient. It must be as many times as large as what it is given, at
        every scale, and may have one bend more than the formulas: GELU's has its own exponential.
        """
        ones = torch.ones_like(result)
        with tally() as counts:
            first = _tensors(self.function(backward, [ctx, Traced(ones)], {}))
        step("backward", tuple(counts.steps))
        if counts.get("special", 0) > 2 or (counts.get("special", 0) == 2 and not counts["exp"]):
            raise Unexplained(
                f"a gradient of its own has {counts['special']} steps or bends, a formula's one"
            )
        for scale in _OF_GRADIENTS:
            with tally():
                again = _tensors(self.function(backward, [ctx, Traced(ones * scale)], {}))
            for a, b in zip(first, again, strict=True):
                expected = a * scale
                whole = expected.isfinite() & (expected.abs() > torch.finfo(a.dtype).tiny)
                if a.dtype is not b.dtype or not torch.equal(expected[whole], b[whole]):
                    raise Unexplained("a gradient of its own is not linear in what it is given")

    def _of_context(self, ctx: Context, name: str) -> Any:
        if name == "saved_tensors":
            return ctx.saved
        if name == "save_for_backward":

            def save(*tensors: Any) -> None:
                ctx.saved = tensors

            return Handler(save)
        raise Unexplained(f"`ctx.{name}` is read")

    # -- calls ---------------------------------------------------------------------------------

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, functools.partial):
            held = (*function.args, *function.keywords.values())
            if type(function) is not functools.partial or not all(map(is_plain, held)):
                raise Unexplained("a `partial` holds what may change")
            return self.call(
                function.func, [*function.args, *args], {**function.keywords, **kwargs}
            )
        if isinstance(function, Handler):
            return function.call(*args, **kwargs)
        if isinstance(function, TensorMethod):
            if function.name in ASKED:
                return ask(function.tensor, function.name, args)
            return METHODS[function.name](self.width, [function.tensor, *args], kwargs)
        if isinstance(function, nn.Module):
            return self._module(function, args, kwargs)
        if isinstance(function, Method):
            return self.function(function.function, [function.module, *args], kwargs)
        operation = FUNCTIONS.get(function) if is_certain(function) else None
        if operation is not None:
            self.found += surroundings.below(function)
            return operation(self.width, args, kwargs)
        if any(function is f for f in NUMERIC):
            return numeric(function, args, kwargs)
        if (said := surroundings.asked(function, args, kwargs, self.device)) is not NotImplemented:
            return said
        if str(getattr(function, "__module__", "")).startswith("torch."):
            raise Unexplained(f"`{_called(function)}` is called, which no formula has")
        if any(isinstance(a, nn.Module) for a in (*args, *kwargs.values())):
            self._check_of_class(function, args)
        return self.function(function, args, kwargs)

    def _check_of_class(self, function: Any, args: list[Any]) -> None:
        """Raise unless a module is handed to a method of its own class: calls look at what these
        read of a module, and at what no other function does."""
        module = args[0] if args else None
        name = getattr(function, "__name__", "")
        own = isinstance(module, nn.Module) and any(
            vars(base).get(name) is function for base in type(module).__mro__
        )
        if not own or sum(isinstance(a, nn.Module) for a in args) > 1:
            raise Unexplained(f"`{_called(function)}` is called with a module")

    def _module(self, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        for name, child in self.live.items():
            if child is module:
                (x,) = args if len(args) == 1 and not kwargs else (None,)
                if not isinstance(x, Traced):
                    raise Unexplained(f"`{name}` is called with more than one tensor")
                self.calls.append((name, x))
                y = child(x.tensor)
                if type(y) is not torch.Tensor:
                    raise Unexplained(f"`{name}` returns a {type(y).__name__}")
                # a hook on it may keep what it returns, so nobody may write to that
                return Traced(y, role=name, step=step("call", name, x))
        if module._modules:
            raise Unexplained(f"a `{type(module).__name__}` with modules of its own is called")
        return self.forward(module, args, kwargs)


def _bound(function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The function's parameters by name."""
    code = function.__code__
    try:
        signature = inspect.Signature.from_callable(_bare(function), follow_wrapped=False)
        found = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as e:
        raise Unexplained(f"`{_called(function)}` is called with other arguments: {e}") from e
    for name, parameter in signature.parameters.items():
        if name not in found.arguments and parameter.default is not parameter.empty:
            if not is_plain(parameter.default):
                raise Unexplained(
                    f"`{name}` of `{_called(function)}` has a default that may change"
                )
            found.arguments[name] = parameter.default
    empty: dict[str, Any] = {}
    if code.co_flags & inspect.CO_VARARGS:
        empty[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]] = ()
    if code.co_flags & inspect.CO_VARKEYWORDS:
        last = bool(code.co_flags & inspect.CO_VARARGS)
        empty[code.co_varnames[code.co_argcount + code.co_kwonlyargcount + last]] = {}
    return {**empty, **found.arguments}


def _bare(function: types.FunctionType) -> types.FunctionType:
    """The function without what was noted on it: a `__signature__` may say anything."""
    bare = types.FunctionType(
        function.__code__, {}, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


#: Powers of two, which no product rounds.
_OF_GRADIENTS = (-1.0, 2.0**-10, 2.0**10, 2.0**-40, 2.0**40, 2.0**80)


def _tensors(found: Any) -> list[torch.Tensor]:
    """The tensors that a backward returns."""
    all_of_it = found if isinstance(found, (tuple, list)) else (found,)
    return [t.tensor for t in all_of_it if isinstance(t, Traced)]


def _member(cls: type, name: str) -> Any:
    return inspect.getattr_static(cls, name)


def _is_inherited(cls: type, name: str, base: type) -> bool:
    return _member(cls, name) is _member(base, name)


def _called(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function))
