"""What every fused transformer block shares: how it is proven and when it steps aside."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from hfpatch.blocks.likeness import odd_build, own_settings, read_through
from hfpatch.kernels.sources import Kernel, Sources
from hfpatch.leaves.recorded import may_record
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.planning.plan import Refusal
from hfpatch.proof.contract import Contract
from hfpatch.proof.keys import attributes_of, code_of
from hfpatch.proof.proving import cpu_default, float32_default
from hfpatch.proof.subject import (
    Combo,
    Formula,
    Forward,
    Subject,
    Tensor,
    class_of,
    coded,
    is_dense,
    is_dtensor,
    watched,
)
from hfpatch.proof.unchanged import (
    Part,
    ProcessorPart,
    hooks_on_all,
    is_hooked,
    layers_replaced,
    same_parts,
)


class NotCovered(Exception):
    """A call of a fused forward that only the original can answer; the text says why."""


class HandedBack(NotCovered):
    """A call that the original answers as a matter of course: nothing is said of it."""


#: What a fused forward ends in where a call is none that it was written for: inputs that broadcast,
#: a table of another dtype, a weight that is gone. The original answers it, or has its own error.
_ERRORS = (NotCovered, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
_CALL_IMPL = nn.Module._call_impl.__code__
#: The first argument of a call that has none.
_MISSING: Any = object()


def _of_a_module(error: BaseException) -> bool:
    """Whether it was raised in a module that was called, or in somebody's hook on one."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is _CALL_IMPL for frame, _ in frames)


@dataclass(frozen=True)
class BlockProof:
    """A fused block that reproduces the original in one dtype, and its largest error."""

    dtype: torch.dtype
    forward: Forward
    max_abs_error: float
    max_rel_error: float


