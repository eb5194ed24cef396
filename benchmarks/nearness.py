"""docs/nearness.md: how the criterion of whole models decides about right and wrong kernels.

    python benchmarks/nearness.py                   measure under each setting, and write the page
    python benchmarks/nearness.py --only avx2       measure under one of them, and write the page
    python benchmarks/nearness.py --page            write the page from benchmarks/results

The criterion is tests/support/nearness.py; settings are those of tests/cpus.py, and `as it is`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cpus  # noqa: E402
import torch  # noqa: E402
import zoo  # noqa: E402
from support import mutations  # noqa: E402
from support.leaves import DRAWS as LEAF_DRAWS  # noqa: E402
from support.leaves import LIKE as LEAF_LIKE  # noqa: E402
from support.leaves import leaves  # noqa: E402
from support.nearness import Draw, allowance, limit, verdict  # noqa: E402
from support.samples import SEEDS, Sample, draws_and_like  # noqa: E402

import hfpatch  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "nearness"
PAGE = ROOT / "docs" / "nearness.md"
SETTINGS = {"as-it-is": None, "avx2": "avx2", "baseline": "baseline"}
DTYPES = {str(t).removeprefix("torch."): t for t in zoo.DTYPES}
MUTATED_MODELS, MUTATED_LEAVES = (
    ("llama", "t5-v1.1", "bert"),
    ("llama", "gemma2", "t5-v1.1", "bert"),
)
Row = dict[str, Any]


# ------------------------------------------------------------------------------ measuring


def errors(name: str, dtype: torch.dtype, count: int, **settings: Any) -> list[Draw]:
    draws = []
    for seed in range(SEEDS):
        sample = Sample(zoo.ENTRIES[name], dtype, seed, count // SEEDS)
        hfpatch.apply(sample.model, **settings)
        draws += sample.draws()
    return draws


def measured(setting: str) -> Iterator[Row]:
    """A row for each model and, as it is, for each mutation of a model and of its leaves."""
    for dtype_name, dtype in dtypes_of(setting).items():
        for name in zoo.ENTRIES:
            draws = errors(name, dtype, draws_and_like(name, dtype)[0])
            yield {"kind": "model", "name": name, "dtype": dtype_name, "draws": _pairs(draws)}
        for mutation, make in mutations.MUTATIONS.items() if setting == "as-it-is" else ():
            with mutations.registered(make) as settings:
                row = {"dtype": dtype_name, "mutation": mutation}
                for name in MUTATED_MODELS:
                    draws = errors(name, dtype, 12, **settings)
                    yield {"kind": "mutated", "name": name, "draws": _pairs(draws), **row}
                for name in MUTATED_LEAVES:
                    for leaf in leaves(name, dtype, **settings):
                        pairs = _pairs(leaf.draws(dtype))
                        yield {"kind": "leaf", "name": leaf.name, "draws": pairs, **row}


def dtypes_of(setting: str) -> dict[str, torch.dtype]:
    """Without vectors half types take very long, and their sums are in fp32 anyway."""
    return {n: t for n, t in DTYPES.items() if setting != "baseline" or t == torch.float32}


def _pairs(draws: list[Draw]) -> list[list[float]]:
    return [[float(f"{d.ours:.6g}"), float(f"{d.theirs:.6g}")] for d in draws]


def write_results(setting: str) -> None:
    rows = list(measured(setting))
    capability = torch.backends.cpu.get_cpu_capability()
    text = ",\n".join(json.dumps(row) for row in rows)
    path = RESULTS / f"{setting}.json"
    path.write_text(
        f'{{"capability": "{capability}", "torch": "{torch.__version__}", '
        f'"threads": {torch.get_num_threads()}, "rows": [\n{text}\n]}}\n'
    )


# ------------------------------------------------------------------------------ the page

HEAD = """\
# As near to fp64 as the original

What a patched model computes is compared with fp64, and so is what the original computes. How that
is decided, and why so: [tests/support/nearness.py](../tests/support/nearness.py). This page shows
what the criterion makes of right and of wrong kernels. `python benchmarks/nearness.py` writes it;
PyTorch {torch}, small models of the real classes with random weights (tests/zoo.py), settings of
[tests/cpus.py](../tests/cpus.py).

`d` is the excess of one draw's mean square, (ours² - allowed²) / (ours² + allowed²): 0 where ours is
as large as what is allowed, 0.2 where it is 1.22 times that in the root. `k + 1` is one over the
variance that `d` would have without the allowance. *Before*: one draw, `ours <= original + eps`.

## Right kernels

All {models} models of the zoo. Before, each draw was a verdict by itself: which of them failed was
chance.

| setting | dtype | draws | draws that failed before | in models | models that fail now | largest mean `d` / its limit | worst `d` (limit 0.80; 0.98 for a recurrence in fp32) |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def render() -> str:
    data = {s: json.loads((RESULTS / f"{s}.json").read_text()) for s in SETTINGS}
    lines = [HEAD.format(torch=data["as-it-is"]["torch"], models=len(zoo.ENTRIES)).rstrip("\n")]
    noisy: list[tuple[float, str]] = []
    for setting, found in data.items():
        for dtype_name, dtype in dtypes_of(setting).items():
            rows = [r for r in found["rows"] if r["kind"] == "model" and r["dtype"] == dtype_name]
            lines.append(_summary(setting, found["capability"], rows, dtype))
            noisy += [_model(setting, row, dtype) for row in rows]
    lines += [SPREAD.rstrip("\n"), *(text for _, text in sorted(noisy)[:12])]
    lines += [MUTATED.format(leaf_draws=LEAF_DRAWS).rstrip("\n")]
    rows = data["as-it-is"]["rows"]
    for mutation in mutations.MUTATIONS:
        for dtype_name, dtype in DTYPES.items():
            some = [r for r in rows if r.get("mutation") == mutation and r["dtype"] == dtype_name]
            lines.append(_mutated(mutation, some, dtype))
    lines.append(BITS.rstrip("\n"))
    return "\n".join(lines) + "\n"


