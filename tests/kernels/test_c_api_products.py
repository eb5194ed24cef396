"""Products, attention, pairs and losses through the C interface, on the CPU.

The cases: products.py.
"""

from __future__ import annotations

import math
from typing import Any

import products
import pytest

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import Library
from test_c_api import (
    EMULATED,
    built,  # noqa: F401  (fixtures, as is `lib`)
    lib,  # noqa: F401
)

#: Multiplications of a product in an emulator, which takes a hundred times as long.
MOST = 3e5 if EMULATED else 1e7
#: Of `make test-all`.
WHOLE = 3e5 if EMULATED else math.inf


@pytest.fixture(scope="module", autouse=True)
def _own_blocks() -> Any:
    """No BLAS of the system: it is looked for at a library's first product."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFPATCH_BLAS", "none")
        yield


class ByFunction:
    """`capi.Library`'s way to call, over that of the tests."""

    def __init__(self, lib: Library) -> None:
        self.lib = lib

    def call(self, function: str, *arguments: Any) -> None:
        *given, stream = arguments
        self.lib.call(function.removeprefix("hfp_"), *given, stream=stream)

    def size(self, function: str, *arguments: int) -> int:
        return int(getattr(self.lib.dll, function)(*arguments))


@pytest.mark.parametrize("most", [MOST, pytest.param(WHOLE, marks=pytest.mark.exhaustive)])
def test_every_case(lib, most):
    cases = list(products.cases(products.Products(ByFunction(lib), "cpu"), most))
    assert len(cases) > (100 if EMULATED else 200)
    for _, check in cases:
        check()
