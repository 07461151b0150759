"""A task's result is known before the task is over, so tasks that depend on it start while it runs.

Dask considers a task done once the future of its thread pool has a result. So this module sets that result while the
task's function still runs. Its thread leaves the pool, as with Dask's ``secede``, and the function's return value is
dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from typing import Any, cast

from dask.sizeof import sizeof
from distributed import Reschedule, Worker
from distributed.core import Status
from distributed.threadpoolexecutor import ThreadPoolExecutor, secede, thread_state
from distributed.utils import thread_state as task_state

from mission_control import _native
from mission_control.dask.seams import replace
from mission_control.objects import Task

logger = logging.getLogger(__name__)

WRITERS_PER_THREAD, WRITERS_MIN = 4, 8
"""Most tasks of a worker that may continue after their results are known: per thread, and at least. So a pipeline with
that many stages runs on a worker with one thread."""
SAY_AFTER_S = 10.0
"""A task that has waited this long for its turn is reported in the worker's log."""


class _Own(threading.local):
    """State of the task in this thread."""

    future: list[Future[Any]] | None = None
    """Holds its future, once the pool has made it."""
    task: Task | None = None
    """The task, once its result is known."""
    stream: str = ""
    over: Callable[[BaseException | None], None] | None = None
    """Called when its function has ended, with its error."""


class Early:
    """The early results of one worker's tasks."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.undo = ExitStack()
        self.own = _Own()
        self.most = max(WRITERS_PER_THREAD * worker.state.nthreads, WRITERS_MIN)
        self.writers = threading.BoundedSemaphore(self.most)
        self.keys: Counter[Any] = Counter()
        """Tasks that continue after their results are known, by key: an earlier run may not have ended yet."""
        self.lock = threading.Lock()
        self.problem: str | None = "this version of Dask has no thread pool as Mission Control knows it"
        self.closed = False

    def start(self) -> None:
        executor = self.worker.executors.get("default")
        if not isinstance(executor, ThreadPoolExecutor):
            logger.warning("Tasks on this worker cannot open streams: %s", self.problem)
            return
        submit, own = executor.submit, self.own

        def run(future: list[Future[Any]], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            own.future, own.task, own.over = future, None, None
            try:
                return function(*args, **kwargs)
            finally:
                self.ended(None)
                own.future = None

        def submit_and_note(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            noted: list[Future[Any]] = []
            future: Future[Any] = submit(run, noted, function, args, kwargs)
            noted.append(future)
            return future

        replace(self.undo, executor, "submit", submit_and_note)
        self.problem = None

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
        if self.own.future is None or state is None:
            raise RuntimeError(f"{key} began before Mission Control was installed here: run it again")
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
        noted = own.future
        assert noted is not None
        while not noted:
            time.sleep(0)  # the pool has just begun it
        (future,) = noted
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
        return self.own.task is not None

    def writes(self, key: Any) -> bool:
        """Whether a task continues after its result is known. May be called in any thread."""
        return bool(self.keys[key])

    def close(self) -> None:
        self.closed = True
        self.problem = "Mission Control is being uninstalled"
        self.undo.close()


def _ignored(*_: Any) -> None:
    pass
