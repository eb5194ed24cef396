"""Which candidate formula reproduces this module, and does the kernel compute it?

The proof as a whole: `identify` finds the formula, `verify` asks the kernel, and a kernel that does
not do gives way to the next one. What decides is written in `hfpatch.proof.trial.Limits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hfpatch.kernels.sources import Kernel, Sources
from hfpatch.ops import OPS
from hfpatch.planning.plan import Refusal
from hfpatch.proof.contract import Contract
from hfpatch.proof.gradients import explain_gradients
from hfpatch.proof.identify import by_consistency, fits_of, fp32_trial, identify, matching
from hfpatch.proof.proving import one_thread, quietly
from hfpatch.proof.subject import Combo, Formula, Forward, Subject
from hfpatch.proof.trial import OperatorCounter, Trial
from hfpatch.proof.verify import verify_foreign, verify_gradients, verify_values
from hfpatch.reading.leaf import still_holds


@dataclass
class Proof:
    """What was proven for one subject on one device."""

    formulas: dict[Combo, Formula]
    computes: dict[Combo, Forward]
    entries: dict[Combo, Forward]
    kernels: tuple[Kernel, ...]
    errors: dict[Combo, tuple[float, float]] = field(default_factory=dict)  # absolute, relative
    dropped: dict[Combo, Refusal] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # for the report
    dims: frozenset[int] | None = None  # of the input, where it is not any number
    takes_empty: bool = True
    autocasts: frozenset[str] = frozenset()  # see `Contract.autocasts`
    #: What the code used of its surroundings, in any combination.
    found: dict[tuple[int, Any], tuple[Any, Any, Any]] = field(default_factory=dict)

    def holds(self) -> bool:
        """Whether what the module's code found by name, in globals and closures, is still there."""
        return still_holds(list(self.found.values()))


@dataclass(frozen=True)
class _Task:
    """What has to be proven: of which module, with whose kernels, on which device."""

    subject: Subject
    sources: Sources
    device: torch.device
    verify: bool
    training: bool
    recorded: bool = False  # under autocast: gradients are compared too
    runs_on: str = ""  # the device type that it is proven for; "": that of `device`


def prove(
    subject: Subject, sources: Sources, device: str, *, verify: bool = True, training: bool = False
) -> Proof | Refusal:
    """Identify the formula of `subject` and verify the kernels for it, on `device`.

    Nothing of the model is touched; no gradient is recorded; torch's random state stays as it was.
    """
    where = device if sources.assumed is None else "cpu"
    with quietly(where):
        return _prove(
            _Task(subject, sources, torch.device(where), verify, training, runs_on=device)
        )


def matching_ops(subject: Subject, device: str) -> set[str]:
    """The ops of the formulas that explain `subject` in fp32; what is asked before a download."""
    with quietly(device):
        trial = fp32_trial(subject, torch.device(device))
        if isinstance(trial, Refusal):
            return set()
        return {f.op for f in matching(trial)[0]}


def prove_autocast(
    subject: Subject,
    sources: Sources,
    device: str,
    combo: Combo,
    *,
    verify: bool = True,
    training: bool = False,
    recorded: bool = False,
) -> Forward | Refusal:
    """The contract's entry for one combination under autocast, on `device`.

    Autocast decides the dtype of each operator in the original, so that its result may have another
    dtype, and roundings elsewhere. `recorded`: gradients are compared too.
    """
    with quietly(device):
        task = _Task(subject, sources, torch.device(device), verify, training, recorded)
        return _prove_autocast(task, combo)


_Trials = dict[Combo, tuple[Trial, dict[Formula, int]]]


def _explained(
    task: _Task,
) -> tuple[Trial, _Trials, dict[Combo, Formula], dict[Combo, Refusal]] | Refusal:
    """The trial in fp32, those of all combinations, the formula that explains each, and why some
    are explained by none."""
    subject = task.subject
    identified = identify(subject, task.device)
    if isinstance(identified, Refusal):
        return identified
    trial, matches = identified
    trials: _Trials = {}
    dropped: dict[Combo, Refusal] = {}
    for combo in subject.combos():
        tried = fits_of(subject, combo, matches, trial)
        if isinstance(tried, Refusal):
            dropped[combo] = tried
        else:
            trials[combo] = tried
    order = by_consistency(matches, [fits for _, fits in trials.values()])
    formulas = {c: next(f for f in order if f in fits) for c, (_, fits) in trials.items()}
    main = subject.main_combo()
    if subject.differentiates or (task.training and subject.trains):
        for combo, formula in tuple(formulas.items()):
            briefly = combo not in (main, trial.combo)
            if (why := explain_gradients(trials[combo][0], formula, briefly=briefly)) is not None:
                dropped[combo] = why
                del formulas[combo]
        if main not in formulas and main in dropped:
            return _found_by(dropped[main], trial)
    return trial, trials, formulas, dropped


