"""Bad calls made from the table of samples, against the C interface by ctypes.

`python fuzz.py KERNELS JOURNAL [--device cuda]` runs in a process of its own, so that a crash is a
failing test: before each call the journal says which. Every argument of every sample, and the first
and last tensor of every list, is made bad in every way of `TENSOR_FAULTS`, `LIST_FAULTS` and
`NUMBER_FAULTS` in turn; then hypothesis combines several. A new op is covered by its row in one of
the tables of samples. Of a decoding step's model it is every tensor, and every number of its
description.

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
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from c_api import (
    CONSTANTS,
    Addressed,
    DLDataType,
    DLDevice,
    DLTensor,
    HfpTensorList,
    Library,
    dltensor,
    int64_array,
)
from decode_samples import BY_ID as DECODE_SAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from list_samples import LISTS_BY_ID, LISTS_OF_DTYPES, ListSample
from op_samples import DTYPES, SAMPLES, Sample

OK, INVALID = CONSTANTS["HFP_OK"], CONSTANTS["HFP_INVALID_ARGUMENT"]
MARGIN, WIDTH, BATCH = 8192, 16, 3
LOW, HIGH = -(2**63), 2**63 - 1
#: Numbers that may have any value, or an infinite one.
FREE_NUMBERS = {"ignore_index", "top_k", "max_norm", "window"}
FREE_NUMBERS |= {"gate_min", "gate_max", "up_min", "up_max", "most_keys", "pad"}
#: Arguments that may have these types too, in the words of the faults.
FREE_TYPES = {(op, "mask"): {"type 1:8x1", "type 6:8x1"} for op in ("attention", "decode_step")}
#: Samples of the decoding functions, each with the dtypes in which it is tried.
DECODING = {
    "decode_step-": [torch.bfloat16],
    "decode_step-masked": DTYPES,
    "decode_step-both-norms": [torch.float32],
    "decode_step-bytes": [torch.float16],
    "decode_choose-ends": DTYPES,
    "decode_choose-": [torch.float32],
}


class Placed:
    """A tensor in the middle of a buffer of zeros, and its DLTensor."""

    def __init__(self, values: torch.Tensor) -> None:
        size = values.numel() * values.element_size()
        self.buffer = torch.zeros(size + 2 * MARGIN, dtype=torch.uint8, device=values.device)
        middle = self.buffer[MARGIN : MARGIN + size]
        self.tensor = middle.view(values.dtype).view(values.shape).copy_(values)
        self.before = self.buffer.clone()

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


#: What a list may be instead.
LIST_FAULTS: dict[str, Callable[[list[DLTensor]], Any]] = {
    "NULL": lambda _: None,
    "NULL first": lambda views: [None, *views[1:]],
    "NULL last": lambda views: [*views[:-1], None],
    "no tensors": lambda views: HfpTensorList(None, len(views)),
    "-1 tensors": lambda _: HfpTensorList(None, -1),
    "one less": lambda views: views[:-1],
    "one more": lambda views: [*views, views[0]],
    "empty": lambda _: [],
}
#: Those that a list of its own may be, and lists that may be missing.
FREE_LISTS = {"one less", "one more", "empty"}
OPTIONAL_LISTS = {"max_exp_avg_sqs", "masters"}
#: An argument, and which tensor where it is a list.
Place = tuple[int, int | None]


def _at(arguments: list[Any], place: Place) -> Any:
    return arguments[place[0]] if place[1] is None else arguments[place[0]][place[1]]


class Call:
    """One valid call by ctypes, and copies of it with faults."""

    #: Arguments, by place, that may be of any size.
    any_size: AbstractSet[int] = frozenset()

    def __init__(self, sample: Sample, dtype: torch.dtype, kernels: Any, device: str) -> None:
        tensors = sample.make(dtype, BATCH, WIDTH, device)
        results = sample.call_all(kernels, tensors, WIDTH)
        outs = [Placed(torch.full_like(e, -7)) for e in results]
        self.expected = sample.meant(results)
        self.meant = sample.meant([o.tensor for o in outs])
        self._take(sample, outs, sample.arguments(tensors, WIDTH))
        self.written = outs
        self.any_size = set()
        if device != "cpu":  # a product's workspace there may have any size
            self.any_size = {i for i, r in enumerate(sample.results) if r == "product_workspace"}

    def _take(self, sample: Any, outs: list[Placed], inputs: tuple[Any, ...]) -> None:
        self.sample, self.op, self.outs = sample, sample.schema, outs

        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return [placed(v) for v in value]
            return Placed(value) if isinstance(value, torch.Tensor) else value

        self.inputs = [placed(value) for value in inputs]
        kinds = [kind for kind, _ in self.op.arguments]
        self.kinds = ["Tensor"] * len(outs) + kinds
        self.names = [f"result {i}" for i in range(len(outs))]
        self.names += [name for _, name in self.op.arguments]

    def arguments(self) -> list[Any]:
        def view(value: Any) -> Any:
            if isinstance(value, list):
                return [view(v) for v in value]
            return value.view() if isinstance(value, Placed) else value

        return [view(value) for value in (*self.outs, *self.inputs)]

    def places(self) -> Iterator[Place]:
        """Of a list the first tensor and the last."""
        for at, value in enumerate((*self.outs, *self.inputs)):
            if isinstance(value, list):
                yield from ((at, member) for member in sorted({0, len(value) - 1}) if value)
            else:
                yield at, None

    def name_of(self, place: Place) -> str:
        return self.names[place[0]] + ("" if place[1] is None else f"[{place[1]}]")

    def singles(self) -> Iterator[tuple[str, list[Any], bool]]:
        """(what is wrong, arguments, whether it must be refused): one fault each."""
        for place in self.places():
            (at, member), name = place, self.name_of(place)
            kind = self.kinds[at]
            for number in NUMBER_FAULTS.get(kind, ()):
                arguments = self.arguments()
                arguments[at] = number
                free = self.names[at] in FREE_NUMBERS
                yield f"{name} = {number}", arguments, not free
            if kind in NUMBER_FAULTS or _at(self.arguments(), place) is None:
                continue
            if member is None:
                arguments = self.arguments()
                arguments[at] = None
                yield f"{name} = NULL", arguments, kind == "Tensor" and at >= len(self.outs)
            for fault in TENSOR_FAULTS:
                dimensions = _at(self.arguments(), place).ndim
                for i in range(dimensions if fault.per_dimension else 1):
                    arguments = self.arguments()
                    must = fault.apply(_at(arguments, place), i)
                    refused = must and self._read(at) and not self._may(place, fault)
                    yield f"{name}: {fault.name} of {i}", arguments, refused

    def _read(self, at: int) -> bool:
        """Not of a gradient that `needs` does not ask for."""
        return at >= len(self.outs) or self.outs[at].tensor.numel() > 0

    def _may(self, place: Place, fault: Fault) -> bool:
        at, _ = place
        if at in self.any_size and fault.name == "size 0":
            return True
        return fault.name in FREE_TYPES.get((self.sample.op, self.names[at]), ())

    def reset(self) -> None:
        for placed in self.written:
            placed.buffer.copy_(placed.before)

    def combined(self, rng: random.Random) -> tuple[str, list[Any]]:
        """Several faults in several arguments; but one device, or the call may be a valid one that
        sends the CPU to a GPU's memory."""
        arguments, texts = self.arguments(), []
        moved = False
        places = list(self.places())
        for _ in range(rng.randint(1, 4)):
            place = rng.choice(places)
            value, name = _at(arguments, place), self.name_of(place)
            if not isinstance(value, DLTensor):
                choices = NUMBER_FAULTS.get(self.kinds[place[0]])
                if choices:
                    arguments[place[0]] = rng.choice(choices)
                    texts.append(f"{name} = {arguments[place[0]]}")
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
                texts.append(f"{name}: {fault.name} of {i}")
        return ", ".join(texts), arguments


