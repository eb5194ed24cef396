"""Attacks by who may write to the cache, or between a check and a use."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import py_compile
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import kernels.importer
import pytest
from attack import EVIL, SPEC, evil, loads, ran, sampled, snapshot, withstood
from huggingface_hub import constants
from packages import SILU, fresh, package
from server import HubServer

from hfpatch.hub import HubOptions, HubSpec, evidence
from hfpatch.hub.load import load


def cache() -> Path:
    return Path(constants.HF_HUB_CACHE)


def state() -> Path:
    return Path(os.environ["HFPATCH_STATE"])


def another_user() -> None:
    """Nothing is known of what lies in the cache."""
    shutil.rmtree(state(), ignore_errors=True)
    fresh()


def blob_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def plant(commit: str, files: dict[str, bytes], links: bool = True) -> Path:
    """A snapshot as huggingface_hub lays it out, each blob by its right hash; the variant."""
    folder = cache() / "kernels--toy--kernel"
    for path, data in files.items():
        file = folder / "snapshots" / commit / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if links:
            blob = folder / "blobs" / blob_of(data)
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(data)
            file.symlink_to(os.path.relpath(blob, file.parent))
        else:
            file.write_bytes(data)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "v1").write_text(commit)
    (folder / "hfpatch-trusted").write_text("toy\n")
    return folder / "snapshots" / commit / "build" / "torch-cpu"


# --------------------------------------------------------------------- between check and use


def test_a_blob_that_is_flipped_while_it_is_loaded(toy: HubServer) -> None:
    """All the time, in loads one after the other: each is the right one, or refused."""
    helper = "value = 1.0\n"
    source = "from .helper import value\n" + SILU.replace("silu(x)\n\n", "silu(x) * value\n\n")
    toy.put("toy/kernel", package(source, more={"helper.py": helper}))
    loads()
    blobs = {snapshot() / n: (snapshot() / n).read_bytes() for n in ("__init__.py", "helper.py")}
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            for path, good in blobs.items():
                for data in (EVIL.encode().ljust(len(good)), good):
                    new = cache() / f"new-{threading.get_ident()}"
                    new.write_bytes(data)
                    os.replace(new, path.resolve())

    thread = threading.Thread(target=flip)
    thread.start()
    outcomes = set()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            fresh()
            try:
                load(HubSpec.parse(SPEC), HubOptions())
                outcomes.add("right")
            except Exception as e:
                outcomes.add(type(e).__name__)
            assert not ran()
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {"right", "KernelIntegrityError"}


def test_what_was_checked_is_what_is_imported(
    toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are exchanged just before the import; a submodule long after it."""
    source = "def late():\n    from .part import value\n    return value\n" + SILU
    toy.put("toy/kernel", package(source, more={"part.py": "value = 'right'\n"}))
    import hfpatch.hub.load as module

    original = module.import_sealed

    def swapped(*arguments: object) -> object:
        for name in ("__init__.py", "part.py"):
            (snapshot() / name).resolve().write_text(EVIL)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "import_sealed", swapped)
    package_ = load(HubSpec.parse(SPEC), HubOptions())
    assert not ran()
    compiled = importlib.util.cache_from_source(str(snapshot() / "part.py"))
    py_compile.compile(str(snapshot() / "part.py"), cfile=compiled)
    assert package_.module.late() == "right" and not ran()
    assert package_.module.late.__module__ == package_.module.__name__


def test_no_bytecode_for_the_life_of_a_package(toy: HubServer) -> None:
    """Neither read nor written, where it is imported from and where it was read, also later."""
    source = "def late():\n    from .part import value\n    return value\n" + SILU
    toy.put("toy/kernel", package(source, more={"part.py": "value = 1\n"}))
    loaded = load(HubSpec.parse(SPEC), HubOptions())
    assert loaded.module.late() == 1
    private = Path(str(loaded.module.__file__)).parent
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for folder in (private, snapshot(), cache()):
        assert not list(folder.rglob("*.pyc")) and not list(folder.rglob("__pycache__"))


def test_what_kernels_imported_is_not_taken_over(toy: HubServer) -> None:
    """Something else may have been there when `kernels.get_kernel` imported it."""
    loads()
    path = snapshot()
    kernels.importer._loaded_kernels[path] = kernels.importer.LoadedKernel(
        None, type(os)("evil"), None  # type: ignore[arg-type]
    )  # fmt: skip
    package_ = load(HubSpec.parse(SPEC), HubOptions())
    assert callable(package_.module.silu)


