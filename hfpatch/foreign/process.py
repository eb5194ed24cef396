"""What a kernel may not change of the process: modes, defaults, switches, random state."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import operator
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._device
from torch import overrides
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils import _python_dispatch

from hfpatch.proof.keys import content_of_cell

_modes_of_functions: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_pop_mode: Callable[[], Any] = overrides._pop_mode
_push_mode: Callable[[Any], None] = overrides._push_mode
_modes_of_operators: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
_on_gpu: Callable[[], bool] = torch.cuda.is_initialized

_MISSING = object()


def _default_device() -> Any:
    """With the modes that functions pass through, among which the default device is one."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context, torch.utils._device.CURRENT_DEVICE, tuple(_modes_of_functions())


def _restore_default_device(state: Any) -> None:
    # not by `torch.set_default_device`, which takes away contexts that were entered before
    context, device, modes = state
    for _ in range(len(_modes_of_functions())):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context
    torch.utils._device.CURRENT_DEVICE = device


def _restore_dispatch_modes(modes: tuple[Any, ...]) -> None:
    for _ in range(len(_modes_of_operators())):
        _python_dispatch._pop_mode()
    for mode in modes:
        _python_dispatch._push_mode(mode)


def _flushes_denormals() -> bool:
    return float(torch.tensor([1e-40]).mul_(1.0)) == 0.0


def _set_numpy(state: Any) -> None:
    sys.modules["numpy"].random.set_state(state)


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), *rest)


def _restore_numpy(state: Any) -> None:
    if state is not None:
        numpy: Any = sys.modules["numpy"]
        name, keys, *rest = state
        _set_numpy((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _restore_numpy_errors(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].seterr(**state)


def _saving() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _restore_saving(state: Any) -> None:
    while (held := _saving()) is not None and held != state:
        torch._C._autograd._pop_saved_tensors_default_hooks()


#: What begins the variables that torch keeps there for its own compiler.
_OF_INDUCTOR = "_TORCHINDUCTOR_"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_OF_INDUCTOR)}


