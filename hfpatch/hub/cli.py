"""The commands about Hub kernels: `hfpatch inspect`, `hfpatch download`, `hfpatch lock`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpatch.hub.options import HubOptions
    from hfpatch.hub.spec import HubSpec


def add_hub_commands(commands: Any) -> None:
    """Add them to the subparsers of the command line."""
    inspect = commands.add_parser(
        "inspect",
        help="what a Hub kernel exports, and which ops it could serve; none of its code is run",
    )
    inspect.add_argument(
        "kernel", help="org/name, org/name@v1, or the folder of a local kernel repository"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")

    download = commands.add_parser(
        "download",
        help="fetch and verify kernels as they are now, so that they load without a network",
    )
    lock = commands.add_parser(
        "lock", help="write which commit each kernel is, and the sha256 of every variant"
    )
    for command, which in ((download, "those of the lock file"), (lock, "those already locked")):
        command.add_argument("kernels", nargs="*", metavar="ORG/NAME@V1", help=f"default: {which}")
        command.add_argument(
            "--lockfile", type=Path, help="default: that of the config file, else hfpatch.lock"
        )
        command.add_argument(
            "--trust-remote-code", action="store_true", help="whoever their publishers are"
        )
        command.add_argument(
            "--trust-kernel",
            action="append",
            default=[],
            metavar="ORG/NAME",
            help="whoever the publisher of this one is",
        )
        command.add_argument("--allow-branches", action="store_true")
    download.add_argument("--require-signed", action="store_true")
    download.add_argument(
        "--all-variants", action="store_true", help="builds for other systems too"
    )


def _options(args: argparse.Namespace) -> HubOptions:
    from hfpatch.hub.options import HubOptions
    from hfpatch.kernels.config import read_defaults

    chosen: dict[str, Any] = {}
    for name in ("trust_remote_code", "allow_branches", "require_signed"):
        if getattr(args, name, False):
            chosen[name] = True
    if args.trust_kernel and not args.trust_remote_code:
        chosen["trust_remote_code"] = tuple(args.trust_kernel)
    if args.lockfile is not None:
        chosen["lockfile"] = args.lockfile
    return HubOptions.of(chosen, read_defaults().hub)


def _specs(args: argparse.Namespace, options: HubOptions, path: Path) -> list[HubSpec]:
    from hfpatch.hub.lock import LockFile
    from hfpatch.hub.spec import HubSpec

    if args.kernels:
        return [HubSpec.parse(k, options.allow_branches) for k in args.kernels]
    if not path.is_file():
        raise ValueError(
            f"name a kernel (`hfpatch {args.command} org/name@v1`): there is no lock file `{path}` "
            "to take them from"
        )
    return [HubSpec.parse(k, allow_branches=True) for k in LockFile.read(path).kernels]


def _inspect(args: argparse.Namespace) -> int:
    from hfpatch.hub.inspection import inspect_hub, inspect_local
    from hfpatch.hub.spec import HubSpec

    name: str = args.kernel
    if name and Path(name).is_dir():
        found = inspect_local(Path(name))
    else:
        spec = HubSpec.parse(name, allow_branches=True)
        found = inspect_hub(spec if "@" in name else spec.repo)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0


def _download(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from hfpatch.errors import KernelLoadError
    from hfpatch.hub.download import download
    from hfpatch.hub.lock import FILE

    options = _options(args)
    path = options.lockfile or Path(FILE)
    if not args.kernels and path.is_file():  # what is locked, rather than what is newest
        options = replace(options, lockfile=path)
    failed = 0
    for spec in _specs(args, options, path):
        try:
            done = download(spec, options, args.all_variants)
        except KernelLoadError as e:  # the others are fetched all the same
            failed += 1
            print(f"hfpatch download: {e}", file=sys.stderr)
            continue
        moved = f" (was {done.previous[:12]})" if done.previous else ""
        which = ", ".join(done.variants) + ("" if done.fits else "; none for this system")
        print(f"{spec}: {done.commit[:12] or 'LOCAL_KERNELS'}{moved}, {which}")
    return int(failed > 0)


def _lock(args: argparse.Namespace) -> int:
    from hfpatch.hub.download import lock
    from hfpatch.hub.lock import FILE, KERNELS_FILE

    options = _options(args)
    path = options.lockfile or Path(FILE)
    locked = lock(_specs(args, options, path), options, path)
    for name, entry in sorted(locked.kernels.items()):
        count = len(entry.variants)
        print(f"{name}: {entry.commit[:12]}, {count} variant{'s' * (count != 1)}")
    print(f"wrote {path} and {path.with_name(KERNELS_FILE)}", file=sys.stderr)
    return 0


HUB_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "download": _download,
    "lock": _lock,
}
