"""Medians, their spread, and when two of them differ."""

from __future__ import annotations

import pytest

from hfpatch.bench.spread import Gain, Spread


def test_quartiles_of_many_and_the_range_of_few() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0, 3)
    assert Spread.of([100.0, *[1.0] * 20]).high == 1.0, "one slow turn moves nothing"
    with pytest.raises(ValueError, match="`times` is empty"):
        Spread.of([])


def test_its_text() -> None:
    assert Spread.of([2.0, 1.0, 3.0]).text("s") == "2.00 s (1.00 to 3.00)"
    assert Spread.of([2.0]).text("ms", ".1f") == "2.0 ms"


@pytest.mark.parametrize(
    ("before", "after", "text", "noise"),
    [
        ([2.0, 2.1, 1.9], [1.0, 1.1, 0.9], "2.00x (1.73 to 2.33)", False),
        ([1.0, 1.1, 0.9], [1.0, 1.05, 0.95], "1.00x, within noise (0.86 to 1.16)", True),
        ([1.0, 1.01, 0.99], [2.0, 2.01, 1.99], "0.50x (0.49 to 0.51)", False),
        ([2.0], [1.0], "2.00x, measured once", False),
        ([2.0, 2.0, 2.0], [1.0], "2.00x, measured once", False),
    ],
)
def test_gain(before: list[float], after: list[float], text: str, noise: bool) -> None:
    gain = Gain.of(before, after)
    assert str(gain) == text
    assert gain.within_noise is noise
