"""A task's result is known before the task is over: tasks that depend on it start beside it.

Dask takes a task for done once the future of its thread pool has a result. So that future is given one while the task's
function still runs. Its thread leaves the pool, as with Dask's ``secede``, and what the function returns is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from dask.sizeof import sizeof
from distributed import Reschedule, Worker
from distributed.threadpoolexecutor import ThreadPoolExecutor, secede, thread_state
from distributed.utils import thread_state as task_state

from mission_control.dask.seams import replace

logger = logging.getLogger(__name__)

WRITERS_PER_THREAD, WRITERS_MIN = 4, 8
"""So many tasks of a worker may go on after their results are known, for each thread and at least: a pipeline of as
many stages runs on a worker with one thread."""
SAY_AFTER_S = 10.0
"""A task that has waited so long for its turn to begin says so in the worker's log."""


class _Own(threading.local):
    future: list[Future[Any]] | None = None
    """Holds the future of the task in this thread, once the pool has made it."""
    done = False
    """Its result is known."""
    needs = False
    """The scheduler keeps objects for it."""


class Early:
    """The results of one worker's tasks that are known early."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.undo = ExitStack()
        self.own = _Own()
        self.most = max(WRITERS_PER_THREAD * worker.state.nthreads, WRITERS_MIN)
        self.writers = threading.BoundedSemaphore(self.most)
        self.problem: str | None = "this version of Dask has no thread pool as Mission Control knows it"

    def start(self) -> None:
        executor = self.worker.executors.get("default")
        if not isinstance(executor, ThreadPoolExecutor):
            logger.warning("Tasks on this worker cannot open streams: %s", self.problem)
            return
        submit, own = executor.submit, self.own

        def run(future: list[Future[Any]], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            own.future, own.done, own.needs = future, False, False
            try:
                return function(*args, **kwargs)
            finally:
                own.future = None

        def submit_and_note(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            noted: list[Future[Any]] = []
            future: Future[Any] = submit(run, noted, function, args, kwargs)
            noted.append(future)
            return future

        replace(self.undo, executor, "submit", submit_and_note)
        self.problem = None

    def check(self, key: Any) -> None:
        """See that the task in this thread may finish early.

        Raises:
            RuntimeError: It may not; says why.
        """
        if self.problem is not None:
            raise RuntimeError(f"this worker has no streams: {self.problem}")
        if getattr(thread_state, "executor", None) is not self.worker.executors.get("default"):
            raise RuntimeError("open_stream was called outside the worker's own thread pool: call it in a plain task")
        if self.own.done:
            raise RuntimeError(f"{key} has opened a stream before: give that more parts")
        if self.own.future is None:
            raise RuntimeError(f"{key} began before Mission Control was installed here: run it again")

    def begin_writer(self, key: Any) -> Callable[[], None]:
        """Wait until not too many tasks go on after their results are known.

        Returns:
            What is to be called when this one does so no more.
        """
        since, said = time.monotonic(), False
        while not self.writers.acquire(timeout=1):
            if not said and time.monotonic() - since > SAY_AFTER_S:
                said = True
                logger.info("%s waits until one of the %d streams that this worker writes has ended", key, self.most)
        return self.writers.release

    def finish(self, key: Any, result: Any) -> None:
        """Have Dask take the task in this thread for done, with this result; the thread leaves the pool."""
        noted = self.own.future
        assert noted is not None
        while not noted:
            time.sleep(0)  # the pool has just begun it
        (future,) = noted
        plugin: Any = self.worker.plugins["mission-control"]
        # Dask releases its inputs once its result is known.
        if inputs := plugin.inputs_of(key):
            plugin.needs(key, inputs)
            self.own.needs = True
        self.own.done = True
        plugin.objects.look(key, result)
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
        # The pool gives it the function's result in the end.
        vars(future).update(set_result=_ignored, set_exception=_ignored)
        secede()

    def over(self, key: Any, error: BaseException | None) -> None:
        """The function of the task in this thread has ended, whose result was known before."""
        plugin: Any = self.worker.plugins.get("mission-control")
        if plugin is None:
            return
        if self.own.needs:
            plugin.needs(key, ())
        if isinstance(error, Reschedule):
            # Something that it needs was lost, and is being computed again.
            plugin.again(key)
        elif error is not None:
            # Dask does not log it.
            logger.warning("%s failed after its stream had begun: %s: %s", key, type(error).__name__, error)

    @property
    def is_done(self) -> bool:
        """Whether the result of this thread's task is known already."""
        return self.own.done

    def close(self) -> None:
        self.problem = "Mission Control is being uninstalled"
        self.undo.close()


def _ignored(*_: Any) -> None:
    pass
