"""What is done behind a registered forward after its calls were compared.

What a call can notice takes it to the original, or to another comparison. What it cannot is in the
list of docs/registry-and-probe.md: the next `apply` sees what the module holds.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.foreign import forward_watch

F = nn.functional
WIDTH = 16


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.cfg, self.table, self.factors = SimpleNamespace(scale=1.0), {"scale": 1.0}, [1.0]
        self.nested, self.slots = {"a": {"b": {"scale": 1.0}}}, Slots()
        self.inner.cfg = SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor, n: Any = 1) -> Tensor:
        gain = self.cfg.scale * self.table["scale"] * self.factors[0] * self.inner.cfg.scale
        gain *= self.nested["a"]["b"]["scale"] * self.slots.scale
        if isinstance(n, Tensor):
            gain *= 2 if bool(n.all()) else 1
        else:
            gain *= 3 if getattr(n, "v", n) == 7 else 1
        return self.norm(self.inner(x)) * gain  # type: ignore[no-any-return]


def _fast(m: Any, x: Tensor, n: Any = 1) -> Tensor:
    y = F.linear(x, m.inner.weight, m.inner.bias)
    return F.layer_norm(y, (WIDTH,), m.norm.weight, m.norm.bias, m.norm.eps)


def _sample(module: nn.Module) -> tuple[Any, ...]:
    return (torch.randn(3, WIDTH),)


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    handle = hfpatch.register("^Held$", forward=_fast, sample=_sample)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = nn.Sequential(Held()).eval()
            twin = copy.deepcopy(model)
            assert _is_registered(hfpatch.apply(model))
            for _ in range(2):
                _alike(model, twin)
            yield model, twin
    finally:
        handle.remove()


def _is_registered(report: Any) -> bool:
    return any(s.source == "registered" for s in report.swaps)


def _alike(model: Any, twin: Any, *args: Any) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model[0](x, *args), twin[0](x, *args), rtol=1e-4, atol=1e-4)


LATER: dict[str, Callable[[Any], Any]] = {
    "an attribute of a config": lambda m: setattr(m.cfg, "scale", 3.0),
    "another config": lambda m: setattr(m, "cfg", SimpleNamespace(scale=3.0)),
    "a config of a module inside": lambda m: setattr(m.inner.cfg, "scale", 3.0),
    "an entry of a dict": lambda m: m.table.update(scale=3.0),
    "an element of a list": lambda m: m.factors.__setitem__(0, 3.0),
    "an object with slots": lambda m: setattr(m.slots, "scale", 3.0),
    "a hook": lambda m: m.norm.register_forward_hook(lambda a, b, y: 3 * y),
    "a pre-hook": lambda m: m.norm.register_forward_pre_hook(lambda a, b: (b[0] ** 2,)),
    "a forward of a module inside": lambda m: setattr(m.norm, "forward", lambda x: x),
    "a call of a module inside": lambda m: m.norm.__dict__.update(_call_impl=lambda x: x),
    "another module inside": lambda m: setattr(m, "norm", nn.Identity()),
}


@pytest.mark.parametrize("what", LATER)
def test_a_call_notices(what: str, pair: tuple[Any, Any]) -> None:
    model, twin = pair
    for m in pair:
        LATER[what](m[0])
    for _ in range(3):
        _alike(model, twin)
    assert not _is_registered(hfpatch.apply(model))
    _alike(model, twin)


@pytest.mark.parametrize(
    "argument", [7, 7.0, SimpleNamespace(v=7)], ids=["whole", "floating", "object"]
)
def test_numbers_of_arguments(argument: Any, pair: tuple[Any, Any]) -> None:
    first = SimpleNamespace(v=2) if isinstance(argument, SimpleNamespace) else type(argument)(2)
    for value in (first, first, argument, argument):
        _alike(*pair, value)


def test_a_hook_fires_once_a_call_and_goes(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    seen: list[int] = []
    handle = model[0].norm.register_forward_hook(lambda *_: seen.append(1))
    for i in range(3):
        model(torch.randn(3 + i, WIDTH))
        assert len(seen) == i + 1
    handle.remove()
    model(torch.randn(3, WIDTH))
    assert len(seen) == 3


def test_a_counter_is_not_compared_for_ever() -> None:
    handle = hfpatch.register("^Held$", forward=_fast, sample=_sample)
    try:
        model = nn.Sequential(Held()).eval()
        twin = copy.deepcopy(model)
        assert _is_registered(hfpatch.apply(model))
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            for i in range(70):
                _alike(model, twin, i + 8)
        assert sum("differ in numbers alone" in str(w.message) for w in said) == 1
    finally:
        handle.remove()


def test_calls_of_many_shapes_are_each_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_watch, "_VALUES", 2)
    handle = hfpatch.register("^Held$", forward=_fast, sample=_sample)
    try:
        model = nn.Sequential(Held()).eval()
        assert _is_registered(hfpatch.apply(model))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            for rows in range(3, 8):
                model(torch.randn(rows, WIDTH))
    finally:
        handle.remove()


class Inlined(nn.Module):
    """What a registered forward computes without calling what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.act(self.inner(x))) * self.gain
        for module in self.more:
            y = module(y)
        return y  # type: ignore[no-any-return]


