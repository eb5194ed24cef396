"""Operators bound to their numbers, past PyTorch's dispatcher where nothing listens to it."""

import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from ._ops import add_op_namespace_prefix, ops

_NAMESPACE = add_op_namespace_prefix("")[:-2]
_SHARED = "_python_calls"  # on the operators' namespace: copies of one build share its library


def bind(name: str, codes: tuple[Any, ...], into: bool = False) -> Optional[Callable[..., Any]]:
    """A callable of the operator's tensors alone, without autograd; None if this build has none.

    It takes ordinary tensors. What it does not take goes to the operator: subclasses, any mode,
    trace, transform or profile that watches operators, layouts that want a copy, bad arguments.

    Args:
        name: the operator, e.g. ``"rms_norm"``.
        codes: its numbers, as the operator takes them after the tensors.
        into: the callable takes the tensors to write before all others and returns None.

    Returns:
        The results without scratch memory, one as a tensor and several as a tuple.
    """
    if _extension is None:
        return None
    operator = getattr(ops, name + "_out" if into else name).default
    result: Optional[Callable[..., Any]] = _extension.bind(name, into, codes, operator._op)
    return result


def guard(bound: Callable[..., Any], *tensors: Any) -> Optional[Callable[..., Any]]:
    """The same callable for tensors like these alone; None if it does not take even these.

    Like means: of the same dtypes and device type, None at the same places. For any other call it
    returns NotImplemented, and also where autograd would record, inside a level of forward-mode
    differentiation and under autocast. So a caller need not ask for any of it first.

    Args:
        bound: what `bind` returned, without ``into``.
        tensors: one call's.
    """
    result: Optional[Callable[..., Any]] = _extension.guard(bound, *tensors)
    return result


def of_module(
    guarded: Callable[..., Any],
    cls: type,
    forward: Callable[..., Any],
    coded: Any,
    code: Any,
    read: Optional[Callable[[dict[str, Any]], Any]],
    settings: Any,
    names: tuple[str, ...],
    there: tuple[bool, ...],
    in_order: bool,
) -> Callable[[Any, Any], Any]:
    """A guarded call for a module whose forward is that operator of its input and parameters.

    It takes the module and the input, and returns NotImplemented where `guarded` would, or where
    the module is no longer what it was: its class is another one, has another forward, or other
    settings; a parameter is hidden by an attribute, or is none of PyTorch's own.

    Args:
        guarded: what `guard` returned, of the input and the parameters in the order of `names`.
        cls: the module's class, and `forward` the one that it must have.
        coded: what has the forward's `__code__`, which must be `code`.
        read: what reads the module's settings off its `__dict__`; they must equal `settings`. It
            may raise any error: the call is not for this way then. None: there are none.
        names: of the parameters; one that the module does not have is None.
        there: whether the module had each of them, so that an attribute would hide it.
        in_order: only inputs whose dimensions before the last lie in memory as they come.
    """
    result: Callable[[Any, Any], Any] = _extension.of_module(
        guarded, cls, forward, coded, code, read, settings, names, there, in_order
    )
    return result


def direct() -> Optional[Callable[..., Any]]:
    """What calls a module by what `of_module` returned: of (quick, forward, module, args, kwargs).
    None if this build has none of this, or torch's ``Module._call_impl`` was replaced before.

    It returns NotImplemented where it is no call for that: where ``Module._call_impl`` would do
    more than to call the forward (a hook on the module or on all modules), where the module's class
    has another ``_call_impl``, where its forward is no longer ``forward``, and where what
    `of_module` returned says so.

    Its arguments: ``quick``, a list of one, what `of_module` returned or None; ``forward``, what
    stands by that name in the module's ``__dict__``; the module, and the call's two containers.
    """
    if _extension is None or _call_impl() is None:
        return None
    result: Callable[..., Any] = _extension.direct
    return result


def over_lists(name: str, *arguments: Any) -> Optional[bool]:
    """Call an operator over lists of tensors, without autograd and past the dispatcher.

    Reading a tensor takes 30 ns so, where the dispatcher takes 200; a step of an optimizer has
    thousands. The caller raises the version counters: `torch.autograd.graph.increment_version`.

    Args:
        name: ``"adamw_step"``, ``"clip_grads"`` or ``"scale_grads"``.
        arguments: all of the operator's, in its order, numbers included.

    Returns:
        Whether it was done. False: it was refused, and nothing was written; the operator says why.
        None: something listens to operators (a mode, a trace, the profiler), or this build has
        none of this; call the operator.
    """
    if _extension is None:
        return None
    done: Optional[bool] = _extension.over_lists(name, *arguments)
    return done


