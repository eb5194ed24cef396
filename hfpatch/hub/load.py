"""The story of a Hub kernel: spec → variant → files → checks → import → package."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.hub import verify
from hfpatch.hub.explain import reason
from hfpatch.hub.options import HubOptions
from hfpatch.hub.patience import impatient
from hfpatch.hub.resolver import (
    PinnedResolver,
    dependency_of,
    hub_api,
    variant_folder,
)
from hfpatch.hub.spec import HubSpec

if TYPE_CHECKING:
    from kernels.deps import DepTreeNode


@dataclass(frozen=True)
class HubPackage:
    """A package that was verified and imported.

    Attributes:
        module: what `kernels.get_kernel` would return.
        name: its name, e.g. "activation"; the repository may be called otherwise.
        version: "commit:variant", for the report.
        devices: device types that the variant has code for.
        archs: CUDA architectures of the variant; empty if it does not say.
        path: the variant's folder.
    """

    module: ModuleType
    spec: HubSpec
    name: str
    version: str
    devices: frozenset[str]
    archs: tuple[str, ...]
    path: Path


_loaded: dict[tuple[HubSpec, HubOptions], HubPackage] = {}
_lock = threading.RLock()


def load(spec: HubSpec, options: HubOptions) -> HubPackage:
    """A Hub kernel, imported; loaded once per process and options.

    `LOCAL_KERNELS=org/name=path` puts a local build in its place, as it does for `kernels`: that
    one is checked against the digests in its own metadata only.

    Raises:
        KernelLoadError: it cannot be had, does not fit, is not what it should be, or does not
            import; the subclasses say which.
    """
    with _lock:
        key = (spec, options)
        if key not in _loaded:
            _loaded[key] = _load(spec, options)
        return _loaded[key]


def forget_packages() -> None:
    """Look at the cache and the Hub again at the next `load`; what was imported stays imported."""
    with _lock:
        _loaded.clear()


def install(spec: HubSpec, options: HubOptions, refresh: bool = False) -> DepTreeNode[Any]:
    """Download a kernel and its dependencies and verify them; nothing is imported.

    Args:
        spec: what to install.
        options: on what terms.
        refresh: take what a version is now on the Hub, even if the cache has an older one.

    Returns:
        `kernels`' tree of installed kernels.

    Raises:
        KernelLoadError: see `load`.
    """
    from kernels.deps import resolve_kernel_tree
    from kernels.load import _get_local_kernel_overrides
    from kernels.resolver import SequentialResolver
    from kernels.validate import AllValidator, default_metadata_validators

    pinned = PinnedResolver(options, refresh)
    try:
        with impatient():
            api = hub_api()
            tree = resolve_kernel_tree(
                api=api,
                kernel=dependency_of(spec),
                backend=None,
                resolver=SequentialResolver([_get_local_kernel_overrides(), pinned]),
            )
            tree.validate_metadata(AllValidator(default_metadata_validators()))
            installed = tree.install(api=api)
        for node in _nodes(installed):
            check_variant(variant_folder(node.location), pinned)
        pinned.remember()
    except KernelLoadError:
        raise
    except Exception as e:
        local = os.environ.get("LOCAL_KERNELS")
        seen = "" if local is None else f", with LOCAL_KERNELS={local!r},"
        raise KernelLoadError(f"Hub kernel `{spec}`{seen} could not be loaded: {reason(e)}") from e
    return installed


def _load(spec: HubSpec, options: HubOptions) -> HubPackage:
    tree = install(spec, options)
    path, metadata = variant_folder(tree.location), tree.location.metadata
    for node in _nodes(tree):
        name = node.location.metadata.id
        if _is_a_module(name):
            raise KernelIntegrityError(
                f"`{spec}`: the `id` of `{node.location.metadata.name}` is {name!r}, which is a "
                "module's that is here already, or no name of one; nothing was imported. Tell its "
                "publisher"
            )
    try:
        with _no_bytecode():
            module = tree.load()
    except (Exception, SystemExit) as e:  # it may end the process in any way but this
        raise KernelLoadError(
            f"Hub kernel `{spec}` could not be imported ({path.name}): {reason(e)}"
        ) from e
    backend = str(metadata.backend.backend_type)
    devices = {"cuda": {"cuda"}, "cpu": {"cpu"}}.get(backend, set())
    snapshot = path.parent.parent
    commit = snapshot.name[:12] if snapshot.parent.name == "snapshots" else "LOCAL_KERNELS"
    return HubPackage(
        module,
        spec,
        str(metadata.name),
        f"{commit}:{path.name}",
        frozenset(devices),
        tuple(metadata.backend.archs or ()),
        path,
    )


def _nodes(tree: DepTreeNode[Any]) -> Iterator[Any]:
    yield tree
    for dep in tree.deps.values():
        yield from _nodes(dep)


def check_variant(variant: Path, pinned: PinnedResolver) -> None:
    """Compare a variant's folder with its digests, and as the options say with signature and lock.

    Raises:
        KernelIntegrityError: it is not what it should be.
    """
    snapshot = variant.parent.parent
    if snapshot.parent.name != "snapshots":  # of LOCAL_KERNELS: the user's own
        verify.check_content(variant)
        return
    repo = snapshot.parent.parent.name.removeprefix("kernels--").replace("--", "/", 1)
    spec = pinned.specs[repo, snapshot.name]
    try:
        verify.check_content(variant)
        if pinned.options.require_signed:
            verify.check_signature(variant)
        if pinned.lock is not None:
            verify.check_lock(variant, pinned.lock.of(spec).variants, pinned.lock.path)
    except KernelIntegrityError as e:
        raise KernelIntegrityError(f"`{spec}`: {e}") from e


def _is_a_module(name: str) -> bool:
    """Whether `import name` finds something, apart from kernels that were loaded; or never could.

    `kernels` imports a package under the name that its metadata say, whatever has it.
    """
    if not name.isidentifier() or name == "__main__":
        return True
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(name, None) is not None for find in finders if find is not None)


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """No bytecode is read from beside the sources, which digests do not cover, nor written there:
    a shared cache stays as it was downloaded."""
    prefix, write = sys.pycache_prefix, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="hfpatch-") as empty:
        sys.pycache_prefix, sys.dont_write_bytecode = empty, True
        try:
            yield
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = prefix, write
