"""`hfpatch kernel publish` against a loopback Hub, by the real huggingface_hub client."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from repositories import Blob
from scaffold import built_scaffold
from server import Hang, HubServer, Status, Truncate

from hfpatch import cli, kernel_build
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.load import load
from hfpatch.kernel_project import ProjectError
from hfpatch.kernel_project.project import Project
from hfpatch.kernel_project.publish import Published, plan_publication, publish

REPO = "me/my-kernel"
CPU = "torch-stable-abi211-cpu-x86_64-linux"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_scaffold(tmp_path_factory.mktemp("publish"))


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / built.name)


def variant(project: Path) -> Path:
    (found,) = (project / "build").iterdir()
    return found


def send(project: Path, **arguments: bool) -> Published:
    return publish(plan_publication(Project.open(project), REPO), **arguments)


def files(hub: HubServer, branch: str = "v1") -> dict[str, Blob]:
    repo = hub.repos["kernel", REPO]
    return {p: b for p, b in repo.commits[repo.branches[branch]].items() if p != ".gitattributes"}


# ------------------------------------------------------------------------------ what is sent


def test_what_is_published_where(hub: HubServer, project: Path) -> None:
    done = send(project)
    sent = files(hub)
    local = {
        f"build/{p.relative_to(project / 'build').as_posix()}": p
        for p in variant(project).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    local["benchmarks/benchmark.py"] = project / "benchmarks" / "benchmark.py"
    assert set(sent) == {*local, "README.md"}
    assert all(sent[name].data == path.read_bytes() for name, path in local.items())
    assert {name for name in sent if sent[name].lfs} == {n for n in sent if n.endswith(".so")}
    assert set(files(hub, "main")) == {"README.md"}
    card = sent["README.md"].data.decode()
    assert card == files(hub, "main")["README.md"].data.decode()
    assert "license: apache-2.0" in card and f'get_kernel("{REPO}", version=1)' in card
    assert "- `relu_squared`" in card and "- `ReLUSquared`" in card and "{%" not in card
    assert done == Published(f"{hub.url}/kernels/{REPO}/tree/v1", len(sent), 0, 0)


def test_it_is_loaded_by_hfpatch_and_by_kernels(hub: HubServer, project: Path) -> None:
    import kernels

    send(project)
    hub.trust("me")
    x = torch.linspace(-2, 2, 9)
    expected = torch.relu(x).square()
    package = load(HubSpec.parse(f"{REPO}@v1"), HubOptions())
    torch.testing.assert_close(package.module.relu_squared(x), expected)
    torch.testing.assert_close(kernels.get_kernel(REPO, version=1).relu_squared(x), expected)


def test_a_second_time_nothing_is_sent(hub: HubServer, project: Path) -> None:
    count = send(project).sent
    heads = dict(hub.repos["kernel", REPO].branches)
    before = len(hub.requests)
    assert send(project) == Published(f"{hub.url}/kernels/{REPO}/tree/v1", 0, count, 0)
    assert hub.repos["kernel", REPO].branches == heads
    assert not [r for r in hub.requests[before:] if "/commit/" in r or "/store/" in r]


def test_a_new_build_replaces_its_variant_and_leaves_the_others(
    hub: HubServer, project: Path
) -> None:
    send(project)
    other = {
        "build/torch-stable-abi211-cu130-x86_64-linux/metadata.json": b"{}",
        f"build/{CPU}/stale.py": b"",
        "benchmarks/benchmark_old.py": b"",
        "notes.md": b"mine",
    }
    hub.put(REPO, other, keep=True)
    (library,) = variant(project).glob("*.so")
    library.rename(library.with_name("_my_kernel_cpu_new.abi3.so"))
    done = send(project)
    assert (done.sent, done.deleted) == (1, 3)
    names = set(files(hub))
    assert f"build/{CPU}/_my_kernel_cpu_new.abi3.so" in names and "notes.md" in names
    assert "build/torch-stable-abi211-cu130-x86_64-linux/metadata.json" in names
    assert not names & {f"build/{CPU}/stale.py", "benchmarks/benchmark_old.py"}
    assert f"build/{CPU}/{library.name}" not in names
    assert not hub.seen("PUT", "/store/")[1:], "the library's content was there already"


def test_a_new_version_begins_without_the_old_builds(hub: HubServer, project: Path) -> None:
    send(project)
    hub.put(REPO, {"build/old/metadata.json": b"{}", "LICENSE": b"x"}, branch="main", keep=True)
    first = dict(files(hub))
    toml = project / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2"))
    path = variant(project) / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    send(project)
    assert files(hub) == first, "v1 stays what it was"
    assert {p.split("/")[1] for p in files(hub, "v2") if p.startswith("build/")} == {CPU}
    assert "LICENSE" in files(hub, "v2")


def test_bytecode_is_not_published(hub: HubServer, project: Path) -> None:
    cache = variant(project) / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.pyc").write_bytes(b"x")
    send(project)
    assert not any("pyc" in name for name in files(hub))


# ------------------------------------------------------------------------------ resuming


def test_interrupted_before_the_commit_it_is_resumed(hub: HubServer, project: Path) -> None:
    hub.fail("POST", "/commit/v1", Status(403), times=1)
    with pytest.raises(ProjectError, match="the Hub answered 403"):
        send(project)
    assert files(hub) == {}, "the branch is not half a build"
    assert len(hub.seen("PUT", "/store/")) == 1
    send(project)
    assert len(hub.seen("PUT", "/store/")) == 1, "the library was not sent again"
    assert len(files(hub)) > 5


def test_interrupted_between_the_branches_it_is_resumed(hub: HubServer, project: Path) -> None:
    hub.fail("POST", "/commit/main", Status(403), times=1)
    with pytest.raises(ProjectError, match="403"):
        send(project)
    assert "README.md" not in files(hub, "main")
    assert send(project).sent == 0
    assert "README.md" in files(hub, "main")


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]], ids=["publish", "dry run"])
def test_a_client_that_cannot_write_kernels(
    hub: HubServer,
    project: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """huggingface_hub before 2.3 raises its own ValueError, after it has made the repository."""
    monkeypatch.setattr("hfpatch.kernel_project.publish.metadata.version", lambda _: "2.2.0")
    assert run(project, "--repo-id", REPO, "--no-check", *arguments) == 2
    assert "`huggingface_hub` 2.2.0 cannot write to a kernel's repository, expected >= 2.3" in (
        capsys.readouterr().err
    )
    assert hub.seen("POST", "/") == []


@pytest.mark.parametrize(
    ("method", "path", "code", "said"),
    [
        ("POST", "/api/repos/create", 401, "does not accept the token: `hf auth login`"),
        ("POST", "/api/repos/create", 403, "needs approval"),
        ("GET", "/refs", 404, "you may not see it"),
        ("POST", "/commit/v1", 409, "somebody else is writing to it"),
        ("POST", "/commit/v1", 412, "somebody else has written to it meanwhile"),
        ("POST", "/preupload/", 400, "what was sent is not sent again"),
    ],
)
def test_what_the_hub_refuses(
    hub: HubServer, project: Path, method: str, path: str, code: int, said: str
) -> None:
    hub.fail(method, path, Status(code))
    with pytest.raises(ProjectError, match=f"`{REPO}`: the Hub answered {code}") as raised:
        send(project)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_real_wrong_token(hub: HubServer, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ProjectError, match="the Hub answered 401"):
        send(project)
    assert not hub.repos


def test_somebody_else_commits_meanwhile(
    hub: HubServer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the commit that this one was based on: theirs is not written over."""
    send(project)
    (variant(project) / "reference.py").write_text("x = 1\n")
    original = HfApi.create_commit

    def late(api: HfApi, *arguments: object, **more: object) -> object:
        hub.put(REPO, {"theirs.md": b"x"}, keep=True)
        return original(api, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "create_commit", late)
    with pytest.raises(ProjectError, match="has written to it meanwhile; run the same command"):
        send(project)
    monkeypatch.undo()
    assert b"x = 1" not in files(hub)[f"build/{CPU}/reference.py"].data