def count(steps: Any, by: float) -> bool:
    """Add a number to step counts. False: one is no fp32 scalar on the CPU; none has changed."""
    return _extension is not None and bool(_extension.count(steps, by))


def notes_of_dicts() -> Any:
    """What notes the contents of dictionaries; None if this build has none.

    ``note_values(dicts)``: the values of each, in their order.
    ``note_sizes(dicts)``: how many items each has.
    ``note_attributes(dicts, names)``: how many items the ``__dict__`` of each of some modules has,
    and what by these names, if anything.

    Each takes a list and returns a function of nothing: whether it is still so. It keeps alive what
    it looks at and what that held.
    """
    return _extension


def note_places(tensors: list[torch.Tensor]) -> Optional[Callable[[], bool]]:
    """A function of nothing: whether each tensor's first element lies where it lies now.

    It reads torch's own objects, 5 ns a tensor. None if this build cannot, if these are laid out in
    another way than expected, or if they are not ordinary tensors with memory.
    """
    if _extension is None or not _layout_is_known:
        return None
    try:
        noted: Optional[Callable[[], bool]] = _extension.note_places([_shown(t) for t in tensors])
    except (RuntimeError, NotImplementedError):  # one has no storage
        return None
    return noted


def library() -> Path:
    """The shared library that the operators are in, whose C functions are those of hfpatch.h.

    Raises:
        RuntimeError: the operators are another module's, whose library is not known.
    """
    module = sys.modules.get(f"{__package__}.{_NAMESPACE}")
    path = Path(__file__).parent / f"{_NAMESPACE}.abi3.so"
    if module is not None:
        return Path(str(module.__file__))
    for loaded in torch.ops.loaded_libraries:  # of another copy of this build, perhaps
        if Path(loaded).name == path.name:
            return Path(loaded)
    raise RuntimeError(f"`{path.name}`: its operators are there, but nothing says from which file")


def _allocators() -> tuple[Any, Any]:
    """Functions of (shape, strides, dtype) for new tensors, on the CPU and the current CUDA device.

    They are those of inductor's code: 0.46 us where `torch.empty_like` takes 0.78. None where torch
    has none, or another by that name.
    """
    guards = getattr(torch._C._dynamo, "guards", None)
    cpu = getattr(guards, "_empty_strided_cpu", None)
    cuda = getattr(guards, "_empty_strided_cuda", None)
    try:
        made = cpu((2, 3), (3, 1), torch.bfloat16)
    except Exception:
        return None, None
    known = type(made) is torch.Tensor and made.dtype is torch.bfloat16
    known = known and (made.shape, made.stride()) == ((2, 3), (3, 1))
    return (cpu, cuda) if known else (None, None)


def _call_impl() -> Optional[Callable[..., Any]]:
    """torch's own ``Module._call_impl``; None where a tool put another one there."""
    found = torch.nn.Module._call_impl
    file = torch.nn.modules.module.__file__
    own = getattr(getattr(found, "__code__", None), "co_filename", None)
    return found if own == file else None


def _read_state(extension: Any) -> None:
    """Let the calls read the dispatcher's state, where it shows what they ask for.

    That is tried here: it is no interface of torch's, which may keep it elsewhere one day.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    if not extension.read_state(str(library)):
        return
    try:
        shown = _shows(extension)
    except Exception:  # this torch has them by other names
        shown = False
    if not shown:
        extension.read_state(None)


def _shows(extension: Any) -> bool:
    from torch.utils._python_dispatch import TorchDispatchMode

    functorch = torch._C._functorch
    asked = (torch._C._len_torch_dispatch_stack, functorch.peek_interpreter_stack)
    if any(question() for question in asked) or torch._C._is_any_autocast_enabled():
        return False  # something is on: who knows what is plain
    with torch.inference_mode(not torch.is_inference_mode_enabled()):
        extension.note_plain()
    extension.note_plain()
    if not extension.is_plain():
        return False
    seen = []
    for kind in ("cpu", "cuda"):  # without the context manager, which looks for a GPU
        torch.set_autocast_enabled(kind, True)
        try:
            seen.append(extension.is_plain())
        finally:
            torch.set_autocast_enabled(kind, False)
    with TorchDispatchMode():
        seen.append(extension.is_plain())
    functorch._vmap_increment_nesting(1, "error")
    try:
        seen.append(extension.is_plain())
    finally:
        functorch._vmap_decrement_nesting()
    functorch._grad_increment_nesting()
    try:
        seen.append(extension.is_plain())
    finally:
        functorch._grad_decrement_nesting()
    return not any(seen) and bool(extension.is_plain())


def _shown(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What Python says of where torch keeps a tensor's parts."""
    storage = tensor.untyped_storage()
    parts = (tensor._cdata, storage._cdata, storage.data_ptr(), tensor.storage_offset())
    return (tensor, *parts, torch._C._dispatch_keys(tensor).raw_repr())


