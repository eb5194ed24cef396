"""What the operators return for tensors without data: shapes and dtypes for torch.compile."""

import torch

from ._codes import CAST_INPUT, CAST_WEIGHT
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
