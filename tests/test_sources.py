"""Kernel sources that cannot be used: each ends in a clear note or, under `strict`, an error."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch import env
from hfpatch.errors import KernelLoadError
from hfpatch.kernels import builds, sources
from hfpatch.proof.proofs import forget_proofs

MODEL_WIDTH = 48


def model() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(MODEL_WIDTH)).requires_grad_(False)


@pytest.fixture
def build(kernels_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the local CPU build that a test may damage; `local` resolves to it."""
    name = next(p.name for p in (kernels_dir / "build").iterdir() if "-cpu-" in p.name)
    shutil.copytree(kernels_dir / "build" / name, tmp_path / "build" / name)
    monkeypatch.setattr(sources, "LOCAL_BUILD", tmp_path)
    monkeypatch.setattr(builds, "beside", list)
    forget_proofs()
    return tmp_path


def variant(build: Path) -> Path:
    return next((build / "build").iterdir())


def expect_fallback(reason: str) -> None:
    """The model runs on torch's operators, the report says why; strict raises the same."""
    m = model()
    x = torch.randn(3, MODEL_WIDTH)
    expected = m(x)
    report = hfpatch.apply(m)
    assert not any(s.source == "local" for s in report.swaps)
    (note,) = report.notes
    assert reason in note
    assert "Using torch's own operators instead." in note
    assert reason in str(report).replace("\n", " ")
    torch.testing.assert_close(m(x), expected)
    before = dict(m[0].__dict__)
    with pytest.raises(KernelLoadError) as raised:
        hfpatch.apply(m, strict=True)
    assert reason in str(raised.value)
    assert dict(m[0].__dict__) == before


def test_an_intact_copy_loads(build: Path) -> None:
    package = sources.local_package(build)
    assert package.devices == {"cpu"}
    assert package.kernel("silu").raw is not None


def test_nothing_was_built(build: Path) -> None:
    shutil.rmtree(build / "build")
    (build / "REASON.json").write_text(json.dumps({"reason": "no C++ compiler was found"}))
    expect_fallback("no C++ compiler was found")


def test_a_corrupt_library_is_not_loaded(build: Path) -> None:
    library = next(variant(build).glob("*.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 0xFF
    library.write_bytes(data)
    expect_fallback("is damaged: sha256")


def test_a_truncated_library(build: Path) -> None:
    library = next(variant(build).glob("*.so"))
    library.write_bytes(library.read_bytes()[:1000])
    expect_fallback("is damaged")


@pytest.mark.parametrize(
    "content", ["", "{", "{}", '{"digest": {"algorithm": "md17", "files": {}}}']
)
def test_bad_metadata(build: Path, content: str) -> None:
    (variant(build) / "metadata.json").write_text(content)
    expect_fallback("is damaged")


def test_a_missing_file(build: Path) -> None:
    (variant(build) / "__init__.py").unlink()
    expect_fallback("is damaged")


def test_a_build_for_a_newer_torch(build: Path) -> None:
    path = variant(build)
    path.rename(path.with_name(path.name.replace("abi211", "abi999")))
    expect_fallback("too new for environment Torch version")


def test_a_build_for_another_system(build: Path) -> None:
    path = variant(build)
    path.rename(path.with_name(path.name.replace("x86_64", "riscv64").replace("aarch64", "riscv")))
    expect_fallback("does not match system CPU")


def test_a_library_that_does_not_link(build: Path) -> None:
    """The digests are right, but the library is not one (built against something else)."""
    from hfpatch.kernel_build import digest

    path = variant(build)
    library = next(path.glob("*.so"))
    library.write_bytes(b"\x7fELF" + bytes(500))
    metadata = json.loads((path / "metadata.json").read_text())
    ops = path / "_ops.py"  # operators of its own, or those of the intact build would serve
    ops.write_text(ops.read_text().replace(f"ops.{metadata['id']}", "ops.broken"))
    metadata["digest"] = digest(path)
    metadata["id"] += "_broken"
    (path / "metadata.json").write_text(json.dumps(metadata))
    expect_fallback("could not be loaded")


def test_no_build_for_this_gpu() -> None:
    why = sources.unsupported_capability(("8.0", "9.0"), (7, 5))
    assert why is not None
    assert "no code for compute capability 7.5, only for 8.0, 9.0" in why
    assert sources.unsupported_capability(("8.0", "9.0+PTX"), (12, 0)) is None
    assert sources.unsupported_capability(("8.0",), (8, 6)) is None
    assert sources.unsupported_capability(("9.0a",), (9, 0)) is None
    assert sources.unsupported_capability(("9.0a",), (10, 0)) is not None
    kernel = sources.Kernel(
        "silu", torch.nn.functional.silu, "cpu-only", devices=frozenset({"cpu"})
    )
    assert "has no code for cuda" in (kernel.refuses("cuda") or "")


@pytest.mark.parametrize("rocm", [None, "6.4"])
def test_a_build_without_code_for_the_gpu_is_told_by_env(
    rocm: str | None, monkeypatch: pytest.MonkeyPatch, kernels_module: object
) -> None:
    """Not on ROCm, whose capabilities are other numbers."""
    package = replace(sources.local_package(), archs=("8.0", "9.0"))
    monkeypatch.setattr(sources, "local_package", lambda: package)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    problem = env.describe()["local build"].get("problem", "")
    assert ("no code for compute capability 7.5" in problem) is (rocm is None)


def test_hub_kernel_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants  # which reads the variable once

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    m = model()
    report = hfpatch.apply(m, kernels={"layer_norm": "nobody/nothing@v1"})
    assert "`nobody/nothing@v1` was never downloaded" in report.notes[0]
    with pytest.raises(KernelLoadError, match="nobody/nothing@v1"):
        hfpatch.apply(m, kernels={"layer_norm": "nobody/nothing@v1"}, strict=True)
