"""Data that a worker sends belongs to the job of its task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from dask.utils import key_split
from distributed import Worker

from mission_control.dask.comm import MissionComm, Whose, belongs_to
from mission_control.objects import Task

SENT = "get_data"
"""The request by which one worker has another send results."""


def name_transfers(worker: Worker) -> Callable[[], None]:
    """Have each answer to a request for results belong to the job of the first.

    Returns:
        What undoes it.
    """
    handler = worker.handlers[SENT]

    # Dask looks at the parameters of the original.
    @functools.wraps(handler)
    async def with_its_job(comm: Any, keys: Collection[Any], **named: Any) -> Any:
        whose = transfer_of(worker, keys)
        # A worker says who it is; clients and schedulers do not.
        if isinstance(comm, MissionComm) and named.get("who") is not None and (why := comm.refuses(whose)) is not None:
            # An answer, which the task that waits for them raises: another try would end in the same way.
            raise PermissionError(why)
        with belongs_to(whose):
            return await handler(comm, keys=keys, **named)

    worker.handlers[SENT] = with_its_job

    def undo() -> None:
        if worker.handlers.get(SENT) is with_its_job:
            worker.handlers[SENT] = handler

    return undo


def transfer_of(worker: Worker, keys: Collection[Any]) -> Whose:
    """Return whose these results are: the first one's; or one's that demands encryption, and all are encrypted."""
    states = [state for key in keys if (state := worker.state.tasks.get(key)) is not None]
    tasks = [Task(state.key, state.annotations) for state in states] or [Task("message", None)]
    strict = max(tasks, key=lambda task: ENCRYPTIONS.index(task.demands.get("encrypt", "none")))
    return Whose(strict.job, key_split(strict.key), "gather", strict.demands)


ENCRYPTIONS = ("none", "opportunistic", "authenticated")
"""From the least to the most."""
