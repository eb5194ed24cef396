"""Thousands of damaged and hostile inputs of each kind: a typed error or what is right, never
another error, a wait, or a line of code that runs.

The inputs are made from a seed, so a failure's number brings it back."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
import huggingface_hub
import pytest
from attack import SPEC, evil, ran
from endpoints import ROUTES, Answer, Endpoints, Problem
from packages import package
from server import HubServer

from hfpatch.errors import KernelLoadError
from hfpatch.hub import HubOptions, HubSpec
from hfpatch.hub.load import install
from hfpatch.hub.lock import LockFile
from hfpatch.hub.spec import is_commit
from hfpatch.kernels.config import read_defaults
from hfpatch.kernels.sources import Sources

pytestmark = pytest.mark.timeout(1800)  # of ten thousand on a busy machine

COUNTS = [200, pytest.param(10_000, marks=pytest.mark.exhaustive)]
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 10**40, 1.5, "", "..", "../../evil", "/etc/passwd", "\x00",
    "a\nb", "\x1b[2J", "\ud800", "x" * 5000, "t\u043ey/kernel", "toy/kernel", "v1", "main",
    "refs/pr/1", "a" * 40, "b" * 64, [], {}, [[]], [None], {"": None}, [{"path": "x"}], {"a": {}},
]  # fmt: skip
TOKENS = [
    b"NaN", b"Infinity", b"1e999", b"9" * 400, b"null", b"[" * 300, b"]", b"{", b"}", b'"', b",",
    b"\\u0000", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"\x00", b"../", b"//", b"=", b"\n", b"[hub]",
]  # fmt: skip


def replaced(value: Any, rng: random.Random) -> Any:
    """A structure with one of its parts put in the place of another, removed, or doubled."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(_keys(node)):
            places.append((node, key))
            walk(node[key])

    walk(value)
    if not places:
        return rng.choice(HOSTILE)
    node, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, there = rng.choice(places)
        node[key] = copy.deepcopy(other[there]) if there in _keys(other) else None
    elif kind == 2 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    else:
        node[key] = rng.choice(HOSTILE)
    return value


def _keys(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node) if isinstance(node, list) else 0)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some of them changed, cut out, doubled, or other tokens between them."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 40)))
        kind = rng.randrange(4)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = out[at:end]
        else:
            out[at:at] = rng.choice(TOKENS)
    return bytes(out)


def inputs(seed: str, value: Any, count: int) -> Iterator[bytes]:
    """Hostile texts of JSON: of other structures, and of damaged text."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        changed = value
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            changed = replaced(changed, rng)
        data = json.dumps(changed).encode()
        yield damaged(data, rng) if rng.random() < 0.5 else data


# ------------------------------------------------------------------------------ metadata


@pytest.mark.parametrize("count", COUNTS)
def test_metadata(
    count: int, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of LOCAL_KERNELS: what passes has a digest that is its files'."""
    folder = tmp_path / "mine" / "build" / "torch-cpu"
    folder.mkdir(parents=True)
    files = evil(**{"kernel-depends": [], "python-depends": []})
    for path, data in files.items():
        (folder / Path(path).name).write_bytes(data)
    good = json.loads(files["build/torch-cpu/metadata.json"])
    monkeypatch.setenv("LOCAL_KERNELS", f"toy/kernel={tmp_path / 'mine'}")
    monkeypatch.setattr("hfpatch.hub.resolver.offline", lambda: True)
    monkeypatch.setattr("hfpatch.hub.trust.offline", lambda: True)
    passed, refused = 0, 0
    with hub.quiet():
        for data in inputs("metadata", good, count):
            (folder / "metadata.json").write_bytes(data)
            try:
                found = install(HubSpec.parse(SPEC), HubOptions(trust_remote_code=True), copy=False)
            except KernelLoadError:
                refused += 1
                continue
            passed += 1
            metadata = found.top.sealed.metadata
            assert dict(metadata.digest.files) == good["digest"]["files"], data
            assert metadata.id.isidentifier() and metadata.id.isascii()
    assert not ran()
    assert refused > count / 4 and passed > count / 100, (passed, refused)


# ------------------------------------------------------------------------------ lock files


