"""Tensors that are not what they seem, and changes of parameters and children that keep a module's
looks: each call ends as it does in an unpatched twin, in its result, its layout, its gradients,
what it writes to and what it tells others."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaves import WIDTH, PlainRMSNorm, SomeMLP, drawn
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import hfpatch

LOG: list[Any] = []


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> None:
    LOG.clear()


class WrittenRMSNorm(PlainRMSNorm):
    pass


class WrittenLayerNorm(nn.Module):
    """With operators that promote, and keep the layout of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return self.weight * (centred / torch.sqrt(variance + self.eps)) + self.bias


class WrittenSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class PartialGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class PackedGEGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * F.gelu(gate)


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm": WrittenRMSNorm,
    "nn.RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "nn.LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm": WrittenLayerNorm,
    "SiLU": WrittenSiLU,
    "GELU": PartialGELU,
    "MLP": SomeMLP,
    "GEGLU": PackedGEGLU,
}
NORMS = [name for name in LEAVES if "Norm" in name]


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def pair(make: Callable[[], nn.Module], mode: str) -> tuple[Root, Root]:
    """A patched model whose kernel has run, and its twin."""
    model = Root(drawn(make())).eval()
    twin = copy.deepcopy(model)
    hfpatch.apply(model, mode=mode, kernels="local")
    for m in (model, twin):
        with torch.no_grad():
            for shape in ((2, 5, WIDTH), (6, WIDTH), (2, 5, WIDTH)):
                m(torch.randn(shape))
    LOG.clear()
    return model, twin


def told(t: Tensor) -> Any:
    """What others may ask of a result, beside its values."""
    layout = t.is_contiguous() if t.layout is torch.strided and not t.is_nested else t.layout
    return type(t), t.dtype, t.shape if not t.is_nested else 0, t.device, t.requires_grad, layout


def outcome(model: nn.Module, make: Callable[..., Any], seed: int, grads: bool) -> Any:
    args = make(torch.Generator().manual_seed(seed))
    args, kwargs = ((), args) if isinstance(args, dict) else (args, {})
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    dense = all(t.layout is torch.strided for t in given)
    for t in given if grads and dense else ():
        usual = t.is_leaf and not t.is_nested and not t.is_inference()
        if usual and t.is_floating_point() and t.dtype.itemsize > 1:
            t.requires_grad_()
    LOG.clear()
    torch.manual_seed(seed)
    found: list[Tensor] = []
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(grads):
            warnings.simplefilter("ignore")
            y = model(*args, **kwargs)
            leaves = [t for t in (*given, *model.parameters()) if t.requires_grad and t.is_leaf]
            if grads and leaves and isinstance(y, Tensor) and y.requires_grad:
                weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
                back = torch.autograd.grad(y, leaves, weights, allow_unused=True)
                found = [torch.zeros(0) if g is None else g for g in back]
    except Exception as e:  # of any case
        return type(e), list(LOG), torch.get_rng_state().tolist()
    ours = [*given, *([y] if isinstance(y, Tensor) else [])]
    return y, found, ours, list(LOG), torch.get_rng_state().tolist()


def check(model: nn.Module, twin: nn.Module, make: Callable[..., Any], grads: bool = False) -> None:
    got, expected = (outcome(m, make, 7, grads) for m in (model, twin))
    assert got[-2:] == expected[-2:], "what was told to others, or the random state"
    if isinstance(expected[0], type):
        assert got[0] is expected[0]
        return
    assert not isinstance(got[0], type), f"{got[0]} where the original gives a result"
    assert len(got[2]) == len(expected[2]) and type(got[0]) is type(expected[0])
    for a, b in zip(got[2], expected[2], strict=True):
        assert told(a) == told(b)
        close(a, b, 2e-4)
    half = any(t.dtype.itemsize == 2 for t in expected[2])
    for a, b in zip(got[1], expected[1], strict=True):
        close(a, b, 5e-2 if half else 2e-3)


