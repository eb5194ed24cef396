"""docs/families.md lists every class whose blocks are fused, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from hfpatch.planning.families import all_families

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def listed() -> list[str]:
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| ")][1:]
    return [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]


def test_classes_are_the_registrys() -> None:
    names = listed()
    assert len(names) == len(set(names))
    patterns = [family.pattern for family in all_families() if family.name == "block"]
    for pattern in patterns:
        assert any(pattern.search(name) for name in names), pattern
    for name in names:
        assert any(pattern.search(name) for pattern in patterns), name


def test_classes_exist() -> None:
    import diffusers.models as models

    source = Path(str(models.__file__)).parent
    text = "\n".join(p.read_text(encoding="utf-8") for p in source.rglob("*.py"))
    assert all(re.search(rf"^class {name}\(", text, re.MULTILINE) for name in listed())
