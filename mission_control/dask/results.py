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

from distributed import worker as dask_worker

from mission_control.dask.handing import ended_with, hand_on
from mission_control.delegates import Delegation, check_returned


def watch(name: str) -> None:
    """Let the plug-in `name` of a worker examine each result in its task's thread. Once per process, for all its
    workers.

    Args:
        name: Of the worker plug-in; it has ``objects``, ``turns``, ``early`` and ``thread``.
    """
    run_task: Callable[..., Any] = dask_worker._run_task
    run_task_async: Callable[..., Awaitable[Any]] = dask_worker._run_task_async
    if getattr(run_task, "_mission_control", False):
        return

    @functools.wraps(run_task)
    def run_and_look(task: Any, data: dict, execution_state: dict, key: Any, *rest: Any, **more: Any) -> Any:
        plugin = execution_state["worker"].plugins.get(name)
        turns = plugin.turns if plugin is not None else None
        run = begun(execution_state["worker"], key, task)
        if plugin is not None:
            plugin.thread.run, plugin.thread.delegated = run, None
        with turns.turn_of(key) if turns is not None else nullcontext():
            message = run_task(task, data, execution_state, key, *rest, **more)
            if plugin is None:
                return message
            if plugin.early.is_done:
                plugin.early.ended(message.get("actual_exception"))
            elif message["op"] == "task-finished":
                return look(plugin, key, run, message)
            return message

    @functools.wraps(run_task_async)
    async def run_and_note(task: Any, data: dict, *rest: Any, **more: Any) -> Any:
        worker = dask_worker.get_worker()
        run = begun(worker, task.key, task)
        message = await run_task_async(task, data, *rest, **more)
        plugin = worker.plugins.get(name)
        if plugin is not None and message["op"] == "task-finished":
            # Not here: a large result takes time, and this is the worker's event loop.
            return await asyncio.to_thread(look, plugin, task.key, run, message)
        return message

    def begun(worker: Any, key: Any, task: Any) -> int | None:
        """Return the number of the run that begins. If the scheduler revokes a running task and assigns it again, Dask
        lets it continue under another number; its result belongs to this one."""
        state = worker.state.tasks.get(key)
        return state.run_id if state is not None and state.run_spec is task else None

    def look(plugin: Any, key: Any, run: int | None, message: Any) -> Any:
        try:
            check_returned(message["result"], getattr(plugin.thread, "delegated", None))
        except RuntimeError as error:
            return ended_with(error, message)
        if type(message["result"]) is Delegation:
            return hand_on(plugin, key, run, message)
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
