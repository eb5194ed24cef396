"""kernels-community/rotary: transformers' `apply_rotary_pos_emb`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hfpatch.hub.adapters.base import Adapter, Row, only

Tensor = torch.Tensor


def _rope_qk(module: ModuleType) -> Any:
    def rope_qk(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        seq_dim: int = 1,
        interleaved: bool = False,
        rotary_dim: int = 0,
        round_products: bool = False,
    ) -> Any:
        # [B, H, S, D] has its heads where the tables get a dimension: at 1; [B, S, H, D] at 2
        unsqueeze = {2: 1, 1: 2}[seq_dim]
        return module.apply_rotary_transformers(q, k, cos, sin, unsqueeze)

    return rope_qk


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
