"""Ask a peer for results of several jobs at once, in one message for each job (docs/explanation/design-dask.md).

Dask requests one message at a time from each peer, with results of any jobs in it. Such a message has no job whose
share it could get, and jobs wait for each other. Here each job has a lane to each peer. `crates/core` chooses the job
of the next message (``lanes``). A result belongs to the job of a task that waits for it.

This replaces private parts of Dask's worker. If they are not as expected, messages stay as they are, with a warning.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from distributed import Worker
from distributed.collections import HeapSet
from distributed.comm import get_address_host
from distributed.worker_state_machine import WorkerState

from mission_control import _native
from mission_control.dask.seams.by_job import ByJob
from mission_control.dask.seams.seam import CONTENDED, ERRORS, Part, Parts, Seam
from mission_control.dask.seams.turns import UNNAMED, job_of
from mission_control.jobs import ANNOTATION

LANES = f"{CONTENDED}, on workers that listen at mission://"
SELECT = Seam(
    "WorkerState", "_select_workers_for_gather", "asks a peer for each job's results in a message", when=LANES
)
NEEDED = Seam("WorkerState", "data_needed", "keeps the results to ask for by job", when=LANES)
IN_FLIGHT = Seam("WorkerState", "in_flight_workers", "lets several messages of a peer be under way", when=LANES)

USED = {"_ensure_communicating", "_select_workers_for_gather", "_select_keys_for_gather", "_gather_dep_done_common"}
HELD = {"data_needed": defaultdict, "in_flight_workers": dict, "busy_workers": set}
"""Methods and attributes of Dask's worker that this relies on."""


Place = tuple[str, str, int]
"""The address of a peer, a job, and the number of a message in this lane."""


class Lane(str):
    """The address of a peer, with the job of a message and its number. It equals the address alone."""

    __slots__ = ("job", "number")
    job: str
    number: int

    @classmethod
    def to(cls, peer: str, job: str, number: int = 0) -> Lane:
        own = cls(peer)
        own.job, own.number = job, number
        return own


class InFlight(dict[Any, Any]):
    """The keys of each message that is under way. Dask looks them up by :class:`Lane`.

    An address alone means a message that Dask requested by itself, before this was installed or after.
    """

    def __init__(self, state: WorkerState, native: _native.Lanes, part: Part):
        super().__init__()
        self.state, self.native = state, native
        self.part = part
        self.closing = False

    def __contains__(self, peer: object) -> bool:
        """Whether a message is under way; for an address alone, any message from there."""
        return super().__contains__(place_of(peer)) if isinstance(peer, Lane) else any(own == peer for own, *_ in self)

    def __getitem__(self, peer: str) -> Any:
        return super().__getitem__(place_of(peer))

    def __setitem__(self, peer: str, keys: Any) -> None:
        try:
            tasks = [self.state.tasks[key] for key in keys]
            for task in tasks:
                belongs_to_its_consumer(task)
            self.native.begins(*place_of(peer), sum(task.get_nbytes() for task in tasks))
        except ERRORS as error:
            self.part.fail(error)
        super().__setitem__(place_of(peer), keys)

    def pop(self, peer: str) -> Any:  # type: ignore[override]
        keys = super().pop(place_of(peer))
        try:
            self.native.ends(*place_of(peer))
        except ERRORS as error:
            self.part.fail(error)
        if self.closing and not self:
            self.state.in_flight_workers = {}
        return keys


def place_of(peer: str) -> Place:
    return (str(peer), peer.job, peer.number) if isinstance(peer, Lane) else (str(peer), UNNAMED[0], 0)


