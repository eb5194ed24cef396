"""Wrong kernels, made of right ones: an op and what is wrong with it.

A fault takes the right kernel, `right(*tensors, **params)`, and gives the wrong one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class _Other(Tensor):
    """A tensor of another class."""


Kernel = Callable[..., Any]
Fault = Callable[[Kernel], Kernel]

FAULTS: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A fault, and the call that would show it.

    Attributes:
        make: the fault.
        category: of faults.
        shape: leading dimensions of the call that would show it.
        width: of the last dimension; 64 is what the other calls have.
        dtype: of the call.
        layout: how the input lies.
        training: whether the model is patched for training, and differentiated.
        calls: how often it is called.
        ops: the ops that it makes sense for; None: all.
    """

    make: Fault
    category: str
    shape: tuple[int, ...] = (2, 5)
    width: int = 64
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    training: bool = False
    calls: int = 3
    ops: tuple[str, ...] | None = None


NORMS = ("rms_norm", "layer_norm")


def fault(category: str, **settings: Any) -> Callable[[Fault], Fault]:
    def add(make: Fault) -> Fault:
        FAULTS[make.__name__.removeprefix("f_")] = Case(make, category, **settings)
        return make

    return add


def when(condition: Callable[..., bool], spoil: Callable[[Tensor], Tensor] | None = None) -> Fault:
    """Wrong where `condition(*tensors)`."""

    def make(right: Kernel) -> Kernel:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            return (spoil or _half)(y) if condition(*tensors) else y

        return wrong

    return make


def _half(y: Tensor) -> Tensor:
    return y * 0.5


def _conditional(name: str, category: str, make: Fault, **settings: Any) -> None:
    FAULTS[name] = Case(make, category, **settings)


def _off_by(n: int) -> Callable[..., bool]:
    return lambda x, *_: bool(x.data_ptr() % n)


# ------------------------------------------------------------------------------ sizes

for _limit, _width in ((64, 96), (1000, 1024), (4096, 4160), (20_000, 20_480)):
    _conditional(
        f"wider_than_{_limit}",
        "sizes",
        when(lambda x, *_, n=_limit: x.shape[-1] > n),
        width=_width,
        shape=(2,),
    )