def _inlined(m: Any, x: Tensor) -> Tensor:
    y = F.silu(F.linear(x, m.inner.weight, m.inner.bias))
    return y * m.gain.reshape(-1)[:WIDTH]


def _doubled(of: Any) -> Any:
    return lambda self, *args: 2 * of(self, *args)


def _on_all(m: Any, patch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setitem(hooks, -1, lambda of, args, y: 2 * y if isinstance(of, nn.Linear) else None)


#: What is done to it or to the classes of what is inside, once for the model and its twin.
INSIDE: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a dropout draws, as to sample predictions": lambda m, _: m.drop.train(),
    "a module more in a list": lambda m, _: m.more.append(nn.Tanh()),
    "a parameter of another shape": lambda m, _: setattr(
        m, "gain", nn.Parameter(torch.arange(3.0 * WIDTH).view(3, WIDTH))
    ),
    "the forward of a class inside": lambda m, patch: patch.setattr(
        nn.SiLU, "forward", _doubled(nn.SiLU.forward)
    ),
    "the call of a class inside": lambda m, patch: patch.setattr(
        nn.Linear, "__call__", _doubled(nn.Module.__call__), raising=False
    ),
    "a hook on all modules": _on_all,
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_call_notices_what_is_done_inside(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = hfpatch.register("^Inlined$", forward=_inlined, sample=_sample)
    try:
        model = nn.Sequential(Inlined()).eval()
        twin = copy.deepcopy(model)
        assert _is_registered(hfpatch.apply(model))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for _ in range(2):
                _alike(model, twin)
            changes = (model, twin) if "of a class" not in what and "all" not in what else (model,)
            for m in changes:
                INSIDE[what](m[0], monkeypatch)
            for _ in range(3):
                torch.manual_seed(0)
                expected = twin(torch.ones(3, WIDTH))
                torch.manual_seed(0)
                torch.testing.assert_close(model(torch.ones(3, WIDTH)), expected)
    finally:
        handle.remove()


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3, WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y if self.bias is None else y + self.bias


#: What becomes of its parameters, and what says so.
OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "frozen": (
        lambda m: m.weight.requires_grad_(False),
        lambda m: not m.weight.requires_grad and m.bias.requires_grad,
    ),
    "half": (
        lambda m: setattr(m.weight, "data", m.weight.data.half()),
        lambda m: m.weight.dtype == torch.float16,
    ),
    "transposed": (
        lambda m: setattr(m.weight, "data", m.weight.data.t().contiguous().t()),
        lambda m: not m.weight.is_contiguous(),
    ),
    "none": (lambda m: setattr(m, "bias", None), lambda m: m.bias is None),
}


@pytest.mark.parametrize("what", OTHERS)
def test_parameters_of_another_form(what: str) -> None:
    change, is_changed = OTHERS[what]
    handle = hfpatch.register(
        "^Gain$",
        forward=lambda m, x: Gain.forward(m, x) * (0.5 if is_changed(m) else 1.0),
        sample=_sample,
        differentiable=True,
    )
    try:
        model = nn.Sequential(Gain())
        twin = copy.deepcopy(model)
        assert _is_registered(hfpatch.apply(model, mode="training"))
        for _ in range(2):
            _alike(model, twin)
        for m in (model, twin):
            change(m[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(3):
                _alike(model, twin)
    finally:
        handle.remove()


UNSEEN: dict[str, Callable[[Any], Any]] = {
    "deep in a dict": lambda m: m.nested["a"]["b"].update(scale=3.0),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_the_next_apply_notices(what: str, pair: tuple[Any, Any]) -> None:
    model, twin = pair
    x = torch.randn(3, WIDTH)
    before = model(x)
    for m in pair:
        UNSEEN[what](m[0])
    torch.testing.assert_close(model(x), before)  # as the docs say
    assert not _is_registered(hfpatch.apply(model))
    _alike(model, twin)


def test_values_of_tensors_are_asked_about(pair: tuple[Any, Any]) -> None:
    model, twin = pair
    no, yes = torch.tensor([False]), torch.tensor([True])
    with pytest.warns(RuntimeWarning, match="with truth everywhere in input 1"):
        model[0](torch.randn(3, WIDTH), no)
    for value in (no, no, yes, yes):
        _alike(model, twin, value)
