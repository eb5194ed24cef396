"""Attention of a training step: the model's own attention function with the arguments that the
original passes, but PyTorch's by the kernel that is fastest with its backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.training import packed
from hfpatch.training.deferred_mask import DeferredMask, made


@dataclass(frozen=True)
class Argument:
    """A keyword argument of the attention function: an attribute or parameter of the attention
    module by that name, or one of its configuration ("config.NAME"), or a constant."""

    name: str
    attribute: str | None = None
    constant: Any = None

    def value(self, module: nn.Module) -> Any:
        """What the original would pass."""
        if self.attribute is None:
            return self.constant
        held: Any = module
        for name in self.attribute.split("."):
            held = getattr(held, name)
        return held


@dataclass(frozen=True)
class Passed:
    """A keyword argument of a layer. reaches: whether it reaches the attention function. off:
    whether it was None or False when that was seen."""

    name: str
    reaches: bool
    off: bool


@dataclass(frozen=True)
class Call:
    """How a layer calls its attention function.

    own: arguments that the attention module makes itself. passed: the layer's own keyword arguments
    that were seen. passes_others: whether any other reaches the function than what the layer or the
    attention module takes by its name (named).
    """

    own: tuple[Argument, ...]
    passed: tuple[Passed, ...]
    passes_others: bool
    named: frozenset[str]

    def reaching(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """What of a layer's keyword arguments reaches the function; None where it is not known
        what becomes of one."""
        found = {}
        for name, value in given.items():
            seen = next((p for p in self.passed if p.name == name), None)
            if seen is None:
                own = any(name == a.name for a in self.own)  # twice the same is an error
                if not self.passes_others or name in self.named or own:
                    return None
            elif not seen.reaches:
                # the layer was seen to do without it, but not with it
                if seen.off and value is not None and value is not False:
                    return None
                continue
            found[name] = value
        return found

    def arguments(self, module: nn.Module, reaching: Mapping[str, Any]) -> dict[str, Any]:
        """The function's keyword arguments."""
        return {a.name: a.value(module) for a in self.own} | dict(reaching)


def _eager_of(cls: type) -> Any:
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return getattr(forward, "__globals__", {}).get("eager_attention_forward")


def function_of(module: Any) -> Callable[..., Any] | None:
    """The attention function that a module's own forward would find now."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    cls: Any = type(module)
    default = _eager_of(cls)
    name = module.config._attn_implementation
    if name is None or default is None:
        return None
    found: Any = ALL_ATTENTION_FUNCTIONS.get(name, None if name != "eager" else default)
    return found  # type: ignore[no-any-return]


def attended(
    function: Callable[..., Any],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    arguments: dict[str, Any],
) -> Tensor:
    """Attention's result [B, S, heads * head_dim], dense.

    Args:
        q: [B, heads, S, head_dim]. k, v: [B, key_heads, S, head_dim].
        mask: what the layer was given.
        arguments: `Call.arguments`.
    """
    batch, _, length, _ = q.shape
    out = None
    alike = q.dtype == k.dtype == v.dtype
    if alike and function is _sdpa() and _is_causal(module, q, k, arguments):
        scale = arguments.get("scaling")
        if mask is None:
            out = _by_cudnn(q, k, v, scale) if q.is_cuda else None
        else:
            found = _sequences(mask, arguments, batch, length)
            out = None if found is None else packed.attended(q, k, v, found, scale)
    if out is None:
        out = function(module, q, k, v, made(mask), **arguments)[0]
    return out.reshape(batch, length, -1).contiguous()


def _sequences(
    mask: Any, arguments: dict[str, Any], rows: int, length: int
) -> packed.Sequences | None:
    if type(mask) is DeferredMask:
        return mask.sequences if mask.shape == (rows, 1, length, length) else None
    positions, window = arguments.get("position_ids"), arguments.get("sliding_window")
    return packed.sequences_of(mask, positions, window, rows)


@functools.cache
def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _is_causal(module: nn.Module, q: Tensor, k: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether it is attention of tokens to those before them and nothing more."""
    if any(arguments.get(name) is not None for name in ("softcap", "position_bias", "cache")):
        return False
    causal = arguments.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return causal is True and not arguments.get("dropout") and q.shape[2] == k.shape[2] > 1


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor | None:
    """On a GPU whose fastest kernels they are; None where they do not serve."""
    if not _cudnn_serves(q, k, v):
        return None
    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale
    )
    out: Tensor = found[0]
    return out.transpose(1, 2)


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN's attention has a forward and a backward for these, and is allowed."""
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    wants = q.requires_grad or k.requires_grad or v.requires_grad
    key = (q.device.index, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), wants)
    found = _served.get(key)
    if found is None:
        if len(_served) >= 1024:  # packed batches of all lengths
            _served.clear()
        groups = q.shape[1] != k.shape[1]
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, groups)
        found = _served[key] = (
            q.dtype in (torch.float16, torch.bfloat16)
            and q.shape[-1] <= 128
            and torch.cuda.get_device_capability(q.device)[0] >= 9
            and torch.backends.cuda.can_use_cudnn_attention(params)
        )
    return found


_served: dict[Any, bool] = {}
