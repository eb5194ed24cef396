"""A patched norm's call past `Module._call_impl`, which takes a quarter of it on the host.

`Module.__call__` calls an instance's `_compiled_call_impl` where it has one. A norm is given one
that does in C what `_call_impl` does for a module without hooks, and calls `_call_impl` otherwise.
`torch.compile` goes through it to the forward; pickles and copies of a module do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

#: The attribute's name.
DIRECT = "_compiled_call_impl"
_MARK = "__hfpatch_direct__"
#: Of (a module's new forward, bound; its adapter): the method to put there; None where that would
#: take no call.
Direct = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any] | None]


def direct_call(
    call: Callable[..., Any], quick: list[Any], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The method to put there.

    Args:
        call: what `calls.direct` of the kernels' package returns.
        quick: a list of what takes a call of the norm, or None.
        forward: the adapter, bound, as it stands on the instance.
    """

    def direct(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            y = call(quick, forward, self, args, kwargs)
            if y is not NotImplemented:
                return y
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    setattr(direct, _MARK, direct)
    return direct


def is_direct(value: Any) -> bool:
    """Whether it is such a method, and not what `Module.compile` puts there."""
    function = getattr(value, "__func__", None)
    return function is not None and getattr(function, _MARK, None) is function


def has_own_call(attributes: dict[str, Any]) -> bool:
    """Whether a module with this `__dict__` is called by something else than its class and us:
    `Module.compile` put it there, or somebody."""
    call = attributes.get(DIRECT)
    return "_call_impl" in attributes or not (call is None or is_direct(call))
