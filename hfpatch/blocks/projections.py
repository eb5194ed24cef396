"""A block's linear layers: several as one product, GELU in the epilogue, where they are plain.

A layer is plain when calling it is `F.linear` with its own weight and nothing else: no LoRA, no
quantized weight, no hook, nobody's forward in its place. Any other layer is called as a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfpatch.proof.subject import Tensor
from hfpatch.proof.unchanged import is_hooked, is_replaced

#: Attributes of an instance that stand before its class's forward and its parameters.
_INSTEAD = ("forward", "weight", "bias")
#: Of a convolution also the method that its forward calls: who wants seamless textures sets it.
_INSTEAD_OF_CONVOLUTION = (*_INSTEAD, "_conv_forward")


def is_plain(linear: Any, x: Tensor) -> bool:
    """Whether calling `linear` on `x` is `F.linear` with its own weight and nothing else."""
    if type(linear) is not nn.Linear or is_hooked(linear):
        return False
    d = linear.__dict__  # attributes of a module cost twenty times a dict's entries
    parameters = d["_parameters"]
    weight = parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype == x.dtype
        and "bias" in parameters  # else it is a buffer, or gone
        and d.keys().isdisjoint(_INSTEAD)
    )


def parameter(module: nn.Module, name: str) -> Any:
    """`getattr(module, name)`, which takes a module three times as long: it looks at its class and
    its attributes first."""
    d = module.__dict__
    held = d["_parameters"].get(name) if name not in d else None
    return getattr(module, name) if held is None else held


def is_plain_convolution(conv: Any, x: Tensor) -> bool:
    """Whether calling `conv` on `x` is `F.conv2d` or `F.conv3d` with its own weight alone."""
    if type(conv) not in (nn.Conv2d, nn.Conv3d) or conv.padding_mode != "zeros" or is_hooked(conv):
        return False
    d = conv.__dict__
    weight = d["_parameters"].get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype == x.dtype
        and d.keys().isdisjoint(_INSTEAD_OF_CONVOLUTION)
    )


def without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`conv(x)` less its bias, and the bias: [C], or None where it is in the result.

    PyTorch adds a convolution's bias in a kernel of its own, which reads and writes the whole
    result; whoever adds something to it anyway adds the bias there.
    """
    bias = parameter(conv, "bias")
    if bias is None or not is_plain_convolution(conv, x):
        return conv(x), None
    return conv._conv_forward(x, parameter(conv, "weight"), None), bias


def convolve(conv: Any, x: Tensor) -> Tensor:
    """`conv(x)`, by `convolve_plain` where it may be."""
    return convolve_plain(conv, x) if is_plain_convolution(conv, x) else conv(x)


def convolve_plain(conv: Any, x: Tensor, more: Tensor | None = None) -> Tensor:
    """What an `nn.Conv2d` that `is_plain_convolution` makes of `x`; `more`: [C], added to its bias.

    Of one pixel in channels-last memory it is a matrix product, whose epilogue adds the bias.
    """
    bias = conv.bias if more is None else more if conv.bias is None else conv.bias + more
    rows = x.permute(0, 2, 3, 1)
    one = conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0)
    if not (one and conv.groups == 1 and rows.is_contiguous() and stays_channels_last(x)):
        return conv._conv_forward(x, conv.weight, bias)  # type: ignore[no-any-return]
    return F.linear(rows, conv.weight.flatten(1), bias).permute(0, 3, 1, 2)


def stays_channels_last(x: Tensor) -> bool:
    """Whether PyTorch makes of an image in channels-last memory one that lies so too: it looks at
    the strides of what there is one of as well, and attention over pixels leaves a single image
    with another step to the next image than images have."""
    _, c, h, w = x.shape
    of_image, of_channel, of_row, of_pixel = x.stride()
    return (
        of_channel >= 0
        and of_channel * max(c, 1) <= of_pixel
        and of_pixel * max(w, 1) <= of_row
        and of_row * max(h, 1) <= of_image
    )


