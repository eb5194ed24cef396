"""From a model to its plan: walk, ask the families, prove. Nothing here writes to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hfpatch import kernelized, packing, probe, registry
from hfpatch.errors import HfpatchError, PatchError, VerificationError
from hfpatch.patches.base import Family, class_of
from hfpatch.patches.blocks.chain import Chain
from hfpatch.patches.keys import classes_read_once
from hfpatch.plan import Plan, Skip
from hfpatch.proofs import Prepared, prepare
from hfpatch.settings import Settings, matches
from hfpatch.sites import Site, sites_of, unfit


@dataclass
class _Draft:
    """A plan in the making."""

    settings: Settings
    prepared: list[Prepared] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    covered: set[int] = field(default_factory=set)  # ids of modules a wider swap bypasses


def make_plan(
    roots: Sequence[tuple[str, nn.Module]], name: str, settings: Settings
) -> tuple[Plan, list[Prepared]]:
    """Walk the modules, ask the families, prove each distinct subject once.

    Args:
        roots: (prefix of paths, module) pairs; a pipeline has several.
        name: what the report calls the model.
        settings: checked arguments.

    Returns:
        the plan, and what `swap.commit` needs to carry it out.

    Raises:
        ValueError: an `include` or `exclude` pattern matches no module.
        VerificationError: under `strict`, a kernel failed its verification.
    """
    # whatever the user's default device is: probes draw on the CPU
    with torch.device("cpu"), classes_read_once():
        return _make_plan(roots, name, settings)


def _make_plan(
    roots: Sequence[tuple[str, nn.Module]], name: str, settings: Settings
) -> tuple[Plan, list[Prepared]]:
    draft = _Draft(settings)
    sites = [
        site for prefix, root in roots for site in sites_of(prefix, root, settings.assume_device)
    ]
    for pattern in (*(settings.include or ()), *settings.exclude):
        if not any(matches((pattern,), s.path, class_of(s.module).__name__) for s in sites):
            raise ValueError(
                f"pattern {pattern!r} in `include`/`exclude` matches no module path or class name "
                f"of {name}"
            )
    ranked: list[tuple[int, Site, list[Family]]] = []
    for site in sites:
        families = registry.nominating(site.module)
        if families:
            ranked.append((families[0].rank, site, families))
    for _, site, families in sorted(ranked, key=lambda r: r[0]):
        if id(site.module) not in draft.covered:
            _decide(draft, site, families)
    if (note := kernelized.note(m for _, root in roots for m in root.modules())) is not None:
        settings.sources.notes.append(note)
    order_of = {site.path: i for i, site in enumerate(sites)}
    draft.prepared.sort(key=lambda p: order_of[p.swap.path])
    draft.skips.sort(key=lambda s: order_of[s.path])
    _link(draft.prepared)
    plan = Plan(
        name,
        settings.mode,
        tuple(p.swap for p in draft.prepared),
        tuple(draft.skips),
        tuple(settings.sources.notes),
    )
    return plan, draft.prepared


def _decide(draft: _Draft, site: Site, families: list[Family]) -> None:
    path, module = site.path, site.module
    class_name = class_of(module).__name__
    settings = draft.settings

    def skip(kind: str, reason: str) -> None:
        draft.skips.append(Skip(path, class_name, kind, reason))

    for family in families:
        try:
            subject = family.examine(module)
        except Exception as e:  # a lookalike may lack anything
            why = f"it could not be examined: {type(e).__name__}: {e}"
            if settings.strict:
                raise PatchError(f"`{path}` ({class_name}): {why}") from e
            return skip("unsupported", why)
        if subject is None:
            continue
        if settings.include is not None and not matches(settings.include, path, class_name):
            return
        if matches(settings.exclude, path, class_name):
            return skip("excluded", "matched by `exclude`")
        if isinstance(subject, str):
            return skip("unsupported", subject)
        try:
            outcome = unfit(site, subject) or prepare(site, family, subject, settings)
        except HfpatchError:
            raise
        except Exception as e:
            why = f"proving its kernel failed: {type(e).__name__}: {e}"
            if settings.strict:
                raise PatchError(f"`{path}` ({class_name}): {why}") from e
            outcome = probe.Refusal("rejected", why)
        if isinstance(outcome, Prepared):
            draft.prepared.append(outcome)
            draft.covered.update(id(m) for m in subject.covers())
            return
        if outcome.kind == "rejected" and settings.strict:
            raise VerificationError(f"`{path}` ({class_name}): {outcome.reason}")
        return skip(outcome.kind, outcome.reason)


def _link(prepared: list[Prepared]) -> None:
    """Tell blocks that stand in one list of each other."""
    lists: dict[tuple[str, Any], list[Prepared]] = {}
    for p in prepared:
        if p.block is not None:
            parent = p.swap.path.rpartition(".")[0]
            lists.setdefault((parent, type(p.block)), []).append(p)
    for blocks in lists.values():
        chain = Chain([p.module for p in blocks])
        for p in blocks:
            p.block.chain = chain  # type: ignore[union-attr]
        together = {id(p): q for p, q in zip(blocks, _packed_across(blocks), strict=True)}
        prepared[:] = [together.get(id(p), p) for p in prepared]


def _packed_across(blocks: list[Prepared]) -> list[Prepared]:
    """The same, but the first block's swap packs what one product serves in all of them."""
    result = list(blocks)
    groups = [p.block.chain_packs() for p in blocks]  # type: ignore[union-attr]
    for kind in zip(*groups, strict=True):
        together = tuple(linear for group in kind for linear in group)
        if len(blocks) < 2 or not packing.can_pack(together):
            continue
        for i, (p, group) in enumerate(zip(result, kind, strict=True)):
            own = tuple(pack for pack in p.packs if set(pack) != set(group))
            result[i] = replace(p, packs=(*own, together) if i == 0 else own)
    return result