def _restore_environment(values: dict[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _cuda_rng() -> Any:
    return torch.cuda.get_rng_state().tolist() if _on_gpu() else None


def _restore_cuda_rng(state: Any) -> None:
    if state is not None:
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


def _cuda_device() -> Any:
    return torch.cuda.current_device() if _on_gpu() else None


def _restore_cuda_device(index: Any) -> None:
    if index is not None:
        torch.cuda.set_device(index)


def _cuda_stream() -> Any:
    return torch.cuda.current_stream() if _on_gpu() else None


def _restore_cuda_stream(stream: Any) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(device: str) -> list[_Entry]:
    return [
        (
            f"autocast on {device}",
            lambda: torch.is_autocast_enabled(device),
            lambda v: torch.set_autocast_enabled(device, v),
        ),
        (
            f"autocast's dtype on {device}",
            lambda: torch.get_autocast_dtype(device),
            lambda v: torch.set_autocast_dtype(device, v),
        ),
    ]


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _restore_autocast_nesting(depth: int) -> None:
    """At none its cache of weights is cleared: else weights would be stale for as long as the
    process lives."""
    while (now := _autocast_nesting()) != depth:
        if now < depth:
            torch.autocast_increment_nesting()
        elif torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _restore_forward_level(level: int) -> None:
    while forward_ad._current_level > level:
        forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


def _is_of_an_import(modules: int, before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether a list is as it was, or has more since a library was imported that the function
    needs: some add folders."""
    rest = iter(now)
    return before == now or (len(sys.modules) > modules and all(one in rest for one in before))


_SIGNALS = sorted(s for s in signal.valid_signals() if isinstance(s, signal.Signals))


def _handlers() -> Any:
    if threading.current_thread() is not threading.main_thread():  # where nobody can set one
        return None
    return tuple(map(signal.getsignal, _SIGNALS))


def _restore_handlers(handlers: Any) -> None:
    for number, now, before in zip(_SIGNALS, _handlers(), handlers, strict=True):
        if now is not before and before is not None:  # None: not set by Python
            signal.signal(number, before)


def _restore_conversion(state: tuple[bool, bool]) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(state[0])
    torch.__future__.set_swap_module_params_on_conversion(state[1])


def _import_path() -> Any:
    return len(sys.modules), tuple(sys.path)


def _restore_import_path(state: tuple[int, tuple[str, ...]]) -> bool:
    modules, path = state
    if _is_of_an_import(modules, path, tuple(sys.path)):
        return False
    sys.path[:] = path
    return True


def _filters_of_warnings() -> Any:
    return len(sys.modules), tuple(warnings.filters), warnings.showwarning


def _restore_filters_of_warnings(state: Any) -> bool:
    """Libraries add some as they are imported."""
    modules, filters, show = state
    same = warnings.showwarning is show
    warnings.showwarning = show
    if _is_of_an_import(modules, filters, tuple(warnings.filters)):
        return not same
    warnings.resetwarnings()  # which tells what Python keeps of the filters
    warnings.filters.extend(filters)  # type: ignore[attr-defined]
    return True


def _torch_rng() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _restore_torch_rng(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _rounding() -> int:
    return int(_libc().fegetround())


def _restore_rounding(mode: int) -> None:
    _libc().fesetround(mode)


def _layers() -> list[type]:
    """PyTorch's layers that have a forward of their own."""
    found = [v for v in vars(torch.nn).values() if isinstance(v, type) and "forward" in vars(v)]
    return [
        v for v in dict.fromkeys(found) if v is not torch.nn.Module and v is not torch.nn.Linear
    ]


#: PyTorch's functions, by where code finds them.
_FUNCTIONS: list[tuple[Any, list[str]]] = [
    *(
        (
            of,
            [
                name
                for name, value in vars(of).items()
                if isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
            ],
        )
        for of in (
            *(torch, functional, torch.Tensor, torch.nn.Module, torch.nn.Linear),
            *(torch.linalg, torch.fft, torch.special, torch.nn.init, torch.autograd),
        )
    ),
    *((of, ["forward"]) for of in _layers()),
]
#: The same, read at once: it is done hundreds of times for a kernel, and they are 1,400.
_READ = [(of, operator.itemgetter(*names)) for of, names in _FUNCTIONS if names[1:]]
_READ_ONE = [(of, names[0]) for of, names in _FUNCTIONS if not names[1:]]


def _functions() -> Any:
    try:
        several = [read(vars(of)) for of, read in _READ]
        return (*several, *[(vars(of)[name],) for of, name in _READ_ONE])
    except KeyError:  # one was deleted
        return tuple([tuple(map(vars(of).get, names)) for of, names in _FUNCTIONS])


def _restore_functions(values: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether one was another function; those that torch wrapped, as at its first compilation in a
    process, stay so."""
    others = False
    for (of, names), of_one in zip(_FUNCTIONS, values, strict=True):
        for name, value in zip(names, of_one, strict=True):
            now = vars(of).get(name)
            if now is not value and not wrapped_by_torch(now, value):
                setattr(of, name, value)
                others = True
    return others


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"  # not torchao's


def wrapped_by_torch(value: Any, before: Any) -> bool:
    """Whether a function is one of torch's around the one that was there; what decides is where its
    code lies and that it holds that one, whatever name it gives itself."""
    code = getattr(value, "__code__", None)
    if code is None or not code.co_filename.startswith(_TORCH):
        return False
    return any(content_of_cell(c) is before for c in value.__closure__ or ())


_HOOKS_ON_ALL = [
    held
    for name, held in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(held, dict)
]


def _hooks_on_all() -> Any:
    return tuple(tuple(held.items()) for held in _HOOKS_ON_ALL)


def _restore_hooks_on_all(values: Any) -> None:
    for held, items in zip(_HOOKS_ON_ALL, values, strict=True):
        held.clear()
        held.update(items)


#: A name, what reads it, and what sets it back: False from there means that nothing was changed.
_Entry = tuple[str, Callable[[], Any], Callable[[Any], Any]]
_BACKENDS: list[tuple[str, Any, str]] = [
    ("the TF32 switch of matrix products", torch.backends.cuda.matmul, "fp32_precision"),
    ("the TF32 switch of convolutions", torch.backends.cudnn, "fp32_precision"),
    ("the TF32 switch", torch.backends, "fp32_precision"),
    ("oneDNN's precision", torch.backends.mkldnn, "fp32_precision"),
    ("cuDNN's TF32 switch", torch.backends.cudnn, "allow_tf32"),
    ("cuBLAS's TF32 switch", torch.backends.cuda.matmul, "allow_tf32"),
    (
        "cuBLAS's fp16 reductions",
        torch.backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
    ),
    (
        "cuBLAS's bf16 reductions",
        torch.backends.cuda.matmul,
        "allow_bf16_reduced_precision_reduction",
    ),
    ("cuDNN's deterministic switch", torch.backends.cudnn, "deterministic"),
    ("cuDNN's benchmark switch", torch.backends.cudnn, "benchmark"),
    ("whether cuDNN is used", torch.backends.cudnn, "enabled"),
    ("filling of new memory", torch.utils.deterministic, "fill_uninitialized_memory"),
]

#: Name, how it is read, how it is set back. One that cannot be read is left out.
_ENTRIES: list[_Entry] = [
    ("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the default device", _default_device, _restore_default_device),
    (
        "the precision of matrix products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *((name, *_attribute(owner, attribute)) for name, owner, attribute in _BACKENDS),
    (
        "the deterministic switch",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "the flash attention switch",
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    (
        "the math attention switch",
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
    ),
    (
        "the efficient attention switch",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    ("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    ("flushing of denormals", _flushes_denormals, torch.set_flush_denormal),
    ("torch's random state", _torch_rng, _restore_torch_rng),
    ("the GPU's random state", _cuda_rng, _restore_cuda_rng),
    ("Python's random state", random.getstate, random.setstate),
    ("NumPy's random state", _numpy, _restore_numpy),
    ("the environment", _environment, _restore_environment),
    ("Python's garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    ("the working directory", os.getcwd, os.chdir),
    ("NumPy's handling of errors", _numpy_errors, _restore_numpy_errors),
    ("hooks on what autograd saves", _saving, _restore_saving),
    (
        "the threads of backwards",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    ),
    ("the repetition of warnings", torch.is_warn_always_enabled, torch.set_warn_always),
    ("the filters of warnings", _filters_of_warnings, _restore_filters_of_warnings),
    ("the tracing of Python", sys.gettrace, sys.settrace),
    ("the profiling of Python", sys.getprofile, sys.setprofile),
    (
        "how views are differentiated",
        lambda: torch._C._is_view_replay_enabled(),
        lambda on: torch._C._set_view_replay_enabled(on),
    ),
    ("the level of logging", lambda: logging.root.manager.disable, logging.disable),
    ("whether oneDNN is used", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ("the rounding of numbers", _rounding, _restore_rounding),
    ("how often autocast is entered", _autocast_nesting, _restore_autocast_nesting),
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("the level of forward-mode", lambda: forward_ad._current_level, _restore_forward_level),
    ("the handlers of signals", _handlers, _restore_handlers),
    ("the path of imports", _import_path, _restore_import_path),
    (
        "how modules are converted",
        lambda: (
            torch.__future__.get_overwrite_module_params_on_conversion(),
            torch.__future__.get_swap_module_params_on_conversion(),
        ),
        _restore_conversion,
    ),
    ("functions of PyTorch", _functions, _restore_functions),
    ("hooks on all modules", _hooks_on_all, _restore_hooks_on_all),
    (
        "modes that see operators",
        lambda: tuple(_modes_of_operators()),
        _restore_dispatch_modes,
    ),
    (
        "the fast path of attention layers",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    ("whether NNPACK is used", torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    (
        "the order of attention's kernels",
        torch._C._get_sdp_priority_order,
        torch._C._set_sdp_priority_order,
    ),
    (
        "the cuDNN attention switch",
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    ("the current GPU", _cuda_device, _restore_cuda_device),
    ("the current stream", _cuda_stream, _restore_cuda_stream),
]


@dataclass(frozen=True)
class Process:
    """The state of the process at one moment."""

    values: tuple[Any, ...]
    entries: Sequence[_Entry]

    @classmethod
    def now(cls, only: Collection[str] | None = None) -> Process:
        """`only`: of these entries, by their names."""
        entries = _ENTRIES if only is None else [e for e in _ENTRIES if e[0] in only]
        return cls(tuple(map(_read, entries)), entries)

    def changed(self) -> list[str]:
        """What is no longer as it was, after setting it back."""
        found = []
        for entry, before in zip(self.entries, self.values, strict=True):
            after = _read(entry)
            told = after is not _MISSING and before is not _MISSING and after != before
            if told and entry[2](before) is not False:
                found.append(entry[0])
        return found


#: Names of entries.
_RANDOM = (
    *("torch's random state", "the GPU's random state"),
    *("Python's random state", "NumPy's random state"),
)


@contextmanager
def unseeded() -> Iterator[None]:
    """Random numbers come from where no seed begins: one who seeds as its caller has just seeded
    would seem to change nothing."""
    before = Process.now(_RANDOM)
    seed = int.from_bytes(os.urandom(4), "little")
    torch.default_generator.manual_seed(seed)
    if _on_gpu():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    random.seed(seed)
    if _numpy() is not None:
        sys.modules["numpy"].random.seed(seed)
    try:
        yield
    finally:
        before.changed()


def _read(entry: _Entry) -> Any:
    try:
        return entry[1]()
    except Exception:  # a switch that this PyTorch lacks, or mixes with a newer one
        return _MISSING


def matmul_precision() -> str | None:
    """`torch.get_float32_matmul_precision()`, or None where somebody set another precision of the
    newer kind (`torch.backends.cuda.matmul.fp32_precision`): PyTorch refuses to tell then."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _products() -> Any:
    """How exact products of fp32 are, by whichever switches were used."""
    old = matmul_precision()
    if old is not None:
        return old
    return tuple(
        getattr(of, "fp32_precision", None)
        for of in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    )


def surroundings() -> tuple[Any, ...]:
    """What of the thread and the process a kernel's results may come to depend on."""
    return (
        threading.get_ident(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),  # among which is the default device
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _products(),
        torch._C._is_any_autocast_enabled(),
    )
