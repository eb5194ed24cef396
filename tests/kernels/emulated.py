"""The C interface built for aarch64 and called through an emulator, as `c_api.Library` is called.

Each call goes to a process under qemu (`emulated.cpp`) with all memory that its tensors lie in, and
what comes back is written to that memory; so a test of the C interface does not see a difference.
`run_emulated.py` runs these tests on it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import c_api
import torch
from c_api import DLTensor, HfpTensorList, dltensor

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
#: Debian's packages of them.
PACKAGES = "g++-aarch64-linux-gnu qemu-user-static"
#: So that kernels split their work, whatever machine this is.
THREADS = 3

#: [start, end) of memory.
Range = tuple[int, int]


def missing() -> str:
    """What must be installed before anything can be emulated; "" if nothing."""
    absent = [program for program in (COMPILER, EMULATOR) if not shutil.which(program)]
    return f"no {' and no '.join(absent)}: apt-get install {PACKAGES}" if absent else ""


def build(folder: Path) -> Path:
    """Compiles the CPU kernels and the program that calls them; the path of the program."""
    objects = c_api.compile_sources(folder, COMPILER)
    program = folder / "emulated"
    # Static, so that the emulator needs no loader of that architecture.
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp", "-static"]
    files = [str(Path(__file__).with_suffix(".cpp")), *map(str, objects)]
    command = [COMPILER, *options, f"-I{c_api.KERNEL_SRC}", *files, "-o", str(program)]
    # The linker warns of a dlopen in libgomp, which nothing calls.
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} failed on {files[0]}:\n{done.stderr}")
    return program


def _extent(view: DLTensor) -> Range | None:
    """The memory from its pointer to all that a tensor reaches; None: it reaches none."""
    if not view.data or view.ndim < 0 or not (view.shape or view.ndim == 0):
        return None
    low = high = 0
    stride = 1
    for i in reversed(range(view.ndim)):
        size = view.shape[i]
        if size <= 0:
            return None
        step = view.strides[i] if view.strides else stride
        low, high = low + min(step * (size - 1), 0), high + max(step * (size - 1), 0)
        stride *= size
    width, start = view.dtype.bits // 8, view.data + view.byte_offset
    return min(view.data, start + low * width), start + (high + 1) * width


def _storage(tensor: torch.Tensor) -> Range | None:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if storage.nbytes() else None


def _merged(ranges: list[Range]) -> list[Range]:
    """Those that share memory made one, so that it is shared on the other side too."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class _Message:
    """The bytes of one call."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self._words: list[int] = []  # where addresses stand in that memory
        self._arguments: list[bytes] = []

    def _numbers(self, *values: int) -> None:
        # Bits of unsigned numbers, addresses among them, are those of signed ones.
        self._arguments.append(struct.pack(f"<{len(values)}Q", *(v % 2**64 for v in values)))

    def add(self, value: Any) -> None:
        if value is None:
            self._numbers(0)
        elif isinstance(value, float):
            self._arguments.append(struct.pack("<d", value))
        elif isinstance(value, int):
            self._numbers(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(dltensor(value), _storage(value))
        elif isinstance(value, DLTensor):
            self._tensor(value, _extent(value))
        elif isinstance(value, c_api.Addressed):
            self._tensor(dltensor(value.table), _storage(value.table))
            for place, led_to in value.leads_to.items():
                self.ranges += filter(None, [_storage(led_to)])
                self._words.append(value.table.data_ptr() + 8 * place)
        elif isinstance(value, HfpTensorList):
            self._list([value.tensors[i].contents for i in range(value.count)])
        else:
            self._list(value)

    def _list(self, members: Any) -> None:
        self._numbers(1, len(members))
        for member in members:
            self.add(member)

    def _tensor(self, view: DLTensor, memory: Range | None) -> None:
        if memory is not None:
            self.ranges.append(memory)
        kind = view.dtype
        self._numbers(1, view.device.device_type, view.device.device_id, view.ndim)
        self._numbers(kind.code, kind.bits, kind.lanes, view.data or 0, view.byte_offset)
        for values in (view.shape, view.strides):
            self._numbers(1, *values[: view.ndim]) if values else self._numbers(0)

    def chunks(self, function: str) -> Iterator[bytes]:
        name = function.encode()
        yield struct.pack("<Q", len(name)) + name
        self.ranges = _merged(self.ranges)
        yield struct.pack("<Q", len(self.ranges))
        for start, end in self.ranges:
            yield struct.pack("<QQ", start, end - start)
            yield ctypes.string_at(start, end - start)
        yield struct.pack(f"<{len(self._words) + 1}Q", len(self._words), *self._words)
        yield from self._arguments


class _Functions:
    """`library.dll.hfp_partial_rows(3, 4)`, as of ctypes."""

    def __init__(self, library: Emulated) -> None:
        self._library = library

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> Any:
            result, text = self._library.exchange(function, arguments)
            return text.encode() if function == "hfp_build_info" else result

        return call


class Emulated(c_api.Library):
    """The library for aarch64. `called` has the names of the ops that returned HFP_OK."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.called: set[str] = set()
        self.dll = _Functions(self)  # type: ignore[assignment]
        self._text = ""
        self._process = subprocess.Popen(
            [EMULATOR, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Passive: threads that wait in a loop would take this machine's cores from each other.
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(THREADS),
                "OMP_WAIT_POLICY": "PASSIVE",
            },
        )

    def last_error(self) -> str:
        return self._text

    def status(self, name: str, *arguments: Any, stream: int | None = None) -> int:
        op = c_api.CALLS[name]
        kinds = ["Tensor"] * op.outputs + [kind for kind, _ in op.arguments]
        # As ctypes makes them by the function's signature.
        given = [
            float(value) if kind == "float" else value
            for kind, value in zip(kinds, arguments, strict=True)
        ]
        status, self._text = self.exchange(op.function, given)
        if status == c_api.CONSTANTS["HFP_OK"]:
            self.called.add(name)
        return status

    def size(self, name: str, *arguments: Any) -> int:
        found, text = self.exchange(name, arguments)
        if found < 0:
            raise c_api.KernelError(found, text)
        return found

    def exchange(self, function: str, arguments: Any) -> tuple[int, str]:
        """What a C function returns, and its message; tensors are changed in place."""
        message = _Message()
        for value in arguments:
            message.add(value)
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.writelines(message.chunks(function))
            self._process.stdin.flush()
            result, length = struct.unpack("<qq", self._read(16))
            text = self._read(length).decode()
            for start, end in message.ranges:
                ctypes.memmove(start, self._read(end - start), end - start)
        except (BrokenPipeError, EOFError) as e:
            code = self._process.wait()
            raise RuntimeError(f"the build for aarch64 ended in `{function}`: exit {code}") from e
        return result, text

    def _read(self, size: int) -> bytes:
        assert self._process.stdout
        found = self._process.stdout.read(size)
        if len(found) < size:
            raise EOFError
        return found


@functools.cache  # the fixture is made anew in each file of tests
def library(program: str) -> Emulated:
    """The program that `build` has made, running until this process ends."""
    return Emulated(Path(program))
