"""Pieces of a report: what the template `report.html` shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Piece = dict[str, Any]
"""A text, table, figure, facts, links or details."""
ONE = r"[-+]?[\d.,]+(e[-+]?\d+)?"
NUMBER = re.compile(rf"{ONE}( to {ONE})?( ?(%|s|ms|B|KiB|MiB|GiB|TiB|Mbit/s))?")
WIDE = 40
"""Characters from which a column gets room: a phone would wrap it at each word."""


def text(words: str, css: str = "", head: str = "") -> Piece:
    return {"kind": "text", "words": words, "css": css, "head": head}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Piece:
    """Make a table. Columns without any value are left out."""
    rows = [[shown(value) for value in row] for row in rows]
    columns = []
    for at, name in enumerate(head):
        values = [row[at] for row in rows if row[at] != ""]
        if values:
            columns.append({"at": at, "name": name, "css": css_of(values)})
    return {"kind": "table", "columns": columns, "rows": rows, "caption": caption}


def shown(value: Any) -> Any:
    """Make a cell: a bar stays one, all else is text."""
    return value if isinstance(value, dict) else "" if value is None else str(value)


def css_of(values: Sequence[Any]) -> str:
    """Return the class of a column: numbers are aligned on the right, and long texts get room."""
    if all(isinstance(value, str) and (NUMBER.fullmatch(value) or value == "none") for value in values):
        return "n"
    return "wide" if any(len(value) > WIDE for value in values) else ""


def bar(part: float, mark: float | None = None) -> Piece:
    """Make a cell: a part as a bar, with a line where it was expected to end."""
    return {"part": part, "mark": mark}


def facts(pairs: Sequence[tuple[str, str]]) -> Piece:
    """Make a list of terms and their values, side by side; without those that have none."""
    return {"kind": "facts", "pairs": [(name, value) for name, value in pairs if value]}


def drawn(svg: str, caption: str = "") -> Piece:
    return {"kind": "figure", "svg": svg, "caption": caption}


def details(head: str, *parts: Piece) -> Piece:
    return {"kind": "details", "head": head, "parts": parts}


def links(pairs: Sequence[tuple[str, str]]) -> Piece:
    """Make a line of links, given as name and address."""
    return {"kind": "links", "links": pairs}
