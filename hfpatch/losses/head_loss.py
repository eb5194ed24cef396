"""Cross entropy of a linear head's results, which never exist all at once.

A language model's logits are its largest tensor: 2 GiB in bf16 for 8,192 tokens and 128,256
classes, and eager PyTorch makes six of their size. `linear_cross_entropy` takes what the head is
given and the head's weight instead:

A mean or a sum makes the gradients with the loss, as Liger's kernel does (arXiv:2410.10989): of
some rows at a time the logits, their gradient in their place, and with it those of the hidden
states and the weight. Both are kept in fp32 until the backward multiplies them with what it is
given and rounds, once; so the weight's is 4 bytes an element from the forward to the backward.

Losses of single rows make them in the backward, and so does a mean or a sum where the weight's
gradient would be larger than the logits in fp32, which eager PyTorch keeps (fewer rows than the
hidden states are wide), and where somebody looks at what autograd saves: activation checkpointing
throws the first forward's away.

- forward: the logits of some rows at a time, and of each row its loss and `lse`, the logarithm of
  its sum of exponentials, which is kept;
- backward: the logits of some *classes* at a time, once more. Their gradient is complete for these
  classes, so their rows of the weight's gradient are one product over all tokens, rounded once. The
  gradient of the hidden states is summed up in fp32.

That is eight products of a token and a weight in place of six (two each for the forward, the hidden
states' and the weight's gradients), and no memory but the gradients'.

Gradients of gradients, and batches of them (`is_grads_batched`), are PyTorch's own, of all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F

from hfpatch.errors import TargetOutOfRangeError
from hfpatch.handover import tensor_refusal
from hfpatch.kernels.sources import local_package
from hfpatch.losses.logits_hooks import LogitsHooks
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.packing import ALIGNMENT, ends_aligned
from hfpatch.proof.saved import saving_is_watched
from hfpatch.proof.subject import autocasts, no_gradients, only_by_operators

#: Bytes of logits that exist at a time.
CHUNK_BYTES = 64 << 20
#: The same where gradients are made with the loss: each piece reads and writes the weight's whole.
ROWS_BYTES = 512 << 20
#: Rows of a product below which a GPU's products are slow.
LEAST = 512
#: Devices on which few rows' gradients too are made in the forward: logits made twice are 15 % of a
#: small model's step there, and memory is the host's.
TIME_FIRST = frozenset({"cpu"})
#: Devices whose products are slow where a dimension of half types, as GPT-2's 50,257 classes, is no
#: multiple of 16 bytes: "Tensor Core Usage" in cuBLAS's documentation.
PADDED = frozenset({"cuda"})
#: Classes of a piece are a multiple of this.
_CLASSES = 64
#: Reductions as PyTorch's C++ functions number them.
_NONE, _SUM = 0, 2


class Options(NamedTuple):
    """How a head's loss is made.

    Attributes:
        ignore_index, smoothing, scale, softcap: as `linear_cross_entropy` has them.
        dtype: of the head's products.
        bias_dtype: what the bias is added in: `dtype`, as the product does, or fp32.
        adapter_dtype: of the products of an adapter: `dtype`, or fp32.
        scaling: of the adapter.
    """

    ignore_index: int
    smoothing: float
    scale: float
    softcap: float
    dtype: torch.dtype
    bias_dtype: torch.dtype
    adapter_dtype: torch.dtype
    scaling: float = 0.0

    def bytes_of(self, classes: int) -> int:
        """Of a row's logits, in the widest dtype that they are made in."""
        dtypes = self.dtype, self.bias_dtype, self.adapter_dtype
        return classes * max(dtype.itemsize for dtype in dtypes)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    num_items: Tensor | float | None = None,
    recompute: bool | None = None,
) -> Tensor:
    """`cross_entropy(softcapped(linear(hidden, weight, bias) * scale).float(), target)` in pieces.

    The logits are rounded to the dtype of `hidden` (of an fp32 `weight` see there) and the rest is
    fp32, as where a model makes them and its loss is taken of their fp32 copy.

    Args:
        hidden: ``[..., H]``; fp32, fp16 or bf16.
        weight: ``[V, H]``, of the dtype of `hidden`, or fp32: its gradient is fp32 then. With
            hidden states of a half type the products and the logits are fp32, as of hidden states
            that are widened before the head; under autocast the weight is rounded to their dtype.
        target: ``[...]``, integers; `ignore_index`, or 0 to ``V - 1``.
        bias: ``[V]`` or None.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"``, or ``"none"``.
        ignore_index: rows with this target have loss and gradient 0.
        label_smoothing: from 0 to 1, as `torch.nn.functional.cross_entropy` has it.
        scale: what the logits are multiplied with, before the softcap.
        softcap: 0, or the c of ``c * tanh(logits / c)``.
        z_loss: adds ``z_loss * lse ** 2`` of each row (PaLM, arXiv:2204.02311).
        class_weight: ``[V]`` or None: `torch.nn.functional.cross_entropy`'s `weight`. With it, and
            with `z_loss`, PyTorch's operators stand in for the kernel: no more memory, more time.
        num_items: what the sum is divided by in place of the rows that count, where gradients are
            accumulated over batches; for ``reduction="mean"``.
        recompute: True: make the logits once more in the backward, in place of keeping the
            gradients from the forward on: a third more time, ``4 * V * H`` bytes less. False: keep
            them. None: False, but True on a GPU with fewer than ``H`` rows, where these bytes are
            more than the logits' in fp32, and where hooks look at what autograd saves, as
            activation checkpointing's do.

    Returns:
        fp32: 0 dimensions, or ``[...]`` for ``reduction="none"``. The mean over no row is NaN.

    Raises:
        ValueError: shapes or dtypes that do not belong together; another `reduction`; on a CPU a
            target out of range, whose loss is NaN on a GPU.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction`: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"`num_items`: expected it with `reduction='mean'`, got {reduction!r}")
    if z_loss or class_weight is not None:
        check_head(hidden, weight, target, bias, ignore_index)
        rows = target.to(hidden.device, torch.int64).reshape(-1)
        from hfpatch.losses import head_rows

        losses, z, found = head_rows.weighted_rows(
            hidden, weight, target, bias, ignore_index, label_smoothing,
            head_rows.Form(scale, softcap), z_loss, class_weight,
        )  # fmt: skip
        if reduction == "none":
            return shaped(losses + z, target.shape)
        return head_rows.reduced(losses, z, reduction, found, rows, class_weight, num_items)[0]
    check_head(hidden, weight, target, bias, ignore_index)
    dtype = product_dtype(hidden, weight)
    numbers = float(label_smoothing), float(scale), float(softcap)
    options = Options(int(ignore_index), *numbers, dtype, dtype, dtype)
    return loss_of_head(
        hidden, weight, target, bias, options, reduction, num_items=num_items, recompute=recompute
    )


def loss_of_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    reduction: str,
    *,
    num_items: Tensor | float | None = None,
    recompute: bool | None = None,
    adapter: tuple[Tensor | None, Tensor | None] = (None, None),
    hooks: LogitsHooks | None = None,
    sources: Sequence[Tensor | None] = (None,) * 5,
) -> Tensor:
    """`linear_cross_entropy` without what is PyTorch's operators' alone, of a head that
    `check_head` has seen.

    Args:
        adapter: (A [r, H], B [V, r]) of LoRA: ``scaling (hidden A^T) B^T`` is added to the product.
        hooks: those on logits that a model's head has deferred: called in the backward.
        sources: what the hidden states, the weight, the bias, A and B were made of, where they are
            some rows or classes of it: what a hook has changed goes there.
    """
    rows = target.to(hidden.device, torch.int64).reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _LinearCrossEntropy.apply
    wanted = [t is not None and t.requires_grad for t in (flat, weight, bias, *adapter)]
    if recompute is None:
        few = weight.requires_grad and len(rows) < weight.shape[1]
        recompute = saving_is_watched() or (few and hidden.device.type not in TIME_FIRST)
    if reduction != "none" and not recompute and any(wanted) and torch.is_grad_enabled():
        summed: Any = _SummedCrossEntropy.apply
        total: Tensor = summed(
            flat, weight, bias, *adapter, rows, options, hooks, *sources
        ).double()
    else:
        loss: Tensor = apply(flat, weight, bias, *adapter, rows, options, hooks, *sources)
        total = loss.sum(dtype=torch.float64) if reduction != "none" else loss
    if reduction == "none":
        return shaped(total, target.shape)
    if reduction == "mean":
        items = (rows != options.ignore_index).sum() if num_items is None else num_items
        total = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return shaped(total.to(torch.float32), ())


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of a head's products. An fp32 weight is rounded to the half type of hidden states by autocast
    alone: without it, who keeps it in fp32 wants fp32 logits."""
    half = hidden.dtype in (torch.float16, torch.bfloat16)
    if half and weight.dtype == torch.float32 and not autocasts(hidden.device.type):
        return torch.float32
    return hidden.dtype


