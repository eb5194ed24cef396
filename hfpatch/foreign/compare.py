"""Is what a kernel returned the formula's, row by row?

What decides is `hfpatch.proof.trial.Limits`, in epsilons of the result's dtype relative to the
largest value of each row. A row is right where it is as near to the formula in fp64 as the formula
in the tensors' own dtypes is, or is what that gives: where its squares overflow both are allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.foreign.memory import bits
from hfpatch.foreign.samples import ROWWISE
from hfpatch.ops import OPS
from hfpatch.proof.trial import LIMITS

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

_CHUNK = 1 << 22  # elements that are compared at once
#: A row that the formula itself misses by more is compared with what the formula gives there.
_MISSED = 256.0
#: Of other rows' errors, how much a row may have in any case: it may be exact by luck.
_LUCK = 2.0


@dataclass(frozen=True)
class Asked:
    """What a kernel stands for: an op and its parameters."""

    op: str
    params: Mapping[str, Any]

    def formula(self, tensors: Tensors) -> Any:
        """What the reference gives in the tensors' own dtypes; also what is used instead of a
        kernel that does not do, and differentiable then."""
        device = next((t.device.type for t in tensors if t is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return OPS[self.op].reference(*tensors, **self.params)

    def fused(self, tensors: Tensors) -> Any:
        """What PyTorch's fused operators give, or None where they do not take the call."""
        device = next((t.device.type for t in tensors if t is not None), "cpu")
        try:
            with torch.autocast(device, enabled=False):
                return OPS[self.op].aten(*tensors, **self.params)
        except RuntimeError:
            return None

    def truth(self, tensors: Tensors) -> Any:
        """What it gives in fp64."""
        return self.formula([None if t is None else wide(t) for t in tensors])


def wide(t: Tensor) -> Tensor:
    """`t` in fp64."""
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t


def form_of(y: Any, expected: Any, tensors: Tensors) -> str | None:
    """Why `y` is no result like `expected`, whatever its values are, or None."""
    if isinstance(expected, tuple):
        if not isinstance(y, (tuple, list)) or len(y) != len(expected):
            return f"returned {_describe(y)}, expected {len(expected)} tensors"
        whys = (form_of(a, b, tensors) for a, b in zip(y, expected, strict=True))
        return next((why for why in whys if why is not None), None)
    if type(y) is not Tensor:
        return f"returned {_describe(y)}, expected a tensor"
    if y.layout != torch.strided or y.is_nested or y.is_neg() or y.is_conj() or y.is_quantized:
        return "returned a tensor whose memory does not hold its values"
    if y.shape != expected.shape:
        return f"returned shape {list(y.shape)}, expected {list(expected.shape)}"
    if y.dtype != expected.dtype:
        return f"returned {y.dtype}, expected {expected.dtype}"
    if y.device != expected.device:
        return f"returned a tensor on {y.device}, expected {expected.device}"
    dense = expected.is_contiguous() and all(t is None or t.is_contiguous() for t in tensors)
    if y.numel() and dense and not y.is_contiguous():
        return f"returned strides {y.stride()}, expected a contiguous tensor"
    if y.numel() and any(n > 1 and s == 0 for n, s in zip(y.shape, y.stride(), strict=True)):
        return "returned a tensor whose elements share memory"
    mine = y.untyped_storage().data_ptr()
    if y.numel() and any(t is not None and t.untyped_storage().data_ptr() == mine for t in tensors):
        return "returned a tensor in the memory of an input"
    return None


def keeps(y: Any) -> str | None:
    """Why a result without a gradient, that the caller has one name for, is not the caller's alone:
    somebody else holds it, or its memory; or None. One that is no tensor is `form_of`'s to tell."""
    if any(type(t) is not Tensor or t.layout != torch.strided or t.is_nested for t in listed(y)):
        return None
    if any(t.requires_grad for t in listed(y)):
        return "returned a tensor that requires a gradient where none is recorded"
    if isinstance(y, Tensor) and _holders(y) > _ALONE[0]:
        return "keeps its result, which a later call can overwrite"
    for tensor in listed(y):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            return "returned a tensor of inference mode, which autograd cannot use"
        usual = _ALONE[1]
        if tensor._is_view():  # what it is a view of may be nobody else's either
            usual += 1
            base = tensor._base
            if _holders(base) > _ALONE[0]:
                return "keeps what its result is a view of, which a later call can overwrite"
        if tensor.numel() and _in_its_memory(tensor) > usual:
            return "keeps the memory of its result, which a later call can overwrite"
    return None