class Lanes:
    """The lanes of one Dask worker."""

    def __init__(self, worker: Worker, endpoint: _native.Endpoint, parts: Parts):
        self.worker = worker
        self.endpoint = endpoint
        self.native = _native.Lanes()
        self.part = parts.part("lanes", "messages between workers mix results of several jobs")

    def weigh(self) -> None:
        """Use the current weights of jobs."""
        try:
            if not self.part.is_off:
                self.native.weigh(self.endpoint.weights())
        except ERRORS as error:
            self.part.fail(error)

    def start(self) -> bool:
        """Take over the worker's requests to its peers. Return False if Dask is not as expected, or an error was ours
        before."""
        if self.part.is_off:
            return False
        state = self.worker.state
        factory: Any = getattr(getattr(state, "data_needed", None), "default_factory", None)
        known = (
            isinstance(state, WorkerState)
            and set(dir(WorkerState)) >= USED
            # Messages of an earlier contention may still be under way.
            and all(type(getattr(state, name, None)) in (kind, InFlight) for name, kind in HELD.items())
            and isinstance(factory, partial)
            and type(factory()) is HeapSet
            and factory.keywords.keys() == {"key"}
        )
        if not known:
            self.part.unknown("requests of a worker for results")
            return False
        self._replace(state, factory.keywords["key"])
        return not self.part.is_off

    def _replace(self, state: Any, key: Any) -> None:

        def select(original: Callable[[], Iterator[tuple[str, HeapSet]]]) -> Iterator[tuple[str, HeapSet]]:
            """Request the results of each job in separate messages."""
            try:
                yield from self.free(state)
                return
            except ERRORS as error:
                self.part.fail(error)
            yield from original()

        if not self.part.replace(SELECT, state, select):
            return
        factory = state.data_needed.default_factory
        choose = lambda jobs: jobs[0]  # noqa: E731
        consumer_of = self.part.guard(lambda _, task: consumer(task), lambda task: UNNAMED[0])
        in_flight = InFlight(state, self.native, self.part)
        for peer, keys in state.in_flight_workers.items():
            in_flight[Lane.to(*peer) if isinstance(peer, tuple) else peer] = keys
        needed: defaultdict[str, ByJob] = defaultdict(partial(ByJob, key=key, job_of=consumer_of, choose=choose))
        for peer, tasks in state.data_needed.items():
            needed[peer] = ByJob.of(tasks, consumer_of, choose)
        state.in_flight_workers, state.data_needed = in_flight, needed

        def restore() -> None:
            state.data_needed = defaultdict(factory, {peer: own.plain() for peer, own in state.data_needed.items()})
            # Several messages of one peer may be under way.
            in_flight.closing = True
            if not in_flight:
                state.in_flight_workers = {}

        self.part.stack.callback(restore)

    def free(self, state: Any) -> Iterator[tuple[Lane, HeapSet]]:
        """Yield lanes in which a message may begin, with the tasks whose results wait there: the next lane first.

        `crates/core` chooses the job. Within a job the order is Dask's: by the priority of the first task, near peers
        before others, then by the number of tasks, then random. The caller removes tasks, and adds the requested ones
        to `in_flight_workers`.
        """
        here = get_address_host(state.address)

        def ranked(lane: Lane, tasks: HeapSet) -> tuple[Any, ...]:
            is_far = get_address_host(str(lane)) != here
            return tasks.peek().priority, is_far, -len(tasks), state.rng.random(), lane, tasks

        by_job: dict[str, list[Any]] = {}
        for peer, all_tasks in list(state.data_needed.items()):
            if not all_tasks:
                del state.data_needed[peer]
            elif peer not in state.busy_workers:
                for job, tasks in all_tasks.heaps.items():
                    if (number := self.native.free(peer, job)) is not None:
                        by_job.setdefault(job, []).append(ranked(Lane.to(peer, job, number), tasks))
        for heap in by_job.values():
            heapq.heapify(heap)
        while by_job:
            job = self.next(by_job)
            heap = by_job[job]
            _, _, count, _, lane, tasks = heapq.heappop(heap)
            # If several peers have a result, it may have been requested meanwhile.
            if tasks and -count != len(tasks):
                heapq.heappush(heap, ranked(lane, tasks))
                continue
            if not heap:
                del by_job[job]
            if tasks:
                yield lane, tasks

    def next(self, by_job: dict[str, list[Any]]) -> str:
        """Choose a job, given the lanes of each as a heap."""
        if len(by_job) == 1:
            return next(iter(by_job))
        first = [(job, tasks.peek() if (tasks := heap[0][-1]) else None) for job, heap in by_job.items()]
        # Jobs are in the order of their first tasks: the first of equals is chosen.
        first.sort(key=lambda own: () if own[1] is None else own[1].priority)
        return self.native.next([(job, priority_of(task)) for job, task in first]) or first[0][0]

    def close(self) -> None:
        self.part.undo()


def consumer(task: Any) -> str:
    """Return the job of a result to request: that of a task that waits for it."""
    return job_of(waiting(task))[0]


def belongs_to_its_consumer(task: Any) -> None:
    """Assign a result that was not computed here to the job of a task that waits for it.

    Dask sends annotations only to the worker that computes a task. Without them a worker that forwards the result would
    not know that its job demands encryption.
    """
    consumer = waiting(task)
    annotations = consumer.annotations if consumer is not None else None
    if task.annotations is None and isinstance(annotations, dict) and ANNOTATION in annotations:
        task.annotations = {ANNOTATION: annotations[ANNOTATION]}


def priority_of(task: Any) -> float:
    """The priority of that job."""
    return job_of(waiting(task))[1]


def waiting(task: Any) -> Any:
    """Return a task that waits for this one's result; ``None`` if the result is only copied."""
    return next(iter(task.waiters or task.dependents), None) if task is not None else None
