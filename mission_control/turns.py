"""A task that waits for the network lends its thread to another; each runs in its turn (DESIGN 4.1).

For any engine whose tasks run in threads. `crates/core` decides whose turn it is (`threads`), by the jobs' weights;
this is what a task's own thread does for it.
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
    lent = False


class Turns:
    """Of one worker process.

    Args:
        threads: that its tasks have.
        lends: whether tasks lend theirs.
        on_lent: a thread was lent, so that another task may begin; called in the thread that waits from now on.
    """

    def __init__(self, threads: int, lends: bool, on_lent: Callable[[], None]):
        self.threads = _native.Threads(threads)
        self.lends = lends
        self.on_lent = on_lent
        self.numbers = itertools.count(1)
        self.own = _Own()

    @contextmanager
    def turn(self, job: str, priority: float) -> Iterator[None]:
        """Around a task, in its thread: waits until it has its turn, and ends that with it."""
        own = self.own
        own.task, own.lent = (next(self.numbers), job, priority), False
        self.threads.begins(*own.task)
        try:
            yield
        finally:
            self.threads.ends(own.task[0])
            own.task = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While it waits for the network, a task lends its thread."""
        own = self.own
        if own.task is None or own.lent or self.threads.closed or not self.lends:
            yield
            return
        own.lent = True
        self.threads.lends(own.task[0])
        self.on_lent()
        try:
            yield
        finally:
            self.threads.goes_on(own.task[0])
            own.lent = False

    def leave(self) -> None:
        """The task of this thread does not count any more, for good or until it comes back."""
        if self.own.task is not None and not self.own.lent:
            self.own.lent = True
            self.threads.ends(self.own.task[0])

    def come_back(self) -> None:
        """It counts again: waits for its turn."""
        if self.own.task is not None and self.own.lent:
            self.threads.begins(*self.own.task)
            self.own.lent = False

    def close(self) -> None:
        """Nobody waits for a turn any more."""
        self.threads.close()
