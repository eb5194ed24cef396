"""From a pinned spec to a sealed variant: of the cache if it is known, else of the Hub.

What was downloaded and compared is used without a single request, also for a version branch that
has moved since; `hfpatch download` is what refreshes. What lies in a cache without being known to
this user (somebody else's download) is compared with the Hub's listing first. `kernels` itself asks
the Hub at each load, and with HF_HUB_OFFLINE set it finds neither a version (it stores no ref) nor
a repository of which only this system's variant was downloaded (kernels 0.17.2 with huggingface_hub
2.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfpatch.errors import (
    KernelIntegrityError,
    KernelLoadError,
    KernelUntrustedError,
    NoCompatibleVariantError,
)
from hfpatch.hub import verify
from hfpatch.hub.cache import CachedRepo, cache_dir, offline
from hfpatch.hub.evidence import Evidence
from hfpatch.hub.fetch import METADATA, SIGNATURE, Listed, fetch, listing
from hfpatch.hub.lock import LockFile
from hfpatch.hub.options import HubOptions
from hfpatch.hub.sealed import Sealed, seal
from hfpatch.hub.spec import HubSpec, is_commit
from hfpatch.hub.trust import Trust, unreleased

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from kernels._rust import KernelDependency


def hub_api() -> HfApi:
    """The API client of `kernels`, with a user agent that is a legal header.

    With HF_HUB_DISABLE_TELEMETRY set, kernels 0.17.2 makes one that ends in a blank, which httpx
    refuses to send.
    """
    from kernels.hf_hub import _get_hf_api

    api: HfApi = _get_hf_api()
    api.user_agent = api.user_agent or None
    return api


def newest_commit(api: HfApi, spec: HubSpec) -> str:
    """What a version or branch is now on the Hub.

    huggingface_hub's `resolve_revision` would answer with what was cached where the Hub does not
    answer, and would move what the cache takes the version for before anything is downloaded.

    Raises:
        KernelLoadError: the answer is no commit, or of another repository; or there is no such
            branch or tag. Anything else than a version is looked for among these: the Hub also
            takes a part of a commit's hash, which may be a pull request's.
    """
    if spec.version is None and spec.commit is None and not spec.ref.startswith("refs/"):
        refs = api.list_repo_refs(spec.repo, repo_type="kernel")
        found = [r.target_commit for r in (*refs.branches, *refs.tags) if r.name == spec.ref]
        if not found:
            raise KernelLoadError(f"`{spec.repo}` has no branch and no tag `{spec.ref}`")
        commit: Any = found[0]
    else:
        info = api.kernel_info(spec.repo, revision=spec.ref)
        if info.id != spec.repo:
            raise KernelIntegrityError(
                f"the Hub answers for `{info.id}`, asked for `{spec.repo}`; if that is its name "
                "now, write that one"
            )
        commit = info.sha
    if not isinstance(commit, str) or not is_commit(commit):
        raise KernelLoadError(f"the Hub names {commit!r} as the commit of `{spec}`, which is none")
    return commit


def spec_of(kernel: KernelDependency) -> HubSpec:
    """A dependency of `kernels` as a spec.

    Raises:
        ValueError: it has no name that a repository or a revision can have; the metadata of a
            kernel may say anything.
    """
    from kernels._rust import KernelVersion

    version = kernel.version
    numbered = isinstance(version, KernelVersion.Version)
    ref = f"v{version.version}" if numbered else version.revision
    return HubSpec.parse(f"{kernel.repo_id}@{ref}", allow_branches=True)


@dataclass(frozen=True)
class Resolved:
    """A kernel that was found, compared and allowed; nothing of it is imported.

    Attributes:
        commit: what it is; "" for a local build of LOCAL_KERNELS.
        folder: where it was read; `sealed` is what was read.
    """

    spec: HubSpec
    commit: str
    folder: str
    sealed: Sealed


@dataclass
class PinnedResolver:
    """Finds kernels at their pins, and checks trust before a download and content after it.

    Without network wherever what is known and the cache suffice. With `refresh`, what a version is
    and whether its publisher is trusted is asked anew. `copy`: see `hfpatch.hub.sealed.seal`.
    """

    options: HubOptions
    refresh: bool = False
    copy: bool = True
    lock: LockFile | None = None
    asked: dict[HubSpec, str] = field(default_factory=dict)
    known: dict[str, Evidence] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.options.refused:
            raise KernelUntrustedError(self.options.refused)
        if self.lock is None and self.options.lockfile is not None:
            self.lock = LockFile.read(self.options.lockfile)
        self.trust = Trust(self.options, self.refresh, self.notes)

    def evidence(self, repo: str) -> Evidence:
        """What this user knows of a repository."""
        if repo not in self.known:
            self.known[repo] = Evidence.read(repo)
        return self.known[repo]

    def resolve(self, api: HfApi, spec: HubSpec, named: bool) -> Resolved:
        """The kernel's best variant for this system, compared: of the cache, or of the Hub.

        Args:
            api: whom to ask.
            spec: what to find.
            named: the user asked for it, rather than another kernel that depends on it.
        """
        local = self._local(api, spec)
        if local is not None:
            return local
        if not spec.pinned and not self.options.allow_branches and self.lock is None:
            raise KernelLoadError(
                f"it depends on `{spec}`, a branch, which can change under you: lock it (`hfpatch "
                "lock`), or allow it with `hub={'allow_branches': True}` (`--allow-branches`)"
            )
        commit = self.commit_of(api, spec)
        signed = self.require_trust(api, spec, commit, named)
        sealed = self._known(spec, commit, signed)
        if sealed is None:
            if offline():
                raise KernelLoadError(
                    f"`{spec}` (commit {commit[:12]}) is not complete in the cache "
                    f"`{cache_dir()}`, or was never compared with what the Hub has, and "
                    f"HF_HUB_OFFLINE is set. While online: `hfpatch download {spec}`"
                )
            variant = _fitting(api, spec, commit)
            sealed = self.compared(api, spec, commit, variant, signed)
        folder = CachedRepo(spec.repo).build(commit) / sealed.variant
        return Resolved(spec, commit, str(folder), sealed)

    def _local(self, api: HfApi, spec: HubSpec) -> Resolved | None:
        """What LOCAL_KERNELS puts in its place."""
        from kernels._rust import KernelDependency, KernelVersion
        from kernels.load import _get_local_kernel_overrides

        version = KernelVersion.Revision(spec.ref)
        found = _get_local_kernel_overrides().resolve(
            api=api, backend=None, kernel=KernelDependency(spec.repo, version)
        )
        if found is None:
            return None
        demanded = {"require_signed": self.options.require_signed, "a lock file": self.lock}
        for what, value in demanded.items():
            if value:
                raise KernelIntegrityError(
                    f"`{spec}`: LOCAL_KERNELS puts `{found.variant_path}` in its place, of which "
                    f"{what} can say nothing. Take one of them away"
                )
        path = found.variant_path
        self.notes.append(f"`{spec}` is `{path}`, since LOCAL_KERNELS says so")
        return Resolved(spec, "", str(path), seal(path, None, self.copy))

    def _known(self, spec: HubSpec, commit: str, signed: bool) -> Sealed | None:
        """The best variant that is in the cache and was compared before."""
        from kernels.variants import parse_variant, resolve_variants

        variants = self.evidence(spec.repo).commit(commit).variants
        repo = CachedRepo(spec.repo)
        here = [v for v, files in variants.items() if repo.complete(commit, v, files)]
        fitting, _ = resolve_variants([parse_variant(v) for v in here], None)
        for variant in fitting:
            name = variant.variant_str
            return self._sealed(spec, commit, name, variants[name], signed)
        return None

    def compared(
        self, api: HfApi, spec: HubSpec, commit: str, variant: str, signed: bool
    ) -> Sealed:
        """A variant, downloaded as far as it is not in the cache, and compared with the listing.

        With `signed`, only if it is signed; until that is known, only its metadata are fetched.
        """
        files = listing(api, spec.repo, commit, variant)
        if signed:
            both = {path: files[path] for path in (METADATA, SIGNATURE) if path in files}
            fetch(api, spec.repo, commit, variant, both)
            folder = CachedRepo(spec.repo).build(commit) / variant
            try:
                verify.check_signature_of(folder, both, spec)
            except KernelIntegrityError as e:
                raise unreleased(spec, commit, e) from e
        fetch(api, spec.repo, commit, variant, files)
        sealed = self._sealed(spec, commit, variant, files, signed)
        self.evidence(spec.repo).commit(commit).variants[variant] = sealed.files
        return sealed

    def _sealed(
        self,
        spec: HubSpec,
        commit: str,
        variant: str,
        expected: Mapping[str, Listed | str],
        signed: bool,
    ) -> Sealed:
        try:
            sealed = seal(CachedRepo(spec.repo).build(commit) / variant, expected, self.copy)
            try:
                if self.options.require_signed:
                    verify.check_signature(sealed, spec)
                elif signed:
                    _signed_or_unreleased(sealed, spec, commit)
                if self.lock is not None:
                    verify.check_lock(sealed, self.lock.of(spec).variants, self.lock.path)
            except BaseException:
                sealed.discard()
                raise
        except KernelIntegrityError as e:
            raise KernelIntegrityError(f"`{spec}`: {e}") from e
        return sealed

    def require_trust(self, api: HfApi, spec: HubSpec, commit: str, named: bool) -> bool:
        """Whether this commit may run only if it is signed; see `hfpatch.hub.trust`.

        Raises:
            KernelUntrustedError: it may not run.
        """
        known = self.evidence(spec.repo)
        try:
            return self.trust.require(api, spec, commit, known, named)
        except KernelUntrustedError:
            if known != (kept := Evidence.read(spec.repo)) and kept != Evidence():
                known.write(spec.repo)  # trust that was taken back is not believed again
            raise

    def commit_of(self, api: HfApi, spec: HubSpec) -> str:
        """The commit to load: the locked one, the one that was downloaded, or the Hub's newest."""
        if self.lock is not None:
            return self.lock.of(spec).commit
        if spec.commit is not None:
            return spec.commit
        known = self.evidence(spec.repo).refs.get(spec.ref)
        cached = known or CachedRepo(spec.repo).commit_of(spec.ref)
        if cached is not None and not self.refresh:
            return cached
        if cached is not None and offline():
            raise KernelLoadError(
                f"what `{spec}` is now cannot be asked while HF_HUB_OFFLINE is set; the cache "
                f"`{cache_dir()}` has {cached[:12]}, which loads as it is"
            )
        if offline():
            raise KernelLoadError(
                f"`{spec}` was never downloaded to `{cache_dir()}` and HF_HUB_OFFLINE is set. "
                f"While online: `hfpatch download {spec}`"
            )
        commit = self.asked[spec] = newest_commit(api, spec)
        return commit

    def remember(self) -> None:
        """Once all is here and compared, let versions mean what the Hub said they are.

        Not before: a download that breaks off leaves what was there in use.
        """
        for spec, commit in self.asked.items():
            self.evidence(spec.repo).refs[spec.ref] = commit
            CachedRepo(spec.repo).remember(spec.ref, commit)
        for repo, known in self.known.items():
            if known != Evidence.read(repo):
                known.write(repo)


