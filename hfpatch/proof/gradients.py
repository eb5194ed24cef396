"""Are the original's gradients those of the formula?

A formula that explains a module's values need not explain its gradients: a straight-through
estimator, a clipped gradient, a detached statistic give the same values and other gradients. Where
an adapter computes the formula by other operators under autograd, these must be the formula's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hfpatch.kernels.sources import reference_kernel
from hfpatch.planning.plan import Refusal
from hfpatch.proof.identify import trained
from hfpatch.proof.subject import Formula, Tensor
from hfpatch.proof.trial import LIMITS, Trial, error_of, formula_limit, seeded
from hfpatch.proof.verify import gradients


def explain_gradients(trial: Trial, formula: Formula, *, briefly: bool = False) -> Refusal | None:
    """Compare the original's gradients, of its input and of every parameter, with the formula's in
    fp64, in `eval()` and in `train()`; and its values where gradients are recorded.

    `briefly`: in `train()` alone, near zero, unless the code has a gradient of its own. Without
    one it is made of analytic operations, whose gradients are those of their values: what was
    found in one combination of dtypes holds in the others, where the values are the formula's.

    Returns why the formula does not explain them. Nothing is asked of a kernel.
    """
    briefly = briefly and not trial.reading.own_gradient
    clean = trial.x.nan_to_num(0.0, 0.0, 0.0)
    near = clean.clamp(-8, 8)
    upstream = torch.randn(trial.original.shape, generator=seeded(2))
    modules = {"train": trained(trial.module)}
    if not briefly:
        modules["eval"] = trial.module
    why = _differ(trial, formula, modules, near, upstream)
    if briefly:
        return why
    # In fp16 gradients overflow before the values do, and autocast rounds what they are made of. Of
    # parameters they are sums over rows, of which the largest decide: of far ones nothing is seen.
    if why is None and torch.float16 not in trial.dtypes and trial.combo.autocast is None:
        rows = upstream.shape[-2]
        upstream *= torch.tensor([1.0, 1e-3, 1e3]).repeat(rows)[:rows, None]  # is it clipped?
        why = _differ(trial, formula, modules, clean, upstream, far=True)
    return why


def _differ(
    trial: Trial,
    formula: Formula,
    modules: Mapping[str, nn.Module],
    x: Tensor,
    upstream: Tensor,
    *,
    far: bool = False,
) -> Refusal | None:
    """Compare values and gradients for one input; for `far` ones the input's gradient alone.

    `modules`: the original in `eval()` and in `train()`, by these names.
    """
    x = trial.off_bends(formula, x)
    subject, name = trial.subject, type(trial.subject.module).__name__
    upstream = upstream.to(x.device, trial.original.dtype)
    compute = subject.compute(reference_kernel(formula.op), formula)
    wide = (x.double(), upstream.double(), nullcontext())
    truth, exact_y = gradients(subject, trial.wide, compute, *wide)
    for mode, module in modules.items():
        try:
            found, y = gradients(subject, module, subject.run, x, upstream, trial.context())
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            return Refusal(
                "mismatch",
                f"`{name}` has no gradient in `{mode}()` with {trial.combo}: "
                f"{type(e).__name__}: {e}",
            )
        if not far and not _is_value(trial, y, exact_y):
            return Refusal(
                "mismatch",
                f"`{name}` computes something else where gradients are recorded than elsewhere",
            )
        for tensor, exact in truth.items():
            if (tensor == "input" or not far) and not _is_near(trial, found.get(tensor), exact):
                return Refusal(
                    "mismatch",
                    f"the gradient of `{name}` for `{tensor}` in `{mode}()` is not that of "
                    f"{formula}, with {trial.combo}",
                )
    return None


def _is_value(trial: Trial, y: Any, exact: Tensor) -> bool:
    """Whether a result, made where autograd records, is the formula's."""
    return (
        isinstance(y, Tensor)
        and (y.shape, y.dtype) == (exact.shape, trial.original.dtype)
        and error_of(y.detach(), exact.detach(), y.dtype) <= formula_limit(trial, y.dtype)
    )


def _is_near(trial: Trial, found: Tensor | None, exact: Tensor | None) -> bool:
    if found is None or exact is None:
        return found is None and exact is None
    if found.shape != exact.shape:
        return False
    limit = LIMITS.gradient * formula_limit(trial, found.dtype)
    return error_of(found, exact, found.dtype) <= limit
