"""What is installed here: versions, devices, kernel builds. For the report and `hfpatch env`."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

_PACKAGES = (
    *("torch", "transformers", "diffusers", "kernels", "accelerate", "safetensors"),
    *("flash-attn-3", "fa3-fwd"),  # FlashAttention-3, by either name
)


def versions() -> dict[str, str]:
    """Versions of hfpatch and the packages it works with; absent ones are left out."""
    found = {"hfpatch": _version("hfpatch") or "source tree", "python": platform.python_version()}
    for name in _PACKAGES:
        version = torch.__version__ if name == "torch" else _version(name)
        if version is not None:
            found[name] = str(version)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _capability(index: int) -> str:
    """ "9.0" of a GPU of CUDA, "gfx942 (ROCm 7.0)" of one of ROCm."""
    if torch.version.hip is not None:
        arch = getattr(torch.cuda.get_device_properties(index), "gcnArchName", "")
        return f"{arch} (ROCm {torch.version.hip})".strip()
    return ".".join(map(str, torch.cuda.get_device_capability(index)))


def version_line() -> str:
    """The versions on one line."""
    return " · ".join(f"{k} {v}" for k, v in versions().items())


def describe() -> dict[str, Any]:
    """Versions, devices, the local kernel build and FlashAttention-3, as plain data."""
    from hfpatch.blocks import flash3
    from hfpatch.errors import KernelLoadError
    from hfpatch.kernels.sources import local_package, unsupported_capability
    from hfpatch.ops import OPS

    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            devices.append(
                {
                    "device": f"cuda:{i}",
                    "name": torch.cuda.get_device_name(i),
                    "capability": _capability(i),
                }
            )
    if torch.xpu.is_available():
        for i in range(torch.xpu.device_count()):
            name = torch.xpu.get_device_name(i)
            devices.append({"device": f"xpu:{i}", "name": name, "capability": "XPU"})
    build: dict[str, Any]
    try:
        package = local_package()
        build = {
            "variant": package.variant,
            "devices": sorted(package.devices),
            "archs": list(package.archs),
            "ops": [op for op in OPS if hasattr(package.module, op)],
        }
        if torch.cuda.is_available() and package.archs and torch.version.hip is None:
            why = unsupported_capability(package.archs, torch.cuda.get_device_capability())
            if why is not None:
                build["problem"] = why
    except KernelLoadError as e:
        build = {"problem": str(e)}
    return {
        "versions": versions(),
        "devices": devices,
        "local build": build,
        "FlashAttention-3": flash3.describe(),
    }
