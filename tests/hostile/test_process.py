"""What of the process a kernel may not change: each change is noticed by name, and taken back.

The tests of wrong kernels ask `Process` whether anything changed; here it is asked by others.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.foreign import process
from hfpatch.foreign.process import Process

Read = Callable[[], Any]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _unheard(*_: Any) -> None:
    """Traces nothing."""


LIBC = ctypes.CDLL(None)
#: Name to (a change, how it is read without `Process`).
CHANGES: dict[str, tuple[Callable[[], Any], Read]] = {
    "the grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "the default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.empty(0).dtype,
    ),
    "the default device": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.empty(0).device,
    ),
    "the precision of matrix products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "cuDNN's deterministic switch": (
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "cuDNN's benchmark switch": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "whether cuDNN is used": (
        lambda: setattr(torch.backends.cudnn, "enabled", False),
        lambda: torch.backends.cudnn.enabled,
    ),
    "filling of new memory": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "the deterministic switch": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "the number of threads": (
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        torch.get_num_threads,
    ),
    "the flash attention switch": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "the math attention switch": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "the efficient attention switch": (
        lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
        torch.backends.cuda.mem_efficient_sdp_enabled,
    ),
    "autocast on cpu": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast's dtype on cpu": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast on cuda": (
        lambda: torch.set_autocast_enabled("cuda", True),
        lambda: torch.is_autocast_enabled("cuda"),
    ),
    "autocast's dtype on cuda": (
        lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
        lambda: torch.get_autocast_dtype("cuda"),
    ),
    "how often autocast is entered": (
        torch.autocast_increment_nesting,
        lambda: (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
    ),
    "anomaly detection": (
        lambda: torch.autograd.set_detect_anomaly(True),
        torch.is_anomaly_enabled,
    ),
    "flushing of denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: float(torch.tensor([2e-40]) * 0.5) == 0.0,
    ),
    "torch's random state": (lambda: torch.rand(1), lambda: torch.get_rng_state().tolist()),
    "Python's random state": (random.random, random.getstate),
    "NumPy's random state": (
        lambda: numpy.random.random(),
        lambda: numpy.random.get_state()[1].tolist() + list(numpy.random.get_state()[2:]),
    ),
    "the environment": (
        lambda: os.environ.update(HFPATCH_A_TEST="1", PATH="/nowhere"),
        lambda: (os.environ["PATH"], os.environ.get("HFPATCH_A_TEST")),
    ),
    "Python's garbage collection": (gc.disable, gc.isenabled),
    "the working directory": (lambda: os.chdir("/"), lambda: os.path.realpath(".")),
    "NumPy's handling of errors": (lambda: numpy.seterr(all="raise"), numpy.geterr),
    "hooks on what autograd saves": (
        lambda: torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "the threads of backwards": (
        lambda: torch._C._set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "the repetition of warnings": (
        lambda: torch.set_warn_always(True),
        torch.is_warn_always_enabled,
    ),
    "the level of logging": (
        lambda: logging.disable(logging.CRITICAL),
        lambda: logging.getLogger("any").isEnabledFor(logging.ERROR),
    ),
    "the filters of warnings": (
        lambda: warnings.simplefilter("error"),
        lambda: ("error", None, Warning, None, 0) in warnings.filters,
    ),
    "the tracing of Python": (lambda: sys.settrace(_unheard), sys.gettrace),
    "the profiling of Python": (lambda: sys.setprofile(_unheard), sys.getprofile),
    "how views are differentiated": (
        lambda: torch._C._set_view_replay_enabled(True),
        torch._C._is_view_replay_enabled,
    ),
    "autocast's cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "the level of forward-mode": (
        forward_ad.enter_dual_level,  # type: ignore[no-untyped-call]
        lambda: forward_ad._current_level,
    ),
    "the handlers of signals": (
        lambda: signal.signal(signal.SIGUSR2, lambda *_: None),
        lambda: signal.getsignal(signal.SIGUSR2),
    ),
    "the path of imports": (lambda: sys.path.insert(0, "/nowhere"), lambda: list(sys.path)),
    "how modules are converted": (
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        torch.__future__.get_swap_module_params_on_conversion,
    ),
    "the rounding of numbers": (lambda: LIBC.fesetround(0x400), LIBC.fegetround),
    "functions of PyTorch": (
        lambda: setattr(F, "silu", lambda x, inplace=False: 2 * x),
        lambda: F.silu,
    ),
    "modes that see operators": (
        lambda: _Mode().__enter__(),
        torch._C._len_torch_dispatch_stack,
    ),
    "hooks on all modules": (
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, a, y: y),
        lambda: len(torch.nn.modules.module._global_forward_hooks),
    ),
    "the fast path of attention layers": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        torch.backends.mha.get_fastpath_enabled,
    ),
    "whether NNPACK is used": (
        lambda: torch._C._set_nnpack_enabled(False),
        torch._C._get_nnpack_enabled,
    ),
    "the order of attention's kernels": (
        lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
        torch._C._get_sdp_priority_order,
    ),
    "the cuDNN attention switch": (
        lambda: torch.backends.cuda.enable_cudnn_sdp(False),
        torch.backends.cuda.cudnn_sdp_enabled,
    ),
    "whether oneDNN is used": (
        lambda: torch._C._set_mkldnn_enabled(False),
        torch._C._get_mkldnn_enabled,
    ),
}
#: What PyTorch changes along with it.
ALSO = {
    "the precision of matrix products": "the TF32 switch of matrix products",
    "the deterministic switch": "the environment",
}
#: Those that a machine without a GPU cannot change.
OF_A_GPU = {"the GPU's random state", "the current GPU", "the current stream"}
#: Switches that are one attribute each; PyTorch warns where its old and new names are mixed.
ATTRIBUTES = {name for name, _, _ in process._BACKENDS} - set(CHANGES)


@pytest.fixture
def given_back() -> Iterator[None]:
    before = [read() for _, read in CHANGES.values()]
    yield
    assert [read() for _, read in CHANGES.values()] == before


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_taken_back(name: str, given_back: None) -> None:
    change, read = CHANGES[name]
    before, state = read(), Process.now()
    assert state.changed() == []
    change()
    assert read() != before, "it is a change"
    assert {name} <= set(state.changed()) <= {name, ALSO.get(name)}
    assert read() == before
    assert state.changed() == []


def test_several_at_once(given_back: None) -> None:
    state = Process.now()
    names = ["the default dtype", "Python's random state", "the environment"]
    for name in names:
        CHANGES[name][0]()
    assert state.changed() == names
    assert state.changed() == []


def test_everything_that_is_watched_is_tried_here() -> None:
    assert {name for name, _, _ in process._ENTRIES} == {*CHANGES, *ATTRIBUTES, *OF_A_GPU}


def test_numpy_that_nobody_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(process.sys.modules, "numpy")
    state = Process.now()
    assert state.changed() == []
    assert "numpy" not in process.sys.modules


def test_how_warnings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, state = warnings.showwarning, Process.now()
    warnings.showwarning = print  # type: ignore[assignment]
    assert state.changed() == ["the filters of warnings"]
    assert warnings.showwarning is shown and state.changed() == []


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (torch.fft, "fft"),
        (torch.linalg, "norm"),
        (torch.special, "expit"),
        (torch.autograd, "grad"),
        (torch.nn.init, "normal_"),
    ],
)
def test_functions_of_pytorchs_other_modules(of: Any, name: str) -> None:
    function, state = getattr(of, name), Process.now()
    setattr(of, name, print)
    assert state.changed() == ["functions of PyTorch"]
    assert getattr(of, name) is function
