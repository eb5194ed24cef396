"""Whether a module's code is the library's own: what a forward written for one class may rely on.

A class name says which block, or which model, somebody meant to build. Its code may be another one:
a subclass, a class of the same name, a method that was replaced. Here each function of a class is
compared with the code that its module's file holds.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hfpatch.proof.keys import helpers_of, kept_while_planning, names_of
from hfpatch.proof.subject import class_of

#: Packages whose classes fused forwards stand in for.
_LIBRARIES = ("diffusers", "torch", "transformers")
#: Whose decorators they use beside their own.
_DECORATORS = (*_LIBRARIES, "huggingface_hub", "contextlib")
#: Where hooks on a module are kept.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 6  # of functions around functions: decorators
#: Packages that are nobody's own code wherever they lie: in a clone, or a folder of PYTHONPATH.
_KNOWN = (*_LIBRARIES, "accelerate", "peft")


def _installed() -> Iterator[str]:
    """The folders of Python and of installed packages."""
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if found := sysconfig.get_path(name):
            yield found
    yield from site.getsitepackages()
    if found := site.getusersitepackages():
        yield found
    for name in _KNOWN:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # ValueError: somebody has put a module there by hand
            continue
        if spec is None or spec.origin is None:  # a folder of that name
            continue
        for folder in spec.submodule_search_locations or ():
            yield folder
            if glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), "*.dist-info")):
                yield os.path.dirname(folder)  # `pip install --target`


#: Where Python and its packages keep their files.
INSTALLED = tuple({f"{p}/" for folder in _installed() for p in (folder, os.path.realpath(folder))})


def odd_code(module: Any) -> str | None:
    """Why the code that calling `module` (a processor too) runs is not the library's; or None."""
    return odd_class(class_of(module))


def odd_class(cls: type) -> str | None:
    """Why a class is not a library's own, as its file has it; None if it is."""
    known = kept_while_planning(odd_class)
    if cls not in known:
        known[cls] = _odd_class(cls)
    found: str | None = known[cls]
    return found


def is_own(function: types.FunctionType) -> bool:
    """Whether a library's function has the code that its module's file holds."""
    return _is_own(function, _DEPTH)


def is_installed(function: Any) -> bool:
    """Whether a function, bound or in a `partial`, is an installed package's code, or ours."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "__func__", None) or getattr(function, "func", None)
        if inner is None:
            break
        function = inner
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__hfpatch__"):
        return True  # none, or written in C, or ours
    return bool(code.co_filename.startswith(INSTALLED))


def hooks_of_libraries(module: nn.Module) -> Iterator[Any]:
    """The hooks of diffusers and accelerate on a module."""
    registry = module.__dict__.get("_diffusers_hook")
    yield from getattr(registry, "hooks", {}).values()
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def strange_names(block: nn.Module) -> str | None:
    """A name by which the code of the library's classes inside `block` finds a function that is
    neither the library's nor another installed package's: somebody put it there. Or None."""
    found: str | None = None
    for cls in dict.fromkeys(type(m) for m in block.modules()):
        if cls.__module__.partition(".")[0] not in ("diffusers", "transformers"):
            continue
        known = kept_while_planning(strange_names)
        if cls not in known:
            known[cls] = _strange_name(cls)
        found = found or known[cls]
    return found


def _strange_name(cls: type) -> str | None:
    members = [f for base in cls.__mro__[:-1] for v in vars(base).values() for f in functions_of(v)]
    for _, name, function in reached(members):
        if not (_is_own(function, _DEPTH) or function.__code__.co_filename.startswith(INSTALLED)):
            return name
    return None


def called_by_forward(module: nn.Module) -> list[types.FunctionType]:
    """The functions of a module's class that its forward is, or may call."""
    names = ("forward", *sorted(helpers_of(module)))
    bases = class_of(module).__mro__[:-1]
    return [
        f for n in names for base in bases if n in vars(base) for f in functions_of(vars(base)[n])
    ]


def reached(
    functions: Iterable[types.FunctionType],
) -> Iterator[tuple[dict[str, Any], str, types.FunctionType]]:
    """The functions that these, and the library's functions that they call, find by name: (the
    globals of a module, the name, the function)."""
    left = list(functions)
    seen: set[int] = set()
    while left:
        function = left.pop()
        home = function.__module__ or ""
        if id(function) in seen or not home.startswith(("diffusers", "transformers")):
            continue
        seen.add(id(function))
        for name in sorted(names_of(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                yield function.__globals__, name, value
                left.append(value)


def names_in_processor(cls: type) -> set[str]:
    """Every name in the code of a class of processors, and in the library's functions that it may
    call: what it asks the attention for that it is given."""
    known = kept_while_planning(names_in_processor)
    if cls not in known:
        members = [v for base in cls.__mro__[:-1] for v in vars(base).values()]
        functions = [f for v in members for f in functions_of(v)]
        functions += [f for _, _, f in reached(functions)]
        known[cls] = set().union(*(names_of(f.__code__) for f in functions))
    found: set[str] = known[cls]
    return found


def _odd_class(cls: type) -> str | None:
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        name = f"`{base.__module__}.{base.__qualname__}`"
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            if base.__module__ in sys.stdlib_module_names:
                continue  # ABC, Generic, OrderedDict
            return f"{name} is a class of its own, not the library's"
        if _found(base.__module__, base.__qualname__) is not base:
            return f"{name} is not the class that its module has under that name"
        for method, value in vars(base).items():
            for function in functions_of(value):
                if not _is_own(function, _DEPTH):
                    return f"`{method}` of {name} is not as the library has it"
    return None


def _found(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions in a member of a class."""
    if isinstance(value, property):
        parts: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    else:
        parts = (getattr(value, "__func__", value),)
    yield from (f for f in parts if isinstance(f, types.FunctionType))


def _is_own(
    function: types.FunctionType, depth: int, above: tuple[types.FunctionType, ...] = ()
) -> bool:
    """Whether a function, and those that it wraps, have the code that their modules' files hold."""
    if function in above:  # a wrapper that knows itself
        return True
    if depth <= 0:
        return False
    module = function.__globals__.get("__name__", "")
    if module.partition(".")[0] not in _DECORATORS:
        return _is_generated(function)
    if function.__globals__ is not vars(sys.modules[module]):
        return False
    if not _is_in_file(function.__code__, module):
        return _is_generated(function)
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        inner = isinstance(held, types.FunctionType)
        if inner and not _is_own(held, depth - 1, (*above, function)):
            return False
    return True


def _is_generated(function: types.FunctionType) -> bool:
    """Whether `dataclass` or the like wrote it: what has no file computes nothing here."""
    return function.__code__.co_filename == "<string>" and function.__name__.startswith("__")


def _is_in_file(code: types.CodeType, module: str) -> bool:
    if _in_file.get((id(code), module)) is code:
        return True
    if any(code == own for own in _codes(module).get((code.co_name, code.co_firstlineno), ())):
        _in_file[id(code), module] = code
        return True
    return False


#: Code that was found in its module's file; held, so that its id stays its own.
_in_file: dict[tuple[int, str], types.CodeType] = {}


@functools.lru_cache(maxsize=256)
def _codes(module: str) -> dict[tuple[str, int], list[types.CodeType]]:
    """Every function's code in a module's file, by name and first line; empty if it has none."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        whole = spec.loader.get_code(module)  # type: ignore[union-attr]
    except Exception:  # any loader's own
        whole = None
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    left = [] if whole is None else [whole]
    while left:
        code = left.pop()
        found.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        left += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found
