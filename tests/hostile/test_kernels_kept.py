"""User kernels beside their names: changed closures, blocks, `verify=False`, Triton's template."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import kernel_models as models
import pytest
import torch
import zoo
from torch import Tensor, nn

import hfpatch
from hfpatch.foreign import reads
from hfpatch.kernel_project.new import new_project
from hfpatch.ops import OPS

_SCALE = 1.0
_HELD = {0: 1.0}


def _reading_a_global(*tensors: Any, **params: Any) -> Any:
    return OPS["layer_norm"].reference(*tensors, **params) * _SCALE


def _reading_a_list(*tensors: Any, **params: Any) -> Any:
    return OPS["layer_norm"].reference(*tensors, **params) * _HELD[0]


@functools.cache
def _cached(width: int) -> float:
    return _SCALE


def _reading_a_cache(*tensors: Any, **params: Any) -> Any:
    return OPS["layer_norm"].reference(*tensors, **params) * _cached(tensors[0].shape[-1])


def _with_default(*tensors: Any, scale: float = 1.0, **params: Any) -> Any:
    return OPS["layer_norm"].reference(*tensors, **params) * scale


@pytest.mark.parametrize("how", ["closure", "global", "list", "cache", "default", "attribute"])
def test_a_closure_that_changed_is_another_kernel(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven, changed, and proven anew at the next `apply`: not taken from the cache."""
    scale = 1.0

    def closed(*tensors: Any, **params: Any) -> Any:
        return OPS["layer_norm"].reference(*tensors, **params) * scale

    def held(*tensors: Any, **params: Any) -> Any:
        return OPS["layer_norm"].reference(*tensors, **params) * held.scale  # type: ignore

    held.scale = 1.0  # type: ignore[attr-defined]
    kernel = {
        "closure": closed,
        "global": _reading_a_global,
        "list": _reading_a_list,
        "cache": _reading_a_cache,
        "default": _with_default,
        "attribute": held,
    }[how]
    model = nn.Sequential(nn.LayerNorm(64))
    before = reads.key_of(kernel)
    assert reads.key_of(kernel) == before
    with Registered(kernel):
        assert hfpatch.apply(model, kernels={"layer_norm": "mine"}).swaps
        hfpatch.restore(model)
        scale = 2.0
        held.scale = 2.0  # type: ignore[attr-defined]
        monkeypatch.setattr(sys.modules[__name__], "_SCALE", 2.0)
        _cached.cache_clear()
        monkeypatch.setitem(_HELD, 0, 2.0)
        monkeypatch.setitem(_with_default.__kwdefaults__, "scale", 2.0)
        assert reads.key_of(kernel) != before
        (skip,) = hfpatch.apply(model, kernels={"layer_norm": "mine"}).skips
    assert skip.kind == "rejected"


class Registered:
    """A layer norm kernel registered as `mine`."""

    def __init__(self, kernel: Any) -> None:
        self.handle = hfpatch.register(op="layer_norm", kernel=kernel, name="mine")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.handle.remove()


def test_verify_false_spares_our_own_alone() -> None:
    def wrong(x: Tensor, *rest: Any, **params: Any) -> Tensor:
        return OPS["layer_norm"].reference(x, *rest, **params) * 1.01

    model = nn.Sequential(nn.LayerNorm(64))
    (skip,) = hfpatch.apply(model, kernels={"layer_norm": wrong}, verify=False).skips
    assert skip.kind == "rejected" and "its largest error" in skip.reason

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    handle = hfpatch.register(
        "^Doubled$", forward=lambda m, x: x * 3, sample=lambda m: (torch.randn(3, 4),)
    )
    try:
        (skip,) = hfpatch.apply(nn.Sequential(Doubled()), verify=False).skips
    finally:
        handle.remove()
    assert skip.kind == "rejected"


