"""A Hub on the loopback interface: what `huggingface_hub` and `kernels` ask of one over HTTP.

It speaks repo info, refs, trees, `resolve` with ETags and redirects to a content store, the LFS
batch protocol, preupload, commit, branches, repo creation and organization overviews, for every
repo type; so the real clients upload to it and download from it. State is in memory. Xet is not
spoken: clients are told `HF_HUB_DISABLE_XET=1`, which makes them upload by LFS.

    with HubServer() as hub:
        hub.trust("some-org")
        env = hub.env(cache)                    # for a fresh process
        HfApi(endpoint=hub.url, token=hub.token).create_repo("org/name", repo_type="kernel")
        hub.fail("GET", r"/resolve/", Truncate(100), times=1)
        assert hub.seen("POST", "/commit/")
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
LFS_SUFFIXES = (".so", ".dylib", ".dll", ".bin", ".safetensors")
LFS_FROM = 10 * 1024 * 1024  # bytes: larger files are LFS whatever their name


def python_path() -> str:
    """`PYTHONPATH` of a fresh process: this checkout, then what this process was given."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


# ------------------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Status:
    """Answer with this HTTP status instead."""

    code: int
    error: str = ""  # the Hub's X-Error-Code, e.g. "RepoNotFound"


@dataclass(frozen=True)
class Hang:
    """Take the request and say nothing for so long; then close the connection."""

    seconds: float