def close(a: Tensor, b: Tensor, rtol: float) -> None:
    if b.is_meta or b.is_nested:
        return
    if a.dtype in (torch.bfloat16, torch.float16):
        rtol = 2e-2
    a, b = (t.detach() for t in (a, b))
    a, b = (t.as_subclass(Tensor) if type(t) is Told else t for t in (a, b))
    a, b = ((t.to_dense() if t.layout is not torch.strided else t).resolve_neg() for t in (a, b))
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    scale = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * scale + 1e-30, equal_nan=True)


# Inputs ------------------------------------------------------------------------------------------


class Told(Tensor):
    """Tells of each function that is called with it, attributes included."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


INPUTS: dict[str, Callable[[torch.Generator], Any]] = {}


def given(function: Any) -> Any:
    INPUTS[function.__name__] = function
    return function


def randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g)


@given
def negated(g: torch.Generator) -> Any:
    return (torch._neg_view(randn(g, 4, WIDTH)),)


@given
def negated_by_a_conjugate(g: torch.Generator) -> Any:
    z = torch.randn(2, 5, WIDTH, dtype=torch.complex64, generator=g)
    return (z.conj().imag,)


@given
def negated_and_dense(g: torch.Generator) -> Any:
    z = torch.randn(4, WIDTH, dtype=torch.complex64, generator=g)
    return (z.conj().imag.as_strided((4, WIDTH), (WIDTH, 1)),)


@given
def sparse(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH).to_sparse(),)


@given
def mkldnn(g: torch.Generator) -> Any:
    return (randn(g, 2, 5, WIDTH).to_mkldnn(),)


@given
def nested(g: torch.Generator) -> Any:
    return (torch.nested.nested_tensor([randn(g, 2, WIDTH), randn(g, 3, WIDTH)]),)


@given
def meta(g: torch.Generator) -> Any:
    return (torch.empty(2, 5, WIDTH, device="meta"),)


@given
def of_a_class_that_tells(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH).as_subclass(Told),)


@given
def without_memory(g: torch.Generator) -> Any:
    return (torch._efficientzerotensor((4, WIDTH)),)


@given
def elements_apart(g: torch.Generator) -> Any:
    return (randn(g, WIDTH, 6).t(),)


@given
def channels_of_a_volume(g: torch.Generator) -> Any:
    return (randn(g, 2, WIDTH, 3, 2, 2).movedim(1, -1),)


@given
def channels_last(g: torch.Generator) -> Any:
    return (randn(g, 2, 3, 4, WIDTH).to(memory_format=torch.channels_last),)


@given
def overlapping(g: torch.Generator) -> Any:
    return (randn(g, 200).as_strided((6, WIDTH), (3, 1)),)


def _misaligned(t: Tensor) -> Tensor:
    """The same values at an odd address, as in a buffer of somebody's own format."""
    memory = bytearray(t.nbytes + 1)
    there = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=1)
    return there.view(t.shape).copy_(t)


@given
def at_an_odd_address(g: torch.Generator) -> Any:
    return (_misaligned(randn(g, 4, WIDTH)),)


@given
def apart_at_an_odd_address(g: torch.Generator) -> Any:
    return (_misaligned(randn(g, WIDTH, 6)).t(),)


@given
def one_element_repeated(g: torch.Generator) -> Any:
    return (randn(g, 4, 1).expand(4, WIDTH) if not torch.is_grad_enabled() else randn(g, WIDTH),)


@given
def whole_numbers(g: torch.Generator) -> Any:
    return (torch.randint(-5, 5, (4, WIDTH), generator=g),)


@given
def booleans(g: torch.Generator) -> Any:
    return (torch.randint(0, 2, (4, WIDTH), generator=g).bool(),)


@given
def complex_numbers(g: torch.Generator) -> Any:
    return (torch.randn(4, WIDTH, dtype=torch.complex64, generator=g),)


@given
def doubles(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH).double(),)


@given
def eight_bits(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH).to(torch.float8_e4m3fn),)


@given
def a_parameter(g: torch.Generator) -> Any:
    return (nn.Parameter(randn(g, 4, WIDTH)),)


@given
def of_inference_mode(g: torch.Generator) -> Any:
    with torch.inference_mode():
        return (randn(g, 4, WIDTH),)


