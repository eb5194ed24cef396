"""libhfpatch: what is built, what it needs, what it exports, and how others find it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import c_api
import pytest

import hfpatch
from hfpatch.kernel_build import KernelBuildError, clib

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernel_src" / "hfpatch.h"
FUNCTIONS = set(re.findall(r"HFP_EXPORT[\w\s]*?[ *](hfp_\w+)\(", HEADER.read_text()))
ABI = clib.abi_version(HEADER)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

PROGRAM = r"""
#include <stdio.h>
#include "hfpatch.h"
int main(void) {
  float data[3] = {1, 2, 3}, result[3];
  int64_t shape[1] = {3};
  DLTensor x = {data, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, NULL, 0}, out = x;
  out.data = result;
  int32_t status = hfp_silu(&out, &x, NULL);
  printf("%d %d %s\n", (int)status, (int)hfp_abi_version(), hfp_last_error());
  if (status == HFP_OK) printf("%.4f %.4f %.4f\n", result[0], result[1], result[2]);
  return 0;
}
"""
RIGHT = "0.7311 1.7616 2.8577"  # x / (1 + exp(-x))


@pytest.fixture(scope="module")
def prefix() -> Path:
    library = c_api.built_library()
    assert library is not None
    return library.parent.parent


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    c_api.build(folder, static=True)
    return folder


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stub")
    c_api.build(folder, kind="stub")
    return folder


@pytest.mark.exhaustive
def test_no_source_has_a_warning(tmp_path: Path) -> None:
    c_api.build(tmp_path, flags=c_api.WARNINGS)


def said(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def exported(library: Path, *options: str) -> set[str]:
    lines = said("nm", *options, "--defined-only", library).splitlines()
    return {line.split()[-1] for line in lines if re.search(r" [A-TV-Zuvw] ", line)}


def run_program(folder: Path, prefix: Path, *flags: str, compiler: str = "gcc") -> str:
    source = folder / "program.c"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", source]
    said(*command, "-o", folder / "program", *flags)
    return said(folder / "program", env={**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib")})


def test_header_has_functions() -> None:
    assert len(FUNCTIONS) > 40
    assert {"hfp_rms_norm", "hfp_last_error", "hfp_sum_partial_rows"} <= FUNCTIONS


@pytest.mark.parametrize("kind", ["prefix", "stub"])
def test_shared_library_exports_the_interface_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue(kind) / "lib" / f"libhfpatch.so.{ABI}"
    assert exported(library, "-D") == FUNCTIONS


def test_shared_library_needs_neither_torch_nor_python(prefix: Path) -> None:
    dynamic = said("readelf", "-d", prefix / "lib" / "libhfpatch.so")
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", dynamic))
    assert needed <= {"libstdc++", "libm", "libgomp", "libgcc_s", "libc", "ld-linux-x86-64",
                      "ld-linux-aarch64", "libpthread", "libdl"}  # fmt: skip
    assert f"soname: [libhfpatch.so.{ABI}]" in dynamic
    assert os.readlink(prefix / "lib" / "libhfpatch.so") == f"libhfpatch.so.{ABI}"


def test_static_library_defines_the_interface_alone(static: Path) -> None:
    assert exported(static / "lib" / "libhfpatch.a") == FUNCTIONS
    assert not (static / "lib" / "libhfpatch.so").exists()


def test_the_version_of_the_library_is_that_of_the_header(prefix: Path, stub: Path) -> None:
    for folder in (prefix, stub):
        library = c_api.Library(folder / "lib" / "libhfpatch.so")
        assert library.dll.hfp_abi_version() == ABI
        assert json.loads(library.dll.hfp_build_info())["abi"] == ABI


@pytest.mark.parametrize("kind", ["prefix", "static", "stub"])
def test_pkg_config_finds_it(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    # Moved: nothing in it names where it was built.
    moved = tmp_path / "moved"
    shutil.copytree(request.getfixturevalue(kind), moved, symlinks=True)
    env = {**os.environ, "PKG_CONFIG_PATH": str(moved / "lib" / "pkgconfig")}
    options = ["--static"] if kind == "static" else []
    flags = said("pkg-config", "--cflags", "--libs", *options, "hfpatch", env=env).split()
    assert said("pkg-config", "--modversion", "hfpatch", env=env).strip() == str(ABI)
    printed = run_program(tmp_path, moved, *flags).splitlines()
    if kind == "stub":
        assert printed == [
            f"-1 {ABI} hfp_silu: this is the stub of libhfpatch, which has no kernels; link with "
            "libhfpatch, or compute this another way"
        ]
    else:
        assert printed == [f"0 {ABI} ", RIGHT]


@pytest.mark.parametrize("kind", ["prefix", "static"])
def test_cmake_finds_it(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    (tmp_path / "program.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p LANGUAGES C)\n"
        f"find_package(hfpatch {ABI} REQUIRED)\nadd_executable(program program.c)\n"
        "target_link_libraries(program hfpatch::hfpatch)\n"
    )
    prefix = request.getfixturevalue(kind)
    build = tmp_path / "build"
    said("cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    said("cmake", "--build", build)
    assert said(build / "program").splitlines() == [f"0 {ABI} ", RIGHT]
    other = (tmp_path / "CMakeLists.txt").read_text().replace(f"hfpatch {ABI}", "hfpatch 1")
    (tmp_path / "CMakeLists.txt").write_text(other)
    again = ["cmake", "-S", tmp_path, "-B", tmp_path / "b2", f"-DCMAKE_PREFIX_PATH={prefix}"]
    refused = subprocess.run(list(map(str, again)), capture_output=True, text=True)
    assert refused.returncode != 0
    assert "requested version" in refused.stderr


def test_cmake_builds_and_installs_the_stub(tmp_path: Path) -> None:
    """The recipe itself; its kernels take minutes, and are the sources that `build` compiles."""
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    build, out = tmp_path / "build", tmp_path / "out"
    said("cmake", "-S", ROOT, "-B", build, "-DHFPATCH_KIND=stub", f"-DCMAKE_INSTALL_PREFIX={out}")
    said("cmake", "--build", build)
    said("cmake", "--install", build)
    assert exported(out / "lib" / f"libhfpatch.so.{ABI}", "-D") == FUNCTIONS
    printed = run_program(tmp_path, out, f"-I{out}/include", f"-L{out}/lib", "-lhfpatch")
    assert printed.startswith(f"-1 {ABI} hfp_silu: this is the stub")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_cmake_builds_the_kernels(tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    build, out = tmp_path / "build", tmp_path / "out"
    said("cmake", "-S", ROOT, "-B", build, f"-DCMAKE_INSTALL_PREFIX={out}")
    said("cmake", "--build", build, "-j2")
    said("cmake", "--install", build)
    assert exported(out / "lib" / f"libhfpatch.so.{ABI}", "-D") == FUNCTIONS
    printed = run_program(tmp_path, out, f"-I{out}/include", f"-L{out}/lib", "-lhfpatch")
    assert printed.splitlines() == [f"0 {ABI} ", RIGHT]


def test_every_function_of_the_stub_answers_that_it_has_no_kernel(stub: Path) -> None:
    library = c_api.Library(stub / "lib" / "libhfpatch.so")
    assert json.loads(library.dll.hfp_build_info())["devices"] == []
    for name, op in c_api.CALLS.items():
        arguments = [None] * op.outputs
        arguments += [0 if kind in ("int", "float") else None for kind, _ in op.arguments]
        with pytest.raises(c_api.KernelError, match=rf"^{op.function}: this is the stub") as e:
            library.call(name, *arguments)
        assert e.value.status == -1


def test_the_command_needs_neither_torch_nor_hfpatch(tmp_path: Path) -> None:
    """As `make clib` calls it."""
    script = (
        "import sys; sys.modules['torch'] = None; from kernel_build import clib; "
        f"raise SystemExit(clib.main([{str(tmp_path)!r}, '--stub', '--quiet']))"
    )
    said(sys.executable, "-c", script, cwd=ROOT / "hfpatch")
    assert exported(tmp_path / "lib" / "libhfpatch.so", "-D") == FUNCTIONS


def test_the_command_of_hfpatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hfpatch.cli import main

    assert main(["clib", str(tmp_path), "--stub"]) == 0
    assert f"libhfpatch.so.{ABI}" in capsys.readouterr().out
    assert main(["clib", str(tmp_path), "--cpu", "--archs", "9.0"]) == 2
    assert "`--archs`: expected with `--cuda`" in capsys.readouterr().err


def test_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="expected one of cpu, cuda, stub, got `rocm`"):
        clib.build_clib(tmp_path, "rocm")


def test_include_dir() -> None:
    assert (hfpatch.include_dir() / "hfpatch.h").read_bytes() == HEADER.read_bytes()


def test_from_an_installed_package(tmp_path: Path) -> None:
    """What the wheel brings is enough: the sources beside the package, nothing above it."""
    package = tmp_path / "site" / "hfpatch"
    shutil.copytree(ROOT / "hfpatch" / "kernel_build", package / "kernel_build")
    (package / "_clib").mkdir()
    shutil.copy(ROOT / "build.toml", package / "_clib")
    for name in ("clib", "kernel_src"):
        shutil.copytree(ROOT / name, package / "_clib" / name)
    before = {p for p in package.rglob("*") if "__pycache__" not in p.parts}
    script = (
        "from pathlib import Path\nfrom kernel_build import clib\n"
        f"clib.build_clib({str(tmp_path / 'out')!r}, 'stub', verbose=False)\n"
        "library = clib._CLibrary(clib.source_root(), 'cpu', None, True, (), print)\n"
        "print(library.root.name, len(library._units(Path('/nonexistent'))))\n"
    )
    said_units = said(sys.executable, "-c", script, cwd=package).split()
    sources = [*ROOT.glob("kernel_src/*.cpp"), *ROOT.glob("kernel_src/cpu/*.cpp")]
    assert said_units == ["_clib", str(len(sources))]
    assert exported(tmp_path / "out" / "lib" / "libhfpatch.so", "-D") == FUNCTIONS
    after = {p for p in package.rglob("*") if "__pycache__" not in p.parts}
    assert after == before  # an installed package is not written to
