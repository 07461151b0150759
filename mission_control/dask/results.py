"""Examine each task's result in the task's thread: find the references that it carries ([`mission_control.carried`]),
or that it is a delegation ([`mission_control.delegates`]).

The search is skipped if the task put nothing and no reference that it could have received lives in this process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from distributed import Reschedule
from distributed import worker as dask_worker

from mission_control.dask.handing import ended_with, hand_on
from mission_control.dask.seams.seam import ERRORS, Part, Parts, Seam, reason
from mission_control.delegates import Delegation, check_returned

SEAMS = (
    Seam(
        "distributed.worker",
        "_run_task",
        "looks for references in a result, runs the task in its turn, and ends streams",
        ("task", "data", "execution_state", "key"),
    ),
    Seam(
        "distributed.worker", "_run_task_async", "looks for references in the result of a coroutine", ("task", "data")
    ),
)

PLUGINS: dict[int, Any] = {}
"""The plug-ins of the workers of this process, by the identity of the worker."""


def _report_off(name: str, why: str) -> None:
    for plugin in list(PLUGINS.values()):
        _switch_off(plugin, name, why)


def _switch_off(plugin: Any, name: str, why: str) -> None:
    plugin.parts.switch_off(name, why, "results are not searched for references")
    # Nobody would see that a task has delegated, or end its stream.
    plugin.no_delegates = plugin.early.problem = f"an error has switched Mission Control's part {name!r} off: {why}"


# A module has one function for all workers of its process.
PARTS = Parts("this process", lambda call: call(), _report_off)
INSTALLED: list[Part] = []


def watch(worker: Any, plugin: Any) -> None:
    """Let the plug-in of a worker examine each result in its task's thread. Once per process, for all its workers."""
    PLUGINS[id(worker)] = plugin
    for name, why in PARTS.off.items():
        _switch_off(plugin, name, why)
    if INSTALLED:
        return
    part = PARTS.part("results", "objects that results name may be freed late, and tasks cannot delegate")
    INSTALLED.append(part)
    run, run_async = SEAMS
    part.put_in(run, dask_worker, lambda run_task: run_and_look(part, run_task))
    part.replace(run_async, dask_worker, run_and_note)


def unwatch(worker: Any) -> None:
    """Undo :func:`watch` once no other worker of this process has the plug-in."""
    PLUGINS.pop(id(worker), None)
    if not PLUGINS and INSTALLED:
        INSTALLED.pop().undo()


def run_and_look(part: Part, run_task: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dask's function that runs a task, with what is ours around it. It is called for each task."""

    @functools.wraps(run_task)
    def run(task: Any, data: dict, execution_state: dict, key: Any, *rest: Any, **more: Any) -> Any:
        worker = execution_state["worker"]
        plugin = PLUGINS.get(id(worker))
        if plugin is None or part.is_off:
            return run_task(task, data, execution_state, key, *rest, **more)
        number = turns = None
        try:
            number = begun(worker, key, task)
            plugin.thread.run, plugin.thread.delegated = number, None
            turns = plugin.turns
        except ERRORS as error:
            part.fail(error)
        with nullcontext() if turns is None else turns.turn_of(key):
            message = run_task(task, data, execution_state, key, *rest, **more)
        try:
            return is_over(plugin, key, number, message)
        except ERRORS as error:
            part.fail(error)
        return message

    return run


def is_over(plugin: Any, key: Any, run: int | None, message: Any) -> Any:
    """Return Dask's message of a task that is over, or the one that replaces it."""
    error = message.get("actual_exception")
    if plugin.early.is_done:
        plugin.early.ended(error)
    elif message["op"] == "task-finished" and (
        type(message["result"]) is Delegation or plugin.thread.delegated is not None or plugin.objects.are_used()
    ):
        return looked(plugin, key, run, message)
    if type(error) is Reschedule:
        # Dask looks at its type only. Its traceback refers to Dask's frame with this message: a cycle, which would hold
        # what the task had in its variables, parts of streams too, until Python collects garbage.
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return message


async def run_and_note(run_task: Callable[..., Awaitable[Any]], task: Any, data: dict, *rest: Any, **more: Any) -> Any:
    worker = dask_worker.get_worker()
    run = begun(worker, task.key, task)
    message = await run_task(task, data, *rest, **more)
    plugin = PLUGINS.get(id(worker))
    if plugin is not None and message["op"] == "task-finished":
        # Not here: a large result takes time, and this is the worker's event loop.
        return await asyncio.to_thread(looked, plugin, task.key, run, message)
    return message


def begun(worker: Any, key: Any, task: Any) -> int | None:
    """Return the number of the run that begins. If the scheduler revokes a running task and assigns it again, Dask
    lets it continue under another number; its result belongs to this one."""
    state = worker.state.tasks.get(key)
    return state.run_id if state is not None and state.run_spec is task else None


def looked(plugin: Any, key: Any, run: int | None, message: Any) -> Any:
    try:
        return look(plugin, key, run, message)
    except ERRORS as error:
        if type(message["result"]) is not Delegation:
            raise
        # Nobody would run its next step.
        for part in INSTALLED:
            part.fail(error)
        return ended_with(RuntimeError(f"{key} could not delegate: {reason(error)}"), message)


def look(plugin: Any, key: Any, run: int | None, message: Any) -> Any:
    result = message["result"]
    try:
        check_returned(result, getattr(plugin.thread, "delegated", None))
    except RuntimeError as error:
        return ended_with(error, message)
    if type(result) is Delegation:
        return hand_on(plugin, key, run, message)
    plugin.objects.look(key, result)
    return message
