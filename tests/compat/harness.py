"""One cell: the deed before `apply`, after it, and what `restore` leaves."""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from columns import COLUMNS, Column
from counting import COUNT, Count
from expect import assert_same_dicts, relative_error, snapshot
from row import Case, Row, Sum, forward
from torch import nn

import hfpatch

PATCHED, PARTLY, ORIGINAL, ABSENT = "patched", "partly", "original", "n/a"


@dataclass(frozen=True)
class Cell:
    """What was seen: the state where the deed came before `apply` and where it came after it, and
    the reason of every state that is not "patched"."""

    before: str
    after: str
    reason: str = ""


def modules_of(target: Any) -> dict[str, nn.Module]:
    """Every module of a model or pipeline, by path."""
    if isinstance(target, nn.Module):
        return dict(target.named_modules())
    roots = getattr(target, "components", None) or {"model": target.model}
    found = {}
    for name, root in roots.items():
        if isinstance(root, nn.Module):
            found |= {f"{name}.{p}": m for p, m in root.named_modules()}
    return found


def assert_clean(target: Any) -> None:
    """Nothing of hfpatch is left in any module, in a hook's function reference or in a wrapper."""
    for path, module in modules_of(target).items():
        holders = [module.__dict__]
        registry = module.__dict__.get("_diffusers_hook")
        holders += [vars(r) for r in getattr(registry, "_fn_refs", ())]
        for holder in holders:
            for key, value in holder.items():
                if key == "_torchdynamo_orig_callable":
                    continue  # what a wrapper of torch.compile found: read if it is wrapped again
                assert not _is_ours(value), f"`{path}.{key}` is still hfpatch's"
                for wrapper in _wrappers(value):
                    held = [k for k, v in vars(wrapper).items() if "hfpatch" in k or _is_ours(v)]
                    assert not held, f"what wraps `{path}.{key}` still has {held} of hfpatch's"


def _wrappers(value: Any) -> Iterator[Any]:
    """What wraps a function, from the outside, as `functools.update_wrapper` notes it."""
    while hasattr(value, "__wrapped__"):
        value = getattr(value, "__func__", value)
        if not hasattr(value, "__dict__"):
            return
        yield value
        value = value.__wrapped__


def _is_ours(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(function, types.FunctionType) and function.__module__.startswith("hfpatch")


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield k
            yield from flatten(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from flatten(v)
    else:
        yield value


def assert_equal(got: Any, expected: Any, tolerance: float, what: str) -> None:
    """Tensors within `tolerance` (0: every bit), everything else equal."""
    left, right = list(flatten(got)), list(flatten(expected))
    assert len(left) == len(right), f"{what}: {len(left)} values, expected {len(right)}"
    for mine, theirs in zip(left, right, strict=True):
        if isinstance(theirs, Sum):
            error = (mine.value - theirs.value).abs().max().item()
            assert error <= tolerance * theirs.size, (
                f"{what}: a sum is off by {error:.2e}, expected <= {tolerance:.0e} of what is "
                f"summed, {theirs.size:.3g}"
            )
            continue
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs, f"{what}: {mine!r}, expected {theirs!r}"
            continue
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, what
        if tolerance == 0.0 or not theirs.is_floating_point():
            assert torch.equal(mine, theirs), f"{what}: not equal bit for bit"
        elif theirs.norm() > 0:
            error = relative_error(mine, theirs)
            assert error <= tolerance, f"{what}: off by {error:.2e}, expected <= {tolerance:.0e}"
        else:
            assert mine.norm() == 0, f"{what}: not zero"


@cache
def baseline(name: str, thin: bool) -> Count:
    """Calls of one forward of the patched model to which nothing was done."""
    case = Case(COLUMNS[name], torch.float32, Path(), thin)
    model = case.build()
    hfpatch.apply(model)
    forward(case, model)  # blocks are captured
    COUNT.reset()
    forward(case, model)
    assert COUNT.some, f"no kernel runs in `{name}`"
    return COUNT.copy()


def _state(count: Count, base: Count, row: Row) -> str:
    if not count.some:
        return ORIGINAL
    calls = row.calls or 1
    fewer = row.calls and count.kernels < base.kernels * calls
    if fewer or count.blocks < base.blocks * calls:
        return PARTLY
    return PATCHED


def _seeded(function: Any, case: Case, target: Any) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(case, target)


def _observe(row: Row, case: Case, target: Any, expected: Any, base: Count, order: str) -> str:
    COUNT.reset()
    got = _seeded(row.run, case, target)
    count = COUNT.copy()
    # a call that no kernel touched ran the original's code on the same tensors: then not a bit may
    # differ, unless that code is written anew
    exact = not (count.some or count.formulas or row.generated)
    assert_equal(got, expected, 0.0 if exact else row.tolerance, order)
    case.notes["count"] = count
    return _state(count, base, row)


def run_cell(row: Row, column: Column, folder: Path) -> Cell:
    """Do it in both orders, compare with the unpatched model, restore, compare again."""
    if (absent := row.unless(column)) is not None:
        return Cell(ABSENT, ABSENT, absent)
    if row.thin:  # compiled
        torch._dynamo.reset()
    again = row.tolerance if row.generated else 0.0  # the original's code once more
    base = baseline(column.name, row.thin)

    case = Case(column, row.dtype, folder, row.thin)
    target = _seeded(row.do, case, case.build())
    expected = _seeded(row.run, case, target)
    held = {p: dict(d) for p, d in _snapshot(target).items()}
    hfpatch.apply(target, mode=row.mode)
    before = _observe(row, case, target, expected, base, "done before `apply`")
    hfpatch.restore(target)
    assert_clean(target)
    if row.lasting and isinstance(target, nn.Module):
        assert_same_dicts(held, target)
    assert_equal(_seeded(row.run, case, target), expected, again, "done before, restored")

    case = Case(column, row.dtype, folder, row.thin)
    case._files = 100
    model = case.build()
    hfpatch.apply(model, mode=row.mode)
    forward(Case(column, torch.float32, folder), model)  # in use already
    target = _seeded(row.do, case, model)
    after = _observe(row, case, target, expected, base, "done after `apply`")
    if row.afterwards is not None:
        row.afterwards(case, target)
    hfpatch.restore(target)
    assert_clean(target)
    assert_equal(_seeded(row.run, case, target), expected, again, "done after, restored")

    if before == after == PATCHED:
        return Cell(before, after)
    reasons = [row.reason(column, s) for s in (before, after) if s != PATCHED]
    assert all(reasons), (
        f"{before}/{after}, and the row does not say why; {case.notes['count']}, without it {base}"
    )
    return Cell(before, after, " ".join(dict.fromkeys(reasons)))  # type: ignore[arg-type]


def _snapshot(target: Any) -> dict[str, dict[str, object]]:
    return snapshot(target) if isinstance(target, nn.Module) else {}
