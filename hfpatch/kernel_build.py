"""Compile the kernels named by ``build.toml`` and write them in the Kernel Hub's layout.

Any kernel-builder project for CPU and CUDA on torch's stable ABI: hfpatch's own, and those that
`hfpatch kernel new` makes.

The result, ``<out>/build/<variant>/``, is what `kernels.get_local_kernel` and `kernels.get_kernel`
load: the Python files of ``torch-ext/``, a generated ``_ops.py``, one shared library on torch's
stable ABI, and ``metadata.json``. Hub releases come from kernel-builder, which reads the same
``build.toml``; this module is for ``pip install``, `hfpatch kernel build` and development.

It needs the standard library only (and ``tomli`` on Python 3.10), never torch or hfpatch, since
``setup.py`` loads it by path in an isolated environment. Environment variables:

- ``CXX``: the C++ compiler (default: ``g++``, then ``clang++``).
- ``CUDA_HOME``: the CUDA toolkit (default: the one of ``nvcc`` on ``PATH``).
- ``HFPATCH_CUDA_ARCHS``: ``all`` (default), ``native``, ``none`` or a list: ``8.0;9.0+PTX``.
- ``HFPATCH_TORCH_DIR``: the ``torch`` package directory to compile against.
- ``MAX_JOBS``: how many compilers run at once (default: the number of CPUs).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "BuildResult",
    "BuiltVariant",
    "KernelBuildError",
    "ToolchainMissing",
    "build",
    "build_available",
    "cuda_archs",
    "digest",
    "find_torch",
    "main",
    "read_project",
    "resources",
]

MIN_TORCH = (2, 11)
MIN_ARCH = (7, 5)

# Symbols that the library takes from libtorch's own OpenMP runtime: linking a second runtime would
# start a second thread pool, deaf to torch.set_num_threads.
_OPENMP = re.compile(r"^(GOMP_|omp_|__kmpc_)")
# What the interpreter itself provides.
_PYTHON = re.compile(r"^_?Py[A-Z_]")

_CXX_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-gnu-unique",
)

_REGISTRATION_H = """\
#pragma once
#include <torch/csrc/stable/library.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, KEY, MODULE) \\
  STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, MODULE)
#define REGISTER_EXTENSION(NAME)  // loaded by torch.ops.load_library: no Python module needed
"""

# glibc 2.29 gave these new versions, which differ in errno alone; asking for the old ones lets the
# library load wherever manylinux_2_28 does.
_PORTABLE_H = """\
#if defined(__linux__) && defined(__GNUC__) && !defined(__CUDA_ARCH__)
#if defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp,exp@GLIBC_2.17");
__asm__(".symver exp2,exp2@GLIBC_2.17");
__asm__(".symver log,log@GLIBC_2.17");
__asm__(".symver log2,log2@GLIBC_2.17");
__asm__(".symver pow,pow@GLIBC_2.17");
#endif
#endif
"""

# What torch's headers use of libraries newer than manylinux_2_28's: constructors that libstdc++
# exports from GLIBCXX_3.4.26 on, and a hint of glibc 2.32 that lets `shared_ptr` skip its atomics.
# An own copy, kept inside by the version script.
_PORTABLE_CPP = """\
#include <sstream>
#if defined(__GLIBCXX__)
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_istringstream<char>::basic_istringstream();
#endif
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
"""
_VERSION_SCRIPT = (
    "{ local: _ZS*; _ZNS*; _ZNKS*; _ZZNS*; _ZZNKS*; _ZGVNS*; _ZGVZNS*; _ZTIS*; _ZTSS*; _ZTVS*;\n"
    "  __libc_single_threaded; };\n"
)

# What the static CUDA runtime takes of glibc, by the library that had it before glibc 2.34 moved
# them all into libc under a new version. Linking against stubs of those libraries keeps the old
# versions, which every glibc still has, so that the result loads on manylinux_2_28 too.
_PTHREAD = """
    atfork attr_destroy attr_getdetachstate attr_init attr_setdetachstate attr_setstacksize cancel
    condattr_destroy condattr_init condattr_setclock condattr_setpshared create detach getspecific
    join key_create key_delete kill mutex_timedlock mutex_trylock mutexattr_destroy mutexattr_init
    mutexattr_setpshared mutexattr_settype once rwlock_destroy rwlock_init rwlock_rdlock
    rwlock_timedrdlock rwlock_timedwrlock rwlock_tryrdlock rwlock_trywrlock rwlock_unlock
    rwlock_wrlock rwlockattr_destroy rwlockattr_init rwlockattr_setpshared setname_np setspecific
    spin_destroy spin_init spin_lock spin_trylock spin_unlock
