"""kernels-community/liger-kernels: Triton layers, called through their forwards."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hfpatch.hub.adapters.base import Adapter, Row, borrow, only
from hfpatch.hub.adapters.signatures import as_rms_norm, as_rope_qk

Tensor = torch.Tensor


def _rms_norm(module: ModuleType) -> Any:
    layer = module.layers.LigerRMSNorm

    def call(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
    ) -> Any:
        if bias is not None:
            raise ValueError("`LigerRMSNorm` takes no bias")
        return borrow(layer, weight=weight, variance_epsilon=eps)(x.contiguous())

    return as_rms_norm(call)


def _first(pair: Any) -> Any:
    return pair[0]


def _second(pair: Any) -> Any:
    return pair[1]


def _same(x: Any) -> Any:
    return x


def _gated(module: ModuleType) -> Any:
    # its MLPs project, multiply and project: with projections that only pass on, the product
    roles = {"gate_proj": _first, "up_proj": _second, "down_proj": _same}
    layers = module.layers
    forwards = {
        "silu": borrow(layers.LigerSwiGLUMLP, **roles),
        "gelu_tanh": borrow(layers.LigerGEGLUMLP, **roles),
    }

    def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Any:
        return forwards[activation]((gate, up))

    return gated


def _rope_qk(module: ModuleType) -> Any:
    # it may rotate in place, where a transposed view is what it would copy to
    return as_rope_qk(
        lambda q, k, cos, sin, seq_dim: module.liger_rotary_pos_emb(q.clone(), k.clone(), cos, sin)
    )


ADAPTER = Adapter(
    "kernels-community/liger-kernels",
    3,
    "liger-kernels",
    (
        # Its backward writes to the incoming gradient, so it is not used under autograd.
        Row(
            "rms_norm",
            ("layers.LigerRMSNorm(hidden_states)",),
            _rms_norm,
            only(weight_offset=(0.0,), cast=("input",)),
        ),
        Row(
            "gated",
            ("layers.LigerSwiGLUMLP(x)", "layers.LigerGEGLUMLP(x)"),
            _gated,
            only(activation=("silu", "gelu_tanh")),
            differentiable=True,
        ),
        Row(
            "rope_qk",
            ("liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)",),
            _rope_qk,
            only(seq_dim=(2,), interleaved=(False,), rotary_dim=(0,)),
        ),
    ),
)
