"""What `make test` leaves to `make test-all` of functions with many cases."""

from __future__ import annotations

from support.thinning import LEAST, kept

CASES = [f"t.py::f[{op}-{dtype}-{level}]" for op in range(10) for dtype in "abc" for level in "xyz"]


def test_a_share_of_the_cases_stays_and_always_the_same() -> None:
    left = kept(CASES, 4)
    assert len(left) == 23 and left <= set(CASES)
    assert kept(reversed(CASES), 4) == left


def test_a_few_stay_whatever_the_share() -> None:
    assert len(kept(CASES[:8], 4)) == LEAST
    assert kept(CASES[:3], 4) == set(CASES[:3])


def test_every_value_of_an_axis_stays() -> None:
    left = kept(CASES, 4)
    for axis in ("-a-", "-b-", "-c-", "-x]", "-y]", "-z]"):
        assert any(axis in case for case in left), axis
