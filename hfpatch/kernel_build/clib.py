"""libhfpatch: the kernels as a C library, which needs neither torch nor Python.

The folder that is written has the layout of an installed library: ``include/hfpatch.h``,
``lib/libhfpatch.so.<ABI>`` with the link ``libhfpatch.so`` (or ``lib/libhfpatch.a``),
``lib/pkgconfig/hfpatch.pc`` and ``lib/cmake/hfpatch/hfpatchConfig.cmake``. It can be moved.
`CMakeLists.txt` makes the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .commands import run, search, write
from .errors import KernelBuildError, ToolchainMissing
from .estimate import cost
from .flags import QUICK_FLAGS, arch_label, host_flags, nvcc_flags, quick
from .objects import Objects, Unit, other_builds
from .portable import PORTABLE_H, old_glibc
from .project import read_project
from .toolchain import cuda_archs, find_cxx, find_nvcc

KINDS = ("cpu", "cuda", "stub")


def source_root() -> Path:
    """The folder of ``kernel_src/`` and ``clib/``: the source tree, or what the wheel brings.

    Raises:
        KernelBuildError: neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for root in (package.parent, package / "_clib"):
        if (root / "kernel_src" / "hfpatch.h").is_file() and (root / "clib").is_dir():
            return root
    raise KernelBuildError(
        f"the sources of libhfpatch are neither in `{package.parent}` nor in "
        f"`{package / '_clib'}`; install hfpatch again"
    )


def abi_version(header: Path) -> int:
    """``HFP_ABI_VERSION`` of a header."""
    found = search(r"^#define HFP_ABI_VERSION (\d+)", header.read_text(encoding="utf-8"))
    if found is None:
        raise KernelBuildError(f"`{header}` has no `HFP_ABI_VERSION`")
    return int(found)


