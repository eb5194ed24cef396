"""Bad calls made from the table of samples, against the C interface by ctypes.

`python fuzz.py KERNELS JOURNAL [--device cuda]` runs in a process of its own, so that a crash is a
failing test: before each call the journal says which. Every argument of every sample is made bad
in every way of `TENSOR_FAULTS` and of `NUMBER_FAULTS` in turn; then hypothesis combines several. A
new op is covered by its row in the table of samples.

Memory: tensors lie in the middle of larger buffers, and no fault that a call may accept reaches
beyond those; what would (huge shapes and strides) must be refused because it overflows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from c_api import CONSTANTS, DLDataType, DLDevice, DLTensor, Library, dltensor, int64_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_samples import DTYPES, SAMPLES, Sample

OK, INVALID = CONSTANTS["HFP_OK"], CONSTANTS["HFP_INVALID_ARGUMENT"]
MARGIN, WIDTH, BATCH = 8192, 16, 3
LOW, HIGH = -(2**63), 2**63 - 1
#: Integers that may have any value.
FREE_INTEGERS = {"ignore_index", "top_k"}


class Placed:
    """A tensor in the middle of a buffer of zeros, and its DLTensor."""

    def __init__(self, values: torch.Tensor) -> None:
        size = values.numel() * values.element_size()
        self.buffer = torch.zeros(size + 2 * MARGIN, dtype=torch.uint8, device=values.device)
        middle = self.buffer[MARGIN : MARGIN + size]
        self.tensor = middle.view(values.dtype).view(values.shape).copy_(values)

    def view(self) -> DLTensor:
        t = dltensor(self.tensor)
        t.data = self.buffer.data_ptr() + MARGIN  # torch has no address for zero elements
        return t


@dataclass(frozen=True)
class Fault:
    """`apply(t, i)` changes a DLTensor, `i` a dimension; True: the call must then be refused."""

    name: str
    apply: Callable[[DLTensor, int], bool]
    per_dimension: bool = False


def _set(t: DLTensor, **fields: Any) -> bool:
    for name, value in fields.items():
        setattr(t, name, value)
    return True


def _retype(code: int, bits: int, lanes: int = 1) -> Callable[[DLTensor, int], bool]:
    def apply(t: DLTensor, _: int) -> bool:
        same = (t.dtype.code, t.dtype.bits) == (code, bits) and lanes == 1
        accepted = lanes == 1 and (code, bits) in ((2, 32), (2, 16), (4, 16))
        integer = t.dtype.code == 0
        t.dtype = DLDataType(code, bits, lanes)
        return not same and (integer or not accepted)

    return apply


def _resize(change: Callable[[int], int], must: bool = True) -> Callable[[DLTensor, int], bool]:
    def apply(t: DLTensor, i: int) -> bool:
        shape = list(t.shape[: t.ndim])
        before, shape[i] = shape[i], change(shape[i])
        t.shape = int64_array(shape)
        t.strides = None
        return must and shape[i] != before

    return apply


def _restride(change: Callable[[int], int], must: Callable[[DLTensor, int], bool]) -> Any:
    def apply(t: DLTensor, i: int) -> bool:
        strides = list(t.strides[: t.ndim])
        strides[i] = change(strides[i])
        t.strides = int64_array(strides)
        return t.shape[i] > 1 and must(t, i)

    return apply


def _redim(t: DLTensor, ndim: int) -> bool:
    number = math.prod(t.shape[: t.ndim]) == 1
    return _set(t, ndim=ndim) and not (number and ndim == 0)


def _last(t: DLTensor, i: int) -> bool:
    return i == t.ndim - 1


def _device(kind: int, index: int) -> Callable[[DLTensor, int], bool]:
    def apply(t: DLTensor, _: int) -> bool:
        same = t.device.device_type == kind and t.device.device_id == index
        if kind == 1 and not same and math.prod(t.shape[: t.ndim]) == 1:
            return False  # a number may be on the CPU, and would be read there
        t.device = DLDevice(kind, index)
        return not same

    return apply


TENSOR_FAULTS = [
    *(Fault(f"ndim {n}", lambda t, _, n=n: _redim(t, n)) for n in (0, -1, 65, 2**31 - 1)),
    Fault("no shape", lambda t, _: t.ndim > 0 and _set(t, shape=None)),
    Fault("no data", lambda t, _: _set(t, data=None)),
    Fault("data + 1 byte", lambda t, _: _set(t, data=t.data + 1)),
    *(
        Fault(f"byte_offset {n}", lambda t, _, n=n: _set(t, byte_offset=n))
        for n in (1, 2**63, 2**64 - 4)
    ),
    Fault("byte_offset 64", lambda t, _: not _set(t, byte_offset=64)),
    Fault("no strides", lambda t, _: not _set(t, strides=None)),
    *(
        Fault(f"type {code}:{bits}x{lanes}", _retype(code, bits, lanes))
        for code, bits, lanes in (
            (0, 8, 1), (0, 32, 1), (0, 64, 1), (1, 8, 1), (2, 16, 1), (2, 32, 1), (2, 64, 1),
            (4, 16, 1), (5, 64, 1), (6, 8, 1), (10, 8, 1), (255, 255, 1), (2, 32, 2), (2, 16, 0),
        )
    ),
    *(Fault(f"device {d}", _device(*d)) for d in ((0, 0), (1, 0), (2, 0), (2, -1), (7, 0), (2, 9))),
    *(
        Fault(f"size {n}", _resize(lambda _, n=n: n), True)
        for n in (-1, LOW, 2**62, HIGH)
    ),
    Fault("size 0", _resize(lambda _: 0), True),
    Fault("size 1", _resize(lambda _: 1, must=False), True),
    Fault("size + 1", _resize(lambda n: n + 1, must=False), True),
    *(
        Fault(f"stride {n}", _restride(lambda _, n=n: n, lambda *_: True), True)
        for n in (2**62, LOW)
    ),
    *(Fault(f"stride {n}", _restride(lambda _, n=n: n, _last), True) for n in (0, 2, -1)),
    Fault("stride + 3", _restride(lambda n: n + 3, _last), True),
    Fault("stride negative", _restride(lambda n: -n, _last), True),
]  # fmt: skip
NUMBER_FAULTS: dict[str, list[Any]] = {
    "float": [math.nan, math.inf, -math.inf, 1e300, -1e300],
    "int": [LOW, -1, 99, 2**31, HIGH],
}


class Call:
    """One valid call by ctypes, and copies of it with faults."""

    def __init__(self, sample: Sample, dtype: torch.dtype, kernels: Any, device: str) -> None:
        self.sample, self.op = sample, sample.schema
        tensors = sample.make(dtype, BATCH, WIDTH, device)
        self.expected = sample.call_all(kernels, tensors, WIDTH)
        self.outs = [Placed(torch.full_like(e, -7)) for e in self.expected]
        self.inputs = [
            Placed(v) if isinstance(v, torch.Tensor) else v
            for v in sample.arguments(tensors, WIDTH)
        ]
        kinds = [kind for kind, _ in self.op.arguments]
        self.kinds = ["Tensor"] * len(self.outs) + kinds
        self.names = [f"result {i}" for i in range(len(self.outs))]
        self.names += [name for _, name in self.op.arguments]

    def arguments(self) -> list[Any]:
        return [a.view() if isinstance(a, Placed) else a for a in (*self.outs, *self.inputs)]

    def singles(self) -> Iterator[tuple[str, list[Any], bool]]:
        """(what is wrong, arguments, whether it must be refused): one fault each."""
        for at, (kind, name) in enumerate(zip(self.kinds, self.names, strict=True)):
            for number in NUMBER_FAULTS.get(kind, ()):
                arguments = self.arguments()
                arguments[at] = number
                yield f"{name} = {number}", arguments, name not in FREE_INTEGERS
            if kind in NUMBER_FAULTS or self.arguments()[at] is None:
                continue
            arguments = self.arguments()
            arguments[at] = None
            yield f"{name} = NULL", arguments, kind == "Tensor" and at >= len(self.outs)
            for fault in TENSOR_FAULTS:
                for i in range(self.arguments()[at].ndim if fault.per_dimension else 1):
                    arguments = self.arguments()
                    must = fault.apply(arguments[at], i)
                    yield f"{name}: {fault.name} of {i}", arguments, must and self._read(at)

    def _read(self, at: int) -> bool:
        """Not of a gradient that `needs` does not ask for."""
        return at >= len(self.outs) or self.expected[at].numel() > 0

    def combined(self, rng: random.Random) -> tuple[str, list[Any]]:
        """Several faults in several arguments; but one device, or the call may be a valid one that
        sends the CPU to a GPU's memory."""
        arguments, texts = self.arguments(), []
        moved = False
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(arguments))
            value = arguments[at]
            if not isinstance(value, DLTensor):
                choices = NUMBER_FAULTS.get(self.kinds[at])
                if choices:
                    arguments[at] = rng.choice(choices)
                    texts.append(f"{self.names[at]} = {arguments[at]}")
                continue
            fault = rng.choice(TENSOR_FAULTS)
            if fault.name.startswith("device"):
                if moved:
                    continue
                moved = True
            usable = value.shape and (value.strides or "stride" not in fault.name)
            if usable and 0 < value.ndim < 9 and value.data:
                i = rng.randrange(value.ndim)
                fault.apply(value, i)
                texts.append(f"{self.names[at]}: {fault.name} of {i}")
        return ", ".join(texts), arguments


