"""`hfpatch kernel publish`: the built variants, to the version's branch of a repository.

What goes where is what kernel-builder does: `build/<variant>/` and `benchmarks/benchmark*.py` to
the branch `v<version>`, the filled card as `README.md` to it and to `main`. A variant that is there
already is replaced whole, other variants stay. Large files are sent first, one by one, and one
commit then names them all, so the branch is never half a build; files that the Hub has are not sent
again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from hfpatch.kernel_project.card import fill_card
from hfpatch.kernel_project.new import check_repo_id
from hfpatch.kernel_project.project import Project, ProjectError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_VERSION = re.compile(r"^v?(\d+)$")
_APPROVAL = "https://huggingface.co/spaces/kernels-community/README/discussions/new"
_MESSAGE = "Upload kernel with hfpatch"
_WRITES_KERNELS = "2.3"  # of huggingface_hub; see `publish` in pyproject.toml


@dataclass(frozen=True)
class File:
    """A file to publish: its path in the repository, and its content on disk or in memory."""

    path: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def read(self) -> bytes:
        """The content."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


@dataclass(frozen=True)
class Publication:
    """What is published where; `print` shows it."""

    repo_id: str
    branch: str
    variants: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def card(self) -> File:
        """The repository's page."""
        return next(f for f in self.files if f.path == "README.md")

    def __str__(self) -> str:
        width = max(len(f.path) for f in self.files)
        lines = [f"{self.repo_id}, branch {self.branch} (and README.md on main)"]
        lines += [f"  {f.path:{width}} {f.size:>12,}" for f in self.files]
        total = sum(f.size for f in self.files)
        lines.append(
            f"{len(self.files)} files, {total:,} bytes, {len(self.variants)} "
            + ("variant" if len(self.variants) == 1 else "variants")
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Published:
    """What became of a publication: numbers of files, and where it is."""

    url: str
    sent: int
    unchanged: int
    deleted: int


def plan_publication(
    project: Project, repo_id: str | None = None, version: str | None = None
) -> Publication:
    """What would be published. Uses no network.

    Args:
        project: with its built variants.
        repo_id: "org/name"; default: `general.hub.repo-id` of `build.toml`.
        version: "v1" or "1"; must be that of `build.toml`, which the builds carry.

    Raises:
        ProjectError: there is nothing to publish, nowhere to publish it, or another version.
    """
    repo_id = repo_id or project.repo_id
    if repo_id is None or repo_id.startswith("your-name/"):
        raise ProjectError(
            "where to? Name a repository: `--repo-id org/name`, or `repo-id` under "
            f"`[general.hub]` in `{project.root / 'build.toml'}`"
        )
    check_repo_id(repo_id)
    match = _VERSION.match(version or f"v{project.version}")
    if match is None:
        raise ProjectError(f"`{version}` is not a version: expected `v1`, `v2`, …")
    if int(match[1]) != project.version:
        raise ProjectError(
            f"`--version {version}`: `build.toml` says {project.version}, which is written in "
            f"every build; set `version = {match[1]}` there and build again"
        )
    branch = project.toml["general"].get("hub", {}).get("branch", f"v{project.version}")
    if branch != f"v{project.version}":
        raise ProjectError(
            f"`{project.root / 'build.toml'}` says `branch = {branch!r}`, where nobody looks for a "
            f"version; this publishes to `v{project.version}`: remove the line"
        )
    variants = project.variants()
    if not variants:
        raise ProjectError(
            f"`{project.root}` has no built variant; `hfpatch kernel build` makes those of this "
            "machine, kernel-builder all"
        )
    files = [File("README.md", fill_card(project, repo_id).encode())]
    for variant in variants:
        files += [
            File(f"build/{variant.name}/{path.relative_to(variant).as_posix()}", path)
            for path in sorted(variant.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
        ]
    files += [
        File(f"benchmarks/{path.name}", path)
        for path in sorted((project.root / "benchmarks").glob("benchmark*.py"))
    ]
    names = tuple(v.name for v in variants)
    return Publication(repo_id, f"v{project.version}", names, tuple(files))


def publish(
    plan: Publication, private: bool = False, say: Callable[[str], None] = lambda line: None
) -> Published:
    """Upload; run it again after an interruption, and only what is missing is sent.

    The token is huggingface_hub's: `HF_TOKEN`, or that of `hf auth login`.

    Args:
        plan: what to publish.
        private: of a repository that does not exist yet; False: as its owner's settings say.
        say: told what is being done.

    Raises:
        ProjectError: the Hub refused, or could not be reached, or the installed huggingface_hub
            cannot publish kernels; says why and what to do.
    """
    from huggingface_hub import HfApi, constants

    check_client()
    api = HfApi(endpoint=constants.ENDPOINT, library_name="hfpatch")
    with _explained(plan.repo_id):
        api.create_repo(plan.repo_id, repo_type="kernel", private=private or None, exist_ok=True)
        refs = api.list_repo_refs(plan.repo_id, repo_type="kernel")
        heads = {b.name: b.target_commit for b in refs.branches}
        new = plan.branch not in heads
        if new:
            say(f"making branch {plan.branch}")
            api.create_branch(plan.repo_id, repo_type="kernel", branch=plan.branch, exist_ok=True)
        there = _tree(api, plan.repo_id, plan.branch)
        changed = [f for f in plan.files if there.get(f.path) not in _hashes(f)]
        stale = [p for p in sorted(there) if _is_stale(p, plan, new)]
        if changed or stale:
            _commit(api, plan, plan.branch, changed, stale, heads.get(plan.branch), say)
        if _tree(api, plan.repo_id, "main").get("README.md") not in _hashes(plan.card):
            _commit(api, plan, "main", [plan.card], [], None, say)
    url = f"{constants.ENDPOINT}/kernels/{plan.repo_id}/tree/{plan.branch}"
    return Published(url, len(changed), len(plan.files) - len(changed), len(stale))


def check_client() -> None:
    """That the installed huggingface_hub can publish: it made repositories of kernels (1.10) long
    before it let anybody write to them.

    Raises:
        ProjectError: it cannot.
    """
    found = metadata.version("huggingface_hub")
    if Version(found) < Version(_WRITES_KERNELS):
        raise ProjectError(
            f"`huggingface_hub` {found} cannot write to a kernel's repository, expected >= "
            f"{_WRITES_KERNELS}: `pip install 'hfpatch[publish]'`"
        )


def _commit(
    api: HfApi,
    plan: Publication,
    branch: str,
    files: list[File],
    stale: list[str],
    parent: str | None,
    say: Callable[[str], None],
) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    where: dict[str, Any] = {"repo_type": "kernel", "revision": branch}
    additions = [
        CommitOperationAdd(f.path, f.source if isinstance(f.source, bytes) else str(f.source))
        for f in files
    ]
    for file, addition in zip(files, additions, strict=True):
        if file.size > 100_000 or file.path.endswith(".so"):
            say(f"sending {file.path} ({file.size:,} bytes)")
            api.preupload_lfs_files(plan.repo_id, [addition], **where)
    count = f"{len(files)} file" + "s" * (len(files) != 1)
    say(f"committing {count} to {branch}" + (f", {len(stale)} removed" if stale else ""))
    api.create_commit(
        plan.repo_id,
        [*additions, *(CommitOperationDelete(p) for p in stale)],
        commit_message=_MESSAGE,
        parent_commit=parent,
        **where,
    )


def _tree(api: HfApi, repo_id: str, branch: str) -> dict[str, str]:
    """The files of a branch, and the hash that the Hub knows each by."""
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repo_id, repo_type="kernel", revision=branch, recursive=True)
    return {
        entry.path: entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
        for entry in tree
        if isinstance(entry, RepoFile)
    }


def _hashes(file: File) -> tuple[str, str]:
    """What the Hub may know a file by: git's hash, or sha256 if it is stored by LFS or Xet."""
    data = file.read()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return git, hashlib.sha256(data).hexdigest()


def _is_stale(path: str, plan: Publication, new: bool) -> bool:
    """Whether a file of the branch belongs to what is replaced, and is not in it."""
    if any(f.path == path for f in plan.files):
        return False
    if re.fullmatch(r"benchmarks/benchmark[^/]*\.py", path):
        return True
    if new:  # what `main` had when the branch was made
        return path.startswith(("build/", "benchmarks/"))
    return any(path.startswith(f"build/{name}/") for name in plan.variants)


# ------------------------------------------------------------------------------ errors


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into one sentence and what to do."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    # its HTTP client's, whichever that is
    unreachable: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]

    again = "run the same command again: what was sent is not sent again"
    login = "`hf auth login`, or set `HF_TOKEN`, with a token that may write"
    try:
        yield
    except LocalTokenNotFoundError as e:
        raise ProjectError(f"there is no token for the Hub: {login}") from e
    except HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else 0
        said = " ".join((e.server_message or str(e)).split())
        advice = {
            401: f"the Hub does not accept the token: {login}",
            403: f"you may not write to it: take another `--repo-id` or token; publishing kernels "
            f"needs approval, which is asked for at {_APPROVAL}",
            404: "there is no such repository, or you may not see it",
            409: f"somebody else is writing to it; {again}",
            412: f"somebody else has written to it meanwhile; {again}",
            429: f"too many requests; wait, then {again}",
        }.get(status, again)
        raise ProjectError(f"`{repo_id}`: the Hub answered {status} ({said}); {advice}") from e
    except (unreachable, OSError) as e:
        raise ProjectError(
            f"`{repo_id}`: the Hub could not be reached ({type(e).__name__}: {e}); {again}"
        ) from e
