"""The vectors through `hfpatch.capi`, without torch and without NumPy.

python run_vectors.py FILE LIBRARY FOLDER_OF_CAPI [stub | CUDA_RUNTIME]

CUDA_RUNTIME: a libcudart; tensors are then those of cuda:0, in memory that the host reads too.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import struct
import sys
from pathlib import Path
from typing import Any

FORMATS = {(2, 32): "f", (2, 16): "e", (2, 64): "d", (0, 64): "q", (1, 8): "B"}


class Cuda:
    """Memory of cuda:0 that the host reads too."""

    def __init__(self, runtime: str) -> None:
        self._runtime = ctypes.CDLL(runtime)

    def checked(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA: status {status}")

    def copied(self, data: bytes) -> Any:
        found = ctypes.c_void_p()
        wanted = ctypes.c_size_t(max(len(data), 1))
        self.checked(self._runtime.cudaMallocManaged(ctypes.byref(found), wanted, 1))
        memory = (ctypes.c_char * max(len(data), 1)).from_address(found.value or 0)
        memory[: len(data)] = data
        return memory

    def finish(self) -> None:
        self.checked(self._runtime.cudaDeviceSynchronize())

    def free(self, memory: Any) -> None:
        self.checked(self._runtime.cudaFree(ctypes.c_void_p(ctypes.addressof(memory))))


class Run:
    """One case while its lines come."""

    def __init__(self, capi: Any, name: str, cuda: Cuda | None = None) -> None:
        self.capi, self.name, self.cuda = capi, name, cuda
        self.function = self.message = ""
        self.status = 0
        self.memory: list[Any] = []
        self.views: list[tuple[Any, tuple[int, int]]] = []
        self.arguments: list[Any] = []
        self.expected: list[tuple[int, float, bytes]] = []

    def view(self, memory: Any, kind: tuple[int, int], parts: list[str]) -> None:
        _, *shape = map(int, parts[0].split())
        strides = list(map(int, parts[1].split()))
        address = ctypes.addressof(memory) + int(parts[2]) * kind[1] // 8
        self.memory.append(memory)
        device = (1, 0) if self.cuda is None else (2, 0)
        self.views.append((self.capi.dltensor(address, shape, kind, strides, device), kind))

    def line(self, word: str, rest: str) -> None:
        if word == "function":
            self.function = rest
        elif word == "tensor":
            head, *parts = rest.split(" | ")
            _, code, bits, size = map(int, head.split())
            zeros = parts[3] == "zeros"
            data = bytes(size) if zeros else bytes.fromhex(parts[3].replace("-", ""))
            if self.cuda is None:
                memory = (ctypes.c_char * max(size, 1)).from_buffer_copy(data or b"\0")
            else:
                memory = self.cuda.copied(data)
            self.view(memory, (code, bits), parts)
        elif word == "view":
            head, *parts = rest.split(" | ")
            of = int(head.split()[1])
            self.view(self.memory[of], self.views[of][1], parts)
        elif word == "host":
            self.views[int(rest)][0].device = self.capi.DLDevice(1, 0)
        elif word == "address":
            table, place, of = map(int, rest.split())
            word_of = ctypes.c_uint64.from_buffer(self.memory[table], 8 * place)
            word_of.value = self.views[of][0].data
        elif word == "null":
            self.arguments.append(None)
        elif word == "float":
            self.arguments.append(struct.unpack(">d", bytes.fromhex(rest))[0])
        elif word == "int":
            self.arguments.append(int(rest))
        elif word == "use":
            self.arguments.append(self.views[int(rest)][0])
        elif word == "list":
            chosen = map(int, rest.split())
            self.arguments.append([None if i < 0 else self.views[i][0] for i in chosen])
        elif word == "status":
            self.status = int(rest)
        elif word == "message":
            self.message = rest
        elif word == "expect":
            index, tolerance, values = rest.split()
            allowed = struct.unpack(">d", bytes.fromhex(tolerance))[0]
            self.expected.append((int(index), allowed, bytes.fromhex(values.replace("-", ""))))

    def values(self, index: int, count: int) -> list[float]:
        kind = self.views[index][1]
        data = bytes(self.memory[index])[: count * kind[1] // 8]
        if kind == (4, 16):  # the upper half of an fp32
            halves = struct.unpack(f"<{count}H", data)
            data = struct.pack(f"<{count}I", *(h << 16 for h in halves))
            return list(struct.unpack(f"<{count}f", data))
        return list(struct.unpack(f"<{count}{FORMATS[kind]}", data))

    def wrong(self, library: Any, stub: bool) -> str:
        """What is not as expected; "" if all is."""
        status = library.status(self.function, *self.arguments, None)
        if self.cuda is not None:
            self.cuda.finish()
        said = library.last_error() if status else ""
        if stub:
            right = f"{self.function}: this is the stub of libhfpatch, "
            return "" if status == -1 and said.startswith(right) else f"{status} {said}"
        if status != self.status or said != self.message:
            return f"expected {self.status} `{self.message}`, got {status} `{said}`"
        for index, allowed, data in self.expected:
            wanted = struct.unpack(f">{len(data) // 8}d", data)
            found = self.values(index, len(wanted))
            for i, (value, right) in enumerate(zip(found, wanted, strict=True)):
                both = math.isnan(value) and math.isnan(right)
                if not both and value != right and not abs(value - right) <= allowed:
                    return f"tensor {index}[{i}]: expected {right} ± {allowed}, got {value}"
        return ""


def main(path: str, library_path: str, folder: str, mode: str = "") -> int:
    sys.path.insert(0, folder)
    capi = importlib.import_module("capi")
    library = capi.Library(library_path)
    cuda = None if mode in ("", "stub") else Cuda(mode)
    count = failed = 0
    run = Run(capi, "", cuda)
    for line in Path(path).read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "case":
            run = Run(capi, rest, cuda)
        elif word == "end":
            count += 1
            if why := run.wrong(library, mode == "stub"):
                failed += 1
                print(f"FAIL {run.name}: {why}")
            if cuda is not None:
                for memory in {ctypes.addressof(m): m for m in run.memory}.values():
                    cuda.free(memory)
        else:
            run.line(word, rest)
    print(f"{count} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
