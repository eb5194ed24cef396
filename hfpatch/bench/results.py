"""What a run writes, and how what was written is read."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hfpatch.env import versions

Result = dict[str, Any]


def head(suite: str, device: torch.device, commit: str | None) -> Result:
    """What identifies a run: the machine, the versions, the commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    found: Result = {
        "suite": suite,
        "device": name,
        "commit": commit or _git_head(),
        "versions": versions() | _peer_versions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["l2_bytes"] = properties.L2_cache_size
        found["versions"]["cuda"] = torch.version.cuda or ""
    else:
        found["threads"] = torch.get_num_threads()
    return found


def _peer_versions() -> dict[str, str]:
    found = {}
    for name in ("liger-kernel", "triton", "flash-attn-4"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "CPU"
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"


def write(result: Result, path: Path) -> None:
    """As JSON with one row a line, so that a diff of two runs can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(_short(row)) for row in result["rows"])
    path.write_text(f'{rest[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def _short(value: Any) -> Any:
    """Five digits are more than a timing has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return value


def read(path: Path) -> Result:
    return dict(json.loads(path.read_text(encoding="utf-8")))
