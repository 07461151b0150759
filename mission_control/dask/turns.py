"""Whose task runs next, on workers and in the scheduler's queue: by the jobs' weights (DESIGN 4.1).

A task that waits in ``fetch`` lends its thread to another, so that tasks of all jobs ask for data at once; workers with
one thread lend none unless they are told to. Tasks begin, and go on once their data has come, in the order that
`crates/core` (`threads`) gives. In the scheduler's queue each job has its own places on the workers. Each of the three
can be turned off in Dask's configuration (`PARTS`). All rests on private parts of Dask: where they are not as expected,
that part stays as Dask has it, with a warning.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
from distributed import Scheduler, Worker
from distributed.collections import HeapSet
from distributed.core import Status
from distributed.threadpoolexecutor import ThreadPoolExecutor, thread_state
from distributed.worker_state_machine import UnpauseEvent, WorkerState

from mission_control import _native
from mission_control.dask.seams import replace
from mission_control.jobs import ANNOTATION

logger = logging.getLogger(__name__)

PARTS = ("lend-threads", "order-tasks", "queue-by-job")
"""Set ``mission-control.lend-threads`` and so on to false to have Dask's own way."""


def wanted(part: str, default: bool = True) -> bool:
    """Whether a part is turned on."""
    assert part in PARTS
    return bool(dask.config.get(f"mission-control.{part}", default=default))


class OwnTask(threading.local):
    """The task of this thread, as `begins` takes it."""

    task: tuple[int, str, float] | None = None
    lent = False


