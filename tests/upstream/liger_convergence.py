"""Liger's own convergence tests, their files unchanged, with hfpatch in Liger's place.

    python tests/upstream/liger_convergence.py --checkout DIR [--device cuda] [--json FILE]

Each test trains a small model twice for 32 steps on the same text, as it is and patched, and
compares the losses of all steps, the log-probabilities of the likeliest tokens and the weights
behind the last step, by Liger's tolerances. DIR is Liger-Kernel at the version whose tests these
are; its source distribution has them:

    pip download --no-deps --no-binary liger-kernel liger-kernel==0.8.5
    tar xzf liger_kernel-0.8.5.tar.gz

A CHECKOUT.txt there, if it is no release, says in the result how it was put together. Needed beside
hfpatch's own requirements: triton, which Liger's package imports, also on a CPU; datasets; for the
files of `--files multimodal` torchvision. Nothing is downloaded.

On a CPU the tests in bf16 are skipped by themselves, and one in fp32 takes twenty minutes. Exit
status: 1 where a test fails whose unpatched training ended, and where `--budget` ended the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hfpatch.bench.results import head, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: What `--files` takes: its file in each of Liger's folders of dtypes.
FILES = {
    "plain": "test_mini_models.py",
    "logits": "test_mini_models_with_logits.py",
    "multimodal": "test_mini_models_multimodal.py",
}
DTYPES = ("fp32", "bf16")


def version_of(checkout: Path) -> str:
    """The version that its pyproject.toml declares, and what its CHECKOUT.txt says."""
    found = re.search(r'^version = "([^"]+)"', (checkout / "pyproject.toml").read_text(), re.M)
    note = checkout / "CHECKOUT.txt"
    remark = f" ({' '.join(note.read_text().split())})" if note.exists() else ""
    return f"{found[1] if found else 'unknown'}{remark}"


def run(
    checkout: Path,
    files: list[str],
    models: list[str],
    device: str,
    workers: int,
    control: bool,
    budget: float | None,
) -> tuple[dict[str, Any], bool]:
    """The tests in a process of their own: what plugin.py recorded, and whether it was all."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HFPATCH_UPSTREAM_PATCH": ""}
    places = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in places if p)
    environment["HFPATCH_LIGER_CONTROL"] = "1" if control else ""
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # their `infer_device` takes a GPU that it sees
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "liger_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", *files]
    command += ["-n", str(workers)] if workers else []
    # a test's name goes on behind the model's with a minus
    command += ["-k", " or ".join(f"[{name}-" for name in models)] if models else []
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        environment["HFPATCH_UPSTREAM_RECORD"] = str(record)
        with subprocess.Popen(command, cwd=checkout, env=environment) as process:
            try:
                process.wait(budget)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # behind which it records what it has
        # 0: all passed, 1: some failed
        complete = process.returncode in (0, 1)
        if not record.exists():
            raise SystemExit("pytest ended before it ran the tests: see what it printed above")
        found: dict[str, Any] = json.loads(record.read_text())
        return found, complete


def row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """What the result has of one test. outcome: "passed", "failed", "skipped" or "xfailed" by
    their own marks, or "fails unpatched"."""
    file, _, rest = name.partition("::")
    turn = entry.get("properties", {}).get("turn", {})
    outcome = entry["outcome"]
    if outcome in ("failed", "error") and turn.get("stage") == "unpatched":
        outcome = "fails unpatched"
    raised = [line for line in entry.get("message", "").splitlines() if line.startswith("E  ")]
    why = entry.get("reason") or " ".join(line[1:].strip() for line in raised[:3])
    model = re.search(r"\[(mini_[^-\]]+)", rest)
    return {
        "file": file.removeprefix("test/convergence/"),
        "model": model[1] if model else rest,
        "outcome": outcome,
        "seconds": entry["seconds"],
        **{key: turn.get(key) for key in ("swaps", "layer_calls", "kernel_calls", "loss", "notes")},
        "why": "" if outcome == "passed" else why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="Liger-Kernel's sources")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--files", nargs="+", choices=list(FILES), default=["plain", "logits"])
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME", help="as mini_llama3")
    parser.add_argument("--workers", type=int, default=0, help="of pytest-xdist")
    parser.add_argument("--budget", type=float, help="seconds, behind which the rest is left out")
    parser.add_argument("--control", action="store_true", help="patch nothing: train it twice")
    parser.add_argument("--commit", help="what is tested; default: git's HEAD")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    files = [f"test/convergence/{d}/{FILES[f]}" for d in args.dtypes for f in args.files]
    if missing := [f for f in files if not (checkout / f).is_file()]:
        parser.error(f"`{checkout}` has no `{missing[0]}`; expected sources of Liger-Kernel 0.8.5")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device cuda` and PyTorch sees no GPU")
    found, complete = run(
        checkout, files, args.models, args.device, args.workers, args.control, args.budget
    )
    rows = [row(name, entry) for name, entry in found["tests"].items()]
    result = head("liger-convergence", torch.device(args.device), args.commit)
    result["versions"]["tests of liger-kernel"] = version_of(checkout)
    result |= {"control": args.control, "complete": complete}
    result["rows"] = rows
    for r in rows:
        print(f"{r['file']} {r['model']}: {r['outcome']}, {r['swaps']}, {r['why'][:200]}")
    if args.json:
        write(result, args.json)
    return int(not complete or any(r["outcome"] in ("failed", "error") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
