"""The well-known packages, one small file each; a new one is a file and a line here."""

from hfpatch.hub.adapters import activation, attention, liger, norms, rotary
from hfpatch.hub.adapters.base import Adapter, Row, params_of, same_signature

#: In the order of preference of the source "hub".
ADAPTERS: tuple[Adapter, ...] = (
    activation.ADAPTER,
    liger.ADAPTER,
    norms.FLASH_ATTN_OPS,
    norms.LAYER_NORM,
    norms.RMSNORM,
    rotary.ADAPTER,
    attention.FLASH_ATTN2,
    attention.FLASH_ATTN3,
    attention.FINEGRAINED_FP8,
    attention.EETQ,
)


def adapter_for(package: str) -> Adapter | None:
    """The adapter of a package, by the name in its metadata."""
    return next((a for a in ADAPTERS if a.package == package), None)


def repos_for(op: str) -> tuple[str, ...]:
    """Pinned repositories that are known to serve an op, in order of preference."""
    return tuple(a.spec for a in ADAPTERS if any(row.op == op for row in a.rows))


__all__ = ["ADAPTERS", "Adapter", "Row", "adapter_for", "params_of", "repos_for", "same_signature"]
