"""Proofs, one for all modules of equal code and settings, and the swaps that they allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfpatch import packing
from hfpatch.blocks.base import BlockProof, BlockSubject
from hfpatch.direct_calls import Direct, direct_call
from hfpatch.errors import FAILURES
from hfpatch.kernels.sources import Kernel
from hfpatch.leaves.activations import ActivationSubject
from hfpatch.leaves.custom import CustomSubject
from hfpatch.leaves.glu import GatedSubject
from hfpatch.leaves.norms import NormSubject, quick_of
from hfpatch.leaves.recall import RecallSubject, compared
from hfpatch.ops import OPS
from hfpatch.planning.plan import Refusal, Swap
from hfpatch.planning.settings import Settings
from hfpatch.planning.sites import Site, probe_devices
from hfpatch.proof import probe
from hfpatch.proof.contract import Contract
from hfpatch.proof.copies import CannotReplicateError
from hfpatch.proof.keys import Same, code_of, held_by
from hfpatch.proof.library import odd_code
from hfpatch.proof.proving import float32_default
from hfpatch.proof.subject import Combo, Family, Formula, Forward, Subject, class_of
from hfpatch.proof.surroundings import functions_of_torch, replaced_function
from hfpatch.reading.leaf import still_holds
from hfpatch.text import told


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
    #: Methods of the instance that come with it, by name.
    brings: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    direct: Direct | None = None
    #: Of a norm or an activation: what it computes, and the names of its weight and bias.
    leaf: tuple[Formula, str | None, str | None] | None = None
    #: Of a gated MLP: its activation, which it bypasses, and what that computes.
    act: tuple[nn.Module, Formula] | None = None


_V = TypeVar("_V")


class _Recent(dict[Any, _V]):
    """The last that were added: modules that are no more leave no proofs for ever. An adapter has
    its contract anyway; what was dropped is proven again at the next `apply`."""

    MOST = 1024

    def __setitem__(self, key: Any, value: _V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.MOST:
            del self[next(iter(self))]


# One proof serves every module of equal code and settings, in every model of the process.
_contracts: _Recent[tuple[Contract, dict[str, probe.Proof | Refusal]]] = _Recent()
# Like `_contracts`, for blocks, which are proven as a whole.
_blocks: _Recent[tuple[Contract, dict[str, BlockProof | Refusal]]] = _Recent()
# Which ops a module may be, where that was asked before its kernels.
_identified: _Recent[set[str]] = _Recent()
# The contract of each adapter, whose own attributes hooks copy to themselves.
_contract_of: WeakKeyDictionary[Forward, Contract] = WeakKeyDictionary()

_CHANGED = "its class, or an object that it holds, was changed since; call `hfpatch.apply` again"


def forget_proofs() -> None:
    """Drop every cached proof; the next `apply` probes afresh."""
    from hfpatch.foreign import battery
    from hfpatch.regions import offer

    offer.forget()
    _contracts.clear()
    _blocks.clear()
    _identified.clear()
    compared.clear()
    battery.forget()


def prepare(site: Site, family: Family, subject: Subject, settings: Settings) -> Prepared | Refusal:
    """The swap of a module, if its kernel is proven on a device where the module may run."""
    path, module = site.path, site.module
    original = type(module).forward
    if isinstance(subject, CustomSubject):
        return _prepare_custom(path, module, subject, settings)
    devices = probe_devices(site)
    if isinstance(devices, Refusal):
        return devices
    if isinstance(subject, BlockSubject):
        return _prepare_block(path, module, subject, devices, settings)
    try:
        contract, proofs = _contract(module, family, subject, devices, settings)
    except CannotReplicateError as e:
        return Refusal("unsupported", str(e))
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
    refusals = [p for d in devices if isinstance(p := proofs[d], Refusal)]
    good = {d: p for d in devices if isinstance(p := proofs[d], probe.Proof)}
    if not good:
        return refusals[0]
    proof = good.get(site.execution or "", next(iter(good.values())))
    for note in (n for p in good.values() for n in p.notes):
        settings.sources.note(note)
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
    return Prepared(
        module,
        lambda: _adapter(subject, original, contract),
        entry,
        leaf=_leaf(subject, formula),
        act=_act(subject, formula),
        direct=_direct(subject, proof.kernels[0]),
    )


def _direct(subject: Subject, kernel: Kernel) -> Direct | None:
    """What calls a norm past `Module._call_impl`, where its kernel's package can do that."""
    made = getattr(kernel.calls, "direct", None)
    call = made() if made is not None and isinstance(subject, NormSubject) else None
    if call is None:
        return None

    def direct(forward: Forward, adapter: Forward) -> Callable[..., Any] | None:
        quick = quick_of(adapter)
        return None if quick is None else direct_call(call, quick, forward)

    return direct


