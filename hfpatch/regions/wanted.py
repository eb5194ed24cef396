"""Whether blocks of a model can be captured at all, which needs nothing of what captures them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hfpatch import ops
from hfpatch.planning.settings import Settings
from hfpatch.proof.subject import class_of

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


_GPU = frozenset({"cuda"})
_EVERYWHERE = frozenset({"cpu", "cuda"})


def devices_of(module: nn.Module, auto: bool) -> frozenset[str]:
    """The types of devices on which a block is captured.

    Args:
        auto: by default, that is: on a CPU only blocks of diffusers (and of classes made of these),
            whose steps are long and many. A text model's first call of each kind takes longer to be
            captured there than its calls gain.
    """
    bases = class_of(module).__mro__
    everywhere = not auto or any(c.__module__.startswith("diffusers.") for c in bases)
    return _EVERYWHERE if everywhere else _GPU


def may_lie_on(roots: Iterable[nn.Module], settings: Settings, auto: bool) -> bool:
    """Whether some block of these models, which has parameters, may be captured where it lies."""
    roots = list(roots)
    devices = frozenset().union(*(devices_of(m, auto) for root in roots for m in root.modules()))
    if settings.device is not None:
        return settings.device in devices
    return any(p.device.type in devices for root in roots for p in root.parameters())