class Fuzzer:
    def __init__(self, library: Library, journal: Path, device: str) -> None:
        self.library, self.device = library, device
        self.count = {"refused": 0, "accepted": 0}
        journal.write_bytes(b" " * 4096)
        self.file = journal.open("r+b")
        self.journal = mmap.mmap(self.file.fileno(), 4096)

    def run(self, call: Call, dtype: torch.dtype, text: str, arguments: list[Any]) -> bool:
        """Whether the call was refused, properly."""
        what = f"{call.sample.id} {dtype}: {text}"
        self.journal[:] = what.encode()[:4096].ljust(4096)
        status = self.library.status(call.op.name, *arguments)
        if status == OK:
            self.count["accepted"] += 1
            return False
        message = self.library.last_error()
        # A faulty device may be one that this build has no kernels for.
        known = (INVALID, CONSTANTS["HFP_NOT_AVAILABLE"])
        assert status in known, f"{what}: status {status}, {message}"
        pattern = rf"{call.op.function}: (`\w+` must .*|this build has no CUDA kernels.*)"
        assert re.fullmatch(pattern, message), f"{what}: {message!r}"
        self.count["refused"] += 1
        return True

    def works(self, call: Call, text: str) -> None:
        """The valid call still computes the right result."""
        assert self.library.status(call.op.name, *call.arguments()) == OK, self.library.last_error()
        outs = [o.tensor for o in call.outs]
        pairs = zip(call.sample.meant(outs), call.sample.meant(call.expected), strict=True)
        for out, expected in pairs:
            assert torch.equal(out, expected), f"{call.sample.id} after {text}"

    def one_by_one(self, call: Call, dtype: torch.dtype) -> None:
        accepted = []
        for text, arguments, must in call.singles():
            if not must:
                accepted.append((text, arguments))
            elif not self.run(call, dtype, text, arguments):
                raise AssertionError(f"{call.sample.id} {dtype}: accepted {text}")
        for o in call.outs:
            untouched = torch.zeros_like(o.buffer)
            end = len(untouched) - MARGIN
            untouched[MARGIN:end] = torch.full_like(o.tensor, -7).reshape(-1).view(torch.uint8)
            assert torch.equal(o.buffer, untouched), f"{call.sample.id}: a refused call wrote"
        self.works(call, "refused calls")
        for text, arguments in accepted:
            self.run(call, dtype, text, arguments)
        self.works(call, "odd calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--examples", type=int, default=1500)
    options = parser.parse_args()
    import kernels

    package = kernels.get_local_kernel(options.kernels)
    (binary,) = Path(package.__file__).parent.glob("*.so")
    fuzzer = Fuzzer(Library(binary), options.journal, options.device)
    calls = [(Call(s, t, package, options.device), t) for s in SAMPLES for t in DTYPES]
    for call, dtype in calls:
        fuzzer.one_by_one(call, dtype)

    @settings(
        max_examples=options.examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, len(calls) - 1), st.randoms(use_true_random=False))
    def several(index: int, rng: random.Random) -> None:
        call, dtype = calls[index]
        text, arguments = call.combined(rng)
        fuzzer.run(call, dtype, text, arguments)

    several()
    for call, _ in calls:
        fuzzer.works(call, "all bad calls")
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps(fuzzer.count))


if __name__ == "__main__":
    assert ctypes.sizeof(DLTensor) == 48
    main()
