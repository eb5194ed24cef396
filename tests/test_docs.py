"""The documentation says what is so: its code runs, its names exist, its tables match the code."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from hfpatch import cli, kernel_build, registry, sources
from hfpatch.ops import OPS
from hfpatch.plan import SKIP_KINDS
from hfpatch.trial import LIMITS

ROOT = Path(__file__).resolve().parent.parent
#: Written from measurements, so it may be missing in a fresh tree.
GENERATED = ROOT / "docs" / "performance.md"
DOCS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not path.name.startswith(GENERATED.stem)
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class Block(NamedTuple):
    """One fenced block: the words after the fence, the line of its first code line, the code."""

    path: Path
    info: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            code = "\n".join(lines[start + 1 : number])
            yield Block(path, lines[start][3:].strip(), start + 2, code)
            start = None
    assert start is None, f"`{path.name}`: the fence of line {start} is not closed"


BLOCKS = [block for path in DOCS for block in blocks(path)]
PYTHON = [block for block in BLOCKS if block.info.split()[:1] == ["python"]]


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next heading of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert match is not None, f"no section {title!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """Cells of every table row that is neither a heading nor a rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    rules = {i for i, row in enumerate(cells) if set("".join(row)) <= set("-:")}
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


# ------------------------------------------------------------------------------ code


@pytest.fixture
def _clean_registry(
    kernels_module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_rows", list(registry._rows))
    monkeypatch.setattr(sources, "_registered", dict(sources._registered))


@pytest.mark.parametrize("block", [b for b in PYTHON if b.info == "python"], ids=str)
@pytest.mark.usefixtures("_clean_registry")
def test_python_blocks_run(block: Block) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(block.path), "exec"), {})


@pytest.mark.parametrize("block", [b for b in PYTHON if b.info != "python"], ids=str)
def test_other_python_blocks_are_marked_and_parse(block: Block) -> None:
    assert block.info == "python no-run"
    compile(block.code, str(block.path), "exec")


@pytest.mark.usefixtures("_clean_registry")
def test_the_readme_shows_what_its_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    index = BLOCKS.index(PYTHON[0])
    shown = BLOCKS[index + 1]
    assert shown.info == "text"
    exec(PYTHON[0].code, {})
    printed = capsys.readouterr().out

    def table(text: str) -> list[str]:  # not times, versions, nor the last digits of errors
        lines = [" ".join(line.split()) for line in text.split("\nhfpatch ")[0].splitlines()]
        return [re.sub(r" in [\d.]+ s$| [\d.]+e-\d+$", "", line) for line in lines if line]

    assert table(printed) == table(shown.code)


# ------------------------------------------------------------------------------ names


LINKS = [
    (path, target)
    for path in DOCS
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    if not target.startswith("http")
]


@pytest.mark.parametrize(("path", "target"), LINKS, ids=[f"{p.name}-{t}" for p, t in LINKS])
def test_links_lead_somewhere(path: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if file == GENERATED and not file.exists():
        pytest.skip("the figures are not measured yet")
    assert file.is_file(), target
    if anchor:
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
        assert anchor in slugs


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_files_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spans = set(re.findall(r"`([^`\n<>…*]+)`", text)) | set(
        re.findall(r"(?<=python )[\w/.-]+\.py", text)
    )
    suffixes = (".py", ".md", ".h", ".cpp", ".cu", ".cuh", ".toml", ".nix", ".txt")
    # `my-kernel/` is what `hfpatch kernel new my-kernel` writes, from its templates
    named = {s.removeprefix("my-kernel/") for s in spans if s.endswith(suffixes) and " " not in s}
    tops = ("hfpatch", "kernel_src", "torch-ext", "tests", "examples", "benchmarks", "docs")
    tops += ("clib", "bindings")
    files = [f"/{p.name}" for p in ROOT.iterdir() if p.is_file()]
    files += [
        f"/{p.relative_to(ROOT).as_posix()}"
        for top in tops
        for p in (ROOT / top).rglob("*")
        if p.is_file()
    ]
    files += [f"/requirements/{p.name}" for p in (ROOT / "requirements").iterdir()]
    missing = {n for n in named if not any(f.endswith(f"/{n}") for f in files)}
    assert not missing
    assert path.name != "README.md" or len(named) >= 4


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(o for o in action.option_strings if o.startswith("--") and o != "--help")
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= flags_of(sub)
    return found


def flags_in_source(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r"\badd(?:_argument)?\(\s*\"(--[a-z-]+)\"", text))


