"""Which references a value carries: found by pickling it into nothing.

What an engine would send of it is what counts, wherever in it a reference hides: in object arrays, in pandas columns,
in classes that nobody here knows. Buffers are not copied for that (pickle protocol 5, out of band).
"""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control.objects import Reference, references_in

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, memoryview)
"""Types whose values carry nothing."""


class _Nothing:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Finder(cloudpickle.Pickler):
    """Notes every reference that it meets."""

    def __init__(self) -> None:
        super().__init__(_Nothing(), protocol=5, buffer_callback=lambda buffer: None)
        self.found: dict[str, Reference] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Reference):
            self.found[obj.object] = obj
            return str, ("",)
        return super().reducer_override(obj)


def carried_by(value: Any) -> set[Reference]:
    """Find the references that a result carries.

    Args:
        value: The result of a task.

    Returns:
        One reference for each object.
    """
    if isinstance(value, PLAIN):
        return set()
    if isinstance(value, Reference):
        return {value}
    finder = _Finder()
    try:
        finder.dump(value)
    except Exception:
        # It cannot be sent, so it stays here: what it holds is what was met, and what the garbage collector sees.
        return {*finder.found.values(), *references_in(value)}
    return set(finder.found.values())
