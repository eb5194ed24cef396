"""The commands about kernels of one's own: `hfpatch kernel new | build | check | publish`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.kernel_project.checks import Row
    from hfpatch.kernel_project.project import Project


def add_kernel_commands(commands: Any) -> None:
    """Add `kernel` to the subparsers of the command line."""
    kernel = commands.add_parser("kernel", help="a kernel of your own, from a scaffold to the Hub")
    actions = kernel.add_subparsers(dest="action", required=True)

    new = actions.add_parser("new", help="write a kernel project that builds and passes as it is")
    new.add_argument("name", help="lower-case letters, digits and dashes: my-kernel")
    new.add_argument("--repo-id", help="where it will be published: org/name")
    new.add_argument(
        "--template",
        default="elementwise",
        help="elementwise (default) or row, in C++ and CUDA; or triton (for `hfpatch.register`)",
    )

    build = actions.add_parser("build", help="compile what this machine can: cpu, and cuda by nvcc")
    check = actions.add_parser("check", help="what the Hub demands, as a table")
    publish = actions.add_parser("publish", help="upload the built variants")
    for action in (build, check, publish):
        action.add_argument("project", nargs="?", type=Path, default=Path(), metavar="DIR")
    for action in (build, check, publish):
        action.add_argument(
            "--build", type=Path, metavar="DIR", help="where `build/` is (default: the project)"
        )
    build.add_argument(
        "--backend", action="append", choices=("cpu", "cuda"), help="repeatable; default: what can"
    )
    build.add_argument("--archs", help="CUDA architectures: all, native, none or 8.0;9.0+PTX")
    build.add_argument("--quiet", action="store_true")
    build.add_argument(
        "--ptx", type=Path, metavar="DIR",
        help='write PTX of the `extern "C"` kernels and an index there instead',
    )  # fmt: skip
    check.add_argument("--no-load", action="store_true", help="do not import what was built")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    publish.add_argument("--repo-id", help="org/name; default: that of build.toml")
    publish.add_argument("--version", help="v1, v2, …; must be that of build.toml, the default")
    publish.add_argument("--dry-run", action="store_true", help="check and list, send nothing")
    publish.add_argument("--private", action="store_true", help="if the repository is new")
    publish.add_argument("--no-check", action="store_true", help="publish whatever the check says")


def run_kernel_command(args: argparse.Namespace) -> int:
    """Runs one of them; returns the exit status."""
    return _ACTIONS[args.action](args)


def _new(args: argparse.Namespace) -> int:
    from hfpatch.kernel_project.new import new_project

    root = new_project(args.name, Path(), args.repo_id, args.template)
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        print(path)
    build = "" if args.template == "triton" else f"hfpatch kernel build {root} && "
    print(f"\nnext: {build}python -m pytest {root}/tests")
    return 0


def _build(args: argparse.Namespace) -> int:
    from hfpatch import kernel_build

    if args.ptx:
        return _ptx(args)
    project = _project(args)
    out = args.build or project.root
    backends = project.toml["general"]["backends"]
    if args.backend:
        kernel_build.build(project.root, out, args.backend, args.archs, not args.quiet)
        return 0
    built, failed = 0, False
    for backend in ("cpu", "cuda"):
        if backend not in backends:
            continue
        try:
            built += len(
                kernel_build.build(project.root, out, [backend], args.archs, not args.quiet)
            )
        except kernel_build.ToolchainMissing as e:
            print(f"{backend}: not built: {e}", file=sys.stderr)
        except kernel_build.KernelBuildError as e:
            failed = True
            print(f"{backend}: {e}", file=sys.stderr)
    if not built and not failed:
        raise ValueError(
            f"nothing was built: none of the backends of `build.toml` ({', '.join(backends)}) can "
            "be built here; this builds cpu and cuda"
        )
    return 1 if failed else 0


def _ptx(args: argparse.Namespace) -> int:
    from hfpatch.kernel_build.ptx import build_ptx

    for name in ("backend", "build"):
        if getattr(args, name):
            raise ValueError(f"`--{name}`: expected without `--ptx`, which builds no variant")
    say = (lambda line: None) if args.quiet else print
    index = build_ptx(args.project, args.ptx, args.archs, say)
    print(index)
    return 0


def _check(args: argparse.Namespace) -> int:
    from hfpatch.kernel_project.checks import as_table, check_project

    rows = check_project(_project(args), load=not args.no_load)
    if args.json:
        print(json.dumps([{**asdict(r), "passed": r.passed} for r in rows], indent=2))
    else:
        print(as_table(rows))
    return int(any(not row.passed for row in rows))


def _publish(args: argparse.Namespace) -> int:
    from hfpatch.kernel_project.publish import check_client, plan_publication, publish

    project = _project(args)
    plan = plan_publication(project, args.repo_id, args.version)
    print(plan, flush=True)
    if not args.no_check and (failed := _failures(project)):
        from hfpatch.kernel_project.checks import as_table

        print(as_table(failed))
        print(
            "hfpatch kernel publish: the Hub demands more; nothing was sent. `--no-check` sends it "
            "all the same",
            file=sys.stderr,
        )
        return 1
    check_client()
    if args.dry_run:
        print("dry run: nothing was sent")
        return 0
    done = publish(plan, args.private, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{done.sent} files sent, {done.unchanged} unchanged, {done.deleted} removed")
    print(done.url)
    return 0


def _failures(project: Project) -> list[Row]:
    from hfpatch.kernel_project.checks import check_project

    return [row for row in check_project(project) if not row.passed]


def _project(args: argparse.Namespace) -> Project:
    from hfpatch.kernel_project.project import Project

    project = Project.open(args.project)
    return replace(project, build=args.build.resolve()) if args.build else project


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "new": _new,
    "build": _build,
    "check": _check,
    "publish": _publish,
}
