"""A machine that is not this one, for a plan without it: `hfpatch.plan(model, device="cuda:9.0")`.

Nothing can be run there, so what is proven is proven on the CPU here, by the same formulas; the
plan says that it is not proven on the machine that it is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_DEVICE = re.compile(r"(cpu|cuda)(?::(\d{1,2})\.(\d))?", re.ASCII)
#: The lowest compute capability that the kernels are built for.
LEAST = (7, 5)


@dataclass(frozen=True)
class Elsewhere:
    """A machine with such a device; `capability` None: any that the kernels are built for."""

    type: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.type + ("" if self.capability is None else ":{}.{}".format(*self.capability))

    def lacks(self) -> str | None:
        """Why the kernels cannot run there, or None."""
        if self.capability is None or self.capability >= LEAST:
            return None
        return (
            f"the kernels are built for compute capability {LEAST[0]}.{LEAST[1]} and up, "
            f"not for `{self}`"
        )

    def note(self, compiled: bool) -> str:
        """What the plan says of itself; `compiled`: whether there are kernels for the CPU here."""
        by = "compared with the kernels' CPU code" if compiled else "identified"
        return (
            f"planned for `{self}`, and not proven there: this machine has no such device. "
            f"Formulas were {by} on the CPU here; `apply` proves each kernel where it will run"
        )


def parse_device(device: Any) -> Elsewhere | None:
    """`device=` of `plan`: "cpu", "cuda", or a GPU by its compute capability, "cuda:9.0".

    Raises:
        TypeError, ValueError: it is something else.
    """
    if device is None:
        return None
    if isinstance(device, torch.device):
        device = device.type
    if not isinstance(device, str):
        raise TypeError(f"`device` must be a str such as 'cuda:9.0', got {type(device).__name__}")
    match = _DEVICE.fullmatch(device)
    if match is None or (match[1] == "cpu" and match[2]):
        raise ValueError(
            "`device` must be 'cpu', 'cuda' or a GPU by its compute capability such as 'cuda:9.0', "
            f"got {device!r}"
        )
    return Elsewhere(match[1], (int(match[2]), int(match[3])) if match[2] else None)


def is_here(planned: Elsewhere) -> bool:
    """Whether this machine is such a one, so that kernels can be proven on it."""
    if planned.type == "cpu":
        return True
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return planned.capability in (None, torch.cuda.get_device_capability())


def as_one_operator(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A formula that counts as the one launch that its kernel would be (`OperatorCounter`)."""

    def fn(*tensors: Any, **params: Any) -> Any:
        with _disable_current_modes():
            found = reference(*tensors, **params)
        if isinstance(found, tuple):
            return (found[0].clone(), *found[1:])
        return found.clone()

    return fn
