"""Generated bad calls: the C interface by ctypes in a process of its own, and torch's operators."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from c_api import CONSTANTS, Library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_samples import LIST_SAMPLES, ListSample
from op_samples import DTYPES, FIRST, SAMPLES, Sample
from torch import Tensor

FUZZER = Path(__file__).parent / "fuzz.py"
WIDTH = 16


def fuzz(kernels_dir: Path, folder: Path, *options: str) -> dict[str, int]:
    """The fuzzer's counts; what it was doing when it crashed is in the failure's message."""
    journal = folder / "journal"
    command = [sys.executable, str(FUZZER), str(kernels_dir), str(journal), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode != 0:
        last = journal.read_text(errors="replace").strip() if journal.exists() else "nothing"
        pytest.fail(f"exit status {done.returncode} in: {last}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def test_bad_calls_by_ctypes(kernels_dir: Path, tmp_path: Path) -> None:
    assert fuzz(kernels_dir, tmp_path)["refused"] >= 10_000


# -------------------------------------------------------------------------------------------------
# The same bad input through torch


@pytest.fixture(scope="module")
def library(kernels_module: ModuleType) -> Library:
    (binary,) = Path(kernels_module.__file__).parent.glob("*.so")
    # A copy of the build may have been loaded first, by a test of the Hub: then its library has the
    # operators, and this one must not be loaded beside it. In a Hub's cache its file is a digest,
    # so it is known by the operators' namespace.
    namespace = binary.name.partition(".")[0].encode()
    files = [p for p in torch.ops.loaded_libraries if Path(p).is_file()]
    loaded = [p for p in files if namespace in Path(p).read_bytes()]
    return Library(loaded[0] if loaded else binary)


RETYPED = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64,
    torch.uint8,
]  # fmt: skip


def changes(t: Tensor) -> dict[str, Tensor]:
    """What a torch user may pass instead of `t`, laid out so that torch makes no copy."""
    shape = list(t.shape)
    made = {str(dtype): t.to(dtype) for dtype in RETYPED}
    for i in range(t.dim()):
        for size in {0, 1, shape[i] + 1}:
            other = [*shape[:i], size, *shape[i + 1 :]]
            made[f"shape {other}"] = t.new_ones(other)
    made["a number"] = t.new_ones(())
    made["a dimension more"] = t[None].clone()
    made["a dimension less"] = t[0].clone() if t.shape[0] else t
    made["sliced"] = t.new_ones(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]
    if t.is_cuda:
        made["on the CPU"] = t.cpu()
    return made


NUMBERS: dict[str, list[Any]] = {
    "float": [math.nan, math.inf, -math.inf, -1.0, 0.5, 2.0, 1e300],
    "int": [-(2**63), -2, -1, 0, 1, 2, 3, 5, 2**31, 2**63 - 1],
}


def error_of(call: Any) -> str | None:
    try:
        call()
    except RuntimeError as e:
        return str(e)
    return None


def say_the_same(
    data: st.DataObject, library: Library, kernels_module: ModuleType, device: str
) -> None:
    """The same arguments, good or bad: the same message, or the same bits in the results."""
    sample: Sample = data.draw(st.sampled_from(SAMPLES))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = sample.make(dtype, 3, WIDTH, device)
    inputs = list(sample.arguments(tensors, WIDTH))
    outs = [torch.full_like(e, 5) for e in sample.call_all(kernels_module, tensors, WIDTH)]
    kinds = ["Tensor"] * len(outs) + [kind for kind, _ in sample.schema.arguments]
    given_ = [*outs, *inputs]
    for at in data.draw(st.lists(st.integers(0, len(given_) - 1), min_size=1, max_size=3)):
        value = given_[at]
        if isinstance(value, Tensor):
            made = changes(value) if value.dim() and value.numel() else {"itself": value}
            given_[at] = made[data.draw(st.sampled_from(sorted(made)))]
        elif kinds[at] in NUMBERS:
            given_[at] = data.draw(st.sampled_from(NUMBERS[kinds[at]]))
    count = len(outs)
    twice = [[*(o.clone() for o in given_[:count]), *given_[count:]] for _ in range(2)]
    # A clone is dense; a sliced result has to stay one.
    for arguments in twice:
        for i, out in enumerate(given_[:count]):
            if not out.is_contiguous():
                arguments[i] = out
    status = library.status(sample.op, *twice[0])
    by_ctypes = library.last_error() if status != CONSTANTS["HFP_OK"] else None
    operator = getattr(kernels_module.ops, sample.op + "_out").default
    by_torch = error_of(lambda: operator(*twice[1]))
    assert by_torch == by_ctypes
    if by_ctypes is None:
        pairs = zip(sample.meant(twice[0][:count]), sample.meant(twice[1][:count]), strict=True)
        for a, b in pairs:
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    elif any(f"`{name}`" in by_ctypes.split(" must ")[0] for _, name in sample.schema.arguments):
        # Of an argument, the operator that allocates its results says the same.
        functional = getattr(kernels_module.ops, sample.op).default
        message = error_of(lambda: functional(*given_[count:]))
        assert message == by_ctypes


#: Bytes for a tensor of a list, the largest of which has 24 elements.
_ROOM = 512


def say_the_same_of_lists(
    data: st.DataObject, library: Library, kernels_module: ModuleType, device: str
) -> None:
    sample: ListSample = data.draw(st.sampled_from(LIST_SAMPLES))
    dtype = data.draw(st.sampled_from(list(sample.dtypes)))
    inputs = list(sample.arguments(sample.make(dtype, device, ((3, 8), (), (5,)))))
    outs = [torch.zeros((), device=device), torch.zeros(3, device=device)]
    outs = outs[: sample.schema.outputs]
    kinds = ["Tensor"] * len(outs) + [kind for kind, _ in sample.schema.arguments]
    given_: list[Any] = [*outs, *inputs]
    flat = [t for v in given_ for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]

    def other(value: Tensor) -> Tensor:
        made = changes(value) if value.dim() else {"two": value.new_ones(2), "wide": value.double()}
        alike = [t for t in flat if t.shape == value.shape]
        made["shared"] = data.draw(st.sampled_from(alike or [value]))
        return made[data.draw(st.sampled_from(sorted(made)))]

    for at in data.draw(st.lists(st.integers(0, len(given_) - 1), min_size=1, max_size=3)):
        value = given_[at]
        if isinstance(value, Tensor):
            given_[at] = other(value)
        elif kinds[at] in NUMBERS:
            given_[at] = data.draw(st.sampled_from(NUMBERS[kinds[at]]))
        elif isinstance(value, list) and len(value) > 1:
            which = data.draw(st.integers(-1, len(value) - 1))  # -1: the list gets shorter
            given_[at] = value[:-1] if which < 0 else list(value)
            if which >= 0:
                given_[at][which] = other(value[which])

    def copied(value: Any, room: Tensor, clones: dict[int, Tensor]) -> Any:
        if isinstance(value, list):
            return [copied(v, room, clones) for v in value]
        # A copy is dense; a sliced tensor has to stay one, and is refused.
        if not isinstance(value, Tensor) or not value.is_contiguous():
            return value
        if id(value) not in clones:
            # In one order in memory: of several that overlap the first one there is named.
            start, size = len(clones) * _ROOM, value.numel() * value.element_size()
            place = room[start : start + size].view(value.dtype).view(value.shape)
            clones[id(value)] = place.copy_(value)
        return clones[id(value)]

    rooms = [torch.zeros(64 * _ROOM, dtype=torch.uint8, device=device) for _ in range(2)]
    by_c, by_operator = (copied(given_, room, {}) for room in rooms)
    status = library.status(sample.op, *by_c)
    by_ctypes = library.last_error() if status != CONSTANTS["HFP_OK"] else None
    operator = getattr(kernels_module.ops, sample.op + "_out" * bool(outs)).default
    by_torch = error_of(lambda: operator(*by_operator))
    assert by_torch == by_ctypes
    if by_ctypes is None:
        for a, b in zip(by_c, by_operator, strict=True):
            for x, y in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
                assert not isinstance(x, Tensor) or torch.equal(x.nan_to_num(7), y.nan_to_num(7))


ROUNDS = settings(
    max_examples=1200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("says_the_same", [say_the_same, say_the_same_of_lists])
@ROUNDS
@given(data=st.data())
def test_torch_and_ctypes_say_the_same(
    data: st.DataObject, says_the_same: Any, library: Library, kernels_module: ModuleType
) -> None:
    says_the_same(data, library, kernels_module, "cpu")


@pytest.mark.parametrize("sample", FIRST.values(), ids=lambda s: s.id)
def test_none_for_a_tensor_is_named(sample: Sample, kernels_module: ModuleType) -> None:
    """As by ctypes; where all tensors are None, torch's dispatcher answers."""
    tensors = sample.make(torch.float32)
    arguments = list(sample.arguments(tensors))
    outs = sample.call_all(kernels_module, tensors)
    functional = getattr(kernels_module.ops, sample.op).default
    out_form = getattr(kernels_module.ops, sample.op + "_out").default
    for i, (kind, name) in enumerate(sample.schema.arguments):
        if kind == "Tensor":
            changed = [*arguments[:i], None, *arguments[i + 1 :]]
            expected = f"hfp_{sample.op}: `{name}` must be a tensor, got NULL"
            assert error_of(lambda c=changed: out_form(*outs, *c)) == expected
            if len(tensors) > 1:
                assert error_of(lambda c=changed: functional(*c)) == expected
    without = [None, *outs[1:]]
    message = error_of(lambda: out_form(*without, *arguments))
    assert message == f"hfp_{sample.op}: `out` must be a tensor, got NULL"
