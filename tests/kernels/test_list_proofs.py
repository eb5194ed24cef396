"""What holds for every op over lists, on the CPU; on a GPU: `test_cuda_list_proofs.py`."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import c_api
import list_proofs
import proofs
import pytest
import torch
from list_samples import LIST_SAMPLES, LISTS_BY_ID, LISTS_FIRST, LISTS_OF_DTYPES

EVERY = pytest.mark.parametrize(("name", "dtype"), LISTS_OF_DTYPES, ids=str)


def test_every_op_over_lists_has_a_sample() -> None:
    assert set(LISTS_FIRST) == set(c_api.LIST_OPS)


@EVERY
def test_opcheck(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    operator = getattr(kernels_module.ops, sample.op).default
    for change in (lambda t: t, *list_proofs.LAYOUTS.values()):
        made = sample.make(dtype, shapes=((3, 40), (), (0, 2), (17,)), change=change)
        torch.library.opcheck(operator, sample.arguments(made))


@EVERY
def test_bits_and_memory(name: str, dtype: torch.dtype, kernels_module: ModuleType) -> None:
    sample = LISTS_BY_ID[name]
    list_proofs.repeats(sample, kernels_module, dtype, "cpu")
    list_proofs.layouts(sample, kernels_module, dtype, "cpu")
    list_proofs.canaries(sample, kernels_module, dtype, "cpu")


@EVERY
def test_zero_size_and_odd_values(
    name: str, dtype: torch.dtype, kernels_module: ModuleType
) -> None:
    list_proofs.zero_size(LISTS_BY_ID[name], kernels_module, dtype, "cpu")
    list_proofs.odd_values(LISTS_BY_ID[name], kernels_module, dtype, "cpu")


def test_threads(kernels_module: ModuleType) -> None:
    proofs.at_once(list_proofs.calls_of(kernels_module, torch.bfloat16, "cpu"), "cpu")


@pytest.mark.parametrize("sample", LIST_SAMPLES, ids=lambda s: s.id)
def test_compiles_once_for_all_sizes(sample: object, kernels_module: ModuleType) -> None:
    list_proofs.compiles_once(sample, kernels_module, torch.bfloat16, "cpu")


def test_no_growth_in_memory(kernels_module: ModuleType) -> None:
    for sample in LISTS_FIRST.values():
        arguments = sample.arguments(sample.make(torch.bfloat16, shapes=((5,), (3, 4))))
        operator = getattr(kernels_module.ops, sample.op).default
        proofs.assert_no_growth(partial(proofs.repeat, operator, arguments), 2000, sample.op)
