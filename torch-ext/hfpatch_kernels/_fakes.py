"""What the operators return for tensors without data: shapes and dtypes for torch.compile."""

import functools

import torch

from ._codes import CAST_INPUT, CAST_WEIGHT, NEED_BIAS, NEED_WEIGHT, NORM_CHUNK
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


def _sum_partial_rows(rows, cols, sums):
    """hfp_sum_partial_rows of hfpatch.h."""
    if sums < 1 or rows <= sums:
        return 0
    parts = _partial_rows(rows, cols) // sums
    return 0 if parts < 2 else torch.sym_min(parts, rows // sums) * sums


def _product(sizes):
    total = 1
    for size in sizes:
        total = total * size
    return total


def _if_needed(parameter, needed):
    shape = parameter.shape if needed else (0,)
    return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def _sums(x, parameter, needs):
    rows, cols = _product(x.shape[:-1]), x.shape[-1]
    wanted = (needs & 1) + (needs >> 1 & 1)
    parts = _sum_partial_rows(rows, cols, _product(parameter.shape[:-1])) if wanted else 0
    return torch.empty((parts, wanted * cols), dtype=torch.float32, device=x.device)


def _add_activation_backward(grad, x, bias, *rest):
    needs = rest[-1]
    return _like(x), _if_needed(bias, needs & NEED_BIAS), _sums(grad, bias, needs)


def _mul_add_backward(grad, a, b, cast, needs):
    db, dc = _if_needed(b, needs & NEED_WEIGHT), _if_needed(b, needs & NEED_BIAS)
    return _like(a), db, dc, _sums(grad, b, needs)


def _cross_entropy(logits, *_):
    def rows():
        return torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)

    return rows(), rows()


def _cross_entropy_with_gradient(logits, *_):
    total = torch.empty((), dtype=torch.float32, device=logits.device)
    return total, *_cross_entropy(logits), _like(logits)


