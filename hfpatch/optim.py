"""`hfpatch.optim.AdamW` and `clip_grad_norm_`: PyTorch's, on the fused kernels.

Import it by name (`import hfpatch.optim`): `import hfpatch` alone does not load it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import add, attrgetter, is_, itemgetter, le
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hfpatch import dtensors
from hfpatch.handover import PLAIN_TENSORS, local_kernel, tensor_refusal, warn_of_handover
from hfpatch.kernels.sources import Kernel, local_package
from hfpatch.proof.subject import is_dtensor

__all__ = ["AdamW", "clip_grad_norm_"]

_GRAD, _IS_NONE = attrgetter("grad"), partial(is_, None)
_DTYPE, _LAYOUT, _NBYTES = attrgetter("dtype"), attrgetter("layout"), attrgetter("nbytes")
_IS_CPU, _IS_CUDA, _INDEX = attrgetter("is_cpu"), attrgetter("is_cuda"), Tensor.get_device
_PLAIN = set(PLAIN_TENSORS)
_LARGEST = torch.finfo(torch.float32).max
_List = list[Tensor]
_Lists = tuple[_List, _List, _List, _List, _List, _List]
_Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


def _dense(tensor: Tensor) -> bool:
    """Whether the strides leave neither gaps nor overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _tensor_refusal(tensor: Tensor) -> str | None:
    """Why no kernel takes this tensor, or None."""
    why = tensor_refusal("adamw_step", tensor)
    if why is None and not _dense(tensor):
        why = "strides with gaps or overlaps"
    return why


def _shared(tensors: Sequence[Tensor]) -> set[int]:
    """Addresses where those begin that lie in memory of another of them, as weights tied by
    `.data` do, or a part of a weight that is a parameter too: the kernels write all tensors at
    once, and PyTorch one after the other. The tensors are dense."""
    starts = list(map(Tensor.data_ptr, tensors))  # 0: no elements
    ends = list(map(add, starts, map(_NBYTES, tensors)))
    in_order = sorted(starts)
    if all(map(le, sorted(ends), in_order[1:])):
        return set()
    shared: set[int] = set()
    owner, reach = 0, 0
    for start, end in sorted(zip(starts, ends, strict=True)):
        if start < reach:
            shared |= {owner, start}
        if end > reach:
            owner, reach = start, end
    return shared


def _warn(who: str, reasons: Iterable[str]) -> None:
    warn_of_handover(f"optim.{who}", "PyTorch's own implementation", reasons)


class _Bucket:
    """Parameters that one launch can update, with their state."""

    def __init__(self) -> None:
        self.params: _List = []
        self.grads: _List = []
        self.exp_avgs: _List = []
        self.exp_avg_sqs: _List = []
        self.max_exp_avg_sqs: _List = []
        self.steps: _List = []

    def lists(self) -> _Lists:
        """In the order of `torch.optim.adamw.adamw`'s arguments."""
        return (
            self.params, self.grads, self.exp_avgs, self.exp_avg_sqs,
            self.max_exp_avg_sqs, self.steps,
        )  # fmt: skip

    def rows(self) -> Iterable[_Row]:
        tops: Sequence[Tensor | None] = self.max_exp_avg_sqs or [None] * len(self.params)
        return zip(
            self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, tops, self.steps, strict=True
        )

    @classmethod
    def of(cls, rows: Iterable[_Row]) -> _Bucket:
        bucket = cls()
        for row in rows:
            bucket.append(row)
        return bucket

    def append(self, row: _Row) -> None:
        for values, value in zip(self.lists(), row, strict=True):
            if value is not None:
                values.append(value)


