"""Liger's kernels as peers; imported at the first call, so that nothing here needs the package."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from hfpatch.bench.formulas import EPS

Tensor = torch.Tensor


def available() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def rms_norm(x: Tensor, weight: Tensor) -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)


def swiglu(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def geglu_tanh(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """In place; Liger wants [B, H, S, D], of which ours is the transposed view."""
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def mean_loss(logits: Tensor, target: Tensor) -> Any:
    """In training the gradient is written over the logits, already in the forward."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, target, None)[0]


def softmax(x: Tensor) -> Any:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)
