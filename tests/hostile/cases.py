"""What every hostile case is put through: planned, patched, called, restored, and compared with an
unpatched copy of itself at each step."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.proof.keys import OWNED_BY_WRAPPERS
from hfpatch.report import Report


class Root(nn.Module):
    """A model of one module, which is called with what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A module and its calls.

    Attributes:
        build: makes it; the same weights each time.
        calls: positional arguments of each call, or a function of a generator that draws them.
        mode: of `apply`.
        grads: whether gradients are compared.
        train: whether the model is in `train()`.
        swapped: whether `apply` swaps something, or that it does not matter.
        reason: part of the reason why not.
        after: what is done to both models after `apply`.
    """

    build: Callable[[], nn.Module]
    calls: Sequence[Any] = field(default_factory=tuple)
    mode: str = "inference"
    grads: bool = False
    train: bool = False
    swapped: bool | None = None
    reason: str = ""
    after: Callable[[nn.Module], None] = lambda model: None


def check(case: Case) -> Report:
    """Put a case through everything; returns the report of its `apply`."""
    model = Root(case.build()).train(case.train)
    twin = copy.deepcopy(model)
    before, process = state_of(model), process_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfpatch.plan(model, mode=case.mode)
        assert state_of(model) == before, "`plan` wrote to the model"
        assert process_state() == process, "`plan` changed the process"
        report = hfpatch.apply(model, mode=case.mode)
        assert state_of(model) == before, "`apply` wrote to the model"
        assert process_state() == process, "`apply` changed the process"
        assert hfpatch.apply(twin, include=()).swaps == ()
        hfpatch.restore(twin)
        if case.swapped is not None:
            assert bool(report.swaps) == case.swapped, report
        if case.reason:
            assert any(case.reason in s.reason for s in report.skips), report
        case.after(model)
        case.after(twin)
        for i, call in enumerate(case.calls):
            generator = torch.Generator().manual_seed(1000 + i)
            args = call(generator) if callable(call) else call
            compare(model, twin, args, case.grads)
        hfpatch.restore(model)
        assert state_of(model) == state_of(twin), "it is not as its twin after the same calls"
        if case.calls and not case.train:
            compare(model, twin, args, case.grads, exactly=True)
    return report


def compare(
    model: nn.Module, twin: nn.Module, args: Any, grads: bool, *, exactly: bool = False
) -> None:
    """Call both with inputs of their own; results and gradients are those of the twin."""
    results = [outcome(m, args, grads) for m in (twin, model)]
    (expected, its_grads), (got, our_grads) = results
    assert type(got) is type(expected), f"{got!r:.200} for {expected!r:.200}"
    if isinstance(expected, type):
        assert got is expected
        return
    same(got, expected, exactly)
    same(our_grads, its_grads, exactly)


def outcome(model: nn.Module, args: Any, grads: bool) -> tuple[Any, Any]:
    """What a call gives, or the class of what it raises; and the gradients."""
    args, kwargs = ((), args) if isinstance(args, dict) else (args, {})
    copied = [copy.deepcopy(a) for a in args], {k: copy.deepcopy(v) for k, v in kwargs.items()}
    random.seed(0)
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(grads):
            leaves = []
            if grads:
                for a in (*copied[0], *copied[1].values()):
                    if isinstance(a, Tensor) and a.is_floating_point() and not a.is_inference():
                        leaves.append(a.requires_grad_())
            y = model(*copied[0], **copied[1])
        if not grads:
            return y, None
        tensors = [t for t in flat(y) if t.requires_grad]
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not tensors:
            return y, None
        g = torch.Generator().manual_seed(7)
        upstream = [torch.randn(t.shape, generator=g).to(t.dtype) for t in tensors]
        found = torch.autograd.grad(tensors, [*leaves, *parameters], upstream, allow_unused=True)
        return tuple(t.detach() for t in flat(y)), found
    except Exception as e:  # any case's own
        return type(e), None


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for r in result for t in flat(r)]
    return []


def same(got: Any, expected: Any, exactly: bool) -> None:
    if expected is None or got is None:
        assert got is None and expected is None
        return
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            same(a, b, exactly)
        return
    assert isinstance(got, Tensor) and got.dtype == expected.dtype and got.shape == expected.shape
    if exactly:
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        return
    half = expected.dtype in (torch.float16, torch.bfloat16)
    rtol = 2e-2 if half else 2e-4
    scale = float(expected.detach().abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    atol = rtol * max(scale, 1e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


# State -------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a model holds, bit for bit, except for what a patch puts on an instance."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for k, v in module.__dict__.items():
            if k in OWNED_BY_WRAPPERS or k == "_modules":
                continue
            found[f"{path}:{k}"] = frozen(v)
    return found


def frozen(value: Any, depth: int = 6) -> Any:
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:
            value = value.view(torch.int16)
        return (str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes())
    if isinstance(value, (int, float, str, bool, bytes, type(None), torch.dtype, type)):
        return repr(value)
    if isinstance(value, dict):
        return tuple((repr(k), frozen(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v, depth - 1) for v in value)
    if isinstance(value, (set, frozenset)):  # a copy's order can be another one
        return frozenset(frozen(v, depth - 1) for v in value)
    held = getattr(value, "__dict__", None)
    if depth > 0 and isinstance(held, dict) and not isinstance(value, nn.Module):
        return (type(value).__name__, frozen(held, depth - 1))
    return type(value).__name__


def process_state() -> Any:
    return (
        torch.random.get_rng_state().numpy().tobytes(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
    )


def copies(model: nn.Module) -> dict[str, nn.Module]:
    """A patched model's copies, and copies of these."""
    once = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    return {
        "deepcopy": once,
        "deepcopy of a deepcopy": copy.deepcopy(once),
        "pickle": loaded,
        "pickle of a deepcopy": pickle.loads(pickle.dumps(once)),
        "deepcopy of a pickle": copy.deepcopy(loaded),
        "copy": copy.copy(model),
    }