def project(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """`tuple(linear(x) for linear in linears)`: one product where their weights stand packed.

    Returns views of one [..., N1 + N2 + …] tensor then, so their rows are strided.
    """
    product = packed_product(x, linears)
    if product is None:
        return tuple(linear(x) for linear in linears)
    return torch.split(product, [m.out_features for m in linears], -1)


def packed_product(x: Tensor, linears: Sequence[Any]) -> Tensor | None:
    """What the layers make of `x` side by side, [..., N1 + N2 + …], as one product; None where
    their weights do not stand packed."""
    packed = _packed(linears, x)
    return None if packed is None else F.linear(x, *packed)


def is_packed(linears: Sequence[Any], x: Tensor) -> bool:
    """Whether `project` of `x` is one product."""
    return _packed(linears, x) is not None


def project_into(out: Tensor, x: Tensor, linears: Sequence[Any]) -> None:
    """Write `project(x, linears)`, side by side, to `out`; for layers that `is_packed`.

    Args:
        out: [M, N1 + N2 + …], contiguous.
        x: [M, K].
        linears: layers whose weights stand packed.
    """
    packed = _packed(linears, x)
    assert packed is not None
    weight, bias = packed
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _packed(linears: Sequence[Any], x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """The weights and biases as one, if they lie one after the other in one storage."""
    first = linears[0]
    if not is_plain(first, x):  # what stands in its place may have none of its attributes
        return None
    weight, bias = first._parameters["weight"], first._parameters["bias"]
    rows, columns = 0, first.in_features
    weight_at = weight.data_ptr()
    bias_at = 0 if bias is None else bias.data_ptr()
    size = weight.element_size()
    for linear in linears:
        if linear is not first and not is_plain(linear, x):
            return None
        own = linear._parameters
        if (
            (own["bias"] is None) != (bias is None)
            # an address is added to nothing: a layer's sizes may be NumPy's, of 32 bits
            or own["weight"].data_ptr() - weight_at != rows * columns * size
            or (bias is not None and own["bias"].data_ptr() - bias_at != rows * size)
        ):
            return None
        rows += linear.out_features
    if not (_holds(weight, rows * columns) and (bias is None or _holds(bias, rows))):
        return None
    whole = weight.as_strided((rows, columns), (columns, 1))
    return whole, None if bias is None else bias.as_strided((rows,), (1,))


def _holds(first: Tensor, elements: int) -> bool:
    """Whether the storage goes on behind `first`: neighbours in memory may be two storages."""
    end = first.storage_offset() + elements
    return first.is_contiguous() and first.untyped_storage().nbytes() >= end * first.element_size()


def gelu_product(linear: Any, x: Tensor, approximate: str) -> Tensor | None:
    """`gelu(linear(x))` with GELU in the epilogue of the product, where cuBLASLt offers it.

    Args:
        linear: the layer, as a module.
        x: [..., K].
        approximate: the GELU's formula; the epilogue computes "tanh".

    Returns:
        [..., N], or None where the modules must be called.
    """
    if not (
        x.is_cuda
        and x.dtype != torch.float32
        and approximate == "tanh"
        and linear.bias is not None
        and is_plain(linear, x)
    ):
        return None
    h = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
    return h.view(*x.shape[:-1], -1)


def drops_nothing(dropout: Any) -> bool:
    """Whether calling this module returns its input and does nothing else."""
    return (
        type(dropout) is nn.Dropout
        and not (dropout.training and dropout.p)
        and "forward" not in dropout.__dict__
        and not is_hooked(dropout)
    )


def output_projection(attn: Any, x: Tensor) -> Tensor:
    """diffusers' `attn.to_out`: [linear, dropout]."""
    modules = attn._modules["to_out"]._modules
    x = modules["0"](x)
    dropout = modules["1"]
    return x if drops_nothing(dropout) else dropout(x)


def feed_forward(ff: Any, x: Tensor) -> Tensor:
    """diffusers' `FeedForward`: [activation with its projection, dropout, linear, and perhaps a
    dropout]."""
    first, dropout, *rest = ff._modules["net"]._modules.values()
    approximate = first.__dict__.get("approximate")
    if (
        approximate is not None
        and drops_nothing(dropout)
        and not is_replaced(ff)
        and not is_replaced(first)
    ):
        h = gelu_product(first.proj, x, approximate)
        if h is not None:
            for module in rest:
                h = module(h)
            return h
    return ff(x)  # type: ignore[no-any-return]
