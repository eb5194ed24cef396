"""The loop's steps that write to a lab: init, check, profile, hypothesis, next, record."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from hfpatch.lab import changes, checking, experience, profiles, worker
from hfpatch.lab.compiling import CUDA_SUFFIXES, HOST_SUFFIXES
from hfpatch.lab.problems import Refused, ToolMissing
from hfpatch.lab.workspace import Lab, write_json

Found = dict[str, Any]
_CHIPS = ("H100", "H200", "A100", "B200", "L40S", "L4", "T4", "V100", "A10")


# init -------------------------------------------------------------------------------------------


def init(
    root: Path,
    subject: Found,
    source: Path | str,
    ref: Path | None,
    iterations: int,
    settings: Found,
) -> Lab:
    """A lab with v0.

    Args:
        subject: `kind`, `file`, `name`, `backend`, and what else its kind needs.
        source: the file or tree that becomes v0, or the text of a file that is written.
        ref: what has `reference(**kwargs)`; copied.
        iterations: how many versions may follow; fixed from now on.
        settings: `sizes`, `seeds`, `device`, `dtype`, `flags`, `derive`, `threads`.
    """
    folders = []
    if isinstance(source, Path) and source.is_file():
        folders.append(str(source.resolve().parent))
    if ref is not None and str(ref.resolve().parent) not in folders:
        folders.append(str(ref.resolve().parent))
    lab = Lab.make(
        root,
        {
            "subject": subject,
            "iterations": iterations,
            **settings,
            "folders": folders,
            "made": experience.now(),
        },
    )
    if ref is not None:
        shutil.copyfile(ref, lab.root / "ref.py")
    if isinstance(source, Path):
        lab.add(source, None)
    else:
        kernel = lab.root / subject["file"]
        kernel.write_text(source, encoding="utf-8")
        lab.add(kernel, None)
        lab.data["subject"]["original"] = str(kernel)
        lab.save()
    return lab


def kind_of(path: Path) -> Found:
    """The subject that a file or folder is.

    Raises:
        ValueError: it is none; says what can be one.
    """
    if path.is_dir():
        if not (path / "build.toml").is_file():
            raise ValueError(f"`{path}` has no `build.toml`; expected a kernel project, or a file")
        return {"kind": "project", "file": "project", "backend": "project"}
    if not path.is_file():
        raise ValueError(f"`{path}`: no such file; expected a .cu, .c, .cpp or .py file")
    if path.suffix in CUDA_SUFFIXES:
        return {"kind": "solve", "file": path.name, "backend": "cuda"}
    if path.suffix in HOST_SUFFIXES:
        return {"kind": "solve", "file": path.name, "backend": "cpp"}
    if path.suffix == ".py":
        text = path.read_text(encoding="utf-8", errors="replace")
        triton = re.search(r"^\s*(?:import|from)\s+triton\b", text, re.MULTILINE)
        return {"kind": "python", "file": path.name, "backend": "triton" if triton else "python"}
    raise ValueError(
        f"`{path}`: expected a .cu, .c, .cpp or .py file, or a kernel project's folder"
    )


# check ------------------------------------------------------------------------------------------


def check(lab: Lab, n: int, seconds: float) -> Found:
    """Check version n and write `correctness.md`. Raises ToolMissing, Refused."""
    _need_device(lab)
    _need_packages(lab)
    if "chip" not in lab.data:
        lab.data["chip"] = _chip(lab.data["device"])
        lab.save()
    digest = lab.digest(n)
    try:
        found = worker.job(lab, "check", seconds, version=n)
    except worker.Failed as e:
        found = {"passed": False, "rows": [{"check": "runs", "passed": False, "found": str(e)}]}
    found = {"version": n, "file": lab.data["subject"]["file"], "sha256": digest, **found}
    write_json(lab.folder(n) / "correctness.json", found)
    page = lab.folder(n) / "correctness.md"
    page.write_text(checking.as_markdown(n, found), encoding="utf-8")
    return found


def _need_device(lab: Lab) -> None:
    if lab.data["device"] != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise ToolMissing(
            "this lab is of a GPU, and this torch sees none; go on where there is one"
        )
    if torch.cuda.get_device_capability() < (7, 0):
        raise ToolMissing(
            f"the GPU is {torch.cuda.get_device_name()}; expected compute capability 7.0 or newer"
        )


def _need_packages(lab: Lab) -> None:
    if lab.data["subject"]["backend"] != "triton":
        return
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise ToolMissing("the kernel imports Triton, which is not installed: pip install triton")


# profile ----------------------------------------------------------------------------------------


def profile(lab: Lab, n: int, seconds: float, roofline: bool) -> Found:
    """Profile version n. Raises Refused without a passed check of the same files, ToolMissing."""
    lab.require_checked(n)
    _need_device(lab)
    return profiles.profile(lab, n, seconds, roofline)


# hypothesis, next -------------------------------------------------------------------------------


def hypothesis(lab: Lab, base: int, change: str, text: str, rationale: str, expected: str) -> Found:
    """Write down what the next version changes, and why. Raises Refused, ValueError."""
    given = {"change": change, "hypothesis": text, "rationale": rationale, "expected": expected}
    for name, value in given.items():
        if len(value.split()) < 2:
            raise ValueError(f"--{name} {value!r}: expected a few words")
    _require_recorded(lab)
    lab.require_checked(base)
    if lab.fresh(base, "profile") is None:
        raise Refused(f"v{base} was not profiled as it is: run `hfpatch lab profile` first")
    found = {"from": base, **given, "time": experience.now()}
    write_json(lab.root / "hypothesis.json", found)
    return found


def _require_recorded(lab: Lab) -> None:
    if lab.last and lab.result(lab.last, "record") is None:
        raise Refused(
            f"v{lab.last} was not recorded: check it, profile it and run `hfpatch lab record` first"
        )


def advance(lab: Lab, source: Path | None) -> Found:
    """Make the next version of a changed file or tree.

    Raises:
        Refused: no hypothesis, no version left, no change, or more than one as the diff shows.
    """
    import json

    if lab.last >= lab.data["iterations"]:
        raise Refused(
            f"all {lab.data['iterations']} iterations are done; `hfpatch lab report` says what "
            "came of them"
        )
    _require_recorded(lab)
    path = lab.root / "hypothesis.json"
    if not path.is_file():
        raise Refused("there is no hypothesis: run `hfpatch lab hypothesis` first")
    wanted = json.loads(path.read_text(encoding="utf-8"))
    if source is None:
        source = Path(lab.data["subject"]["original"])
    base = lab.kernel(wanted["from"])
    if not source.exists():
        raise ValueError(f"`{source}`: no such file; expected the changed kernel")
    if source.is_dir() != base.is_dir():
        raise ValueError(
            f"`{source}`: expected a {'folder' if base.is_dir() else 'file'}, as v0 is"
        )
    places, diff = changes.differences(base, source)
    if not places:
        raise Refused(f"`{source.name}` is v{wanted['from']}, comments and spaces left out")
    groups = changes.independent(places)
    if len(groups) > 1:
        said = "; ".join(
            f"{i + 1}. {', '.join(p.where for p in group)} ({group[0].lines[0].strip()})"
            for i, group in enumerate(groups)
        )
        raise Refused(
            f"{len(groups)} changes at once, which have nothing in common: {said}. Make one, "
            "measure it, then the next"
        )
    n = lab.add(source, wanted["from"])
    folder = lab.folder(n)
    path.replace(folder / "hypothesis.json")
    (folder / "hypothesis.md").write_text(_hypothesis_page(n, wanted), encoding="utf-8")
    (folder / "change.diff").write_text(f"{diff}\n", encoding="utf-8")
    return {"version": n, "from": wanted["from"], "changed": [p.where for p in places]}


def _hypothesis_page(n: int, h: Found) -> str:
    return (
        f"# v{n}: {h['change']}\n\nFrom v{h['from']}.\n\n"
        f"**Hypothesis:** {h['hypothesis']}\n\n**Rationale:** {h['rationale']}\n\n"
        f"**Expected:** {h['expected']}\n"
    )


# record -----------------------------------------------------------------------------------------


def record(lab: Lab, n: int, log: experience.Log, seconds: float) -> Found:
    """Measure version n in turns with the one it came from, and write down what came of it.

    Raises:
        Refused: it was not checked and profiled as it is, or was recorded already.
    """
    if n == 0:
        raise Refused("v0 changes nothing; there is nothing to record")
    if lab.result(n, "record") is not None:
        raise Refused(f"v{n} was recorded already; `v{n}/record.json` has it")
    wanted = lab.result(n, "hypothesis")
    if wanted is None:
        raise Refused(f"v{n} has no hypothesis; `hfpatch lab next` makes versions")
    base = wanted["from"]
    checked = lab.fresh(n, "correctness")
    if checked is None:
        raise Refused(f"v{n} was not checked as it is: run `hfpatch lab check` first")
    before = lab.result(base, "profile") or {}
    metrics: dict[str, float] = {}
    gain, note = None, ""
    if not checked["passed"]:
        said = "failure"
        wrong = next(r for r in checked["rows"] if r["passed"] is False)
        note = f"wrong: {wrong['check']}: {wrong['found']}"[:2000]
        measured: Found = {}
    else:
        after = lab.fresh(n, "profile")
        if after is None:
            raise Refused(f"v{n} was not profiled as it is: run `hfpatch lab profile` first")
        _need_device(lab)
        try:
            measured = worker.job(lab, "versions", seconds, versions=[base, n])
        except worker.Failed as e:
            raise Refused(f"v{base} and v{n} could not be timed together: {e}") from e
        verdict = measured["against"][f"v{n}"]
        said, gain = verdict["outcome"], verdict["gain"]
        metrics = {
            "us before": measured["times"][f"v{base}"]["median"],
            "us after": measured["times"][f"v{n}"]["median"],
            "noise": verdict["noise"],
            **{f"{k} before": v for k, v in before["bottleneck"]["numbers"].items()},
            **{f"{k} after": v for k, v in after["bottleneck"]["numbers"].items()},
        }
    subject = lab.data["subject"]
    entry = experience.Entry(
        op=subject["name"],
        backend=subject["backend"],
        chip=lab.data["chip"],
        bottleneck=before.get("bottleneck", {}).get("kind", "unknown"),
        technique=wanted["change"],
        outcome=said,
        gain=gain,
        shape=", ".join(f"{k}={v:g}" for k, v in (lab.data["sizes"] or [{}])[0].items()),
        dtype=lab.data["dtype"],
        hypothesis=wanted["hypothesis"],
        rationale=wanted["rationale"],
        metrics=metrics,
        note=note or f"expected: {wanted['expected']}",
        source="hfpatch lab",
        time=experience.now(),
    )
    log.append([entry])
    found = {
        "version": n,
        "from": base,
        "sha256": lab.digest(n),
        "outcome": said,
        "gain": gain,
        "note": note,
        "metrics": metrics,
        "entry": entry.id,
        **measured,
    }
    write_json(lab.folder(n) / "record.json", found)
    return found


def _chip(device: str) -> str:
    """As the log calls it: "H100", "sm_89", "cpu"."""
    if device == "cpu":
        return "cpu"
    import torch

    name = torch.cuda.get_device_name()
    known = next((c for c in _CHIPS if re.search(rf"\b{c}\b", name)), None)
    major, minor = torch.cuda.get_device_capability()
    return known or f"sm_{major}{minor}"
