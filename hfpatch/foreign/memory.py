"""Tensors in memory with a margin: what a kernel writes where it may not shows bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.proof.subject import version

Tensor = torch.Tensor

_MARGIN = 64  # elements before and after
_ALIGNED = 64  # bytes


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor's elements, so that NaN equals itself and -0 does not equal 0."""
    if x.is_complex():
        x = torch.view_as_real(x)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(widths[x.element_size()]) if x.is_floating_point() else x


@dataclass(frozen=True, eq=False)
class Very:
    """An object that is equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Very) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, eq=False)
class _Bits:
    """The elements of a tensor at one moment; equal to the same ones."""

    value: Tensor

    @classmethod
    def of(cls, t: Tensor | None) -> _Bits | None:
        """None also of one that is sparse, or of a class of its own."""
        if type(t) is not Tensor or t.layout is not torch.strided:
            return None
        return cls(bits(t.detach()).clone())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and torch.equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.value.shape)


#: What a compilation by torch marks a parameter with.
_OF_DYNAMO = "_dynamo_static_input_type"


def form(t: Tensor) -> tuple[object, ...]:
    """What of a tensor, beside its elements, a kernel can change in place."""
    grad = t.grad if t.is_leaf else None
    hooks: Any = t._backward_hooks
    after: Any = t._post_accumulate_grad_hooks
    return (
        *(type(t), _Bits.of(grad)),
        *(t.shape, t.stride(), t.storage_offset(), t.data_ptr(), t.dtype, t.requires_grad),
        *(Very(grad), tuple(map(Very, (hooks or {}).values()))),
        tuple(map(Very, (after or {}).values())),
        tuple((k, Very(v)) for k, v in t.__dict__.items() if k != _OF_DYNAMO),
    )


def reform(t: Tensor, before: tuple[object, ...], storage: torch.UntypedStorage) -> None:
    """Set it back."""
    cls, kept_grad, *places, requires_grad, grad, hooks, after, attributes = before
    shape, stride, offset, _, _ = places
    if type(t) is not cls:
        t.__class__ = cls  # type: ignore[assignment]
    t.__dict__.clear()
    t.__dict__.update((k, v.value) for k, v in attributes)  # type: ignore[attr-defined]
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        if t.is_leaf:
            t.grad = grad.value  # type: ignore[attr-defined]
            if isinstance(kept_grad, _Bits):
                bits(t.grad).copy_(kept_grad.value)
        kept: Any = t._backward_hooks
        for key in [k for k, hook in (kept or {}).items() if Very(hook) not in hooks]:  # type: ignore
            del kept[key]
        kept = t._post_accumulate_grad_hooks
        for key in [k for k, hook in (kept or {}).items() if Very(hook) not in after]:  # type: ignore
            del kept[key]
        t.detach_().requires_grad_(False)
        t.set_(storage, offset, shape, stride)  # type: ignore[call-overload]
        t.requires_grad_(bool(requires_grad))


def put_back_version(t: Tensor, before: int | None) -> None:
    """After its elements were written back, too."""
    if before is not None:
        torch._C._autograd._unsafe_set_version_counter((t,), (before,))


@dataclass
class Held:
    """A tensor inside a larger buffer of its own.

    Attributes:
        tensor: what a kernel is given.
        core: the elements that are its, without repetition, dense.
    """

    tensor: Tensor
    core: Tensor
    _buffer: Tensor
    _before: Tensor | None = None
    _form: tuple[object, ...] = ()
    _version: int | None = None

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        view: Callable[[Tensor], Tensor] = lambda t: t,
        offset: int = 0,
    ) -> Held:
        """`view(core)` of a core of `shape`, that begins `offset` elements behind an aligned
        address."""
        numel = 1
        for size in shape:
            numel *= size
        step = _ALIGNED // torch.empty((), dtype=dtype).element_size()
        buffer = torch.full((numel + 2 * _MARGIN + 2 * step,), 77, dtype=dtype, device=device)
        start = _MARGIN
        while (buffer.data_ptr() + start * buffer.element_size()) % _ALIGNED:
            start += 1
        core = buffer[start + offset : start + offset + numel].view(shape)
        return cls(view(core), core, buffer)

    @classmethod
    def like(cls, t: Tensor) -> Held:
        """A copy of `t`: the same strides, the same place relative to aligned addresses, a
        parameter where `t` is one."""
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        if t.numel() == 0:
            extent = 0
        offset = (t.data_ptr() % _ALIGNED) // t.element_size() if extent else 0
        held = cls.make((extent,), t.dtype, t.device, offset=offset)
        if extent:
            held.core.copy_(t.detach().as_strided((extent,), (1,), t.storage_offset()))
        held.tensor = held.core.as_strided(
            t.shape, t.stride(), held.core.storage_offset() if extent else 0
        )
        if isinstance(t, nn.Parameter):
            held.tensor = nn.Parameter(held.tensor, requires_grad=False)
        return held

    @classmethod
    def all_like(cls, tensors: Iterable[Tensor | None]) -> list[Held | None]:
        """Copies of arguments; what is one tensor in two places is one copy."""
        made: dict[int, Held] = {}
        found: list[Held | None] = []
        for t in tensors:
            if t is not None and id(t) not in made:
                made[id(t)] = cls.like(t)
            found.append(None if t is None else made[id(t)])
        return found

    def is_as(self, t: Tensor) -> bool:
        """Whether `t`, of which this is a copy, has the very bits of it, also between its rows."""
        return self.core.dim() == 1 and torch.equal(bits(self.core), bits(self._span(t)))

    def restore(self, t: Tensor) -> None:
        """Write them back."""
        with torch.inference_mode(t.is_inference()):
            self._span(t).copy_(self.core)

    def _span(self, t: Tensor) -> Tensor:
        return t.detach().as_strided((self.core.numel(),), (1,), t.storage_offset())

    def remember(self) -> None:
        self._before, self._form = self._buffer.clone(), form(self.tensor)
        self._version = version(self.tensor)

    def written(self) -> bool:
        """Whether it, or anything around it, is not as it was when it was remembered."""
        assert self._before is not None
        return (
            form(self.tensor) != self._form
            or version(self.tensor) != self._version
            or not torch.equal(bits(self._before), bits(self._buffer))
        )

    def fill(self, values: Tensor) -> None:
        # past the version that PyTorch counts, as `p.data.copy_` of a model writes: what is kept of
        # a tensor by its version is stale
        self.core.data.copy_(values)

    def stir(self) -> None:
        """Other contents at the same place: what it holds, the other way round."""
        if self.core.is_floating_point() and self.core.numel():
            self.core.data.copy_(self.core.flatten().flip(0).view(self.core.shape) * 0.75)
