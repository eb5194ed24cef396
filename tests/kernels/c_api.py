"""`hfpatch.capi` for torch tensors of every layout and kind, and the op tables of the header.

Functions are called by their names in `HFP_OP_TABLE`, constants are read from the header's enums,
so this file does not change when an op is added. Torch tensors go in as DLTensors that point to
their memory: DLPack would refuse some that the tests need.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfpatch import capi
from hfpatch.capi import DLDataType, DLDevice, DLTensor, HfpTensorList
from hfpatch.kernel_build import ToolchainMissing
from hfpatch.kernel_build.clib import build_clib

ROOT = Path(__file__).resolve().parents[2]
KERNEL_SRC = ROOT / "kernel_src"
HEADER = KERNEL_SRC / "hfpatch.h"


def _dtype_codes() -> dict[torch.dtype, tuple[int, int]]:
    floats = {torch.float16: 16, torch.float32: 32, torch.float64: 64}
    ints = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
    codes = {dtype: (2, bits) for dtype, bits in floats.items()}
    codes.update({dtype: (0, bits) for dtype, bits in ints.items()})
    codes[torch.uint8] = (1, 8)
    codes[torch.bool] = (6, 8)
    codes[torch.bfloat16] = (4, 16)
    return codes


DTYPE_CODES = _dtype_codes()


def int64_array(values: Iterable[int]) -> ctypes.Array:
    values = list(values)
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def dltensor(tensor: torch.Tensor) -> DLTensor:
    """A DLTensor viewing the memory of `tensor`, which must outlive it."""
    code, bits = DTYPE_CODES[tensor.dtype]
    device = DLDevice(2 if tensor.is_cuda else 1, tensor.device.index or 0)
    return DLTensor(
        data=tensor.data_ptr() or None,
        device=device,
        ndim=tensor.dim(),
        dtype=DLDataType(code, bits, 1),
        shape=int64_array(tensor.shape),
        strides=int64_array(tensor.stride()),
        byte_offset=0,
    )


def going_down(tensor: torch.Tensor) -> DLTensor:
    """The same from its last row on, backwards: no tensor of PyTorch's has such strides."""
    view = dltensor(tensor)
    view.data = tensor[-1].data_ptr()
    view.strides = int64_array([-tensor.stride(0), *tensor.stride()[1:]])
    return view


def tensor_list(tensors: Iterable[Any]) -> HfpTensorList:
    """A list of torch tensors, DLTensors or None."""
    views = [dltensor(t) if isinstance(t, torch.Tensor) else t for t in tensors]
    pointer = ctypes.POINTER(DLTensor)
    pointers = (pointer * len(views))(*(v if v is None else ctypes.pointer(v) for v in views))
    found = HfpTensorList(ctypes.cast(pointers, ctypes.POINTER(pointer)), len(views))
    found.keep = (views, pointers)  # type: ignore[attr-defined]  # as long as the list
    return found


class Addressed:
    """An int64 tensor that holds addresses.

    Args:
        numbers: its elements, any number where an address comes.
        leads_to: by place, the tensor whose address stands there.
    """

    def __init__(self, numbers: Iterable[int], leads_to: dict[int, torch.Tensor]) -> None:
        device = next(iter(leads_to.values())).device
        values = list(numbers)
        for place, tensor in leads_to.items():
            values[place] = tensor.data_ptr()
        self.leads_to, self.table = leads_to, torch.tensor(values, device=device)


@dataclass(frozen=True)
class Op:
    """One row of HFP_OP_TABLE, HFP_LIST_OP_TABLE or HFP_DECODE_TABLE.

    `arguments` are (type, name) pairs such as ("Tensor?", "weight").
    """

    name: str
    function: str
    result: str
    arguments: tuple[tuple[str, str], ...]

    @property
    def outputs(self) -> int:
        return 0 if self.result == "none" else self.result.count(",") + 1


def read_ops(name: str = "HFP_OP_TABLE", header: Path = HEADER) -> dict[str, Op]:
    text = header.read_text().split(f"#define {name}(X)", 1)[1]
    table = re.match(r"(?:.*\\\n)*.*\n", text)[0]  # type: ignore[index]  # up to a line without \
    row = re.compile(r"X\(\s*(\w+)\s*,\s*(\w+)\s*,\s*\"([^\"]+)\"\s*,((?:[\s\\]*\"[^\"]*\")+)\s*\)")
    ops = {}
    for name, function, result, strings in row.findall(table):
        arguments = "".join(re.findall(r'"([^"]*)"', strings))
        pairs = tuple(tuple(part.split()) for part in arguments.split(","))
        ops[name] = Op(name, function, result, pairs)  # type: ignore[arg-type]
    return ops


