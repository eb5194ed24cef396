"""The story, top to bottom: find the modules, plan, prove, commit, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch import swap
from hfpatch.announce import announce, what_was_lost
from hfpatch.collector import young_only
from hfpatch.kernels.kernelized import OVERWRITTEN
from hfpatch.per_object import PerObject
from hfpatch.planning.plan import FUSED_HEAD, HEAD, Candidate, Plan, Skip, Swap
from hfpatch.planning.settings import Settings, check_settings
from hfpatch.report import Report

# What makes and proves a plan is imported by the first call: `import hfpatch` stays light.
if TYPE_CHECKING:
    from torch import Tensor

    from hfpatch.hub import HubOptions
    from hfpatch.losses.fused_heads import Fused
    from hfpatch.proof.proofs import Prepared

#: One source, or several in order of preference, or either by op.
Kernels = (
    str
    | Sequence["str | Callable[..., Tensor]"]
    | Mapping[str, "str | Callable[..., Tensor] | Sequence[str | Callable[..., Tensor]] | None"]
    | None
)


@dataclass(frozen=True)
class _Noted:
    """What the last apply left about a module, whichever model it was reached by. Its swap is read
    off the module itself."""

    #: For `status`, what it said of the module; of a model as a whole, what it decided.
    said: Swap | Skip | None = None
    plan: Plan | None = None
    #: And with which arguments, so that `hfpatch.applied` can go back to them.
    asked: dict[str, Any] | None = None


_noted: PerObject[nn.Module, _Noted] = PerObject()


def apply(
    model: Any,
    *,
    mode: str = "inference",
    kernels: Kernels = None,
    hub: HubOptions | Mapping[str, Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    verify: bool = True,
    strict: bool = False,
    cuda_graphs: bool | int | str = False,
    decoding: str | bool = "auto",
    blocks: str | bool | None = "auto",
    gain: str | None = None,
) -> Report:
    """Swap the forwards of `model`'s modules for fused kernels, where that is proven equal.

    Only instances change, and only their forward: same classes, same `state_dict`, and
    `hfpatch.restore(model)` takes it back. Calling it again re-plans with the new settings. If
    anything fails the model is as it was before the call.

    Args:
        model: a `torch.nn.Module`, a diffusers pipeline (each of its modules is patched), or a
            transformers pipeline.
        mode: "inference" (what autograd records is computed by the original forward, or by the same
            formula on PyTorch's operators) or "training" (kernels with a backward are used under
            autograd too).
        kernels: where kernels come from: a source for every op ("local", "torch", a pinned Hub
            kernel "org/name@v1", or "hub": the repositories that hfpatch has adapters for); a
            sequence of them in order of preference; or a dict of op to source, function, sequence,
            or None (leave the op alone), with "*" for the other ops. None: what HFPATCH_KERNELS or
            a config file says, else the local build, else torch's own operators.
        hub: on what terms Hub kernels are loaded: `hfpatch.hub.HubOptions`, or a dict of its
            fields, e.g. `{"trust_remote_code": ["me/my-kernel"]}`.
        include: globs over module paths and class names, e.g. "transformer_blocks.0.*" or
            "LlamaMLP": nothing else is looked at. Of a module with several paths the first counts.
        exclude: globs of what stays as it is; they win over `include`.
        verify: run every kernel against the original before it is used; without it only this
            project's own are spared. The formula of each module is identified in any case.
        strict: raise when a requested kernel cannot be loaded or fails its verification, instead of
            leaving the module as it is and saying so in the report.
        cuda_graphs: record the forward of `model` (of a pipeline: of its denoisers) in CUDA graphs,
            one per kind of call, and replay it: the same kernels and bits without the time of
            launching them (except attention where padding is masked: to the precision of the
            dtype). A number is the most graphs to keep (True: 8). Calls that cannot be replayed
            (hooks inside, gradients, tensors on the CPU) run as they are; the reason is warned of
            once and in `status`. "auto": of each kind of call the graph and the plain call are
            timed in turns, seven calls at most, and the faster is kept; `status` shows both times.
        decoding: "auto": the decoding steps of a model that generates text (one new token of up
            to 16 sequences, as `generate` asks for) are computed by one call of an engine each,
            where what the model computes is proven; on a GPU as a CUDA graph. True: the same, and
            a warning where they stay as they are. "int8": on a CPU, with copies of the weights that
            are rounded to 8 bits (a scale a row): less memory is read, and texts are no longer the
            original's. False: they stay as they are.
        blocks: fuse whole blocks (the elements of a model's lists of layers) that no file was
            written for: at the first call of a kind what a block computes is captured, rewritten
            and proven on that call's arguments, while the original computes its result. Until then
            they are `candidates` of the report; `status` says what came of them. "auto": those on
            a GPU, diffusers' on a CPU too, and calls without a cache that has entries; True: all
            on the CPU too, where texts gain little, and all calls; False: none; None: as "auto".
        gain: None: what is known to be faster is swapped. "time": beside that, the original and the
            patched forward of each kind of module are timed on the first calls that come without
            gradients, in turns, and the faster is kept for calls of that size; `status` shows both
            times.

    Returns:
        the report; `print(report)` is a table.

    Raises:
        TypeError, ValueError: an argument is not what it must be.
        KernelLoadError, VerificationError: under `strict`.
        PatchError: the swap itself failed and was rolled back.
    """
    from hfpatch.decoding import kept, offer
    from hfpatch.graphs import kept as graphs
    from hfpatch.planning import gain as gains
    from hfpatch.proof.keys import classes_read_once
    from hfpatch.proof.proving import outside_modes

    started = time.perf_counter()
    asked = {
        "mode": mode, "kernels": kernels, "hub": hub, "include": include, "exclude": exclude,
        "verify": verify, "strict": strict, "cuda_graphs": cuda_graphs, "decoding": decoding,
        "blocks": blocks, "gain": gain,
    }  # fmt: skip
    settings = check_settings(mode, kernels, include, exclude, verify, strict, hub)
    timed = gains.check_choice(gain, settings.training)
    name, roots = _roots(model)
    with outside_modes(), young_only(), classes_read_once():
        decided, prepared, in_vain = decide(name, roots, settings, cuda_graphs, decoding, blocks)
        decided, fused = _with_fused_heads(decided, roots, settings)
    if timed:
        table = gains.Table(host_counts=not cuda_graphs)
        prepared = [table.wrap(p) for p in prepared]
    lost = what_was_lost(decided, roots, settings.sources.failures, settings.include is not None)
    for text in (*lost, *in_vain, *offer.missed(decoding, decided.skips)):
        announce(text)  # where a filter makes an error of it, nothing is patched
    taken = _heads_in_vain(roots, decided.swaps)  # it walks the model, which may fail
    graphs.release(_modules(roots))  # those of an apply before
    kept.release(_modules(roots))
    last = partial(_finish, roots, fused, decided, asked)
    try:
        with young_only(), classes_read_once():  # adapters look at each module's class again
            _commit(roots, prepared, last)
    except BaseException:
        kept.release(_modules(roots))  # those of adapters that were made and taken off again
        raise
    gains.release(root for _, root in roots)
    if timed:
        for _, root in roots:
            gains.keep(root, table)
    notes = (*decided.notes, *taken)
    seconds = time.perf_counter() - started
    return Report(replace(decided, notes=notes, seconds=seconds), applied=True)


def plan(
    model: Any,
    *,
    mode: str = "inference",
    kernels: Kernels = None,
    hub: HubOptions | Mapping[str, Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    verify: bool = True,
    strict: bool = False,
    cuda_graphs: bool | int | str = False,
    decoding: str | bool = "auto",
    blocks: str | bool | None = "auto",
    gain: str | None = None,
    device: str | None = None,
) -> Plan:
    """What `apply` with the same arguments would decide; the model is not changed.

    Args:
        device: plan as if the weights were there, wherever they are now (also on the meta device):
            "cpu", "cuda", or a GPU by its compute capability, "cuda:9.0". One that this machine has
            not is planned for by proofs on the CPU; `Plan.planned_for` and a note say so. Decoding
            steps and blocks to capture are planned by what the model computes. The dtype is the
            weights'.

    Raises:
        TypeError, ValueError, KernelLoadError, VerificationError: as `apply`.
    """
    from hfpatch.planning import gain as gains
    from hfpatch.proof.keys import classes_read_once
    from hfpatch.proof.proving import outside_modes

    started = time.perf_counter()
    settings = check_settings(mode, kernels, include, exclude, verify, strict, hub, device)
    gains.check_choice(gain, settings.training)  # what is faster, no plan can tell
    with outside_modes(), young_only(), classes_read_once():
        name, roots = _roots(model)
        decided, _, _ = decide(name, roots, settings, cuda_graphs, decoding, blocks)
        decided, _ = _with_fused_heads(decided, roots, settings)
    notes = (*decided.notes, *_heads_in_vain(roots, decided.swaps))
    return replace(decided, notes=notes, seconds=time.perf_counter() - started)


def _with_fused_heads(
    decided: Plan, roots: list[tuple[str, nn.Module]], settings: Settings
) -> tuple[Plan, list[Fused]]:
    """With the models whose fused head, as TRL's, is served."""
    if not settings.training or not any(map(swap.may_have_fused_head, _modules(roots))):
        return decided, []
    from hfpatch.losses import fused_heads

    fused, skips = fused_heads.offer(_paths(roots), settings)
    paths = {f.entry.path for f in fused}
    wrong = {note for matched, note in settings.selecting_none if not paths.isdisjoint(matched)}
    return replace(
        decided,
        swaps=(*(f.entry for f in fused), *decided.swaps),
        skips=(*decided.skips, *skips),
        notes=tuple(note for note in decided.notes if note not in wrong),
    ), fused


def _finish(
    roots: list[tuple[str, nn.Module]],
    fused: list[Fused],
    decided: Plan,
    asked: dict[str, Any],
    done: list[Callable[[], object]],
) -> None:
    """What belongs to an `apply` behind its adapters; appends what undoes it."""
    _fused_heads_back(roots, done)
    if fused:
        from hfpatch.losses.fused_heads import exchange

        exchange(fused, done)
    _remember(roots, decided, asked, done)


def _fused_heads_back(roots: list[tuple[str, nn.Module]], done: list[Callable[[], object]]) -> int:
    """Put the forwards of fused heads back; how many were ours. Appends what undoes it."""
    models = list(filter(swap.may_have_fused_head, _modules(roots)))
    if not models:
        return 0
    from hfpatch.losses.taken import put_back

    return sum(put_back(module, done) for module in models)


def _fused_head_of(module: nn.Module) -> Swap | None:
    if not swap.may_have_fused_head(module):
        return None
    from hfpatch.losses.taken import entry_of

    return entry_of(module)


def _made_whole(path: str, head: nn.Module) -> list[str]:
    from hfpatch.leaves.head import made_whole

    return list(made_whole(path, head))


def _heads_in_vain(roots: list[tuple[str, nn.Module]], swaps: Sequence[Swap]) -> list[str]:
    """Notes on heads among `swaps` whose weight a forward above takes, or may, or whose logits it
    writes to. It is read at each asking: TRL's trainers put theirs on a model that is patched."""
    if not any(s.op == HEAD for s in swaps):
        return []
    paths = dict(_paths(roots))
    heads, served = (
        {id(paths[s.path]) for s in swaps if s.op == op and s.path in paths}
        for op in (HEAD, FUSED_HEAD)
    )
    from hfpatch.losses.taken import takers
    from hfpatch.losses.written import writers

    return [
        text
        for owner, head, text in (*takers(paths.items()), *writers(paths.items()))
        if id(head) in heads and id(owner) not in served
    ]


def restore(model: Any) -> int:
    """Take back every swap in `model`; returns how many there were.

    Each module's `__dict__` is as it was before `apply`. A model that was not patched stays as is.
    """
    from hfpatch.decoding import kept
    from hfpatch.graphs import kept as graphs

    _, roots = _roots(model)
    try:
        # first: weights that were made one take memory of their own again
        graphs.release(_modules(roots))
        kept.release(_modules(roots))
    finally:
        count = _take_back(roots)
    return count


def _take_back(roots: list[tuple[str, nn.Module]]) -> int:
    """Restore every module; what the last apply left is forgotten when all of them are."""
    from hfpatch.planning import gain as gains

    try:
        count = _fused_heads_back(roots, [])
        return count + swap.restore(_modules(roots))
    finally:  # an interrupt comes when all are restored, another error when one could not be
        if all(swap.swapped(module) is None for module in _modules(roots)):
            gains.release(root for _, root in roots)
            _forget(roots)


def arguments_of(model: Any) -> dict[str, Any] | None:
    """The arguments of the `apply` that patched `model`; None if nothing in it is patched.

    Raises:
        ValueError: it is patched, but not by one `apply` of the whole of it.
    """
    name, roots = _roots(model)
    if not any(swap.swapped(module) or _fused_head_of(module) for module in _modules(roots)):
        return None
    asked = [_noted_of(root).asked for _, root in roots]
    if asked[0] is None or any(one is not asked[0] for one in asked):
        raise ValueError(
            f"`{name}` is patched already, not by one `apply` of the whole of it, so that state "
            "could not be brought back; call `hfpatch.restore` on it first"
        )
    return asked[0]


def status(model: Any) -> Report:
    """What is patched in `model` now, read off its modules (so also right for a copied model).

    The mode is that of its swaps, "mixed" where they differ: each says its own. The skips are those
    that the last apply of each module gave; of a copy none is known. A swap that somebody wrote
    over since, as `kernels.kernelize` does, is among them, of kind "foreign".
    """
    from hfpatch.blocks import flash3
    from hfpatch.decoding import kept
    from hfpatch.graphs import kept as graphs
    from hfpatch.planning import gain as gains
    from hfpatch.proof.proofs import autocast_notes
    from hfpatch.training.adapted_by import stepping_aside

    name, roots = _roots(model)
    swaps: list[Swap] = []
    skips: list[Skip] = []
    candidates: list[Candidate] = []
    adapters = []
    whole: list[str] = []
    for path, module in _paths(roots):
        mark, said = swap.swapped(module), _noted_of(module).said
        if (entry := _fused_head_of(module)) is not None:
            swaps.append(replace(entry, path=path))
            said = None
        if mark is not None and isinstance(mark.details, Candidate):
            candidates.append(mark.details.now(path, module))  # type: ignore[attr-defined]
        elif mark is not None:
            swaps.append(replace(mark.details, path=path))
            if mark.details.op == HEAD:
                whole += _made_whole(path, module)
            adapters.append(mark.adapter)
        elif isinstance(said, Skip):
            skips.append(replace(said, path=path))
        elif said is not None and "forward" in module.__dict__:
            # a restored module holds no forward, one that was written over holds somebody's
            skips.append(Skip(path, said.class_name, "foreign", OVERWRITTEN))
    known = [p for _, root in roots if (p := _noted_of(root).plan) is not None]
    modes = {s.mode for s in swaps} or {p.mode for p in known} or {"inference"}
    notes = [
        *(note for p in known for note in p.notes),
        *(note for _, root in roots for note in graphs.notes(root)),
        *(note for _, root in roots for note in kept.notes(root)),
        *(note for _, root in roots for note in stepping_aside(root)),
        *whole,
        *_heads_in_vain(roots, swaps),
        *autocast_notes(adapters),
        *(flash3.in_use() if candidates or any(s.op == "block" for s in swaps) else ()),
    ]
    decided = Plan(
        name,
        modes.pop() if len(modes) == 1 else "mixed",
        tuple(swaps),
        tuple(skips),
        tuple(dict.fromkeys(notes)),
        candidates=tuple(candidates),
        times=tuple(t for _, root in roots for t in (*graphs.times(root), *gains.times(root))),
    )
    return Report(decided, applied=True)


def decide(
    name: str,
    roots: list[tuple[str, nn.Module]],
    settings: Settings,
    cuda_graphs: bool | int | str = False,
    decoding: str | bool = "auto",
    blocks: str | bool | None = "auto",
) -> tuple[Plan, list[Prepared], list[str]]:
    """The plan for modules by the prefix of their paths, what carries it out, and what to warn of:
    things that were asked for in vain."""
    from hfpatch.decoding import offer
    from hfpatch.graphs import kept as graphs
    from hfpatch.planning.planner import make_plan

    limit, auto = graphs.check_limit(cuda_graphs)
    if limit and settings.training:
        raise ValueError("`cuda_graphs` needs mode='inference': a graph records no gradient")
    wanted = offer.check_choice(decoding)
    blocks = "auto" if blocks is None else blocks
    if not isinstance(blocks, bool) and blocks != "auto":
        raise TypeError(f"`blocks` must be 'auto', True or False, got {blocks!r}")
    decided, prepared = make_plan(roots, name, settings)
    no_graphs: list[str] = []
    if settings.training:
        from hfpatch.training.offer import offer as offer_layers

        layers, skipped = offer_layers(roots, settings)
        taken = {id(p.module) for p in prepared}
        prepared = [*(p for p in layers if id(p.module) not in taken), *prepared]
        swaps = tuple(p.swap for p in prepared)
        decided = replace(decided, swaps=swaps, skips=(*skipped, *decided.skips))
    candidates, notes = _candidates(roots, settings, prepared, blocks) if blocks else ([], [])
    marks = tuple(p.swap.now(p.swap.path, p.module) for p in candidates)
    in_vain = [*offer.in_vain(decoding, settings), *_blocks_in_vain(blocks, settings)]
    decided = replace(decided, candidates=marks, notes=(*decided.notes, *notes, *in_vain))
    if wanted:
        said = len(settings.sources.notes)
        steps, skips = offer.offer(roots, settings, wanted)
        taken = {id(p.module) for p in prepared}
        prepared = [*(p for p in steps if id(p.module) not in taken), *prepared]
        swaps = tuple(p.swap for p in prepared)
        notes = settings.sources.notes[said:]
        decided = replace(
            decided,
            swaps=swaps,
            skips=(*skips, *decided.skips),
            notes=(*decided.notes, *notes),
        )
    if limit:
        from hfpatch.graphs import recording

        once: dict[int, tuple[str, nn.Module]] = {}  # two components may be one module
        for prefix, root in roots:
            once.setdefault(id(root), (prefix, root))
        elsewhere = settings.sources.assumed is not None
        recorded, no_graphs = recording.prepare(
            list(once.values()), prepared, limit, elsewhere, auto
        )
        with_graphs = {id(p.module) for p in recorded}
        prepared = [*recorded, *(p for p in prepared if id(p.module) not in with_graphs)]
        swaps = tuple(p.swap for p in prepared)
        decided = replace(decided, swaps=swaps, notes=(*decided.notes, *no_graphs))
    decided = replace(decided, notes=(*_selecting_none(decided, settings), *decided.notes))
    return decided, [*prepared, *candidates], [*in_vain, *([] if auto else no_graphs)]


def _selecting_none(decided: Plan, settings: Settings) -> Iterator[str]:
    """Notes on patterns that select nothing at all."""
    selected = settings.left_out | {s.path for s in decided.swaps}
    selected |= {c.path for c in decided.candidates}
    selected |= {s.path for s in decided.skips if s.kind == "excluded"}
    for paths, note in settings.selecting_none:
        if selected.isdisjoint(paths):
            yield note


def _blocks_in_vain(blocks: str | bool, settings: Settings) -> list[str]:
    """What to say of `blocks=True` with arguments under which none is captured."""
    from hfpatch.regions.wanted import refusal

    why = refusal(settings) if blocks is True else None
    return [] if why is None else [f"`blocks=True` captures nothing: {why}"]


def _candidates(
    roots: list[tuple[str, nn.Module]],
    settings: Settings,
    prepared: list[Prepared],
    blocks: str | bool,
) -> tuple[list[Any], list[str]]:
    """The blocks that are captured at their first call, by default those that lie on a GPU or are
    of diffusers; and notes on those that are not."""
    from hfpatch.regions.wanted import may_lie_on, refusal

    # A decoding step takes longer to capture than to run, and nobody has timed what it gains.
    auto = blocks == "auto"
    if refusal(settings) is not None or not may_lie_on((m for _, m in roots), settings, auto):
        return [], []
    from hfpatch.regions.offer import offer  # what captures is a third of all that `apply` imports

    return offer(roots, settings, prepared, auto)


def _remember(
    roots: list[tuple[str, nn.Module]],
    decided: Plan,
    asked: dict[str, Any],
    done: list[Callable[[], object]],
) -> None:
    """Keep what was decided, in place of what was before; appends what undoes it."""
    by_path: dict[str, Swap | Skip] = {s.path: s for s in decided.skips}
    by_path |= {s.path: s for s in decided.swaps}
    wholes = {id(root) for _, root in roots}
    before, now = [], []
    for path, module in _paths(roots):
        whole = id(module) in wholes
        said = by_path.get(path)
        new = _Noted(said, decided, asked) if whole else None if said is None else _Noted(said)
        before.append((module, _noted.get(module)))
        now.append((module, new))
    done.append(partial(_note, before))
    _note(now)


def _noted_of(module: nn.Module) -> _Noted:
    return _noted.get(module) or _Noted()


def _forget(roots: list[tuple[str, nn.Module]]) -> None:
    _note([(module, None) for module in _modules(roots)])


def _note(each: Sequence[tuple[nn.Module, _Noted | None]]) -> None:
    for module, noted in each:
        if noted is None:
            _noted.pop(module, None)
        else:
            _noted[module] = noted


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _commit(
    roots: list[tuple[str, nn.Module]],
    prepared: list[Prepared],
    remember: Callable[[list[Callable[[], object]]], None],
) -> None:
    keep = {id(p.module) for p in prepared}
    stale = [m for m in _modules(roots) if id(m) not in keep and swap.swapped(m) is not None]
    swap.commit(stale, [_fresh(p) for p in prepared], remember)


def _fresh(p: Prepared) -> swap.Fresh:
    return swap.Fresh(p.module, p.make, p.swap, p.packs, p.brings, p.direct)


def _modules(roots: list[tuple[str, nn.Module]]) -> Iterator[nn.Module]:
    return (module for _, module in _paths(roots))


def modules_of(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a model or a pipeline once, under the first of its paths.

    Raises:
        TypeError: it is neither.
    """
    return _paths(_roots(model)[1])


@dataclass(frozen=True)
class Roots:
    """The modules that `apply` patches in a model, by the prefix of their paths. What takes a model
    takes these in its place: a pipeline may let go of some (`pipe.transformer = None`)."""

    name: str
    each: list[tuple[str, nn.Module]]

    def and_those_of(self, model: Any) -> Roots:
        """These, and what has come to the model since."""
        try:
            now = _roots(model)[1]
        except TypeError:  # nothing is left in it
            now = []
        held = {id(root) for _, root in self.each}
        return Roots(self.name, [*self.each, *((p, m) for p, m in now if id(m) not in held)])


def roots_of(model: Any) -> Roots:
    """Those of a model, which is a module or a pipeline.

    Raises:
        TypeError: it is neither.
    """
    return Roots(*_roots(model))


def _paths(roots: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under the first of its paths: components may share some."""
    seen: set[int] = set()
    for prefix, root in roots:
        for path, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield _join(prefix, path), module


def _roots(model: Any) -> tuple[str, list[tuple[str, nn.Module]]]:
    """(name, [(path prefix, module)]) of a module or a pipeline."""
    if isinstance(model, Roots):
        return model.name, model.each
    name = type(model).__name__
    if isinstance(model, nn.Module):
        return name, [("", model)]
    components = getattr(model, "components", None)  # diffusers.DiffusionPipeline
    if isinstance(components, Mapping):
        roots = [(k, m) for k, m in components.items() if isinstance(m, nn.Module)]
        if roots:
            return name, roots
    inner = getattr(model, "model", None)  # transformers.Pipeline
    if isinstance(inner, nn.Module):
        return f"{name}({type(inner).__name__})", [("", inner)]
    raise TypeError(
        "`model` must be a torch.nn.Module, a diffusers pipeline or a transformers pipeline, got "
        f"{type(model).__name__}"
    )
