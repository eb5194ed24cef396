"""Which candidate formula reproduces this module, and does the kernel compute it?

The original's own forward runs on small random inputs, on a replica with random weights, and is
compared with each candidate formula, evaluated in fp64. What decides is written in `Limits`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hfpatch.ops import OPS
from hfpatch.patches.base import (
    Combo,
    Contract,
    Formula,
    Forward,
    Subject,
    Tensor,
    float32_default,
    replicate,
)
from hfpatch.sources import Kernel, Sources, reference_kernel


@dataclass(frozen=True)
class Limits:
    """Errors in units of the dtype's epsilon, relative to the largest value of the row.

    formula: how far the original may be from a candidate's fp64 value. In fp32 a chain of a dozen
        roundings and a reduction explain 24; in a half dtype composed activations round after each
        of up to nine operations, and the formula was identified in fp32 already.
    kernel: how much farther than the original a kernel may be from the fp64 value: one rounding
        (half an epsilon), doubled because a row's largest value can lie just under a power of two;
        in fp32 six, for a reduction in another order.
    gradient: how many times these a gradient may be off: it passes the module twice, and that of a
        parameter is a sum over rows.
    """

    formula_fp32: float = 24.0
    formula_half: float = 8.0
    kernel_fp32: float = 6.0
    kernel_half: float = 1.0
    gradient: float = 4.0


LIMITS = Limits()


@dataclass(frozen=True)
class Refusal:
    """Why a module is not swapped. `kind` is the `Skip.kind` that the report groups by."""

    kind: str
    reason: str


@dataclass
class Proof:
    """What was proven for one subject on one device."""

    formulas: dict[Combo, Formula]
    computes: dict[Combo, Forward]
    entries: dict[Combo, Forward]
    kernels: tuple[Kernel, ...]
    errors: dict[Combo, tuple[float, float]] = field(default_factory=dict)  # absolute, relative
    dropped: dict[Combo, Refusal] = field(default_factory=dict)


class _KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of a call that launch work (views do not), and sees random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket._qualified_op_name)
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _error(y: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Largest distance, in epsilons of `dtype`, relative to each row's largest finite true value.

    Where `truth` is NaN or infinite `y` must be the same; infinity stands for any other outcome.
    """
    y = y.double()
    finite = truth.isfinite()
    if not torch.equal(y[~finite].nan_to_num(), truth[~finite].nan_to_num()):
        return float("inf")
    if not torch.equal(y.isnan(), truth.isnan()):
        return float("inf")
    zero = torch.zeros((), dtype=torch.float64, device=y.device)
    truth = torch.where(finite, truth, zero)
    scale = truth.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    distance = (torch.where(finite, y, zero) - truth).abs()
    error = (distance / scale).max().item() / torch.finfo(dtype).eps
    return error if error == error else float("inf")


def _half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


class _Trial:
    """One dtype combination: the replica, its input, and what the original makes of it."""

    def __init__(self, subject: Subject, combo: Combo, device: torch.device, seed: int = 0) -> None:
        self.combo, self.device = combo, device
        #: The dtypes that values are rounded to on their way to the result.
        self.dtypes = [combo.x, combo.param, combo.autocast if subject.has_layers else None]
        self.module = subject.replica(combo, device, _generator(seed))
        self.x = subject.inputs(combo, device, _generator(seed + 1))
        fp64 = torch.float64
        wide = Combo(fp64, fp64 if combo.param else None, combo.autocast)
        self.wide = subject.replica(wide, device, _generator(seed))
        # the fp64 replica holds the very values of the rounded one
        for ours, theirs in zip(self.module.modules(), self.wide.modules(), strict=True):
            if ours is theirs:
                continue
            for name, p in ours._parameters.items():
                if p is not None:
                    theirs._parameters[name] = nn.Parameter(p.double(), requires_grad=False)
            for name, b in ours._buffers.items():
                if b is not None and b.is_floating_point():
                    theirs._buffers[name] = b.double()
        with self.context():
            self.original: Any = subject.run(self.module, self.x)

    def context(self) -> AbstractContextManager[Any]:
        """What a call of the combination runs in; no weight of ours gets into autocast's cache."""
        if self.combo.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.combo.autocast, cache_enabled=False)

    def truth(self, subject: Subject, formula: Formula) -> Tensor:
        compute = subject.compute(reference_kernel(formula.op), formula)
        result: Tensor = compute(self.wide, self.x.double())
        return result

    def candidate(self, subject: Subject, formula: Formula, widens: bool | None = None) -> Tensor:
        kernel = replace(reference_kernel(formula.op), widens=widens)
        compute = subject.compute(kernel, formula)
        with self.context():
            result: Tensor = compute(self.module, self.x)
        return result


