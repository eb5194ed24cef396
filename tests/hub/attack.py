"""What an attack on the Hub path must end in: the original forward and a reason in the report, or a
typed error under `strict`; and not a line of the attacker's code has run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import kernels.importer
import pytest
import torch
from huggingface_hub import constants
from packages import SILU, package
from torch import nn

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.hub.load import forget_packages

SPEC = "toy/kernel@v1"
X = torch.linspace(-4, 4, 96).reshape(2, 48)
#: A kernel that computes what it should, and leaves a trace where it runs.
EVIL = "import os\nopen(os.environ['HFPATCH_EVIL'], 'a').close()\n" + SILU


def sampled(cases: Iterable[Any], keep: int) -> list[Any]:
    """Cases of one kind: so many of them, spread over all, are in `make test`, the others in
    `make test-all`."""
    listed = list(cases)
    kept = {i * len(listed) // keep for i in range(keep)}
    return [
        c if i in kept else pytest.param(*(c if isinstance(c, tuple) else (c,)),
                                         marks=pytest.mark.exhaustive)
        for i, c in enumerate(listed)
    ]  # fmt: skip


def evil(**arguments: object) -> dict[str, bytes]:
    """The files of a package that leaves a trace when it is imported."""
    return package(EVIL, **arguments)  # type: ignore[arg-type]


def ran() -> bool:
    """Whether the attacker's code has run since the test began."""
    return Path(os.environ["HFPATCH_EVIL"]).exists()


def renew() -> None:
    """As a new process would start; what the modules themselves compute need not be proven anew."""
    huggingface_hub.close_session()
    kernels.importer._loaded_kernels.clear()
    forget_packages()


def model() -> nn.Sequential:
    return nn.Sequential(nn.SiLU()).requires_grad_(False)


def withstood(spec: str | None = SPEC, said: str = "", **arguments: object) -> str:
    """Apply with a kernel that is an attack; returns the reason in the report.

    Args:
        spec: the source for `silu`; None: what the environment and the config file say.
        said: a part of the reason, and of the error under `strict`.
        arguments: more arguments of `apply`.
    """
    chosen = {} if spec is None else {"kernels": {"silu": spec}}
    m = model()
    before = dict(m[0].__dict__)
    renew()
    report = hfpatch.apply(m, **chosen, **arguments)  # type: ignore[arg-type]
    assert not ran(), "the attacker's code ran"
    assert [s.source for s in report.swaps] == [], "the attacker's kernel is used"
    assert dict(m[0].__dict__) == before
    assert torch.equal(m(X), nn.functional.silu(X))
    (skip,) = report.skips
    assert skip.kind in ("unavailable", "rejected") and said in skip.reason, skip
    assert "\x1b" not in skip.reason and "\x1b" not in str(report)
    renew()
    with pytest.raises(HfpatchError) as raised:
        hfpatch.apply(m, strict=True, **chosen, **arguments)  # type: ignore[arg-type]
    assert said in str(raised.value)
    assert not ran(), "the attacker's code ran under `strict`"
    assert dict(m[0].__dict__) == before
    renew()
    return skip.reason


def loads(spec: str = SPEC, **arguments: object) -> str:
    """Apply with a kernel that is in order; its version."""
    renew()
    m = model()
    (swap,) = hfpatch.apply(m, kernels={"silu": spec}, strict=True, **arguments).swaps  # type: ignore[arg-type]
    torch.testing.assert_close(m(X), nn.functional.silu(X))
    return swap.version


def snapshot(repo: str = "toy/kernel") -> Path:
    """The folder of the only variant of a repository in the cache."""
    cache = Path(constants.HF_HUB_CACHE)
    (found,) = cache.glob(f"kernels--{repo.replace('/', '--')}/snapshots/*/build/*")
    return found
