"""`hfpatch kernel new`: a copy of a template under another name.

Each template is a project of its own, called `example-kernel`, that builds and passes as it is;
only its name is replaced. One of two folders takes from the second what it has no file for.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from hfpatch.kernel_project.project import ProjectError

TEMPLATES = Path(__file__).parent / "templates"
#: Template to its folder, and the one that it takes the other files from.
_FOLDERS = {
    "elementwise": (TEMPLATES,),
    "row": (TEMPLATES.with_name("templates_row"), TEMPLATES),
    "triton": (TEMPLATES.with_name("templates_triton"),),
}
#: What can be asked for; the first is the default.
TEMPLATE_NAMES = tuple(_FOLDERS)
#: Files that are called otherwise here, so that no tool takes them for this repository's.
_RENAMED = {"gitignore": ".gitignore"}
_NAME = re.compile(r"^[a-z][-a-z0-9]*[a-z0-9]$")
#: Characters that the Hub takes.
_LONGEST = 96
_REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
#: What templates have for the repository and for the name; the first of them that fits counts.
_PLACES = re.compile("your-name/example-kernel|example-kernel|example_kernel")


def new_project(
    name: str, parent: Path, repo_id: str | None = None, template: str = TEMPLATE_NAMES[0]
) -> Path:
    """Write a kernel project called `name` into `parent/name`.

    Args:
        name: of the kernel: lower case, digits and dashes, e.g. "my-kernel".
        parent: the folder to write to.
        repo_id: where it will be published, "org/name"; can be given later.
        template: "elementwise" (an activation, C++ and CUDA), "row" (a norm: a reduction, an
            operator in place, a weight that may be None or of another dtype) or "triton" (for
            `hfpatch.register`).

    Returns:
        The project's folder.

    Raises:
        ProjectError: the name, the repository or the template is not one, or the folder is there
            already.
    """
    check_name(name)
    if repo_id is not None:
        check_repo_id(repo_id)
    if template not in _FOLDERS:
        raise ProjectError(
            f"there is no template `{template}`; there are {', '.join(f'`{t}`' for t in _FOLDERS)}"
        )
    root = parent / name
    if root.exists():
        raise ProjectError(f"`{root}` exists already; take another name, or remove it")
    files = {
        path.relative_to(folder).as_posix(): path
        for folder in reversed(_FOLDERS[template])
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    try:
        for relative, path in sorted(files.items()):
            target = root / _named(_RENAMED.get(relative, relative), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = _named(path.read_text(encoding="utf-8"), name, repo_id)
            target.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ProjectError(f"`{root}` cannot be written: {e}") from e
    return root


def _named(text: str, name: str, repo_id: str | None = None) -> str:
    """In one go, so that nothing is replaced in what the user gave."""
    given = {
        "your-name/example-kernel": repo_id or f"your-name/{name}",
        "example-kernel": name,
        "example_kernel": name.replace("-", "_"),
    }
    return _PLACES.sub(lambda found: given[found[0]], text)


def check_name(name: str) -> None:
    """Refuse what the Hub's tools or Python would not take for a kernel's name.

    Raises:
        ProjectError: see above.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or "--" in name:
        raise ProjectError(
            f"`{name}` is not a kernel's name: expected lower-case letters, digits and single "
            "dashes, a letter first and at least two characters, e.g. `my-kernel`"
        )
    if len(name) > _LONGEST:
        raise ProjectError(
            f"`{name[:20]}…` has {len(name)} characters; a repository's name has at most {_LONGEST}"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "torch":
        raise ProjectError(
            f"`{name}` would be the Python module `{module}`, which is taken; take another name"
        )


def check_repo_id(repo_id: str) -> None:
    """Refuse what is not "org/name".

    Raises:
        ProjectError: see above.
    """
    bad = "--" in repo_id or ".." in repo_id or repo_id.endswith((".git", ".", "-"))
    if bad or len(repo_id) > 96 or not _REPO.fullmatch(repo_id):
        raise ProjectError(
            f"`{repo_id}` is not a repository of the Hub: expected `org/name` or `user/name`, of "
            "letters, digits, `-`, `_` and `.`"
        )