def _act(subject: Subject, formula: Formula) -> tuple[nn.Module, Formula] | None:
    name = getattr(subject, "act", None)
    activation = formula.params.get("activation")
    if not isinstance(subject, GatedSubject) or name is None or activation not in _ACTIVATIONS:
        return None
    if formula.op == "gated_clamped":  # the clamp may be the activation's own
        return None
    module = subject.module._modules.get(name)
    return None if module is None else (module, _ACTIVATIONS[activation])


#: Activations of gated products, as ops of their own.
_ACTIVATIONS = {
    "silu": Formula("silu", {}),
    "gelu": Formula("gelu", {"approximate": "none"}),
    "gelu_tanh": Formula("gelu", {"approximate": "tanh"}),
    "gelu_sigmoid": Formula("gelu", {"approximate": "sigmoid"}),
}


def _leaf(subject: Subject, formula: Formula) -> tuple[Formula, str | None, str | None] | None:
    """What captured blocks know of a leaf that they bypass."""
    if isinstance(subject, NormSubject) and formula.op in ("rms_norm", "layer_norm"):
        return formula, subject.weight, subject.bias
    plain = isinstance(subject, ActivationSubject) and subject.projection is None
    if plain and formula.op in ("gelu", "silu"):
        return formula, None, None
    return None


def _adapter(subject: Subject, original: Forward, contract: Contract) -> Forward:
    forward = subject.forward(original, contract)
    _contract_of[forward] = contract
    return forward


def stands_for(outer: Forward, inner: Forward) -> None:
    """`outer` is an adapter around `inner`, of the same contract."""
    if (contract := _contract_of.get(inner)) is not None:
        _contract_of[outer] = contract


def autocast_notes(adapters: Iterable[Forward]) -> Iterator[str]:
    """What the calls of these under autocast were computed by, each said once."""
    for contract in dict.fromkeys(c for f in adapters if (c := _contract_of.get(f)) is not None):
        yield from contract.notes()


def _contract(
    module: nn.Module,
    family: Family,
    subject: Subject,
    devices: tuple[str, ...],
    settings: Settings,
) -> tuple[Contract, dict[str, probe.Proof | Refusal]]:
    ops = _ops(module, family, subject, devices, settings)
    kernels = tuple(
        # another project's may not do, and then what follows it counts
        (op, k.source, k.version, settings.sources.explicit(op))
        + (settings.sources.order(op) if k.adapted else ())
        + _reads(k)
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
        settings.sources.assumed,
    )
    found = _contracts.get(key)
    if found is not None and not all(map(_holds, found[1].values())):
        found = None  # a function or a constant that its code uses was replaced since
    if found is None:
        # Held by the cache, so it must not hold the model: a replica stands in for the module.
        with float32_default():
            stand_in = family.examine(
                subject.replica(subject.main_combo(), torch.device("cpu"), torch.Generator())
            )
        held = held_by((module, *subject.covers()))
        as_made = (_key_of(stand_in), held())
        asked = {"verify": settings.verify, "training": settings.training}

        def still() -> Subject | str:
            """The stand-in, or why it is none."""
            if not isinstance(stand_in, Subject):
                return "its replica could not be examined"
            return stand_in if (_key_of(stand_in), held()) == as_made else _CHANGED

        def prove_late(device: str, dtype: torch.dtype) -> str | None:
            if isinstance(now := still(), str):
                return now
            proof = probe.prove(now, settings.sources, device, **asked)
            if isinstance(proof, Refusal):
                return proof.reason
            probe.fill(contract, proof, device)
            return None

        def prove_autocast(device: str, combo: Combo, recorded: bool) -> Forward | str:
            if isinstance(now := still(), str):
                return now
            found = probe.prove_autocast(
                now, settings.sources, device, combo, recorded=recorded, **asked
            )
            return found.reason if isinstance(found, Refusal) else found

        contract = Contract(
            class_of(module).__name__,
            prove_late,
            settings.training,
            prove_autocast=prove_autocast,
        )
        found = _contracts[key] = (contract, {})
    return found


def _reads(kernel: Kernel) -> tuple[Any, ...]:
    """What a kernel that is not ours is beside its name: a closure that changed is another one."""
    if kernel.own:
        return ()
    from hfpatch.foreign import reads  # where somebody has kernels of their own

    return Same(kernel.fn), reads.key_of(kernel.fn)


def _holds(proof: probe.Proof | Refusal) -> bool:
    """Whether the surroundings of the code are as they were when it was read, to whatever end."""
    if isinstance(proof, Refusal):
        return proof.kind != "unexplained" and still_holds(proof.found)
    return proof.holds()


def _key_of(subject: Subject | str | None) -> Any:
    """What a stand-in computes, by its class's code and its own attributes."""
    if not isinstance(subject, Subject):
        return None
    return (code_of(subject.module), subject.key)