SPREAD = """
## Where a draw varies most

The twelve with the smallest `k + 1`. Before, a model passed or failed by the first draw.

| model | dtype | setting | ours / original, draw by draw | draws that failed before | mean `d` | limit | `k + 1` |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501

MUTATED = """
## Wrong kernels

Every norm of a model is given a kernel that is wrong in one way (tests/support/mutations.py), by
`hfpatch.register` and `verify=False`, as one of our own: behind the proof, which would reject it. A wrong kernel is
found where the mean of `d` is above its limit. In a leaf (one norm, {leaf_draws} draws, no rounding
to a half type allowed) each is found in each dtype and formula; a whole model in a half type rounds
so often itself that small faults drown, before and now. "One more rounding" is one to a half type,
in fp32 to fp16: one to fp32 is allowed, before and now.

| mutation | dtype | models | share of draws that found it before | mean `d` / limit now, in models | in leaves: the least mean `d` / limit |
|---|---|---|---|---|---|
"""  # noqa: E501

BITS = """
## Where bits are compared

| compared bit for bit | why it holds on every CPU | where |
|---|---|---|
| the model after `restore`, and calls that are handed back | the original's code on the same tensors; PyTorch aligns what it allocates, and the number of threads stays | tests/test_models.py, test_offload.py, test_after_apply.py, test_autocast.py, test_fault_injection.py, tests/compat |
| a second call, a copy, another way to call | the same kernels on tensors laid out and aligned alike | tests/test_joint_blocks.py, test_after_apply.py, test_gated_norms.py, test_optim.py, test_offload.py |
| graphs of the backends `eager` and `aot_eager` | their operators are called one by one, in the same order | tests/compat, test_autocast_proofs.py, tests/kernels |
| copies, joined neighbours, kept tables, states of random numbers | nothing is added up | tests/test_joint_blocks.py, test_recall.py, test_zoo.py |
| kernels by their own ways: strided, in place, by ctypes, on more threads | one row is one thread's, in one order | tests/kernels, tests/proofs.py |

Not there: what inductor writes, which may add up in another order when it is written anew; a mean in
a graph and in eager mode; a kernel's result and the original's.
"""  # noqa: E501


def _draws(row: Row) -> list[Draw]:
    return [Draw(*pair) for pair in row["draws"]]


def _old_fails(row: Row, dtype: torch.dtype) -> int:
    return sum(not d.ours <= d.theirs + torch.finfo(dtype).eps for d in _draws(row))


def _summary(setting: str, capability: str, rows: list[Row], dtype: torch.dtype) -> str:
    found = {
        r["name"]: verdict(_draws(r), allowance(dtype), draws_and_like(r["name"], dtype)[1])
        for r in rows
    }
    failed = {r["name"]: n for r in rows if (n := _old_fails(r, dtype))}
    worst = max(found.values(), key=lambda v: v.mean / v.limit)
    return (
        f"| {setting} ({capability}) | {rows[0]['dtype']} | {sum(len(r['draws']) for r in rows)} "
        f"| {sum(failed.values())} | {', '.join(failed) or 'none'} "
        f"| {', '.join(n for n, v in found.items() if not v.is_near) or 'none'} "
        f"| {worst.mean:.3f} / {worst.limit:.3f} | {max(v.worst for v in found.values()):.2f} |"
    )


def _model(setting: str, row: Row, dtype: torch.dtype) -> tuple[float, str]:
    draws = _draws(row)
    raw = [d.excess(0.0) for d in draws]
    parts = 1 / variance if (variance := statistics.pvariance(raw)) else math.inf
    now = verdict(draws, allowance(dtype), draws_and_like(row["name"], dtype)[1])
    ratios = sorted(d.ours / d.theirs for d in draws)
    return parts, (
        f"| {row['name']} | {row['dtype']} | {setting} | {ratios[0]:.2f} … {ratios[-1]:.2f} "
        f"| {_old_fails(row, dtype)} of {len(draws)} | {now.mean:.3f} | {now.limit:.3f} "
        f"| {parts:.0f} |"
    )


def _mutated(mutation: str, rows: list[Row], dtype: torch.dtype) -> str:
    models = [r for r in rows if r["kind"] == "mutated"]
    shares = [f"{_old_fails(r, dtype)} of {len(r['draws'])}" for r in models]
    now = [f"{verdict(_draws(r), allowance(dtype)).mean:.2f}" for r in models]
    allowed = allowance(dtype, roundings=0)
    least = min(verdict(_draws(r), allowed, LEAF_LIKE).mean for r in rows if r["kind"] == "leaf")
    return (
        f"| {mutation} | {rows[0]['dtype']} | {', '.join(r['name'] for r in models)} "
        f"| {', '.join(shares)} | {', '.join(now)} / {limit(12):.2f} "
        f"| {least:.3f} / {limit(LEAF_DRAWS, LEAF_LIKE):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--only", choices=SETTINGS, help="measure under this setting alone")
    parser.add_argument("--measure", choices=SETTINGS, help=argparse.SUPPRESS)  # in the process
    arguments = parser.parse_args()
    if arguments.measure:
        write_results(arguments.measure)
        return
    for setting in () if arguments.page else [arguments.only] if arguments.only else SETTINGS:
        chosen = SETTINGS[setting]
        environment = cpus.environment(cpus.SETTINGS[chosen]) if chosen else None
        command = [sys.executable, __file__, "--measure", setting]
        subprocess.run(command, env=environment, check=True)
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
