"""Which blocks of one model run fused, and why others do not: it is built small and called."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.coverage.models import MOST
from hfpatch.inputs import NoInputs, sample_inputs

#: `uncalled` of a row that was written without calling its model.
NOT_RUN = "not run yet"
#: Of the blocks that a call runs: all, some, none are fused; it has none; it could not be called.
STATES = ("fused", "some", "none", "no blocks", "not called", NOT_RUN)


def blocks_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """`blocks` as [fused, called] with `unfused` reasons by class name, or `uncalled`, why not.

    Blocks that the call does not reach, such as an image tower's in a call with text alone, are not
    counted; most have a model type of their own. The model is called in fp32 on the CPU, with
    random weights and inputs of a few tokens or small images. A block of a file of its own
    (docs/families.md) counts as fused.
    """
    torch.manual_seed(0)
    try:
        with contextlib.suppress(Exception):  # a constructor that computes has no `meta`
            with torch.device("meta"):
                size = sum(p.numel() for p in make().parameters())
            if size > MOST:
                return {"uncalled": f"has {size / 1e6:.0f} million parameters at its smallest"}
        model = make().eval().requires_grad_(False)
        inputs = sample_inputs(model)
    except NoInputs as e:
        return {"uncalled": f"no inputs are known: {e}".splitlines()[0][:160]}
    except Exception as e:  # the constructor's own demands
        return {"uncalled": f"{type(e).__name__}: {e}".splitlines()[0][:160]}
    report = hfpatch.apply(model, blocks=True, decoding=False)
    try:
        with torch.no_grad():
            for _ in range(2):
                model(**inputs)
        candidates = hfpatch.status(model).plan.candidates
    except Exception as e:  # drawn weights may be out of the code's own bounds
        return {"uncalled": f"{type(e).__name__}: {e}".splitlines()[0][:160]}
    finally:
        hfpatch.restore(model)
    named = sum(s.op == "block" for s in report.swaps)
    called = [c for c in candidates if c.state != "at its first call"]
    fused = sum(c.state == "fused" for c in called)
    row: dict[str, Any] = {"blocks": [named + fused, named + len(called)]}
    unfused: dict[str, Counter[str]] = {}
    for c in called:
        if c.state != "fused":
            unfused.setdefault(c.class_name, Counter())[c.reason[:240]] += 1
    if unfused:
        row["unfused"] = {n: c.most_common(1)[0][0] for n, c in sorted(unfused.items())}
    return row


def state_of(row: dict[str, Any]) -> str:
    """The word for a row: one of STATES."""
    if "blocks" not in row:
        return NOT_RUN if row.get("uncalled") == NOT_RUN else "not called"
    fused, count = row["blocks"]
    if not count:
        return "no blocks"
    return "fused" if fused == count else "some" if fused else "none"
