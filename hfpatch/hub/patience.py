"""A Hub that accepts a connection and then says nothing must not hold `apply` up for ever."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hfpatch import forks

_lock = forks.lock()
#: Seconds that the headers of an answer may take. A read has a timeout of its own, but each byte
#: that comes begins another one, and a server may send them one by one.
LONGEST_HEADERS = 60.0
#: Until when the headers that this thread waits for must be there.
_headers_by: ContextVar[float | None] = ContextVar("hfpatch_headers_by", default=None)


@contextmanager
def impatient() -> Iterator[None]:
    """Give requests of huggingface_hub's client that have no timeout HF_HUB_ETAG_TIMEOUT seconds.

    Downloads have one of their own; calls of the API (repository info, trees, organizations) are
    sent with none (huggingface_hub 2.4), and no argument reaches it from here.
    """
    with hooked():
        yield


@contextmanager
def hooked(
    on_request: Callable[[Any], None] | None = None,
    on_response: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """`impatient`, and these called with each request before it is sent, and each response before
    its body is read.

    The client is the whole process', so what is added to it is taken out again by itself, whoever
    else adds what.
    """
    from huggingface_hub import constants, get_session

    client: Any = get_session()
    seconds = constants.HF_HUB_ETAG_TIMEOUT

    def limit(request: Any) -> None:
        timeout = request.extensions.get("timeout") or {}
        if all(value is None for value in timeout.values()):
            request.extensions["timeout"] = dict.fromkeys(
                ("connect", "read", "write", "pool"), seconds
            )
        _headers_by.set(time.monotonic() + LONGEST_HEADERS)
        request.extensions["trace"] = _watching(request.extensions.get("trace"))
        if on_request is not None:
            on_request(request)

    def look(response: Any) -> None:
        _headers_by.set(None)
        if on_response is not None:
            on_response(response)

    ours: dict[str, Callable[[Any], None]] = {"request": limit, "response": look}
    with _lock:
        hooks = client.event_hooks
        client.event_hooks = {
            **hooks, **{kind: [*hooks.get(kind, ()), hook] for kind, hook in ours.items()}
        }  # fmt: skip
    try:
        yield
    finally:
        _headers_by.set(None)
        with _lock:
            hooks = client.event_hooks
            left = {kind: [h for h in hooks.get(kind, ()) if h is not ours[kind]] for kind in ours}
            client.event_hooks = {**hooks, **left}


def _watching(others: Callable[[str, Any], Any] | None) -> Callable[[str, Any], Any]:
    """What the client tells of a request: each connection that it makes is bounded. One that was
    there before, of somebody else's request, is not."""

    def trace(event: str, info: Any) -> Any:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            _bound(info.get("return_value"))
        return None if others is None else others(event, info)

    return trace


def _bound(stream: Any) -> None:
    """Reads of this connection end where the headers that are waited for take too long."""
    read = getattr(stream, "read", None)
    if read is None:
        return

    def bounded(max_bytes: int, timeout: float | None = None) -> Any:
        until = _headers_by.get()
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                errors: Any = importlib.import_module(type(stream).__module__.partition(".")[0])
                raise errors.ReadTimeout(f"its headers took more than {LONGEST_HEADERS:.0f} s")
            timeout = left if timeout is None else min(timeout, left)
        return read(max_bytes, timeout)

    stream.read = bounded