@pytest.mark.parametrize("count", COUNTS)
def test_lock_files(count: int, tmp_path: Path) -> None:
    row = {"kernel": SPEC, "commit": "a" * 40, "variants": {"torch-cpu": "b" * 64}}
    other = {**row, "kernel": "toy/other@main", "commit": "c" * 40}
    path = tmp_path / "hfpatch.lock"
    passed = 0
    for data in inputs("lock", {"format": 1, "kernels": [row, other]}, count):
        path.write_bytes(data)
        try:
            kernels = LockFile.read(path).kernels
        except KernelLoadError:
            continue
        passed += 1
        for name, locked in kernels.items():
            assert str(HubSpec.parse(name, allow_branches=True)) == name
            assert is_commit(locked.commit)
            for variant, hash in locked.variants.items():
                assert "/" not in variant and variant != ".." and variant.isprintable()
                assert len(hash) == 64 and int(hash, 16) >= 0
    assert count / 100 < passed < count * 3 / 4, passed


# ------------------------------------------------------------------------------ config files

CONFIG = """
[kernels]
silu = "toy/kernel@v1"
gelu = ["hub", "local", "torch"]
"*" = ["local", "torch"]

[hub]
repos = ["toy/kernel@v1"]
lockfile = "hfpatch.lock"
require-signed = true
allow-branches = false
"""
VALUES = [
    "true", "false", "1", "-1.5", "nan", "inf", '""', '"none"', '"hub"', '"local"', '"torch"',
    '"toy/kernel@main"', '"../../x"', '"/etc/passwd"', "[]", "[[]]", '["hub"]', "{}", "{a = 1}",
    "1979-05-27", '"\\u0000"', '"\\u001b[2J"', "'''x'''", '"t\u043ey/kernel@v1"',
]  # fmt: skip
LINES = ["[tool]", "[kernels]", "[hub]", "[[hub]]", "trust-remote-code = true", "kernels = 'hub'",
         "trust_remote_code = true", "refused = ''", "silu = 'toy/kernel@v1'"]  # fmt: skip


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_config_files(
    found: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults or a ValueError; and nothing of a file makes foreign code run."""
    path = tmp_path / "hfpatch.toml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HFPATCH_KERNELS", raising=False)
    if found:
        monkeypatch.delenv("HFPATCH_CONFIG", raising=False)
    else:
        monkeypatch.setenv("HFPATCH_CONFIG", str(path))
    passed = 0
    for number in range(count):
        rng = random.Random(f"config {number}")
        lines = CONFIG.splitlines()
        for _ in range(rng.choice((0, 1, 2, 3))):
            at = rng.randrange(len(lines))
            kind = rng.randrange(4)
            if kind == 0:
                lines[at] = f"{lines[at].partition('=')[0]}= {rng.choice(VALUES)}"
            elif kind == 1:
                lines.insert(at, rng.choice(LINES))
            elif kind == 2:
                del lines[at]
            else:
                lines.insert(at, lines[at])
        data = "\n".join(lines).encode()
        path.write_bytes(damaged(data, rng) if rng.random() < 0.3 else data)
        try:
            defaults = read_defaults()
            sources = Sources.parse(None, strict=False)
        except (ValueError, TypeError):
            continue
        passed += 1
        assert defaults.hub.trust_remote_code is False, path.read_text()
        named = {s for op in ("silu", "gelu", "rms_norm") for s in sources.choices.of(op) or ()}
        if defaults.note:
            assert any(str(path) in note for note in sources.notes)
        if found:
            assert defaults.hub.lockfile is None and not defaults.hub.repos
            assert not defaults.hub.allow_branches
            if named - {"local", "torch"}:
                assert sources._found
    assert passed > count / 20, passed


# ------------------------------------------------------------------------------ answers


class Wire:
    """The loopback Hub without sockets, whose answers go through a function."""

    def __init__(self, hub: HubServer) -> None:
        self.hub, self.endpoints = hub, Endpoints(hub)
        self.change: Callable[[str, Answer], Answer] = lambda name, answer: answer

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        url = urlsplit(str(request.url))
        method = "GET" if request.method == "HEAD" else request.method
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        for wanted, pattern, name in ROUTES:
            match = re.match(pattern, unquote(url.path) if name == "resolve" else url.path)
            if wanted == method and match is not None:
                try:
                    answer = getattr(self.endpoints, name)(match, query, request.read())
                except Problem as e:
                    return httpx2.Response(e.code, headers={"X-Error-Code": e.error})
                answer = self.change(name, answer)
                body = b"" if request.method == "HEAD" else answer.body
                headers = {**answer.headers, "Content-Length": str(len(answer.body))}
                return httpx2.Response(answer.code, headers=headers, content=body)
        return httpx2.Response(404)


HEADERS = ["ETag", "X-Linked-Etag", "X-Repo-Commit", "Location", "Content-Encoding", "Link",
           "X-Linked-Size", "X-Xet-Hash", "Content-Type", "X-Error-Code"]  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
def test_answers(
    count: int, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each route: the right kernel or a KernelLoadError, and nothing beside the cache."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr("hfpatch.hub.guard._MOST_REQUESTS", 300)
    hub.trust("toy")
    hub.put("toy/base", package(name="base"))
    depends = {"kernel-depends": [{"repo-id": "toy/base", "version": 1}]}
    right: dict[str, dict[str, str]] = {}
    for readme in (b"older", b"newer"):  # whether the older one is released its history says
        files = package(**depends) | package(variant="torch-cuda") | {"README.md": readme}
        right[hub.put("toy/kernel", files)] = {
            path.removeprefix("build/torch-cpu/"): hashlib.sha256(data).hexdigest()
            for path, data in files.items()
            if "torch-cpu" in path
        }
    older, newer = right
    pull = hub.put("toy/kernel", evil(), branch="refs/pr/1")
    wire, changed = Wire(hub), Counter[str]()
    huggingface_hub.close_session()
    # the hooks of huggingface_hub's own client, and no socket
    huggingface_hub.set_client_factory(
        lambda: httpx2.Client(transport=httpx2.MockTransport(wire), follow_redirects=True)
    )
    try:
        outcomes = {True: 0, False: 0}
        for number in range(count):
            rng = random.Random(f"answer {number}")
            kind = rng.random()
            wanted = newer if kind < 0.7 else older if kind < 0.9 else pull
            named = ["info", "organization", "tree", "refs", "resolve"]
            target = rng.choice(named if wanted == newer else ["refs", "history", "history"])

            def change(
                name: str, answer: Answer, rng: Any = rng, target: str = target, n: int = number
            ) -> Answer:
                if name != target or rng.random() < 0.15:
                    return answer
                changed[name] += 1
                if name == "resolve" or rng.random() < 0.2:
                    header = rng.choice(HEADERS)
                    value = str(rng.choice([v for v in HOSTILE if isinstance(v, str)]))
                    value = "".join(c for c in value if c.isprintable() and c.isascii())
                    answer.headers = {**answer.headers, header: value[:500]}
                    if rng.random() < 0.5:
                        answer.body = damaged(answer.body, rng)
                    return answer
                seed = f"{n} {rng.random()}"
                (answer.body,) = inputs(seed, json.loads(answer.body), 1)
                return answer

            wire.change = change
            home = tmp_path / f"case{number % 50 if wanted == newer else number}"
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "cache"))
            monkeypatch.setenv("HFPATCH_STATE", str(home / "state"))
            spec = HubSpec.parse(SPEC if kind < 0.4 else f"toy/kernel@{wanted}")
            try:
                found = install(spec, HubOptions(), refresh=rng.random() < 0.5, copy=False)
            except KernelLoadError:
                outcomes[False] += 1
                continue
            outcomes[True] += 1
            assert found.top.commit == wanted != pull, number
            assert found.top.sealed.files == right[wanted], number
        beside = [p for p in tmp_path.rglob("*") if "evil" in p.name]
        assert not beside and not ran()
        assert min(outcomes.values()) > count / 20, outcomes
        assert changed.total() > count / 2 and changed.keys() == {*named, "history"}, changed
        assert min(changed.values()) > count / 50, changed
    finally:
        huggingface_hub.close_session()
        huggingface_hub.set_client_factory(_default_factory())


def _default_factory() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    return default_client_factory