class BlockSubject(Subject):
    """A block as a whole: many inputs, one fused forward, several ops.

    A subclass says which ops it needs, builds a small replica with sample inputs, and writes the
    fused forward in terms of bound kernels. Its children's projections are called as modules.
    """

    #: Ops that the fused forward calls, with their parameters per call site.
    ops: tuple[str, ...]
    #: How the report describes it.
    title: str
    #: Class name of the attention processors that the fused forward stands in for.
    processor: ClassVar[str | tuple[str, ...]] = ""
    #: Name of the first parameter of the class's forward.
    argument: ClassVar[str] = "hidden_states"

    #: Paths of children, beside layers, that the fused forward calls as modules.
    called: ClassVar[tuple[str, ...]] = ()

    #: Errors of the fused block against fp64 may exceed the original's by this factor and by one
    #: epsilon: both round at the same places, except where fusing keeps fp32 longer.
    tolerance = 1.25

    _same: Callable[[nn.Module], bool] | None = None  # what `still_proven` made

    @abstractmethod
    def build(self, m: Any) -> Any:
        """A small block of the class and with the settings of `m`, by its constructor."""

    def settle(self, block: Any, m: Any) -> None:
        """Give the small block the settings of `m` that its constructor does not take."""

    def tiny(self, generator: torch.Generator) -> nn.Module:
        """A small block of the same class and settings with random parameters, fp32, on the CPU."""
        block = small(lambda: self.build(self.module), generator)
        self.settle(block, self.module)
        return block

    @abstractmethod
    def sample(self, block: nn.Module, generator: torch.Generator) -> dict[str, Any]:
        """Keyword arguments of a call of `tiny()`'s block, fp32, on the CPU."""

    @abstractmethod
    def fuse(self, bind: Callable[..., Callable[..., Any]]) -> Forward:
        """The fused forward; `bind(op, **params)` gives a callable of the op's tensors.

        With `into=N` the N tensors to write come before them, and nothing is returned.
        """

    # These look at any block of the class: bound, they would keep the subject's module alive.
    @staticmethod
    def attentions(block: Any) -> tuple[Any, ...]:
        """The attentions whose processor is not called, by the names that most classes have."""
        held = (block._modules.get(name) for name in ("attn", "attn1", "attn2"))
        return tuple(attn for attn in held if attn is not None)

    @staticmethod
    @abstractmethod
    def unused(block: Any) -> list[nn.Module]:
        """Modules that the fused forward reads but never calls."""

    @staticmethod
    @abstractmethod
    def odd(block: Any) -> str | None:
        """Why this block is not what the fused forward computes; None if it is."""

    @classmethod
    def projection(cls, block: Any) -> Any:
        """A linear layer: its dtype is the one that the model computes in. None: no layer tells."""
        return cls.attentions(block)[0].to_out[0]

    @staticmethod
    def is_another(block: Any) -> bool:
        """Whether a module of that name is none of these blocks, of which nothing is said."""
        return False

    def idle(self) -> list[nn.Module]:
        """Modules of the block that the fused forward never calls."""
        return type(self).unused(self.module)

    @classmethod
    def ready(cls, block: nn.Module) -> bool:
        """Whether the rest of a block is as it was proven, its attentions' processors above all.

        That its idle modules are, is looked at before: `still_proven`.
        """
        return odd_processors(cls.processor, cls.attentions(block)) is None

    def _read(self) -> tuple[set[str], list[tuple[str, nn.Module]]]:
        """The paths of the idle modules, and all modules that the fused forward reads by path."""
        ids = {id(m) for m in self.idle()}
        idle = {path for path, m in self.module.named_modules() if id(m) in ids}
        return idle, list(read_through(self.module, idle, self.called))

    def reads(self) -> list[nn.Module]:
        """The modules whose code the fused forward stands in for."""
        return [m for _, m in self._read()[1]]

    def still_proven(self) -> Callable[[nn.Module], bool]:
        """A function that tells whether the modules that the fused forward reads are those of now:
        classes, settings, processors, and of idle ones nobody's hooks or forwards. It holds none of
        them: copies share it."""
        if self._same is not None:
            return self._same
        idle, read = self._read()
        parts = [
            Part(m, tuple(filter(None, path.split("."))), called=path not in idle, own_tensors=True)
            for path, m in read
        ]
        processors = [
            ProcessorPart(m.processor, tuple(path.split(".")))
            for path, m in read
            if "processor" in m.__dict__
        ]

        self._same = same_parts(parts, processors)
        return self._same

    def unlike(self, tiny: nn.Module) -> str | None:
        """How the block is built otherwise than `tiny`, which is what is proven."""
        idle, _ = self._read()
        return odd_build(self.module, tiny, idle, self.called)

    @classmethod
    def works_in(cls, block: nn.Module) -> torch.dtype | None:
        """The dtype of the block's products, where that is known: an input of another one is none
        that the block was proven with."""
        # what stands there by now may be somebody's own layer, which need not have a weight
        projection = cls.projection(block)
        if projection is None:
            return None
        weight = projection.__dict__.get("_parameters", {}).get("weight")  # the quick way
        if type(weight) is not nn.Parameter or "weight" in projection.__dict__:
            weight = getattr(projection, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else None
        return dtype if dtype in KERNEL_DTYPES else None  # a quantizer's own is no such

    def packs(self) -> list[list[nn.Module]]:
        """Linear layers that `project` is called with: worth one product each."""
        return []

    def covers(self) -> list[nn.Module]:
        return self.idle()

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(
            (
                path,
                code_of(m),
                attributes_of(m, ignore=("processor",)),
                _processor_key(m.__dict__.get("processor")),
                tuple((n, p is not None and p.dtype) for n, p in m._parameters.items()),
                tuple(m._modules),
            )
            for path, m in self._read()[1]
        )

    def prove_block(
        self, sources: Sources, device: str, dtype: torch.dtype | None = None
    ) -> BlockProof | Refusal:
        """Compare the fused with the original forward in one dtype, by default the model's own; or
        why it cannot be used.

        Also without `verify`: for a block this is what identifies its formula.
        """
        if device == "xpu":
            return Refusal("unsupported", "whole blocks are fused on CUDA and on the CPU alone")
        kernels: dict[str, Kernel] = {}
        proving = [True]  # a kernel of others that is wrong in the proof rules the block out
        for op in self.ops:
            kernel = sources.kernel(op, block=True)
            if kernel is None:
                return Refusal("off", f"op `{op}` is switched off by `kernels=`")
            if kernel.accepts is not None:
                why = f"kernel `{kernel.source}` for `{op}` is another project's"
                return Refusal("rejected", why)
            if kernel.source == "torch" and not sources.explicit(op):
                return Refusal("unsupported", f"no compiled kernel for `{op}`")
            if (refused := kernel.refuses(device)) is not None:
                return Refusal("unavailable", refused)
            if not kernel.own:
                from hfpatch.foreign.watch import Watched

                kernel = replace(kernel, watch=Watched.of(kernel, proving))
            kernels[op] = kernel

        def bind(op: str, into: int = 0, **params: Any) -> Callable[..., Any]:
            return kernels[op].bind_into(into, params) if into else kernels[op].bind(params)

        if dtype is None:
            dtype = self.main_combo().x
        if dtype not in KERNEL_DTYPES:
            return Refusal("rejected", f"no kernel computes in {dtype}")
        fused = self.fuse(bind)
        try:
            where = device if sources.assumed is None else "cpu"
            outcome = self._compare(fused, torch.device(where), dtype)
        finally:
            proving[0] = False
        if isinstance(outcome, str):
            return Refusal("rejected", outcome)
        return BlockProof(dtype, fused, *outcome)

    def _compare(
        self, fused: Forward, device: torch.device, dtype: torch.dtype
    ) -> tuple[float, float] | str:
        def cast(value: Any, to: torch.dtype) -> Any:
            if isinstance(value, Tensor):
                # tables in fp32 stay what they are: the model makes them in fp32 in every dtype
                return value.to(device, to) if value.is_floating_point() else value.to(device)
            if isinstance(value, tuple):
                return tuple(v.to(device) for v in value)
            return value

        with torch.no_grad(), cpu_default(), float32_default():
            generator = torch.Generator().manual_seed(0)
            block = self.tiny(generator).eval().requires_grad_(False)
            inputs = self.sample(block, generator)
            original = type(block).forward
            low = {k: cast(v, dtype) for k, v in inputs.items()}
            block = block.to(device, dtype)
            before = {k: v.clone() for k, v in low.items() if isinstance(v, Tensor)}
            try:
                theirs = original(block, **low)
                try:
                    ours = fused(block, **low)
                except HandedBack:  # as at a call
                    ours = original(block, **low)
            except torch.OutOfMemoryError:
                raise  # says nothing of the block: another time there is memory
            except Exception as e:
                return f"with {dtype} the fused block failed: {type(e).__name__}: {e}"
            # on the CPU: loading a GPU's fp64 kernels for this would take longer than all the rest
            wide = {k: _to_fp64(v) for k, v in low.items()}
            try:
                truth = original(block.cpu().double(), **wide)
            except Exception as e:
                return f"in fp64 on the CPU the block failed: {type(e).__name__}: {e}"
        if any(not torch.equal(before[k], low[k]) for k in before):
            return "the fused block wrote to its input"
        if _describe(ours) != _describe(theirs):
            return f"the fused block returned {_describe(ours)}, expected {_describe(theirs)}"
        worst = (0.0, 0.0)
        for mine, eager, exact in zip(*map(_tensors, (ours, theirs, truth)), strict=True):
            outcome = self._error(mine, eager, exact.to(device))
            if isinstance(outcome, str):
                return f"with {dtype} {outcome}"
            worst = max(worst, outcome)
        return worst

    def _error(self, ours: Tensor, theirs: Tensor, truth: Tensor) -> tuple[float, float] | str:
        """Largest difference of the two, absolute and relative; or that ours is too far off."""
        norm = truth.norm()
        error = ((ours.double() - truth).norm() / norm).item()
        limit = ((theirs.double() - truth).norm() / norm).item() * self.tolerance
        limit += torch.finfo(ours.dtype).eps
        if not error <= limit:
            return f"the fused block is off by {error:.2e}, expected <= {limit:.2e}"
        difference = (ours.double() - theirs.double()).abs().max().item()
        return difference, difference / theirs.double().abs().max().item()

    def forward(self, original: Forward, contract: Contract) -> Forward:
        cpu, cuda = contract.cpu, contract.cuda
        autocast, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
        ready, same, works_in = self.ready, self.still_proven(), self.works_in
        distributed = torch.distributed.is_available()
        cls, own = class_of(self.module), coded(original)
        code = own.__code__

        def partitioned(block: nn.Module) -> bool:
            """Whether a parameter is a DTensor or empty: FSDP2 has gathered them by now."""
            if not (distributed and torch.distributed.is_initialized()):
                return False
            found = [n for n, p in block.named_parameters() if is_dtensor(p) or p.numel() == 0]
            if found:
                contract.partitioned(found[0])
            return bool(found)

        def forward(
            self: nn.Module, hidden_states: Any = _MISSING, *args: Any, **kwargs: Any
        ) -> Any:
            if hidden_states is _MISSING:
                return type(self).forward(self, **kwargs)  # which says what it lacks
            if is_compiling():
                return original(self, hidden_states, *args, **kwargs)
            # its class is another one, or was patched
            if (
                (type(self) is not cls and class_of(self) is not cls)
                or type(self).forward is not original
                or own.__code__ is not code
            ):
                return type(self).forward(self, hidden_states, *args, **kwargs)
            if (
                type(hidden_states) is Tensor
                and not watched()
                and all(map(_is_readable, (hidden_states, *args, *kwargs.values())))
            ):
                if layers_replaced() or not (same(self) and ready(self)):
                    contract.changed()
                elif hooks_on_all():
                    contract.hooks_on_all()
                elif partitioned(self):
                    pass
                elif grad_enabled() and may_record(self, (hidden_states, *args, *kwargs.values())):
                    contract.needs_grad()
                elif hidden_states.is_cuda or hidden_states.is_cpu:
                    key = (hidden_states.dtype, None)
                    device, table = ("cuda", cuda) if hidden_states.is_cuda else ("cpu", cpu)
                    if autocast(device):  # asked first: no proof is made under it
                        contract.not_under_autocast()
                    elif works_in(self) not in (None, hidden_states.dtype):
                        contract.another_dtype(hidden_states)
                    else:
                        run = table.get(key) or contract.late(hidden_states, key)
                        if run is not None:
                            try:
                                return run(self, hidden_states, *args, **kwargs)
                            except HandedBack:
                                pass
                            except _ERRORS as e:
                                if isinstance(e, torch.OutOfMemoryError) or _of_a_module(e):
                                    raise
                                contract.not_covered(e)
            return original(self, hidden_states, *args, **kwargs)

        first = self.argument
        # Python's own errors of arguments name the function
        forward.__qualname__ = own.__qualname__
        if first == "hidden_states":
            return forward

        def renamed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if "hidden_states" in kwargs or (args and first in kwargs):
                return type(self).forward(self, *args, **kwargs)  # which says what is too many
            if first in kwargs:
                return forward(self, kwargs.pop(first), **kwargs)
            return forward(self, *args, **kwargs)

        return renamed

    def main_combo(self) -> Combo:
        modules = [self.module, *self.idle()]
        return Combo(compute_dtype(modules, type(self).projection(self.module)), None)

    # A block is proven as a whole, by `prove_block`.
    def formulas(self) -> list[Formula]:
        return [Formula(op, {}) for op in self.ops]

    def combos(self) -> list[Combo]:
        return [Combo(t, None) for t in KERNEL_DTYPES]

    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        return self.tiny(generator).to(device, combo.x)

    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        raise NotImplementedError("a block has several inputs: see `sample`")

    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        raise NotImplementedError("a block calls several kernels: see `fuse`")


def _processor_key(processor: Any) -> Any:
    if processor is None:
        return None
    return (*code_of(processor), repr(own_settings(processor)))


def _to_fp64(value: Any) -> Any:
    """On the CPU, masks and indices too; complex tables in their wide dtype."""
    if isinstance(value, tuple):
        return tuple(_to_fp64(v) for v in value)
    if not isinstance(value, Tensor):
        return value
    value = value.cpu()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _tensors(result: Any) -> list[Tensor]:
    """The tensors that a block returned: one, or a tuple in which some may be None."""
    values = result if isinstance(result, tuple) else (result,)
    return [v for v in values if isinstance(v, Tensor)]


def _describe(result: Any) -> str:
    values = result if isinstance(result, tuple) else (result,)
    return ", ".join(
        f"{list(v.shape)} {v.dtype}" if isinstance(v, Tensor) else repr(v) for v in values
    )


def _is_readable(value: Any) -> bool:
    """Whether an argument, or each tensor of a tuple of tables, is none that is read with another
    sign, sparse or nested: kernels and products of ours read its memory as it lies."""
    if isinstance(value, Tensor):
        return is_dense(value)
    return not isinstance(value, tuple) or all(map(_is_readable, value))


def unhooked(*modules: nn.Module) -> bool:
    """Whether none of the modules, which are not called, has a hook that would not fire."""
    return not any(is_hooked(m) for m in modules)


def small(make: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """What `make` builds, with random parameters: about 1 in vectors, 1/sqrt(fan in) in matrices
    and in the kernels of convolutions.

    `make` draws from a copy of the global generator.
    """
    with torch.random.fork_rng(devices=[]):
        block = make()
    with torch.no_grad():
        for p in block.parameters():
            inputs = p[0].numel() if p.ndim > 3 else p.shape[-1]
            scale = inputs**-0.5 if p.ndim > 1 else 1.0
            offset = 1.0 if p.ndim == 1 else 0.0
            p.copy_(offset + scale * torch.randn(p.shape, generator=generator) * 0.5)
    return block


def compute_dtype(modules: Sequence[nn.Module], projection: Any) -> torch.dtype:
    """The dtype that a block computes in: that of `projection`'s weight, or, where a quantizer
    stores that weight in a dtype of its own, the narrowest that parameters in `modules` have."""
    dtype: torch.dtype = projection.weight.dtype
    if dtype in KERNEL_DTYPES:
        return dtype
    others = [p.dtype for m in modules for p in m.parameters() if p.dtype in KERNEL_DTYPES]
    return min(others, key=lambda d: d.itemsize, default=dtype)


def odd_processors(name: str | tuple[str, ...], attentions: Iterable[Any]) -> str | None:
    """Why an attention is not the one that class `name` computes, as diffusers builds it."""
    names = (name,) if isinstance(name, str) else name
    for attn in attentions:
        processor = attn.processor
        if type(processor).__name__ not in names:
            return f"its attention processor is `{type(processor).__name__}`"
        if getattr(processor, "_parallel_config", None) is not None:
            return "its attention is split over several GPUs"
        if attn.__dict__.get("fused_projections"):
            return "its projections were fused by `fuse_qkv_projections()`"
    return None
