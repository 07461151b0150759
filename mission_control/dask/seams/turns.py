"""Run the tasks of a Dask worker by the weights of their jobs, and others while one waits.

So tasks of all jobs fetch at the same time. By default workers with one thread do not share it. This replaces private
parts of Dask's worker. If they are not as expected, tasks run in Dask's own order, with a warning.
Design: docs/explanation/design-control.md, "Tasks get threads by weight".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from distributed import Worker
from distributed.collections import HeapSet
from distributed.core import Status
from distributed.threadpoolexecutor import ThreadPoolExecutor, thread_state
from distributed.worker_state_machine import UnpauseEvent, WorkerState

from mission_control import _native, turns
from mission_control.dask.seams import wanted
from mission_control.dask.seams.by_job import ByJob
from mission_control.dask.seams.seam import CONTENDED, ERRORS, Part, Parts, Seam
from mission_control.jobs import spec_in

UNNAMED = ("unnamed", 1.0)
"""The job and the priority of a task that belongs to no named job."""

ADJUST = Seam(
    "ThreadPoolExecutor", "_adjust_thread_count", "notes that a task leaves its thread (secede)", (), when=CONTENDED
)
SUBMIT = Seam("ThreadPoolExecutor", "submit", "lets a task that comes back wait for its turn (rejoin)", when=CONTENDED)
ENSURE = Seam(
    "WorkerState", "_ensure_computing", "starts a task for each one that waits for the network", when=CONTENDED
)
READY = Seam("WorkerState", "ready", "orders ready tasks by the weight of their jobs", when=CONTENDED)


class Turns(turns.Turns):
    """The threads of one Dask worker."""

    def __init__(self, worker: Worker, endpoint: _native.Endpoint, limit_bytes: int, parts: Parts):
        threads = worker.state.nthreads
        # A user of one thread may rely on the absence of concurrent tasks.
        super().__init__(threads, wanted("lend-threads", default=threads > 1), self._have_more_begin)
        self.part = parts.part("threads", "weights decide who gets the network, and not whose task runs")
        self.worker = worker
        self.endpoint = endpoint
        self.limit_bytes = limit_bytes
        self.asked = False

    def turn_of(self, key: Any) -> AbstractContextManager[None]:
        """Return the turn of a task; an empty context outside the worker's own threads (actors, other executors)."""
        if self.part.is_off or getattr(thread_state, "executor", None) is not self.worker.executors["default"]:
            return nullcontext()
        return _Guarded(self.turn(*job_of(self.worker.state.tasks.get(key))), self.part)

    def _have_more_begin(self) -> None:
        if not self.asked and (self.worker.state.ready or self.worker.state.constrained):
            self.asked = True
            self.worker.loop.add_callback(self._begin_more)

    def _begin_more(self) -> None:
        """Make Dask start a ready task. Runs in its event loop."""
        self.asked = False
        if not self.threads.closed and self.worker.status == Status.running and self.worker.state.running:
            self.worker.handle_stimulus(UnpauseEvent(stimulus_id=f"mission-control-lent-{time.time()}"))

    def weigh(self) -> None:
        """Use the current weights of jobs."""
        try:
            if not self.part.is_off and not self.threads.closed:
                self.threads.weigh(self.endpoint.weights())
        except ERRORS as error:
            self.part.fail(error)

    @contextmanager
    def thread_released(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                if not self.part.is_off:
                    stack.enter_context(_Guarded(super().thread_released(), self.part))
            except ERRORS as error:
                self.part.fail(error)
            yield

    def ahead(self) -> int:
        """Return how many more tasks than threads may have begun."""
        if not self.threads.ahead(0, self.limit_bytes):
            # As a rule nobody waits, and to ask the kernel for the memory takes longer than a small task.
            return 0
        live = self.endpoint.live_bytes()
        if self.worker.memory_manager.memory_limit:
            # Memory of tasks beside objects counts in the same way.
            live = max(live, int(self.worker.monitor.get_process_memory() * _native.STORE_MEMORY_FRACTION))
        return self.threads.ahead(live, self.limit_bytes)

    def start(self) -> bool:
        """Take over the worker's threads. Return False if Dask is not as expected, or an earlier error was ours."""
        if self.part.is_off:
            return False
        state, executor = self.worker.state, self.worker.executors.get("default")
        known = (
            isinstance(executor, ThreadPoolExecutor)
            and {"_max_workers", "_rejoin_list"} <= vars(executor).keys()
            and isinstance(state, WorkerState)
            and type(state.ready) is HeapSet
            and {"_ensure_computing", "nthreads", "executing"} <= set(dir(WorkerState))
        )
        if not known:
            self.part.unknown("threads of a worker")
            return False
        self._watch_pool(executor)
        if self.lends:
            self._lend_threads(state, executor)
        if wanted("order-tasks"):
            choose = self.part.guard(lambda _, jobs: self.threads.next(jobs) or jobs[0], lambda jobs: jobs[0])
            state.ready = ByJob.of(state.ready, lambda task: job_of(task)[0], choose)
            self.part.stack.callback(lambda: setattr(state, "ready", state.ready.plain()))
        # First of all: whoever waits for a turn goes on.
        self.part.stack.callback(super().close)
        return not self.part.is_off

    def _watch_pool(self, executor: Any) -> None:
        """Tasks leave the pool (`secede`) and come back (`rejoin`), each in its own thread."""

        def adjust_and_leave(adjust: Callable[[], None]) -> None:
            if not getattr(thread_state, "proceed", True) and not self.own.comes_back:
                self.leave()
            adjust()

        def submit_and_come_back(submit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if getattr(thread_state, "proceed", True):
                return submit(*args, **kwargs)
            self.come_back()
            self.own.comes_back = True  # `submit` adjusts the number of threads, too
            try:
                return submit(*args, **kwargs)
            finally:
                self.own.comes_back = False

        self.part.replace(ADJUST, executor, adjust_and_leave)
        self.part.replace(SUBMIT, executor, submit_and_come_back)

    def _lend_threads(self, state: WorkerState, executor: Any) -> None:

        def with_more_threads(ensure: Callable[[], Any]) -> Any:
            """Start tasks on all threads that do not wait for the network."""
            if not (more := self.ahead()):
                return ensure()
            threads = state.nthreads
            state.nthreads = threads + more
            try:
                return ensure()
            finally:
                state.nthreads = threads

        if not self.part.replace(ENSURE, state, with_more_threads):
            return
        executor._max_workers += self.threads.most
        self.part.stack.callback(setattr, executor, "_max_workers", executor._max_workers - self.threads.most)

    def close(self) -> None:
        super().close()
        self.part.undo()


class _Guarded:
    """A turn. Its errors switch the part off; the task runs in any case."""

    __slots__ = ("part", "turn")

    def __init__(self, turn: AbstractContextManager[None], part: Part):
        self.turn, self.part = turn, part

    def __enter__(self) -> None:
        try:
            self.turn.__enter__()
        except ERRORS as error:
            self.part.fail(error)

    def __exit__(self, *raised: Any) -> None:
        try:
            self.turn.__exit__(*raised)
        except ERRORS as error:
            self.part.fail(error)


def job_of(task: Any) -> tuple[str, float]:
    """Return the job of a worker's task, and its priority. It must not raise for any annotation: Dask would close the
    worker."""
    spec = spec_in(getattr(task, "annotations", None))
    job, priority = spec.get("job"), spec.get("priority", 1.0)
    if not isinstance(job, str) or not isinstance(priority, int | float) or not 0 < priority < math.inf:
        return UNNAMED
    return job, float(priority)