def _holders(y: Tensor) -> int:
    return sys.getrefcount(y)


def _in_its_memory(y: Tensor) -> int:
    """How many tensors, and wrappers of it, hold the storage of `y`."""
    return int(torch._C._storage_Use_Count(y.untyped_storage()._cdata))


def _alone(y: Tensor) -> tuple[int, int]:
    return _holders(y), _in_its_memory(y)


def _usual() -> tuple[int, int]:
    y = torch.empty(1, device="cpu")
    return _alone(y)


#: The counts of a tensor that only its caller holds: they differ by the version of Python.
_ALONE = _usual()


def _describe(y: Any) -> str:
    if isinstance(y, Tensor):
        return f"{type(y).__name__} {list(y.shape)}"
    return type(y).__name__


def wrong_values(asked: Asked, tensors: Tensors, y: Any) -> str | None:
    """Why the values of `y`, whose form is right, are not the formula's; or None."""
    # a proof's default device is a mode that every operator would pass through
    with torch._C.DisableTorchFunction():
        for part, mine in _parts(asked, tensors, y):
            plain = asked.formula(part)
            if _identical(mine, plain):
                continue

            def shaken(part: Tensors = part) -> Any:
                return asked.truth(_shaken(part))

            truth, slack = asked.truth(part), slack_of(part)
            why = _wrong(mine, plain, truth, slack, shaken)
            if why is None:
                continue
            # PyTorch's fused operators overflow elsewhere, and many originals are these
            fused = asked.fused(part)
            if fused is None or _wrong(mine, fused, truth, slack, shaken) is not None:
                return why
    return None


def _identical(y: Any, plain: Any) -> bool:
    pairs = zip(listed(y), listed(plain), strict=True)
    return all(torch.equal(bits(a.detach()), bits(b)) for a, b in pairs)