@dataclass(frozen=True)
class Slow:
    """Send the body in pieces, with pauses that add up to about `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Truncate:
    """Announce the whole body, send so many bytes, close the connection."""

    size: int


@dataclass(frozen=True)
class Flip:
    """Flip a bit of the body; the length stays."""

    offset: int


Fault = Status | Hang | Slow | Truncate | Flip


@dataclass
class _Rule:
    method: str
    path: re.Pattern[str]
    fault: Fault
    times: int  # how often it strikes; negative: for ever


# ------------------------------------------------------------------------------ repositories


@dataclass(frozen=True)
class Blob:
    """A file's content, and whether it is stored by LFS."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        """git's own object id: of the content, or of the LFS pointer."""
        data = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            "version https://git-lfs.github.com/spec/v1\n"
            f"oid sha256:{self.sha256}\nsize {len(self.data)}\n"
        ).encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


Files = dict[str, Blob]


@dataclass
class Repo:
    """Branches, tags, and the files of every commit."""

    kind: str
    name: str
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, branch: str, files: Files, message: str) -> str:
        parent = self.branches.get(branch, "")
        content = "".join(f"{p} {b.oid}\n" for p, b in sorted(files.items()))
        sha = hashlib.sha1(f"{parent}\n{message}\n{content}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """A branch, a tag, a full ref or a commit, as a commit."""
        revision = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        return sha if sha in self.commits else None


class HubServer:
    """The server; a context manager. `url` and `token` are what a client needs."""

    token = "hf_loopback"

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.trusted: set[str] = set()
        self.requests: list[str] = []  # "GET /api/…", in the order of arrival
        self.lock = threading.RLock()
        self._rules: list[_Rule] = []
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def store_url(self) -> str:
        """The content store: the same server by another host name, as the Hub's CDN is."""
        return self.url.replace("127.0.0.1", "localhost")

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()

    def env(self, cache: Path, **more: str) -> dict[str, str]:
        """Environment of a fresh client process: this checkout, and no server but this one."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "KERNELS_"))}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONPATH": python_path(),
            "HFPATCH_CONFIG": "",
            **more,
        }

    def trust(self, organization: str) -> None:
        """Make an organization a trusted kernel publisher."""
        self.trusted.add(organization)

    def seen(self, method: str, path: str) -> list[str]:
        """Requests so far of a method whose path contains a string."""
        return [r for r in self.requests if r.startswith(f"{method} ") and path in r]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Fails if a request arrives inside."""
        before = len(self.requests)
        yield
        assert self.requests[before:] == [], "there was traffic"

    # faults

    def fail(self, method: str, path: str, fault: Fault, times: int = -1) -> None:
        """Answer requests whose path matches a regular expression with `fault`."""
        self._rules.append(_Rule(method, re.compile(path), fault, times))

    def heal(self) -> None:
        """Forget every fault."""
        self._rules.clear()

    def strike(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for rule in self._rules:
                if rule.method == method and rule.times != 0 and rule.path.search(path):
                    rule.times -= 1
                    return rule.fault
        return None

    # content, without a client

    def put(self, name: str, files: dict[str, bytes], branch: str = "v1", kind: str = "kernel",
            keep: bool = False) -> str:  # fmt: skip
        """Commit files to a branch, in place of what is there (`keep`: beside it); the commit."""
        with self.lock:
            repo = self.repos.setdefault((kind, name), Repo(kind, name))
            blobs = {p: Blob(d, p.endswith(LFS_SUFFIXES)) for p, d in files.items()}
            if keep and branch in repo.branches:
                blobs = {**repo.commits[repo.branches[branch]], **blobs}
            self.lfs.update({b.sha256: b.data for b in blobs.values() if b.lfs})
            if "main" not in repo.branches:
                repo.commit("main", {}, "initial commit")
            return repo.commit(branch, blobs, f"commit {len(repo.commits)}")

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the server's end."""
        self._closing.wait(seconds)


# ------------------------------------------------------------------------------ HTTP


class _Problem(Exception):
    def __init__(self, code: int, error: str, message: str) -> None:
        super().__init__(message)
        self.code, self.error = code, error


_ID = r"(?P<id>[\w.-]+/[\w.-]+)"
_TYPE = r"(?P<type>models|datasets|spaces|kernels)"
_ROUTES: list[tuple[str, str, str]] = [
    ("GET", rf"^/api/{_TYPE}/{_ID}$", "info"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/revision/(?P<rev>[^/]+)$", "info"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/refs$", "refs"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/tree/(?P<rev>[^/]+)(?:/(?P<path>.*))?$", "tree"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/paths-info/(?P<rev>[^/]+)$", "paths"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/preupload/(?P<rev>[^/]+)$", "preupload"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/commit/(?P<rev>[^/]+)$", "commit"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/branch/(?P<rev>[^/]+)$", "branch"),
    ("DELETE", rf"^/api/{_TYPE}/{_ID}/branch/(?P<rev>[^/]+)$", "unbranch"),
    ("POST", r"^/api/repos/create$", "create"),
    ("POST", r"^/api/validate-yaml$", "yaml"),
    ("GET", r"^/api/organizations/(?P<org>[\w.-]+)/overview$", "organization"),
    ("GET", r"^/api/whoami-v2$", "whoami"),
    ("POST", rf"^/(?:{_TYPE}/)?{_ID}\.git/info/lfs/objects/batch$", "batch"),
    ("PUT", r"^/store/(?P<oid>[0-9a-f]{64})$", "store"),
    ("POST", r"^/store/(?P<oid>[0-9a-f]{64})/verify$", "verify"),
    ("GET", r"^/store/(?P<oid>[0-9a-f]{64})$", "fetch"),
    ("GET", rf"^/(?:{_TYPE}/)?{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)$", "resolve"),
]


@dataclass
class Answer:
    """A response before it is sent."""

    body: bytes = b""
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def json(data: Any, code: int = 200) -> Answer:
        return Answer(json.dumps(data).encode(), code, {"Content-Type": "application/json"})


class Endpoints:
    """One method per route: (match, query, body) -> Answer. Holds no socket."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub

    def _repo(self, match: re.Match[str]) -> Repo:
        kind = (match["type"] or "models").removesuffix("s")
        repo = self.hub.repos.get((kind, match["id"]))
        if repo is None:
            raise _Problem(404, "RepoNotFound", f"Repository {match['id']} not found")
        return repo

    def _at(self, match: re.Match[str]) -> tuple[Repo, str, Files]:
        repo = self._repo(match)
        revision = unquote(match.groupdict().get("rev") or "main")
        sha = repo.resolve(revision)
        if sha is None:
            raise _Problem(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, sha, repo.commits[sha]

    # reading

    def info(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, sha, files = self._at(match)
        siblings = [{"rfilename": path} for path in sorted(files)]
        author = repo.name.split("/")[0]
        return Answer.json(
            {"_id": "0" * 24, "id": repo.name, "author": author, "sha": sha, "private": False,
             "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
             "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
             "siblings": siblings}
        )  # fmt: skip

    def refs(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo = self._repo(match)

        def rows(refs: dict[str, str], prefix: str) -> list[dict[str, str]]:
            return [
                {"name": n, "ref": f"refs/{prefix}/{n}", "targetCommit": s} for n, s in refs.items()
            ]

        branches, tags = rows(repo.branches, "heads"), rows(repo.tags, "tags")
        return Answer.json({"branches": branches, "tags": tags, "converts": []})

    def tree(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        folder = unquote(match["path"] or "").strip("/")
        start = f"{folder}/" if folder else ""
        inside = {p: b for p, b in files.items() if p.startswith(start)}
        if folder and not inside:
            raise _Problem(404, "EntryNotFound", f"{folder} does not exist")
        recursive = query.get("recursive", "").lower() in ("true", "1")
        rows: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(inside.items()):
            parts = path[len(start) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                above = start + "/".join(parts[:depth])
                rows[above] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": above}
            if recursive or len(parts) == 1:
                rows[path] = _row(path, blob)
        return _page(list(rows.values()), match.string, query, self.hub.url)

    def paths(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        wanted = json.loads(body)["paths"]
        return Answer.json([_row(p, files[p]) for p in wanted if p in files])

    def resolve(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, sha, files = self._at(match)
        path = unquote(match["path"])
        blob = files.get(path)
        if blob is None:
            raise _Problem(404, "EntryNotFound", f"Entry not found: {path}")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            return Answer(blob.data, 200, {**headers, "Content-Type": "text/plain"})
        headers |= {
            "X-Linked-Etag": f'"{blob.sha256}"',
            "X-Linked-Size": str(len(blob.data)),
            "Location": f"{self.hub.store_url}/store/{blob.sha256}",
        }
        return Answer(b"", 302, headers)

    def fetch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        data = self.hub.lfs.get(match["oid"])
        if data is None:
            raise _Problem(404, "EntryNotFound", "no such object")
        return Answer(data, 200, {"ETag": f'"{match["oid"]}"', "Accept-Ranges": "bytes"})

    def organization(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        name = match["org"]
        known = name in self.hub.trusted or any(n.startswith(f"{name}/") for _, n in self.hub.repos)
        if not known:
            raise _Problem(404, "", "This organization does not exist")
        trusted = name in self.hub.trusted
        return Answer.json({"name": name, "fullname": name, "trustedKernelPublisher": trusted})

    def whoami(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        return Answer.json({"type": "user", "name": "loopback", "orgs": []})

    # writing

    def create(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        asked = json.loads(body)
        kind, owner = asked.get("type") or "model", asked.get("organization") or "loopback"
        name = f"{owner}/{asked['name']}"
        prefix = "" if kind == "model" else f"{kind}s/"
        answer = {"url": f"{self.hub.url}/{prefix}{name}", "name": name, "id": "0" * 24}
        if (kind, name) in self.hub.repos:
            return Answer.json({"error": "You already created this repo", **answer}, 409)
        repo = self.hub.repos[kind, name] = Repo(kind, name)
        repo.commit("main", {".gitattributes": Blob(b"*.so filter=lfs\n", False)}, "initial commit")
        return Answer.json(answer)

    def branch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, name = self._repo(match), unquote(match["rev"])
        if name in repo.branches:
            raise _Problem(409, "", f"Reference already exists: {name}")
        start = (json.loads(body) if body else {}).get("startingPoint") or "main"
        sha = repo.resolve(start)
        if sha is None:
            raise _Problem(404, "RevisionNotFound", f"Invalid rev id: {start}")
        repo.branches[name] = sha
        return Answer.json({}, 201)

    def unbranch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if self._repo(match).branches.pop(unquote(match["rev"]), None) is None:
            raise _Problem(404, "RevisionNotFound", "no such branch")
        return Answer.json({})

    def yaml(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        return Answer.json({"errors": [], "warnings": []})

    def preupload(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        rows = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            large = path.endswith(LFS_SUFFIXES) or asked["size"] > LFS_FROM
            there = files.get(path)
            row = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            rows.append(row | ({"oid": there.etag} if there is not None else {}))
        return Answer.json({"files": rows})

    def batch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        self._repo(match)
        rows = []
        for asked in json.loads(body)["objects"]:
            row = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.lfs:
                href = f"{self.hub.url}/store/{asked['oid']}"
                row["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            rows.append(row)
        return Answer.json({"transfer": "basic", "objects": rows})

    def store(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != match["oid"]:
            raise _Problem(400, "", "the content does not have this sha256")
        self.hub.lfs[match["oid"]] = body
        return Answer()

    def verify(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if len(self.hub.lfs.get(match["oid"], b"")) != json.loads(body)["size"]:
            raise _Problem(404, "", "the object was not uploaded")
        return Answer()

    def commit(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, sha, files = self._at(match)
        branch = unquote(match["rev"])
        if branch not in repo.branches:
            raise _Problem(404, "RevisionNotFound", f"no branch {branch}")
        files, message = dict(files), ""
        for line in body.splitlines():
            row = json.loads(line)
            key, value = row["key"], row["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", sha) != sha:
                    raise _Problem(412, "", "A commit has happened since. Please refresh")
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    raise _Problem(400, "", f"{value['path']}: the LFS object was not uploaded")
                files[value["path"]] = Blob(self.hub.lfs[value["oid"]], True)
            elif key == "deletedFile":
                files.pop(value["path"], None)
            elif key == "deletedFolder":
                start = value["path"].rstrip("/") + "/"
                files = {p: b for p, b in files.items() if not p.startswith(start)}
        new = repo.commit(branch, files, message)
        prefix = "" if repo.kind == "model" else f"{repo.kind}s/"
        url = f"{self.hub.url}/{prefix}{repo.name}/commit/{new}"
        return Answer.json({"success": True, "commitUrl": url, "commitOid": new})


_OPEN_WRITES = ("yaml", "store", "paths")  # neither needs a token


def _row(path: str, blob: Blob) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path}
    if blob.lfs:
        pointer = len(blob.pointer)
        row["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": pointer}
    return row


PAGE = 50


def _page(rows: list[dict[str, Any]], path: str, query: dict[str, str], url: str) -> Answer:
    """Rows in pages, as the Hub sends them: the next one's address is in the `Link` header."""
    start = int(query.get("cursor", "0"))
    answer = Answer.json(rows[start : start + PAGE])
    if start + PAGE < len(rows):
        rest = "&".join(f"{k}={v}" for k, v in query.items() if k != "cursor")
        answer.headers["Link"] = f'<{url}{path}?{rest}&cursor={start + PAGE}>; rel="next"'
    return answer


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    endpoints = Endpoints(hub)
    routes = [(method, re.compile(path), name) for method, path, name in _ROUTES]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one segment
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            url = urlsplit(self.path)
            reading = "GET" if self.command == "HEAD" else self.command
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            with hub.lock:
                hub.requests.append(f"{self.command} {self.path}")
            fault = hub.strike(self.command, url.path)
            if isinstance(fault, Hang):
                hub.wait(fault.seconds)
                self.close_connection = True
                return
            if isinstance(fault, Status):
                problem = _Problem(fault.code, fault.error, f"fault injected: {fault.code}")
                return self._send(self._problem(problem), None)
            query = {k: v[0] for k, v in parse_qs(url.query).items()}
            try:
                self._send(self._route(reading, url.path, query, body), fault)
            except _Problem as problem:
                self._send(self._problem(problem), fault)

        def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
            for wanted, pattern, name in routes:
                match = pattern.match(path) if wanted == method else None
                if match is not None:
                    signed = self.headers.get("Authorization") == f"Bearer {hub.token}"
                    if method != "GET" and name not in _OPEN_WRITES and not signed:
                        raise _Problem(401, "", "Invalid username or password.")
                    with hub.lock:
                        answer: Answer = getattr(endpoints, name)(match, query, body)
                    return answer
            raise _Problem(404, "", f"this server does not know {method} {path}")

        @staticmethod
        def _problem(problem: _Problem) -> Answer:
            answer = Answer.json({"error": str(problem)}, problem.code)
            answer.headers |= {"X-Error-Code": problem.error, "X-Error-Message": str(problem)}
            return answer

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _send(self, answer: Answer, fault: Fault | None) -> None:
            body, code = answer.body, answer.code
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if wanted and code == 200:
                start = int(wanted[1])
                answer.headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body, code = body[start:], 206
            if isinstance(fault, Flip) and len(body) > fault.offset:
                changed = bytearray(body)
                changed[fault.offset] ^= 1
                body = bytes(changed)
            self.send_response(code)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if isinstance(fault, Truncate):
                body, self.close_connection = body[: fault.size], True
            pieces = 8 if isinstance(fault, Slow) else 1
            size = max(1, -(-len(body) // pieces))
            for start in range(0, len(body), size):
                if isinstance(fault, Slow):
                    time.sleep(fault.seconds / pieces)
                self.wfile.write(body[start : start + size])
                self.wfile.flush()

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    return Handler
