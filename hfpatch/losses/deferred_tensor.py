"""The tensor that stands for logits, and makes them when somebody reads them.

It holds what a head was given and its weight, and the steps that were written down of what a model
did to its logits; `RECORDED` says of which functions they are. Every other operation makes the
logits by the head's own product, with autograd, and goes on with them: numbers and gradients are
then the original's. Code that PyTorch's Python interface does not see, as an autograd function of
the user's (Liger's loss), finds the logits in autograd's graph, as the result of the same product.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpatch.errors import HfpatchError
from hfpatch.losses.logits_hooks import Hook, LogitsHooks, Place
from hfpatch.proof.saved import kept_as_they_are, saving_is_watched
from hfpatch.proof.subject import no_gradients


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
_VIEWS = frozenset({"shape", "rows", "swap", "classes", "detach"})
STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
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
    "detach": lambda y, _: y.detach(),
}


#: By function of tensors: what is written down of it, or None for arguments that are not known.
#: `hfpatch.losses.deferred_logits` fills it.
RECORDED: dict[Any, Callable[..., Any]] = {}
#: Those whose second argument may be the logits.
COMMUTES: set[Any] = set()


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
    _values: Any  # what `deferred_values` has made of all rows for some numbers of each
    _of: tuple[DeferredLogits, int] | None  # what was iterated over, and which of it these are

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
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(records_gradients(self)),
                keeps,
            ):
                if self._before is None or self._step is None:
                    self._made = self._head.product()
                else:
                    name, value = self._step
                    self._made = STEPS[name](self._before.materialized(), value)
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

    def _is_taken_in_turn(self) -> bool:
        """Whether these are one of those that all a loss was made of together."""
        logits: DeferredLogits | None = self
        while logits is not None and logits._of is None:
            logits = logits._before
        return logits is not None and logits._of is not None and bool(logits._of[0]._losses)

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
        asks = func in _ASKING and any(
            t._losses or t._is_taken_in_turn() for t in _deferred_in((args, kwargs))
        )
        hooked = asks and func is Tensor.register_hook and records_gradients(args[0])
        if hooked and not args[0]._is_taken_in_turn():
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
        if func == _BASE and (args[0]._step is None or args[0]._step[0] not in _VIEWS - {"detach"}):
            return None  # FSDP2 asks each result of a model whether it is a view
        step = RECORDED.get(func)
        of = args[::-1] if func in COMMUTES and len(args) == 2 else args
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
                y = STEPS[name](y, next(biases) if name == "add" else value)
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
    records = torch.is_grad_enabled() and (before is None or records_gradients(before))
    with torch.set_grad_enabled(records):
        made: DeferredLogits = _Product.apply(  # type: ignore[no-untyped-call]
            shape, dtype, head, steps, *head.tensors, *added_by(steps)
        )
    made._head, made._before, made._step, made._made = head, before, step, None
    made._steps, made._bare, made._strides, made._rows = steps, None, strides, None
    made._after, made._losses, made._values, made._of = [], [], None, None
    if before is not None and step is not None and step[0] not in _VIEWS:
        # a view of logits is written to with them, but what is made of that is not
        logits: DeferredLogits | None = before
        while logits is not None:
            logits._after.append(weakref.ref(made))
            is_view = logits._step is not None and logits._step[0] in _VIEWS
            logits = logits._before if is_view else None
    return made


def added_by(steps: list[tuple[str, Any]]) -> list[Tensor]:
    return [value for name, value in steps if name == "add"]


def _deferred_in(value: Any) -> Iterator[DeferredLogits]:
    if type(value) is DeferredLogits:
        yield value
    elif isinstance(value, dict):
        yield from _deferred_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _deferred_in(v)


def records_gradients(logits: DeferredLogits) -> bool:
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
                logits._bare = STEPS[name](logits._bare, value)
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


def shape_of(logits: Tensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(logits.shape)


def dtype_of(logits: Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.dtype


def meta_of(logits: DeferredLogits) -> Tensor:
    """A tensor that lies as the logits would, without memory."""
    return torch.empty_strided(shape_of(logits), logits._strides, device="meta")


def then(
    logits: DeferredLogits,
    step: str,
    value: Any,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """`like`: how the result lies; as the logits where None."""
    if like is None:  # as PyTorch makes it of elements that lie in any order
        like = torch.empty_like(meta_of(logits))
    return _deferred(
        logits._head,
        tuple(like.shape),
        like.stride(),
        dtype or dtype_of(logits),
        logits,
        (step, value),
    )


def cast(logits: DeferredLogits, dtype: torch.dtype) -> DeferredLogits | None:
    if dtype == dtype_of(logits):
        return logits
    # to another half type is one more rounding, which the kernel does not make
    return then(logits, "to", dtype, dtype=dtype) if dtype == torch.float32 else None


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
