"""A task that has delegated its result runs its next step under its own key.

Dask's scheduler runs a task's ``run_spec`` once its ``dependencies`` are available. Mission Control replaces both after
the scheduler has revoked the task from its worker, and before it checks what the task waits for. At the end of the
chain the task is restored as its client submitted it, so a lost result is recomputed from the first step.

Meanwhile the task's first inputs have no dependents, and Dask would forget them. So a task that never runs, the
*keeper*, depends on them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dask._task_spec import Task, TaskRef
from distributed.scheduler import Scheduler, TaskState

from mission_control import _native
from mission_control.dask.seams.seam import ERRORS, Seam
from mission_control.delegates import run_step

if TYPE_CHECKING:
    from mission_control.dask.scheduler import MissionControlScheduler

logger = logging.getLogger(__name__)

STEPS = [
    Seam(
        "TaskState",
        name,
        "is that of a task's next step",
        when="between a task's delegation and the end of its last step",
    )
    for name in ("run_spec", "dependencies")
]
LOOK_S, LOOKS = 0.01, 1000
"""A task's client submits through a separate connection, so a future may be unknown at first: 1000 checks, each after
10 ms in which the scheduler handles messages."""
WAITING = ("waiting", "queued", "no-worker")
CLOSED = "Mission Control is being uninstalled"
KEEPERS = "mission-control-keepers"
"""A client, as for Dask's queues and variables: it wants the keepers, so that a restart of the cluster forgets them."""
NAMES = (
    "dependencies",
    "dependents",
    "exception_blame",
    "has_lost_dependencies",
    "run_id",
    "run_spec",
    "suspicious",
    "waiters",
    "who_wants",
)
"""Fields of Dask's record of a task that this module reads or changes."""


def unlike(scheduler: Scheduler) -> str | None:
    """Return which parts of this version of Dask are not as Mission Control expects."""
    slots = getattr(TaskState, "__slots__", ())
    missing = [name for name in NAMES if name not in slots]
    parameters = list(inspect.signature(scheduler.new_task).parameters) if hasattr(scheduler, "new_task") else []
    if missing or parameters[:3] != ["key", "spec", "state"]:
        return f"TaskState.{missing[0]}" if missing else "Scheduler.new_task"
    return None


class First(NamedTuple):
    """A task as it was submitted."""

    task: TaskState
    run_spec: Any
    inputs: tuple[Any, ...]
    """Keys."""
    kept: tuple[Any, ...]
    """Keys that our client wants: the keeper of the inputs, and inputs that cannot be recomputed."""


class Next(NamedTuple):
    """The next step of a task."""

    run: int
    """The run of the task that delegated to it."""
    run_spec: Any
    inputs: tuple[Any, ...]
    """Keys."""
    again: bool = False
    """Whether it is the first step."""


