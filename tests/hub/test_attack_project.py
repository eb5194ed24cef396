"""Attacks by files of a project that others wrote: config files, lock files, local builds."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from attack import EVIL, SPEC, evil, loads, model, ran, sampled, withstood
from packages import SILU, fresh, package
from server import HubServer

import hfpatch
from hfpatch import cli
from hfpatch.errors import KernelLoadError, KernelUntrustedError
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.download import lock
from hfpatch.hub.lock import LockFile
from hfpatch.kernels.config import read_defaults


@pytest.fixture
def found(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file two folders above the working directory; nobody named it."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.delenv("HFPATCH_CONFIG")
    return tmp_path / "hfpatch.toml"


# ------------------------------------------------------------------------------ config files


@pytest.mark.parametrize(
    "text",
    [
        f'kernels = "{SPEC}"', f'[kernels]\nsilu = "{SPEC}"', 'kernels = "hub"',
        '[kernels]\nsilu = ["hub"]', f'[kernels]\n"*" = "{SPEC}"',
        f'[kernels]\nsilu = ["{SPEC}", "toy/other@v1"]', 'kernels = "toy/kernel@' + "a" * 40 + '"',
    ],
)  # fmt: skip
def test_a_found_file_that_names_a_kernel(text: str, found: Path, toy: HubServer) -> None:
    """Even of a trusted publisher: which of its old versions would be somebody else's choice."""
    toy.put("toy/kernel", evil())
    found.write_text(text)
    with toy.quiet():
        withstood(None, "nobody named that file")


@pytest.mark.parametrize(
    "line",
    ['repos = ["toy/kernel@v1"]', 'lockfile = "hfpatch.lock"', "allow-branches = true",
     'require-signed = true\nrepos = ["toy/kernel@v1"]'],
)  # fmt: skip
def test_a_found_file_that_says_on_what_terms(line: str, found: Path, toy: HubServer) -> None:
    """Nothing of the Hub is loaded: without the file's terms, which are not taken, it would be
    loaded on others than its author meant."""
    toy.put("toy/kernel", evil())
    found.write_text(f"[hub]\n{line}\n")
    with toy.quiet():
        withstood(SPEC, "nobody named that file")
        with pytest.raises(KernelUntrustedError):
            hfpatch.plan(model(), kernels={"silu": SPEC}, hub={"allow_branches": True}, strict=True)
    assert cli.main(["download", SPEC]) == cli.main(["lock", SPEC]) == 1


def test_what_a_found_file_may_do(found: Path, toy: HubServer) -> None:
    toy.put("toy/kernel", evil())
    found.write_text('[kernels]\nsilu = "none"\nlayer_norm = "torch"\n"*" = ["local", "torch"]\n')
    report = hfpatch.apply(model())
    assert [s.kind for s in report.skips] == ["off"]
    assert f"`{found}` chose the kernels: silu: none; layer_norm: torch" in report.notes[0]
    found.write_text("[hub]\nrequire-signed = true\n")
    withstood(SPEC, "is not signed")
    found.write_text('kernels = "none"')
    assert [s.kind for s in hfpatch.apply(model()).skips] == ["off"]


