"""What is run of a version, in a process of its own: a kernel may crash it, hang, or spoil the GPU.

python -m hfpatch.lab.worker JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.lab.alone import checking, measuring
from hfpatch.lab.problems import Refused, ToolMissing
from hfpatch.lab.workspace import Lab, write_json

if TYPE_CHECKING:
    from hfpatch.lab.subjects import Subject

#: What a job that went wrong is: its own kernel's doing, or something else's.
ERRORS = {"ToolMissing": ToolMissing, "Refused": Refused}


class Failed(Exception):
    """The version could not be loaded or called: it crashed, hung, or raised. Says how."""


def job(lab: Lab, step: str, seconds: float, **given: Any) -> dict[str, Any]:
    """Run one job in a new process.

    Args:
        step: a name of `STEPS`.
        seconds: it is killed after so long.
        given: its arguments.

    Raises:
        Failed: the version itself is at fault.
        ToolMissing, Refused: something else is.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, result = Path(folder, "job.json"), Path(folder, "result.json")
        write_json(wanted, {"root": str(lab.root), "step": step, **given})
        try:
            done = subprocess.run(
                command(wanted, result), env=environment(), capture_output=True, text=True,
                errors="replace", timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise Failed(f"it did not end within {seconds:g} s (`--timeout` allows more)") from e
        return outcome_of(result, done.returncode, done.stderr)


def outcome_of(result: Path, status: int, said: str) -> dict[str, Any]:
    """What a job left; raises as `job` does."""
    try:
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tail = "\n".join(said.strip().splitlines()[-5:])
        if status < 0:
            tail = f"{signal.Signals(-status).name} {tail}".strip()
        raise Failed(f"the process ended with status {status}: {tail}") from None
    error = found.get("error")
    if error is not None:
        raise ERRORS.get(error["kind"], Failed)(error["message"])
    return found


def command(wanted: Path, result: Path) -> list[str]:
    return [sys.executable, "-m", "hfpatch.lab.worker", str(wanted), str(result)]


def environment() -> dict[str, str]:
    """That of this process, in which this hfpatch is found."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# In the process ---------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    wanted = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        found = STEPS[wanted["step"]](Lab.open(Path(wanted["root"])), wanted)
    except Exception as e:
        message = str(e) if type(e).__name__ in (*ERRORS, "Unfit") else _said(e)
        found = {"error": {"kind": type(e).__name__, "message": message}}
    write_json(Path(argv[1]), found)
    return 0


def _said(e: Exception) -> str:
    if type(e).__name__ == "CompileError":
        return f"the compiler refused it:\n{e}"
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {' '.join(lines[:3])}"


def _sizes(lab: Lab, subject: Subject) -> list[dict[str, float]]:
    return lab.data["sizes"] or subject.settings.get("SIZES") or [{}]


def _check(lab: Lab, wanted: dict[str, Any]) -> dict[str, Any]:
    from hfpatch.lab.checking import check
    from hfpatch.lab.subjects import load

    _settle(lab)
    subject = load(lab, wanted["version"])
    derive = lab.data["derive"] and not subject.settings.get("EXACT_SIZES", False)
    with checking():
        return check(subject, _sizes(lab, subject), lab.data["seeds"], derive)


def _call(lab: Lab, wanted: dict[str, Any]) -> dict[str, Any]:
    """A few calls, of which Nsight Compute sees the last."""
    import torch

    from hfpatch.lab.subjects import load

    subject = load(lab, wanted["version"])
    inputs = subject.make(0, _sizes(lab, subject)[0])
    for _ in range(3):
        subject.run(inputs)
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.profiler
    with measuring():
        runtime.start()
        subject.run(inputs)
        torch.cuda.synchronize()
        runtime.stop()
    return {}


def _roofline(lab: Lab, wanted: dict[str, Any]) -> dict[str, Any]:
    from hfpatch.lab.roofline import measured
    from hfpatch.lab.subjects import load

    _settle(lab)
    subject = load(lab, wanted["version"])
    return measured(subject, _sizes(lab, subject)[0])


def _versions(lab: Lab, wanted: dict[str, Any]) -> dict[str, Any]:
    """Versions in turns; the first of them twice, which is the noise."""
    from hfpatch.lab.subjects import load
    from hfpatch.lab.turns import as_data, calls_of, in_turns, outcome

    _settle(lab)
    calls, graphs, cuda = {}, {}, False
    numbers = wanted["versions"]
    for name, n in [("again", numbers[0]), *((f"v{n}", n) for n in numbers)]:
        subject = load(lab, n)
        cuda = subject.device.type == "cuda"
        inputs = subject.make(0, _sizes(lab, subject)[0])
        calls[name], graphs[name] = calls_of(subject, inputs, subject.run), subject.capturable
    with measuring():
        times = in_turns(calls, cuda, graphs)
    base = times[f"v{numbers[0]}"]
    return {
        "times": {name: as_data(values) for name, values in times.items()},
        "against": {f"v{n}": outcome(base, times["again"], times[f"v{n}"]) for n in numbers[1:]},
    }


def _report(lab: Lab, wanted: dict[str, Any]) -> dict[str, Any]:
    """Versions, the reference as it is and compiled, in turns."""
    from hfpatch.lab.checking import copied
    from hfpatch.lab.subjects import load
    from hfpatch.lab.turns import as_data, calls_of, in_turns, outcome

    _settle(lab)
    calls: dict[str, Any] = {}
    graphs: dict[str, bool] = {}
    absent: dict[str, str] = {}
    for n in wanted["versions"]:
        subject = load(lab, n)
        inputs = subject.make(0, _sizes(lab, subject)[0])
        calls[f"v{n}"], graphs[f"v{n}"] = calls_of(subject, inputs, subject.run), subject.capturable
    cuda = subject.device.type == "cuda"
    if subject.refer is None:
        absent["eager"] = absent["torch.compile"] = "there is no reference"
    else:
        calls["eager"], graphs["eager"] = calls_of(subject, inputs, subject.refer), True
        try:
            compiled = subject.refer.compiled(copied(inputs))
            compiled()
            calls["torch.compile"], graphs["torch.compile"] = [compiled], True
            size = len(calls["eager"])
            calls["torch.compile"] = [
                subject.refer.compiled(copied(inputs)) for _ in range(min(size, 4))
            ]
            for call in calls["torch.compile"]:
                call()
        except Exception as e:  # no compiler here, or it does not know the reference
            calls.pop("torch.compile", None)
            absent["torch.compile"] = _said(e)
    with measuring():
        times = in_turns(calls, cuda, graphs)
    first = f"v{wanted['versions'][0]}"
    return {
        "times": {name: as_data(values) for name, values in times.items()},
        "of v0": {
            name: outcome(times[first], times[first], values)["gain"]
            for name, values in times.items()
        },
        "absent": absent,
    }


def _settle(lab: Lab) -> None:
    import torch

    if lab.data["threads"]:
        torch.set_num_threads(lab.data["threads"])
    torch.set_grad_enabled(False)


STEPS: dict[str, Callable[[Lab, dict[str, Any]], dict[str, Any]]] = {
    "check": _check,
    "call": _call,
    "roofline": _roofline,
    "versions": _versions,
    "report": _report,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
