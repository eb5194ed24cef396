"""examples/c, examples/rust and examples/go print what examples/row_pytorch.py prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import c_api
import pytest
from support import row_examples

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(scope="module")
def prefix() -> Path:
    library = c_api.built_library()
    assert library is not None
    return library.parent.parent


def test_the_two_tokens_differ() -> None:
    first, second = (row_examples.of_pytorch(token) for token in row_examples.TOKENS)
    assert first != second


def test_c(prefix: Path, tmp_path: Path) -> None:
    row_examples.check(row_examples.in_c(prefix, tmp_path), prefix, ("cpu",))


def test_rust(prefix: Path, tmp_path: Path) -> None:
    row_examples.check(row_examples.in_rust(prefix, tmp_path), prefix, ("cpu",))


def test_go(prefix: Path, tmp_path: Path) -> None:
    row_examples.check(row_examples.in_go(prefix, tmp_path), prefix, ("cpu",))
