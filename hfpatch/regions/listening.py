"""transformers' own hooks that note hidden states and attentions where a caller asks for these.

They stay on a model's modules for good once any call asked. While no caller listens to what one
notes, the module that it is on may be bypassed.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hfpatch.proof.library import is_own
from hfpatch.proof.unchanged import has_diffusers_hook

_HOME = "transformers.utils.output_capturing"
_NAME = "install_output_capuring_hook.<locals>.output_capturing_hook"
_REST = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook")
_known: dict[int, Any] = {}  # code objects of such hooks, by identity


def is_idle(module: nn.Module) -> bool:
    """Whether all hooks on a module are such, and nobody listens to them."""
    d = module.__dict__
    if any(d.get(name) for name in _REST) or "_hf_hook" in d or has_diffusers_hook(d):
        return False
    hooks = d["_forward_hooks"]
    return all(map(_is_idle, hooks.values()))


def _is_idle(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    if _known.get(id(code)) is not code or code is None:
        if hook.__module__ != _HOME or hook.__qualname__ != _NAME or not is_own(hook):
            return False
        _known[id(code)] = code
    collected = sys.modules[_HOME]._active_collector.get()  # type: ignore[attr-defined]
    if collected is None:
        return True
    key = dict(zip(code.co_freevars, hook.__closure__ or (), strict=True)).get("key")
    return key is not None and key.cell_contents not in collected