def _prove(task: _Task) -> Proof | Refusal:
    subject = task.subject
    with one_thread():
        explained = _explained(task)
    if isinstance(explained, Refusal):
        return explained
    trial, trials, formulas, dropped = explained
    main = subject.main_combo()
    chosen = _Chosen(task.sources)
    while True:
        proof = Proof({}, {}, {}, (), dropped=dict(dropped), dims=trial.dims)
        proof.takes_empty = trial.takes_empty
        proof.autocasts = trial.reading.autocasts
        pairs = [(trials[c][0], f) for c, f in formulas.items()]
        refusal = _prove_with(task, trial, pairs, chosen, proof)
        if refusal is None:
            return proof
        if main not in formulas or not chosen.pass_over(formulas[main].op, refusal):
            return _found_by(refusal, trial)


def _found_by(refusal: Refusal, trial: Trial) -> Refusal:
    """With what the code found by name: put back, it may be swapped."""
    return replace(refusal, found=refusal.found or tuple(trial.reading.found))


def _prove_autocast(task: _Task, combo: Combo) -> Forward | Refusal:
    subject = task.subject
    identified = identify(subject, task.device)
    if isinstance(identified, Refusal):
        return identified
    if others := identified[0].reading.autocasts:
        return Refusal("unsupported", f"its code asks for autocast on {', '.join(sorted(others))}")
    # autocast casts the inputs of some operators to fp32; inside of a linear layer it casts anyway
    widths = (False,) if subject.has_layers or combo.x == torch.float32 else (False, True)
    misfits: list[Refusal] = []
    refusals: list[Refusal] = []
    fits: list[tuple[int, Formula, bool, Trial]] = []
    for widens in widths:
        tried = fits_of(subject, combo, identified[1], identified[0], widens)
        if isinstance(tried, Refusal):
            misfits.append(tried)
        else:
            trial, counts = tried
            formula = min(counts, key=counts.__getitem__)
            fits.append((counts[formula], formula, widens, trial))
    for _, formula, widens, trial in sorted(fits, key=lambda fit: fit[0]):
        found = _prove_fit(task, trial, formula, widens)
        if not isinstance(found, Refusal):
            return found
        refusals.append(found)
    return [*refusals, *misfits][0]


def _prove_fit(task: _Task, trial: Trial, formula: Formula, widens: bool) -> Forward | Refusal:
    """The entry for a formula that explains the original under autocast."""
    chosen = _Chosen(task.sources, widens=widens)
    while True:
        proof = Proof({}, {}, {}, ())
        outcome = (
            (explain_gradients(trial, formula) if task.recorded else None)
            or _prove_combo(task, trial, formula, chosen, proof)
            or _no_gain(trial, proof, chosen)
            or _prove_gradients(task, trial, formula, chosen, proof)
        )
        if outcome is None:
            return proof.entries[trial.combo]
        if not chosen.pass_over(formula.op, outcome):
            return outcome


@dataclass
class _Chosen:
    """The kernel of each op: the preferred one, or one that follows it for this subject."""

    sources: Sources
    instead: dict[str, Kernel] = field(default_factory=dict)
    widens: bool | None = None  # under autocast

    def kernel(self, op: str) -> Kernel | None:
        kernel = self.instead.get(op) or self.sources.kernel(op)
        if kernel is None or kernel.widens == self.widens:
            return kernel
        return replace(kernel, widens=self.widens)

    def pass_over(self, op: str, refusal: Refusal) -> bool:
        """Take the next in the order of preference, where another project's kernel does not do."""
        kernel = self.kernel(op)
        if kernel is None or not kernel.adapted:
            return False
        if refusal.kind == "rejected" and self.sources.strict:
            return False
        if refusal.kind not in ("rejected", "unsupported", "unavailable", "no gain"):
            return False
        following = self.sources.after(op, kernel)
        if following is None:
            return False
        if refusal.kind != "no gain":
            self.sources.pass_over(op, kernel, refusal.reason)
        self.instead[op] = following
        return True


def _prove_with(
    task: _Task,
    trial: Trial,
    explained: list[tuple[Trial, Formula]],
    chosen: _Chosen,
    proof: Proof,
) -> Refusal | None:
    """Prove every combination into `proof`, with one choice of kernels, or say why not."""
    for combo_trial, formula in explained:
        outcome = _prove_combo(task, combo_trial, formula, chosen, proof)
        if outcome is not None:
            if outcome.kind in ("off", "unavailable"):
                return outcome
            proof.dropped[combo_trial.combo] = outcome
    main = task.subject.main_combo()
    if main not in proof.computes:
        return proof.dropped.get(main, Refusal("unsupported", f"no kernel for {main}"))
    ops = {f.op for f in proof.formulas.values()}
    proof.kernels = tuple(k for op in sorted(ops) if (k := chosen.kernel(op)) is not None)
    return _no_gain(trial, proof, chosen)


