"""Queue root tasks by job: in the scheduler's queue each job has its own places on every worker.

Core counts the free places (`control::jobs`). This replaces private parts of Dask's scheduler. If they are not as
expected, Dask's own queue stays, with a warning.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import Any

from distributed import Scheduler
from distributed.collections import HeapSet

from mission_control.dask.seams import replace, wanted
from mission_control.dask.seams.by_job import ByJob

logger = logging.getLogger(__name__)


def places(scheduler: Scheduler, nthreads: int) -> int | None:
    """Return how many concurrent tasks of each job a worker may have; ``None``: no bound."""
    saturation = getattr(scheduler, "WORKER_SATURATION", math.inf)
    return None if math.isinf(saturation) else max(math.ceil(saturation * nthreads), 1)


def queue_by_job(plugin: Any, scheduler: Scheduler, undo: ExitStack) -> None:
    """Give each job in the scheduler's queue its own places on the workers, which no other job's tasks take."""
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
            for address in plugin.controller.open(job):
                worker, task = scheduler.workers.get(address), queued.first_of(job)
                if task is None:
                    break
                if worker not in scheduler.running:
                    continue
                chosen.append(worker)
                try:
                    scheduler.transitions({task.key: "processing"}, stimulus_id)
                finally:
                    chosen.clear()
                if task in queued:
                    break  # it may not go there

    queued = ByJob.of(scheduler.queued, job_of_task, choose)
    scheduler.queued = queued
    undo.callback(lambda: setattr(scheduler, "queued", queued.plain()))
    replace(undo, scheduler, names[0], slots_of_each)
    replace(undo, scheduler, names[1], lambda: chosen[-1] if chosen else decide())