class Delegates:
    """The tasks of one scheduler that have delegated their results."""

    def __init__(self, plugin: MissionControlScheduler, scheduler: Scheduler):
        self.plugin, self.scheduler = plugin, scheduler
        other = unlike(scheduler)
        self.problem = f"this version of Dask has no {other} as Mission Control knows it" if other is not None else None
        """Why tasks cannot delegate, if they cannot."""
        if self.problem is not None:
            logger.warning("Tasks cannot delegate: %s", self.problem)
        self.first: dict[Any, First] = {}
        """By key, while a step is planned or runs."""
        self.next: dict[Any, Next] = {}
        """By key, between a worker's message and the end of that run."""
        self.awaited: dict[Any, list[Any]] = {}
        """By key: inputs that may not be forgotten until the task waits for them."""
        self.closed = False
        self.used = False
        """Whether a task has delegated, so that workers get tasks with other inputs than before."""

    # --- events from workers ----------------------------------------------------------------------------------------

    async def on_await(self, key: Any, run: int, inputs: Sequence[Any]) -> dict[str, Any]:
        """Keep the inputs of a step until the task waits for them.

        The worker requests this before it sends `delegate`, because the inputs were submitted through another
        connection.

        Returns:
            ``why`` the task cannot wait for them; or the ``exception`` and ``traceback`` of a failed input; or nothing.
        """
        self.plugin.use_objects()
        tasks = self.scheduler.tasks
        looks = 0
        while missing := [own for own in inputs if own not in tasks or _is_unspecified(tasks[own])]:
            looks += 1
            # Counts checks instead of time: a scheduler that was blocked has not received messages meanwhile.
            if looks > LOOKS:
                unknown = _some(missing)
                return {
                    "why": f"the scheduler does not know {unknown}: submit it to this cluster, and do not cancel it"
                }
            await asyncio.sleep(LOOK_S)
        if self.closed:
            return {"why": CLOSED}
        # The books may have been closed meanwhile.
        self.plugin.use_objects()
        if (task := self._running(key, run)) is None:
            return {}  # `delegate` will find the same: the scheduler does not wait for this run
        if (cycle := self._waits_for(task, [tasks[own] for own in inputs])) is not None:
            return {"why": f"it would wait for itself: {cycle.key} is among its inputs, and depends on {key}"}
        if (failed := _failed(tasks[own] for own in inputs)) is not None and failed.exception_blame is not None:
            blamed = failed.exception_blame
            return {"exception": blamed.exception, "traceback": blamed.traceback}
        self._await_no_more(key)
        self.awaited[key] = list(inputs)
        self.scheduler.client_desires_keys(keys=list(inputs), client=_client_of(key))
        return {}

    def on_delegate(self, worker: str, key: Any, run: int, call: bytes, inputs: list[Any], objects: list[Any]) -> None:
        """A task has delegated its result; its worker releases it with the next message."""
        task, plugin = self._running(key, run), self.plugin
        plugin.use_objects()
        if not self.used:
            self.used = True
            self.tell_of_steps(list(self.scheduler.workers))
        number = plugin.number_of(key)
        if task is None or number is None:
            # Another worker runs the task, or nobody wants it, so these objects must not be kept.
            plugin.carry_out(plugin.controller.delegates(plugin.now(), next(plugin.next_number), [], objects, False))
            return
        try:
            if self.closed:
                raise RuntimeError(CLOSED)
            numbers = [plugin.numbers[own] for own in inputs if own in plugin.numbers]
            plugin.carry_out(plugin.controller.delegates(plugin.now(), number, numbers, objects, True))
            if key not in self.first:
                self.first[key] = self._first(task, number)
            step = Task(key, run_step, call, inputs, objects, *map(TaskRef, inputs))
            self.next[key] = Next(run, step, tuple(inputs))
            # An object may have been lost with its worker meanwhile.
            self._begin_again(key, task)
        except ERRORS as error:
            # Otherwise the task would run the same step again.
            logger.exception("%s could not delegate", key)
            self.next[key] = Next(run, Task(key, _fail, f"{key} could not delegate: {error}"), ())

    def tell_of_steps(self, workers: Sequence[str]) -> None:
        """Tell these workers that tasks may come again with other inputs: ahead of the first step, in the same ordered
        streams. A worker without the plug-in would close itself at an unknown message."""
        joined = self.plugin.joined_workers()
        for worker in workers:
            stream = self.scheduler.stream_comms.get(worker)
            if worker in joined and stream is not None and not stream.closed():
                stream.send({"op": "mission-control-steps"})

    def on_step_lost(self, worker: str, key: Any, run: int) -> None:
        """A running step names a lost object; its worker releases the task with the next message."""
        if (task := self._running(key, run)) is not None:
            self._begin_again(key, task)

    def begin_again(self, key: Any) -> None:
        """A step needs a lost object. If a worker runs the step already, that worker may have the object, or reports
        its loss."""
        task = self.scheduler.tasks.get(key)
        if task is not None and task.state in WAITING and self._begin_again(key, task):
            self._transitions({key: "released"})

    def _begin_again(self, key: Any, task: TaskState) -> bool:
        """Restart a task from its first step once the scheduler has it back."""
        first, number = self.first.get(key), self.plugin.numbers.get(key)
        if first is None or first.task is not task or number is None:
            return False
        may = self.plugin.controller.lost_step(number)
        if may is None:
            return False
        if may:
            self.next[key] = Next(task.run_id, first.run_spec, first.inputs, again=True)
        else:
            times = _native.BEGINS_AGAIN_MAX
            why = f"{key} restarted {times} times, and its next step still needs a lost object"
            self.next[key] = Next(task.run_id, Task(key, _lose, why), ())
        return True

    # --- events of the scheduler ------------------------------------------------------------------------------------

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Called after each transition of a task, before those that follow from it."""
        if key in self.next:
            step, task = self.next.pop(key), self.scheduler.tasks.get(key)
            if finish == "released" and task is not None and task.run_id == step.run:
                self._exchange(task, step)
        if start == "processing" and key in self.awaited:
            # Released once the task waits for them.
            self.plugin.soon(lambda: self._await_no_more(key))
        if key in self.first and finish in ("memory", "erred", "released", "forgotten"):
            self.plugin.soon(lambda: self._end(key))

    def _exchange(self, task: TaskState, step: Next) -> None:
        """The task is on no worker, and waits for nothing yet."""
        known = self.scheduler.tasks
        inputs = {known[own] for own in step.inputs if own in known}
        if len(inputs) < len(set(step.inputs)):
            # An input was cancelled by force meanwhile; so is the task.
            task.has_lost_dependencies = True
        run_spec = step.run_spec
        if (failed := _failed(inputs)) is not None:
            # The input failed since the check. Dask lets no task wait for a failed one.
            why = f"{failed.key} failed, so its result cannot be an argument"
            run_spec, inputs = Task(task.key, _fail, why), set()
        before = set(task.dependencies) - inputs
        _depend(task, inputs)
        task.run_spec = run_spec
        number = self.plugin.numbers.get(task.key)
        if step.again and number is not None:
            self.plugin.carry_out(self.plugin.controller.delegate_ends(self.plugin.now(), number, True))
        elif number is not None and self.plugin.controller.is_furthest(number):
            # Each step may lose as many workers as a task may.
            task.suspicious = 0
        # Released once the scheduler has checked what the task waits for.
        self.plugin.soon(lambda: self._let_go(before))

    def _end(self, key: Any) -> None:
        """The last step is over, for whatever reason: restore the task as its client submitted it."""
        first, task = self.first.get(key), self.scheduler.tasks.get(key)
        if first is None or (task is first.task and not _is_over(task)):
            return
        del self.first[key]
        self.next.pop(key, None)
        if task is first.task:
            before = set(task.dependencies)
            known = self.scheduler.tasks
            inputs = {known[own] for own in first.inputs if own in known}
            # The first step's inputs may be gone permanently.
            task.has_lost_dependencies |= len(inputs) < len(set(first.inputs))
            task.run_spec = first.run_spec
            _depend(task, inputs)
            self._let_go(before - inputs)
        self._release(KEEPERS, list(first.kept))
        if task is first.task and (number := self.plugin.numbers.get(key)) is not None:
            self.plugin.carry_out(self.plugin.controller.delegate_ends(self.plugin.now(), number, False))

    def close(self) -> None:
        """Leave all tasks to Dask. A chain that has begun meanwhile is not changed, and fails with its next step."""
        self.closed = True
        for key in list(self.first):
            self._end(key)
        for first in self.first.values():
            self._release(KEEPERS, list(first.kept))
        self.first.clear()
        self.next.clear()
        for key in list(self.awaited):
            self._await_no_more(key)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _running(self, key: Any, run: int) -> TaskState | None:
        """Return the task if the scheduler waits for this run of it."""
        task = self.scheduler.tasks.get(key)
        return task if task is not None and task.state == "processing" and task.run_id == run else None

    def _first(self, task: TaskState, number: int) -> First:
        inputs = tuple(own.key for own in task.dependencies)
        if not inputs:
            return First(task, task.run_spec, inputs, ())
        key = (KEEPERS, number)
        keeper = self.scheduler.new_task(key, Task(key, _nothing), "released")
        keeper.priority = task.priority
        for own in task.dependencies:
            keeper.add_dependency(own)
        kept = (key, *(own.key for own in task.dependencies if own.run_spec is None))
        self.scheduler.client_desires_keys(keys=list(kept), client=KEEPERS)
        return First(task, task.run_spec, inputs, kept)

    def _await_no_more(self, key: Any) -> None:
        if (inputs := self.awaited.pop(key, None)) is not None:
            self._release(_client_of(key), inputs)

    def _release(self, client: str, keys: list[Any]) -> None:
        if (own := self.scheduler.clients.get(client)) is None:
            return
        self.scheduler.client_releases_keys(keys=keys, client=client)
        if not own.wants_what:
            self.scheduler.clients.pop(client, None)

    def _waits_for(self, task: TaskState, inputs: Iterable[TaskState]) -> TaskState | None:
        """Return the input that waits for a task, directly or indirectly, or is going to."""
        tasks = self.scheduler.tasks
        seen: set[TaskState] = set()
        for start in inputs:
            pending = [start]
            while pending:
                own = pending.pop()
                if own is task:
                    return start
                if own in seen or own.state == "memory":
                    continue
                seen.add(own)
                pending += own.dependencies
                pending += [tasks[key] for key in self.awaited.get(own.key, ()) if key in tasks]
        return None

    def _let_go(self, tasks: Iterable[TaskState]) -> None:
        """Handle tasks that have lost a dependent, as when a client has released them."""
        wanted: dict[Any, str] = {}
        for task in tasks:
            if task.who_wants or self.scheduler.tasks.get(task.key) is not task:
                continue
            if not task.dependents:
                wanted[task.key] = "forgotten"
            elif not task.waiters and task.state not in ("released", "erred"):
                wanted[task.key] = "released"
        if wanted:
            self._transitions(wanted)

    def _transitions(self, wanted: dict[Any, Any]) -> None:
        self.scheduler.transitions(wanted, stimulus_id=f"mission-control-delegate-{time.time()}")


def _depend(task: TaskState, inputs: set[TaskState]) -> None:
    """Make a task that waits for nothing depend only on these tasks."""
    for own in set(task.dependencies) - inputs:
        task.dependencies.discard(own)
        own.dependents.discard(task)
        if own.waiters:
            own.waiters.discard(task)
    for own in inputs - set(task.dependencies):
        task.add_dependency(own)


def _is_over(task: TaskState) -> bool:
    """Whether a task does not run any more, and nobody waits for it to run again."""
    if task.state == "erred":
        # A failed input stays an input: it has the error, and may be retried.
        return task.exception_blame is task
    return task.state == "memory" or (task.state == "released" and not task.who_wants and not task.waiters)


def _failed(inputs: Iterable[TaskState]) -> TaskState | None:
    return next((own for own in inputs if own.state == "erred"), None)


def _fail(why: str) -> None:
    """Raise the error of a step that cannot run; the task runs this instead."""
    raise RuntimeError(why)


def _lose(why: str) -> None:
    raise _native.Lost(why)


def _is_unspecified(task: TaskState) -> bool:
    """Whether a task is wanted that its client has not submitted yet."""
    return task.run_spec is None and task.state == "released"


def _nothing() -> None:
    """Run a keeper: Dask does that only if a failed input of it is retried."""


def _client_of(key: Any) -> str:
    return f"mission-control-delegate-{key}"


def _some(keys: list[Any]) -> str:
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{keys[0]}{more}"
