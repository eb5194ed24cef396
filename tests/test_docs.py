"""The documentation says what is so: its code runs, its names exist, its tables match the code."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hfpatch import cli, kernel_build, registry
from hfpatch.announce import logger
from hfpatch.kernels import sources
from hfpatch.ops import OPS
from hfpatch.planning.plan import SKIP_KINDS
from hfpatch.proof.trial import LIMITS

ROOT = Path(__file__).resolve().parent.parent
#: Written from measurements, so it may be missing in a fresh tree.
GENERATED = ROOT / "docs" / "performance.md"
DOCS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not path.name.startswith(GENERATED.stem)
]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class Block(NamedTuple):
    """One fenced block: the words after the fence, the line of its first code line, the code."""

    path: Path
    info: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}"


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


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


def stories() -> Iterator[Any]:
    """Blocks to run in one go: each by itself, but one that is `continued` behind those before it.

    `exhaustive` ones are for `make test-all`.
    """
    found: list[list[Block]] = []
    for block in PYTHON:
        if block.info == "python continued":
            found[-1].append(block)
        elif block.info in ("python", "python exhaustive"):
            found.append([block])
    for story in found:
        marks = [pytest.mark.exhaustive] if story[0].info == "python exhaustive" else []
        yield pytest.param(story, id=str(story[0]), marks=marks)


@pytest.mark.parametrize("story", list(stories()))
@pytest.mark.usefixtures("_clean_registry")
def test_python_blocks_run(story: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    level, names = logger.level, {}
    try:
        for block in story:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(block.path), "exec"), names)
    finally:
        logger.setLevel(level)


def test_every_python_block_runs_or_says_why_not() -> None:
    """What needs a GPU, a package of others or the Hub parses, at least; these are all."""
    known = {"", "continued", "exhaustive", "no-run"}
    assert {block.info.removeprefix("python").strip() for block in PYTHON} <= known
    left = [block for block in PYTHON if block.info == "python no-run"]
    for block in left:
        compile(block.code, str(block.path), "exec")
    assert Counter(block.path.name for block in left) == {
        "c-library.md": 1,  # needs a libhfpatch that was built
        "hub.md": 2,  # tests/hub/test_docs_hub.py runs them
        "registry-and-probe.md": 1,  # calls a kernel of the Hub
        "usage.md": 1,  # CPU offload needs a GPU
        "writing-kernels.md": 2,  # tests/hub/test_docs_writing.py runs them
        "trl.md": 1,  # trl is not among the packages of the tests
    }


@pytest.mark.usefixtures("_clean_registry")
def test_the_first_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, *_ = blocks(ROOT / "docs" / "usage.md")
    assert (code.info, shown.info) == ("python", "text")
    exec(code.code, {})
    printed = capsys.readouterr().out

    def table(text: str) -> list[str]:  # not times, versions, nor the last digits of errors
        lines = [" ".join(line.split()) for line in text.split("\nhfpatch ")[0].splitlines()]
        return [re.sub(r" in [\d.]+ s$| [\d.]+e-\d+$", "", line) for line in lines if line]

    assert table(printed) == table(shown.code)


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_tables_are_whole(path: Path) -> None:
    """A row behind an empty line is no row of the table: each begins with a heading's rule."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = table.splitlines()
        assert len(lines) > 2 and set(lines[1]) <= set("|-: "), lines[0]


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
    tops += ("clib", "bindings", "release")
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


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(o for o in action.option_strings if o.startswith("--") and o != "--help")
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= flags_of(sub)
    for other in parser.get_default("handed_over") or ():
        found |= flags_of(other)
    return found


def flags_in_source(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r"\badd(?:_argument)?\(\s*\"(--[a-z-]+)\"", text))


COMMON = flags_in_source(ROOT / "examples" / "_common.py")


def test_command_line_flags_are_all_on_their_page() -> None:
    assert set(FLAG.findall(page("command-line"))) == flags_of(cli.build_parser())


@pytest.mark.parametrize("name", ["ltx_video", "llm_generate"])
def test_flags_of_the_examples_are_all_documented(name: str) -> None:
    text = page("examples")
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
    release = ROOT / "release" / "release.py"
    for source in (*(ROOT / "examples").glob("[a-z]*.py"), build, release):
        known |= flags_in_source(source)
    assert set(FLAG.findall(path.read_text(encoding="utf-8"))) <= known


def test_subcommands_and_make_targets_exist() -> None:
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a.choices, dict))
    named = set(re.findall(r"^hfpatch ([a-z-]+)", page("command-line"), re.MULTILINE))
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
    text = section(page("design"), "Layout")
    here = {p.name for p in (ROOT / "hfpatch").glob("*.py") if not p.name.startswith("__")}
    assert {name for name in here if name not in text} == set()


