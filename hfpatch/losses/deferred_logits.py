"""Logits that are made when somebody reads them; a cross entropy of them never does.

In training the head of a language model returns `DeferredLogits`: a tensor subclass that holds what
the head was given and its weight. What a model does to its logits before the loss is written down
(casts, shapes, some of the rows or classes, a bias, a scale, a softcap).
`torch.nn.functional.cross_entropy` of them runs `head_loss.linear_cross_entropy`; so every loss
function that ends there is served, transformers' own and the user's. Of `log_softmax` the value at
a class of each row, and the sum over the classes, are made without it (`head_log_probs`). Every
other operation makes the logits by the head's own product, with autograd, and goes on with them:
numbers and gradients are then the original's. Code that PyTorch's Python interface does not see, as
an autograd function of the user's (Liger's loss), finds the logits in autograd's graph, as the
result of the same product.
"""

from __future__ import annotations

import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfpatch.errors import HfpatchError
from hfpatch.losses.head_log_probs import LogProbsOfHead, at_and_sum
from hfpatch.losses.head_loss import Options, check_head, loss_of_head
from hfpatch.losses.logits_hooks import Formula, Hook, LogitsHooks, Place
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.saved import kept_as_they_are, saving_is_watched
from hfpatch.proof.subject import autocasts, no_gradients


class Adapter(NamedTuple):
    """Of LoRA: ``scaling (hidden a^T) b^T`` is added to the product. a [r, H], b [V, r].

    dtype: of the two small products, that of the hidden states or fp32.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dtype: torch.dtype


@dataclass(frozen=True)
class _Head:
    """What the logits are made of: hidden [..., H], weight [V, H], bias [V] or None, an adapter."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    adapter: Adapter | None
    versions: tuple[int, ...]
    told: Callable[[str], None]  # which operation has made them whole

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter: Adapter | None,
        told: Callable[[str], None],
    ) -> _Head:
        ab = () if adapter is None else (adapter.a, adapter.b)
        return _Head(hidden, weight, bias, adapter, _versions(hidden, weight, bias, *ab), told)

    @property
    def tensors(self) -> list[Tensor | None]:
        """Hidden states, weight, bias, and A and B of the adapter."""
        ab = (None, None) if self.adapter is None else (self.adapter.a, self.adapter.b)
        return [self.hidden, self.weight, self.bias, *ab]

    def like(self, tensors: Sequence[Any]) -> _Head:
        """The same of other tensors."""
        x, weight, bias, a, b = tensors
        adapter = None if self.adapter is None else self.adapter._replace(a=a, b=b)
        return _Head.of(x, weight, bias, adapter, self.told)

    def check_unchanged(self) -> None:
        """Raises HfpatchError where a tensor was written to since the forward."""
        # Sharded weights are given back after the backward.
        gone = not self.weight.untyped_storage().size() and self.weight.numel()
        if gone or _versions(*self.tensors) != self.versions:
            raise HfpatchError(
                "`logits`: expected the head's weight and input as they were in the forward, got "
                "others (an optimizer's step?); with `hfpatch.apply(mode='training')` logits are "
                "made when they are read: read them before the weights change, or leave the head "
                "alone with `exclude='lm_head'`, by the path that the report names"
            )

    def product(self) -> Tensor:
        self.check_unchanged()
        x, weight, bias = self.hidden, self.weight, self.bias
        if weight.dtype != x.dtype:  # autocast was on
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(x, weight, bias)
            if self.adapter is None:
                return y
            a, b, scaling, dtype = self.adapter  # as PEFT's module computes it
            low = F.linear(x.to(dtype), a.to(dtype))
            return (y + F.linear(low, b.to(dtype)) * scaling).to(y.dtype)


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


#: Steps whose result lies where the logits lie: who writes to either writes to both. A "shape" or
#: "rows" step with other elements side by side is one; a "copy" has the same elements elsewhere.
_VIEWS = frozenset({"shape", "rows", "swap", "classes"})
_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": lambda y, dtype: y.to(dtype),
    "copy": lambda y, shape: y.reshape(shape).clone(memory_format=torch.contiguous_format),
    "mul": lambda y, number: y * number,
    "div": lambda y, number: y / number,
    "tanh": lambda y, _: torch.tanh(y),
    "shape": lambda y, shape: y.reshape(shape),
    "rows": lambda y, index: y[index],
    "picked": lambda y, index: y[index],  # rows too, by their numbers
    "swap": lambda y, dims: y.transpose(*dims),
    "classes": lambda y, part: y[..., part],
    "add": lambda y, bias: y + bias,
    "log_softmax": lambda y, _: torch.log_softmax(y, -1),
    "neg": lambda y, _: -y,
}


