"""`hfpatch coverage`: what is served of every model type of transformers and diffusers."""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="REGEX", default="", help="models whose name has it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/coverage.md and tests/data/coverage.json of this checkout",
    )


def run_command(args: argparse.Namespace) -> int:
    """Returns the exit status, 0.

    Raises:
        ValueError: `--only` is no regular expression, or matches no model; `--write` has no
            checkout, or only some of the models.
    """
    from hfpatch.coverage import page

    try:
        only = re.compile(args.only)
    except re.error as e:
        raise ValueError(f"`--only` {args.only!r} is not a regular expression: {e}") from e
    root = Path(__file__).parents[2]
    if args.write and args.only:
        raise ValueError("`--write` is of all models: leave `--only` away")
    if args.write and not (root / "docs").is_dir():
        raise ValueError(f"`--write`: no docs in {root}; run it in a checkout")
    rows = rows_of(only, told=not args.json)
    if not rows:
        raise ValueError(
            f"`--only` {args.only!r} matches no model; names are such as "
            "'transformers LlamaModel (llama)' and 'diffusers FluxTransformer2DModel'"
        )
    text = page.data(rows)
    if args.json:
        print(text, end="")
    else:
        for line in page.summary(page.counts_of(rows)):
            print(line)
    if args.write:
        (root / "tests" / "data").mkdir(exist_ok=True)
        (root / "tests" / "data" / "coverage.json").write_text(text, encoding="utf-8")
        (root / "docs" / "coverage.md").write_text(page.page(json.loads(text)), encoding="utf-8")
    return 0


def rows_of(only: re.Pattern[str], told: bool = False, called: bool = True) -> dict[str, Any]:
    """The row of each model whose name has `only`; `told`: each is printed when it is known.

    `called`: with its blocks, for which it is called.
    """
    import diffusers
    import transformers

    from hfpatch.coverage.count import row_of
    from hfpatch.coverage.small_diffusers import of_diffusers
    from hfpatch.coverage.small_transformers import of_transformers
    from hfpatch.progress import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    loud = not are_progress_bars_disabled()
    disable_progress_bars()
    levels = [(lib.logging, lib.logging.get_verbosity()) for lib in (transformers, diffusers)]
    rows: dict[str, Any] = {}
    try:
        for logging, _ in levels:
            logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models that are small, and of what is deprecated
            for name, make in (*of_transformers(), *of_diffusers()):
                if only.search(name):
                    rows[name] = row_of(make, called)
                    if told:
                        print(_line(name, rows[name]), file=sys.stdout, flush=True)
    finally:
        for logging, level in levels:
            logging.set_verbosity(level)
        if loud:
            enable_progress_bars()
    return rows


def _line(name: str, row: dict[str, Any]) -> str:
    if "why" in row:
        return f"{name}: {row['category']}: {row['why']}"
    norms, mlps = ("{} of {}".format(*row[kind]) for kind in ("norms", "mlps"))
    blocks = "{} of {}".format(*row["blocks"]) if "blocks" in row else row.get("uncalled")
    said = f"{name}: {row['category']}, norms {norms}, gated MLPs {mlps}, blocks {blocks}"
    left = (*row.get("left", {}).items(), *row.get("unfused", {}).items())
    return "\n".join([said, *(f"    {n}: {why}" for n, why in left)])