def _prove_combo(
    task: _Task, trial: Trial, formula: Formula, chosen: _Chosen, proof: Proof
) -> Refusal | None:
    """Prove one combination into `proof`, or say why not."""
    subject, training = task.subject, task.training
    kernel = chosen.kernel(formula.op)
    if kernel is None:
        if (why := chosen.sources.missing(formula.op)) is not None:
            return Refusal("unavailable", why)
        return Refusal("off", f"op `{formula.op}` is switched off by `kernels=`")
    if kernel.accepts is not None and (why := kernel.accepts(formula.params)) is not None:
        return Refusal("unsupported", f"kernel `{kernel.source}` for `{formula.op}` {why}")
    runs_on = task.runs_on or task.device.type
    if (why := kernel.refuses(runs_on)) is not None:
        return Refusal("unavailable", why)
    if task.sources.assumed is not None and not kernel.own and "cpu" not in (kernel.devices or ()):
        why = f"kernel `{kernel.source}` can be proven on {runs_on} only, which is not here"
        return Refusal("unavailable", why)
    if training and not kernel.differentiable:
        return Refusal(
            "unsupported",
            f"kernel `{kernel.source}` for `{formula.op}` is not differentiable, which "
            "mode='training' needs; register it with differentiable=True if it is",
        )
    compute = subject.compute(kernel, formula, training)
    if task.verify or not kernel.own:
        verdict = verify_values(trial, formula, kernel, compute)
        if isinstance(verdict, Refusal):
            return verdict
        proof.errors[trial.combo] = verdict
    if not kernel.own:
        asked = verify_foreign(trial, formula, kernel, training)
        if isinstance(asked, Refusal):
            return asked
        kernel, notes = asked
        proof.notes.update(dict.fromkeys(notes))
    proof.formulas[trial.combo] = formula
    proof.found |= {(id(where), name): (where, name, v) for where, name, v in trial.reading.found}
    proof.computes[trial.combo] = compute
    with trial.context():
        entry = subject.entry(kernel, formula, training, trial.module, trial.x)
    proof.entries[trial.combo] = entry
    return None


def _prove_gradients(
    task: _Task, trial: Trial, formula: Formula, chosen: _Chosen, proof: Proof
) -> Refusal | None:
    kernel = chosen.kernel(formula.op)
    if not task.recorded or kernel is None or not (task.verify or not kernel.own):
        return None
    return verify_gradients(trial, formula, kernel, proof.computes[trial.combo])


#: What a linear layer launches.
_LINEAR = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_unsafe_view"}


def _count(call: Callable[[], Any]) -> list[str]:
    counter = OperatorCounter()
    with counter:
        call()
    return counter.names


def _no_gain(trial: Trial, proof: Proof, chosen: _Chosen) -> Refusal | None:
    """Refuse a swap that launches as much as the original does, unless measured to be faster."""
    formula = proof.formulas.get(trial.combo)
    if formula is None or chosen.sources.explicit(formula.op):
        return None
    subject, compute = trial.subject, proof.computes[trial.combo]
    with trial.context():
        theirs = _count(lambda: subject.run(trial.module, trial.x))
        ours = _count(lambda: compute(trial.module, trial.x))
    kernel = chosen.kernel(formula.op)
    assert kernel is not None
    faster = kernel.source != "torch" and not kernel.adapted
    assumed = chosen.sources.assumed
    device = trial.device.type if assumed is None else assumed.type
    faster = faster and device in OPS[formula.op].beats_single_kernel
    if len(ours) < len(theirs) or (faster and len(ours) == len(theirs)):
        return None
    name = type(subject.module).__name__
    # what stays when the children's own work (their matrix products) is taken away
    replaced = list((Counter(theirs) - Counter(ours)).elements())
    if len(replaced) == 1 and (len(theirs) == 1 or {n for n in theirs if n in ours} <= _LINEAR):
        return Refusal("no gain", f"`{replaced[0]}` is a single kernel already")
    return Refusal(
        "no gain",
        f"source `{kernel.source}` would launch {len(ours)} kernels for `{name}`, the original "
        f"{len(theirs)}",
    )


def fill(contract: Contract, proof: Proof, device: str) -> None:
    """Give a contract what was proven on `device`."""
    table = contract.table(device)
    if proof.dims is not None:
        contract.dims, contract.takes_empty = proof.dims, proof.takes_empty
    contract.autocasts |= proof.autocasts
    for combo, entry in proof.entries.items():
        table[(combo.x, combo.param)] = entry
    contract.proven(device)
