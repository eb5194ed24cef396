"""A kernel that is not ours, as adapters call it: each new kind of call is compared before its
result is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.announce import warn_in_call
from hfpatch.errors import FAILURES
from hfpatch.foreign import reads
from hfpatch.foreign.compare import Asked, form_of, keeps, wrong_values
from hfpatch.foreign.gradients import state_of_backward, wrong_gradients
from hfpatch.foreign.memory import Held, bits, form, put_back_version, reform
from hfpatch.foreign.process import Process, surroundings
from hfpatch.kernels.sources import Kernel
from hfpatch.proof.proving import may_prove, quietly
from hfpatch.proof.subject import version
from hfpatch.text import told

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

_KINDS = 4096  # of calls that are remembered; then all are compared again


class NoSecondGradient(RuntimeError):
    """A user's kernel was to be differentiated twice."""


class WrongKernel(Exception):
    """A kernel got a call wrong while a block was proven with it."""


@dataclass(frozen=True)
class Watched:
    """Makes the watch of each binding of one kernel; `Kernel.watch`.

    Attributes:
        fn: the user's function.
        name: what messages call it.
        op: the op's name.
        state: what it reads that changes from call to call: each call is compared then.
        strict: whether a wrong call raises `WrongKernel` now, as it does in the proof of a block.
    """

    fn: Callable[..., Any]
    name: str
    op: str
    state: tuple[str, ...] = ()
    strict: list[bool] | None = None

    @classmethod
    def of(cls, kernel: Kernel, proving: list[bool]) -> Watched:
        """Of a kernel that a block calls, which is asked no more than its calls show."""
        state = (*reads.iterators_of(kernel.fn), *reads.others_of(kernel.fn))
        return cls(kernel.fn, kernel.source, kernel.op, state, proving)

    def __call__(
        self, call: Callable[..., Any], params: dict[str, Any], training: bool
    ) -> Callable[..., Any]:
        return Watch(self, call, Asked(self.op, params)).call


