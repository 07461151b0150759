"""Attribute data that a worker sends to the job of its task."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from dask.utils import key_split
from distributed import Worker
from distributed.comm import CommClosedError

from mission_control.dask.comm import MissionComm, Whose, belongs_to
from mission_control.dask.seams.seam import ERRORS, Parts, Seam
from mission_control.objects import Task

logger = logging.getLogger(__name__)

SENT = Seam(
    "Worker.handlers",
    "get_data",
    "names the job of results that another worker asks for, and refuses a connection without the encryption it demands",
    ("comm", "keys"),
    deliberate=(CommClosedError,),
    when="on workers that listen at mission://",
)


def name_transfers(worker: Worker, parts: Parts) -> None:
    """Attribute each answer to a request for results to the job of the first result."""

    async def answer(handler: Callable[..., Any], comm: Any, keys: Collection[Any], whose: Whose, **named: Any) -> Any:
        # Workers name themselves in the request; clients and schedulers do not.
        if isinstance(comm, MissionComm) and named.get("who") is not None and (why := comm.refuses(whose)) is not None:
            # Dask requests again, over a connection with a new handshake. After an error in an answer, tasks that wait
            # for the results would wait for ever (dask/distributed issue 6705).
            logger.warning("%s", why)
            comm.abort()
            raise CommClosedError(why)
        with belongs_to(whose):
            return await handler(comm, keys=keys, **named)

    async def with_demands(handler: Callable[..., Any], comm: Any, keys: Collection[Any], **named: Any) -> Any:
        if "messages" not in parts.off:
            return await handler(comm, keys=keys, **named)
        return await answer(handler, comm, keys, demanded(worker, keys), **named)

    async def with_its_job(handler: Callable[..., Any], comm: Any, keys: Collection[Any], **named: Any) -> Any:
        try:
            whose = transfer_of(worker, keys)
        except ERRORS as error:
            part.fail(error)
            # Below it the demands are looked at.
            return await handler(comm, keys=keys, **named)
        return await answer(handler, comm, keys, whose, **named)

    # Below the other: a demand holds also where that is off.
    demands = parts.part("demands", "results that must be encrypted may leave over plain connections")
    demands.replace(SENT, worker.handlers, with_demands)
    part = parts.part("messages", "messages between workers have no job, whose share and demands they would have")
    part.replace(SENT, worker.handlers, with_its_job)


def demanded(worker: Worker, keys: Collection[Any]) -> Whose:
    """Return a transfer with the highest demand that the annotations of these results have."""
    tasks = [Task(state.key, state.annotations) for key in keys if (state := worker.state.tasks.get(key)) is not None]
    strictest = max(tasks, key=encryption_of, default=Task("message", None))
    return Whose(strictest.job, "message", "gather", strictest.demands)


def encryption_of(task: Task) -> int:
    return ENCRYPTIONS.index(task.demands.get("encrypt", "none"))


def transfer_of(worker: Worker, keys: Collection[Any]) -> Whose:
    """Return the transfer of these results: the first one's; or one that demands encryption, so all are encrypted."""
    states = [state for key in keys if (state := worker.state.tasks.get(key)) is not None]
    tasks = [Task(state.key, state.annotations) for state in states] or [Task("message", None)]
    all_of = [Whose(task.job, key_split(task.key), "gather", task.demands) for task in tasks]
    inherited = worker.plugins["mission-control"].inherited
    all_of += [own for state in states if (own := inherited.of(state.key)) is not None]
    return max(all_of, key=lambda whose: ENCRYPTIONS.index(whose.demands.get("encrypt", "none")))


class Inherited:
    """Transfers of results that arrived encrypted from other workers. A copy that Dask makes for itself has no task
    from which it could inherit its job's demands."""

    def __init__(self, worker: Worker):
        self.tasks = worker.state.tasks
        self.whose: dict[Any, tuple[float, Whose]] = {}
        """By key: since when the result is known, and its transfer."""
        self.forget_at = INHERITED_MIN

    def add(self, keys: Iterable[Any], whose: Whose) -> None:
        now = time.monotonic()
        if len(self.whose) >= self.forget_at:
            # A result that has just arrived is no task yet: Dask gathers all copies of one request before it keeps any.
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
"""Beyond this number, entries are dropped whose results the worker no longer has."""
UNKEPT_S = 600.0
"""Seconds in which a result may be received but not stored yet."""


ENCRYPTIONS = ("none", "opportunistic", "authenticated")
"""Levels of encryption, from the lowest to the highest."""
