"""Each task's result is looked at in the task's own thread: which references it carries ([`mission_control.carried`]).

Nothing is looked for where the task put nothing and no reference that it could have met lives in this process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from distributed import worker as dask_worker

from mission_control.dask.handing import hand_on
from mission_control.delegates import Delegation


def watch(name: str) -> None:
    """Have the plug-in `name` of a worker look at each result where it was made. Once per process, for all its workers.

    Args:
        name: Of the worker plug-in; it has ``objects`` and ``turns``.
    """
    run_task: Callable[..., Any] = dask_worker._run_task
    run_task_async: Callable[..., Awaitable[Any]] = dask_worker._run_task_async
    if getattr(run_task, "_mission_control", False):
        return

    @functools.wraps(run_task)
    def run_and_look(task: Any, data: dict, execution_state: dict, key: Any, *rest: Any, **more: Any) -> Any:
        plugin = execution_state["worker"].plugins.get(name)
        turns = plugin.turns if plugin is not None else None
        with turns.turn_of(key) if turns is not None else nullcontext():
            message = run_task(task, data, execution_state, key, *rest, **more)
            if plugin is None:
                return message
            if plugin.early.is_done:
                plugin.early.ended(message.get("actual_exception"))
            elif message["op"] == "task-finished":
                return look(plugin, key, message)
            return message

    @functools.wraps(run_task_async)
    async def run_and_note(task: Any, data: dict, *rest: Any, **more: Any) -> Any:
        message = await run_task_async(task, data, *rest, **more)
        plugin = dask_worker.get_worker().plugins.get(name)
        if plugin is not None and message["op"] == "task-finished":
            # A large result takes a while, and this is the worker's event loop.
            return await asyncio.to_thread(look, plugin, task.key, message)
        return message

    def look(plugin: Any, key: Any, message: Any) -> Any:
        if type(message["result"]) is Delegation:
            return hand_on(plugin, key, message)
        plugin.objects.look(key, message["result"])
        return message

    run_and_look._mission_control = True  # type: ignore[attr-defined]
    dask_worker._run_task, dask_worker._run_task_async = run_and_look, run_and_note


def unwatch(name: str) -> None:
    """Undo :func:`watch` once no other worker of this process has the plug-in."""
    others = [worker for worker in dask_worker.Worker._instances if name in worker.plugins]
    if not others and hasattr(dask_worker._run_task, "_mission_control"):
        for function in ("_run_task", "_run_task_async"):
            setattr(dask_worker, function, getattr(dask_worker, function).__wrapped__)