def prove(
    subject: Subject, sources: Sources, device: str, *, verify: bool = True, training: bool = False
) -> Proof | Refusal:
    """Identify the formula of `subject` and verify the kernels for it, on `device`.

    Nothing of the model is touched; no gradient is recorded; torch's random state stays as it was.
    """
    with _quietly(device):
        return _prove(subject, sources, torch.device(device), verify, training)


def matching_ops(subject: Subject, device: str) -> set[str]:
    """The ops of the formulas that explain `subject` in fp32; what is asked before a download."""
    with _quietly(device):
        trial = _base_trial(subject, torch.device(device))
        if isinstance(trial, Refusal):
            return set()
        return {f.op for f in _matching(subject, trial)[0]}


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
    with _quietly(device):
        identified = _identify(subject, torch.device(device))
        if isinstance(identified, Refusal):
            return identified
        return _prove_autocast(
            subject, sources, torch.device(device), combo, identified[1], verify, training, recorded
        )


@contextmanager
def _quietly(device: str) -> Iterator[None]:
    """Nothing that the caller's thread is in the middle of takes part in a proof: a late one is
    made in a call, under autocast, in inference mode, or inside of a checkpoint."""
    with ExitStack() as modes:
        if torch._C._len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        modes.enter_context(_by_itself(device))
        yield


