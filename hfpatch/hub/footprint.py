"""What an import changed that was not its own: taken back, and told.

A kernel that may run can do what Python can do; this is no wall against it. It is for those that
replace what other models use, by intent or not: functions and classes of torch, of this project and
of what it is built on, modules that are there, and the way to those that are not yet.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from hfpatch.errors import KernelIntegrityError
from hfpatch.foreign.process import Process

#: Modules whose functions and classes must stay; those of torch are what models call.
_ROOTS = ("hfpatch", "kernels", "huggingface_hub", "builtins", "importlib", "hashlib", "json")
_OF_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.autograd",
             "torch._C._nn", "torch.ops", "torch.library", "torch.cuda")  # fmt: skip
_CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.autograd.Function)

#: What of the process an import has no reason to change, by its name in `Process`.
_SETTINGS = frozenset({
    "the grad mode",
    "the default dtype",
    "the default device",
    "the precision of matrix products",
    "the deterministic switch",
    "flushing of denormals",
    "the working directory",
    "hooks on what autograd saves",
    "hooks on all modules",
})  # fmt: skip


class Footprint:
    """A context manager around an import; raises KernelIntegrityError for what was changed."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = str(folder)

    def __enter__(self) -> Footprint:
        self.modules = dict(sys.modules)
        self.values = [(owner, dict(vars(owner))) for owner in _owners(self.modules)]
        self.path = list(sys.path)
        self.process = Process.now(_SETTINGS)
        self.operators = set(torch.library._impls)
        self.random = torch.get_rng_state()
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
                if name in now and _of_torch(now[name]):  # torch wraps some of its own, lazily
                    continue
                title = f"{owner.__module__}." if isinstance(owner, type) else ""
                changed.append(f"{title}{owner.__name__}.{name}")
                setattr(owner, name, value)
            if isinstance(owner, type):
                changed += _shadows(owner, before)
        return changed

    def _modules(self) -> list[str]:
        changed = []
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                changed.append(name)
                sys.modules[name] = module
        for name in set(sys.modules) - set(self.modules):
            root = name.partition(".")[0]
            if root in _ROOTS and "." in name and not _belongs(sys.modules[name], root):
                changed.append(name)
                del sys.modules[name]
        return changed

    def _state(self) -> list[str]:
        changed = []
        if any(str(p).startswith(self.folder) for p in sys.path if p not in self.path):
            changed.append("sys.path")
            sys.path[:] = self.path
        changed += [*self.process.changed(), *self._operators()]
        if not torch.equal(torch.get_rng_state(), self.random):
            torch.set_rng_state(self.random)  # numbers drawn are no harm, other numbers later are
        return changed

    def _operators(self) -> list[str]:
        """PyTorch's own operators that have another kernel now: every model would call it."""
        new = set(torch.library._impls) - self.operators
        changed = sorted(key for key in new if key.startswith("aten/"))
        if changed:
            # by its type: what else there is may answer `isinstance` by code of its own
            libraries = [o for o in gc.get_objects() if type(o) is torch.library.Library]
            for library in libraries:
                if not library._op_impls.isdisjoint(changed):
                    library._destroy()  # type: ignore[no-untyped-call]
        return changed


def _shadows(owner: type, before: dict[str, Any]) -> list[str]:
    """Names that a class has now in the place of those that it inherits; taken out again."""
    changed = []
    for name, value in list(vars(owner).items()):
        inherited = any(name in vars(base) for base in owner.__mro__[1:])
        if name not in before and inherited and callable(value) and not _of_torch(value):
            changed.append(f"{owner.__module__}.{owner.__name__}.{name}")
            delattr(owner, name)
    return changed


def _owners(modules: dict[str, Any]) -> list[Any]:
    """Modules and classes that are watched."""
    found: list[Any] = []
    for name, module in modules.items():
        of_torch = name in _OF_TORCH or name.startswith("torch.nn.modules.")
        if not isinstance(module, ModuleType):
            continue
        if name.partition(".")[0] in _ROOTS or of_torch:
            found.append(module)
        if name.startswith(("torch.nn.modules.", "hfpatch.")):
            found += [c for c in vars(module).values() if _defined_in(c, name)]
    return [*found, *_CLASSES[:1], *_CLASSES[2:]]


def _defined_in(value: Any, name: str) -> bool:
    return isinstance(value, type) and value.__module__ == name


def _counts(name: str, value: Any) -> bool:
    """Whether a name is one of those that must stay: what can be called, and constants."""
    if name.startswith("__") and name not in ("__import__", "__call__", "__init__", "__getattr__"):
        return False
    return callable(value) or isinstance(value, staticmethod | classmethod) or name.isupper()


def _of_torch(value: Any) -> bool:
    """Whether the code of a function is torch's own, whatever name it gives itself."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(str(Path(torch.__file__).parent))


def _belongs(module: Any, root: str) -> bool:
    """Whether a module that is new lies where its package does."""
    file, package = getattr(module, "__file__", None), sys.modules.get(root)
    folders = [str(Path(p)) for p in getattr(package, "__path__", ())]
    if file is None:  # a namespace, or made in memory
        return bool(getattr(module, "__path__", None)) or not folders
    return any(str(file).startswith(folder) for folder in folders)