class Turns:
    """Of one worker: each of its tasks runs in its turn."""

    def __init__(self, worker: Worker, endpoint: _native.Endpoint, limit_bytes: int):
        self.worker = worker
        self.endpoint = endpoint
        self.limit_bytes = limit_bytes
        self.threads = _native.Threads(worker.state.nthreads)
        self.numbers = itertools.count(1)
        self.own = OwnTask()
        self.asked = False
        self.lends = False
        self.undo = ExitStack()

    # --- in the threads of tasks ------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, key: Any) -> Iterator[None]:
        """Waits until a task has its turn, and ends that with it. What runs elsewhere than on the worker's own threads
        (actors, other executors) waits for nothing."""
        if getattr(thread_state, "executor", None) is not self.worker.executors["default"]:
            yield
            return
        own = self.own
        own.task, own.lent = (next(self.numbers), *job_of(self.worker.state.tasks.get(key))), False
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
        if not self.asked and (self.worker.state.ready or self.worker.state.constrained):
            self.asked = True
            self.worker.loop.add_callback(self._begin_more)
        try:
            yield
        finally:
            self.threads.goes_on(own.task[0])
            own.lent = False

    def _leave(self) -> None:
        """The task leaves the pool, for good or until it comes back; Dask itself begins another one."""
        if self.own.task is not None and not self.own.lent:
            self.own.lent = True
            self.threads.ends(self.own.task[0])

    def _come_back(self) -> None:
        if self.own.task is not None and self.own.lent:
            self.threads.begins(*self.own.task)
            self.own.lent = False

    # --- in the worker's event loop ---------------------------------------------------------------------------------

    def _begin_more(self) -> None:
        """A thread was lent: has Dask look for a ready task."""
        self.asked = False
        if not self.threads.closed and self.worker.status == Status.running and self.worker.state.running:
            self.worker.handle_stimulus(UnpauseEvent(stimulus_id=f"mission-control-lent-{time.time()}"))

    def weigh(self) -> None:
        """Takes over what jobs weigh now."""
        self.threads.weigh(self.endpoint.weights())

    def ahead(self) -> int:
        """How many tasks more than threads may have begun."""
        live = self.endpoint.live_bytes()
        if self.worker.memory_manager.memory_limit:
            # What tasks hold beside objects counts alike.
            live = max(live, int(self.worker.monitor.get_process_memory() * _native.STORE_MEMORY_FRACTION))
        return self.threads.ahead(live, self.limit_bytes)

    def start(self) -> bool:
        """Takes the worker's threads over; false, with a warning, where Dask is not as expected."""
        state, executor = self.worker.state, self.worker.executors.get("default")
        known = (
            isinstance(executor, ThreadPoolExecutor)
            and {"_max_workers", "_rejoin_list"} <= vars(executor).keys()
            and type(state) is WorkerState
            and type(state.ready) is HeapSet
            and {"_ensure_computing", "nthreads", "executing"} <= set(dir(WorkerState))
        )
        if not known:
            logger.warning(
                "This version of Dask has no workers as Mission Control knows them: weights decide who gets the "
                "network, and not whose task runs"
            )
            return False
        self._watch_pool(executor)
        # Who wants one thread may rely on it that no other task is under way.
        self.lends = wanted("lend-threads", default=state.nthreads > 1)
        if self.lends:
            self._lend_threads(state, executor)
        if wanted("order-tasks"):
            choose = lambda jobs: self.threads.next(jobs) or jobs[0]  # noqa: E731
            state.ready = ByJob.of(state.ready, lambda task: job_of(task)[0], choose)
            self.undo.callback(lambda: setattr(state, "ready", state.ready.plain()))
        return True

    def _watch_pool(self, executor: Any) -> None:
        """Tasks leave the pool (`secede`) and come back (`rejoin`), each in its own thread."""
        adjust, submit = executor._adjust_thread_count, executor.submit

        def adjust_and_leave() -> None:
            if not getattr(thread_state, "proceed", True):
                self._leave()
            adjust()

        def submit_and_come_back(*args: Any, **kwargs: Any) -> Any:
            if not getattr(thread_state, "proceed", True):
                self._come_back()
            return submit(*args, **kwargs)

        replace(self.undo, executor, "_adjust_thread_count", adjust_and_leave)
        replace(self.undo, executor, "submit", submit_and_come_back)

    def _lend_threads(self, state: WorkerState, executor: Any) -> None:
        turns = self

        class Lending(WorkerState):
            """Gives tasks to as many threads as are not lent."""

            __slots__ = ()

            def _ensure_computing(self) -> Any:
                threads = state.nthreads
                state.nthreads = threads + turns.ahead()
                try:
                    return super()._ensure_computing()
                finally:
                    state.nthreads = threads

        state.__class__ = Lending
        executor._max_workers += self.threads.most
        self.undo.callback(setattr, state, "__class__", WorkerState)
        self.undo.callback(setattr, executor, "_max_workers", executor._max_workers - self.threads.most)

    def close(self) -> None:
        """Nobody waits for a turn any more."""
        self.threads.close()
        self.undo.close()


class ByJob(HeapSet):
    """As Dask's, but the smallest element is that of the job that is chosen."""

    __slots__ = ("choose", "front", "heaps", "job_of", "jobs_of")

    def __init__(self, *, key: Callable[[Any], Any], job_of: Callable[[Any], str], choose: Callable[[list[str]], str]):
        super().__init__(key=key)
        self.job_of, self.choose = job_of, choose
        self.heaps: dict[str, HeapSet] = {}
        self.jobs_of: dict[Any, str] = {}
        # What `peek` gave stays first until it is taken.
        self.front: str | None = None

    @classmethod
    def of(cls, plain: HeapSet, job_of: Callable[[Any], str], choose: Callable[[list[str]], str]) -> ByJob:
        own = cls(key=plain.key, job_of=job_of, choose=choose)
        for value in plain.sorted():
            own.add(value)
        return own

    def plain(self) -> HeapSet:
        """The same elements in Dask's own order."""
        own = HeapSet(key=self.key)
        for value in self:
            own.add(value)
        return own

    def __reduce__(self) -> tuple[Callable, tuple]:
        return self.plain().__reduce__()

    def jobs(self) -> list[str]:
        return list(self.heaps)

    def first_of(self, job: str) -> Any:
        """The smallest element of one job, if it has any."""
        heap = self.heaps.get(job)
        return heap.peek() if heap else None

    def add(self, value: Any) -> None:
        if value not in self._data:
            self._data.add(value)
            job = self.jobs_of[value] = self.job_of(value)
            if job not in self.heaps:
                self.heaps[job] = HeapSet(key=self.key)
            self.heaps[job].add(value)

    def discard(self, value: Any) -> None:
        if value in self._data:
            self._data.discard(value)
            job = self.jobs_of.pop(value)
            self.heaps[job].discard(value)
            if not self.heaps[job]:
                del self.heaps[job]
            self.front = None

    def peek(self) -> Any:
        if not self._data:
            raise KeyError("peek into empty set")
        if self.front is None:
            self.front = next(iter(self.heaps)) if len(self.heaps) == 1 else self.choose(list(self.heaps))
        return self.heaps[self.front].peek()

    def pop(self) -> Any:
        value = self.peek()
        self.discard(value)
        return value

    def peekright(self) -> Any:
        if not self._data:
            raise KeyError("peek into empty set")
        return next(reversed(self.heaps.values())).peekright()

    def popright(self) -> Any:
        value = self.peekright()
        self.discard(value)
        return value

    def sorted(self) -> Iterator[Any]:
        return iter(sorted(self._data, key=self.key))

    def clear(self) -> None:
        self._data.clear()
        self.heaps.clear()
        self.jobs_of.clear()
        self.front = None


