"""From a model to its plan: walk, ask the families, prove. Nothing here writes to a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from hfpatch import registry
from hfpatch.errors import HfpatchError, PatchError, VerificationError
from hfpatch.kernels import kernelized
from hfpatch.kernels.sources import compiled_here
from hfpatch.planning.plan import Plan, Refusal, Skip
from hfpatch.planning.settings import Settings, matches
from hfpatch.planning.sites import Site, sites_of, unfit
from hfpatch.progress import track
from hfpatch.proof.keys import classes_read_once
from hfpatch.proof.proofs import Prepared, prepare
from hfpatch.proof.proving import cpu_default
from hfpatch.proof.subject import Family, class_of


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
    with cpu_default(), classes_read_once():
        return _make_plan(roots, name, settings)


def _make_plan(
    roots: Sequence[tuple[str, nn.Module]], name: str, settings: Settings
) -> tuple[Plan, list[Prepared]]:
    draft = _Draft(settings)
    sites, other_names = _sites(roots, settings)
    for pattern in (*(settings.include or ()), *settings.exclude):
        if not _matching(pattern, sites):
            raise ValueError(_no_match(pattern, name, sites, other_names))
    ranked: list[tuple[int, Site, list[Family]]] = []
    for site in sites:
        families = registry.nominating(site.module)
        if families:
            ranked.append((families[0].rank, site, families))
    if settings.training:
        from hfpatch.leaves.head import HEADS, head_sites

        ranked += [(HEADS.rank, site, [HEADS]) for site in head_sites(sites)]
    ranked.sort(key=lambda r: r[0])
    for _, site, families in track(ranked, f"hfpatch: {name}", "module"):
        if id(site.module) not in draft.covered:
            _decide(draft, site, families)
    settings.selecting_none[:] = _pattern_notes(draft, sites, [site for _, site, _ in ranked])
    if (note := kernelized.note(m for _, root in roots for m in root.modules())) is not None:
        settings.sources.notes.append(note)
    order_of = {site.path: i for i, site in enumerate(sites)}
    draft.prepared.sort(key=lambda p: order_of[p.swap.path])
    draft.skips.sort(key=lambda s: order_of[s.path])
    assumed = settings.sources.assumed
    if assumed is not None:
        settings.sources.notes.append(assumed.note(compiled_here()))
    plan = Plan(
        name,
        settings.mode,
        tuple(p.swap for p in draft.prepared),
        tuple(draft.skips),
        tuple(settings.sources.notes),
        planned_for="" if assumed is None else str(assumed),
    )
    return plan, draft.prepared


def _sites(
    roots: Sequence[tuple[str, nn.Module]], settings: Settings
) -> tuple[list[Site], dict[str, str]]:
    """Each module once, by the first of its paths; and that path by every other one.

    Components of a pipeline may be one module, or share some.
    """
    first: dict[int, Site] = {}
    other_names: dict[str, str] = {}
    for prefix, root in roots:
        for site in sites_of(prefix, root, settings.device):
            known = first.setdefault(id(site.module), site)
            if known is not site:
                other_names[site.path] = known.path
    return list(first.values()), other_names


def _matching(pattern: str, sites: Sequence[Site]) -> list[Site]:
    return [s for s in sites if matches((pattern,), s.path, class_of(s.module).__name__)]


def _no_match(pattern: str, name: str, sites: Sequence[Site], other_names: dict[str, str]) -> str:
    for path, first in other_names.items():
        if matches((pattern,), path, ""):
            return (
                f"pattern {pattern!r} in `include`/`exclude` matches no module by its first path: "
                f"`{path}` is `{first}` once more; write that"
            )
    names = dict.fromkeys(n for s in sites for n in (s.path, class_of(s.module).__name__) if n)
    near = difflib.get_close_matches(pattern, names, 3, 0.0)
    return (
        f"pattern {pattern!r} in `include`/`exclude` matches no module path or class name of "
        f"{name}; the nearest are {', '.join(f'`{n}`' for n in near)}"
    )


def _pattern_notes(
    draft: _Draft, sites: Sequence[Site], nominated: Sequence[Site]
) -> Iterator[tuple[frozenset[str], str]]:
    """What to say of patterns that select nothing, as those that name a module for its children;
    each with what it matches."""
    settings = draft.settings
    if settings.include == ():
        yield frozenset(), "`include` is empty, so nothing is swapped"
    decided = draft.covered | {id(p.module) for p in draft.prepared}
    paths = {skip.path for skip in draft.skips}
    decided |= {id(site.module) for site in sites if site.path in paths}
    for argument in ("include", "exclude"):
        for pattern in getattr(settings, argument) or ():
            matched = _matching(pattern, sites)
            if any(id(site.module) in decided for site in matched):
                continue
            there = frozenset(s.path for s in matched)
            names = ", ".join(dict.fromkeys(class_of(s.module).__name__ for s in matched))
            said = f"{pattern!r} in `{argument}` matches {names}, which hfpatch has no kernel for"
            inside = next(
                (
                    f"{site.path}.*".removeprefix(".")
                    for site in matched
                    if any(n.path.startswith(f"{site.path}.".lstrip(".")) for n in nominated)
                ),
                None,
            )
            if inside is not None:
                yield there, f"{said}; for the modules inside write {inside!r}"
            elif argument == "include":
                yield there, said


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
            outcome = Refusal("rejected", why)
        if isinstance(outcome, Prepared):
            swap = replace(outcome.swap, mode=settings.mode)
            draft.prepared.append(replace(outcome, swap=swap))
            draft.covered.update(id(m) for m in subject.covers())
            return
        if outcome.kind == "rejected" and settings.strict:
            raise VerificationError(f"`{path}` ({class_name}): {outcome.reason}")
        return skip(outcome.kind, outcome.reason)
