"""Ranges and lists on the command line: `1-48`, `1,2,8-16`, `16kB,32kB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from mission_control import _native
from mission_control.errors import BadInput

Value = TypeVar("Value")
SENDERS_MAX = 10_000


def senders(text: str) -> list[int]:
    """Parse numbers of senders; return each once, in ascending order.

    Raises:
        BadInput: the text has no such numbers.
    """
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= SENDERS_MAX:
            raise BadInput(f"{text!r} are no senders: write numbers from 1 to {SENDERS_MAX}, as in 1-48 or 1,2,4,8-16")
        found.update(range(first, last + 1))
    return sorted(found)


def sizes(text: str) -> list[int]:
    """Parse sizes; keep their order.

    Raises:
        BadInput: a unit is missing, or the text is no size.
    """
    found = [quantity(_native.parse_bytes, word) for word in text.split(",")]
    if 0 in found:
        raise BadInput(f"{text!r}: nothing is sent in 0 bytes, use 1 or more")
    return found


def quantity(parse: Callable[[str], Value], text: str) -> Value:
    """Parse a text with ``parse``.

    Raises:
        BadInput: ``parse`` does not accept it.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise BadInput(str(error)) from None


def size(count: int) -> str:
    """Format bytes as people type them: `64 kB`, `64 KiB`; a number that is round in neither as any other."""
    for unit, step in (("MB", 10**6), ("kB", 10**3), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % step == 0:
            return f"{count // step} {unit}"
    return _native.format_bytes(count)