class _Kept:
    """A group's parameters, and their entries in the optimizer's state."""

    def __init__(self, params: _List, entries: list[dict[str, Any]]) -> None:
        self.params, self.entries = params, entries
        self.refused = False

    def step(self, group: dict[str, Any], grads: _List) -> bool | None:
        """Whether it was done; False: this group's tensors are not for one launch; None: not now,
        but perhaps at another step. Without True nothing has changed."""
        if tensor_refusal("adamw_step", self.params[0]) is not None:
            return False
        calls = local_package().module.calls
        try:
            firsts, seconds, steps = (
                list(map(itemgetter(name), self.entries))
                for name in ("exp_avg", "exp_avg_sq", "step")
            )
            tops = list(map(itemgetter("max_exp_avg_sq"), self.entries)) if group["amsgrad"] else []
        except KeyError:
            return False
        counted = steps[0].is_cpu
        if not counted:
            torch._foreach_add_(steps, 1)
        elif not calls.count(steps, 1.0):
            return False
        beta1, beta2 = group["betas"]
        done: bool | None = calls.over_lists(
            "adamw_step", self.params, grads, firsts, seconds, tops, (), steps,
            None, None, None, None, group["lr"], float(beta1), float(beta2), group["eps"],
            group["weight_decay"], int(group["maximize"]),
        )  # fmt: skip
        if done:
            changed = self.params + firsts + seconds + tops + (steps if counted else [])
            torch.autograd.graph.increment_version(changed)
        elif counted:
            calls.count(steps, -1.0)
        else:
            torch._foreach_add_(steps, -1)
        return done


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is one kernel launch over all parameters of a group.

    A subclass with the same constructor, state and `state_dict`, so checkpoints go both ways. The
    formula is the same, in fp32 whatever the dtypes, each result rounded once (as
    ``torch.optim.AdamW(fused=True)`` has it); of fp16 and bf16 parameters the moments have that
    dtype, as PyTorch's do. The default ``eps`` is zero in fp16, where PyTorch's unfused formula
    divides by it when a second moment is zero too, and the parameter becomes infinite; here, as
    with ``fused=True``, it stays what it is.

    Of DTensors (FSDP2, tensor parallel) each process updates its part, where parameter, gradient
    and state are spread alike.

    Without a kernel for them, parameters are handed over to PyTorch's own implementation, with one
    warning per optimizer: other dtypes (fp64, complex), other tensor subclasses, layouts with
    gaps or with a gradient laid out otherwise, parameters that share memory,
    ``differentiable=True``, a learning rate below 0 or not finite, a device or machine without our
    kernels. Sparse gradients are an error, as in PyTorch.

    ``fused=True`` keeps its meaning for `torch.amp.GradScaler` (gradients are unscaled, and a step
    with infinities is passed over, on the device; here the gradients themselves stay scaled), and
    like ``capturable=True`` puts the step counts on the device, which a captured CUDA graph needs.
    ``foreach`` concerns only what is handed over.
    """

    _told = False
    #: The state after the last step, in its order, and what each group had of it.
    _seen: tuple[list[Tensor], list[dict[str, Any]]] | None = None
    _kept: dict[int, _Kept] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: a CUDA graph is captured and a group is neither capturable nor fused; or a
                gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reasons: list[str] = []
        kept = None if torch.compiler.is_compiling() else self._what_is_kept()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            for index, group in enumerate(self.param_groups):
                if kept is None or not self._step_kept(group, kept.get(index)):
                    self._step_group(group, reasons)
        if reasons and not self._told:
            self._told = True
            _warn("AdamW", reasons)
        return loss

    def _what_is_kept(self) -> dict[int, _Kept] | None:
        """What each group's parameters have in `state`; None where `state` is not what it was after
        the step before. Identities alone are compared: a hash of each tensor takes longer."""
        state, seen = self.state, self._seen
        if (
            seen is not None
            and len(state) == len(seen[0])
            and all(map(is_, state, seen[0]))
            and all(map(is_, state.values(), seen[1]))
        ):
            return self._kept
        self._seen, self._kept = (list(state), list(state.values())), {}
        for index, group in enumerate(self.param_groups):
            params = list(group["params"])
            if params and all(p in state and state[p] for p in params):
                self._kept[index] = _Kept(params, [state[p] for p in params])
        return None

    def _step_kept(self, group: dict[str, Any], kept: _Kept | None) -> bool:
        """A step past everything that is asked for each parameter, where all have gradients: one
        pass of C reads the tensors, and the kernel's own checks refuse what it cannot do."""
        if kept is None or kept.refused or getattr(self, "found_inf", None) is not None:
            return False
        if getattr(self, "grad_scale", None) is not None or isinstance(group["lr"], Tensor):
            return False
        params: _List = group["params"]
        if len(params) != len(kept.params) or not all(map(is_, params, kept.params)):
            return False
        grads = list(map(_GRAD, params))
        if any(map(_IS_NONE, grads)):
            return False
        _check_capture(group)
        if _group_refusal(group) is not None:
            return False
        done = kept.step(group, grads)
        kept.refused = done is False
        return bool(done)

    def _step_group(self, group: dict[str, Any], reasons: list[str]) -> None:
        everything = _Bucket()
        has_complex = self._init_group(group, *everything.lists())  # type: ignore[no-untyped-call]
        if not everything.params:
            return
        _check_capture(group)
        if torch.compiler.is_compiling():  # inductor fuses PyTorch's own formula
            self._hand_over(group, everything, has_complex)
            return
        whole_group = _group_refusal(group)
        here = everything
        if whole_group is None and not set(map(type, everything.params)) <= _PLAIN:
            here = _Bucket.of(map(_part_here, everything.rows()))
        if whole_group is None and _alike(here) and not _shared(here.params):
            self._launch(group, here)  # as mostly: nothing to sort
            _count_writes(everything, here)
            return
        kinds: list[tuple[Any, ...] | None] = []
        refusals = [whole_group or _refusal(*row) for row in here.rows()]
        shared = _shared([p for p, why in zip(here.params, refusals, strict=True) if why is None])
        for row, why in zip(here.rows(), refusals, strict=True):
            p, _, m, *_ = row
            if why is None and shared and p.data_ptr() in shared:
                why = "memory that parameters share"
            kinds.append((p.device, p.dtype, m.dtype) if why is None else None)
            if why is not None:
                reasons.append(why)
        buckets: defaultdict[tuple[Any, ...] | None, _Bucket] = defaultdict(_Bucket)
        wholes: defaultdict[tuple[Any, ...] | None, _Bucket] = defaultdict(_Bucket)
        for kind, row, whole in zip(kinds, here.rows(), everything.rows(), strict=True):
            buckets[kind].append(row)
            wholes[kind].append(whole)
        theirs = wholes.pop(None, None)
        for kind, bucket in buckets.items():
            if kind is not None:
                self._launch(group, bucket)
                _count_writes(wholes[kind], bucket)
        if theirs is not None:
            self._hand_over(group, theirs, has_complex)

    def _launch(self, group: dict[str, Any], bucket: _Bucket) -> None:
        device = bucket.params[0].device
        kernel = local_kernel("adamw_step", device.type)
        assert isinstance(kernel, Kernel)
        if bucket.steps[0].is_cpu:  # a number would become a tensor for each of them
            one = torch.ones((), dtype=torch.float32, device="cpu")
            torch._foreach_add_(bucket.steps, one, alpha=1.0)
        else:
            torch._foreach_add_(bucket.steps, 1)
        found_inf = _scalar(getattr(self, "found_inf", None), device)
        kernel.fn(
            bucket.params,
            bucket.grads,
            bucket.exp_avgs,
            bucket.exp_avg_sqs,
            bucket.steps,
            bucket.max_exp_avg_sqs,
            lr=_number(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=_scalar(getattr(self, "grad_scale", None), device),
            found_inf=found_inf,
        )
        if found_inf is not None:  # a step that was passed over does not count
            torch._foreach_sub_(bucket.steps, [found_inf] * len(bucket.steps))

    def _hand_over(self, group: dict[str, Any], bucket: _Bucket, has_complex: bool) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            *bucket.lists(),
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def _group_refusal(group: dict[str, Any]) -> str | None:
    """Why no parameter of the group can have the kernel, or None."""
    if group["differentiable"]:
        return "differentiable=True"
    if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group["betas"]):
        return "`betas` on a device"
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and value.device.type != "cpu":
            continue
        if not 0 <= float(value) <= _LARGEST:
            return f"{name}={float(value)}"
    return None


