"""What to try next: what won on kernels like this one, and what lost."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hfpatch.lab.experience import Entry
from hfpatch.ops import OPS

#: What an entry that shares it counts.
_OP, _FAMILY, _BOTTLENECK, _BACKEND, _CHIP, _ARCH = 4.0, 2.0, 3.0, 1.0, 2.0, 1.0
_POINTWISE = {op.name for op in OPS.values() if op.reference.__module__.endswith(".pointwise")}
#: Ops that teach about each other.
_FAMILIES = (
    {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "norm_modulate", "group_norm",
     "gate_residual_norm_modulate", "gated_rms_norm", "rms_norm_silu", "row norm"},
    {"softmax", "cross_entropy", "argmax", "topk", "sample"},
    {"rms_norm_backward", "layer_norm_backward", "mul_add_backward", "add_silu_backward",
     "add_gelu_backward", "softmax_backward"},
    {*_POINTWISE, "gated_silu", "gate_residual", "copy"},
    {"rope", "rope_qk", "qk_norm_rope"},
    {"gemm", "batched_gemm", "matmul", "decode_product"},
    {"attention", "decode_attention"},
)  # fmt: skip
_ARCHS = {"H100": "sm_90", "H200": "sm_90", "A100": "sm_80", "T4": "sm_75", "B200": "sm_100"}


def recommend(
    entries: Iterable[Entry],
    kernel: str,
    backend: str | None = None,
    chip: str | None = None,
    bottleneck: str | None = None,
    most: int = 5,
) -> dict[str, Any]:
    """Entries that are most like the kernel: those that won to try, those that lost to leave.

    Args:
        kernel: what it computes, as `op` of the log.
        backend, chip, bottleneck: as in the log; None: any.
        most: of each list.
    """
    scored = []
    for entry in entries:
        score, shared = likeness(entry, kernel, backend, chip, bottleneck)
        if score > 0:
            scored.append((score, entry, shared))
    scored.sort(key=lambda item: (-item[0], -(item[1].gain or 1.0), item[1].id))

    def rows(outcome: str) -> list[dict[str, Any]]:
        found = [item for item in scored if item[1].outcome == outcome]
        return [
            {
                "technique": e.technique,
                "gain": e.gain,
                "op": e.op,
                "backend": e.backend,
                "chip": e.chip,
                "bottleneck": e.bottleneck,
                "shape": e.shape,
                "shares": shared,
                "score": score,
                "id": e.id,
            }
            for score, e, shared in found[:most]
        ]

    return {
        "for": {"kernel": kernel, "backend": backend, "chip": chip, "bottleneck": bottleneck},
        "try": rows("success"),
        "leave": rows("failure"),
        "changed nothing": rows("neutral"),
        "seen": len(scored),
    }


def likeness(
    entry: Entry, kernel: str, backend: str | None, chip: str | None, bottleneck: str | None
) -> tuple[float, list[str]]:
    """How much an entry says about a kernel, and what both share. 0: nothing.

    Without the op, its family or the bottleneck in common nothing is said.
    """
    score, shared = 0.0, []
    if _same(entry.op, kernel):
        score, shared = _OP, ["op"]
    elif any(_in(entry.op, f) and _in(kernel, f) for f in _FAMILIES):
        score, shared = _FAMILY, ["kind of op"]
    if bottleneck is not None and entry.bottleneck == bottleneck:
        score += _BOTTLENECK
        shared.append("bottleneck")
    if not shared:
        return 0.0, []
    if backend is not None and entry.backend == backend:
        score += _BACKEND
        shared.append("backend")
    if chip is not None:
        if _same(entry.chip, chip):
            score += _CHIP
            shared.append("chip")
        elif _arch(entry.chip) == _arch(chip):
            score += _ARCH
            shared.append("architecture")
    return score, shared


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _same(a: str, b: str) -> bool:
    x, y = _plain(a), _plain(b)
    return x == y or x in y.split("__") or f"_{y}_" in f"_{x}_" or f"_{x}_" in f"_{y}_"


def _in(name: str, family: set[str]) -> bool:
    plain = _plain(name)
    return any(plain == _plain(member) for member in family)


def _arch(chip: str) -> str:
    """ "sm_90" of "H100", "NVIDIA H200", "9.0" and "sm_90"."""
    for name, arch in _ARCHS.items():
        if name.lower() in chip.lower():
            return arch
    digits = re.search(r"(\d+)\.(\d)", chip)
    return f"sm_{digits[1]}{digits[2]}" if digits else chip.lower()


def as_text(found: dict[str, Any]) -> str:
    words = ", ".join(f"{k} {v}" for k, v in found["for"].items() if v)
    lines = [f"For {words}: {found['seen']} entries of the log say something."]
    for title in ("try", "leave", "changed nothing"):
        rows = found[title]
        if not rows:
            continue
        lines += ["", f"{title[0].upper()}{title[1:]}:"]
        for r in rows:
            gain = "" if r["gain"] is None else f" ({r['gain']:.2f}x)"
            where = ", ".join(filter(None, (r["op"], r["shape"], r["chip"])))
            lines.append(f"  {r['id']}  {r['technique']}{gain}: {where}")
    if found["seen"] == 0:
        lines.append("Nothing was tried on anything like it: measure, then write what you expect.")
    return "\n".join(lines)
