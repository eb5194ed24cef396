"""Calls of kernels and of fused decoder layers by the models of a test run, for its plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Calls:
    """Counts from its construction on, in the whole process.

    Attributes:
        kernels: calls of kernels in the place of single modules.
        layers: calls of decoder layers in training that were served.
        paused: while True, as while models are proven, nothing is counted.
    """

    def __init__(self) -> None:
        from hfpatch.kernels.sources import Kernel
        from hfpatch.training.layer import Runner

        self.kernels = self.layers = 0
        self.paused = False
        Kernel.bind = self._kernel(Kernel.bind)  # type: ignore[method-assign]
        Runner.__call__ = self._layer(Runner.__call__)  # type: ignore[method-assign]

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _kernel(self, bind: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        """`Kernel.bind` whose results count their calls."""

        @functools.wraps(bind)
        def wrapped(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = bind(*args, **kwargs)

            def count(*tensors: Any) -> Any:
                self.kernels += not self.paused
                return call(*tensors)

            return count

        return wrapped

    def _layer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`Runner.__call__` that counts where it gives a result."""

        @functools.wraps(call)
        def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(runner, *args, **kwargs)
            self.layers += not self.paused and result is not None
            return result

        return wrapped
