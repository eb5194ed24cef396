"""The command line: `plan`, `apply-check`, `env`; others in `hfpatch.bench`, `hfpatch.coverage`,
`hfpatch.hub`, `hfpatch.lab`, `hfpatch.kernel_project` and `hfpatch.kernel_build.clib`."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hfpatch import loading
from hfpatch.bench import command as bench
from hfpatch.bench.output import require_writable
from hfpatch.coverage import command as coverage
from hfpatch.errors import KernelLoadError
from hfpatch.hub.cli import HUB_COMMANDS, add_hub_commands
from hfpatch.kernel_build import clib
from hfpatch.kernel_project.cli import add_kernel_commands, run_kernel_command
from hfpatch.kernels import setup_kernels
from hfpatch.lab import command as lab
from hfpatch.profiling import command as profiling
from hfpatch.text import printable

DTYPES = ("float32", "float16", "bfloat16")
_SIGPIPE = 13


class _Version(argparse.Action):
    """Versions are looked up when they are asked for: some are read off packages."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from hfpatch import __version__

        print(f"hfpatch {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hfpatch", description="Fast fused kernels in HuggingFace models."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions and exit")
    commands = parser.add_subparsers(dest="command", required=True)

    plan = commands.add_parser(
        "plan",
        help="show what `hfpatch.apply` would swap in a model, and why not the rest",
        description="The model is built from its configuration alone: no weights are needed, no "
        "memory is used for them. A 70B model takes half a minute: its decoding is proven on a "
        "small copy.",
    )
    check = commands.add_parser(
        "apply-check",
        help="apply, compare outputs with the unpatched model, restore, compare again",
    )
    for command in (plan, check):
        command.add_argument(
            "model", help="a Hub id, a local folder, or a config.json / model_index.json"
        )
        command.add_argument("--dtype", choices=DTYPES, default="float32")
        command.add_argument("--mode", choices=("inference", "training"), default="inference")
        command.add_argument(
            "--kernels",
            help="sources in order of preference, or by op, as in HFPATCH_KERNELS: "
            "`hub,local,torch`, `rms_norm=org/name@v1;*=local`",
        )
        command.add_argument("--include", action="append", metavar="GLOB")
        command.add_argument("--exclude", action="append", metavar="GLOB")
        command.add_argument("--subfolder", help="a part of a pipeline, e.g. transformer")
        command.add_argument(
            "--trust-remote-code", action="store_true", help="run code of the model's repository"
        )
        command.add_argument(
            "--trust-kernel",
            action="append",
            default=[],
            metavar="ORG/NAME",
            help="load kernels of this repository, whoever its publisher is",
        )
        command.add_argument(
            "--blocks",
            action="store_true",
            help="capture blocks on a CPU too, as apply(blocks=True) does",
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda, or a GPU by its compute capability such as cuda:9.0; it need not be here: "
        "what is planned for another machine is marked as not proven there",
    )
    plan.add_argument(
        "--explain",
        metavar="PATH",
        help="of one block, such as model.layers.0: what a call of it becomes. A small copy of the "
        "model with random weights is called for it",
    )
    plan.add_argument("--svg", metavar="FILE", help="of --explain: write a drawing too")
    check.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    check.add_argument(
        "--random-weights",
        action="store_true",
        help="build the model from its configuration with random weights",
    )
    check.add_argument(
        "--time", action="store_true", help="measure a forward with and without the kernels"
    )
    env = commands.add_parser("env", help="versions, devices, and the kernel build in use")
    env.add_argument("--json", action="store_true")
    bench.add_parser(commands)
    profiling.add_arguments(
        commands.add_parser(
            "profile",
            help="where a model's time goes, as it is and patched, and where it waits for values",
        )
    )
    lab.add_arguments(
        commands.add_parser(
            "lab",
            help="make a kernel faster by evidence: check, profile, one change, record",
            description="Steps, each a command: docs/lab.md. Exit status: 0 done, 1 the version is "
            "wrong, 2 bad usage, 3 refused as a step before is missing, 4 a tool is missing.",
        )
    )
    add_hub_commands(commands)
    add_kernel_commands(commands)
    coverage.add_arguments(
        commands.add_parser(
            "coverage",
            help="what is served of every model type of transformers and diffusers",
            description="Models are built small, without weights. The table: docs/coverage.md.",
        )
    )
    setup_kernels.add_arguments(
        commands.add_parser(
            "setup",
            help="get compiled kernels for this machine: found, downloaded or compiled",
            description=setup_kernels.__doc__,
        )
    )
    clib.add_arguments(
        commands.add_parser(
            "clib",
            help="build libhfpatch: the kernels for programs without PyTorch",
            description=clib.__doc__,
        )
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 a check or a download failed, 2 bad usage,
    3 `apply-check` could not compare, 141 nobody reads what is printed."""
    with _any_encoding(), _plain_warnings():
        args = build_parser().parse_args(argv)
        try:
            status = _run(args)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a failure can still be said in a line
        except BrokenPipeError:  # as `| head` does it: no error, and what any program ends with
            _print_no_more()
            return 128 + _SIGPIPE
        except OSError as e:
            _print_no_more()
            return _failed(args, e)
        except KeyboardInterrupt as e:
            _failed(args, "interrupted")
            _end_without_a_traceback(e)
            raise
        return status


def _run(args: argparse.Namespace) -> int:
    # PyTorch's profiler announces each start and stop on stderr; its failures are exceptions.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        if args.command == "env":
            return _env(args)
        if args.command == "bench":
            return bench.run(args)
        if args.command == "profile":
            return profiling.run_command(args)
        if args.command == "lab":
            return lab.run_command(args)
        if args.command in HUB_COMMANDS:
            return HUB_COMMANDS[args.command](args)
        if args.command == "kernel":
            return run_kernel_command(args)
        if args.command == "coverage":
            return coverage.run_command(args)
        if args.command == "setup":
            return setup_kernels.run_command(args)
        if args.command == "clib":
            return clib.run_command(args)
        return (
            _plan(args, loading.title(args.model)) if args.command == "plan" else _apply_check(args)
        )
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError) as e:
        return _failed(args, e)


def _failed(args: argparse.Namespace, why: Exception | str) -> int:
    """Say it in a line; returns the exit status."""
    action = getattr(args, "action", None)
    command = f"{args.command} {action}" if action else args.command
    print(printable(f"hfpatch {command}: {why}"), file=sys.stderr)
    return 1 if isinstance(why, KernelLoadError) else 2


def _print_no_more() -> None:
    """What is left to print goes nowhere: Python would try again when it ends, and say so."""
    with suppress(OSError, ValueError, AttributeError):  # no file: a test's, a notebook's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _end_without_a_traceback(interrupt: KeyboardInterrupt) -> None:
    """It is raised on, so that Python ends by the signal, which ends the loop of a shell too."""
    hook = sys.excepthook

    def silent(kind: Any, error: BaseException, trace: Any) -> None:
        if error is not interrupt:
            hook(kind, error, trace)

    sys.excepthook = silent


@contextmanager
def _any_encoding() -> Iterator[None]:
    """A sign that the output's encoding has not becomes `?`; else all that was found is lost."""
    stream = sys.stdout
    kept = getattr(stream, "errors", None)
    if not isinstance(stream, io.TextIOWrapper) or kept not in ("strict", "surrogateescape"):
        yield
        return
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # it flushes, and nobody may read; or it is closed
            stream.reconfigure(errors=kept)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our warnings without the line of our own code that led to them: it is not the user's."""
    form = warnings.formatwarning

    def plain(message: Any, *where: Any, **more: Any) -> str:
        text = str(message)
        return (
            f"{printable(text)}\n"
            if text.startswith("hfpatch: ")
            else form(message, *where, **more)
        )

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = form


def _env(args: argparse.Namespace) -> int:
    from hfpatch.env import describe

    found = describe()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, version in found["versions"].items():
        print(f"{name:14} {version}")
    for device in found["devices"]:
        extra = device.get("capability") or f"{device.get('threads')} threads"
        print(f"{device['device']:14} {device['name']} ({extra})")
    build = found["local build"]
    if "variant" in build:
        print(f"{'kernels':14} {build['variant']}")
        print(f"{'':14} devices: {', '.join(build['devices'])}; ops: {', '.join(build['ops'])}")
        if build["archs"]:
            print(f"{'':14} CUDA architectures: {', '.join(build['archs'])}")
    if "problem" in build:
        print(f"{'problem':14} {build['problem']}")
    flash = found["FlashAttention-3"]
    said = [flash[key] for key in ("package", "problem") if key in flash]
    print(f"{'attention':14} FlashAttention-3: {'; '.join(said)}")
    return 0


def _plan(args: argparse.Namespace, title: str) -> int:
    from hfpatch.apply import decide
    from hfpatch.planning.settings import check_settings
    from hfpatch.report import Report, as_text

    if args.svg and not args.explain:
        raise ValueError("`--svg` is of `--explain PATH`: say which block")
    if args.explain is not None and not args.explain.strip():
        raise ValueError("`--explain` is empty: expected the path of a block, as `layers.0`")
    if args.svg:
        require_writable(Path(args.svg))
    args.model = loading.located(args, weights=False)
    parts = loading.from_config(args, device="meta")
    if args.explain:
        return _explain(args, parts)
    settings = check_settings(
        args.mode, _kernels(args), args.include, args.exclude, True, False, _hub(args), args.device
    )
    decided, _, _ = decide(title, parts, settings, blocks=args.blocks or "auto")
    print(Report(decided, applied=False).to_json() if args.json else as_text(decided, False))
    return 0


def _explain(args: argparse.Namespace, parts: list[tuple[str, Any]]) -> int:
    import torch

    from hfpatch.coverage.small_copy import small_copy
    from hfpatch.inputs import sample_inputs
    from hfpatch.regions.explain import explain

    if args.device != "cpu":
        raise ValueError(
            f"`--explain` calls a small copy on the CPU: leave `--device {args.device}` away"
        )
    settings = {
        "--mode": args.mode if args.mode != "inference" else None,
        "--kernels": args.kernels,
        "--include": args.include,
        "--exclude": args.exclude,
        "--trust-kernel": args.trust_kernel,
    }
    for flag, value in settings.items():
        if value:
            said = " ".join(value) if isinstance(value, list) else value
            raise ValueError(
                "`--explain` says what a block is captured as, for inference and with the kernels "
                f"that are here: leave `{flag} {said}` away"
            )
    name, path = next(
        ((n, args.explain.removeprefix(f"{n}.")) for n, _ in parts
         if n and args.explain.startswith(f"{n}.")),
        ("", args.explain),
    )  # fmt: skip
    model = dict(parts).get(name)
    if model is None:
        known = ", ".join(f"{n}.…" for n, _ in parts)
        raise ValueError(f"`--explain {args.explain}`: of a pipeline, name the part: {known}")
    torch.manual_seed(0)
    try:
        small = small_copy(model).to(getattr(torch, args.dtype)).eval().requires_grad_(False)
    except Exception as e:  # what its class demands of sizes, whatever that raises
        said = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(
            f"`--explain` has no small copy of `{type(model).__name__}` to call: {said}; with a "
            "model that you built call `hfpatch.regions.explain.explain(model, path, inputs)`"
        ) from e
    if (fewer := _beyond(path, model, small)) is not None:
        raise ValueError(fewer)
    found = explain(
        small, path, sample_inputs(small), f"in a small copy of its {type(model).__name__}"
    )
    if args.svg:
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write(found.to_svg())
    text = json.dumps(found.to_dict(), indent=2) if args.json else str(found)
    print(printable(text, len(text)))
    return 0


def _beyond(path: str, model: Any, small: Any) -> str | None:
    """What to say of a layer of the model that its small copy is too small to have."""
    there = dict(small.named_modules(remove_duplicate=False))
    if path in there or path not in dict(model.named_modules(remove_duplicate=False)):
        return None
    place = re.sub(r"\d+", "#", path)
    known = [f"`{p}`" for p in there if re.sub(r"\d+", "#", p) == place]
    if not known:
        return None
    return (
        f"`--explain {path}`: the small copy that is called has fewer layers than the model; "
        f"explain {' or '.join(known[:6])}"
    )


def _kernels(args: argparse.Namespace) -> Any:
    from hfpatch.kernels.choices import parse_variable

    return None if args.kernels is None else parse_variable(args.kernels)


def _hub(args: argparse.Namespace) -> dict[str, Any]:
    """`--trust-remote-code` is about the model's code; each kernel is named by itself."""
    return {"trust_remote_code": tuple(args.trust_kernel)} if args.trust_kernel else {}


def _apply_check(args: argparse.Namespace) -> int:
    import torch

    from hfpatch.check import FAILED, NOT_COMPARED, How, check_model, check_pipeline

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device; check on cpu instead")
    args.model = loading.located(args, weights=not args.random_weights)
    parts, pipeline = loading.models(args)
    how = How(
        {
            "mode": args.mode,
            "kernels": _kernels(args),
            "hub": _hub(args),
            "include": args.include,
            "exclude": args.exclude,
            "blocks": args.blocks or "auto",
        },
        args.time,
    )
    results = []
    checks: list[Any] = [partial(check_model, name, model, how) for name, model in parts]
    if pipeline is not None:
        checks.append(partial(check_pipeline, pipeline, how))
    for check in checks:
        result, report = check()
        results.append(result)
        if not args.json:
            if report is not None:
                print(report)
            print("\n".join(f"{k}: {_said(v)}" for k, v in result.items()), end="\n\n")
    if args.json:
        print(json.dumps(results, indent=2))
    statuses = {result["status"] for result in results}
    return 1 if FAILED in statuses else 3 if NOT_COMPARED in statuses else 0


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_said(v)}" for k, v in value.items())
    if isinstance(value, list):
        return " to ".join(map(_said, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
