"""Data that a worker sends belongs to the job of its task."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from dask.utils import key_split
from distributed import Worker
from distributed.comm import CommClosedError

from mission_control.dask.comm import MissionComm, Whose, belongs_to
from mission_control.objects import Task

logger = logging.getLogger(__name__)

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
            # Dask asks again, over a connection whose ends know the newest of each other. After an error in an answer
            # whoever waits for the results would wait for ever (dask/distributed issue 6705).
            logger.warning("%s", why)
            comm.abort()
            raise CommClosedError(why)
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
    all_of = [Whose(task.job, key_split(task.key), "gather", task.demands) for task in tasks]
    inherited = worker.plugins["mission-control"].inherited
    all_of += [own for state in states if (own := inherited.of(state.key)) is not None]
    return max(all_of, key=lambda whose: ENCRYPTIONS.index(whose.demands.get("encrypt", "none")))


class Inherited:
    """Whose results are that came encrypted from other workers. For copies that Dask makes for itself there is no task
    from which they could inherit what their job demands."""

    def __init__(self, worker: Worker):
        self.tasks = worker.state.tasks
        self.whose: dict[Any, tuple[float, Whose]] = {}
        """By key: since when it is known, and whose it is."""
        self.forget_at = INHERITED_MIN

    def add(self, keys: Iterable[Any], whose: Whose) -> None:
        now = time.monotonic()
        if len(self.whose) >= self.forget_at:
            # What has just come is no task yet: Dask gathers all copies of one request before it keeps any.
            self.whose = {
                key: (since, own)
                for key, (since, own) in self.whose.items()
                if key in self.tasks or now - since < UNKEPT_S
            }
            self.forget_at = max(INHERITED_MIN, 2 * len(self.whose))
        self.whose.update(dict.fromkeys(keys, (now, whose)))

    def of(self, key: Any) -> Whose | None:
        _, whose = self.whose.get(key, (0.0, None))
        return whose


INHERITED_MIN = 1000
"""Beyond so many, those are forgotten whose results the worker no longer has."""
UNKEPT_S = 600.0
"""So long results may be on their way to where a worker keeps them."""


ENCRYPTIONS = ("none", "opportunistic", "authenticated")
"""From the least to the most."""
