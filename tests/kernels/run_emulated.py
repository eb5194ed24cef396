"""Runs the tests of the C interface on its build for aarch64, in an emulator.

    python tests/kernels/run_emulated.py                    all of them
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

import c_api
import emulated
import pytest

HERE = Path(__file__).resolve().parent
#: Those whose tests take the fixture `lib`.
FILES = [f for f in sorted(HERE.glob("test_*.py")) if re.search(r"(?m)^(    lib,|def lib\()", f.read_text())]


class Emulation:
    """Leaves out what does not call the library, and counts."""

    passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "lib" in item.fixturenames]  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def main() -> int:
    if missing := emulated.missing():
        sys.exit(f"error: {missing}")
    with tempfile.TemporaryDirectory(prefix="hfpatch-aarch64-") as folder:
        given = os.environ.get("HFPATCH_TEST_EMULATED")  # one that is built
        program = given or str(emulated.build(Path(folder)))
        os.environ["HFPATCH_TEST_EMULATED"] = program
        run = Emulation()
        status = pytest.main(["-q", *map(str, FILES), *sys.argv[1:]], plugins=[run])
        called = emulated.library(program).called
        never = sorted(set(c_api.OPS | c_api.LIST_OPS) - called)
    print(json.dumps({"passed": run.passed, "never_called": never}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
