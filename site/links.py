"""What MkDocs does not know of these pages: links to files beside docs/, marks of code blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")
#: The words behind a language that tell the tests what to do with a block.
_MARK = re.compile(r"^(```python) (?:no-run|continued|exhaustive)$", re.MULTILINE)

#: Pages that are tables, with sentences in their cells.
_WIDE = ("coverage.md",)


def _repository() -> str | None:
    """Where the files can be read, as pyproject.toml says; None: nowhere yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    found = (urls.get(name) for name in ("repository", "source", "homepage"))
    return next((url.rstrip("/") for url in found if url), None)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Files beside docs/ are linked in the repository; without one their names stay.

    A page without sections, or with sentences in its tables, gives the list's room to its tables.
    """
    if page.file.src_uri in _WIDE or not re.search(r"^## ", markdown, re.MULTILINE):
        page.meta.setdefault("hide", ["toc"])
    repository = _repository()
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if repository is None:
            return text if name in text else f"{text} (`{name}`)"
        return f"[{text}]({repository}/blob/main/{name})"

    return _MARK.sub(r"\1", _LINK.sub(link, markdown))
