"""A Hub that accepts a connection and then says nothing must not hold `apply` up for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_lock = Lock()


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
        if on_request is not None:
            on_request(request)

    def look(response: Any) -> None:
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
        with _lock:
            hooks = client.event_hooks
            left = {kind: [h for h in hooks.get(kind, ()) if h is not ours[kind]] for kind in ours}
            client.event_hooks = {**hooks, **left}
