"""Attacks by what a server answers: names, sizes, encodings, addresses; and without an end."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack import EVIL, SPEC, evil, loads, model, sampled, withstood
from huggingface_hub import constants
from packages import SILU, package
from repositories import Blob
from server import Body, Dripping, Edit, Endless, Headers, HubServer, Redirect, Slow

import hfpatch
from hfpatch.cli import main
from hfpatch.errors import KernelLoadError
from hfpatch.hub import HubOptions, HubSpec, guard, patience
from hfpatch.hub.download import lock
from hfpatch.hub.inspection import inspect_hub

FILE = "/resolve/.*__init__.py"


@pytest.fixture
def outside(tmp_path: Path) -> Callable[[], list[str]]:
    """What lies beside the cache, the state and the project, or anywhere by the attacker's name."""

    def found() -> list[str]:
        cache = Path(constants.HF_HUB_CACHE)
        everything = [p for p in tmp_path.rglob("*") if "evil" in p.name.lower()]
        beside = [p for p in tmp_path.iterdir() if p not in (cache, tmp_path / "state")]
        return [str(p) for p in (*everything, *beside)]

    return found


# ------------------------------------------------------------------------------ names of blobs

TAGS = [
    "../../../evil", "/tmp/hfpatch-evil", "..", "", "abc", "a" * 39, "A" * 40, "g" * 40, "a" * 64,
    "a" * 40 + "/../../evil", 'x"y', "W/evil", "W/" + "a" * 40, "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("tag", sampled(TAGS, 4), ids=range(len(TAGS)))
def test_etags(tag: str, header: str, toy: HubServer, outside: Callable[[], list[str]]) -> None:
    """huggingface_hub names a file of the cache by it."""
    toy.put("toy/kernel", evil())
    for method in ("HEAD", "GET"):
        toy.fail(method, FILE, Headers({"ETag": None, header: f'"{tag}"'}))
    withstood()
    assert outside() == []


def test_small_files_at_another_address(toy: HubServer, outside: Callable[[], list[str]]) -> None:
    """The Hub sends on to `/api/resolve-cache/`, by an address without a host."""
    toy.sends_on = True
    loads()
    assert toy.seen("GET", "/api/resolve-cache/")
    toy.put("toy/kernel", evil(), branch="v2")
    for headers in ({"ETag": '"../../../evil"'}, {"ETag": '"' + "a" * 40 + '"'},
                    {"X-Repo-Commit": "../../evil"}, {"X-Repo-Commit": "a" * 40}):  # fmt: skip
        toy.fail("HEAD", "/api/resolve-cache/.*py", Headers(dict(headers)))
        withstood("toy/kernel@v2", "the Hub ")
        toy.heal()
    assert outside() == []


@pytest.mark.parametrize(
    "commit", sampled(["../../evil", "", "v1", "a" * 40, "A" * 40, "/evil"], 2)
)
def test_commits_in_headers(commit: str, toy: HubServer, outside: Callable[[], list[str]]) -> None:
    """A folder of the cache is named by it."""
    toy.put("toy/kernel", evil())
    toy.fail("HEAD", "/resolve/", Headers({"X-Repo-Commit": commit}))
    withstood(SPEC, "answers for the commit")
    assert outside() == []


# ------------------------------------------------------------------------------ listings


def listed(**change: object) -> Edit:
    """The listing with a row of `__init__.py` that is changed."""

    def edit(body: bytes) -> bytes:
        rows: list[dict[str, Any]] = json.loads(body)
        for row in rows:
            if row["path"].endswith("__init__.py"):
                row.update(change)
        return json.dumps(rows).encode()

    return Edit(edit)


@pytest.mark.parametrize(
    "change",
    sampled([
        {"path": "build/torch-cpu/../../../../../evil.py"},
        {"path": "build/torch-cpu/../../../" + "a" * 40 + "/build/torch-cpu/evil.py"},
        {"path": "/tmp/hfpatch-evil.py"}, {"path": "build/torch-cuda/evil.py"}, {"path": ""},
        {"path": "build/torch-cpu/"}, {"path": "build/torch-cpu//evil.py"},
        {"path": "build/torch-cpu/./evil.py"}, {"path": "build/torch-cpu/evil\u0000.py"},
        {"path": "build/torch-cpu/metadata.json"}, {"path": 7}, {"path": None},
        {"size": -1}, {"size": True}, {"size": "7"}, {"size": 10**30}, {"size": None},
        {"oid": "../../../evil"}, {"oid": ""}, {"oid": "a" * 39}, {"oid": 7}, {"oid": "a" * 40},
        {"lfs": {"oid": "../../evil", "size": 1, "pointerSize": 1}}, {"lfs": 7},
        {"lfs": {"oid": "a" * 64, "size": -1, "pointerSize": 1}},
        {"type": "directory"}, {"type": "link"}, {"xetHash": "../../evil"},
    ], 8),
    ids=range(28),
)  # fmt: skip
def test_listings(
    change: dict[str, object], toy: HubServer, outside: Callable[[], list[str]]
) -> None:
    toy.put("toy/kernel", evil())
    if "xetHash" in change:
        toy.put("toy/kernel", package())
    toy.fail("GET", "/tree/", listed(**change))
    if "xetHash" in change:
        loads()
    else:
        withstood()
    assert [p for p in outside() if not p.endswith("sanitize")] == []


@pytest.mark.parametrize(
    "name", sampled(["../../../evil", "..", "torch-cpu/../../../evil", "/evil", ""], 2)
)
def test_names_of_variants(name: str, toy: HubServer, outside: Callable[[], list[str]]) -> None:
    rows = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f"build/{name}"}]
    toy.put("toy/kernel", evil())
    toy.fail("GET", "/tree/", Body(json.dumps(rows).encode()))
    withstood()
    assert outside() == []


