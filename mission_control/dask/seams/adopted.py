"""Other threads act for a task: what they put, fetch and submit counts as if the task's thread did it.

Dask and Mission Control recognise a calling task by its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Worker
from distributed.utils import thread_state

if TYPE_CHECKING:
    from mission_control.dask.worker import MissionControlWorker

T = TypeVar("T")


class TaskThread:
    """The thread of the task that makes this object."""

    def __init__(self, worker: Worker, plugin: MissionControlWorker):
        self.worker, self.key = worker, worker.get_current_task()
        # Dask finds the worker by the context, and the rest by thread.
        self.context = copy_context()
        plugin.early.note()
        self.early = plugin.early.own
        self.locals = [(local, vars(local)) for local in (thread_state, plugin.thread, plugin.early.own)]
        """Thread-local namespaces, with their current values in the task's thread."""

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function as the task would, in the current thread."""
        return self.context.copy().run(self._adopted, function, *args, **kwargs)

    def _adopted(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with self._is_its():
            return function(*args, **kwargs)

    @contextmanager
    def _is_its(self) -> Iterator[None]:
        worker, ident = self.worker, threading.get_ident()
        for local, values in self.locals:
            vars(local).update(values)
        self.early.is_adopted = True
        with worker.active_threads_lock:
            worker.active_threads[ident] = self.key
        try:
            yield
        finally:
            with worker.active_threads_lock:
                worker.active_threads.pop(ident, None)
            for local, _ in self.locals:
                vars(local).clear()