def _ops(
    module: nn.Module,
    family: Family,
    subject: Subject,
    devices: tuple[str, ...],
    settings: Settings,
) -> set[str]:
    """The ops whose kernels are needed: before a download, only those that the module can be."""
    ops = subject.possible_ops()
    if len(ops) == 1 or not any(settings.sources.remote(op) for op in ops):
        return ops
    key = (code_of(module), family.name, subject.key, subject.main_combo(), devices)
    found = _identified.get(key)
    if found is None:
        here = devices if settings.sources.assumed is None else ("cpu",)
        found = set().union(*(probe.matching_ops(subject, d) for d in here))
        _identified[key] = found
    return found


def _prepare_block(
    path: str,
    module: nn.Module,
    subject: BlockSubject,
    devices: tuple[str, ...],
    settings: Settings,
) -> Prepared | Refusal:
    if settings.training:
        return Refusal("unsupported", "the fused block has no backward")
    sources = settings.sources
    for op in subject.ops:
        if (why := sources.missing(op, block=True)) is not None:
            return Refusal("unavailable", why)
    kernels = tuple(
        (op, k.source, k.version, sources.explicit(op), *_reads(k))
        for op in subject.ops
        if (k := sources.kernel(op, block=True)) is not None
    )
    read = subject.reads()
    around = functions_of_torch(read)
    key = (code_of(module), subject.key, around, subject.main_combo(), kernels, sources.assumed)
    found = _blocks.get(key)
    if found is None:
        if (why := odd_code(module)) is not None:
            return Refusal("unsupported", why)
        if (name := replaced_function(read)) is not None:
            # the small block says nothing of what such a function does elsewhere
            return Refusal("unsupported", f"`{name}`, which its code names, was replaced")
        try:  # its settings may be none that the constructor takes
            with float32_default():
                tiny = subject.tiny(torch.Generator().manual_seed(0))
        except Exception as e:
            return Refusal(
                "unsupported", f"no small copy of it could be made: {type(e).__name__}: {e}"
            )
        if (why := subject.unlike(tiny)) is not None:
            return Refusal("unsupported", why)
        stand_in = type(subject)(tiny)
        as_made = (_key_of(stand_in), functions_of_torch(stand_in.reads()))

        def prove_late(device: str, dtype: torch.dtype) -> str | None:
            if (_key_of(stand_in), functions_of_torch(stand_in.reads())) != as_made:
                return _CHANGED
            proof = stand_in.prove_block(sources, device, dtype)
            if isinstance(proof, Refusal):
                return proof.reason
            _fill_block(contract, proof, device)
            return None

        name = class_of(module).__name__
        contract = Contract(name, prove_late, training=False, by_dtype=True)
        found = _blocks[key] = (contract, {})
    contract, proofs = found
    for device in devices:
        if device not in proofs:
            proof = proofs[device] = subject.prove_block(sources, device)
            if isinstance(proof, BlockProof):
                _fill_block(contract, proof, device)
    good = {d: p for d in devices if isinstance(p := proofs[d], BlockProof)}
    if not good:
        return next(p for d in devices if isinstance(p := proofs[d], Refusal))
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
    subject.still_proven()  # now, while each class is read once
    original = type(module).forward
    packs = tuple(tuple(g) for g in subject.packs() if packing.can_pack(g))
    return Prepared(
        module, lambda: _adapter(subject, original, contract), entry, packs, block=subject
    )


def _fill_block(contract: Contract, proof: BlockProof, device: str) -> None:
    contract.table(device)[proof.dtype, None] = proof.forward
    contract.proven(device, proof.dtype)


def _prepare_custom(
    path: str, module: nn.Module, subject: CustomSubject, settings: Settings
) -> Prepared | Refusal:
    errors: tuple[float, float] | str = (0.0, 0.0)
    if settings.training and not subject.family.differentiable:
        return Refusal("unsupported", "its registered forward is not differentiable")
    if settings.verify or not subject.own:
        try:
            errors = subject.compare()
        except CannotReplicateError as e:
            return Refusal("unsupported", str(e))
        except FAILURES as e:
            errors = f"comparing it with the original failed: {told(e)}"
    if isinstance(errors, str):
        return Refusal("rejected", errors)
    entry = Swap(
        path, class_of(module).__name__, subject.op, subject.title, subject.source, "", (), *errors
    )
    contract = Contract(class_of(module).__name__, lambda device, dtype: None, settings.training)
    original = type(module).forward
    recalls = isinstance(subject, RecallSubject)
    over = (lambda inner: subject.forward(inner, contract)) if recalls else None
    return Prepared(module, lambda: _adapter(subject, original, contract), entry, over=over)
