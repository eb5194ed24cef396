"""What a Hub may answer: from where, how much, and under which names it is stored.

huggingface_hub names a file of its cache by the ETag that the server sends, follows redirects, and
reads an answer whatever its size. While `guarded` is entered, each answer is looked at before it is
read: what is refused here was not written anywhere.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from hfpatch.errors import KernelIntegrityError, KernelLoadError
from hfpatch.hub.patience import hooked
from hfpatch.hub.spec import is_commit

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
#: Where a file is, and where the Hub sends for a small one.
_FILE = re.compile(r"/resolve/|/api/resolve-cache/", re.ASCII)
_AT = re.compile(r"/(?:resolve|resolve-cache/kernels/[^/]+/[^/]+)/([^/]+)/", re.ASCII)
_SCHEMES = {"https": 443, "http": 80}
#: Bytes of an answer that is no file, and of a file that no listing gave a size.
_LARGEST_ANSWER = 16 << 20
#: Seconds that an answer that is no file may take.
_LONGEST_ANSWER = 60.0
#: Requests in one `guarded`: pages that lead to each other for ever end here.
_MOST_REQUESTS = 20_000
#: Bytes per second, on the average of a whole file, below which a download is given up.
_SLOWEST = 16 << 10
#: Headers that would lead huggingface_hub past what is looked at here, or into the log.
_UNWANTED = ("x-xet-hash", "x-xet-refresh-route", "x-hf-warning")


@dataclass
class Guard:
    """What is expected of the answers.

    Attributes:
        hashes: of the files to download, by "/<commit>/<path>", with which their
            addresses end.
        largest: bytes of the largest of them.
    """

    hashes: dict[str, str] = field(default_factory=dict)
    largest: int = _LARGEST_ANSWER
    requests: int = 0
    lock: Lock = field(default_factory=Lock)


_current: ContextVar[Guard | None] = ContextVar("hfpatch_guard", default=None)


def current_guard() -> Guard:
    """The guard of the innermost `guarded`."""
    guard = _current.get()
    if guard is None:
        raise RuntimeError("nothing is asked of a Hub outside of `guarded`")
    return guard


@contextmanager
def guarded() -> Iterator[Guard]:
    """Look at each answer of the Hub, and wait for none without a limit.

    Raises:
        KernelLoadError: HF_ENDPOINT is no address whose answers can be believed.
    """
    endpoint = _endpoint()
    guard = Guard()

    # the client is the whole process': requests of other threads are none of ours
    def request(request: Any) -> None:
        if _current.get() is guard:
            _request(guard, request)

    def response(response: Any) -> None:
        if _current.get() is guard:
            _response(guard, endpoint, response)

    token = _current.set(guard)
    try:
        with hooked(request, response):
            yield guard
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class _Origin:
    scheme: str
    host: str
    port: int

    @property
    def here(self) -> bool:
        """Whether it is this machine, where nobody is in between."""
        return self.host == "localhost" or _address(self.host, "is_loopback")


def _endpoint() -> _Origin:
    from huggingface_hub import constants

    origin = _origin(constants.ENDPOINT)
    if origin is None or (origin.scheme == "http" and not origin.here):
        raise KernelLoadError(
            f"HF_ENDPOINT is `{constants.ENDPOINT}`: anybody on the way could answer in its place, "
            "also whether a publisher is trusted; expected an address that begins with https://"
        )
    return origin


def _origin(url: str) -> _Origin | None:
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            return None
        return _Origin(parts.scheme, parts.hostname, parts.port or _SCHEMES[parts.scheme])
    except ValueError:
        return None


def _address(host: str, what: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), what))
    except ValueError:
        return False


def _request(guard: Guard, request: Any) -> None:
    with guard.lock:
        guard.requests += 1
        if guard.requests > _MOST_REQUESTS:
            raise KernelLoadError(f"the Hub's answers led to more than {_MOST_REQUESTS} requests")
    # a compressed answer's size says nothing of what it becomes
    request.headers["Accept-Encoding"] = "identity"


def _response(guard: Guard, endpoint: _Origin, response: Any) -> None:
    url = str(response.request.url)
    origin = _origin(url)
    if origin is None or not _may_answer(origin, endpoint):
        raise KernelIntegrityError(f"the Hub sends elsewhere for its answer: `{url}`")
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise KernelIntegrityError(f"`{url}` answers in the encoding `{encoding}`, asked for none")
    for name in _UNWANTED:
        if name in response.headers:
            del response.headers[name]
    path = urlsplit(url).path
    limit, seconds = guard.largest, 60 + guard.largest / _SLOWEST
    if origin == endpoint and _FILE.search(unquote(path)):
        _check_file(guard, unquote(path), response)
    elif origin == endpoint:
        limit, seconds = _LARGEST_ANSWER, _LONGEST_ANSWER
        if 300 <= response.status_code < 400:
            where = response.headers.get("location", "")
            raise KernelIntegrityError(
                f"the Hub sends elsewhere for its answer: `{url}` leads to `{where}`. If the "
                "repository has another name now, write that one"
            )
    announced = response.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit and response.request.method != "HEAD":
        raise KernelIntegrityError(f"`{url}` answers {announced} bytes, expected at most {limit}")
    response.stream = _bounded(response, url, limit, seconds)


def _may_answer(origin: _Origin, endpoint: _Origin) -> bool:
    """Whether a file may come from there: its content is compared, but the request itself must not
    reach a service of this machine or network, nor be read on its way."""
    if origin == endpoint or endpoint.here:
        return origin == endpoint or origin.here
    return origin.scheme == "https" and not _inside(origin.host)


#: Ends of names that only a network's own servers know.
_INSIDE = (
    ".local",
    ".localdomain",
    ".localhost",
    ".internal",
    ".intranet",
    ".lan",
    ".home",
    ".arpa",
)


def _inside(host: str) -> bool:
    """Whether a name or address may be one of this machine or its network. Numbers count as such
    however they are written: systems read `127.1` and `0x7f.0.0.1` as addresses too."""
    host = host.lower().rstrip(".")
    if "." not in host and ":" not in host:
        return True
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host.endswith(_INSIDE) or host.rsplit(".", 1)[1][:1].isdigit()


def _check_file(guard: Guard, path: str, response: Any) -> None:
    """Look at the headers by which huggingface_hub names what it stores."""
    status, where = response.status_code, response.headers.get("location", "")
    if status >= 400 or (300 <= status < 400 and where.startswith("/") and where[1:2] != "/"):
        return  # of the latter the next answer is looked at
    commit = response.headers.get("x-repo-commit", "")
    found = _AT.search(path)
    asked = found[1] if found else ""
    if not is_commit(commit) or (is_commit(asked) and commit != asked):
        raise KernelIntegrityError(
            f"the Hub answers for the commit `{commit[:80]}`, asked for `{asked[:80]}`"
        )
    tag = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
    name = tag.removeprefix("W/").strip('"')
    key = path[path.find(f"/{asked}/") :] if is_commit(asked) else ""
    expected = guard.hashes.get(key)
    if not _HASH.fullmatch(name) or (expected is not None and name != expected):
        raise KernelIntegrityError(
            f"the Hub names `{tag[:120]}` as the hash of `{path[-120:]}`, expected "
            f"{expected or 'one'}; nothing was written"
        )


def _bounded(response: Any, url: str, limit: int, seconds: float) -> Any:
    """The response's stream, which ends with an error where it is too long or too slow."""
    client = importlib.import_module(type(response).__module__.partition(".")[0])
    inner, deadline = response.stream, time.monotonic() + seconds
    base: Any = client.SyncByteStream

    class Bounded(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for chunk in inner:
                size += len(chunk)
                if size > limit:
                    raise KernelIntegrityError(f"`{url}` answers more than {limit} bytes")
                if time.monotonic() > deadline:
                    raise KernelLoadError(f"`{url}` timed out: it took more than {seconds:.0f} s")
                yield chunk

        def close(self) -> None:
            inner.close()

    return Bounded()
