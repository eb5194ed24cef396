"""Fetch ahead of time (`hfpatch download`) and write down what was fetched (`hfpatch lock`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelLoadError, NoCompatibleVariantError
from hfpatch.hub.cache import CachedRepo, cache_dir
from hfpatch.hub.explain import reason
from hfpatch.hub.load import check_variant, install
from hfpatch.hub.lock import Locked, LockFile
from hfpatch.hub.options import HubOptions
from hfpatch.hub.patience import impatient
from hfpatch.hub.resolver import PinnedResolver, hub_api, spec_of, variant_folder
from hfpatch.hub.spec import HubSpec
from hfpatch.hub.verify import lock_hash

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class Downloaded:
    """One kernel that is in the cache now, verified.

    Attributes:
        spec: what was asked for.
        commit: what it is; "" for a local build of LOCAL_KERNELS.
        previous: what the cache took it for before, if that was another commit.
        variants: those that are here: this system's first, or every one.
        fits: whether there is one for this system.
    """

    spec: HubSpec
    commit: str
    previous: str | None
    variants: tuple[str, ...]
    fits: bool = True


def download(spec: HubSpec, options: HubOptions, all_variants: bool = False) -> Downloaded:
    """Fetch what a kernel is now, with its dependencies, so that it loads without a network.

    Args:
        spec: what to fetch. Without a lock file a version is taken as it is now on the Hub.
        options: on what terms.
        all_variants: fetch the builds for other systems too, for a cache that is shared; there
            need be none for this one.

    Raises:
        KernelLoadError: see `hfpatch.hub.load.load`.
    """
    cached = CachedRepo(spec.repo)
    previous = cached.commit_of(spec.ref)
    path: Path | None = None
    commit, names = "", set[str]()
    try:
        path = variant_folder(install(spec, options, refresh=True).location)
        snapshot = path.parent.parent
        if snapshot.parent.name == "snapshots":
            commit = snapshot.name
    except NoCompatibleVariantError:
        if not all_variants:
            raise
    if all_variants and (commit or path is None):
        try:
            with impatient():
                commit, names = _every_variant(spec, options)
        except KernelLoadError:
            raise
        except Exception as e:
            raise KernelLoadError(
                f"the other variants of `{spec}` could not be downloaded: {reason(e)}"
            ) from e
    here = () if path is None else (path.name,)
    return Downloaded(
        spec,
        commit,
        previous if previous not in (None, commit) else None,
        (*here, *sorted(names - {*here})),
        path is not None,
    )


def _every_variant(spec: HubSpec, options: HubOptions) -> tuple[str, set[str]]:
    """Fetch and verify every variant of a kernel and of its dependencies; its commit and names."""
    from kernels import Metadata

    api, resolver = hub_api(), PinnedResolver(options, refresh=True)
    commits: dict[HubSpec, str] = {}
    names: set[str] = set()
    todo = [spec]
    while todo:
        one = todo.pop()
        if one in commits:
            continue
        commit = commits[one] = resolver.commit_of(api, one)
        resolver.require_trust(api, one)
        resolver.specs[one.repo, commit] = one
        folder = api.snapshot_download(
            one.repo,
            repo_type="kernel",
            revision=commit,
            allow_patterns="build/*",
            ignore_patterns=["*.pyc", "**/__pycache__/**"],
            cache_dir=cache_dir(),
        )
        for variant in sorted(p for p in (Path(str(folder)) / "build").iterdir() if p.is_dir()):
            check_variant(variant, resolver)
            metadata = Metadata.read_from_file(variant / "metadata.json")
            todo += [spec_of(d) for d in metadata.kernel_depends]
            names |= {variant.name} if one == spec else set()
    resolver.remember()
    return commits[spec], names


def lock(specs: Iterable[HubSpec], options: HubOptions, path: Path) -> LockFile:
    """Write a lock file of these kernels and their dependencies, as they are now on the Hub.

    Only metadata are downloaded, of every variant, so that the lock holds on other systems too.
    Kernels that an existing file locks and that are not named stay as they are.

    Args:
        specs: versions or commits.
        options: on what terms: publishers must be trusted here, since a lock file vouches for what
            it lists.
        path: of the `hfpatch.lock`; `kernels.lock` is written beside it.

    Raises:
        KernelLoadError: a kernel cannot be found or is not trusted, or a variant has no digest,
            without which its hash would not cover its files.
    """
    kept = LockFile.read(path).kernels if path.is_file() else {}
    found: dict[str, Locked] = {}
    resolver = PinnedResolver(replace(options, lockfile=None), refresh=True)
    for spec in specs:
        try:
            with impatient():
                _lock(hub_api(), spec, resolver, found)
        except KernelLoadError:
            raise
        except Exception as e:
            raise KernelLoadError(f"`{spec}` could not be locked: {reason(e)}") from e
    locked = LockFile(path, {**kept, **found})
    locked.write()
    return locked


def _lock(
    api: HfApi,
    spec: HubSpec,
    resolver: PinnedResolver,
    found: dict[str, Locked],
    above: tuple[HubSpec, ...] = (),
) -> None:
    from kernels import Metadata
    from kernels.variants import get_variants

    if spec in above:
        circle = " → ".join(f"`{s}`" for s in (*above[above.index(spec) :], spec))
        raise KernelLoadError(f"{circle}: it depends on itself, so it cannot be loaded")
    if str(spec) in found:
        return
    commit = resolver.commit_of(api, spec)
    resolver.require_trust(api, spec)
    variants: dict[str, str] = {}
    found[str(spec)] = Locked(commit, variants)
    for variant in get_variants(api, repo_id=spec.repo, revision=commit):
        name = variant.variant_str
        data = Path(
            api.hf_hub_download(
                spec.repo,
                f"build/{name}/metadata.json",
                repo_type="kernel",
                revision=commit,
                cache_dir=cache_dir(),
            )
        ).read_bytes()
        metadata: Any = Metadata.from_bytes(data)
        if metadata.digest is None:
            raise KernelLoadError(
                f"`{spec}`: the metadata of `{name}` hold no digest of its files, so no hash of "
                "theirs would cover these; pin its commit instead: "
                f"`{spec.repo}@{commit}`"
            )
        variants[name] = lock_hash(data)
        for dependency in metadata.kernel_depends:
            _lock(api, spec_of(dependency), resolver, found, (*above, spec))