class DeferredLogits(Tensor):
    """See the module. Of the head's result `_before` is None; of what a step made of other logits
    it is those, and `_step` the step."""

    _head: _Head
    _before: DeferredLogits | None
    _step: tuple[str, Any] | None
    _made: Tensor | None
    _as_made: int  # its version
    _steps: list[tuple[str, Any]]  # all of them, from the head's result on
    _bare: Tensor | None  # without autograd, for code below it
    _after: list[weakref.ref[DeferredLogits]]  # what was made of it, in memory of its own
    _strides: tuple[int, ...]  # of the logits, were they made
    _rows: tuple[bool, Tensor] | None  # of log-probabilities: whether with gradients, `at_and_sum`
    _losses: list[LogitsHooks]  # of the losses that were made of them without their values

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter: Adapter | None = None,
        told: Callable[[str], None] = lambda _: None,
    ) -> DeferredLogits:
        """`F.linear(hidden, weight, bias)`, later. hidden [..., H], weight [V, H], bias [V]; `told`
        of each operation that makes them whole."""
        shape = (*hidden.shape[:-1], weight.shape[0])
        strides = torch.empty(shape, device="meta").stride()
        head = _Head.of(hidden, weight, bias, adapter, told)
        return _deferred(head, shape, strides, hidden.dtype)

    def materialized(self) -> Tensor:
        """The logits as the original has them, part of autograd's graph; made at the first call.

        With what was made of them in other memory before: who reads logits may write to them.
        """
        if self._made is None:
            self._are_used()
            # They may be read for a metric first, and by the loss then.
            # By then inside of a checkpoint, which would save them there at its first run alone.
            keeps = kept_as_they_are() if saving_is_watched() else nullcontext()
            with torch.inference_mode(False), torch.set_grad_enabled(_requires_grad(self)), keeps:
                if self._before is None or self._step is None:
                    self._made = self._head.product()
                else:
                    name, value = self._step
                    self._made = _STEPS[name](self._before.materialized(), value)
            self._as_made = self._made._version
            for reference in self._after:
                if (later := reference()) is not None:
                    later.materialized()
        return self._made

    def _is_of_made(self) -> bool:
        """Whether they are, or what they were made of."""
        logits: DeferredLogits | None = self
        while logits is not None and logits._made is None:
            logits = logits._before
        return logits is not None

    def steps(self) -> list[tuple[str, Any]] | None:
        """What was done to the head's result; None if somebody has read it meanwhile."""
        logits: DeferredLogits | None = self
        while logits is not None:
            if logits._made is not None and not logits._is_taken_again():
                return None
            logits = logits._before
        return self._steps

    def _is_taken_again(self) -> bool:
        """Whether this may be a checkpoint that runs its loss once more: what was read behind the
        loss, and not written to, must not change what that saves."""
        made = self._made
        return bool(self._losses) and saving_is_watched() and made._version == self._as_made  # type: ignore[union-attr]

    def consumed(self, hooks: LogitsHooks) -> None:
        """A loss was made of them that their own values took no part in."""
        logits: DeferredLogits | None = self
        while logits is not None:
            if logits._losses or logits._bare is not None:
                logits._are_used()
                hooks.is_alone = False
            logits._losses.append(hooks)
            logits = logits._before

    def _are_used(self) -> None:
        for hooks in self._losses:
            hooks.is_alone = False

    def _hooked(self, hook: Hook) -> Any:
        """`register_hook` behind the losses."""
        head = self._head
        with torch._C.DisableTorchFunctionSubclass():
            place = Place(len(self._steps), self.shape, self.dtype, self.device)
        first, *others = self._losses
        return first.add(hook, place, head.tensors, head.check_unchanged, others)

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is types.FunctionType and not func.__code__.co_filename.startswith(_HOME):
            func = _caller(sys._getframe(1)) or func
        asks = func in _ASKING and any(t._losses for t in _deferred_in((args, kwargs)))
        if asks and func is Tensor.register_hook and _requires_grad(args[0]):
            hook = args[1] if len(args) > 1 else kwargs.get("hook")
            # one for several tensors counts those of their nodes that a backward comes to
            if getattr(hook, "__module__", "") != "torch.autograd.graph":
                return args[0]._hooked(*args[1:], **kwargs)
        if asks:
            raise HfpatchError(
                f"`logits`: `{func.__name__}` asks for their gradient, which a loss that was made "
                "without them does not pass; ask before the loss is made, or leave the head alone "
                "with `exclude='lm_head'`, by the path that the report names"
            )
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _BASE and (args[0]._step is None or args[0]._step[0] not in _VIEWS):
            return None  # FSDP2 asks each result of a model whether it is a view
        step = _RECORDED.get(func)
        of = args[::-1] if step is _plus and len(args) == 2 else args
        of = args if args and type(args[0]) is DeferredLogits else of
        if step is not None and of and type(of[0]) is DeferredLogits:
            found = step(*of, **kwargs)
            if found is not None:
                return found
        for logits in _deferred_in((args, kwargs)):
            if not logits._is_of_made():
                logits._head.told(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_plain(args), **_plain(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Below autograd, whose graph has these logits as the result of `_Product`.
        if func._schema.is_mutable and any(
            isinstance(a, cls) for a in _written(func._schema, args, kwargs or {})
        ):
            raise HfpatchError(
                f"`logits`: expected an operation that reads them, got `{func}` from C++ code, "
                "which writes to logits that are not made yet; leave the head alone with "
                "`exclude='lm_head'`, by the path that the report names"
            )
        return func(*_plain(args, _value), **_plain(kwargs or {}, _value))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.materialized())


class _Product(torch.autograd.Function):
    """The logits' place in autograd's graph, for functions that are applied to them as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        head: _Head,
        steps: list[tuple[str, Any]],
        *tensors: Tensor | None,
    ) -> DeferredLogits:
        """tensors: the head's five, and what is added to its result, step by step."""
        ctx.set_materialize_grads(False)
        # without the tensors, which are saved
        ctx.adapter, ctx.told = head.adapter and head.adapter[2:], head.told
        ctx.steps = [(name, None if name == "add" else value) for name, value in steps]
        ctx.save_for_backward(*tensors)
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype, device=head.hidden.device
        )
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return no_gradients(ctx)
        needed = ctx.needs_input_grad[4:]
        graph = torch.is_grad_enabled()  # gradients of these gradients may be asked for
        inputs: list[Any] = [
            None if t is None else t.view_as(t) if graph else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            x, weight, bias, a, b, *added = inputs
            adapter = ctx.adapter and Adapter(a, b, *ctx.adapter)
            y = _Head.of(x, weight, bias, adapter, ctx.told).product()
            biases = iter(added)
            for name, value in ctx.steps:
                y = _STEPS[name](y, next(biases) if name == "add" else value)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if t is not None and need]
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=graph))
        return None, None, None, None, *(next(found) if need else None for need in needed)