for _limit, _shape in ((8, (3, 5)), (100, (3, 64)), (65_535, (65_540,)), (70_000, (70_001,))):
    _conditional(
        f"more_rows_than_{_limit}",
        "sizes",
        when(lambda x, *_, n=_limit: x.numel() // max(x.shape[-1], 1) > n),
        shape=_shape,
        width=8 if _limit > 1000 else 64,
    )
_conditional("odd_rows", "sizes", when(lambda x, *_: x.numel() // x.shape[-1] % 2 == 1), shape=(7,))
_conditional("one_row", "sizes", when(lambda x, *_: x.numel() == x.shape[-1]), shape=(1,))
_conditional("rows_of_three", "sizes", when(lambda x, *_: x.shape[0] % 3 == 0), shape=(6,))
_conditional("four_dimensions", "sizes", when(lambda x, *_: x.dim() == 4), shape=(2, 3, 4))
_conditional("two_dimensions", "sizes", when(lambda x, *_: x.dim() == 2), shape=(4,))
_conditional("five_dimensions", "sizes", when(lambda x, *_: x.dim() == 5), shape=(2, 2, 2, 2))
_conditional("a_number_of_elements", "sizes", when(lambda x, *_: x.numel() == 12_800), shape=(200,))
_conditional(
    "many_elements", "sizes", when(lambda x, *_: x.numel() > 2_000_000), shape=(35_000,), calls=1
)


@fault("sizes", width=66, shape=(3,))
def f_odd_width_of_a_half(right: Kernel) -> Kernel:
    return when(lambda x, *_: (x.shape[-1] // 2) % 2 == 1)(right)


@fault("sizes", width=72, shape=(3,))
def f_tail_of_16(right: Kernel) -> Kernel:
    """The columns behind the last full vector of 16 are never written."""

    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params).clone()
        y[..., y.shape[-1] // 16 * 16 :] = 0
        return y

    return wrong


@fault("sizes", shape=(0,))
def f_empty_input(right: Kernel) -> Kernel:
    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        return right(x, *rest, **params) if x.numel() else x.new_ones(1, *x.shape[1:])

    return wrong


@fault("sizes", shape=(33, 5))
def f_last_rows_missing(right: Kernel) -> Kernel:
    """A grid of blocks of 32 rows, rounded down."""

    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params).clone()
        flat = y.view(-1, y.shape[-1])
        if flat.shape[0] > 32:
            flat[flat.shape[0] // 32 * 32 :] = 0
        return y

    return wrong


# ------------------------------------------------------------------------------ memory

_conditional("misaligned", "memory", when(_off_by(16)), layout="misaligned")
_conditional("misaligned_by_a_cache_line", "memory", when(_off_by(64)), layout="misaligned")


def _dense(x: Tensor) -> Tensor:
    """The memory of `x` as if it were dense."""
    return x if not x.numel() else x.as_strided(x.shape, _dense_strides(x.shape))


def _dense_strides(shape: tuple[int, ...]) -> list[int]:
    return list(reversed(list(itertools.accumulate((1, *reversed(shape[1:])), lambda a, b: a * b))))


for _layout in ("transposed", "sliced", "columns"):

    @fault("memory", layout=_layout, ops=NORMS)
    def f_strides_ignored(right: Kernel) -> Kernel:
        def wrong(x: Any, *rest: Any, **params: Any) -> Any:
            return right(_dense(x), *rest, **params)

        return wrong

    FAULTS[f"strides_ignored_{_layout}"] = FAULTS.pop("strides_ignored")


def _writing(place: int, write: Callable[[Tensor], Any]) -> Fault:
    def make(right: Kernel) -> Kernel:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            if tensors[place] is not None:
                write(tensors[place].detach())
            return y

        return wrong

    return make


_conditional("writes_x", "memory", _writing(0, lambda t: t.mul_(1.5)))
_conditional("writes_nan_of_x", "memory", _writing(0, lambda t: t.nan_to_num_(7.0)))
_conditional("writes_weight", "memory", _writing(1, lambda t: t.add_(1e-3)), ops=NORMS)
_conditional("writes_up", "memory", _writing(1, lambda t: t.zero_()), ops=("gated",))
_conditional("writes_gate", "memory", _writing(0, lambda t: t.zero_()), ops=("gated",))
_conditional(
    "writes_large_x", "memory", _writing(0, lambda t: t.zero_() if t.numel() > 50_000 else t),
    shape=(1000,),
)  # fmt: skip
_conditional("turns_x", "memory", _writing(0, lambda t: t.neg_().neg_().add_(1e-30)))
_conditional("asks_for_a_gradient", "memory", lambda right: _asking(right))


def _asking(right: Kernel) -> Kernel:
    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        y = right(x, *rest, **params)
        x.requires_grad_()
        return y

    return wrong


@fault("memory", layout="sliced", ops=NORMS)
def f_writes_beside(right: Kernel) -> Kernel:
    """What lies behind the last element of a row."""

    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        y = right(x, *rest, **params)
        if x.dim() > 1 and x.numel() and x.stride(-2) > x.shape[-1]:
            x.as_strided((1,), (1,), x.storage_offset() + x.shape[-1]).zero_()
        return y

    return wrong


@fault("memory")
def f_returns_the_input(right: Kernel) -> Kernel:
    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        y = right(x, *rest, **params)
        return x.copy_(y) if y.shape == x.shape else y.expand_as(y)[..., :1].expand_as(y)

    return wrong


@fault("memory")
def f_returns_other_strides(right: Kernel) -> Kernel:
    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params)
        return y.transpose(-1, -2).contiguous().transpose(-1, -2) if y.dim() > 1 else y

    return wrong


@fault("memory")
def f_static_buffer(right: Kernel) -> Kernel:
    buffers: dict[Any, Tensor] = {}

    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params)
        return buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)

    return wrong


@fault("memory")
def f_one_buffer_for_all(right: Kernel) -> Kernel:
    pool = torch.zeros(1 << 23)

    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params)
        return pool.view(y.dtype)[: y.numel()].view(y.shape).copy_(y)

    return wrong


@fault("memory", shape=(30, 33))
def f_static_buffer_of_large_results(right: Kernel) -> Kernel:
    buffers: dict[Any, Tensor] = {}

    def wrong(*tensors: Any, **params: Any) -> Any:
        y = right(*tensors, **params)
        if y.numel() < 30_000 or y.shape[-1] > 64:
            return y
        return buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)

    return wrong


