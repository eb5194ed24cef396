"""The story of a Hub kernel: spec → variant → files → checks → import → package."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hfpatch import forks
from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.files import read_regular
from hfpatch.hub.cache import cache_dir
from hfpatch.hub.explain import reason
from hfpatch.hub.guard import guarded
from hfpatch.hub.importer import import_sealed
from hfpatch.hub.lock import LARGEST_LOCK
from hfpatch.hub.options import HubOptions
from hfpatch.hub.resolver import PinnedResolver, Resolved, hub_api, spec_of
from hfpatch.hub.spec import HubSpec

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: Kernels that one kernel may bring with it.
_MOST_KERNELS = 64


@dataclass(frozen=True)
class HubPackage:
    """A package that was verified and imported.

    Attributes:
        module: the package.
        name: its name, e.g. "activation"; the repository may be called otherwise.
        version: "commit:variant", for the report.
        devices: device types that the variant has code for.
        archs: CUDA architectures of the variant; empty if it does not say.
        path: the folder in the cache that it was read from; it is imported from a copy.
        files: the sha256 of its files, in hexadecimal, by their paths in it.
        notes: what the report should say of it.
    """

    module: ModuleType
    spec: HubSpec
    name: str
    version: str
    devices: frozenset[str]
    archs: tuple[str, ...]
    path: Path
    files: dict[str, str]
    notes: tuple[str, ...] = ()


_loaded: dict[tuple[Any, ...], HubPackage] = {}
_lock = forks.lock()


def load(spec: HubSpec, options: HubOptions) -> HubPackage:
    """A Hub kernel, imported; loaded once per process, options, endpoint, cache and lock file.

    `LOCAL_KERNELS=org/name=path` puts a local build in its place, as it does for `kernels`: that
    one is checked against the digests in its own metadata only.

    Raises:
        KernelLoadError: it cannot be had, does not fit, is not what it should be, or does not
            import; the subclasses say which.
    """
    with _lock:
        key = (spec, options, *_surroundings(options))
        if key not in _loaded:
            _loaded[key] = _load(spec, options)
        return _loaded[key]


def _surroundings(options: HubOptions) -> tuple[str, ...]:
    """What else decides which code a spec stands for."""
    from huggingface_hub import constants

    locked = ""
    if options.lockfile is not None:
        try:
            locked = hashlib.sha256(read_regular(options.lockfile, LARGEST_LOCK)).hexdigest()
        except (OSError, ValueError):  # the error is the resolver's to tell
            locked = "unreadable"
    local = os.environ.get("LOCAL_KERNELS", "")
    return constants.ENDPOINT, str(cache_dir()), local, locked


def forget_packages() -> None:
    """Look at the cache and the Hub again at the next `load`; what was imported stays imported."""
    with _lock:
        _loaded.clear()


@dataclass(frozen=True)
class Installed:
    """A kernel that is here, verified, with all that it depends on.

    Attributes:
        top: the kernel.
        nodes: it and its dependencies, each once, in the order in which they can be imported.
        deps: {spec: {repository: spec}}.
    """

    top: Resolved
    nodes: dict[HubSpec, Resolved]
    deps: dict[HubSpec, dict[str, HubSpec]]
    notes: tuple[str, ...] = ()

    def discard(self) -> None:
        """Remove the copies of what is not imported."""
        for node in self.nodes.values():
            node.sealed.discard()


def install(
    spec: HubSpec, options: HubOptions, refresh: bool = False, copy: bool = True
) -> Installed:
    """Download a kernel and its dependencies and verify them; nothing is imported.

    Args:
        spec: what to install.
        options: on what terms.
        refresh: take what a version is now on the Hub, even if the cache has an older one.
        copy: keep copies that can be imported.

    Raises:
        KernelLoadError: see `load`.
    """
    pinned = PinnedResolver(options, refresh, copy)
    found = _Tree(pinned, {}, {})
    try:
        with guarded():
            found.visit(hub_api(), spec, ())
        pinned.remember()
    except BaseException as e:
        for node in found.nodes.values():
            node.sealed.discard()
        if isinstance(e, KernelLoadError):
            raise
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise  # a parser's panic is an answer that it could not read; others are the user's
        local = os.environ.get("LOCAL_KERNELS")
        seen = "" if local is None else f", with LOCAL_KERNELS={local!r},"
        raise KernelLoadError(f"Hub kernel `{spec}`{seen} could not be loaded: {reason(e)}") from e
    return Installed(found.nodes[spec], found.nodes, found.deps, tuple(pinned.notes))


@dataclass
class _Tree:
    """Walks from a kernel to what it depends on, visiting each once."""

    pinned: PinnedResolver
    nodes: dict[HubSpec, Resolved]
    deps: dict[HubSpec, dict[str, HubSpec]]

    def visit(self, api: HfApi, spec: HubSpec, above: tuple[HubSpec, ...]) -> None:
        if spec in above:
            circle = " → ".join(f"`{s}`" for s in (*above[above.index(spec) :], spec))
            raise KernelLoadError(f"{circle}: Cyclic, it depends on itself, so it cannot be loaded")
        if spec in self.nodes:
            return
        if len(self.deps) >= _MOST_KERNELS:
            raise KernelLoadError(f"`{(*above, spec)[0]}` needs more than {_MOST_KERNELS} kernels")
        self.deps[spec] = {}
        node = self.pinned.resolve(api, spec, named=not above)
        try:
            _validate(spec, node.sealed.metadata, node.sealed.variant)
            for dependency in node.sealed.metadata.kernel_depends:
                other = spec_of(dependency)
                self.deps[spec][dependency.repo_id] = other
                self.visit(api, other, (*above, spec))
        except BaseException:
            node.sealed.discard()
            raise
        self.nodes[spec] = node  # after its dependencies: the order of imports


def _validate(spec: HubSpec, metadata: Any, variant: str) -> None:
    """Whether `kernels` and Python have what the metadata ask for, and its name is one."""
    from kernels.validate import AllValidator, default_metadata_validators

    AllValidator(default_metadata_validators()).validate_metadata(
        metadata=metadata, variant=variant
    )
    if _is_a_module(metadata.id):
        raise KernelIntegrityError(
            f"`{spec}`: the `id` of `{metadata.name}` is {metadata.id!r}, which is a module's that "
            "is here already, or no name of one; nothing was imported. Tell its publisher"
        )


def _load(spec: HubSpec, options: HubOptions) -> HubPackage:
    tree = install(spec, options)
    imported: dict[HubSpec, ModuleType] = {}
    for one, node in tree.nodes.items():
        deps = {repo: imported[other] for repo, other in tree.deps[one].items()}
        try:
            imported[one] = import_sealed(node.sealed, deps)
        except BaseException as e:
            for left in list(tree.nodes)[len(imported) :]:
                tree.nodes[left].sealed.discard()
            if isinstance(e, KeyboardInterrupt):
                raise
            if isinstance(e, KernelIntegrityError):
                raise KernelIntegrityError(f"Hub kernel `{one}`: {e}") from e
            # it may end the process in any way but this
            raise KernelLoadError(
                f"Hub kernel `{spec}` could not be imported ({node.sealed.variant}): {reason(e)}"
            ) from e
    top, metadata = tree.top, tree.top.sealed.metadata
    backend = str(metadata.backend.backend_type)
    return HubPackage(
        imported[spec],
        spec,
        str(metadata.name),
        f"{top.commit[:12] or 'LOCAL_KERNELS'}:{top.sealed.variant}",
        devices_of(backend),
        tuple(metadata.backend.archs or ()),
        Path(top.folder),
        dict(top.sealed.files),
        tree.notes,
    )


def _is_a_module(name: str) -> bool:
    """Whether `import name` finds something, apart from kernels that were loaded; or never could.

    `kernels` imports a package under the name that its metadata say, whatever has it; a package
    that asks for another's name is refused here too.
    """
    if not (name.isidentifier() and name.isascii()) or name == "__main__":
        return True
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(name, None) is not None for find in finders if find is not None)


def devices_of(backend: str) -> frozenset[str]:
    """torch's device types that a variant for `backend` has code for; ROCm's are called cuda."""
    types = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "cpu": "cpu"}
    return frozenset({types[backend]} if backend in types else ())