def _deferred(
    head: _Head,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    before: DeferredLogits | None = None,
    step: tuple[str, Any] | None = None,
) -> DeferredLogits:
    steps = [] if before is None else [*before._steps, *([step] if step else [])]
    # What was made under `no_grad` has no gradient, nor has what is made of it later.
    records = torch.is_grad_enabled() and (before is None or _requires_grad(before))
    with torch.set_grad_enabled(records):
        made: DeferredLogits = _Product.apply(  # type: ignore[no-untyped-call]
            shape, dtype, head, steps, *head.tensors, *_added(steps)
        )
    made._head, made._before, made._step, made._made = head, before, step, None
    made._steps, made._bare, made._strides, made._rows = steps, None, strides, None
    made._after, made._losses = [], []
    if before is not None and step is not None and step[0] not in _VIEWS:
        # a view of logits is written to with them, but what is made of that is not
        logits: DeferredLogits | None = before
        while logits is not None:
            logits._after.append(weakref.ref(made))
            is_view = logits._step is not None and logits._step[0] in _VIEWS
            logits = logits._before if is_view else None
    return made


def _added(steps: list[tuple[str, Any]]) -> list[Tensor]:
    return [value for name, value in steps if name == "add"]


def _deferred_in(value: Any) -> Iterator[DeferredLogits]:
    if type(value) is DeferredLogits:
        yield value
    elif isinstance(value, dict):
        yield from _deferred_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _deferred_in(v)


def _requires_grad(logits: DeferredLogits) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.requires_grad


def _value(logits: DeferredLogits) -> Tensor:
    """The logits where autograd is left out."""
    with torch._C.DisableTorchFunctionSubclass():
        if logits._made is not None:
            return logits._made.detach()
        if logits._bare is None:
            logits._are_used()
            logits._head.told("an autograd function")
            logits._bare = logits._head.product()
            for name, value in logits._steps:
                logits._bare = _STEPS[name](logits._bare, value)
        return logits._bare