# ------------------------------------------------------------------------------ planted content


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("digest", [False, True])
def test_a_snapshot_that_is_right_in_itself(
    offline: bool, links: bool, known: bool, digest: bool, toy: HubServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each hash fits, the publisher is noted as trusted; only, the Hub never had it."""
    commit = toy.repos["kernel", "toy/kernel"].branches["v1"]
    if known:
        loads()
        shutil.rmtree(snapshot())
    plant(commit, evil(digest=digest), links)
    fresh()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    withstood()


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_version_that_points_to_another_commit(
    offline: bool, known: bool, toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = evil()
    pull = toy.put("toy/kernel", files, branch="refs/pr/1")
    version = loads() if known else ""
    plant(pull, files)
    fresh()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    if known:
        assert loads() == version and not ran()
    else:
        withstood()


def test_a_version_that_points_to_another_one(toy: HubServer) -> None:
    """A commit of the publisher's, but not of the version that was asked for."""
    files = evil()
    other = toy.put("toy/kernel", files, branch="v2")
    plant(other, files)
    withstood(SPEC, "no version branch and no tag")


def test_a_cache_of_somebody_else(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the Hub's listing once, without downloading it again; then known."""
    loads()
    another_user()
    before = len(toy.seen("GET", "/resolve/"))
    loads()
    assert len(toy.seen("GET", "/resolve/")) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with toy.quiet():
        loads()
        another_user()
        withstood(SPEC, "HF_HUB_OFFLINE is set")


def test_without_a_digest_the_listing_counts(toy: HubServer, tmp_path: Path) -> None:
    """Not a link's word, and not where it leads."""
    toy.put("toy/kernel", package(digest=False))
    loads()
    init = snapshot() / "__init__.py"
    for target in ("f" * 40, "opaque", blob_of(EVIL.encode())):
        (tmp_path / target).write_text(EVIL)
        init.unlink()
        init.symlink_to(tmp_path / target)
        withstood(SPEC, "`__init__.py` is damaged")
    init.unlink()
    init.write_text(EVIL)
    withstood(SPEC, "`__init__.py` is damaged")


def test_a_cache_in_a_folder_that_is_called_pycache(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "__pycache__" / "hub"))
    hub.trust("toy")
    hub.put("toy/kernel", package(digest=False))
    loads()
    (snapshot() / "__init__.py").resolve().write_text(EVIL)
    withstood(SPEC, "`__init__.py` is damaged")


# ------------------------------------------------------------------------------ planted files


def put(name: str, data: bytes = EVIL.encode()) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return change


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def folder_in_its_place(path: Path) -> None:
    path.mkdir()
    (path / "__init__.py").write_text(EVIL)


@pytest.mark.parametrize(
    "change",
    sampled([
        put("torch.py"), put("helper.pyc"), put("__init__.pyc"), put("sub/__init__.py"),
        put("__pycache__/evil.py"), put("__init__.abi3.so", b"\x7fELF"), put(".hidden"),
        put("metadata.json.sigstore", b"{}"), put("conftest.py"),
        instead("__init__.py", os.mkfifo), instead("metadata.json", os.mkfifo),
        instead("__init__.py", lambda p: p.symlink_to("/dev/zero")),
        instead("metadata.json", lambda p: p.symlink_to("/dev/zero")),
        instead("__init__.py", lambda p: p.symlink_to("/etc/passwd")),
        instead("__init__.py", folder_in_its_place),
        instead("metadata.json", lambda p: p.write_bytes(b"")),
        instead("metadata.json", lambda p: p.write_bytes(evil()["build/torch-cpu/metadata.json"])),
        instead("__init__.py", lambda p: p.write_bytes(b"#" * (64 << 20))),
    ], 8),
    ids=range(18),
)  # fmt: skip
def test_files_in_a_snapshot(change: Callable[[Path], None], toy: HubServer) -> None:
    loads()
    change(snapshot())
    before = time.monotonic()
    withstood()
    assert time.monotonic() - before < 30


def test_a_variant_that_is_a_link(toy: HubServer, tmp_path: Path) -> None:
    loads()
    folder = snapshot()
    folder.rename(tmp_path / "moved")
    for path, data in evil().items():
        file = tmp_path / "planted" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    folder.symlink_to(tmp_path / "planted" / "build" / "torch-cpu")
    withstood()


def test_a_listing_in_the_cache_is_not_read(toy: HubServer) -> None:
    """huggingface_hub would take names, and what is complete, from it."""
    commit = toy.put("toy/kernel", package(SILU + "\n"))
    trees = cache() / "kernels--toy--kernel" / "trees"
    trees.mkdir(parents=True)
    for name in (f"{commit}.json", commit):
        (trees / name).write_text(json.dumps({"build/torch-cpu/../../../../evil.py": {"size": 1}}))
    loads()


# ------------------------------------------------------------------------------ what is known


def test_what_is_known_is_the_users_own(toy: HubServer) -> None:
    loads()
    assert stat.S_IMODE(state().stat().st_mode) == 0o700
    for file in state().iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["group", "others", "link", "file of others"])