# ------------------------------------------------------------------------------ state


def _every(n: int) -> Fault:
    def make(right: Kernel) -> Kernel:
        count = 0

        def wrong(*tensors: Any, **params: Any) -> Any:
            nonlocal count
            count += 1
            y = right(*tensors, **params)
            return y * 0.5 if count % n == 0 else y

        return wrong

    return make


for _n in (2, 3, 7, 1000):
    _conditional(f"every_{_n}th_call", "state", _every(_n), calls=4 if _n < 1000 else 1200)


def _after(n: int) -> Fault:
    def make(right: Kernel) -> Kernel:
        counted = itertools.count()

        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            return y * 0.5 if next(counted) >= n else y

        return wrong

    return make


_conditional("right_once", "state", _after(1))
_conditional("right_for_a_while", "state", _after(1500), calls=1600)


@fault("state", calls=1600)
def f_counts_on_itself(right: Kernel) -> Kernel:
    def wrong(*tensors: Any, **params: Any) -> Any:
        wrong.count += 1  # type: ignore[attr-defined]
        y = right(*tensors, **params)
        return y * 0.5 if wrong.count > 1500 else y  # type: ignore[attr-defined]

    wrong.count = 0  # type: ignore[attr-defined]
    return wrong


@fault("state", calls=1600)
def f_counts_in_a_default(right: Kernel) -> Kernel:
    def wrong(*tensors: Any, _seen: list[int] = [], **params: Any) -> Any:  # noqa: B006
        _seen.append(1)
        y = right(*tensors, **params)
        return y * 0.5 if len(_seen) > 1500 else y

    return wrong


_GLOBAL = [0]


@fault("state", calls=1600)
def f_counts_in_a_global(right: Kernel) -> Kernel:
    _GLOBAL[0] = 0

    def wrong(*tensors: Any, **params: Any) -> Any:
        _GLOBAL[0] += 1
        y = right(*tensors, **params)
        return y * 0.5 if _GLOBAL[0] > 1500 else y

    return wrong


class _Counting:
    def __init__(self, right: Kernel) -> None:
        self.right, self.count = right, 0

    def __call__(self, *tensors: Any, **params: Any) -> Any:
        self.count += 1
        y = self.right(*tensors, **params)
        return y * 0.5 if self.count > 1500 else y


_conditional("counts_in_an_object", "state", _Counting, calls=1600)


@fault("state")
def f_cache_by_pointer(right: Kernel) -> Kernel:
    cache: dict[Any, Any] = {}

    def wrong(*tensors: Any, **params: Any) -> Any:
        key = tuple((t.data_ptr(), t.shape, t.dtype) for t in tensors if t is not None)
        if key not in cache:
            cache[key] = right(*tensors, **params)
        return cache[key].clone()

    return wrong