def read_constants(header: Path = HEADER) -> dict[str, int]:
    """Every HFP_* enumerator and integer macro."""
    text = header.read_text()
    found = re.findall(r"\b(HFP_[A-Z0-9_]+)\s*=\s*(-?\d+)", text)
    found += re.findall(r"#define (HFP_[A-Z0-9_]+) (\d+)", text)
    return {name: int(value) for name, value in found}


OPS = read_ops()
LIST_OPS = read_ops("HFP_LIST_OP_TABLE")
DECODE_OPS = read_ops("HFP_DECODE_TABLE")
#: All functions that return a status.
CALLS = OPS | LIST_OPS | DECODE_OPS
CONSTANTS = read_constants()


KernelError = capi.HfpatchError


class Library:
    """`capi.Library` for torch tensors of any layout, by the names of the op tables:
    `library.call("silu", out, x)` raises KernelError on failure."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.capi = capi.Library(path)
        self.dll = self.capi.dll

    def last_error(self) -> str:
        return self.capi.last_error()

    def status(self, name: str, *arguments: Any, stream: int | None = None) -> int:
        """The status of a call, outputs first; torch tensors, DLTensors, lists, numbers, None, and
        `Addressed`."""
        return self.capi.status(CALLS[name].function, *map(passed, arguments), stream)

    def size(self, name: str, *arguments: Any) -> int:
        """What `hfp_…` says of how large a buffer must be; raises KernelError."""
        return self.capi.size(name, *map(passed, arguments))

    def call(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        status = self.status(name, *arguments, stream=stream)
        if status != CONSTANTS["HFP_OK"]:
            raise KernelError(status, self.last_error())


def passed(value: Any) -> Any:
    """What `capi` is given for an argument of `Library`."""
    if isinstance(value, Addressed):
        value = value.table
    if isinstance(value, torch.Tensor):
        return dltensor(value)
    return tensor_list(value) if isinstance(value, (list, tuple)) else value


@functools.cache  # a second copy would overwrite a library that is in use
def held_to(library: Path, level: str) -> Library | None:
    """A copy of the library held to one instruction set; None if this CPU lacks it."""
    copy = library.with_name(f"libhfpatch_{level}.so")
    shutil.copy(library, copy)
    before = os.environ.get("HFPATCH_SIMD")
    os.environ["HFPATCH_SIMD"] = level  # the copy decides for itself, once
    try:
        loaded = Library(copy)
        used = json.loads(loaded.dll.hfp_build_info())["simd"]
    finally:
        os.environ.pop("HFPATCH_SIMD")
        if before is not None:
            os.environ["HFPATCH_SIMD"] = before
    return loaded if used == level else None


def compile_sources(folder: Path, compiler: str, jobs: int = 2) -> list[Path]:
    """Compiles the CPU kernels into object files in `folder`; their paths."""
    flags = ["-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-DCPU_KERNEL"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    sources = sorted((ROOT / "kernel_src").glob("*.cpp")) + sorted(
        (ROOT / "kernel_src" / "cpu").glob("*.cpp")
    )
    objects = [folder / (source.stem + ".o") for source in sources]
    commands = [
        [compiler, *flags, *warnings, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    for start in range(0, len(commands), jobs):
        running = [subprocess.Popen(command) for command in commands[start : start + jobs]]
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"{compiler} failed on one of {sources}")
    return objects


#: What the library is compiled with besides, in a test of its own: such objects are no other
#: build's.
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(folder: Path, **options: Any) -> Path:
    """libhfpatch, in `folder`; its objects are kept. The path of the library."""
    options = {"kind": "cpu", "verbose": False, **options}
    lock = ROOT / ".cache" / "clib.lock"
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process compiles, the others take its objects
        return build_clib(folder, **options)


@functools.cache
def built_library() -> Path | None:
    """`build`, once per process; None without a compiler."""
    folder = tempfile.mkdtemp(prefix="hfpatch-c-api-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        return build(Path(folder))
    except ToolchainMissing:
        return None


def printed(code: str, library: Path | str, threads: int) -> str:
    """What a fresh process prints with `sys.argv[1]` the library, `[2]` this folder and so many
    threads of OpenMP."""
    return subprocess.run(
        [sys.executable, "-c", code, str(library), str(Path(__file__).parent)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
