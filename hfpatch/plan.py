"""What would be swapped and why: sites, swaps, skips. Nothing here writes to a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hfpatch import kernelized, packing, probe, registry, swap
from hfpatch.errors import HfpatchError, PatchError
from hfpatch.ops import KERNEL_DTYPES, OPS
from hfpatch.patches.base import (
    Contract,
    Family,
    Forward,
    Subject,
    class_of,
    code_of,
    is_dtensor,
    is_hooked,
)
from hfpatch.patches.blocks.base import BlockProof, BlockSubject
from hfpatch.patches.blocks.chain import Chain
from hfpatch.patches.custom import CustomSubject
from hfpatch.sources import Sources

MODES = ("inference", "training")
#: `Skip.kind` to its meaning, for the report and the docs.
SKIP_KINDS = {
    "excluded": "left out by `exclude=`",
    "off": "its op is switched off by `kernels=`",
    "unavailable": "no source named by `kernels=` gave a kernel for its op",
    "no gain": "the original is already as fast",
    "unsupported": "a class, dtype, device or state without a kernel",
    "mismatch": "the original computes something else",
    "rejected": "the kernel failed verification",
    "foreign": "somebody else replaced the module's forward",
}


@dataclass(frozen=True)
class Swap:
    """One module whose forward a kernel takes over.

    `max_abs_error` and `max_rel_error` are the probe's, in the model's own dtypes: kernel against
    original, relative to each row's largest value; 0 without `verify`.
    """

    path: str
    class_name: str
    op: str
    formula: str
    source: str
    version: str
    devices: tuple[str, ...]
    max_abs_error: float
    max_rel_error: float


@dataclass(frozen=True)
class Skip:
    """One nominated module that stays as it is, and why (`kind` is a key of SKIP_KINDS)."""

    path: str
    class_name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decisions for one model. `print(plan)` shows them as a table."""

    model: str
    mode: str
    swaps: tuple[Swap, ...]
    skips: tuple[Skip, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        from hfpatch.report import as_text

        return as_text(self, applied=False)

    def to_json(self, indent: int | None = 2) -> str:
        """Settings, versions, every swap and skip, as JSON."""
        from hfpatch.report import Report

        return Report(self, applied=False).to_json(indent)

    def _repr_html_(self) -> str:
        from hfpatch.report import as_html

        return as_html(self, applied=False)


@dataclass(frozen=True)
class Settings:
    """The arguments of `apply`, checked."""

    sources: Sources
    mode: str = "inference"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    verify: bool = True
    strict: bool = False
    assume_device: str | None = None  # plan weights on the meta device as if they were there

    @property
    def training(self) -> bool:
        return self.mode == "training"


def check_settings(
    mode: str,
    kernels: Any,
    include: Any,
    exclude: Any,
    verify: bool,
    strict: bool,
    hub: Any = None,
) -> Settings:
    """Settings from the raw arguments.

    Raises:
        ValueError, TypeError: an argument is not what it must be; the message says what it may be.
    """
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return Settings(
        Sources.parse(kernels, strict, hub),
        mode,
        None if include is None else _patterns("include", include),
        () if exclude is None else _patterns("exclude", exclude),
        bool(verify),
        bool(strict),
    )


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for p in patterns:
        if not isinstance(p, str):
            raise TypeError(
                f"`{name}` must be a glob or a sequence of globs over module paths and class "
                f"names, got an item of type {type(p).__name__}"
            )
    return patterns


def _matches(patterns: Sequence[str], path: str, class_name: str) -> bool:
    return any(fnmatch.fnmatchcase(path, p) or fnmatch.fnmatchcase(class_name, p) for p in patterns)


@dataclass(frozen=True)
class Prepared:
    """A swap and how to make its adapter."""

    module: nn.Module
    make: Callable[[], Forward]
    swap: Swap
    packs: tuple[tuple[nn.Module, ...], ...] = ()  # linear layers to pack, see `hfpatch.packing`
    block: BlockSubject | None = None
    #: Makes the adapter over another forward than the class's, where that is possible.
    over: Callable[[Forward], Forward] | None = None


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
    with torch.device("cpu"):  # whatever the user's default device is: probes draw on the CPU
        return _make_plan(roots, name, settings)


def _make_plan(
    roots: Sequence[tuple[str, nn.Module]], name: str, settings: Settings
) -> tuple[Plan, list[Prepared]]:
    draft = _Draft(settings)
    sites = [
        site for prefix, root in roots for site in _sites(prefix, root, settings.assume_device)
    ]
    for pattern in (*(settings.include or ()), *settings.exclude):
        if not any(_matches((pattern,), s.path, class_of(s.module).__name__) for s in sites):
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


@dataclass(frozen=True)
class Site:
    """A module of the model and where it runs.

    `execution` is the device type that an offload hook, on it or above, moves its inputs to, if one
    does; `home` the device type of the nearest weights, its own or those of a module above it.
    `gathered` says that FSDP2, on it or above, makes its DTensors plain parameters for its forward.
    """

    path: str
    module: nn.Module
    execution: str | None
    home: str
    gathered: bool = False


def _sites(prefix: str, root: nn.Module, assumed: str | None) -> Iterator[Site]:
    execution: dict[str, str | None] = {}
    home: dict[str, str] = {}
    gathered: dict[str, bool] = {}
    for path, module in root.named_modules():
        above = path.rpartition(".")[0]
        gathered[path] = _is_fully_sharded(module) or (gathered[above] if path else False)
        execution[path] = _execution_device(module) or (execution[above] if path else assumed)
        own = next((p.device.type for p in module.parameters()), None)
        home[path] = own or (home[above] if path else "cpu")
        full = f"{prefix}.{path}" if prefix and path else prefix or path
        yield Site(full, module, execution[path], home[path], gathered[path])


def _is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on it; nothing of torch.distributed is imported for this."""
    return class_of(module) is not type(module) and hasattr(module, "unshard")


def _execution_device(module: nn.Module) -> str | None:
    """Device type that accelerate's hook on this module moves its inputs to."""
    hook = module.__dict__.get("_hf_hook")
    for h in getattr(hook, "hooks", (hook,)):
        device = getattr(h, "execution_device", None)
        if device is not None:
            if isinstance(device, int):
                return "cuda"
            return torch.device(device).type
    return None


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
        if settings.include is not None and not _matches(settings.include, path, class_name):
            return
        if _matches(settings.exclude, path, class_name):
            return skip("excluded", "matched by `exclude`")
        if isinstance(subject, str):
            return skip("unsupported", subject)
        try:
            outcome = _unfit(site, subject) or _prepare(site, family, subject, settings)
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
            from hfpatch.errors import VerificationError

            raise VerificationError(f"`{path}` ({class_name}): {outcome.reason}")
        return skip(outcome.kind, outcome.reason)


def _unfit(site: Site, subject: Subject) -> probe.Refusal | None:
    """What rules a module out before anything is run."""
    module = site.module
    foreign = swap.foreign_forward(module)
    if foreign is not None:
        return probe.Refusal("foreign", foreign)
    if torch.nn.utils.parametrize.is_parametrized(module):
        return probe.Refusal("unsupported", "its parameters are parametrized")
    hooked = [n for n in subject.bypassed if is_hooked(module._modules[n])]  # type: ignore[arg-type]
    if hooked:
        return probe.Refusal(
            "unsupported", f"child `{hooked[0]}` has hooks, which the fused forward would not run"
        )
    if isinstance(subject, CustomSubject):
        return None
    for child in subject.covers():
        if (foreign := swap.foreign_forward(child)) is not None:
            return probe.Refusal(
                "unsupported",
                f"the fused forward would not run a `{type(child).__name__}` inside: {foreign}",
            )
    why = _partitioned(site, subject)
    if why is None and isinstance(subject, BlockSubject) and _context_parallel(module):
        why = "its attention is split over several GPUs (context parallel)"
    if why is not None:
        return probe.Refusal("unsupported", why)
    for name, p in module._parameters.items():
        if p is None:
            continue
        if not is_dtensor(p) and type(p) not in (nn.Parameter, torch.Tensor):
            return probe.Refusal("unsupported", f"`{name}` is a {type(p).__name__}")
        if p.dtype not in KERNEL_DTYPES:
            return probe.Refusal(
                "unsupported",
                f"`{name}` is {p.dtype}; the kernels take "
                f"{', '.join(str(t).removeprefix('torch.') for t in KERNEL_DTYPES)}",
            )
    return None


def _context_parallel(block: nn.Module) -> bool:
    """Whether diffusers' `enable_parallelism` splits the attention of a block."""
    processors = [getattr(m, "processor", None) for m in block.modules()]
    return any(getattr(p, "_parallel_config", None) is not None for p in processors)


def _partitioned(site: Site, subject: Subject) -> str | None:
    """Why parameters of which each process holds a part cannot be read, if they cannot.

    FSDP2 gathers them before the forward. Nobody does so for tensor parallel, and DeepSpeed's hooks
    of ZeRO-3 stand on each module inside a block as well. Projections are called, not read.
    """
    whole = isinstance(subject, BlockSubject)
    for name, p in site.module.named_parameters(recurse=whole):
        if is_dtensor(p) and not site.gathered:
            return f"`{name}` is a DTensor: a part of it is here"
        if p.numel() == 0 and p.device.type != "meta":
            return (
                f"`{name}` is empty, as DeepSpeed's ZeRO-3 leaves it between calls; call `apply` "
                "before the model is partitioned"
            )
    return None


# One proof serves every module of equal code and settings, in every model of the process.
_contracts: dict[Any, tuple[Contract, dict[str, probe.Proof | probe.Refusal]]] = {}


def forget_proofs() -> None:
    """Drop every cached proof; the next `apply` probes afresh."""
    _contracts.clear()
    _blocks.clear()
    _identified.clear()


def _probe_devices(site: Site) -> tuple[str, ...] | probe.Refusal:
    """Device types to prove on: where the weights are, and where a hook will move the input."""
    found = {site.execution} if site.execution is not None else set()
    for child in site.module.modules():
        hook = _execution_device(child) or site.execution
        for p in child._parameters.values():
            if p is not None:  # an offload hook brings weights that are on the meta device now
                found.add(hook if hook is not None and p.is_meta else p.device.type)
    found = found or {site.home}
    if "meta" in found:
        return probe.Refusal(
            "unsupported", "its weights are on the meta device; load them, then call apply again"
        )
    other = found - {"cpu", "cuda"}
    if other:
        return probe.Refusal("unsupported", f"no kernel for device {', '.join(sorted(other))}")
    return tuple(sorted(found))


def _prepare(
    site: Site, family: Family, subject: Subject, settings: Settings
) -> Prepared | probe.Refusal:
    path, module = site.path, site.module
    original = type(module).forward
    if isinstance(subject, CustomSubject):
        return _prepare_custom(path, module, subject, settings)
    devices = _probe_devices(site)
    if isinstance(devices, probe.Refusal):
        return devices
    if isinstance(subject, BlockSubject):
        return _prepare_block(path, module, subject, devices, settings)
    contract, proofs = _contract(module, family, subject, devices, settings)
    for device in devices:
        if device not in proofs:
            proofs[device] = probe.prove(
                subject,
                settings.sources,
                device,
                verify=settings.verify,
                training=settings.training,
            )
            if isinstance(proof := proofs[device], probe.Proof):
                probe.fill(contract, proof, device)
    refusals = [p for d in devices if isinstance(p := proofs[d], probe.Refusal)]
    good = {d: p for d in devices if isinstance(p := proofs[d], probe.Proof)}
    if not good:
        return refusals[0]
    proof = good.get(site.execution or "", next(iter(good.values())))
    formula = proof.formulas[subject.main_combo()]
    errors = [p.errors.get(subject.main_combo(), (0.0, 0.0)) for p in good.values()]
    entry = Swap(
        path,
        class_of(module).__name__,
        formula.op,
        str(formula),
        proof.kernels[0].source,
        proof.kernels[0].version,
        tuple(good),
        max(e[0] for e in errors),
        max(e[1] for e in errors),
    )
    return Prepared(module, lambda: subject.forward(original, contract), entry)


# Like `_contracts`, for blocks, which are proven as a whole.
_blocks: dict[Any, tuple[Contract, dict[str, BlockProof | str]]] = {}


def _prepare_block(
    path: str,
    module: nn.Module,
    subject: BlockSubject,
    devices: tuple[str, ...],
    settings: Settings,
) -> Prepared | probe.Refusal:
    if settings.training:
        return probe.Refusal("unsupported", "the fused block has no backward")
    sources = settings.sources
    for op in subject.ops:
        if (why := sources.missing(op, block=True)) is not None:
            return probe.Refusal("unavailable", why)
    kernels = tuple(
        (op, k.source, k.version, sources.explicit(op))
        for op in subject.ops
        if (k := sources.kernel(op, block=True)) is not None
    )
    key = (code_of(module), subject.key, subject.main_combo(), kernels)
    if key not in _blocks:
        try:  # a lookalike's constructor may take anything
            tiny = subject.tiny(torch.Generator().manual_seed(0))
        except Exception as e:
            return probe.Refusal(
                "unsupported", f"no small copy of it could be made: {type(e).__name__}: {e}"
            )
        if (why := subject.unlike(tiny)) is not None:
            return probe.Refusal("unsupported", why)
        stand_in = type(subject)(tiny)

        def prove_late(device: str, dtype: torch.dtype) -> str | None:
            proof = stand_in.prove_block(sources, device, dtype)
            if isinstance(proof, str):
                return proof
            _fill_block(contract, proof, device)
            return None

        name = class_of(module).__name__
        contract = Contract(name, prove_late, training=False, by_dtype=True)
        _blocks[key] = (contract, {})
    contract, proofs = _blocks[key]
    for device in devices:
        if device not in proofs:
            proof = proofs[device] = subject.prove_block(sources, device)
            if isinstance(proof, BlockProof):
                _fill_block(contract, proof, device)
    good = {d: p for d in devices if isinstance(p := proofs[d], BlockProof)}
    if not good:
        reason = str(proofs[devices[0]])
        kind = "off" if "switched off" in reason else "rejected"
        return probe.Refusal("unsupported" if "no compiled" in reason else kind, reason)
    entry = Swap(
        path,
        class_of(module).__name__,
        "block",
        subject.title,
        ", ".join(sorted({k[1] for k in kernels})),
        kernels[0][2],
        tuple(good),
        max(p.max_abs_error for p in good.values()),
        max(p.max_rel_error for p in good.values()),
    )
    original = type(module).forward
    packs = tuple(tuple(g) for g in subject.packs() if packing.can_pack(g))
    return Prepared(
        module, lambda: subject.forward(original, contract), entry, packs, block=subject
    )


def _fill_block(contract: Contract, proof: BlockProof, device: str) -> None:
    contract.table(device)[proof.dtype, None] = proof.forward
    contract.proven(device, proof.dtype)


def _prepare_custom(
    path: str, module: nn.Module, subject: CustomSubject, settings: Settings
) -> Prepared | probe.Refusal:
    errors: tuple[float, float] | str = (0.0, 0.0)
    if settings.training and not subject.family.differentiable:
        return probe.Refusal("unsupported", "its registered forward is not differentiable")
    if settings.verify:
        try:
            errors = subject.compare()
        except Exception as e:
            errors = f"comparing it with the original failed: {type(e).__name__}: {e}"
    if isinstance(errors, str):
        return probe.Refusal("rejected", errors)
    entry = Swap(
        path, class_of(module).__name__, subject.op, subject.title, subject.source, "", (), *errors
    )
    contract = Contract(class_of(module).__name__, lambda device, dtype: None, settings.training)
    original = type(module).forward
    over = (lambda inner: subject.forward(inner, contract)) if subject.op == "recall" else None
    return Prepared(module, lambda: subject.forward(original, contract), entry, over=over)


# Which ops a module may be, where that was asked before its kernels.
_identified: dict[Any, set[str]] = {}


def _ops(
    module: nn.Module,
    family: Family,
    subject: Subject,
    devices: tuple[str, ...],
    settings: Settings,
) -> set[str]:
    """The ops whose kernels are needed: before a download, only those that the module can be."""
    ops = {f.op for f in subject.formulas()}
    if len(ops) == 1 or not any(settings.sources.remote(op) for op in ops):
        return ops
    key = (code_of(module), family.name, subject.key, subject.main_combo(), devices)
    if key not in _identified:
        _identified[key] = set().union(*(probe.matching_ops(subject, d) for d in devices))
    return _identified[key]


def _contract(
    module: nn.Module,
    family: Family,
    subject: Subject,
    devices: tuple[str, ...],
    settings: Settings,
) -> tuple[Contract, dict[str, probe.Proof | probe.Refusal]]:
    ops = _ops(module, family, subject, devices, settings)
    kernels = tuple(
        # another project's may not do, and then what follows it counts
        (op, k.source, k.version, settings.sources.explicit(op))
        + (settings.sources.order(op) if k.adapted else ())
        if (k := settings.sources.kernel(op)) is not None
        else (op, settings.sources.missing(op))
        for op in OPS
        if op in ops
    )
    key = (
        code_of(module),
        family.name,
        subject.key,
        subject.main_combo(),
        kernels,
        settings.training,
        settings.verify,
    )
    if key not in _contracts:
        # Held by the cache, so it must not hold the model: a replica stands in for the module.
        stand_in = family.examine(
            subject.replica(subject.main_combo(), torch.device("cpu"), torch.Generator())
        )

        def prove_late(device: str, dtype: torch.dtype) -> str | None:
            if not isinstance(stand_in, Subject):
                return "its replica could not be examined"
            proof = probe.prove(
                stand_in,
                settings.sources,
                device,
                verify=settings.verify,
                training=settings.training,
            )
            if isinstance(proof, probe.Refusal):
                return proof.reason
            probe.fill(contract, proof, device)
            return None

        contract = Contract(class_of(module).__name__, prove_late, settings.training)
        _contracts[key] = (contract, {})
    return _contracts[key]
