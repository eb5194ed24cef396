"""What is done to a fused block, or to a module inside of it, behind `apply`, one thing each.

The block answers as its unpatched twin at the next call. Every module of every family takes its
turn.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from blocks_single import ROWS
from test_hostile_blocks import Root, assert_alike, draw, outcome, patch_and_decide
from test_inputs_of_blocks import NAMES, block_and_call
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _doubled(y: Any) -> Any:
    if isinstance(y, Tensor):
        return 2 * y
    return tuple(map(_doubled, y)) if isinstance(y, tuple) else y


def _twice(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _doubled(f(*args, **kwargs))


def forward_of_the_instance(m: Any, patch: pytest.MonkeyPatch) -> None:
    m.forward = _twice(m.forward)


def call_of_the_instance(m: Any, patch: pytest.MonkeyPatch) -> None:
    m.__dict__["_call_impl"] = _twice(m._call_impl)


def hook(m: Any, patch: pytest.MonkeyPatch) -> None:
    m.register_forward_hook(lambda module, args, y: _doubled(y))


def pre_hook(m: Any, patch: pytest.MonkeyPatch) -> None:
    m.register_forward_pre_hook(
        lambda module, args: (_doubled(args[0]), *args[1:]) if args else None
    )


def class_of_the_instance(m: Any, patch: pytest.MonkeyPatch) -> None:
    cls: Any = type(m)
    m.__class__ = type(cls.__name__, (cls,), {"forward": _method(cls.forward)})


def _method(f: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _doubled(f(self, *args, **kwargs))

    return forward


def hidden_parameters(m: Any, patch: pytest.MonkeyPatch) -> None:
    for name, p in m._parameters.items():
        if p is not None:
            m.__dict__[name] = 2 * p.detach()


def another_parameter(m: Any, patch: pytest.MonkeyPatch) -> None:
    for name, p in m._parameters.items():
        if p is not None:
            m._parameters[name] = nn.Parameter(1.5 * p.detach(), requires_grad=False)


def no_bias(m: Any, patch: pytest.MonkeyPatch) -> None:
    if m._parameters.get("bias") is not None:
        m._parameters["bias"] = None


def wrapped_children(m: Any, patch: pytest.MonkeyPatch) -> None:
    for name, child in list(m._modules.items()):
        if child is not None and not isinstance(m, (nn.ModuleList, nn.Sequential)):
            m._modules[name] = _Wrapped(child)


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _doubled(self.inner(*args, **kwargs))


def forward_of_the_class(m: Any, patch: pytest.MonkeyPatch) -> None:
    if type(m) not in (nn.ModuleList, nn.ModuleDict) and type(m).forward is not nn.Module.forward:
        patch.setattr(type(m), "forward", _method(type(m).forward))


def call_of_the_class(m: Any, patch: pytest.MonkeyPatch) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _doubled(nn.Module._call_impl(self, *args, **kwargs))

    patch.setattr(type(m), "__call__", call, raising=False)


def processor(m: Any, patch: pytest.MonkeyPatch) -> None:
    held = m.__dict__.get("processor")
    if held is not None:
        m.__dict__["processor"] = _twice(held)


def processors_class(m: Any, patch: pytest.MonkeyPatch) -> None:
    held = m.__dict__.get("processor")
    if held is not None:
        patch.setattr(type(held), "__call__", _method(type(held).__call__))


def processors_code(m: Any, patch: pytest.MonkeyPatch) -> None:
    held = m.__dict__.get("processor")
    call = vars(type(held)).get("__call__")
    if hasattr(call, "__code__"):
        _KEPT["call"] = type(call)(
            call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__
        )
        if not call.__closure__:
            patch.setattr(call, "__code__", _through.__code__)
            patch.setitem(call.__globals__, "_KEPT", _KEPT)
            patch.setitem(call.__globals__, "_doubled", _doubled)


_KEPT: dict[str, Any] = {}


def _through(self, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _doubled(_KEPT["call"](self, *args, **kwargs))


def code_of_the_forward(m: Any, patch: pytest.MonkeyPatch) -> None:
    call: Any = type(m).forward
    if getattr(call, "__closure__", 0) is None and type(m).__module__.startswith("diffusers"):
        _KEPT["call"] = type(call)(
            call.__code__, call.__globals__, call.__name__, call.__defaults__
        )
        _KEPT["call"].__kwdefaults__ = call.__kwdefaults__
        patch.setattr(call, "__code__", _through.__code__)
        patch.setitem(call.__globals__, "_KEPT", _KEPT)
        patch.setitem(call.__globals__, "_doubled", _doubled)


def settings(m: Any, patch: pytest.MonkeyPatch) -> None:
    for k, v in list(m.__dict__.items()):
        if isinstance(v, float) and not k.startswith("_"):
            m.__dict__[k] = 2 * v + 0.1


ON_INSTANCES = (
    *(forward_of_the_instance, call_of_the_instance, hook, pre_hook, class_of_the_instance),
    *(hidden_parameters, another_parameter, no_bias, wrapped_children, processor, settings),
)
#: Of the process: done once, for the block and its twin.
ON_CLASSES = (
    *(forward_of_the_class, call_of_the_class, processors_class, processors_code),
    code_of_the_forward,
)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is nn.functional.linear else y


def _compare(model: nn.Module, twin: nn.Module, call: dict[str, Any], what: object) -> None:
    got, expected = outcome(model, call), outcome(twin, call)
    if isinstance(expected, type):
        assert isinstance(got, type), what
        return
    assert_alike(got, expected, what)


def _places(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules() if path.startswith("blocks.")]


def check_family(name: str, share: int) -> None:
    """Each change at one of `share` of the modules, which differ from change to change."""
    block, call = block_and_call(name)
    base = Root(zoo.randomize_(block).eval().requires_grad_(False))
    base_copy = copy.deepcopy(base)
    patch_and_decide(base_copy, call)
    for i, change in enumerate((*ON_INSTANCES, *ON_CLASSES)):
        places = _places(base)
        for path in places[i % share :: share]:
            model, twin = copy.deepcopy(base_copy), copy.deepcopy(base)
            _compare(model, twin, call, "as it is")
            with pytest.MonkeyPatch.context() as patch:
                for m in (model, twin):
                    if change in ON_INSTANCES or m is model:
                        change(m.get_submodule(path), patch)
                _compare(model, twin, call, (change.__name__, path))
    model, twin = base_copy, base
    with Mode():
        _compare(model, twin, call, "function mode")
    _compare(model, twin, call, "as it was")


@pytest.mark.parametrize("name", NAMES)
def test_one_of_many_modules(name: str) -> None:
    check_family(name, 32)  # each of the 16 changes at another one of the first 16 modules


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_every_module(name: str) -> None:
    check_family(name, 1)


def _width(m: Any) -> int | None:
    """Of the rows that a norm takes; None of another module."""
    of = getattr(m, "normalized_shape", None) or getattr(m, "dim", None)
    last = of[-1] if isinstance(of, (tuple, list)) and of else of
    return last if type(last) is int else None


def _empty(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Where a norm has no weight or bias: its path and the name."""
    for path, m in model.named_modules():
        names = [n for n, p in m._parameters.items() if p is None]
        yield from ((path, name) for name in names if _width(m) is not None)


