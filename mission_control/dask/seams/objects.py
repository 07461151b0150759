"""Let Dask's scheduler count the objects that results name, when it places tasks and when workers retire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from mission_control.dask.seams.seam import Part, Seam

if TYPE_CHECKING:
    from mission_control.dask.scheduler import MissionControlScheduler

INPUTS_MAX = 32
"""A task with more inputs than this has to fetch about the same amount anywhere, so a lookup is not worth its cost."""

OBJECTS = "from the first object that a task puts until nothing of ours is used"
RETIRE = Seam(
    "Scheduler", "_track_retire_worker", "waits until others have the worker's objects", ("ws", "policy"), when=OBJECTS
)
COST = Seam("Scheduler", "get_comm_cost", "adds the objects that a task's inputs name", ("ts", "ws"), when=OBJECTS)
CLOSE = Seam("Scheduler", "workers_to_close", "counts objects as memory of their worker", (), when=OBJECTS)


def count_objects(plugin: MissionControlScheduler, scheduler: Scheduler) -> list[Part]:
    """Replace the methods of one scheduler that place tasks and retire workers."""
    parts = []
    for seam, make, name, without in (
        (RETIRE, hand_over, "retirement", "objects of workers that retire are computed again"),
        (COST, count_far, "placement", "tasks are placed without regard to their objects"),
        (CLOSE, count_held, "scale-down", "scale-down takes workers without regard to their objects"),
    ):
        part = plugin.parts.part(name, without)
        if part.replace(seam, scheduler, make(plugin, scheduler, part)) and seam.name in scheduler.handlers:
            original = scheduler.handlers[seam.name]
            scheduler.handlers[seam.name] = getattr(scheduler, seam.name)
            part.stack.callback(scheduler.handlers.__setitem__, seam.name, original)
        parts.append(part)
    return parts


class BothDone:
    """Dask's policy of a retiring worker, which is over when its results are elsewhere; here also its objects. Where no
    object of ours has been, Dask's own rule holds."""

    def __init__(self, policy: Any, worker: Any, holds: Callable[[], bool], hands_over: Callable[[], bool]):
        self.policy = policy
        self.worker = worker
        self.holds = holds
        self.hands_over = hands_over
        self.has_held = False
        self.again = False

    def done(self) -> bool:
        if not self.policy.done():
            return False
        self.has_held = self.has_held or self.holds()
        if self.policy.no_recipients or not self.has_held:
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


def hand_over(plugin: MissionControlScheduler, scheduler: Scheduler, part: Part) -> Any:
    """Make a retiring worker wait until others have its objects."""

    async def with_objects(retire: Any, ws: Any, policy: Any, *args: Any, **kwargs: Any) -> Any:
        worker = ws.address
        plugin.event("leaving", worker=worker)

        def holds() -> bool:
            return plugin.controller.object_bytes(worker) > 0

        def hands_over() -> bool:
            # If all workers retire, nobody needs their objects.
            return bool(scheduler.running) and plugin.controller.is_handing_over(worker)

        both = BothDone(policy, ws, holds, hands_over)
        # Dask calls it in the middle of its own method.
        both.done = part.guard(lambda _, done=both.done: done(), lambda: both.policy.done())  # type: ignore[method-assign]
        retired = False
        try:
            answer = await retire(ws, both, *args, **kwargs)
            retired = answer[1] == "OK"
            return answer
        finally:
            if not retired:
                plugin.event("stays", worker=worker)

    return with_objects


def count_far(plugin: MissionControlScheduler, scheduler: Scheduler, part: Part) -> Any:
    """Place a task where its objects are: its inputs hold only references."""

    def with_objects(cost: Any, ts: Any, ws: Any) -> float:
        seconds = cost(ts, ws)
        if len(ts.dependencies) > INPUTS_MAX:
            return seconds
        inputs = [plugin.numbers[own.key] for own in ts.dependencies if own.key in plugin.numbers]
        far = plugin.controller.far_bytes(inputs, ws.address) if inputs else 0
        return seconds + far / scheduler.bandwidth

    return with_objects


def count_held(plugin: MissionControlScheduler, scheduler: Scheduler, part: Part) -> Any:
    """Choose the workers of a scale-down with objects counted: workers that hold little go, and the rest has memory for
    all."""

    def with_objects(choose: Any, *args: Any, **kwargs: Any) -> Any:
        held = {ws: plugin.controller.object_bytes(address) for address, ws in scheduler.workers.items()}
        for ws, nbytes in held.items():
            ws.nbytes += nbytes
        try:
            return choose(*args, **kwargs)
        finally:
            for ws, nbytes in held.items():
                ws.nbytes -= nbytes

    return with_objects
