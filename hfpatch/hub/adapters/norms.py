"""Norms: kernels-community/rmsnorm (CPU), layer-norm (CUDA) and flash-attn-ops (Triton)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hfpatch.hub.adapters.base import Adapter, Row, only

Tensor = torch.Tensor


def _need(weight: Tensor | None, bias: Tensor | None, what: str) -> None:
    if weight is None or bias is not None:
        raise ValueError(f"{what} needs a weight and takes no bias")


# ---------------------------------------------------------------------------- rmsnorm


def _rmsnorm(module: ModuleType) -> Any:
    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        _need(weight, bias, "`apply_rms_norm`")
        return module.apply_rms_norm(x.contiguous(), weight, eps)

    return rms_norm


RMSNORM = Adapter(
    "kernels-community/rmsnorm",
    1,
    "rmsnorm",
    (
        Row(
            "rms_norm",
            ("apply_rms_norm(input, weight, eps)",),
            _rmsnorm,
            only(weight_offset=(0.0,)),
        ),
    ),
)

# ---------------------------------------------------------------------------- layer-norm

_LN = (
    "dropout_add_ln_fwd(input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, "
    "epsilon, rowscale_const, z_numrows, gen, residual_in_fp32, is_rms_norm)"
)


def _dropout_add_ln(
    module: ModuleType, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Any:
    if weight is None:
        raise ValueError("`dropout_add_ln_fwd` needs a weight")
    rows = x.contiguous().view(-1, x.shape[-1])
    out = module.dropout_add_ln_fwd(
        rows, weight, bias, None, None, None, None, 0.0, eps, 1.0, 0, None, False, rms
    )
    return out[0].view(x.shape)


def _ln_rms(module: ModuleType) -> Any:
    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        return _dropout_add_ln(module, x, weight, bias, eps, True)

    return rms_norm


def _ln_layer(module: ModuleType) -> Any:
    def layer_norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Any:
        return _dropout_add_ln(module, x, weight, bias, eps, False)

    return layer_norm


LAYER_NORM = Adapter(
    "kernels-community/layer-norm",
    1,
    "layer-norm",
    (
        Row("rms_norm", (_LN,), _ln_rms, only(weight_offset=(0.0,)), min_capability=(8, 0)),
        Row("layer_norm", (_LN,), _ln_layer, min_capability=(8, 0)),
    ),
)

# ---------------------------------------------------------------------------- flash-attn-ops

_RMS_FN = "rms_norm_fn(x, weight, bias, residual, x1, weight1, bias1, eps)"
_LAYER_FN = "layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, eps)"


def _triton_rms(module: ModuleType) -> Any:
    def rms_norm(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        centred = weight_offset == 1.0
        return module.rms_norm_fn(x, weight, bias, eps=eps, zero_centered_weight=centred)

    return rms_norm


def _triton_layer(module: ModuleType) -> Any:
    def layer_norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Any:
        return module.layer_norm_fn(x, weight, bias, eps=eps)

    return layer_norm


def _triton_add_rms(module: ModuleType) -> Any:
    def add_rms_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "none",
    ) -> Any:
        centred = weight_offset == 1.0
        return module.rms_norm_fn(
            x, weight, bias, residual=residual, eps=eps, prenorm=True, zero_centered_weight=centred
        )

    return add_rms_norm


def _triton_add_layer(module: ModuleType) -> Any:
    def add_layer_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        return module.layer_norm_fn(x, weight, bias, residual=residual, eps=eps, prenorm=True)

    return add_layer_norm


_OFFSETS = only(weight_offset=(0.0, 1.0))

FLASH_ATTN_OPS = Adapter(
    "kernels-community/flash-attn-ops",
    1,
    "flash-attn-ops",
    (
        Row("rms_norm", (_RMS_FN,), _triton_rms, _OFFSETS, differentiable=True),
        Row("layer_norm", (_LAYER_FN,), _triton_layer, differentiable=True),
        Row("add_rms_norm", (_RMS_FN,), _triton_add_rms, _OFFSETS, differentiable=True),
        Row("add_layer_norm", (_LAYER_FN,), _triton_add_layer, differentiable=True),
    ),
)
