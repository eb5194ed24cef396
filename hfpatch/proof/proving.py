"""One proof at a time in the process, and what it changes of the process."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from hfpatch import forks
from hfpatch.foreign.process import matmul_precision
from hfpatch.proof.saved import kept_as_they_are, saving_is_watched

# The default dtype, the filters of warnings and the random state are the process's. Reentrant: what
# is proven may call a module that makes a proof of its own.
_lock = forks.lock(waits=True)
_under_way: set[Hashable] = set()


@contextmanager
def may_prove(what: Hashable) -> Iterator[bool]:
    """Whether this thread may prove `what` now; it waits while another one makes a proof.

    Not in a backward: a proof of gradients itself waits for autograd's thread of the device, which
    this may be. And not inside of the proof of `what`, which calls it.
    """
    if not _lock.acquire(blocking=torch._C._current_graph_task_id() == -1):
        yield False
        return
    try:
        if what in _under_way:
            yield False
            return
        _under_way.add(what)
        try:
            yield True
        finally:
            _under_way.remove(what)
    finally:
        _lock.release()


@contextmanager
def float32_default() -> Iterator[None]:
    """PyTorch's own default dtype, whatever the user's is: what is drawn and built has no other.
    Afterwards the process is as it was, whatever a module that was called did to it.

    Every proof is made in it, so it is what makes them wait for each other.
    """
    with _lock, _undisturbed():
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts back random states, default dtype, whether gradients are recorded, deterministic
    algorithms, and the precision of matrix products."""
    numpy = sys.modules.get("numpy")
    drawn, drawn_by_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = matmul_precision()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if initialized else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(drawn)
            if numpy is not None:
                numpy.random.set_state(drawn_by_numpy)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            if (
                torch.are_deterministic_algorithms_enabled() != deterministic
                or torch.is_deterministic_algorithms_warn_only_enabled() != warns
            ):
                torch.use_deterministic_algorithms(deterministic, warn_only=warns)
            if precision is not None and matmul_precision() != precision:
                torch.set_float32_matmul_precision(precision)


@contextmanager
def cpu_default() -> Iterator[None]:
    """What is drawn and built without a device is on the CPU, whatever the user's default is.

    Where it is the CPU already nothing is entered: the context of a device is a Python function
    that PyTorch calls before each operator, which would be a third of a proof's time.
    """
    if _len_torch_function_stack() == 0 and torch.empty(0).device.type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operators compute in the calling thread alone.

    Those of small models are done sooner than other threads are woken, and on a machine whose
    processors are busy each of them would wait for a thread that is not running: 19 s in place of
    1.6 for a model of text beside three other programs on two cores. Not for kernels: what they do
    with several threads is part of their proof.
    """
    before = torch.get_num_threads()
    # another pool of threads takes a number once, and then warns
    if before == 1 or not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:  # else a model's own code has chosen another
            torch.set_num_threads(before)


@contextmanager
def outside_modes() -> Iterator[None]:
    """A plan is of the model as it is, whatever its caller is inside of: `torch.inference_mode`,
    `FakeTensorMode`, autocast, `torch.device("meta")`."""
    with ExitStack() as modes:
        if torch._C._len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(cpu_default())
        yield


@contextmanager
def quietly(device: str) -> Iterator[None]:
    """Nothing that the caller's thread is in the middle of takes part in a proof: a late one is
    made in a call, under autocast, in inference mode, or inside of a checkpoint."""
    with ExitStack() as modes:
        if torch._C._len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        modes.enter_context(_by_itself(device))
        modes.enter_context(_unheard())
        modes.enter_context(_uncached())
        if saving_is_watched():
            modes.enter_context(kept_as_they_are())
        yield


@contextmanager
def _unheard() -> Iterator[None]:
    """transformers' hooks that note router logits and attentions for a caller, which stay on the
    parts that a proof calls as they are, note nothing."""
    home: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(home, "_active_collector", None)
    if collector is None or collector.get() is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


class _KeepsNothing(dict[Any, Any]):
    """What `parametrize.cached()` writes to while a proof is made."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextmanager
def _uncached() -> Iterator[None]:
    """Inside of the caller's `parametrize.cached()` a weight that a proof's calls make is not kept:
    it has no data where a call is captured, and belongs to a copy elsewhere. Nor is one taken that
    was kept before."""
    if not parametrize._cache_enabled:
        yield
        return
    kept, ours = parametrize._cache, _KeepsNothing()
    parametrize._cache = ours
    try:
        yield
    finally:
        if parametrize._cache is ours:  # else another thread's context has ended, and cleared it
            parametrize._cache = kept


@contextmanager
def _by_itself(device: str) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device, enabled=False),
        cpu_default(),
        float32_default(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of the original, about dtypes that the model never uses
        yield
