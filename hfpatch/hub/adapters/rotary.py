"""kernels-community/rotary: transformers' `apply_rotary_pos_emb`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hfpatch.hub.adapters.base import Adapter, Row, only
from hfpatch.hub.adapters.signatures import as_rope_qk


def _rope_qk(module: ModuleType) -> Any:
    # [B, H, S, D] has its heads where the tables get a dimension: at 1; [B, S, H, D] at 2
    return as_rope_qk(
        lambda q, k, cos, sin, seq_dim: module.apply_rotary_transformers(
            q, k, cos, sin, 3 - seq_dim
        )
    )


ADAPTER = Adapter(
    "kernels-community/rotary",
    2,
    "rotary",
    (
        Row(
            "rope_qk",
            ("apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim)",),
            _rope_qk,
            only(seq_dim=(1, 2), interleaved=(False,), rotary_dim=(0,)),
        ),
    ),
)
