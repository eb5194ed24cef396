"""examples/c, examples/rust and examples/go on a GPU: what examples/row_pytorch.py prints there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import row_examples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def prefix() -> Path:
    path = os.environ.get("HFPATCH_LIBRARY")
    if not path:
        pytest.skip("HFPATCH_LIBRARY names no libhfpatch with CUDA kernels (make clib)")
    return Path(path).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def cublaslt() -> None:
    """Where PyTorch's wheel brings cuBLASLt, and the system has none: that one."""
    found = next(iter(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libcublasLt.so.*")), None)
    if found and "HFPATCH_CUBLASLT" not in os.environ:
        os.environ["HFPATCH_CUBLASLT"] = str(found)


@pytest.mark.parametrize(
    "build", [row_examples.in_c, row_examples.in_rust, row_examples.in_go], ids=["c", "rust", "go"]
)
def test_on_a_gpu(build: Callable[[Path, Path], Path], prefix: Path, tmp_path: Path) -> None:
    """HFPATCH_ROW_PROGRAMS: a folder of programs in_rust and in_go that another machine built."""
    brought = Path(os.environ.get("HFPATCH_ROW_PROGRAMS", "")) / build.__name__
    program = brought if brought.is_file() else build(prefix, tmp_path)
    row_examples.check(program, prefix, ("cpu", "cuda:0"))