def test_the_network_fails(hub: HubServer, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's retries
    hub.fail("POST", "/commit/v1", Truncate(3), times=1)
    with pytest.raises(ProjectError, match="the Hub could not be reached"):
        send(project)
    hub.fail("GET", "/tree/", Hang(0))
    with pytest.raises(ProjectError, match="could not be reached"):
        send(project)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(ProjectError, match="Connection refused"):
        send(project)


# ------------------------------------------------------------------------------ the command


def run(*arguments: object) -> int:
    return cli.main(["kernel", "publish", *map(str, arguments)])


def test_a_dry_run_sends_nothing(
    hub: HubServer, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub.quiet():
        assert run(project, "--repo-id", REPO, "--dry-run") == 0
    out = capsys.readouterr().out
    assert f"{REPO}, branch v1" in out and "dry run: nothing was sent" in out
    (library,) = variant(project).glob("*.so")
    (line,) = (line for line in out.splitlines() if library.name in line)
    assert line.split()[-1] == f"{library.stat().st_size:,}"
    assert "9 files" in out and "1 variant" in out


def test_what_fails_the_check_is_not_sent(
    hub: HubServer, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = project / "torch-ext" / "my_kernel" / "__init__.py"
    init.write_text(init.read_text() + "\n# edited\n")
    with hub.quiet():
        assert run(project, "--repo-id", REPO) == 1
    said = capsys.readouterr()
    assert "`__init__.py` was edited since" in said.out and "nothing was sent" in said.err
    assert run(project, "--repo-id", REPO, "--no-check") == 0
    said = capsys.readouterr()
    assert f"/kernels/{REPO}/tree/v1" in said.out and "0 unchanged" in said.out
    assert "making branch v1" in said.err and ".abi3.so" in said.err


def test_where_and_which_version(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert run(project, *arguments, "--dry-run") == 2
        return capsys.readouterr().err

    assert "where to? Name a repository: `--repo-id org/name`" in refused()
    assert "is not a repository of the Hub" in refused("--repo-id", "nowhere")
    assert "is not a version: expected `v1`" in refused("--repo-id", REPO, "--version", "main")
    assert "`build.toml` says 1" in refused("--repo-id", REPO, "--version", "v2")
    assert plan_publication(Project.open(project), REPO, "1").branch == "v1"
    toml = project / "build.toml"
    toml.write_text(toml.read_text().replace("your-name/", "me/"))
    assert plan_publication(Project.open(project)).repo_id == REPO
    good = toml.read_text()
    toml.write_text(good.replace("[general.hub]", '[general.hub]\nbranch = "dev"'))
    assert "says `branch = 'dev'`" in refused("--repo-id", REPO)
    toml.write_text(good)
    shutil.rmtree(project / "build")
    assert "has no built variant; `hfpatch kernel build`" in refused("--repo-id", REPO)


def test_builds_of_kernel_builder_come_first(project: Path) -> None:
    """It leaves them in `result`."""
    shutil.copytree(project / "build", project / "result")
    (project / "result" / CPU).rename(project / "result" / "torch212-cxx11-cpu-x86_64-linux")
    plan = plan_publication(Project.open(project), REPO)
    assert plan.variants == ("torch212-cxx11-cpu-x86_64-linux",)
    assert kernel_build.digest(variant(project))["files"]
