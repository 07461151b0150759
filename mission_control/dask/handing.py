"""A task of this worker has returned a delegation: the scheduler has it run again, as its next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import Reschedule
from distributed.core import clean_exception, error_message
from distributed.utils import sync

from mission_control.delegates import Step, name_of

if TYPE_CHECKING:
    from mission_control.dask.worker import MissionControlWorker

ANSWER_WITHIN_S = 60
"""For the scheduler to know a step's inputs, which it may wait for some seconds."""


def hand_on(plugin: MissionControlWorker, key: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Return what Dask is to do in place of keeping the delegation as a result. Runs in the task's thread.

    Args:
        message: Of the task that has finished, as Dask makes it.
    """
    worker, delegation = plugin.worker, message["result"]
    outcome: Exception = Reschedule()
    try:
        step = Step.of(delegation)
        task = worker.state.tasks.get(key)
        if task is not None:
            said = {"key": key, "run": task.run_id}
            if step.inputs:
                answer = sync(
                    worker.loop,
                    worker.scheduler.mission_control_await,
                    **said,
                    inputs=step.inputs,
                    callback_timeout=ANSWER_WITHIN_S,
                )
                if "why" in answer:
                    raise RuntimeError(f"{key} delegates to {name_of(delegation.function)}, but {answer['why']}")
                if "exception" in answer:
                    # As if it was a task that waits for the one that has failed.
                    raise clean_exception(**answer)[1]
            plugin.objects.hand_on(key, (own[0] for own in step.objects))
            plugin.rescheduled.pop(key, None)
            # Ahead of the message that the task is to run again: both take the same ordered stream.
            plugin.soon(
                lambda: plugin.say("delegate", **said, call=step.call, inputs=step.inputs, objects=step.objects)
            )
    except Exception as error:
        outcome = error
    kept = {name: message[name] for name in ("start", "stop", "thread")}
    return {**error_message(outcome), **kept, "op": "task-erred", "actual_exception": outcome}
