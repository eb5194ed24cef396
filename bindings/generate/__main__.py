"""Writes everything that is made of `kernel_src/hfpatch.h`.

    python bindings/generate            write the files
    python bindings/generate --check    write nothing; fail where a file is not up to date

Needs the standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

import c
import card
import go
import kernels_page
import package
import page
import python
import rust
import sources
from header import HEADER, ROOT, HeaderError, read_header
from snapshot import broken, snapshot
from stub import stub

FILES = {
    "CARD.md": card.card,
    "build.toml": sources.build_toml,
    "clib/abi.txt": snapshot,
    "clib/stub.c": stub,
    "docs/c-api.md": page.page,
    "docs/kernels.md": kernels_page.kernels,
    "docs/usage.md": kernels_page.usage,
    "hfpatch/capi/signatures.py": python.signatures,
    "hfpatch/capi/functions.py": python.functions,
    "torch-ext/hfpatch_kernels/__init__.py": package.exports,
    "torch-ext/hfpatch_kernels/_table.py": package.table,
    "bindings/c/dispatch.h": c.dispatch,
    "bindings/go/functions.go": go.functions,
    "bindings/go/functions_test.go": go.table,
    "bindings/go/shims.h": go.shims,
    "bindings/rust/hfpatch-sys/src/lib.rs": rust.sys,
    "bindings/rust/hfpatch/src/constants.rs": rust.constants,
    "bindings/rust/hfpatch/src/ops.rs": rust.ops,
    "bindings/rust/hfpatch/tests/vectors/dispatch.rs": rust.dispatch,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bindings/generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--header", type=Path, default=HEADER)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the files lie")
    args = parser.parse_args()
    try:
        header = read_header(args.header)
    except (HeaderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    recorded = args.root / "clib" / "abi.txt"
    before = recorded.read_text(encoding="utf-8") if recorded.is_file() else ""
    if changed := broken(before, header):
        print(
            "error: the interface changed; raise `HFP_ABI_VERSION` in hfpatch.h, or keep:\n  "
            + "\n  ".join(changed),
            file=sys.stderr,
        )
        return 1
    stale = False
    for name, make in FILES.items():
        path, wanted = args.root / name, make(header)
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found == wanted:
            continue
        if args.check:
            stale = True
            lines = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), name, "expected", lineterm="", n=1
            )
            print("\n".join(list(lines)[:30]), file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {name}")
    if stale:
        print("error: not up to date; run `python bindings/generate`", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
