"""Does the kernel compute the formula, and its gradient, as well as the original does?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import set_multithreading_enabled
from torch.autograd.graph import saved_tensors_hooks

from hfpatch.errors import FAILURES
from hfpatch.foreign.memory import Held, bits
from hfpatch.foreign.process import Process
from hfpatch.kernels.sources import Kernel, reference_kernel
from hfpatch.planning.plan import Refusal
from hfpatch.proof.subject import Formula, Forward, Subject, Tensor
from hfpatch.proof.trial import LIMITS, Trial, error_of, formula_limit, kernel_slack, seeded
from hfpatch.text import told


def verify_values(
    trial: Trial, formula: Formula, kernel: Kernel, compute: Forward
) -> tuple[float, float] | Refusal:
    """Run the kernel: no farther from the fp64 value than the original, plus one rounding.

    Returns its largest distance from the original, absolute and relative.
    """
    what = f"kernel `{kernel.source}` for `{formula.op}`"
    before = trial.x.clone()
    held = [(n, t, t.clone()) for n, t in _own_tensors(trial)] if not kernel.own else []
    process = None if kernel.own else Process.now()
    try:
        with trial.context():
            y = compute(trial.module, trial.x)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as e:
        return Refusal("rejected", f"{what} failed with {trial.combo}: {told(e)}")
    finally:
        changed = process.changed() if process is not None else ()
    if changed:
        return Refusal("rejected", f"{what} changed {', '.join(changed)}")
    for name, now, was in held:
        if not torch.equal(bits(was), bits(now)):
            return Refusal("rejected", f"{what} wrote to `{name}`")
    if not isinstance(y, Tensor) or y.shape != trial.original.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        return Refusal(
            "rejected", f"{what} returned {got}, expected shape {tuple(trial.original.shape)}"
        )
    if y.dtype != trial.original.dtype:
        return Refusal("rejected", f"{what} returned {y.dtype}, expected {trial.original.dtype}")
    if not torch.equal(bits(before), bits(trial.x)):
        return Refusal("rejected", f"{what} wrote to its input")
    truth = trial.truth(formula)
    ours = error_of(y, truth, y.dtype)
    theirs = error_of(trial.original, truth, y.dtype)
    if ours > theirs + kernel_slack(trial, y.dtype):
        return Refusal(
            "rejected",
            f"{what} is wrong with {trial.combo}: its largest error is {ours:.3g} epsilons of "
            f"{str(y.dtype).removeprefix('torch.')}, the original's {theirs:.3g}",
        )
    difference = (y.double() - trial.original.double()).abs()
    relative = error_of(y, trial.original.double(), y.dtype) * torch.finfo(y.dtype).eps
    return difference[difference.isfinite()].max().item(), relative


def _own_tensors(trial: Trial) -> list[tuple[str, Tensor]]:
    module = trial.module
    return [*module.named_parameters(), *module.named_buffers()]


def verify_foreign(
    trial: Trial, formula: Formula, kernel: Kernel, training: bool
) -> tuple[Kernel, tuple[str, ...]] | Refusal:
    """Ask a kernel that is not ours what `hfpatch.foreign` asks; of combinations of dtypes that the
    model does not have now, and under autocast, less.

    Returns the kernel with a watch on its calls, and notes for the report.
    """
    from hfpatch.foreign.battery import challenge
    from hfpatch.foreign.compare import Asked
    from hfpatch.foreign.watch import Watched

    what = f"kernel `{kernel.source}` for `{formula.op}`"
    given: list[tuple[Tensor | None, ...]] = []
    params: list[dict[str, Any]] = []
    asked = Asked(formula.op, formula.params)

    def record(call: Any, bound: dict[str, Any], training: bool) -> Any:
        def recorded(*tensors: Tensor | None) -> Any:
            held = Held.all_like(tensors)
            given.append(tuple(None if h is None else h.tensor for h in held))
            params.append(bound)
            return asked.formula(tensors)

        return recorded

    with trial.context():
        trial.subject.compute(replace(kernel, watch=record), formula, training)(
            trial.module, trial.x
        )
    if not given:
        return Refusal("rejected", f"{what} was not called with {trial.combo}")
    plain = replace(kernel, widens=None, watch=None)
    main = trial.subject.main_combo()
    few = trial.combo.autocast is not None or (trial.combo.x, trial.combo.param) != (
        main.x,
        main.param,
    )
    verdict = challenge(
        kernel.fn,
        plain.bind(dict(params[0]), training),
        Asked(formula.op, params[0]),
        given[0],
        trial.context,
        few=few,
        differentiated=plain.bind(dict(params[0]), True) if kernel.differentiable else None,
    )
    if verdict.why is not None:
        return Refusal("rejected", f"{what} {verdict.why}, with {trial.combo}")
    notes = []
    if verdict.state:
        names = ", ".join(f"`{n}`" for n in verdict.state)
        notes.append(
            f"{what} keeps state that changes from call to call ({names}): each of its calls is "
            "compared with the formula, which takes longer than the original"
        )
    if verdict.waits is not None:
        notes.append(f"{what} makes the host wait for the GPU in each call: {verdict.waits}")
    watched = Watched(kernel.fn, kernel.source, formula.op, verdict.state)
    return replace(kernel, watch=watched), tuple(notes)


def verify_gradients(
    trial: Trial, formula: Formula, kernel: Kernel, compute: Forward
) -> Refusal | None:
    """Differentiate it: every gradient has the original's dtype, and is no farther from the fp64
    one, a few roundings apart."""
    what = f"the gradient of kernel `{kernel.source}` for `{formula.op}`"
    x = trial.x.nan_to_num(0.0, 0.0, 0.0).clamp(-8, 8)  # in fp16 it overflows before the value
    x = trial.off_bends(formula, x)
    upstream = torch.randn(trial.original.shape, generator=seeded(2)).to(x.device)
    upstream = upstream.to(trial.original.dtype)
    subject = trial.subject
    reference = subject.compute(reference_kernel(formula.op), formula)
    try:
        theirs, _ = gradients(subject, trial.module, subject.run, x, upstream, trial.context())
        ours, _ = gradients(subject, trial.module, compute, x, upstream, trial.context())
        truth, _ = gradients(
            subject, trial.wide, reference, x.double(), upstream.double(), nullcontext()
        )
    except torch.OutOfMemoryError:
        raise
    except FAILURES as e:
        return Refusal("rejected", f"{what} failed with {trial.combo}: {told(e)}")
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
        mine, off = error_of(our, true, our.dtype), error_of(their, true, our.dtype)
        if not off <= LIMITS.gradient * formula_limit(trial, our.dtype):
            return Refusal(
                "mismatch", f"the original's gradient for `{name}` is not that of {formula}"
            )
        if mine > off + LIMITS.gradient * kernel_slack(trial, our.dtype):
            return Refusal(
                "rejected",
                f"{what} is wrong with {trial.combo}: its largest error for `{name}` is "
                f"{mine:.3g} epsilons of {str(our.dtype).removeprefix('torch.')}, the original's "
                f"{off:.3g}",
            )
    return None


def gradients(
    subject: Subject,
    module: nn.Module,
    run: Forward,
    x: Tensor,
    upstream: Tensor,
    context: AbstractContextManager[Any],
) -> tuple[dict[str, Tensor | None], Any]:
    """By the input and by the replica's own parameters; and what `run` returned."""
    models = {id(p) for p in subject.module.parameters()}
    leaves = {"input": x.clone().requires_grad_()}
    own = [(n, p) for n, p in module.named_parameters() if id(p) not in models]
    leaves |= {n: p for n, p in own if p.is_floating_point()}
    try:
        for leaf in leaves.values():
            leaf.requires_grad_()
        # a checkpoint counts what is saved: not what is saved here
        with recording():
            with context:
                y = run(module, leaves["input"])
            found = _pulled_back(y, upstream, list(leaves.values()))
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
    return dict(zip(leaves, found, strict=True)), y


def _pulled_back(y: Any, upstream: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(y, leaves, upstream)`, which compares the two shapes by means of SymPy:
    its import takes over a second where nobody has. Nobody reads the sum, and its gradient by `y`
    is `upstream`, bit for bit. In this thread: cuBLAS would give another one 32 MiB to work in,
    for good."""
    if y.shape != upstream.shape:
        raise RuntimeError(
            f"it returned a tensor of shape {list(y.shape)}, expected {list(upstream.shape)}"
        )
    found: tuple[Tensor | None, ...]
    with set_multithreading_enabled(False):
        found = torch.autograd.grad((y * upstream).sum(), leaves, allow_unused=True)
    return found


@contextmanager
def recording() -> Iterator[None]:
    """Autograd records; a checkpoint that this is inside of does not count what is saved here."""
    inside = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    with torch.enable_grad(), saved_tensors_hooks(_same, _same) if inside else nullcontext():
        yield


def _same(x: Tensor) -> Tensor:
    return x
