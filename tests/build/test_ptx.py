"""`hfpatch kernel build --ptx`, and the programs in examples/ptx that load what it writes.

There need be no GPU: the programs run with a libcuda that takes PTX apart by its kernels' names and
computes on the host what they do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfpatch.cli import main
from hfpatch.kernel_build import KernelBuildError
from hfpatch.kernel_build.ptx import _entries, build_ptx

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ptx"
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")

PTX = """
.version 9.0
.target sm_90
.extern .shared .align 16 .b8 room[];
.shared .align 4 .b8 table[64];
.visible .entry sums(
	.param .u64 .ptr .align 1 sums_param_0,
	.param .align 8 .b8 sums_param_1[24],
	.param .f32 sums_param_2
)
.maxntid 256
.minnctapersm 2
{
	.reg .b32 %r<5>;
	// demoted variable
	.shared .align 4 .b8 part[1024];
	mov.u32 %r1, part;
	mov.u32 %r2, room;
	ret;
}
.visible .entry _Z5otherv()
{
	ret;
}
.visible .entry bare()
.reqntid 8, 4, 2
{
	ld.shared.u32 %r1, [table];
	ret;
}
"""


def test_entries_of_ptx() -> None:
    sums, bare = _entries(PTX)
    assert sums == {
        "name": "sums",
        "parameters": [
            {"type": "u64", "bytes": 8, "align": 8},
            {"type": "b8", "bytes": 24, "align": 8},
            {"type": "f32", "bytes": 4, "align": 4},
        ],
        "block": {"max": [256, 1, 1], "required": None, "min_ctas": 2},
        "shared_bytes": 1024,
        "dynamic_shared": True,
    }
    assert (bare["parameters"], bare["shared_bytes"], bare["dynamic_shared"]) == ([], 64, False)
    assert bare["block"] == {"max": None, "required": [8, 4, 2], "min_ctas": None}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ptx")
    command = ["kernel", "build", str(EXAMPLES / "kernels"), "--ptx", str(folder)]
    assert main([*command, "--archs", "8.0;9.0"]) == 0
    return folder


@needs_nvcc
def test_one_file_for_each_architecture_and_an_index(built: Path) -> None:
    index = json.loads((built / "index.json").read_text())
    assert [(m["file"], m["arch"]) for m in index["modules"]] == [
        ("relu_squared.sm_80.ptx", "8.0"), ("relu_squared.sm_90.ptx", "9.0"),
    ]  # fmt: skip
    for module in index["modules"]:
        text = (built / module["file"]).read_text()
        assert f".target sm_{module['arch'].replace('.', '')}" in text
        entries = {e["name"]: e for e in module["entries"]}
        assert set(entries) == {"relu_squared", "block_sums"}
        assert [p["bytes"] for p in entries["relu_squared"]["parameters"]] == [8, 8, 4]
        assert entries["relu_squared"]["block"]["max"] == [256, 1, 1]
        assert entries["relu_squared"]["shared_bytes"] == 0
        assert entries["block_sums"]["shared_bytes"] == 1024


@needs_nvcc
def test_a_project_without_such_kernels(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "kernels", tmp_path / "project")
    file = tmp_path / "project" / "kernel_src" / "relu_squared.cu"
    file.write_text(file.read_text().replace('extern "C" ', ""))
    with pytest.raises(KernelBuildError, match=r"expected a `\.cu` file with kernels that are"):
        build_ptx(tmp_path / "project", tmp_path / "out", "9.0", lambda line: None)
    assert not (tmp_path / "out").exists()


DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned u;
int cuInit(u flags) { return flags; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return d; }
int cuCtxSetCurrent(void *c) { return c != (void *)1; }
int cuGetErrorString(int s, const char **t) { *t = s == 500 ? "not found" : "wrong"; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : -1; return d; }
int cuModuleLoadData(void **m, const char *t) {
  *m = strdup(t);
  return !strstr(t, ".target sm_90");
}
int cuModuleGetFunction(void **f, void *m, const char *n) {
  char entry[99];
  snprintf(entry, sizeof entry, ".entry %s(", n);
  *f = strdup(n);
  return strstr(m, entry) ? 0 : 500;
}
int cuMemAlloc_v2(uint64_t *p, size_t n) { *p = (uint64_t)malloc(n); return 0; }
int cuMemFree_v2(uint64_t p) { free((void *)p); return 0; }
int cuMemcpyHtoD_v2(uint64_t d, const void *s, size_t n) { memcpy((void *)d, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, uint64_t s, size_t n) { memcpy(d, (void *)s, n); return 0; }
int cuLaunchKernel(void *f, u gx, u gy, u gz, u bx, u by, u bz, u shared, void *stream, void **a,
                   void **extra) {
  float *out = *(float **)a[0], *x = *(float **)a[1];
  const int n = *(int *)a[2];
  if (gy * gz * by * bz != 1 || shared || stream || extra) return 1;
  for (u b = 0; b < gx; ++b) {
    float sum = 0;
    for (u t = 0; t < bx; ++t) {
      const int i = (int)(b * bx + t);
      if (i >= n) continue;
      if (!strcmp(f, "relu_squared")) out[i] = x[i] > 0 ? x[i] * x[i] : 0;
      sum += x[i];
    }
    if (!strcmp(f, "block_sums")) out[b] = sum;
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", "-O1", str(folder / "driver.c")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def _said(command: list[Any], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAID = "sum 1993.0\nlaunches block_sums 1 relu_squared 1\n"


@needs_nvcc
def test_the_program_in_python(built: Path, environment: dict[str, str]) -> None:
    assert _said([sys.executable, EXAMPLES / "python" / "launch.py", built], environment) == SAID


@needs_nvcc
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_the_program_in_c(built: Path, environment: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "launch"
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    source = EXAMPLES / "c" / "launch.c"
    subprocess.run(["gcc", *strict, str(source), "-ldl", "-o", str(program)], check=True)
    assert _said([program, built], environment) == SAID


@needs_nvcc
@pytest.mark.skipif(not shutil.which("cargo"), reason="no cargo")
def test_the_program_in_rust(built: Path, environment: dict[str, str], tmp_path: Path) -> None:
    crate = tmp_path / "crate"
    shutil.copytree(EXAMPLES / "rust", crate)
    command = ["cargo", "build", "-q", "--manifest-path", str(crate / "Cargo.toml")]
    subprocess.run(command, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "t")})
    assert _said([tmp_path / "t" / "debug" / "launch", built], environment) == SAID
