"""Find the references that a task's result carries, so that objects that it put and does not carry are freed.

References are found by pickling the value and discarding the output.

This finds each reference that an engine would send with the value: in object arrays, in pandas columns, in any class.
Buffers are not copied for that (pickle protocol 5, out of band).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control.objects import Reference, references_in

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, memoryview)
"""Types whose values carry no reference."""


class _Nothing:
    """A file that discards its input."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Finder(cloudpickle.Pickler):
    """A pickler that records every reference in a value."""

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
        # The value cannot be sent, so it stays here: it holds the references met so far, and those that the garbage
        # collector finds.
        return {*finder.found.values(), *references_in(value)}
    return set(finder.found.values())


def described(references: Iterable[Reference]) -> list[tuple[str, str, int, int, int]]:
    """Return the objects as `Controller.carries` takes them."""
    return [(own.object, own.worker, len(own), sum(own.sizes), own.copies) for own in references]


class TaskObjects:
    """The objects that the tasks of one worker put. An object outlives its task only if the task's result carries
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put: defaultdict[Any, list[str]] = defaultdict(list)
        self._carried: dict[Any, set[Reference]] = {}

    def put(self, task: Any, name: str) -> None:
        """Record that a task has put an object."""
        with self._lock:
            self._put[task].append(name)

    def hand_on(self, task: Any, names: Iterable[str]) -> None:
        """Record that a task's next step names these objects, so they outlive the task."""
        named = set(names)
        with self._lock:
            if (put := self._put.get(task)) is not None:
                put[:] = [name for name in put if name not in named]

    def look(self, task: Any, result: Any) -> None:
        """Find the references in a result. Runs in the task's thread, because a large result takes a while."""
        if not self._may_carry(task):
            return
        found = carried_by(result)
        with self._lock:
            self._carried[task] = found

    def are_used(self) -> bool:
        """Whether a task that ends may have put an object, or carry a reference."""
        return bool(self._put or self._carried or Reference._live)

    def ended(
        self, task: Any, result: Callable[[], Any] | None
    ) -> tuple[list[tuple[str, str, int, int, int]], list[str]]:
        """End a task.

        Args:
            result: Returns the task's result, which is searched unless :meth:`look` has done so; ``None``: there is
                none.

        Returns:
            The objects that its result carries, as `Controller.carries` takes them; and the names of objects to free.
        """
        if not self.are_used():
            return [], []
        with self._lock:
            put, found = self._put.pop(task, []), self._carried.pop(task, None)
        if result is None:
            return [], put
        if found is None:
            found = carried_by(result()) if put or Reference._live else set()
        return described(found), sorted(set(put) - {own.object for own in found})

    def _may_carry(self, task: Any) -> bool:
        """Return whether the task has put an object, or any reference lives in this process: an argument, a closure, a
        Variable or a Queue may have given it to the task."""
        return bool(self._put.get(task) or Reference._live)
