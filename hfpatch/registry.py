"""Class-name pattern to patch family: our own rows and the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hfpatch.kernels import sources
from hfpatch.leaves.custom import CustomFamily
from hfpatch.proof.keys import kept_while_planning
from hfpatch.proof.subject import Family, class_of


@dataclass(frozen=True, eq=False)  # rows that say the same are two all the same
class _Nomination:
    """A user's row: classes that match `pattern` are looked at by `family`."""

    pattern: re.Pattern[str]
    family: Family


_rows: list[_Nomination] = []


@dataclass(frozen=True)
class Registration:
    """What `register` added; `remove()` takes it back."""

    _undo: Callable[[], None]

    def remove(self) -> None:
        """Take the registration back. Models that were patched with it stay patched."""
        self._undo()


def register(
    class_name: str | None = None,
    *,
    family: str | None = None,
    forward: Callable[..., Any] | None = None,
    sample: Callable[[nn.Module], tuple[Any, ...]] | None = None,
    op: str | None = None,
    kernel: Callable[..., Tensor] | None = None,
    name: str | None = None,
    devices: str | Iterable[str] | None = None,
    differentiable: bool = False,
) -> Registration:
    """Teach hfpatch a class or a kernel. Three forms:

    - ``register("MyNorm", family="norm")``: modules whose class name matches the regular
      expression are nominated for a built-in family ("norm", "gated mlp", "activation"). The
      probe finds the
      formula.
    - ``register("MyBlock", forward=fn, sample=make_inputs)``: your own forward for a class.
      ``fn(module, *inputs)`` replaces the forward; ``make_inputs(module)`` returns a tuple of
      inputs on the module's device, on which `fn` is compared with the original before it is used.
    - ``register(op="rms_norm", kernel=fn, name="mine")``: a kernel (a plain function, a Triton
      launcher, a Hub kernel's function) for ``kernels={"rms_norm": "mine"}``. It is called with the
      signature of ``hfpatch.ops.OPS[op].reference`` and verified like every kernel.

    Args:
        class_name: regular expression, searched in the class name.
        family: the built-in family to nominate for.
        forward: the replacement, called as ``forward(module, *inputs)``.
        sample: makes the inputs for the comparison.
        op: the op a kernel is for.
        kernel: the function.
        name: the name by which ``kernels=`` finds the kernel.
        devices: device types the kernel has code for, ``"cuda"`` or ``("cpu", "cuda")``; default:
            any.
        differentiable: whether autograd works through the kernel or the forward, which
            ``mode="training"`` needs.

    Returns:
        a handle; ``.remove()`` undoes the registration.

    Raises:
        ValueError: an unknown op, family or device type, or arguments that belong to different
            forms.
        TypeError: `kernel` or `forward` is not callable, or `class_name`, `name` or `devices` are
            no strings.
    """
    if not isinstance(differentiable, bool):
        raise TypeError(f"`differentiable` must be a bool, got {differentiable!r:.60}")
    if op is not None or kernel is not None:
        others = (class_name, family, forward, sample)
        if op is None or kernel is None or name is None or any(o is not None for o in others):
            raise ValueError("a kernel is registered by `op=`, `kernel=` and `name=` together")
        if not isinstance(name, str):
            raise TypeError(f"`name` must be a str, got {name!r}")
        added = sources.register_kernel(op, kernel, name, _device_types(devices), differentiable)
        return Registration(lambda: sources.unregister_kernel(added))
    if class_name is None:
        raise ValueError("`register` needs a `class_name` pattern, or `op=` and `kernel=`")
    bare = getattr(class_name, "pattern", class_name)  # a compiled one may be of bytes
    if not isinstance(bare, str):
        raise TypeError(f"`class_name` must be a regular expression, a str, got {class_name!r}")
    try:
        pattern = re.compile(class_name)
    except re.error as e:
        raise ValueError(f"`class_name` {class_name!r} is not a regular expression: {e}") from e
    if name is not None or devices is not None:
        raise ValueError("`name=` and `devices=` belong to a kernel: give `op=` and `kernel=` too")
    if forward is not None:
        if family is not None:
            raise ValueError("give either `family=` or `forward=`, not both")
        if not callable(forward) or not callable(sample):
            raise TypeError(
                "`forward` and `sample` must both be callable: `sample(module)` returns the inputs "
                "on which `forward(module, *inputs)` is compared with the original"
            )
        row = _Nomination(pattern, CustomFamily(pattern, forward, sample, differentiable))
    else:
        if sample is not None:
            raise ValueError("`sample=` belongs to `forward=`: a family makes its own inputs")
        families = {f.name: f for f in own_families()}
        if not isinstance(family, str | None):
            raise TypeError(f"`family` must be a str, got {family!r}")
        if family not in families:
            raise ValueError(
                f"`family` must be one of {', '.join(map(repr, sorted(families)))}, got {family!r}"
            )
        row = _Nomination(pattern, families[family])
    _rows.append(row)
    return Registration(lambda: _rows.remove(row) if row in _rows else None)


def _device_types(devices: Any) -> frozenset[str] | None:
    if devices is None:
        return None
    listed = isinstance(devices, Iterable) and not isinstance(devices, str)
    types = tuple(devices) if listed else (devices,)
    for one in types:
        if not isinstance(one, str):
            raise TypeError(f"`devices` must be device types such as 'cuda', got {one!r}")
        if one not in ("cpu", "cuda", "xpu"):
            raise ValueError(
                f"`devices` must be of 'cpu', 'cuda' (which ROCm is too) and 'xpu', got {one!r}"
            )
    if not types:
        raise ValueError("`devices` is empty; None stands for any device")
    return frozenset(types)


def own_families() -> tuple[Family, ...]:
    """hfpatch's, in the order of their rank; imported here because there are many."""
    from hfpatch.planning.families import all_families

    return all_families()


def nominating(module: nn.Module) -> list[Family]:
    """Families that want to look at `module`: the user's rows first, then ours by rank."""
    from hfpatch.planning.families import named

    cls = class_of(module)
    known = kept_while_planning(nominating)
    if cls not in known:
        found = [r.family for r in _rows if r.pattern.search(cls.__name__)]
        found += [f for f in named(cls.__name__) if f.nominates(module)]
        known[cls] = list(dict.fromkeys(found))
    nominated: list[Family] = known[cls]
    return nominated
