"""Validation of the results of users' functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def are_items(given: Any) -> bool:
    """Whether a result is an iterable of items, and not a single item, nor a table, which would yield names."""
    single = isinstance(given, str | bytes | bytearray | memoryview | tuple | Mapping)
    table = any(hasattr(type(given), name) for name in ("__dataframe__", "__arrow_c_stream__", "__arrow_c_array__"))
    return isinstance(given, Iterable) and not single and not table


def shown(given: Any) -> str:
    """Return a value for an error, not too long."""
    text = repr(given)
    return f"{type(given).__name__} {text[:100]}{'..' if len(text) > 100 else ''}"
