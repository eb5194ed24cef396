"""Further attacks on the Hub path: bytes before the text, numbers that are none, names that look
alike, answers that lie about themselves, caches that lead elsewhere, files of a project."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack import EVIL, SPEC, evil, loads, model, ran, renew, sampled, snapshot, withstood
from huggingface_hub import constants
from packages import SILU, package
from server import Body, Edit, Flip, Headers, HubServer, Redirect, Status, Truncate

import hfpatch
from hfpatch.cli import main
from hfpatch.errors import HfpatchError, KernelIntegrityError
from hfpatch.files import strict_json
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.inspection import inspect_hub
from hfpatch.hub.lock import LockFile
from hfpatch.kernels.config import read_defaults

METADATA = "build/torch-cpu/metadata.json"
FILE = "/resolve/.*__init__.py"


def encoded(change: Callable[[bytes], bytes]) -> dict[str, bytes]:
    files = evil()
    return {**files, METADATA: change(files[METADATA])}


# ------------------------------------------------------------------------------ metadata


@pytest.mark.parametrize(
    "change",
    sampled(
        [
            lambda d: b"\xef\xbb\xbf" + d,  # a mark of byte order
            lambda d: d.decode().encode("utf-16"),
            lambda d: d.decode().encode("utf-32"),
            lambda d: d + b"\0",
            lambda d: d.replace(b'"toy"', b'"to\xffy"'),
            lambda d: d.replace(b'"toy"', b'"to\\u0000y"'),
            lambda d: d.replace(b'"toy"', b'"to\\ud800y"'),  # half of a character
            lambda d: d.replace(b'"toy"', '"t\u00f6y"'.encode()),
            lambda d: d.replace(b'"toy"', '"toy\u202e"'.encode()),
            lambda d: d.replace(b'"toy"', '"toy\u200b"'.encode()),
            lambda d: d.replace(b'"version": 1', b'"version": 1e400'),
            lambda d: d.replace(b'"version": 1', b'"version": 18446744073709551617'),
            lambda d: d.replace(b'"version": 1', b'"version": -0'),
            lambda d: d[:-1] + b', "vers\\u0069on": 2}',  # the key, written in another way
            lambda d: d[:-1] + b', "digest": null}',
            lambda d: d[:-1] + b"} {}",
            lambda d: d[:-1] + b", }",
            lambda d: d.replace(b'{"type": "cpu"}', b"[]"),
            lambda d: b"[" + d + b"]",
            lambda d: gzip.compress(d),
            lambda d: b"",
        ],
        10,
    ),
    ids=range(21),
)
def test_metadata_in_other_bytes(change: Callable[[bytes], bytes], toy: HubServer) -> None:
    toy.put("toy/kernel", encoded(change))
    withstood()


def test_a_key_in_two_spellings_is_one_key() -> None:
    with pytest.raises(ValueError, match="stands there twice"):
        strict_json(b'{"a": 1, "\\u0061": 2}')


@pytest.mark.parametrize("count", [3000, 200_000])
def test_json_that_is_deep_in_a_value(count: int, toy: HubServer) -> None:
    deep = b'{"a":' * count + b"1" + b"}" * count
    toy.put("toy/kernel", encoded(lambda d: d[:-1] + b', "zzz": ' + deep + b"}"))
    before = time.monotonic()
    withstood()
    assert time.monotonic() - before < 30


# ------------------------------------------------------------------------------ names of files


@pytest.mark.parametrize(
    "names",
    sampled(
        [
            ["Helper.py", "helper.py"],
            ["stra\u00dfe.py", "strasse.py"],  # one where case does not count
            ["\u212aelvin.py", "kelvin.py"],  # the sign of Kelvin
            ["e\u0301.py"],  # two characters that look like one
            ["a\u202ecod.py"],
            ["a\u200db.py"],
            ["\x1b[2J.py"],
            [" .py "],
            ["a\\b.py"],
            ["x/../y.py"],
            ["__pycache__/x.py"],
            ["__init__.cpython-311.PYC"],
            ["a" * 300 + ".py"],
        ],
        6,
    ),
    ids=range(13),
)
def test_names_that_look_alike(names: list[str], toy: HubServer) -> None:
    toy.put("toy/kernel", package(EVIL, more=dict.fromkeys(names, "x = 1\n")))
    assert "\x1b" not in withstood()


def rows(change: Callable[[list[dict[str, Any]]], Any]) -> Edit:
    def edit(body: bytes) -> bytes:
        listed: list[dict[str, Any]] = json.loads(body)
        found = change(listed)
        return json.dumps(listed if found is None else found).encode()

    return Edit(edit)


@pytest.mark.parametrize(
    "change",
    sampled(
        [
            lambda r: [*r, *r],  # each file twice
            lambda r: [*r, {**r[0], "path": "build/torch-cpu/../torch-cpu/__init__.py"}],
            lambda r: [*r, {**r[0], "path": "build/torch-cpu/..\\evil.py"}],
            lambda r: [*r, {**r[0], "path": "build/TORCH-CPU/evil.py"}],
            lambda r: [*r, {**r[0], "path": "build/torch-cpu/METADATA.json"}],
            lambda r: [*r, {**r[0], "path": "build/torch-cpu/__init__.py/x.py"}],
            lambda r: [*r, {**r[0], "path": "build/torch-cpu/CON"}, {**r[0], "path": "/evil"}],
            lambda r: [x for x in r if not x["path"].endswith("metadata.json")],
            lambda r: {"rows": r},
            lambda r: [[x] for x in r],
            lambda r: [None, *r],
            lambda r: [],
        ],
        6,
    ),
    ids=range(12),
)
def test_rows_of_a_listing(change: Any, toy: HubServer, tmp_path: Path) -> None:
    toy.put("toy/kernel", evil())
    toy.fail("GET", "/tree/", rows(change))
    withstood()
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name.lower()]


# ------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "fault",
    sampled(
        [
            Truncate(7),
            Flip(3),
            Headers({"Content-Encoding": "gzip"}),
            Headers({"Content-Encoding": "deflate"}),
            Headers({"Content-Encoding": "br"}),
            Body(gzip.compress(b"#" * (8 << 20)), {"Content-Encoding": "gzip"}),
            Body(zlib.compress(b"#" * (8 << 20)), {"Content-Encoding": "deflate"}),
            Body(EVIL.encode()),
            Body(b"\xef\xbb\xbf" + SILU.encode()),
            Body(SILU.encode() + b"\0"),
            Status(206),
            Status(304),
            Status(451),
            Redirect("file:///etc/passwd", 302),
            Redirect("http://127.0.0.1:1/evil", 301),
            Redirect("//evil.example/x", 308),
            Redirect("", 307),
            Redirect("\\\\evil\\x", 307),
        ],
        6,
    ),
    ids=range(18),
)
def test_answers_about_a_file(fault: Any, toy: HubServer) -> None:
    """The content is not what was listed, or it does not come: no other is taken in its place."""
    toy.put("toy/kernel", package())
    toy.fail("GET", FILE, fault)
    withstood()


@pytest.mark.parametrize("path", ["/revision/v1", "/tree/", "/refs$", "/overview"])
@pytest.mark.parametrize(
    "body",
    sampled(
        [
            b"",
            b"\0",
            b"\xef\xbb\xbf{}",
            b"null",
            b"[]",
            b'{"sha": "' + b"a" * 40 + b'", "sha": "' + b"b" * 40 + b'"}',
            b'{"sha": ' + b"9" * 5000 + b"}",
            b"[" * 50_000,
            b'"\\ud800"',
            b'{"isTrustedKernelPublisher": "true", "siblings": 7, "branches": 7}',
        ],
        4,
    ),
    ids=range(10),
)
def test_answers_that_say_nothing(body: bytes, path: str, toy: HubServer) -> None:
    toy.put("toy/kernel", evil())
    toy.fail("GET", path, Body(body))
    withstood()


# ------------------------------------------------------------------------------ caches


def _cache() -> Path:
    return Path(constants.HF_HUB_CACHE) / "kernels--toy--kernel"


def _elsewhere(path: Path, target: Path) -> None:
    shutil.copytree(path, target, symlinks=True)
    shutil.rmtree(path)
    path.symlink_to(target)


@pytest.mark.parametrize("where", ["blobs", "refs", ""])
def test_a_folder_of_the_cache_that_is_a_link(where: str, toy: HubServer, tmp_path: Path) -> None:
    """To a folder of the attacker's, who changes what lies there."""
    loads()
    _elsewhere(_cache() / where if where else _cache(), tmp_path / "theirs")
    loads()  # the contents are the publisher's still: they may lie anywhere
    for path in (tmp_path / "theirs").rglob("*"):
        if path.is_file() and not path.is_symlink() and path.read_bytes() == SILU.encode():
            path.chmod(0o644)
            path.write_text(EVIL)
    target = snapshot() / "__init__.py"
    if target.read_bytes() != EVIL.encode():
        target.resolve().write_text(EVIL)
    withstood(SPEC, "is damaged")


