"""What a patch family is, and what every adapter shares.

A family nominates modules by class name, proposes formulas, and knows how to call a kernel in a
module's place. It decides nothing: `hfpatch.probe` runs the original against each formula.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad as _forward_ad

from hfpatch.ops import KERNEL_DTYPES
from hfpatch.patches.keys import BLANK_NAMES, OWNED_BY_WRAPPERS, class_values, names_read
from hfpatch.sources import Kernel

Tensor = torch.Tensor
#: Called with the module and its inputs, in the module's place.
Forward = Callable[..., Any]


class Formula:
    """A candidate: an op and its parameters. Hashable by value."""

    def __init__(self, op: str, params: Mapping[str, Any]) -> None:
        self.op = op
        self.params = dict(params)
        self._key = (op, tuple(sorted(self.params.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        values = ", ".join(
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.params.items()
        )
        return f"{self.op}({values})"


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

    def run(self, module: nn.Module, x: Tensor) -> Any:
        """The class's own forward on what `inputs` made."""
        return type(module).forward(module, x)

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


_proving = threading.Lock()  # held by who makes a proof under autocast


class Contract:
    """Which calls an adapter may take, and what it does for them: (device, dtypes) -> entry.

    One contract serves every module of equal class, settings and source. What was not proven when
    the model was patched (a device while its weights were still on the CPU, a block's other dtypes)
    is proven at its first call.
    """

    def __init__(
        self,
        name: str,
        prove: Callable[[str, torch.dtype], str | None],
        training: bool,
        *,
        by_dtype: bool = False,
        prove_autocast: Callable[[str, Combo, bool], Any] | None = None,
    ) -> None:
        """`prove(device, dtype)` fills the table of a device, with `by_dtype` for one dtype alone,
        and returns why it cannot. `prove_autocast(device, combo, recorded)` returns the entry of
        one combination under autocast, `recorded` if also its gradients are right, or why there is
        none."""
        self.name = name
        self.training = training
        self.cpu: dict[Any, Forward] = {}
        self.cuda: dict[Any, Forward] = {}
        self._prove = prove
        self._by_dtype = by_dtype
        self._prove_autocast = prove_autocast
        #: Under autocast: device, autocast's dtype, whether autograd may record, and the dtypes of
        #: the call -> the entry, or None for the original.
        self._autocast: dict[tuple[str, torch.dtype, bool, Any], Any] = {}
        #: What `notes` says of these.
        self._outcomes: dict[str, None] = {}
        #: Device, and dtype where proofs are by dtype: why it cannot be served, or None.
        self._proven: dict[tuple[str, torch.dtype | None], str | None] = {}
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def table(self, device: str) -> dict[Any, Forward]:
        return self.cpu if device == "cpu" else self.cuda

    def proven(self, device: str, dtype: torch.dtype | None = None) -> None:
        self._proven[device, dtype if self._by_dtype else None] = None

    def late(self, x: Tensor, key: Any) -> Any:
        """Slow path of a call that the tables do not know: prove it, or warn once."""
        device = x.device.type
        unit = (device, x.dtype if self._by_dtype else None)
        if device in ("cpu", "cuda") and unit not in self._proven:
            if device == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            with self._lock:
                if unit not in self._proven:
                    try:
                        self._proven[unit] = self._prove(device, x.dtype)
                    except torch.OutOfMemoryError:
                        self._warn_once(
                            f"{self.name}: there was no memory to prove its kernel on {device}; "
                            "the call uses the original forward, and the next one tries again"
                        )
                        return None
            found = self.table(device).get(key)
            if found is not None:
                return found
        why = self._proven.get(unit) or _unproven(key)
        self._warn_once(
            f"{self.name} was called with {_describe(key)} on {device}; such calls use the "
            f"original forward: {why}"
        )
        return None

    def needs_grad(self) -> None:
        """Say once why a call that autograd records is not taken."""
        if "grad" not in self._warned:
            self._warned.add("grad")
            self._warn_once(
                f"{self.name} was called where autograd records and `mode` is 'inference'; such "
                "calls use the original forward. Use torch.no_grad() or mode='training'"
            )

    def under_autocast(self, x: Tensor, key: Any, recorded: bool = False) -> Any:
        """The entry for a call under autocast, which decides the dtype of each operator in the
        original and so makes it another function; None for the original.

        Args:
            x: the input.
            key: the dtypes of the call, as in the tables.
            recorded: whether autograd may record, so that gradients must be right too.
        """
        if not (x.is_cuda or x.is_cpu):
            return None
        device = "cuda" if x.is_cuda else "cpu"
        unit = (device, torch.get_autocast_dtype(device), recorded, key)
        try:
            return self._autocast[unit]
        except KeyError:
            return self._late_autocast(*unit)

    def _late_autocast(self, device: str, dtype: torch.dtype, recorded: bool, key: Any) -> Any:
        """Prove one combination under autocast, or warn once."""
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        unit, combo = (device, dtype, recorded, key), Combo(key[0], key[1], dtype)
        if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            if "hooks" not in self._warned:
                self._warned.add("hooks")
                self._warn_once(
                    f"{self.name} was called under autocast while hooks on all modules are "
                    "registered (FlopCounterMode, `register_module_forward_hook`), which would see "
                    f"the modules of its proof; until they are removed calls with {combo} use the "
                    "original forward"
                )
            return None
        entry: Any = _unproven((*key, dtype))
        if all(map(supported, (*key, dtype))) and self._prove_autocast is not None:
            # One at a time, since the default dtype and the filters of warnings are the process's.
            # Nobody waits: a proof of gradients itself waits for autograd's thread of the device,
            # which may be here for somebody's backward. Others call the original meanwhile.
            if not _proving.acquire(blocking=False):
                return None
            try:
                entry = self._prove_autocast(device, combo, recorded)
            except torch.OutOfMemoryError:
                entry = None
            finally:
                _proving.release()
        if entry is not None:
            self._autocast[unit] = None if isinstance(entry, str) else entry
        called = f"{combo} on {device}{' where autograd records' if recorded else ''}"
        if entry is None:
            self._warn_once(
                f"{self.name}: there was no memory to prove its kernel with {called}; the call "
                "uses the original forward, and the next one tries again"
            )
        elif isinstance(entry, str):
            self._outcomes[f"`{self.name}` with {called}: the original, since {entry}"] = None
            self._warn_once(
                f"{self.name} was called with {called}; such calls use the original forward: "
                f"{entry}"
            )
        else:
            self._outcomes[f"`{self.name}` with {called}: the kernel"] = None
            return entry
        return None

    def not_under_autocast(self) -> None:
        """Say once that a block, which is proven as a whole, is not fused under autocast."""
        if "autocast" not in self._warned:
            self._warned.add("autocast")
            self._outcomes[f"`{self.name}` under autocast: the original, not fused"] = None
            self._warn_once(
                f"{self.name} was called under autocast, which decides the dtype of each operator "
                "in it; such calls use the original forward, not the fused block. Load the model "
                "in bf16 (`dtype=torch.bfloat16`) and call it without autocast"
            )

    def notes(self) -> list[str]:
        """For `status`: what calls under autocast were computed by."""
        return list(self._outcomes)

    def two_dtypes(self, x: Tensor, gate: Tensor) -> None:
        """Say once that an input and its gate must have one dtype, which autocast may change."""
        if "two dtypes" not in self._warned:
            self._warned.add("two dtypes")
            ours, other = (str(t.dtype).removeprefix("torch.") for t in (x, gate))
            what = f"{ours} input and a {other} gate"
            self._outcomes[f"`{self.name}` with {what}: the original"] = None
            self._warn_once(
                f"{self.name} was called with {what}, as autocast makes them; such calls use the "
                "original forward: its kernel takes one dtype"
            )

    def changed(self) -> None:
        """Say once that a module is not as it was proven."""
        if "changed" not in self._warned:
            self._warned.add("changed")
            self._warn_once(
                f"{self.name} got other settings, or hooks, processors, forwards, parameters or "
                "modules inside, after it was patched; such calls use the original forward. Call "
                "`hfpatch.apply` again: it, or its parts, are patched then"
            )

    def partitioned(self, parameter: str) -> None:
        """Say once why a call with a parameter that is partly elsewhere is not taken."""
        if "partitioned" not in self._warned:
            self._warned.add("partitioned")
            self._warn_once(
                f"{self.name}: `{parameter}` is partitioned over several processes; such calls use "
                "the original forward"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"hfpatch: {message}", RuntimeWarning, stacklevel=5)


