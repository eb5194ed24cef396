"""What a plan serves of one model: blocks, norms and gated MLPs, and why not the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpatch.coverage.blocks import blocks_of
from hfpatch.coverage.small_transformers import MOST
from hfpatch.leaves.gating import looks_gated
from hfpatch.leaves.norms import Norms
from hfpatch.planning.plan import Plan
from hfpatch.planning.planner import make_plan
from hfpatch.planning.settings import check_settings
from hfpatch.proof.subject import class_of

#: A single kernel already: nothing is left to serve.
SERVED_AS_IT_IS = "no gain"
CATEGORIES = ("blocks with a file of their own", "leaves only", "nothing", "not built")


def is_norm(module: nn.Module) -> bool:
    """Whether it is counted as a norm: by its name, and without modules inside. Not counted are
    those of groups, images and batches."""
    inner = any(c is not None for c in module._modules.values())
    return not inner and bool(Norms.pattern.search(class_of(module).__name__))


def row_of(make: Callable[[], nn.Module], called: bool = True) -> dict[str, Any]:
    """One model's row: `category`, `norms` and `mlps` as [served, all], `left` by class name, and
    what `blocks_of` adds where it is `called`.

    The model is built on the `meta` device, and planned for the CPU: proofs run on small copies of
    its modules. One whose constructor computes with its tensors is built in memory.
    """
    torch.manual_seed(0)
    try:
        try:
            with torch.device("meta"):
                model = make()
        except Exception:
            model = make()
        if (size := sum(p.numel() for p in model.parameters())) > MOST and not _on_meta(model):
            raise ValueError(f"has {size / 1e6:.0f} million parameters at its smallest")
    except Exception as e:  # the constructor's own demands
        why = f"{type(e).__name__}: {e}".splitlines()[0][:160]
        return {"category": "not built", "why": why}
    settings = check_settings("inference", None, None, (), True, False, None, "cpu")
    decided, prepared = make_plan([("", model)], type(model).__name__, settings)
    inside = {id(m) for p in prepared if p.swap.op == "block" for m in p.module.modules()}
    row = counted(model, decided, inside)
    del model, prepared
    return row | (blocks_of(make) if called else {})


def _on_meta(model: nn.Module) -> bool:
    return all(p.is_meta for p in model.parameters())


def counted(model: nn.Module, decided: Plan, inside: set[int]) -> dict[str, Any]:
    """The row of a model whose plan is made; `inside`: ids of the modules of fused blocks."""
    swapped = {s.path: s for s in decided.swaps}
    skipped = {s.path: s for s in decided.skips}
    counts = {"norms": [0, 0], "mlps": [0, 0]}
    left: dict[str, Counter[str]] = {}
    for path, module in model.named_modules():
        kind = "norms" if is_norm(module) else "mlps" if looks_gated(module) else None
        if kind is None:
            continue
        counts[kind][1] += 1
        skip = skipped.get(path)
        if path in swapped or id(module) in inside or (skip and skip.kind == SERVED_AS_IT_IS):
            counts[kind][0] += 1
            continue
        why = f"{skip.kind}: {skip.reason}"[:240] if skip else "nothing looks at it"
        left.setdefault(class_of(module).__name__, Counter())[why] += 1
    ops = {s.op for s in decided.swaps}
    category = CATEGORIES[0 if "block" in ops else 1 if ops else 2]
    row: dict[str, Any] = {"category": category, **counts}
    if left:
        row["left"] = {n: c.most_common(1)[0][0] for n, c in sorted(left.items())}
    return row


def is_whole(row: dict[str, Any]) -> bool:
    """Whether all norms and gated MLPs of a model are served."""
    return all(row[k][0] == row[k][1] for k in ("norms", "mlps"))
