"""What functions of a user gave, where items are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def are_items(given: Any) -> bool:
    """Whether it is what items come from, one after another, and not one item, nor a table, whose names would come."""
    single = isinstance(given, str | bytes | bytearray | memoryview | tuple | Mapping)
    table = any(hasattr(type(given), name) for name in ("__dataframe__", "__arrow_c_stream__", "__arrow_c_array__"))
    return isinstance(given, Iterable) and not single and not table


def shown(given: Any) -> str:
    """Return a value for an error, not too long."""
    text = repr(given)
    return f"{type(given).__name__} {text[:100]}{'..' if len(text) > 100 else ''}"
