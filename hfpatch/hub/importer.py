"""Importing what was sealed: from memory where it is Python, under a name that nobody else has.

`kernels` imports a package under the `id` that its metadata give, from the cache, with Python's own
loaders, which read bytecode from beside a source and write it there, for each submodule whenever it
is first imported. Here sources are compiled from what was compared, for as long as the package
lives; and the name holds a hash of the content, so that it stands for no other module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hfpatch.hub.footprint import Footprint
from hfpatch.hub.sealed import Sealed

_PREFIX = "_hfpatch_hub_"


class _SourceLoader(SourceFileLoader):
    """Compiles a source that is in memory; there is no bytecode."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


class _Package:
    """A sealed package that is imported, or is just being imported."""

    def __init__(self, name: str, sealed: Sealed, root: str) -> None:
        assert sealed.folder is not None
        self.name, self.sealed, self.root = name, sealed, root
        self.folders = {p.rsplit("/", 1)[0] for p in sealed.files if "/" in p} | {
            "/".join(p.split("/")[:i]) for p in sealed.files for i in range(1, p.count("/") + 1)
        }

    def spec(self, fullname: str) -> ModuleSpec | None:
        """Where a module of the package is; None if there is no such file."""
        folder = self.sealed.folder
        assert folder is not None
        path = self.root + "/".join(fullname.split(".")[1:])
        stem = path.removesuffix("/")
        start = f"{stem}/" if stem else ""
        if (source := self.sealed.kept.get(f"{start}__init__.py")) is not None:
            return self._source(fullname, folder / start / "__init__.py", source, folder / stem)
        for suffix in EXTENSION_SUFFIXES:
            if stem and f"{stem}{suffix}" in self.sealed.files:
                file = str(folder / f"{stem}{suffix}")
                return importlib.util.spec_from_file_location(
                    fullname, file, loader=ExtensionFileLoader(fullname, file)
                )
        if stem and (source := self.sealed.kept.get(f"{stem}.py")) is not None:
            return self._source(fullname, folder / f"{stem}.py", source, None)
        if stem in self.folders:
            found = ModuleSpec(fullname, None, is_package=True)
            found.submodule_search_locations = [str(folder / stem)]
            return found
        return None

    @staticmethod
    def _source(name: str, path: Path, source: bytes, package: Path | None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(
            name,
            path,
            loader=_SourceLoader(name, str(path), source),
            submodule_search_locations=None if package is None else [str(package)],
        )


class _Finder(MetaPathFinder):
    """Finds submodules of imported packages, before any other finder looks for them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = _packages.get(fullname.partition(".")[0])
        return None if package is None else package.spec(fullname)


_packages: dict[str, _Package] = {}
_modules: dict[tuple[str, ...], ModuleType] = {}
_finder = _Finder()


def import_sealed(sealed: Sealed, deps: Mapping[str, ModuleType]) -> ModuleType:
    """Import a package; the same content, with the same dependencies, is imported once.

    Args:
        sealed: what was read and compared, with copies.
        deps: the packages that it depends on, by repository, as this gave them.

    Raises:
        ImportError: there is no module in it.
        KernelIntegrityError: its import changed what is not its own; that was taken back.
        Exception: whatever its code raises.
    """
    key = (sealed.content, *(f"{repo} {deps[repo].__name__}" for repo in sorted(deps)))
    if key in _modules:
        sealed.discard()
        return _modules[key]
    name = f"{_PREFIX}{sealed.content[:16]}_{len(_modules)}_{sealed.metadata.id}"
    root = "" if "__init__.py" in sealed.kept else f"{sealed.metadata.name.python_name}/"
    package = _Package(name, sealed, root)
    spec = package.spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no `__init__.py` in `{sealed.variant}`")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = importlib.util.module_from_spec(spec)
    _packages[name] = package
    sys.modules[name] = module
    try:
        with Footprint(sealed.folder), _dependencies(dict(deps)):
            spec.loader.exec_module(module)
    except BaseException:
        del _packages[name]
        for left in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            del sys.modules[left]
        raise
    _modules[key] = module
    return module


def _dependencies(deps: dict[str, ModuleType]) -> Any:
    """What `kernels.get_kernel_dep` gives a package while it is imported."""
    from kernels.deps import use_kernel_deps

    return use_kernel_deps(deps)
