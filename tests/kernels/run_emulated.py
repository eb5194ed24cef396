"""Runs the tests of the C interface on its build for aarch64, in an emulator.

    python tests/kernels/run_emulated.py                    all of them
    python tests/kernels/run_emulated.py --quick            except for the longest
    python tests/kernels/run_emulated.py -k rms_norm        with arguments of pytest

It ends with one line of JSON: how many tests passed, and the ops that no test called with success.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import c_api
import emulated
import pytest
import torch

HERE = Path(__file__).resolve().parent
#: Those whose tests take the fixture `lib`.
FILES = [
    file
    for file in sorted(HERE.glob("test_*.py"))
    if re.search(r"^    lib,|^def lib\(", file.read_text(encoding="utf-8"), re.MULTILINE)
]
#: Of 70 s of all tests 19 s.
LONGEST = ("test_large_softmax", "test_top_k_of_sample_is_a_mask")


class Emulation:
    """Leaves out what does not call the library, and counts."""

    def __init__(self, quick: bool) -> None:
        self.passed, self._left_out = 0, LONGEST if quick else ()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item
            for item in items
            if "lib" in item.fixturenames and item.originalname not in self._left_out
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def main() -> int:
    if missing := emulated.missing():
        sys.exit(f"error: {missing}")
    with tempfile.TemporaryDirectory(prefix="hfpatch-aarch64-") as folder:
        given = os.environ.get("HFPATCH_TEST_EMULATED")  # one that is built
        program = given or str(emulated.build(Path(folder)))
        os.environ["HFPATCH_TEST_EMULATED"] = program
        run = Emulation("--quick" in sys.argv)
        options = [word for word in sys.argv[1:] if word != "--quick"]
        torch.set_num_threads(1)  # of the references; the emulator has its own
        command = ["-q", "-p", "no:cacheprovider", *map(str, FILES), *options]
        status = pytest.main(command, plugins=[run])
        called = emulated.library(program).called
        never = sorted(set(c_api.CALLS) - called)
    print(json.dumps({"passed": run.passed, "never_called": never}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