class Watch:
    """One kernel with one set of parameters.

    A kind of call is the shapes, strides, dtypes, devices and alignment of its tensors, whether
    they are views or of inference mode, which of them are one tensor, what of it autograd records,
    the thread, and what else of the process a kernel may depend on. The first call of each kind
    is compared with the formula; its result is used if it is right, and so is a second call
    with other values, after which the first result must be as it was. A kernel that refuses a
    kind (it raises) is not asked about it again; one that was wrong once, raised later, wrote
    where it may not, or changed the process, is not called again. What it does not compute the
    formula does, in PyTorch's operators, and a warning says so.
    """

    def __init__(self, watched: Watched, call: Callable[..., Any], asked: Asked) -> None:
        self._of = watched
        self._call = call
        self._asked = asked
        self._right: set[Any] = set()
        self._refused: set[Any] = set()
        self._lied = False
        self._keeps_state = bool(watched.state)

    def call(self, *tensors: Tensor | None) -> Any:
        """The result for `tensors`; this is the hot path."""
        key = [
            None
            if t is None
            else (
                t.shape,
                t.stride(),
                t.dtype,
                t.data_ptr() & 63,
                t.requires_grad,
                t.get_device(),
                t._is_view(),
                t.is_inference(),
            )
            for t in tensors
        ]
        kind = (*key, len(set(map(id, tensors))), *surroundings())
        if kind not in self._right:
            return self._new(kind, tensors)
        try:
            y = self._call(*tensors)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as e:  # as it did not when it was asked
            return self._wrong(f"failed ({told(e)})", tensors)
        return self._given(y)

    def _given(self, y: Any) -> Any:
        """A result, whose gradient is not differentiated in its turn: nobody has compared that."""
        for t in y if isinstance(y, (tuple, list)) else (y,):
            if t.requires_grad:
                t.register_hook(self._once)
        return y

    def _once(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():  # as `create_graph=True` has it
            raise NoSecondGradient(
                f"kernel `{self._of.name}` for `{self._of.op}` has a first gradient alone, and "
                "this backward was asked to record the second (`create_graph=True`). Leave the op "
                f"to PyTorch where it is needed: `kernels={{{self._of.op!r}: 'torch'}}`"
            )

    def _new(self, kind: Any, tensors: tuple[Tensor | None, ...]) -> Any:
        if self._lied or kind in self._refused:
            return self._asked.formula(tensors)
        on_cuda = any(t is not None and t.is_cuda for t in tensors)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            self._warn(
                "cannot be compared while a CUDA graph is captured, where it was called first with",
                tensors,
            )
            return self._asked.formula(tensors)
        with may_prove((self, kind)) as may:
            if not may:
                return self._asked.formula(tensors)
            return self._compared(kind, tensors, "cuda" if on_cuda else "cpu")

    def _compared(self, kind: Any, tensors: tuple[Tensor | None, ...], device: str) -> Any:
        recorded = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in tensors
        )
        try:
            with quietly(device):
                held = Held.all_like(tensors)
                copies = [None if h is None else h.tensor for h in held]
                forms = [
                    None if t is None else (form(t), t.untyped_storage() if t.is_leaf else None)
                    for t in tensors
                ]
        except torch.OutOfMemoryError:
            return self._asked.formula(tensors)  # the next call asks again
        reading = () if self._keeps_state else reads.key_of(self._of.fn)
        versions = [None if t is None else version(t) for t in tensors]
        before = Process.now()
        y: Any = None
        failure: BaseException | None = None
        try:
            y = self._call(*tensors)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as e:
            failure = e
        finally:  # also when an interrupt ended it
            why = self._left(before, tensors, forms, versions, held)
        if failure is not None and why is None:
            if len(self._refused) >= _KINDS:
                self._refused.clear()
            self._refused.add(kind)
            self._warn(f"failed ({told(failure)}) with", tensors)
            return self._asked.formula(tensors)
        try:
            if why is None:
                alone = None if recorded else keeps(y)
                with quietly(device):
                    why = alone or self._judge(copies, y)
                    if why is None and recorded:
                        # of the copies: what the model's tensors record stays as it is
                        why = self._judge_gradients(copies)
                    if why is None and not self._keeps_state:
                        why = self._again(held, reading, y)
        except torch.OutOfMemoryError:
            return self._asked.formula(tensors)
        if why is not None:
            return self._wrong(why, tensors)
        if not self._keeps_state:
            if len(self._right) >= _KINDS:
                self._right.clear()
            self._right.add(kind)
        return self._given(y)

    def _judge(self, copies: Tensors, y: Any) -> str | None:
        why = form_of(y, self._asked.formula(copies), copies)
        return why if why is not None else wrong_values(self._asked, copies, y)

    def _judge_gradients(self, copies: Tensors) -> str | None:
        def asks() -> str | None:
            return wrong_gradients(self._asked, self._call, copies, nullcontext)

        if self._keeps_state:
            why, changed = asks(), list[str]()
        else:
            why, changed = state_of_backward(self._of.fn, asks)
        if why is not None:
            return f"has a gradient that {why}"
        names = ", ".join(f"`{n}`" for n in changed)
        return f"keeps state that changes with each backward ({names})" if names else None

    def _again(self, held: Sequence[Held | None], reading: Any, first: Any) -> str | None:
        """Does it compute others, at the same place, afresh, and leave its first result as it is?
        And if what it keeps changes again it changes with every call: each is compared from now
        on."""
        results = [t.detach() for t in _tensors(first)]
        before = [bits(t).clone() for t in results]
        for _ in range(2):
            now = reads.key_of(self._of.fn)
            for h in {id(h): h for h in held if h is not None}.values():
                h.stir()
            tensors = [None if h is None else h.tensor for h in held]
            try:
                y = self._call(*tensors)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as e:
                return f"failed ({told(e)}), when it is called again"
            if (why := self._judge(tensors, y)) is not None:
                return f"{why}, when it is called again"
            if not all(map(torch.equal, before, map(bits, results))):
                return "writes to the result of the call before"
            if now == reading:
                return None
            reading = now
        self._keeps_state = reads.key_of(self._of.fn) != reading
        return None

    def _left(
        self,
        before: Process,
        tensors: Tensors,
        forms: Sequence[Any],
        versions: Sequence[int | None],
        held: Sequence[Held | None],
    ) -> str | None:
        """What it changed that it may not; set back."""
        whys = []
        if changed := before.changed():
            whys.append(f"changed {', '.join(changed)}")
        with quietly("cpu"):
            for i, (t, was, copy) in enumerate(zip(tensors, forms, held, strict=True)):
                if t is not None and form(t) != was[0]:
                    whys.append(f"changed its argument {i}")
                    if was[1] is not None:
                        reform(t, *was)
                if t is not None and copy is not None and not copy.is_as(t):
                    whys.append(f"wrote to its argument {i}")
                    copy.restore(t)
            for i, (t, counted) in enumerate(zip(tensors, versions, strict=True)):
                if t is not None and version(t) != counted:
                    if not whys:  # autograd would refuse what it saved of it all the same
                        whys.append(f"wrote to its argument {i}, and put it back")
                    put_back_version(t, counted)
        return ", and ".join(whys) or None

    def _wrong(self, why: str, tensors: Tensors) -> Any:
        if self._of.strict and self._of.strict[0]:
            raise WrongKernel(f"kernel `{self._of.name}` for `{self._of.op}` {why}")
        self._lied = True
        self._right.clear()
        self._warn(f"is not used any more, since it {why}, with", tensors)
        return self._asked.formula(tensors)

    def _warn(self, what: str, tensors: Tensors) -> None:
        shapes = ", ".join(
            "None"
            if t is None
            else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} of strides {t.stride()}"
            for t in tensors
        )
        warn_in_call(
            f"hfpatch: kernel `{self._of.name}` for `{self._of.op}` {what} {shapes}; such calls "
            "use the same formula in PyTorch's operators",
            RuntimeWarning,
            stacklevel=6,
        )


def _tensors(y: Any) -> list[Tensor]:
    return [t for t in (y if isinstance(y, (tuple, list)) else (y,)) if isinstance(t, Tensor)]