def _children(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, m in model.named_modules():
        if path and not isinstance(m, (nn.ModuleList, nn.Sequential)):
            yield from ((path, name) for name, child in m._modules.items() if child is not None)


def _give(m: Any, name: str, registered: bool) -> None:
    t = torch.linspace(-1, 2, _width(m))  # type: ignore[call-overload]
    if registered:
        setattr(m, name, nn.Parameter(t, requires_grad=False))
    else:
        m.__dict__[name] = t


def _each(name: str, found: Callable[[nn.Module], Any], change: Callable[..., None]) -> int:
    row = ROWS[name]
    call = next(iter(row.calls.values()))(draw, 2, 9)
    base = Root(zoo.randomize_(row.make()).eval().requires_grad_(False))
    patched = copy.deepcopy(base)
    patch_and_decide(patched, call)
    places = list(found(base))
    for path, of in places:
        model, twin = copy.deepcopy(patched), copy.deepcopy(base)
        _compare(model, twin, call, "as it is")
        for m in (model, twin):
            change(m.get_submodule(path), of)
        _compare(model, twin, call, (path, of))
    return len(places)


@pytest.mark.parametrize("registered", [True, False])
def test_parameters_where_none_were(registered: bool) -> None:
    """As somebody folds a factor into a norm that had no weight."""
    names = [name for name in ROWS if any(_empty(Root(ROWS[name].make())))]
    assert names
    for name in names[::3]:
        assert _each(name, _empty, lambda m, of: _give(m, of, registered))


@pytest.mark.parametrize("name", list(ROWS)[::4])
def test_attributes_that_hide_children(name: str) -> None:
    def change(m: Any, of: str) -> None:
        m.__dict__[of] = _Wrapped(m._modules[of])

    _each(name, _children, change)
