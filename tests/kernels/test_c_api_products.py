"""Products, attention, pairs and losses through the C interface, on the CPU.

The cases: products.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import products
import pytest
import torch

# ruff: noqa: F811  (fixtures that are imported, and used as parameters)
from c_api import KernelError, Library, dltensor, int64_array
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


def masked(library: Library, mask: Any, out: torch.Tensor) -> None:
    """Attention of [2, 4, 5, 8] with that mask of [2, 4, 5, 7]."""
    q, k, v = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8), torch.ones(2, 4, 7, 6)
    lse = torch.zeros(2, 4, 5)
    library.call(
        "attention", out, lse, q, k, v, mask, None, None, None, 0.5, 0, 0, 0, 0.0
    )  # fmt: skip


def test_masks_of_bytes_that_reach_beyond_all_memory(built: Path) -> None:
    """A mask of bool is no tensor of the kernels' dtypes, and is looked at as closely."""
    library, whole = Library(built), torch.ones(2, 4, 5, 7, dtype=torch.bool)
    changes: list[Callable[[Any], Any]] = [
        lambda t: setattr(t, "byte_offset", 2**63),
        lambda t: setattr(t, "byte_offset", 2**64 - 4),
        lambda t: setattr(t, "strides", int64_array([2**62, 2**61, 7, 1])),
        lambda t: setattr(t, "strides", int64_array([-(2**63), 35, 7, 1])),
        lambda t: setattr(t, "strides", int64_array([140, 35, 2**62, 1])),
    ]
    out = torch.full((2, 4, 5, 6), 7.0)
    for change in changes:
        view = dltensor(whole)
        change(view)
        with pytest.raises(KernelError, match=r"`mask` must span fewer than 2\^63 bytes"):
            masked(library, view, out)
    assert bool((out == 7).all())
    # where the size is 1 the stride does not matter
    view = dltensor(whole)
    view.strides = int64_array([140, 35, 7, 2**62])
    view.shape = int64_array([2, 4, 5, 1])
    masked(library, view, out)
    assert torch.equal(out, torch.ones_like(out))


def test_no_result_lies_in_a_mask_of_bytes(built: Path) -> None:
    library, memory = Library(built), torch.ones(1000)
    out = memory[100:340].view(2, 4, 5, 6)
    for begin, lies in ((100, True), (339, True), (340, False), (29, False), (31, True)):
        mask = memory.view(torch.uint8)[4 * begin : 4 * begin + 280].view(2, 4, 5, 7)
        if lies:
            with pytest.raises(KernelError, match="`out` must not overlap `mask`"):
                masked(library, mask, out)
        else:
            masked(library, mask, out)
        memory.fill_(1)
    one = memory.view(torch.uint8)[400:407].expand(2, 4, 5, 7)
    with pytest.raises(KernelError, match="`out` must not overlap `mask`"):
        masked(library, one, out)
