"""A task's result is known before the task is over, so tasks that depend on it start while it runs.

Dask considers a task done once the future of its thread pool has a result. So this module sets that result while the
task's function still runs. Its thread leaves the pool, as with Dask's ``secede``, and the function's return value is
dropped.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, cast

from dask.sizeof import sizeof
from distributed import Reschedule, Worker
from distributed.core import Status
from distributed.threadpoolexecutor import secede, thread, thread_state
from distributed.utils import thread_state as task_state

from mission_control import _native
from mission_control.objects import Task

logger = logging.getLogger(__name__)

WRITERS_PER_THREAD, WRITERS_MIN = 4, 8
"""Most tasks of a worker that may continue after their results are known: per thread, and at least. So a pipeline with
that many stages runs on a worker with one thread."""
SAY_AFTER_S = 10.0
"""A task that has waited this long for its turn is reported in the worker's log."""


class _Own(threading.local):
    """State of the task in this thread."""

    future: Future[Any] | None = None
    """Its future, once it was looked for."""
    task: Task | None = None
    """The task, once its result is known."""
    is_adopted = False
    """Whether the thread acts for the task of another thread."""
    stream: str = ""
    over: Callable[[BaseException | None], None] | None = None
    """Called when its function has ended, with its error."""


class Early:
    """The early results of one worker's tasks."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.own = _Own()
        self.most = max(WRITERS_PER_THREAD * worker.state.nthreads, WRITERS_MIN)
        self.writers = threading.BoundedSemaphore(self.most)
        self.keys: Counter[Any] = Counter()
        """Tasks that continue after their results are known, by key: an earlier run may not have ended yet."""
        self.lock = threading.Lock()
        self.problem: str | None = None
        """Why tasks cannot open streams here, if they cannot."""
        self.closed = False

    def note(self) -> None:
        """Find the future of the task in this thread, also for other threads that act for it."""
        if not self.own.is_adopted and (here := future_here()) is not None:
            self.own.future = here

    def task(self) -> Task | None:
        """The task in this thread, if its result is known already."""
        own = self.own
        if own.task is not None and not own.is_adopted and future_here() not in (None, own.future):
            own.task = own.over = None  # of an earlier task in this thread
        return own.task

    def check(self, key: Any) -> None:
        """Check that the task in this thread may finish early.

        Raises:
            RuntimeError: It may not; the text has the reason.
        """
        if self.problem is not None:
            raise RuntimeError(f"this worker has no streams: {self.problem}")
        if getattr(thread_state, "executor", None) is not self.worker.executors.get("default"):
            raise RuntimeError("open_stream was called outside the worker's own thread pool: call it in a plain task")
        if self.is_done:
            raise RuntimeError(f"{key} has opened a stream before: give that more parts")
        state = self.worker.state.tasks.get(key)
        self.note()
        if self.own.future is None:
            raise RuntimeError("this worker has no streams: its thread pool is none that Mission Control knows")
        if state is None:
            raise RuntimeError(f"{key} is cancelled")
        if state.resource_restrictions:
            raise RuntimeError(
                f"{key} demands resources, and Dask would give them to others while it writes a stream: submit it "
                "without resources"
            )
        if key in self.worker.state.actors:
            raise RuntimeError("open_stream was called where an actor is made: its result is the actor")

    def has_turn(self) -> bool:
        """Whether one more task may continue after its result is known; if so, count it."""
        return self.writers.acquire(blocking=False)

    def wait_for_turn(self, key: Any) -> None:
        """Wait until one more task may continue after its result is known.

        Raises:
            mission_control.Cancelled: The worker closes.
        """
        turns = cast(Any, self.worker.plugins["mission-control"]).turns
        since, said = time.monotonic(), False
        with turns.thread_released() if turns is not None else nullcontext():
            while not self.writers.acquire(timeout=1):
                if self.closed or self.worker.status not in (Status.running, Status.paused):
                    raise _native.Cancelled("this worker is closing")
                if not said and time.monotonic() - since > SAY_AFTER_S:
                    said = True
                    logger.info("%s waits until one of the %d that write streams here has ended", key, self.most)

    def finish(self, task: Task, result: Any, over: Callable[[BaseException | None], None]) -> None:
        """Make Dask consider the task in this thread done, with this result; the thread leaves the pool.

        Args:
            result: The reference of its stream.
            over: Called when its function has ended, with its error.
        """
        own, plugin = self.own, cast(Any, self.worker.plugins["mission-control"])
        future = own.future
        assert future is not None
        own.task, own.stream, own.over = task, result.object, over
        with self.lock:
            self.keys[task.key] += 1
        # Dask releases the task's inputs once its result is known.
        plugin.writes(task.key, result.object, result.deterministic)
        plugin.objects.look(task.key, result)
        now = time.time() + self.worker.scheduler_delay
        message = {
            "op": "task-finished",
            "status": "OK",
            "result": result,
            "nbytes": sizeof(result),
            "type": type(result),
            "start": getattr(task_state, "start_time", now),
            "stop": now,
            "thread": threading.get_ident(),
        }
        future.set_result(message)
        # The pool sets the function's result on the future in the end.
        vars(future).update(set_result=_ignored, set_exception=_ignored)
        if thread_state.proceed:
            # Otherwise the thread has left the pool before.
            secede()

    def ended(self, error: BaseException | None) -> None:
        """Handle the end of the function of the task in this thread. Only the first call has an effect."""
        own = self.own
        task, over, own.over = own.task, own.over, None
        if task is None or over is None:
            return
        try:
            over(error)
        finally:
            self.writers.release()
            with self.lock:
                self.keys -= Counter([task.key])
            plugin: Any = self.worker.plugins.get("mission-control")
            if plugin is not None:
                # An input was lost, and is being recomputed.
                plugin.wrote(task.key, own.stream, isinstance(error, Reschedule))
        if error is not None and not isinstance(error, Reschedule):
            # Dask does not log it.
            logger.warning("%s failed after its stream had begun: %s: %s", task.key, type(error).__name__, error)

    @property
    def is_done(self) -> bool:
        """Whether the result of this thread's task is known already."""
        return self.task() is not None

    def writes(self, key: Any) -> bool:
        """Whether a task continues after its result is known. May be called in any thread."""
        return bool(self.keys[key])

    def close(self) -> None:
        self.closed = True
        self.problem = "Mission Control is being uninstalled"


def future_here() -> Future[Any] | None:
    """The future of what a thread pool runs in this thread; ``None``: no pool runs it.

    A pool keeps it in the frame that calls the task, so that nothing has to be noted of each task that begins.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not thread._WorkItem.run.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals["self"].future if frame is not None else None


def _ignored(*_: Any) -> None:
    pass