COMMON = flags_in_source(ROOT / "examples" / "_common.py")


def test_command_line_flags_are_all_in_the_readme() -> None:
    assert set(FLAG.findall(section(README, "Command line"))) == flags_of(cli.build_parser())


@pytest.mark.parametrize("name", ["ltx_video", "llm_generate"])
def test_flags_of_the_examples_are_all_documented(name: str) -> None:
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    here = section(text, f"`examples/{name}.py`")
    assert set(FLAG.findall(here)) == flags_in_source(ROOT / "examples" / f"{name}.py") | COMMON


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_no_flag_is_invented(path: Path) -> None:
    known = flags_of(cli.build_parser()) | COMMON
    known |= {"--no-deps", "--force-reinstall"}  # pip's
    known |= {"--build", "--install", "--prefix"}  # CMake's
    known |= {"--cflags", "--libs"}  # pkg-config's
    known |= flags_in_source(ROOT / "bindings" / "generate" / "__main__.py")
    known |= set(FLAG.findall((ROOT / "tests/compat/conftest.py").read_text(encoding="utf-8")))
    build = Path(kernel_build.__file__).with_name("__main__.py")
    for source in (*(ROOT / "examples").glob("[a-z]*.py"), build):
        known |= flags_in_source(source)
    assert set(FLAG.findall(path.read_text(encoding="utf-8"))) <= known


