"""Blocks that run one after the other: what one of them may compute for all, or for the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.blocks.memo import StepMemo, current_operator, stream_of
from hfpatch.proof.subject import Tensor, version

#: Modulation sums of all blocks at once are kept for a step: not where each token has its own.
_MAX_SUMS = 1 << 22


#: Makes a value for each block, or none.
SharedMake = Callable[..., "Sequence[Any] | None"]


class Chain:
    """The fused blocks of one `nn.ModuleList`, in order.

    Nothing here changes a result. A value for all blocks, or for the next one, is used only where
    it was made from the very tensors that the block was called with; else the block computes it
    itself. So skipped, reordered, copied or unpatched blocks, hooks and callbacks are all safe.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = [weakref.ref(b) for b in blocks]
        self._index = {id(b): i for i, b in enumerate(blocks)}
        self._sums = StepMemo(self._add_tables)
        self._shared: dict[Any, StepMemo[Sequence[Any] | None]] = {}
        self._handed: _Handed | None = None

    def at(self, block: nn.Module, temb: Tensor) -> Place | None:
        """Where `block` stands, with the modulation sums of its step.

        Args:
            block: of this chain; for another one, as the copies of a model are, there is no place.
            temb: [B, T, N * D], to be added to each block's `scale_shift_table` of [N, D].

        Returns:
            None also where sums cannot be kept for the step, the tables are not all at hand, or
            only some of the blocks run here.
        """
        i = self._index.get(id(block))
        if i is None or self._blocks[i]() is not block:
            return None
        operator = current_operator()
        if operator is not None and operator.blocks != len(self._blocks):
            return None
        if version(temb) is None or stream_of(temb) is None:
            return None
        sums = self._sums(temb)
        if sums is not None and not sums.of(i, block):  # its table was written or exchanged since
            self._sums.forget()
            sums = self._sums(temb)
        return None if sums is None else Place(self, i, sums)

    def share(self, make: SharedMake, *tensors: Tensor) -> Sequence[Any] | None:
        """`make(blocks, *tensors)`, one value for each block, once per step; None if it is None."""
        memo = self._shared.get(make)
        if memo is None:
            memo = self._shared[make] = StepMemo(lambda *t: self._make_shared(make, *t))
        return memo(*tensors)

    def drop(self) -> None:
        """Forget what a block left for the next one."""
        self._handed = None

    def _make_shared(self, make: SharedMake, *tensors: Tensor) -> Sequence[Any] | None:
        blocks = [r() for r in self._blocks]
        return None if any(b is None for b in blocks) else make(blocks, *tensors)

    def _add_tables(self, temb: Tensor) -> _Sums | None:
        tables = [getattr(r(), "scale_shift_table", None) for r in self._blocks]
        first = tables[0]
        if (
            not isinstance(first, Tensor)
            or len(tables) * temb.numel() > _MAX_SUMS
            or any(
                type(t) is not nn.Parameter
                or (t.shape, t.dtype, t.device) != (first.shape, first.dtype, temb.device)
                or t.is_inference()
                for t in tables
            )
        ):
            return None
        batch, steps, _ = temb.shape
        all_tables = torch.stack(tables)[:, None, None]  # type: ignore[arg-type]
        whole = all_tables + temb.reshape(1, batch, steps, *first.shape)
        return _Sums(whole, tables)  # type: ignore[arg-type]


def _stamp(table: Tensor) -> tuple[int, int, int]:
    """Changes if a table is written to or exchanged. No weak reference: `torch.utils.swap_tensors`
    takes no tensor that has one."""
    return id(table), table.data_ptr(), table._version


class _Sums:
    """The modulation sums of all blocks, [blocks, B, T, N, D], taken apart when a block asks: views
    of all of them take the host longer than the GPU takes for the sums, at the start of a step."""

    def __init__(self, whole: Tensor, tables: Sequence[Tensor]) -> None:
        self._whole = whole
        self._parts: list[tuple[Tensor, ...] | None] = [None] * whole.shape[0]
        self._made_of = [_stamp(t) for t in tables]

    def of(self, i: int, block: nn.Module) -> bool:
        """Whether the block's table is the one that these sums were made of, as it was then."""
        table = block._parameters.get("scale_shift_table")
        return table is not None and _stamp(table) == self._made_of[i]

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        """N tensors of [B, T, D]: the same tuple at each call."""
        part = self._parts[i]
        if part is None:
            part = self._parts[i] = self._whole[i].unbind(2)
        return part


@dataclass(frozen=True)
class _Handed:
    """The next block's modulated norm of `h`, made with its modulation sums `ada`."""

    h: weakref.ref[Tensor]
    version: int
    ada: tuple[Tensor, ...]
    x: Tensor


class Place:
    """One block's place in its chain, during one call."""

    __slots__ = ("_chain", "_index", "_sums")

    def __init__(self, chain: Chain, index: int, sums: _Sums) -> None:
        self._chain, self._index, self._sums = chain, index, sums

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """This block's `scale_shift_table + temb`: N tensors of [B, T, D]."""
        return self._sums[self._index]

    def share(self, make: SharedMake, *tensors: Tensor) -> Any:
        """This block's part of `Chain.share`; None if there is none."""
        found = self._chain.share(make, *tensors)
        return None if found is None else found[self._index]

    def after(self) -> tuple[Any, tuple[Tensor, ...]] | None:
        """The next block and its sums."""
        i = self._index + 1
        blocks = self._chain._blocks
        block = blocks[i]() if i < len(blocks) else None
        return None if block is None else (block, self._sums[i])

    def hand_over(self, h: Tensor, x: Tensor) -> None:
        """The next block will be called with `h`; `x` is its modulated norm."""
        counted = version(h)
        if counted is not None:
            ada = self._sums[self._index + 1]
            self._chain._handed = _Handed(weakref.ref(h), counted, ada, x)
            if (operator := current_operator()) is not None:
                operator.at_end(self._chain.drop)

    def take(self, h: Tensor) -> Tensor | None:
        """What was handed over for this very call, if anything."""
        held, self._chain._handed = self._chain._handed, None
        if held is None or held.h() is not h or held.version != version(h):
            return None
        return held.x if held.ada is self.sums else None
