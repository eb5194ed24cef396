"""What a patch family is, and what every adapter shares.

A family nominates modules by class name, proposes formulas, and knows how to call a kernel in a
module's place. It decides nothing: `hfpatch.proof.probe` runs the original against each formula.
"""

from __future__ import annotations

import math
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad as _forward_ad
from torch.utils._device import DeviceContext

from hfpatch.kernels.sources import Kernel
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.reading.leaf import Reading, Unexplained, read
from hfpatch.reading.values import Clamp

if TYPE_CHECKING:
    from hfpatch.proof.contract import Contract

Tensor = torch.Tensor
#: Called with the module and its inputs, in the module's place.
Forward = Callable[..., Any]


class Formula:
    """A candidate: an op and its parameters. Hashable by value.

    `how`: what the subject does beside it, where the op has no parameter for that.
    """

    def __init__(self, op: str, params: Mapping[str, Any], how: str = "") -> None:
        self.op = op
        self.params = dict(params)
        self.how = how
        self._key = (op, tuple(sorted(self.params.items())), how)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        values = ", ".join(
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.params.items()
        )
        return f"{self.op}({values})" + (f", {self.how}" if self.how else "")


@dataclass(frozen=True)
class Combo:
    """Dtypes of one call: of the input, of the module's own parameters (None: has none), and the
    one that autocast gives to matrix products (None: it is off)."""

    x: torch.dtype
    param: torch.dtype | None
    autocast: torch.dtype | None = None

    def __str__(self) -> str:
        def short(dtype: torch.dtype | None) -> str:
            return str(dtype).removeprefix("torch.") if dtype is not None else "no weight"

        under = f", autocast to {short(self.autocast)}" if self.autocast else ""
        return f"{short(self.x)} input, {short(self.param)}{under}"


