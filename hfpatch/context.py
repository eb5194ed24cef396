"""`with hfpatch.applied(model):` the kernels for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfpatch import forks
from hfpatch.apply import Kernels, apply, arguments_of, restore, roots_of
from hfpatch.report import Report

if TYPE_CHECKING:
    from hfpatch.hub import HubOptions


@dataclass(eq=False)
class _Block:
    """One that has begun and not ended, and what the model goes back to behind it."""

    before: Any


#: Of each model, by its modules, in the order in which they began.
_begun: dict[tuple[int, ...], list[_Block]] = {}
_lock = forks.lock()
_NOWHERE = object()


@contextmanager
def applied(
    model: Any,
    *,
    mode: str = "inference",
    kernels: Kernels = None,
    hub: HubOptions | Mapping[str, Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    verify: bool = True,
    strict: bool = False,
    cuda_graphs: bool | int | str = False,
    decoding: str | bool = "auto",
    blocks: str | bool | None = "auto",
    gain: str | None = None,
) -> Iterator[Report]:
    """`hfpatch.apply` inside of a `with` block; behind it the model is as it was before.

    A model that an `apply` patched before goes back to that: the same arguments are applied again,
    which proves nothing anew. It happens however the block ends; of blocks that overlap, as those
    of two threads do, when the last one does:

        with hfpatch.applied(pipe, cuda_graphs=True) as report:
            pipe(prompt)

    The arguments are those of `hfpatch.apply`.

    Yields:
        the report of `apply`.

    Raises:
        ValueError: the model is patched already, but only in parts or as a copy, so that this state
            could not be brought back.
        TypeError, KernelLoadError, VerificationError, PatchError: as `hfpatch.apply`.
    """
    roots = roots_of(model)  # which stay alive with this frame, and their identities theirs
    key = tuple(id(root) for _, root in roots.each)
    with _lock:
        block = _Block(arguments_of(model))
        _begun.setdefault(key, []).append(block)
    reached = block.before  # and there the model still is, if `apply` fails
    try:
        report = apply(
            model,
            mode=mode,
            kernels=kernels,
            hub=hub,
            include=include,
            exclude=exclude,
            verify=verify,
            strict=strict,
            cuda_graphs=cuda_graphs,
            decoding=decoding,
            blocks=blocks,
            gain=gain,
        )
        reached = _NOWHERE
        yield report
    finally:
        try:
            while not _ended(key, block, reached):
                reached = block.before
                whole = roots.and_those_of(model)  # a pipeline may have let go of some
                if reached is None:
                    restore(whole)
                else:
                    apply(whole, **reached)
        except BaseException:
            _ended(key, block, block.before)
            raise


def _ended(key: tuple[int, ...], block: _Block, reached: Any) -> bool:
    """Whether the model is where `block` leaves it; the block is gone then.

    One that began later and goes on keeps the model as it is, and goes back to what was before
    both: this block's own swaps are nothing to go back to. The generator of a block that nobody
    ends, as of a training that raised, is ended by Python's collector, at any time.
    """
    with _lock:
        begun = _begun[key]
        if begun[-1] is block and block.before is not reached:
            return False
        at = begun.index(block)
        del begun[at]
        if at < len(begun):
            begun[at].before = block.before
        if not begun:
            del _begun[key]
        return True
