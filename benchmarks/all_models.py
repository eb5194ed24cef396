"""Every model type of transformers and model class of diffusers that can be built small: what is
swapped, and whether anything else changes.

    python benchmarks/all_models.py --out benchmarks/results/all-models.json [--only REGEX]

Each is built from a small configuration with random weights; one that cannot be is counted with
the reason. Of those that can, `plan` must leave all values of the model as they are; outputs and
gradients are compared as `hfpatch apply-check` does, against fp64; after `restore` the model
computes the bits that it did before. Where no inputs can be made, the model is still planned,
patched and restored.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.bench import results
from hfpatch.check import FAILED, NOT_COMPARED, PASSED, How, check_model
from hfpatch.coverage.small_diffusers import of_diffusers
from hfpatch.coverage.small_transformers import MOST, of_transformers
from hfpatch.proof.keys import OWNED_BY_WRAPPERS

#: Seconds that one model may take, its fp64 twin and gradients included.
_SECONDS = 60


class TooLong(BaseException):
    """A model took more than its seconds. What catches any `Exception` does not catch it."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights none of which is trivial, whatever the constructor left (zeros, ones, no value)."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        drawn = torch.randn(p.shape, generator=generator)
        if p.ndim >= 2:
            p.copy_(drawn * (0.5 if id(p) in embeddings else max(p[0].numel(), 1) ** -0.5))
        elif name.endswith("weight"):
            p.copy_(1 + 0.2 * drawn)
        else:
            p.copy_(0.1 * drawn)
    return model.eval()


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a model holds, except for what a patch puts on an instance."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in OWNED_BY_WRAPPERS or key in ("_modules", "config", "_internal_dict"):
                continue
            found[f"{path}:{key}"] = _frozen(value, 4)
    return found


