"""Gradients: forward and backward are one kernel each.

Each class is entered only when a gradient is wanted, since `Function.apply` costs more than a
kernel launch. A second derivative is the formula's: `_second`, which also answers where there is no
gradient (None): zeros are not made of it.
"""

import torch
from torch.autograd import Function

from . import _codes, _second
from ._ops import ops
from ._second import twice_differentiable

# A backward of a small shape costs what is written here: each call, context and loop counts.


def _of_norm(backward, ctx, grad):
    """The gradients of x, weight and bias that autograd asked for; kernels always compute dx."""
    x, weight, bias = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    needs = (_codes.NEED_WEIGHT if need_weight else 0) | (_codes.NEED_BIAS if need_bias else 0)
    dx, dweight, dbias, _ = backward(grad, x, weight, bias, *ctx.codes, needs)
    return (
        dx if need_x else None,
        dweight if need_weight else None,
        dbias if need_bias else None,
    )


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, weight_offset, cast):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        ctx.codes = (eps, weight_offset, cast)
        return ops.rms_norm.default(x, weight, bias, eps, weight_offset, cast)

    @staticmethod
    @twice_differentiable(_second.rms_norm)
    def backward(ctx, grad):
        return (*_of_norm(ops.rms_norm_backward.default, ctx, grad), None, None, None)


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        ctx.codes = (eps,)
        return ops.layer_norm.default(x, weight, bias, eps)

    @staticmethod
    @twice_differentiable(_second.layer_norm)
    def backward(ctx, grad):
        return (*_of_norm(ops.layer_norm_backward.default, ctx, grad), None)


class Activation(Function):
    @staticmethod
    def forward(ctx, x, activation):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.codes = (activation,)
        if activation == _codes.SILU:
            return ops.silu.default(x)
        return ops.gelu.default(x, activation)

    @staticmethod
    @twice_differentiable(_second.activation)
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.codes == (_codes.SILU,):
            return ops.silu_backward.default(grad, x), None
        return ops.gelu_backward.default(grad, x, *ctx.codes), None


class Gated(Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate, up)
        ctx.codes = (activation,)
        return ops.gated.default(gate, up, activation)

    @staticmethod
    @twice_differentiable(_second.gated)
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad[:2]
        dgate, dup = ops.gated_backward.default(grad, gate, up, *ctx.codes)
        return dgate if need_gate else None, dup if need_up else None, None


class GatedPacked(Function):
    @staticmethod
    def forward(ctx, x, activation, gate_first):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.codes = (activation, gate_first)
        return ops.gated_packed.default(x, activation, gate_first)

    @staticmethod
    @twice_differentiable(_second.gated_packed)
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ops.gated_packed_backward.default(grad, x, *ctx.codes), None, None


class CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index, label_smoothing, softcap):
        ctx.set_materialize_grads(False)
        ctx.codes = (ignore_index, label_smoothing, softcap)
        loss, lse = ops.cross_entropy.default(logits, target, *ctx.codes)
        ctx.save_for_backward(logits, target, lse)
        return loss

    @staticmethod
    @twice_differentiable(_second.cross_entropy)
    def backward(ctx, grad):
        dlogits = ops.cross_entropy_backward.default(
            grad.contiguous(), *ctx.saved_tensors, *ctx.codes
        )
        return dlogits, None, None, None, None


def _graph_stays():
    """Whether this backward was asked to keep the graph, so that another may follow."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


class TotalCrossEntropy(Function):
    """The gradient is made by the forward, for an upstream gradient of 1.

    The backward multiplies it by the real one, in a kernel that reads this from the device and has
    nothing to do where it is 1.
    """

    @staticmethod
    def forward(
        ctx, logits, target, divisor_tensor, divisor, ignore_index, label_smoothing, softcap
    ):
        ctx.set_materialize_grads(False)
        ctx.codes = (divisor, ignore_index, label_smoothing, softcap)
        total, _, _, dlogits = ops.cross_entropy_with_gradient.default(
            logits, target, divisor_tensor, *ctx.codes
        )
        ctx.save_for_backward(logits, target, divisor_tensor, dlogits)
        return total

    @staticmethod
    @twice_differentiable(_second.total_cross_entropy)
    def backward(ctx, grad):
        dlogits = ctx.saved_tensors[-1]
        if _graph_stays():
            dlogits = dlogits * grad
        else:
            ops.scale_grads.default([dlogits], grad)
        return dlogits, None, None, None, None, None, None
