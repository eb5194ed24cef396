"""What an import changed that was not its own: taken back, and told.

A kernel that may run can do what Python can do; this is no wall against it. It is for those that
replace what other models use, by intent or not: functions and classes of torch, of this project and
of what it is built on, modules that are there, and the way to those that are not yet.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from hfpatch.errors import KernelIntegrityError
from hfpatch.foreign.process import Process, wrapped_by_torch

#: Modules whose functions and classes must stay; those of torch are what models call.
_ROOTS = ("hfpatch", "kernels", "huggingface_hub", "transformers", "diffusers")
#: Packages to which an import adds no module of its own.
_CLOSED = ("hfpatch", "kernels", "huggingface_hub", "builtins", "importlib", "hashlib", "json")
_OF_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.autograd",
             "torch._C._nn", "torch.ops", "torch.library", "torch.cuda", "torch.linalg",
             "torch.special", "torch.fft", "torch.utils.checkpoint",
             "torch.serialization")  # fmt: skip
_CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.autograd.Function)

#: What of the process an import has no reason to change, by its name in `Process`.
_SETTINGS = frozenset({
    "the grad mode",
    "the default dtype",
    "the default device",
    "the precision of matrix products",
    "the deterministic switch",
    "flushing of denormals",
    "the rounding of numbers",
    "autocast on cpu",
    "autocast's dtype on cpu",
    "autocast on cuda",
    "autocast's dtype on cuda",
    "how often autocast is entered",
    "autocast's cache",
    "the level of forward-mode",
    "modes that see operators",
    "the working directory",
    "hooks on what autograd saves",
    "hooks on all modules",
})  # fmt: skip
#: Numbers drawn are no harm, other numbers later are: set back, and nothing is said.
_RANDOM = frozenset({"torch's random state", "Python's random state", "NumPy's random state",
                     "the GPU's random state"})  # fmt: skip


class Footprint:
    """A context manager around an import; raises KernelIntegrityError for what was changed."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = str(folder)

    def __enter__(self) -> Footprint:
        self.modules = dict(sys.modules)
        self.values = [(owner, dict(vars(owner))) for owner in _owners(self.modules)]
        self.code = _functions(self.values)
        self.path = list(sys.path)
        self.finders = {name: list(getattr(sys, name)) for name in ("meta_path", "path_hooks")}
        self.process = Process.now(_SETTINGS)
        self.operators = set(torch.library._impls)
        self.named = set(torch._C._dispatch_get_all_op_names())
        self.random = Process.now(_RANDOM)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed = [*self._values(), *self._modules(), *self._state()]
        if changed and kind is None:
            shown = ", ".join(f"`{c}`" for c in changed[:3]) + (", …" if changed[3:] else "")
            raise KernelIntegrityError(
                f"its import changed {shown}, which is not its own; that was taken back"
            )

    def _values(self) -> list[str]:
        changed = []
        for owner, before in self.values:
            now = vars(owner)
            for name, value in before.items():
                if now.get(name, self) is value or not _counts(name, value):
                    continue
                if name in now and wrapped_by_torch(now[name], value):
                    continue
                title = f"{owner.__module__}." if isinstance(owner, type) else ""
                changed.append(f"{title}{owner.__name__}.{name}")
                setattr(owner, name, value)
            if isinstance(owner, type):
                changed += _shadows(owner, before)
        for function, *were in self.code:
            if any(getattr(function, a) is not w for a, w in zip(_INSIDE, were, strict=True)):
                changed.append(f"{function.__module__}.{function.__qualname__}")
                for attribute, value in zip(_INSIDE, were, strict=True):
                    setattr(function, attribute, value)
        return changed

    def _modules(self) -> list[str]:
        changed = []
        for name, module in self.modules.items():
            now = sys.modules.get(name)
            if now is not module:
                # the one that was there stays in any case
                sys.modules[name] = module
                if _is_loaded_again(name, now, module):
                    _give_children(name, module)
                else:
                    changed.append(name)
        for name in set(sys.modules) - set(self.modules):
            root = name.partition(".")[0]
            if root in _CLOSED and "." in name and not _belongs(sys.modules[name], root):
                changed.append(name)
                del sys.modules[name]
        return changed

    def _state(self) -> list[str]:
        changed = []
        if any(str(p).startswith(self.folder) for p in sys.path if p not in self.path):
            changed.append("sys.path")
            sys.path[:] = self.path
        for name, before in self.finders.items():
            now = getattr(sys, name)
            if any(self._is_own(finder) for finder in now):
                changed.append(f"sys.{name}")
                now[:] = before
        changed += [*self.process.changed(), *self._operators()]
        self.random.changed()
        return changed

    def _is_own(self, finder: Any) -> bool:
        """Whether the code of a finder lies in the package; others' packages bring some too."""
        code = getattr(getattr(finder, "find_spec", finder), "__code__", None)
        return code is not None and code.co_filename.startswith(self.folder)

    def _operators(self) -> list[str]:
        """Operators that have another kernel now: PyTorch's own, which every model would call,
        or those of somebody else's library, this project's too."""
        new = set(torch.library._impls) - self.operators
        changed = sorted(k for k in new if k.startswith("aten/") or self._overrides(k))
        if changed:
            # by its type: what else there is may answer `isinstance` by code of its own
            libraries = [o for o in gc.get_objects() if type(o) is torch.library.Library]
            for library in libraries:
                if not library._op_impls.isdisjoint(changed):
                    library._destroy()  # type: ignore[no-untyped-call]
        return changed

    def _overrides(self, key: str) -> bool:
        """Whether a kernel, by "<library>/<operator>/<key>", stands in another one's place."""
        library, operator, where = key.split("/")
        name = f"{library}::{operator}"
        return name in self.named and f"{where} (inactive)" in torch._C._dispatch_dump(name)


