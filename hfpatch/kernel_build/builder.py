"""How one backend of a kernel project is compiled and linked."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .commands import run, write
from .errors import KernelBuildError, ToolchainMissing
from .estimate import cost
from .flags import CXX_FLAGS, QUICK_FLAGS, arch_label, host_flags, nvcc_flags, quick
from .objects import Objects, Unit, other_builds
from .portable import EXPORTS, PORTABLE_CPP, PORTABLE_H, old_glibc
from .project import Project
from .toolchain import cuda_archs, find_cxx, find_nvcc, find_torch, jobs, python_headers

# Symbols that the library takes from libtorch's own OpenMP runtime: linking a second runtime would
# start a second thread pool, deaf to torch.set_num_threads.
_OPENMP = re.compile(r"^(GOMP_|omp_|__kmpc_)")
# What the interpreter itself provides.
_PYTHON = re.compile(r"^_?Py[A-Z_]")

_REGISTRATION_H = """\
#pragma once
#include <torch/csrc/stable/library.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, KEY, MODULE) \\
  STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, MODULE)
#define REGISTER_EXTENSION(NAME)  // loaded by torch.ops.load_library: no Python module needed
"""


class Builder:
    """Compiles and links a kernel project for one backend.

    Raises:
        ToolchainMissing: the machine lacks what the backend needs.
        KernelBuildError: the project cannot be built for it.
    """

    def __init__(
        self,
        root: Path,
        backend: str,
        archs: str | None,
        verbose: bool,
        also: Callable[[str], None] | None = None,
    ) -> None:
        if platform.system() != "Linux":
            raise ToolchainMissing(
                f"compiled kernels are for Linux alone, and this is {platform.system()}; hfpatch "
                "uses PyTorch's own operators here"
            )
        self.also = also
        self.project = Project(root, backend)
        self.verbose = verbose
        self.cxx = find_cxx()
        self.torch = find_torch()
        self.nvcc = find_nvcc() if backend == "cuda" else None
        self.archs = cuda_archs(archs, self.nvcc) if self.nvcc else []
        if self.nvcc and not self.archs:
            raise ToolchainMissing("no CUDA architecture to build for (none asked, or no GPU here)")
        self.quick = self.nvcc is not None and quick(self.nvcc.version)
        self.python_headers = python_headers()
        self.cxx_version = run([self.cxx, "--version"]).splitlines()[0]
        self.clang = "clang" in self.cxx_version
        self.cache = self._cache_dir()
        self.generated = self.cache / "generated"
        write(self.generated / "registration.h", _REGISTRATION_H)
        write(self.generated / "portable.h", PORTABLE_H)
        write(self.generated / "portable.cpp", PORTABLE_CPP)
        write(self.generated / "exports.map", EXPORTS)
        self.id = f"_{self.project.package}_{backend}_{self._source_hash()}"

    def _cache_dir(self) -> Path:
        project = self.project.root
        root = project / ".cache"
        if not os.access(project, os.W_OK) or project.name == "_clib":  # that of an installation
            key = hashlib.sha256(str(project).encode()).hexdigest()[:12]
            root = _own_directory(Path(tempfile.gettempdir()) / f"hfpatch-{os.getuid()}-{key}")
        path = root / "kernel_build" / self.project.backend
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def variant(self) -> str:
        abi = self.project.abi.replace(".", "")
        name = (
            f"cu{self.nvcc.version[0]}{self.nvcc.version[1]}" if self.nvcc else self.project.backend
        )
        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(
            platform.machine(), platform.machine()
        )
        return f"torch-stable-abi{abi}-{name}-{machine}-{platform.system().lower()}"

    def _source_hash(self) -> str:
        """Names the operators' namespace: two different builds can live in one process."""
        sha = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            sha.update(path.read_bytes())
        for path in self.project.sources():
            sha.update(path.relative_to(self.project.root).as_posix().encode() + b"\0")
            sha.update(path.read_bytes())
        flags = [*CXX_FLAGS, *self.archs, self.cxx_version, self.torch.version]
        flags.append(f"nvcc: {self.nvcc and self.nvcc.release}")
        flags.append(f"python headers: {bool(self.python_headers)}")
        if self.quick:
            flags.append("quick")
        sha.update("\0".join(flags).encode())
        return sha.hexdigest()[:10]

    def units(self) -> list[Unit]:
        """One per source file, the slow ones first."""
        result = []
        sources = [
            (src, section)
            for section in self.project.sections
            for src in section["src"]
            if Path(src).suffix in (".cpp", ".cc", ".cu")
        ]
        count = max(1, sum(src.endswith(".cu") for src, _ in sources))
        threads = max(1, min(jobs() // count, len(self.archs)))
        for src, section in sorted(sources, key=lambda item: not item[0].endswith(".cu")):
            target = self.cache / (src.replace("/", "-") + ".o")
            includes = [f"-I{d}" for d in section.get("include", [])]
            binding = section is self.project.torch
            command = (
                self._nvcc_command(section, src)
                if src.endswith(".cu")
                else self._cxx_command(section)
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
            seconds = cost(src, len(self.archs))
            result.append(Unit(self._label(src), tuple(command), target, seconds))
        source, target = self.generated / "portable.cpp", self.cache / "portable.cpp.o"
        command = [*self._cxx_command({}), "-c", str(source), "-o", str(target)]
        result.append(Unit(self._label(source.name), tuple(command), target))
        return sorted(result, key=lambda unit: -unit.cost)

    def _label(self, src: str) -> str:
        name = Path(src).name
        if not src.endswith(".cu"):
            return f"{Path(self.cxx).name} {name}"
        return f"nvcc {name} ({arch_label(self.archs)})"

    def _target_version(self) -> str:
        major, minor = self.project.abi.split(".")
        return f"-DTORCH_TARGET_VERSION={(int(major) << 56) | (int(minor) << 48):#x}ULL"

    def _host_flags(self) -> list[str]:
        flags = host_flags(self.clang)
        # No path of this machine may end in the binary (by way of __FILE__).
        flags += [f"-ffile-prefix-map={self.torch.include}=torch-include"]
        flags += [f"-ffile-prefix-map={self.project.root}=."]
        return flags

    def _cxx_command(self, section: dict[str, Any]) -> list[str]:
        define = f"-D{self.project.backend.upper()}_KERNEL"
        archs = f'-DHFP_CUDA_ARCHS="{" ".join(self.archs)}"'
        portable = ["-include", str(self.generated / "portable.h")]
        flags = [*self._host_flags(), *portable, define, archs]
        return [self.cxx, *flags, *section.get("cxx-flags", [])]

    def _nvcc_command(self, section: dict[str, Any], src: str) -> list[str]:
        assert self.nvcc is not None
        command = [self.nvcc.path, *nvcc_flags(self.cxx, self._host_flags(), self.archs, src)]
        command += QUICK_FLAGS if self.quick else []
        return command + list(section.get("cuda-flags", []))

    def objects(self) -> Objects:
        tools = f"{self.cxx_version}\0{self.torch.version}\0{self.nvcc}"
        others = other_builds(self.cache.parent.parent, self.cache)
        root = self.project.root
        return Objects(self.units(), root, tools, self.say, self.cxx_version, others)

    def link(self, objects: Sequence[Path], target: Path) -> None:
        """The shared library `target`.

        Raises:
            KernelBuildError: the linker failed, or symbols are in no object and no library.
        """
        command = [self.cxx, "-shared", "-s", "-o", str(target), *map(str, objects)]
        command += ["-Wl,--no-as-needed", f"-L{self.torch.lib}", "-ltorch_cpu"]
        if self.nvcc:
            if not (self.torch.lib / "libtorch_cuda.so").is_file():
                command.append(f"-L{self._torch_cuda_stub()}")
            libs = [self.nvcc.root / "lib64", *self.nvcc.root.glob("targets/*/lib")]
            command += ["-ltorch_cuda", *(f"-L{lib}" for lib in libs if lib.is_dir())]
            command.append("-lcudart_static")
        openmp = [*self.torch.lib.glob("libgomp*"), *self.torch.path.glob("../torch.libs/libgomp*")]
        if self.clang or not openmp:
            command.append("-fopenmp")
        # All symbols must resolve, except OpenMP's and Python's: warn and look at the warnings.
        command += ["-Wl,--as-needed", *old_glibc(self.cxx, self.cache / "stub")]
        command += ["-Wl,-z,defs", "-Wl,--warn-unresolved-symbols"]
        command += ["-Wl,--exclude-libs,ALL", "-Wl,--build-id=none"]
        command.append(f"-Wl,--version-script={self.generated / 'exports.map'}")
        output = run(command, cwd=self.project.root)
        undefined = set(re.findall(r"undefined reference to [`'\"]([^`'\"]+)", output))
        undefined = {name for name in undefined if not (_OPENMP.match(name) or _PYTHON.match(name))}
        if undefined:
            raise KernelBuildError(
                "undefined symbols; is a source missing in build.toml? "
                + ", ".join(sorted(undefined))
            )

    def _torch_cuda_stub(self) -> Path:
        """Directory of a `libtorch_cuda.so` to link against where torch has none (a CPU build)."""
        directory = self.cache / "stub"
        source = directory / "stub.cpp"
        symbol = "aoti_torch_get_current_cuda_stream"
        write(source, f'extern "C" int {symbol}(int, void **) {{ return 1; }}\n')
        command = [self.cxx, "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", str(source)]
        run([*command, "-o", str(directory / "libtorch_cuda.so")])
        return directory

    def say(self, line: str) -> None:
        text = f"{self.project.general['name']} {self.project.backend}: {line}"
        if self.verbose:
            print(text, flush=True)
        if self.also is not None:
            self.also(text)


def _own_directory(path: Path) -> Path:
    """A directory in one that all users write to: objects of another user must not be linked."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise KernelBuildError(
            f"`{path}`: expected a directory that no other user can write to, got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; remove it, or set `TMPDIR`"
        )
    return path
