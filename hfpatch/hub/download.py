"""Fetch ahead of time (`hfpatch download`) and write down what was fetched (`hfpatch lock`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelIntegrityError, KernelLoadError, NoCompatibleVariantError
from hfpatch.files import read_regular, strict_json
from hfpatch.hub.cache import CachedRepo
from hfpatch.hub.evidence import Evidence
from hfpatch.hub.explain import reason
from hfpatch.hub.fetch import LARGEST_METADATA, METADATA, Listed, fetch, listing
from hfpatch.hub.guard import guarded
from hfpatch.hub.load import install
from hfpatch.hub.lock import Locked, LockFile
from hfpatch.hub.options import HubOptions
from hfpatch.hub.resolver import PinnedResolver, hub_api, spec_of
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
    previous = Evidence.read(spec.repo).refs.get(spec.ref) or CachedRepo(spec.repo).commit_of(
        spec.ref
    )
    top = None
    commit, names = "", set[str]()
    try:
        top = install(spec, options, refresh=True, copy=False).top
        commit = top.commit
    except NoCompatibleVariantError:
        if not all_variants:
            raise
    if all_variants and (commit or top is None):
        try:
            with guarded():
                commit, names = _every_variant(spec, options)
        except KernelLoadError:
            raise
        except Exception as e:
            raise KernelLoadError(
                f"the other variants of `{spec}` could not be downloaded: {reason(e)}"
            ) from e
    here = () if top is None else (top.sealed.variant,)
    return Downloaded(
        spec,
        commit,
        previous if previous not in (None, commit) else None,
        (*here, *sorted(names - {*here})),
        top is not None,
    )


def _every_variant(spec: HubSpec, options: HubOptions) -> tuple[str, set[str]]:
    """Fetch and verify every variant of a kernel and of its dependencies; its commit and names."""
    from kernels.variants import get_variants

    api, resolver = hub_api(), PinnedResolver(options, refresh=True, copy=False)
    commits: dict[HubSpec, str] = {}
    names: set[str] = set()
    todo = [spec]
    while todo:
        one = todo.pop()
        if one in commits:
            continue
        commit = commits[one] = resolver.commit_of(api, one)
        signed = resolver.require_trust(api, one, commit, named=one == spec)
        for variant in get_variants(api, repo_id=one.repo, revision=commit):
            sealed = resolver.compared(api, one, commit, variant.variant_str, signed)
            todo += [spec_of(d) for d in sealed.metadata.kernel_depends]
            names |= {sealed.variant} if one == spec else set()
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
            with guarded():
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
    from kernels.variants import get_variants

    if spec in above:
        circle = " → ".join(f"`{s}`" for s in (*above[above.index(spec) :], spec))
        raise KernelLoadError(f"{circle}: it depends on itself, so it cannot be loaded")
    if str(spec) in found:
        return
    commit = resolver.commit_of(api, spec)
    signed = resolver.require_trust(api, spec, commit, named=not above)
    variants: dict[str, str] = {}
    found[str(spec)] = Locked(commit, variants)
    for variant in get_variants(api, repo_id=spec.repo, revision=commit):
        name = variant.variant_str
        data, metadata = _metadata(api, resolver, spec, commit, name, signed)
        if metadata.digest is None:
            raise KernelLoadError(
                f"`{spec}`: the metadata of `{name}` hold no digest of its files, so no hash of "
                "theirs would cover these; pin its commit instead: "
                f"`{spec.repo}@{commit}`"
            )
        variants[name] = lock_hash(data)
        for dependency in metadata.kernel_depends:
            _lock(api, spec_of(dependency), resolver, found, (*above, spec))


def _metadata(
    api: HfApi, resolver: PinnedResolver, spec: HubSpec, commit: str, variant: str, signed: bool
) -> tuple[bytes, Any]:
    """A variant's metadata, as the Hub lists them; of what must be signed, all its files."""
    from kernels import Metadata

    if signed:
        sealed = resolver.compared(api, spec, commit, variant, signed)
        return sealed.kept[METADATA], sealed.metadata
    files = {METADATA: listing(api, spec.repo, commit, variant)[METADATA]}
    fetch(api, spec.repo, commit, variant, files)
    path = CachedRepo(spec.repo).build(commit) / variant / METADATA
    data = read_regular(path, LARGEST_METADATA)
    row: Listed = files[METADATA]
    if row.differs(data):
        raise KernelIntegrityError(
            f"`{spec}`: `{variant}/{METADATA}` is damaged. Delete `{CachedRepo(spec.repo).folder}` "
            "and try again"
        )
    strict_json(data)
    return data, Metadata.from_bytes(data)
