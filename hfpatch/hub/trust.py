"""Whose code may run: a publisher that the Hub trusts, and of it what the publisher has released.

A repository's name is its publisher's, but not each of its commits is: anybody can open a pull
request, and its commits can be had by their hashes like any other. So a commit counts only if a
version branch or a tag of the repository leads to it, as the Hub says; or if it is signed by
somebody whom `kernels` knows; or if the user's own code names it in `trust_remote_code`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelUntrustedError
from hfpatch.hub.cache import offline
from hfpatch.hub.evidence import Evidence, fresh
from hfpatch.hub.explain import reason
from hfpatch.hub.options import HubOptions
from hfpatch.hub.spec import HubSpec

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: Branches and tags whose history is looked through for a commit.
_MOST_REFS = 64


@dataclass
class Trust:
    """Asks the user's options, then what is known of a repository, then the Hub.

    `notes` says what was believed because nobody could be asked.
    """

    options: HubOptions
    refresh: bool = False
    notes: list[str] = field(default_factory=list)

    def require(self, api: HfApi, spec: HubSpec, commit: str, known: Evidence, named: bool) -> bool:
        """Let a commit pass, or say why not.

        Args:
            api: whom to ask.
            spec: what was asked for.
            commit: what that is.
            known: of the repository; what is learned is added to it, not yet written.
            named: the user asked for just this, rather than a lock file or another kernel.

        Returns:
            Whether it may run only if it is signed: no branch and no tag leads to it.

        Raises:
            KernelUntrustedError: nobody vouches for it, or nobody can be asked.
        """
        if self.options.trusts_commit(spec.repo, commit):
            return False
        pull_request = spec.ref.startswith("refs/")
        if self.options.trusts(spec):
            if named and (spec.commit is not None or pull_request):
                return False
        else:
            self._require_publisher(api, spec, known)
        if pull_request:
            raise KernelUntrustedError(
                f"`{spec}` is a pull request, which is not its publisher's. {_how(spec, commit)}"
            )
        return not self._released(api, spec, commit, known)

    def _require_publisher(self, api: HfApi, spec: HubSpec, known: Evidence) -> None:
        how = _how(spec)
        if known.publisher and not self.refresh:
            if fresh(known.publisher):
                return
            if offline():
                self._old(spec, "that its publisher is trusted", known.publisher)
                return
        if offline():
            raise KernelUntrustedError(
                f"`{spec}`: whether `{spec.publisher}` is a trusted publisher was never asked "
                f"here, and HF_HUB_OFFLINE is set. While online: `hfpatch download {spec}`. {how}"
            )
        try:
            publisher: Any = api.get_organization_overview(spec.publisher)
        except Exception as e:
            raise KernelUntrustedError(
                f"`{spec}`: the Hub does not say whether `{spec.publisher}` is a trusted publisher "
                f"({reason(e)}). {how}"
            ) from e
        trusted = getattr(publisher, "trustedKernelPublisher", False) is True
        if not trusted or getattr(publisher, "name", None) != spec.publisher:
            known.publisher = 0.0
            raise KernelUntrustedError(
                f"`{spec}`: `{spec.publisher}` is not a trusted publisher. {how}"
            )
        known.publisher = time.time()

    def _released(self, api: HfApi, spec: HubSpec, commit: str, known: Evidence) -> bool:
        """Whether a branch or tag that counts leads to the commit."""
        found = known.commit(commit)
        if found.via and self._counts(found.via, spec) and not self.refresh:
            if fresh(found.asked):
                return True
            if offline():
                self._old(spec, f"that {found.via} leads to the commit", found.asked)
                return True
        if offline() and found.asked and not found.via:
            return False
        if offline():
            raise KernelUntrustedError(
                f"`{spec}`: whether a version of `{spec.repo}` leads to the commit {commit[:12]} "
                f"was never asked here, and HF_HUB_OFFLINE is set. While online: `hfpatch download "
                f"{spec}`. {_how(spec, commit)}"
            )
        try:
            via = self._via(api, spec, commit)
        except Exception as e:
            raise KernelUntrustedError(
                f"`{spec}`: the Hub does not say whether a version leads to the commit "
                f"{commit[:12]} ({reason(e)}). {_how(spec, commit)}"
            ) from e
        found.via, found.asked = via, time.time()
        return bool(via)

    def _via(self, api: HfApi, spec: HubSpec, commit: str) -> str:
        """A branch or tag that leads to the commit, "" if none does."""
        refs = api.list_repo_refs(spec.repo, repo_type="kernel")
        rows = [("heads", r) for r in refs.branches] + [("tags", r) for r in refs.tags]
        names = {
            f"{kind}/{r.name}": r.target_commit
            for kind, r in rows
            if r.ref == f"refs/{kind}/{r.name}" and self._counts(f"{kind}/{r.name}", spec)
        }
        for name, target in names.items():
            if target == commit:
                return name
        # the version that was asked for is the likeliest
        first = f"heads/{spec.ref}"
        for name in sorted(names, key=lambda n: (n != first, n))[:_MOST_REFS]:
            history = api.list_repo_commits(
                spec.repo, repo_type="kernel", revision=name.partition("/")[2]
            )
            if any(c.commit_id == commit for c in history):
                return name
        return ""

    def _counts(self, via: str, spec: HubSpec) -> bool:
        """Whether that branch or tag is one that is taken: a branch that is no version only where
        it was asked for by its name, which `allow_branches` or a lock file allowed; for a version
        that no lock file pins only itself, since its commit may be what a shared cache says."""
        kind, _, name = via.partition("/")
        if spec.version is not None and self.options.lockfile is None:
            return name == spec.ref
        released = kind == "tags" or HubSpec("", name).version is not None
        return released or self.options.allow_branches or name == spec.ref

    def _old(self, spec: HubSpec, what: str, asked: float) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(asked))
        self.notes.append(
            f"`{spec}`: the Hub said {what} on {day}; since HF_HUB_OFFLINE is set, it was not "
            "asked again"
        )


def unreleased(spec: HubSpec, commit: str, why: object) -> KernelUntrustedError:
    """The error where nothing leads to a commit and it is not signed, for that reason."""
    moved = f" If the version moved: `hfpatch download {spec}`." if spec.version is not None else ""
    return KernelUntrustedError(
        f"`{spec}`: no version branch and no tag of `{spec.repo}` leads to the commit "
        f"{commit[:12]}, so it need not be its publisher's: a pull request has commits too; and "
        f"{why}.{moved} {_how(spec, commit)}"
    )


def _how(spec: HubSpec, commit: str = "") -> str:
    name = f"{spec.repo}@{commit}" if commit and spec.commit != commit else spec.repo
    return (
        f"If you trust it: `hub={{'trust_remote_code': ['{name}']}}`, or `--trust-kernel {name}` "
        "on the command line"
    )
