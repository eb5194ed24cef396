"""`hfpatch bench`: the arguments, and what they run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfpatch.bench.model_command import model_parser, run_model

SUITES = ("ops", "host")
_DTYPES = ("float32", "float16", "bfloat16")


def add_parser(commands: Any) -> None:
    """The subcommand, for `hfpatch.cli`; imports nothing heavy."""
    parser = commands.add_parser(
        "bench",
        help="time every op against eager PyTorch, torch.compile, Liger and torch's fused op",
        description="GPU time by CUDA-graph replay (cold: buffers rotate past the L2 cache; warm: "
        "one buffer), host time apart; on the CPU wall time. Peers run in turns in one process.",
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="suite",
        help=f"{', '.join(SUITES)}; default: both, with a filter `ops`; or `model MODEL`, which "
        "has arguments of its own: `hfpatch bench model --help`",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--op", action="append", metavar="GLOB", help="repeatable")
    parser.add_argument("--shape", action="append", metavar="4x1024x2048", help="repeatable")
    parser.add_argument("--dtype", action="append", choices=_DTYPES, help="repeatable")
    parser.add_argument(
        "--peer",
        "--peers",
        action="append",
        metavar="NAME",
        help="eager, torch, compile, max-autotune, liger or all; repeatable",
    )
    parser.add_argument("--threads", type=int, default=2, help="on the CPU; default 2")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that compile for torch.compile before the measuring; default: half the "
        "cores, up to 8, on a GPU machine, else 1",
    )
    parser.add_argument(
        "--output", type=Path, metavar="JSON", help="a folder takes a file for each suite"
    )
    parser.add_argument("--commit", help="what was measured; default: git's HEAD")
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write docs/performance.md from benchmarks/results/*.json and measure nothing",
    )
    parser.add_argument("--check", action="store_true", help="with --page: fail if out of date")
    _hand_over_models(parser)


def _hand_over_models(parser: argparse.ArgumentParser) -> None:
    """`bench model ...` has a parser of its own: a suite's words and a model's would mix."""
    models, own = model_parser(), parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> Any:
        if args and args[0] == "model":
            return models.parse_known_args(args[1:], namespace)
        return own(args, namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign]
    parser.set_defaults(handed_over=(models,))


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status: 1 if something could not be measured or missed a gate.

    Raises:
        ValueError: an argument that cannot be; says what can.
        KernelLoadError: no compiled kernels.
    """
    if args.suites == ["model"]:
        return run_model(args)
    if args.check and not args.page:
        raise ValueError("--check belongs to --page: write `hfpatch bench --page --check`")
    if args.page:
        from hfpatch.bench.page import update

        return update(Path.cwd(), args.check)
    unknown = sorted(set(args.suites) - set(SUITES))
    if unknown:
        raise ValueError(f"suite `{unknown[0]}`: expected one of {', '.join(SUITES)}")
    if args.threads < 1:
        raise ValueError(f"--threads {args.threads}: expected at least 1")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: expected at least 1")
    filters = [name for name in ("op", "shape", "dtype", "peer") if getattr(args, name)]
    if filters and "host" in args.suites:
        raise ValueError(
            f"--{filters[0]} is a filter of the suite `ops`; `host` has none, so run it by itself"
        )
    every = [s for s in SUITES if s == "ops" or not filters]
    suites = [s for s in SUITES if s in args.suites] or every
    if args.output and args.output.is_file() and len(suites) > 1:  # not after the first rows
        raise ValueError(f"--output {args.output}: expected a folder for two suites, got a file")
    import torch
    from rich.console import Console

    from hfpatch.bench import results
    from hfpatch.bench.output import require_writable
    from hfpatch.kernels.sources import local_package

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device")
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    package = local_package()
    if device.type not in package.devices:
        raise ValueError(f"the kernel build {package.variant} has no code for {device.type}")
    console = Console()
    broken = False
    for suite in suites:
        result = results.head(suite, device, args.commit)
        path = args.output
        if path and (len(suites) > 1 or path.is_dir()):
            short = "cpu" if device.type == "cpu" else result["device"].split()[1].lower()
            path = path / f"{suite}-{short}.json"
        if path and not args.list:
            try:
                require_writable(path)
            except OSError as e:
                raise ValueError(f"--output {args.output}: {e}") from e
        start = time.perf_counter()

        def save(
            part: dict[str, Any],
            result: dict[str, Any] = result,
            path: Path | None = path,
            start: float = start,
        ) -> None:
            """What there is by now, so that a run that is cut off keeps what it measured."""
            result |= part | {"seconds": round(time.perf_counter() - start, 1)}
            if path and not args.list:
                results.write(result, path)

        measured = _ops if suite == "ops" else _host
        save(measured(args, package.module, device, console, save))
        if args.list:
            continue
        console.print(f"{suite}: {result['seconds']} s on {result['device']}")
        if path:
            console.print(f"wrote {path}")
        broken |= bool(result.get("failed"))
    return int(broken)


