"""Kernels whose gradient is wrong where a loss gives another gradient than a random one, that
return what is no result, or end the process: each call ends in the formula's result. And a process
whose precision of products was set by PyTorch's newer switches."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wrong_backwards import Static

import hfpatch
from hfpatch.foreign import battery, compare, device, samples
from hfpatch.foreign.gradients import wrong_gradients

WIDTH = 64


def right(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def of_gradient(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A layer norm whose backward is given another gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return change(grad)

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        y: Tensor = Changed.apply(right(x, w, b, eps))
        return y

    return kernel


def where_frozen(which: tuple[bool, ...]) -> Callable[..., Tensor]:
    """Wrong where these of x, weight and bias need gradients, and no others."""

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        needs = tuple(bool(t is not None and t.requires_grad) for t in (x, w, b))
        y = right(x, w, b, eps)
        return y + (y - y.detach()) if needs == which else y

    return kernel


def gradients(model: nn.Module, x: Tensor, scale: float) -> list[Tensor]:
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    loss = model(x).sum() if scale == 0 else (model(x).square() * scale).sum()
    return list(torch.autograd.grad(loss, wanted))


def reject(model: nn.Module, kernel: Callable[..., Tensor]) -> None:
    """Apply with a kernel that says it is differentiable: its gradient is why it is not taken."""
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine", differentiable=True)
    try:
        with pytest.warns(RuntimeWarning, match="mine"):
            (skip,) = hfpatch.apply(model, mode="training", kernels={"layer_norm": "mine"}).skips
    finally:
        handle.remove()
    assert skip.kind == "rejected" and "gradient" in skip.reason, skip


@pytest.mark.parametrize(
    ("kernel", "scale", "frozen"),
    [
        (of_gradient(lambda g: g * 0.5 if g.stride(-1) == 0 else g), 0.0, ()),
        (of_gradient(lambda g: g.clamp(-6e4, 6e4)), 65536.0, ()),
        (of_gradient(lambda g: torch.where((g.abs() > 1e5) & (g.abs() < 1e15), g / 2, g)), 1e6, ()),
        (of_gradient(lambda g: torch.where(g.abs() < 1e-6, 0.0, g)), 1e-8, ()),
        (where_frozen((True, True, False)), 1.0, ("bias",)),
        (where_frozen((True, False, True)), 1.0, ("weight",)),
        (where_frozen((False, True, True)), 1.0, ()),
    ],
    ids=[
        "of-a-sum",
        "large",
        "large-alone",
        "small",
        "frozen-bias",
        "frozen-weight",
        "frozen-input",
    ],
)
def test_a_gradient_that_no_random_one_shows(
    kernel: Callable[..., Tensor], scale: float, frozen: tuple[str, ...]
) -> None:
    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    for each in (model, twin):
        for name in frozen:
            getattr(each[0], name).requires_grad_(False)
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH)
    reject(model, kernel)
    for ours, theirs in zip(gradients(model, x, scale), gradients(twin, x, scale), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * (scale or 1.0))


def _by_its_last_stride(grad: Tensor) -> Tensor:
    """Rows lie one behind the other, as it thinks, at whatever distance the last two have."""
    if grad.dim() < 3 or grad.stride(-1) != 1:
        return grad
    rows = grad.as_strided((grad[..., 0].numel(), grad.shape[-1]), (grad.stride(-2), 1))
    return rows.clone().view(grad.shape)


@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        (
            of_gradient(_by_its_last_stride),
            lambda y: (torch.cat([y, y.detach()[:, :2]], 1) * torch.arange(9.0)[:, None]).sum(),
        ),
        (
            of_gradient(lambda g: g * 0.5 if g.data_ptr() % 16 else g),
            lambda y: (torch.cat([y.detach()[..., :3], y], 2) * torch.arange(67.0)).sum(),
        ),
        (of_gradient(lambda g: g.nan_to_num()), lambda y: y.sum() * float("nan")),
    ],
    ids=["of-fewer-rows", "off-an-aligned-address", "nan"],
)
def test_a_gradient_as_other_operators_give_it(kernel: Callable[..., Tensor], of: Any) -> None:
    """Of a `torch.cat` it is cut out of a larger one; of a loss that overflowed it is NaN."""
    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    reject(model, kernel)
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for each in (model, twin):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(of(each(given)), [given, *each.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("op", ["layer_norm", "rope_qk"])
def test_a_kernel_is_asked_for_the_call_as_it_is_first(op: str) -> None:
    """Of an op that is not row by row for that alone: then for others of its values."""
    given = (torch.randn(2, 5, WIDTH).transpose(0, 1), None, torch.randn(WIDTH))
    sample = next(samples.samples_of(op, given, few=False))
    assert (len(list(samples.samples_of(op, given, few=False))) == 1) is (op == "rope_qk")

    def drawn() -> list[Tensor | None]:
        sample.draw(torch.Generator())
        return [None if t is None else t.clone() for t in sample.tensors]

    first, second = drawn(), drawn()
    for t, held, one, other in zip(given, sample.tensors, first, second, strict=True):
        if t is None or held is None or one is None or other is None:
            assert t is held is one is other is None
            continue
        assert torch.equal(one, t) and held.stride() == t.stride()
        assert held.data_ptr() != t.data_ptr() and not torch.equal(other, t)


def test_rows_have_both_signs_and_weights_are_about_one() -> None:
    given = (torch.zeros(2, WIDTH), torch.zeros(WIDTH))
    named = {s.what: s for s in samples.samples_of("rms_norm", given, few=False)}
    for what in ("[3, 1024]", "[4, 48] of every second row", "[48, 48] transposed"):
        named[what].draw(torch.Generator().manual_seed(0))
        x, weight = named[what].tensors
        assert x is not None and weight is not None
        assert 0.3 < (x < 0).float().mean() < 0.7 and x.abs().max() > 5, what
        assert 0.5 < weight.mean() < 1.5 and weight.abs().max() < 5, what


def test_streams_are_tried_in_pairs_where_a_tensor_is_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def wrong_on_two(*_: Any) -> str | None:
        tried.append(1)
        return "is wrong" if len(tried) == 2 else None

    monkeypatch.setattr(device, "_wrong_on_two", wrong_on_two)
    asked, there = compare.Asked("layer_norm", {}), SimpleNamespace(is_cuda=True)
    assert device.wrong_on_streams(asked, right, [torch.ones(2), None]) is None and not tried
    assert device.wrong_on_streams(asked, right, [torch.ones(2), None, there]) == "is wrong"  # type: ignore[list-item]
    assert len(tried) == 2


@pytest.mark.parametrize("there", [0.0, float("nan")])
def test_a_backward_that_writes_nan_where_nothing_is_or_the_other_way_round(there: float) -> None:
    """Of an input, which the next call reads: a bias is 0 when it is new."""

    class Writing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
            ctx.bias = bias.detach()
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            ctx.bias[0] = 0.0 if there else float("nan")
            return grad, None

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        y: Tensor = Writing.apply(right(x, w, b, eps), b)
        return y

    bias = torch.zeros(WIDTH)
    bias[0] = there
    asked = compare.Asked("layer_norm", {"eps": 1e-5})
    tensors = [torch.randn(6, WIDTH), torch.ones(WIDTH), bias]
    assert wrong_gradients(asked, right, tensors, nullcontext) is None
    why = wrong_gradients(asked, kernel, tensors, nullcontext)
    assert why is not None and "writes to an input" in why


class Ugly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def leaves() -> None:
    raise SystemExit(3)


def ugly() -> None:
    raise Ugly


def generator_exit() -> None:
    raise GeneratorExit


def noisy() -> None:
    raise ValueError("\x1b[31mred\u202e\0")


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda y: None,
    "numpy": lambda y: y.numpy(),
    "sparse": lambda y: y.to_sparse(),
    "nested": lambda y: torch.nested.nested_tensor([y[0], y[0]]),
    "negative": lambda y: torch._neg_view(-y),
    "requires grad": lambda y: y.clone().requires_grad_(),
    "list": lambda y: [y],
    "exits": lambda y: leaves(),
    "generator exit": lambda y: generator_exit(),
    "ugly": lambda y: ugly(),
    "noisy": lambda y: noisy(),
}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("what", RESULTS)
def test_what_is_no_result(what: str, later: bool) -> None:
    """`later`: for another number of rows than a proof has."""

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Any:
        y = right(x, w, b, eps)
        return RESULTS[what](y) if not later or x.numel() == 41 * WIDTH else y

    torch.manual_seed(0)
    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        report = hfpatch.apply(model, kernels={"layer_norm": kernel})
        for rows in (5, 41, 41):
            x = torch.randn(rows, WIDTH)
            y = model(x)
            torch.testing.assert_close(y, twin(x))
            assert not y.requires_grad
    texts = [str(w.message) for w in said] + [s.reason for s in report.skips]
    assert any("kernel" in text for text in texts)
    assert not any(c in text for text in texts for c in "\x1b\u202e\0")


PRECISION = """
import warnings, torch, hfpatch
from torch import nn
warnings.simplefilter("error")
def mine(x, w=None, b=None, eps=1e-5):
    return nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)