def _parts(asked: Asked, tensors: Tensors, y: Any) -> Iterator[tuple[Tensors, Any]]:
    rows = [t for t in tensors if t is not None and t.dim() > 1]
    if asked.op not in ROWWISE or not rows or rows[0].numel() <= _CHUNK:
        yield tensors, y
        return
    flat = [t if t is None or t.dim() < 2 else t.reshape(-1, t.shape[-1]) for t in tensors]
    mine = y.reshape(-1, y.shape[-1])
    step = max(1, _CHUNK // rows[0].shape[-1])
    for i in range(0, mine.shape[0], step):
        part = [t if t is None or t.dim() < 2 else t[i : i + step] for t in flat]
        yield part, mine[i : i + step]


def slack_of(tensors: Tensors) -> Callable[[torch.dtype], float]:
    """How many epsilons of a result's dtype a kernel may be farther off than the formula."""
    halves = [t.dtype for t in tensors if t is not None and _half(t.dtype)]

    def slack(out: torch.dtype) -> float:
        narrow = [*halves, *([out] if _half(out) else [])]
        if not narrow:
            return LIMITS.kernel_fp32
        return max(torch.finfo(t).eps for t in narrow) / torch.finfo(out).eps * LIMITS.kernel_half

    return slack


def _half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _shaken(tensors: Tensors) -> list[Tensor | None]:
    """The tensors, each element off by an epsilon of fp32: what a row makes of that, its arithmetic
    in fp32 may make of roundings."""
    generator = torch.Generator().manual_seed(3)
    found: list[Tensor | None] = []
    for t in tensors:
        if t is None or not t.is_floating_point():
            found.append(t)
            continue
        signs = torch.randint(0, 2, t.shape, generator=generator, device="cpu") * 2 - 1
        found.append(t.double() * (1 + signs.to(t.device) * torch.finfo(torch.float32).eps))
    return found


def _wrong(
    y: Any, plain: Any, truth: Any, slack: Callable[[torch.dtype], float], shaken: Callable[[], Any]
) -> str | None:
    if isinstance(plain, tuple):
        for i, (a, b, c) in enumerate(zip(y, plain, truth, strict=True)):
            why = _wrong(a, b, c, slack, lambda i=i: shaken()[i])  # type: ignore[misc]
            if why is not None:
                return why
        return None
    if not plain.is_floating_point():
        return None if torch.equal(y, plain) else "its whole numbers are not the formula's"
    return wrong_rows(y, plain, truth, slack(y.dtype), shaken)


def wrong_rows(
    y: Tensor,
    plain: Tensor,
    truth: Tensor,
    slack: float,
    shaken: Callable[[], Tensor],
    floor: float = 0.0,
) -> str | None:
    """Compare row by row; see the top of this file. `shaken`: the truth for shaken inputs; `floor`:
    of the largest row, what rows are measured by at least."""
    if not y.numel():
        return None
    ours, theirs, exact = (_rows(t) for t in (y, plain, truth))
    eps, largest = torch.finfo(y.dtype).eps, torch.finfo(y.dtype).max
    if _quickly(ours, theirs, exact, slack * eps, largest):
        return None
    overflows = exact.abs() > largest  # when it is rounded to the result's dtype
    exact = torch.where(overflows, exact.sign() * float("inf"), exact)
    same_as_truth = _same_class(ours, exact)
    same_as_plain = _same_class(ours, theirs)
    if not bool((same_as_truth | same_as_plain).all()):
        return "NaN or infinity comes out where the formula gives none, or the other way round"
    off = _off(ours, exact, eps, floor)
    missed = _off(theirs, exact, eps, floor)
    from_plain = _off(ours, theirs, eps, floor)
    usual = torch.where(missed <= _MISSED, missed, torch.zeros_like(missed))
    allowed = torch.maximum(usual, usual.max().clamp(max=_LUCK)) + slack
    bad = ~((off <= allowed) & same_as_truth.all(-1)) & ~(
        (from_plain <= slack) & same_as_plain.all(-1)
    )
    if not bool(bad.any()):
        return None
    shake = _off(torch.where(overflows, exact, _rows(shaken())), exact, eps, floor)
    shake = torch.where(shake.isfinite(), shake, torch.zeros_like(shake))
    bad &= ~((off <= allowed + 4 * shake) & same_as_truth.all(-1))
    bad &= ~((from_plain <= slack + 4 * shake) & same_as_plain.all(-1))
    if not bool(bad.any()):
        return None
    worst = torch.where(bad, torch.minimum(off, from_plain), torch.zeros_like(off)).argmax()
    return (
        f"its largest error is {float(off[worst]):.3g} epsilons of "
        f"{str(y.dtype).removeprefix('torch.')}, the formula's {float(missed[worst]):.3g}"
    )


def _quickly(ours: Tensor, theirs: Tensor, exact: Tensor, tolerance: float, largest: float) -> bool:
    """Whether all is finite, and every row within the allowance even of an exact formula."""
    scale = exact.abs().amax(-1)
    distance = (ours - exact).abs().amax(-1)
    return bool(
        ((distance <= tolerance * scale) & (scale <= largest)).all() & theirs.sum().isfinite()
    )


def _rows(t: Tensor) -> Tensor:
    t = t.detach().double()
    return t.reshape(1, -1) if t.dim() < 2 else t.reshape(-1, t.shape[-1])


def _same_class(a: Tensor, b: Tensor) -> Tensor:
    """Where both are finite, or both NaN, or the same infinity."""
    finite = a.isfinite() & b.isfinite()
    return finite | (a == b) | (a.isnan() & b.isnan())


def _off(a: Tensor, b: Tensor, eps: float, floor: float) -> Tensor:
    """Each row's largest distance in epsilons of its largest finite value of `b`."""
    finite = b.isfinite() & a.isfinite()
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    b = torch.where(b.isfinite(), b, zero)
    scale = b.abs().amax(-1)
    scale = torch.maximum(scale, floor * scale.max()).clamp_min(torch.finfo(torch.float32).tiny)
    distance = torch.where(finite, (torch.where(finite, a, zero) - b).abs(), zero).amax(-1)
    return distance / scale / eps


def listed(y: Any) -> list[Any]:
    """The tensors of a result."""
    return list(y) if isinstance(y, (tuple, list)) else [y]