@given
def no_dimension(g: torch.Generator) -> Any:
    return (randn(g),)


@given
def no_width(g: torch.Generator) -> Any:
    return (randn(g, 4, 0),)


@given
def another_width(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH + 1),)


@given
def nothing(g: torch.Generator) -> Any:
    return (None,)


@given
def no_argument(g: torch.Generator) -> Any:
    return ()


@given
def two_arguments(g: torch.Generator) -> Any:
    return (randn(g, 4, WIDTH), randn(g, 4, WIDTH))


@given
def by_the_name_of_nothing(g: torch.Generator) -> Any:
    return {"x": None}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("leaf", LEAVES)
def test_an_odd_input(leaf: str, mode: str) -> None:
    model, twin = pair(LEAVES[leaf], mode)
    assert hfpatch.status(model).swaps
    for name, make in INPUTS.items():
        for grads in (False, True):
            try:
                check(model, twin, make, grads)
            except AssertionError as e:
                raise AssertionError(f"{name}, gradients {grads}: {e}") from e


# Parameters --------------------------------------------------------------------------------------

Later = Callable[[Any, str], None]
PARAMETERS: dict[str, Later] = {}


def later(function: Later) -> Later:
    PARAMETERS[function.__name__] = function
    return function


def _own(module: Any, name: str) -> Tensor:
    value: Tensor = module._parameters[name]
    return value.detach().clone()


@later
def p_negated(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(torch._neg_view(_own(m, n)))


@later
def p_negated_data(m: Any, n: str) -> None:
    m._parameters[n].data = torch._neg_view(_own(m, n))


@later
def p_sparse(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n).to_sparse())


@later
def p_mkldnn(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n).to_mkldnn(), requires_grad=False)


@later
def p_meta(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n).to("meta"))


@later
def p_double(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n).double())


@later
def p_half_by_data(m: Any, n: str) -> None:
    m._parameters[n].data = _own(m, n).bfloat16()


@later
def p_of_a_class_that_tells(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n)).as_subclass(Told)


@later
def p_hidden(m: Any, n: str) -> None:
    m.__dict__[n] = _own(m, n) + 1


@later
def p_an_attribute(m: Any, n: str) -> None:
    m.__dict__[n] = m._parameters.pop(n).detach() + 1


@later
def p_a_buffer(m: Any, n: str) -> None:
    value = _own(m, n)
    del m._parameters[n]
    m.register_buffer(n, value + 1)


@later
def p_two_dimensions(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n).expand(3, 1, WIDTH).contiguous())


@later
def p_one_element(m: Any, n: str) -> None:
    m._parameters[n] = nn.Parameter(_own(m, n)[:1])


@later
def p_strided(m: Any, n: str) -> None:
    m._parameters[n].data = _own(m, n).repeat_interleave(2)[::2]


@later
def p_expanded(m: Any, n: str) -> None:
    m._parameters[n].data = torch.tensor(1.3).expand(WIDTH)


@later
def p_gone(m: Any, n: str) -> None:
    delattr(m, n)


@later
def p_pruned(m: Any, n: str) -> None:
    prune.custom_from_mask(m, n, torch.arange(WIDTH) % 2)


@later
def p_pruned_for_good(m: Any, n: str) -> None:
    prune.custom_from_mask(m, n, torch.arange(WIDTH) % 2)
    prune.remove(m, n)


class _Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


@later
def p_parametrized(m: Any, n: str) -> None:
    parametrize.register_parametrization(m, n, _Twice())


@later
def p_parametrized_and_not(m: Any, n: str) -> None:
    parametrize.register_parametrization(m, n, _Twice())
    parametrize.remove_parametrizations(m, n)