def _part_here(row: _Row) -> _Row:
    there = [t for t in row[:-1] if t is not None]
    parts = dtensors.parts_here(there)
    if parts is None:
        return row
    top = parts[4] if len(parts) > 4 else None
    return (parts[0], parts[1], parts[2], parts[3], top, row[-1])


def _count_writes(whole: _Bucket, here: _Bucket) -> None:
    """A write to a DTensor's part is one to the DTensor, for autograd."""
    if whole is not here:
        lists = (whole.params, whole.exp_avgs, whole.exp_avg_sqs, whole.max_exp_avg_sqs)
        changed = [t for values in lists for t in values if is_dtensor(t)]
        torch.autograd.graph.increment_version(changed)


def _refusal(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, top: Tensor | None, step: Tensor
) -> str | None:
    """Why the kernel cannot update this parameter, or None."""
    why = _tensor_refusal(p)
    if why is not None:
        return why
    dtype, device, stride = p.dtype, p.device, p.stride()
    if type(grad) not in PLAIN_TENSORS or grad.dtype != dtype:
        return f"a gradient of {type(grad).__name__}, {grad.dtype} for {dtype}"
    state_dtype = m.dtype
    if state_dtype not in (dtype, torch.float32):
        return f"a state of {state_dtype} for {dtype}"
    for t in (v, top):
        if t is not None and t.dtype != state_dtype:
            return f"states of {state_dtype} and {t.dtype}"
    same = True
    for t in (grad, m, v, top):
        if t is None:
            continue
        if t.device != device:
            return "a gradient or state on another device"
        same = same and t.stride() == stride
    if step.dtype != torch.float32 or not (step.is_cpu or step.device == device):
        return f"a step count of {step.dtype} on {step.device}"
    if not same and not all(t is None or t.is_contiguous() for t in (p, grad, m, v, top)):
        return "a gradient or state with other strides than its parameter"
    return None


