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

#: Whole models, blocks, leaves, and what users do to a model.
NUMERIC: Sequence[str] = (
    "tests/test_nearness.py",
    "tests/test_models.py",
    "tests/test_leaves.py",
    "tests/test_blocks.py",
    "tests/test_blocks_single.py",
    "tests/test_joint_blocks.py",
    "tests/test_compiled_blocks.py",
    "tests/test_ltx_vae.py",
    "tests/test_chain.py",
    "tests/test_packing.py",
    "tests/test_packing_families.py",
    "tests/test_norm_calls.py",
    "tests/test_gated_norms.py",
    "tests/test_after_apply.py",
    "tests/test_autocast.py",
    "tests/test_loss.py",
    "tests/test_optim.py",
    "tests/test_recall.py",
    "tests/compat",
)

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