@later
def p_weight_norm(m: Any, n: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(m, n, dim=None)
    getattr(m, f"{n}_g").data.mul_(2)


@later
def p_hook(m: Any, n: str) -> None:
    m._parameters[n].register_hook(lambda g: 2 * g)


@later
def p_swapped(m: Any, n: str) -> None:
    torch.utils.swap_tensors(m._parameters[n], nn.Parameter(_own(m, n) * 3))


@later
def p_misaligned(m: Any, n: str) -> None:
    m._parameters[n].data = _misaligned(m._parameters[n].data)


@later
def p_not_a_number(m: Any, n: str) -> None:
    m._parameters[n].data[3] = float("nan")


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("what", PARAMETERS)
@pytest.mark.parametrize("leaf", NORMS)
def test_an_odd_parameter(leaf: str, what: str, which: str) -> None:
    if which == "bias" and "Layer" not in leaf:
        pytest.skip("it has none")
    for mode in ("inference", "training"):
        model, twin = pair(LEAVES[leaf], mode)
        for m in (model, twin):
            PARAMETERS[what](m.inner, which)
        for dtype in (torch.float32, torch.bfloat16):
            # in bf16 PyTorch's own gradients of mixed dtypes are less exact than the kernels'
            for grads in (False, True) if dtype == torch.float32 else (False,):
                check(model, twin, lambda g, dtype=dtype: (randn(g, 2, 5, WIDTH).to(dtype),), grads)


# Children and the module --------------------------------------------------------------------------

MODULES: dict[str, Callable[[Any], None]] = {}


def change(function: Callable[[Any], None]) -> Callable[[Any], None]:
    MODULES[function.__name__] = function
    return function


def _relayed(returned: Callable[[Tensor], Any]) -> type[nn.Linear]:
    class Relay(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return returned(super().forward(x))  # type: ignore[no-any-return]

    return Relay


def _relay(module: Any, returned: Callable[[Tensor], Any]) -> None:
    for child in module.children():
        if isinstance(child, nn.Linear):
            child.__class__ = _relayed(returned)


@change
def children_return_negated(m: Any) -> None:
    _relay(m, torch._neg_view)


@change
def children_return_transposed(m: Any) -> None:
    _relay(m, lambda y: y.transpose(0, 1).contiguous().transpose(0, 1) if y.dim() > 1 else y)


@change
def children_are_compiled_otherwise(m: Any) -> None:
    for child in m.children():
        child._compiled_call_impl = lambda x, c=child: 2 * type(c).forward(c, x)


@change
def children_have_hooks_that_always_fire(m: Any) -> None:
    for child in m.children():
        child.register_forward_hook(lambda c, a, y: LOG.append(type(c)), always_call=True)


@change
def children_have_a_callable_object(m: Any) -> None:
    for child in m.children():
        child.forward = _Tripled(child.forward)


class _Tripled:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return 3 * self.function(*args)


@change
def children_have_a_partial(m: Any) -> None:
    for child in m.children():
        child.forward = functools.partial(lambda c, x: 2 * type(c).forward(c, x), child)


@change
def an_activation_that_writes(m: Any) -> None:
    if "act_fn" in m._modules:
        m.act_fn.inplace = True
        m.gate_proj.register_forward_hook(lambda c, a, y: c.__dict__.__setitem__("kept", y))
        m.register_forward_hook(
            lambda c, a, y: LOG.append(float(c.gate_proj.kept.detach().float().sum().round()))
        )


@change
def a_partial_that_is_written_to(m: Any) -> None:
    if isinstance(m.__dict__.get("act"), functools.partial):
        m.act.keywords["approximate"] = "none"


@change
def a_partial_of_another_function(m: Any) -> None:
    if isinstance(m.__dict__.get("act"), functools.partial):
        m.act.__setstate__((F.relu, (), {}, {}))


@change
def a_forward_of_its_own(m: Any) -> None:
    m.forward = _Tripled(m.forward)


@change
def a_class_with_a_descriptor(m: Any) -> None:
    cls = type(m)
    if "eps" in m.__dict__:
        m.__class__ = type(cls.__name__, (cls,), {"eps": property(lambda self: 0.5)})


@change
def a_class_that_looks_up_otherwise(m: Any) -> None:
    def look(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return 0.5 if name == "eps" else value

    m.__class__ = type(type(m).__name__, (type(m),), {"__getattribute__": look})


@change
def a_copy_that_is_changed(m: Any) -> None:
    if "eps" in m.__dict__:
        m.eps = 0.5
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.5)


@change
def hooks_of_every_kind(m: Any) -> None:
    m.register_forward_pre_hook(lambda c, a, k: ((2 * a[0], *a[1:]), k), with_kwargs=True)
    m.register_forward_hook(lambda c, a, y: LOG.append("after"), always_call=True)
    m.register_full_backward_hook(lambda c, i, o: LOG.append("backward"))


@pytest.mark.parametrize("what", MODULES)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_change_that_keeps_the_looks(leaf: str, what: str) -> None:
    for mode in ("inference", "training"):
        model, twin = pair(LEAVES[leaf], mode)
        for m in (model, twin):
            if what.startswith("a_copy"):
                m.inner = copy.deepcopy(m.inner)
            MODULES[what](m.inner)
        for grads in (False, True):
            check(model, twin, lambda g: (randn(g, 2, 5, WIDTH),), grads)


# Classes -----------------------------------------------------------------------------------------

GAIN: contextvars.ContextVar[float] = contextvars.ContextVar("GAIN", default=1.0)
LOCAL = threading.local()
LOCAL.gain = 1.0


@dataclasses.dataclass
class Settings:
    gain: float = 1.0


class Kind(enum.Enum):
    ONE, TWO = 1.0, 2.0


class Number(enum.IntEnum):
    ONE, TWO = 1, 2


class Described:
    def __init__(self) -> None:
        self.value = 1e-6

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.value

    def __set__(self, owner: Any, value: float) -> None:
        self.value = value


class DescribedRMSNorm(PlainRMSNorm):
    eps: Any = Described()


class SlottedRMSNorm(PlainRMSNorm):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "gain", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain  # type: ignore[no-any-return,attr-defined]


class ContextRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GAIN.get()


class ThreadRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * LOCAL.gain  # type: ignore[no-any-return]


class SettingsRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.gain


class KindRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.kind = Kind.ONE

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.kind is Kind.TWO else y


class NumberRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.number = Number.ONE

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number


class LateBufferRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.gain is None else y * self.gain


class LateParameterRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.gain is None else y * self.gain


class LateBetaSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x if self.beta is None else self.beta * x)


class LateBetaMLP(SomeMLP):
    def __init__(self) -> None:
        super().__init__(LateBetaSwish())


class LateModuleRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("after", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.after is None else self.after(y)


class LateAttributeRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "_late", 1.0)


class OfClassRMSNorm(PlainRMSNorm):
    _gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * type(self)._gain


class TellingRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        LOG.append("called")
        return super().forward(x)


class RandomRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().forward(x)


class ViewedRMSNorm(PlainRMSNorm):
    """It cannot take an input that no view of two dimensions has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, WIDTH)).view(x.shape)


class WrittenToRMSNorm(PlainRMSNorm):
    """In fp32 it is its input that it writes to."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))
        return self.weight * y.to(x.dtype)


class PartialMethodRMSNorm(PlainRMSNorm):
    def _scaled_by(self, x: Tensor, gain: float) -> Tensor:
        return PlainRMSNorm.forward(self, x) * gain

    forward = functools.partialmethod(_scaled_by, gain=2.0)  # type: ignore[assignment]


class NoneFirstMLP(SomeMLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.norm is None else self.norm(x))


class InPlaceMLP(SomeMLP):
    def __init__(self) -> None:
        super().__init__(nn.SiLU(inplace=True))


@contextlib.contextmanager
def _of(set_gain: Callable[[float], Any]) -> Iterator[None]:
    set_gain(3.0)
    try:
        yield
    finally:
        set_gain(1.0)


def _setting(**values: Any) -> Callable[[Any], Any]:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return change


def _keeping(module: Any) -> None:
    """What the first layer returned is looked at when all is done."""
    an_activation_that_writes(module)


#: What is done to both models after `apply`, or what calls are made under.
CLASSES: dict[type[nn.Module], Any] = {
    DescribedRMSNorm: _setting(eps=0.5),
    SlottedRMSNorm: lambda m: object.__setattr__(m, "gain", 3.0),
    ContextRMSNorm: lambda: _of(GAIN.set),
    ThreadRMSNorm: lambda: _of(lambda gain: setattr(LOCAL, "gain", gain)),
    SettingsRMSNorm: lambda m: setattr(m.settings, "gain", 3.0),
    KindRMSNorm: _setting(kind=Kind.TWO),
    NumberRMSNorm: _setting(number=Number.TWO),
    LateBufferRMSNorm: lambda m: setattr(m, "gain", torch.tensor(3.0)),
    LateParameterRMSNorm: lambda m: setattr(m, "gain", nn.Parameter(torch.tensor(3.0))),
    LateBetaSwish: lambda m: setattr(m, "beta", torch.tensor(3.0)),
    LateBetaMLP: lambda m: setattr(m.act_fn, "beta", torch.tensor(3.0)),
    LateModuleRMSNorm: lambda m: setattr(m, "after", nn.Tanh()),
    LateAttributeRMSNorm: _setting(_late=3.0),
    OfClassRMSNorm: lambda m: setattr(OfClassRMSNorm, "_gain", 3.0),
    TellingRMSNorm: _setting(),
    RandomRMSNorm: _setting(),
    ViewedRMSNorm: _setting(),
    WrittenToRMSNorm: _setting(),
    PartialMethodRMSNorm: _setting(),
    NoneFirstMLP: lambda m: setattr(m, "norm", nn.Tanh()),
    InPlaceMLP: _keeping,
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_of_its_own_mind(cls: Any) -> None:
    what = CLASSES[cls]
    under = what if what.__code__.co_argcount == 0 else contextlib.nullcontext
    made = drawn(cls()).state_dict()

    def make() -> nn.Module:
        module: nn.Module = cls()
        module.load_state_dict(made)
        return module.eval()

    for mode in ("inference", "training"):
        LOG.clear()
        model, twin = Root(make()), Root(make())  # a deep copy leaves slots behind
        hfpatch.apply(model, mode=mode, kernels="local")
        assert not LOG, "`apply` called the module"
        for step in ("before", "after"):
            for m in (model, twin) if step == "after" and under is contextlib.nullcontext else ():
                what(m.inner)
            with under() if step == "after" else contextlib.nullcontext():
                for shape in ((2, 5, WIDTH), (6, WIDTH), (WIDTH,)):
                    check(model, twin, lambda g, shape=shape: (randn(g, *shape),))
                check(model, twin, lambda g: (randn(g, 2, WIDTH, 5).transpose(1, 2),))
                check(model, twin, lambda g: (randn(g, 2, 5, WIDTH),), True)
        if isinstance(vars(cls).get("_gain"), float):
            cls._gain = 1.0
        DescribedRMSNorm.__dict__["eps"].value = 1e-6


def _sigmoid_times(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class HoldingSiLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = _sigmoid_times

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class BoundSiLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = self._act

    def _act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


@pytest.mark.parametrize("cls", [HoldingSiLU, BoundSiLU])
def test_the_code_of_a_function_that_is_held(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = pair(cls, "inference")
    assert hfpatch.status(model).swaps
    if cls is HoldingSiLU:
        other: Any = lambda x: 3 * x  # noqa: E731
        monkeypatch.setattr(_sigmoid_times, "__code__", other.__code__)
    else:
        other = lambda self, x: 3 * x  # noqa: E731
        monkeypatch.setattr(BoundSiLU._act, "__code__", other.__code__)
    check(model, twin, lambda g: (randn(g, 2, 5, WIDTH),))
    with torch.no_grad():
        x = torch.randn(3, WIDTH)
        assert torch.equal(model(x), 3 * x)


def test_a_projections_result_is_not_written_to() -> None:
    """An activation in place is no part of a fused product: hooks may keep what it writes to."""
    model = Root(drawn(InPlaceMLP())).eval()
    (skip,) = [s for s in hfpatch.apply(model).skips if s.path == "inner"]
    assert skip.kind == "unexplained" and "memory that others see" in skip.reason