def _alike(bucket: _Bucket) -> bool:
    """Whether one launch can update all of these, told by what mostly holds: one device, one dtype
    of the parameters and one of their state, everything contiguous. Asking `_refusal` of each takes
    more than twice as long."""
    first = bucket.params[0]
    tensors = bucket.params + bucket.grads
    state = bucket.exp_avgs + bucket.exp_avg_sqs + bucket.max_exp_avg_sqs
    state_dtype = bucket.exp_avgs[0].dtype
    return (
        tensor_refusal("adamw_step", first) is None
        and set(map(type, tensors)) <= _PLAIN
        and set(map(_LAYOUT, bucket.params)) == {torch.strided}
        and set(map(_DTYPE, tensors)) == {first.dtype}
        and set(map(_DTYPE, state)) == {state_dtype}
        and state_dtype in (first.dtype, torch.float32)
        and set(map(_DTYPE, bucket.steps)) == {torch.float32}
        and _all_on(first.device, tensors + state)
        and all(map(Tensor.is_contiguous, tensors + state))
        and (all(map(_IS_CPU, bucket.steps)) or _all_on(first.device, bucket.steps))
    )


def _all_on(device: torch.device, tensors: _List) -> bool:
    """Without an object for the device of each."""
    if device.type == "cpu":
        return all(map(_IS_CPU, tensors))
    if device.type == "cuda":
        return all(map(_IS_CUDA, tensors)) and set(map(_INDEX, tensors)) == {device.index}
    return all(t.device == device for t in tensors)


def _check_capture(group: dict[str, Any]) -> None:
    if group["capturable"] or group["fused"] or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and a group of `AdamW` has its step counts on the "
            "CPU: every replay would be the same step. Use `AdamW(..., capturable=True)`"
        )


def _number(lr: float | Tensor) -> float | Tensor:
    """A learning rate as the kernel takes it: a tensor stays one where it is on a device."""
    if not isinstance(lr, Tensor):
        return lr
    return float(lr) if lr.device.type == "cpu" else lr.to(torch.float32)


def _scalar(value: Tensor | None, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    # a copy to the host must have arrived when the CPU reads it
    return value.to(device, torch.float32, non_blocking=device.type == "cuda")


_warned_clip: set[str] = set()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` on the fused kernels, without a synchronization.

    Gradients are multiplied by ``min(1, max_norm / (total_norm + 1e-6))``. The norm is summed in
    fp32 and fp64; the same gradients give the same bits.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: at least 0, may be infinite (then only the norm is computed).
        norm_type: 2 and infinity have kernels; other norms, gradients that no kernel takes or that
            share memory, and a parameter listed twice, are PyTorch's, with a warning the first
            time.
        error_if_nonfinite: raise if the norm is NaN or infinite, which waits for the device.
        foreach: as in PyTorch, where it takes over.

    Returns:
        The total norm before clipping, 0 dimensions; fp32, also of fp16 and bf16 gradients. Of
        DTensors a DTensor, as PyTorch's is; each process has all of it.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if dtensors.can_clip(grads, norm_type):
        return dtensors.clip(grads, float(max_norm), float(norm_type), error_if_nonfinite)
    why = None if torch.compiler.is_compiling() else _clip_refusal(grads, norm_type)
    if why is not None and why not in _warned_clip:
        _warned_clip.add(why)
        _warn("clip_grad_norm_", [why])
    if why is not None or not grads or torch.compiler.is_compiling():
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    clip = local_package().module.clip_grad_norm_
    total: Tensor = clip(parameters, float(max_norm), norm_type, error_if_nonfinite)
    return total


def _clip_refusal(grads: list[Tensor], norm_type: float) -> str | None:
    if float(norm_type) not in (2.0, float("inf")):
        return f"norm_type={norm_type}"
    if len(set(map(id, grads))) < len(grads):
        return "a parameter listed twice"  # the kernel would scale it at two places at once
    why = next((why for g in grads if (why := _tensor_refusal(g)) is not None), None)
    return "memory that gradients share" if why is None and _shared(grads) else why