def _find_layout(extension: Any) -> bool:
    """Whether torch's objects have what is read of tensors, and where: tried, as above."""
    try:
        # sizes, strides and offsets that no other number of these tensors is
        forms = (
            ((3, 5, 7), torch.float32),
            ((2, 3, 11, 5), torch.float32),
            ((13, 17), torch.bfloat16),
            ((19,), torch.int64),
            ((2, 3, 2, 3, 5), torch.uint8),
        )
        parts = []
        for i, (shape, dtype) in enumerate(forms):
            whole = torch.empty(9000 + i, dtype=dtype, device="cpu")[4001 + 97 * i :]
            parts.append(whole[: math.prod(shape)].view(shape).transpose(0, -1))
        parts.append(torch.nn.Parameter(torch.empty(8111, device="cpu")[5003:]))
        parts += [
            torch.empty(4007, device="cpu", dtype=t)[2003:] for t in (torch.float16, torch.float64)
        ]
        shown = [_shown(t) for t in parts]
        lazily: Any = vars(torch)["_lazy_clone"]
        size = torch.Tensor.__basicsize__
        return bool(extension.find_layout(shown, size, lambda: lazily(parts[0])))
    except Exception:  # something else than ordinary tensors is made here and now
        return False


def _find_versions(extension: Any) -> None:
    """Let looks at dictionaries read their versions, where those change as expected: tried, too."""
    module = torch.nn.Module()
    tried: Any = module.__dict__
    extension.find_versions(
        tried,
        [
            lambda: setattr(module, "a", 1),
            lambda: setattr(module, "a", 2),
            lambda: delattr(module, "a"),
            lambda: object.__setattr__(module, "a", 1),
            lambda: object.__setattr__(module, "a", 2),
            lambda: tried.__setitem__("a", 1),
            lambda: tried.__setitem__("a", 2),
            lambda: tried.update(a=3),
            lambda: tried.setdefault("b", 1),
            lambda: tried.update({"b": 2}),
            lambda: tried.pop("b"),
            lambda: tried.__ior__({"a": 4}),
            lambda: tried.__delitem__("a"),
            lambda: tried.__setitem__("a", 5),
            tried.popitem,
        ],
    )


def _load() -> Any:
    if os.environ.get("HFPATCH_PYTHON_CALLS", "1") == "0":
        return None
    found = ops.__dict__.get(_SHARED)
    if found is not None:
        return found
    if f"{__package__}.{_NAMESPACE}" not in sys.modules:
        library = Path(__file__).parent / f"{_NAMESPACE}.abi3.so"
        # Operators of another copy: this one's library must not be loaded beside it.
        if os.path.realpath(library) not in torch.ops.loaded_libraries:
            return None
    try:
        extension = import_module(f".{_NAMESPACE}", __package__)
        # of which the first two show in the dispatcher's state
        listeners = (
            torch._C._len_torch_dispatch_stack,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._len_torch_function_stack,
            torch._C._is_tracing,
            torch._C._autograd._profiler_enabled,
        )
        ready = extension.setup(
            torch.Tensor.__dlpack_c_exchange_api__,
            torch.Tensor,
            torch.nn.Parameter,
            torch.Tensor.new_empty_strided,
            *_allocators(),
            (torch.float32, torch.float16, torch.bfloat16),
            listeners,
            2,
            torch._C._is_any_autocast_enabled,
            torch.is_autocast_enabled,
            vars(torch.autograd.forward_ad),
            _call_impl(),
            vars(torch.nn.modules.module),
        )
    except (ImportError, AttributeError):  # built without Python's headers; another torch
        return None
    if not ready:
        return None
    _read_state(extension)
    _find_versions(extension)
    setattr(ops, _SHARED, extension)
    return extension


_extension = _load()
_layout_is_known = _extension is not None and _find_layout(_extension)