def _frozen(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        if value.is_meta:
            return ("meta", tuple(value.shape))
        flat = value.detach().contiguous().flatten()
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, (int, float, str, bool, bytes, type(None), type, torch.dtype)):
        return repr(value)
    if isinstance(value, dict):
        return tuple((repr(k), _frozen(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)) and depth > 0:
        return tuple(_frozen(v, depth - 1) for v in value)
    return type(value).__name__


def measure(make: Callable[[], nn.Module], only_plan: bool = False) -> dict[str, Any]:
    """One model's row."""
    started = time.perf_counter()
    row: dict[str, Any] = {"built": False}
    torch.manual_seed(0)
    try:
        with torch.device("meta"):  # some are never small
            size = sum(p.numel() for p in make().parameters())
        if size > MOST:
            raise ValueError(f"has {size / 1e6:.0f} million parameters at its smallest")
    except ValueError as e:
        if "million parameters" in str(e):
            return row | {"why": str(e)}
    except Exception:  # a constructor that computes on the CPU
        pass
    try:
        model = randomized(make())
    except Exception as e:
        return row | {"why": f"{type(e).__name__}: {e}".splitlines()[0][:200]}
    row |= {"built": True, "parameters": sum(p.numel() for p in model.parameters())}
    before = state_of(model)
    decided = hfpatch.plan(model)
    row["plan left the state"] = state_of(model) == before
    row["swaps"] = dict(collections.Counter(s.op for s in decided.swaps))
    row["skips"] = dict(collections.Counter(s.kind for s in decided.skips))
    row["unexplained"] = sorted(
        {f"{s.class_name}: {s.reason}"[:300] for s in decided.skips if s.kind == "unexplained"}
    )
    if only_plan:
        return row
    for mode in ("inference", "training"):
        with at_most(_SECONDS):
            result, _ = check_model("", model, How({"mode": mode}))
            if result["status"] == FAILED:
                judge_again(result, make, How({"mode": mode}))
        row[mode] = {k: v for k, v in result.items() if k != "part"}
    row["state after restore"] = _same_but_counters(before, state_of(model))
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def judge_again(result: dict[str, Any], make: Callable[[], nn.Module], how: How) -> None:
    """By the mean square of the errors over four draws of weights, as the tests of whole models do:
    of one draw of two right results one may be several times nearer. Other failures stay."""
    kinds = [k for k in ("error of outputs", "error of gradients") if k in result]
    if not kinds or "from those in fp64" not in result.get("reason", ""):
        return
    results = [result, *(check_model("", randomized(make(), s), how)[0] for s in (1, 2, 3))]
    result["draws"] = [{k: r.get(k) for k in kinds} for r in results]
    if all("from those in fp64" in r.get("reason", "from those in fp64") for r in results) and all(
        sum(r[k]["patched"] ** 2 for r in results)
        <= 4.0 * sum(max(r[k]["original"], torch.finfo(torch.float32).eps) ** 2 for r in results)
        for k in kinds
    ):
        result |= {"status": PASSED, "reason": f"over four draws; of the first {result['reason']}"}


def _same_but_counters(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the state is the same; what a model's own forward wrote is in both its runs."""
    return all(after.get(k) == v for k, v in before.items() if ":_parameters" in k)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The counts of all rows, by library."""
    counts: dict[str, Any] = {}
    for library in ("transformers", "diffusers"):
        mine = {k: r for k, r in rows.items() if k.startswith(library)}
        built = [r for r in mine.values() if r["built"]]
        swaps: collections.Counter[str] = collections.Counter()
        skips: collections.Counter[str] = collections.Counter()
        for r in built:
            swaps.update(r.get("swaps", {}))
            skips.update(r.get("skips", {}))
        found: dict[str, Any] = {
            "classes": len(mine),
            "built": len(built),
            "raised": sum("error" in r for r in built),
            "with swaps": sum(bool(r.get("swaps")) for r in built),
            "swaps": dict(swaps.most_common()),
            "skips": dict(skips.most_common()),
            "plan changed the state": sum(not r.get("plan left the state", True) for r in built),
            "parameters changed": sum(not r.get("state after restore", True) for r in built),
        }
        for mode in ("inference", "training"):
            results = [r[mode] for r in built if mode in r]
            found[mode] = {
                **collections.Counter(r["status"] for r in results),
                "outputs compared": sum("relative difference" in r for r in results),
                "gradients compared": sum("error of gradients" in r for r in results),
                "bit-equal after restore": sum(
                    r.get("bit-equal after restore") is True for r in results
                ),
            }
        counts[library] = found
    return counts


def as_lines(known: dict[str, Any]) -> str:
    """JSON with a line per model."""
    models = known["rows"]
    rows = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in models.items()
    )
    head = json.dumps({k: v for k, v in known.items() if k != "rows"}, indent=1, sort_keys=True)
    return f'{head[:-2]},\n "rows": {{\n{rows}\n }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    parser.add_argument("--plan", action="store_true", help="what is swapped, and no more")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for library in ("transformers", "diffusers"):
        importlib.import_module(library).logging.set_verbosity_error()
    head = results.head("all models", torch.device("cpu"), None)
    rows: dict[str, Any] = {}
    if args.resume and args.out.exists():
        rows = json.loads(args.out.read_text())["rows"]
    for name, make in (*of_transformers(), *of_diffusers()):
        if not re.search(args.only, name) or name in rows:
            continue
        try:
            rows[name] = measure(make, args.plan)
        except TooLong as e:
            rows[name] = {"built": False, "why": str(e)}
        except Exception as e:  # what a user would see: the finding
            rows[name] = {
                "built": True,
                "error": f"{type(e).__name__}: {e}"[:500],
                "where": traceback.format_exc()[-600:],
            }
        status = {m: rows[name].get(m, {}).get("status") for m in ("inference", "training")}
        failed = FAILED in status.values() or "error" in rows[name]
        uncompared = NOT_COMPARED in status.values()
        mark = "FAILED" if failed else "-" if not rows[name]["built"] or uncompared else "ok"
        print(f"{mark:6} {name} {rows[name].get('swaps', rows[name].get('why', ''))}", flush=True)
        if args.out is not None:
            known = {**head, "counts": summary(rows), "rows": rows}
            args.out.write_text(as_lines(known))
    json.dump(summary(rows), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
