"""Pictures of the site and of a report, as a browser shows them: `make screenshots`.

The site is served, because its search needs a server, and photographed by Chromium without a window
(`apt-get install chromium`). Look at the pictures before they are committed.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Picture to (page, width, height): pixels of the window.
PAGES = {
    "start-page": ("index.html", 1280, 1120),
    "coverage-page": ("coverage.html", 1280, 1120),
    "report": ("report-of-a-pipeline.html", 1000, 500),
}
REPORT = """<!doctype html>
<meta charset="utf-8">
<title>A report</title>
<body style="margin: 24px; background: white; color: black; font: 14px sans-serif">{}</body>
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder, on this machine alone."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def report_page() -> str:
    """The HTML report of the small LTX-Video pipeline of the examples."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from _ltx_random import build_pipeline

    import hfpatch

    pipe = build_pipeline(False, torch.device("cpu"), torch.float32)
    return REPORT.format(hfpatch.apply(pipe)._repr_html_())


def take(browser: str, address: str, width: int, height: int, file: Path) -> None:
    """One picture of one page. Raises RuntimeError where the browser made none."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{height}",
            "--force-device-scale-factor=1", "--virtual-time-budget=5000",
            f"--screenshot={file}", address,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    if done.returncode or not file.exists():
        raise RuntimeError(f"`{browser}` made no picture of {address}: {done.stderr[-500:]}")


def main(arguments: list[str] | None = None) -> int:
    """0; 1 where there is no browser, or no site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is here: apt-get install chromium", file=sys.stderr)
        return 1
    if not (given.site / "index.html").is_file():
        print(f"no site in `{given.site}`: run `make site` first", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    (given.site / PAGES["report"][0]).write_text(report_page(), encoding="utf-8")
    with served(given.site) as address:
        for name, (page, width, height) in PAGES.items():
            file = given.out.resolve() / f"{name}.png"
            take(browser, f"{address}/{page}", width, height, file)
            print(f"wrote {file}")
    (given.site / PAGES["report"][0]).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
