"""A model that decodes through the engine answers as its unpatched twin, whatever is done to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from decoding_cases import CASES


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


#: Every second one is in `make test`; those that found something are all.
_MORE = [n for i, n in enumerate(CASES) if "/" in n and i % 3]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.exhaustive if n in _MORE else (), id=n.replace("/", "-"))
        for n in CASES
    ],
)
def test_it_answers_as_its_twin(name: str) -> None:
    CASES[name]()


def test_there_are_enough() -> None:
    assert len(CASES) >= 150
