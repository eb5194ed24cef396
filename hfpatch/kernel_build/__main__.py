"""The command ``python -m hfpatch.kernel_build``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __doc__ as description
from . import build, build_available, resources
from .errors import KernelBuildError
from .ptxas import print_resources


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hfpatch.kernel_build --out DIR [--backend cpu] [--archs 9.0]``"""
    parser = argparse.ArgumentParser(
        prog="python -m hfpatch.kernel_build",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--project",
        default=str(Path(__file__).resolve().parent.parent.parent),
        help="directory of build.toml (default: the source tree)",
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", help="build/<variant>/ is written here")
    task.add_argument(
        "--resources",
        action="store_true",
        help="print registers, spills and shared memory of every CUDA kernel instead; fails on "
        "spills",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=["cpu", "cuda"],
        help="repeatable; default: what this machine can build",
    )
    parser.add_argument("--archs", help="CUDA architectures: all, native, none or 8.0;9.0+PTX")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    if args.resources and "cpu" in (args.backend or []):
        parser.error("`--resources`: expected no `--backend` or `cuda`, whose kernels it is of")
    try:
        if args.resources:
            found = resources(args.project, args.archs, not args.quiet)
            return int(print_resources(found) > 0)
        if args.backend:
            build(args.project, args.out, args.backend, args.archs, not args.quiet)
            return 0
        result = build_available(args.project, args.out, args.archs, not args.quiet)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for backend, why in {**result.missing, **result.failed}.items():
        print(f"{backend}: not built: {why}", file=sys.stderr)
    return 1 if result.failed or not result.variants else 0


if __name__ == "__main__":
    sys.exit(main())
