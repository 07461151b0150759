"""Which references a task's result carries: found in the task's own thread, by pickling the result into nothing.

What Dask would send of a result is what counts, wherever in it a reference hides: in object arrays, in pandas columns,
in classes that nobody here knows. Buffers are not copied for that (pickle protocol 5, out of band). Nothing is looked
for where the task put nothing and no reference that it could have met lives in this process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from distributed import worker as dask_worker

from mission_control.objects import Reference, references_in

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, memoryview)
"""Types whose values carry nothing."""


class _Nothing:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Finder(cloudpickle.Pickler):
    """Notes every reference that it meets."""

    def __init__(self) -> None:
        super().__init__(_Nothing(), protocol=5, buffer_callback=lambda buffer: None)
        self.found: dict[str, Reference] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Reference):
            self.found[obj.object] = obj
            return str, ("",)
        return super().reducer_override(obj)


def carried_by(value: Any) -> set[Reference]:
    """Find the references that a result carries.

    Args:
        value: The result of a task.

    Returns:
        One reference for each object.
    """
    if isinstance(value, PLAIN):
        return set()
    if isinstance(value, Reference):
        return {value}
    finder = _Finder()
    try:
        finder.dump(value)
    except Exception:
        # It cannot be sent, so it stays here: what it holds is what was met, and what the garbage collector sees.
        return {*finder.found.values(), *references_in(value)}
    return set(finder.found.values())


def watch(name: str) -> None:
    """Have the plug-in `name` of a worker look at each result where it was made. Once per process, for all its workers.

    Args:
        name: Of the worker plug-in; it has a method ``remember_carried(key, value)``.
    """
    run_task: Callable[..., Any] = dask_worker._run_task
    run_task_async: Callable[..., Awaitable[Any]] = dask_worker._run_task_async
    if getattr(run_task, "_mission_control", False):
        return

    @functools.wraps(run_task)
    def run_and_look(task: Any, data: dict, execution_state: dict, key: Any, *rest: Any, **more: Any) -> Any:
        plugin = execution_state["worker"].plugins.get(name)
        turns = plugin.turns if plugin is not None else None
        with turns.turn(key) if turns is not None else nullcontext():
            message = run_task(task, data, execution_state, key, *rest, **more)
            if plugin is not None and message["op"] == "task-finished":
                plugin.remember_carried(key, message["result"])
            return message

    @functools.wraps(run_task_async)
    async def run_and_note(task: Any, data: dict, *rest: Any, **more: Any) -> Any:
        message = await run_task_async(task, data, *rest, **more)
        plugin = dask_worker.get_worker().plugins.get(name)
        if plugin is not None and message["op"] == "task-finished":
            # A large result takes a while, and this is the worker's event loop.
            await asyncio.to_thread(plugin.remember_carried, task.key, message["result"])
        return message

    run_and_look._mission_control = True  # type: ignore[attr-defined]
    dask_worker._run_task, dask_worker._run_task_async = run_and_look, run_and_note
