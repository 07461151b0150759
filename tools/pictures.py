"""Make the pictures of the documentation anew: the report, `mission top`, the live page, the console, the site.

    python tools/pictures.py [FOLDER]

It runs the two jobs of `mission demo` and a service, two minutes in all, and needs Chromium. The default folder is
docs/pictures. Exit status: 0: done; 3: there is no Chromium, or no site.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from rich.console import Console

from mission_control import demo, page
from mission_control.bench import console
from mission_control.bench.browser import Page, browser, chromium
from mission_control.bench.service import serving_processes
from mission_control.cli.show import LiveTable
from mission_control.experiments.engine import Observer

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SITE = PICTURES.parent.parent / "target" / "site" / "index.html"
WIDTH = 1000
COLOURS = 256
"""Of a picture: enough for plots and smooth letters, and a third of the bytes."""
MEMBERS, TRANSFERS = 10, 10_000
CURVE_S = 30.0
"""Time in which the console's curve fills."""
Status = dict[str, Any]


class Recorder(Observer):
    """Keeps what `mission top` and the live page would show while both jobs fetch."""

    def __init__(self) -> None:
        self.found: list[Status] = []

    def show(self, line: str, doing: str, status: Mapping[str, Any]) -> None:
        moving = [
            own for job in status.get("jobs", []) for own in job["transfers"] if own["weight"] and own["flows_now"]
        ]
        if len(moving) > 1:
            self.found.append(json.loads(json.dumps(status)))


def save(shown: Page, name: str, folder: Path, height: int | None = None) -> None:
    """Write a picture of the page, of its whole height if none is given."""
    metrics = {"width": WIDTH, "deviceScaleFactor": 1, "mobile": False}
    shown.call("Emulation.setScrollbarsHidden", hidden=True)
    shown.call("Emulation.setDeviceMetricsOverride", height=height or 100, **metrics)
    if height is None:
        height = shown.run("document.documentElement.scrollHeight")
        shown.call("Emulation.setDeviceMetricsOverride", height=height, **metrics)
    time.sleep(0.5)
    path = folder / f"{name}.png"
    shown.picture(path)
    shrink(path)


def shrink(path: Path) -> None:
    """Write a picture again with few colours; a colour that differs from all others stays, however small its area."""
    made = (
        Image.open(io.BytesIO(path.read_bytes()))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    made.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1000} kB")


def report(folder: Path, results: Path) -> None:
    """Take the first screen of a report, light and dark."""
    with browser(WIDTH) as shown:
        shown.open(results.as_uri())
        shown.until("document.readyState === 'complete'")
        save(shown, "report-light", folder, height=1000)
        shown.dark(True)
        save(shown, "report-dark", folder, height=1000)


def top(folder: Path, found: list[Status]) -> None:
    """Take what `mission top` prints."""
    table, printed = LiveTable(quiet=True), Console(record=True, width=112, file=io.StringIO())
    for status in found[:-1]:
        table.draw("", "", status)  # rates are differences
    printed.print(table.draw("", "", found[-1]))
    with TemporaryDirectory() as made, browser(WIDTH) as shown:
        path = Path(made, "top.svg")
        path.write_text(printed.export_svg(title="mission top"))
        shown.open(path.as_uri())
        shown.until("document.readyState === 'complete'")
        ratio = shown.run(
            "document.documentElement.viewBox.baseVal.height / document.documentElement.viewBox.baseVal.width"
        )
        save(shown, "top", folder, height=int(WIDTH * ratio))


@contextmanager
def replayed(found: list[Status]) -> Iterator[str]:
    """Serve the live page with recorded states, one after the other; give its address."""
    # The page asks once a second, and a run is looked at several times a second.
    left = iter(found[:: max(1, round(len(found) / (found[-1]["time"] - found[0]["time"])))])
    last = found[-1]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_status = self.path.endswith("/status.json")
            content = json.dumps(next(left, last)) if is_status else page.content()
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if is_status else "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mission-control"
    finally:
        server.shutdown()
        server.server_close()


def live_page(folder: Path, found: list[Status]) -> None:
    """Take the live page, light and dark."""
    for name, dark in (("page-light", False), ("page-dark", True)):
        with replayed(found) as address, browser(WIDTH) as shown:
            shown.dark(dark)
            shown.open(address)
            shown.until("document.querySelectorAll('#rows th').length > 1")
            time.sleep(2.5)
            save(shown, name, folder)


def site(folder: Path) -> None:
    """Take the first page of the documentation."""
    with browser(WIDTH) as shown:
        shown.open(SITE.as_uri())
        shown.until("document.readyState === 'complete'")
        save(shown, "documentation", folder, height=900)


def service(folder: Path) -> None:
    """Take the console of a service whose transfers all move."""
    with serving_processes(None, 1) as own, console.members(own, MEMBERS, TRANSFERS // MEMBERS), browser() as shown:
        console.enter(shown, f"http://127.0.0.1:{own.ports[0]}", own.tokens["viewer"])
        time.sleep(CURVE_S)
        for path in console.take_pictures(shown, folder):
            shrink(path)


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    if not SITE.exists():
        print(f"{SITE} is missing: use make pictures", file=sys.stderr)
        return 3
    if chromium() is None:
        print("there is no chromium on the path (Debian: chromium)", file=sys.stderr)
        return 3
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder()
    with TemporaryDirectory() as results:
        result = demo.two_jobs(Path(results), recorder)
        report(folder, Path(result.folder).resolve() / "report.html")
    if len(recorder.found) < 2:
        print("the two jobs did not fetch at the same time: try again on a quieter machine", file=sys.stderr)
        return 1
    half = recorder.found[: max(6, len(recorder.found) // 2)]
    top(folder, half)
    live_page(folder, half)
    service(folder)
    site(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
