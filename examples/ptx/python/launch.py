"""Loads what `hfpatch kernel build --ptx DIR` wrote, by the driver API, and launches by name.

    python launch.py DIR

Needs the standard library and an NVIDIA driver; neither PyTorch nor a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


class Driver:
    """libcuda, with the first device's primary context."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self("cuCtxSetCurrent", self.context)
        found = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            self("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            found.append(value.value)
        self.arch = (found[0], found[1])

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({status})")


class Kernels:
    """The kernels of a folder by name; `launches` counts how often each was launched."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self.driver, self.launches = driver, Counter[str]()
        self.functions: dict[str, tuple[ctypes.c_void_p, dict[str, Any]]] = {}
        index = json.loads((folder / "index.json").read_text())
        by_source: dict[str, list[dict[str, Any]]] = {}
        for module in index["modules"]:
            arch = tuple(int(n) for n in module["arch"].split("."))
            if arch <= driver.arch:  # PTX of an older architecture is compiled for this one
                by_source.setdefault(module["source"], []).append(module)
        for modules in by_source.values():
            newest = max(modules, key=lambda m: [int(n) for n in m["arch"].split(".")])
            text = (folder / newest["file"]).read_bytes() + b"\0"
            handle = ctypes.c_void_p()
            driver("cuModuleLoadData", ctypes.byref(handle), text)
            for entry in newest["entries"]:
                function = ctypes.c_void_p()
                name = entry["name"].encode()
                driver("cuModuleGetFunction", ctypes.byref(function), handle, name)
                self.functions[entry["name"]] = (function, entry)

    def launch(self, name: str, grid: int, block: int, *arguments: Any, shared: int = 0) -> None:
        """`arguments`: ctypes values, as many and as large as the index says."""
        function, entry = self.functions[name]
        sizes = [p["bytes"] for p in entry["parameters"]]
        given = [ctypes.sizeof(a) for a in arguments]
        if sizes != given:
            raise TypeError(f"{name}: expected arguments of {sizes} bytes, got {given}")
        most = entry["block"]["max"]
        if most and block > most[0] * most[1] * most[2]:
            raise ValueError(f"{name}: expected at most {most} threads in a block, got {block}")
        pointers = [ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments]
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        self.driver("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, None, array, None)
        self.launches[name] += 1


def main() -> None:
    driver = Driver()
    kernels = Kernels(driver, Path(sys.argv[1]))
    n, block = 1000, 256
    blocks = (n + block - 1) // block
    x = (ctypes.c_float * n)(*[i % 7 - 3.0 for i in range(n)])
    sums = (ctypes.c_float * blocks)()
    memory = []
    for size in (4 * n, 4 * n, 4 * blocks):
        pointer = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        memory.append(pointer)
    source, squared, totals = memory
    driver("cuMemcpyHtoD_v2", source, x, ctypes.c_size_t(4 * n))
    kernels.launch("relu_squared", blocks, block, squared, source, ctypes.c_int(n))
    kernels.launch("block_sums", blocks, block, totals, squared, ctypes.c_int(n))
    driver("cuMemcpyDtoH_v2", sums, totals, ctypes.c_size_t(4 * blocks))
    for pointer in memory:
        driver("cuMemFree_v2", pointer)
    print("sum", round(sum(sums), 4))
    print("launches", " ".join(f"{k} {v}" for k, v in sorted(kernels.launches.items())))


if __name__ == "__main__":
    main()