def _describe(key: Any) -> str:
    return str(Combo(*key)) if isinstance(key, tuple) else str(key)


def _unproven(key: Any) -> str:
    """Why the tables have no entry for dtypes, where nothing failed."""
    without = [t for t in key if not supported(t)] if isinstance(key, tuple) else []
    if without:
        names = ", ".join(str(t).removeprefix("torch.") for t in KERNEL_DTYPES)
        return f"there is no kernel for {str(without[0]).removeprefix('torch.')}, only for {names}"
    return "its kernel was not proven for that"


_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state


def watched() -> bool:
    """Whether something looks on that kernels take no part in: forward-mode derivatives, a
    transform of `torch.func`, `torch.jit.trace`, whose graphs must load without hfpatch."""
    return _forward_ad._current_level >= 0 or _transforming() or _tracing() is not None


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class as it was written: `fully_shard` puts one of its own before it.

    That is made at run time, `FSDP` and the name, of FSDP's and the module's own class.
    """
    cls = type(module)
    bases = cls.__bases__
    if len(bases) == 2 and bases[0].__module__.startswith("torch.distributed."):
        return bases[1]
    return cls


@contextmanager
def float32_default() -> Iterator[None]:
    """PyTorch's own default dtype, whatever the user's is: what is drawn and built has no other."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_dtensor(p: Tensor) -> bool:
    """Whether `p` is spread over a mesh; torch.distributed is not imported to know it."""
    return type(p).__name__ == "DTensor"


