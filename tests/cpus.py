"""The numeric tests as other CPUs would run them: `make test-cpus`, or `python tests/cpus.py`.

    python tests/cpus.py                          every setting, all numeric tests
    python tests/cpus.py avx2 baseline -- -n 4    these settings; what follows `--` is pytest's

Each setting is a process with environment variables of its own, since PyTorch, its libraries and
the kernels read them once. What sums come out as depends on them, what is right does not. The
kernels' own tests run for every instruction set in any case (tests/kernels).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED, BAD_USAGE = 77, 2


@dataclass(frozen=True)
class Setting:
    """Variables of a process, and the flag of /proc/cpuinfo without which they would make PyTorch
    run instructions that the CPU does not have."""

    variables: Mapping[str, str]
    needs: str | None = None

    def missing(self) -> str | None:
        """Why this machine cannot run it, or None."""
        if self.needs is None:
            return None
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"`{self.needs}` is x86's, this is {platform.machine()}"
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        return None if self.needs in flags else f"this CPU has no {self.needs}"


def _threads(count: int) -> dict[str, str]:
    """MKL may use fewer where it finds that faster, unless it is told not to."""
    fixed = {"MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE"}
    return fixed | {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


SETTINGS: Mapping[str, Setting] = {
    "avx2": Setting(
        {
            "HFPATCH_SIMD": "avx2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
        needs="avx2",
    ),
    "baseline": Setting(
        {
            "HFPATCH_SIMD": "baseline",
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        }
        | _threads(1)
    ),
    "1-thread": Setting(_threads(1)),
    "4-threads": Setting(_threads(4)),
    # Parts of unequal size, and MKL's sums in the one order that it has for every CPU.
    "3-threads-cbwr": Setting(_threads(3) | {"MKL_CBWR": "COMPATIBLE"}),
}

#: Tests that compare results too, and why no setting is needed for them.
ELSEWHERE: Mapping[str, str] = {
    "tests/kernels": "run the kernels for every instruction set by themselves",
    "tests/clib": "the kernels of tests/kernels, by another binding",
    "tests/build": "a kernel that was built is called once",
    "tests/hub": "kernels of Hub repositories that are made for the tests: one operator each",
    "tests/gpu": "what the GPU computes",
    "tests/test_bench.py": "about times",
    "tests/test_flash3.py": "no kernel of this project; copies and multiples of two",
    "tests/test_other_machines.py": "one operator of PyTorch's",
    "tests/test_sources.py": "which kernel is chosen",
    "tests/test_status.py": "what is said of a model",
    "tests/test_cpus.py": "runs the others",
    "tests/test_tolerances.py": "bounds, of numbers that are given",
}
#: What a test says that compares the results of two computations.
COMPARES = re.compile(
    r"assert_as_near|relative_error|assert_close|allclose|torch\.equal|harness|loop_cases|choice_cases"
    r"|support.leaves"
)


def numeric() -> list[str]:
    """Every file of tests that compares results, except for those that are named above."""
    paths = (p for p in sorted((ROOT / "tests").rglob("test_*.py")))
    found = [p for p in paths if COMPARES.search(p.read_text(encoding="utf-8"))]
    names = [p.relative_to(ROOT).as_posix() for p in found]
    left = tuple(f"{name}/" for name in ELSEWHERE)
    return [n for n in names if n not in ELSEWHERE and not n.startswith(left)]


#: Whole models, blocks, leaves, losses, decoding steps, and what users do to a model.
NUMERIC: Sequence[str] = numeric()

_NUMBERS = "tests/test_models.py::test_numbers_and_restore"
_CELL = "tests/compat/test_matrix.py::test_cell"
#: Those that failed somewhere, and one of each kind: under every setting in `make test` too.
SENSITIVE: Sequence[str] = (
    f"{_NUMBERS}[t5-v1.1-torch.float32]",
    f"{_NUMBERS}[qwen3-next-torch.float32]",
    f"{_CELL}[Serving-and-hooks-generate-beam-search-t5-v1.1]",
    f"{_CELL}[Training-gradient-accumulation-t5-v1.1]",
    "tests/test_compiled_blocks.py::test_what_comes_between_blocks_parts_them",
    "tests/test_blocks_single.py::test_numbers[ltx vae-video-torch.float32]",
    "tests/test_leaves.py::test_leaves_are_as_near[llama]",
    "tests/test_head_loss.py::test_a_models_loss_and_gradients[llama-torch.float32]",
    "tests/decoding/test_engine.py::test_threads_change_no_bit[torch.bfloat16]",
)


def environment(setting: Setting) -> dict[str, str]:
    """This process's, with the setting's variables."""
    return {**os.environ, **setting.variables}


def run(name: str, tests: Sequence[str] = NUMERIC, arguments: Sequence[str] = ()) -> int:
    """pytest's exit status under a setting; `SKIPPED` where this machine cannot run it."""
    setting = SETTINGS[name]
    if (why := setting.missing()) is not None:
        print(f"{name}: skipped, {why}", flush=True)
        return SKIPPED
    variables = " ".join(f"{k}={v}" for k, v in setting.variables.items())
    print(f"{name}: {variables}", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "not exhaustive", *arguments, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment(setting), check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """0 when no setting failed, 1 when one did."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, rest = arguments[:at] or list(SETTINGS), arguments[at + 1 :]
    if unknown := [n for n in names if n not in SETTINGS]:
        print(f"expected settings of {', '.join(SETTINGS)}, got {unknown}", file=sys.stderr)
        return BAD_USAGE
    results = {}
    for name in names:
        started = time.perf_counter()
        status = run(name, arguments=rest)
        word = {0: "passed", SKIPPED: "skipped"}.get(status, f"failed (pytest's status {status})")
        results[name] = f"{word}, {time.perf_counter() - started:.0f} s"
    for name, result in results.items():
        print(f"{name}: {result}")
    return int(any("failed" in r for r in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
