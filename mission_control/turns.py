"""Share the threads of a worker: while a task waits for the network, another task uses its thread.

For any engine whose tasks run in threads. `crates/core` chooses the next task (`threads`), by the jobs' weights; this
module is the part that runs in the tasks' threads.
Design: docs/explanation/design-control.md, "Tasks get threads by weight".
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mission_control import _native


class _Own(threading.local):
    """The task of this thread, as `begins` takes it."""

    task: tuple[int, str, float] | None = None
    released = False
    """Whether it has released its thread, or has left the pool."""
    comes_back = False
    """Whether it returns to the pool, which is adjusted meanwhile."""


class _Turn:
    """A task's time on its thread. A class, because each task has one, and a generator takes twice as long."""

    __slots__ = ("task", "turns")

    def __init__(self, turns: Turns, task: tuple[int, str, float]):
        self.turns, self.task = turns, task

    def __enter__(self) -> None:
        own = self.turns.own
        own.task, own.released = self.task, False
        self.turns.threads.begins(*self.task)

    def __exit__(self, *raised: object) -> None:
        self.turns.threads.ends(self.task[0])
        self.turns.own.task = None


class Turns:
    """The threads of one worker process.

    Args:
        threads: Number of tasks that run at once.
        lends: Whether tasks share their threads while they wait.
        on_lent: Called in the waiting thread after it was released, so that the engine can start another task.
    """

    def __init__(self, threads: int, lends: bool, on_lent: Callable[[], None]):
        self.threads = _native.Threads(threads)
        self.lends = lends
        self.on_lent = on_lent
        self.numbers = itertools.count(1)
        self.own = _Own()

    def turn(self, job: str, priority: float) -> _Turn:
        """Run a task in its thread: the context waits for its turn first."""
        return _Turn(self, (next(self.numbers), job, priority))

    @contextmanager
    def thread_released(self) -> Iterator[None]:
        """Release the thread of the current task while it waits for the network."""
        own = self.own
        if own.task is None or own.released or self.threads.closed or not self.lends:
            yield
            return
        own.released = True
        self.threads.lends(own.task[0])
        self.on_lent()
        try:
            yield
        finally:
            self.threads.goes_on(own.task[0])
            own.released = False

    def leave(self) -> None:
        """Stop counting the current task: it has left the pool, for good or until it comes back."""
        if self.own.task is not None and not self.own.released:
            self.own.released = True
            self.threads.ends(self.own.task[0])

    def come_back(self) -> None:
        """Count the current task again: wait for its turn."""
        if self.own.task is not None and self.own.released:
            self.threads.begins(*self.own.task)
            self.own.released = False

    def close(self) -> None:
        """End all waiting for turns."""
        self.threads.close()
