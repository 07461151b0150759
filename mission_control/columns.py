"""Arrow arrays as the buffers of columns that `crates/columns` splits, joins and sorts.

Arrow columnar format, "Buffer Listing for Each Layout".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mission_control import _native

Described = tuple[str, int, "Buffer | None", "Buffer | None"]
"""A buffer, as :class:`mission_control._native.ColumnSplit` takes it."""

Place = tuple["_native.Segment | None", int, int, int, int]
"""Where a joined buffer lies, as :meth:`mission_control._native.Endpoint.join_columns` says."""


def flat_kinds(type: pa.DataType) -> tuple[tuple[str, int], ...] | None:
    """Return the buffers of an Arrow array; ``None``: the array is nested."""
    if pa.types.is_null(type):
        return ()
    if pa.types.is_boolean(type):
        return ("bits", 0), ("bits", 0)
    if pa.types.is_string(type) or pa.types.is_binary(type):
        return ("bits", 0), ("variable", 4)
    if pa.types.is_large_string(type) or pa.types.is_large_binary(type):
        return ("bits", 0), ("variable", 8)
    if pa.types.is_primitive(type) or pa.types.is_decimal(type) or pa.types.is_fixed_size_binary(type):
        return ("bits", 0), ("fixed", type.bit_width // 8)
    return None


def arrow_buffers(column: pa.Array, kinds: Sequence[tuple[str, int]]) -> list[Described]:
    """Describe the buffers of an array, without a copy."""
    if not kinds:
        return []
    start, rows = column.offset, len(column)
    validity, *rest = column.buffers()
    described: list[Described] = [
        ("bits", start, validity, None) if validity is not None and column.null_count else ("all-set", 0, None, None)
    ]
    ((kind, width),) = kinds[1:]
    if kind == "bits":
        described.append(("bits", start, rest[0], None))
    elif kind == "fixed":
        described.append(("fixed", width, cut(rest[0], start * width, rows * width), None))
    else:
        offsets = cut(rest[0], start * width, (rows + 1) * width)
        described.append(("variable", width, rest[1], offsets))
    return described


def cut(buffer: pa.Buffer | None, start: int, length: int) -> memoryview | None:
    """Return `length` bytes of a buffer, which may be padded; an array without rows may have no buffer."""
    return memoryview(buffer)[start : start + length] if buffer is not None and length else None


def arrow_array(type: pa.DataType, kinds: Sequence[tuple[str, int]], rows: int, places: Sequence[Place]) -> pa.Array:
    """Make an array of joined buffers, without a copy."""
    buffers: list[pa.Buffer | None] = []
    for (kind, _), (segment, start, length, second, second_length) in zip(kinds, places, strict=True):
        if segment is None:
            # If all bits are set there is no validity buffer. An array of booleans needs one.
            is_validity = not buffers
            buffers.append(None if is_validity else pa.py_buffer(b"\xff" * -(-rows // 8)))
            continue
        memory = memoryview(segment)
        buffers.append(pa.py_buffer(memory[start : start + length]))
        if kind == "variable":
            buffers.append(pa.py_buffer(memory[second : second + second_length]))
    return pa.nulls(rows) if not buffers else pa.Array.from_buffers(type, rows, buffers)