# ------------------------------------------------------------------------------ without an end


def test_pages_without_end(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_MOST_REQUESTS", 200)
    commit = toy.put("toy/kernel", evil())
    toy.put("toy/kernel", evil(name="later"))
    for path in ("/tree/", "/commits/"):
        link = f'<{toy.url}/api/kernels/toy/kernel{path}v1>; rel="next"'
        toy.fail("GET", path, Body(b"[]", {"Link": link}))
        withstood(SPEC if "tree" in path else f"toy/kernel@{commit}", "more than 200 requests")
        toy.heal()


@pytest.mark.parametrize("path", ["/revision/v1", "/overview", "/tree/", "/refs", "/commits/"])
def test_an_answer_without_end(path: str, toy: HubServer) -> None:
    commit = toy.put("toy/kernel", evil())
    toy.put("toy/kernel", package())
    toy.fail("GET", path, Endless())
    withstood(SPEC if "rev" in path else f"toy/kernel@{commit}", "answers more than")


@pytest.mark.parametrize("path", ["/revision/v1", "/overview", "/tree/", FILE])
def test_a_compressed_answer(path: str, toy: HubServer) -> None:
    """Of a gigabyte, in a megabyte."""
    bomb = gzip.compress(b" " * (64 << 20))
    toy.put("toy/kernel", evil())
    toy.fail("GET", path, Body(bomb, {"Content-Encoding": "gzip"}))
    withstood(SPEC, "in the encoding `gzip`")


def test_a_file_that_is_larger_than_listed(toy: HubServer) -> None:
    toy.put("toy/kernel", evil())
    toy.fail("GET", FILE, Body(EVIL.encode() + b"#" * (20 << 20)))
    withstood()
    largest = max(p.stat().st_size for p in Path(constants.HF_HUB_CACHE).rglob("*") if p.is_file())
    assert largest < 1 << 20


def test_a_slow_answer(toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece in time, but never the whole."""
    toy.put("toy/kernel", evil())
    monkeypatch.setattr(guard, "_LONGEST_ANSWER", 0.2)
    toy.fail("GET", "/revision/v1", Slow(8.0))
    before = time.monotonic()
    withstood(SPEC, "timed out")
    assert time.monotonic() - before < 20


@pytest.mark.parametrize(
    ("method", "path", "pause"),
    [("GET", "/revision/v1", 0.05), ("GET", "/revision/v1", 0.0), ("HEAD", FILE, 0.05)],
)
def test_headers_drop_by_drop(
    method: str, path: str, pause: float, toy: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in time, without an end: a client waits anew after each byte. In a hurry they end at the
    client's own limit of their size."""
    toy.put("toy/kernel", evil())
    monkeypatch.setattr(patience, "LONGEST_HEADERS", 0.2 if pause else 60.0)
    toy.fail(method, path, Dripping(pause))
    before = time.monotonic()
    withstood(SPEC, "timed out" if pause and path != FILE else "")
    assert time.monotonic() - before < 120  # a request for a file is made again a few times
    toy.heal()
    assert patience._headers_by.get() is None


# ------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    "where",
    sampled(["http://10.0.0.1/x", "https://169.254.169.254/latest", "file:///etc/passwd",
             "ftp://x/y", "http://[::1", "//evil.example/x", "http://evil.example/x"], 3),
)  # fmt: skip
@pytest.mark.parametrize("path", ["/revision/v1", "/overview", FILE])
def test_redirects_elsewhere(where: str, path: str, toy: HubServer) -> None:
    """Nothing is asked of the other host: it need not be there for an error at once."""
    toy.put("toy/kernel", evil())
    for method in ("GET", "HEAD"):
        toy.fail(method, path, Redirect(where))
    before = time.monotonic()
    withstood()
    assert time.monotonic() - before < 20


@pytest.mark.parametrize(
    "endpoint",
    ["http://hub.example", "file:///tmp/hub", "ftp://hub.example", "", "hub", "http://10.1.2.3",
     "http://127.0.0.1.evil.example", "http://localhost.evil.example", "http://user@evil.example"],
)  # fmt: skip
def test_endpoints(endpoint: str, toy: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with toy.quiet():
        withstood(SPEC, "HF_ENDPOINT is")


def test_who_may_send_a_file() -> None:
    """Of the real Hub: its content stores, but nothing inside of this network."""

    def may(url: str, endpoint: str = "https://huggingface.co") -> bool:
        origin, hub = guard._origin(url), guard._origin(endpoint)
        assert hub is not None
        return origin is not None and guard._may_answer(origin, hub)

    for good in ("https://huggingface.co/x", "https://cdn-lfs.hf.co/x", "https://s3.amazonaws.com"):
        assert may(good)
    for bad in ("http://huggingface.co", "http://cdn-lfs.hf.co", "https://127.0.0.1", "https://[::1]",
                "https://localhost", "https://10.0.0.1", "https://192.168.0.1", "https://router",
                "https://169.254.169.254", "file:///etc/passwd", "https://", "x", "https://127.1",
                "https://localhost.", "https://127.0.0.1.", "https://0x7f.0.0.1", "https://10.1",
                "https://192.168.1", "https://100.64.0.1", "https://localhost.localdomain",
                "https://metadata.google.internal", "https://2130706433"):  # fmt: skip
        assert not may(bad)


# ------------------------------------------------------------------------------ what is shown

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


def test_escape_sequences(
    toy: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def clean(text: str) -> None:
        assert not any(c in text for c in "\x1b\x07\u202e\x9b"), text

    toy.put("toy/kernel", package(f"raise RuntimeError({ESCAPES!r})\n"))
    clean(withstood(SPEC, "owned"))
    toy.put("toy/failing", package(f"def silu(x): raise RuntimeError({ESCAPES!r})\n"))
    m = model()
    report = hfpatch.apply(m, kernels={"silu": "toy/failing@v1"})
    clean(str(report))
    assert report.skips
    for skip in report.skips:
        clean(skip.reason)
    toy.put("toy/kernel", evil(id=f"x{ESCAPES}"))
    clean(withstood(SPEC))
    problem = json.dumps({"error": ESCAPES}).encode()
    toy.fail("GET", "/revision/v1", Edit(lambda body: problem))
    clean(withstood(SPEC))
    toy.heal()
    toy.put("toy/kernel", package(f"{'x' * 3} = 1\n", license=ESCAPES))
    for command in (
        ["inspect", SPEC], ["inspect", f"toy/{ESCAPES}@v1"],
        ["download", f"toy/kernel@{ESCAPES}"], ["lock", f"{ESCAPES}/kernel@v1"],
    ):  # fmt: skip
        main(command)
        out = capsys.readouterr()
        clean(out.out + out.err)


@pytest.mark.parametrize("size", [600 << 10, 5 << 20])
def test_inspect_of_a_large_file(size: int, toy: HubServer) -> None:
    """A syntax tree takes a hundred times the memory of its source."""
    toy.put("toy/kernel", package("x = [" + "1," * (size // 2) + "]\n"))
    before = time.monotonic()
    with pytest.raises(KernelLoadError, match="which is not read"):
        inspect_hub(HubSpec.parse(SPEC))
    assert time.monotonic() - before < 20
    assert not toy.seen("GET", "/resolve/")


def test_inspect_of_many_files(toy: HubServer) -> None:
    more = {f"m{i}.py": "x = 1\n" * 60_000 for i in range(14)}
    toy.put("toy/kernel", package(more=more))
    with pytest.raises(KernelLoadError, match="bytes of Python"):
        inspect_hub(HubSpec.parse(SPEC))


def test_a_lock_of_what_is_listed(toy: HubServer, tmp_path: Path) -> None:
    """The hash that is locked is the one that the Hub lists, not of what comes by the way."""
    other = evil()["build/torch-cpu/metadata.json"]
    toy.fail("GET", "/resolve/.*metadata.json", Body(other))
    with pytest.raises(KernelLoadError):
        lock([HubSpec.parse(SPEC)], HubOptions(), tmp_path / "hfpatch.lock")
    assert not (tmp_path / "hfpatch.lock").exists()


@pytest.mark.parametrize("right", [True, False])
def test_metadata_that_are_stored_as_a_large_file(
    right: bool, toy: HubServer, tmp_path: Path
) -> None:
    """Of those the Hub lists a sha256."""
    files = toy.repos["kernel", "toy/kernel"].commits[toy.put("toy/kernel", package(SILU + "\n"))]
    path = "build/torch-cpu/metadata.json"
    blob = files[path] = Blob(files[path].data, lfs=True)
    toy.lfs[blob.sha256] = blob.data if right else blob.data.replace(b"Apache-2.0", b"Apache-2.1")
    target = tmp_path / "hfpatch.lock"
    if right:
        locked = lock([HubSpec.parse(SPEC)], HubOptions(), target)
        assert locked.of(HubSpec.parse(SPEC)).variants == {"torch-cpu": blob.sha256}
        loads()
    else:
        with pytest.raises(KernelLoadError, match="is damaged"):
            lock([HubSpec.parse(SPEC)], HubOptions(), target)
        withstood(SPEC, "is damaged")


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("https://hub.example/a", True),
        ("http://hub.example:8080/a", True),
        ("ftp://hub.example/a", False),
        ("ftp://hub.example:21/a", False),
        ("file://hub.example:1/a", False),
        ("https:///a", False),
        ("https://hub.example:99999/a", False),
        ("hub.example", False),
    ],
)
def test_an_origin_has_a_known_scheme_and_a_host(url: str, known: bool) -> None:
    assert (guard._origin(url) is not None) is known
