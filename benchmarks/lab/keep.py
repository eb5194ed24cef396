"""Keep what `run.py` brought from a GPU in this repository.

    python benchmarks/lab/keep.py lab.tar.gz

Raw pages of the four synthetic kernels become fixtures of the tests, the studies' pages and figures
go to `results/` beside their kernels, and their entries into the experience log that hfpatch ships.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from hfpatch.lab.experience import SHIPPED, Log  # noqa: E402

LIMITS = {"copy": "memory", "fma": "compute", "chase": "latency", "hog": "occupancy"}
#: Of each version; the kernel itself is in the study, what was compiled nowhere.
_KEPT = (".md", ".json", ".diff", ".svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tar", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(args.tar) as tar:
            tar.extractall(folder, filter="data")
        labs = Path(folder) / "labs"
        pages(labs)
        studies(labs)
        entries(labs / "experience.jsonl")


def pages(labs: Path) -> None:
    """Fixtures, called after what limits the kernel."""
    to = ROOT / "tests" / "lab" / "pages"
    for name, limit in LIMITS.items():
        page = labs / "synthetic" / name / "v0" / "ncu_raw.csv"
        if page.is_file():
            to.mkdir(exist_ok=True)
            text = re.sub(r"[ \t]+$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
            (to / f"{limit}-{name}.csv").write_text(_nameless(text), encoding="utf-8")
            print(f"tests/lab/pages/{limit}-{name}.csv")


def _nameless(page: str) -> str:
    """Without the name of the machine and of the program, which say nothing."""
    import csv
    import io

    rows = list(csv.reader(io.StringIO(page)))
    head = rows[0]
    for i in (head.index(n) for n in ("Host Name", "Process Name", "Process ID") if n in head):
        for row in rows[2:]:
            row[i] = "1" if head[i] == "Process ID" else "python"
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue()


def studies(labs: Path) -> None:
    for plan in sorted(HERE.glob("*/study.json")):
        lab = labs / plan.parent.name
        if not (lab / "final_report.md").is_file():
            continue
        to = plan.parent / "results"
        shutil.rmtree(to, ignore_errors=True)
        for path in sorted(lab.rglob("*")):
            if path.suffix in _KEPT and "build" not in path.relative_to(lab).parts:
                target = to / path.relative_to(lab)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_kept(path), encoding="utf-8")
        print(to.relative_to(ROOT))


def _kept(path: Path) -> str:
    """A file without folders of the machine that measured, which are nobody's business, and a
    profile without the metrics that its pages do not show."""
    text = path.read_text(encoding="utf-8")
    if path.name == "profile.json":
        data = json.loads(text)
        for kernel in data.get("kernels", ()):
            kernel.pop("raw", None)
        text = json.dumps(data, indent=1) + "\n"
    text = re.sub(r"/[\w./-]*?labs-\w+/", "labs/", text)
    return re.sub(r"/[\w./-]*?/(benchmarks/lab|kernel_src)\b", r"\1", text)


def entries(path: Path) -> None:
    log, shipped = Log(path), Log(SHIPPED)
    found = [dataclasses.replace(e, source="benchmarks/lab", id="") for e in log.entries()]
    added = shipped.append(found)
    count = len(shipped.entries())
    page = ROOT / "docs" / "lab.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r" \d+ entries of", f" {count} entries of", text), encoding="utf-8")
    print(f"{added} entries added, {count} in all")


if __name__ == "__main__":
    main()