class Subject(ABC):
    """One nominated module, as its family understands it. Subjects of equal `key` probe alike."""

    #: Child modules whose forward the adapter never calls: they must be free of hooks.
    bypassed: tuple[str, ...] = ()
    #: Whether it calls linear layers, whose products autocast rounds to its dtype.
    has_layers = False
    #: Child modules that the adapter calls as they are: their code is not read.
    live: tuple[str, ...] = ()
    #: Whether what it computes may depend on the width of its input (a norm of that one width).
    fixed_width = False
    #: How many dimensions its input must have, where its kind takes no others.
    dims: frozenset[int] | None = None
    #: Whether the code that was read last casts anything, or would where dtypes were others.
    casts = False
    #: Children that it calls, whose weight's dtype the code that was read last asks for.
    asked: frozenset[str] = frozenset()
    #: Whether its adapter computes the formula by other operators where autograd records, also in
    #: `mode="inference"`.
    differentiates = False
    #: Whether `mode="training"` gives it a gradient of ours.
    trains = True

    #: Powers of ten: scales at which fp32 holds all that its formulas compute.
    far: ClassVar[Tensor] = torch.arange(-12, 13, 3, device="cpu")
    #: How many operations its formulas have that could make something else between the samples:
    #: "special" (a step or a bend: exp, tanh, sigmoid), "root", "over" (divides by a tensor).
    most: ClassVar[Mapping[str, int]] = {"special": 1, "root": 0, "over": 0}

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """What beyond the class's code decides how the module behaves; hashable."""

    @abstractmethod
    def formulas(self) -> list[Formula]:
        """The candidates, most likely first."""

    @abstractmethod
    def combos(self) -> list[Combo]:
        """The dtype combinations to prove."""

    @abstractmethod
    def main_combo(self) -> Combo:
        """The combination that the model has now: the one that must match."""

    @abstractmethod
    def replica(self, combo: Combo, device: torch.device, generator: torch.Generator) -> nn.Module:
        """A small copy of the module with fresh random parameters, in the combo's dtypes."""

    @abstractmethod
    def inputs(self, combo: Combo, device: torch.device, generator: torch.Generator) -> Tensor:
        """A random input for the replica that tells the candidates apart."""

    @property
    def any_width(self) -> bool:
        """Whether rows of any width are taken, as nothing of the module's says which."""
        return False

    def own_parameters(self, replica: nn.Module) -> dict[str, nn.Parameter]:
        """Of a replica, those that the formula has beside those of children that are called."""
        return {n: p for n, p in replica._parameters.items() if p is not None}

    def far_inputs(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Like `x`, which `inputs` made, with rows of every scale at which fp32 holds powers of
        three: a small term shows at one of them."""
        scales = 10.0**self.far
        rows = torch.randn(*x.shape[:-3], 1, len(scales), x.shape[-1], generator=generator)
        return (rows * scales[:, None]).to(x.device, x.dtype)

    def reshaped(self, x: Tensor, lead: tuple[int, ...]) -> Tensor:
        """Rows of what `inputs` made, the first one and others, in these dimensions."""
        rows = x.flatten(0, -2)
        picks = torch.linspace(0, len(rows) - 1, math.prod(lead)).round().long()
        return rows[picks.to(x.device)].reshape(*lead, x.shape[-1])

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the forward is called with, of what `inputs` made."""
        return (x,)

    def run(self, module: nn.Module, x: Tensor) -> Any:
        """The class's own forward on what `inputs` made."""
        return type(module).forward(module, *self.arguments(x))

    def read(self, module: nn.Module, x: Tensor) -> Reading:
        """What the class's own forward says of what `inputs` made; none of it is run.

        Raises:
            Unexplained: it has something that no formula accounts for.
        """
        width = x.shape[-1] if self.fixed_width else None
        reading = read(module, self.arguments(x), self.live, width=width)
        for kind, most in self.most.items():
            count = reading.counts.get(kind, 0)
            if kind == "over":  # 1 / (1 + exp(-x))
                count -= reading.counts.get("exp", 0)
            if count > most:
                raise Unexplained(
                    f"it has {count} operations of the kind of {_KINDS[kind]}, its formula {most}"
                )
        self.casts, self.asked = reading.counts.get("cast", 0) > 0, reading.asked
        if (why := self.misread(reading.calls) or self.misclamped(reading.clamps)) is not None:
            raise Unexplained(f"it {why}")
        return reading

    def misread(self, calls: Sequence[tuple[str, str]]) -> str | None:
        """How the code calls its live children otherwise than the adapter does, or None.

        `calls`: name, and whose result it is called with, see `hfpatch.reading.leaf.Reading`.
        """
        return None

    def misclamped(self, clamps: Sequence[Clamp]) -> str | None:
        """What the code clamps that no formula of the subject does, or None."""
        return "clamps a tensor, which no formula of its kind does" if clamps else None

    def possible_ops(self) -> set[str]:
        """The ops of all formulas that it may have, before its code is read."""
        return {f.op for f in self.formulas()}

    def off_bends(self, wide: nn.Module, formula: Formula, x: Tensor, eps: float) -> Tensor:
        """Like `x`, of which nothing lies so near a bend of the formula that a rounding by `eps`
        decides on which side: there a gradient is another one. `wide`: the replica in fp64."""
        return x

    @abstractmethod
    def compute(self, kernel: Kernel, formula: Formula, training: bool = False) -> Forward:
        """`compute(...)(module, x)`: the module's result through `kernel`, nothing checked."""

    def covers(self) -> list[nn.Module]:
        """Modules inside that the adapter never calls, so that they are no sites of their own."""
        return [m for n in self.bypassed if (m := self.module._modules[n]) is not None]

    def entry(
        self, kernel: Kernel, formula: Formula, training: bool, replica: nn.Module, x: Tensor
    ) -> Forward:
        """What the contract's tables hold for this formula, for `forward` to call.

        `replica` and its input `x` are those that it was proven with.
        """
        return self.compute(kernel, formula, training)

    @abstractmethod
    def forward(self, original: Forward, contract: Contract) -> Forward:
        """The function that replaces the module's forward."""


class Family(ABC):
    """A row of the registry."""

    name: ClassVar[str]
    #: Regular expression, searched in the class name.
    pattern: re.Pattern[str]
    #: Families of lower rank are tried first: blocks, then attention and MLPs, then leaves.
    rank: ClassVar[int]

    def nominates(self, module: nn.Module) -> bool:
        return self.pattern.search(class_of(module).__name__) is not None

    @abstractmethod
    def examine(self, module: nn.Module) -> Subject | str | None:
        """The subject; or why this module cannot be one; or None if it is not this family's."""


_KINDS = {"special": "`exp` and `tanh`", "root": "`sqrt`", "over": "a division by a tensor"}

_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def watched() -> bool:
    """Whether something looks on that kernels take no part in: forward-mode derivatives, a
    transform of `torch.func`, `torch.jit.trace`, whose graphs must load without hfpatch, or a
    `TorchFunctionMode`, which may make another function of each that the original calls."""
    return (
        _forward_ad._current_level >= 0
        or _transforming()
        or _tracing() is not None
        or (_function_modes() > 0 and _has_foreign_mode())
    )


def _has_foreign_mode() -> bool:
    """Whether a function mode is active that is not `with torch.device(...)`, or the default
    device, which decides where new tensors lie."""
    modes = map(torch._C._get_function_stack_at, range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device: never for one that it does not know ("meta"),
    where `torch.is_autocast_enabled` raises."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class _Codeless:
    """Stands for a forward that is no Python function, whose code nobody can exchange."""

    __code__ = None


def coded(forward: Any) -> Any:
    """What has the `__code__` of a forward: tools that load a file again while a program runs
    (IPython's autoreload) exchange it in the function that is there."""
    return forward if isinstance(forward, types.FunctionType) else _Codeless


def forward_of_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The original forward: that of the class which the module has now, as the class has it now."""
    return type(self).forward(self, *args, **kwargs)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class as it was written: `fully_shard` puts one of its own before it.

    That is made at run time, `FSDP` and the name, of FSDP's and the module's own class.
    """
    cls = type(module)
    bases = cls.__bases__
    if len(bases) == 2 and bases[0].__module__.startswith("torch.distributed."):
        return bases[1]
    return cls


def is_dtensor(p: Tensor) -> bool:
    """Whether `p` is spread over a mesh; torch.distributed is not imported to know it."""
    return type(p).__name__ == "DTensor"


def plain(x: Any) -> bool:
    """Whether `x` is an ordinary tensor: no subclass (DTensor, FakeTensor, quantized)."""
    return type(x) is nn.Parameter or type(x) is Tensor


def only_by_operators(*grads: Tensor | None) -> bool:
    """In a backward: whether gradients of its results may be asked for, or it is given a batch of
    gradients at once (`is_grads_batched=True`, a vectorized Jacobian)."""
    if torch.is_grad_enabled():
        return True
    return any(g is not None and "Batched" in str(torch._C._dispatch_keys(g)) for g in grads)


def no_gradients(ctx: Any) -> tuple[None, ...]:
    """A backward's answer where what follows gives no gradient: none for any input.

    Zeros would not be the same: an optimizer leaves a parameter without a gradient alone, and
    decays the weights of one whose gradient is 0. So functions call
    `ctx.set_materialize_grads(False)`. As PyTorch's own nodes do, this asks for what was saved even
    so, which is an error where that was freed or written to.
    """
    _ = ctx.saved_tensors
    return (None,) * len(ctx.needs_input_grad)


def version(t: Tensor) -> int | None:
    """How often `t` was written to, as autograd counts, which refuses what was saved before; None
    for an inference tensor, which does not count."""
    return None if t.is_inference() else t._version


def is_dense(x: Tensor) -> bool:
    """Whether the memory of a tensor holds its values as they are: no sparse, MKL-DNN or nested
    one, and none that is read with another sign (`torch._neg_view`, views of such an `.imag`)."""
    return x.layout is torch.strided and not x.is_nested and not x.is_neg()


def misaligned(*tensors: Tensor | None) -> bool:
    """Whether a tensor begins at no multiple of its element's size, as `torch.frombuffer` makes
    them: kernels refuse such a one, PyTorch's operators on a CPU do not. Leaves ask where a
    kernel has refused a call, so that no other call pays for it."""
    try:
        return any(t is not None and t.data_ptr() % t.element_size() != 0 for t in tensors)
    except RuntimeError:  # a wrapper, as those of torch.func, has no address
        return False


def readable(x: Any) -> bool:
    """Whether a kernel of rows may be given what a module inside returned; its result is
    contiguous, and that of PyTorch's operators lies as their input does."""
    return plain(x) and is_dense(x) and x.is_contiguous() and x.dtype in KERNEL_DTYPES


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The one input of a call by position or by its name; None if the call is anything else."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and len(kwargs) == 1:
        return kwargs.get(name)
    return None


def input_name(module: nn.Module) -> str:
    """Name of the first parameter of the class's forward; "" where it has none."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None:
        return "x"
    by_name = code.co_argcount > 1 and code.co_posonlyargcount < 2
    return str(code.co_varnames[1]) if by_name else ""


def weight_dtype(layer: Any, otherwise: torch.dtype) -> torch.dtype:
    """dtype of a layer's weight, or `otherwise` where it has none, or a quantized one."""
    dtype = dtype_of_weight(layer)
    return dtype if dtype in KERNEL_DTYPES else otherwise


def dtype_of_weight(layer: Any) -> torch.dtype | None:
    """dtype of a layer's weight, or None where it has none.

    A parametrization is not run for that: it may write to buffers of its own, as spectral norm
    does in training. It gives what it is given, unless it was registered as `unsafe`.
    """
    held = None if layer is None else layer._modules.get("parametrizations")
    if held is not None and "weight" in held:
        made = held["weight"]
        if not made.unsafe and made.is_tensor:
            return made.original.dtype  # type: ignore[no-any-return]
    return getattr(getattr(layer, "weight", None), "dtype", None)


def floating_params(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None and t.is_floating_point()]


def supported(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype in KERNEL_DTYPES
