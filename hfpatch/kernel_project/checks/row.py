"""One line of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What was checked, and what came out.

    Attributes:
        where: "project", or the name of a variant.
        what: the demand, in a few words.
        problem: what is wrong; empty if nothing is.
        todo: what to do about it.
        note: what was found where nothing is wrong.
    """

    where: str
    what: str
    problem: str = ""
    todo: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problem


def verdict(where: str, what: str, problems: Iterable[str], todo: str, note: str = "") -> Row:
    """A row of all problems of one kind: the first three, and how many more."""
    found = list(problems)
    if not found:
        return Row(where, what, note=note)
    more = f"; {len(found) - 3} more" if found[3:] else ""
    return Row(where, what, "; ".join(found[:3]) + more, todo)