def build_clib(
    out_dir: str | os.PathLike[str],
    kind: str | None = None,
    static: bool = False,
    archs: str | None = None,
    verbose: bool = True,
    openmp: bool = True,
    flags: Sequence[str] = (),
    root: Path | None = None,
) -> Path:
    """Build libhfpatch into ``out_dir``.

    Args:
        out_dir: the folder of ``lib/`` and ``include/``.
        kind: "cuda" (which holds the CPU kernels too), "cpu", or "stub": every function is there
            and answers that it has no kernel. Default: "cuda" where there is an nvcc, else "cpu".
        static: ``libhfpatch.a`` instead of the shared library.
        archs: CUDA architectures; default: ``HFPATCH_CUDA_ARCHS``, then the GPUs that
            are here, then ``all``.
        verbose: print a line for each file compiled.
        openmp: several threads for one call on the CPU.
        flags: further ones of the C++ compiler and the linker, such as ``-fsanitize=address``.
        root: the sources; default: `source_root()`.

    Returns:
        The path of the library.

    Raises:
        ToolchainMissing: the machine lacks what this kind needs.
        KernelBuildError: a compiler or the linker failed.
    """
    start = time.perf_counter()
    out = Path(out_dir).resolve()

    def say(line: str) -> None:
        if verbose:
            print(f"libhfpatch {kind}: {line}", flush=True)

    if kind is None:
        try:
            find_nvcc()
            kind = "cuda"
        except ToolchainMissing as error:
            kind = "cpu"
            say(f"without CUDA kernels: {error}")
    if kind not in KINDS:
        raise KernelBuildError(f"`kind`: expected one of {', '.join(KINDS)}, got `{kind}`")
    library = _CLibrary(root or source_root(), kind, archs, openmp, flags, say)
    path = library.install(out, static)
    say(f"wrote {path} in {time.perf_counter() - start:.1f} s")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command `hfpatch clib`."""
    parser.add_argument("out", metavar="DIR", help="lib/ and include/ are written here")
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (
        ("cuda", "CUDA and CPU kernels"),
        ("cpu", "CPU kernels only"),
        ("stub", "no kernel: every function answers that it has none"),
    ):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    parser.add_argument("--static", action="store_true", help="libhfpatch.a instead of .so")
    parser.add_argument("--archs", help="CUDA architectures: all, native or 8.0;9.0+PTX")
    parser.add_argument(
        "--no-openmp", dest="openmp", action="store_false", help="one thread for each call"
    )
    parser.add_argument("--quiet", action="store_true")


def run_command(args: argparse.Namespace) -> int:
    """Runs `hfpatch clib`; returns the exit status."""
    if args.archs and args.kind in ("cpu", "stub"):
        raise KernelBuildError(f"`--archs`: expected with `--cuda`, got it with `--{args.kind}`")
    try:
        build_clib(args.out, args.kind, args.static, args.archs, not args.quiet, args.openmp)
    except OSError as e:
        raise KernelBuildError(f"`{args.out}` cannot be written: {e}; name another folder") from e
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m kernel_build.clib``, in the folder ``hfpatch/``: needs no torch."""
    parser = argparse.ArgumentParser(
        prog="python -m kernel_build.clib",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        return run_command(parser.parse_args(argv))
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


class _CLibrary:
    def __init__(
        self,
        root: Path,
        kind: str,
        archs: str | None,
        openmp: bool,
        flags: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.root = root
        self.kind = kind
        self.flags = list(flags)
        self.openmp = openmp and kind != "stub"
        self.say = say
        self.header = root / "kernel_src" / "hfpatch.h"
        self.abi = abi_version(self.header)
        self.cxx = find_cxx()
        self.cxx_version = run([self.cxx, "--version"]).splitlines()[0]
        self.nvcc = find_nvcc() if kind == "cuda" else None
        self.archs = cuda_archs(archs, self.nvcc) if self.nvcc else []
        if self.nvcc and not self.archs:
            raise ToolchainMissing("no CUDA architecture to build for (none asked, or no GPU here)")

    def install(self, out: Path, static: bool) -> Path:
        lib = out / "lib"
        lib.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="libhfpatch-") as scratch:
            objects = self._objects(self._cache(Path(scratch))).compile()
            link = self._archive if static else self._shared
            path = link(objects, lib, Path(scratch))
        (out / "include").mkdir(exist_ok=True)
        shutil.copyfile(self.header, out / "include" / "hfpatch.h")
        self._fill("hfpatch.pc", lib / "pkgconfig")
        for name in ("hfpatchConfig.cmake", "hfpatchConfigVersion.cmake"):
            self._fill(name, lib / "cmake" / "hfpatch")
        return path

    def _cache(self, scratch: Path) -> Path:
        """Where objects are kept; those of an installed hfpatch are not."""
        folder = scratch
        if os.access(self.root, os.W_OK) and self.root.name != "_clib":
            key = " ".join([*self.flags, f"openmp={self.openmp}"]).encode()
            name = f"{self.kind}-{hashlib.sha256(key).hexdigest()[:8]}"
            folder = self.root / ".cache" / "clib" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _objects(self, cache: Path) -> Objects:
        write(cache / "generated" / "portable.h", PORTABLE_H)  # as in the other builds
        tools = f"{self.cxx_version}\0{self.nvcc}"
        shared = self.root / ".cache"
        others = other_builds(shared, cache) if cache.is_relative_to(shared) else []
        return Objects(self._units(cache), self.root, tools, self.say, self.cxx_version, others)

    def _units(self, cache: Path) -> list[Unit]:
        host = host_flags("clang" in self.cxx_version)
        host += [f"-ffile-prefix-map={self.root}=.", *self.flags]
        cxx = [self.cxx, *host, "-include", str(cache / "generated" / "portable.h")]
        if self.kind == "stub":
            target = cache / "stub.o"
            # As C++, so that one compiler is enough.
            command = [*cxx, "-x", "c++", "-Ikernel_src", "-c", "clib/stub.c", "-o", str(target)]
            return [Unit("stub.c", tuple(command), target)]
        units = []
        for section in read_project(self.root).get("kernel", {}).values():
            if section["backend"] != self.kind:
                continue
            for src in section["src"]:
                target = cache / (src.replace("/", "-") + ".o")
                if src.endswith(".cu") and self.nvcc:
                    command = [self.nvcc.path, *nvcc_flags(self.cxx, host, self.archs, src)]
                    command += QUICK_FLAGS if quick(self.nvcc.version) else []
                    command += section.get("cuda-flags", [])
                    label = f"nvcc {Path(src).name} ({arch_label(self.archs)})"
                elif src.endswith(".cpp"):
                    command = [*cxx, f"-D{self.kind.upper()}_KERNEL"]
                    command.append(f'-DHFP_CUDA_ARCHS="{" ".join(self.archs)}"')
                    command += self._threads(section)
                    label = f"{Path(self.cxx).name} {Path(src).name}"
                else:
                    continue
                includes = [f"-I{d}" for d in section.get("include", [])]
                command += [*includes, "-c", src, "-o", str(target)]
                seconds = cost(src, len(self.archs))
                units.append(Unit(label, tuple(command), target, seconds))
        return sorted(units, key=lambda unit: -unit.cost)

    def _threads(self, section: dict[str, Any]) -> list[str]:
        flags = section.get("cxx-flags", [])
        return [f for f in flags if self.openmp or f != "-fopenmp"]

    def _shared(self, objects: Sequence[Path], lib: Path, scratch: Path) -> Path:
        soname = f"libhfpatch.so.{self.abi}"
        # Written beside and moved: a program may be running with the one that is there.
        partial = lib / f".{soname}.{os.getpid()}"
        command = [self.cxx, "-shared", "-s", "-o", str(partial), *map(str, objects)]
        command += [f"-Wl,-soname,{soname}", "-Wl,--build-id=none"]
        if not any(flag.startswith("-fsanitize") for flag in self.flags):
            command.append("-Wl,-z,defs")  # a sanitizer's functions are those of the program
        command += [f"-Wl,--version-script={self.root / 'clib' / 'exports.map'}"]
        command += ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL", *self.flags]
        if self.openmp:
            command.append("-fopenmp")
        if self.nvcc:
            command += [*self._cuda_folders(), "-lcudart_static"]
        command += old_glibc(self.cxx, scratch / "stub")
        try:
            run([*command, "-lm"], cwd=self.root)
            os.replace(partial, lib / soname)
        finally:
            partial.unlink(missing_ok=True)
        link = lib / "libhfpatch.so"
        link.unlink(missing_ok=True)
        link.symlink_to(soname)
        return lib / soname

    def _archive(self, objects: Sequence[Path], lib: Path, scratch: Path) -> Path:
        """One object in an archive, in which all but the interface is local."""
        ld, objcopy, ar = (_tool(name) for name in ("ld", "objcopy", "ar"))
        joined = scratch / "hfpatch.o"
        # Groups are settled here: once their symbols are local, no other linker may choose among
        # them.
        run([ld, "-r", "--force-group-allocation", "-o", str(joined), *map(str, objects)])
        run([objcopy, "--localize-hidden", "--wildcard", "--keep-global-symbol=hfp_*", str(joined)])
        path = lib / "libhfpatch.a"
        partial = scratch / path.name
        run([ar, "rcsD", str(partial), str(joined)])
        shutil.copyfile(partial, path)
        return path

    def _cuda_folders(self) -> list[str]:
        if not self.nvcc:
            return []
        found = [self.nvcc.root / "lib64", *self.nvcc.root.glob("targets/*/lib")]
        return [f"-L{folder}" for folder in found if folder.is_dir()]

    def _fill(self, name: str, folder: Path) -> None:
        private = []
        if self.kind != "stub":
            private += ["-lstdc++", "-lm", "-ldl"] + (["-fopenmp"] if self.openmp else [])
        if self.nvcc:
            private += [*self._cuda_folders(), "-lcudart_static", "-lrt", "-lpthread"]
        text = (self.root / "clib" / f"{name}.in").read_text(encoding="utf-8")
        separator = " " if name.endswith(".pc") else ";"
        text = text.replace("@hfpatch_private@", separator.join(private))
        write(folder / name, text.replace("@hfpatch_abi@", str(self.abi)))


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ToolchainMissing(f"no `{name}` on `PATH`: a static library needs binutils")
    return path


if __name__ == "__main__":
    sys.exit(main())
