"""Let Dask's scheduler count the objects that results name, when it places tasks and when workers retire."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from mission_control.dask.seams import replace

if TYPE_CHECKING:
    from mission_control.dask.scheduler import MissionControlScheduler

logger = logging.getLogger(__name__)

INPUTS_MAX = 32
"""A task with more inputs than this has to fetch about the same amount anywhere, so a lookup is not worth its cost."""


def count_objects(plugin: MissionControlScheduler, scheduler: Scheduler, undo: ExitStack) -> None:
    """Replace the methods of one scheduler that place tasks and retire workers."""
    for name, parameters, make, without in (
        ("_track_retire_worker", ["ws", "policy"], hand_over, "objects of workers that retire are computed again"),
        ("get_comm_cost", ["ts", "ws"], count_far, "tasks are placed without regard to their objects"),
        ("workers_to_close", [], count_held, "scale-down takes workers without regard to their objects"),
    ):
        original = getattr(scheduler, name, None)
        known = list(inspect.signature(original).parameters) if callable(original) else []
        if original is None or known[: len(parameters)] != parameters:
            logger.warning("This version of Dask has no Scheduler.%s as Mission Control knows it: %s", name, without)
            continue
        replace(undo, scheduler, name, make(plugin, scheduler, original))
        if name in scheduler.handlers:
            scheduler.handlers[name] = getattr(scheduler, name)
            undo.callback(scheduler.handlers.__setitem__, name, original)


class BothDone:
    """Dask's policy of a retiring worker, which is over when its results are elsewhere; here also its objects."""

    def __init__(self, policy: Any, worker: Any, hands_over: Callable[[], bool]):
        self.policy = policy
        self.worker = worker
        self.hands_over = hands_over
        self.again = False

    def done(self) -> bool:
        if not self.policy.done():
            return False
        if self.policy.no_recipients:
            return True
        if self.hands_over():
            return False
        if self.again or all(len(task.who_has or ()) > 1 for task in self.worker.has_what):
            return True
        # Dask's policy ends at the first moment without unique results, but tasks may have ended there since.
        self.again = True
        manager = self.policy.manager
        self.policy = type(self.policy)(self.worker.address)
        manager.add_policy(self.policy)
        manager.run_once()
        return False

    @property
    def no_recipients(self) -> bool:
        return self.policy.no_recipients


def hand_over(plugin: MissionControlScheduler, scheduler: Scheduler, retire: Any) -> Any:
    """Make a retiring worker wait until others have its objects."""

    async def with_objects(ws: Any, policy: Any, *args: Any, **kwargs: Any) -> Any:
        worker = ws.address
        plugin.event("leaving", worker=worker)

        def hands_over() -> bool:
            # If all workers retire, nobody needs their objects.
            return bool(scheduler.running) and plugin.controller.is_handing_over(worker)

        retired = False
        try:
            answer = await retire(ws, BothDone(policy, ws, hands_over), *args, **kwargs)
            retired = answer[1] == "OK"
            return answer
        finally:
            if not retired:
                plugin.event("stays", worker=worker)

    return with_objects


def count_far(plugin: MissionControlScheduler, scheduler: Scheduler, cost: Any) -> Any:
    """Place a task where its objects are: its inputs hold only references."""

    def with_objects(ts: Any, ws: Any) -> float:
        seconds = cost(ts, ws)
        if len(ts.dependencies) > INPUTS_MAX:
            return seconds
        inputs = [plugin.numbers[own.key] for own in ts.dependencies if own.key in plugin.numbers]
        far = plugin.controller.far_bytes(inputs, ws.address) if inputs else 0
        return seconds + far / scheduler.bandwidth

    return with_objects


def count_held(plugin: MissionControlScheduler, scheduler: Scheduler, choose: Any) -> Any:
    """Choose the workers of a scale-down with objects counted: workers that hold little go, and the rest has memory for
    all."""

    def with_objects(*args: Any, **kwargs: Any) -> Any:
        held = {ws: plugin.controller.object_bytes(address) for address, ws in scheduler.workers.items()}
        for ws, nbytes in held.items():
            ws.nbytes += nbytes
        try:
            return choose(*args, **kwargs)
        finally:
            for ws, nbytes in held.items():
                ws.nbytes -= nbytes

    return with_objects
