"""Calls that no sample of a proof is like, and whether a patched module answers as its twin."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.proof.keys import OWNED_BY_WRAPPERS

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """One call: its input, and what it is made under."""

    name: str
    x: Callable[[torch.Generator], Tensor]
    context: Callable[[], Any] = contextlib.nullcontext
    gradient: bool = False
    before: Callable[[nn.Module], None] = lambda module: None


def _randn(*shape: int, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda g: scale * torch.randn(shape, generator=g)


def _half(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(shape, generator=g).bfloat16()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    os.environ["HFPATCH_HOSTILE"] = "1"
    try:
        with torch.no_grad():
            yield
    finally:
        del os.environ["HFPATCH_HOSTILE"]


def battery(width: int) -> list[Call]:
    """Calls for a module that takes `[..., width]`."""
    no_grad = torch.no_grad
    plain = [
        Call("plain", _randn(2, 5, width), no_grad),
        Call("two dimensions", _randn(6, width), no_grad),
        Call("one dimension", _randn(width), no_grad),
        Call("four dimensions", _randn(2, 3, 4, width), no_grad),
        Call("batch of one", _randn(1, 5, width), no_grad),
        Call("a single row", _randn(1, 1, width), no_grad),
        Call("long", _randn(2, 40, width), no_grad),
        Call("many rows", _randn(300, width), no_grad),
        Call("far out", _randn(2, 5, width, scale=1e6), no_grad),
        Call("one far out", lambda g: _spike(width, g), no_grad),
        Call("infinite", lambda g: _spike(width, g, float("inf")), no_grad),
        Call("tiny", _randn(2, 5, width, scale=1e-12), no_grad),
        Call("apart", lambda g: torch.randn(2, width, 5, generator=g).transpose(1, 2), no_grad),
        Call("offset", lambda g: torch.randn(3, 5, width, generator=g)[1:], no_grad),
        Call("empty", _randn(0, 5, width), no_grad),
        Call("grad mode", _randn(2, 5, width)),
        Call("inference mode", _randn(2, 5, width), torch.inference_mode),
        Call("environment", _randn(2, 5, width), _environment),
        Call("gradient", _randn(2, 5, width), gradient=True),
        Call("bf16", _half(2, 5, width), no_grad),
    ]
    again = [Call(f"again {i}", _randn(2, 5, width), no_grad) for i in range(4)]
    training = [
        Call("training", _randn(2, 5, width), no_grad, before=lambda m: _train(m, True)),
        Call(
            "training in bf16", lambda g: torch.randn(2, 5, width, generator=g).bfloat16(), no_grad
        ),
        Call("eval", _randn(2, 5, width), no_grad, before=lambda m: _train(m, False)),
    ]
    return [*plain, *again, *training]


def _train(module: nn.Module, mode: bool) -> None:
    module.train(mode)


def _spike(width: int, generator: torch.Generator, value: float = 3e5) -> Tensor:
    x = torch.randn(2, 5, width, generator=generator)
    x[..., 3] = value
    return x


def compare(patched: nn.Module, twin: nn.Module, calls: list[Call], inputs: int = 1) -> list[str]:
    """The calls that the patched module answers otherwise than its unpatched twin.

    Each is made with the same fresh values. Errors must be of the same class, and what a call
    writes to its input or the module must be written too.
    """
    wrong = []
    for seed, call in enumerate(calls):
        outcomes = []
        for module in (patched, twin):
            call.before(module)
            generator = torch.Generator().manual_seed(100 + seed)
            args = [call.x(generator) for _ in range(inputs)]
            dtype = next((p.dtype for p in module.parameters()), torch.float32)
            if args[0].dtype != dtype and args[0].dtype != torch.float32:
                module = module.to(args[0].dtype)
            outcomes.append(_outcome(module, args, call))
            module.to(dtype)
        if (why := _differ(*outcomes)) is not None:
            wrong.append(f"{call.name}: {why}")
    return wrong


def _outcome(module: nn.Module, args: list[Tensor], call: Call) -> dict[str, Any]:
    if call.gradient:
        args = [a.requires_grad_() for a in args]
    try:
        with warnings.catch_warnings(), call.context():
            warnings.simplefilter("ignore")
            y = module(*args)
            gradients: tuple[Tensor | None, ...] = ()
            if call.gradient:
                leaves = [*args, *module.parameters()]
                gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    except Exception as e:
        return {"error": type(e)}
    own = {k for m in module.modules() for k in m.__dict__ if k not in OWNED_BY_WRAPPERS}
    return {"y": y, "gradients": gradients, "args": args, "attributes": own}


def _differ(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    if "error" in theirs or "error" in ours:
        one, other = ours.get("error"), theirs.get("error")
        return None if one is other else f"{one} for {other}"
    if ours["attributes"] != theirs["attributes"]:
        return f"attributes {ours['attributes'] ^ theirs['attributes']}"
    pairs = [("output", ours["y"], theirs["y"])]
    pairs += [("input", a, b) for a, b in zip(ours["args"], theirs["args"], strict=True)]
    pairs += [
        ("gradient", a, b) for a, b in zip(ours["gradients"], theirs["gradients"], strict=True)
    ]
    for name, a, b in pairs:
        if (a is None) != (b is None):
            return f"{name} is missing"
        if a is None:
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} {tuple(a.shape)} {a.dtype} for {tuple(b.shape)} {b.dtype}"
        if a.numel() == 0:
            continue
        a, b = a.detach().double(), b.detach().double()
        eps = torch.finfo(ours["y"].dtype).eps
        if not torch.equal(a.isnan(), b.isnan()):
            return f"{name}: NaN elsewhere"
        a, b = a.nan_to_num(), b.nan_to_num()
        limit = 100 if name == "gradient" else 16
        if (a - b).abs().max() > limit * eps * b.abs().max().clamp_min(1e-30):
            return f"{name} differs by {(a - b).abs().max().item():.1e}"
    return None


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a plan must leave as it was: tensors, attributes, modes."""
    found: dict[str, Any] = {}
    for path, m in module.named_modules():
        for name, value in m.__dict__.items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    found[f"{path}.{key}"] = None if tensor is None else tensor.clone()
            elif name not in ("_modules",):
                found[f"{path}.{name}"] = copy.deepcopy(value) if _plain(value) else id(value)
    return found


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None), list, dict, tuple, set))


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a
    )