class ListCall(Call):
    """The same of an op over lists, which changes its tensors in place."""

    def __init__(self, sample: ListSample, dtype: torch.dtype, kernels: Any, device: str) -> None:
        def fresh() -> tuple[Any, ...]:
            return sample.arguments(sample.make(dtype, device, ((3, 8), (), (5,))))

        done = fresh()
        results = getattr(kernels.ops, sample.op).default(*done) or ()
        self._take(sample, [Placed(torch.full_like(r, -7)) for r in results], fresh())
        members = [p for value in self.inputs if isinstance(value, list) for p in value]
        self.written = [*self.outs, *members]
        given = zip(self.op.arguments, self.inputs, done, strict=True)
        changed = [(mine, theirs) for (kind, _), mine, theirs in given if "!" in kind]
        self.meant = [p.tensor for mine, _ in changed for p in mine]
        self.expected = [t for _, theirs in changed for t in theirs]
        if results:  # a norm; what follows are its partial sums
            self.meant.append(self.outs[0].tensor)
            self.expected.append(results[0])

    def singles(self) -> Iterator[tuple[str, list[Any], bool]]:
        yield from super().singles()
        for at, kind in enumerate(self.kinds):
            if not kind.endswith("[]") or not self.arguments()[at]:
                continue
            for fault, change in LIST_FAULTS.items():
                arguments = self.arguments()
                arguments[at] = change(arguments[at])
                must = not (self._alone() and fault in FREE_LISTS)
                if fault in ("NULL", "empty") and self.names[at] in OPTIONAL_LISTS:
                    must = False
                yield f"{self.names[at]}: {fault}", arguments, must

    def _alone(self) -> bool:
        """Whether nothing belongs to the tensors of the list."""
        return sum(kind.endswith("[]") for kind in self.kinds) == 1

    def _may(self, place: Place, fault: Fault) -> bool:
        """Another shape is as good."""
        listed = self.kinds[place[0]].endswith("[]")
        return self._alone() and listed and fault.name in ("ndim 0", "size 0")


