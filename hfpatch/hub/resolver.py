"""From a pinned spec to files on disk: the cache if it has them, else the Hub.

What was downloaded is used without a single request, also for a version branch that has moved
since; `hfpatch download` is what refreshes. `kernels` itself asks the Hub at each load, and with
HF_HUB_OFFLINE set it finds neither a version (it stores no ref) nor a repository of which only this
system's variant was downloaded (kernels 0.17.2 with huggingface_hub 2.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelLoadError, KernelUntrustedError, NoCompatibleVariantError
from hfpatch.hub.cache import CachedRepo, cache_dir, offline
from hfpatch.hub.explain import reason
from hfpatch.hub.lock import LockFile
from hfpatch.hub.options import HubOptions
from hfpatch.hub.spec import HubSpec, is_commit

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from kernels._rust import KernelDependency
    from kernels.resolver import LocalKernel, RemoteKernel


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
    """
    commit = api.kernel_info(spec.repo, revision=spec.ref).sha
    if commit is None or not is_commit(commit):
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


def dependency_of(spec: HubSpec) -> KernelDependency:
    """A spec as a dependency of `kernels`."""
    from kernels._rust import KernelDependency, KernelVersion

    if spec.version is not None:
        return KernelDependency(spec.repo, KernelVersion.Version(spec.version))
    return KernelDependency(spec.repo, KernelVersion.Revision(spec.ref))


@dataclass
class PinnedResolver:
    """A resolver for `kernels.deps.resolve_kernel_tree`.

    Attributes:
        options: on what terms.
        refresh: ask the Hub what a version is now, even if the cache knows what it was.
        specs: what was resolved, by variant folder, for the checks that follow.
        asked: what the Hub said that versions are; see `remember`.
    """

    options: HubOptions
    refresh: bool = False
    specs: dict[tuple[str, str], HubSpec] = field(default_factory=dict)
    asked: dict[HubSpec, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.options.lockfile
        self.lock = LockFile.read(path) if path is not None else None

    def resolve(
        self, *, api: HfApi, backend: str | None, kernel: KernelDependency
    ) -> LocalKernel | RemoteKernel:
        """The kernel's best variant for this system: in the cache, or on the Hub."""
        spec = spec_of(kernel)
        if not spec.pinned and not self.options.allow_branches and self.lock is None:
            raise KernelLoadError(
                f"it depends on `{spec}`, a branch, which can change under you: lock it (`hfpatch "
                "lock`), or allow it with `hub={'allow_branches': True}` (`--allow-branches`)"
            )
        commit = self.commit_of(api, spec)
        self.specs[spec.repo, commit] = spec
        cached = _cached_kernel(spec, commit, backend)
        if cached is not None:
            self.require_trust(api, spec)
            return cached
        if offline():
            raise KernelLoadError(
                f"`{spec}` (commit {commit[:12]}) is not complete in the cache `{cache_dir()}` and "
                f"HF_HUB_OFFLINE is set. While online: `hfpatch download {spec}`"
            )
        self.require_trust(api, spec)
        return _remote_kernel(api, spec, commit, backend)

    def commit_of(self, api: HfApi, spec: HubSpec) -> str:
        """The commit to load: the locked one, the one that was downloaded, or the Hub's newest."""
        if self.lock is not None:
            return self.lock.of(spec).commit
        if spec.commit is not None:
            return spec.commit
        cached = CachedRepo(spec.repo).commit_of(spec.ref)
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
        """Once all is here and verified, let versions mean what the Hub said they are.

        Not before: a download that breaks off leaves what was there in use.
        """
        for spec, commit in self.asked.items():
            CachedRepo(spec.repo).remember(spec.ref, commit)

    def require_trust(self, api: HfApi, spec: HubSpec) -> None:
        """Trusted by the user, or as a publisher that the Hub trusts.

        A lock file says which code, not whose: a config file can name one, and no file may make
        foreign code run. Nor does a publisher answer for a pull request: anybody can open one.
        """
        repo = CachedRepo(spec.repo)
        if self.options.trusts(spec):
            return
        how = (
            f"If you trust it: `hub={{'trust_remote_code': ['{spec.repo}']}}`, or "
            "`--trust-remote-code` on the command line"
        )
        if spec.ref.startswith("refs/pr/"):
            raise KernelUntrustedError(
                f"`{spec}` is a pull request, which is not its publisher's. {how}"
            )
        if repo.trusted and not self.refresh:
            return
        if offline():
            raise KernelUntrustedError(
                f"`{spec}`: whether `{spec.publisher}` is a trusted publisher was never asked, and "
                f"HF_HUB_OFFLINE is set. While online: `hfpatch download {spec}`. {how}"
            )
        try:
            publisher: Any = api.get_organization_overview(spec.publisher)
        except Exception as e:
            raise KernelUntrustedError(
                f"`{spec}`: the Hub does not say whether `{spec.publisher}` is a trusted publisher "
                f"({reason(e)}). {how}"
            ) from e
        if getattr(publisher, "trustedKernelPublisher", False) is not True:
            raise KernelUntrustedError(
                f"`{spec}`: `{spec.publisher}` is not a trusted publisher. {how}"
            )
        repo.remember_trust()


def _cached_kernel(spec: HubSpec, commit: str, backend: str | None) -> LocalKernel | None:
    from kernels import Metadata
    from kernels.resolver import LocalKernel
    from kernels.variants import get_variants_local, resolve_variants

    repo = CachedRepo(spec.repo)
    fitting, _ = resolve_variants(get_variants_local(repo.build(commit)), backend)
    for variant in fitting:
        if repo.complete(commit, variant.variant_str):
            path = repo.build(commit) / variant.variant_str
            return LocalKernel(path, Metadata.read_from_file(path / "metadata.json"))
    return None


def _remote_kernel(api: HfApi, spec: HubSpec, commit: str, backend: str | None) -> RemoteKernel:
    from kernels.resolver import resolve_hub_kernel

    try:
        return resolve_hub_kernel(spec.repo, api=api, backend=backend, revision=commit)
    except FileNotFoundError as e:
        if "Cannot find a build variant" not in str(e):
            raise
        raise NoCompatibleVariantError(
            f"`{spec}` has no build for this system ({system()}):\n{_trace(e)}\n"
            "Take another version or repository (`hfpatch inspect` shows what they have), a torch "
            "that it was built for, or another source: kernels=['local', 'torch']"
        ) from e


def _trace(e: Exception) -> str:
    """The lines of the decision trace: one per variant, with the reason."""
    return "\n".join(f"  {line}" for line in str(e).splitlines()[1:] if line.strip())


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


def variant_folder(kernel: Any) -> Path:
    """The folder of a kernel that `kernels` installed."""
    return Path(kernel.variant_path)
