"""Which candidate formula reproduces this module?

The original's own forward runs on small random inputs, on a replica with random weights, and is
compared with each candidate formula, evaluated in fp64.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from hfpatch.kernels.sources import reference_kernel
from hfpatch.planning.plan import Refusal
from hfpatch.proof.replicas import own_copy, replicate
from hfpatch.proof.subject import Combo, Formula, Subject, Tensor
from hfpatch.proof.trial import LIMITS, Trial, error_of, formula_limit, seeded
from hfpatch.reading.leaf import Unexplained


def identify(subject: Subject, device: torch.device) -> tuple[Trial, list[Formula]] | Refusal:
    """The original in fp32, and the formulas that explain it."""
    name = type(subject.module).__name__
    trial = fp32_trial(subject, device)
    if isinstance(trial, Refusal):
        return trial
    matches, nearest = matching(trial)
    if not matches:
        return Refusal("mismatch", _explain(name, nearest), trial.reading.found)
    matches = [f for f in matches if _holds_far_out(trial, f)]
    if not matches:
        return Refusal(
            "mismatch",
            f"`{name}` computes something else for small or large inputs",
            trial.reading.found,
        )
    why = _of_other_widths(trial, matches[0])
    if why is not None or (why := _of_other_ranks(trial, matches[0])) is not None:
        return Refusal("mismatch", f"`{name}` {why}", trial.reading.found)
    return trial, matches


def fp32_trial(subject: Subject, device: torch.device) -> Trial | Refusal:
    """The original in fp32, which says what it computes."""
    name = type(subject.module).__name__
    base = Combo(torch.float32, torch.float32 if subject.main_combo().param else None)
    try:
        trial = Trial(subject, base, device)
    except torch.OutOfMemoryError:
        raise  # says nothing of the module: another time there is memory
    except Unexplained as e:
        return Refusal("unexplained", f"the code of `{name}` is no formula's: {e}")
    except Exception as e:
        return Refusal("mismatch", f"`{name}` could not be probed: {type(e).__name__}: {e}")
    if not isinstance(trial.original, Tensor):
        return Refusal(
            "mismatch", f"`{name}` returns {type(trial.original).__name__}, not a tensor"
        )
    return trial


def matching(trial: Trial) -> tuple[list[Formula], tuple[Formula, str] | None]:
    """Formulas that explain the original in fp32, and the nearest one that does not."""
    matches: list[Formula] = []
    nearest: tuple[float, Formula, str] | None = None
    for formula in trial.subject.formulas():
        truth = trial.truth(formula)
        if truth.shape != trial.original.shape:
            why = f"shape {tuple(truth.shape)}, original {tuple(trial.original.shape)}"
            nearest = nearest or (float("inf"), formula, why)
            continue
        error = error_of(trial.original, truth, torch.float32)
        if error <= LIMITS.formula_fp32:
            matches.append(formula)
        elif nearest is None or error < nearest[0]:
            relative = error * torch.finfo(torch.float32).eps
            nearest = (error, formula, f"relative error {relative:.1e} in fp32")
    return matches, None if nearest is None else nearest[1:]


def _explain(name: str, nearest: tuple[Formula, str] | None) -> str:
    if nearest is None:
        return f"no known formula reproduces `{name}`"
    return f"no known formula reproduces `{name}`; nearest: {nearest[0]}, {nearest[1]}"


def _holds_far_out(trial: Trial, formula: Formula) -> bool:
    """Whether the formula explains the original at all scales: its code has been read, and is made
    of analytic operations, so that a term that is small for the samples is large at another one."""
    subject, x = trial.subject, trial.subject.far_inputs(trial.x, seeded(2))
    original = subject.run(trial.module, x)
    compute = subject.compute(reference_kernel(formula.op), formula)
    truth = compute(trial.wide, x.double())
    if error_of(original, truth, torch.float32) > LIMITS.formula_fp32:
        return False
    return all(_holds_with_parameters(trial, formula, by) for by in _SCALES)


#: Powers of two, which no dtype rounds.
_SCALES = (2.0**-60, 2.0**10, 2.0**60)


def _holds_with_parameters(trial: Trial, formula: Formula, by: float) -> bool:
    """Whether the formula explains the original with its own parameters so many times as large."""
    own = trial.subject.own_parameters(trial.module)
    if not own:
        return True
    wide = {n: trial.wide._parameters[n] for n in own}
    compute = trial.subject.compute(reference_kernel(formula.op), formula)
    try:
        for name, p in own.items():
            trial.module._parameters[name] = nn.Parameter(p * by, requires_grad=False)
            trial.wide._parameters[name] = nn.Parameter(p.double() * by, requires_grad=False)
        original = trial.subject.run(trial.module, trial.x)
        truth = compute(trial.wide, trial.x.double())
        return error_of(original, truth, torch.float32) <= LIMITS.formula_fp32
    finally:
        trial.module._parameters.update(own)
        trial.wide._parameters.update(wide)


def _of_other_widths(trial: Trial, formula: Formula) -> str | None:
    """How the original treats rows of another width than the proof's, where nothing of its own
    says how wide they are: its code may have a width of its own."""
    subject = trial.subject
    if not subject.any_width:
        return None
    compute = subject.compute(reference_kernel(formula.op), formula)
    width = trial.x.shape[-1]
    for other in (width - 32, 2 * width):
        x = trial.x.repeat(*([1] * (trial.x.dim() - 1)), 2)[..., :other]
        try:
            subject.read(trial.module, x)
            got = subject.run(trial.module, x)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            return f"takes no rows of {other} elements, or not as those of {width}: {e}"
        truth = compute(trial.wide, x.double())
        if (
            not isinstance(got, Tensor)
            or got.shape != truth.shape
            or not error_of(got, truth, got.dtype) <= LIMITS.formula_fp32
        ):
            return f"computes something else of rows of {other} elements than of {width}"
    return None


#: Dimensions before the last one of further samples: no batch, one row, images, videos, none.
_RANKS = ((), (1,), (4,), (1, 1), (2, 1, 3), (1, 2, 1, 3), (0,))


def _of_other_ranks(trial: Trial, formula: Formula) -> str | None:
    """How the original treats a row of an input of other dimensions otherwise: a channels-first
    norm permutes inputs of four. Notes which numbers of dimensions it takes at all."""
    subject = trial.subject
    compute = subject.compute(reference_kernel(formula.op), formula)
    refused: set[int] = set()
    far = subject.far_inputs(trial.x, seeded(2))
    samples = (trial.x, far, far.flip(-2)) if trial.reading.by_rank else (trial.x,)
    ranks: tuple[tuple[int, ...], ...]
    ranks = (*_RANKS, (0, 2), (2, 0)) if trial.reading.by_rank else _RANKS
    if subject.dims is not None:
        ranks = tuple(lead for lead in ranks if len(lead) + 1 in subject.dims)
        trial.takes_empty = False
    for lead, sample in itertools.product(ranks, samples):
        x = subject.reshaped(sample, lead)
        try:
            if trial.reading.by_rank:  # the code is another one
                trial.steps_of[len(lead) + 1] = subject.read(trial.module, x).steps
            got = subject.run(trial.module, x)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # unexplained there, or any class's own: it does not take such an input
            if 0 in lead:
                trial.takes_empty = False
            else:
                refused.add(len(lead) + 1)
            continue
        if 0 in lead:
            if not isinstance(got, Tensor) or got.numel():
                return "computes something else of an empty input"
            continue
        truth = compute(trial.wide, x.double())
        if (
            not isinstance(got, Tensor)
            or got.shape != truth.shape
            or not error_of(got, truth, got.dtype) <= LIMITS.formula_fp32
        ):
            return f"computes something else of an input of shape {tuple(x.shape)}"
    if (
        refused or trial.reading.by_rank or not trial.takes_empty
    ):  # of more dimensions the code was not read
        trial.dims = (subject.dims or frozenset(range(1, 6))) - refused
    return None


def trained(module: nn.Module) -> nn.Module:
    """The replica in `train()`, with buffers of its own, which it may write to."""
    children = {n: trained(c) for n, c in module._modules.items() if c is not None}
    copy = replicate(module, children)
    copy._parameters.update(module._parameters)
    copy._buffers.update({n: own_copy(b) for n, b in module._buffers.items()})
    copy.training = True
    return copy


def _computes_otherwise(trial: Trial, base: Trial) -> str | None:
    """How the code does something else in these dtypes than in fp32 (`base`), beside its casts.

    In fp32 it was compared far out, with parameters of other scales, of other numbers of
    dimensions: that holds here as long as the code is the same.
    """
    ours, theirs = trial.reading, base.reading
    narrows, as_there = (r.counts.get("narrowing", 0) > 0 for r in (ours, theirs))
    if torch.float16 not in trial.dtypes and narrows and not as_there:
        return "casts to float16, which it does not"
    if ours.by_rank is not theirs.by_rank or ours.autocasts != theirs.autocasts:
        return "asks for what it does not ask for"
    if ours.steps != theirs.steps:
        return "computes something else than"
    subject = trial.subject
    for lead in _RANKS if ours.by_rank else ():
        dims = len(lead) + 1
        if 0 in lead or dims not in base.steps_of or (base.dims and dims not in base.dims):
            continue
        x = subject.reshaped(trial.x, lead)  # not under autocast, which stacks no two half types
        with trial.context():
            reading = subject.read(trial.module, x)
        if reading.steps != base.steps_of[dims]:
            return f"computes something else of {dims} dimensions than"
    return None


def fits_of(
    subject: Subject,
    combo: Combo,
    matches: list[Formula],
    base: Trial,
    widens: bool | None = None,
) -> tuple[Trial, dict[Formula, int]] | Refusal:
    """Formulas that explain the original in these dtypes, with the count of values that differ.

    Formulas equal in fp32 (`base`) differ here in where they round.
    """
    try:
        trial = Trial(subject, combo, base.device)
        why = _computes_otherwise(trial, base)
        if why is not None:
            raise Unexplained(f"it {why} in float32")
    except torch.OutOfMemoryError:
        raise
    except Unexplained as e:
        return Refusal("unexplained", f"with {combo} its code is no formula's: {e}")
    except Exception as e:
        return Refusal("unsupported", f"the original does not take {combo}: {e}")
    fits: dict[Formula, int] = {}
    dtypes = set()
    for formula in matches:
        candidate = trial.candidate(formula, widens)
        dtypes.add(str(candidate.dtype))
        if candidate.dtype != trial.original.dtype:
            continue
        error = error_of(trial.original, trial.truth(formula), candidate.dtype)
        # what the original does not round to half on its way, no kernel may
        if (
            error
            <= LIMITS.formula_fp32
            < error_of(candidate, trial.truth(formula), candidate.dtype)
        ):
            continue
        if error <= formula_limit(trial, candidate.dtype):
            fits[formula] = int((candidate != trial.original).sum())
    if fits:
        return trial, fits
    return Refusal(
        "mismatch",
        f"with {combo} the original gives {trial.original.dtype} values that no formula "
        f"reproduces ({', '.join(sorted(dtypes))})",
    )


def by_consistency(matches: list[Formula], outcomes: list[dict[Formula, int]]) -> list[Formula]:
    """Matches, best first: fits most dtype combinations, then fewest differing values.

    One formula should explain a module in every dtype; where all dtypes agree, several do.
    """
    return sorted(
        matches,
        key=lambda f: (-sum(f in o for o in outcomes), sum(o.get(f, 0) for o in outcomes)),
    )
