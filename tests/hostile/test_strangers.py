"""Objects of a stranger's class that a module holds: `plan` and `apply` run no line of it."""

from __future__ import annotations

import collections
import copy
import copyreg
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch

RAN: list[str] = []


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32) + 0.5), 1e-6
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _with(name: str, base: type = object) -> type:
    """A class with one method of its own, which notes that it ran."""
    theirs = getattr(base, name, None)

    def method(self: Any, *args: Any) -> Any:
        if args != ("__class__",):  # which `isinstance` asks
            RAN.append(name)
        if name == "__getattr__":
            raise AttributeError(args[0])
        if name == "__new__":
            return theirs(self)  # type: ignore[misc]
        return theirs(self, *args) if theirs is not None else copy.copy(vars(self))

    return type("Stranger", (base,), {name: method})


SAYS_HOW = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__"),
)
ASKED = ("__getattr__", "__getattribute__", "__new__")


@pytest.fixture(autouse=True)
def _quiet(kernels_module: object) -> Iterator[None]:
    RAN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _planned(held: Any, mode: Any = "inference") -> Any:
    model: Any = nn.Sequential(RMSNorm())
    twin = copy.deepcopy(model)
    model[0].held = held
    RAN.clear()
    plan = hfpatch.plan(model, mode=mode)
    report = hfpatch.apply(model, mode=mode)
    assert not RAN
    assert len(plan.swaps) == len(report.swaps)
    x = torch.randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x))
    return report


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", SAYS_HOW)
def test_one_that_says_how_it_is_copied(name: str, mode: str) -> None:
    (skip,) = _planned(_with(name)(), mode).skips
    assert f"`{name}` of its own" in skip.reason and "`held`" in skip.reason


@pytest.mark.parametrize("base", [object, dict, list, set])
@pytest.mark.parametrize("name", ASKED)
def test_one_that_is_only_asked_is_copied(name: str, base: type) -> None:
    assert _planned(_with(name, base)()).swaps


@pytest.mark.parametrize("inside", [lambda s: [s], lambda s: {"a": (s,)}, lambda s: Holder(s)])
def test_one_inside_of_another(inside: Callable[[Any], Any]) -> None:
    (skip,) = _planned(inside(_with("__deepcopy__")())).skips
    assert "`__deepcopy__` of its own" in skip.reason
    assert _planned(inside(_with("__getattr__")())).swaps


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_function_that_reduces_it() -> None:
    cls = type("Reduced", (), {})
    copyreg.pickle(cls, lambda value: RAN.append("reducer") or (cls, ()))
    try:
        (skip,) = _planned(cls()).skips
    finally:
        del copyreg.dispatch_table[cls]
    assert "`reducer` of its own" in skip.reason


def test_a_method_of_the_object_alone() -> None:
    held = Holder(1)
    vars(held)["__deepcopy__"] = lambda memo: RAN.append("__deepcopy__")
    (skip,) = _planned(held).skips
    assert "`__deepcopy__` of its own" in skip.reason


class AttrDict(dict[str, Any]):
    """Whose keys are attributes, as many a configuration's are."""

    __setattr__ = dict.__setitem__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        return self[name]  # a KeyError for `__deepcopy__`


