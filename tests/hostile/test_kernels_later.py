"""Kernels that lie where a battery of samples cannot be: in another thread, mode or memory, to what
they keep, in what they leave behind. Each call ends in the formula's result."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_models as models
import numpy as np
import pytest
import torch
from test_process import CHANGES
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import hfpatch
from hfpatch.foreign.process import Process
from hfpatch.proof.proofs import forget_proofs

WIDTH = 64
Kernel = Callable[..., Any]
#: Name to the op, the lie, and the calls that would show it.
LIES: dict[str, tuple[str, Callable[[Kernel], Kernel], Callable[[Any], list[Any]]]] = {}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    forget_proofs()
    before, threads = Process.now(), torch.get_num_threads()
    yield
    before.changed()
    torch.set_num_threads(threads)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def half_where(condition: Callable[..., bool]) -> Callable[[Kernel], Kernel]:
    def make(right: Kernel) -> Kernel:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            return y * 0.5 if condition(*tensors) else y

        return wrong

    return make


def lie(name: str, make: Callable[[Kernel], Kernel], calls: Any, op: str = "layer_norm") -> None:
    LIES[name] = (op, make, calls)


# Where it is called -------------------------------------------------------------------------------


def _in_a_thread(model: Any) -> list[Any]:
    x, found = drawn(7, WIDTH), []
    found.append(model(x))
    thread = threading.Thread(target=lambda: found.append(_no_grad(model, x)))
    thread.start()
    thread.join()
    return found


def _no_grad(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def _under(context: Callable[[], Any]) -> Callable[[Any], list[Any]]:
    def calls(model: Any) -> list[Any]:
        x = drawn(7, WIDTH)
        before = model(x)
        with context():
            inside = model(x)
        return [before, inside, model(x)]

    return calls


@contextlib.contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


_MAIN = threading.get_ident()
lie("another_thread", half_where(lambda *_: threading.get_ident() != _MAIN), _in_a_thread)
lie(
    "another_default_dtype",
    half_where(lambda *_: torch.get_default_dtype() != torch.float32),
    _under(lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64)),
)
lie(
    "memory_of_the_default_dtype",
    lambda right: lambda *tensors, **params: right(*tensors, **params) * torch.ones(1),
    _under(lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64)),
)
lie(
    "another_default_device",
    half_where(lambda *_: torch.get_default_device().type != "cpu"),
    _under(lambda: torch.device("meta")),
)
lie(
    "more_threads",
    half_where(lambda *_: torch.get_num_threads() == 3),
    _under(lambda: _set(torch.get_num_threads, torch.set_num_threads, 3)),
)
lie(
    "deterministic",
    half_where(lambda *_: torch.are_deterministic_algorithms_enabled()),
    _under(
        lambda: _set(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        )
    ),
)
lie(
    "inference_mode",
    half_where(lambda *_: torch.is_inference_mode_enabled()),
    _under(torch.inference_mode),
)
lie("autocast", half_where(lambda *_: torch.is_autocast_enabled("cpu")),
    _under(lambda: torch.autocast("cpu", torch.bfloat16)))  # fmt: skip
lie(
    "precision_of_products",
    half_where(lambda *_: torch.get_float32_matmul_precision() != "highest"),
    _under(
        lambda: _set(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        )
    ),
)


# What it is given ---------------------------------------------------------------------------------


def _then(*makes: Callable[[], Tensor]) -> Callable[[Any], list[Any]]:
    return lambda model: [model(make()) for make in (*makes, *makes)]


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return drawn(7, WIDTH)


lie(
    "no_view",
    half_where(lambda x, *_: not x._is_view()),
    _then(lambda: drawn(7 * WIDTH).view(7, WIDTH), lambda: drawn(7, WIDTH)),
)
lie(
    "a_view",
    half_where(lambda x, *_: x._is_view() and x.shape[0] == 7),
    _then(lambda: drawn(7, WIDTH), lambda: drawn(14, WIDTH)[:7]),
)
lie(
    "an_inference_tensor",
    half_where(lambda x, *_: x.is_inference()),
    _then(lambda: drawn(7, WIDTH), _of_inference),
)
lie(
    "a_tensor_that_needs_a_gradient",
    half_where(lambda x, *_: x.requires_grad),
    _then(lambda: drawn(7, WIDTH), lambda: drawn(7, WIDTH).requires_grad_()),
)
lie(
    "a_row_of_nan",
    half_where(lambda x, *_: bool(x.isnan().any())),
    _then(lambda: drawn(7, WIDTH), lambda: drawn(7, WIDTH).log()),
)


def _trained(model: Any) -> list[Any]:
    """Weights that are replaced, and written to past PyTorch, between calls."""
    x, found = drawn(7, WIDTH), []
    for layer in model.layers:
        layer.requires_grad_(False)
    found.append(model(x))
    for layer in model.layers:
        layer.weight.data.mul_(2.0)
    found.append(model(x))
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
    found.append(model(x))
    return found


def _by_version(right: Kernel) -> Kernel:
    """A cache of what is made of a weight, by address and version, as real kernels have it."""
    kept: dict[Any, Tensor] = {}

    def wrong(x: Any, weight: Any = None, *rest: Any, **params: Any) -> Any:
        if weight is not None:
            key = (weight.data_ptr(), weight._version, weight.dtype, weight.shape)
            if key not in kept:
                kept[key] = weight.detach().clone()
            weight = kept[key]
        return right(x, weight, *rest, **params)

    return wrong


lie("cache_by_version", _by_version, _trained)


# What it leaves -----------------------------------------------------------------------------------


def _weight_and(right: Kernel, touch: Callable[[Tensor], Any]) -> Kernel:
    def wrong(x: Any, weight: Any = None, *rest: Any, **params: Any) -> Any:
        y = right(x, weight, *rest, **params)
        if weight is not None and weight.requires_grad and weight.is_leaf:
            touch(weight)
        return y

    return wrong


def _gradient_after(model: Any) -> list[Any]:
    x = drawn(7, WIDTH)
    found = [model(x) for _ in range(2)]
    assert all(p.grad is None for p in model.parameters())
    with torch.enable_grad():
        total = sum(y.square().sum() for y in model(x))
        return [*found, [torch.autograd.grad(total, [*model.parameters()])[0]]]


lie(
    "hook_on_the_weight",
    lambda right: _weight_and(right, lambda w: w.register_hook(lambda g: 2 * g)),
    _gradient_after,
)
lie(
    "gradient_of_the_weight",
    lambda right: _weight_and(right, lambda w: setattr(w, "grad", torch.ones_like(w))),
    _gradient_after,
)


def _used_with_a_gradient(model: Any) -> list[Any]:
    found = []
    for y in model(drawn(7, WIDTH)):
        w = torch.ones(WIDTH, requires_grad=True)
        with torch.enable_grad():
            found.append([torch.autograd.grad((y * w).square().sum(), w)[0]])
    return found


def _inference_result(right: Kernel) -> Kernel:
    def wrong(*tensors: Any, **params: Any) -> Any:
        with torch.inference_mode():
            return right(*tensors, **params).clone()

    return wrong


lie("result_of_inference_mode", _inference_result, _used_with_a_gradient)


def _spoils_the_last(which: Callable[[Any, Any], Any]) -> Callable[[Kernel], Kernel]:
    """It writes to a tensor of the call before, which it holds weakly, of sizes of no sample."""

    def make(right: Kernel) -> Kernel:
        held: list[Any] = [lambda: None]

        def wrong(x: Any, *rest: Any, **params: Any) -> Any:
            last = held[0]()
            y = right(x, *rest, **params)
            if x.shape[0] == 37 and x.dim() == 2:
                if last is not None:
                    last.detach().zero_()
                held[0] = weakref.ref(which(x, y))
            return y

        return wrong

    return make


def _kept_results(model: Any) -> list[Any]:
    inputs = [drawn(37, WIDTH, seed=i) for i in range(3)]
    found = [model(x) for x in inputs]
    return [*found, inputs]


lie("spoils_the_last_result", _spoils_the_last(lambda x, y: y), _kept_results)


def _leaves(touch: Callable[[], Any]) -> Callable[[Kernel], Kernel]:
    def make(right: Kernel) -> Kernel:
        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            touch()
            return y

        return wrong

    return make


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


#: What it changes, and how that is read.
_LEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{
        name: CHANGES[name]
        for name in (
            "Python's garbage collection", "the working directory", "NumPy's handling of errors",
            "the threads of backwards", "the repetition of warnings", "the level of logging",
            "whether oneDNN is used", "autocast's cache", "the handlers of signals",
            "the path of imports", "how modules are converted", "the filters of warnings",
            "how views are differentiated",
        )
    },
    "function_mode": (lambda: _Mode().__enter__(), torch._C._len_torch_function_stack),
    "saved_tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda t: t * 2, lambda t: t
        ).__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "forward_mode": (  # a second level cannot be entered
        lambda: forward_ad._current_level < 0 and forward_ad.enter_dual_level(),
        lambda: forward_ad._current_level,
    ),
    "fft": (lambda: setattr(torch.fft, "rfft", lambda x: x * 0), lambda: torch.fft.rfft),
    "layer": (
        lambda: setattr(nn.LayerNorm, "forward", lambda self, x: x * 0),
        lambda: nn.LayerNorm.forward,
    ),
}  # fmt: skip


# What it counts with ------------------------------------------------------------------------------


class _Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def _deque() -> Callable[[], int]:
    held: Any = collections.deque([0], maxlen=1)
    return lambda: held.append(held[-1] + 1) or held[-1]


def _counter() -> Callable[[], int]:
    held: Any = collections.Counter()

    def count() -> int:
        held["n"] += 1
        return int(held["n"])

    return count


def _bytes() -> Callable[[], int]:
    held = bytearray(4)

    def count() -> int:
        held[:] = (int.from_bytes(held, "big") + 1).to_bytes(4, "big")
        return int.from_bytes(held, "big")

    return count


def _array() -> Callable[[], int]:
    held = array.array("l", [0])

    def count() -> int:
        held[0] += 1
        return held[0]

    return count


def _numpy() -> Callable[[], int]:
    held = np.zeros(1, dtype=np.int64)

    def count() -> int:
        held[0] += 1
        return int(held[0])

    return count


def _thread_local() -> Callable[[], int]:
    held = threading.local()

    def count() -> int:
        held.n = getattr(held, "n", 0) + 1
        return int(held.n)

    return count


def _context() -> Callable[[], int]:
    held: contextvars.ContextVar[int] = contextvars.ContextVar("held", default=0)

    def count() -> int:
        held.set(held.get() + 1)
        return held.get()

    return count


def _module() -> Callable[[], int]:
    held: Any = nn.Module()
    held.register_buffer("n", torch.zeros((), dtype=torch.long))

    def count() -> int:
        held.n += 1
        return int(held.n)

    return count


def _large_tensor() -> Callable[[], int]:
    held = torch.zeros(5000)

    def count() -> int:
        held.data[0] += 1
        return int(held[0])

    return count


_COUNTS = {
    "slots": _Slotted, "deque": _deque, "counter": _counter, "bytes": _bytes, "array": _array,
    "numpy": _numpy, "thread_local": _thread_local, "context": _context, "module": _module,
    "large_tensor": _large_tensor,
}  # fmt: skip


def _counting(make: Callable[[], Callable[[], int]]) -> Callable[[Kernel], Kernel]:
    def lying(right: Kernel) -> Kernel:
        count = make()

        def wrong(*tensors: Any, **params: Any) -> Any:
            y = right(*tensors, **params)
            return y * 0.5 if count() > 1500 else y

        return wrong

    return lying


def _often(model: Any) -> list[Any]:
    x = drawn(7, WIDTH)
    return [model(x) for _ in range(800)][-60:]


for _name, _make in _COUNTS.items():
    lie(f"counts_in_{_name}", _counting(_make), _often)


def _raising(right: Kernel) -> Kernel:
    count = _Slotted()

    def wrong(*tensors: Any, **params: Any) -> Any:
        if count() % 997 == 0:
            raise ZeroDivisionError("at times")
        return right(*tensors, **params)

    return wrong


lie("raises_at_times", _raising, _often)


def _raising_elsewhere(right: Kernel) -> Kernel:
    def wrong(*tensors: Any, **params: Any) -> Any:
        if os.environ.get("HFPATCH_HOSTILE_RAISES"):
            raise ZeroDivisionError("when it is told to")
        return right(*tensors, **params)

    return wrong


def _told_to_raise(model: Any) -> list[Any]:
    x = drawn(7, WIDTH)
    found = [model(x)]
    os.environ["HFPATCH_HOSTILE_RAISES"] = "1"
    try:
        return [*found, model(x)]
    finally:
        del os.environ["HFPATCH_HOSTILE_RAISES"]


lie("raises_when_told", _raising_elsewhere, _told_to_raise)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_that_comes_later(name: str) -> None:
    op, make, calls = LIES[name]
    _check(op, make, calls)


def _check(op: str, make: Any, calls: Callable[[Any], list[Any]]) -> Any:
    model, twin = models.Model(op, WIDTH), models.Model(op, WIDTH)
    kernel = make(models.right_kernel(op))
    handle = hfpatch.register(op=op, kernel=kernel, name="lying")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            expected = calls(twin)
            report = hfpatch.apply(model, kernels={op: "lying"})
            got = calls(model)
    finally:
        handle.remove()
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return report


@pytest.mark.parametrize("name", _LEFT)
def test_what_it_may_not_leave(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch, read = _LEFT[name]
    monkeypatch.chdir(tmp_path)
    before = read()
    try:
        report = _check("layer_norm", _leaves(touch), _often_enough)
        assert read() == before, "a call changed it"
        assert not report.swaps
        assert any("changed" in s.reason for s in report.skips), report
    finally:
        Process.now()


def test_a_library_that_is_imported_at_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some add filters of warnings and folders when they are imported: no kernel's fault."""
    (tmp_path / "adds_a_filter.py").write_text(
        "import sys, warnings\nwarnings.filterwarnings('ignore', 'of this library')\n"
        f"sys.path.append({str(tmp_path / 'more')!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "adds_a_filter", raising=False)
    model = models.Model("layer_norm", WIDTH)
    kernel = _leaves(lambda: __import__("adds_a_filter"))(models.right_kernel("layer_norm"))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="importing")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            report = hfpatch.apply(model, kernels={"layer_norm": "importing"})
            del sys.modules["adds_a_filter"]
            sys.path.remove(str(tmp_path / "more"))
            warnings.simplefilter("error", RuntimeWarning)
            got = model(drawn(7, WIDTH))
            assert {s.source for s in report.swaps} == {"importing"}
            assert any("of this library" in str(f[1]) for f in warnings.filters)
    finally:
        handle.remove()
    assert str(tmp_path / "more") in sys.path
    hfpatch.restore(model)
    torch.testing.assert_close(got, model(drawn(7, WIDTH)))


