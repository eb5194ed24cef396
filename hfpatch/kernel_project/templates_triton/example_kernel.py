"""Two Triton kernels and how hfpatch gets them: `install()`, then `hfpatch.apply`.

`rms_norm` serves an op of hfpatch, for every module that computes it. `mish_mlp` is a forward for
one class, whose gate is none of hfpatch's ops.

Without a GPU they run under Triton's interpreter: set TRITON_INTERPRET=1 before Python starts.
"""

import contextlib

import torch
import triton
import triton.language as tl

_TILE = 4096  # elements of one program: narrow rows share one
_WIDEST = 65536  # of a row, which one program holds


@triton.jit
def _rms_norm_kernel(
    x_ptr, w_ptr, y_ptr, rows, width, row_stride, eps, offset,
    HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    value = x.to(tl.float32)
    value *= (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps))[:, None]
    if HAS_WEIGHT:
        weight = tl.load(w_ptr + column, mask=column < width, other=0.0)
        # where the normalized value is rounded: `cast` of hfpatch.ops.OPS["rms_norm"]
        if CAST == "input":
            value = value.to(x.dtype).to(tl.float32)
        if CAST == "weight":
            value = value.to(weight.dtype).to(tl.float32)
        value *= (weight.to(tl.float32) + offset)[None, :]
    out = y_ptr + row[:, None] * width + column[None, :]
    tl.store(out, value.to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(x, weight=None, bias=None, eps=1e-6, weight_offset=0.0, cast="none"):
    """The signature of `hfpatch.ops.OPS["rms_norm"].reference`.

    What it cannot take it refuses by an exception: such calls go on without it.
    """
    width = x.shape[-1]
    if bias is not None:
        raise NotImplementedError("no bias")
    if width > _WIDEST:
        raise NotImplementedError(f"rows of {width}; at most {_WIDEST}")
    dtype = x.dtype
    if weight is not None and cast == "input":
        dtype = torch.promote_types(x.dtype, weight.dtype)
    elif weight is not None and cast == "weight":
        dtype = weight.dtype
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:  # other strides between rows are read where they are
        rows = rows.contiguous()
    if weight is not None:
        weight = weight.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y  # a launch of no programs is an error
    columns = triton.next_power_of_2(width)
    tile = max(1, _TILE // columns)
    with _on(x):
        _rms_norm_kernel[(triton.cdiv(len(rows), tile),)](
            rows, weight, y, len(rows), width, rows.stride(0), eps, weight_offset,
            HAS_WEIGHT=weight is not None, CAST=cast, ROWS=tile, COLUMNS=columns,
        )  # fmt: skip
    return y


@triton.jit
def _mish_gate_kernel(gate_ptr, up_ptr, y_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    # tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2); beyond 20 it is 1
    e = tl.exp(tl.where(x > 20.0, 20.0, x))
    n = e * (e + 2.0)
    mish = tl.where(x > 20.0, x, x * (n / (n + 2.0)))
    product = mish.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + at, product.to(y_ptr.dtype.element_ty), mask=inside)


def mish_gate(gate, up):
    """``mish(gate) * up`` (Misra, arXiv:1908.08681); two tensors of one shape and dtype."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError("expected two tensors of one shape and dtype")
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if y.numel():
        with _on(gate):
            _mish_gate_kernel[(triton.cdiv(y.numel(), _TILE),)](gate, up, y, y.numel(), TILE=_TILE)
    return y


def mish_mlp(module, x):
    """The forward of `down_proj(mish(gate_proj(x)) * up_proj(x))`; its layers are called."""
    return module.down_proj(mish_gate(module.gate_proj(x), module.up_proj(x)))


def _on(x):
    """Triton launches on the current device, which need not be that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def install(class_name="^MishMLP$"):
    """Make both known to hfpatch; the handles' `.remove()` takes that back."""
    import hfpatch

    def sample(module):
        p = module.gate_proj.weight
        return (torch.randn(2, 5, p.shape[1], device=p.device, dtype=p.dtype),)

    return [
        hfpatch.register(op="rms_norm", kernel=rms_norm, name="example-kernel"),
        hfpatch.register(class_name, forward=mish_mlp, sample=sample),
    ]