"""
_SEM = "sem_destroy sem_init sem_open sem_close sem_post sem_timedwait sem_trywait sem_wait"
_OLD_GLIBC = {
    "libpthread.so.0": [f"pthread_{name}" for name in _PTHREAD.split()] + _SEM.split(),
    "libdl.so.2": ["dlclose", "dlerror", "dlopen", "dlsym", "dlvsym", "dladdr", "dlmopen"],
    "librt.so.1": ["shm_open", "shm_unlink"],
}
# Version of all of them, by machine, and of those that came later.
_OLD_VERSION = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
_LATER = {
    "x86_64": {
        "dlmopen": "GLIBC_2.3.4",
        "pthread_condattr_setclock": "GLIBC_2.3.3",
        "pthread_setname_np": "GLIBC_2.12",
    }
}

_OPS_PY = """\
from pathlib import Path

import torch

ops = torch.ops.{id}

# Another copy of this build may be loaded already; its operators are these.
if not hasattr(ops, "{probe}"):
    torch.ops.load_library(str(Path(__file__).parent / "{library}"))


def add_op_namespace_prefix(op_name):
    return "{id}::" + op_name
"""

_COMPAT_PY = """\
import importlib.util
import sys
from pathlib import Path

# Versions of `kernels` that look for the package inside the variant directory land here.
_path = Path(__file__).resolve().parent.parent / "__init__.py"
_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _path)
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
globals().update({{k: v for k, v in vars(sys.modules[_name]).items() if not k.startswith("__")}})
__all__ = sys.modules[_name].__all__
"""


class KernelBuildError(RuntimeError):
    """The kernels could not be built; the message ends with what the failing command said."""


class ToolchainMissing(KernelBuildError):
    """The machine lacks what the build needs: a compiler, torch's headers, nvcc, a GPU."""


@dataclass(frozen=True)
class BuiltVariant:
    """One directory ``build/<name>/`` that was written."""

    name: str
    path: Path
    backend: str
    id: str
    archs: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass
class BuildResult:
    """What `build_available` built, and why it did not build the rest (by backend)."""

    variants: list[BuiltVariant] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


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
    path: str
    root: Path
    version: tuple[int, int]


@dataclass(frozen=True)
class _Unit:
    """One source file to compile."""

    label: str
    command: tuple[str, ...]
    object: Path


# -------------------------------------------------------------------------------------------------
# What the machine has


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
        text = (path / "version.py").read_text(encoding="utf-8")
        version = _search(r"__version__ *= *['\"]([^'\"]+)", text) or "0.0"
        cuda = _search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", text)
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
    text = _run([path, "-dryrun", "-E", "-x", "cu", os.devnull], check=False)
    root = Path(_search(r"^#\$ TOP=(.*)$", text) or Path(path).resolve().parent.parent).resolve()
    release = _search(r"release (\d+\.\d+)", _run([path, "--version"])) or "0.0"
    major, minor = (int(n) for n in release.split("."))
    return Nvcc(path, root, (major, minor))


def cuda_archs(request: str | None, nvcc: Nvcc) -> list[str]:
    """Resolve ``request`` (default: ``HFPATCH_CUDA_ARCHS``, then ``all``) to capabilities.

    Returns:
        Capabilities in ascending order such as ``["8.0", "9.0+PTX"]``; empty for none.

    Raises:
        KernelBuildError: not a list of capabilities, or one that nvcc does not know.
    """
    text = (request or os.environ.get("HFPATCH_CUDA_ARCHS") or "all").strip().lower()
    if text == "none":
        return []
    found = re.findall(r"^compute_(\d+)$", _run([nvcc.path, "--list-gpu-arch"]), re.MULTILINE)
    known = sorted({(int(n[:-1]), int(n[-1])) for n in found})
    known = [arch for arch in known if arch >= MIN_ARCH]
    if text == "all":
        return [_dotted(a) for a in known[:-1]] + [_dotted(known[-1]) + "+PTX"]
    if text == "native":
        text = ";".join(_gpus())
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


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    out = _run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], check=False)
    return re.findall(r"^\s*(\d+\.\d+)\s*$", out, re.MULTILINE)


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"