def plain(x: Any) -> bool:
    """Whether `x` is an ordinary tensor: no subclass (DTensor, FakeTensor, quantized)."""
    return type(x) is nn.Parameter or type(x) is Tensor


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The one input of a call by position or by its name; None if the call is anything else."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and len(kwargs) == 1:
        return kwargs.get(name)
    return None


def input_name(module: nn.Module) -> str:
    """Name of the first parameter of the class's forward."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or code.co_argcount < 2:
        return "x"
    return str(code.co_varnames[1])


def is_hooked(module: nn.Module) -> bool:
    """Whether calling `module` would run somebody's hook."""
    d = module.__dict__
    return bool(
        d.get("_forward_hooks")
        or d.get("_forward_pre_hooks")
        or d.get("_backward_hooks")
        or d.get("_backward_pre_hooks")
        or "_hf_hook" in d
        or has_diffusers_hook(d)
    )


def has_diffusers_hook(attributes: dict[str, Any]) -> bool:
    """Whether one of diffusers' hooks is on the module: their registry stays when they go."""
    registry = attributes.get("_diffusers_hook")
    return registry is not None and bool(registry.hooks)


def weight_dtype(layer: Any, otherwise: torch.dtype) -> torch.dtype:
    """dtype of a layer's weight, or `otherwise` where it has none, or a quantized one."""
    dtype = getattr(getattr(layer, "weight", None), "dtype", None)
    return dtype if dtype in KERNEL_DTYPES else otherwise


def floating_params(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None and t.is_floating_point()]


#: Values that a forward may read off its module as settings.
_PLAIN = (int, float, bool, str, type(None), torch.dtype)
#: What a forward may call that it reads off its module: a deep copy has the very same.
_CALLED = (types.FunctionType, types.BuiltinFunctionType, type)


def settings_of(module: nn.Module) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    """What reads a module's settings off its `__dict__`, and what it reads now.

    Settings are the plain attributes and functions that somebody may set while the module is
    patched, such as `eps`: what was bound to their values is no longer right when they differ. A
    name that begins with `_` is one if the class's code has it: others put marks on modules.
    """
    named = names_read(module)
    names = [
        k
        for k, v in module.__dict__.items()
        if k not in BLANK_NAMES
        and k not in OWNED_BY_WRAPPERS
        and (k in named or not k.startswith("_"))
        and _is_setting(v)
    ]
    inherited = {k for k, v in class_values(module).items() if k in named and _is_setting(v)}
    read = operator.itemgetter(*names) if names else _no_settings
    found: Any = read(module.__dict__)
    settings = tuple(map(_held, found)) if len(names) > 1 else _held(found)
    if not inherited:
        return read, settings
    cls, others = type(module), tuple(sorted(inherited))

    def read_both(attributes: dict[str, Any]) -> Any:
        """Also what an instance has of its class, until it is given one of its own."""
        return read(attributes), *(
            attributes[n] if n in attributes else getattr(cls, n, None) for n in others
        )

    return read_both, (settings, *map(_held, read_both(module.__dict__)[1:]))


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):  # not of tensors, which have no one answer to ==
        return all(isinstance(v, _PLAIN) for v in value)
    if isinstance(value, functools.partial):
        return all(isinstance(v, _PLAIN) for v in (*value.args, *value.keywords.values()))
    return isinstance(value, (*_PLAIN, *_CALLED, types.MethodType))