class Delegating:
    """One that asks another for what it does not have, without end while it has none."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        return getattr(self.inner, name)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = [1]

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)


class Single:
    only: Any = None

    def __new__(cls) -> Single:
        RAN.append("__new__")
        cls.only = cls.only or object.__new__(cls)
        return cls.only  # type: ignore[no-any-return]


class Named(NamedTuple):
    a: int
    b: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int = 1
    b: tuple[int, ...] = (1, 2)


ORDINARY: dict[str, Callable[[], Any]] = {
    "a dict with attributes": lambda: AttrDict(a=1, b=AttrDict(c=[2])),
    "one that delegates": lambda: Delegating(Holder(1)),
    "slots": Slotted,
    "a single one": Single,
    "a named tuple": lambda: Named(1, "b"),
    "a tuple type": lambda: collections.namedtuple("Point", "x y")(1, 2),
    "a dataclass": Frozen,
    "a dict with an order": lambda: collections.OrderedDict(a=1),
    "a dict with a default": lambda: collections.defaultdict(list, a=[1]),
    "a configuration": LlamaConfig,
    "a class above": lambda: type("Config", (LlamaConfig,), {})(),
    "a device": lambda: torch.device("cpu"),
    "itself": lambda: _ring(),
}


def _ring() -> Any:
    held = Delegating(None)
    held.inner = [held]
    return held


@pytest.mark.parametrize("what", ORDINARY)
def test_ordinary_ones_are_swapped(what: str) -> None:
    assert _planned(ORDINARY[what]()).swaps


def test_a_copy_holds_what_its_original_does() -> None:
    from hfpatch.proof.replicas import copied_apart

    shared = [1]
    held = AttrDict(a=shared, b=Delegating(shared), c=Slotted())
    copied = copied_apart({"held": held}, "it")["held"]
    assert type(copied) is AttrDict and copied is not held and list(copied) == ["a", "b", "c"]
    assert copied["a"] == [1] and copied["a"] is not shared
    assert copied["b"].inner is copied["a"]
    assert copied["c"].a == [1] and copied["c"].a is not held["c"].a
    ring = _ring()
    again = copied_apart(ring, "it")
    assert again is not ring and again.inner[0] is again


def test_a_registered_forward_of_a_module_that_delegates() -> None:
    """Its class has a `__getattr__`, which a copy of the module does not need."""
    handle = hfpatch.register(
        "^Wrapping$", forward=lambda m, x: m.inner(x) * 2, sample=lambda m: (torch.randn(3, 8),)
    )
    try:
        assert hfpatch.apply(nn.Sequential(Wrapping())).swaps
    finally:
        handle.remove()


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", [*SAYS_HOW, *ASKED])
def test_in_each_module_of_a_model(name: str, mode: Any) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).eval()  # fmt: skip
    held = _with(name)()
    for m in model.modules():
        m.__dict__["held"] = held
    RAN.clear()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        hfpatch.plan(model, mode=mode)
        hfpatch.apply(model, mode=mode, **({"blocks": True} if mode == "inference" else {}))
        for _ in range(2):
            after = model(input_ids=ids, use_cache=False).logits
    assert not RAN
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


class Refusing:
    """Whatever it is asked, it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_one_that_raises_whatever_it_is_asked(mode: Any) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).eval()  # fmt: skip
    held = Refusing()
    for m in model.modules():
        m.__dict__["held"] = held
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        hfpatch.plan(model, mode=mode)
        assert hfpatch.apply(model, mode=mode).swaps
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)
    hfpatch.status(model)
    hfpatch.restore(model)
    assert all(m.__dict__["held"] is held for m in model.modules())


#: What people put into a configuration.
IN_CONFIGS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.ones(3),
    "a set": lambda: {1, 2},
    "an object": lambda: Holder(1),
    "one that says how it is copied": lambda: _with("__deepcopy__")(),
    "a function": lambda: torch.tanh,
    "itself": lambda: _list_of_itself(),
}


def _list_of_itself() -> Any:
    held: list[Any] = []
    held.append(held)
    return held


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("what", IN_CONFIGS)
def test_in_a_configuration(what: str, mode: Any, later: bool) -> None:
    """One that no JSON can say is no reason for an error."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).eval()  # fmt: skip
    ids = torch.arange(1, 7)[None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    if later:
        hfpatch.apply(model, mode=mode)
    vars(model.config)["held"] = IN_CONFIGS[what]()
    RAN.clear()
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        with torch.no_grad():
            again = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)
        plan = hfpatch.plan(model, mode=mode)
        report = hfpatch.apply(model, mode=mode)
    assert not RAN
    assert len(plan.swaps) == len(report.swaps) > 0
    if mode == "inference":
        assert any("its config" in s.reason for s in report.skips), report
