"""Products, attention, pairs and losses on CUDA through the C interface; wrong memory is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import products
import pytest
import torch

from hfpatch.capi.library import Caller

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def library() -> Caller:
    path = os.environ.get("HFPATCH_LIBRARY")
    if not path:
        pytest.skip("HFPATCH_LIBRARY names no libhfpatch with CUDA kernels (make clib)")
    return Caller(path)


@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gemm", "attention", "other"])
def test_cases(library: Caller, kind: str, dtype: torch.dtype) -> None:
    p = products.Products(library, "cuda")
    for name, case in getattr(products, f"{kind}_cases")(p, dtype):
        try:
            case()
        except AssertionError as error:
            raise AssertionError(name) from error


WRONG = """
import sys, ctypes, numpy as np
from hfpatch.capi.library import Caller
from hfpatch.capi.tensors import view
library = Caller(sys.argv[1])
x, out = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
views = [view(name, array, written=False) for name, array in (("out", out), ("x", x))]
for one in views:
    one.tensor.device.device_type = 2
function = library.function("hfp_scale")
print(function(*(ctypes.byref(v.tensor) for v in views), 2.0, None), library.last_error())
"""


def test_host_memory_given_for_the_device_s_is_named(library: Caller) -> None:
    environment = {
        **os.environ, "HFPATCH_CHECK_POINTERS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-c", WRONG, str(library.path)], capture_output=True, text=True,
        env=environment, check=True,
    ).stdout  # fmt: skip
    assert said.strip() == (
        "-2 hfp_scale: `x` must point to memory of cuda:0, as its device says, got the host's; "
        "copy it, or say kDLCPU"
    )
