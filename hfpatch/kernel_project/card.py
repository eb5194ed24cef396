"""The repository's page: `CARD.md` filled in, as kernel-builder does it."""

from __future__ import annotations

import ast
from pathlib import Path

from hfpatch.kernel_project.project import Project, ProjectError, assigned_names


def fill_card(project: Project, repo_id: str) -> str:
    """`CARD.md` of a project as Markdown, its Jinja placeholders filled.

    The placeholders are kernel-builder's: `repo_id`, `version`, `functions`, `layers`,
    `has_benchmark`, `upstream`, `source`, `license`.

    Raises:
        ProjectError: there is no card, or it is not a template.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    path = project.root / "CARD.md"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ProjectError(f"`{path}`: the page of the kernel's repository is missing: {e}") from e
    general = project.toml["general"]
    functions, layers = _exports(project.package)
    environment = SandboxedEnvironment(trim_blocks=True, keep_trailing_newline=True)
    try:
        filled = environment.from_string(text).render(
            repo_id=repo_id,
            version=project.version,
            functions=functions,
            layers=layers,
            has_benchmark=(project.root / "benchmarks" / "benchmark.py").is_file(),
            upstream=general.get("upstream"),
            source=general.get("source"),
            license=str(general["license"]).lower(),
        )
    except TemplateError as e:
        raise ProjectError(f"`{path}` is not a Jinja template: {e}") from e
    return str(filled)


def _exports(package: Path) -> tuple[list[str], list[str]]:
    """The names in `__all__`, and the classes of `layers` if that is one of them."""
    names = assigned_names(_tree(package / "__init__.py"))
    functions = [n for n in names if n != "layers"]
    if "layers" not in names:
        return functions, []
    file = package / "layers.py"
    tree = _tree(file if file.is_file() else package / "layers" / "__init__.py")
    public = assigned_names(tree)
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    return functions, [c for c in classes if not public or c in public]


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as e:
        raise ProjectError(f"`{path}` cannot be read: {e}") from e
