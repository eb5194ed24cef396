"""Are the original's gradients those of the formula?

A formula that explains a module's values need not explain its gradients: a straight-through
estimator, a clipped gradient, a detached statistic give the same values and other gradients. Where
an adapter computes the formula by other operators under autograd, these must be the formula's too.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from hfpatch.identify import trained
from hfpatch.patches.base import Formula, Tensor
from hfpatch.plan import Refusal
from hfpatch.sources import reference_kernel
from hfpatch.trial import LIMITS, Trial, error_of, formula_limit, seeded
from hfpatch.verify import gradients, recording


def explain_gradients(trial: Trial, formula: Formula) -> Refusal | None:
    """Compare the original's gradients, of its input and of every parameter, with the formula's in
    fp64, in `eval()` and in `train()`; and its values where gradients are recorded.

    Returns why the formula does not explain them. Nothing is asked of a kernel.
    """
    clean = trial.x.nan_to_num(0.0, 0.0, 0.0)
    upstream = torch.randn(trial.original.shape, generator=seeded(2))
    why = _differ(trial, formula, clean.clamp(-8, 8), upstream)
    # In fp16 gradients overflow before the values do, and autocast rounds what they are made of. Of
    # parameters they are sums over rows, of which the largest decide: of far ones nothing is seen.
    if why is None and torch.float16 not in trial.dtypes and trial.combo.autocast is None:
        rows = upstream.shape[-2]
        upstream *= torch.tensor([1.0, 1e-3, 1e3]).repeat(rows)[:rows, None]  # is it clipped?
        why = _differ(trial, formula, clean, upstream, only="input")
    return why or _recorded_values(trial, formula, clean.clamp(-8, 8))


def _differ(
    trial: Trial, formula: Formula, x: Tensor, upstream: Tensor, only: str | None = None
) -> Refusal | None:
    """Compare the gradients for one input; with `only` that of one tensor."""
    subject, name = trial.subject, type(trial.subject.module).__name__
    upstream = upstream.to(x.device, trial.original.dtype)
    compute = subject.compute(reference_kernel(formula.op), formula)
    truth = gradients(subject, trial.wide, compute, x.double(), upstream.double(), nullcontext())
    for module, mode in ((trial.module, "eval"), (trained(trial.module), "train")):
        try:
            found = gradients(subject, module, subject.run, x, upstream, trial.context())
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            return Refusal(
                "mismatch",
                f"`{name}` has no gradient in `{mode}()` with {trial.combo}: "
                f"{type(e).__name__}: {e}",
            )
        for tensor, exact in truth.items():
            if only in (None, tensor) and not _is_near(trial, found.get(tensor), exact):
                return Refusal(
                    "mismatch",
                    f"the gradient of `{name}` for `{tensor}` in `{mode}()` is not that of "
                    f"{formula}, with {trial.combo}",
                )
    return None


def _is_near(trial: Trial, found: Tensor | None, exact: Tensor | None) -> bool:
    if found is None or exact is None:
        return found is None and exact is None
    if found.shape != exact.shape:
        return False
    limit = LIMITS.gradient * formula_limit(trial, found.dtype)
    return error_of(found, exact, found.dtype) <= limit


def _recorded_values(trial: Trial, formula: Formula, x: Tensor) -> Refusal | None:
    """The values of the original where autograd records: a forward may ask for that."""
    with recording(), trial.context():
        found = trial.subject.run(trial.module, x.clone().requires_grad_())
    compute = trial.subject.compute(reference_kernel(formula.op), formula)
    truth = compute(trial.wide, x.double())
    if isinstance(found, Tensor) and found.shape == truth.shape:
        error = error_of(found.detach(), truth, found.dtype)
        if found.dtype == trial.original.dtype and error <= formula_limit(trial, found.dtype):
            return None
    name = type(trial.subject.module).__name__
    return Refusal(
        "mismatch", f"`{name}` computes something else where gradients are recorded than elsewhere"
    )
