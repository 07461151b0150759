"""Give the free places on workers to queued root tasks by the weight of their jobs.

Dask queues root tasks by priority, and gives one to a worker when that has a free place. While two jobs or more were
named, core chooses the job whose task gets it (`control::jobs`). The number of places stays Dask's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.collections import HeapSet

from mission_control.dask.seams import wanted
from mission_control.dask.seams.by_job import ByJob
from mission_control.dask.seams.seam import CONTENDED, Part, Seam

if TYPE_CHECKING:
    from mission_control.dask.scheduler import MissionControlScheduler

QUEUED = Seam("Scheduler", "queued", "gives free places to root tasks by the weight of their jobs", when=CONTENDED)
UNNAMED = ""
"""Stands for all jobs that nobody has named."""


def queue_by_job(plugin: MissionControlScheduler) -> Part | None:
    """Let jobs share the scheduler's queue until the part is undone."""
    scheduler: Any = plugin.scheduler
    part = plugin.parts.part("queue-by-job", "jobs wait for each other's root tasks")
    if not wanted("queue-by-job") or part.is_off:
        part.undo()
        return None
    if type(getattr(scheduler, "queued", None)) is not HeapSet:
        part.unknown("Scheduler.queued")
        return None

    def job_of(_: Any, task: Any) -> str:
        number = plugin.numbers.get(task.key)
        return (plugin.controller.named_job_of(number) if number is not None else None) or UNNAMED

    def choose(_: Any, jobs: list[str]) -> str:
        return jobs[plugin.controller.next([job or None for job in jobs])]

    queued = ByJob.of(
        scheduler.queued,
        part.guard(job_of, lambda task: UNNAMED),
        part.guard(choose, lambda jobs: jobs[0]),
    )
    scheduler.queued = queued
    part.stack.callback(lambda: setattr(scheduler, "queued", queued.plain()))
    return part
