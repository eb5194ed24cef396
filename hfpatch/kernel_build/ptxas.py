"""What ptxas says of the kernels: registers, spills, shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from .errors import KernelBuildError


def parse_ptxas(text: str) -> list[dict[str, Any]]:
    """What `ptxas -v` says of each kernel.

    Returns:
        A dict for each kernel and architecture: `kernel` (mangled), `arch` ("sm_90"), `registers`
        (per thread), `stack`, `spill_stores`, `spill_loads` (bytes per thread), `shared` (bytes per
        block).
    """
    found = []
    for entry in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(\w+)' for '(sm_\w+)'", entry)
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry
        )
        used = re.search(r"Used (\d+) registers", entry)
        if name is None or frame is None or used is None:
            raise KernelBuildError(f"`ptxas -v` said what was not expected: {entry[:300]}")
        shared = re.search(r"(\d+) bytes smem", entry)
        stack, stores, loads = map(int, frame.groups())
        found.append(
            {
                "kernel": name[1],
                "arch": name[2],
                "registers": int(used[1]),
                "stack": stack,
                "spill_stores": stores,
                "spill_loads": loads,
                "shared": int(shared[1]) if shared else 0,
            }
        )
    return found


def demangle(found: list[dict[str, Any]]) -> None:
    """Gives kernels of `parse_ptxas` readable names, where `c++filt` is installed."""
    if shutil.which("c++filt"):
        names = "\n".join(kernel["kernel"] for kernel in found)
        done = subprocess.run(["c++filt"], input=names, text=True, stdout=subprocess.PIPE)
        for kernel, name in zip(found, done.stdout.splitlines(), strict=True):
            name = name.replace("(anonymous namespace)::", "").replace("hfp::cuda::", "")
            kernel["kernel"] = re.sub(r"^void |\([^()]*\)$", "", name)


def print_resources(found: list[dict[str, Any]]) -> int:
    """A line for each kernel; returns how many spill."""
    print("file arch registers spill_stores spill_loads stack shared kernel")
    spilling = 0
    for k in found:
        spills = k["spill_stores"] or k["spill_loads"]
        spilling += bool(spills)
        numbers = " ".join(
            f"{k[name]:>4}"
            for name in ("registers", "spill_stores", "spill_loads", "stack", "shared")
        )
        mark = "  <- spills" if spills else ""
        print(f"{k['file']} {k['arch']} {numbers} {k['kernel']}{mark}")
    print(f"{len(found)} kernels, {spilling} with spills")
    return spilling
