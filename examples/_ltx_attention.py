"""diffusers' attention backends: which of them run here, and which one to compare with."""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from typing import Any

import torch

# What else may stand for "attention as it might have been", in this order.
YARDSTICKS = ("_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def default_backend() -> str:
    """What diffusers uses where nothing was set."""
    return os.environ.get("DIFFUSERS_ATTN_BACKEND", "native").lower()


def names() -> list[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return sorted(backend.value for backend in AttentionBackendName)


def from_hub(name: str) -> bool:
    """Whether the backend is downloaded from the Kernel Hub when it is set."""
    return name.endswith("_hub")


@functools.cache
def result(name: str, device: torch.device, dtype: torch.dtype, masked: bool) -> Any:
    """Attention of a small sample by one backend, or the exception that it raised.

    LTX-Video calls both kinds: its self-attention has no mask, its cross-attention one.
    """
    from diffusers.models import attention_dispatch as dispatch

    backend = dispatch.AttentionBackendName(name)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 2, 64, generator=generator).to(device, dtype) for _ in range(3))
    mask = torch.zeros(1, 2, 1, 128, device=device, dtype=dtype) if masked else None
    try:
        dispatch._check_attention_backend_requirements(backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each reason why some other kernel was not taken
            out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
        return out.float().cpu()
    except Exception as e:  # whatever a package of attention kernels raises
        return e


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why LTX-Video cannot run on this backend here; None if it can (or might, from the Hub)."""
    if from_hub(name):
        return None
    for masked in (False, True):
        got = result(name, device, dtype, masked)
        if isinstance(got, Exception):
            return (str(got).splitlines() or [type(got).__name__])[0]
    return None


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str, name: str) -> str:
    """The name in lower case; ends with a message that lists what there is if it does not run."""
    name = name.lower()
    known = names()
    problem = (
        why_not(name, args.device, args.dtype) if name in known else "diffusers knows no such one"
    )
    if problem is None:
        return name
    here = [n for n in known if not from_hub(n) and why_not(n, args.device, args.dtype) is None]
    parser.error(
        f"argument {flag}: {name!r} cannot be used on {args.device}: {problem}; "
        f"these can: {', '.join(here)}; "
        f"and these may, from the Kernel Hub: {', '.join(filter(from_hub, known))}"
    )


def another(current: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """A backend that runs here and rounds differently than the current one."""
    ours = result(current or default_backend(), device, dtype, False)
    for name in YARDSTICKS:
        if name != current and why_not(name, device, dtype) is None:
            theirs = result(name, device, dtype, False)
            if isinstance(ours, Exception) or not torch.equal(ours, theirs):
                return name
    return None


def use(transformer: Any, name: str | None) -> None:
    """Set the backend of a model; None: what it had when it was loaded.

    diffusers also makes it the default of all models, which `reset_attention_backend` leaves so.
    """
    transformer.set_attention_backend(name or default_backend())
    if name is None:
        transformer.reset_attention_backend()
