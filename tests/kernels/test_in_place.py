"""In-place operators, and which overlaps the C interface takes."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import HEADER, KernelError
from op_samples import FIRST
from test_c_api import (
    built,  # noqa: F401  (fixtures, as is `lib`)
    lib,  # noqa: F401
)
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_TABLE = HEADER.read_text().split("#define HFP_IN_PLACE_TABLE(X)", 1)[1].split("/*")[0]
IN_PLACE = re.findall(r'X\((\w+), "[^"]+"\)', _TABLE)


def replaced(name: str) -> list[int]:
    """Positions of the arguments that a result replaces, in the results' order."""
    return [0, 1] if name in ("add_rms_norm", "add_layer_norm", "rope_qk", "qk_norm_rope") else [0]


def operator(package: ModuleType, name: str) -> Any:
    return getattr(package.ops, name).default


def fresh(name: str, dtype: torch.dtype) -> list[Any]:
    sample = FIRST[name]
    return list(sample.arguments(sample.make(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_the_functional_one(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    args = fresh(name, dtype)
    expected = FIRST[name].call_all(kernels_module, FIRST[name].make(dtype))
    assert operator(kernels_module, name + "_")(*args) is None
    for position, e in zip(replaced(name), expected, strict=True):
        assert torch.equal(args[position], e)
    torch.library.opcheck(operator(kernels_module, name + "_"), tuple(fresh(name, dtype)))


CALLS: dict[str, Any] = {
    "rms_norm_": lambda k, x, w: k.rms_norm_(x, w, None, 1e-6, 0.0, "input"),
    "layer_norm_": lambda k, x, w: k.layer_norm_(x, w, w),
    "gelu_": lambda k, x, w: k.gelu_(x, "tanh"),
    "silu_": lambda k, x, w: k.silu_(x),
    "add_gelu_": lambda k, x, w: k.add_gelu_(x, w, "sigmoid"),
    "add_silu_": lambda k, x, w: k.add_silu_(x, w),
    "mul_add_": lambda k, x, w: k.mul_add_(x, w, w),
    "gate_residual_": lambda k, x, w: k.gate_residual_(x, w, x * 2),
    "add_rms_norm_": lambda k, x, w: k.add_rms_norm_(x, x * 2, w)[0],
    "add_layer_norm_": lambda k, x, w: k.add_layer_norm_(x, x * 2, w)[0],
    "rope_": lambda k, x, w: k.rope_(x, *TABLES),
    "rope_qk_": lambda k, x, w: k.rope_qk_(x, x * 2, *TABLES)[0],
    "qk_norm_rope_": lambda k, x, w: k.qk_norm_rope_(x, x * 2, w, w, *TABLES)[0],
}
TABLES = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(5))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_calls_cover_the_table() -> None:
    assert {name.removesuffix("_") for name in CALLS} == set(IN_PLACE)


@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str, kernels_module: ModuleType) -> None:
    """The input is returned, holds what the functional one gives, and autograd sees the write."""

    class Functional:
        def __getattr__(self, called: str) -> Any:
            return getattr(kernels_module, called.removesuffix("_"))

    w = draw(16).abs()
    x = draw(2, 3, 16)
    expected = CALLS[name](Functional(), x.clone(), w)
    before = x._version
    result = CALLS[name](kernels_module, x, w)
    assert result is x and x._version > before
    torch.testing.assert_close(x, expected, rtol=0, atol=0)

    torch._dynamo.reset()
    again = draw(2, 3, 16)
    compiled = torch.compile(
        lambda t: CALLS[name](kernels_module, t, w), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(again), expected, rtol=0, atol=0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_refused(name: str, kernels_module: ModuleType) -> None:
    x, w = draw(2, 3, 16), draw(16).abs()
    asked = f"`{name}`: expected tensors that need no gradient, got"
    with pytest.raises(RuntimeError, match=asked):
        CALLS[name](kernels_module, (x * 1).requires_grad_(), w)
    assert torch.equal(x, draw(2, 3, 16))
    with torch.no_grad():
        CALLS[name](kernels_module, x.requires_grad_(), w)
    with torch.inference_mode():
        CALLS[name](kernels_module, draw(2, 3, 16), w)


def test_a_saved_tensor_that_was_written_over_is_noticed(kernels_module: ModuleType) -> None:
    weight, x = draw(16).requires_grad_(), draw(2, 16)
    y = (x * weight).sum()  # saves x
    kernels_module.silu_(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_in_views_of_a_packed_buffer(kernels_module: ModuleType) -> None:
    packed = draw(2, 3, 3 * 4 * 16)
    before = packed.clone()
    q, k, _ = (t.unflatten(-1, (4, 16)) for t in packed.chunk(3, -1))
    expected = kernels_module.rope_qk(q, k, *TABLES)
    assert kernels_module.rope_qk_(q, k, *TABLES)[0] is q
    assert all(map(torch.equal, (q, k), expected))
    assert torch.equal(packed[..., -64:], before[..., -64:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.silu_(draw(4, 8).t()), r"`x` must have stride 1.*in place: the result is `x`"),
        (lambda k: k.silu_(draw(4, 8)[:, :4]), r"`out` must be contiguous.*in place"),
        (
            lambda k: k.rms_norm_(draw(4, 8).half(), draw(8), cast="weight"),
            r"`out` must be float32, got float16.*in place",
        ),
        (lambda k: k.rope_(draw(1, 3, 16).expand(2, -1, -1), *TABLES), r"must not repeat elements"),
        (lambda k: k.rope_qk_(*[draw(2, 3, 16)] * 2, *TABLES), r"`q_out` must not overlap `k`"),
    ],
)
def test_what_cannot_be_written_over(call: Any, message: str, kernels_module: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(kernels_module)


# --- overlaps ---------------------------------------------------------------------------------


def memory(*shape: int) -> Tensor:
    return torch.ones(*shape)


def overlapping() -> list[tuple[str, tuple[Any, ...], str | None]]:
    """(op, arguments, the message or None where the call is fine)."""
    m, w = memory(20, 8), memory(8)
    rows, late = m[:16], m[1:17]
    packed = memory(6, 3, 24)
    q, k = packed[..., :8], packed[..., 8:16]
    tables = torch.ones(2, 3, 4)
    part = "must be exactly the view `x` \\(in place\\) or not overlap it"
    return [
        ("silu", (rows, rows), None),
        ("silu", (rows, late), part),
        ("silu", (late, rows), part),
        ("silu", (m[:8], m[8:16]), None),
        ("silu", (m[:4], m[2::3][:4]), part),
        ("silu", (m[1:3], m[0:6:5]), None),  # between two rows
        ("silu", (m.view(-1)[4:12].view(1, 8), m[0:1]), part),
        ("silu", (m.view(-1)[64:128].view(8, 8), m.view(10, 16)[:8, :8]), part),
        ("gated", (rows, rows, m[4:20], 3), "must be exactly the view `up`"),
        ("gated", (rows, memory(16, 8), rows, 3), None),
        ("rms_norm", (m[:1].view(8), m[1], m[0], None, 1e-6, 0.0, 1), "`out` must not overlap `w"),
        ("mul_add", (rows, memory(16, 8), rows, w, 1), "`out` must not overlap `b`"),
        ("mul_add", (rows, rows, w, w, 1), None),
        ("add_rms_norm", (rows, rows, memory(16, 8), memory(16, 8), None, None, 1e-6, 0.0, 0),
         "`out` must not overlap `sum`"),
        ("add_layer_norm", (rows, memory(16, 8), memory(16, 8), rows, None, None, 1e-6), None),
        ("rope_qk", (q, k, q, k, *tables, 1, 0, 0, 0), None),
        ("rope_qk", (k, q, q, k, *tables, 1, 0, 0, 0), "`q_out` must not overlap `k`"),
        ("rope_qk", (packed[..., 2:10], packed[..., 16:], q, k, *tables, 1, 0, 0, 0),
         "must be exactly the view `q`"),
        ("rope_qk", (packed[:4, :, :8], packed[:4, :, 8:16], packed[2:, :, :8], packed[2:, :, 8:16],
                     *tables, 1, 0, 0, 0), "must be exactly the view `q`"),
        ("gated_packed", (m.view(-1)[:80].view(10, 8), m.view(10, 16), 3, 1), "exactly the view"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(len(overlapping())))
def test_overlaps(lib, case):
    name, args, message = overlapping()[case]
    if message is None:
        lib.call(name, *args)
    else:
        with pytest.raises(KernelError, match=message):
            lib.call(name, *args)


def test_overlap_agrees_with_a_count_of_bytes(lib):
    """Random pairs of views of one buffer: refused exactly if they share an element, where the
    result is dense."""
    generator = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    refused = 0
    for _ in range(400):
        base = torch.zeros(600)
        sizes = (pick(1, 4), pick(1, 4), pick(1, 6))
        inner = sizes[2] + pick(0, 4)
        outer = sizes[1] * inner + pick(0, 9)
        x = base.as_strided(sizes, (outer, inner, 1), pick(0, 100))
        if pick(0, 2):
            x = x.transpose(0, 1)
        out = base.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1), pick(0, 150))
        numbers = torch.arange(600.0)
        ours, theirs = (
            set(numbers.as_strided(t.shape, t.stride(), t.storage_offset()).reshape(-1).tolist())
            for t in (out, x)
        )
        same = out.data_ptr() == x.data_ptr() and all(
            n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), out.stride(), strict=True)
        )
        if ours & theirs and not same:
            refused += 1
            with pytest.raises(KernelError, match="must be exactly the view"):
                lib.call("silu", out, x)
        else:
            lib.call("silu", out, x)
    assert 50 < refused < 350
