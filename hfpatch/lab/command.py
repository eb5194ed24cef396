"""`hfpatch lab`: the arguments of each step, what it prints, and its exit status.

0 done; 1 the version is wrong; 2 bad usage; 3 refused, as a step before is missing; 4 a tool is
missing. With `--json` every step prints one JSON object, also where it fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.lab.workspace import Lab

_DTYPES = ("float32", "float16", "bfloat16")
Found = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For `hfpatch.cli`; imports nothing heavy."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="STEP")

    def add(name: str, text: str, *, lab: bool = True) -> argparse.ArgumentParser:
        step = actions.add_parser(name, help=text, description=text)
        step.add_argument("--json", action="store_true", help="one JSON object, also of an error")
        if lab:
            step.add_argument("--out", type=Path, default=Path("lab"), metavar="DIR")
        return step

    env = add("env", "what the steps need, what is here, and what to do about the rest")
    env.add_argument("--backend", choices=("cpu", "cuda", "triton"))
    init = add("init", "make a lab: v0, its reference, and how many iterations there are")
    init.add_argument("kernel", nargs="?", type=Path, help="a .cu, .c, .cpp or .py file, a project")
    init.add_argument("--ref", type=Path, help="a file with `reference(**kwargs)`")
    init.add_argument(
        "--iterations", type=int, required=True, metavar="N", help="fixed from now on"
    )
    init.add_argument("--op", help="an op of hfpatch")
    init.add_argument("--project", type=Path, metavar="DIR", help="hfpatch's sources, for --op")
    init.add_argument("--function", help="of a kernel project")
    init.add_argument("--region", metavar="PATH", help="a module that a report names")
    init.add_argument("--model", help="the model of --region")
    init.add_argument("--random-weights", action="store_true")
    init.add_argument("--name", help="what it computes, for the log; default: the file's name")
    init.add_argument("--size", action="append", default=[], metavar="N=1000,M=3",
                      help="repeatable; the first is timed")  # fmt: skip
    init.add_argument("--exact-sizes", action="store_true", help="check no odd sizes besides")
    init.add_argument("--seeds", type=int, default=3)
    init.add_argument("--device", choices=("cpu", "cuda"))
    init.add_argument("--dtype", choices=_DTYPES, default="float32", help="of --op and --region")
    init.add_argument("--flags", default="", help="for the compiler: '-lcublas --use_fast_math'")
    init.add_argument("--threads", type=_count, help="of torch on the CPU")
    for name, text in (
        ("check", "is a version right: seeds, sizes, canaries, odd values, the same bits twice"),
        ("profile", "what limits a version: Nsight Compute, or a roofline from timings"),
        ("record", "measure a version beside the one it came from, and write to the log"),
    ):
        step = add(name, text)
        step.add_argument("--version", type=int, metavar="N", help="default: the newest")
        step.add_argument("--timeout", type=_seconds, default=600.0, metavar="S")
        if name == "profile":
            step.add_argument("--roofline", action="store_true", help="leave the counters alone")
        if name == "record":
            _add_log(step)
        if name != "check":
            step.add_argument("--lock-clocks", action="store_true", help="given back at the end")
    recommend = add("recommend", "what won on kernels like this one, and what lost")
    recommend.add_argument("--kernel", help="what it computes; default: the lab's")
    recommend.add_argument("--backend", help="default: the lab's")
    recommend.add_argument("--chip", help="H100, sm_90, cpu; default: the lab's")
    recommend.add_argument("--bottleneck", choices=("memory", "compute", "latency", "occupancy"))
    recommend.add_argument("--most", type=_count, default=5, help="of each list")
    _add_log(recommend)
    write = add("hypothesis", "write down the one change that comes next, and why")
    write.add_argument("--change", action="append", required=True, help="exactly one")
    write.add_argument("--hypothesis", required=True)
    write.add_argument("--rationale", required=True)
    write.add_argument("--expected", required=True)
    write.add_argument("--from", dest="base", type=int, metavar="N", help="default: the best")
    following = add("next", "make the next version of the changed kernel")
    following.add_argument("kernel", nargs="?", type=Path, help="default: the file given to init")
    report = add("report", "the best version, the way to it, and the reference in turns")
    report.add_argument("--timeout", type=_seconds, default=1200.0, metavar="S")
    report.add_argument("--lock-clocks", action="store_true", help="given back at the end")
    add("status", "where a lab stands, and which step comes next")
    search = add("search", "entries of the experience log with all these words", lab=False)
    search.add_argument("words", nargs="+")
    listing = add("list", "the experience log", lab=False)
    for step in (search, listing):
        step.add_argument("--outcome", choices=("success", "failure", "neutral"))
        step.add_argument("--most", type=_count, default=20)
    merge = add("merge", "add another log's entries to yours", lab=False)
    sync = add("sync", "make your log and another file have the same entries", lab=False)
    for step in (merge, sync):
        step.add_argument("file", type=Path)
    stats = add("stats", "counts of the log", lab=False)
    for step in (search, listing, merge, sync, stats):
        _add_log(step)


def _count(text: str) -> int:
    """A whole number of at least 1."""
    found = int(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {found}")
    return found


def _seconds(text: str) -> float:
    """A number above 0; infinity is none that a process can be waited for."""
    found = float(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return found


def _add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", type=Path, metavar="FILE", help="default: yours")


def run_command(args: argparse.Namespace) -> int:
    """The step; returns its exit status."""
    from hfpatch.lab.problems import Refused, ToolMissing
    from hfpatch.lab.worker import Failed
    from hfpatch.text import printable

    try:
        found, text, status = _STEPS[args.action](args)
    except (Refused, ToolMissing, Failed, ValueError, TypeError, OSError) as e:
        status = {Refused: 3, ToolMissing: 4, Failed: 1}.get(type(e), 2)
        if args.json:
            error = {"step": args.action, "status": status, "kind": type(e).__name__}
            print(json.dumps({"error": {**error, "message": str(e)}}, indent=1))
        else:
            print(printable(f"hfpatch lab {args.action}: {e}"), file=sys.stderr)
        return status
    print(json.dumps({**found, "status": status}, indent=1) if args.json else text)
    return status


Said = tuple[Found, str, int]


def _env(args: argparse.Namespace) -> Said:
    from hfpatch.lab.environment import as_markdown, report

    found = report(args.backend)
    text = as_markdown(found)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "env_check.md").write_text(text, encoding="utf-8")
    return found, text, 0 if found["fits"] else 4


def _init(args: argparse.Namespace) -> Said:
    from hfpatch.lab import steps

    named = [n for n in ("kernel", "op", "region") if getattr(args, n) is not None]
    if len(named) != 1:
        raise ValueError("expected one of a kernel's file or folder, --op, or --region")
    if args.iterations < 1:
        raise ValueError(f"--iterations {args.iterations}: expected at least 1")
    if args.seeds < 2:
        raise ValueError(f"--seeds {args.seeds}: expected at least 2")
    if args.ref is not None and not args.ref.is_file():
        raise ValueError(f"--ref {args.ref}: no such file")
    subject, source = _subject(args)
    backend = subject["backend"]
    device = args.device or _device(backend)
    if backend == "cpp" and device != "cpu":
        raise ValueError(f"`{args.kernel}` runs on the CPU; leave --device {device} out")
    if backend == "cuda" and device != "cuda":
        raise ValueError(f"`{args.kernel}` runs on a GPU; leave --device {device} out")
    if args.ref is None and subject["kind"] in ("solve", "python") and args.region is None:
        text = args.kernel.read_text(encoding="utf-8", errors="replace")
        if subject["kind"] == "solve" or "def reference" not in text:
            raise ValueError(f"`{args.kernel}` has no reference; give one by --ref ref.py")
    lab = steps.init(
        args.out, subject, source, args.ref, args.iterations,
        {
            "sizes": [_size(text) for text in args.size],
            "seeds": args.seeds,
            "device": device,
            "dtype": args.dtype,
            "flags": args.flags.split(),
            "derive": not args.exact_sizes,
            "threads": args.threads,
        },
    )  # fmt: skip
    text = f"wrote {lab.kernel(0)}; {args.iterations} iterations. Next: hfpatch lab check"
    return {"out": str(lab.root), "version": 0, **lab.data}, text, 0


def _subject(args: argparse.Namespace) -> tuple[Found, Path | str]:
    """The subject, and what becomes v0."""
    from hfpatch.lab import steps

    if args.op is not None:
        from hfpatch.lab import ops

        case = ops.case_of(args.op)
        name = args.name or case.op
        if args.project is None:
            found = {"kind": "op", "file": "kernel.py", "backend": "python"}
            return {**found, "name": name, "op": case.name}, ops.template(case.name)
        found = steps.kind_of(args.project)
        return {**found, "kind": "op", "name": name, "op": case.name, "project": True,
                "original": str(args.project.resolve())}, args.project  # fmt: skip
    if args.region is not None:
        from hfpatch.lab import regions

        if args.model is None:
            raise ValueError("--region is of a model: name it by --model")
        file, sep, function = args.model.rpartition(".py:")
        model = f"{Path(file + '.py').resolve()}:{function}" if sep else args.model
        if not sep and Path(model).exists():
            model = str(Path(model).resolve())
        text = regions.TEMPLATE.format(
            model=model, path=args.region, random=args.random_weights, dtype=args.dtype
        )
        found = {"kind": "python", "file": "kernel.py", "backend": "python"}
        return {**found, "name": args.name or args.region}, text
    found = steps.kind_of(args.kernel)
    if found["kind"] == "project":
        if args.function is None:
            raise ValueError(f"`{args.kernel}`: name the project's function by --function")
        found["function"] = args.function
    name = args.name or args.function or args.kernel.stem
    return {**found, "name": name, "original": str(args.kernel.resolve())}, args.kernel


def _device(backend: str) -> str:
    if backend in ("cuda", "triton"):
        return "cuda"
    if backend == "cpp":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _size(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sep, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            sep = ""
        if not sep or not name.strip():
            raise ValueError(f"--size {text}: expected names with numbers, such as N=1000,M=3")
        if not 0 < number < float("inf"):
            raise ValueError(f"--size {text}: expected names with numbers above 0, got {value!r}")
        whole = number.is_integer() and "." not in value and "e" not in value.lower()
        found[name.strip()] = int(number) if whole else number
    return found


def _lab(args: argparse.Namespace) -> Lab:
    from hfpatch.lab.workspace import Lab

    return Lab.open(args.out)


def _check(args: argparse.Namespace) -> Said:
    from hfpatch.lab import checking, steps

    lab = _lab(args)
    found = steps.check(lab, lab.number(args.version), args.timeout)
    return found, checking.as_markdown(found["version"], found), 0 if found["passed"] else 1


def _profile(args: argparse.Namespace) -> Said:
    from hfpatch.lab import profiles, steps
    from hfpatch.lab.clocks import locked

    lab = _lab(args)
    with locked(args.lock_clocks) as clock:
        found = steps.profile(lab, lab.number(args.version), args.timeout, args.roofline)
    return {**found, "locked MHz": clock}, profiles.summary(found), 0


def _recommend(args: argparse.Namespace) -> Said:
    from hfpatch.lab.experience import both
    from hfpatch.lab.recommend import as_text, recommend

    kernel, backend, chip, bottleneck = args.kernel, args.backend, args.chip, args.bottleneck
    if kernel is None:
        lab = _lab(args)
        kernel = lab.data["subject"]["name"]
        backend = backend or lab.data["subject"]["backend"]
        chip = chip or lab.data.get("chip")
        if bottleneck is None:
            profile = lab.result(lab.best(), "profile") or {}
            kind = profile.get("bottleneck", {}).get("kind")
            bottleneck = None if kind == "unknown" else kind
    found = recommend(both(args.log), kernel, backend, chip, bottleneck, args.most)
    return found, as_text(found), 0


def _hypothesis(args: argparse.Namespace) -> Said:
    from hfpatch.lab import steps

    if len(args.change) != 1:
        raise ValueError(f"--change was given {len(args.change)} times; one change a version")
    lab = _lab(args)
    base = lab.best() if args.base is None else lab.number(args.base)
    found = steps.hypothesis(
        lab, base, args.change[0], args.hypothesis, args.rationale, args.expected
    )
    return found, f"v{lab.last + 1} will change v{base}: {args.change[0]}", 0


def _next(args: argparse.Namespace) -> Said:
    from hfpatch.lab import steps

    lab = _lab(args)
    found = steps.advance(lab, args.kernel)
    text = f"wrote {lab.kernel(found['version'])}. Next: hfpatch lab check"
    return found, text, 0


def _record(args: argparse.Namespace) -> Said:
    from hfpatch.lab import steps
    from hfpatch.lab.clocks import locked
    from hfpatch.lab.experience import user_log

    lab = _lab(args)
    with locked(args.lock_clocks):
        found = steps.record(lab, lab.number(args.version), user_log(args.log), args.timeout)
    gain = "" if found["gain"] is None else f", {found['gain']:.3f}x"
    return found, f"v{found['version']}: {found['outcome']}{gain} {found['note']}".rstrip(), 0


def _report(args: argparse.Namespace) -> Said:
    from hfpatch.lab.clocks import locked
    from hfpatch.lab.reporting import report

    lab = _lab(args)
    with locked(args.lock_clocks):
        found = report(lab, args.timeout)
    return found, (lab.root / "final_report.md").read_text(encoding="utf-8"), 0


def _status(args: argparse.Namespace) -> Said:
    lab = _lab(args)
    n = lab.last
    checked, profiled = lab.fresh(n, "correctness"), lab.fresh(n, "profile")
    recorded = lab.result(n, "record")
    if checked is None:
        step = "check"
    elif checked["passed"] and profiled is None:
        step = "profile"
    elif n and recorded is None:
        step = "record"
    elif n >= lab.data["iterations"]:
        step = "report"
    elif (lab.root / "hypothesis.json").is_file():
        step = "next"
    elif not n and not checked["passed"]:
        step = "check"
    else:
        step = "hypothesis"
    found = {
        "version": n,
        "iterations": lab.data["iterations"],
        "best": lab.best(),
        "passed": None if checked is None else checked["passed"],
        "next": step,
    }
    return found, f"v{n} of {found['iterations']}, best v{found['best']}. Next: {step}", 0


def _entries(args: argparse.Namespace, words: list[str]) -> Said:
    from hfpatch.lab.experience import both, matches

    found = [
        e
        for e in both(args.log)
        if matches(e, words) and (args.outcome is None or e.outcome == args.outcome)
    ]
    lines = []
    for e in found[: args.most]:
        gain = "" if e.gain is None else f" {e.gain:.2f}x"
        lines.append(f"{e.id}  {e.outcome}{gain}  {e.op} ({e.backend}, {e.chip}, {e.bottleneck})")
        lines.append(f"    {e.technique}")
    lines.append(f"{len(found)} entries" + (f", {args.most} shown" * (len(found) > args.most)))
    shown = [asdict(e) for e in found[: args.most]]
    return {"count": len(found), "entries": shown}, "\n".join(lines), 0


def _merge(args: argparse.Namespace) -> Said:
    from hfpatch.lab.experience import merge, user_log

    log = user_log(args.log)
    added, skipped = merge(log, args.file)
    found = {"added": added, "skipped": skipped, "log": str(log.path)}
    return found, f"{added} entries added to {log.path}, {skipped} lines were none", 0


def _sync(args: argparse.Namespace) -> Said:
    from hfpatch.lab.experience import Log, user_log

    log, other = user_log(args.log), Log(args.file)
    added = log.append(other.entries())
    sent = other.append(log.entries())
    found = {"added": added, "sent": sent, "skipped": other.skipped, "log": str(log.path)}
    return found, f"{added} entries came, {sent} went", 0


def _stats(args: argparse.Namespace) -> Said:
    from hfpatch.lab.experience import both, stats

    found = stats(both(args.log))
    lines = [f"{found['entries']} entries"]
    for name in ("outcome", "bottleneck", "backend", "chip", "op"):
        said = ", ".join(f"{k} {v}" for k, v in list(found[name].items())[:12])
        lines.append(f"{name}: {said}")
    for name, row in found["won by bottleneck"].items():
        lines.append(f"{name}-bound: {row['won']} of {row['tried']} won")
    return found, "\n".join(lines), 0


_STEPS: dict[str, Callable[[argparse.Namespace], Said]] = {
    "env": _env,
    "init": _init,
    "check": _check,
    "profile": _profile,
    "recommend": _recommend,
    "hypothesis": _hypothesis,
    "next": _next,
    "record": _record,
    "report": _report,
    "status": _status,
    "search": lambda args: _entries(args, args.words),
    "list": lambda args: _entries(args, []),
    "merge": _merge,
    "sync": _sync,
    "stats": _stats,
}