def _grad_norm(tensors, norm_type):
    chunks = sum((t.numel() + NORM_CHUNK - 1) // NORM_CHUNK for t in tensors)
    device = tensors[0].device
    norm = torch.empty((), dtype=torch.float32, device=device)
    return norm, torch.empty(chunks, dtype=torch.float32, device=device)


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


#: hfp_gemm_workspace of hfpatch.h, and products.h.
_GEMM_COLUMNS, _GEMM_PANEL, _GEMM_CAPACITY = 512, 32, 1 << 20
_CUDA_GEMM_WORKSPACE = 8 << 20


def _gemm_workspace(a, batch, m, n, k):
    entries = 0
    if a.device.type == "cuda":
        entries = _CUDA_GEMM_WORKSPACE
    elif batch > 0 and m > 0 and n > 0:
        k = torch.sym_max(k, 1)
        padded = (n + _GEMM_PANEL - 1) // _GEMM_PANEL * _GEMM_PANEL
        columns = _GEMM_CAPACITY // k // _GEMM_PANEL * _GEMM_PANEL
        columns = torch.sym_max(torch.sym_min(columns, _GEMM_COLUMNS), _GEMM_PANEL)
        columns = torch.sym_min(columns, padded)
        fit = torch.sym_max(_GEMM_CAPACITY // (columns * k), 1)
        entries = torch.sym_min(fit, batch) * columns * k
    return torch.empty(entries, dtype=torch.float32, device=a.device)


def _gemm(a, b, c, alpha, beta, transpose_a, transpose_b):
    m, k = (a.shape[-1], a.shape[-2]) if transpose_a else (a.shape[-2], a.shape[-1])
    n = b.shape[-2] if transpose_b else b.shape[-1]
    batch, shape = 1, (m, n)
    if a.dim() == 3:
        batch = a.shape[0] if a.shape[0] != 1 else b.shape[0]
        if batch == 1 and c is not None:
            batch = c.shape[0]
        shape = (batch, m, n)
    out = torch.empty(shape, dtype=a.dtype, device=a.device)
    return out, _gemm_workspace(a, batch, m, n, k)


def _attention(q, k, v, *_):
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _log_probs(logits, *_):
    return *_cross_entropy(logits), _like(logits)


def _load_balancing_loss(logits, mask, k):
    tokens, width = logits.shape[0], 2 * logits.shape[1] + 1
    parts = torch.sym_min(torch.sym_max((tokens + 63) // 64, 1), 256)
    options = {"dtype": torch.float32, "device": logits.device}
    return (
        torch.empty((), **options),
        torch.empty(width, **options),
        torch.empty(parts * width, **options),
    )


def _nothing(*_):
    return None


_FUNCTIONAL = {
    "rms_norm": _rms_norm,
    "layer_norm": _like,
    "gelu": _like,
    "silu": _like,
    "gated": _like,
    "gated_packed": _halved,
    "gated_clamped": _like,
    "norm_modulate": _modulated,
    "gate_residual": _modulated,
    "gate_residual_norm_modulate": _like_twice,
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _like_twice,
    "rope": _like,
    "rope_qk": _like_two,
    "qk_norm_rope": _like_two,
    "gated_rms_norm": _like,
    "rms_norm_silu": _like,
    "add_bias": _like,
    "group_norm": _group_norm,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_backward": _layer_norm_backward,
    "gelu_backward": _second,
    "silu_backward": _second,
    "gated_backward": _gated_backward,
    "gated_packed_backward": _second,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _second,
    "cross_entropy_with_gradient": _cross_entropy_with_gradient,
    "grad_norm": _grad_norm,
    "softmax": _softmax,
    "softmax_backward": _softmax,
    "argmax": _argmax,
    "topk": _topk,
    "sample": _indices,
    "add_gelu": _like,
    "add_silu": _like,
    "mul_add": _modulated,
    "add_gelu_backward": _add_activation_backward,
    "add_silu_backward": _add_activation_backward,
    "mul_add_backward": _mul_add_backward,
    "add": _like,
    "mul": _like,
    "scale": _like,
    "gemm": _gemm,
    "gemm_batched": _gemm,
    "attention": _attention,
    "cross_entropy_log_probs": _log_probs,
    "load_balancing_loss": _load_balancing_loss,
    "load_balancing_loss_backward": _second,
}
#: Of HFP_LIST_OP_TABLE: they return nothing.
_NOTHING = ("adamw_step", "clip_grads", "scale_grads")
#: HFP_IN_PLACE_TABLE of hfpatch.h
_IN_PLACE = (
    "rms_norm",
    "layer_norm",
    "gelu",
    "silu",
    "add_gelu",
    "add_silu",
    "mul_add",
    "gate_residual",
    "add_rms_norm",
    "add_layer_norm",
    "rope",
    "rope_qk",
    "qk_norm_rope",
)


def _of_one_device(fake):
    """`fake`, where no tensor on the meta device stands beside one with data: PyTorch dispatches
    such a call here, and the result would be memory that nobody has written."""

    @functools.wraps(fake)
    def call(*args):
        flat = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
        devices = {t.device for t in flat if type(t) in (torch.Tensor, torch.nn.Parameter)}
        if len({d.type == "meta" for d in devices}) > 1:
            raise RuntimeError(
                "expected all tensors on one device, got {}".format(" and ".join(map(str, devices)))
            )
        return fake(*args)

    return call


def register():
    """Once in a process, also when two copies of one build are imported."""
    if hasattr(ops, "_fakes_registered"):
        return
    nothing = _of_one_device(_nothing)
    for name, fake in _FUNCTIONAL.items():
        torch.library.register_fake(add_op_namespace_prefix(name), _of_one_device(fake))
        torch.library.register_fake(add_op_namespace_prefix(name + "_out"), nothing)
    for name in _NOTHING:
        torch.library.register_fake(add_op_namespace_prefix(name), nothing)
    for name in _IN_PLACE:
        torch.library.register_fake(add_op_namespace_prefix(name + "_"), nothing)
    ops._fakes_registered = True


register()
