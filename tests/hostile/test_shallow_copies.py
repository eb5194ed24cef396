"""Modules whose deep copies share something with them: nothing of the model is written to."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from regions.families import build
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import hfpatch

F = nn.functional


#: What was copied by the code of its own class.
COPIED: list[Any] = []


class Box:
    """Its deep copy is itself."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: Any) -> Box:
        COPIED.append(self)
        return self


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: Any) -> Slotted:
        COPIED.append(self)
        return self


class Counting(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.held = Box() if held is None else held

    def forward(self, x: Tensor) -> Tensor:
        _count(self.held)
        return self.inner(x)  # type: ignore[no-any-return]


class Shallow(Counting):
    def __deepcopy__(self, memo: Any) -> Shallow:
        COPIED.append(self)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


def _count(held: Any) -> None:
    if isinstance(held, list):
        _count(held[0])
    elif isinstance(held, dict):
        _count(held["box"])
    elif isinstance(held, Tensor):
        held.add_(1)
    else:
        held.count += 1


def _counted(held: Any) -> float:
    if isinstance(held, list):
        return _counted(held[0])
    if isinstance(held, dict):
        return _counted(held["box"])
    return float(held) if isinstance(held, Tensor) else held.count


def _fast(module: Any, x: Tensor, *rest: Any) -> Tensor:
    return F.linear(x, module.inner.weight, module.inner.bias)


def _sample(module: nn.Module) -> tuple[Any, ...]:
    return (torch.randn(3, 16),)


HELD: dict[str, Callable[[], nn.Module]] = {
    "an object": lambda: Counting(Box()),
    "an object in a list": lambda: Counting([Box()]),
    "an object in a dict": lambda: Counting({"box": Box()}),
    "slots": lambda: Counting(Slotted()),
    "a shallow copy": lambda: Shallow([torch.zeros(())]),
}


@pytest.fixture(params=[False, True], ids=["a stranger's", "a package's"])
def of_a_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what copies these objects is the code of an installed package, which is run."""
    COPIED.clear()
    if request.param:
        for cls in (Box, Slotted, Shallow):
            function: Any = cls.__deepcopy__
            code = function.__code__.replace(co_filename=pytest.__file__)
            monkeypatch.setattr(function, "__code__", code)
    return bool(request.param)


@pytest.mark.parametrize("what", HELD)
def test_a_registered_forward_is_refused_unasked(what: str, of_a_package: bool) -> None:
    model: Any = nn.Sequential(HELD[what]()).eval()
    handle = hfpatch.register("^(Counting|Shallow)$", forward=_fast, sample=_sample)
    try:
        hfpatch.plan(model)
        (skip,) = hfpatch.apply(model).skips
        assert skip.kind == "unsupported"
        assert ("shares" if of_a_package else "`__deepcopy__` of its own") in skip.reason
        assert bool(COPIED) == of_a_package
        assert _counted(model[0].held) == 0
        with torch.no_grad():
            model(torch.randn(3, 16))
        assert _counted(model[0].held) == 1
    finally:
        handle.remove()


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, box: Any = None) -> Tensor:
        if box is not None:
            box.count += 1
        return self.inner(x)  # type: ignore[no-any-return]


def test_an_argument_that_cannot_be_copied(of_a_package: bool) -> None:
    why = "shares a `Box`" if of_a_package else "a `Box` with a `__deepcopy__` of its own"
    handle = hfpatch.register("^Taking$", forward=_fast, sample=_sample)
    try:
        model = nn.Sequential(Taking()).eval()
        assert hfpatch.apply(model).swaps
        box, x = Box(), torch.randn(3, 16)
        with torch.no_grad(), pytest.warns(RuntimeWarning, match=why):
            model[0](x, box)
        assert box.count == 1
        with torch.no_grad():
            model[0](x, box)
        assert box.count == 2
    finally:
        handle.remove()


class Color(enum.Enum):
    RED = 1


class Ordinary(Counting):
    """What deep copies share by right."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = [0]
        self.color, self.log, self.act = Color.RED, logging.getLogger("ordinary"), F.silu
        self.dtype, self.operator, self.nothing = torch.float32, torch.ops.aten.mul.Tensor, ()

    def forward(self, x: Tensor) -> Tensor:
        self.held[0] += 1
        return self.inner(x)  # type: ignore[no-any-return]


def test_what_copies_may_share() -> None:
    handle = hfpatch.register("^Ordinary$", forward=_fast, sample=_sample)
    try:
        # it counts, so the registered one is wrong; but it was asked, on a copy
        model: Any = nn.Sequential(Ordinary()).eval()
        report = hfpatch.apply(model)
        assert model[0].held == [0]
        assert report.swaps or "shares" not in report.skips[0].reason
    finally:
        handle.remove()


class BoxMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        self.box.count += 1
        return super().forward(x)  # type: ignore[no-any-return]


class CountedMLP(LlamaMLP):
    """Its counter can be copied, so its block is captured as before."""

    def forward(self, x: Tensor) -> Tensor:
        self.box[0] += 1
        return super().forward(x)  # type: ignore[no-any-return]


def _llama(cls: type, held: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    model, inputs = build("llama")
    for layer in model.layers:
        layer.mlp.__class__, layer.mlp.box = cls, held()
    return model, inputs(2, 9)


@pytest.mark.parametrize(
    ("cls", "held", "state"),
    [(BoxMLP, Box, "left"), (CountedMLP, lambda: [0], "fused")],
)
def test_a_captured_block(cls: type, held: Any, state: str, kernels_module: object) -> None:
    model, call = _llama(cls, held)
    twin, _ = _llama(cls, held)
    hfpatch.plan(model, decoding=False, blocks=True)
    hfpatch.apply(model, decoding=False, blocks=True)
    with torch.no_grad():
        for i in range(3):
            expected = twin(**call)[0]
            assert (model(**call)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
            for layer in model.layers:
                count = layer.mlp.box if isinstance(layer.mlp.box, list) else layer.mlp.box.count
                assert count in ([i + 1], i + 1)
    candidates = hfpatch.status(model).plan.candidates
    assert {c.state for c in candidates} == {state}
    assert state == "fused" or "a `Box` with a `__deepcopy__` of its own" in candidates[0].reason


class CountedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_a_layer_inside_of_a_patched_module_is_called_once(kernels_module: object) -> None:
    """The patched MLP around it has a forward of its own, which refers to the module it is on."""
    model, inputs = build("llama")
    for layer in model.layers:
        layer.mlp.down_proj.__class__ = CountedLinear
    hfpatch.apply(model, decoding=False, blocks=True)
    with torch.no_grad():
        for i in range(3):
            model(**inputs(2, 9))
            assert {layer.mlp.down_proj.calls for layer in model.layers} == {i + 1}


def test_somebodys_hook_fires_once(kernels_module: object) -> None:
    model, inputs = build("llama")
    seen: list[int] = []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda *_: seen.append(1))
    hfpatch.apply(model, decoding=False, blocks=True)
    call = inputs(2, 9)
    with torch.no_grad():
        for i in range(3):
            model(**call)
            assert len(seen) == (i + 1) * len(model.layers)


def test_models_of_the_libraries_are_copied(kernels_module: object) -> None:
    """None that is swapped is refused for what its copies share; `make test-all` has them all."""
    import zoo

    for name in ("llama", "bert", "sd3", "wan") if "bert" in zoo.ENTRIES else ("llama", "sd3"):
        model = copy.deepcopy(zoo.ENTRIES[name].build())
        assert not any("shares" in s.reason for s in hfpatch.apply(model).skips)
