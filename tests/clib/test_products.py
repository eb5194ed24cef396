"""Products of libhfpatch by a BLAS that the system has, or that is asked for.

With its own blocks, and every instruction set: tests/kernels/test_c_api_products.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import c_api
import numpy as np
import pytest
import torch

from hfpatch import capi

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(scope="module")
def path() -> Path:
    found = c_api.built_library()
    assert found is not None
    return found


BLAS_C = """
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  (void)order, (void)ta, (void)tb, (void)k, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb;
  (void)beta;
  for (int i = 0; i < m; ++i) for (int j = 0; j < n; ++j) c[i * ldc + j] = 42;
}
"""
ASKED = """
import sys, torch, products; from hfpatch import capi
p = products.Products(capi.Library(sys.argv[1]), "cpu")
a, b = torch.ones(9, 4), torch.ones(4, 5)
print(p.library.size("hfp_gemm_backend", 1), p.gemm(a, b)[8, 4].item(),
      p.gemm(a.bfloat16(), b.bfloat16())[8, 4].item())
"""


def test_a_blas_is_loaded_at_run_time(path: Path, tmp_path: Path) -> None:
    source, blas = tmp_path / "blas.c", tmp_path / "libours.so"
    source.write_text(BLAS_C)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(blas)], check=True)
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])
    }  # fmt: skip

    def said(wanted: str) -> str:
        command = [sys.executable, "-c", ASKED, str(path)]
        environment["HFPATCH_BLAS"] = wanted
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, check=True
        ).stdout.strip()

    own, named = capi.CONSTANTS["HFP_GEMM_OWN"], capi.CONSTANTS["HFP_GEMM_BLAS"]
    assert said("none") == f"{own} 4.0 4.0"
    assert said(str(tmp_path / "absent.so")) == f"{own} 4.0 4.0"
    assert said(str(blas)) == f"{named} 42.0 4.0"


def refused(library: capi.Library, name: str, *arguments: object) -> str:
    with pytest.raises(capi.HfpatchError) as error:
        library.call(name, *arguments, None)
    return str(error.value)


def test_refusals_of_gemm(path: Path) -> None:
    library = capi.Library(path)
    a, b, out = torch.ones(3, 4), torch.ones(4, 5), torch.zeros(3, 5)
    work = torch.zeros(library.size("hfp_gemm_workspace", 1, 3, 5, 4, 1))
    rest = (1.0, 0.0, 0, 0)
    assert refused(library, "hfp_gemm", out, work, a, b.T.contiguous(), None, *rest) == (
        "hfp_gemm: `b` must have shape [K, N] = [4, 4], got [5, 4]"
    )
    assert refused(library, "hfp_gemm", out, work[:7], a, b, None, *rest).startswith(
        "hfp_gemm: `workspace` must be contiguous float32 of one dimension and at least 128 "
        "elements"
    )
    assert refused(library, "hfp_gemm", out, work, a, b, out[:, :4], *rest).startswith(
        "hfp_gemm: `c` must have shape [M, N] = [3, 5], got [3, 4]"
    )
    assert refused(library, "hfp_gemm", a[:, :3], work, a, a.T[:, :3], None, *rest).startswith(
        "hfp_gemm: `b` must have stride 1 in its last dimension"
    )
    same = torch.ones(4, 4)
    assert "must not overlap `a`" in refused(
        library, "hfp_gemm", same, work, same, same, None, *rest
    )
    twice = torch.zeros(5).expand(3, 5)
    assert "rows that share no memory" in refused(
        library, "hfp_gemm", twice, work, a, b, None, *rest
    )


def test_refusals_of_attention(path: Path) -> None:
    library = capi.Library(path)
    q, k = torch.ones(2, 6, 3, 8), torch.ones(2, 4, 5, 8)
    out, lse = torch.zeros(2, 6, 3, 8), torch.zeros(2, 6, 3)
    rest = (None, None, None, None, 1.0, 0, 0, 0, 0.0)
    assert refused(library, "hfp_attention", out, lse, q, k, k, *rest) == (
        "hfp_attention: `k` must have a number of heads that divides the 6 of `q`, got shape "
        "[2, 4, 5, 8]"
    )
    k = k[:, :3]
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    assert refused(library, "hfp_attention", out, lse, q, k, k, mask, *rest[1:]) == (
        "hfp_attention: `mask` must have shape [2, 6, 3, 5], sizes 1 where it is broadcast, or its "
        "last two, got [2, 1, 3, 4]"
    )
    starts = torch.tensor([0, 3])
    args = (None, starts, None, None, 1.0, 0, 0, 0, 0.0)
    assert "must be given together" in refused(library, "hfp_attention", out, lse, q, k, k, *args)
    long = torch.ones(2, 6, 3, 264)
    assert "must have heads of 1 to 256 columns" in refused(
        library, "hfp_attention", out, lse, long, long, long, *rest
    )


def test_attention_of_numpy_arrays(path: Path) -> None:
    library = capi.Library(path)
    q = np.ones((1, 2, 3, 4), np.float32)
    out, lse = np.empty_like(q), np.empty((1, 2, 3), np.float32)
    library.attention(out, lse, q, q, q, None, None, None, None, 0.5, 0, 0, 0, 0.0)
    assert np.allclose(out, 1) and np.allclose(lse, 2 + np.log(3))