def test_a_file_is_taken_whole_where_it_is_named(
    found: Path, toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.write_text(f'[kernels]\nsilu = "hub"\n[hub]\nrepos = ["{SPEC}"]\n')
    monkeypatch.setenv("HFPATCH_CONFIG", str(found))
    report = hfpatch.apply(model(), strict=True)
    assert [s.source for s in report.swaps] == [SPEC] and "chose the kernels" in report.notes[0]


@pytest.mark.parametrize("name", ["hfpatch.toml", "pyproject.toml"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large", "deep", "bytes"])
def test_a_config_file_that_is_none(kind: str, name: str, found: Path, toy: HubServer) -> None:
    path = found.with_name(name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        contents = {"large": b"#" * (5 << 20), "deep": b"x = " + b"[" * 20_000, "bytes": b"\xff"}
        path.write_bytes(contents[kind])
    before = time.monotonic()
    # a broken pyproject.toml may be anybody's: only a file of ours is an error
    if kind in ("pipe", "device", "folder") or name == "pyproject.toml":
        assert not read_defaults().origin
    else:
        with pytest.raises(ValueError, match="cannot be read"):
            read_defaults()
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("where", ["../../hfpatch.lock", "/tmp/hfpatch.lock", "link/hfpatch.lock"])
def test_a_lock_file_outside_of_the_project(
    where: str, found: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("/tmp")
    found.write_text(f'[hub]\nlockfile = "{where}"\n')
    monkeypatch.setenv("HFPATCH_CONFIG", str(found))
    with pytest.raises(ValueError, match="which is outside of"):
        read_defaults()


def test_trust_in_a_models_code_is_none_in_kernels(
    toy: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--trust-remote-code` of `plan` and `apply-check` is about the model."""
    toy.trusted.clear()
    toy.put("toy/kernel", evil())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32,
    }))  # fmt: skip
    for command in (["plan"], ["apply-check", "--random-weights"]):
        fresh()
        arguments = [*command, str(config), "--trust-remote-code", "--kernels", f"rms_norm={SPEC}"]
        status = cli.main(arguments)
        out = capsys.readouterr()
        assert not ran() and "is not a trusted publisher" in out.out + out.err, (status, out)
    fresh()
    cli.main(["plan", str(config), "--kernels", f"rms_norm={SPEC}", "--trust-kernel", "toy/kernel"])
    assert ran(), "named, it is loaded"


# ------------------------------------------------------------------------------ lock files


def row(**change: object) -> dict[str, object]:
    return {"kernel": SPEC, "commit": "a" * 40, "variants": {"torch-cpu": "b" * 64}} | change


@pytest.mark.parametrize(
    "text",
    sampled([
        json.dumps({"format": 1, "kernels": [row(), row(commit="c" * 40)]}),
        json.dumps({"format": 1, "kernels": [row(), row(kernel="Toy/Kernel@v1")]}),
        '{"format": 1, "format": 1, "kernels": []}',
        json.dumps({"format": 1, "kernels": [row()]}).replace(
            '"commit"', '"commit": "' + "c" * 40 + '", "commit"'
        ),
        json.dumps({"format": 1, "kernels": [row()]}).replace(
            '"torch-cpu"', '"torch-cpu": "' + "c" * 64 + '", "torch-cpu"'
        ),
        json.dumps({"format": True, "kernels": [row()]}),
        json.dumps({"format": 1.0, "kernels": [row()]}),
        json.dumps({"format": 1, "kernels": {SPEC: row()}}),
        json.dumps({"format": 1, "kernels": [row(commit="A" * 40)]}),
        json.dumps({"format": 1, "kernels": [row(kernel="toy/kernel@" + "c" * 40)]}),
        json.dumps({"format": 1, "kernels": [row(variants={"../torch-cpu": "b" * 64})]}),
        json.dumps({"format": 1, "kernels": [row(variants={"torch-cpu": "b" * 63})]}),
        json.dumps({"format": 1, "kernels": [row(variants={"torch-cpu": None})]}),
        json.dumps({"format": 1, "kernels": [row(variants=[["torch-cpu", "b" * 64]])]}),
        json.dumps({"format": 1, "kernels": [row(kernel="t\u043ey/kernel@v1")]}),
        json.dumps({"format": 1, "kernels": [row(trust=True)]}),
        '{"format": 1, "kernels": [' + "[" * 100_000, '{"format": NaN, "kernels": []}',
        '{"format": ' + "1" * 5000 + ', "kernels": []}', "[]", "null", '"x"', "1", "",
    ], 8),
    ids=range(24),
)  # fmt: skip
def test_lock_files(text: str, toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    path.write_text(text)
    with toy.quiet():
        withstood(SPEC, "cannot be read", hub={"lockfile": path, "trust_remote_code": True})


@pytest.mark.parametrize("kind", ["pipe", "zero", "folder", "large", "terminal"])
def test_a_lock_file_that_is_none(kind: str, toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b" " * (17 << 20))
    else:
        path.symlink_to("/dev/zero" if kind == "zero" else "/dev/tty")
    before = time.monotonic()
    withstood(SPEC, "cannot be read", hub={"lockfile": path})
    assert time.monotonic() - before < 20


def test_a_lock_of_another_repositorys_commit(toy: HubServer, tmp_path: Path) -> None:
    files = evil()
    other = toy.put("toy/other", files)
    data = files["build/torch-cpu/metadata.json"]
    variants = {"torch-cpu": hashlib.sha256(data).hexdigest()}
    path = tmp_path / "hfpatch.lock"
    path.write_text(json.dumps({"format": 1, "kernels": [row(commit=other, variants=variants)]}))
    for trust in (False, True):
        withstood(SPEC, hub={"lockfile": path, "trust_remote_code": trust})


def test_a_lock_that_covers_no_file(toy: HubServer, tmp_path: Path) -> None:
    files = evil(digest=False)
    commit = toy.put("toy/kernel", files)
    data = files["build/torch-cpu/metadata.json"]
    variants = {"torch-cpu": hashlib.sha256(data).hexdigest()}
    path = tmp_path / "hfpatch.lock"
    path.write_text(json.dumps({"format": 1, "kernels": [row(commit=commit, variants=variants)]}))
    withstood(SPEC, "hold no digest", hub={"lockfile": path})


def test_a_lock_that_changed_since_is_read_again(toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    m = model()
    assert hfpatch.apply(m, kernels={"silu": SPEC}, hub={"lockfile": path}).swaps
    path.write_text('{"format": 1, "kernels": []}')
    (skip,) = hfpatch.apply(m, kernels={"silu": SPEC}, hub={"lockfile": path}).skips
    assert "is not in the lock file" in skip.reason


@pytest.mark.parametrize("name", ["hfpatch.lock", "kernels.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_what_is_written_over(kind: str, name: str, toy: HubServer, tmp_path: Path) -> None:
    """A link in the project may lead to a file of the user's."""
    victim = tmp_path / "victim"
    good = json.dumps({"format": 1, "kernels": []}) if name == "hfpatch.lock" else "[]"
    if kind == "link":
        victim.write_text(good)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(KernelLoadError, match="cannot be"):
        lock([HubSpec.parse(SPEC)], HubOptions(), tmp_path / "hfpatch.lock")
    assert not victim.exists() or victim.read_text() == good
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_lock_file_is_written_whole(toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    before = path.stat().st_ino
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    assert path.stat().st_ino != before and LockFile.read(path).kernels[SPEC]


# ------------------------------------------------------------------------------ local builds


def local(folder: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    monkeypatch.setenv("LOCAL_KERNELS", f"toy/kernel={folder}")
    return folder / "build" / "torch-cpu"


def test_a_local_build_beside_what_it_cannot_meet(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature, or a lock file given in code."""
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse(SPEC)], HubOptions(), path)
    local(tmp_path / "mine", evil(), monkeypatch)
    for hub in ({"require_signed": True}, {"lockfile": path},
                {"lockfile": path, "trust_remote_code": True}):  # fmt: skip
        withstood(SPEC, "Take one of them away", hub=hub)


def test_a_local_build_of_a_dependency(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depends = {"kernel-depends": [{"repo-id": "toy/kernel", "version": 1}]}
    toy.put("toy/top", package(SILU + "\n", **depends))
    path = tmp_path / "hfpatch.lock"
    lock([HubSpec.parse("toy/top@v1")], HubOptions(), path)
    local(tmp_path / "mine", evil(), monkeypatch)
    withstood("toy/top@v1", "Take one of them away", hub={"lockfile": path})


@pytest.mark.parametrize("change", ["digest", "edited", "extra", "bytecode", "pipe"])
def test_local_builds(
    change: str, toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local(tmp_path / "mine", evil(digest=change != "digest"), monkeypatch)
    if change == "edited":
        (folder / "__init__.py").write_text(EVIL + "\n")
    elif change == "extra":
        (folder / "torch.py").write_text(EVIL)
    elif change == "bytecode":
        (folder / "helper.pyc").write_bytes(b"")
    elif change == "pipe":
        os.mkfifo(folder / "data")
    with toy.quiet():
        withstood()


def test_a_local_build_is_told(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(tmp_path / "mine", package(), monkeypatch)
    report = hfpatch.apply(model(), kernels={"silu": SPEC})
    assert report.swaps[0].version == "LOCAL_KERNELS:torch-cpu"
    assert "since LOCAL_KERNELS says so" in report.notes[0]
    monkeypatch.delenv("LOCAL_KERNELS")
    assert not loads().startswith("LOCAL"), "another surrounding, another package"


@pytest.mark.parametrize(
    "entry",
    sampled(["toy", "toy/kernel ", "toy/*", "t\u043ey/kernel", "*", "", "toy/kernel@v1",
             "toy/kernel@main", "toy/kernel@abc1234"], 3),
)  # fmt: skip
def test_trust_in_what_is_no_repository(entry: str, toy: HubServer) -> None:
    with toy.quiet(), pytest.raises(ValueError, match="expected `org/name`"):
        hfpatch.apply(model(), kernels={"silu": SPEC}, hub={"trust_remote_code": [entry]})


def test_trust_is_for_one_apply(toy: HubServer) -> None:
    """What was loaded on the user's word is not there for an apply without it."""
    toy.trusted.clear()
    assert hfpatch.apply(model(), kernels={"silu": SPEC}, hub={"trust_remote_code": True}).swaps
    (skip,) = hfpatch.apply(model(), kernels={"silu": SPEC}).skips
    assert "is not a trusted publisher" in skip.reason