Save = Callable[[dict[str, Any]], None]


def _ops(
    args: argparse.Namespace, package: Any, device: Any, console: Any, save: Save
) -> dict[str, Any]:
    import itertools

    from rich.console import Console

    from hfpatch.bench import compiling, ops, show
    from hfpatch.bench.peers import choose
    from hfpatch.bench.timing import copy_bytes_per_second

    peers = choose(args.peer, device.type)
    tasks, missing = ops.select(package, device.type, args.op, args.shape, args.dtype)
    for name in missing:
        console.print(f"[yellow]{name}[/]: not in this build of the kernels, not measured")
    if args.list:
        for task in tasks:
            console.print(str(task), highlight=False)
        return {"rows": []}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    copy: float | None = None

    def found() -> dict[str, Any]:
        part: dict[str, Any] = {} if copy is None else {"copy_bytes_per_s": copy}
        return part | ({"failed": failed} if failed else {}) | {"rows": rows}

    with _progress(Console(stderr=True)) as progress:
        jobs = compiling.default_jobs(device.type) if args.jobs is None else args.jobs
        bar = progress.add_task("compiling", total=compiling.count(tasks, peers), visible=jobs > 1)
        for line in compiling.compile_ahead(tasks, peers, device.type, jobs):
            progress.update(bar, advance=1, description=f"compiled: {line}")
        progress.remove_task(bar)
        copy = copy_bytes_per_second() if device.type == "cuda" else None
        bar = progress.add_task("", total=len(tasks))
        for _, group in itertools.groupby(tasks, key=lambda task: task.case.name):
            here = []
            for task in group:
                progress.update(bar, description=str(task))
                try:
                    here.append(ops.measure(task, package, device, peers, copy))
                except Exception as e:  # the other rows are worth having
                    failed[str(task)] = f"{type(e).__name__}: {e}"
                    console.print(f"{task}: {failed[str(task)]}", style="red", markup=False)
                progress.advance(bar)
            for cache in ("cold", "warm"):
                show.show_ops(console, here, cache)
            rows += here
            save(found())
    if rows:
        show.summary(console, rows)
    if copy is not None:
        console.print(f"copy: {copy / 1e12:.2f} TB/s read and written")
    return found()


def _host(
    args: argparse.Namespace, package: Any, device: Any, console: Any, save: Save
) -> dict[str, Any]:
    from rich.console import Console

    from hfpatch.bench import host, show

    if args.list:
        console.print("host time of each op and of every way to call a norm")
        return {"rows": []}
    with _progress(Console(stderr=True)) as progress:
        bar = progress.add_task("host: ways to call a norm", total=None)
        rows = host.norm_rows(package, device)
        for row in host.op_rows(package, device):
            progress.update(bar, description=f"host: {row['op']}")
            rows.append(row)
            save({"rows": rows})
    show.show_host(console, rows)
    return {"rows": rows}


def _progress(console: Any) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from hfpatch.progress import shown

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(
        *columns,
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not shown(),
    )
