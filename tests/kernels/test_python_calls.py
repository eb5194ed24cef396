"""Operators as plain callables (`calls.bind`): the same bits, and the operator where it is seen."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any, ClassVar

import proofs
import pytest
import torch
import torch.utils.flop_counter
from op_samples import BY_ID, DTYPES, FORMULAS, Sample, rows, sample
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Those that no adapter calls through `Kernel.bind` have results of another shape or dtype.
BOUND = [
    name for name, s in BY_ID.items() if s.op in FORMULAS and FORMULAS[s.op].direct
    and s.op not in ("argmax", "topk", "softmax")
]  # fmt: skip
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bind(kernels: ModuleType, s: Sample, into: bool = False, width: int = 34) -> Any:
    return kernels.calls.bind(s.op, FORMULAS[s.op].encode(s.values(width)), into)


def ordered(s: Sample, tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple(tensors.get(n) for kind, n in s.schema.arguments if kind.startswith("Tensor"))


def as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def test_a_call_from_within_the_collector(kernels_module: ModuleType) -> None:
    """Up to Python 3.11 the collector runs while a call makes a tuple. What is kept of the shape is
    then still one shape's: else every call of that shape goes to the operator."""
    fell: list[torch.Size] = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        fell.append(x.shape)
        return torch.nn.functional.silu(x)

    silu = kernels_module.calls._extension.bind("silu", False, (), operator)
    x, other, flat = torch.randn(2, 3, 4), torch.randn(5, 6, 7), torch.randn(2, 2)
    calling = False

    def collecting(phase: str, info: Any) -> None:
        if phase == "start" and calling:
            silu(other)

    before = gc.get_threshold()
    gc.callbacks.append(collecting)
    try:
        for allocations in range(4):
            gc.disable()
            gc.collect()
            silu(flat)
            tuples = [(i, i, i) for i in range(2500)]  # more than Python keeps of freed ones
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            calling = True
            silu(x)
            calling = False
            gc.disable()
            silu(x)
            assert len(tuples) == 2500 and not fell
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*before)
        gc.enable()


def check_same_bits(s: Sample, kernels: ModuleType, dtype: torch.dtype, device: str) -> None:
    """The operator's results, in every layout, new and written to given tensors."""
    call, into = bind(kernels, s), bind(kernels, s, into=True)
    for layout in proofs.LAYOUTS:
        tensors = proofs.laid_out(s, s.make(dtype, device=device), layout)
        if tensors is None:
            continue
        expected = s.call(kernels, tensors)
        got = as_list(call(*ordered(s, tensors)))
        proofs.assert_same_bits(got, expected, f"{s.id}, {layout}")
        assert [(g.stride(), g.device) for g in got] == [(e.stride(), e.device) for e in expected]
        if into is None:  # needs scratch memory
            assert len(s.results) > len(expected)
            continue
        outs = [torch.full_like(e, 7.0) for e in expected]
        assert into(*outs, *ordered(s, tensors)) is None
        proofs.assert_same_bits(outs, expected, f"{s.id}, {layout}, into")


