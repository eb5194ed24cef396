"""What this machine has to build with: torch's headers, compilers, GPUs, CPUs."""

from __future__ import annotations

import os
import re
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .commands import run, search
from .errors import KernelBuildError, ToolchainMissing

MIN_TORCH = (2, 11)
MIN_ARCH = (7, 5)


@dataclass(frozen=True)
class Torch:
    """A torch package on disk."""

    path: Path
    version: str
    cuda: str | None

    @property
    def include(self) -> Path:
        return self.path / "include"

    @property
    def lib(self) -> Path:
        return self.path / "lib"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA toolkit."""

    path: str
    root: Path
    version: tuple[int, int]
    release: str = ""  # to the last digit


def python_headers() -> list[str]:
    """Directories of this interpreter's `Python.h`; none where its headers are not installed."""
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    found = [path for path in paths if path and (Path(path) / "Python.h").is_file()]
    return list(paths) if found else []


def find_torch() -> Torch:
    """The torch package that the target interpreter would import, without importing it.

    Raises:
        ToolchainMissing: there is none, it has no headers, or it is older than 2.11.
    """
    override = os.environ.get("HFPATCH_TORCH_DIR")
    if override:
        candidates = [Path(override)]
    else:
        roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
        if site.ENABLE_USER_SITE:
            roots.append(site.getusersitepackages())
        # A build isolated in its own virtual environment still sees the user's through this.
        venv = os.environ.get("VIRTUAL_ENV")
        if venv:
            roots += [str(p) for p in sorted(Path(venv).glob("lib/python3*/site-packages"))]
        candidates = [Path(root) / "torch" for root in roots if root]
    for path in candidates:
        if not (path / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            continue
        if not (path / "version.py").is_file():
            raise ToolchainMissing(
                f"torch in `{path}`: expected torch's Python package, got its headers without "
                "`version.py`, as libtorch has them; set `HFPATCH_TORCH_DIR` to the package"
            )
        text = (path / "version.py").read_text(encoding="utf-8")
        version = search(r"__version__ *= *['\"]([^'\"]+)", text) or "0.0"
        cuda = search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", text)
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        if numbers < MIN_TORCH:
            raise ToolchainMissing(
                f"torch in `{path}`: expected version {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, "
                f"got {version}; upgrade torch"
            )
        return Torch(path, version, cuda)
    where = f"in `HFPATCH_TORCH_DIR` ({override})" if override else "for this interpreter"
    raise ToolchainMissing(
        f"no torch headers found {where}; install torch >= 2.11 first, or set `HFPATCH_TORCH_DIR`"
    )


def find_cxx() -> str:
    """The C++ compiler.

    Raises:
        ToolchainMissing: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    raise ToolchainMissing(
        f"no C++ compiler: `CXX` is `{wanted}`, which is not an executable"
        if wanted
        else "no C++ compiler: neither `g++` nor `clang++` is on `PATH`"
    )


def find_nvcc() -> Nvcc:
    """The CUDA compiler.

    Raises:
        ToolchainMissing: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if path is None:
        where = f"in `CUDA_HOME` ({home})" if home else "on `PATH` (or set `CUDA_HOME`)"
        raise ToolchainMissing(f"no CUDA compiler: no `nvcc` {where}")
    # `nvcc` on PATH may be a wrapper; the dry run prints the toolkit that it really uses.
    text = run([path, "-dryrun", "-E", "-x", "cu", os.devnull], check=False)
    root = Path(search(r"^#\$ TOP=(.*)$", text) or Path(path).resolve().parent.parent).resolve()
    said = run([path, "--version"])
    release = search(r"release (\d+\.\d+)", said)
    if release is None:
        raise ToolchainMissing(
            f"no CUDA compiler: `{path} --version`: expected `release X.Y`, got `{said.strip()}`"
        )
    major, minor = (int(n) for n in release.split("."))
    return Nvcc(path, root, (major, minor), search(r"\bV(\d[\d.]*)", said) or release)


def cuda_archs(request: str | None, nvcc: Nvcc) -> list[str]:
    """Resolve ``request`` (default: ``HFPATCH_CUDA_ARCHS``, then the GPUs that are here, then,
    where there is none, ``all``) to capabilities. ``native`` has PTX of the newest beside, so that
    a GPU which comes later runs it too.

    Returns:
        Capabilities in ascending order such as ``["8.0", "9.0+PTX"]``; empty for none.

    Raises:
        KernelBuildError: not a list of capabilities, or one that nvcc does not know.
    """
    text = (request or os.environ.get("HFPATCH_CUDA_ARCHS") or "").strip().lower()
    text = text or ("native" if gpus() else "all")
    if text == "none":
        return []
    found = re.findall(r"^compute_(\d+)$", run([nvcc.path, "--list-gpu-arch"]), re.MULTILINE)
    known = sorted({(int(n[:-1]), int(n[-1])) for n in found})
    known = [arch for arch in known if arch >= MIN_ARCH]
    if text == "all":
        return [_dotted(a) for a in known[:-1]] + [_dotted(known[-1]) + "+PTX"]
    if text == "native":
        return _native(known)
    archs: dict[tuple[int, int], bool] = {}
    for item in re.split(r"[;,\s]+", text):
        if not item:
            continue
        match = re.fullmatch(r"(\d+)\.(\d)(\+ptx)?", item)
        arch = (int(match[1]), int(match[2])) if match else None
        if match is None or arch not in known:
            raise KernelBuildError(
                f"`{'archs' if request else 'HFPATCH_CUDA_ARCHS'}`: expected `all`, `native`, "
                f"`none` or capabilities among {', '.join(map(_dotted, known))} (each with an "
                f"optional `+PTX`), got `{item}`"
            )
        assert arch is not None
        archs[arch] = archs.get(arch, False) or bool(match[3])
    return [_dotted(arch) + ("+PTX" if archs[arch] else "") for arch in sorted(archs)]


def _native(known: list[tuple[int, int]]) -> list[str]:
    """Those of the GPUs that are here, for which this nvcc can compile; a GPU that it does not know
    gets PTX of the newest below it."""
    found = {(int(a), int(b)) for a, b in (text.split(".") for text in gpus())}
    archs = sorted({max(k for k in known if k <= gpu) for gpu in found if gpu >= known[0]})
    return [_dotted(a) for a in archs[:-1]] + [_dotted(a) + "+PTX" for a in archs[-1:]]


def gpus() -> list[str]:
    """Capabilities of the GPUs of this machine, such as "9.0"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    out = run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], check=False)
    return re.findall(r"^\s*(\d+\.\d+)\s*$", out, re.MULTILINE)


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"


def jobs() -> int:
    """How many compilers run at once: `MAX_JOBS`, or as many as this process may use processors.

    Raises:
        KernelBuildError: `MAX_JOBS` is no number.
    """
    wanted = os.environ.get("MAX_JOBS") or str(_processors())
    if not re.fullmatch(r"\s*\d+\s*", wanted):
        raise KernelBuildError(f"`MAX_JOBS`: expected a whole number, got `{wanted}`")
    return max(1, int(wanted))


def _processors() -> int:
    """Fewer than the machine has, in a container or under `taskset`; not every system says it."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1
