"""Attacks by who is not the publisher: commits, names and answers about trust."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from attack import SPEC, evil, loads, model, ran, sampled, withstood
from huggingface_hub import constants
from packages import SILU, fresh, package
from server import Body, Edit, HubServer, Redirect, Status

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.download import download, lock


@pytest.fixture
def pull(toy: HubServer) -> str:
    """The hash of a commit in a pull request to `toy/kernel`, which anybody can open."""
    return toy.put("toy/kernel", evil(), branch="refs/pr/1")


def locked(path: Path, commit: str, files: dict[str, bytes]) -> Path:
    """A lock file that names a commit, with the right hash of its metadata."""
    data = files["build/torch-cpu/metadata.json"]
    row = {
        "kernel": SPEC, "commit": commit,
        "variants": {"torch-cpu": hashlib.sha256(data).hexdigest()},
    }  # fmt: skip
    path.write_text(json.dumps({"format": 1, "kernels": [row]}))
    return path


# ------------------------------------------------------------------------------ pull requests


def test_the_commit_of_a_pull_request_by_hash(pull: str) -> None:
    withstood(f"toy/kernel@{pull}", "no version branch and no tag")


@pytest.mark.parametrize("below", sampled([".", "a", "a/b"], 2))
@pytest.mark.parametrize("name", ["hfpatch.toml", "pyproject.toml"])
def test_by_a_config_file_that_is_found(
    below: str, name: str, pull: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "kernels" if name == "hfpatch.toml" else "tool.hfpatch.kernels"
    (tmp_path / name).write_text(f'[{table}]\nsilu = "toy/kernel@{pull}"\n')
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / below)
    monkeypatch.delenv("HFPATCH_CONFIG")
    withstood(None, "nobody named that file")


def test_by_a_config_file_that_is_named(
    pull: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(f'[kernels]\nsilu = "toy/kernel@{pull}"\n')
    monkeypatch.setenv("HFPATCH_CONFIG", str(tmp_path / "mine.toml"))
    withstood(None, "no version branch and no tag")


@pytest.mark.parametrize("trust", [False, ("toy/kernel",), ("toy/other",)])
def test_by_a_lock_file(trust: object, toy: HubServer, tmp_path: Path) -> None:
    """Also where the user vouches for the repository: the file names the commit, not the user."""
    files = evil()
    commit = toy.put("toy/kernel", files, branch="refs/pr/1")
    path = locked(tmp_path / "hfpatch.lock", commit, files)
    hub = {"lockfile": path, "trust_remote_code": trust}
    withstood(SPEC, "no version branch and no tag", hub=hub)


@pytest.mark.parametrize("trust", [False, ("toy/kernel",), ("toy/base", "toy/kernel")])
def test_by_a_dependency(trust: object, toy: HubServer) -> None:
    commit = toy.put("toy/base", evil(name="base"), branch="refs/pr/1")
    toy.put("toy/base", package(name="base"))
    depends = {"kernel-depends": [{"repo-id": "toy/base", "revision": commit}]}
    toy.put("toy/kernel", package(**depends))
    withstood(SPEC, "no version branch and no tag", hub={"trust_remote_code": trust})


def test_a_dependency_on_the_pull_request_itself(toy: HubServer) -> None:
    toy.put("toy/base", evil(name="base"), branch="refs/pr/1")
    depends = {"kernel-depends": [{"repo-id": "toy/base", "revision": "refs/pr/1"}]}
    toy.put("toy/kernel", package(**depends))
    withstood(SPEC, "is a pull request", hub={"allow_branches": True})


@pytest.mark.parametrize("part", [slice(0, 7), slice(0, 12), slice(0, 39)])
def test_by_a_part_of_its_hash(part: slice, pull: str) -> None:
    """The Hub takes that for a revision too."""
    spec = f"toy/kernel@{pull[part]}"
    withstood(spec, "has no branch and no tag", hub={"allow_branches": True})


def test_by_its_hash_in_capitals(pull: str) -> None:
    spec = f"toy/kernel@{pull.upper()}"
    if spec.islower():
        pytest.skip("a hash of digits alone")
    withstood(spec, "has no branch and no tag", hub={"allow_branches": True})


def test_a_branch_that_is_no_version(toy: HubServer) -> None:
    commit = toy.put("toy/kernel", evil(), branch="experiment")
    withstood(f"toy/kernel@{commit}", "no version branch and no tag")


def test_a_version_that_is_listed_as_a_pull_request(toy: HubServer, pull: str) -> None:
    """A name alone is no branch: the full reference counts."""

    def change(body: bytes) -> bytes:
        data = json.loads(body)
        row = {"name": "v9", "ref": "refs/pr/1", "targetCommit": pull}
        return json.dumps({**data, "branches": [*data["branches"], row]}).encode()

    toy.fail("GET", "/refs", Edit(change))
    withstood(f"toy/kernel@{pull}", "no version branch and no tag")


def test_what_the_publisher_released_loads(toy: HubServer, pull: str, tmp_path: Path) -> None:
    """Commits of a version's history and of tags; and any that the user's own code names."""
    repo = toy.repos["kernel", "toy/kernel"]
    old = repo.branches["v1"]
    toy.put("toy/kernel", package(SILU + "\n"))
    assert loads(f"toy/kernel@{old}").startswith(old[:12])
    tagged = toy.put("toy/kernel", package(SILU + "\n\n"), branch="release")
    withstood(f"toy/kernel@{tagged}", "no version branch and no tag")
    repo.tags["2026.1"] = tagged
    assert loads(f"toy/kernel@{tagged}").startswith(tagged[:12])
    for trust in (True, ["toy/kernel"], [f"toy/kernel@{pull}"]):
        assert loads(f"toy/kernel@{pull}", hub={"trust_remote_code": trust}).startswith(pull[:12])
    assert ran()


def test_a_commit_that_is_named_may_come_by_a_lock_file(toy: HubServer, tmp_path: Path) -> None:
    files = package(SILU + "\n# a pull request\n")
    commit = toy.put("toy/kernel", files, branch="refs/pr/1")
    path = locked(tmp_path / "hfpatch.lock", commit, files)
    trust = [f"toy/kernel@{commit}"]
    assert loads(SPEC, hub={"lockfile": path, "trust_remote_code": trust}).startswith(commit[:12])
    for wrong in (f"toy/other@{commit}", "toy/kernel@" + "0" * 40):
        withstood(SPEC, "no version", hub={"lockfile": path, "trust_remote_code": [wrong]})


# ------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "fault",
    sampled([
        Status(500), Status(404), Body(b"{}"), Body(b"[]"), Body(b"null"), Body(b"\xff"),
        Body(b'{"branches": [{}], "tags": [], "converts": []}'),
        Body(b'{"branches": 5, "tags": [], "converts": []}'),
    ], 3),
)  # fmt: skip
@pytest.mark.parametrize("path", ["/refs$", "/commits/"])
def test_a_hub_that_does_not_say(
    path: str, fault: object, toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that the commit is released; without its word nothing is imported."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's retries
    old = toy.put("toy/kernel", evil())
    toy.put("toy/kernel", package(SILU + "\n"))
    toy.fail("GET", path, fault)  # type: ignore[arg-type]
    withstood(f"toy/kernel@{old}", "version")


@pytest.mark.parametrize(
    "answer",
    sampled([
        {"name": "toy", "trustedKernelPublisher": "true"},
        {"name": "toy", "trustedKernelPublisher": 1},
        {"name": "toy", "trustedKernelPublisher": ["yes"]},
        {"name": "toy"},
        {"name": "Toy", "trustedKernelPublisher": True},
        {"name": "other", "trustedKernelPublisher": True},
        {"trustedKernelPublisher": True},
        [], "yes", None, 7,
    ], 4),
)  # fmt: skip
def test_an_answer_that_is_no_clear_yes(answer: object, hub: HubServer) -> None:
    hub.put("toy/kernel", evil())
    hub.fail("GET", "/overview", Body(json.dumps(answer).encode()))
    withstood(SPEC, "trusted publisher")


def test_a_repository_that_was_moved(toy: HubServer) -> None:
    """The Hub redirects the old name to whoever has it now; trust was in the old one's owner."""
    toy.put("mallory/kernel", evil())
    for route in ("/revision/v1", "/refs", "/tree/.*", ""):
        path = f"/api/kernels/toy/kernel{route}"
        toy.fail("GET", f"^{path}$", Redirect(path.replace("toy", "mallory").replace(".*", "v1")))
    withstood(SPEC, "sends elsewhere")