def _signed_or_unreleased(sealed: Sealed, spec: HubSpec, commit: str) -> None:
    try:
        verify.check_signature(sealed, spec)
    except KernelIntegrityError as e:
        raise unreleased(spec, commit, e) from e


def _fitting(api: HfApi, spec: HubSpec, commit: str) -> str:
    """The name of the best variant that the Hub has for this system."""
    from kernels.variants import get_variants, resolve_variants, variants_trace_str

    fitting, trace = resolve_variants(get_variants(api, repo_id=spec.repo, revision=commit), None)
    if not fitting:
        lines = variants_trace_str(trace).splitlines()
        raise NoCompatibleVariantError(
            f"`{spec}` has no build for this system ({system()}):\n"
            + "\n".join(f"  {line}" for line in _first(lines, 100) if line.strip())
            + "\nTake another version or repository (`hfpatch inspect` shows what they have), a "
            "torch that it was built for, or another source: kernels=['local', 'torch']"
        )
    return str(fitting[0].variant_str)


def _first(lines: list[str], count: int) -> Iterator[str]:
    yield from lines[:count]
    if lines[count:]:
        yield f"and {len(lines) - count} more"


def system() -> str:
    """What a build must fit: torch, its ABI, CUDA, compute capabilities, platform."""
    import platform

    import torch

    parts = [f"torch {torch.__version__}", f"C++11 ABI {torch.compiled_with_cxx11_abi()}"]
    parts.append(f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    if torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        parts.append("capability " + ", ".join(f"{a}.{b}" for a, b in sorted(found)))
    parts.append(f"{platform.machine()}-{platform.system().lower()}")
    return ", ".join(parts)