class DecodeCall(Call):
    """The same of a function that goes by addresses, which are those of buffers here too.

    On the CPU numbers of the tables and of the model's description are made bad as well, where no
    valid address would then lead to less memory than is read. On a GPU a call must be one that is
    refused before anything is launched: what the kernels read there by address nobody has checked.
    """

    def __init__(self, sample: Any, dtype: torch.dtype, library: Library, device: str) -> None:
        self.library, self.device = library, device
        made = sample.make(dtype, library.size, device)
        led: dict[int, Placed] = {}

        def placed(value: Any) -> Any:
            if isinstance(value, Addressed):
                led.update((i, Placed(t.nan_to_num(0.5))) for i, t in value.leads_to.items())
                table = value.table.clone()
                for i, memory in led.items():
                    table[i] = memory.tensor.data_ptr()
                return table
            return value

        given = [placed(value) for value in made.arguments]
        outs = [None if t is None else Placed(t) for t in given[: sample.schema.outputs]]
        self._take(sample, outs, tuple(given[sample.schema.outputs :]))
        self.scratch = made.scratch
        if self.op.name == "decode_choose":  # counters and ends
            self.any_size = {1, 5}
        self.written = [*filter(None, self.outs), *led.values()]
        self.meant = [o.tensor for i, o in enumerate(self.outs) if o and i != self.scratch]
        self.meant += [memory.tensor for memory in led.values()]
        self.expected = []
        assert library.status(self.op.name, *self.arguments()) == OK, library.last_error()
        self.expected = [t.clone() for t in self.meant]
        self.reset()

    def places(self) -> Iterator[Place]:
        for at, value in enumerate((*self.outs, *self.inputs)):
            if isinstance(value, list):
                yield from ((at, i) for i, member in enumerate(value) if member is not None)
            else:
                yield at, None

    def singles(self) -> Iterator[tuple[str, list[Any], bool]]:
        for found in super().singles():
            # no workspace of a GPU's grows with threads: 99 are as good as one
            if self.device == "cpu" or (found[2] and found[0] != "threads = 99"):
                yield found
        for at, kind in enumerate(self.kinds):
            if kind != "Tensor[]":
                continue
            for fault, change in LIST_FAULTS.items():
                if fault == "NULL last" and self.arguments()[at][-1] is None:
                    continue
                arguments = self.arguments()
                arguments[at] = change(arguments[at])
                # the last one is what a model may be without
                yield f"{self.names[at]}: {fault}", arguments, fault != "NULL last"
        if self.device == "cpu":
            yield from self._missing()
            yield from self._numbers()

    def _missing(self) -> Iterator[tuple[str, list[Any], bool]]:
        """Calls without one tensor of the model, which it may do without, or not."""
        for at, member in self.places():
            if member is not None:
                arguments = self.arguments()
                arguments[at][member] = None
                yield f"{self.name_of((at, member))} = NULL", arguments, member < 4

    def _numbers(self) -> Iterator[tuple[str, list[Any], bool]]:
        """Calls in which one element of a tensor of numbers is another one."""
        for place in self.places():
            value = _at([*self.outs, *self.inputs], place)
            name = self.name_of(place)
            if not isinstance(value, Placed) or place[0] == self.scratch:
                continue
            tensor = value.tensor
            described = place[1] is not None and place[1] < 2  # plan and numbers
            if not (described or tensor.dtype == torch.int64):
                continue
            faults = NUMBER_FAULTS["float" if tensor.is_floating_point() else "int"]
            for i in range(tensor.numel()):
                for number in faults:
                    if self._leads_away(name, i, number, tensor.numel()):
                        continue
                    arguments = self.arguments()
                    other = Placed(tensor)
                    flat = other.tensor.view(-1)
                    flat[i] = float("inf") * number if abs(number) > 1e200 else number
                    view = other.view()
                    view.keep = other  # type: ignore[attr-defined]  # as long as the view
                    if place[1] is None:
                        arguments[place[0]] = view
                    else:
                        arguments[place[0]][place[1]] = view
                    yield f"{name}[{i}] = {number}", arguments, False

    def _leads_away(self, name: str, i: int, number: int, count: int) -> bool:
        """Whether a number would be taken for an address, or for a capacity, that is not there."""
        if name == "cache":
            return i > 0 and not (i % 3 == 0 and number < 0)
        return self.op.name == "decode_choose" and name == "result 2" and i >= count - 3

    def _may(self, place: Place, fault: Fault) -> bool:
        value = _at([*self.outs, *self.inputs], place)
        bytes_ = isinstance(value, Placed) and value.tensor.element_size() == 1
        if bytes_ and fault.name in ("data + 1 byte", "byte_offset 1"):
            return True
        return super()._may(place, fault)

    def combined(self, rng: random.Random) -> tuple[str, list[Any]]:
        """Tables stay as they are: shifted ones hold other addresses."""
        tables = {at for at, name in enumerate(self.names) if name in ("cache", "result 2")}
        for _ in range(20):
            text, arguments = super().combined(rng)
            if not any(f"{self.names[at]}: byte_offset" in text for at in tables):
                return text, arguments
        return "nothing", self.arguments()


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
        # of a model: `layers[0].attention.q.weight`
        name = r"\w+(\[\d+\])?(\.\w+)*"
        pattern = rf"{call.op.function}: (`{name}` must .*|this build has no CUDA kernels.*)"
        assert re.fullmatch(pattern, message), f"{what}: {message!r}"
        self.count["refused"] += 1
        return True

    def works(self, call: Call, text: str) -> None:
        """The valid call still computes the right result."""
        call.reset()
        assert self.library.status(call.op.name, *call.arguments()) == OK, self.library.last_error()
        for out, expected in zip(call.meant, call.expected, strict=True):
            assert torch.equal(out, expected), f"{call.sample.id} after {text}"

    def one_by_one(self, call: Call, dtype: torch.dtype) -> None:
        accepted = []
        for text, arguments, must in call.singles():
            if not must:
                accepted.append((text, arguments))
            elif not self.run(call, dtype, text, arguments):
                raise AssertionError(f"{call.sample.id} {dtype}: accepted {text}")
        for placed in call.written:
            unchanged = torch.equal(placed.buffer, placed.before)
            assert unchanged, f"{call.sample.id}: a refused call wrote"
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
    calls += [
        (ListCall(LISTS_BY_ID[name], t, package, options.device), t) for name, t in LISTS_OF_DTYPES
    ]
    decoding = [
        (DecodeCall(DECODE_SAMPLES[name], t, fuzzer.library, options.device), t)
        for name, dtypes in DECODING.items()
        for t in dtypes
        if options.device == "cpu" or not name.endswith("bytes")
    ]
    for call, dtype in (*calls, *decoding):
        fuzzer.one_by_one(call, dtype)
    if options.device == "cpu":
        calls += decoding

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