def test_a_kernel_that_refuses_a_size_is_asked_once() -> None:
    calls: list[int] = []

    def picky(x: Tensor, *rest: Any, **params: Any) -> Tensor:
        if x.shape[0] == 77:
            calls.append(1)
            raise NotImplementedError("no 77")
        return OPS["layer_norm"].reference(x, *rest, **params)

    model = nn.Sequential(nn.LayerNorm(64)).requires_grad_(False)
    x = torch.randn(77, 64)
    expected = model(x)
    assert hfpatch.apply(model, kernels={"layer_norm": picky}).swaps
    with pytest.warns(RuntimeWarning, match="failed .*no 77"), torch.no_grad():
        results = [model(x) for _ in range(3)]
    for y in results:
        torch.testing.assert_close(y, expected)
    assert len(calls) == 1


def test_state_is_said_in_the_report() -> None:
    count = 0

    def counting(*tensors: Any, **params: Any) -> Tensor:
        nonlocal count
        count += 1
        return OPS["layer_norm"].reference(*tensors, **params)

    report = hfpatch.apply(nn.Sequential(nn.LayerNorm(64)), kernels={"layer_norm": counting})
    assert any("keeps state" in n and "`count`" in n for n in report.notes)


def test_a_wait_is_said_in_the_report() -> None:
    def waiting(x: Tensor, *rest: Any, **params: Any) -> Tensor:
        if x.numel() and x.isnan().any().item():
            pass
        return OPS["layer_norm"].reference(x, *rest, **params)

    report = hfpatch.apply(nn.Sequential(nn.LayerNorm(64)), kernels={"layer_norm": waiting})
    assert any("makes the host wait" in n for n in report.notes)


def test_the_second_call_of_a_kind_is_the_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.foreign import watch

    model = nn.Sequential(models.SomeRMSNorm(64)).requires_grad_(False)
    kernel = models.right_kernel("rms_norm")
    assert hfpatch.apply(model, kernels={"rms_norm": kernel}).swaps
    compared: list[Any] = []
    original = watch.wrong_values
    monkeypatch.setattr(
        watch,
        "wrong_values",
        lambda *a: compared.append(1) or original(*a),  # type: ignore
    )
    with torch.no_grad():
        for shape in [(2, 64), (2, 64), (3, 64), (2, 64), (3, 64)]:
            model(torch.randn(shape))
    # of both kinds the first call, and one with other values behind it
    assert len(compared) == 4


@pytest.mark.parametrize("op", ["norm_modulate", "gate_residual"])
def test_a_wrong_kernel_in_a_block(op: str, kernels_module: object) -> None:
    """A block is proven with small inputs; what a kernel gets wrong at another size is seen then,
    and when it is wrong in every call the block is not fused."""
    entry = zoo.ENTRIES["ltx2"]
    model = entry.build()
    inputs = entry.inputs(model)
    expected = entry.run(model, inputs)
    spoiled: list[int] = []
    size = 0

    def wrong(x: Tensor, *rest: Any, **params: Any) -> Any:
        y = OPS[op].reference(x, *rest, **params)
        if size and x.shape[-2] != size:
            return y
        spoiled.append(1)
        return y * 0.5

    for size in (inputs["hidden_states"].shape[1], 0):
        report = hfpatch.apply(model, kernels={"*": "local", op: wrong})
        assert any(s.op == "block" for s in report.swaps) is bool(size), report
        spoiled.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(2):
                y = entry.run(model, inputs)
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert bool(spoiled) is bool(size), "it was called, and seen to be wrong"
        hfpatch.restore(model)


@pytest.mark.parametrize("op", ["norm_modulate", "gate_residual"])
def test_no_block_is_captured_with_somebodys_kernel(op: str, kernels_module: object) -> None:
    """A capture is proven with our own."""
    entry = zoo.ENTRIES["ltx"]
    model = entry.build()
    inputs = entry.inputs(model)
    expected = entry.run(model, inputs)

    def wrong(x: Tensor, *rest: Any, **params: Any) -> Any:
        return OPS[op].reference(x, *rest, **params) * 0.5

    assert hfpatch.apply(model).plan.candidates
    hfpatch.restore(model)
    assert not hfpatch.apply(model, kernels={"*": "local", op: wrong}).plan.candidates
    for _ in range(3):
        torch.testing.assert_close(entry.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_tritons_template_under_its_interpreter(tmp_path: Path) -> None:
    """Its kernels compute right, and hfpatch takes them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    root = new_project("my-triton", tmp_path, template="triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "tests")],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