def _search(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else None


def _run(command: Sequence[str], cwd: Path | None = None, check: bool = True) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise KernelBuildError(f"`{command[0]}` could not be started: {error}") from error
    if check and done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-40:])
        raise KernelBuildError(
            f"`{Path(command[0]).name}` failed with status {done.returncode}\n"
            f"command: {shlex.join(command)}\n{tail}"
        )
    return done.stdout


def read_project(project: Path) -> dict[str, Any]:
    """``build.toml`` of a kernel project, as plain data.

    Raises:
        KernelBuildError: there is none, it is not TOML, or it lacks what a build needs.
    """
    path = project / "build.toml"
    try:
        toml: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise KernelBuildError(
            f"`{project}` is not a kernel project: it has no `build.toml`; "
            "`hfpatch kernel new NAME` makes one"
        ) from error
    except (OSError, ValueError) as error:
        raise KernelBuildError(f"`{path}` cannot be read: {error}") from error
    general = toml.get("general")
    missing = [
        f"general.{key}"
        for key in ("name", "version", "license", "backends")
        if not isinstance(general, dict) or key not in general
    ]
    if not isinstance(toml.get("torch"), dict) or "src" not in toml["torch"]:
        missing.append("torch.src")
    if missing:
        raise KernelBuildError(f"`{path}` lacks {', '.join(f'`{name}`' for name in missing)}")
    if wrong := _wrong_types(toml):
        raise KernelBuildError(f"`{path}`: {wrong}")
    return toml