def shaped(loss: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`loss.reshape(shape)`, and itself where it has that shape: a loss that is a view cannot be
    detached in place, as pipelines that split the backward do (`torch.distributed.pipelining`)."""
    return loss if loss.shape == shape else loss.reshape(shape)


def refusal(hidden: Tensor, weight: Tensor) -> str | None:
    """Why a head's loss cannot be taken in pieces, or None."""
    if hidden.dtype not in KERNEL_DTYPES:
        return f"dtype {hidden.dtype}"
    return tensor_refusal("cross_entropy", hidden) or tensor_refusal("cross_entropy", weight)


def check_head(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int = -100
) -> None:
    """Raises TypeError for what is no tensor, ValueError where a head, what it is given and its
    targets do not belong together."""
    check_tensors(hidden=hidden, weight=weight, target=target)
    check_tensors_or_none(bias=bias)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`weight`: expected [V, {hidden.shape[-1] if hidden.dim() else 'H'}], the last "
            f"dimension of `hidden`, got {list(weight.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`target`: expected shape {list(hidden.shape[:-1])}, that of `hidden` without its "
            f"last dimension, got {list(target.shape)}"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"`target`: expected integers, got {target.dtype}")
    check_targets(target, len(weight), ignore_index)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias`: expected [{weight.shape[0]}], got {list(bias.shape)}")


def check_tensors(**named: Any) -> None:
    """Raises TypeError for the first that is no tensor."""
    for name, given in named.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"`{name}`: expected a tensor, got {type(given).__name__}")


def check_tensors_or_none(**named: Any) -> None:
    """The same of what may be None."""
    check_tensors(**{name: given for name, given in named.items() if given is not None})


def check_targets(target: Tensor, classes: int, ignore_index: int, name: str = "target") -> None:
    """Raises TargetOutOfRangeError, a ValueError and an IndexError, for one out of range. A GPU is
    not waited for: there its loss is NaN."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if len(wrong):
        raise TargetOutOfRangeError(
            f"`{name}`: expected 0 to {classes - 1}, or `ignore_index` {ignore_index}, got "
            f"{int(wrong[0])}; is the tokenizer larger than the head?"
        )


def ops() -> Any:
    return local_package().module._ops.ops


def _logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    classes: int,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """[N, classes], of a head that may be `evened`: then a view whose rows lie further apart.

    Args:
        bias: in the dtype of the weight, or in a wider one, which the logits then have.
        low, up: [N, r] and [V, r] of an adapter, whose product is added, in their dtype.
    """
    inside = None if bias is None or bias.dtype != weight.dtype else bias
    linear = _wide_linear if x.dtype != weight.dtype else F.linear
    logits = linear(x, weight, inside)
    if low is not None and up is not None:
        logits = logits.to(low.dtype).addmm_(low, up.t()).to(weight.dtype)
    if bias is not inside and bias is not None:
        logits = logits.to(bias.dtype).add_(bias)
    if len(weight) != classes:
        logits = logits[:, :classes]
    return logits if scale == 1.0 else logits.mul_(scale)


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in the dtype of the weight, which is wider than that of x."""
    logits = x.new_empty(len(x), len(weight), dtype=weight.dtype)
    for part, rows in _widened(x, weight.dtype):
        torch.mm(rows, weight.t(), out=logits[part])
    return logits if bias is None else logits.add_(bias)


def _widened(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows of x in `dtype`: all at once where they are of it, some at a time where they are not."""
    count = len(x) if x.dtype == dtype else rows_of_bytes(x.shape[1] * dtype.itemsize)
    for start in range(0, max(len(x), 1), max(count, 1)):  # also of no row, whose product is zero
        part = slice(start, start + count)
        yield part, x[part].to(dtype)


def rows_of_bytes(each: int) -> int:
    return max(LEAST, CHUNK_BYTES // max(each, 1))


def evened(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The head with classes of zeros behind its own, to a number whose products are fast: a copy,
    where its own is none."""
    if type(weight) not in (Tensor, nn.Parameter) or not is_odd(weight, len(weight)):
        return weight, bias
    more = -len(weight) % (ALIGNMENT // weight.element_size())
    whole = F.pad(weight, (0, 0, 0, more))
    return whole, None if bias is None else F.pad(bias, (0, more))


def _low(x: Tensor, a: Tensor, scaling: float) -> Tensor:
    low = F.linear(x, a) if x.dtype == a.dtype else _wide_linear(x, a, None)
    return low.mul_(scaling)


def _as_long(b: Tensor, weight: Tensor) -> Tensor:
    """With rows of zeros behind its own, where the weight has some."""
    more = len(weight) - len(b)
    return F.pad(b, (0, 0, 0, more)) if more else b


class Own:
    """A head as its products take it: in the products' dtype, and `evened`."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        options: Options,
    ) -> None:
        dtype = options.dtype
        wide_bias = None if bias is None else bias.to(options.bias_dtype)
        self.classes, self.scale, self._scaling = len(weight), options.scale, options.scaling
        # `to`: the same tensor, but under autocast
        self.weight, self.bias = evened(weight.to(dtype), wide_bias)
        self.a = None if a is None else a.to(options.adapter_dtype)
        self.b = None if b is None else _as_long(b.to(options.adapter_dtype), self.weight)

    def low(self, x: Tensor) -> Tensor | None:
        """The adapter's small product, [N, r]."""
        return None if self.a is None else _low(x, self.a, self._scaling)

    def logits(self, x: Tensor, low: Tensor | None) -> Tensor:
        return _logits(x, self.weight, self.bias, self.scale, self.classes, low, self.b)

    def logits_at(self, x: Tensor, target: Tensor) -> Tensor:
        """[N]: what `logits` has at one class of each row, rounded where it rounds."""
        dtype = self.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        found = []
        count = rows_of_bytes(2 * x.shape[1] * wide.itemsize)
        for part, t in zip(torch.split(x, count), torch.split(target, count), strict=True):
            y = (part.to(wide) * self.weight[t].to(wide)).sum(-1)
            bias = None if self.bias is None else self.bias[t]
            if bias is not None and bias.dtype == dtype:
                y += bias
            y = y.to(dtype)
            if (low := self.low(part)) is not None and self.b is not None:
                up = self.b[t]
                added = (low.to(wide) * up.to(wide)).sum(-1)
                y = (y.to(up.dtype).to(wide) + added).to(up.dtype).to(dtype)
            if bias is not None and bias.dtype != dtype:
                y = y.to(bias.dtype) + bias
            found.append(y if self.scale == 1.0 else y * self.scale)
        return torch.cat(found)


def is_odd(like: Tensor, classes: int) -> bool:
    """Whether products with so many classes are slow."""
    half = like.dtype in (torch.float16, torch.bfloat16)
    return half and like.device.type in PADDED and not ends_aligned(like, classes)


def padded_logits(logits: Tensor, fill: float) -> Tensor:
    """What `_logits` is a view of, contiguous, with `fill` for the further classes."""
    count, classes = logits.shape
    stride = logits.stride(0)
    if stride <= classes:
        return logits
    whole = logits.as_strided((count, stride), (stride, 1))
    whole[:, classes:] = fill
    return whole


def _of_these(target: Tensor, classes: int, among: int, ignore_index: int) -> Tensor:
    """Targets for `among` classes of which `classes` exist: others are none there either."""
    if among == classes:
        return target
    none = among + (ignore_index == among)
    return torch.where((target < classes) | (target == ignore_index), target, none)


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, target [N] -> loss [N], fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        options: Options,
        hooks: LogitsHooks | None,
        *sources: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ignore_index, smoothing, _, softcap = options[:4]
        own = Own(weight, bias, a, b, options)
        count = rows_of_bytes(options.bytes_of(len(weight)))
        losses, lses = [], []
        for x, t in zip(torch.split(hidden, count), torch.split(target, count), strict=True):
            z = own.logits(x, own.low(x))
            if not (smoothing or softcap):  # which classes of no probability would change
                z = padded_logits(z, -torch.inf)
                t = _of_these(t, len(weight), z.shape[1], ignore_index)
            loss, lse = ops().cross_entropy.default(z, t, ignore_index, smoothing, softcap)
            del z
            losses.append(loss)
            lses.append(lse)
        ctx.options, ctx.hooks = options, hooks
        ctx.of_sources = likenesses(sources)
        ctx.save_for_backward(hidden, weight, bias, a, b, target, torch.cat(lses))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return none(ctx)
        *head, target, lse = ctx.saved_tensors
        if (found := by_hooks(ctx, grad)) is not None:
            return found
        wanted, options = ctx.needs_input_grad[:5], ctx.options
        if only_by_operators(grad):
            of_logits = _cross_entropy_of(target, options, grad)
            return *by_operators(head, wanted, options, grad, of_logits), *others(ctx)
        grad = _finite_or_nan(grad)
        with torch.autocast(grad.device.type, enabled=False):  # it may be on around a backward
            hidden, weight, bias, a, b = head
            grads = Gradients(hidden, weight, bias, a, b, wanted, options.dtype, options)
            for part in grads.parts(options.bytes_of(1)):
                grads.add(part, grads.of_logits(part, target, lse, grad, options))
        return *grads.results(), *others(ctx)


class _SummedCrossEntropy(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, target [N] -> the sum of losses, fp32 []."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        target: Tensor,
        options: Options,
        hooks: LogitsHooks | None,
        *sources: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ignore_index, smoothing, scale, softcap, dtype = options[:5]
        own = Own(weight, bias, a, b, options)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = hidden.new_empty(hidden.shape, dtype=torch.float32) if wants_hidden else None
        made = weight.new_empty if len(hidden) else weight.new_zeros  # no row, no product
        dw = made(own.weight.shape, dtype=torch.float32) if wants_weight else None
        db = weight.new_zeros(len(weight), dtype=torch.float32) if wants_bias else None
        adapted = _AdapterGradients(own, ctx.needs_input_grad[3:5])
        copied = bool(smoothing or softcap) and len(own.weight) != len(weight)
        count = max(LEAST, ROWS_BYTES // ((1 + copied) * options.bytes_of(len(weight))))
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        scratch = torch.empty_like(losses)
        total = hidden.new_empty((), dtype=torch.float32)
        for start in range(0, len(hidden), count):
            part = slice(start, start + count)
            x, t = hidden[part], target[part]
            low = own.low(x)
            z = own.logits(x, low)
            y = z.contiguous() if smoothing or softcap else padded_logits(z, -torch.inf)
            t = _of_these(t, len(weight), y.shape[1], ignore_index)
            # divided by 1: gradients are scaled in fp32, behind the products, so that those of half
            # types neither vanish nor are rounded twice
            ops().cross_entropy_with_gradient_out.default(
                total, losses[part], scratch[part], y, y, t, None, 1.0, ignore_index, smoothing,
                softcap,
            )  # fmt: skip
            z = padded_logits(z if y is z else z.copy_(y), 0.0) if smoothing or softcap else y
            del y
            if scale != 1.0:
                z.mul_(scale)
            if db is not None:
                db += z.sum(0, dtype=torch.float32)[: len(weight)]
            z = z.to(dtype)  # which it is not of a bias that is wider than the products
            if dx is not None:
                _product_into(dx[part], z, own.weight)
            if low is not None:
                adapted.add(x, low, z, None if dx is None else dx[part])
            if dw is not None:
                for rows, own_x in _widened(x, dtype):
                    is_first = not start and not rows.start
                    (_product_into if is_first else _add_product)(dw, z[rows].t(), own_x)
            del z
        dw = None if dw is None else dw[: len(weight)]
        ctx.options, ctx.hooks = options, hooks
        ctx.of_sources = likenesses(sources)
        # All that PyTorch's own loss keeps, so that writing to one of them is the same error; and
        # the hidden states are alive anyway.
        ctx.save_for_backward(
            hidden, weight, bias, a, b, target, dx, dw, db, *adapted.results(len(weight))
        )
        return losses.sum(dtype=torch.float64).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return none(ctx)
        *head, target, dx, dw, db, da, dup = ctx.saved_tensors
        if (changed := by_hooks(ctx, grad)) is not None:
            return changed
        if only_by_operators(grad):
            wanted = ctx.needs_input_grad[:5]
            of_logits = _cross_entropy_of(target, ctx.options, grad)
            return *by_operators(head, wanted, ctx.options, grad, of_logits), *others(ctx)
        # A row that does not count has the gradient 0 whatever the loss's is, which is infinite
        # where a mean is one over nothing.
        counted = target != ctx.options.ignore_index
        factor = _finite_or_nan(grad)
        of_rows = torch.where(counted, factor, 0.0)[:, None]
        of_all = torch.where(counted.any(), factor, 0.0)
        found = [
            None if d is None else _scaled(d, of_rows if d is dx else of_all, like.dtype)
            for d, like in zip((dx, dw, db, da, dup), head, strict=True)
        ]
        return *found, *others(ctx)


def others(ctx: Any) -> tuple[Tensor | None, ...]:
    """The gradients of what the functions above are given besides: of the sources there is none,
    for what comes to them comes by what was made of them."""
    return None, None, None, *(_nothing(ctx, like) for like in ctx.of_sources)


#: Shape and dtype of an input.
_Likeness = tuple[torch.Size, torch.dtype]


def likenesses(tensors: Sequence[Tensor | None]) -> list[_Likeness | None]:
    return [None if t is None else (t.shape, t.dtype) for t in tensors]


def _nothing(ctx: Any, like: _Likeness | None) -> Tensor | None:
    """No gradient of one of the two inputs that tell of the same; like: that input.

    Compiled autograd, which calls a backward with a stand-in for its node, has made a place for the
    gradient of each input by then, and cannot do without: it is given zeros, which it adds to what
    comes by the other input.
    """
    if isinstance(ctx, BackwardCFunction) or like is None:
        return None
    nothing: Tensor = ctx.saved_tensors[0].new_zeros(like[0], dtype=like[1])
    return nothing


def none(ctx: Any) -> tuple[None, ...]:
    """Where the loss has no gradient, which hooks on the logits are told."""
    found = no_gradients(ctx)
    if ctx.hooks:
        ctx.hooks.run_without_gradient()
    return found


def by_hooks(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...] | None:
    """All gradients where a hook on the logits has changed theirs, None where none has."""
    if not ctx.hooks:
        return None
    needed = ctx.needs_input_grad
    has_source = [like is not None for like in ctx.of_sources]
    wanted = [needed[i - 5] if has else needed[i] for i, has in enumerate(has_source)]
    found = ctx.hooks.run(grad, wanted)
    if found is None:
        return None
    tensors, both = likenesses(ctx.saved_tensors[:5]), list(zip(found, has_source, strict=True))
    direct = [
        _nothing(ctx, like) if has else d for like, (d, has) in zip(tensors, both, strict=True)
    ]
    return *direct, None, None, None, *(d if has else None for d, has in both)


def _finite_or_nan(grad: Tensor) -> Tensor:
    """As far as an infinite gradient of a loss comes in PyTorch: its softmax makes NaN of it."""
    return torch.where(grad.isfinite(), grad, torch.nan)


def _cross_entropy_of(target: Tensor, options: Options, grad: Tensor) -> Callable[[Tensor], Tensor]:
    """grad: of the losses of the rows, or of their sum."""
    # what `torch.nn.functional.cross_entropy` calls: its name may be somebody else's by now
    function = torch.ops.aten.cross_entropy_loss.default
    rest = None, _SUM if grad.dim() == 0 else _NONE, options.ignore_index, options.smoothing
    return lambda wide: function(wide, target, *rest)


def by_operators(
    head: Sequence[Tensor | None],
    wanted: Sequence[bool],
    options: Options,
    grad: Tensor,
    of_logits: Callable[[Tensor], Tensor],
) -> list[Tensor | None]:
    """The gradients by PyTorch's own operators, of all logits at once.

    Args:
        head: hidden, weight, bias, and A and B of the adapter.
        grad: of what `of_logits` makes of the logits in fp32.
    """
    scale, softcap = options.scale, options.softcap
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        # Other tensors of the same values: with tied weights the hidden states are made of the
        # head's, and what comes to the weight by them is not this function's.
        own = [None if t is None else t.view_as(t) for t in head]
        if not graph:
            own = [None if t is None else t.detach() for t in own]
            for t, want in zip(own, wanted, strict=True):
                if t is not None:
                    t.requires_grad_(want)
        logits = _whole_logits(own, options)
        wide = (logits if scale == 1.0 else logits * scale).float()
        if softcap:
            wide = softcap * torch.tanh(wide / softcap)
        loss = of_logits(wide)
    inputs = [t for t, want in zip(own, wanted, strict=True) if t is not None and want]
    found = iter(torch.autograd.grad(loss, inputs, grad, create_graph=graph))
    return [next(found) if want else None for want in wanted]


def _whole_logits(head: Sequence[Tensor | None], options: Options) -> Tensor:
    dtype = options.dtype
    x, weight, bias = (None if t is None else t.to(dtype) for t in head[:3])
    a, b = (None if t is None else t.to(options.adapter_dtype) for t in head[3:])
    assert x is not None and weight is not None
    is_wide = options.bias_dtype != dtype
    logits = F.linear(x, weight, None if is_wide else bias)
    if a is not None and b is not None:
        low = F.linear(x.to(options.adapter_dtype), a)
        logits = (logits + F.linear(low, b) * options.scaling).to(dtype)
    if is_wide and head[2] is not None:
        logits = logits.to(options.bias_dtype) + head[2].to(options.bias_dtype)
    return logits


class _AdapterGradients:
    """Those of A and B of an adapter, in fp32, of some rows after others."""

    def __init__(self, own: Own, wanted: Sequence[bool]) -> None:
        self._own = own
        self._da, self._db = (
            None if t is None or not want else torch.zeros_like(t, dtype=torch.float32)
            for t, want in zip((own.a, own.b), wanted, strict=True)
        )

    def add(self, x: Tensor, low: Tensor, d: Tensor, dx: Tensor | None) -> None:
        """d [n, V]: the gradient of the head's result; x [n, H]; `low` of x; dx: added to."""
        own = self._own
        assert own.a is not None and own.b is not None
        x, d = x.to(own.a.dtype), d.to(own.a.dtype)
        if self._db is not None:
            _add_product(self._db, d.t(), low)
        if dx is None and self._da is None:
            return
        d_low = torch.mm(d, own.b).mul_(own._scaling)
        if dx is not None:
            _add_product(dx, d_low, own.a)
        if self._da is not None:
            _add_product(self._da, d_low.t(), x)

    def results(self, classes: int) -> tuple[Tensor | None, Tensor | None]:
        return self._da, None if self._db is None else self._db[:classes]


class Gradients:
    """The gradients of a head, made from those of the logits of some classes at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        wanted: Sequence[bool],
        dtype: torch.dtype,
        options: Options | None = None,
    ) -> None:
        wants_hidden, wants_weight, wants_bias, wants_a, wants_b = wanted
        self.x, self.weight, self.bias, self.dtype = hidden, weight, bias, dtype
        self.bias_dtype = dtype if options is None else options.bias_dtype
        self.a, self.b, self.low = a, b, None
        if a is not None and b is not None and options is not None:
            self.scaling = options.scaling
            self.a, self.b = a.to(options.adapter_dtype), b.to(options.adapter_dtype)
            self.low = _low(hidden, self.a, self.scaling)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.dx = torch.zeros_like(hidden, dtype=wide) if wants_hidden else None
        self.dw = torch.empty_like(weight) if wants_weight else None
        self.db = torch.empty_like(bias) if wants_bias and bias is not None else None
        self.da = torch.zeros_like(a) if wants_a and a is not None else None
        self.dup = torch.empty_like(b) if wants_b and b is not None else None
        self.d_low = None
        if self.low is not None and (wants_hidden or wants_a):
            self.d_low = torch.zeros_like(self.low, dtype=wide)  # of scaling * x A^T

    def parts(self, size: int) -> Iterator[slice]:
        """Slices of the classes; `size`: bytes of an element of what is made of them."""
        count = max(LEAST, CHUNK_BYTES // max(len(self.x) * size, 1))
        count -= count % _CLASSES if count > _CLASSES else 0
        for start in range(0, len(self.weight), count):
            yield slice(start, min(start + count, len(self.weight)))

    def logits(self, part: slice, scale: float) -> Tensor:
        """The head's result for some classes, [N, part], times `scale`."""
        bias = None if self.bias is None else self.bias[part].to(self.bias_dtype)
        head = evened(self.weight[part].to(self.dtype), bias)
        up = None if self.b is None else _as_long(self.b[part], head[0])
        return _logits(self.x, *head, scale, part.stop - part.start, self.low, up)

    def of_logits(
        self,
        part: slice,
        target: Tensor,
        lse: Tensor,
        grad: Tensor,
        options: Options,
    ) -> Tensor:
        """d(loss) / d(linear's result) of the classes `part`, [N, part], in the logits' dtype.

        The kernel knows a row's class by its number among those that it sees. A row whose class is
        elsewhere is told the first one, where the gradient is then written anew; label smoothing
        spreads over all classes, not over those seen, so it is taken out there and put in here.
        """
        ignore_index, smoothing, scale, softcap = options[:4]
        z = self.logits(part, scale)
        inside = (target >= part.start) & (target < part.stop)
        counted = target != ignore_index
        first = z[:, 0].float()
        here = torch.where(inside, target - part.start, 0).masked_fill_(~counted, ignore_index)
        if smoothing:
            z = self._smoothed(z, here, inside & counted, lse, grad, options)
        else:
            classes = z.shape[1]
            z = ops().cross_entropy_backward.default(
                grad.contiguous(),
                z if softcap else padded_logits(z, -torch.inf),
                here,
                lse,
                ignore_index,
                0.0,
                softcap,
            )[:, :classes]
            outside = counted & ~inside
            capped = softcap * torch.tanh(first / softcap) if softcap else first
            anew = torch.exp(capped - lse) * grad
            if softcap:
                anew = anew * (1 - (capped / softcap).square())
            z[:, 0] = torch.where(outside, anew.to(z.dtype), z[:, 0])
        return z if scale == 1.0 else z.mul_(scale)

    def _smoothed(
        self,
        z: Tensor,
        here: Tensor,
        inside: Tensor,
        lse: Tensor,
        grad: Tensor,
        options: Options,
    ) -> Tensor:
        """By PyTorch's operators: softmax - (1 - s) at the class - s / V everywhere."""
        ignore_index, smoothing, _, softcap = options[:4]
        wide = z.float()
        if softcap:
            wide = wide.div_(softcap).tanh_().mul_(softcap)
        bend = 1 - (wide / softcap).square() if softcap else None
        d = (wide - lse[:, None]).exp_().sub_(smoothing / len(self.weight))
        at = here.clamp(min=0)[:, None]
        d.scatter_add_(1, at, (smoothing - 1) * inside[:, None].to(d.dtype))
        d.mul_(grad[:, None])
        if bend is not None:
            d.mul_(bend)
        # of a row that is ignored nothing counts, also no infinity
        return d.masked_fill_((here == ignore_index)[:, None], 0.0).to(z.dtype)

    def add(self, part: slice, d: Tensor) -> None:
        """`d`: as `of_logits` gives it."""
        count = d.shape[1]
        if self.db is not None:
            wide = torch.promote_types(d.dtype, torch.float32)
            self.db[part] = d.sum(0, dtype=wide)
        d = d.to(self.dtype)
        if self.low is not None and self.b is not None:
            wide_d = d.to(self.low.dtype)
            if self.dup is not None:
                self.dup[part] = torch.mm(wide_d.t(), self.low)
            if self.d_low is not None:
                _add_product(self.d_low, wide_d, self.b[part])
            del wide_d
        weight, _ = evened(self.weight[part].to(d.dtype), None)
        if len(weight) != count:
            d = F.pad(d, (0, len(weight) - count))
        if self.dx is not None:
            _add_product(self.dx, d, weight)
        if self.dw is not None:
            if self.x.dtype != d.dtype:  # an fp32 head of half states
                for rows, x in _widened(self.x, d.dtype):
                    (_add_product if rows.start else _product_into)(self.dw[part], d[rows].t(), x)
            elif self.dw.dtype == d.dtype and len(weight) == count:
                torch.mm(d.t(), self.x, out=self.dw[part])
            else:  # fp32 parameters under autocast; evened
                self.dw[part] = torch.mm(d.t(), self.x)[:count]

    def results(self) -> tuple[Tensor | None, ...]:
        """Of hidden, weight, bias, A and B; None where none is wanted."""
        if self.d_low is not None and self.a is not None:
            d_low = (self.d_low * self.scaling).to(self.a.dtype)
            if self.dx is not None:
                _add_product(self.dx, d_low, self.a)
            if self.da is not None:
                total = torch.zeros_like(self.da, dtype=torch.float32)
                for rows, x in _widened(self.x, self.a.dtype):
                    _add_product(total, d_low[rows].t(), x)
                self.da.copy_(total)
        dx = None if self.dx is None else self.dx.to(self.x.dtype)
        return dx, self.dw, self.db, self.da, self.dup


def _scaled(d: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`d * factor`, rounded once; factor: [] or, of each row, [N, 1]. Some rows at a time on a GPU:
    between the product and the cast, each a kernel of its own, they lie in its cache; the kernel
    that does both is half as fast."""
    if not d.is_cuda or dtype == d.dtype or d.dim() != 2:
        return torch.mul(d, factor, out=torch.empty_like(d, dtype=dtype))
    result = torch.empty_like(d, dtype=dtype)
    count = max(1, (16 << 20) // (4 * max(1, d.shape[1])))
    for start in range(0, len(d), count):
        part = slice(start, start + count)
        result[part] = d[part] * (factor[part] if factor.dim() else factor)
    return result


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out = a @ b`, in fp32 where PyTorch's products of half types can."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in fp32 where PyTorch's products of half types can."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += torch.mm(a, b)
