"""What a user's function reads beside its arguments, as a key: closures, defaults, globals.

A function whose key changed is another kernel; one whose key changes from call to call keeps state.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import datetime
import dis
import functools
import mmap
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.foreign.memory import bits
from hfpatch.proof.keys import Same, is_transparent, names_of, value_key

#: How deep functions that functions read are followed, and how many values are looked at.
_DEPTH, _VALUES = 4, 2000
_LIBRARIES = frozenset({"torch", "numpy", "triton", "hfpatch", "transformers", "diffusers"})


@dataclass
class _Walk:
    """One look at all that a function reads."""

    parts: list[Any] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def visit(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self.seen or len(self.parts) > _VALUES:
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
            self.seen.add(id(value))
        if depth <= 0:
            self.parts.append((name, Same(value)))
        elif isinstance(value, types.FunctionType):
            self._function(name, value, depth)
        elif isinstance(value, types.MethodType):
            self.visit(name, value.__func__, depth)
            self.visit(f"{name}.self", value.__self__, depth)
        elif isinstance(value, functools.partial):
            for i, part in enumerate((value.func, *value.args, *value.keywords.values())):
                self.visit(f"{name}[{i}]", part, depth)
        elif isinstance(value, type):
            self._class(name, value, depth)
        elif isinstance(value, (Iterator, types.GeneratorType)):
            self.iterators.append(name)
        elif _wraps(value):
            # of Triton's and functools' wrappers the function counts, not what they have compiled
            self.parts.append((name, Same(value)))
            self.visit(name, _wraps(value), depth - 1)
        elif (found := content_of(value)) is not _NONE:
            self.parts.append((name, found))
        elif isinstance(value, nn.Module):
            self.seen.add(id(value))
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                self.visit(f"{name}.{key}", tensor, 1)
            self.parts.append((name, Same(value)))
        elif callable(value) and is_transparent(type(value)):
            self.seen.add(id(value))
            for key, held in vars(value).items():
                self.visit(f"{name}.{key}", held, depth - 1)
            self.visit(f"{name}()", type(value), depth)
        elif slots := slots_of(type(value)):
            self.seen.add(id(value))
            for key in (*slots, *getattr(value, "__dict__", ())):
                self.visit(f"{name}.{key}", getattr(value, key, None), depth - 1)
            self.visit(f"{name}()", type(value), depth)
        else:
            if type(value) in (list, tuple, dict, set) and len(value) <= 64:
                held = value.values() if isinstance(value, dict) else value
                for i, part in enumerate(held):
                    if callable(part) or isinstance(part, Iterator):
                        self.visit(f"{name}[{i}]", part, depth - 1)
            self.parts.append((name, value_key(value)))

    def _function(self, name: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        self.parts.append((name, code))
        for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.visit(cell_name, held, depth - 1)
        for i, default in enumerate(function.__defaults__ or ()):
            self.visit(f"{name}'s default {i}", default, depth - 1)
        for key, default in (function.__kwdefaults__ or {}).items():
            self.visit(f"{name}'s default {key}", default, depth - 1)
        for key, held in vars(function).items():
            if key != "__wrapped__":
                self.visit(f"{name}.{key}", held, depth - 1)
        names = names_of(code)
        self.others += _read_by(function, names)
        if not names.isdisjoint(_ENVIRONMENT):
            self.parts.append(("the environment", frozenset(os.environ.items())))
        for key in sorted(names & function.__globals__.keys()):
            held = function.__globals__[key]
            if not isinstance(held, types.ModuleType):
                self.visit(key, held, depth - 1)
            elif not _of_a_library(held.__name__):
                for inner in sorted(names & vars(held).keys()):
                    self.visit(f"{key}.{inner}", vars(held)[inner], depth - 2)

    def _class(self, name: str, cls: type, depth: int) -> None:
        self.parts.append((name, Same(cls)))
        if _of_a_library(cls.__module__):
            return
        for key, held in vars(cls).items():
            if key in ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"):
                continue
            inner = getattr(held, "__func__", held)
            if isinstance(inner, types.FunctionType) or not hasattr(inner, "__get__"):
                self.visit(f"{name}.{key}", inner, depth - 1)


#: By what code reads the environment.
_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")
#: By what code reads the time, and asks who calls it or who else knows its arguments: the answers
#: are others in a comparison than later.
_CLOCKS = (
    *("monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"),
    *("thread_time", "thread_time_ns", "time_ns", "clock_gettime", "utcnow"),
)
#: Names that are a clock's where they are found in these modules.
_OF_CLOCKS = ("time", "monotonic", "now", "today", "localtime", "gmtime", "ctime")
_CLOCK_MODULES = ("time", "datetime")
_CALLERS = (
    *("_getframe", "_getframemodulename", "_current_frames", "currentframe", "f_back"),
    *("extract_stack", "walk_stack", "getouterframes", "getrefcount", "get_referrers"),
)
_NONE = object()


def _read_by(function: types.FunctionType, names: frozenset[str]) -> list[str]:
    """What a function's code reads that no key of it can hold."""
    found: list[str] = []
    read, imported = _read_and_imported(function.__code__)
    held = [function.__globals__[n] for n in read & function.__globals__.keys()]
    modules = {v.__name__ for v in held if isinstance(v, types.ModuleType)} | imported
    modules |= {v.__module__ for v in held if v is datetime.datetime or v is datetime.date}
    of_clocks = any(
        isinstance(v, types.BuiltinFunctionType) and v.__module__ == "time" for v in held
    )
    of_clocks |= not (names.isdisjoint(_OF_CLOCKS) or modules.isdisjoint(_CLOCK_MODULES))
    if of_clocks or not names.isdisjoint(_CLOCKS):
        found.append("the clock")
    if not names.isdisjoint(_CALLERS):
        found.append("who calls it")
    return found