def _wrong_types(toml: dict[str, Any]) -> str | None:
    """What is not of the type that everything here reads; kernels' parser judges the rest."""
    general, kernel = toml["general"], toml.get("kernel", {})
    version = general["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        return f"`general.version` must be a whole number from 0 up, got {version!r}"
    if not isinstance(general["backends"], list):
        return f"`general.backends` must be a list, got {general['backends']!r}"
    tables = {f"general.{key}": general.get(key, {}) for key in ("hub", "cpu", "cuda")}
    tables["kernel"] = kernel
    if isinstance(kernel, dict):
        tables |= {f"kernel.{name}": section for name, section in kernel.items()}
    for name, table in tables.items():
        if not isinstance(table, dict):
            return f"`{name}` must be a table, got {table!r}"
    for name, table in {"torch": toml["torch"], **tables}.items():
        if not isinstance(table.get("src", []), list):
            return f"`{name}.src` must be a list of files, got {table['src']!r}"
    return None


# -------------------------------------------------------------------------------------------------
# Compiling


class _Builder:
    """Builds one backend of one project."""

    def __init__(self, project: Path, backend: str, archs: str | None, verbose: bool) -> None:
        self.project = project
        self.backend = backend
        self.verbose = verbose
        self.toml: dict[str, Any] = read_project(project)
        self.general = self.toml["general"]
        self.package = self.general["name"].replace("-", "_")
        if backend not in self.general["backends"]:
            raise KernelBuildError(
                f"`{backend}`: expected a backend of build.toml "
                f"({', '.join(self.general['backends'])})"
            )
        abi = self.toml["torch"].get("stable-abi", {})
        #: The stable ABI that it is built for, e.g. "2.11": one for all backends, or one for each.
        self.abi = str(abi.get(backend, "") if isinstance(abi, dict) else abi)
        if not re.fullmatch(r"\d\.\d+", self.abi):
            raise KernelBuildError(
                f'`{project / "build.toml"}`: expected `{backend} = "2.11"` under '
                "`[torch.stable-abi]`: builds on torch's stable ABI only are made here, others by "
                "kernel-builder"
            )
        name = self.general["name"]
        if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
            raise KernelBuildError(
                f"`general.name` must be of lower-case letters, digits and dashes, got {name!r}"
            )
        init = project / "torch-ext" / self.package / "__init__.py"
        if not init.is_file():
            raise KernelBuildError(
                f"`{init}` is not there: the Python package of a kernel called "
                f"`{name}` is expected in that folder"
            )
        self.cxx = find_cxx()
        self.torch = find_torch()
        self.nvcc = find_nvcc() if backend == "cuda" else None
        self.archs = cuda_archs(archs, self.nvcc) if self.nvcc else []
        if self.nvcc and not self.archs:
            raise ToolchainMissing("no CUDA architecture to build for (none asked, or no GPU here)")
        self.python_headers = python_headers()
        self.cxx_version = _run([self.cxx, "--version"]).splitlines()[0]
        self.clang = "clang" in self.cxx_version
        self.cache = self._cache_dir()
        self.generated = self.cache / "generated"
        _write(self.generated / "registration.h", _REGISTRATION_H)
        _write(self.generated / "portable.h", _PORTABLE_H)
        _write(self.generated / "portable.cpp", _PORTABLE_CPP)
        _write(self.generated / "exports.map", _VERSION_SCRIPT)
        self.id = f"_{self.package}_{backend}_{self._source_hash()}"

    def _cache_dir(self) -> Path:
        root = self.project / ".cache"
        if not os.access(self.project, os.W_OK):
            key = hashlib.sha256(str(self.project).encode()).hexdigest()[:12]
            root = Path(tempfile.gettempdir()) / f"hfpatch-{os.getuid()}-{key}"
        path = root / "kernel_build" / self.backend
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def variant(self) -> str:
        abi = self.abi.replace(".", "")
        name = f"cu{self.nvcc.version[0]}{self.nvcc.version[1]}" if self.nvcc else self.backend
        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(
            platform.machine(), platform.machine()
        )
        return f"torch-stable-abi{abi}-{name}-{machine}-{platform.system().lower()}"

    def _sections(self) -> list[dict[str, Any]]:
        sections = self.toml.get("kernel", {}).values()
        return [self.toml["torch"]] + [s for s in sections if s["backend"] == self.backend]

    def _source_hash(self) -> str:
        """Names the operators' namespace: two different builds can live in one process."""
        sha = hashlib.sha256()
        sha.update(Path(__file__).read_bytes())
        files = {self.project / "build.toml", *self._python_files()}
        for section in self._sections():
            files.update(self.project / src for src in section["src"])
        for path in sorted(files):
            if not path.is_file():
                raise KernelBuildError(f"build.toml names `{path}`, which does not exist")
            sha.update(path.relative_to(self.project).as_posix().encode() + b"\0")
            sha.update(path.read_bytes())
        flags = [*_CXX_FLAGS, *self.archs, self.cxx_version, self.torch.version]
        flags.append(f"python headers: {bool(self.python_headers)}")
        sha.update("\0".join(flags).encode())
        return sha.hexdigest()[:10]

    def _python_files(self) -> list[Path]:
        root = self.project / "torch-ext" / self.package
        suffixes = {"." + ext for ext in self.toml["torch"].get("pyext", ["py", "pyi"])}
        return [p for p in sorted(root.rglob("*")) if p.suffix in suffixes and p.is_file()]

    def units(self) -> list[_Unit]:
        """One per source file, the slow ones first."""
        result = []
        sources = [
            (src, section)
            for section in self._sections()
            for src in section["src"]
            if Path(src).suffix in (".cpp", ".cc", ".cu")
        ]
        count = max(1, sum(src.endswith(".cu") for src, _ in sources))
        threads = max(1, min(_jobs() // count, len(self.archs)))
        for src, section in sorted(sources, key=lambda item: not item[0].endswith(".cu")):
            target = self.cache / (src.replace("/", "-") + ".o")
            includes = [f"-I{d}" for d in section.get("include", [])]
            binding = section is self.toml["torch"]
            command = (
                self._nvcc_command(section) if src.endswith(".cu") else self._cxx_command(section)
            )
            if binding:
                includes.append(f"-I{self.generated}")
                includes += [f"-isystem{directory}" for directory in self.python_headers]
                command.append(f"-DTORCH_EXTENSION_NAME={self.id}")
            if binding or "torch" in section.get("depends", []):
                includes += ["-isystem", str(self.torch.include)]
                command.append(self._target_version())
            if src.endswith(".cu") and threads > 1:
                command.append(f"-t{threads}")
            command += [*includes, "-c", src, "-o", str(target)]
            result.append(_Unit(self._label(src), tuple(command), target))
        source, target = self.generated / "portable.cpp", self.cache / "portable.cpp.o"
        command = [*self._cxx_command({}), "-c", str(source), "-o", str(target)]
        result.append(_Unit(self._label(source.name), tuple(command), target))
        return result

    def _label(self, src: str) -> str:
        name = Path(src).name
        if not src.endswith(".cu"):
            return f"{Path(self.cxx).name} {name}"
        sms = ["sm_" + a.replace("+PTX", "").replace(".", "") for a in self.archs]
        return f"nvcc {name} ({sms[0]}" + (f"…{sms[-1]})" if len(sms) > 1 else ")")

    def _target_version(self) -> str:
        major, minor = self.abi.split(".")
        return f"-DTORCH_TARGET_VERSION={(int(major) << 56) | (int(minor) << 48):#x}ULL"

    def _host_flags(self) -> list[str]:
        flags = [f for f in _CXX_FLAGS if not (self.clang and f == "-fno-gnu-unique")]
        # No path of this machine may end in the binary (by way of __FILE__).
        flags += [f"-ffile-prefix-map={self.torch.include}=torch-include"]
        flags += [f"-ffile-prefix-map={self.project}=."]
        return flags

    def _cxx_command(self, section: dict[str, Any]) -> list[str]:
        define = f"-D{self.backend.upper()}_KERNEL"
        archs = f'-DHFP_CUDA_ARCHS="{" ".join(self.archs)}"'
        portable = ["-include", str(self.generated / "portable.h")]
        flags = [*self._host_flags(), *portable, define, archs]
        return [self.cxx, *flags, *section.get("cxx-flags", [])]

    def _nvcc_command(self, section: dict[str, Any]) -> list[str]:
        assert self.nvcc is not None
        host = [f for f in self._host_flags() if not f.startswith(("-O", "-std"))]
        command = [self.nvcc.path, "-O3", "-std=c++17", "-cudart", "static", "-DCUDA_KERNEL"]
        command.append("-Xptxas=-v")  # for `resources`
        command += ["-ccbin", self.cxx, *(f"-Xcompiler={flag}" for flag in host)]
        for arch in self.archs:
            number = arch.replace("+PTX", "").replace(".", "")
            command.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                command.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return command + list(section.get("cuda-flags", []))

    def compile(self) -> list[Path]:
        units = self.units()
        done = 0
        lock = threading.Lock()

        def one(unit: _Unit) -> None:
            nonlocal done
            start = time.perf_counter()
            fresh = self._compile_unit(unit)
            with lock:
                done += 1
                took = f"{time.perf_counter() - start:.1f} s" if fresh else "up to date"
                self.say(f"[{done}/{len(units)}] {unit.label} {took}")

        with ThreadPoolExecutor(_jobs()) as pool:
            futures = [pool.submit(one, unit) for unit in units]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        return [unit.object for unit in units]

    def _compile_unit(self, unit: _Unit) -> bool:
        """Returns whether a compiler ran: an object is reused while its command and files last."""
        state = unit.object.with_suffix(".json")
        try:
            record = json.loads(state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = {}
        if unit.object.is_file() and record.get("key") == self._key(unit, record.get("deps", [])):
            return False
        state.unlink(missing_ok=True)
        depfile = unit.object.with_suffix(".d")
        partial = unit.object.with_suffix(f".{os.getpid()}.o")
        command = [*unit.command[:-1], str(partial), "-MMD", "-MF", str(depfile)]
        said = _run(command, cwd=self.project)
        deps = _parse_depfile(depfile.read_text(encoding="utf-8"))
        os.replace(partial, unit.object)
        record = {"key": self._key(unit, deps), "deps": deps, "kernels": _parse_ptxas(said)}
        _write(state, json.dumps(record))
        return True

    def resources(self) -> list[dict[str, Any]]:
        """What ptxas said of every kernel when it was compiled; see `_parse_ptxas`."""
        found = []
        for unit in self.units():
            if unit.command[0] == (self.nvcc.path if self.nvcc else None):
                record = json.loads(unit.object.with_suffix(".json").read_text(encoding="utf-8"))
                found += [{"file": unit.object.stem, **kernel} for kernel in record["kernels"]]
        return found

    def _key(self, unit: _Unit, deps: list[str]) -> str:
        sha = hashlib.sha256("\0".join(unit.command).encode())
        sha.update(f"{self.cxx_version}\0{self.torch.version}\0{self.nvcc}".encode())
        for dep in deps:
            path = self.project / dep
            sha.update(dep.encode() + b"\0")
            sha.update(path.read_bytes() if path.is_file() else b"")
        return sha.hexdigest()

    def link(self, objects: Sequence[Path], target: Path) -> None:
        command = [self.cxx, "-shared", "-s", "-o", str(target), *map(str, objects)]
        command += ["-Wl,--no-as-needed", f"-L{self.torch.lib}", "-ltorch_cpu"]
        if self.nvcc:
            if not (self.torch.lib / "libtorch_cuda.so").is_file():
                command.append(f"-L{self._torch_cuda_stub()}")
            libs = [self.nvcc.root / "lib64", *self.nvcc.root.glob("targets/*/lib")]
            command += ["-ltorch_cuda", *(f"-L{lib}" for lib in libs if lib.is_dir())]
            command += ["-lcudart_static", *self._old_glibc()]
        openmp = [*self.torch.lib.glob("libgomp*"), *self.torch.path.glob("../torch.libs/libgomp*")]
        if self.clang or not openmp:
            command.append("-fopenmp")
        # All symbols must resolve, except OpenMP's and Python's: warn and look at the warnings.
        command += ["-Wl,--as-needed", "-Wl,-z,defs", "-Wl,--warn-unresolved-symbols"]
        command += ["-Wl,--exclude-libs,ALL", "-Wl,--build-id=none"]
        command.append(f"-Wl,--version-script={self.generated / 'exports.map'}")
        output = _run(command, cwd=self.project)
        undefined = set(re.findall(r"undefined reference to [`'\"]([^`'\"]+)", output))
        undefined = {name for name in undefined if not (_OPENMP.match(name) or _PYTHON.match(name))}
        if undefined:
            raise KernelBuildError(
                "undefined symbols; is a source missing in build.toml? "
                + ", ".join(sorted(undefined))
            )

    def _old_glibc(self) -> list[str]:
        """What stands for `-ldl -lrt -lpthread`: stubs with the versions that old systems have."""
        machine = platform.machine()
        if platform.system() != "Linux" or machine not in _OLD_VERSION:
            return ["-ldl", "-lrt", "-lpthread"]
        libraries = []
        for soname, names in _OLD_GLIBC.items():
            versions: dict[str, list[str]] = {}
            for name in names:
                version = _LATER.get(machine, {}).get(name, _OLD_VERSION[machine])
                versions.setdefault(version, []).append(name)
            source = self.cache / "stub" / f"{soname}.c"
            script = source.with_suffix(".map")
            _write(source, "".join(f"void {name}(void) {{}}\n" for name in names))
            _write(
                script,
                "".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in versions.items()),
            )
            library = source.with_suffix("")
            command = [self.cxx, "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib"]
            command += [str(source), f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
            _run([*command, "-o", str(library)])
            libraries.append(str(library))
        return libraries

    def _torch_cuda_stub(self) -> Path:
        """Directory of a `libtorch_cuda.so` to link against where torch has none (a CPU build)."""
        directory = self.cache / "stub"
        source = directory / "stub.cpp"
        symbol = "aoti_torch_get_current_cuda_stream"
        _write(source, f'extern "C" int {symbol}(int, void **) {{ return 1; }}\n')
        command = [self.cxx, "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", str(source)]
        _run([*command, "-o", str(directory / "libtorch_cuda.so")])
        return directory

    # ---------------------------------------------------------------------------------------------
    # Packaging

    def package_variant(self, final: Path, objects: Sequence[Path]) -> None:
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".tmp-") as temporary:
            root = Path(temporary) / self.variant
            root.mkdir()
            library = f"{self.id}.abi3.so"
            self.link(objects, root / library)
            source = self.project / "torch-ext" / self.package
            for path in self._python_files():
                _write(root / path.relative_to(source), path.read_text(encoding="utf-8"))
            names = {"id": self.id, "library": library, "probe": self._first_op()}
            _write(root / "_ops.py", _OPS_PY.format(**names))
            _write(root / self.package / "__init__.py", _COMPAT_PY.format(**names))
            backend: dict[str, Any] = {"type": self.backend}
            if self.archs:
                backend["archs"] = list(self.archs)
            metadata = {
                "name": self.general["name"],
                "id": self.id,
                "version": self.general["version"],
                "license": self.general["license"],
                "python-depends": self._depends("python-depends"),
                "backend": backend,
                "digest": digest(root),
            }
            metadata |= {k: self.general[k] for k in ("upstream", "source") if k in self.general}
            if kernel_depends := self._depends("kernel-depends"):
                metadata["kernel-depends"] = kernel_depends
            _write(root / "metadata.json", json.dumps(metadata, indent=2) + "\n")
            if final.exists():
                shutil.rmtree(final)
            os.replace(root, final)

    def _depends(self, key: str) -> list[Any]:
        """What the package needs on every backend, and on this one (`general.cuda`)."""
        return [*self.general.get(key, []), *self.general.get(self.backend, {}).get(key, [])]

    def up_to_date(self, variant: Path) -> bool:
        """Whether `variant` is this very build, undamaged."""
        try:
            metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(metadata, dict) and bool(
            metadata.get("id") == self.id and metadata.get("digest") == digest(variant)
        )

    def _first_op(self) -> str:
        """Any operator of the library: `_ops.py` asks whether it is registered."""
        for section in self._sections():
            for src in section["src"]:
                text = (self.project / src).read_text(encoding="utf-8")
                name = _search(r"#define \w+_OP_TABLE\(X\)[\s\\]*X\((\w+)", text)
                name = name or _search(r"\bdef\(\s*\"(\w+)\(", text)
                if name:
                    return name
        raise KernelBuildError(
            'build.toml: no source defines an operator (`ops.def("name(...)")` or an op table '
            "`#define NAME_OP_TABLE(X)`)"
        )

    def say(self, line: str) -> None:
        if self.verbose:
            print(f"{self.general['name']} {self.backend}: {line}", flush=True)


def _jobs() -> int:
    wanted = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not re.fullmatch(r"\s*\d+\s*", wanted):
        raise KernelBuildError(f"`MAX_JOBS`: expected a whole number, got `{wanted}`")
    return max(1, int(wanted))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _parse_depfile(text: str) -> list[str]:
    names = text.replace("\\\n", " ").split(":", 1)[-1]
    return sorted({n.replace("\\ ", " ") for n in re.split(r"(?<!\\)\s+", names) if n})


def _parse_ptxas(text: str) -> list[dict[str, Any]]:
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


def digest(variant: Path) -> dict[str, Any]:
    """The ``digest`` entry of ``metadata.json``: base64 SHA-256 of each file of ``variant``."""
    files = {}
    for path in sorted(variant.rglob("*")):
        name = path.relative_to(variant).as_posix()
        if not path.is_file() or path.suffix == ".pyc" or "__pycache__" in path.parts:
            continue
        if name in ("metadata.json", "metadata.json.sigstore"):
            continue
        files[name] = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    return {"algorithm": "sha256", "files": files}


# -------------------------------------------------------------------------------------------------
# Entry points


def build(
    project_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    backends: Sequence[str] = ("cpu", "cuda"),
    archs: str | None = None,
    verbose: bool = True,
) -> list[BuiltVariant]:
    """Build every backend of ``backends`` into ``<out_dir>/build/<variant>/``.

    Objects are cached in ``<project_dir>/.cache/kernel_build`` and reused while their command,
    source and headers stay the same.

    Args:
        project_dir: where ``build.toml`` is.
        out_dir: where ``build/`` is written.
        backends: of ``cpu`` and ``cuda``.
        archs: CUDA architectures; default: ``HFPATCH_CUDA_ARCHS``, then ``all``.
        verbose: print a line for each file compiled.

    Raises:
        ToolchainMissing: the machine lacks what a backend needs.
        KernelBuildError: a compiler or the linker failed.
    """
    built = []
    for backend in backends:
        start = time.perf_counter()
        builder = _Builder(Path(project_dir).resolve(), backend, archs, verbose)
        path = Path(out_dir).resolve() / "build" / builder.variant
        if builder.up_to_date(path):
            builder.say(f"{path.name} is up to date")
        else:
            builder.package_variant(path, builder.compile())
            builder.say(f"wrote {path} in {time.perf_counter() - start:.1f} s")
        seconds = time.perf_counter() - start
        variant = BuiltVariant(path.name, path, backend, builder.id, tuple(builder.archs), seconds)
        built.append(variant)
    return built


def resources(
    project_dir: str | os.PathLike[str], archs: str | None = None, verbose: bool = True
) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of every CUDA kernel, as ptxas reports them.

    Compiles what is not up to date.

    Args:
        project_dir, archs, verbose: as in `build`.

    Returns:
        A dict for each kernel and architecture: `file`, `kernel` (its name, demangled where
        ``c++filt`` is installed), `arch` ("sm_90"), `registers` per thread, `stack`,
        `spill_stores` and `spill_loads` in bytes per thread, `shared` in bytes per block.

    Raises:
        ToolchainMissing: the machine lacks what the backend needs.
        KernelBuildError: a compiler failed.
    """
    builder = _Builder(Path(project_dir).resolve(), "cuda", archs, verbose)
    builder.compile()
    found = builder.resources()
    if shutil.which("c++filt"):
        names = "\n".join(kernel["kernel"] for kernel in found)
        done = subprocess.run(["c++filt"], input=names, text=True, stdout=subprocess.PIPE)
        for kernel, name in zip(found, done.stdout.splitlines(), strict=True):
            name = name.replace("(anonymous namespace)::", "").replace("hfp::cuda::", "")
            kernel["kernel"] = re.sub(r"^void |\([^()]*\)$", "", name)
    return found


def _print_resources(found: list[dict[str, Any]]) -> int:
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


def build_available(
    project_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    archs: str | None = None,
    verbose: bool = True,
) -> BuildResult:
    """Build what this machine can, and say why not the rest. Used by ``pip install``.

    Where a backend is missing that this machine's torch could use, ``<out_dir>/REASON.json`` says
    so: ``{"reason": text, "backends": {backend: text}}``. hfpatch's report shows it.
    """
    result = BuildResult()
    for backend in ("cpu", "cuda"):
        try:
            result.variants += build(project_dir, out_dir, (backend,), archs, verbose)
        except ToolchainMissing as error:
            result.missing[backend] = str(error)
        except KernelBuildError as error:
            result.failed[backend] = str(error)
    reasons = {**result.missing, **result.failed}
    try:
        if "cuda" in result.missing and find_torch().cuda is None:
            del reasons["cuda"]  # a CPU build of torch has no use for it
    except ToolchainMissing:
        pass
    reason = Path(out_dir) / "REASON.json"
    reason.unlink(missing_ok=True)
    if reasons:
        text = "; ".join(f"{name} kernels were not built: {why}" for name, why in reasons.items())
        _write(reason, json.dumps({"reason": text, "backends": reasons}, indent=2) + "\n")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hfpatch.kernel_build --out DIR [--backend cpu] [--archs 9.0]``"""
    parser = argparse.ArgumentParser(
        prog="python -m hfpatch.kernel_build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--project",
        default=str(Path(__file__).resolve().parent.parent),
        help="directory of build.toml (default: the source tree)",
    )
    parser.add_argument("--out", help="build/<variant>/ is written here")
    parser.add_argument(
        "--resources",
        action="store_true",
        help="print registers, spills and shared memory of every CUDA kernel instead; fails on "
        "spills",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=["cpu", "cuda"],
        help="repeatable; default: what this machine can build",
    )
    parser.add_argument("--archs", help="CUDA architectures: all, native, none or 8.0;9.0+PTX")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    if not (args.out or args.resources):
        parser.error("`--out` or `--resources` is needed")
    try:
        if args.resources:
            found = resources(args.project, args.archs, not args.quiet)
            return int(_print_resources(found) > 0)
        if args.backend:
            build(args.project, args.out, args.backend, args.archs, not args.quiet)
            return 0
        result = build_available(args.project, args.out, args.archs, not args.quiet)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for backend, why in {**result.missing, **result.failed}.items():
        print(f"{backend}: not built: {why}", file=sys.stderr)
    return 1 if result.failed or not result.variants else 0


if __name__ == "__main__":
    sys.exit(main())
