"""A model of transformers whose blocks are captured answers as its unpatched twin, whatever is done
to it before and after `apply`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from region_cases import CASES


@pytest.fixture(autouse=True)
def _kernels(kernels_module: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


#: Each change with each of ten models is for `make test-all`; `make test` takes one of 15.
_SHARE = 15


def _cases() -> Iterator[object]:
    for i, name in enumerate(CASES):
        often = (i + i // _SHARE) % _SHARE == 0 or name.startswith(("codes", "counting"))
        marks = () if often else (pytest.mark.exhaustive,)
        yield pytest.param(name, marks=marks, id=name.replace("/", "-"))


@pytest.mark.parametrize("name", _cases())
def test_it_answers_as_its_twin(name: str) -> None:
    CASES[name]()


def test_there_are_enough() -> None:
    assert len(CASES) >= 300