#: What of a function can be exchanged while it is the same one.
_INSIDE = ("__code__", "__defaults__", "__kwdefaults__")


def _functions(values: list[tuple[Any, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """The functions of modules and classes, with what is inside of them."""
    found = {}
    for _, names in values:
        for value in names.values():
            kind = type(value)
            if kind is staticmethod or kind is classmethod:
                value = value.__func__
            if type(value) is FunctionType:
                found[id(value)] = (value, value.__code__, value.__defaults__, value.__kwdefaults__)
    return list(found.values())


def _shadows(owner: type, before: dict[str, Any]) -> list[str]:
    """Names that a class has now in the place of those that it inherits; taken out again."""
    changed = []
    for name, value in list(vars(owner).items()):
        if name in before or not callable(value):
            continue
        inherited = [vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)]
        if inherited and not any(value is one for one in inherited):
            changed.append(f"{owner.__module__}.{owner.__name__}.{name}")
            delattr(owner, name)
    return changed


def _owners(modules: dict[str, Any]) -> list[Any]:
    """Modules and classes that are watched."""
    found: list[Any] = []
    for name, module in modules.items():
        of_torch = name in _OF_TORCH or name.startswith("torch.nn.modules.")
        if not isinstance(module, ModuleType) or name == "__main__":
            continue
        root = name.partition(".")[0]
        if root in _ROOTS or of_torch or root in sys.stdlib_module_names:
            found.append(module)
        if root in _ROOTS or name.startswith("torch.nn.modules."):
            found += [c for c in vars(module).values() if _defined_in(c, name)]
    return [*found, *_CLASSES[:1], *_CLASSES[2:]]


def _defined_in(value: Any, name: str) -> bool:
    return isinstance(value, type) and value.__module__ == name


def _counts(name: str, value: Any) -> bool:
    """Whether a name is one of those that must stay: what can be called, and constants; one that is
    None is filled when it is used first, as huggingface_hub's client is."""
    if callable(value) or isinstance(value, staticmethod | classmethod):
        return True
    return name.isupper() and value is not None


def _is_loaded_again(name: str, now: Any, before: Any) -> bool:
    """Whether a module is the same file's, imported once more, as setuptools does with `backports`
    and transformers with itself: no sign of harm. None of those that nobody has to import again."""
    root = name.partition(".")[0]
    if root in (*_CLOSED, "torch") or root in sys.stdlib_module_names:
        return False
    specs: list[Any] = [getattr(m, "__spec__", None) for m in (now, before)]
    if not all(isinstance(m, ModuleType) for m in (now, before)) or type(now) is not type(before):
        return False
    if not all(type(s) is ModuleSpec and type(s.loader) is SourceFileLoader for s in specs):
        return False
    return bool(specs[0].origin) and specs[0].origin == specs[1].origin


def _give_children(name: str, module: ModuleType) -> None:
    """What was imported below the other module while it was there is found by this one."""
    for child, held in list(sys.modules.items()):
        above, _, last = child.rpartition(".")
        if above == name and last not in vars(module) and isinstance(held, ModuleType):
            setattr(module, last, held)


def _belongs(module: Any, root: str) -> bool:
    """Whether a module that is new lies where its package does."""
    file, package = getattr(module, "__file__", None), sys.modules.get(root)
    folders = [str(Path(p)) for p in getattr(package, "__path__", ())]
    if file is None:  # a namespace, or made in memory
        return bool(getattr(module, "__path__", None)) or not folders
    return any(str(file).startswith(folder) for folder in folders)