def test_subcommands_and_make_targets_exist() -> None:
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a.choices, dict))
    named = set(re.findall(r"^hfpatch ([a-z-]+)", README, re.MULTILINE))
    assert named == set(commands.choices or ())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    everything = "\n".join(path.read_text(encoding="utf-8") for path in DOCS)
    for target in set(re.findall(r"(?:`|^)make ([a-z-]+)", everything, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_help_lists_every_target_and_variable() -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", "help"],
        capture_output=True,
        text=True,
        check=True,
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) - {"help"}
    variables = set(re.findall(r"\b([A-Z_]+) \?=", makefile))
    listed = set(re.findall(r"^make ([a-z-]+)|^([A-Z_]+) ", done.stdout, re.MULTILINE))
    assert {name for pair in listed for name in pair if name} == targets | variables


def test_the_design_names_every_module() -> None:
    text = section((ROOT / "docs" / "design.md").read_text(encoding="utf-8"), "Layout")
    here = {p.name for p in (ROOT / "hfpatch").glob("*.py") if not p.name.startswith("__")}
    assert {name for name in here if name not in text} == set()


def test_the_changelog_has_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#{2,} .*", text, re.MULTILINE)
    release = r"## \[Unreleased\]|## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
    kind = "### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    assert not [h for h in headings if not re.fullmatch(f"{release}|{kind}", h)]
    assert headings[0].startswith("## ")


def test_environment_variables_are_those_of_the_code() -> None:
    pattern = re.compile(r"\bHFPATCH_(?!H_)[A-Z_]+\b")
    package = [p for p in (ROOT / "hfpatch").rglob("*.py") if "_kernels" not in p.parts]
    code = [*package, *(ROOT / "kernel_src").rglob("*.cpp")]
    code += [ROOT / "setup.py", ROOT / "CMakeLists.txt", *(ROOT / "examples").glob("*.py")]
    code += (ROOT / "torch-ext").rglob("*.py")
    code += (ROOT / "bindings").rglob("build.rs")
    read = {name for path in code for name in pattern.findall(path.read_text(encoding="utf-8"))}
    named = {name for path in DOCS for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert named == read


# ------------------------------------------------------------------------------ tables


def test_kinds_of_skips() -> None:
    kinds = [row[0].strip("`") for row in rows(section(README, "How it decides"))]
    assert kinds == list(SKIP_KINDS)


def test_op_table_is_the_headers() -> None:
    header = (ROOT / "kernel_src" / "hfpatch.h").read_text(encoding="utf-8")
    table = header.split("#define HFP_OP_TABLE(X)", 1)[1].replace("\\\n", "")
    entries = re.findall(r'X\((\w+), (\w+), "([^"]+)",((?:\s*"[^"]*")+)\)', table)
    assert len(entries) == len(re.findall(r"\bX\(", table))
    declared = [(n, f, "".join(re.findall(r'"([^"]*)"', schema))) for n, f, _, schema in entries]
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    before_details = section(text, "Ops").split("\n### ")[0]
    assert [tuple(c.strip("`") for c in row) for row in rows(before_details)] == declared
    # gradients, losses and optimizers are reached through the package, so they are no `Op`
    gradients = ("_backward", "_with_gradient")
    forward = {name for name, _, _ in declared if not name.endswith(gradients)}
    training = {"adamw_step", "grad_norm", "clip_grads", "scale_grads"}
    assert forward == set(OPS) | {"cross_entropy"} | training
    used = {rule.strip() for _, _, rules, _ in entries for rule in rules.split(",")}
    used = {re.sub(r"=\w+(&\d)?", lambda m: "=NAME&BIT" if m[1] else "=NAME", r) for r in used}
    shown = {
        r for row in rows(section(text, "Result rules")) for r in re.findall("`(.+?)`", row[0])
    }
    assert shown == used
    assert set(OPS) <= set(re.findall(r"`(\w+)`", section(README, "Use")))


def test_statuses_and_codes_are_the_headers() -> None:
    header = (ROOT / "kernel_src" / "hfpatch.h").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    statuses = dict(
        re.findall(
            r"^  (HFP_\w+) = (-\d|0)\b", header.split("#define HFP_MAX_OUTER")[0], re.MULTILINE
        )
    )
    shown = {r[0].strip("`"): r[1].replace("−", "-") for r in rows(section(text, "Errors"))}
    assert shown == statuses
    activations = re.findall(r"HFP_ACT_(?!COUNT)\w+ = (\d)", header)
    assert [row[1] for row in rows(section(text, "`gelu`, `silu`"))] == activations
    casts = re.findall(r"HFP_CAST_(?!COUNT)(\w+) = (\d)", header)
    assert [(r[0].strip("`").upper(), r[1]) for r in rows(section(text, "`rms_norm`"))] == casts


def test_limits_are_the_probes() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    shown = {row[0].strip("`"): float(row[1]) for row in rows(section(text, "Numbers"))}
    assert shown == {f.name: getattr(LIMITS, f.name) for f in fields(LIMITS)}


def test_families_are_the_registrys() -> None:
    text = (ROOT / "docs" / "registry-and-probe.md").read_text(encoding="utf-8")
    table = rows(section(text, "Nomination"))
    families: dict[tuple[str, int], list[registry.Family]] = {}
    for family in registry.own_families():  # blocks have a family each and one row together
        families.setdefault((family.name, family.rank), []).append(family)
    assert [(row[0].strip("`"), int(row[1])) for row in table] == list(families)
    for members, row in zip(families.values(), table, strict=True):
        words = re.findall(r"`([^`]+)`", row[2])
        for word in words:
            assert any(family.pattern.search(word) for family in members), (row[0], word)
        for family in members:
            assert any(family.pattern.search(word) for word in words), family.pattern
