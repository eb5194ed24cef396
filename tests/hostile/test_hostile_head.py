"""Logits that are made late are to everybody what the head's own result is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from head_cases import CASES


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_its_twin(name: str) -> None:
    CASES[name]()


def test_there_are_enough() -> None:
    assert len(CASES) >= 150