def test_an_answer_about_another_repository(toy: HubServer) -> None:
    other = toy.put("mallory/kernel", evil())
    body = json.dumps({"id": "mallory/kernel", "sha": other}).encode()
    toy.fail("GET", "/api/kernels/toy/kernel/revision/v1", Body(body))
    withstood(SPEC, "answers for `mallory/kernel`")


@pytest.mark.parametrize("sha", sampled(["../../../../evil", "/etc", "v1", 7, None, ["a" * 40]], 2))
def test_a_commit_that_is_none(sha: object, toy: HubServer) -> None:
    body = json.dumps({"id": "toy/kernel", "sha": sha}).encode()
    toy.fail("GET", "/api/kernels/toy/kernel/revision/v1", Body(body))
    withstood(SPEC)


def test_trust_is_asked_anew_after_a_while(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken back by the Hub, it is not believed for ever; nor is a clock that was set back."""
    loads()
    with toy.quiet():
        loads()
    toy.trusted.clear()
    with toy.quiet():
        loads()
    now = time.time()
    for then in (now + 30 * 24 * 3600, now - 24 * 3600):
        with monkeypatch.context() as later:
            later.setattr(time, "time", lambda then=then: then)
            withstood(SPEC, "`toy` is not a trusted publisher")
    withstood(SPEC, "is not a trusted publisher")  # it is not believed again
    toy.trust("toy")
    loads()


def test_without_a_network_old_trust_holds_and_is_told(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads()
    then = time.time() + 30 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: then)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fresh()
    with toy.quiet():
        report = hfpatch.apply(model(), kernels={"silu": SPEC})
    assert report.swaps and "was not asked again" in "\n".join(report.notes)


def test_a_commit_that_was_withdrawn(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher took a bad commit out of the version's history."""
    old = toy.repos["kernel", "toy/kernel"].branches["v1"]
    loads(f"toy/kernel@{old}")
    repo = toy.repos["kernel", "toy/kernel"]
    new = toy.put("toy/kernel", package(SILU + "\n"))
    repo.parents[new] = ""
    loads(f"toy/kernel@{old}")
    then = time.time() + 30 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: then)
    withstood(f"toy/kernel@{old}", "no version branch and no tag")


def test_commands_refuse_them_too(toy: HubServer, pull: str, tmp_path: Path) -> None:
    spec = HubSpec.parse(f"toy/kernel@{pull}")
    for command in (
        lambda: download(spec, HubOptions()),
        lambda: download(spec, HubOptions(), all_variants=True),
        lambda: lock([spec], HubOptions(), tmp_path / "hfpatch.lock"),
    ):
        with pytest.raises(HfpatchError, match="no version branch and no tag"):
            command()
    assert not (tmp_path / "hfpatch.lock").exists()
