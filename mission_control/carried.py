"""Find the references that a task's result carries, so that objects that it put and does not carry are freed.

The value is walked as the garbage collector walks it. That runs no code of the program, and is fast. A value with
something of which nobody can tell what an engine would send, such as a function or a class with pickling of its own, is
pickled, and the output discarded. This finds each reference that an engine would send. Buffers are not copied for that
(pickle protocol 5, out of band).
"""

from __future__ import annotations

import copyreg
import datetime
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control import _native
from mission_control.objects import Reference, references_in

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, memoryview)
"""Types whose values carry no reference."""


HOLD_NOTHING = (*PLAIN, range, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, Decimal)
CONTAINERS = (list, tuple, dict, set, frozenset, deque, defaultdict, OrderedDict, Counter)
HAS_GC = 1 << 14
"""`Py_TPFLAGS_HAVE_GC`: the garbage collector knows what such objects hold."""


def kind_of(own: type) -> str:
    """Return what objects of a type hold, see :class:`mission_control._native.Finder`."""
    # Called for types of results, and not where the command line only prints its help.
    import numpy as np

    if issubclass(own, Reference):
        return "reference"
    if not isinstance(module := own.__module__, str):
        return "unknown"
    library = module.partition(".")[0]
    walked = own.__flags__ & HAS_GC
    if library == "pyarrow" or own in HOLD_NOTHING or issubclass(own, (Enum, datetime.tzinfo)):
        return "plain"
    if issubclass(own, np.ndarray):
        # Masked arrays and records have code of Python that says what they are.
        return "array" if own is np.ndarray else "unknown"
    if library == "pandas":
        return "walked" if walked else "plain"
    if library == "numpy":
        return "plain" if issubclass(own, np.generic) and not issubclass(own, np.void) else "unknown"
    if own in CONTAINERS or (walked and is_sent_as_it_is(own)):
        return "walked"
    return "unknown"


def is_sent_as_it_is(own: type) -> bool:
    """Whether an instance is pickled with what it holds, and its class by name."""
    as_objects_are = all(
        getattr(own, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )
    return as_objects_are and own not in copyreg.dispatch_table and own.__module__ != "__main__" and is_importable(own)


def is_importable(own: type) -> bool:
    found: Any = sys.modules.get(own.__module__)
    for name in own.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is own


FINDER = _native.Finder(kind_of)


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
        if (held := FINDER.find(value)) is not None:
            return set({own.object: own for own in held}.values())
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
        self.on_put: Callable[[], None] = lambda: None
        """Called when a task has put an object, in its thread."""

    def put(self, task: Any, name: str) -> None:
        """Record that a task has put an object."""
        with self._lock:
            self._put[task].append(name)
        self.on_put()

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
