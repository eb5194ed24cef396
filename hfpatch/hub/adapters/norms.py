"""Norms: kernels-community/rmsnorm (CPU), layer-norm (CUDA) and flash-attn-ops (Triton)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hfpatch.hub.adapters.base import Adapter, Row, only
from hfpatch.hub.adapters.signatures import (
    as_add_layer_norm,
    as_add_rms_norm,
    as_layer_norm,
    as_rms_norm,
)

Tensor = torch.Tensor
_NO_OFFSET = only(weight_offset=(0.0,))

# ---------------------------------------------------------------------------- rmsnorm


def _rmsnorm(module: ModuleType) -> Any:
    def call(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
    ) -> Any:
        if weight is None or bias is not None:
            raise ValueError("`apply_rms_norm` needs a weight and takes no bias")
        return module.apply_rms_norm(x.contiguous(), weight, eps)

    return as_rms_norm(call)


RMSNORM = Adapter(
    "kernels-community/rmsnorm",
    1,
    "rmsnorm",
    (Row("rms_norm", ("apply_rms_norm(input, weight, eps)",), _rmsnorm, _NO_OFFSET),),
)

# ---------------------------------------------------------------------------- layer-norm

_LN = (
    "dropout_add_ln_fwd(input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, "
    "epsilon, rowscale_const, z_numrows, gen, residual_in_fp32, is_rms_norm)"
)


def _dropout_add_ln(module: ModuleType, rms: bool) -> Any:
    def call(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
    ) -> Any:
        if weight is None:
            raise ValueError("`dropout_add_ln_fwd` needs a weight")
        rows = x.contiguous().view(-1, x.shape[-1])
        out = module.dropout_add_ln_fwd(
            rows, weight, bias, None, None, None, None, 0.0, eps, 1.0, 0, None, False, rms
        )
        return out[0].view(x.shape)

    return call


def _ln_rms(module: ModuleType) -> Any:
    return as_rms_norm(_dropout_add_ln(module, rms=True))


def _ln_layer(module: ModuleType) -> Any:
    return as_layer_norm(_dropout_add_ln(module, rms=False))


LAYER_NORM = Adapter(
    "kernels-community/layer-norm",
    1,
    "layer-norm",
    (
        Row("rms_norm", (_LN,), _ln_rms, _NO_OFFSET, min_capability=(8, 0)),
        Row("layer_norm", (_LN,), _ln_layer, min_capability=(8, 0)),
    ),
)

# ---------------------------------------------------------------------------- flash-attn-ops

_RMS_FN = "rms_norm_fn(x, weight, bias, residual, x1, weight1, bias1, eps)"
_LAYER_FN = "layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, eps)"


def _rms(module: ModuleType) -> Any:
    return as_rms_norm(
        lambda x, weight, bias, eps, offset: module.rms_norm_fn(
            x, weight, bias, eps=eps, zero_centered_weight=offset == 1.0
        )
    )


def _layer(module: ModuleType) -> Any:
    return as_layer_norm(
        lambda x, weight, bias, eps, offset: module.layer_norm_fn(x, weight, bias, eps=eps)
    )


def _add_rms(module: ModuleType) -> Any:
    return as_add_rms_norm(
        lambda x, residual, weight, bias, eps, offset: module.rms_norm_fn(
            x, weight, bias, residual=residual, eps=eps, prenorm=True,
            zero_centered_weight=offset == 1.0,
        )
    )  # fmt: skip


def _add_layer(module: ModuleType) -> Any:
    return as_add_layer_norm(
        lambda x, residual, weight, bias, eps, offset: module.layer_norm_fn(
            x, weight, bias, residual=residual, eps=eps, prenorm=True
        )
    )


_OFFSETS = only(weight_offset=(0.0, 1.0))

FLASH_ATTN_OPS = Adapter(
    "kernels-community/flash-attn-ops",
    1,
    "flash-attn-ops",
    (
        Row("rms_norm", (_RMS_FN,), _rms, _OFFSETS, differentiable=True),
        Row("layer_norm", (_LAYER_FN,), _layer, differentiable=True),
        Row("add_rms_norm", (_RMS_FN,), _add_rms, _OFFSETS, differentiable=True),
        Row("add_layer_norm", (_LAYER_FN,), _add_layer, differentiable=True),
    ),
)
