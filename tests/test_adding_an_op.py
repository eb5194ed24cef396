"""What an op costs: in how many files that are written by hand one that was added is named."""

from __future__ import annotations

import re
from pathlib import Path

from hfpatch.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
#: An op with kernels for both devices, an operator, a block that reaches it, tests and docs.
OP = "add_bias"
#: However it is spelled: in C, in Python, as a type, as a file. `add_bias_kv` is PyTorch's.
NAME = re.compile(r"add[_-]?bias(?!_kv)", re.IGNORECASE)
#: As docs/registry-and-probe.md has them, in its order.
BY_HAND = [
    "kernel_src/hfpatch.h",
    "kernel_src/api_pointwise.cpp",
    "kernel_src/cpu/add_bias.cpp",
    "kernel_src/cuda/add_bias.cu",
    "hfpatch/ops/pointwise.py",
    "torch-ext/hfpatch_kernels/_pointwise.py",
    "hfpatch/blocks/ltx_vae.py",
    "tests/kernels/test_rms_norm_silu.py",
]
#: Written from measurements: by `hfpatch bench`, and the log of what was tried.
MEASURED = [
    "benchmarks/results",
    "docs/performance*.md",
    "docs/images",
    "hfpatch/lab/experience.jsonl",
]
#: What stands between two lines of a file that is written by hand otherwise.
WRITTEN = re.compile(
    r"written by `python bindings/generate`\..*?\n(?:#|<!--) End of the ", re.DOTALL
)
#: Where nothing is anybody's source: builds, caches and the like.
OTHERS = {"_kernels", "__pycache__", "target", "build", "dist", "node_modules", "tests/build"}
KINDS = {".py", ".h", ".cpp", ".cuh", ".cu", ".c", ".md", ".toml", ".rs", ".go", ".txt", ".json"}
KINDS |= {
    ".jsonl",
    ".svg",
    ".yml",
    ".yaml",
    ".cfg",
    ".nix",
    ".ipynb",
    ".js",
    ".css",
    ".html",
    ".sh",
}


def files() -> list[Path]:
    found = []
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            name = path.relative_to(ROOT).as_posix()
            if path.is_dir():
                if not (path.name.startswith(".") or path.suffix == ".egg-info") and (
                    name == "tests/build" or path.name not in OTHERS
                ):
                    folders.append(path)
            elif path.suffix in KINDS and path.name != Path(__file__).name:
                found.append(path)
    return found


def generated() -> set[str]:
    """The files that `python bindings/generate` writes, in whole or in part: they are as it writes
    them, or `tests/clib/test_generate.py` fails."""
    text = (ROOT / "bindings" / "generate" / "__main__.py").read_text(encoding="utf-8")
    table = text.partition("FILES = {")[2].partition("\n}")[0]
    return set(re.findall(r'^    "([^"]+)":', table, re.MULTILINE))


def by_hand(path: Path) -> str:
    """The text of a file that a command writes, without what it writes; "": all of it."""
    text = path.read_text(encoding="utf-8")
    rest, parts = WRITTEN.subn("", text)
    return rest if parts else ""


def test_an_op_is_named_in_eight_files() -> None:
    written = generated()
    assert OP in OPS and len(BY_HAND) == 8 and len(written) > 15
    measured = {p for pattern in MEASURED for p in ROOT.glob(pattern)}
    named = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if measured & {path, *path.parents}:
            continue
        text = by_hand(path) if name in written else path.read_text(encoding="utf-8")
        if NAME.search(path.name + text):
            named.append(name)
    assert sorted(named) == sorted(BY_HAND)


def test_a_part_that_a_command_writes() -> None:
    """Such a file counts for what is beside that part."""
    for name in (
        "build.toml",
        "docs/kernels.md",
        "docs/usage.md",
        "CARD.md",
        "torch-ext/hfpatch_kernels/__init__.py",
    ):
        text, rest = (ROOT / name).read_text(encoding="utf-8"), by_hand(ROOT / name)
        assert name in generated() and NAME.search(text) and 20 < len(rest) < len(text)


def test_what_is_left_out_names_it() -> None:
    """Else the lists above would hide files that nothing writes."""
    for pattern in MEASURED:
        texts = [
            p
            for found in ROOT.glob(pattern)
            for p in (found.rglob("*") if found.is_dir() else [found])
        ]
        assert any(
            NAME.search(p.name + p.read_text(encoding="utf-8")) for p in texts if p.is_file()
        )


def test_the_steps_are_documented() -> None:
    text = (ROOT / "docs" / "registry-and-probe.md").read_text(encoding="utf-8")
    steps = re.findall(r"^(\d)\. (.*)$", text.partition("**An op**")[2], re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 9))
    for (_, step), name in zip(steps, BY_HAND, strict=True):
        assert name.split("/")[0] in step or step.startswith(("what reaches it", "its tests"))
