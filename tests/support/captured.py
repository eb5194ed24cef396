"""Tests of blocks that have a file of their own, run over captures of the same classes too.

`HFPATCH_TEST_CAPTURES=1` does it for every such class. Without it those in `OFTEN` are tested so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import nn

import hfpatch
from hfpatch.planning.families import BLOCKS, NEVER_CAPTURED, without_files

ALL = os.environ.get("HFPATCH_TEST_CAPTURES") == "1"
#: Rows of blocks_single.py whose class has a file and that are tested so without being asked for.
OFTEN = ("sana",)


def with_captures(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of tests, as captures where their class has no file; and behind them those whose
    class has one and that are tested as captures too, by other names."""
    files = {name: type(row.make()).__name__ in BLOCKS for name, row in rows.items()}
    return {
        name: row if files[name] else dataclasses.replace(row, captured=True)
        for name, row in rows.items()
    } | {
        f"{name}, captured": dataclasses.replace(row, captured=True)
        for name, row in rows.items()
        if files[name]
        and (name in OFTEN or (ALL and type(row.make()).__name__ not in NEVER_CAPTURED))
    }


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """No block has a file of its own, and `hfpatch.apply` captures blocks on a CPU too."""
    with without_files(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hfpatch, "apply", functools.partial(hfpatch.apply, blocks=True))
        yield


def paths(model: nn.Module) -> set[str]:
    """The blocks of a model that its patches fuse, by their files or as captures; a capture counts
    from the call on that decided it."""
    now = hfpatch.status(model)
    fused = {c.path for c in now.plan.candidates if c.state == "fused"}
    return fused | {s.path for s in now.swaps if s.op == "block"}
