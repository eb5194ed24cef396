"""`with hfpatch.applied(model):` the kernels for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hfpatch.apply import Kernels, apply, arguments_of, restore
from hfpatch.report import Report

if TYPE_CHECKING:
    from hfpatch.hub import HubOptions


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
    which proves nothing anew. It happens however the block ends:

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
    before = arguments_of(model)
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
    try:
        yield report
    finally:
        if before is None:
            restore(model)
        else:
            apply(model, **before)
