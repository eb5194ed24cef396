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


def _workspace(x):
    """hfp_row_workspace of hfpatch.h: an entry per part of a row, where rows are shared out."""
    cols, rows = x.shape[-1], 1
    for size in x.shape[:-1]:
        rows = rows * size
    entries = 0
    if cols >= 16384 and rows <= 256:
        part = 2048 * ((cols + 2048 * 1024 - 1) // (2048 * 1024))
        entries = rows * ((cols + part - 1) // part)
    return torch.empty(entries, dtype=torch.int64, device=x.device)


def _indices(x, *_):
    return torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)


def _softmax(x, *_):
    return _like(x), _workspace(x)


def _argmax(x):
    return _indices(x), _workspace(x)


def _topk(x, k):
    shape = (*x.shape[:-1], k)
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    return values, torch.empty(shape, dtype=torch.int64, device=x.device)


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
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_backward": _layer_norm_backward,
    "gelu_backward": _second,
    "silu_backward": _second,
    "gated_backward": _gated_backward,
    "gated_packed_backward": _second,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _second,
    "softmax": _softmax,
    "softmax_backward": _softmax,
    "argmax": _argmax,
    "topk": _topk,
    "sample": _indices,
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