NAMED = ("CHANGELOG.md", "CARD.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
WORDS = [*DOCS, *(ROOT / name for name in NAMED)]
#: What nobody would say aloud.
UNSAID = re.compile(r"\b(?:but for|is to be|are to be)\b")


def unsaid(text: str) -> list[str]:
    words = " ".join(re.sub(r"^\s*#+", "", text, flags=re.MULTILINE).split()).lower()
    return [sentence for sentence in words.split(".") if UNSAID.search(sentence)]


@pytest.mark.parametrize("path", WORDS, ids=lambda p: p.name)
def test_plain_english(path: Path) -> None:
    assert not unsaid(path.read_text(encoding="utf-8"))


def strings(path: Path) -> Iterator[str]:
    """Docstrings, and what a program says: every text in a file's code, and its comments."""
    code = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    lines = re.findall(r"^\s*(#.*)$", code, re.MULTILINE)
    yield "\n".join(lines)


def test_plain_english_in_code() -> None:
    """`help()` of every function, errors, and the command line's; private ones become public."""
    package = [p for p in (ROOT / "hfpatch").rglob("*.py") if "_kernels" not in p.parts]
    found = {
        path.relative_to(ROOT).as_posix(): said
        for path in (*package, *(ROOT / "torch-ext").rglob("*.py"))
        if (said := [s for text in strings(path) for s in unsaid(text)])
    }
    assert not found


def test_the_readme_can_be_read_in_one_go() -> None:
    """150 lines; ten lines of code; one picture; five limits."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (code,) = (b for b in PYTHON if b.path.name == "README.md")
    assert len([line for line in code.code.splitlines() if line.strip()]) <= 10
    assert text.count("![") == 1
    assert len(re.findall(r"^\d\. ", section(text, "Five limits"), re.MULTILINE)) == 5


def test_the_changelog_has_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 40, "a release in 40 lines"
    assert max(map(len, lines)) <= 120
    headings = re.findall(r"^#{2,} .*", text, re.MULTILINE)
    release = r"## \[Unreleased\]|## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
    kind = "### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    assert not [h for h in headings if not re.fullmatch(f"{release}|{kind}", h)]
    assert headings[0].startswith("## ")


def test_environment_variables_are_those_of_the_code() -> None:
    pattern = re.compile(r"\bHFPATCH_(?!H_)[A-Z_]+\b")
    package = [p for p in (ROOT / "hfpatch").rglob("*.py") if "_kernels" not in p.parts]
    sources = (p for p in (ROOT / "kernel_src").rglob("*") if p.suffix in (".cpp", ".h", ".cu"))
    code = [*package, *sources]
    code += [ROOT / "setup.py", ROOT / "CMakeLists.txt", *(ROOT / "examples").glob("*.py")]
    code += (ROOT / "torch-ext").rglob("*.py")
    code += (ROOT / "bindings").rglob("build.rs")
    read = {name for path in code for name in pattern.findall(path.read_text(encoding="utf-8"))}
    named = {name for path in DOCS for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert named == read


# ------------------------------------------------------------------------------ tables


def test_kinds_of_skips() -> None:
    kinds = [row[0].strip("`") for row in rows(section(page("report"), "What was left alone"))]
    assert kinds == list(SKIP_KINDS)


def test_op_table_is_the_headers() -> None:
    header = (ROOT / "kernel_src" / "hfpatch.h").read_text(encoding="utf-8")
    table = header.split("#define HFP_OP_TABLE(X)", 1)[1].split("#define HFP_DECODE_TABLE(X)", 1)[0]
    table = table.replace("\\\n", "")
    entries = re.findall(r'X\((\w+), (\w+), "([^"]+)",((?:\s*"[^"]*")+)\)', table)
    assert len(entries) == len(re.findall(r"\bX\(", table))
    declared = [(n, f, "".join(re.findall(r'"([^"]*)"', schema))) for n, f, _, schema in entries]
    text = page("kernels")
    before_details = section(text, "Ops").split("\n### ")[0]
    assert [tuple(c.strip("`") for c in row) for row in rows(before_details)] == declared
    # gradients, losses and optimizers are reached through the package, so they are no `Op`
    gradients = ("_backward", "_with_gradient")
    forward = {name for name, _, _ in declared if not name.endswith(gradients)}
    training = {"adamw_step", "grad_norm", "clip_grads", "scale_grads"}
    # For programs without PyTorch: no patch uses them.
    alone = {"add", "mul", "scale", "gemm", "gemm_batched", "attention"}
    alone |= {"cross_entropy_log_probs", "load_balancing_loss"}
    assert forward == set(OPS) | {"cross_entropy"} | training | alone
    used = {rule.strip() for _, _, rules, _ in entries for rule in rules.split(",")}
    used = {re.sub(r"=\w+(&\d)?", lambda m: "=NAME&BIT" if m[1] else "=NAME", r) for r in used}
    shown = {
        r for row in rows(section(text, "Result rules")) for r in re.findall("`(.+?)`", row[0])
    }
    assert shown == used
    chosen, others = section(page("usage"), "The ops").split("The built package has more")
    assert set(re.findall(r"`(\w+)`", chosen)) == set(OPS)
    assert forward - set(OPS) <= set(re.findall(r"`(\w+)`", others))


def test_statuses_and_codes_are_the_headers() -> None:
    header = (ROOT / "kernel_src" / "hfpatch.h").read_text(encoding="utf-8")
    text = page("kernels")
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
    text = page("design")
    shown = {row[0].strip("`"): float(row[1]) for row in rows(section(text, "Numbers"))}
    assert shown == {f.name: getattr(LIMITS, f.name) for f in fields(LIMITS)}


def test_families_are_the_registrys() -> None:
    text = page("registry-and-probe")
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