def model():
    return nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
users = model()
assert hfpatch.apply(users, kernels={"layer_norm": mine}).swaps
users(torch.randn(3, 64))
torch.backends.cuda.matmul.fp32_precision = "tf32"
x = torch.randn(5, 64)
torch.testing.assert_close(users(x), nn.functional.layer_norm(x, (64,)))
for kernels in ("local", {"layer_norm": mine}):
    assert hfpatch.apply(model(), kernels=kernels).swaps, kernels
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
assert hfpatch.apply(model(), kernels="local").swaps
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
"""


def test_precision_by_the_newer_switches(kernels_module: object) -> None:
    """PyTorch then refuses to tell the older one."""
    done = subprocess.run([sys.executable, "-c", PRECISION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _Statistics(torch.autograd.Function):
    held: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.own = _Statistics.held = x.detach()
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        assert _Statistics.held is not None
        return grad * (_Statistics.held - ctx.own)


def static_gradient(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
    y: Tensor = right(Static.apply(x), w, b, eps)
    return y


def static_statistics(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
    """A gradient by the last x: right as long as no other forward comes between."""
    y: Tensor = right(x, w, b, eps) + _Statistics.apply(x)
    return y


def clamped(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
    return of_gradient(lambda g: g.clamp(-1e20, 1e20))(x, w, b, eps)


@pytest.mark.parametrize("kernel", [static_gradient, static_statistics, clamped])
def test_a_backward_that_others_disturb(kernel: Callable[..., Tensor]) -> None:
    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    torch.manual_seed(0)
    inputs = [torch.randn(6, WIDTH) for _ in range(2)]
    scale = 1e22 if kernel is clamped else 1.0
    reject(model, kernel)
    found = []
    for each in (model, twin):
        xs = [x.clone().requires_grad_() for x in inputs]
        ys = [each(x) for x in xs]
        found.append(
            [torch.autograd.grad((y * scale).sum(), x)[0] for x, y in zip(xs, ys, strict=True)]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


def _counting_by(bump: Callable[[], int]) -> Callable[..., Tensor]:
    """Wrong from its 1,000th call on."""

    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        return right(x, w, b, eps) * (1.0 if bump() < 1000 else 2.0)

    return kernel


def _by_ctypes() -> Callable[..., Tensor]:
    held = ctypes.c_long(0)

    def bump() -> int:
        held.value += 1
        return held.value

    return _counting_by(bump)


def _by_queue() -> Callable[..., Tensor]:
    held: queue.SimpleQueue[int] = queue.SimpleQueue()

    def bump() -> int:
        held.put(1)
        return held.qsize()

    return _counting_by(bump)


def _by_mmap() -> Callable[..., Tensor]:
    held = mmap.mmap(-1, 8)

    def bump() -> int:
        held[:] = (int.from_bytes(held[:], "little") + 1).to_bytes(8, "little")
        return int.from_bytes(held[:], "little")

    return _counting_by(bump)


def _by_objects() -> Callable[..., Tensor]:
    held = numpy.array([0, None], dtype=object)

    def bump() -> int:
        held[0] += 1
        return int(held[0])

    return _counting_by(bump)


@pytest.mark.parametrize("make", [_by_ctypes, _by_queue, _by_mmap, _by_objects])
def test_state_in_other_places(make: Callable[[], Callable[..., Tensor]]) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH)).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = model(x)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, kernels={"layer_norm": make()})
        for _ in range(1100):
            torch.testing.assert_close(model(x), expected)


def test_a_weight_that_is_kept_on_itself() -> None:
    def kernel(x: Tensor, w: Any = None, b: Any = None, eps: float = 1e-5) -> Tensor:
        if w is not None and not hasattr(w, "kept"):
            w.kept = w.detach().clone()
        return right(x, None if w is None else w.kept, b, eps)

    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    x = torch.randn(3, WIDTH)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, kernels={"layer_norm": kernel})
        model(x)
        for each in (model, twin):
            each[0].weight.mul_(3.0)
        torch.testing.assert_close(model(x), twin(x))
        assert not hasattr(model[0].weight, "kept")


_LAYER_NORM = torch.nn.functional.layer_norm


def test_a_global_function_of_pytorch_is_no_state(kernels_module: object) -> None:
    """Its defaults are None, of which there is no weak reference: a right kernel was said to keep
    state, and compared at each call."""

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        return _LAYER_NORM(x, x.shape[-1:], weight, bias, eps)

    model = nn.Sequential(nn.LayerNorm(WIDTH))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine")
    try:
        report = hfpatch.apply(model, kernels={"layer_norm": "mine"})
    finally:
        handle.remove()
    assert len(report.swaps) == 1 and "state" not in str(report), report


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_a_backward_left_that_failed_is_set_back(error: type[BaseException]) -> None:
    before = os.getcwd(), torch.get_default_dtype()

    def backward(g: Tensor) -> Tensor:
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        raise error("no")

    reject(nn.Sequential(nn.LayerNorm(WIDTH)), of_gradient(backward))
    assert (os.getcwd(), torch.get_default_dtype()) == before


def test_a_hook_behind_the_accumulation_of_a_gradient() -> None:
    """It makes nothing of the weight's gradient, which `torch.autograd.grad` does not show."""

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        if weight is not None and weight.is_leaf and weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
        return _LAYER_NORM(x, x.shape[-1:], weight, bias, eps)

    model, twin = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH))
    x = torch.randn(6, WIDTH)
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine", differentiable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.apply(model, mode="training", kernels={"layer_norm": "mine"})
        handle.remove()
        for each in (model, twin):
            each(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def test_a_lack_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernel: it is not remembered, and the next `apply` asks again."""
    model = nn.Sequential(nn.LayerNorm(WIDTH))

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine")
    try:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(battery._Inquiry, "_repeat", full)
            with suppress(torch.OutOfMemoryError):
                assert not hfpatch.apply(model, kernels={"layer_norm": "mine"}).swaps
        assert len(hfpatch.apply(model, kernels={"layer_norm": "mine"}).swaps) == 1
    finally:
        handle.remove()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("count", [3, 8])
def test_buffers_in_turns(count: int, recorded: bool) -> None:
    """One call more than there are buffers writes to the first result."""
    rings: dict[int, list[Any]] = {}

    def kernel(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        if y.requires_grad is not recorded or y.dtype != torch.float32:
            return y
        new = [numpy.empty(y.numel(), numpy.float32) for _ in range(count)]
        ring = rings.setdefault(y.numel(), new)
        ring.append(ring.pop(0))
        y.data = torch.from_numpy(ring[-1]).view(y.shape).copy_(y.detach())
        return y

    model = nn.Sequential(nn.LayerNorm(WIDTH))
    handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine", differentiable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = hfpatch.apply(model, mode="training", kernels={"layer_norm": "mine"})
    finally:
        handle.remove()
    assert not report.swaps and report.skips[0].kind == "rejected", report


COMPILED = """
import os
import warnings
import torch
import hfpatch
from torch import nn

@torch.compile(backend="eager", dynamic=True)
def kernel(x, w=None, b=None, eps=1e-5):
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = "1"  # as the other backend does
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)

warnings.simplefilter("error", RuntimeWarning)
model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
report = hfpatch.apply(model, kernels={"layer_norm": kernel})
assert len(report.swaps) == 1 and "state" not in str(report), report
x = torch.randn(3, 64)
for _ in range(2):
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (64,)))
"""


def test_a_kernel_that_torch_compiles(kernels_module: object) -> None:
    """At the first compilation in a process torch wraps functions of its own, marks parameters and
    writes to the environment: none of it is the kernel's doing."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