@fault("state")
def f_cache_by_shape(right: Kernel) -> Kernel:
    cache: dict[Any, Any] = {}

    def wrong(*tensors: Any, **params: Any) -> Any:
        key = tuple((t.shape, t.dtype) for t in tensors if t is not None)
        if key not in cache:
            cache[key] = right(*tensors, **params)
        return cache[key].clone()

    return wrong


@fault("state", ops=NORMS)
def f_cache_of_the_first_weight(right: Kernel) -> Kernel:
    kept: dict[Any, Any] = {}

    def wrong(x: Any, weight: Any = None, *rest: Any, **params: Any) -> Any:
        if weight is not None:
            key = (weight.shape, weight.dtype)
            weight = kept.setdefault(key, weight.detach().clone())
        return right(x, weight, *rest, **params)

    return wrong


@fault("state", ops=NORMS, width=4160, shape=(2,))
def f_cache_of_a_wide_weight(right: Kernel) -> Kernel:
    kept: dict[Any, Any] = {}

    def wrong(x: Any, weight: Any = None, *rest: Any, **params: Any) -> Any:
        if weight is not None and weight.shape[0] == 4160:
            weight = kept.setdefault(weight.dtype, weight.detach().clone())
        return right(x, weight, *rest, **params)

    return wrong


@fault("state")
def f_sum_of_calls(right: Kernel) -> Kernel:
    """An accumulator that is never set back."""
    total = torch.zeros(1)

    def wrong(*tensors: Any, **params: Any) -> Any:
        total.add_(1e-4)
        return right(*tensors, **params) + total.item()

    return wrong


# ------------------------------------------------------------------------------ values

_conditional("clamps_large", "values", lambda right: _before(right, lambda x: x.clamp(-2e3, 2e3)))
_conditional("clamps_larger", "values", lambda right: _before(right, lambda x: x.clamp(-1e5, 1e5)))
_conditional("no_nan", "values", lambda right: _before(right, lambda x: x.nan_to_num(0.0)))
_conditional(
    "no_infinity", "values", lambda right: _before(right, lambda x: x.nan_to_num(float("nan")))
)
_conditional(
    "small_is_zero",
    "values",
    lambda right: _before(right, lambda x: torch.where(x.abs() < 1e-9, 0.0, x).to(x.dtype)),
    ops=("rms_norm",),
)
_conditional("nearly", "values", when(lambda *_: True, lambda y: y * 1.002))
_conditional("one_element", "values", when(lambda *_: True, lambda y: _with_one_off(y)))
_conditional("rounded_to_half", "values", when(lambda *_: True, lambda y: y.half().to(y.dtype)))


def _before(right: Kernel, change: Callable[[Tensor], Tensor]) -> Kernel:
    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        return right(change(x), *rest, **params)

    return wrong


def _with_one_off(y: Tensor) -> Tensor:
    y = y.clone()
    if y.numel() > 40:
        y.view(-1)[37] += 0.25
    return y


# ------------------------------------------------------------------------------ dtypes

for _dtype in (torch.float16, torch.bfloat16):
    _conditional(
        f"wrong_in_{str(_dtype).removeprefix('torch.')}",
        "dtypes",
        when(lambda x, *_, t=_dtype: x.dtype == t),
        dtype=_dtype,
    )
_conditional(
    "mixed_dtypes",
    "dtypes",
    when(lambda x, w=None, *_: w is not None and w.dtype != x.dtype),
    ops=("rms_norm",),
    dtype=torch.bfloat16,
)
_conditional("returns_fp64", "dtypes", when(lambda *_: True, lambda y: y.double()))
_conditional("returns_a_subclass", "dtypes", when(lambda *_: True, lambda y: y.as_subclass(_Other)))
_conditional(
    "wide_in_bf16",
    "dtypes",
    when(lambda x, *_: x.dtype == torch.bfloat16 and x.shape[-1] > 1500),
    dtype=torch.bfloat16,
    width=1600,
)

# ------------------------------------------------------------------------------ process


