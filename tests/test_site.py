"""docs/ as a site: it builds without a warning, is found by the search, and has no dead link."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("mkdocs", reason="requirements/docs.txt is not installed")


def build(folder: Path, config: Path = ROOT / "site" / "mkdocs.yml") -> str:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config),
               "-d", str(folder)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    said = build(folder)
    assert "WARNING" not in said
    return folder


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def test_no_link_is_dead(site: Path) -> None:
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    assert len(pages) > 30
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            found = target.is_file()
            if found and parts.fragment and target in pages:
                found = unquote(parts.fragment) in pages[target].anchors
            if not found:
                dead.append(f"{path.relative_to(site)} -> {link}")
    assert not dead


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link rel=\"(?:stylesheet|icon)\")[^>]*"
                              r"(?:src|href)=\"?https?://[^\s\">]+", text), path.name  # fmt: skip


def test_every_page_has_its_place_and_is_searched(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    nav = (ROOT / "site" / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert searched == {page.removesuffix(".md") + ".html" for page in pages}


def test_the_reference_is_that_of_the_docstrings(site: Path) -> None:
    import hfpatch

    text = (site / "api.html").read_text(encoding="utf-8")
    modules = {"bench", "callbacks", "functional", "layers", "loss", "optim", "__version__"}
    for name in set(hfpatch.__all__) - modules:
        assert re.search(rf'id="hfpatch\.[\w.]*\b{name}"', text), name
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))
    assert "Swap the forwards of model's modules for fused kernels" in shown
    assert "Restore now, as after a generation that did not end." in shown


def test_marks_of_code_blocks_are_not_shown(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "```" not in re.sub(r"<code>.*?</code>", "", text, flags=re.DOTALL), path.name


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    """The check can fail."""
    shutil.copytree(ROOT / "site", tmp_path / "site")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[there](nowhere.md)\n")
    config = tmp_path / "site" / "mkdocs.yml"
    head, _, _ = config.read_text(encoding="utf-8").partition("\nnav:")
    config.write_text(head.replace("  - site.css", "  []"), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"nowhere\.md"):
        build(tmp_path / "out", config)


def test_the_pictures_are_the_browsers(site: Path, tmp_path: Path) -> None:
    """`make screenshots` on this site; the committed pictures are of those pages, in that size."""
    from PIL import Image

    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "site" / "screenshots.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, (_, *size) in script.PAGES.items():
        with Image.open(ROOT / "docs" / "images" / f"{name}.png") as picture:
            assert list(picture.size) == size, name
    if not any(map(shutil.which, script.BROWSERS)):
        pytest.skip("no browser: apt-get install chromium")
    assert script.main(["--site", str(site), "--out", str(tmp_path)]) == 0
    for name, (_, *size) in script.PAGES.items():
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert list(picture.size) == size
            colors = picture.convert("RGB").getcolors(1 << 20)
            assert colors is not None and len(colors) > 50, f"`{name}` is blank"


def test_pictures_need_a_browser(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "site" / "screenshots.py"), "--site", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": ""}
    )
    assert done.returncode == 1 and "apt-get install chromium" in done.stderr
