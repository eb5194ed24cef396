"""What the operators return for tensors without data: shapes and dtypes for torch.compile."""

import torch

from ._codes import CAST_INPUT, CAST_WEIGHT, NEED_BIAS, NEED_WEIGHT
from ._ops import add_op_namespace_prefix, ops


def _like(x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rms_norm(x, weight, bias, eps, weight_offset, cast):
    dtype = x.dtype
    if weight is not None and cast == CAST_INPUT:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    elif weight is not None and cast == CAST_WEIGHT:
        dtype = weight.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _halved(x, *_):
    torch._check(
        x.shape[-1] % 2 == 0,
        lambda: "`x`: expected an even last dimension, got {}".format(x.shape[-1]),
    )
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _modulated(x, modulation, *rest):
    dtype = x.dtype
    if rest[-1] == CAST_INPUT:
        dtype = torch.promote_types(x.dtype, modulation.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _like_twice(x, *_):
    return _like(x), _like(x)


def _add_rms_norm(x, residual, *rest):
    return _rms_norm(x, *rest), _like(x)


def _like_two(q, k, *_):
    return _like(q), _like(k)


def _second(_, x, *__):
    return _like(x)


def _gated_backward(grad, gate, up, activation):
    return _like(gate), _like(up)


def _partial_rows(rows, cols):
    """hfp_partial_rows of hfpatch.h, for sizes that may be symbols."""
    width = torch.sym_max(cols, 1)
    at_once = torch.sym_max(1024 // width, 1)
    room = 4 if width <= 512 else 8
    per_sm = torch.sym_min(torch.sym_max(8192 // width, 1), room)
    return torch.sym_min((rows + at_once - 1) // at_once, 132 * per_sm)


def _norm_backward(x, weight, bias, needs):
    cols, rows = x.shape[-1], 1
    for size in x.shape[:-1]:
        rows = rows * size

    def gradient(parameter, bit):
        if parameter is None or not needs & bit:
            return torch.empty(0, dtype=x.dtype, device=x.device)
        return torch.empty(cols, dtype=parameter.dtype, device=x.device)

    wanted = (needs & 1) + (needs >> 1 & 1)
    parts = _partial_rows(rows, cols) if wanted else 0
    partials = torch.empty((parts, wanted * cols), dtype=torch.float32, device=x.device)
    return _like(x), gradient(weight, NEED_WEIGHT), gradient(bias, NEED_BIAS), partials


def _rms_norm_backward(grad, x, weight, bias, eps, weight_offset, cast, needs):
    return _norm_backward(x, weight, bias, needs)


def _layer_norm_backward(grad, x, weight, bias, eps, needs):
    return _norm_backward(x, weight, bias, needs)


def _cross_entropy(logits, *_):
    def rows():
        return torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)

    return rows(), rows()


def _group_parts(channels, positions, groups, channels_last):
    """hfp_group_parts of hfpatch.h, for sizes that may be symbols."""
    least = 512 if channels_last else 4096
    elements = channels // groups * positions
    parts = torch.sym_max(torch.sym_min((elements + least - 1) // least, 256), 1)
    return torch.sym_min(parts, torch.sym_max(positions, 1)) if channels_last else parts


def _group_norm(x, weight, bias, groups, eps, silu, channels_last):
    samples, channels, positions = x.shape
    if channels_last:
        channels, positions = positions, channels
    parts = _group_parts(channels, positions, groups, channels_last)
    shape = (samples, groups, parts + 1, 2)
    return _like(x), torch.empty(shape, dtype=torch.float32, device=x.device)


def _nothing(*_):
    return None


_FUNCTIONAL = {
    "rms_norm": _rms_norm,
    "layer_norm": _like,
    "gelu": _like,
    "silu": _like,
    "gated": _like,
    "gated_packed": _halved,
    "norm_modulate": _modulated,
    "gate_residual": _modulated,
    "gate_residual_norm_modulate": _like_twice,
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _like_twice,
    "rope": _like,
    "rope_qk": _like_two,
    "qk_norm_rope": _like_two,
    "gated_rms_norm": _like,
    "group_norm": _group_norm,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_backward": _layer_norm_backward,
    "gelu_backward": _second,
    "silu_backward": _second,
    "gated_backward": _gated_backward,
    "gated_packed_backward": _second,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _second,
}


def register():
    """Once in a process, also when two copies of one build are imported."""
    if hasattr(ops, "_fakes_registered"):
        return
    for name, fake in _FUNCTIONAL.items():
        torch.library.register_fake(add_op_namespace_prefix(name), fake)
        torch.library.register_fake(add_op_namespace_prefix(name + "_out"), _nothing)
    ops._fakes_registered = True


register()
