"""Whether blocks of a model can be captured at all, which needs nothing of what captures them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hfpatch import ops
from hfpatch.planning.settings import Settings

#: What a candidate's fused calls may need.
OPS = tuple(op.name for op in ops.OPS.values() if op.captured)


def refusal(settings: Settings) -> str | None:
    """Why these arguments of `apply` leave every block to its parts, or None."""
    if settings.training:
        return (
            "mode='training' captures no block: decoder layers have functions of their own there, "
            "all else is swapped part by part"
        )
    if not settings.verify:
        return "a captured block is only used once it is proven, which verify=False leaves out"
    for op in OPS:
        kernel = settings.sources.kernel(op, block=True)
        if kernel is None or not kernel.own or kernel.source != "local":
            why = settings.sources.missing(op, block=True)
            return "its kernels are those of the local build, " + (
                f"of which `{op}` cannot be had: {why}"
                if why is not None and "local" in (settings.sources.choices.of(op) or ())
                else f"which `kernels=` leaves out for `{op}`"
            )
    return None


def may_lie_on(roots: Iterable[nn.Module], settings: Settings, devices: frozenset[str]) -> bool:
    """Whether a block of these models, which has parameters, may lie on devices of these types."""
    if settings.device is not None:
        return settings.device in devices
    return any(p.device.type in devices for root in roots for p in root.parameters())
