"""`lab env`: what the steps need, what of it is here, and what to do about the rest."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.lab import clocks, ncu
from hfpatch.lab.compiling import MIN_CUDA
from hfpatch.lab.problems import ToolMissing

MIN_CAPABILITY = (7, 0)
BACKENDS = ("cpu", "cuda", "triton")


@dataclass(frozen=True)
class Need:
    """One thing that steps need.

    Attributes:
        found: what is here; "" for nothing.
        wanted: the least that does.
        fits: whether it does.
        steps: those that stop without it.
        advice: what to do.
        backends: the kernels that need it.
    """

    name: str
    found: str
    wanted: str
    fits: bool
    steps: tuple[str, ...]
    advice: str
    backends: tuple[str, ...]


def needs() -> list[Need]:
    """All of them, on this machine."""
    import torch

    gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if gpu else (0, 0)
    found = [
        Need("Python", platform.python_version(), "3.10", True, (), "", BACKENDS),
        Need("torch", str(torch.__version__), "2.11", True, (), "", BACKENDS),
        _compiler(),
        Need(
            "GPU",
            f"{torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})" if gpu else "",
            "compute capability 7.0",
            gpu and capability >= MIN_CAPABILITY,
            ("check", "profile", "record", "report"),
            "run the lab on a machine with a CUDA GPU and a torch for it; .c and .cpp files, "
            "kernel projects, Python files and ops go on with --device cpu",
            ("cuda", "triton"),
        ),
        _nvcc(),
        _ncu(),
        _package(
            "triton", ("check", "profile", "record", "report"), "pip install triton", ("triton",)
        ),
        _package("nsight-python", (), "not needed: `ncu` is run by itself", ("cuda", "triton")),
        _package(
            "matplotlib", ("the picture of report",), "pip install 'hfpatch[bench]'", BACKENDS
        ),
    ]
    return found


def _compiler() -> Need:
    from hfpatch.kernel_build.errors import KernelBuildError
    from hfpatch.kernel_build.toolchain import find_cxx

    try:
        path = find_cxx()
    except KernelBuildError:
        path = ""
    steps = ("check of .c and .cpp files and of kernel projects",)
    return Need("C++ compiler", path, "any", bool(path), steps, "install g++ or clang", ("cpu",))


def _nvcc() -> Need:
    from hfpatch.kernel_build.errors import KernelBuildError
    from hfpatch.kernel_build.toolchain import find_nvcc

    wanted = ".".join(map(str, MIN_CUDA))
    try:
        nvcc = find_nvcc()
        found, fits = nvcc.release, nvcc.version >= MIN_CUDA
    except KernelBuildError:
        found, fits = "", False
    return Need(
        "CUDA (nvcc)", found, wanted, fits, ("check of .cu files",),
        "install the CUDA toolkit, or set `CUDA_HOME`", ("cuda",),
    )  # fmt: skip


def _ncu() -> Need:
    try:
        _, version = ncu.find()
        found, fits = ".".join(map(str, version)), True
    except ToolMissing as e:
        found, fits = ("", False) if "PATH" in str(e) else (str(e).split(",")[0], False)
    return Need(
        "Nsight Compute", found, ".".join(map(str, ncu.MIN_VERSION)), fits, ("profile",),
        "install it, or profile by timings: `hfpatch lab profile --roofline`", ("cuda", "triton"),
    )  # fmt: skip


def _package(name: str, steps: tuple[str, ...], advice: str, backends: tuple[str, ...]) -> Need:
    from importlib import metadata

    module = {"nsight-python": "nsight"}.get(name, name)
    here = importlib.util.find_spec(module) is not None
    try:
        found = metadata.version(name) if here else ""
    except metadata.PackageNotFoundError:
        found = "yes"
    return Need(name, found, "any", here, steps, advice, backends)


def report(backend: str | None) -> dict[str, Any]:
    """What `lab env` says.

    Args:
        backend: "cpu", "cuda" or "triton"; None: "cuda" where there is a GPU, else "cpu".
    """
    found = needs()
    if backend is None:
        backend = "cuda" if next(n.fits for n in found if n.name == "GPU") else "cpu"
    missing = [n for n in found if not n.fits and n.steps and backend in n.backends]
    stopped = [n for n in missing if not n.steps[0].startswith("the picture")]
    return {
        "backend": backend,
        "fits": not stopped,
        "needs": [asdict(n) for n in found],
        "missing": [n.name for n in missing],
        "stopped": sorted({s for n in stopped for s in n.steps}),
        "clocks": clocks.current(),
    }


def as_markdown(found: dict[str, Any]) -> str:
    """`env_check.md`."""
    whole = "complete" if found["fits"] else "incomplete"
    lines = [
        f"# Environment for {found['backend']} kernels: {whole}",
        "",
        "| | here | at least | | what to do |",
        "|---|---|---|---|---|",
    ]
    for n in found["needs"]:
        needed = found["backend"] in n["backends"]
        verdict = "ok" if n["fits"] else "**missing**" if needed and n["steps"] else "not needed"
        advice = "" if n["fits"] else n["advice"]
        if not n["fits"] and needed and n["steps"]:
            advice = f"stops {', '.join(n['steps'])}: {advice}"
        lines.append(
            f"| {n['name']} | {n['found'] or '-'} | {n['wanted']} | {verdict} | {advice} |"
        )
    if found["clocks"]:
        said = ", ".join(f"{k} {v}" for k, v in found["clocks"].items())
        lines += ["", f"Clocks now: {said}. They are left alone unless `--lock-clocks` holds them."]
    return "\n".join([*lines, ""])
