"""Kernels of users on a GPU: streams, waiting hosts, captured graphs, and Triton's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfpatch
from hfpatch.kernel_project.new import new_project
from hfpatch.ops import OPS
from hfpatch.proof.proofs import forget_proofs

pytestmark = pytest.mark.gpu

right: Callable[..., Tensor] = OPS["layer_norm"].reference


@pytest.fixture(autouse=True)
def afresh() -> None:
    forget_proofs()


def _report(kernel: Any) -> Any:
    model = nn.LayerNorm(64, device="cuda").requires_grad_(False)
    return hfpatch.apply(nn.Sequential(model), kernels={"layer_norm": kernel})


def test_a_stream_of_its_own() -> None:
    own = torch.cuda.Stream()

    def kernel(*tensors: Any, **params: Any) -> Tensor:
        with torch.cuda.stream(own):
            return right(*tensors, **params)

    report = _report(kernel)
    assert not report.swaps and {s.kind for s in report.skips} == {"rejected"}


def test_a_stream_that_is_left_current() -> None:
    before = torch.cuda.current_stream()

    def kernel(*tensors: Any, **params: Any) -> Tensor:
        y = right(*tensors, **params)
        torch.cuda.set_stream(torch.cuda.Stream())
        return y

    report = _report(kernel)
    assert "changed the current stream" in report.skips[0].reason
    assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("how", ["item", "synchronize", "stream", "not at all"])
def test_a_kernel_that_makes_the_host_wait(how: str) -> None:
    def kernel(x: Tensor, *rest: Any, **params: Any) -> Tensor:
        y = right(x, *rest, **params)
        if how == "item" and x.numel():
            x.sum().item()
        if how == "synchronize":
            torch.cuda.synchronize()
        if how == "stream":
            torch.cuda.current_stream().synchronize()
        return y

    report = _report(kernel)
    assert len(report.swaps) == 1
    assert any("makes the host wait" in n for n in report.notes) is (how != "not at all")


def test_a_first_call_in_a_capture() -> None:
    model = nn.Sequential(nn.LayerNorm(64, device="cuda")).requires_grad_(False)
    x = torch.randn(5, 64, device="cuda")
    expected = model(x)
    hfpatch.apply(model, kernels={"layer_norm": lambda *t, **p: right(*t, **p)})
    graph = torch.cuda.CUDAGraph()
    says = pytest.warns(RuntimeWarning, match="cannot be compared while")
    with torch.no_grad(), says, torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    torch.testing.assert_close(y, expected)


def test_tritons_template_passes_its_own_tests(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    root = new_project("my-triton", tmp_path, template="triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "tests")],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


def test_the_triton_example_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).resolve().parents[2] / "examples" / "triton_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "4 swapped" in done.stdout and "restored, bit for bit: True" in done.stdout