def _no_settings(attributes: dict[str, Any]) -> None:
    return None


def _held(value: Any) -> Any:
    """What a setting is compared with: these are made anew where a module is copied."""
    return _Held(value) if isinstance(value, (functools.partial, types.MethodType)) else value


class _Held:
    """Equal to a function with arguments, or a method of whatever object, that is as this one.

    It holds no object of a method: an adapter is shared by copies of its module.
    """

    __slots__ = ("_parts", "_same")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._same = value if type(value) is functools.partial else self
        self._parts = _parts(value)

    def __eq__(self, other: object) -> bool:
        return other is self._same or bool(_parts(other) == self._parts)


def _parts(value: Any) -> Any:
    if type(value) is types.MethodType:
        return value.__func__
    if type(value) is functools.partial:
        return value.func, value.args, value.keywords
    return None


class Part:
    """A module that a fused forward stands in for and never calls: class, forward and settings."""

    def __init__(self, module: nn.Module, path: tuple[str, ...] = ()) -> None:
        self._path, self._class = path, type(module)
        self._read, self._settings = settings_of(module)

    def is_same(self, root: nn.Module) -> bool:
        """Whether the module at this path below `root` is as it was, and nobody's hook is on it."""
        module: nn.Module | None = root
        for name in self._path:
            if module is None:
                return False
            module = module._modules.get(name)
        if module is None or type(module) is not self._class or is_replaced(module):
            return False
        return bool(self._read(module.__dict__) == self._settings)


def is_replaced(module: nn.Module) -> bool:
    """Whether calling `module` runs more or else than its class's forward: a hook's, an own one."""
    forward = module.__dict__.get("forward")
    return (forward is not None and not _is_bound(module, forward)) or is_hooked(module)


def _is_bound(module: nn.Module, forward: Any) -> bool:
    """Whether an instance's forward is its class's, as hooks leave it when they go, or ours."""
    function = getattr(forward, "__func__", None)
    ours = getattr(getattr(function, "__hfpatch__", None), "adapter", None)
    return getattr(forward, "__self__", None) is module and (
        function is type(module).forward or (ours is not None and ours is function)
    )


def replicate(module: nn.Module, children: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy that shares no tensor, hook or instance forward with `module`.

    Parameters and buffers are left out for the caller to fill; `children` replaces child modules,
    others are copied too, with the tensors that they have (most activations have none).
    """
    copy = object.__new__(type(module))
    blank = nn.Module().__dict__
    state = {
        k: _bound_to(copy, v, module)
        for k, v in module.__dict__.items()
        if k not in blank and k not in OWNED_BY_WRAPPERS
    }
    given = children or {}
    others = {n: _twin(c) for n, c in module._modules.items() if n not in given}
    copy.__dict__.update(blank)
    copy.__dict__.update(state)
    copy.__dict__["training"] = False
    copy.__dict__["_modules"] = {**dict.fromkeys(module._modules), **others, **given}
    return copy


def _bound_to(copy: nn.Module, value: Any, module: nn.Module) -> Any:
    """A method of `module` that it holds, as the copy's: it would compute with the first one's."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, copy)
    return value


def _twin(module: nn.Module | None) -> nn.Module | None:
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return module
    copy = replicate(module)
    # dicts of its own: the probe puts fp64 tensors into them
    copy.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
    return copy


def random_like(
    t: Tensor, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A random stand-in for a norm's parameter, far enough from 0 and 1 to tell `w` from `1+w`."""
    values = 1.0 + 0.5 * torch.randn(t.shape, generator=generator)
    return values.to(device, dtype)


def random_linear(
    n_in: int,
    n_out: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> nn.Linear:
    """A linear layer for a replica."""
    # skip_init: the constructor's own draws would advance the user's random state
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, n_in, n_out, bias=bias, device="cpu"
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * n_in**-0.5)
    return layer.to(device, dtype).requires_grad_(False)


def supported(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype in KERNEL_DTYPES
