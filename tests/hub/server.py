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

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from endpoints import OPEN_WRITES, ROUTES, Answer, Endpoints, Problem
from repositories import LFS_SUFFIXES, Blob, Repo

ROOT = Path(__file__).resolve().parents[2]


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
class Dripping:
    """Send headers without an end, one after the other, with pauses of so many seconds."""

    pause: float


@dataclass(frozen=True)
class Truncate:
    """Announce the whole body, send so many bytes, close the connection."""

    size: int


@dataclass(frozen=True)
class Flip:
    """Flip a bit of the body; the length stays."""

    offset: int


@dataclass(frozen=True)
class Headers:
    """Answer as usual, with other headers; None takes one away."""

    headers: dict[str, str | None]


@dataclass(frozen=True)
class Redirect:
    """Send the client elsewhere."""

    location: str
    code: int = 307


@dataclass(frozen=True)
class Body:
    """Answer with this body, and these headers."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Endless:
    """Send a body that has no end and no announced length: `chunk` again and again."""

    chunk: bytes = b" " * 65536


@dataclass(frozen=True)
class Edit:
    """Answer with what a function makes of the usual body."""

    change: Callable[[bytes], bytes]


Fault = (
    Status | Hang | Slow | Dripping | Truncate | Flip | Headers | Redirect | Body | Endless | Edit
)


@dataclass
class _Rule:
    method: str
    path: re.Pattern[str]
    fault: Fault
    times: int  # how often it strikes; negative: for ever


# ------------------------------------------------------------------------------ the server


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news here."""


class HubServer:
    """The server; a context manager. `url` and `token` are what a client needs."""

    token = "hf_loopback"

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.trusted: set[str] = set()
        self.sends_on = False  # small files are answered at another address, as the Hub does
        self.requests: list[str] = []  # "GET /api/…", in the order of arrival
        self.lock = threading.RLock()
        self._rules: list[_Rule] = []
        self._closing = threading.Event()
        self._http = _Quiet(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def closing(self) -> bool:
        """Whether the server is being stopped."""
        return self._closing.is_set()

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
            "HFPATCH_STATE": str(cache / "hfpatch-state"),
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


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    endpoints = Endpoints(hub)
    routes = [(method, re.compile(path), name) for method, path, name in ROUTES]

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
                problem = Problem(fault.code, fault.error, f"fault injected: {fault.code}")
                return self._send(self._problem(problem), None)
            if isinstance(fault, Redirect):
                return self._send(Answer(b"", fault.code, {"Location": fault.location}), None)
            if isinstance(fault, Endless):
                return self._without_end(fault.chunk)
            query = {k: v[0] for k, v in parse_qs(url.query).items()}
            try:
                self._send(self._route(reading, url.path, query, body), fault)
            except Problem as problem:
                self._send(self._problem(problem), fault)

        def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
            for wanted, pattern, name in routes:
                match = pattern.match(path) if wanted == method else None
                if match is not None:
                    signed = self.headers.get("Authorization") == f"Bearer {hub.token}"
                    if method != "GET" and name not in OPEN_WRITES and not signed:
                        raise Problem(401, "", "Invalid username or password.")
                    with hub.lock:
                        answer: Answer = getattr(endpoints, name)(match, query, body)
                    return answer
            raise Problem(404, "", f"this server does not know {method} {path}")

        @staticmethod
        def _problem(problem: Problem) -> Answer:
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

        def _without_end(self, chunk: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client has had enough
                while not hub.closing:
                    self.wfile.write(chunk)

        def _drip(self, pause: float) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client has had enough
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while not hub.closing:
                    self.wfile.write(b"X-Drop: 1\r\n")
                    self.wfile.flush()
                    time.sleep(pause)

        def _send(self, answer: Answer, fault: Fault | None) -> None:
            if isinstance(fault, Dripping):
                self._drip(fault.pause)
                return
            if isinstance(fault, Body):
                answer = Answer(fault.data, 200, {**answer.headers, **fault.headers})
            if isinstance(fault, Edit):
                answer.body = fault.change(answer.body)
            if isinstance(fault, Headers):
                merged: dict[str, str | None] = {**answer.headers, **fault.headers}
                answer.headers = {k: v for k, v in merged.items() if v is not None}
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
