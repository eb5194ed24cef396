"""Which blocks of one model run fused, and why others do not: it is built small and called."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.coverage.small_transformers import MOST
from hfpatch.inputs import NoInputs, sample_inputs
from hfpatch.planning.plan import Candidate
from hfpatch.proof.subject import class_of

#: `uncalled` of a row that was written without calling its model.
NOT_RUN = "not run yet"
#: Of the blocks that a call runs: all, some, none are fused; it has none; it could not be called.
STATES = ("fused", "some", "none", "no blocks", "not called", NOT_RUN)

#: How a class of blocks is called: `BasicTransformerBlock`, `LlamaDecoderLayer`, `MidBlock3D`.
_BLOCK_NAME = re.compile(r"(Block|Layer)\d*(\dD)?$")
#: How what is inside of a block is called.
_MIXES = re.compile(r"att(n|ention)|mlp|feed_?forward", re.IGNORECASE)
_NORMS = re.compile("norm", re.IGNORECASE)


def block_paths(model: nn.Module) -> dict[str, str]:
    """The class of each block by its path, which is what the survey counts classes of blocks by.

    A block is a module whose class is called one and which holds a norm, and attention or an MLP
    (by the name, three linear layers, or two in a row: one that scales and one that puts out are
    no MLP). One that holds a list of blocks is a stage of them, as is a wrapper around one; what
    is inside of a block are its parts.
    """
    found = {
        path: class_of(m).__name__
        for path, m in model.named_modules()
        if path and _BLOCK_NAME.search(class_of(m).__name__) and _holds(m)
    }
    blocks = {path: name for path, name in found.items() if not _stage(model.get_submodule(path))}
    return {path: name for path, name in blocks.items() if not _within(path, blocks)}


def _stage(module: nn.Module) -> bool:
    """Whether it holds a list of blocks, or is a wrapper around a single one."""
    inner = list(module.children())
    if len(inner) == 1 and _BLOCK_NAME.search(class_of(inner[0]).__name__) and _holds(inner[0]):
        return True
    return any(
        _BLOCK_NAME.search(class_of(part).__name__)
        for held in module.modules()
        if isinstance(held, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for part in held.children()
    )


def _holds(module: nn.Module) -> bool:
    inner = [m for m in module.modules() if m is not module]
    names = [class_of(m).__name__ for m in inner]
    several = sum(isinstance(m, nn.Linear) for m in inner) >= 3
    rows = (m for m in inner if isinstance(m, nn.Sequential))
    several = several or any(sum(isinstance(c, nn.Linear) for c in m) >= 2 for m in rows)
    mixes = several or any(map(_MIXES.search, names))
    return mixes and any(map(_NORMS.search, names))


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _ran(model: nn.Module, paths: Iterable[str], inputs: dict[str, Any]) -> set[str]:
    """Which of these a call reaches."""
    reached: set[str] = set()
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda m, a, path=path: reached.add(path)
        )
        for path in paths
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return reached


def _classes(
    ran: dict[str, str], fused: set[str], candidates: Iterable[Candidate]
) -> dict[str, str | None]:
    """By class why its blocks are not fused, or None where all that ran are."""
    reasons = {c.path: c.reason for c in candidates if c.state == "left"}
    found: dict[str, str | None] = {}
    for path, name in sorted(ran.items()):
        whole = path in fused or _within(path, fused) or any(_within(f, [path]) for f in fused)
        why = None if whole else reasons.get(path, _NOT_TRIED)[:240]
        found[name] = found.get(name) or why
    return found


#: Why a block is left that is no candidate, nor has a file of its own.
_NOT_TRIED = "it stands in no list of blocks, so nothing captures it"


def blocks_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """`blocks` as [fused, called] with `unfused` reasons by class name, or `uncalled`, why not.

    `classes` has the classes of blocks (`block_paths`) that the call runs: None for each that is
    fused, and why for each that is not.

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
    known = block_paths(model)
    try:
        ran = _ran(model, known, inputs)
    except Exception as e:  # a second call that the first one does not go with
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
    own = {s.path for s in report.swaps if s.op == "block"}
    own |= {c.path for c in candidates if c.state == "fused"}
    if ran:
        row["classes"] = _classes({p: known[p] for p in sorted(ran)}, own, candidates)
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
