"""The real clients, in this process, against a loopback Hub with a cache of its own."""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels.hf_hub
import kernels.install
import kernels.locking
import kernels.resolver
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from packages import fresh, package
from server import HubServer


class _Hurried:
    """`time` for a client that waits longer before each of its retries: not so long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, 0.02))


#: Each new client reads all certificates of the machine, which a loopback Hub has no use for.
_certificates = functools.cache(ssl.create_default_context)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A loopback Hub that this process' clients talk to, with an empty cache."""
    with HubServer() as server:
        cache = tmp_path / "hub-cache"
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for client in (_http, file_download):
            monkeypatch.setattr(client, "time", _Hurried())
        for module in (kernels.hf_hub, kernels.resolver, kernels.install, kernels.locking):
            monkeypatch.setattr(module, "CACHE_DIR", None)
        for name in ("KERNELS_CACHE", "LOCAL_KERNELS", "HFPATCH_KERNELS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(ssl, "create_default_context", _certificates)
        monkeypatch.setenv("HFPATCH_CONFIG", "")
        monkeypatch.setenv("HFPATCH_EVIL", str(tmp_path / "the attacker's code ran"))
        monkeypatch.setenv("HFPATCH_STATE", str(tmp_path / "state"))
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.chdir(tmp_path)
        fresh()
        yield server
        fresh()


@pytest.fixture
def toy(hub: HubServer) -> HubServer:
    """A Hub with the trusted kernel `toy/kernel@v1`."""
    hub.trust("toy")
    hub.put("toy/kernel", package())
    return hub