@OF_DTYPE
@pytest.mark.parametrize("name", BOUND)
def test_same_bits_as_the_operator(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    assert inspect.isbuiltin(bind(kernels_module, BY_ID[name]))
    check_same_bits(BY_ID[name], kernels_module, dtype, "cpu")


@pytest.mark.parametrize("name", BOUND)
def test_no_rows(name: str, kernels_module: ModuleType) -> None:
    s = BY_ID[name]
    tensors = s.make(torch.bfloat16, n=0)
    got = as_list(bind(kernels_module, s)(*ordered(s, tensors)))
    proofs.assert_same_bits(got, s.call(kernels_module, tensors), name)


@pytest.mark.parametrize("x", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("cast", ["none", "input", "weight"])
def test_mixed_dtypes(
    x: torch.dtype, weight: torch.dtype | None, cast: str, kernels_module: ModuleType
) -> None:
    s = sample("rms_norm", x=rows(3, "D"), eps=1e-6, cast=cast)
    w = None if weight is None else torch.randn(34).to(weight)
    values, call = s.make(x)["x"], bind(kernels_module, s)
    codes = FORMULAS["rms_norm"].encode(s.params)
    expected = kernels_module.ops.rms_norm.default(values, w, None, *codes)
    proofs.assert_same_bits([call(values, w, None)], [expected], f"{x} {weight} {cast}")
    for op in ("gate_residual", "mul_add"):
        cast = "input" if cast == "weight" else cast
        b = torch.randn(34).to(weight or x)
        codes = FORMULAS[op].encode({"cast": cast})
        given = (values, b, values) if op == "gate_residual" else (values, b, b)
        expected = getattr(kernels_module.ops, op).default(*given, *codes)
        got = kernels_module.calls.bind(op, codes)(*given)
        proofs.assert_same_bits([got], [expected], f"{op} {x} {weight} {cast}")


def _rms_norm(kernels: ModuleType) -> tuple[Any, torch.Tensor, torch.Tensor]:
    s = BY_ID["rms_norm"]
    made = s.make(torch.float32)
    return bind(kernels, s), made["x"], made["weight"]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_watches_operators_sees_it(kernels_module: ModuleType) -> None:
    call, x, w = _rms_norm(kernels_module)
    expected = call(x, w, None)
    with Seen() as seen:
        assert torch.equal(call(x, w, None), expected)
    assert seen.names[0] == "rms_norm"
    with Called() as called:
        assert torch.equal(call(x, w, None), expected)
    assert any("rms_norm" in name for name in called.names)
    with torch.profiler.profile() as profile:
        assert torch.equal(call(x, w, None), expected)
    assert any(e.key.endswith("::rms_norm") for e in profile.key_averages())

    traced = torch.jit.trace(lambda t: call(t, w, None) * 2, (x,), check_trace=False)
    assert "rms_norm" in str(traced.graph)
    assert torch.equal(traced(2 * x), call(2 * x, w, None) * 2)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda t: call(t, w, None))(x)
    assert "rms_norm" in graph.code
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(call(fake, mode.from_tensor(w), None), torch._subclasses.FakeTensor)


def test_transforms_get_what_the_operator_gives(kernels_module: ModuleType) -> None:
    """Inside vmap the tensors are of the ordinary class, but have no memory of their own."""
    call, x, w = _rms_norm(kernels_module)
    codes = FORMULAS["rms_norm"].encode(BY_ID["rms_norm"].params)

    def outcome(f: Any) -> Any:
        try:
            return torch.func.vmap(f)(x)
        except Exception as e:
            return str(e)

    ours = outcome(lambda t: call(t, w, None))
    theirs = outcome(lambda t: kernels_module.ops.rms_norm.default(t, w, None, *codes))
    assert type(ours) is type(theirs)
    assert ours == theirs if isinstance(ours, str) else torch.equal(ours, theirs)


class Logged(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_dispatchers_state_is_read(kernels_module: ModuleType) -> None:
    """Where it shows modes, transforms and autocast: so it does in the torch of these tests."""
    is_plain = kernels_module.calls._extension.is_plain
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(is_plain())
        return x.sum()

    x = torch.randn(3, 4)
    thread = threading.Thread(target=note, args=(x,))
    thread.start()
    thread.join()
    with torch.inference_mode():
        note(x)
    with torch.no_grad():
        note(x)
    note(x)
    assert found == [True] * 4
    found.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        note(x)
    with _Seen():
        note(x)
    torch.vmap(note)(x)
    torch.func.grad(note)(x)
    torch.func.functionalize(note)(x)
    torch.jit.trace(note, x, check_trace=False)
    assert found and not any(found)
    assert is_plain()


def test_without_the_dispatchers_state(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a torch that keeps it elsewhere: each is asked."""
    calls = kernels_module.calls
    assert calls._extension.read_state(None) is False
    try:
        assert not calls._extension.is_plain()
        test_whoever_watches_operators_sees_it(kernels_module)
        test_transforms_get_what_the_operator_gives(kernels_module)
        test_guard(kernels_module)
        test_of_module(kernels_module, monkeypatch)
        assert calls._extension.read_state("/nowhere/libc10.so") is False
    finally:
        calls._read_state(calls._extension)
    assert calls._extension.is_plain()


def test_a_torch_whose_state_does_not_show_it_is_asked(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = kernels_module.calls
    monkeypatch.setattr(calls, "_shows", lambda extension: extension.note_plain())
    try:
        calls._read_state(calls._extension)
        assert not calls._extension.is_plain()
    finally:
        monkeypatch.undo()
        calls._read_state(calls._extension)
    assert calls._extension.is_plain()


def test_subclasses_go_to_the_operator(kernels_module: ModuleType) -> None:
    call, x, w = _rms_norm(kernels_module)
    Logged.seen.clear()
    got = call(x.as_subclass(Logged), w, None)
    assert type(got) is Logged and any("rms_norm" in name for name in Logged.seen)
    assert torch.equal(got.as_subclass(torch.Tensor), call(x, w, None))


def test_errors_are_the_operators(kernels_module: ModuleType) -> None:
    call, x, w = _rms_norm(kernels_module)
    codes = FORMULAS["rms_norm"].encode(BY_ID["rms_norm"].params)
    raw = kernels_module.ops.rms_norm.default
    for bad in (
        (x.double(), w, None), (x, w[:-1], None), (x.to(torch.int32), w, None), (x, w),
        (x, w, None, None), (None, w, None), ("x", w, None), (x, w.bfloat16(), w),
    ):  # fmt: skip
        outcomes = []
        for f in (lambda *t: call(*t), lambda *t: raw(*t, *codes)):
            try:
                outcomes.append(f(*bad))
            except Exception as e:
                outcomes.append((type(e), str(e)))
        assert isinstance(outcomes[0], tuple) and outcomes[0] == outcomes[1]
    with pytest.raises(TypeError):
        call(x=x)


def test_what_bind_refuses(kernels_module: ModuleType) -> None:
    calls = kernels_module.calls
    assert calls.bind("topk", (3,)) is None  # results of another dtype: the operator allocates them
    assert calls.bind("group_norm", (2, 1e-5, 0, 0), into=True) is None
    with pytest.raises(IndexError):
        calls.bind("rms_norm", (1e-6, 0.0))
    with pytest.raises(TypeError, match=r"`codes` of `rms_norm`: expected 3 numbers, got 4"):
        calls.bind("rms_norm", (1e-6, 0.0, 1, 1))
    with pytest.raises(TypeError):
        calls.bind("rms_norm", ("a", 0.0, 1))
    with pytest.raises(AttributeError):
        calls.bind("no_such_op", ())
    for stranger in (len, print, "x", 3, lambda: None):
        with pytest.raises((TypeError, ValueError)):
            calls.guard(stranger, torch.ones(3))


def test_guard(kernels_module: ModuleType) -> None:
    """It takes calls like the one it was made with, and says so of any other."""
    call, x, w = _rms_norm(kernels_module)
    guarded = kernels_module.calls.guard(call, x, w, None)
    expected = call(x, w, None)
    assert torch.equal(guarded(x, w, None), expected)
    assert torch.equal(guarded(x[:1], w, None), expected[:1])  # of any shape
    for other in (
        (x.bfloat16(), w, None), (x, w.bfloat16(), None), (x, None, None), (x, w, w), (x, w),
        (x.as_subclass(Logged), w, None), (object(), w, None), (x, w[:-1], None), (None, w, None),
        (x.to("meta"), w, None),
    ):  # fmt: skip
        assert guarded(*other) is NotImplemented
    assert kernels_module.calls.guard(call, x.bfloat16(), w.bfloat16(), None)(x, w, None) is (
        NotImplemented
    )
    assert kernels_module.calls.guard(call, x.as_subclass(Logged), w, None) is None

    parameter = torch.nn.Parameter(w)
    assert guarded(x, parameter, None) is NotImplemented
    with torch.no_grad():
        assert torch.equal(guarded(x, parameter, None), expected)
    with torch.inference_mode():
        assert torch.equal(guarded(x, parameter, None), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert guarded(x, w, None) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        assert guarded(x, w, None) is NotImplemented
    with Seen() as seen:
        assert guarded(x, w, None) is NotImplemented
    assert seen.names == []


class Norm(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), None
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _of_module(kernels: ModuleType, module: Norm, guarded: Any, in_order: bool = True) -> Any:
    def read(attributes: dict[str, Any]) -> Any:
        return attributes["eps"]

    forward = Norm.forward
    return kernels.calls.of_module(
        guarded, Norm, forward, forward, forward.__code__, read, 1e-6,
        ("weight", "bias"), (True, False), in_order,
    )  # fmt: skip


def test_of_module(kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guarded call of a module's own parameters, for as long as the module is what it was."""
    call, x, w = _rms_norm(kernels_module)
    guarded = kernels_module.calls.guard(call, x, w, None)
    module = Norm(w)
    quick = _of_module(kernels_module, module, guarded)
    expected = call(x, w, None)

    @torch.no_grad()
    def takes(x: Any = x, *more: Any) -> bool:
        y = quick(module, x, *more)
        assert y is NotImplemented or torch.equal(y, call(x, w, None))
        return y is not NotImplemented

    assert takes() and takes(x[:1]) and not takes(x.bfloat16()) and not takes(x, None)
    assert quick(module, x) is NotImplemented  # the weight wants a gradient
    assert quick() is NotImplemented and quick(x, module) is NotImplemented
    for stranger in (None, 3, torch.nn.Parameter(x), x.as_subclass(Logged), x.to_sparse()):
        assert not takes(stranger)
    assert not takes(torch._neg_view(x))
    wide = torch.randn(4, 6, x.shape[-1])
    assert takes(wide) and takes(wide[:, ::2]) and takes(wide[1:2].transpose(0, 1))
    assert takes(wide[:1].expand(4, -1, -1)) and not takes(wide.transpose(0, 1))
    with torch.no_grad():
        in_any_order = _of_module(kernels_module, module, guarded, False)
        swapped = wide.transpose(0, 1)
        assert torch.equal(in_any_order(module, swapped), call(swapped, w, None))

    module.eps = 1e-5
    assert not takes()
    del module.eps  # reading it raises
    assert not takes()
    module.eps = 1e-6
    module.__dict__["weight"] = w  # hides the parameter
    assert not takes()
    del module.__dict__["weight"]
    module.__dict__["bias"] = w  # of a name that the class did not have
    assert takes()
    module._parameters["bias"] = torch.nn.Parameter(w)
    assert not takes()
    module._parameters["bias"] = None
    module._parameters["weight"] = w.clone()  # no parameter
    assert not takes()
    module._parameters["weight"] = torch.nn.Parameter(torch._neg_view(-w))
    assert not takes()
    module._parameters["weight"] = torch.nn.Parameter(w.bfloat16())
    assert not takes()
    del module._parameters["weight"]
    assert not takes()
    module._parameters["weight"] = torch.nn.Parameter(w.clone())
    assert takes()

    class Other(Norm):
        pass

    module.__class__ = Other
    assert not takes()
    module.__class__ = Norm
    with monkeypatch.context() as patch:
        patch.setattr(Norm, "forward", lambda self, x: -x)
        assert not takes()
    with monkeypatch.context() as patch:
        patch.setattr(Norm.forward, "__code__", (lambda self, x: -x).__code__)
        assert not takes()
    with torch.no_grad(), Seen() as seen:
        assert quick(module, x) is NotImplemented
    assert seen.names == [] and takes()
    with torch.no_grad():
        assert torch.equal(quick(module, x), expected)


def test_what_of_module_refuses(kernels_module: ModuleType) -> None:
    call, x, w = _rms_norm(kernels_module)
    of_module = kernels_module.calls._extension.of_module
    guarded = kernels_module.calls.guard(call, x, w, None)
    rest = (Norm, Norm.forward, Norm.forward, Norm.forward.__code__, None, None)
    names: Any
    for first, names, there in (
        (len, ("weight", "bias"), (True, False)),
        (guarded, ["weight", "bias"], (True, False)),
        (guarded, ("weight", "bias"), (True,)),
        (guarded, ("w",) * 40, (True,) * 40),
    ):
        with pytest.raises(TypeError, match="`of_module`: expected what `guard` returned"):
            of_module(first, *rest, names, there, True)
    with pytest.raises(TypeError, match="`of_module`"):
        of_module(guarded)
    # one parameter where the operator takes two: no call is for it
    short = of_module(guarded, *rest, ("weight",), (True,), True)
    with torch.no_grad():
        assert short(Norm(w), x) is NotImplemented


def test_results_are_ordinary_tensors(kernels_module: ModuleType) -> None:
    """They are allocated past the dispatcher, and are what it would have made."""
    call, x, w = _rms_norm(kernels_module)
    codes = FORMULAS["rms_norm"].encode(BY_ID["rms_norm"].params)
    raw = kernels_module.ops.rms_norm.default
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            deep = x[(None,) * 9]
            transposed = x[None, :1].transpose(0, 1)
            for given in (x, x.half(), x[:1], x.bfloat16(), transposed, x[:0], deep, deep, x):
                got, expected = call(given, w, None), raw(given, w, None, *codes)
                assert type(got) is torch.Tensor and not got.requires_grad and got.grad_fn is None
                assert got.is_inference() is expected.is_inference()
                for name in ("shape", "dtype", "device", "layout"):
                    assert getattr(got, name) == getattr(expected, name)
                assert got.stride() == expected.stride() and torch.equal(got, expected)
    call(x, w, None).add_(w).requires_grad_()
    with torch.inference_mode(), pytest.raises(RuntimeError):
        call(x, w, None)._version  # noqa: B018  (inference tensors have none)


def test_memory(kernels_module: ModuleType) -> None:
    """Nothing is kept by a call, a refused one, a bound callable or its copies."""
    call, x, w = _rms_norm(kernels_module)
    guarded = kernels_module.calls.guard(call, x, w, None)
    norm = bind(kernels_module, BY_ID["group_norm"])
    group = ordered(BY_ID["group_norm"], BY_ID["group_norm"].make(torch.float32))
    assert copy.deepcopy(call) is call
    module = Norm(w)

    def work() -> None:
        for _ in range(200):
            call(x, w, None), guarded(x, w, None), guarded(x, None, None), norm(*group)
            with pytest.raises(RuntimeError):
                call(x, w[:-1], None)
            bind(kernels_module, BY_ID["rms_norm"])
            made = kernels_module.calls.guard(call, x, w, None)
            of_module = _of_module(kernels_module, module, made)
            with torch.no_grad():
                of_module(module, x), of_module(module, x.half()), of_module(3, x)

    def count() -> tuple[int, int, int]:
        gc.collect()
        return sys.getrefcount(x), sys.getrefcount(w), len(gc.get_objects())

    work()
    before = proofs.bytes_in_use()
    counted = count()
    grown = []
    for _ in range(3):  # other threads make objects too, though not each time
        for _ in range(5):
            work()
        *references, objects = count()
        assert tuple(references) == counted[:2]
        grown.append(objects - counted[2])
        counted = count()
    assert min(grown) < 50, grown
    assert proofs.bytes_in_use() - before < 100_000


def test_threads_run_side_by_side(kernels_module: ModuleType) -> None:
    """The interpreter's lock is given up for the kernel: another thread runs meanwhile."""
    call = kernels_module.calls.bind("gelu", FORMULAS["gelu"].encode({"approximate": "none"}))
    x = torch.randn(1 << 24)
    go, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1000)  # nobody is made to give it up
        go.set()
        call(x)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


SWITCHED_OFF = """
import torch
from hfpatch.kernels.sources import local_package
package = local_package()
assert package.module.calls.bind("silu", ()) is None
x = torch.randn(3, 8)
kernel = package.kernel("silu")
assert torch.equal(kernel.bind({})(x), kernel.raw(x))
out = torch.empty_like(x)
kernel.bind_into(1, {})(out, x)
assert torch.equal(out, kernel.raw(x))
assert kernel.guard(kernel.bind({}), x) is None
"""
UNKNOWN_TORCH = "import torch; del torch.Tensor.__dlpack_c_exchange_api__\n" + SWITCHED_OFF


#: A torch without inductor's allocators, or with others by their names.
OTHER_ALLOCATORS = """
import sys, torch
guards = torch._C._dynamo.guards
if sys.argv[1] == "none":
    del guards._empty_strided_cpu
else:
    guards._empty_strided_cpu = lambda shape, strides, dtype: torch.empty(shape[::-1], dtype=dtype)
from hfpatch.kernels.sources import local_package
package = local_package()
assert package.module.calls._allocators() == (None, None)
x = torch.randn(3, 8)
kernel = package.kernel("silu")
run = kernel.bind({})
assert type(run).__name__ == "builtin_function_or_method"
assert torch.equal(run(x), kernel.raw(x)) and torch.equal(kernel.guard(run, x)(x), kernel.raw(x))
"""


@pytest.mark.parametrize("which", ["none", "others"])
def test_allocators_that_are_not_known(which: str) -> None:
    subprocess.run([sys.executable, "-c", OTHER_ALLOCATORS, which], check=True)


@pytest.mark.parametrize(
    ("code", "switch"), [(SWITCHED_OFF, "0"), (UNKNOWN_TORCH, "1")], ids=["off", "unknown torch"]
)
def test_without(code: str, switch: str) -> None:
    environment = {**os.environ, "HFPATCH_PYTHON_CALLS": switch}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


TWO_COPIES = """
import shutil, sys, torch
from pathlib import Path
from kernels import get_local_kernel
from hfpatch.kernels.sources import LOCAL_BUILD
copy = Path(sys.argv[1]) / "copy"
shutil.copytree(LOCAL_BUILD, copy)
first, second = get_local_kernel(LOCAL_BUILD), get_local_kernel(copy)
assert first.__file__ != second.__file__
x = torch.randn(3, 8)
a, b = first.calls.bind("silu", ()), second.calls.bind("silu", ())
assert torch.equal(a(x), b(x)) and torch.equal(second.calls.guard(a, x)(x), a(x))
"""


def test_two_copies_of_a_build(tmp_path: Any) -> None:
    """The second must not load its library: the operators are registered already."""
    subprocess.run([sys.executable, "-c", TWO_COPIES, str(tmp_path)], check=True)


# ------------------------------------------------------------------------- lists of tensors


def lists_of(dtype: torch.dtype = torch.float32) -> list[Any]:
    """`scale_grads`' arguments."""
    torch.manual_seed(0)
    grads = [torch.randn(s).to(dtype) for s in ((3, 5), (), (0,), (70,))]
    return [grads, torch.tensor([0.5])]


@OF_DTYPE
def test_lists_get_the_same_bits(dtype: torch.dtype, kernels_module: ModuleType) -> None:
    ours, theirs = lists_of(dtype), lists_of(dtype)
    assert kernels_module.calls.over_lists("scale_grads", *ours) is True
    kernels_module.ops.scale_grads.default(*theirs)
    assert all(map(torch.equal, ours[0], theirs[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[0].append(a[0][0]),
        lambda a: a[0].append(None),
        lambda a: a[0].append(torch.ones(3).double()),
        lambda a: a[0].append(torch.ones(4, 6)[:, ::2]),
        lambda a: a[0].append(torch.ones(2).to_sparse()),
        lambda a: a[0].append(torch.ones(2, device="meta")),
        lambda a: a[0].append(torch.nn.Linear(1, 1).weight.as_subclass(torch.Tensor).expand(2, 1)),
        lambda a: a[0].clear(),
        lambda a: a.__setitem__(0, iter(a[0])),
        lambda a: a.__setitem__(1, None),
        lambda a: a.__setitem__(1, torch.ones(2)),
        lambda a: a.__setitem__(1, 0.5),
        lambda a: a.append(1),
        lambda a: a.pop(),
    ],
)
def test_lists_that_are_refused(change: Any, kernels_module: ModuleType) -> None:
    arguments = lists_of()
    before = [t.clone() for t in arguments[0]]
    tensors = list(arguments[0])
    change(arguments)
    assert not kernels_module.calls.over_lists("scale_grads", *arguments)
    assert all(map(torch.equal, tensors, before))


def test_lists_where_somebody_listens(kernels_module: ModuleType) -> None:
    over = kernels_module.calls.over_lists
    assert over("no_such", *lists_of()) is None
    with torch.profiler.profile():
        assert over("scale_grads", *lists_of()) is None
    arguments = lists_of()
    with torch.utils.flop_counter.FlopCounterMode(display=False):  # a mode of the dispatcher's
        assert over("scale_grads", *arguments) is None
    with pytest.raises(TypeError, match="`name`: expected a string"):
        over(3)


def test_step_counts(kernels_module: ModuleType) -> None:
    count = kernels_module.calls.count
    steps = [torch.tensor(3.0), torch.tensor(0.0)]
    assert count(steps, 1.0) and [float(s) for s in steps] == [4, 1]
    for other in (torch.ones(1), torch.tensor(1), torch.tensor(1.0).double(), None, 2.0):
        assert not count([*steps, other], 1.0)
    assert [float(s) for s in steps] == [4, 1]


def test_a_source_that_is_older_than_of_module(
    kernels_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the Hub, say: its norms are swapped, and their calls look by themselves."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    import hfpatch
    from hfpatch.kernels.sources import local_package

    calls = local_package().kernel("rms_norm").calls
    monkeypatch.delattr(calls, "of_module")
    model = torch.nn.Sequential(LlamaRMSNorm(64)).requires_grad_(False)
    original = copy.deepcopy(model)
    assert len(hfpatch.apply(model).swaps) == 1
    x = torch.randn(3, 64)
    for _ in range(3):
        torch.testing.assert_close(model(x), original(x))