def job_of(task: Any) -> tuple[str, float]:
    """The job of a worker's task, and its priority."""
    spec = (getattr(task, "annotations", None) or {}).get(ANNOTATION) or {}
    return spec.get("job", "unnamed"), float(spec.get("priority", 1.0))


def places(scheduler: Scheduler, nthreads: int) -> int | None:
    """So many tasks of each job may a worker have at once, if there is a bound."""
    saturation = scheduler.WORKER_SATURATION
    return None if math.isinf(saturation) else max(math.ceil(saturation * nthreads), 1)


def queue_by_job(plugin: Any, scheduler: Scheduler, undo: ExitStack) -> None:
    """In the scheduler's queue each job has its own places on the workers, and no task of another one takes them."""
    if not wanted("queue-by-job"):
        return
    names = ("stimulus_queue_slots_maybe_opened", "decide_worker_rootish_queuing_enabled", "check_idle_saturated")
    if type(getattr(scheduler, "queued", None)) is not HeapSet or not all(hasattr(scheduler, name) for name in names):
        logger.warning(
            "This version of Dask has no queue as Mission Control knows it: jobs wait for each other's root tasks"
        )
        return
    slots, decide = scheduler.stimulus_queue_slots_maybe_opened, scheduler.decide_worker_rootish_queuing_enabled
    chosen: list[Any] = []

    def job_of_task(task: Any) -> str:
        number = plugin.numbers.get(task.key)
        return (plugin.controller.job_of(number) if number is not None else None) or "unnamed"

    def choose(jobs: list[str]) -> str:
        return min(jobs, key=lambda job: queued.key(queued.heaps[job].peek()))

    def slots_of_each(*, stimulus_id: str) -> None:
        slots(stimulus_id=stimulus_id)
        if not queued or plugin.controller.jobs < 2 or math.isinf(scheduler.WORKER_SATURATION):
            return
        for job in queued.jobs():
            known = ((scheduler.workers.get(address), free) for address, free in plugin.controller.open(job))
            room = {worker: free for worker, free in known if worker in scheduler.running}
            while room and (task := queued.first_of(job)) is not None:
                worker = min(room, key=lambda own: len(own.processing) / own.nthreads)
                chosen.append(worker)
                try:
                    scheduler.transitions({task.key: "processing"}, stimulus_id)
                finally:
                    chosen.clear()
                room[worker] -= 1
                if not room[worker]:
                    del room[worker]
                if task in queued:
                    break  # it may not go there

    queued = ByJob.of(scheduler.queued, job_of_task, choose)
    scheduler.queued = queued
    undo.callback(lambda: setattr(scheduler, "queued", queued.plain()))
    replace(undo, scheduler, names[0], slots_of_each)
    replace(undo, scheduler, names[1], lambda: chosen[-1] if chosen else decide())