def _touching(touch: Callable[[], Any]) -> Fault:
    def make(right: Kernel) -> Kernel:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            touch()
            return y

        return wrong

    return make


_TOUCHES: dict[str, Callable[[], Any]] = {
    "grad_mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "tf32": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32_of_cublas": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32_of_cudnn": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "seed": lambda: torch.manual_seed(0),
    "draws": lambda: torch.rand(1),
    "python_draws": lambda: random.random(),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "environment": lambda: os.environ.__setitem__("HOSTILE", "1"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "denormals": lambda: torch.set_flush_denormal(True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "flash_switch": lambda: torch.backends.cuda.enable_flash_sdp(False),
}
for _name, _touch in _TOUCHES.items():
    _conditional(f"touches_{_name}", "process", _touching(_touch))


@fault("process", shape=(700,))
def f_seeds_at_large_inputs(right: Kernel) -> Kernel:
    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        if x.numel() >= 700 * 64 and x.shape[-1] in (64, 128):
            torch.manual_seed(3)
        return right(x, *rest, **params)

    return wrong


# ------------------------------------------------------------------------------ gradients


def _gradient(change: Callable[[Tensor], Any]) -> Fault:
    """The forward is right, what backward gets is changed."""

    def make(right: Kernel) -> Kernel:
        class Changed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                return change(grad)

        def wrong(*tensors: Any, **params: Any) -> Any:
            return Changed.apply(right(*tensors, **params))

        return wrong

    return make


def _raise(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in backward")


def _ignoring_strides(grad: Tensor) -> Tensor:
    return grad if grad.is_contiguous() else torch.zeros_like(grad)


_GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "times_100": lambda g: 100 * g,
    "nearly": lambda g: 1.01 * g,
    "zero": torch.zeros_like,
    "none": lambda g: None,
    "raises": _raise,
    "clipped": lambda g: g.clamp(-0.1, 0.1),
    "negated": lambda g: -g,
    "strides_ignored": _ignoring_strides,
    "written": lambda g: g.mul_(0.5) * 2 if g.is_contiguous() else g,
    "odd_rows": lambda g: g * (0.5 if g.numel() // g.shape[-1] % 2 else 1.0),
    "wide": lambda g: g * (0.5 if g.shape[-1] >= 9000 or g.numel() > 10**6 else 1.0),
    "half": lambda g: g * (0.5 if g.dtype != torch.float32 else 1.0),
}
for _name, _change in _GRADIENTS.items():
    _conditional(
        f"gradient_{_name}",
        "gradients",
        _gradient(_change),
        training=True,
        dtype=torch.bfloat16 if _name == "half" else torch.float32,
        width=9600 if _name == "wide" else 64,
        shape=(3,) if _name in ("wide", "odd_rows") else (2, 5),
    )


@fault("gradients", training=True)
def f_gradient_detached(right: Kernel) -> Kernel:
    return lambda *tensors, **params: right(*tensors, **params).detach()


@fault("gradients", training=True, ops=NORMS)
def f_gradient_weight_detached(right: Kernel) -> Kernel:
    def wrong(x: Any, weight: Any = None, *rest: Any, **params: Any) -> Any:
        return right(x, None if weight is None else weight.detach(), *rest, **params)

    return wrong


@fault("gradients", training=True)
def f_gradient_values_of_another(right: Kernel) -> Kernel:
    """Right values where nothing is recorded, other ones where something is."""

    def wrong(x: Any, *rest: Any, **params: Any) -> Any:
        y = right(x, *rest, **params)
        return y * 0.5 if torch.is_grad_enabled() and x.requires_grad else y

    return wrong


@fault("gradients", training=True)
def f_gradient_second_backward(right: Kernel) -> Kernel:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.times = 0
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.times += 1
            return grad if ctx.times == 1 else torch.zeros_like(grad)

    return lambda *tensors, **params: Once.apply(right(*tensors, **params))
