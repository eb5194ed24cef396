"""Is a result one that the original gives, or would give of numbers a rounding away?

Of large numbers sums overflow, of equal ones differences are roundings alone: what is right there
is anything that lies as near to the original's result as that moves when its inputs do, or when it
is computed in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hfpatch.foreign.inside import parts_of
from hfpatch.foreign.values import put

Tensor = torch.Tensor

#: How many times as far as the references lie apart.
_APART = 8.0
#: How many values are looked at.
_VALUES = 1 << 14
#: The tensors and plain values in a value, by where they are.
Named = list[tuple[str, Any]]


def named_in(value: Any, name: str = "") -> Named:
    """What lies in a value, which is called `name`."""
    found: Named = []
    left: list[tuple[str, Any, tuple[int, ...]]] = [(name, value, ())]
    while left and len(found) < _VALUES:
        where, held, above = left.pop()
        if isinstance(held, (Tensor, int, float, complex, bool, str, bytes, type(None))):
            found.append((where, held))
        elif id(held) not in above and (parts := parts_of(held)) is not None:
            left += [(where + n, part, (*above, id(held))) for n, part in reversed(parts)]
    return found


def unlike(
    ours: Named,
    theirs: Named,
    others: Sequence[Named],
    far: Sequence[Named],
    limit: float,
    scale_of: Callable[[Tensor], Tensor],
) -> str | None:
    """Why a result is none that the original gives, or None.

    theirs: what it gave.
    others: what it gave of inputs that differ by a rounding, and in fp64.
    far: what it gave of larger and of smaller inputs. Where these are not finite alike, sums are
        about to overflow, which their order decides.
    limit: in epsilons of a result's dtype, relative to `scale_of` it.
    """
    names = [n for n, _ in theirs]
    if [n for n, _ in ours] != names:
        return "its result is built in another way than the original's"
    others, far = ([o for o in given if [n for n, _ in o] == names] for given in (others, far))
    for i, (name, b) in enumerate(theirs):
        a, references = ours[i][1], [o[i][1] for o in others]
        if type(b) in (float, complex) and type(a) is type(b):
            a, b, *references = (
                torch.tensor([r], dtype=torch.complex64 if type(b) is complex else torch.float32)
                for r in (a, b, *references)
                if type(r) is type(b)
            )
        if isinstance(b, Tensor):
            near = [r for r in references if _alike(r, b)]
            more = [o[i][1] for o in far if _alike(o[i][1], b)]
            why = _unlike(a, b, near, more, limit, scale_of)
        elif type(a) is type(b) and (a == b or any(r != b for r in references)):
            why = None
        else:
            why = f"it gives {a!r:.60}, the original {b!r:.60}"
        if why is not None:
            return f"{why}{f' ({name})' if name else ''}"
    return None


def _alike(reference: Any, of: Tensor) -> bool:
    return (
        isinstance(reference, Tensor)
        and reference.shape == of.shape
        and reference.is_complex() == of.is_complex()
    )


def _unlike(
    a: Any,
    b: Tensor,
    references: list[Tensor],
    far: list[Tensor],
    limit: float,
    scale_of: Callable[[Tensor], Tensor],
) -> str | None:
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return "it gives a tensor of another form"
    if type(b) not in (Tensor, nn.Parameter) or b.layout != torch.strided or not b.numel():
        return None
    references = [r.to(b.device).to(b.dtype) for r in references]  # where a rounding overflows
    if not b.is_floating_point() and not b.is_complex():
        known = torch.ones_like(b, dtype=torch.bool)
        for r in references:
            known &= r == b
        return "its whole numbers or truth values are others" if (known & (a != b)).any() else None
    eps = torch.finfo(b.dtype).eps
    x, y, *near = _rows_of([a, b, *references])
    known = torch.ones_like(y, dtype=torch.bool)
    for r in (*near, *_rows_of(far)):
        known &= _class(r) == _class(y)
    if bool((known & (_class(x) != _class(y))).any()):
        return "NaN or infinity comes out elsewhere than in the original"
    known &= y.isfinite() & x.isfinite()
    x, y, *near = (torch.where(known, t, 0.0) for t in (x, y, *near))
    apart = torch.zeros_like(y)
    for r in near:
        apart = torch.maximum(apart, (r - y).abs())
    allowed = limit * eps * scale_of(y) + _APART * apart.amax(-1, keepdim=True)
    off = (x - y).abs() > allowed
    if not bool(off.any()):
        return None
    worst = ((x - y).abs() / scale_of(y)).masked_fill(~off, 0.0).max()
    return f"it differs from the original by {float(worst):.2e} (relative)"


def _rows_of(tensors: list[Tensor]) -> list[Tensor]:
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return [t.detach().double().reshape(t.shape or (1,)) for t in tensors]


def _class(x: Tensor) -> Tensor:
    """0 for finite numbers, and which one of the others it is."""
    return x.isnan() * 1 + (x == float("inf")) * 2 + (x == -float("inf")) * 3


def stretched(value: Any, by: float) -> None:
    """The finite numbers of dense floating tensors in containers so many times as large, in place,
    as far as their dtype holds them."""
    for t in _floating(value):
        largest, held = torch.finfo(t.dtype).max, t.detach().double()
        put(t, torch.where(held.isfinite(), (held * by).clamp(-largest, largest), held))


def _floating(value: Any) -> Iterator[Tensor]:
    for t in {id(t): t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)}.values():
        if t.layout == torch.strided and t.is_floating_point() and t.numel():
            yield t


def shaken(value: Any, seed: int) -> None:
    """Each number of dense floating tensors in containers off by a rounding, in place."""
    generator = torch.Generator().manual_seed(seed)
    for t in _floating(value):
        signs = torch.randint(0, 2, t.shape, generator=generator, device="cpu") * 2 - 1
        eps = torch.finfo(t.dtype).eps
        put(t, t.detach().double() * (1 + eps * signs.to(t.device)))
