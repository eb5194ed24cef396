"""PTX of a project's kernels, for programs that load them by the driver API.

Of every `.cu` file of `build.toml` that has `extern "C"` kernels, one `.ptx` per architecture, and
`index.json`, which says what each holds::

    {"version": 1, "modules": [{
      "file": "scale.sm_90.ptx", "source": "kernel_src/scale.cu", "arch": "9.0", "ptx": "9.0",
      "entries": [{
        "name": "scale", "parameters": [{"type": "u64", "bytes": 8, "align": 8}, ...],
        "block": {"max": [256, 1, 1], "required": null, "min_ctas": null},
        "shared_bytes": 1024, "dynamic_shared": false}]}]}

`bytes` of a parameter that is a structure is its size. `block` is what `__launch_bounds__` or
`__block_size__` say. `shared_bytes` is what the kernel declares itself; `dynamic_shared`: it uses
`extern __shared__`, whose size the launch gives.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .commands import run, write
from .errors import KernelBuildError
from .project import read_project
from .toolchain import cuda_archs, find_cxx, find_nvcc

INDEX = "index.json"
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ENTRY = re.compile(
    r"\.(?:visible|weak)\s+\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)(?P<rules>[^{]*)"
    r"\{(?P<body>.*?)^\}",
    re.DOTALL | re.MULTILINE,
)
_SHARED = re.compile(
    r"^\s*\.shared\s+(?:\.align\s+\d+\s+)?\.[a-z]+(?P<bits>\d+)\s+(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d+)\])?;",
    re.MULTILINE,
)


def build_ptx(
    project: str | os.PathLike[str],
    out: str | os.PathLike[str],
    archs: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the PTX of `project` and its index into the folder `out`.

    Args:
        project: the folder of `build.toml`.
        out: made if it is not there. Files of another build stay.
        archs: as of a build: `8.0;9.0`, `all`, `native`.
        say: gets a line for each file.

    Returns:
        The path of `index.json`.

    Raises:
        ToolchainMissing: there is no nvcc.
        KernelBuildError: a file does not compile, or no kernel of the project is `extern "C"`.
    """
    root, folder = Path(project).resolve(), Path(out).resolve()
    nvcc, cxx = find_nvcc(), find_cxx()
    numbers = [arch.removesuffix("+PTX") for arch in cuda_archs(archs, nvcc)]
    if not numbers:
        raise KernelBuildError("`archs`: expected at least one architecture, got none")
    sections = [s for s in read_project(root).get("kernel", {}).values() if s["backend"] == "cuda"]
    sources = [(src, s) for s in sections for src in s["src"] if src.endswith(".cu")]
    stems = [Path(src).stem for src, _ in sources]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise KernelBuildError(
            f"`{twice[0]}.cu`: expected files of different names, got several of this one; the PTX "
            "is called as they are"
        )
    modules: list[dict[str, Any]] = []
    for src, section in sources:
        for arch in numbers:
            name = f"{Path(src).stem}.sm_{arch.replace('.', '')}.ptx"
            text = _compile(root, src, section, [nvcc.path, "-ccbin", cxx], arch)
            entries = _entries(text)
            if not entries:
                say(f'{src}: has no kernel that is `extern "C"`')
                break
            write(folder / name, text)
            version = re.search(r"^\.version (\S+)", text, re.MULTILINE)
            modules.append({
                "file": name, "source": src, "arch": arch,
                "ptx": version[1] if version else "", "entries": entries,
            })  # fmt: skip
            say(f"{name}: {', '.join(entry['name'] for entry in entries)}")
    if not modules:
        raise KernelBuildError(
            f'`{root}`: expected a `.cu` file with kernels that are `extern "C" __global__`, found '
            "none in its sections of backend cuda; the names of others are not stable"
        )
    index = folder / INDEX
    write(index, json.dumps({"version": 1, "modules": modules}, indent=1) + "\n")
    return index


def _compile(root: Path, src: str, section: dict[str, Any], nvcc: list[str], arch: str) -> str:
    with tempfile.TemporaryDirectory(prefix="hfpatch-ptx-") as scratch:
        target = Path(scratch) / "out.ptx"
        number = arch.replace(".", "")
        command = [*nvcc, "-O3", "-std=c++17", "-ptx", f"-arch=compute_{number}"]
        command += [f"-I{folder}" for folder in section.get("include", [])]
        command += [*section.get("cuda-flags", []), src, "-o", str(target)]
        run(command, cwd=root)
        return target.read_text(encoding="utf-8")


def _entries(text: str) -> list[dict[str, Any]]:
    """The kernels whose names C++ has not changed."""
    text = re.sub(r"//[^\n]*", "", text)
    extern = set(re.findall(r"^\s*\.extern\s+\.shared\s+[^;]*?([\w$]+)\[\];", text, re.MULTILINE))
    modules = {m["name"]: _bytes(m) for m in _SHARED.finditer(_ENTRY.sub("", text))}
    found = []
    for match in _ENTRY.finditer(text):
        if match["name"].startswith("_Z"):
            continue
        body = match["body"]
        words = set(re.findall(r"[\w$]+", body))
        own = sum(_bytes(m) for m in _SHARED.finditer(body))
        own += sum(size for name, size in modules.items() if name in words)
        found.append({
            "name": match["name"],
            "parameters": [_parameter(p) for p in match["parameters"].split(",") if p.strip()],
            "block": {
                "max": _numbers(match["rules"], "maxntid"),
                "required": _numbers(match["rules"], "reqntid"),
                "min_ctas": _first(match["rules"], "minnctapersm"),
            },
            "shared_bytes": own,
            "dynamic_shared": bool(extern & words),
        })  # fmt: skip
    return found


def _bytes(match: re.Match[str]) -> int:
    return _SIZES[match["bits"]] * int(match["count"] or 1)


def _first(rules: str, name: str) -> int | None:
    found = re.search(rf"\.{name}\s+(\d+)", rules)
    return int(found[1]) if found else None


def _numbers(rules: str, name: str) -> list[int] | None:
    """Of `.maxntid 256, 1, 1`, those that are given; a block has three."""
    found = re.search(rf"\.{name}\s+([\d,\s]+)", rules)
    if found is None:
        return None
    numbers = [int(n) for n in found[1].replace(",", " ").split()]
    return [*numbers, 1, 1][:3]


def _parameter(text: str) -> dict[str, Any]:
    match = re.search(
        r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+(?P<bits>\d+))\s+"
        r"(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?[\w$]+(?:\[(?P<count>\d+)\])?",
        text,
    )
    if match is None:
        raise KernelBuildError(f"`{text.strip()}`: expected a parameter of PTX that is known here")
    size = _SIZES[match["bits"]]
    return {
        "type": match["type"],
        "bytes": size * int(match["count"] or 1),
        "align": int(match["align"] or size),
    }
