"""Registers and spills of the CUDA kernels, as ptxas reports them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hfpatch import kernel_build
from hfpatch.kernel_build import KernelBuildError, ptxas

ROOT = Path(__file__).resolve().parents[2]
has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ

#: What `make test` compiles.
ARCHS = "8.0;9.0"

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onePf' for 'sm_80'
ptxas info    : Function properties for _Z3onePf
    8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 3.1 ms
ptxas info    : Compiling entry function '_Z3twoPf' for 'sm_90'
ptxas info    : Function properties for _Z3twoPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 7 registers, used 0 barriers
"""


def test_ptxas_is_read() -> None:
    one, two = ptxas.parse_ptxas(PTXAS)
    assert one == {
        "kernel": "_Z3onePf",
        "arch": "sm_80",
        "registers": 32,
        "stack": 8,
        "spill_stores": 16,
        "spill_loads": 4,
        "shared": 512,
    }
    assert (two["arch"], two["registers"], two["spill_stores"], two["shared"]) == ("sm_90", 7, 0, 0)
    assert ptxas.parse_ptxas("") == []


def test_words_of_ptxas_that_are_not_known_are_no_empty_report() -> None:
    with pytest.raises(KernelBuildError, match="not expected: 'k' for 'sm_80'"):
        ptxas.parse_ptxas("Compiling entry function 'k' for 'sm_80'\nsomething new\n")


def test_spills_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = [{"file": "a.cu", **kernel} for kernel in ptxas.parse_ptxas(PTXAS)]
    assert ptxas.print_resources(found) == 1
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.endswith("<- spills"))
    assert line.startswith("a.cu sm_80") and "_Z3onePf" in line
    assert out.endswith("2 kernels, 1 with spills\n")


#: Kernels that spill a little, outside their loops' products, and the most bytes: docs/gpus.md.
SPILL = {
    "decode_attention_kernel": 24,
    "decode_plain_product_kernel": 8,
    "decode_plain_prepare_kernel": 24,
}


@pytest.mark.exhaustive
@pytest.mark.skipif(not has_nvcc, reason="no nvcc")
@pytest.mark.timeout(3600)
def test_kernels_spill_no_more_than_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` builds in a hurry where there is no GPU: here all of it is compiled again."""
    monkeypatch.delenv("HFPATCH_CUDA_QUICK", raising=False)
    found = kernel_build.resources(ROOT, ARCHS, verbose=False)
    assert {k["arch"] for k in found} == {"sm_80", "sm_90"}
    assert len(found) > 1000
    spilling = {}
    for k in found:
        bytes_ = max(k["spill_stores"], k["spill_loads"], k["stack"])
        known = [name for name in SPILL if name in k["kernel"]]
        if bytes_ > sum(SPILL[name] for name in known):
            spilling[k["kernel"], k["arch"]] = bytes_
    assert not spilling
    assert all(0 < k["registers"] <= 255 and k["shared"] <= 48 * 1024 for k in found)