@contextmanager
def _by_itself(device: str) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device, enabled=False),
        torch.device("cpu"),  # where the draws are made, whatever the user's default is
        float32_default(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of the original, about dtypes that the model never uses
        yield


def _base_trial(subject: Subject, device: torch.device) -> _Trial | Refusal:
    """The original in fp32, which says what it computes."""
    name = type(subject.module).__name__
    base = Combo(torch.float32, torch.float32 if subject.main_combo().param else None)
    try:
        trial = _Trial(subject, base, device)
    except torch.OutOfMemoryError:
        raise  # says nothing of the module: another time there is memory
    except Exception as e:
        return Refusal("mismatch", f"`{name}` could not be probed: {type(e).__name__}: {e}")
    if not isinstance(trial.original, Tensor):
        return Refusal(
            "mismatch", f"`{name}` returns {type(trial.original).__name__}, not a tensor"
        )
    return trial


def _identify(subject: Subject, device: torch.device) -> tuple[_Trial, list[Formula]] | Refusal:
    """The original in fp32, and the formulas that explain it."""
    name = type(subject.module).__name__
    trial = _base_trial(subject, device)
    if isinstance(trial, Refusal):
        return trial
    matches, nearest = _matching(subject, trial)
    if not matches:
        return Refusal("mismatch", _explain(name, nearest))
    if (why := _in_training(subject, trial)) is not None:
        return Refusal("mismatch", f"`{name}` {why}")
    return trial, matches


def _prove(
    subject: Subject, sources: Sources, device: torch.device, verify: bool, training: bool
) -> Proof | Refusal:
    identified = _identify(subject, device)
    if isinstance(identified, Refusal):
        return identified
    trial, matches = identified
    trials: dict[Combo, tuple[_Trial, dict[Formula, int]]] = {}
    dropped: dict[Combo, Refusal] = {}
    for combo in subject.combos():
        tried = _fits(subject, combo, matches, device)
        if isinstance(tried, Refusal):
            dropped[combo] = tried
        else:
            trials[combo] = tried
    order = _by_consistency(matches, [fits for _, fits in trials.values()])
    formulas = {c: next(f for f in order if f in fits) for c, (_, fits) in trials.items()}
    main = subject.main_combo()
    chosen = _Chosen(sources)
    while True:
        proof = Proof({}, {}, {}, (), dropped=dict(dropped))
        refusal = _prove_with(
            subject, trial, {c: (trials[c][0], f) for c, f in formulas.items()}, chosen, device,
            verify, training, proof,
        )  # fmt: skip
        if refusal is None:
            return proof
        if main not in formulas or not chosen.pass_over(formulas[main].op, refusal):
            return refusal


def _prove_autocast(
    subject: Subject,
    sources: Sources,
    device: torch.device,
    combo: Combo,
    matches: list[Formula],
    verify: bool,
    training: bool,
    recorded: bool,
) -> Forward | Refusal:
    # autocast casts the inputs of some operators to fp32; inside of a linear layer it casts anyway
    widths = (False,) if subject.has_layers or combo.x == torch.float32 else (False, True)
    misfits: list[Refusal] = []
    refusals: list[Refusal] = []
    fits: list[tuple[int, Formula, bool, _Trial]] = []
    for widens in widths:
        tried = _fits(subject, combo, matches, device, widens)
        if isinstance(tried, Refusal):
            misfits.append(tried)
        else:
            trial, counts = tried
            formula = min(counts, key=counts.__getitem__)
            fits.append((counts[formula], formula, widens, trial))
    for _, formula, widens, trial in sorted(fits, key=lambda fit: fit[0]):
        found = _prove_fit(
            subject, sources, device, trial, formula, widens, verify, training, recorded
        )
        if not isinstance(found, Refusal):
            return found
        refusals.append(found)
    return [*refusals, *misfits][0]


def _prove_fit(
    subject: Subject,
    sources: Sources,
    device: torch.device,
    trial: _Trial,
    formula: Formula,
    widens: bool,
    verify: bool,
    training: bool,
    recorded: bool,
) -> Forward | Refusal:
    """The entry for a formula that explains the original under autocast."""
    chosen = _Chosen(sources, widens=widens)
    while True:
        proof = Proof({}, {}, {}, ())
        outcome = _prove_combo(
            subject, trial, formula, chosen, device, verify, training, proof
        ) or _no_gain(subject, trial, proof, chosen, device.type)
        kernel = chosen.kernel(formula.op)
        if outcome is None and recorded and kernel is not None and (verify or kernel.adapted):
            outcome = _verify_gradients(
                subject, trial, formula, kernel, proof.computes[trial.combo]
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
        if refusal.kind not in ("rejected", "unsupported", "no gain"):
            return False
        following = self.sources.after(op, kernel)
        if following is None:
            return False
        if refusal.kind != "no gain":
            self.sources.pass_over(op, kernel, refusal.reason)
        self.instead[op] = following
        return True


def _prove_with(
    subject: Subject,
    trial: _Trial,
    trials: dict[Combo, tuple[_Trial, Formula]],
    chosen: _Chosen,
    device: torch.device,
    verify: bool,
    training: bool,
    proof: Proof,
) -> Refusal | None:
    """Prove every combination into `proof`, with one choice of kernels, or say why not."""
    for combo_trial, formula in trials.values():
        outcome = _prove_combo(
            subject, combo_trial, formula, chosen, device, verify, training, proof
        )
        if outcome is not None:
            if outcome.kind in ("off", "unavailable"):
                return outcome
            proof.dropped[combo_trial.combo] = outcome
    main = subject.main_combo()
    if main not in proof.computes:
        return proof.dropped.get(main, Refusal("unsupported", f"no kernel for {main}"))
    ops = {f.op for f in proof.formulas.values()}
    proof.kernels = tuple(k for op in sorted(ops) if (k := chosen.kernel(op)) is not None)
    return _no_gain(subject, trial, proof, chosen, device.type)


def _matching(subject: Subject, trial: _Trial) -> tuple[list[Formula], tuple[Formula, str] | None]:
    """Formulas that explain the original in fp32, and the nearest one that does not."""
    matches: list[Formula] = []
    nearest: tuple[float, Formula, str] | None = None
    for formula in subject.formulas():
        truth = trial.truth(subject, formula)
        if truth.shape != trial.original.shape:
            why = f"shape {tuple(truth.shape)}, original {tuple(trial.original.shape)}"
            nearest = nearest or (float("inf"), formula, why)
            continue
        error = _error(trial.original, truth, torch.float32)
        if error <= LIMITS.formula_fp32:
            matches.append(formula)
        elif nearest is None or error < nearest[0]:
            relative = error * torch.finfo(torch.float32).eps
            nearest = (error, formula, f"relative error {relative:.1e} in fp32")
    return matches, None if nearest is None else nearest[1:]


def _in_training(subject: Subject, trial: _Trial) -> str | None:
    """How the original in `train()` is another than in `eval()`, which alone a formula explains."""
    module = _trained(trial.module)
    before = {k: b.clone() for k, b in module.named_buffers()}
    counter = _KernelCounter()
    devices = [trial.x.device] if trial.x.is_cuda else []
    try:
        with torch.random.fork_rng(devices), counter:  # a draw must not show in the user's
            got = subject.run(module, trial.x)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return f"could not be probed in `train()`: {type(e).__name__}: {e}"
    if counter.draws:
        return (
            "draws random numbers in `train()` (dropout in its own forward?), which no kernel does"
        )
    if (
        not isinstance(got, Tensor)
        or (got.shape, got.dtype) != (trial.original.shape, trial.original.dtype)
        or not _error(got, trial.original.double(), got.dtype) <= LIMITS.formula_fp32
    ):
        return "computes something else in `train()` than in `eval()`"
    changed = [k for k, b in module.named_buffers() if not torch.equal(b, before[k])]
    if changed:
        return f"writes its buffer `{changed[0]}` in `train()`"
    return None


def _trained(module: nn.Module) -> nn.Module:
    """The replica in `train()`, with buffers of its own: modules in it may be the model's."""
    children = {n: _trained(c) for n, c in module._modules.items() if c is not None}
    copy = replicate(module, children)
    copy._parameters.update(module._parameters)
    copy._buffers.update({n: b if b is None else b.clone() for n, b in module._buffers.items()})
    copy.training = True
    return copy


def _explain(name: str, nearest: tuple[Formula, str] | None) -> str:
    if nearest is None:
        return f"no known formula reproduces `{name}`"
    return f"no known formula reproduces `{name}`; nearest: {nearest[0]}, {nearest[1]}"


def _fits(
    subject: Subject,
    combo: Combo,
    matches: list[Formula],
    device: torch.device,
    widens: bool | None = None,
) -> tuple[_Trial, dict[Formula, int]] | Refusal:
    """Formulas that explain the original in these dtypes, with the count of values that differ.

    Formulas equal in fp32 differ here in where they round.
    """
    try:
        trial = _Trial(subject, combo, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return Refusal("unsupported", f"the original does not take {combo}: {e}")
    fits: dict[Formula, int] = {}
    dtypes = set()
    for formula in matches:
        candidate = trial.candidate(subject, formula, widens)
        dtypes.add(str(candidate.dtype))
        if candidate.dtype != trial.original.dtype:
            continue
        error = _error(trial.original, trial.truth(subject, formula), candidate.dtype)
        if error <= _formula_limit(trial, candidate.dtype):
            fits[formula] = int((candidate != trial.original).sum())
    if fits:
        return trial, fits
    return Refusal(
        "mismatch",
        f"with {combo} the original gives {trial.original.dtype} values that no formula "
        f"reproduces ({', '.join(sorted(dtypes))})",
    )


def _formula_limit(trial: _Trial, out: torch.dtype) -> float:
    """What roundings explain, in epsilons of `out`: more where a value was rounded on its way."""
    widening = _widening(trial, out)
    return LIMITS.formula_half * widening if widening else LIMITS.formula_fp32


def _kernel_slack(trial: _Trial, out: torch.dtype) -> float:
    """How much farther than the original a kernel may be, in epsilons of `out`."""
    widening = _widening(trial, out)
    return LIMITS.kernel_half * widening if widening else LIMITS.kernel_fp32


def _widening(trial: _Trial, out: torch.dtype) -> float:
    """Epsilon of the narrowest half dtype on the way to `out`, in epsilons of `out`; 0 if none."""
    halves = [t for t in (*trial.dtypes, out) if t is not None and _half(t)]
    return max((torch.finfo(t).eps for t in halves), default=0.0) / torch.finfo(out).eps


def _by_consistency(matches: list[Formula], outcomes: list[dict[Formula, int]]) -> list[Formula]:
    """Matches, best first: fits most dtype combinations, then fewest differing values.

    One formula should explain a module in every dtype; where all dtypes agree, several do.
    """
    return sorted(
        matches,
        key=lambda f: (-sum(f in o for o in outcomes), sum(o.get(f, 0) for o in outcomes)),
    )


def _prove_combo(
    subject: Subject,
    trial: _Trial,
    formula: Formula,
    chosen: _Chosen,
    device: torch.device,
    verify: bool,
    training: bool,
    proof: Proof,
) -> Refusal | None:
    """Prove one combination into `proof`, or say why not."""
    kernel = chosen.kernel(formula.op)
    if kernel is None:
        if (why := chosen.sources.missing(formula.op)) is not None:
            return Refusal("unavailable", why)
        return Refusal("off", f"op `{formula.op}` is switched off by `kernels=`")
    if kernel.accepts is not None and (why := kernel.accepts(formula.params)) is not None:
        return Refusal("unsupported", f"kernel `{kernel.source}` for `{formula.op}` {why}")
    if (why := kernel.refuses(device.type)) is not None:
        return Refusal("unsupported", why)
    if training and not kernel.differentiable:
        return Refusal(
            "unsupported",
            f"kernel `{kernel.source}` for `{formula.op}` is not differentiable, which "
            "mode='training' needs; register it with differentiable=True if it is",
        )
    compute = subject.compute(kernel, formula, training)
    if verify or kernel.adapted:
        verdict = _verify(subject, trial, formula, kernel, compute, proof)
        if verdict is not None:
            return verdict
    proof.formulas[trial.combo] = formula
    proof.computes[trial.combo] = compute
    with trial.context():
        entry = subject.entry(kernel, formula, training, trial.module, trial.x)
    proof.entries[trial.combo] = entry
    return None


def _verify(
    subject: Subject,
    trial: _Trial,
    formula: Formula,
    kernel: Kernel,
    compute: Forward,
    proof: Proof,
) -> Refusal | None:
    """Run the kernel: no farther from the fp64 value than the original, plus one rounding."""
    what = f"kernel `{kernel.source}` for `{formula.op}`"
    before = trial.x.clone()
    try:
        with trial.context():
            y = compute(trial.module, trial.x)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return Refusal("rejected", f"{what} failed with {trial.combo}: {type(e).__name__}: {e}")
    if not isinstance(y, Tensor) or y.shape != trial.original.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        return Refusal(
            "rejected", f"{what} returned {got}, expected shape {tuple(trial.original.shape)}"
        )
    if y.dtype != trial.original.dtype:
        return Refusal("rejected", f"{what} returned {y.dtype}, expected {trial.original.dtype}")
    if not torch.equal(before.nan_to_num(), trial.x.nan_to_num()):
        return Refusal("rejected", f"{what} wrote to its input")
    truth = trial.truth(subject, formula)
    ours = _error(y, truth, y.dtype)
    theirs = _error(trial.original, truth, y.dtype)
    if ours > theirs + _kernel_slack(trial, y.dtype):
        return Refusal(
            "rejected",
            f"{what} is wrong with {trial.combo}: its largest error is {ours:.3g} epsilons of "
            f"{str(y.dtype).removeprefix('torch.')}, the original's {theirs:.3g}",
        )
    difference = (y.double() - trial.original.double()).abs()
    relative = _error(y, trial.original.double(), y.dtype) * torch.finfo(y.dtype).eps
    proof.errors[trial.combo] = (difference[difference.isfinite()].max().item(), relative)
    return None


def _verify_gradients(
    subject: Subject, trial: _Trial, formula: Formula, kernel: Kernel, compute: Forward
) -> Refusal | None:
    """Differentiate it: every gradient has the original's dtype, and is no farther from the fp64
    one, but for a few roundings."""
    what = f"the gradient of kernel `{kernel.source}` for `{formula.op}`"
    x = trial.x.nan_to_num(0.0, 0.0, 0.0).clamp(-8, 8)  # in fp16 it overflows before the value
    upstream = torch.randn(trial.original.shape, generator=_generator(2)).to(x.device)
    upstream = upstream.to(trial.original.dtype)
    reference = subject.compute(reference_kernel(formula.op), formula)
    try:
        theirs = _gradients(subject, trial.module, subject.run, x, upstream, trial.context())
        ours = _gradients(subject, trial.module, compute, x, upstream, trial.context())
        truth = _gradients(
            subject, trial.wide, reference, x.double(), upstream.double(), nullcontext()
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return Refusal("rejected", f"{what} failed with {trial.combo}: {type(e).__name__}: {e}")
    for name, their in theirs.items():
        our, true = ours[name], truth[name]
        if their is None or our is None or true is None:
            if not (their is None and our is None):
                return Refusal("rejected", f"{what} is not that of the same tensors: `{name}`")
            continue
        if our.dtype != their.dtype:
            return Refusal(
                "rejected", f"{what} is {our.dtype} for `{name}`, expected {their.dtype}"
            )
        mine, off = _error(our, true, our.dtype), _error(their, true, our.dtype)
        if not off <= LIMITS.gradient * _formula_limit(trial, our.dtype):
            return Refusal(
                "mismatch", f"the original's gradient for `{name}` is not that of {formula}"
            )
        if mine > off + LIMITS.gradient * _kernel_slack(trial, our.dtype):
            return Refusal(
                "rejected",
                f"{what} is wrong with {trial.combo}: its largest error for `{name}` is "
                f"{mine:.3g} epsilons of {str(our.dtype).removeprefix('torch.')}, the original's "
                f"{off:.3g}",
            )
    return None


def _gradients(
    subject: Subject,
    module: nn.Module,
    run: Forward,
    x: Tensor,
    upstream: Tensor,
    context: AbstractContextManager[Any],
) -> dict[str, Tensor | None]:
    """By the input and by the replica's own parameters."""
    models = {id(p) for p in subject.module.parameters()}
    leaves = {"input": x.clone().requires_grad_()}
    own = [(n, p) for n, p in module.named_parameters() if id(p) not in models]
    leaves |= {n: p for n, p in own if p.is_floating_point()}
    try:
        for leaf in leaves.values():
            leaf.requires_grad_()
        # a checkpoint counts what is saved: not what is saved here
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            with context:
                y = run(module, leaves["input"])
            found = torch.autograd.grad(y, list(leaves.values()), upstream, allow_unused=True)
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
    return dict(zip(leaves, found, strict=True))


def _same(x: Tensor) -> Tensor:
    return x


#: What a linear layer launches.
_LINEAR = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_unsafe_view"}


def _count(call: Callable[[], Any]) -> list[str]:
    counter = _KernelCounter()
    with counter:
        call()
    return counter.names


def _no_gain(
    subject: Subject, trial: _Trial, proof: Proof, chosen: _Chosen, device: str
) -> Refusal | None:
    """Refuse a swap that launches as much as the original does, unless measured to be faster."""
    formula = proof.formulas.get(trial.combo)
    if formula is None or chosen.sources.explicit(formula.op):
        return None
    compute = proof.computes[trial.combo]
    with trial.context():
        theirs = _count(lambda: subject.run(trial.module, trial.x))
        ours = _count(lambda: compute(trial.module, trial.x))
    kernel = chosen.kernel(formula.op)
    assert kernel is not None
    faster = kernel.source != "torch" and not kernel.adapted
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
    for combo, entry in proof.entries.items():
        table[(combo.x, combo.param)] = entry
    contract.proven(device)