@functools.lru_cache(maxsize=4096)
def _read_and_imported(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code reads, and the modules that it imports when it runs."""
    steps = list(dis.get_instructions(code))
    read = {str(s.argval) for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    imported = {str(s.argval) for s in steps if s.opname == "IMPORT_NAME"}
    inner = [_read_and_imported(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return (
        frozenset(read).union(*(r for r, _ in inner)),
        frozenset(imported).union(*(i for _, i in inner)),
    )


#: Elements of arrays and tensors that are looked at; of larger tensors it is their version.
_LARGEST = 1 << 16


def content_of(value: Any) -> Any:
    """What a container holds that a call can write to and that is none of Python's plain ones, as a
    key; `_NONE` for anything else."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return _NONE
        if value.numel() > _LARGEST or type(value) not in (Tensor, nn.Parameter):
            return _NONE
        with torch._C.DisableTorchFunction():
            held = bits(value.detach()).contiguous().view(-1)
            return value.dtype, tuple(value.shape), held.numpy().tobytes()
    if isinstance(value, collections.deque):
        return tuple(map(value_key, value))
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, array.array):
        return value.typecode, value.tobytes()
    if isinstance(value, threading.local):
        return value_key(dict(vars(value)))
    if isinstance(value, contextvars.ContextVar):
        return value_key(value.get(None))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)):
        return type(value).__name__, bytes(memoryview(value))
    if isinstance(value, mmap.mmap):
        return len(value), bytes(value[:_LARGEST])
    if isinstance(value, (queue.Queue, queue.SimpleQueue)):
        return value.qsize()
    if isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary | weakref.WeakSet):
        return len(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes() if value.device.type == "cpu" else _NONE
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.size <= _LARGEST:
        if value.dtype.hasobject:
            return value_key(value.tolist())
        return str(value.dtype), value.shape, value.tobytes()
    return _NONE


def slots_of(cls: type) -> tuple[str, ...]:
    """The slots of a class that is written in Python, and of no library's."""
    if _of_a_library(cls.__module__) or not cls.__flags__ & (1 << 9):
        return ()
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(s for s in found if s not in ("__dict__", "__weakref__"))


def _wraps(value: Any) -> Any:
    """The function in a wrapper that keeps a cache of its own, or None."""
    module = type(value).__module__.partition(".")[0]
    if module == "triton":
        return getattr(value, "fn", None)
    if module == "functools" and hasattr(value, "cache_info"):
        return getattr(value, "__wrapped__", None)
    return None


def _of_a_library(module: str) -> bool:
    top = module.partition(".")[0]
    return top in _LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")


def _walk(function: Any) -> _Walk:
    walk = _Walk()
    walk.visit(getattr(function, "__name__", "kernel"), function, _DEPTH)
    return walk


def key_of(function: Any) -> tuple[Any, ...]:
    """All that `function` reads, hashable; equal keys compute alike."""
    return tuple(_walk(function).parts)


def iterators_of(function: Any) -> list[str]:
    """Names of the iterators and generators that `function` reads: each call can move them on."""
    return _walk(function).iterators


def others_of(function: Any) -> list[str]:
    """What else `function` reads that may be another at the next call: the clock, its callers."""
    return list(dict.fromkeys(_walk(function).others))


def names_changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """Names of what differs between two keys of one function."""
    was, now = dict(before), dict(after)
    return sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
