"""macOS, Windows, ROCm and XPU, as far as a machine with none of them can show.

What is shown here is logic: imports, paths, choices, messages. That kernels of others run on those
devices is for who has one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfpatch
from hfpatch import env
from hfpatch.blocks import flash3
from hfpatch.kernels import sources
from hfpatch.kernels.sources import Kernel
from hfpatch.ops import OPS
from hfpatch.planning.plan import Refusal
from hfpatch.planning.sites import Site, probe_devices
from hfpatch.proof import contract, probe
from hfpatch.proof.proofs import forget_proofs

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("system", "name"),
    [("win32", "Windows"), pytest.param("darwin", "Darwin", marks=pytest.mark.exhaustive)],
)
def test_a_system_without_posix(system: str, name: str, tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "another_system.py"
    done = subprocess.run(
        [sys.executable, str(script), system, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["not imported"] == []
    assert found["sources"] == ["torch"] and found["near"] and found["restored"] >= 1
    (warned,) = found["warned"]
    assert "no compiled kernels" in warned and "Using torch's own operators" in warned
    assert set(found["planned"]) == {"local"}, "what a Linux machine with a GPU would get"
    status, build = found["env"]
    assert status == 0 and "no compiled kernels" in build["problem"]
    assert found["failed"] == {}
    assert all(f"and this is {name}" in why for why in found["missing"].values())
    assert bytes(found["bytes"]) == b"a\r\nb\x1a\n"
    assert found["opened"] == []


# ------------------------------------------------------------------------------ ROCm, XPU


@pytest.fixture
def _rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.1")


def site(device: str) -> Site:
    return Site("norm", nn.Identity(), device, "cpu")


def test_which_devices_are_known() -> None:
    assert probe_devices(site("xpu")) == ("xpu",)
    refusal = probe_devices(site("mps"))
    assert isinstance(refusal, Refusal) and refusal.reason == "no kernel for device mps"


@pytest.mark.usefixtures("_rocm")
def test_own_kernels_are_left_out_on_rocm(kernels_module: object) -> None:
    kernel = sources.local_package().kernel("rms_norm")
    why = kernel.refuses("cuda") or ""
    assert why.startswith("kernel `local` has no code for ROCm (hip 7.0.1); hfpatch's own kernels")
    assert "`kernels='org/name@v1'`" in why and kernel.refuses("cpu") is None


@pytest.mark.usefixtures("_rocm")
def test_kernels_of_others_are_used_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a compute capability is another number, and architectures have other names."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (7, 0))
    devices = frozenset({"cuda"})
    kernel = Kernel(
        "silu", OPS["silu"].aten, "org/name@v1", devices=devices, archs=("gfx942",),
        min_capability=(8, 0),
    )  # fmt: skip
    assert kernel.refuses("cuda") is None
    monkeypatch.setattr(torch.version, "hip", None)
    assert "it needs compute capability 8.0" in (kernel.refuses("cuda") or "")


@pytest.mark.usefixtures("_rocm")
def test_flash_attention_3_is_not_taken_for_rocms_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))  # gfx90a says so
    assert flash3._capability(torch.device("cuda", 0)) is None


@pytest.mark.usefixtures("_rocm")
def test_env_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        gcnArchName = "gfx942:sramecc+"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties())
    assert env._capability(0) == "gfx942:sramecc+ (ROCm 7.0.1)"


def test_own_kernels_are_left_out_on_xpu(kernels_module: object) -> None:
    why = sources.local_package().kernel("rms_norm").refuses("xpu") or ""
    assert why.startswith("kernel `local` has no code for xpu; hfpatch's own kernels are for CUDA")


class _AsOnXpu:
    """`torch`, on whose device xpu the CPU computes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu" if name == "xpu" else name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """As on a machine with an XPU, and a kernel that is registered for it."""
    forget_proofs()
    monkeypatch.setattr(probe, "torch", _AsOnXpu())
    monkeypatch.setattr("hfpatch.proof.proofs.probe_devices", lambda site: ("xpu",))
    seen: list[Any] = []

    def kernel(*tensors: Any, **params: Any) -> Any:
        seen.append(params)
        return OPS["rms_norm"].aten(*tensors, **params)

    handle = hfpatch.register(op="rms_norm", kernel=kernel, name="intels", devices="xpu")
    yield seen
    handle.remove()
    forget_proofs()


def on_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on tensors say that they are there."""
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda t: False))
    monkeypatch.setattr(contract, "_device_type", lambda x: "xpu")


def test_a_registered_kernel_is_proven_and_called_on_xpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(LlamaRMSNorm(64)).requires_grad_(False)
    x = torch.randn(3, 64)
    expected = model(x)
    report = hfpatch.apply(model, kernels={"rms_norm": "intels"})
    (swap,) = report.swaps
    assert (swap.source, swap.devices) == ("intels", ("xpu",))
    calls.clear()
    on_xpu(monkeypatch)
    with torch.no_grad():
        result = model(x)
    assert len(calls) >= 1, "the kernel ran"
    monkeypatch.undo()
    torch.testing.assert_close(result, expected)


def test_under_autocast_the_original_runs_on_xpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(LlamaRMSNorm(64)).requires_grad_(False)
    hfpatch.apply(model, kernels={"rms_norm": "intels"})
    calls.clear()
    on_xpu(monkeypatch)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device == "xpu")
    with pytest.warns(RuntimeWarning, match="under autocast on xpu"), torch.no_grad():
        model(torch.randn(3, 64))
    assert calls == []


def test_without_a_kernel_for_it_modules_stay_on_xpu(
    calls: list[Any], kernels_module: object
) -> None:
    model = nn.Sequential(LlamaRMSNorm(64)).requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="has no code for xpu; hfpatch's own kernels are for"):
        report = hfpatch.apply(model)
    (skip,) = report.skips
    assert not report.swaps and skip.kind == "unavailable"


def test_whole_blocks_are_for_cuda_and_the_cpu(calls: list[Any], kernels_module: object) -> None:
    import zoo

    model = zoo.ENTRIES["cogvideox"].build()
    plan = hfpatch.plan(model)
    reasons = {s.reason for s in plan.skips if s.class_name == "CogVideoXBlock"}
    assert reasons == {"whole blocks are fused on CUDA and on the CPU alone"}


@pytest.mark.parametrize(
    ("backend", "devices"), [("rocm", {"cuda"}), ("xpu", {"xpu"}), ("cuda", {"cuda"})]
)
def test_devices_of_a_hub_kernels_variant(backend: str, devices: set[str]) -> None:
    from hfpatch.hub.load import devices_of

    assert devices_of(backend) == devices
    assert devices_of("metal") == set()
