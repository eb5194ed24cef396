"""The ops that kernels are written for: one file per op, one readable PyTorch formula each."""

from hfpatch.ops import (
    activation,
    adaln,
    add_norm,
    gated,
    gated_norm,
    group_norm,
    layer_norm,
    pointwise,
    rms_norm,
    rms_norm_silu,
    rope,
    sample,
    search,
    softmax,
)
from hfpatch.ops.base import KERNEL_DTYPES, Op

#: Every op by name.
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        rms_norm.OP,
        layer_norm.OP,
        activation.GELU,
        activation.SILU,
        gated.GATED,
        gated.GATED_PACKED,
        gated.GATED_CLAMPED,
        adaln.NORM_MODULATE,
        adaln.GATE_RESIDUAL,
        adaln.GATE_RESIDUAL_NORM_MODULATE,
        add_norm.ADD_RMS_NORM,
        add_norm.ADD_LAYER_NORM,
        rope.ROPE,
        rope.ROPE_QK,
        rope.QK_NORM_ROPE,
        gated_norm.OP,
        rms_norm_silu.OP,
        softmax.OP,
        search.ARGMAX,
        search.TOPK,
        sample.OP,
        pointwise.ADD_BIAS,
        pointwise.ADD_GELU,
        pointwise.ADD_SILU,
        pointwise.MUL_ADD,
        group_norm.OP,
    )
}

__all__ = ["KERNEL_DTYPES", "OPS", "Op"]
