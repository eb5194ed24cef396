"""Gradients. The forward is the kernel; the backward is plain PyTorch in fp32, rounded once.

Each class is entered only when a gradient is wanted, since `Function.apply` costs more than a
kernel launch. The second derivative is not there: `once_differentiable` says so to who asks.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import _codes
from ._ops import ops

_aten = torch.ops.aten


def _activate(x, activation):
    """act(x) for fp32 ``x``; the activations of hfpatch.h."""
    if activation == _codes.SILU:
        return torch.nn.functional.silu(x)
    if activation == _codes.GELU_SIGMOID:
        return x * torch.sigmoid(1.702 * x)
    if activation == _codes.RELU:
        return torch.relu(x)
    tanh = activation == _codes.GELU_TANH
    return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")


def _activate_backward(grad, x, activation):
    """grad * act'(x); fp32 in and out."""
    if activation == _codes.SILU:
        return _aten.silu_backward(grad, x)
    if activation == _codes.GELU_SIGMOID:
        s = torch.sigmoid(1.702 * x)
        return grad * (s + 1.702 * x * s * (1 - s))
    if activation == _codes.RELU:
        return _aten.threshold_backward(grad, x, 0)
    tanh = activation == _codes.GELU_TANH
    return _aten.gelu_backward(grad, x, approximate="tanh" if tanh else "none")


def _sum_rows(grad):
    """Sum over all dimensions but the last."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, weight_offset, cast):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.weight_offset, ctx.cast = eps, weight_offset, cast
        ctx.bias_dtype = None if bias is None else bias.dtype
        return ops.rms_norm.default(x, weight, bias, eps, weight_offset, cast)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        g = grad.float()
        xf = x.float()
        rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + ctx.eps)
        xhat = xf * rstd
        grad_x = grad_weight = grad_bias = None
        if need_bias:
            grad_bias = _sum_rows(g).to(ctx.bias_dtype)
        if weight is not None:
            if need_weight:
                # What the weight multiplied: xhat as the forward rounded it.
                factor = xhat
                if ctx.cast == _codes.CAST_INPUT:
                    factor = xhat.to(x.dtype).float()
                elif ctx.cast == _codes.CAST_WEIGHT:
                    factor = xhat.to(weight.dtype).float()
                grad_weight = _sum_rows(g * factor).to(weight.dtype)
            g = g * (weight.float() + ctx.weight_offset)
        if need_x:
            grad_x = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return ops.layer_norm.default(x, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        g = grad.float()
        xf = x.float()
        centered = xf - xf.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + ctx.eps)
        xhat = centered * rstd
        grad_x = grad_weight = grad_bias = None
        if need_bias:
            grad_bias = _sum_rows(g).to(ctx.bias_dtype)
        if weight is not None:
            if need_weight:
                grad_weight = _sum_rows(g * xhat).to(weight.dtype)
            g = g * weight.float()
        if need_x:
            mean = g.mean(-1, keepdim=True)
            grad_x = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdim=True))
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None


class Activation(Function):
    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        if activation == _codes.SILU:
            return ops.silu.default(x)
        return ops.gelu.default(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return _activate_backward(grad.float(), x.float(), ctx.activation).to(x.dtype), None


class Gated(Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.gated.default(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        g, gf = grad.float(), gate.float()
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = _activate_backward(g * up.float(), gf, ctx.activation).to(gate.dtype)
        if ctx.needs_input_grad[1]:
            # act(gate) as the forward rounded it.
            grad_up = (g * _activate(gf, ctx.activation).to(gate.dtype).float()).to(up.dtype)
        return grad_gate, grad_up, None


class GatedPacked(Function):
    @staticmethod
    def forward(ctx, x, activation, gate_first):
        ctx.save_for_backward(x)
        ctx.activation, ctx.gate_first = activation, gate_first
        return ops.gated_packed.default(x, activation, gate_first)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        first, second = x.float().chunk(2, dim=-1)
        gate, up = (first, second) if ctx.gate_first else (second, first)
        g = grad.float()
        grad_gate = _activate_backward(g * up, gate, ctx.activation)
        grad_up = g * _activate(gate, ctx.activation).to(x.dtype).float()
        halves = (grad_gate, grad_up) if ctx.gate_first else (grad_up, grad_gate)
        return torch.cat(halves, dim=-1).to(x.dtype), None, None
