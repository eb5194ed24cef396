"""What the operators return for tensors without data: shapes and dtypes for torch.compile.

By the result rules of hfpatch.h's op table, each of which is a function of the call's arguments by
name; `first` is the first of them.
"""

import functools

import torch

from ._codes import CAST_INPUT, CAST_WEIGHT, NEED_BIAS, NEED_WEIGHT, NORM_CHUNK
from ._ops import add_op_namespace_prefix, ops
from ._table import IN_PLACE, OPS


def _like(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _product(sizes):
    total = 1
    for size in sizes:
        total = total * size
    return total


# ------------------------------------------------------------------------------ of a forward


def _norm(x, weight, cast, **_):
    dtype = x.dtype
    if weight is not None and cast == CAST_INPUT:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    elif weight is not None and cast == CAST_WEIGHT:
        dtype = weight.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _halved(first, **_):
    torch._check(
        first.shape[-1] % 2 == 0,
        lambda: "`x`: expected an even last dimension, got {}".format(first.shape[-1]),
    )
    shape = (*first.shape[:-1], first.shape[-1] // 2)
    return torch.empty(shape, dtype=first.dtype, device=first.device)


def _modulated(first, second, cast, **_):
    dtype = first.dtype
    if cast == CAST_INPUT:
        dtype = torch.promote_types(first.dtype, second.dtype)
    return torch.empty(first.shape, dtype=dtype, device=first.device)


def _rows(first, **_):
    return torch.empty(first.shape[:-1], dtype=torch.float32, device=first.device)


def _scalar(first, **_):
    device = first[0].device if isinstance(first, (list, tuple)) else first.device
    return torch.empty((), dtype=torch.float32, device=device)


def _indices(first, **_):
    return torch.empty(first.shape[:-1], dtype=torch.int64, device=first.device)


def _workspace(first, **_):
    """hfp_row_workspace of hfpatch.h: an entry per part of a row, where rows are shared out."""
    cols, rows = first.shape[-1], _product(first.shape[:-1])
    entries = 0
    if cols >= 16384 and rows <= 256:
        part = 2048 * ((cols + 2048 * 1024 - 1) // (2048 * 1024))
        entries = rows * ((cols + part - 1) // part)
    return torch.empty(entries, dtype=torch.int64, device=first.device)


def _topk(first, k, dtype=None, **_):
    return torch.empty((*first.shape[:-1], k), dtype=dtype or first.dtype, device=first.device)


def _topk_indices(**arguments):
    return _topk(**arguments, dtype=torch.int64)


def _groups(x, groups, channels_last, **_):
    """hfp_group_parts of hfpatch.h, for sizes that may be symbols."""
    samples, channels, positions = x.shape
    if channels_last:
        channels, positions = positions, channels
    least = 512 if channels_last else 4096
    elements = channels // groups * positions
    parts = torch.sym_max(torch.sym_min((elements + least - 1) // least, 256), 1)
    if channels_last:
        parts = torch.sym_min(parts, torch.sym_max(positions, 1))
    return torch.empty((samples, groups, parts + 1, 2), dtype=torch.float32, device=x.device)


def _attended(q, v, **_):
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)


def _balance(logits, parts=1, **_):
    width = 2 * logits.shape[1] + 1
    return torch.empty(parts * width, dtype=torch.float32, device=logits.device)


def _balance_partials(logits, **_):
    return _balance(logits, torch.sym_min(torch.sym_max((logits.shape[0] + 63) // 64, 1), 256))


def _chunks(tensors, **_):
    chunks = sum((t.numel() + NORM_CHUNK - 1) // NORM_CHUNK for t in tensors)
    return torch.empty(chunks, dtype=torch.float32, device=tensors[0].device)


# ------------------------------------------------------------------------------ of gradients


def _partial_rows(rows, cols):
    """hfp_partial_rows of hfpatch.h, for sizes that may be symbols."""
    width = torch.sym_max(cols, 1)
    at_once = torch.sym_max(1024 // width, 1)
    room = 4 if width <= 512 else 8
    per_sm = torch.sym_min(torch.sym_max(8192 // width, 1), room)
    return torch.sym_min((rows + at_once - 1) // at_once, 132 * per_sm)


def _wanted(needs):
    return (needs & 1) + (needs >> 1 & 1)


def _of_parameter(x, parameter, needed):
    if parameter is None or not needed:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    return torch.empty(x.shape[-1], dtype=parameter.dtype, device=x.device)


def _dweight(x, weight, needs, **_):
    return _of_parameter(x, weight, needs & NEED_WEIGHT)


def _dbias(x, bias, needs, **_):
    return _of_parameter(x, bias, needs & NEED_BIAS)


def _partials(x, needs, **_):
    wanted, cols = _wanted(needs), x.shape[-1]
    parts = _partial_rows(_product(x.shape[:-1]), cols) if wanted else 0
    return torch.empty((parts, wanted * cols), dtype=torch.float32, device=x.device)


def _if_needed(parameter, needed):
    shape = parameter.shape if needed else (0,)
    return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def _sum_partial_rows(rows, cols, sums):
    """hfp_sum_partial_rows of hfpatch.h."""
    if sums < 1 or rows <= sums:
        return 0
    parts = _partial_rows(rows, cols) // sums
    return 0 if parts < 2 else torch.sym_min(parts, rows // sums) * sums


def _sums(x, parameter, needs):
    rows, cols = _product(x.shape[:-1]), x.shape[-1]
    wanted = _wanted(needs)
    parts = _sum_partial_rows(rows, cols, _product(parameter.shape[:-1])) if wanted else 0
    return torch.empty((parts, wanted * cols), dtype=torch.float32, device=x.device)


# ------------------------------------------------------------------------------ of products

#: hfp_gemm_workspace of hfpatch.h, and products.h.
_GEMM_COLUMNS, _GEMM_PANEL, _GEMM_CAPACITY = 512, 32, 1 << 20
_CUDA_GEMM_WORKSPACE = 8 << 20


def _gemm_sizes(a, b, c, transpose_a, transpose_b):
    m, k = (a.shape[-1], a.shape[-2]) if transpose_a else (a.shape[-2], a.shape[-1])
    n = b.shape[-2] if transpose_b else b.shape[-1]
    batch = 1
    if a.dim() == 3:
        batch = a.shape[0] if a.shape[0] != 1 else b.shape[0]
        if batch == 1 and c is not None:
            batch = c.shape[0]
    return batch, m, n, k


def _gemm(a, b, c, transpose_a, transpose_b, **_):
    batch, m, n, _k = _gemm_sizes(a, b, c, transpose_a, transpose_b)
    shape = (batch, m, n) if a.dim() == 3 else (m, n)
    return torch.empty(shape, dtype=a.dtype, device=a.device)


def _gemm_workspace(a, b, c, transpose_a, transpose_b, **_):
    batch, m, n, k = _gemm_sizes(a, b, c, transpose_a, transpose_b)
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


# ------------------------------------------------------------------------------ the table

_RULES = {
    "x": lambda first, **_: _like(first),
    "norm": _norm,
    "halved": _halved,
    "modulated": _modulated,
    "rows": _rows,
    "scalar": _scalar,
    "indices": _indices,
    "workspace": _workspace,
    "topk": _topk,
    "topk_indices": _topk_indices,
    "groups": _groups,
    "attended": _attended,
    "balance": _balance,
    "balance_partials": _balance_partials,
    "chunks": _chunks,
    "dweight": _dweight,
    "dbias": _dbias,
    "partials": _partials,
    "product": _gemm,
    "product_workspace": _gemm_workspace,
}


def _result(rule, arguments):
    """What a rule says of a call; with a parameter: "=NAME", "=NAME&BIT", "sums=NAME"."""
    kind, equals, name = rule.partition("=")
    if not equals:
        return _RULES[rule](**arguments)
    if kind == "sums":
        return _sums(arguments["first"], arguments[name], arguments["needs"])
    name, _, bit = name.partition("&")
    return _if_needed(arguments[name], not bit or arguments["needs"] & int(bit))


def _fake(rules, names):
    """The fake of an operator with these result rules and arguments."""
    names, rules = names.split(), rules.split(", ")

    def fake(*args):
        arguments = dict(zip(names, args))  # noqa: B905
        arguments["first"], arguments["second"] = args[0], args[1] if args[1:] else None
        results = tuple(_result(rule, arguments) for rule in rules)
        return results if len(results) > 1 else results[0]

    return fake


def _nothing(*_):
    return None


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
    for name, (rules, names) in OPS.items():
        prefixed = add_op_namespace_prefix(name)
        if rules == "none":
            torch.library.register_fake(prefixed, nothing)
            continue
        torch.library.register_fake(prefixed, _of_one_device(_fake(rules, names)))
        torch.library.register_fake(prefixed + "_out", nothing)
    for name in IN_PLACE:
        torch.library.register_fake(add_op_namespace_prefix(name + "_"), nothing)
    ops._fakes_registered = True


register()
