"""Texts that other people's programs wrote, made fit for a terminal, a log or a page."""

from __future__ import annotations

from typing import Any


def printable(value: Any) -> Any:
    """Return a text, or what a JSON value holds of texts, without letters that are no picture.

    Control characters drive a terminal, and format characters change the order of what is read (Unicode Technical
    Report 36, section 2.2). Names of jobs, stages and tasks come from programs of anybody who may use the cluster.
    """
    match value:
        case str():
            return value if value.isprintable() else "".join(own if own.isprintable() else "?" for own in value)
        case list() | tuple():
            return [printable(own) for own in value]
        case dict():
            return {printable(key): printable(own) for key, own in value.items()}
    return value