def test_what_somebody_else_may_write_is_not_believed(
    kind: str, toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = evil()
    pull = toy.put("toy/kernel", files, branch="refs/pr/1")
    loads()
    forged = evidence.Evidence.read("toy/kernel")
    hashes = {
        path.removeprefix("build/torch-cpu/"): hashlib.sha256(data).hexdigest()
        for path, data in files.items()
    }
    forged.refs["v1"] = pull
    forged.commits[pull] = evidence.CommitEvidence("heads/v1", time.time(), {"torch-cpu": hashes})
    assert forged.write("toy/kernel")
    plant(pull, files)
    (file,) = state().iterdir()
    if kind == "link":
        state().rename(tmp_path / "theirs")
        state().symlink_to(tmp_path / "theirs")
    else:
        where = file if kind == "file of others" else state()
        where.chmod(0o770 if kind == "group" else 0o702)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    withstood(SPEC, "HF_HUB_OFFLINE is set")


@pytest.mark.parametrize(
    "text",
    sampled(["", "{}", "[]", "null", "\xff", '{"format": 1}', "[" * 10000, '{"format": NaN}'], 2),
)
def test_what_cannot_be_read_is_asked_again(text: str, toy: HubServer) -> None:
    loads()
    (file,) = state().iterdir()
    file.write_text(text)
    before = len(toy.requests)
    loads()
    assert len(toy.requests) > before


def test_what_is_known_of_another_repository(toy: HubServer) -> None:
    """Its file under this one's name; or of another endpoint or cache."""
    loads()
    (mine,) = state().iterdir()
    toy.put("toy/other", package(SILU + "\n"))
    loads("toy/other@v1")
    (other,) = set(state().iterdir()) - {mine}
    shutil.copy(other, mine)
    before = len(toy.requests)
    loads()
    assert len(toy.requests) > before


def test_what_is_known_of_another_format(toy: HubServer) -> None:
    loads()
    (file,) = state().iterdir()
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "format": data["format"] + 1}))
    before = len(toy.requests)
    loads()
    assert len(toy.requests) > before


def test_where_what_is_known_is_kept(
    toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of our own, unless the user named one."""
    monkeypatch.delenv("HFPATCH_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    loads()
    assert evidence.state_folder() == tmp_path / "states" / "hfpatch"
    monkeypatch.delenv("XDG_STATE_HOME")
    loads()
    assert evidence.state_folder() == tmp_path / "home" / ".local" / "state" / "hfpatch"
    monkeypatch.setenv("HFPATCH_STATE", "~/mine")
    loads()
    assert evidence.state_folder() == tmp_path / "home" / "mine"


def test_a_home_that_cannot_be_written(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the Hub is asked each time."""
    monkeypatch.setenv("HFPATCH_STATE", "/proc/hfpatch")
    for _ in range(2):
        before = len(toy.requests)
        loads()
        assert len(toy.requests) > before
    toy.trusted.clear()
    withstood(SPEC, "is not a trusted publisher")


def test_a_digest_of_another_file(toy: HubServer) -> None:
    """The metadata of the cache name the attacker's digest, the listing does not."""
    loads()
    path = snapshot() / "metadata.json"
    data = json.loads(path.read_text())
    digest = base64.b64encode(hashlib.sha256(EVIL.encode()).digest()).decode()
    data["digest"]["files"]["__init__.py"] = digest
    for name, text in (("metadata.json", json.dumps(data)), ("__init__.py", EVIL)):
        (snapshot() / name).unlink()
        (snapshot() / name).write_text(text)
    withstood(SPEC, "is damaged")
    another_user()
    withstood(SPEC, "is damaged")
