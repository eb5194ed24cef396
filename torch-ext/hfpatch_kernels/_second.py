"""Second derivatives: where one is asked for, a gradient is the formula's, on ATen's operators.

A backward kernel leaves nothing for autograd to differentiate. With ``create_graph=True``, and so
in `torch.autograd.functional.hvp` and in gradient penalties, the gradient is by the formula, whose
operators autograd records. `once_differentiable` would not do: `torch.autograd.grad` with inputs
never reaches what it raises, and leaves that part of the result out without a word.
"""

import functools

import torch
import torch.nn.functional as F

from . import _codes


def no_gradients(ctx):
    """A backward's answer where what follows gives no gradient: none for any input.

    Zeros would not be the same: an optimizer leaves a parameter without a gradient alone, and
    decays the weights of one whose gradient is 0. So functions call
    ``ctx.set_materialize_grads(False)``. As PyTorch's own nodes do, this asks for what was saved
    even so, which is an error where that was freed or written to.
    """
    _ = ctx.saved_tensors
    return (None,) * len(ctx.needs_input_grad)


def twice_differentiable(formula):
    """Decorate the backward of a function with one output; it is called without recording, and
    with a gradient.

    ``formula(*saved tensors, *ctx.codes)`` computes what the forward did; the saved tensors begin
    with the forward's first inputs, in order.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def wrapped(ctx, grad):
            if grad is None:
                return no_gradients(ctx)
            if not torch.is_grad_enabled():  # the usual case, which pays for nothing else
                return backward(ctx, grad)
            if not torch.compiler.is_compiling():
                return _recorded(formula, ctx, grad)
            with torch.no_grad():
                return backward(ctx, grad)

        return wrapped

    return decorate


def _recorded(formula, ctx, grad):
    # views: one tensor may be two inputs, each with a gradient of its own
    inputs = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
    place = [i for i, need in enumerate(ctx.needs_input_grad) if need]
    y = formula(*inputs, *ctx.codes)
    found = torch.autograd.grad(
        y, [inputs[i] for i in place], grad.to(y.dtype), create_graph=True, allow_unused=True
    )
    grads = [None] * len(ctx.needs_input_grad)
    for i, g in zip(place, found):  # noqa: B905
        grads[i] = g
    return tuple(grads)


def _wide(*tensors):
    """In fp32, or in fp64 if one of them is."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


def rms_norm(x, weight, bias, eps, weight_offset, cast):
    (y,) = _wide(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None and cast != _codes.CAST_NONE:
        y = y.to(x.dtype if cast == _codes.CAST_INPUT else weight.dtype) * weight
    elif weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    return y if bias is None else y + bias.to(y.dtype)


def layer_norm(x, weight, bias, eps):
    (y,) = _wide(x)
    y = F.layer_norm(y, y.shape[-1:], None, None, eps)
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def activation(x, code):
    if code == _codes.SILU:
        return F.silu(x)
    if code == _codes.RELU:
        return F.relu(x)
    if code == _codes.GELU_SIGMOID:
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if code == _codes.GELU_TANH else "none")


def gated(gate, up, code):
    return activation(gate, code) * up


def gated_packed(x, code, gate_first):
    first, second = x.chunk(2, -1)
    return gated(first, second, code) if gate_first else gated(second, first, code)


def cross_entropy(logits, target, lse, ignore_index, label_smoothing, softcap):
    (z,) = _wide(logits)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(
        z.flatten(0, -2),
        target.flatten(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return loss.view(target.shape)


def total_cross_entropy(
    logits, target, divisor_tensor, dlogits, divisor, ignore_index, label_smoothing, softcap
):
    loss = cross_entropy(logits, target, None, ignore_index, label_smoothing, softcap)
    if divisor_tensor is None:
        divisor_tensor = divisor or (target != ignore_index).sum()
    return loss.sum() / divisor_tensor
