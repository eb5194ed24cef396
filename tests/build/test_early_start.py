"""Which kernels start while the one before them runs, asked by what stands in for a driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
nvcc = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", ""), "bin", "nvcc"))

DRIVER = """\
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

static int from_environment(const char *name) { return std::atoi(std::getenv(name)); }

extern "C" {
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return ""; }
const char *cudaGetErrorString(cudaError_t) { return ""; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
  return *value = from_environment("CAPABILITY"), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, const void *) {
  return of->ptxVersion = from_environment("PTX"), cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *, void **) {
  std::printf("%u ", config->numAttrs);
  return cudaSuccess;
}
void __cudaInitModule(void **) {}
void __cudaRegisterFatBinaryEnd(void **) {}
void **__cudaRegisterFatBinary(void *) { return nullptr; }
void __cudaUnregisterFatBinary(void **) {}
}
"""

LAUNCH = """\
#include "cuda/common.cuh"

namespace hfp {
int32_t set_error(int32_t status, const char *, ...) { return status; }
}  // namespace hfp

struct Early {
  static constexpr bool kStartsEarly = true;
};
struct Plain {};
void early(Early) {}
void plain(Plain) {}

int main() {
  Early e;
  Plain p;
  for (int i = 0; i < 2; ++i) hfp::cuda::launch(&early, 1, 32, e, nullptr, "early");
  hfp::cuda::launch(&plain, 1, 32, p, nullptr, "plain");
}
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early_start")
    (folder / "driver.cpp").write_text(DRIVER)
    (folder / "launch.cu").write_text(LAUNCH)
    command = [nvcc, "-std=c++17", "-arch=sm_90", "--cudart=none", "-I", str(ROOT / "kernel_src")]
    command += ["-o", "launches", "driver.cpp", "launch.cu"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "launches"


@pytest.mark.skipif(not Path(nvcc).is_file(), reason="no nvcc")
@pytest.mark.parametrize(
    ("capability", "ptx", "starts_early"),
    [(9, 90, 1), (12, 90, 1), (12, 120, 1), (9, 80, 0), (12, 86, 0), (8, 80, 0)],
)
def test_code_of_older_ptx_is_not_started_early(
    capability: int, ptx: int, starts_early: int, launches: Path
) -> None:
    """It holds no wait for the kernel before: a build for `8.0+PTX` on a newer GPU."""
    env = {**os.environ, "CAPABILITY": str(capability), "PTX": str(ptx)}
    done = subprocess.run([launches], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(starts_early)] * 2 + ["0"]