@pytest.mark.parametrize(
    "where",
    ["blobs", "snapshots", "build", "variant", "", "../.locks", "../.locks/kernels--toy--kernel"],
)
def test_a_download_into_a_link(where: str, toy: HubServer, tmp_path: Path) -> None:
    """A folder that was put there before the download, to have something written elsewhere."""
    commit = toy.repos["kernel", "toy/kernel"].branches["v1"]
    build = f"snapshots/{commit}/build"
    link = _cache() / {"build": build, "variant": f"{build}/torch-cpu"}.get(where, where)
    link = Path(os.path.normpath(link))
    link.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "theirs").mkdir()
    link.symlink_to(tmp_path / "theirs")
    withstood(SPEC, "leads out of the cache")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_version_that_is_noted_through_a_link(toy: HubServer, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (_cache() / "refs").mkdir(parents=True)
    name = f"v1.{os.getpid()}-{threading.get_ident()}.tmp"  # as it was once called
    (_cache() / "refs" / name).symlink_to(mine)
    loads()
    assert mine.read_text() == "precious"
    assert (_cache() / "refs" / "v1").stat().st_mode & 0o777 == 0o644
    (tmp_path / "theirs").mkdir()
    shutil.rmtree(_cache() / "refs")
    (_cache() / "refs").symlink_to(tmp_path / "theirs")
    shutil.rmtree(os.environ["HFPATCH_STATE"])
    loads()
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_hard_link_that_is_written_to(toy: HubServer, tmp_path: Path) -> None:
    loads()
    mine = tmp_path / "mine.py"
    os.link((snapshot() / "__init__.py").resolve(), mine)
    loads()
    mine.chmod(0o644)
    mine.write_text(EVIL)
    withstood(SPEC, "is damaged")


def test_a_reference_that_is_no_commit(toy: HubServer) -> None:
    loads()
    toy.put("toy/kernel", package(), branch="v2")
    for text in ("../../../../evil", "a" * 41, "\0", "", "v1\n", "\x1b[2J", "ref: refs/heads/v1"):
        (_cache() / "refs" / "v1").write_text(text)
        loads()  # the Hub is asked, and its word counts
        assert not ran()


def test_a_file_of_the_cache_with_holes(toy: HubServer) -> None:
    """A terabyte that takes no disk."""
    loads()
    target = (snapshot() / "__init__.py").resolve()
    target.chmod(0o644)
    with target.open("wb") as file:
        file.truncate(1 << 40)
    before = time.monotonic()
    withstood()
    assert time.monotonic() - before < 30


# ------------------------------------------------------------------------------ files of a project


@pytest.mark.parametrize(
    "data",
    sampled(
        [
            b"\xef\xbb\xbf" + b'kernels = "toy/kernel@v1"\n',
            b'kernels = "toy/kernel@v1"\n\0',
            b"kernels = \"toy/kernel@v1\"\nkernels = 'local'\n",
            'kernels = "t\u043ey/kernel@v1"\n'.encode(),
            b'"kernels" = "toy/kernel@v1"\n',
            b'kernels = ["local", "toy/kernel@v1"]\n',
            b'kernels = {"*" = "toy/kernel@v1"}\n',
            b'kernels = "LOCAL"\n',
            b"kernels = " + b"[" * 20_000 + b"]" * 20_000 + b"\n",
            b"kernels = 1" + b"0" * 5000 + b"\n",
            b'kernels = "toy/kernel@v1\\u0000"\n',
            b'kernels = "\x1b[2Jtoy/kernel@v1"\n',
            b'[hub]\nrequire-signed = "no"\n',
            b'[hub]\nlockfile = "hfpatch.lock\\u0000"\n',
            b'[hub]\nlockfile = "\\u202ehfpatch.lock"\nallow-branches = 1\n',
            'kernels = "local"\n'.encode("utf-16"),
        ],
        6,
    ),
    ids=range(16),
)
@pytest.mark.parametrize("name", ["hfpatch.toml", "pyproject.toml"])
def test_config_files_that_are_found(
    data: bytes, name: str, toy: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused by an error that names it, or chooses nothing that runs."""
    monkeypatch.delenv("HFPATCH_CONFIG", raising=False)
    toy.put("toy/kernel", evil())
    head = b"[tool.hfpatch]\n" if name == "pyproject.toml" else b""
    (tmp_path / name).write_bytes(
        head + data.replace(b"[hub]", b"[tool.hfpatch.hub]" if head else b"[hub]")
    )
    renew()
    said, sources = outcome()
    assert name in said or not sources
    assert "toy" not in {s.partition("/")[0] for s in sources}
    assert "\x1b" not in said and "\u202e" not in said and not ran()


def outcome(**arguments: Any) -> tuple[str, list[str]]:
    """What an `apply` says, and the sources of its kernels; its error if it raises a typed one."""
    try:
        report = hfpatch.apply(model(), **arguments)
    except (ValueError, TypeError, HfpatchError) as e:
        return str(e), []
    return str(report), [s.source for s in report.swaps]


def test_a_project_file_of_a_terabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read whole to find out whether it is ours."""
    monkeypatch.delenv("HFPATCH_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "pyproject.toml").open("wb") as file:
        file.write(b"[project]\nname = 'x'\n")
        file.truncate(1 << 40)
    before = time.monotonic()
    assert read_defaults().kernels is None
    assert time.monotonic() - before < 10


def locking(**change: object) -> str:
    row = {"kernel": SPEC, "commit": "a" * 40, "variants": {"torch-cpu": "b" * 64}} | change
    return json.dumps({"format": 1, "kernels": [row]})


@pytest.mark.parametrize(
    "text",
    sampled(
        [
            "\ufeff{}",
            '{"format": 1, "kernels": [], "kernels": []}',
            '{"format": 1, "kernels": [], "\\u006bernels": []}',
            '{"format": 1, "kernels": [null]}',
            '{"format": 1, "kernels": [{"kernel": "toy/kernel@v1"}]}',
            locking(variants={"a\0": "b" * 64}),
            locking(variants={"a\u202e": "b" * 64}),
            locking(variants="x"),
            locking(commit="a" * 40 + "\n"),
            locking(kernel="toy/kernel@v\u0661"),
            locking(kernel="toy/kernel@v1\0"),
            locking(kernel=[SPEC]),
        ],
        5,
    ),
    ids=range(12),
)
def test_lock_files_in_other_words(text: str, toy: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "hfpatch.lock"
    path.write_text(text, encoding="utf-8")
    toy.put("toy/kernel", evil())
    with toy.quiet():
        reason = withstood(SPEC, "cannot be read", hub={"lockfile": path})
    assert "\u202e" not in reason


def test_a_lock_file_that_pins_another_content(toy: HubServer, tmp_path: Path) -> None:
    """Whoever may write the lock file, but not the repository."""
    commit = toy.put("toy/kernel", evil())
    path = tmp_path / "hfpatch.lock"
    row = {
        "kernel": SPEC,
        "commit": commit,
        "variants": {"torch-cpu": hashlib.sha256(b"").hexdigest()},
    }
    path.write_text(json.dumps({"format": 1, "kernels": [row]}))
    withstood(SPEC, "", hub={"lockfile": path})


@pytest.mark.parametrize(
    "spec",
    sampled([
        "toy/kernel@v1\0", "toy/kernel@v1\n", "toy/kernel@v\u0661", "toy/k\u0435rnel@v1",
        "toy/kernel@v01", "toy/kernel@v1.0", "toy/kernel@V1", "toy/../toy/kernel@v1",
        "toy//kernel@v1", "/toy/kernel@v1", "toy/kernel@v-1", "toy/kernel@v" + "9" * 5000,
        "toy/kernel@refs/pr/1", "toy/kernel@v1@v2", "toy/kernel@\u202ev1", "file:///toy/kernel@v1",
    ], 6),
)  # fmt: skip
def test_names_of_kernels(spec: str, toy: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    toy.put("toy/kernel", evil())
    renew()
    said, sources = outcome(kernels={"silu": spec})
    assert not sources and "\u202e" not in said and "\0" not in said and len(said) < 9000
    for command in ("inspect", "download", "lock"):
        assert main([command, spec]) != 0
        out = capsys.readouterr()
        assert "\u202e" not in out.out + out.err and "\0" not in out.out + out.err
    assert not ran() and not Path("hfpatch.lock").exists()


def test_a_lock_written_by_us_reads_again(toy: HubServer, tmp_path: Path) -> None:
    from hfpatch.hub.download import lock

    spec, path = HubSpec.parse(SPEC), tmp_path / "hfpatch.lock"
    written = lock([spec], HubOptions(), path)
    assert LockFile.read(path) == written
    loads(hub={"lockfile": path})


@pytest.mark.parametrize("offline", [False, True])
def test_inspect_shows_what_the_hub_listed(
    offline: bool, toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what somebody else has put into a shared cache, beside the publisher's name."""
    loads()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    inspect_hub(HubSpec.parse(SPEC))
    path = snapshot() / "__init__.py"
    path.resolve().chmod(0o644)
    path.resolve().write_text("def rms_norm(x): pass\n")
    with pytest.raises(KernelIntegrityError, match="in the cache is not what the Hub listed"):
        inspect_hub(HubSpec.parse(SPEC))
