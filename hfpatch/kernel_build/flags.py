"""Flags of the compilers, for every kind of library that is built here."""

from __future__ import annotations

import os
from collections.abc import Sequence

CXX_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-gnu-unique",
)


def host_flags(clang: bool) -> list[str]:
    """Those of the C++ compiler."""
    return [f for f in CXX_FLAGS if not (clang and f == "-fno-gnu-unique")]


#: CUDA code compiled in a seventh of the time, and slow to run: nvcc's own words for it.
QUICK_FLAGS = ("--Ofast-compile=max",)


def quick(nvcc: tuple[int, int]) -> bool:
    """Whether ``HFPATCH_CUDA_QUICK`` asks for quick builds, for machines that only look whether
    CUDA sources compile; with an nvcc of that version, which must know them."""
    return os.environ.get("HFPATCH_CUDA_QUICK", "0") not in ("", "0") and nvcc >= (13, 0)


#: Ends the names of files whose kernels need what only sm_90a has: they are compiled for it where
#: others are for sm_90. For other GPUs they are empty, and something else is called.
HOPPER = "_hopper.cu"


def nvcc_flags(cxx: str, host: Sequence[str], archs: Sequence[str], src: str = "") -> list[str]:
    """Those of nvcc with the C++ compiler `cxx` under it, for `archs` such as "9.0+PTX"; `src`: the
    file, whose name may ask for more."""
    through = [f"-Xcompiler={flag}" for flag in host if not flag.startswith(("-O", "-std"))]
    flags = ["-O3", "-std=c++17", "-cudart", "static", "-DCUDA_KERNEL", "-Xptxas=-v"]
    flags += ["-ccbin", cxx, *through]
    for arch in archs:
        number = arch.replace("+PTX", "").replace(".", "")
        own = "90a" if number == "90" and src.endswith(HOPPER) else number
        flags.append(f"-gencode=arch=compute_{own},code=sm_{own}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def arch_label(archs: Sequence[str]) -> str:
    """ "sm_80…sm_90" of `archs`."""
    sms = ["sm_" + a.replace("+PTX", "").replace(".", "") for a in archs]
    return sms[0] + (f"…{sms[-1]}" if len(sms) > 1 else "")
