"""Which cases of a test function `make test` runs, where these are a product of many axes.

Ops by dtypes by layouts by instruction sets by shapes: a fault shows in many of these cases at
once, so that one in so many of each function finds it too. The others have the marker `exhaustive`,
and run in `make test-all`. `tests/mutation/run.py` counts what that costs.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

#: Beginning of a test's path: one in so many of a function's cases. Cases that differ in kind, such
#: as attacks or hostile modules, are not thinned out.
SHARES: Mapping[str, int] = {
    "tests/kernels/": 6,
    "tests/test_blocks_single.py": 6,
    "tests/test_joint_blocks.py": 3,
    "tests/test_models.py": 4,
    "tests/test_zoo.py": 2,
    "tests/test_autocast.py": 2,
    "tests/test_packing_families.py": 3,
}
#: So many cases of a function run in any case.
LEAST = 6


def kept(cases: Iterable[str], share: int) -> set[str]:
    """The test ids that stay. Drawn by a checksum of the id: a stride would pick one dtype of the
    three that are often the last axis."""
    drawn = sorted(cases, key=lambda case: (zlib.crc32(case.encode()), case))
    return set(drawn[: max(LEAST, -(-len(drawn) // share))])


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark the others `exhaustive`; of captures (support/captured.py) there is a share too."""
    functions: dict[tuple[str, bool], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if not any(item.iter_markers("exhaustive")):
            name, _, case = item.nodeid.partition("[")
            functions[name, ", captured" in case][item.nodeid] = item
    for (name, _), cases in functions.items():
        share = next((n for path, n in SHARES.items() if name.startswith(path)), 1)
        left = kept(cases, share) if share > 1 else set(cases)
        for nodeid, item in cases.items():
            if nodeid not in left:
                item.add_marker(pytest.mark.exhaustive)
