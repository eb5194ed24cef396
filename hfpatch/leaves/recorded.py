"""Whether autograd may record something inside of a block, whose fused forward has no gradient.

A block calls its layers as they stand. What one of them gives may have a gradient although no
parameter and no argument has one: somebody's hook adds a vector that is trained, a weight is a
tensor that another network made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from hfpatch.proof.library import is_installed
from hfpatch.proof.unchanged import is_bound, is_hooked

#: Attributes of every module, which are looked at by themselves or hold no tensors.
_BLANK = frozenset(nn.Module().__dict__)
#: Packages whose modules hold what they compute with as parameters, buffers or attributes.
_KNOWN = frozenset({"diffusers", "hfpatch", "torch", "transformers"})
_PLAIN = frozenset({bool, float, int, str, type(None)})


def may_record(
    block: nn.Module, values: Iterable[Any], unheard: Callable[[nn.Module], bool] | None = None
) -> bool:
    """Whether autograd may record a call of `block` with these arguments, where it is enabled.

    Beside tensors that require gradients: somebody's hook, forward or code inside, which may bring
    some in. What is on the block itself runs before and after it.

    Args:
        unheard: whether all hooks on a module are such as change nothing.
    """
    if any(map(_requires_grad, values)):
        return True
    modules = [block]
    for module in modules:  # it is asked at each call: few calls of functions
        d = module.__dict__
        for t in d["_parameters"].values():
            if t is not None and t.requires_grad:
                return True
        for t in d["_buffers"].values():
            if t is not None and t.requires_grad:
                return True
        if module is not block:
            if "forward" in d and not is_bound(module, d["forward"]):
                return True
            if is_hooked(module) and (unheard is None or not unheard(module)):
                return True
            for name in d.keys() - _BLANK:
                held = d[name]
                if type(held) not in _PLAIN and _requires_grad(held):
                    return True
            cls = type(module)
            if cls.__module__.partition(".")[0] not in _KNOWN and not is_installed(cls.forward):
                return True
        if children := d["_modules"]:
            modules += [m for m in children.values() if m is not None]
    return False


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, Tensor) and v.requires_grad for v in value)
    if isinstance(value, dict):
        return any(isinstance(v, Tensor) and v.requires_grad for v in value.values())
    return False
