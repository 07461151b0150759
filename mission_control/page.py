"""The page `/mission-control` on the server of Dask's dashboard, and what it draws from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tornado.web import Application, RequestHandler

PAGE, LOOK = Path(__file__).with_name("page.html"), Path(__file__).with_name("look.css")
LOOK_HERE = "/* look.css */"
"""Where the page has the common look."""
PATH = r"(?!.*/proxy/)(?:/.*)?/mission-control"
"""Below any prefix: Dask's scheduler does not keep the one that it was started with (`--dashboard-prefix`). What it
passes on to another server (`/proxy/`) is not ours."""
ROWS = 100
"""Transfers on the page: more than anybody reads, and the cost of looking does not grow with the cluster."""


def add_to(application: Application, status: Callable[[int], dict[str, Any]]) -> Callable[[], None]:
    """Adds the page to the scheduler's own server, beside Dask's pages.

    Returns:
        What removes it.
    """
    rules = application.default_router.rules
    before = list(rules)
    application.add_handlers(r".*$", [(rf"{PATH}/?", Page), (rf"{PATH}/status\.json", Status, {"status": status})])
    added = [rule for rule in rules if rule not in before]

    def remove() -> None:
        for rule in added:
            rules.remove(rule)

    return remove


def content() -> str:
    """Return the page with the common look in it."""
    return PAGE.read_text().replace(LOOK_HERE, LOOK.read_text())


class Page(RequestHandler):
    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        # All of it is in the page: nothing is loaded from elsewhere, and no text of a job is taken for code.
        self.set_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
        )
        self.write(content())


class Status(RequestHandler):
    def initialize(self, status: Callable[[int], dict[str, Any]]) -> None:
        self.status = status

    def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(self.status(ROWS)))