def _often_enough(model: Any) -> list[Any]:
    return [model(drawn(7, WIDTH)) for _ in range(3)]


# Gradients ----------------------------------------------------------------------------------------


def _second_order(change: Callable[[Tensor], Tensor]) -> Callable[[Kernel], Kernel]:
    """The gradient is right, that of the gradient is not."""

    def make(right: Kernel) -> Kernel:
        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                return change(grad)

        return lambda *tensors, **params: Once.apply(right(*tensors, **params))

    return make


def _penalty(model: Any) -> list[Tensor]:
    x = drawn(7, WIDTH).requires_grad_()
    with torch.enable_grad():
        total = sum(y.pow(3).sum() for y in model(x))
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        return [first.detach(), torch.autograd.grad(first.square().sum(), x)[0]]


def _of_no_graph(g: Tensor) -> Tensor:
    """As kernels write it: into memory that autograd knows nothing of."""
    return torch.empty_like(g).copy_(g.detach())


@pytest.mark.parametrize("change", [_of_no_graph, lambda g: 2 * g - g.detach()])
def test_a_gradient_whose_own_is_wrong(change: Any) -> None:
    """The first is the formula's; an error says that there is no second."""
    model, twin = models.Model("layer_norm", WIDTH), models.Model("layer_norm", WIDTH)
    kernel = _second_order(change)(models.right_kernel("layer_norm"))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine", differentiable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            report = hfpatch.apply(model, kernels={"layer_norm": "mine"}, mode="training")
            assert {s.source for s in report.swaps} == {"mine"}, report
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"`mine` .* has a first gradient alone"):
                    _penalty(model)
                x = drawn(7, WIDTH).requires_grad_()
                grads = [
                    torch.autograd.grad(sum(y.pow(3).sum() for y in m(x)), x)[0]
                    for m in (model, twin)
                ]
                torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    finally:
        handle.remove()
    hfpatch.apply(model, kernels={"layer_norm": "torch"}, mode="training")
    torch.testing.assert_close(_penalty(model), _penalty(twin), rtol=1e-3, atol=1e-3)


# A forward of the user's --------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self]
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Turned(), Turned()])
        for layer in self.layers:
            layer.layers = []

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


#: The lies that a forward can tell as well: of what it is called in, given, and raises.
_OF_FORWARDS = (
    "another_thread", "another_default_dtype", "memory_of_the_default_dtype",
    "another_default_device", "more_threads", "deterministic", "inference_mode",
    "precision_of_products", "no_view", "a_view", "an_inference_tensor",
    "raises_when_told",
)  # fmt: skip


@pytest.mark.parametrize("name", _OF_FORWARDS)
def test_a_forward_that_lies_later(name: str) -> None:
    _, make, calls = LIES[name]
    wrong = make(lambda x, weight: torch.tanh(x) * weight)
    torch.manual_seed(0)
    handle = hfpatch.register(
        "^Turned$",
        forward=lambda module, x: wrong(x, module.weight),
        sample=lambda module: (torch.randn(3, WIDTH),),
    )
    try:
        model, twin = Both(), Both()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            expected = calls(twin)
            hfpatch.apply(model)
            got = calls(model)
    finally:
        handle.remove()
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