#: PyTorch's own functions of tensors that are written in Python.
_FUNCTIONS = {
    f.__code__: f
    for home, where in (
        (F, F.__name__),
        (torch.functional, "torch.functional"),
        (Tensor, "torch._tensor"),
    )
    for f in vars(home).values()
    if isinstance(f, types.FunctionType) and f.__module__ == where
}
_HOME = str(Path(torch.__file__).parent)


def _caller(frame: types.FrameType | None) -> Any:
    """PyTorch's function whose code asks for an override. It finds itself by its name, under which
    somebody may have put another function, which has been called by then."""
    for _ in range(3):
        if frame is None:
            return None
        if (found := _FUNCTIONS.get(frame.f_code)) is not None:
            return found
        frame = frame.f_back
    return None


def _plain(
    value: Any, make: Callable[[DeferredLogits], Tensor] = DeferredLogits.materialized
) -> Any:
    """Arguments with the logits made."""
    if type(value) is DeferredLogits:
        return make(value)
    if isinstance(value, dict):
        return {k: _plain(v, make) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_plain(v, make) for v in value)
    return value


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return torch.utils._pytree.tree_leaves([given.get(name) for name in names])


# What a model does to its logits before the loss. Each returns None for what it does not know.


def _shape(logits: Tensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(logits.shape)


def _dtype(logits: Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.dtype


def _meta(logits: DeferredLogits) -> Tensor:
    """A tensor that lies as the logits would, without memory."""
    return torch.empty_strided(_shape(logits), logits._strides, device="meta")


def _then(
    logits: DeferredLogits,
    step: str,
    value: Any,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """`like`: how the result lies; as the logits where None."""
    if like is None:  # as PyTorch makes it of elements that lie in any order
        like = torch.empty_like(_meta(logits))
    return _deferred(
        logits._head,
        tuple(like.shape),
        like.stride(),
        dtype or _dtype(logits),
        logits,
        (step, value),
    )


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    dtype = kwargs.pop("dtype", None) or (args[0] if len(args) == 1 else None)
    if kwargs or len(args) > 1 or not isinstance(dtype, torch.dtype):
        return None
    return _cast(logits, dtype)


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> DeferredLogits | None:
    if dtype == _dtype(logits):
        return logits
    # to another half type is one more rounding, which the kernel does not make
    return _then(logits, "to", dtype, dtype=dtype) if dtype == torch.float32 else None


def _view(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> DeferredLogits | None:
    return _shaped(logits, shape, kwargs, copies=False)


def _reshape(logits: DeferredLogits, *shape: Any, **kwargs: Any) -> DeferredLogits | None:
    return _shaped(logits, shape, kwargs, copies=True)


def _shaped(
    logits: DeferredLogits, shape: tuple[Any, ...], kwargs: Any, *, copies: bool
) -> DeferredLogits | None:
    if kwargs:
        return None
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not sizes or not all(isinstance(s, int) for s in sizes):
        return None
    old = _shape(logits)
    if list(sizes).count(-1) == 1:
        known = -math.prod(sizes)
        if not known or math.prod(old) % known:
            return None
        sizes = tuple(math.prod(old) // known if s == -1 else s for s in sizes)
    if math.prod(sizes) != math.prod(old) or sizes[-1] != old[-1]:
        return None
    if sizes == old:
        return logits
    try:
        return _then(logits, "shape", sizes, _meta(logits).view(sizes))
    except RuntimeError:  # its elements lie too far apart
        return _then(logits, "copy", sizes, torch.empty(sizes, device="meta")) if copies else None


def _flatten(
    logits: DeferredLogits, start_dim: Any = 0, end_dim: Any = -1
) -> DeferredLogits | None:
    old = _shape(logits)
    if not all(isinstance(d, int) and -len(old) <= d < len(old) for d in (start_dim, end_dim)):
        return None
    first, last = start_dim % len(old), end_dim % len(old)
    if first > last:
        return None
    sizes = (*old[:first], math.prod(old[first : last + 1]), *old[last + 1 :])
    return _shaped(logits, sizes, {}, copies=True)


def _contiguous(logits: DeferredLogits) -> DeferredLogits | None:
    if _meta(logits).is_contiguous():
        return logits
    shape = _shape(logits)
    return _then(logits, "copy", shape, torch.empty(shape, device="meta"))


def _item(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    """Some of the rows, as `logits[..., :-1, :]`, `logits[:, 0]`, `logits[mask]`, and of the
    classes those that follow each other."""
    parts = _parts(index if isinstance(index, tuple) else (index,), _shape(logits))
    if parts is None or type(parts[-1]) is not slice:
        return None
    rows, classes = (*parts[:-1], slice(None)), parts[-1]
    try:
        if any(isinstance(p, Tensor) for p in rows):
            return _picked(logits, rows) if classes == slice(None) else None
        start, stop, by = classes.indices(_shape(logits)[-1])
        if by != 1 or stop <= start:
            return None
        if rows != (slice(None),) * len(rows) or classes == slice(None):
            logits = _then(logits, "rows", rows, _meta(logits)[rows])
        if stop - start == _shape(logits)[-1]:
            return logits
        part = slice(start, stop)
        return _then(logits, "classes", part, _meta(logits)[..., part])
    except (ValueError, TypeError, IndexError):  # PyTorch's own error is the original's
        return None


def _parts(given: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """One for each dimension, masks by the numbers that they choose; None for what is not known."""
    parts: list[Any] = []
    sizes: list[int | None] = []  # of what masks are for
    for p in given:
        if type(p) is Tensor and p.dtype == torch.bool and p.dim():
            parts += p.nonzero(as_tuple=True)
            sizes += p.shape
            continue
        if type(p) is Tensor and p.dtype == torch.int64 and p.dim():
            p = p.clone()  # it may be written to
        elif p is not Ellipsis and type(p) not in (slice, int):
            return None
        parts.append(p)
        sizes.append(None)
    at = [i for i, p in enumerate(parts) if p is Ellipsis]
    missing = len(shape) - len(parts) + len(at)
    if len(at) > 1 or missing < 0:
        return None
    first = at[0] if at else len(parts)
    parts[first : first + 1] = [slice(None)] * missing
    sizes[first : first + 1] = [None] * missing
    if any(of not in (None, size) for of, size in zip(sizes, shape, strict=True)):
        return None
    return tuple(parts)


def _picked(logits: DeferredLogits, rows: tuple[Any, ...]) -> DeferredLogits:
    """The rows of these numbers: a copy."""
    shape = _shape(logits)
    # an index that does not fit, or is out of range, is an error of now
    logits._head.hidden.detach().new_empty(()).expand(shape[:-1])[rows[:-1]]
    on_meta = [torch.empty_like(p, device="meta") if isinstance(p, Tensor) else p for p in rows]
    return _then(logits, "picked", rows, _meta(logits)[tuple(on_meta)])


def _transpose(logits: DeferredLogits, dim0: Any, dim1: Any) -> DeferredLogits | None:
    """Of two dimensions that are not the classes'."""
    count = len(_shape(logits))
    if not all(type(d) is int and -count <= d < count for d in (dim0, dim1)):
        return None
    dims = dim0 % count, dim1 % count
    if count - 1 in dims:
        return None
    return _then(logits, "swap", dims, _meta(logits).transpose(*dims))


def _plus(logits: DeferredLogits, bias: Any, **kwargs: Any) -> DeferredLogits | None:
    """A bias of all rows, as transformers' `final_logits_bias`."""
    shape = _shape(logits)
    if (
        kwargs
        or type(bias) not in (Tensor, nn.Parameter)
        or bias.dtype not in KERNEL_DTYPES
        or not 1 <= bias.dim() <= len(shape)
        or tuple(bias.shape) != (*(1,) * (bias.dim() - 1), shape[-1])
        or bias.device != logits._head.hidden.device
    ):
        return None
    dtype = torch.promote_types(_dtype(logits), bias.dtype)
    # who writes to the bias later does not write to these logits
    return _then(logits, "add", bias.clone(), dtype=dtype)


def _times(logits: DeferredLogits, number: Any, **kwargs: Any) -> DeferredLogits | None:
    return _scaled(logits, "mul", number, kwargs)


def _over(logits: DeferredLogits, number: Any, **kwargs: Any) -> DeferredLogits | None:
    return _scaled(logits, "div", number, kwargs)


def _scaled(logits: DeferredLogits, step: str, number: Any, kwargs: Any) -> DeferredLogits | None:
    if kwargs or type(number) not in (int, float) or not math.isfinite(number) or not number:
        return None
    return _then(logits, step, number)


def _tanh(logits: DeferredLogits) -> DeferredLogits | None:
    return _then(logits, "tanh", None)


#: Reductions as PyTorch's C++ functions number them.
_NONE, _SUM = 0, 2
#: How far the factors of logits may go.
_FAR = 2.0**20


def _form(steps: list[tuple[str, Any]], half: bool) -> tuple[float, float] | None:
    """(scale, softcap) of the steps, or None where they are not of that form, or where a scale
    comes behind the cast of a half type, and is not rounded to it."""
    names = [name for name, _ in steps]
    if not {"log_softmax", "neg"}.isdisjoint(names):
        return None
    scaled = [i for i, name in enumerate(names) if name in ("mul", "div", "tanh")]
    if scaled and "add" in names[scaled[0] :]:
        return None
    numbers = [(n, v) for n, v in steps if n in ("mul", "div", "tanh")]
    cap = 0.0
    if "tanh" in names:
        if names.count("tanh") > 1 or len(numbers) < 2 or numbers[-2][0] != "tanh":
            return None
        name, value = numbers[-1]
        cap = float(value if name == "mul" else 1 / value)
        numbers = numbers[:-2]
        if cap <= 0:
            return None
    scale = 1.0
    for name, value in numbers:
        scale *= value if name == "mul" else 1 / value
        if not 1 / _FAR < abs(scale) < _FAR:  # on the way the logits might be infinite, or zero
            return None
    if cap:  # c * tanh(s * y) is the softcap c of s * c * y
        scale *= cap
    if abs(scale - 1) < 1e-12:
        return 1.0, cap
    first = next(i for i, n in enumerate(names) if n in ("mul", "div"))
    return None if half and "to" in names[:first] else (scale, cap)


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    device = logits._head.hidden.device.type
    if _dtype(logits) != torch.float32 and autocasts(device):
        logits = _cast(logits, torch.float32)  # as autocast does
    if (
        _reads_targets(logits, target, reduction)
        or weight is not None
        or size_average is not None
        or reduce is not None
        or not 0.0 <= label_smoothing <= 1.0
    ):
        return None
    pieces = _Pieces.of(logits)
    if pieces is None:
        return None

    def loss_of(values: Tensor, summed: bool) -> Tensor:
        # what `torch.nn.functional.cross_entropy` calls: its name may be somebody else's by now
        found: Tensor = torch.ops.aten.cross_entropy_loss.default(
            values, target, None, _SUM if summed else _NONE, ignore_index, label_smoothing
        )
        return found

    return pieces.loss(target, loss_of, int(ignore_index), float(label_smoothing), reduction)


def _nll_loss(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    """Of logarithms of probabilities: the cross entropy of what they were made of."""
    if (
        _reads_targets(logits, target, reduction)
        or weight is not None
        or size_average is not None
        or reduce is not None
        or (pieces := _Pieces.of(logits, of_log_probs=True)) is None
        or pieces.sign < 0
    ):
        return None

    def loss_of(values: Tensor, summed: bool) -> Tensor:
        found: Tensor = torch.ops.aten.nll_loss_nd.default(
            values, target, None, _SUM if summed else _NONE, ignore_index
        )
        return found

    loss = pieces.loss(target, loss_of, int(ignore_index), 0.0, reduction)
    return loss.float() if autocasts(loss.device.type) else loss


def _reads_targets(logits: DeferredLogits, target: Any, reduction: str) -> bool:
    """Whether a loss of these targets reads the logits."""
    shape = _shape(logits)
    return (
        type(target) is not Tensor
        or target.dtype != torch.int64
        or len(shape) != 2
        or tuple(target.shape) != shape[:-1]
        or target.device != logits._head.hidden.device
        or reduction not in ("mean", "sum", "none")
    )


#: Steps that choose and order rows.
_OF_ROWS = frozenset({"shape", "copy", "rows", "picked", "swap"})


@dataclass(frozen=True)
class _Pieces:
    """What losses in pieces take of logits, or of their log-probabilities, times `sign`."""

    logits: DeferredLogits
    steps: list[tuple[str, Any]]
    hidden: Tensor  # of their rows
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    options: Options
    sign: int

    @staticmethod
    def of(logits: DeferredLogits, of_log_probs: bool = False) -> _Pieces | None:
        """None if the loss needs them whole."""
        steps, head = logits.steps(), logits._head
        if steps is None:
            return None
        names = [name for name, _ in steps]
        before = steps
        if of_log_probs:
            at = names.index("log_softmax") if "log_softmax" in names else len(names)
            if not set(names[at + 1 :]) <= _OF_ROWS | {"neg"} or at == len(names):
                return None
            before = [s for s in steps if s[0] not in ("log_softmax", "neg")]
            if "neg" in names[:at]:
                return None
        form = _form(before, head.hidden.dtype != torch.float32)
        found = None if form is None else _parameters(logits, before)
        if form is None or found is None:
            return None
        head.check_unchanged()
        hidden = head.hidden
        for name, value in steps:
            if name in ("shape", "copy"):
                hidden = hidden.reshape(*value[:-1], hidden.shape[-1])
            elif name in ("rows", "picked"):
                hidden = hidden[value]
            elif name == "swap":
                hidden = hidden.transpose(*value)
        weight, bias, bias_dtype, a, b = found
        options = Options(-100, 0.0, *form, hidden.dtype, bias_dtype, hidden.dtype)
        if head.adapter is not None:
            _, _, scaling, dtype = head.adapter
            options = options._replace(adapter_dtype=dtype, scaling=scaling)
        sign = -1 if names.count("neg") % 2 else 1
        return _Pieces(logits, steps, hidden, (weight, bias, a, b), options, sign)

    @property
    def records(self) -> bool:
        return torch.is_grad_enabled() and _requires_grad(self.logits)

    @property
    def trained(self) -> Tensor | None:
        """What was added, where it has a gradient: as `_parameters` has it, one alone."""
        return next((t for t in _added(self.steps) if t.requires_grad), None)

    @property
    def sources(self) -> list[Tensor | None]:
        """The head's tensors, where others were made of them."""
        whole = self.logits._head.tensors
        if self.trained is not None:
            whole[2] = self.trained
        made = (None, *self.parameters)
        return [None if t is own else t for t, own in zip(whole, made, strict=True)]

    def hooks(self, loss_of: Callable[[Tensor, bool], Tensor]) -> LogitsHooks:
        head, trained = self.logits._head, self.trained

        def product(*tensors: Tensor | None) -> Tensor:
            own = list(tensors)
            if trained is not None:  # it has the place of the head's
                own[2] = head.bias
            logits: Tensor = head.like(own).product()
            return logits

        made_by = [_step(name, value, trained) for name, value in self.steps]
        return LogitsHooks(Formula(product, made_by, loss_of, trained))

    def loss(
        self,
        target: Tensor,
        loss_of: Callable[[Tensor, bool], Tensor],
        ignore_index: int,
        smoothing: float,
        reduction: str,
    ) -> Tensor:
        """Their cross entropy, in their dtype. loss_of: the same of logits that are made."""
        hidden, (weight, bias, a, b) = self.hidden, self.parameters
        hooks = self.hooks(loss_of)
        options = self.options._replace(ignore_index=ignore_index, smoothing=smoothing)
        device = hidden.device.type
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(self.records):
            check_head(hidden, weight, target, bias, ignore_index)
            loss = loss_of_head(
                hidden, weight, target, bias, options, reduction,
                adapter=(a, b), hooks=hooks, sources=self.sources,
            )  # fmt: skip
            loss = loss.to(_dtype(self.logits))  # of half types it is rounded to them
        self.logits.consumed(hooks)
        return loss

    def at_and_sum(self, target: Tensor) -> Tensor:
        """[2, N]: the log-probabilities of the targets [N], and the sums over the classes."""
        hidden, (weight, bias, a, b) = self.hidden, self.parameters

        sign = self.sign  # what hooks hold must not hold the logits, which hold what is found

        def loss_of(values: Tensor, _: bool) -> Tensor:
            flat = values.float().reshape(-1, values.shape[-1])
            return at_and_sum(sign * flat, target)

        hooks, flat = self.hooks(loss_of), hidden.reshape(-1, hidden.shape[-1])
        device = hidden.device.type
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(self.records):
            apply: Any = LogProbsOfHead.apply
            found: Tensor = apply(
                flat, weight, bias, a, b, target, self.options, hooks, *self.sources
            )
        self.logits.consumed(hooks)
        return found


def _log_softmax(
    logits: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> DeferredLogits | None:
    """Of `torch.nn.functional`."""
    return _log_softmax_of(logits, dim, dtype)


def _log_softmax_of(logits: Any, dim: Any = None, dtype: Any = None) -> DeferredLogits | None:
    if dim not in (-1, len(_shape(logits)) - 1) or type(dim) is not int:
        return None
    # what autocast, and the dtype that is asked for, make of theirs
    like = torch.empty(1, 1, dtype=_dtype(logits), device=logits._head.hidden.device)
    wide = _cast(logits, torch.log_softmax(like, -1, dtype).dtype)
    if wide is None:
        return None
    return _then(wide, "log_softmax", None, torch.empty(_shape(wide), device="meta"))


def _negative(logits: DeferredLogits) -> DeferredLogits | None:
    is_log = any(name == "log_softmax" for name, _ in logits._steps)
    return _then(logits, "neg", None) if is_log else None


def _gather(logits: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Tensor | None:
    """Of log-probabilities those of one class in each row."""
    shape = _shape(logits)
    if (
        type(dim) is not int
        or dim not in (-1, len(shape) - 1)
        or sparse_grad
        or type(index) is not Tensor
        or index.dtype != torch.int64
        or tuple(index.shape) != (*shape[:-1], 1)
        or index.device != logits._head.hidden.device
        or (pieces := _Pieces.of(logits, of_log_probs=True)) is None
    ):
        return None
    target = index.reshape(-1)
    # PyTorch's own error is the original's. A GPU is not waited for: there it is one of the device
    if target.device.type == "cpu" and ((target < 0) | (target >= shape[-1])).any():
        return None
    found = pieces.at_and_sum(target)
    logits._rows = None if saving_is_watched() else (pieces.records, found)
    return (pieces.sign * found[0].reshape(index.shape)).to(_dtype(logits))


def _sum(
    logits: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor | None:
    """Of log-probabilities those of all classes."""
    shape = _shape(logits)
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) != 1 or type(dims[0]) is not int or dims[0] not in (-1, len(shape) - 1):
        return None
    pieces = _Pieces.of(logits, of_log_probs=True)
    if pieces is None:
        return None
    # what is made with the value of one class serves for the sum too: see `_gather`
    records, found = logits._rows or (None, None)
    if found is None or records != pieces.records or saving_is_watched():
        rows = pieces.hidden.shape[:-1].numel()
        none = torch.zeros(rows, dtype=torch.int64, device=pieces.hidden.device)
        found = pieces.at_and_sum(none)
    like = torch.empty(1, 1, dtype=_dtype(logits), device=found.device)
    result = pieces.sign * found[1].reshape(*shape[:-1], *(1,) * bool(keepdim))
    return result.to(like.sum(-1, dtype=dtype).dtype)


def _step(name: str, value: Any, trained: Tensor | None) -> Callable[[Tensor, Any], Tensor]:
    if value is trained is not None:
        return lambda y, own: y + own[2]
    return lambda y, _: _STEPS[name](y, value)


def _parameters(
    logits: DeferredLogits, steps: list[tuple[str, Any]]
) -> tuple[Tensor, Tensor | None, torch.dtype, Tensor | None, Tensor | None] | None:
    """The head of the logits that steps make: weight, bias, the dtype that the bias is added in,
    and A and B of the adapter. None where several biases have gradients."""
    hidden, weight, bias, a, b = logits._head.tensors
    assert hidden is not None and weight is not None
    trained = [t for t in (bias, *_added(steps)) if t is not None and t.requires_grad]
    if len(trained) > 1:
        return None
    dtype = bias_dtype = hidden.dtype
    for name, value in steps:
        if name == "to":
            dtype = value
        elif name == "add":
            dtype = bias_dtype = torch.promote_types(dtype, value.dtype)
            value = value.reshape(-1).to(dtype)
            bias = value if bias is None else bias.to(dtype) + value
        elif name == "classes":
            weight, bias, b = (None if t is None else t[value] for t in (weight, bias, b))
            assert weight is not None
    return weight, bias, bias_dtype, a, b


_RECORDED: dict[Any, Callable[..., Any]] = {
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.to: _to,
    Tensor.view: _view,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _item,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.is_contiguous: lambda logits, **how: _meta(logits).is_contiguous(**how),
    Tensor.stride: lambda logits, *dim, **how: _meta(logits).stride(*dim, **how),
    Tensor.__add__: _plus,
    Tensor.__radd__: _plus,
    Tensor.add: _plus,
    torch.add: _plus,
    Tensor.__mul__: _times,
    Tensor.__rmul__: _times,
    Tensor.mul: _times,
    Tensor.__truediv__: _over,
    Tensor.div: _over,
    torch.mul: _times,
    torch.div: _over,
    torch.tanh: _tanh,
    Tensor.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax_of,
    Tensor.log_softmax: _log_softmax_of,
    Tensor.__neg__: _negative,
    Tensor.neg: _negative,
    torch.neg: _negative,
    Tensor.gather: _gather,
    torch.gather: _gather,
    Tensor.sum: _sum,
    torch.sum: _sum,
}

#: What asks for the logits' own gradient.
_ASKING = {
    Tensor.retain_grad,
    Tensor.register_hook,
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.grad.__get__,  # type: ignore[union-attr]
}

_BASE = Tensor._base.__get__  # type: ignore[union-attr]
#: Reading these needs no values.
_METADATA = {
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.get_device,
}
